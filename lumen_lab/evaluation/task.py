"""What is scored: a data set, what predicts its masks, and the work on one image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import nn

from lumen_lab.datasets.pairing import list_pictures, pairing_key
from lumen_lab.datasets.sample import Sample
from lumen_lab.errors import ArtifactError, DatasetError, LumenError
from lumen_lab.evaluation.rows import write_row
from lumen_lab.images import load_mask
from lumen_lab.metrics import score_mask
from lumen_lab.prediction import (
    Predictor,
    artifact_function,
    artifact_manifest,
    checked_size,
    predict_all,
    working_size,
)

EMULATION_BATCH = 16  # images a start of the NPU emulation, which takes seconds


class Dataset(Protocol):
    """What ``evaluate`` reads: samples by index, and words that tell this data set from another."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def sample(self, index: int) -> Sample: ...

    def identity(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class MaskFolder:
    """Masks on disk: the name of a sample → the file that holds its mask."""

    folder: Path
    files: dict[str, Path]

    def mask(self, name: str) -> np.ndarray:
        """float32 (H, W) in [0, 1]."""
        return load_mask(self.files[name], any_levels=True)


@dataclass(frozen=True)
class Task:
    """All that a process needs to score any image of the data set; ``batch_size`` are predicted in one call."""

    predictor: Predictor | MaskFolder
    dataset: Dataset
    names: tuple[str, ...]
    size: tuple[int, int] | None
    hce: bool
    batch_size: int = 1

    def with_session(self, *, threads: int | None = None) -> Task:
        """The task as one process works on it: an ONNX file is loaded once, and runs in so many threads."""
        if not isinstance(self.predictor, str | Path) or self.batch_size > 1:
            return self
        return replace(self, predictor=artifact_function(Path(self.predictor), threads=threads))

    def lines(self, indices: list[int]) -> Iterator[bytes]:
        """One line of text an image, as soon as it is scored; an error bears the name of its image."""
        for batch in self.batches(indices):
            samples = [self.sample(index) for index in batch]
            for index, sample, mask in zip(batch, samples, self.masks(samples), strict=True):
                with image_named(sample.name):
                    line = write_row(index, sample, score_mask(mask, sample.matte, hce=self.hce))
                yield line

    def batches(self, indices: list[int]) -> list[list[int]]:
        """The indices in lists of ``batch_size``."""
        return [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]

    def sample(self, index: int) -> Sample:
        """Sample ``index``, which must have the name that the data set gives it."""
        with image_named(self.names[index]):
            sample = self.dataset.sample(index)
            if sample.name != self.names[index]:
                raise DatasetError(f"sample({index}) is named {sample.name!r}; name({index}) must say the same.")
        return sample

    def masks(self, samples: list[Sample]) -> list[np.ndarray]:
        """The mask of each sample, float32 (H, W) in [0, 1]; an error bears the names of the first and the last."""
        with image_named(" … ".join(dict.fromkeys((samples[0].name, samples[-1].name)))):
            if isinstance(self.predictor, MaskFolder):
                return [self.predictor.mask(sample.name) for sample in samples]
            return predict_all(self.predictor, [sample.image for sample in samples], size=self.size)


def prepare(predictor: Predictor, dataset: Dataset, *, size: tuple[int, int] | None, hce: bool) -> Task:
    """The task, with whatever can be refused before the work begins refused now."""
    _refuse_no_dataset(dataset)
    size = None if size is None else checked_size(size)
    names = tuple(dataset.name(index) for index in range(len(dataset)))
    if not names:
        raise DatasetError("There is no image to evaluate on; the data set is empty.")
    _refuse_twins(names)
    if not isinstance(predictor, str | Path):
        return Task(predictor, dataset, names, size or tuple(working_size(predictor)), hce)
    path = Path(predictor)
    if path.is_dir():
        if size is not None:
            raise LumenError(f"size={size} was asked for, but {path} holds masks of their images' size; leave it out.")
        return Task(_paired_masks(path, names), dataset, names, None, hce)
    if not path.is_file():
        raise ArtifactError(f"Asked to evaluate {path}: there is no such file or folder of masks.")
    manifest = artifact_manifest(path)
    batch_size = EMULATION_BATCH if manifest and manifest.chip is not None else 1
    return Task(path, dataset, names, size or tuple(working_size(path)), hce, batch_size)


def _refuse_no_dataset(dataset: object) -> None:
    needed = ("__len__", "name", "sample", "identity")
    lacks = [f"{name}()" for name in needed if not callable(getattr(dataset, name, None))]
    if lacks:
        raise DatasetError(
            f"A {type(dataset).__name__} was given to be evaluated on, which has no {', '.join(lacks)}; a data set has "
            "__len__(), name(index), sample(index) and identity(), as PairedFolder and ComposedScenes do."
        )


def on_accelerator(predictor: Predictor | MaskFolder) -> bool:
    """Whether it is a network whose parameters lie anywhere but on the CPU."""
    return isinstance(predictor, nn.Module) and any(p.device.type != "cpu" for p in predictor.parameters())


@contextmanager
def image_named(name: str) -> Iterator[None]:
    """Errors inside say which image they are about; what is no ``LumenError`` becomes one, with its cause."""
    try:
        yield
    except LumenError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise LumenError(f"{name}: {type(error).__name__}: {error}") from error


def _paired_masks(folder: Path, names: tuple[str, ...]) -> MaskFolder:
    """A mask for every name, by ``pairing_key``; masks of other names are left alone."""
    found, _ = list_pictures(folder)
    missing = [name for name in names if pairing_key(name) not in found]
    if missing:
        raise DatasetError(
            f"Asked to score the masks in {folder}: of its {len(found)} pictures none is for {len(missing)} of the "
            f"{len(names)} images (first: {', '.join(missing[:5])}), and a mean without them would flatter; a mask has "
            "the name of its image."
        )
    _refuse_twins([pairing_key(name) for name in names])
    return MaskFolder(folder, {name: folder / found[pairing_key(name)] for name in names})


def _refuse_twins(names: tuple[str, ...] | list[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise DatasetError(
            f"{len(twice)} names of the data set are given to several images (first: {', '.join(twice[:5])}); a row of "
            "scores, and a mask in a folder, need a name of their own."
        )
