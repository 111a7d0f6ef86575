"""An ONNX graph with quantisers (QDQ) in the making: values, encodings, and the torch site of every operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from lumen_lab.auditing.onnx_join import CLASSES
from lumen_lab.deploy.model_file import SCOPES
from lumen_lab.deploy.module_calls import FX_NODE
from lumen_lab.quantization.capture import live_nodes, module_stack
from lumen_lab.quantization.encoding import Encoding
from lumen_lab.quantization.fake_quantize import WEIGHT_STEPS
from lumen_lab.quantization.node_rules import op_name
from lumen_lab.quantization.placing import QUANTISER, encoding_source

if TYPE_CHECKING:
    import onnx


class ShapesAndConstants(fx.Interpreter):
    """Runs a graph once and keeps each tensor's shape, and the value of what does not depend on the input.

    What depends on the input is not computed: it has the shape that it was captured with, for the batch that is run,
    and no values ("meta").
    """

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.live = live_nodes(graph)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self.constants: dict[fx.Node, object] = {}

    def run(self, image: Tensor) -> object:
        self.batch = image.shape[0]
        return super().run(image)

    def run_node(self, node: fx.Node) -> object:
        captured = node.meta.get("val") if node in self.live and node.op == "call_function" else None
        if isinstance(captured, Tensor):
            value = torch.empty([size_at(size, self.batch) for size in captured.shape], device="meta")
        else:
            value = super().run_node(node)
        if isinstance(value, Tensor):
            self.shapes[node] = tuple(value.shape)
        if node not in self.live:
            self.constants[node] = value
        return value

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> tuple[tuple, dict]:
        given = super().fetch_args_kwargs_from_env(node)
        if node not in self.live or self.live.issuperset(node.all_input_nodes):
            return given
        return tree_map_only(Tensor, without_values, given)

    def call_module(self, target: str, args: tuple, kwargs: dict) -> object:
        """A quantiser: its value has the shape of what it quantises."""
        return args[0] if args[0].is_meta else super().call_module(target, args, kwargs)


def size_at(size: int | torch.SymInt, batch: int) -> int:
    """A captured size, in which the batch is left open, for one batch."""
    if isinstance(size, int):
        return size
    return int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, batch)))


def without_values(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type that holds nothing."""
    return tensor.to("meta")


