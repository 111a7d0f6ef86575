"""Predictors and data sets that other processes can import: they log every call, wait, fail or die as they are told."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lumen_lab.datasets import ComposedScenes, Sample
from lumen_lab.datasets.drawn import drawn_sources

SIZE = (48, 64)
LENGTH = 12
LOOKS = 3  # calls of a predictor that tell it from others, before any image is scored


def scenes(length=LENGTH, **options):
    """A few small scenes."""
    bank = drawn_sources(pictures=5, side_px=48)
    return ComposedScenes(bank, **{"split": "test", "size": SIZE, "length": length, "seed": 5} | options)


@dataclass
class Logged:
    """Logits that grow with brightness. Appends its process id to ``log`` at every call.

    It fails, dies or stalls for a minute at that call of its process, counted from 1.
    """

    log: Path
    fails_at: int | None = None
    dies_at: int | None = None
    stalls_at: int | None = None
    bias: float = 0.0

    def __call__(self, image: np.ndarray) -> np.ndarray:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")
        calls = len(calls_by(self.log, os.getpid()))
        if calls == self.fails_at:
            raise ZeroDivisionError("no more")
        if calls == self.dies_at:
            os._exit(3)
        if calls == self.stalls_at:
            time.sleep(60)
        return 3 * image.mean(axis=1, keepdims=True) + self.bias


class LoggedNetwork(nn.Module):
    """The same as a network, whose one weight is 1."""

    def __init__(self, logged: Logged):
        super().__init__()
        self.logged, self.weight = logged, nn.Parameter(torch.ones(1))
        self.eval()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.from_numpy(self.logged(image.numpy()))


def calls_by(log: Path, process: int | None = None) -> list[int]:
    """The process of every call so far, or only those of one process."""
    made = [int(line) for line in Path(log).read_text().split()] if Path(log).exists() else []
    return [pid for pid in made if process in (None, pid)]


@dataclass
class Listed:
    """A data set of given samples, as a user may write one."""

    samples: list[Sample]
    words: str = "listed"

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples[index].name

    def sample(self, index: int) -> Sample:
        return self.samples[index]

    def identity(self) -> dict[str, str]:
        return {"kind": self.words}


def disc(name: str, *, attributes: dict | None = None, seed: int = 0) -> Sample:
    """A bright disc on a dark ground; no matte value is just 0.5, which a PNG would lift over it."""
    rows, columns = np.mgrid[:40, :56]
    matte = np.clip(12.3 - np.hypot(rows - 20, columns - 28), 0, 1).astype(np.float32)
    noise = np.random.default_rng(seed).integers(0, 60, (40, 56, 3))
    image = np.uint8(noise + 150 * matte[..., None])
    return Sample(name, image, matte, {"thin": False} if attributes is None else attributes)
