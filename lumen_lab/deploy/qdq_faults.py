"""Which rules of the NPU a quantised ONNX graph (QDQ) breaks, node by node, before or after it is compiled.

Most broken rules end in an operation computed in float, which the compiled graph shows. Some do not: the compiler takes
a weight whose scales lie on the wrong axis, or a bias in other steps than its products, and the NPU computes something
else. Those are called silent, and only the encodings tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lumen_lab.deploy.model_file import QUANTISERS, node_key
from lumen_lab.quantization.rules import INPUT, TIED, htp_rules
from lumen_lab.specs import Record

if TYPE_CHECKING:
    import onnx

ROWS = {
    "Conv": "aten.conv2d.default",
    "ConvTranspose": "aten.conv2d.default",
    "Gemm": "aten.linear.default",
    "LayerNormalization": "aten.layer_norm.default",
    "Add": "aten.add.Tensor",
    "Sub": "aten.sub.Tensor",
    "Mul": "aten.mul.Tensor",
    "Relu": "aten.relu.default",
    "Gelu": "aten.gelu.default",
    "ReduceMean": "aten.mean.dim",
    "Concat": "aten.cat.default",
    "Softmax": "aten.softmax.int",
    "Sigmoid": "aten.sigmoid.default",
    "Resize": "aten.upsample_bilinear2d.vec",
    "GridSample": "aten.grid_sampler.default",
    "Reshape": "aten.reshape.default",
    "Flatten": "aten.flatten.using_ints",
    "Squeeze": "aten.squeeze.dim",
    "Unsqueeze": "aten.unsqueeze.default",
    "Transpose": "aten.permute.default",
    "Slice": "aten.slice.Tensor",
    "Split": "aten.split.Tensor",
    "Tile": "aten.repeat.default",
    "Expand": "aten.expand.default",
    "Pad": "aten.pad.default",
    "DepthToSpace": "aten.pixel_shuffle.default",
    "MaxPool": "aten.max_pool2d.default",
}
"""The row of ``htp_rules.json`` for each ONNX operator; a MatMul is a linear where its second factor is a weight."""

LINEAR, MATMUL = "aten.linear.default", "aten.matmul.default"
FIRST_ONLY = {"Resize", "Reshape", "Slice", "Split", "Tile", "Expand", "Pad", "ReduceMean", "Squeeze", "Unsqueeze"} | {
    "Clip"
}
WEIGHT_AXIS = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1}
MAY_REQUANTISE = {"Slice"}  # another encoding at the output costs nothing here
BIAS_TOLERANCE = 1e-4  # of a bias's scale to the product of the others


@dataclass(frozen=True)
class Fault(Record):
    """A rule that an ONNX node breaks: the table's operation, and ``what`` is wrong in a sentence.

    ``silent``: the compiler takes it as it stands, in integers, and the NPU computes something else.
    """

    rule: str
    what: str
    silent: bool = False

    @property
    def because(self) -> str:
        """What the table says of the operation."""
        found = htp_rules().get(self.rule)
        return found.because if found else ""

    @property
    def of_movement(self) -> bool:
        """Whether the operation only moves data."""
        found = htp_rules().get(self.rule)
        return found is not None and found.output == INPUT


@dataclass(frozen=True)
class ConstantEncoding:
    """A value's encoding as the file has it: scales, the integers' type, the axis of several scales."""

    dtype: str
    scales: np.ndarray
    zero_points: np.ndarray
    axis: int | None
    constant: bool

    def same(self, other: ConstantEncoding) -> bool:
        """Whether both write the same real numbers as the same integers."""
        return self.dtype == other.dtype and all(
            np.array_equal(one, another)
            for one, another in ((self.scales, other.scales), (self.zero_points, other.zero_points))
        )

    def __str__(self) -> str:
        if self.scales.size > 1:
            return f"{self.dtype} with {self.scales.size} scales on axis {self.axis}"
        return f"{self.dtype} in steps of {float(self.scales.reshape(-1)[0]):.4g} from {int(self.zero_points.min())}"


class QdqGraph:
    """Who writes and who reads each value of a QDQ model, and in which encoding."""

    def __init__(self, model: onnx.ModelProto):
        self.model = model
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.producer = {name: node for node in model.graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def array(self, name: str) -> np.ndarray | None:
        """A constant's values; None if it is none, or lies in another file."""
        from onnx import numpy_helper

        tensor = self.constants.get(name)
        return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)

    def read(self, value: str) -> ConstantEncoding | None:
        """The encoding of a value that comes out of a DequantizeLinear; None for a float one."""
        node = self.producer.get(value)
        return self._encoding(node) if node is not None and node.op_type == "DequantizeLinear" else None

    def written(self, node: onnx.NodeProto) -> ConstantEncoding | None:
        """The encoding that a node's output is brought to at once; None where it stays float."""
        readers = self.readers.get(node.output[0], [])
        quantised = bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)
        return self._encoding(readers[0]) if quantised else None

    def only_reader(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The node that alone reads what ``node`` returns."""
        readers = self.readers.get(node.output[0], [])
        return readers[0] if len(readers) == 1 else None

    def _encoding(self, node: onnx.NodeProto) -> ConstantEncoding | None:
        scales = self.array(node.input[1]) if len(node.input) > 1 else None
        if scales is None:
            return None
        zero_points = self.array(node.input[2]) if len(node.input) > 2 else None
        zero_points = np.zeros(scales.shape, np.uint8) if zero_points is None else zero_points
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        dtype = self._integers(node, zero_points)
        return ConstantEncoding(
            dtype, scales, zero_points, axis if scales.size > 1 else None, node.input[0] in self.constants
        )

    def _integers(self, node: onnx.NodeProto, zero_points: np.ndarray) -> str:
        from onnx import helper

        if len(node.input) > 2 or node.input[0] not in self.constants:
            return zero_points.dtype.name
        return helper.tensor_dtype_to_np_dtype(self.constants[node.input[0]].data_type).name


Check = Callable[[QdqGraph, "onnx.NodeProto"], Iterator[tuple[str, bool]]]


def faults_in(model: onnx.ModelProto) -> dict[str, tuple[Fault, ...]]:
    """The faults of each node that has any, by its name; nothing for a network without quantisers.

    Weights that lie beside the file are not needed; scales that do are not judged.
    """
    if not any(node.op_type in QUANTISERS for node in model.graph.node):
        return {}
    graph, found = QdqGraph(model), {}
    for node in model.graph.node:
        if node.op_type in QUANTISERS:
            continue
        faults = [Fault(row_of(graph, node), what, silent) for check in CHECKS for what, silent in check(graph, node)]
        for place in (node, product_behind(graph, node)) if faults else ():
            if place is not None:
                found.setdefault(node_key(place), []).extend(faults)
    return {name: tuple(faults) for name, faults in found.items()}


def row_of(graph: QdqGraph, node: onnx.NodeProto) -> str:
    """The table's operation for a node, its ONNX operator where there is none."""
    if product_behind(graph, node) is not None:
        return LINEAR
    if node.op_type == "MatMul":
        encoding = graph.read(node.input[1])
        return LINEAR if encoding is not None and encoding.constant else MATMUL
    return ROWS.get(node.op_type, node.op_type)


def product_behind(graph: QdqGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The MatMul to which an Add adds a bias with no quantiser between: together they are one FullyConnected."""
    if node.op_type != "Add":
        return None
    makers = [graph.producer.get(value) for value in node.input]
    return next((maker for maker in makers if maker is not None and maker.op_type == "MatMul"), None)


def operands(node: onnx.NodeProto) -> list[str]:
    """The values that a node computes with, sizes and axes left out."""
    return [name for name in (node.input[:1] if node.op_type in FIRST_ONLY else node.input) if name]


def float_operands(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """Constants that are no integers, and values that no quantiser wrote."""
    product = product_behind(graph, node)
    for name in operands(node):
        maker = graph.producer.get(name)
        if name in graph.constants:
            yield f"its constant {name} is float", False
        elif maker is None or (maker.op_type != "DequantizeLinear" and not fused(maker, node) and maker is not product):
            yield f"nothing quantises {name}, which it reads", False


def fused(maker: onnx.NodeProto, node: onnx.NodeProto) -> bool:
    """Whether a node may read another's float value because both become one operation."""
    return maker.op_type == "Conv" and node.op_type in ("Relu", "Clip")


def float_output(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """A value that is read before it is quantised."""
    reader = graph.only_reader(node)
    taken = reader is not None and (fused(node, reader) or product_behind(graph, reader) is node)
    if graph.written(node) is None and not taken:
        yield "nothing quantises what it returns", False


def relu_range(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """A conv and its ReLU, with no quantiser between, in an encoding that holds negative numbers: they stay apart."""
    conv, relu = (
        (node, graph.only_reader(node)) if node.op_type == "Conv" else (graph.producer.get(node.input[0]), node)
    )
    if conv is None or relu is None or (conv.op_type, relu.op_type) != ("Conv", "Relu"):
        return
    after = graph.written(relu)
    if after is not None and int(after.zero_points.min()) > np.iinfo(after.dtype).min:
        yield f"conv and ReLU return {after}; they are one operation only where 0 is the least that is held", False


def weight_axis(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """Scales of a weight on another axis than that of the output channels."""
    if node.op_type not in (*WEIGHT_AXIS, "Gemm") or len(node.input) < 2:
        return
    encoding = graph.read(node.input[1])
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    wanted = WEIGHT_AXIS.get(node.op_type, 0 if transposed else 1)
    if encoding is not None and encoding.axis not in (None, wanted):
        yield (
            f"its weight has a scale for each index of axis {encoding.axis}, and the NPU reads them along axis "
            f"{wanted}",
            True,
        )


def bias_steps(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """A linear's bias that is not int32, or not in steps of input scale × weight scale (a conv reads any steps)."""
    product = product_behind(graph, node)
    if product is None and (node.op_type != "Gemm" or len(node.input) < 3):
        return
    bias = node.input[2] if product is None else next(name for name in node.input if name not in product.output)
    product = product or node
    encoding = graph.read(bias)
    if encoding is None:
        return
    if encoding.dtype != "int32":
        yield f"its bias is {encoding.dtype} without a quantiser before it is added, and the NPU adds int32", False
        return
    data, weight = (graph.read(name) for name in product.input[:2])
    if data is not None and weight is not None and not in_steps(encoding, data, weight):
        yield "its bias is not in steps of input scale × weight scale, as the NPU reads it", True


def in_steps(bias: ConstantEncoding, data: ConstantEncoding, weight: ConstantEncoding) -> bool:
    """Whether the bias is counted as the products are summed; what does not fit in shape is another's fault."""
    expected = data.scales.reshape(-1)[:1].astype(np.float64) * weight.scales.reshape(-1)
    given = bias.scales.reshape(-1)
    if given.size > 1 and expected.size > 1 and given.size != expected.size:
        return True
    return bool(np.all(np.abs(given - expected) <= BIAS_TOLERANCE * expected))


def norm_weights(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """A layer norm's factor that is not uint8 for all channels, a shift that is not int32."""
    if node.op_type != "LayerNormalization":
        return
    factor = graph.read(node.input[1])
    if factor is not None and (factor.axis is not None or not factor.dtype.startswith("uint8")):
        yield f"its factor is {factor}, and the NPU takes uint8 with one scale", False
    shift = graph.read(node.input[2]) if len(node.input) > 2 else None
    if shift is not None and shift.dtype != "int32":
        yield f"its shift is {shift.dtype}, and the NPU adds int32", False


def kept_encoding(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """Another encoding behind what moves data, resizes or pools than before it."""
    rule = htp_rules().get(ROWS.get(node.op_type, ""))
    if rule is None or rule.output not in (INPUT, TIED) or node.op_type in MAY_REQUANTISE:
        return
    before, after = graph.read(node.input[0]), graph.written(node)
    if node.op_type == "Split":
        yield "Split is computed in float in any encoding; slices are not", False
    elif before is not None and after is not None and not before.same(after):
        yield f"it returns {after} and reads {before}; both must be the same", False


def unit_steps(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """A softmax or sigmoid in steps that the NPU does not write: it does as if they were its own."""
    after = graph.written(node) if node.op_type in ("Softmax", "Sigmoid") else None
    if after is None or after.dtype == "uint8":
        return
    bits, signed = np.iinfo(after.dtype).bits, after.dtype.startswith("int")
    zero_point = -(2 ** (bits - 1)) if signed else 0
    exact = abs(float(after.scales.reshape(-1)[0]) * 2**bits - 1) < 1 / 128
    if int(after.zero_points.reshape(-1)[0]) != zero_point or not (exact or (signed and bits == 8)):
        yield f"it returns {after}, and the NPU writes steps of 1/{2**bits} from {zero_point}", True


def operand_types(graph: QdqGraph, node: onnx.NodeProto) -> Iterator[tuple[str, bool]]:
    """Activations of types that do not go together."""
    read = [encoding for name in operands(node) if (encoding := graph.read(name)) is not None]
    kinds = list(dict.fromkeys(encoding.dtype for encoding in read if not encoding.constant))
    if node.op_type == "MatMul" and kinds == ["uint16"] and len(read) == 2 and not any(x.constant for x in read):
        yield "both of its factors have 16 bits, and the NPU rounds the second to 8", True
    elif len(kinds) > 1 and not (node.op_type == "MatMul" and kinds == ["uint16", "uint8"]):
        yield f"it reads {' and '.join(kinds)}; the NPU wants one type", False


CHECKS: tuple[Check, ...] = (
    float_operands,
    float_output,
    relu_range,
    weight_axis,
    bias_steps,
    norm_weights,
    kept_encoding,
    unit_steps,
    operand_types,
)