@dataclass
class QdqBuilder:
    """ONNX nodes and initializers for one batch, and the name of the float value behind each torch node.

    ``now`` is the torch operation that is being written: quantisers are put down to it.
    """

    graph: fx.GraphModule
    run: ShapesAndConstants
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    now: fx.Node | None = None

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return self.run.shapes[node]

    def number(self, value: object) -> object:
        """A number or list of numbers of the torch graph, sizes that depend on the batch put in."""
        return fx.map_arg(value, lambda node: int(self.run.constants[node]))

    def value(self, node: fx.Node) -> str:
        """The name of a node's float value; constants are written where they are first read."""
        if node not in self.names:
            self.names[node] = self.constant_value(node)
        return self.names[node]

    def encoding(self, node: fx.Node) -> Encoding:
        """That of the grid which the node's value lies on."""
        return self.graph.get_submodule(encoding_source(node).target).encoding

    def add(self, op_type: str, inputs: list[str], of: fx.Node, *, name: str = "", **attributes) -> str:
        """One operation of the torch node ``of``, its modules in the metadata; returns the name of its value."""
        made = self._node(op_type, inputs, name or of.name, of, **attributes)
        entry = made.metadata_props.add()
        entry.key, entry.value = FX_NODE, fx_text(of)
        return made.output[0]

    def integers(self, name: str, values) -> str:
        """An initializer of shapes, axes and the like."""
        return self.initializer(name, np.asarray(values, np.int64))

    def initializer(self, name: str, values: np.ndarray) -> str:
        """Constant values under a name; a second time the first ones are kept."""
        self.initializers.setdefault(name, values)
        return name

    def quantised(self, value: str, name: str, encoding: Encoding) -> str:
        """``value`` through a pair of quantiser and dequantiser; returns the name of the float value."""
        given = self._encoding(name, np.float32(encoding.scale), np.asarray(encoding.zero_point, encoding.dtype))
        self._node("QuantizeLinear", [value, *given], integers_of(name))
        return self._node("DequantizeLinear", [integers_of(name), *given], dequantised(name)).output[0]

    def dequantised(self, name: str, integers: str, encoding: Encoding) -> str:
        """Integers that come from elsewhere as float values."""
        given = self._encoding(name, np.float32(encoding.scale), np.asarray(encoding.zero_point, encoding.dtype))
        return self._node("DequantizeLinear", [integers, *given], dequantised(name)).output[0]

    def constant_value(self, node: fx.Node) -> str:
        """A quantised constant, such as a mask: its integers and their dequantiser."""
        name = node.target.removeprefix(QUANTISER)
        encoding = self.encoding(node)
        values = encoding.quantise(self.run.constants[node.args[0]].detach().cpu().numpy())
        return self.dequantised(name, self.initializer(integers_of(name), values), encoding)

    def weight(self, node: fx.Node, *, transposed: bool = False) -> str:
        """An int8 weight with a scale for each output channel, (in, out) where ``transposed``."""
        name = node.target.removeprefix(QUANTISER) + ("_transposed" if transposed else "")
        if integers_of(name) not in self.initializers:
            value, scale = (self.run.constants[argument].detach() for argument in node.args)
            steps = (value / scale).round().clamp(-WEIGHT_STEPS, WEIGHT_STEPS)
            steps = steps.transpose(0, 1) if transposed else steps
            self._constant(name, steps, scale.reshape(-1), np.int8, axis=int(transposed))
        return dequantised(name)

    def bias(self, node: fx.Node, scale: Tensor) -> str:
        """An int32 bias in steps of ``scale``: one for each channel, or one in all."""
        name = node.target.removeprefix(QUANTISER)
        steps = (self.run.constants[node.args[0]].detach() / scale).round()
        self._constant(name, steps, scale if scale.numel() > 1 else scale.reshape(()), np.int32, axis=0)
        return dequantised(name)

    def _constant(self, name: str, steps: Tensor, scale: Tensor, dtype: type, *, axis: int) -> None:
        ends = np.iinfo(dtype)
        values = steps.cpu().double().clamp(ends.min, ends.max).numpy().astype(dtype)
        scales = scale.cpu().numpy().astype(np.float32)
        given = self._encoding(name, scales, np.zeros(scales.shape, dtype))
        attributes = {"axis": axis} if scales.ndim else {}
        self._node(
            "DequantizeLinear", [self.initializer(integers_of(name), values), *given], dequantised(name), **attributes
        )

    def _encoding(self, name: str, scale: np.ndarray, zero_point: np.ndarray) -> list[str]:
        return [self.initializer(f"{name}_scale", scale), self.initializer(f"{name}_zero_point", zero_point)]

    def _node(
        self, op_type: str, inputs: list[str], output: str, of: fx.Node | None = None, **attributes
    ) -> onnx.NodeProto:
        import onnx

        made = onnx.helper.make_node(op_type, inputs, [output], name=f"node_{output}", **attributes)
        for key, text in origin_texts(of or self.now).items():
            entry = made.metadata_props.add()
            entry.key, entry.value = key, text
        self.nodes.append(made)
        return made


def origin_texts(node: fx.Node | None) -> dict[str, str]:
    """What an ONNX node says of where it comes from: paths and classes of the modules around it, the operation."""
    if node is None or node.op != "call_function":
        return {}
    stack = module_stack(node)
    return {
        SCOPES: repr([*(path for path, _ in stack), node.name]),
        CLASSES: repr([*(kind for _, kind in stack), op_name(node)]),
    }


def integers_of(name: str) -> str:
    """The name of the integers of a value."""
    return f"{name}_integers"


def dequantised(name: str) -> str:
    """The name of the float value of a value's integers."""
    return f"{name}_dequantised"


def fx_text(node: fx.Node) -> str:
    """The torch operation in one line, with the names of its weights: two calls of a module are told apart by it."""
    weights = [other.args[0].name for other in node.all_input_nodes if other.op == "call_module" and other.args]
    return f"%{node.name} = call_function[target={node.target}](args = ({', '.join(f'%p_{name}' for name in weights)}))"
