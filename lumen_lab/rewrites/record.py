"""A rewrite is data: what it replaces, when it is refused, how it is built, what it claims and why it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lumen_lab.specs import Claim, Record
from lumen_lab.taps import shapes_only, watch


@dataclass(frozen=True)
class Site:
    """A module that a rewrite may replace, and what flows through it.

    ``input_shapes``: the distinct shapes of its first input (the encoder's modules see two);
    ``producer``: path of the module whose output it reads, if that is a module's output and nothing in between.
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
class Rewrite:
    """One way to write part of a network differently.

    ``name``: verb first; *approximate* and *substitute* are kept for claims that are bounded or learned.
    ``replaces``: the module class; ``refused(site)``: a sentence that names the condition, or None.
    ``built(site)``: new modules by path; pure: weights are copied, nothing is changed in place.
    ``claim``: what it promises and how that is checked; ``because``: why the NPU (or its compiler) needs it;
    ``source``: where that is known from.
    """

    name: str
    replaces: type[nn.Module]
    built: Callable[[Site], dict[str, nn.Module]]
    claim: Claim
    because: str
    source: str
    refused: Callable[[Site], str | None] = lambda site: None
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogEntry(Record):
    """What one rewrite did at one site: the paths it replaced, or the reason it was refused.

    ``site`` is the smallest module that holds everything replaced; it is where the claim is checked.
    """

    rewrite: str
    site: str
    replaced: tuple[str, ...] = ()
    refused: str | None = None


def find_sites(model: nn.Module, kind: type[nn.Module], example_inputs: tuple[Tensor, ...]) -> list[Site]:
    """Every module of class ``kind`` that the forward pass calls, in order of first call; nothing is computed."""
    modules = dict(model.named_modules())
    shapes: dict[str, list] = {}
    producers: dict[str, str | None] = {}
    made_by: dict[int, str] = {}
    alive = []  # keeps every output, so that an id is never used twice

    def see(path: str, module: nn.Module, inputs: tuple, output: object) -> None:
        first = next((value for value in inputs if isinstance(value, Tensor)), None)
        if isinstance(module, kind) and first is not None:
            shapes.setdefault(path, []).append(tuple(first.shape))
            producers[path] = made_by.get(id(first))
        if isinstance(output, Tensor) and id(output) not in made_by:
            made_by[id(output)] = path
            alive.append(output)

    with shapes_only(), watch(model, see):
        model(*(torch.empty_like(value) for value in example_inputs))
    return [Site(path, modules[path], tuple(dict.fromkeys(shapes[path])), producers[path], modules) for path in shapes]


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
            found = self.make(size).to(like)
            if type(found) is Tensor and not torch.compiler.is_compiling():
                self.register_buffer(name, found, persistent=False)
        return found


def with_weights(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None = None) -> nn.Conv2d:
    """A conv with the settings of ``conv`` and copies of the given weight and bias."""
    out_channels, in_channels = weight.shape[0], weight.shape[1] * conv.groups
    new = nn.Conv2d(
        in_channels,
        out_channels,
        tuple(weight.shape[2:]),
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        bias=bias is not None,
    ).to(weight)
    with torch.no_grad():
        new.weight.copy_(weight)
        if bias is not None:
            new.bias.copy_(bias)
    return new
