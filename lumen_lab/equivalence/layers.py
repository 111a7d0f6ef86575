"""What one execution of a network computed at each site, and how that is taken from a torch module."""

from __future__ import annotations

import difflib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from lumen_lab.equivalence.verdict import tensors_of
from lumen_lab.errors import LumenError

PRECISIONS = ("float64", "float32", "float16", "int8")  # fine to coarse


@dataclass(frozen=True, eq=False)
class LayerTensor:
    """Output number ``output`` of call number ``call`` (both from 0) of the module at ``site`` ("": the network).

    ``values`` are as computed; for integers, real = ``scale`` · (values − ``zero_point``). ``layout`` is "NCHW" or
    "NHWC" where it is known, else "": a network may carry maps either way, and shapes then decide. ``handed_on``: the
    module returned a tensor that it was given, untouched. ``kind``: module class, or operators. ``read_by``: the one
    kind of ONNX operator that reads it, "" where there are several or it is not known.
    """

    site: str
    call: int
    output: int
    values: np.ndarray
    kind: str = ""
    layout: str = ""
    scale: float | None = None
    zero_point: int | None = None
    handed_on: bool = False
    read_by: str = ""

    @property
    def real(self) -> np.ndarray:
        """The values as real numbers: float64, dequantised."""
        values = np.asarray(self.values, dtype=np.float64)
        return values if self.scale is None else self.scale * (values - (self.zero_point or 0))


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One execution: ``layers`` in the order in which they were finished, innermost modules first.

    ``name`` says what ran; ``precision`` is what it computed in, one of "float64", "float32", "float16", "int8".
    ``absent`` maps sites that have no tensor here to the reason, which for all others is ``otherwise``; ``rewritten``
    maps paths to the rewrite that made the module there (None: not known). ``chosen``: the sites asked for (None: all).
    ``inputs``: what went in, in order, as it was given (None: not known); ``modules``: the paths of all modules, those
    without a tensor here included (None: not known); ``order``: (site, call) of every call, those that were not kept
    included, as they were finished (None: not known).
    """

    name: str
    precision: str
    layers: tuple[LayerTensor, ...]
    absent: dict[str, str] = field(default_factory=dict)
    otherwise: str = "there is no such module"
    rewritten: dict[str, str] | None = None
    chosen: frozenset[str] | None = None
    inputs: tuple[LayerTensor, ...] | None = None
    modules: frozenset[str] | None = None
    order: tuple[tuple[str, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise LumenError(f"A trace is of precision {', '.join(PRECISIONS)}; '{self.precision}' was given.")
        if self.chosen is not None:
            object.__setattr__(self, "chosen", frozenset(self.chosen))

    @property
    def calls(self) -> dict[str, int]:
        """How often each site was called."""
        return dict(Counter(site for site, _ in self._kept))

    @property
    def finished(self) -> tuple[tuple[str, int], ...]:
        """(site, call) in the order in which they were finished: of all calls, or of those kept if no more is known."""
        return self._kept if self.order is None else self.order

    @property
    def _kept(self) -> tuple[tuple[str, int], ...]:
        return tuple(dict.fromkeys((layer.site, layer.call) for layer in self.layers))

    def at(self, site: str, call: int = 0) -> list[LayerTensor]:
        """The outputs of one call; ``LumenError`` with the nearest sites if there is none."""
        require_sites([site], self.calls, self.name)
        return [layer for layer in self.layers if (layer.site, layer.call) == (site, call)]


def require_sites(sites: Iterable[str], known: Iterable[str], name: str) -> None:
    """``LumenError`` for the first of ``sites`` that is not ``known``, with the nearest names."""
    known = list(known)
    for site in sites:
        if site not in known:
            near = difflib.get_close_matches(site, known, 3) or known[:3]
            raise LumenError(f"There is no site '{site}' in {name}; the nearest are {', '.join(map(repr, near))}.")


def chosen_sites(sites: Iterable[str] | None) -> frozenset[str] | None:
    """The sites asked for; ``LumenError`` if that is none, or a text."""
    if sites is None:
        return None
    if isinstance(sites, str):
        raise LumenError(f"sites is a list of paths, found the text {sites!r}; write [{sites!r}].")
    chosen = frozenset(sites)
    if not chosen:
        raise LumenError("sites was given without a site; leave it out to keep them all.")
    return chosen


def trace_torch(
    model: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    *,
    sites: Iterable[str] | None = None,
    name: str | None = None,
) -> LayerTrace:
    """Run ``model`` once, in its own precision, and keep what every module returned, containers included.

    ``inputs`` are the positional inputs (one tensor may be given alone). Each distinct tensor is copied once, before
    a later in-place operation can reach it; ``sites`` limits what is kept. ``name`` is by default the model's class,
    and whether it was rewritten. ``LumenError`` for a module of which a part is in training mode, where dropout and
    batch statistics are live, and for an unknown site.
    """
    chosen, kind = chosen_sites(sites), type(model).__name__
    modules = dict(model.named_modules())
    live = next((path for path, module in modules.items() if module.training), None)
    if live is not None:
        part = f"{live} of {kind}" if live else kind
        raise LumenError(f"{part} is in training mode, where no two runs agree; call .eval() on the network first.")
    require_sites(chosen or (), modules, kind)
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    recorder = _Recorder(chosen)
    with torch.inference_mode(False), torch.no_grad(), recorder.watching(modules):
        model(*(value.clone() for value in given))
    rewritten = {path: m.rewritten_by for path, m in modules.items() if hasattr(m, "rewritten_by")}
    return LayerTrace(
        name=name or (f"{kind}, rewritten" if rewritten else kind),
        precision=finest_precision(recorder.layers),
        layers=tuple(recorder.layers),
        absent={path: "it was never called" for path in modules if path not in recorder.calls},
        rewritten=rewritten,
        chosen=chosen,
        inputs=given_inputs(tensor.detach().cpu().numpy().copy() for tensor in given),
        modules=frozenset(modules),
        order=tuple(recorder.order),
    )


def given_inputs(
    arrays: Iterable[np.ndarray], encodings: Iterable[tuple[float | None, int | None]] | None = None
) -> tuple[LayerTensor, ...]:
    """Arrays that go into a network, as ``LayerTrace.inputs``; ``encodings``: (scale, zero point) of each."""
    arrays = list(arrays)
    encodings = list(encodings) if encodings is not None else [(None, None)] * len(arrays)
    return tuple(
        LayerTensor(f"input {place}", 0, 0, values, scale=scale, zero_point=zero_point)
        for place, (values, (scale, zero_point)) in enumerate(zip(arrays, encodings, strict=True))
    )


def finest_precision(layers: Sequence[LayerTensor]) -> str:
    """The finest floating-point type among the tensors: constants made in passing do not coarsen a trace."""
    found = {str(layer.values.dtype) for layer in layers}
    return next((precision for precision in PRECISIONS if precision in found), "float32")


class _Recorder:
    """Hooks that copy what modules return; a tensor returned by several modules is copied once."""

    def __init__(self, chosen: frozenset[str] | None):
        self.chosen = chosen
        self.layers: list[LayerTensor] = []
        self.calls: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []
        self.given: list[dict[int, int]] = []
        self.copies: dict[int, tuple[weakref.ref, int, np.ndarray]] = {}

    @contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        handles = []
        try:
            for path, module in modules.items():
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaver(path)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.given.append({id(tensor): tensor._version for tensor in tensors_of([args, kwargs])})

    def _leaver(self, path: str):
        def leave(module: nn.Module, args: tuple, output: object) -> None:
            given, call = self.given.pop(), self.calls[path]
            self.calls[path] += 1
            self.order.append((path, call))
            if self.chosen is None or path in self.chosen:
                for number, tensor in enumerate(tensors_of(output)):
                    handed_on = given.get(id(tensor)) == tensor._version
                    values = self._copied(tensor)
                    self.layers.append(
                        LayerTensor(path, call, number, values, type(module).__name__, handed_on=handed_on)
                    )

        return leave

    def _copied(self, tensor: Tensor) -> np.ndarray:
        alive, version, values = self.copies.get(id(tensor), (lambda: None, -1, None))
        if alive() is not tensor or version != tensor._version:
            values = tensor.detach().cpu().numpy().copy()
            self.copies[id(tensor)] = (weakref.ref(tensor), tensor._version, values)
        return values
