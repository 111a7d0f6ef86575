"""The NPU's graph in torch: every tensor on its integer grid, differentiable, the same object that is emitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, fx, nn

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import site_of
from lumen_lab.quantization.fake_quantize import FakeQuantize, First
from lumen_lab.quantization.placing import QUANTISER


class NPUGraph(nn.Module):
    """A network on the grid of its integers: image (B, C, H, W) -> the network's output, for any batch.

    ``graph_module`` is the captured graph with a quantiser behind every operation that has an encoding of its own, and
    behind weights, biases and constants. Weights carry the names of the network they come from. ``size`` is (H, W).
    """

    def __init__(self, graph: fx.GraphModule, size: tuple[int, int], made_from: Mapping[str, str] | None = None):
        super().__init__()
        self.graph_module = graph
        self.size = size
        self.made_from = dict(made_from or {})

    def forward(self, image: Tensor) -> Tensor:
        return self.graph_module(image)

    def calls(self) -> dict[str, fx.Node]:
        """The node of every quantiser by its name: that of the operation, weight or constant it follows."""
        found: dict[str, fx.Node] = {}
        for node in self.graph_module.graph.nodes:
            if node.op == "call_module":  # one that an operation is tied to is called again
                found.setdefault(node.target.removeprefix(QUANTISER), node)
        return found

    @property
    def quantisers(self) -> dict[str, FakeQuantize]:
        """Those of activations and constants, whose encodings are calibrated, in order of execution."""
        modules = {name: self.graph_module.get_submodule(node.target) for name, node in self.calls().items()}
        return {name: module for name, module in modules.items() if isinstance(module, FakeQuantize)}

    def sites(self) -> dict[str, str]:
        """The site of what each quantiser follows."""
        return {name: site_of(node.args[0]) for name, node in self.calls().items()}

    @contextmanager
    def put_in_place(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Other modules in place of quantisers, by name, while the block runs: observers, or nothing at all."""
        calls = self.calls()
        unknown = [name for name in modules if name not in calls]
        if unknown:
            raise QuantizationError(f"No quantiser of this graph is called '{unknown[0]}'; quantisers lists them.")
        targets = {calls[name].target: module for name, module in modules.items()}
        before = {target: self.graph_module.get_submodule(target) for target in targets}
        try:
            for target, module in targets.items():
                if hasattr(before[target], "scale"):  # biases are counted in it
                    module.scale = before[target].scale
                setattr(self.graph_module, target, module)
            yield
        finally:
            for target, module in before.items():
                setattr(self.graph_module, target, module)

    def in_float(self, names: Iterable[str] | None = None):
        """A context in which the quantisers called ``names`` do nothing; None: all of them, the network in float."""
        return self.put_in_place({name: First() for name in (self.calls() if names is None else names)})

    def learn_scales(self) -> None:
        """Make every activation's scale a parameter, learnt by LSQ gradients; those that a rule fixes stay."""
        for quantiser in self.quantisers.values():
            if not quantiser.fixed:
                quantiser.learn_scale()
