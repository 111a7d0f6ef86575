"""The door to the quantiser: a float network and pictures in, the network as the NPU will run it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from lumen_lab.errors import QuantizationError, RewriteError
from lumen_lab.network.checkpoints import model_name, weights_sha256
from lumen_lab.quantization.calibration import (
    NO_PICTURES,
    NORMALISED_RANGE,
    Calibration,
    calibrate,
    check_method,
    checked_batch,
)
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers, widths_in_words
from lumen_lab.quantization.ranges import MIN_MAX
from lumen_lab.quantization.rules import TABLE
from lumen_lab.rewrites.plan import inputs_for
from lumen_lab.specs import files_sha256

OUTPUTS = ("mask", "logits")
BEYOND = 0.1  # of a normalised picture's range: a resize by another filter overshoots


def quantize(
    model: nn.Module,
    calibration: Iterable,
    *,
    example: Tensor | None = None,
    method: str = MIN_MAX,
    bits: Mapping[str, int] | None = None,
    output: str = "mask",
    by_reader: bool = True,
    input_range: tuple[float, float] | None = NORMALISED_RANGE,
    progress: bool = True,
) -> NPUGraph:
    """``model`` as the NPU's graph, calibrated: image (B, C, H, W), normalised -> mask or logits on their integer grid.

    ``calibration``: a few dozen pictures like those to come: batches or dicts of normalised tensors, or images, which
    are resized (``calibrate``). ``example`` (1, 3, H, W) gives the size; by default the network's own. ``method``: how
    ranges are chosen (``ranges.METHODS``, or "least_error"; docs/quantization.md compares them). ``bits``: a width, 8
    or 16, for operations by name. ``output``: "mask" puts a sigmoid behind the network, so that its integers are the
    mask in steps of 1/256, unless it ends in one; "logits" leaves it. ``by_reader``: ranges by what reads a tensor.
    ``input_range``: between what the pictures lie, by default ImageNet's normalisation; None takes what is seen. The
    weights are copied, ``model`` stays as it is; what was found is the graph's ``calibration``.

    ``QuantizationError`` for no pictures, one of another size or with NaN, a network in training mode or without a
    size, and for an operation without a rule.
    """
    if output not in OUTPUTS:
        raise QuantizationError(f"output='{output}' was asked for; there are 'mask' (with a sigmoid) and 'logits'.")
    check_method(method)
    check_float32(model)
    example = example_for(model, example)
    pictures = looked_into(calibration, example, input_range)
    graph = placed(model, example, bits=bits, output=output)
    found = calibrate(graph, pictures, method=method, by_reader=by_reader, input_range=input_range, progress=progress)
    graph.calibration = found
    graph.made_from = made_from(model, found, output=output, shape=tuple(example.shape), bits=bits or {})
    return graph.eval()


def placed(
    model: nn.Module, example: Tensor, *, bits: Mapping[str, int] | None = None, output: str = "mask"
) -> NPUGraph:
    """The network captured for images like ``example`` (1, 3, H, W), its quantisers yet to be calibrated."""
    captured = capture(model, example)
    if output == "mask":
        append_sigmoid(captured)
    size = int(example.shape[-2]), int(example.shape[-1])
    return NPUGraph(put_quantisers(captured, bits=bits), size, ends_in_mask=output == "mask")


def append_sigmoid(graph: fx.GraphModule) -> None:
    """Put a sigmoid behind the one output of a captured graph, unless it ends in one; names and sites of all else stay.

    ``QuantizationError`` for a network that ends in a softmax, whose classes are no mask.
    """
    end = next(node for node in graph.graph.nodes if node.op == "output")
    outputs = end.all_input_nodes
    if len(outputs) != 1:
        raise QuantizationError(
            f"output='mask' wants a network with one output, this one has {len(outputs)}; wrap it to return its logits."
        )
    (logits,) = outputs
    if logits.target is torch.ops.aten.softmax.int:
        raise QuantizationError(
            "output='mask' was asked for, and the network ends in a softmax over classes; give output='logits', which "
            "leaves it as it is."
        )
    if logits.target is torch.ops.aten.sigmoid.default:
        return
    with graph.graph.inserting_before(end):
        mask = graph.graph.call_function(torch.ops.aten.sigmoid.default, (logits,))
    mask.meta = {"val": logits.meta.get("val"), "nn_module_stack": outermost(logits)}
    end.replace_input_with(logits, mask)
    graph.recompile()


def outermost(node: fx.Node) -> dict[str, tuple[str, str]]:
    """The first entry of a node's stack of modules: the network itself."""
    return dict(list((node.meta.get("nn_module_stack") or {}).items())[:1])


