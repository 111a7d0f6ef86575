"""A photograph in, a mask of its own size out: the same door for a network, an ONNX file and a compiled binary."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit, logit
from torch import nn

from lumen_lab.deploy.report import CompileReport
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.images import check_image, resize_mask, to_network_input
from lumen_lab.network.checkpoints import model_name
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.specs import Manifest, TensorSpec, manifest_path

PROBABILITIES = (
    "The predictor's values over an image lie in [0, 1] and come near both: these look like probabilities; give "
    "logits, of which the sigmoid is taken here."
)
MASK = "mask"
SURE = 2.0**-40  # the least probability of which a logit is taken: none is infinite, and the sigmoid gives 0 or 1 back
QUANTISED = "qdq"  # the kind of a file whose graph must run as it stands: fused INT8 kernels saturate on some machines
NEAR_END = 0.05  # of 0 and of 1: what a probability comes to wherever a mask is sure
INTEGERS = ("uint", "int")
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt")  # endings of files without a network in them
LOADED_BY = {  # the kind of a file of weights: the door that makes a network of it
    "weights": "load_network(config, weights=path)",
    "npu graph": "load_graph(path, network) of lumen_lab.quantization.graph_file, network being the rewritten one",
}
Predictor = nn.Module | str | Path | Callable[[np.ndarray], np.ndarray]


def predict(
    model_or_artifact: Predictor | CompileReport, image: np.ndarray, *, size: tuple[int, int] | None = None
) -> np.ndarray:
    """The mask of ``image`` (uint8, (H, W, 3)): float32 (H, W) in [0, 1], at the photograph's own size.

    ``model_or_artifact``: a network or an ``NPUGraph`` of it; an ``.onnx`` file, run on the CPU; the ``.onnx`` of a
    compiled context binary, or the ``CompileReport`` of one, run in the NPU emulation; or a function from a normalised
    image (1, 3, h, w) to logits (1, 1, h, w). ``size`` is the (h, w) that it works at; without it, the network's
    ``config.image_size`` or the artefact's contract decides. An artefact with integer ends is given the image in the
    encoding of its manifest, and its output is read by it; an output called "mask" is the probability itself. What
    looks like probabilities instead of logits is warned of.
    """
    return predict_all(model_or_artifact, [image], size=size)[0]


def predict_all(
    model_or_artifact: Predictor | CompileReport, images: list[np.ndarray], *, size: tuple[int, int] | None = None
) -> list[np.ndarray]:
    """``predict`` for several photographs; a compiled binary is loaded once for all of them."""
    model_or_artifact = runnable(model_or_artifact)
    images = [check_image(image) for image in images]
    size = working_size(model_or_artifact) if size is None else checked_size(size)
    inputs = [to_network_input(image, size=size) for image in images]
    logits = [checked_logits(output) for output in run_all(model_or_artifact, inputs)]
    return [
        resize_mask(expit(output[0, 0]), size=image.shape[:2]) for output, image in zip(logits, images, strict=True)
    ]


def runnable(given: Predictor | CompileReport) -> nn.Module | Path | Callable[[np.ndarray], np.ndarray]:
    """What can be run of what was given: of a report its context. ``LumenError`` for what cannot be.

    A file of weights has no network in it: the sentence says which door reads it.
    """
    given = given.context_path if isinstance(given, CompileReport) else given
    if isinstance(given, str | Path):
        refuse_weights(Path(given))
        return Path(given)
    if not callable(given):
        raise LumenError(
            f"predict takes a network, the path of an .onnx file, a CompileReport or a function, found a "
            f"{type(given).__name__}; give one of these first, then the image."
        )
    return given


def refuse_weights(path: Path) -> None:
    """``ArtifactError`` for a file of weights, with the door that makes a network of it."""
    if path.suffix.lower() not in WEIGHTS:
        return
    kind = Manifest.load(manifest_path(path)).kind if manifest_path(path).is_file() else ""
    either = f"{LOADED_BY['weights']}; or, if save_graph wrote it, with {LOADED_BY['npu graph']}"
    raise ArtifactError(
        f"{path} holds weights and no network to run; load it with {LOADED_BY.get(kind, either)}, and predict with "
        "what that returns."
    )


def checked_logits(logits: np.ndarray) -> np.ndarray:
    """The logits themselves, (1, 1, h, w) and finite; else ``LumenError``."""
    if logits.ndim != 4 or logits.shape[:2] != (1, 1):
        raise LumenError(f"A mask network gives logits (1, 1, h, w), this one gives {logits.shape}; wrap its output.")
    if not np.isfinite(logits).all():
        raise LumenError("The network's output holds NaN or infinity; look at its weights and at its input's range.")
    warn_of_probabilities(logits)
    return logits


def warn_of_probabilities(logits: np.ndarray) -> None:
    """A warning if all values lie in [0, 1] and come near both ends; the sigmoid of such is grey, 0.5 to 0.73.

    Logits of a mask with a background are below 0 there. Python shows one warning of one place once.
    """
    low, high = float(logits.min(initial=np.inf)), float(logits.max(initial=-np.inf))
    if 0 <= low < NEAR_END and 1 - NEAR_END < high <= 1:
        warnings.warn(PROBABILITIES, stacklevel=2)


def checked_size(size: tuple[int, int]) -> tuple[int, int]:
    """The size itself as (H, W); ``LumenError`` if it is no pair of whole numbers above 0."""
    pair = tuple(size) if isinstance(size, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(side, Integral) and side > 0 for side in pair):
        raise LumenError(f"size={size!r} was asked for; give (H, W) in pixels, such as (1024, 1024), or None.")
    return pair


def working_size(model_or_artifact: Predictor | CompileReport) -> tuple[int, int]:
    """The (H, W) a network or artefact states for itself; ``LumenError`` if it states none."""
    model_or_artifact = runnable(model_or_artifact)
    if isinstance(model_or_artifact, str | Path):
        return artifact_size(model_or_artifact)
    if isinstance(model_or_artifact, NPUGraph):
        return model_or_artifact.size
    config = getattr(model_or_artifact, "config", None)
    if config is None:
        name = getattr(model_or_artifact, "__name__", None) or model_name(model_or_artifact)
        raise LumenError(f"{name} does not state its image size; pass size=(H, W).")
    return config.image_size


def artifact_size(path: Path) -> tuple[int, int]:
    """What the manifest states, or the file itself where it has none (an ONNX file from elsewhere)."""
    manifest = artifact_manifest(path)
    return manifest.inputs[0].shape[-2:] if manifest else onnx_size(path)


def artifact_manifest(path: Path) -> Manifest | None:
    """The manifest beside an artefact, its files checked; None for an ONNX file without one."""
    return Manifest.beside(path) if manifest_path(path).is_file() else None


def onnx_size(path: Path) -> tuple[int, int]:
    """The (H, W) of an ONNX file's first input; ``ArtifactError`` if the file is missing, broken or of open shape."""
    shape = onnx_session(path).get_inputs()[0].shape
    if len(shape) != 4 or not all(isinstance(length, int) for length in shape):
        raise ArtifactError(f"{path} takes {shape}, not one fixed (1, 3, H, W); pass size=(H, W) or export it again.")
    return shape[-2], shape[-1]


