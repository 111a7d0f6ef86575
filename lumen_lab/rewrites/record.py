"""A rewrite is data: what it replaces, when it is refused, how it is built, what it claims and why it is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lumen_lab.equivalence.verdict import tensors_of
from lumen_lab.errors import LumenError, RewriteError
from lumen_lab.specs import Claim, Learned, Record
from lumen_lab.taps import shapes_only, watch


@dataclass(frozen=True)
class Site:
    """A module that a rewrite may replace, and what flows through it.

    ``input_shapes``: the distinct shapes of its first input (the encoder's modules see two);
    ``producer``: path of the module whose output it reads, if in every call that is one module's output with nothing
    in between (an in-place operation counts) and no other module reads it. A plain function that reads it as well is
    not seen here; ``check_plan`` sees its effect.
    """

    path: str
    module: nn.Module
    input_shapes: tuple[tuple[int, ...], ...]
    producer: str | None
    modules: dict[str, nn.Module] = field(repr=False, default_factory=dict)

    @property
    def producer_module(self) -> nn.Module | None:
        """The module at ``producer``."""
        return self.modules.get(self.producer) if self.producer is not None else None


@dataclass(frozen=True)
class Constraint:
    """A relation to another rewrite, by its name, and why it holds."""

    other: str
    because: str


AS_GOOD_AS_THE_TEACHER = Learned("S-measure minus the teacher's", -0.01)
"""What substitutions claim. One point of S-measure is what the field calls the same accuracy: the published INT8
student lies between +0.004 (DUT-OMRON) and −0.017 (DIS-VD, with edges called softer) of its teacher. A difference,
since an absolute value would hold for one teacher and one list alone: the micro teacher reaches .764 on ``composed``
and .629 on ``thin``."""

SIZES_FIRST = Constraint("substitute_input_paths", "constants are made for the sizes that flow when it is applied")
"""Declared by what makes constants that depend on a map's size."""


@dataclass(frozen=True, repr=False)
class Rewrite:
    """One way to write part of a network differently. ``RewriteError`` for a field of another type.

    ``name``: verb first; in the catalogue *approximate* stands for claims that are bounded, *substitute* for learned
    ones, and no other name does (elsewhere the claim alone counts: a copy with another claim keeps its name).
    ``replaces``: the module class; ``refused(site)``: a sentence that names the condition, or None.
    ``built(site)``: new modules by path; pure: weights are copied, nothing is changed in place.
    ``claim``: what it promises and how that is checked; ``because``: why the NPU (or its compiler) needs it;
    ``source``: where that is known from.
    ``after``: rewrites that must have acted before it, where a plan has both; ``excludes``: rewrites that a plan may
    not have beside it.
    ``edge_cases(module, inputs)``: for a bounded claim, modules like the one replaced, and inputs for them, that reach
    the edges of its domain; the claim is checked on them.
    ``code``: the Python expression that makes this record; by default the constant named like it.
    ``resizes``: whether maps behind its sites have another size afterwards.
    ``sites``: the paths that it is kept to (``only_at``); None: it acts wherever it finds a site.
    """

    name: str
    replaces: type[nn.Module]
    built: Callable[[Site], dict[str, nn.Module]]
    claim: Claim
    because: str
    source: str
    refused: Callable[[Site], str | None] = lambda site: None
    after: tuple[Constraint, ...] = ()
    excludes: tuple[Constraint, ...] = ()
    edge_cases: Callable[[nn.Module, tuple], Iterable[tuple[nn.Module, tuple]]] | None = None
    code: str = ""
    resizes: bool = False
    sites: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, (holds, wanted) in _FIELDS.items():
            value = getattr(self, name)
            if not holds(value):
                raise RewriteError(f"Rewrite {self.name!r}: `{name}` is {wanted}; found {value!r:.80}.")

    def __repr__(self) -> str:
        return f"<Rewrite {self.expression} of {self.replaces.__name__}, {type(self.claim).__name__}>"

    @property
    def expression(self) -> str:
        """Python that makes this record: the name of a constant, or a call with its parameters."""
        return self.code or self.name.upper()


def _all_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(item, kind) for item in value)


_TEXT = (lambda value: isinstance(value, str), "text")
_FUNCTION_OF_A_SITE = (callable, "a function of a site")
_CONSTRAINTS = (_all_of(Constraint), "a tuple of Constraint")
_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (lambda value: isinstance(value, str) and bool(value), "text, such as 'fold_batch_norm'"),
    "replaces": (
        lambda value: isinstance(value, type) and issubclass(value, nn.Module),
        "a class of modules, such as nn.Conv2d",
    ),
    "built": _FUNCTION_OF_A_SITE,
    "refused": _FUNCTION_OF_A_SITE,
    "claim": (lambda value: isinstance(value, Claim), "Exact(), Bounded(…) or Learned(…)"),
    "because": _TEXT,
    "source": _TEXT,
    "after": _CONSTRAINTS,
    "excludes": _CONSTRAINTS,
    "edge_cases": (lambda value: value is None or callable(value), "a function of a module and its inputs, or None"),
    "code": _TEXT,
    "sites": (lambda value: value is None or (_all_of(str)(value) and bool(value)), "a tuple of paths, or None"),
}


def by_name(rule: Rewrite) -> Rewrite:
    """The rewrite with its default parameters, which code calls by the constant that holds it."""
    return replace(rule, code="")


@dataclass(frozen=True)
class LogEntry(Record):
    """What one rewrite did at one site: the paths it replaced, or the reason it was refused.

    ``site`` is the smallest module that holds everything replaced; it is where the claim is checked.
    """

    rewrite: str
    site: str
    replaced: tuple[str, ...] = ()
    refused: str | None = None


