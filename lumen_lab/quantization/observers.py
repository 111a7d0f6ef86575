"""What a tensor's values are like, seen once, picture by picture, in memory that does not grow with the pictures."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lumen_lab.quantization.readers import ANYTHING, Reader

BINS = 2048
MOST_COUNTED = 2**18  # of one tensor of one picture; of a larger one every k-th value is counted, k times
FINEST = 2.0**-20  # bins are not narrower than this share of the largest magnitude, times 1 / BINS: float32 ends there
SMALLEST_WIDTH = 2.0**-120
MOMENTUM = 0.9


class Histogram:
    """Counts of values in bins of a power of two, at whole multiples of their width, which doubles when values go
    beyond: pairs of bins are then merged.

    Bins at multiples of a power of two merge without a remainder, so that the histogram is a function of the values
    alone, not of their order nor of how they came in batches. ``low`` and ``high`` are the least and the greatest value
    of all.
    """

    def __init__(self, bins: int = BINS):
        self.bins, self.width, self.first = bins, 0.0, 0
        self.counts = torch.zeros(bins, dtype=torch.float64)
        self.low, self.high, self.zeros = math.inf, -math.inf, 0.0

    def add(self, values: Tensor) -> None:
        """Count ``values`` (any shape, finite)."""
        values = values.detach().reshape(-1)
        if not values.numel():
            return
        self._widen(*(float(end) for end in torch.aminmax(values)))
        every = -(-values.numel() // MOST_COUNTED) | 1  # odd: rows of even length are not met at one place
        counted = values[::every]
        index = (counted / self.width).floor_().long() - self.first
        self.counts += every * torch.bincount(index, minlength=self.bins).cpu()
        self.zeros += every * float((counted == 0).sum())

    def _widen(self, low: float, high: float) -> None:
        """Make room for values from ``low`` to ``high``."""
        self.low, self.high = min(self.low, low), max(self.high, high)
        width = self.width or 2.0 ** math.floor(math.log2(self._narrowest()))
        while width < self._narrowest() or math.floor(self.high / width) - math.floor(self.low / width) >= self.bins:
            width *= 2
        first = math.floor(self.low / width)
        if self.width and (width, first) != (self.width, self.first):
            self.counts = self._moved(self.counts, width, first)
        self.width, self.first = width, first

    def _narrowest(self) -> float:
        return max(FINEST * max(abs(self.low), abs(self.high)), SMALLEST_WIDTH) / self.bins * 2

    def _moved(self, counts: Tensor, width: float, first: int) -> Tensor:
        """``counts`` in bins of ``width``, which is at least as wide as before, from bin ``first`` on."""
        doublings = round(math.log2(width / self.width))
        place = ((torch.arange(self.bins) + self.first) >> doublings) - first
        kept = counts > 0  # bins beyond the greatest value are empty and may fall outside
        return torch.zeros_like(counts).index_add_(0, place[kept], counts[kept])

    def centres(self) -> Tensor:
        """The middle of every bin, float64, those at the ends no farther out than a value was."""
        middle = (torch.arange(self.bins, dtype=torch.float64) + self.first + 0.5) * self.width
        return middle.clamp(self.low, self.high)


class Observer(nn.Module):
    """Stands in a quantiser's place and hands values on as they are, having looked at them.

    ``seen``: the histogram of what the ``reader`` tells apart; ``lowest`` and ``highest``: of the values themselves.
    ``average``: (low, high) by a moving average over pictures, one call of ``end_picture`` each. With
    ``shape=False`` only ends are kept, which is quicker.
    """

    def __init__(self, reader: Reader = ANYTHING, *, shape: bool = True):
        super().__init__()
        self.reader, self.shape = reader, shape
        self.seen = Histogram()
        self.lowest, self.highest = math.inf, -math.inf
        self.average: tuple[float, float] | None = None
        self.picture = (math.inf, -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        if not math.isfinite(high - low):
            self.picture = (math.nan, math.nan)
            return x
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        told = self.reader.told_apart(x.detach())
        if self.shape:
            self.seen.add(told)
        ends = torch.aminmax(told) if told is not x else (low, high)
        low, high = (float(end) for end in ends)
        self.seen.low, self.seen.high = min(self.seen.low, low), max(self.seen.high, high)
        self.picture = min(self.picture[0], low), max(self.picture[1], high)
        return x

    def end_picture(self) -> tuple[float, float]:
        """Take the picture into the moving average; (low, high) of the picture alone, NaN if any value was."""
        picture, self.picture = self.picture, (math.inf, -math.inf)
        before = picture if self.average is None else self.average
        self.average = tuple(MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(before, picture, strict=True))
        return picture
