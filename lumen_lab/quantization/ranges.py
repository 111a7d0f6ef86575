"""From a histogram to the range that an encoding reaches over: the field's methods, and a choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch

from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.observers import Observer

Range = tuple[float, float]
OUTSIDE = 1e-4  # share of values that the percentile leaves outside, half of it at each end
CANDIDATES = 100  # of each end


class Seen:
    """An observer's histogram as arrays over the bins that hold something: ``centres`` and ``counts``, and what the
    tensor's reader makes of a value in the middle of each, ``curve``, with the square of its slope, ``slope2``."""

    def __init__(self, observer: Observer):
        histogram = observer.seen
        counts = histogram.counts
        kept = torch.nonzero(counts).flatten()
        span = slice(int(kept[0]), int(kept[-1]) + 1) if len(kept) else slice(0, 0)
        centres = histogram.centres()[span]
        self.low, self.high, self.average = histogram.low, histogram.high, observer.average
        self.reader, self.zeros = observer.reader, histogram.zeros
        self.width, self.centres, self.counts = histogram.width, centres.numpy(), counts[span].numpy()
        self.bins = np.arange(span.start, span.stop) + histogram.first  # a value x is in bin ⌊x / width⌋
        curve, slope2 = observer.reader.curve(centres)
        self.curve, self.slope2 = curve.numpy(), slope2.numpy()

    @cached_property
    def rounded(self) -> np.ndarray:
        """The counts without the values that are 0, which every encoding writes exactly: ReLU leaves many."""
        return self.counts - np.where(self.bins == 0, self.zeros, 0.0)

    @cached_property
    def total(self) -> float:
        return float(self.counts.sum())

    def error(self, low: np.ndarray, high: np.ndarray, *, bits: int = 8) -> np.ndarray:
        """The sum of squared errors, as the reader sees them, of clipping to each range and rounding in it.

        Within a range of steps Δ, rounding leaves Δ² / 12 times the slope's square; beyond it a value is moved to the
        end: Σ (f(x) − f(end))², from sums of f and f² over the bins.
        """
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        inside = np.searchsorted(self.centres, low), np.searchsorted(self.centres, high, side="right")
        sums = [np.concatenate([[0.0], np.cumsum(self.counts * self.curve**power)]) for power in range(3)]
        weight = np.concatenate([[0.0], np.cumsum(self.rounded * self.slope2)])
        at_low, at_high = (np.interp(end, self.centres, self.curve) for end in (low, high))
        below = sums[2][inside[0]] - 2 * at_low * sums[1][inside[0]] + at_low**2 * sums[0][inside[0]]
        beyond = [total[-1] - total[inside[1]] for total in sums]
        above = beyond[2] - 2 * at_high * beyond[1] + at_high**2 * beyond[0]
        step = (high - low) / (2**bits - 1)
        return np.maximum(below, 0) + np.maximum(above, 0) + step**2 / 12 * (weight[inside[1]] - weight[inside[0]])

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Low and high ends to try, from the whole range inwards; zero stays inside."""
        shares = np.linspace(1, 0, CANDIDATES, endpoint=False)
        return min(self.low, 0.0) * shares, max(self.high, 0.0) * shares


def min_max(seen: Seen, bits: int) -> Range:
    """All that occurred."""
    return seen.low, seen.high


def moving_average(seen: Seen, bits: int) -> Range:
    """Exponential moving averages of each picture's least and greatest value (Jacob et al., 2018, section 3.1)."""
    return seen.average or (seen.low, seen.high)


def percentile(seen: Seen, bits: int) -> Range:
    """All but ``OUTSIDE`` of the values, 99.99 % (McKinstry et al., 2018; Wu et al., 2020, section 3)."""
    share = np.cumsum(seen.counts) / seen.total
    edges = seen.centres + seen.width / 2
    low = edges[np.searchsorted(share, OUTSIDE / 2, side="right")] - seen.width
    high = edges[np.searchsorted(share, 1 - OUTSIDE / 2)]
    return max(float(low), seen.low), min(float(high), seen.high)