def watch_flow(model: nn.Module, example_inputs: tuple[Tensor, ...], after: str = "") -> Flow:
    """What one forward pass calls, with which shapes, and who reads whose output; nothing is computed.

    The pass is made in evaluation mode; the model keeps its own. ``RewriteError`` if the model does not run, with the
    rewrite ``after`` which that is so.
    """
    flow = Flow(dict(model.named_modules()))
    device = next((parameter.device for parameter in model.parameters()), None)
    see = watch(model, lambda path, module, inputs, output: flow.see(path, inputs, output))
    try:
        with evaluating(model), shapes_only(), see:
            model(*(torch.empty(tuple(value.shape), dtype=value.dtype, device=device) for value in example_inputs))
    except Exception as error:
        what = f"After {after} the network" if after else type(model).__name__
        raise RewriteError(
            f"{what} does not run on example inputs of {inputs_in_words(example_inputs)} ({first_line(error)}); give "
            "inputs of a size, number and type that it takes."
        ) from error
    return flow


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block every module is in evaluation mode; then each has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def inputs_in_words(inputs: Iterable[Tensor]) -> str:
    """Shapes and types, such as "(1, 3, 64, 96) float32"."""
    return ", ".join(f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" for value in inputs)


def first_line(error: Exception) -> str:
    """The first line of an error's text, its kind before it unless the error is ours."""
    text = next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "no reason given")
    return text if isinstance(error, LumenError) else f"{type(error).__name__}: {text}"


class Flow:
    """One forward pass over ``modules`` (by path): the shapes that each read, and which module made them."""

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        self.made_by: dict[tuple[int, int], str] = {}
        self.makers: dict[str, list[str | None]] = {}
        self.readers: dict[str, set[str]] = {}
        self.calls: Counter[str] = Counter()
        self.alive: list[Tensor] = []  # keeps every output, so that an id is never used twice

    def see(self, path: str, inputs: tuple, output: object) -> None:
        """Note one call; innermost modules come first, so that a container does not claim its last part's output."""
        tensors = [tensor for value in inputs for tensor in tensors_of(value)]
        if tensors:
            self.shapes.setdefault(path, []).append(tuple(tensors[0].shape))
        read = [self.made_by.get(identity(value)) for value in tensors]
        self.makers.setdefault(path, []).append(read[0] if read else None)
        for maker in filter(None, read):
            self.readers.setdefault(maker, set()).add(path)
        self.calls[path] += 1
        if isinstance(output, Tensor) and identity(output) not in self.made_by:
            self.made_by[identity(output)] = path
            self.alive.append(output)

    def producer(self, path: str) -> str | None:
        """The one module whose output ``path`` reads in every call, if it feeds nothing else."""
        makers = set(self.makers[path])
        if len(makers) > 1 or None in makers:
            return None
        (maker,) = makers
        others = [reader for reader in self.readers[maker] if reader != path and not path.startswith(f"{reader}.")]
        return None if others or self.calls[maker] != self.calls[path] else maker

    def sites(self, model: nn.Module, kind: type[nn.Module]) -> list[Site]:
        """Every module of class ``kind`` that the pass called, in order of first call, as ``model`` has it now."""
        modules = dict(model.named_modules())
        return [
            Site(path, modules[path], tuple(dict.fromkeys(seen)), self.producer(path), modules)
            for path, seen in self.shapes.items()
            if isinstance(modules.get(path), kind)
        ]

    def still_holds(self, model: nn.Module, kind: type[nn.Module]) -> bool:
        """Whether the modules of class ``kind``, and those whose outputs they read, are the ones that the pass saw."""
        now = dict(model.named_modules())
        asked = [path for path, module in now.items() if isinstance(module, kind)]
        read = [maker for path in asked for maker in self.makers.get(path, ()) if maker is not None]
        return all(now.get(path) is self.modules.get(path) for path in (*asked, *read))


def identity(x: Tensor) -> tuple[int, int]:
    """Tells tensors apart, and one tensor before and after an in-place operation."""
    return id(x), x._version


class FixedTensors(nn.Module):
    """Constants that depend on a size alone: one buffer a size, made once, so that an exported graph holds a constant.

    ``make(size)`` returns a float64 tensor. Buffers are not saved; ``.to()`` and ``.double()`` make them anew, so that
    a network taken to float64 is not left with constants rounded to float32.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Tensor]):
        super().__init__()
        self.make = make

    @staticmethod
    def buffer_name(size: tuple[int, ...]) -> str:
        return "at_" + "x".join(map(str, size))

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            self._buffers[name] = self.make(tuple(map(int, name[3:].split("x")))).to(buffer)
        return self

    def forward(self, size: tuple[int, ...], like: Tensor) -> Tensor:
        """The constant for ``size``, in the dtype and on the device of ``like``."""
        name = self.buffer_name(size)
        found = self._buffers.get(name)
        if found is None:
            with torch.inference_mode(False):  # a constant first met in inference must still serve training
                found = self.make(size).to(like)
            if type(found) is Tensor and not torch.compiler.is_compiling():
                self.register_buffer(name, found, persistent=False)
        return found if found.dtype == like.dtype and found.device == like.device else found.to(like)


def with_weights(
    conv: nn.Conv2d, weight: Tensor, bias: Tensor | None = None, *, groups: int | None = None
) -> nn.Conv2d:
    """A conv with the settings of ``conv`` (or other ``groups``) and copies of the given weight and bias."""
    groups = conv.groups if groups is None else groups
    new = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        conv.stride,
        conv.padding,
        conv.dilation,
        groups,
        bias=bias is not None,
    ).to(weight)
    with torch.no_grad():
        new.weight.copy_(weight)
        if bias is not None:
            new.bias.copy_(bias)
    return new