def check_float32(model: nn.Module) -> None:
    """``QuantizationError`` for a network whose weights are no float32, and for one that is quantised already."""
    if isinstance(model, NPUGraph):
        raise QuantizationError("This is an NPU graph already; calibrate(graph, pictures) sets its ranges anew.")
    other = next((p.dtype for p in model.parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise QuantizationError(
            f"{model_name(model)} computes in {str(other).removeprefix('torch.')}; integers are counted in float32: "
            "give model.float()."
        )


def example_for(model: nn.Module, example: Tensor | None) -> Tensor:
    """One image as the network reads it; ``QuantizationError`` if nobody says its size."""
    try:
        (found,) = inputs_for(model, example)
    except (RewriteError, ValueError) as error:
        raise QuantizationError(f"No size to quantise {model_name(model)} at: {error} Give example=.") from None
    if found.ndim != 4:
        raise QuantizationError(f"example is one image (1, 3, H, W); found shape {tuple(found.shape)}.")
    return found[:1]


def looked_into(
    pictures: Iterable, example: Tensor, input_range: tuple[float, float] | None = NORMALISED_RANGE
) -> Iterable:
    """The pictures, which must be of the example's size, the first of them checked before anything that takes long."""
    iterator = iter(pictures)
    first = next(iterator, None)
    if first is None:
        raise QuantizationError(NO_PICTURES)
    for picture in checked_batch(first, tuple(example.shape[-2:]), channels=example.shape[1]):
        if input_range is not None:
            check_normalised(picture, input_range)
    return pictures if hasattr(pictures, "__len__") else chain([first], iterator)


def check_normalised(picture: Tensor, input_range: tuple[float, float] = NORMALISED_RANGE) -> None:
    """``QuantizationError`` for a picture beyond what a normalised one can be: 0 to 255 were given, for example."""
    low, high = float(picture.min()), float(picture.max())
    if low < input_range[0] - BEYOND or high > input_range[1] + BEYOND:
        raise QuantizationError(
            f"The first calibration picture goes from {low:.4g} to {high:.4g}, a normalised one lies between "
            f"{input_range[0]:.2f} and {input_range[1]:.2f}; give images (uint8 H×W×3), normalise it, (x / 255 − mean) "
            "/ std, or say with input_range= between what it lies."
        )


def made_from(
    model: nn.Module, found: Calibration, *, output: str, shape: tuple[int, ...], bits: Mapping[str, int]
) -> dict[str, str]:
    """What the graph depends on, for the manifest of what is made of it."""
    return {
        "network": model_name(model),
        "weights_sha256": weights_sha256(model),
        "rewrites": rewrites_of(model),
        "input_shapes": "x".join(map(str, shape)),
        "output": output,
        "bits": widths_in_words(bits),
        "calibration_pictures": str(found.pictures),
        "calibration_sha256": found.pictures_sha256,
        "calibration_method": f"{found.method}, {'by reader' if found.by_reader else 'all tensors alike'}",
        "code_sha256": code_sha256(),
    }


def rewrites_of(model: nn.Module) -> str:
    """The names of the rewrites that made parts of the network."""
    names = {module.rewritten_by for module in model.modules() if hasattr(module, "rewritten_by")}
    return ", ".join(sorted(names)) or "none"


def code_sha256() -> str:
    """A hash of the code that decides the graph and its encodings."""
    package = Path(__file__).parents[1]
    sources = [path for room in ("network", "rewrites", "quantization") for path in package.glob(f"{room}/*.py")]
    return files_sha256([*sorted(sources), TABLE])
