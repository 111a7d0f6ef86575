"""The graph that the compiler built, operation by operation, joined to the ONNX nodes and torch modules behind it.

Two sources: the context model that onnxruntime writes (partitions, and every node left on the CPU) and the QNN graph of
each partition as JSON (``dump_json_qnn_graph``), written before the long finalise step.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lumen_lab.deploy.model_file import node_key, node_sites, producers, step_back
from lumen_lab.deploy.qdq_faults import Fault, faults_in
from lumen_lab.specs import Record

if TYPE_CHECKING:
    import onnx

# Qnn_DataType_t: the low byte is the width in BCD, the high byte the kind.
KINDS = {0x00: "int", 0x01: "uint", 0x02: "float", 0x03: "s", 0x04: "u", 0x05: "bool"}
GRAPH_INPUT, GRAPH_OUTPUT, STATIC = 0, 1, 4
FLOAT = 0x02
PER_TENSOR, PER_CHANNEL = 0, 1  # Qnn_QuantizationEncoding_t
IN, OUT, CONSTANT = "input", "output", "constant"
MOVING = ("Reshape", "Transpose", "Convert")
MULTIPLYING = ("Conv2d", "DepthWiseConv2d", "TransposeConv2d", "FullyConnected", "MatMul")


@dataclass(frozen=True)
class Operand(Record):
    """A tensor that an operation reads ("input", or "constant" where it is a weight) or writes ("output").

    ``scale`` and ``zero_point`` are those of the whole tensor; where each channel of ``axis`` has its own scale,
    ``channels`` says how many there are, and neither is kept. ``axis`` counts in the NPU's order of axes: a conv's
    weight is (h, w, in, out) there and a linear's (out, in).
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None = None
    zero_point: int | None = None
    axis: int | None = None
    channels: int | None = None

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.startswith("float")

    def __str__(self) -> str:
        encoding = "" if self.scale is None else f" × {self.scale:.4g}, zero at {self.zero_point}"
        encoding = encoding if self.channels is None else f" × {self.channels} scales on axis {self.axis}"
        return f"{self.dtype}{encoding}"


@dataclass(frozen=True)
class QnnOp(Record):
    """One operation inside a partition, its ``operands`` with their encodings.

    ``shape`` and ``dtype`` are those of its (first) output: "u8", "s8", "s32" are fixed-point, "float32" is what
    HTP computes in float16. ``is_float``: an input, weight or output is float. ``at_boundary``: it only quantises a
    network input or dequantises a network output. ``onnx_node`` is None where nothing in the ONNX graph stands behind
    it, and ``joined_by`` says how the link was found: "output" or "name" of the operation, or "neighbour" for a
    change of layout that the compiler put beside that node. ``macs``: multiplications with an addition of one
    inference. ``faults``: the rules of the NPU that the ONNX node breaks, those that do harm unseen among them.
    """

    partition: int
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    at_boundary: bool
    onnx_node: str | None = None
    joined_by: str | None = None
    site: str | None = None
    operands: tuple[Operand, ...] = ()
    macs: int = 0
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Partition(Record):
    """One graph on the NPU, with the tensors that enter and leave it and their bytes."""

    name: str
    ops: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes_in: int
    bytes_out: int


def dtype_name(code: int) -> str:
    """Short name of a QNN data type code: 0x408 is "u8" (fixed-point), 0x232 "float32", 0x132 "uint32"."""
    kind = KINDS.get(code >> 8)
    return f"{kind}{code & 0xFF:x}" if kind else f"type {code:#x}"


def site_name(site: str | None) -> str:
    """How a torch module path is shown: the network itself has an empty one, None is unknown."""
    return "(unknown)" if site is None else site or "(network)"