def run_all(model_or_artifact: Predictor, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Logits (1, 1, h, w) for each normalised image (1, 3, h, w)."""
    if isinstance(model_or_artifact, nn.Module):
        return [run_network(model_or_artifact, value) for value in inputs]
    if isinstance(model_or_artifact, str | Path):
        return run_artifact(Path(model_or_artifact), inputs)
    return [np.asarray(model_or_artifact(value)) for value in inputs]


def run_network(model: nn.Module, value: np.ndarray) -> np.ndarray:
    """One forward pass without gradients, in the network's own dtype and on its device."""
    if any(module.training for module in model.modules()):
        raise LumenError("The network is in training mode, where batch statistics decide the mask; call .eval() first.")
    image = torch.from_numpy(value)
    parameter = next(model.parameters(), image)
    with torch.no_grad():
        output = model(image.to(parameter)).float().cpu().numpy()
    return (
        probability_logits(output) if isinstance(model, NPUGraph) and model.made_from.get("output") == MASK else output
    )


def run_artifact(path: Path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of a compiled context, from the emulation, or of any other ONNX file, from the CPU."""
    manifest = artifact_manifest(path)
    if manifest is None or manifest.chip is None:
        run = artifact_function(path)
        return [run(value) for value in inputs]
    from lumen_lab.deploy.htp import emulate

    found = emulate(path, [in_encoding(value, manifest.inputs[0], path) for value in inputs])
    return [as_logits(next(iter(outputs.values())), manifest.outputs[0], path) for outputs in found]


def artifact_function(path: Path, *, threads: int | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """An ONNX file, loaded once to run on the CPU: from a normalised image (1, 3, h, w) to logits (1, 1, h, w)."""
    manifest = artifact_manifest(path)
    session = onnx_session(path, threads=threads, as_it_stands=manifest is not None and manifest.kind == QUANTISED)
    given, returned = (manifest.inputs[0], manifest.outputs[0]) if manifest else (None, None)

    def run(value: np.ndarray) -> np.ndarray:
        return as_logits(run_session(session, path, in_encoding(value, given, path)), returned, path)

    return run


def as_logits(output: np.ndarray, spec: TensorSpec | None, path: Path) -> np.ndarray:
    """An output as logits: integers dequantised, and of an output called "mask" the inverse of the sigmoid."""
    value = real_values(output, spec, path)
    if spec is None or spec.name != MASK:
        return value
    return probability_logits(value)


def probability_logits(mask: np.ndarray) -> np.ndarray:
    """The logits of a mask of probabilities, none of them infinite."""
    return logit(np.clip(mask.astype(np.float64), SURE, 1 - SURE)).astype(np.float32)


def in_encoding(value: np.ndarray, spec: TensorSpec | None, path: Path) -> np.ndarray:
    """A normalised image as the integers that ``spec`` asks for: ONNX QuantizeLinear; as it is for a float input."""
    if spec is None or not spec.dtype.startswith(INTEGERS):
        return value
    scale, zero_point = encoding_of(spec, path)
    bounds = np.iinfo(spec.dtype)
    return np.clip(np.rint(value / scale) + zero_point, bounds.min, bounds.max).astype(spec.dtype)


def real_values(value: np.ndarray, spec: TensorSpec | None, path: Path) -> np.ndarray:
    """An output as float32: integers by the encoding of ``spec`` (ONNX DequantizeLinear)."""
    if spec is None or not spec.dtype.startswith(INTEGERS):
        return value.astype(np.float32)
    scale, zero_point = encoding_of(spec, path)
    return (value.astype(np.int64) - zero_point).astype(np.float32) * scale


def encoding_of(spec: TensorSpec, path: Path) -> tuple[np.float32, int]:
    """(scale, zero point) of an integer input or output; ``ArtifactError`` if the manifest does not say."""
    if spec.scale is None or spec.zero_point is None:
        raise ArtifactError(
            f"{path} has the {spec.dtype} tensor {spec.name}, and its manifest does not say which numbers its "
            "integers stand for; export it again."
        )
    return np.float32(spec.scale), spec.zero_point


def run_session(session, path: Path, value: np.ndarray) -> np.ndarray:
    """The first output for one image; ``ArtifactError`` if the file does not take an image of this size and type."""
    try:
        return session.run(None, {session.get_inputs()[0].name: value})[0]
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ArtifactError(
            f"{path} cannot be run on an image of {value.shape[-2:]} ({value.dtype}): {reason}"
        ) from None


def onnx_session(path: Path, *, threads: int | None = None, as_it_stands: bool = False):
    """An onnxruntime session on the CPU with so many threads, or as many as it likes.

    ``as_it_stands``: no operation of the graph is fused or folded. ``ArtifactError`` if there is no such file or it is
    no ONNX model.
    """
    import onnxruntime

    if not path.is_file():
        raise ArtifactError(f"Asked to predict with {path}, which is not there; export or compile it first.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    if as_it_stands:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ArtifactError(f"{path} is not a model that onnxruntime can run: {str(error)[:200]}") from None
