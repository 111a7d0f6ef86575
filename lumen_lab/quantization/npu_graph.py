"""The NPU's graph in torch: every tensor on its integer grid, differentiable, the same object that is emitted."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, fx, nn

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import depends_on, device_of, site_of
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.fake_quantize import FakeQuantize, First
from lumen_lab.quantization.placing import QUANTISER

if TYPE_CHECKING:
    from lumen_lab.quantization.calibration import Calibration


class NPUGraph(nn.Module):
    """A network on the grid of its integers: image (B, C, H, W) -> the network's output, for any batch.

    ``graph_module`` is the captured graph with a quantiser behind every operation that has an encoding of its own, and
    behind weights, biases and constants. Weights carry the names of the network they come from. ``size`` is (H, W);
    ``ends_in_mask`` says whether the output is the mask itself, 0 to 1, and no logits; ``calibration`` what
    ``quantize`` found, None where the encodings come from elsewhere.
    The state dict holds weights, encodings and widths; it loads into a graph of the same network and widths.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        size: tuple[int, int],
        made_from: Mapping[str, str] | None = None,
        *,
        ends_in_mask: bool = False,
    ):
        super().__init__()
        self.graph_module = graph
        self.size = size
        self.made_from = dict(made_from or {})
        self.ends_in_mask = ends_in_mask
        self.calibration: Calibration | None = None
        self._targets = {name: node.target for name, node in self.calls().items()}
        bits = [quantiser.bits for quantiser in self.quantisers.values()]
        self.register_buffer("widths", torch.tensor(bits, dtype=torch.uint8))

    def forward(self, image: Tensor) -> Tensor:
        with in_float32(image):
            return self.graph_module(image)

    def __deepcopy__(self, memo: dict[int, object]) -> NPUGraph:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        raise QuantizationError(
            "An NPU graph is not pickled, which would lose its sites; keep it with save_graph(graph, path) and "
            "load_graph(path, model) of lumen_lab.quantization.graph_file, or copy.deepcopy it."
        )

    @property
    def channels(self) -> int:
        """Of the image, as the network was captured."""
        image = next(node for node in self.graph_module.graph.nodes if node.op == "placeholder")
        return int(image.meta["val"].shape[1]) if "val" in image.meta else 3

    def calls(self) -> dict[str, fx.Node]:
        """The node of every quantiser by its name: that of the operation, weight or constant it follows.

        One that brings an activation to another width is named after it and the width ("add_3_16bit").
        """
        found: dict[str, fx.Node] = {}
        for node in self.graph_module.graph.nodes:
            if node.op == "call_module":  # one that several share is called for each of them
                name = node.target.removeprefix(QUANTISER)
                found[name] = node if node.args[0].name == name else found.get(name, node)
        return found

    @property
    def quantisers(self) -> dict[str, FakeQuantize]:
        """Those of activations and constants, whose encodings are calibrated, in order of execution."""
        modules = {name: getattr(self.graph_module, target) for name, target in self._targets.items()}
        return {name: module for name, module in modules.items() if isinstance(module, FakeQuantize)}

    def sites(self) -> dict[str, str]:
        """The site of each quantiser: of the operation that it follows, or that reads the weight or constant."""
        return {name: site_of(node) for name, node in self.calls().items()}

    @contextmanager
    def put_in_place(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Other modules in place of quantisers, by name, while the block runs: observers, or nothing at all."""
        unknown = [name for name in modules if name not in self._targets]
        if unknown:
            raise QuantizationError(f"No quantiser of this graph is called '{unknown[0]}'; calls() lists them.")
        targets = {self._targets[name]: module for name, module in modules.items()}
        before = {target: getattr(self.graph_module, target) for target in targets}
        try:
            for target, module in targets.items():
                if hasattr(before[target], "scale"):  # biases are counted in it
                    module.scale = before[target].scale
                module.train(before[target].training)
                setattr(self.graph_module, target, module)
            yield
        finally:
            for target, module in before.items():
                setattr(self.graph_module, target, module)

    def in_float(self, names: Iterable[str] | None = None):
        """A context in which the quantisers called ``names`` do nothing; None: all of them, the network in float."""
        return self.put_in_place({name: First() for name in (self._targets if names is None else names)})

    def learn_scales(self) -> None:
        """Make every activation's scale a parameter, learnt by LSQ gradients; those that a rule fixes stay."""
        for quantiser in self.quantisers.values():
            if not quantiser.fixed:
                quantiser.learn_scale()

    def freeze_scales(self) -> None:
        """Make every scale a buffer again, with the value that it has learnt."""
        for quantiser in self.quantisers.values():
            freeze_scale(quantiser)

    # Weights

    def weights(self) -> dict[str, nn.Parameter]:
        """The network's weights under their own names, no scales among them: for an optimiser, or to be given back
        with ``network.load_state_dict(graph.weights(), strict=False)``."""
        parameters = self.graph_module.named_parameters(remove_duplicate=False)
        return {name: weight for name, weight in parameters if not name.startswith(QUANTISER)}

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Copy weights from a network's state dict; returns the names in it that the graph has no use for.

        Encodings stay as they are. ``QuantizationError`` if a weight of the graph is missing or has another shape;
        nothing is copied then.
        """
        weights = self.weights()
        for name, weight in weights.items():
            found = tuple(state[name].shape) if name in state else None
            if found != tuple(weight.shape):
                raise QuantizationError(
                    f"The graph has a weight '{name}' of shape {tuple(weight.shape)}; the state dict has "
                    f"{found or 'none of that name'}. Give that of the network it was captured from."
                )
        for name, weight in weights.items():
            weight.copy_(state[name])
        return tuple(name for name in state if name not in weights)

    # Encodings

    def carry_encodings(self, other: NPUGraph) -> None:
        """Take the ranges that the quantisers of ``other`` have, a graph of the same network with other widths.

        Those that convert between widths take the range of what they convert. Nothing is calibrated anew.
        """
        ranges = {
            node.args[0].name: getattr(other.graph_module, node.target).encoding.range
            for node in other.graph_module.graph.nodes
            if node.op == "call_module" and isinstance(getattr(other.graph_module, node.target), FakeQuantize)
        }
        for node in self.calls().values():
            quantiser = getattr(self.graph_module, node.target)
            if isinstance(quantiser, FakeQuantize) and not quantiser.fixed:
                quantiser.encoding = encoding_for_range(*ranges[origin(node, ranges)], bits=quantiser.bits)
        for name, quantiser in self.quantisers.items():
            if name in other.quantisers:
                quantiser.fixed = other.quantisers[name].fixed

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
        given = state_dict.get(f"{prefix}widths")
        if given is not None and (given.shape != self.widths.shape or bool((given.cpu() != self.widths.cpu()).any())):
            errors.append(
                "the state dict is of a graph whose quantisers have other widths; place them with the same bits"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


def in_float32(image: Tensor) -> AbstractContextManager:
    """A context for a forward pass, in which autocast has no say: integers are counted in float32.

    ``QuantizationError`` for an image of another type.
    """
    if image.dtype != torch.float32:
        raise QuantizationError(f"An NPU graph reads float32 images, found {image.dtype}; give image.float().")
    kind = image.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def freeze_scale(quantiser: FakeQuantize) -> None:
    """A learnt scale as a buffer again."""
    if isinstance(quantiser.scale, nn.Parameter):
        learnt = quantiser.scale.detach().abs()
        del quantiser.scale
        quantiser.register_buffer("scale", learnt)


def origin(node: fx.Node, known: Container[str]) -> str:
    """Which of the operations and constants ``known`` made the value that a quantiser's call reads."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.name in known:
            return node.name
    raise QuantizationError(f"The other graph has no range for '{node.name}'; is it of the same network?")


class PartialRun(fx.Interpreter):
    """Runs a part of a graph on values at hand, some of the quantisers switched off.

    ``fixed`` holds what depends on no input (weights, constants and their quantised values), computed once.
    """

    def __init__(self, graph: NPUGraph):
        super().__init__(graph.graph_module)
        self.channels = graph.channels
        self.nodes = list(graph.graph_module.graph.nodes)
        self.open = depends_on(graph.graph_module, lambda node: node.op == "placeholder")
        self.off: Container[str] = ()
        self.fixed: dict[fx.Node, object] = {}
        self.advance(self.fixed, [n for n in self.nodes if n not in self.open and n.op != "output"])

    @property
    def quantiser_targets(self) -> frozenset[str]:
        """The modules of all quantisers: to be ``off`` for a run in float."""
        return frozenset(node.target for node in self.nodes if node.op == "call_module")

    @property
    def result(self) -> fx.Node:
        """The node whose value the graph returns."""
        (value,) = self.nodes[-1].args
        return value[0] if isinstance(value, tuple | list) else value

    def call_module(self, target: str, args: tuple, kwargs: dict) -> object:
        return args[0] if target in self.off else getattr(self.module, target)(*args, **kwargs)

    def start(self, off: Container[str] = (), image: Tensor | None = None) -> dict[fx.Node, object]:
        """Values to begin with: what is fixed, not quantised where ``off`` has the quantiser, and the image."""
        values = {
            node: self.fixed[node.args[0]] if node.op == "call_module" and node.target in off else value
            for node, value in self.fixed.items()
        }
        return values | {node: image for node in self.nodes if node.op == "placeholder" and image is not None}

    def advance(
        self,
        values: dict[fx.Node, object],
        nodes: Iterable[fx.Node],
        *,
        off: Container[str] = (),
        keep: Container[fx.Node] = (),
    ) -> None:
        """Run ``nodes``, in order, as far as they are not known; values that no later node reads are dropped, but for
        those to ``keep``."""
        self.env, self.off = values, off
        for node in nodes:
            if node not in values:
                values[node] = self.run_node(node)
            if node in self.open:
                for unused in self.user_to_last_uses.get(node, ()):
                    if unused in self.open and unused not in keep:
                        values.pop(unused, None)

    @torch.no_grad()
    def element_counts(self, size: tuple[int, int]) -> dict[fx.Node, int]:
        """How many numbers each tensor that depends on the input has, for one picture of ``size`` (H, W)."""
        values, counts = self.start(image=torch.zeros(1, self.channels, *size, device=device_of(self.module))), {}
        for node in self.nodes[:-1]:
            self.advance(values, [node])
            if node in self.open and isinstance(values.get(node), Tensor):
                counts[node] = values[node].numel()
        return counts