def read_partitions(context: onnx.ModelProto, folder: str | Path, model: onnx.ModelProto):
    """``(partitions, ops)`` of the QNN graphs dumped in ``folder``, in the order of the context model.

    ``model`` is the ONNX model that was compiled; ops carry its node names and torch sites.
    """
    boundary = {value.name for value in (*model.graph.input, *model.graph.output)}
    join, faults = OnnxJoin(model), faults_in(model)
    partitions, ops = [], []
    for index, node in enumerate(partition_nodes(context)):
        graph = json.loads((Path(folder) / f"{node.name}.json").read_text())["graph"]
        rows = [_op(index, name, body, graph["tensors"], boundary) for name, body in graph["nodes"].items()]
        ops += [with_faults(op, faults) for op in join.join(rows, graph["nodes"])]
        partitions.append(_partition(node, len(rows), graph["tensors"]))
    return tuple(partitions), tuple(ops)


def partition_nodes(context: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of a context model that stand for a graph on the NPU."""
    return [node for node in context.graph.node if node.op_type == "EPContext"]


def encodings(folder: str | Path, names: Iterable[str]) -> dict[str, tuple[float, int]]:
    """(scale, zero point) of the named 8- or 16-bit graph inputs and outputs, from the dumped QNN graphs."""
    wanted, found = set(names), {}
    for path in sorted(Path(folder).glob("*.json")):
        tensors = json.loads(path.read_text()).get("graph", {}).get("tensors", {})
        for name in wanted & tensors.keys():
            if tensors[name]["data_type"] >> 8 in (0x03, 0x04):
                encoding = tensors[name]["quant_params"]["scale_offset"]
                found[name] = (encoding["scale"], -encoding["offset"])
    return found


def with_faults(op: QnnOp, faults: dict[str, tuple[Fault, ...]]) -> QnnOp:
    """The op with the faults of its ONNX node; what only moves data beside that node has none of them."""
    found = faults.get(op.onnx_node, ()) if op.joined_by != "neighbour" else ()
    if op.kind in MOVING:
        found = tuple(fault for fault in found if fault.of_movement)
    return replace(op, faults=found) if found else op


def _op(partition: int, name: str, body: dict, tensors: dict, boundary: set[str]) -> QnnOp:
    read = [_operand(tensor, IN, tensors[tensor]) for tensor in body["input_names"] if tensor in tensors]
    written = [_operand(tensor, OUT, tensors[tensor]) for tensor in body["output_names"] if tensor in tensors]
    converts = {"Quantize": body["input_names"], "Dequantize": body["output_names"]}.get(body["type"], [])
    return QnnOp(
        partition=partition,
        name=name,
        kind=body["type"],
        shape=written[0].shape,
        dtype=written[0].dtype,
        is_float=any(operand.is_float for operand in (*read, *written)),
        at_boundary=bool(converts) and converts[0] in boundary,
        operands=(*read, *written),
        macs=_macs(body["type"], read, written[0].shape),
    )


def _operand(name: str, role: str, tensor: dict) -> Operand:
    role = CONSTANT if tensor["type"] == STATIC else role
    found = Operand(name, role, dtype_name(tensor["data_type"]), tuple(tensor["dims"]))
    given = tensor.get("quant_params", {})
    if given.get("definition") != 1:  # not quantised
        return found
    scale, offset = given["scale_offset"]["scale"], given["scale_offset"]["offset"]
    if given.get("encoding", PER_TENSOR) == PER_TENSOR:
        return replace(found, scale=scale, zero_point=-offset)
    if given["encoding"] == PER_CHANNEL:  # dumped as if it were one scale: the axis in the place of the number's bits
        return replace(found, axis=struct.unpack("<i", struct.pack("<f", scale))[0], channels=offset)
    return found


def _macs(kind: str, read: list[Operand], shape: tuple[int, ...]) -> int:
    """Multiply-accumulates: elements written × products in each; 0 for what does not multiply matrices."""
    if kind not in MULTIPLYING or len(read) < 2:
        return 0
    data, weight = read[0].shape, read[1].shape
    if kind == "MatMul":
        return math.prod(shape) * data[-1]
    if kind == "FullyConnected":
        return math.prod(shape) * weight[-1]
    if kind == "TransposeConv2d":  # each element read meets the whole kernel
        return math.prod(data) * weight[0] * weight[1] * weight[3]
    return math.prod(shape) * weight[0] * weight[1] * (weight[2] if kind == "Conv2d" else 1)


def _partition(node: onnx.NodeProto, ops: int, tensors: dict) -> Partition:
    def total(kind: int) -> int:
        return sum(_tensor_bytes(tensor) for tensor in tensors.values() if tensor["type"] == kind)

    return Partition(node.name, ops, tuple(node.input), tuple(node.output), total(GRAPH_INPUT), total(GRAPH_OUTPUT))


def _tensor_bytes(tensor: dict) -> int:
    bits = int(f"{tensor['data_type'] & 0xFF:x}")
    return math.prod(tensor["dims"]) * bits // 8


class OnnxJoin:
    """Finds the ONNX node behind a QNN operation.

    QNN names its operations after ONNX nodes but adds suffixes (``_token_7`` after a change of layout, ``_2`` where a
    name was taken), so that ``node_view_2`` may stand for the node ``node_view``. The tensor that an operation writes
    keeps its ONNX name unless the layout changed, and is therefore asked first.
    """

    def __init__(self, model: onnx.ModelProto):
        self.producer = producers(model)
        self.nodes = {node_key(node): node for node in model.graph.node}
        self.sites = node_sites(model)

    def join(self, ops: list[QnnOp], bodies: dict[str, dict]) -> list[QnnOp]:
        """The same ops with ``onnx_node``, ``joined_by`` and ``site`` filled in."""
        found = {op.name: self.behind(op.name, bodies[op.name]["output_names"]) for op in ops}
        for name, neighbour in _neighbours(found, bodies):
            found[name] = (neighbour, "neighbour")
        return [self._joined(op, *found[op.name]) for op in ops]

    def behind(self, name: str, outputs: list[str]) -> tuple[str | None, str | None]:
        """(ONNX node, how it was found) for an operation called ``name`` that writes ``outputs``."""
        for text, how in (*((output, "output") for output in outputs), (name, "name")):
            for spelling in _spellings(text):
                node = step_back(self.producer.get(spelling), self.producer) or self._named(spelling)
                if node is not None:
                    return node_key(node), how
        return None, None

    def _named(self, text: str) -> onnx.NodeProto | None:
        node = self.nodes.get(text)
        return None if node is None else step_back(node, self.producer) or node

    def _joined(self, op: QnnOp, node: str | None, how: str | None) -> QnnOp:
        values = {**vars(op), "onnx_node": node, "joined_by": how, "site": self.sites.get(node)}
        return QnnOp(**values)


def base_name(name: str) -> str:
    """A node's name without what onnxruntime adds when it fuses or copies it, or changes its layout."""
    return re.sub(r"(_token_\d+.*|/[A-Z]\w*Fusion.*|/duplicated.*)$", "", name)


def _spellings(text: str) -> list[str]:
    """Names that ``text`` may have had before the compiler added to it, the likeliest first."""
    base = base_name(text)
    bare = re.sub(r"(_out\d+|_fc_out|_reshape|Reshape)$", "", base)
    return list(dict.fromkeys([text, base, bare, re.sub(r"_\d+$", "", bare)]))


def _neighbours(found: dict[str, tuple[str | None, str | None]], bodies: dict[str, dict]):
    """(op name, ONNX node) for ops without a node: that of the op which reads their output, else of the one before."""
    readers = {tensor: name for name, body in bodies.items() for tensor in body["input_names"]}
    writers = {tensor: name for name, body in bodies.items() for tensor in body["output_names"]}
    for name in [name for name, (node, _) in found.items() if node is None]:
        after = [readers.get(tensor) for tensor in bodies[name]["output_names"]]
        before = [writers.get(tensor) for tensor in bodies[name]["input_names"]]
        near = next((other for other in (*after, *before) if other and found[other][0]), None)
        if near is not None:
            yield name, found[near][0]