def mse(seen: Seen, bits: int) -> Range:
    """The range that leaves the least squared error, over pairs of ends (Sung et al., 2015; Banner et al., 2019)."""
    lows, highs = seen.candidates()
    pairs = np.meshgrid(lows, highs, indexing="ij")
    errors = seen.error(*(ends.ravel() for ends in pairs), bits=bits)
    best = int(np.argmin(errors))
    return float(pairs[0].ravel()[best]), float(pairs[1].ravel()[best])


def entropy(seen: Seen, bits: int) -> Range:
    """The range whose clipped, coarsened distribution has the least divergence from the clipped one (Migacz, 2017).

    First the high end is chosen, then the low one, each among candidates that leave at least 2^bits bins. Zeros are
    left out, which no coarsening moves: the spike that ReLU makes would decide alone.
    """
    first, last = 0, len(seen.counts)
    least = 2 ** min(bits, 8)
    for of_high in (True, False):
        spare = max(last - first - least, 0)
        shifts = np.unique(np.linspace(0, spare, CANDIDATES // 2).round().astype(int))
        pairs = [(first, last - shift) if of_high else (first + shift, last) for shift in shifts]
        pairs = [pair for pair in pairs if holds_zero(seen, *pair)]
        if pairs:
            first, last = min(pairs, key=lambda pair: divergence(seen.rounded, *pair, levels=2**bits))
    whole = (seen.low, seen.high)
    low = whole[0] if first == 0 else float(seen.centres[first] - seen.width / 2)
    high = whole[1] if last == len(seen.counts) else float(seen.centres[last - 1] + seen.width / 2)
    return low, high


def holds_zero(seen: Seen, first: int, last: int) -> bool:
    """Whether the bins reach over zero, as far as the values do."""
    return (first == 0 or seen.centres[first] <= 0) and (last == len(seen.counts) or seen.centres[last - 1] >= 0)


def divergence(counts: np.ndarray, first: int, last: int, *, levels: int) -> float:
    """Kullback and Leibler's, of the bins from ``first`` to ``last`` with what lies outside in the ones at the ends,
    against the same bins without it, of which each level holds an equal part."""
    inside = counts[first:last]
    clipped = inside.copy()
    clipped[0] += counts[:first].sum()
    clipped[-1] += counts[last:].sum()
    level = np.arange(len(inside)) * levels // len(inside)
    filled = inside > 0
    shares = np.bincount(level, inside) / np.maximum(np.bincount(level, filled), 1)
    coarse = np.where(filled, shares[level], 0.0)
    p, q = clipped / max(clipped.sum(), 1e-300), coarse / max(coarse.sum(), 1e-300)
    known = p > 0
    return float(np.sum(p[known] * np.log(p[known] / np.maximum(q[known], 1e-12))))


MIN_MAX = "min_max"
METHODS: Mapping[str, Callable[[Seen, int], Range]] = {
    MIN_MAX: min_max,
    "moving_average": moving_average,
    "percentile": percentile,
    "mse": mse,
    "entropy": entropy,
}
LEAST_ERROR = "least_error"
"""The method that takes, for each tensor, the one of ``METHODS`` whose encoding leaves the least error.

The error is that on the tensor's histogram, as its reader sees it. It is not the network's: what a range clips is an
error of one sign in a few places, which later sums do not average out as they do with rounding."""

ENDS_ONLY = (MIN_MAX, "moving_average")
"""Those that need no histogram."""


def chosen_range(seen: Seen, method: str, *, bits: int = 8) -> tuple[str, Range]:
    """The range by ``method``, and which that was: for "least_error", the one whose encoding leaves the least error."""
    names = METHODS if method == LEAST_ERROR else (method,)
    found = {name: enough(seen, METHODS[name](seen, bits)) for name in names}
    best = min(found, key=lambda name: left_error(seen, found[name], bits=bits)) if len(found) > 1 else method
    return best, found[best]


def enough(seen: Seen, ends: Range) -> Range:
    """The range without what the reader cannot tell apart."""
    low, high = ends
    return min(seen.reader.least_told(low, high), high), high


def left_error(seen: Seen, ends: Range, *, bits: int = 8) -> float:
    """The error that the encoding of a range leaves on the histogram; its ends lie on its grid, not where asked."""
    low, high = encoding_for_range(*ends, bits=bits).range
    return float(seen.error(np.array([low]), np.array([high]), bits=bits)[0])
