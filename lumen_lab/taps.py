"""Named activations: hooks that always come off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Tap:
    """What flowed through one module: the positional inputs and the output of each call, in order."""

    inputs: list[tuple] = field(default_factory=list)
    outputs: list = field(default_factory=list)


@contextmanager
def tap(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, Tap]]:
    """Record inputs and outputs of the modules at ``paths`` while the block runs.

    A module that is called twice (the encoder) has two entries. Inputs are copied before the module runs and outputs
    as they leave it, so that a later in-place operation does not show. An unknown path raises ``KeyError`` with the
    nearest names.
    """
    modules = dict(model.named_modules())
    taps: dict[str, Tap] = {}
    handles = []
    try:
        for path in paths:
            taps[path] = record = Tap()
            module = find(modules, path)
            handles.append(module.register_forward_pre_hook(_input_recorder(record)))
            handles.append(module.register_forward_hook(_output_recorder(record)))
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def find(modules: dict[str, nn.Module], path: str) -> nn.Module:
    """The module at ``path``; ``KeyError`` that names the nearest paths if there is none."""
    if path not in modules:
        import difflib

        near = difflib.get_close_matches(path, modules, 3)
        raise KeyError(f"No module at '{path}'; the nearest are {near or list(modules)[1:4]}.")
    return modules[path]


@contextmanager
def watch(model: nn.Module, see: Callable[[str, nn.Module, tuple, object], None]) -> Iterator[None]:
    """Call ``see(path, module, inputs, output)`` after every module's forward, innermost first.

    ``inputs``: positional ones, then those given by keyword.
    """
    handles = [
        module.register_forward_hook(
            lambda m, given, named, output, path=path: see(path, m, (*given, *named.values()), output), with_kwargs=True
        )
        for path, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_recorder(record: Tap) -> Callable:
    return lambda module, inputs: record.inputs.append(_detached(inputs))


def _output_recorder(record: Tap) -> Callable:
    return lambda module, inputs, output: record.outputs.append(_detached(output))


def _detached(value: object) -> object:
    """A copy that later in-place operations cannot reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return value


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside the block tensors made are fake: a forward pass costs no arithmetic and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        yield
