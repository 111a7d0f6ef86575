"""A calibrated or trained NPU graph on disk: weights and encodings, for the same network to be read back into."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from lumen_lab.errors import ArtifactError, QuantizationError
from lumen_lab.network.checkpoints import model_name, weights_sha256
from lumen_lab.quantization.calibration import input_name
from lumen_lab.quantization.capture import device_of
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.quantize import placed, rewrites_of
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path, replacing, tool_versions

KIND = "npu graph"
TOLD = ("network", "rewrites", "input_shapes")  # of the network that a file can be read back into


def save_graph(graph: NPUGraph, path: str | Path) -> Path:
    """Write weights, encodings and widths as safetensors, with a manifest beside it; returns the path.

    The graph is one that ``quantize`` made, however it was trained since. Both files are written whole.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise QuantizationError(f"A graph is saved as .safetensors, asked for '{path.name}'; change the ending.")
    if not graph.made_from:
        raise QuantizationError("This graph does not say what it was made from; make it with quantize, then save it.")
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in graph.state_dict().items()}
    with replacing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary)
    Manifest(
        kind=KIND,
        made_from=graph.made_from | {"graph_sha256": weights_sha256(graph)},
        versions=tool_versions("torch"),
        inputs=(TensorSpec(input_name(graph), (1, graph.channels, *graph.size), "NCHW", "float32"),),
        outputs=(TensorSpec(graph.made_from["output"], output_shape(graph), "NCHW", "float32"),),
        files={path.name: file_sha256(path)},
    ).save(manifest_path(path))
    return path


def output_shape(graph: NPUGraph) -> tuple[int, ...]:
    """Of what the graph returns for one picture."""
    with torch.no_grad():
        blank = torch.zeros(1, graph.channels, *graph.size, device=device_of(graph))
        return tuple(graph(blank).shape)


def load_graph(path: str | Path, model: nn.Module) -> NPUGraph:
    """The graph that was saved at ``path``, for the rewritten network ``model`` that it was made from.

    ``model`` gives the structure; weights and encodings are those of the file. ``ArtifactError`` for a file that is
    damaged or none of this kind, ``QuantizationError`` for one of another network, with what differs.
    """
    manifest = Manifest.beside(path)
    if manifest.kind != KIND:
        raise ArtifactError(f"{path} is a {manifest.kind}, no NPU graph; give what save_graph wrote.")
    made_from = dict(manifest.made_from)
    saved_sha256 = made_from.pop("graph_sha256", None)
    shape = manifest.inputs[0].shape
    here = {"network": model_name(model), "rewrites": rewrites_of(model), "input_shapes": "x".join(map(str, shape))}
    for name in TOLD:
        if here[name] != made_from.get(name):
            raise QuantizationError(
                f"{path} was made with {name} = {made_from.get(name)}, the network given has {here[name]}; give the "
                "network that was quantised, rewritten by the same plan."
            )
    like = next(model.parameters(), torch.zeros(()))
    example = torch.zeros(shape, dtype=like.dtype, device=like.device)
    graph = placed(model, example, bits=bits_in(made_from.get("bits", "")), output=made_from["output"])
    fill(graph, safetensors.torch.load_file(path), path)
    graph.made_from = made_from
    if weights_sha256(graph) != saved_sha256:
        raise ArtifactError(f"{path} does not hold what its manifest says; quantise or train again.")
    return graph.eval()


def fill(graph: NPUGraph, tensors: dict[str, Tensor], path: str | Path) -> None:
    """Weights and encodings into a graph without any; ``QuantizationError`` if they are not of this graph."""
    try:
        graph.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise QuantizationError(
            f"{path} does not fit this network, as this version captures it: {reason[:300]}"
        ) from None
    graph.quantisers[input_name(graph)].fixed = True


def bits_in(words: str) -> dict[str, int]:
    """Widths from a manifest: "8", or "add_3: 16, softmax: 16"."""
    pairs = (pair.partition(": ") for pair in words.split(", ") if ": " in pair)
    return {name: int(width) for name, _, width in pairs}
