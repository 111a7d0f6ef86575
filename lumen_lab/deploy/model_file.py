"""What the compiler needs to know of an ONNX file before it starts, and where each node comes from in torch."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from lumen_lab.errors import CompileError
from lumen_lab.specs import TensorSpec, file_sha256

if TYPE_CHECKING:
    import onnx

SCOPES = "pkg.torch.onnx.name_scopes"
QUANTISERS = ("QuantizeLinear", "DequantizeLinear")


def read_onnx(path: str | Path) -> onnx.ModelProto:
    """The graph of an ONNX file (external weights stay on disk); ``CompileError`` if it cannot be compiled at all.

    Refused: a missing file, one that is not ONNX, missing external data, and inputs without a fixed shape.
    """
    import onnx

    path = Path(path)
    if not path.is_file():
        raise CompileError(f"There is no ONNX file {path}; export the network first.")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise CompileError(f"{path} is not an ONNX model: {type(error).__name__}: {str(error)[:200]}.") from None
    if not model.graph.node or not model.opset_import:
        raise CompileError(f"{path} is not an ONNX model: it holds no operations.")
    for name in external_files(model):
        if not (path.parent / name).is_file():
            raise CompileError(f"{path} keeps its weights in {name}, which is not beside it; export the network again.")
    _refuse_dynamic(model, path)
    return model


def external_files(model: onnx.ModelProto) -> list[str]:
    """Names of the files beside the model that hold weights, sorted."""
    return sorted(
        {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    )


def content_hashes(path: str | Path, model: onnx.ModelProto) -> dict[str, str]:
    """SHA-256 of the ONNX file, under "onnx", and of each file with external weights, under its name."""
    path = Path(path)
    return {"onnx": file_sha256(path)} | {name: file_sha256(path.parent / name) for name in external_files(model)}


def model_bytes(path: str | Path, model: onnx.ModelProto) -> int:
    """Bytes of the ONNX file and its external weights."""
    path = Path(path)
    return path.stat().st_size + sum((path.parent / name).stat().st_size for name in external_files(model))


def graph_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that a caller must give (initializers may be listed among the inputs too)."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def tensor_specs(values) -> tuple[TensorSpec, ...]:
    """Name, shape, dtype and layout (rank 4: N C H W, as torch exports it) of graph inputs or outputs."""
    import onnx

    def spec(value) -> TensorSpec:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        shape = tuple(dim.dim_value for dim in kind.shape.dim)
        return TensorSpec(value.name, shape, "NCHW" if len(shape) == 4 else "", dtype)

    return tuple(spec(value) for value in values)


def node_key(node: onnx.NodeProto) -> str:
    """The name by which a node is reported: its own, or its first output where it has none."""
    return node.name or next(iter(node.output), "")


def node_sites(model: onnx.ModelProto) -> dict[str, str]:
    """Torch module path of each node ("" for the network itself), from what ``torch.onnx.export`` wrote into it.

    A quantise or dequantise node without a path of its own takes that of the operation whose value it converts, or,
    on weights, that of the operation it feeds. Nodes of unknown origin are left out.
    """
    sites = {node_key(node): site for node in model.graph.node if (site := _own_site(node)) is not None}
    producer = producers(model)
    consumer = {name: node for node in reversed(model.graph.node) for name in node.input}
    for node in model.graph.node:
        if node.op_type in QUANTISERS and node_key(node) not in sites:
            for other in (step_back(node, producer), _step_forward(node, consumer)):
                if other is not None and node_key(other) in sites:
                    sites[node_key(node)] = sites[node_key(other)]
                    break
    return sites


def producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The node that computes each value."""
    return {name: node for node in model.graph.node for name in node.output}


def step_back(node: onnx.NodeProto | None, producer: dict[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """``node``, or the operation behind it if it only quantises or dequantises; None behind a weight or an input."""
    while node is not None and node.op_type in QUANTISERS:
        node = producer.get(node.input[0])
    return node


def _step_forward(node: onnx.NodeProto | None, consumer: dict[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    while node is not None and node.op_type in QUANTISERS:
        node = consumer.get(node.output[0])
    return node


def _own_site(node: onnx.NodeProto) -> str | None:
    text = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), None)
    if text is None:
        return None
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return str(scopes[-2]) if len(scopes) > 1 else ""


def _refuse_dynamic(model: onnx.ModelProto, path: Path) -> None:
    open_inputs = [text for value in graph_inputs(model) if (text := _open_shape(value))]
    if open_inputs:
        raise CompileError(
            f"The NPU takes fixed shapes only, and {path.name} leaves some open: {', '.join(open_inputs)}; "
            "export it with a fixed batch, height and width."
        )


def _open_shape(value) -> str:
    """The input's name and shape if a dimension is not a positive number, else ""."""
    kind = value.type.tensor_type
    dims = [dim.dim_param or str(dim.dim_value or "?") for dim in kind.shape.dim]
    fixed = kind.HasField("shape") and all(dim.dim_value > 0 for dim in kind.shape.dim)
    return "" if fixed else f"{value.name} ({', '.join(dims) if kind.HasField('shape') else 'no shape'})"
