"""The NPU's graph as an ONNX file with quantisers in it (QDQ): the same operations, encodings and integers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import fx

from lumen_lab.deploy.onnx_export import OPSET, TOOLS, write_proto
from lumen_lab.deploy.qdq_builder import QdqBuilder, ShapesAndConstants, dequantised, integers_of
from lumen_lab.deploy.qdq_ops import PARTS_ONLY, emit
from lumen_lab.errors import ExportError
from lumen_lab.quantization.node_rules import op_name, rule_of
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import QUANTISER
from lumen_lab.quantization.rules import INPUT
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path, tool_versions

if TYPE_CHECKING:
    import onnx

FIRST_OPSET_OF_16_BITS = 21  # of QuantizeLinear and DequantizeLinear


def export_qdq(graph: NPUGraph, path: str | Path, *, output_name: str | None = None, float_ends: bool = False) -> Path:
    """Write ``graph`` as ONNX (opset 20, 21 with 16-bit tensors) for a batch of one, with a manifest; returns the path.

    Inputs and outputs are the integers themselves, their encoding in the manifest; with ``float_ends`` they are
    float32 and the file quantises them. ``output_name``: by default what ``quantize`` was asked for, "mask" or
    "logits". The file appears whole or not; ``ExportError`` says why not.
    """
    path = Path(path)
    output_name = output_name or graph.made_from.get("output", "mask" if graph.ends_in_mask else "output")
    if path.suffix != ".onnx":
        raise ExportError(f"An ONNX file is named .onnx, asked for '{path.name}'; change the ending.")
    build = built(graph, float_ends=float_ends)
    if output_name in {ends(build)[0].name, *(name for made in build.nodes for name in made.output)}:
        raise ExportError(f"'{output_name}' is a value of this graph already; give the output another output_name=.")
    proto = model_proto(build, output_name, float_ends=float_ends)
    write_proto(proto, path)
    manifest(graph, build, proto, path, float_ends=float_ends).save(manifest_path(path))
    return path


@torch.no_grad()
def built(graph: NPUGraph, *, float_ends: bool = False) -> QdqBuilder:
    """All operations of the graph, for one image; ``ExportError`` for one that does not compute in float32."""
    module = graph.graph_module
    kinds = {tensor.dtype for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()}
    if other := sorted(str(kind).removeprefix("torch.") for kind in kinds - {torch.float32}):
        raise ExportError(
            f"The graph has weights or scales in {other[0]}; integers are counted in float32: .float() it."
        )
    run = ShapesAndConstants(module)
    run.run(torch.empty(1, graph.channels, *graph.size, device="meta"))
    build = QdqBuilder(module, run)
    for node in module.graph.nodes:
        if node in run.live:
            build.now = node.args[0] if node.op == "call_module" else node
            write(build, node, float_ends=float_ends)
    return build


def write(build: QdqBuilder, node: fx.Node, *, float_ends: bool) -> None:
    """One node: an operation, or the quantiser behind one."""
    if node.op == "call_module":
        (source,) = node.args
        if source.op == "placeholder" and float_ends:
            build.names[node] = build.quantised(source.name, source.name, build.encoding(node))
        elif source.op == "placeholder":
            build.names[node] = build.dequantised(source.name, source.name, build.encoding(node))
        else:  # a second quantiser, which converts to another width, is named after itself
            again = source.op == "call_module" or rule_of(source).output == INPUT
            name = node.target.removeprefix(QUANTISER) if again else source.name
            build.names[node] = build.quantised(build.names[source], name, build.encoding(node))
    elif node.op == "call_function" and op_name(node) not in PARTS_ONLY:
        value = emit(build, node)
        moved = rule_of(node).output == INPUT
        build.names[node] = build.quantised(value, node.name, build.encoding(node)) if moved else value


def model_proto(build: QdqBuilder, output_name: str, *, float_ends: bool) -> onnx.ModelProto:
    """The ONNX model around the operations written."""
    from onnx import helper, numpy_helper

    image, result = ends(build)
    name = build.names[result].removesuffix(dequantised(""))
    for node in build.nodes:
        rename(node, dequantised(name) if float_ends else integers_of(name), output_name)
    kinds = [helper.np_dtype_to_tensor_dtype(np_dtype(build, node, float_ends=float_ends)) for node in (image, result)]
    inputs = [helper.make_tensor_value_info(image.name, kinds[0], build.shape(image))]
    outputs = [helper.make_tensor_value_info(output_name, kinds[1], build.shape(result))]
    constants = [numpy_helper.from_array(values, name) for name, values in build.initializers.items()]
    graph = helper.make_graph(live_only(build.nodes, output_name), "npu_graph", inputs, outputs, constants)
    wide = any(values.dtype == "uint16" for values in build.initializers.values())
    opset = max(OPSET, FIRST_OPSET_OF_16_BITS) if wide else OPSET
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def ends(build: QdqBuilder) -> tuple[fx.Node, fx.Node]:
    """The input, and the node whose value is the output."""
    nodes = list(build.graph.graph.nodes)
    image = next(node for node in nodes if node.op == "placeholder")
    (result,) = nodes[-1].args
    return image, result[0] if isinstance(result, tuple | list) else result


def np_dtype(build: QdqBuilder, node: fx.Node, *, float_ends: bool) -> np.dtype:
    """The type of an input or output of the file."""
    if float_ends:
        return np.dtype(np.float32)
    quantiser = next(iter(node.users)) if node.op == "placeholder" else node
    return np.dtype(build.encoding(quantiser).dtype)


def rename(node: onnx.NodeProto, before: str, after: str) -> None:
    """Another name for a value."""
    for names in (node.input, node.output):
        for place, name in enumerate(names):
            if name == before:
                names[place] = after


def live_only(nodes: list[onnx.NodeProto], output_name: str) -> list[onnx.NodeProto]:
    """The nodes that the output needs."""
    needed, kept = {output_name}, []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]


def manifest(graph: NPUGraph, build: QdqBuilder, proto, path: Path, *, float_ends: bool) -> Manifest:
    """What made the file, and its contract: the encodings of the integers that go in and come out."""
    image, result = ends(build)

    def spec(value, node: fx.Node) -> TensorSpec:
        encoding = build.encoding(node)
        if float_ends:
            return TensorSpec(value.name, build.shape(node), "NCHW", "float32")
        return TensorSpec(value.name, build.shape(node), "NCHW", encoding.dtype, encoding.scale, encoding.zero_point)

    return Manifest(
        kind="qdq",
        made_from=graph.made_from,
        versions=tool_versions(*TOOLS),
        inputs=(spec(proto.graph.input[0], next(iter(image.users))),),
        outputs=(spec(proto.graph.output[0], result),),
        files={path.name: file_sha256(path)},
    )
