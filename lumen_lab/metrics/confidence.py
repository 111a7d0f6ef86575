"""How far a prediction's confidence can be trusted: a histogram of it, and how much of each bin is foreground."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lumen_lab.errors import MetricError
from lumen_lab.specs import Record

BINS = 20


@dataclass(frozen=True)
class Reliability(Record):
    """Pixels of one or more predictions in ``BINS`` equal bins of confidence p; ``pooled`` adds them up.

    For each bin: ``pixels`` in it, the sum of their ``confidence``, and how many of them are ``foreground``. A bin
    holds its lower end; the last one holds 1 too.
    """

    pixels: tuple[int, ...]
    confidence: tuple[float, ...]
    foreground: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.pixels), len(self.confidence), len(self.foreground)}
        if lengths != {BINS}:
            raise MetricError(f"A reliability has {BINS} bins; found {sorted(lengths)}.")

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: Σ (pixels of the bin / all pixels) · |foreground share − mean confidence|.

        Guo et al., On calibration of modern neural networks, ICML 2017, eq. 3, with the pixel as the sample and p as
        the confidence in "foreground". None without a pixel.
        """
        total = sum(self.pixels)
        gaps = [abs(found - claimed) for found, claimed in zip(self.foreground, self.confidence)]
        return sum(gaps) / total if total else None

    def rows(self) -> list[dict[str, object]]:
        """One line a bin; shares and means are None where the bin is empty."""
        total = sum(self.pixels)
        rows = []
        for number, (pixels, confidence, foreground) in enumerate(zip(self.pixels, self.confidence, self.foreground)):
            rows.append(
                {
                    "from": number / BINS,
                    "to": (number + 1) / BINS,
                    "pixels": pixels,
                    "share": pixels / total if total else None,
                    "confidence": confidence / pixels if pixels else None,
                    "foreground": foreground / pixels if pixels else None,
                }
            )
        return rows


def counted(prediction: np.ndarray, mask: np.ndarray) -> Reliability:
    """The bins of a checked prediction, float (H, W) in [0, 1], against its mask, bool (H, W)."""
    number = np.minimum((prediction * BINS).astype(np.intp), BINS - 1).ravel()
    pixels = np.bincount(number, minlength=BINS)
    confidence = np.bincount(number, weights=prediction.ravel(), minlength=BINS)
    foreground = np.bincount(number[mask.ravel()], minlength=BINS)
    return Reliability(tuple(pixels.tolist()), tuple(confidence.tolist()), tuple(foreground.tolist()))


def pooled(parts: Iterable[Reliability]) -> Reliability:
    """All of ``parts`` as one, their pixels together, so that a large image weighs more; without a part, empty bins."""
    parts = list(parts)
    columns = [[getattr(part, field) for part in parts] for field in ("pixels", "confidence", "foreground")]
    return Reliability(*(tuple(map(sum, zip(*column))) or (0,) * BINS for column in columns))
