"""What the teacher says of a picture, computed once: float16 on disk, memory-mapped, by weights and by picture.

A file a picture in a folder a teacher. Numbers are rounded to float16 whether they come from disk or from the teacher,
and each picture is computed alone, so that a run does not depend on what was kept before it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from lumen_lab.distillation.views import ModuleView, Shown
from lumen_lab.errors import LumenError
from lumen_lab.network.checkpoints import model_name, weights_sha256
from lumen_lab.specs import replacing

LARGEST = 65504.0  # that float16 holds


class TeacherOutputs:
    """images (N, 3, H, W) -> the teacher's logits and what its modules at ``paths`` return, without gradients.

    ``folder`` keeps them; None computes them each time. A file that cannot be read is made again. ``hits`` and
    ``misses`` count pictures. ``LumenError`` for a teacher in training mode, and for a value beyond float16.
    """

    def __init__(self, teacher: nn.Module, paths: Iterable[str] = (), *, folder: str | Path | None = None):
        if any(module.training for module in teacher.modules()):
            raise LumenError("The teacher is in training mode, where no two answers are the same; call .eval().")
        self.paths = tuple(paths)
        self.view = ModuleView(copy.deepcopy(teacher), self.paths).requires_grad_(False)
        self.folder = None if folder is None else Path(folder) / teacher_key(teacher, self.paths)
        self.hits = self.misses = 0

    def __call__(self, images: Tensor) -> Shown:
        each = [self._of_one(image) for image in images]
        return {name: torch.stack([one[name] for one in each]).to(images.device) for name in each[0]}

    def _of_one(self, image: Tensor) -> Shown:
        path = None if self.folder is None else self.folder / f"{picture_key(image)}.safetensors"
        kept = read(path)
        self.hits, self.misses = self.hits + (kept is not None), self.misses + (kept is None)
        if kept is None:
            with torch.no_grad():
                shown = self.view.to(image.device)(image[None])
            kept = {name: in_float16(name, value[0]) for name, value in shown.items()}
            if path is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(path) as temporary:
                    safetensors.torch.save_file(kept, temporary)
        return {name: value.float() for name, value in kept.items()}


def read(path: Path | None) -> Shown | None:
    """The values of a file, mapped into memory; None if there is none, or none that can be read."""
    try:
        return safetensors.torch.load_file(path) if path is not None and path.exists() else None
    except (safetensors.SafetensorError, OSError):
        return None


def in_float16(name: str, value: Tensor) -> Tensor:
    """The value as it is kept; ``LumenError`` where float16 cannot hold it."""
    largest = float(value.abs().max()) if value.numel() else 0.0
    if not largest <= LARGEST:
        raise LumenError(
            f"The teacher's '{name}' reaches {largest:.4g}, and its outputs are kept in float16, up to {LARGEST:g}; "
            "leave that tap out."
        )
    return value.detach().cpu().half().contiguous()


def teacher_key(teacher: nn.Module, paths: Iterable[str]) -> str:
    """What the outputs depend on besides the picture: the kind of network, its weights, and what is asked of it."""
    said = "\n".join([model_name(teacher), weights_sha256(teacher), *paths])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def picture_key(image: Tensor) -> str:
    """A hash of a picture's numbers and of its shape."""
    digest = hashlib.sha256(str(tuple(image.shape)).encode())
    digest.update(image.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
