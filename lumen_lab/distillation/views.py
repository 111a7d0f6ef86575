"""What a network shows of itself: logits, and what its modules return, with gradients; of a module and of an NPU graph
alike."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from lumen_lab.errors import LumenError
from lumen_lab.quantization.npu_graph import NPUGraph
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
        self.found: dict[str, list[Tensor]] = {path: [] for path in paths}
        for path in self.found:
            find(modules, path).register_forward_hook(partial(self._record, path))

    def _record(self, path: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.found[path].append(output)

    def forward(self, image: Tensor) -> Shown:
        for values in self.found.values():
            values.clear()
        logits = self.model(image)
        odd = next((path for path, values in self.found.items() if len(values) != 1), None)
        if odd is not None:
            raise LumenError(f"'{odd}' is called {len(self.found[odd])} times a picture; a view shows what runs once.")
        return {LOGITS: logits, **{path: values.pop() for path, values in self.found.items()}}


class GraphView(nn.Module):
    """The same of an NPU graph, on the grid of its integers; and what they were before rounding, at ``raw`` paths.

    The graph's weights and quantisers are shared. With ``in_float`` its quantisers do nothing. ``QuantizationError``
    for a path that the graph does not hold once.
    """

    def __init__(self, graph: NPUGraph, paths: Iterable[str] = (), *, raw: Iterable[str] = (), in_float: bool = False):
        super().__init__()
        nodes = {LOGITS: logits_of(graph), **outputs_of(graph, paths)}
        for path in raw:
            unrounded = before_quantiser(nodes[path])
            if unrounded is not None:
                nodes[RAW.format(path)] = unrounded
        self.graph = graph
        if in_float:
            with graph.in_float():
                self.shown = returning(graph, nodes)
        else:
            self.shown = returning(graph, nodes)

    def forward(self, image: Tensor) -> Shown:
        return self.shown(image)
