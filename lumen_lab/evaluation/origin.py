"""What decides the scores of an evaluation, in words: two evaluations with the same words give the same numbers."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lumen_lab import images, metrics, prediction
from lumen_lab.datasets.sample import Sample
from lumen_lab.errors import ArtifactError, ImageError
from lumen_lab.evaluation.task import MaskFolder, Task, image_named
from lumen_lab.prediction import artifact_manifest
from lumen_lab.specs import Manifest, file_sha256, files_sha256, plain, tool_versions

TOOLS = (
    *("torch", "torchvision", "timm", "onnxruntime", "onnxruntime-qnn"),  # which predict
    *("numpy", "scipy", "pillow", "pysodmetrics", "opencv-python-headless", "scikit-image"),  # which score
)
"""The distributions whose versions decide scores."""

MASKS = "first, middle and last mask"
MASK_FIELDS = 8  # a side; the mean of a field moves by less than a grey level where single pixels round otherwise
SAME_WITHIN_LEVELS = 2


def origin_of(task: Task) -> Manifest:
    """The manifest of the scores, but for the hash of their file."""
    count = len(task.names)
    samples = [task.sample(index) for index in sorted({0, count // 2, count - 1})]
    made_from = {
        "predictor": _predictor(task),
        **_coarse_masks(task, samples),
        "size": str(task.size),
        "hce": str(task.hce),
        "resampler": images.RESAMPLER,
        "images": str(count),
        "names": _sha256("\0".join(task.names).encode("utf-8", "surrogatepass")),
        "first, middle and last sample": _sha256(*(part for sample in samples for part in _bytes(sample))),
        "scoring code": _scoring_code(),
        **{f"dataset {key}": str(value) for key, value in task.dataset.identity().items()},
    }
    return Manifest("scores", made_from, tool_versions(*TOOLS), (), (), {})


def differences(there: Manifest, here: Manifest) -> str:
    """What two origins differ in, as a phrase; "" if they are the same."""
    before, now = there.made_from | there.versions, here.made_from | here.versions
    found = [_difference(key, before.get(key, ""), now.get(key, "")) for key in sorted(before.keys() | now.keys())]
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", "; ".join(filter(None, found)))


def _difference(key: str, before: str, now: str) -> str:
    if before == now:
        return ""
    if key != MASKS:
        return f"{key}: {before or 'not said'} there, {now or 'not said'} here"
    try:
        levels = [np.array(list(bytes.fromhex(masks))) for masks in (before, now)]
        apart = np.abs(levels[0] - levels[1]).max()
    except (TypeError, ValueError):
        return f"{key}: not of the same number of images"
    return f"{key}: up to {apart} grey levels apart" if apart > SAME_WITHIN_LEVELS else ""


def _predictor(task: Task) -> str:
    """Weights and files by their hash; of a function there is only its name."""
    if isinstance(task.predictor, MaskFolder):
        files = sorted(task.predictor.files.items())
        return f"masks {_sha256(*(f'{name} {_mask_sha256(path)} '.encode() for name, path in files))}"
    if isinstance(task.predictor, str | Path):
        return f"file {_artifact_sha256(Path(task.predictor))}"
    if isinstance(task.predictor, nn.Module):
        from lumen_lab.network.checkpoints import weights_sha256

        return f"network {type(task.predictor).__name__}, weights {weights_sha256(task.predictor)}"
    return f"function {getattr(task.predictor, '__qualname__', type(task.predictor).__name__)}"


def _mask_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise ImageError(f"Cannot read the mask {path} ({error.strerror or error}); write it again.") from None


def _coarse_masks(task: Task, samples: list[Sample]) -> dict[str, str]:
    """Means of 8 × 8 fields of the masks, one byte each, in hex: the code and settings around weights, and all that a
    function may hold, have no hash. Files have one, and no masks here."""
    if isinstance(task.predictor, MaskFolder | str | Path):
        return {}
    masks = [torch.from_numpy(mask)[None] for mask in task.masks(samples)]
    means = torch.cat([nn.functional.adaptive_avg_pool2d(mask, MASK_FIELDS) for mask in masks])
    return {MASKS: (255 * means).round().byte().numpy().tobytes().hex()}


def _artifact_sha256(path: Path) -> str:
    """Of every file that the artefact consists of: context binaries and external weights lie beside the ONNX file."""
    import onnx

    from lumen_lab.deploy.model_file import content_hashes

    manifest = artifact_manifest(path)
    if manifest is not None:
        return _sha256(json.dumps(sorted(manifest.files.values())).encode())
    try:
        hashes = content_hashes(path, onnx.load(path, load_external_data=False))
    except Exception as error:  # a damaged file fails in as many ways as there are parsers
        raise ArtifactError(f"{path} cannot be read as an ONNX model ({str(error)[:200]}); export it again.") from None
    return _sha256(json.dumps(sorted(hashes.values())).encode())


def _bytes(sample: Sample) -> tuple[bytes, bytes, bytes]:
    with image_named(sample.name):
        held = json.dumps([sample.image.shape, sample.matte.shape, sample.attributes], default=plain).encode()
    return held, np.ascontiguousarray(sample.image).tobytes(), np.ascontiguousarray(sample.matte).tobytes()


def _scoring_code() -> str:
    """A hash of the code from a file or logits to a score: a row made by other code must not meet these."""
    files = [Path(images.__file__), Path(prediction.__file__), *sorted(Path(metrics.__file__).parent.glob("*.py"))]
    return files_sha256(files)


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
