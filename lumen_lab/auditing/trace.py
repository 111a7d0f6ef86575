"""A network's operations in the order in which they run, from ``torch.export``, without running any of them.

Every tensor is fake: it has a shape, a type and a storage of its own, and no contents. Knows no particular network.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from lumen_lab.auditing.kinds import plain_name
from lumen_lab.errors import AuditError


@dataclass(frozen=True)
class Read:
    """A tensor that an operation takes: output ``output`` of operation ``producer``; -1 - i for network input i."""

    producer: int
    output: int
    tensor: Tensor


@dataclass(frozen=True)
class TracedOp:
    """One operation with the fake tensors that go in and come out.

    ``arguments`` are the operator's, by the names of its schema; ``parameters`` the weights, buffers and constants
    it reads directly, by name. ``call`` counts the calls of its module from 0.
    """

    index: int
    name: str
    kind: str
    site: str
    call: int
    arguments: dict[str, object]
    reads: tuple[Read, ...]
    parameters: dict[str, Tensor]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Trace:
    """``operations`` in order of execution; ``results`` are what the network returns."""

    operations: tuple[TracedOp, ...]
    inputs: tuple[Tensor, ...]
    results: tuple[Read, ...]


def trace(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> Trace:
    """Every operation of ``model`` on inputs like ``example_inputs``, of which only shape and type are used.

    Raises ``AuditError`` for a model in training mode, inputs that are not a tuple of tensors, and a model that
    cannot be exported.
    """
    _check_model(model)
    _check_inputs(example_inputs)
    program = _exported(model, example_inputs)
    return _Reader(program).read()


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise AuditError(f"An audit reads a torch.nn.Module, found {type(model).__name__}.")
    training = [path or "the model itself" for path, module in model.named_modules() if module.training]
    if training:
        raise AuditError(
            f"The model is in training mode ({len(training)} of its modules, first {training[0]}), where it computes "
            "something else than on a phone; call .eval() first."
        )


def _check_inputs(example_inputs: object) -> None:
    if isinstance(example_inputs, Tensor):
        raise AuditError("example_inputs is a tuple with one tensor an argument, found a single tensor; pass (x,).")
    if not isinstance(example_inputs, tuple | list) or not example_inputs:
        raise AuditError(f"example_inputs is a tuple of tensors, found {_described(example_inputs)}.")
    for number, value in enumerate(example_inputs):
        if not isinstance(value, Tensor):
            raise AuditError(f"example_inputs[{number}] is {_described(value)}, not a tensor.")


def _described(value: object) -> str:
    empty = isinstance(value, tuple | list) and not value
    return f"an empty {type(value).__name__}" if empty else type(value).__name__


def _exported(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> ExportedProgram:
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = next(chain(model.parameters(), model.buffers()), None)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = tuple(
            torch.empty(tuple(value.shape), dtype=value.dtype, device=(value if weight is None else weight).device)
            for value in example_inputs
        )
        try:
            return torch.export.export(model, fakes, strict=False)
        except Exception as error:
            raise AuditError(_why_not_exported(model, fakes, error)) from error


def _why_not_exported(model: nn.Module, fakes: tuple[Tensor, ...], error: Exception) -> str:
    asked = f"{type(model).__name__} cannot be exported with inputs {', '.join(str(tuple(x.shape)) for x in fakes)}"
    text = str(error)
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        return (
            f"{asked}: which operations it runs, or their sizes, depends on the values of a tensor; "
            "write that part with a fixed graph (torch.where in place of if)."
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{asked}: {type(error).__name__}: {first[:300]}"


class _Reader:
    """Walks an exported graph once, running each operation on fake tensors so that views share their storage."""

    def __init__(self, program: ExportedProgram):
        self.graph = program.graph
        self.parameter_names = _parameter_names(program.graph_signature)
        self.user_inputs = tuple(program.graph_signature.user_inputs)
        self.values: dict[fx.Node, object] = {}
        self.sources: dict[fx.Node, tuple[int, int]] = {}
        self.operations: list[TracedOp] = []

    def read(self) -> Trace:
        from torch._guards import detect_fake_mode

        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        mode = detect_fake_mode([node.meta["val"] for node in placeholders])
        for node in placeholders:
            self.values[node] = node.meta["val"]
            if node.name in self.user_inputs:
                self.sources[node] = (-1 - self.user_inputs.index(node.name), 0)
        with torch.no_grad(), mode:
            for node in self.graph.nodes:
                if node.op == "call_function":
                    self._call(node)
                elif node.op == "get_attr":
                    raise AuditError(f"The model has control flow in its graph ({node.name}), which no audit can read.")
        inputs = tuple(self.values[node] for node in placeholders if node in self.sources)
        return Trace(tuple(self.operations), inputs, tuple(self._reads(self.graph.output_node())))

    def _call(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        value = self.values[node] = node.target(*args, **kwargs)
        if node.target is operator.getitem:
            self.sources[node] = (self.sources[node.args[0]][0], node.args[1])
            return
        outputs = tuple(_tensors(value))
        if not outputs:  # an assertion about a type or a size
            return
        self._refuse_open_shapes(node, outputs)
        site, call = _site(node)
        index = len(self.operations)
        self.sources[node] = (index, 0)
        self.operations.append(
            TracedOp(
                index=index,
                name=node.name,
                kind=plain_name(node.target),
                site=site,
                call=call,
                arguments=_named_arguments(node.target, args, kwargs),
                reads=tuple(self._reads(node)),
                parameters={
                    self.parameter_names[source.name]: self.values[source]
                    for source in node.all_input_nodes
                    if source.name in self.parameter_names
                },
                outputs=outputs,
            )
        )

    def _reads(self, node: fx.Node) -> Iterator[Read]:
        for source in node.all_input_nodes:
            if source not in self.sources:
                continue
            for offset, tensor in enumerate(_tensors(self.values[source])):
                producer, output = self.sources[source]
                yield Read(producer, output + offset, tensor)

    @staticmethod
    def _refuse_open_shapes(node: fx.Node, outputs: tuple[Tensor, ...]) -> None:
        if any(not isinstance(length, int) for tensor in outputs for length in tensor.shape):
            raise AuditError(
                f"The shape of {node.name} at {_site(node)[0] or '(network)'} depends on the values of a tensor; "
                "an NPU takes fixed shapes only."
            )


def _parameter_names(signature: ExportGraphSignature) -> Mapping[str, str]:
    """Name in the model of each weight, buffer and constant, by its name in the graph."""
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _site(node: fx.Node) -> tuple[str, int]:
    """Path of the module that the operation belongs to, and which of the module's calls it is, from 0."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", 0
    key, (path, _) = list(stack.items())[-1]
    call = re.search(r"@(\d+)$", key)
    return path, int(call[1]) if call else 0


def _named_arguments(target: object, args: tuple, kwargs: dict) -> dict[str, object]:
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    names += [f"argument_{number}" for number in range(len(names), len(args))]
    return dict(zip(names, args, strict=False)) | dict(kwargs)
