"""What a network shows of itself: logits, and what its modules return, with gradients; of a module and of an NPU graph
alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext

from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from lumen_lab.errors import LumenError
from lumen_lab.quantization.npu_graph import NPUGraph, in_float32
from lumen_lab.quantization.values import before_quantiser, logits_of, outputs_of, returning
from lumen_lab.taps import find

LOGITS = "logits"
RAW = "{}, unrounded"
Shown = dict[str, Tensor]


class ModuleView(nn.Module):
    """image (N, 3, H, W) -> {"logits": …, path: what the module there returned}, of a network in float.

    ``KeyError`` for an unknown path; ``LumenError`` for a module that was called more than once, or never.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str] = ()):
        super().__init__()
        self.model = model
        modules = dict(model.named_modules())
        self.watched = {path: find(modules, path) for path in paths}

    def forward(self, image: Tensor) -> Shown:
        found: dict[str, list[Tensor]] = {path: [] for path in self.watched}
        hooks = [
            module.register_forward_hook(lambda module, inputs, output, path=path: found[path].append(output))
            for path, module in self.watched.items()
        ]
        try:
            logits = self.model(image)
        finally:
            for hook in hooks:
                hook.remove()
        odd = next((path for path, values in found.items() if len(values) != 1), None)
        if odd is not None:
            raise LumenError(f"'{odd}' is called {len(found[odd])} times a picture; a view shows what runs once.")
        return {LOGITS: logits, **{path: values[0] for path, values in found.items()}}


class GraphView(nn.Module):
    """The same of an NPU graph, on the grid of its integers; and what they were before rounding, at ``raw`` paths.

    The graph's weights and quantisers are shared. With ``in_float`` its quantisers do nothing. ``parts`` above 1 cuts
    the graph in so many, of which only the ends are kept for the backward pass: each part is computed twice, for less
    memory (Chen et al., 2016, arXiv:1604.06174). ``QuantizationError`` for a path that the graph does not hold once.
    """

    def __init__(
        self,
        graph: NPUGraph,
        paths: Iterable[str] = (),
        *,
        raw: Iterable[str] = (),
        in_float: bool = False,
        parts: int = 1,
    ):
        super().__init__()
        nodes = {LOGITS: logits_of(graph), **outputs_of(graph, paths)}
        for path in raw:
            unrounded = before_quantiser(nodes[path])
            if unrounded is not None:
                nodes[RAW.format(path)] = unrounded
        with graph.in_float() if in_float else nullcontext():
            shown = returning(graph, nodes)
        self.graph, self.shown = graph, recomputed(shown, parts) if parts > 1 else shown

    def forward(self, image: Tensor) -> Shown:
        with in_float32(image):
            return self.shown(image)


class Recomputed(nn.Module):
    """A module whose inner values are computed again in the backward pass instead of being kept."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *given: object) -> object:
        return checkpoint(self.module, *given, use_reentrant=False)


def recomputed(module: fx.GraphModule, parts: int) -> fx.GraphModule:
    """The same graph in ``parts`` of about as many operations, each computed again in the backward pass."""
    count = sum(node.op in ("call_function", "call_module") for node in module.graph.nodes)
    places = itertools.count()
    part_of = {
        node: next(places) * parts // count
        for node in module.graph.nodes
        if node.op in ("call_function", "call_module")
    }
    cut = split_module(module, module, lambda node: part_of.get(node, 0))
    for name, child in list(cut.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(cut, name, Recomputed(child))
    return cut
