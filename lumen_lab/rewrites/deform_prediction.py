"""The five ways to write a deformable conv, what each costs, and the error that a site's statistics predict for it.

The prediction is the share of a site's output energy that a replacement gets wrong. It treats taps, modulators and
input as independent of each other, which they are not: ``deform_choice.measure_choices`` sets the measured error
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_data import SiteStatistics
from lumen_lab.rewrites.deform_substitutes import (
    substitute_modulated_conv,
    substitute_plain_conv,
    substitute_separable_conv,
)

DECOMPOSE, SHIFTS = DECOMPOSE_DEFORM_CONV.name, "approximate_deform_conv_by_shifts"
SUBSTITUTES = {
    "substitute_plain_conv": substitute_plain_conv,
    "substitute_separable_conv": substitute_separable_conv,
    "substitute_modulated_conv": substitute_modulated_conv,
}
TILES = {
    1: dict(zip(SUBSTITUTES, (336, 367, 357), strict=True)) | {DECOMPOSE: 396, SHIFTS: 739},
    3: dict(zip(SUBSTITUTES, (337, 368, 511), strict=True)) | {DECOMPOSE: 470, SHIFTS: 3_583},
    7: dict(zip(SUBSTITUTES, (337, 368, 1_678), strict=True)) | {DECOMPOSE: 1_423, SHIFTS: 18_031},
}
"""Tiles that the compiler makes of one conv alone, by kernel (64 → 256 channels, 64 × 64, float16, SM8850; shifts of
radius 1). How long a tile of look-ups takes on a phone is not known from this."""

LARGEST_SUM = 100
"""Products that shifts may take, k²·(2r + 1)²: about as many tiles as eleven 3×3 convs. A 7×7 conv takes 441 at
radius 1: 18,031 tiles, and 166 MB of DRAM where the conv itself moves 7."""


@dataclass(frozen=True)
class Choice:
    """A way to write a deformable conv: the name of a rewrite, and the radius of shifts (0 for the others)."""

    replacement: str
    radius: int = 0

    def __str__(self) -> str:
        return f"{self.replacement}(radius={self.radius})" if self.radius else self.replacement


def cheapest_first(kernel: int) -> tuple[str, ...]:
    """The five rewrites by the ``TILES`` of the nearest kernel that was compiled."""
    tiles = TILES[min(TILES, key=lambda compiled: abs(compiled - kernel))]
    return tuple(sorted(tiles, key=tiles.get))


def all_choices(kernel: int, radii: Sequence[int]) -> tuple[Choice, ...]:
    """Every choice for a k×k conv, cheapest first; shifts once for each radius."""
    return tuple(
        Choice(name, radius)
        for name in cheapest_first(kernel)
        for radius in (sorted(radii) if name == SHIFTS else (0,))
    )


def predicted_error(known: SiteStatistics, choice: Choice) -> float:
    """Share of the output's energy that a choice should get wrong: 0 is exact, 1 is as bad as no output at all.

    With ρ_r the mean correlation of the input at the distance by which an offset exceeds r, S the share of what the
    taps read that lies inside the image and S_r the same with offsets clamped to r:

    - shifts of radius r: 1 + S_r/S − 2·ρ_r, the energy of the difference of two such samples; 0 if no offset exceeds r;
    - a fitted conv without offsets: 1 − ρ_0²·min(1, S/S_0)·c, what a sample that correlates so leaves unexplained;
      c is 1 with the modulator kept, ``constant_share`` for the plain conv and ``attention_share · rank_one_share`` for
      the separable one. The other taps of the window, which the fit uses too, are not counted.
    """
    if choice.replacement == DECOMPOSE or (choice.replacement == SHIFTS and known.offset_max_px <= choice.radius):
        return 0.0
    if choice.radius and choice.radius not in known.radii:
        raise RewriteError(f"Radius {choice.radius} is not among the statistics' radii {known.radii}; measure it too.")
    correlation = known.mean_correlation(choice.radius)
    share = known.inside_share_within[(0, *known.radii).index(choice.radius)]
    overlap = known.inside_share / max(share, 1e-12)
    if choice.replacement == SHIFTS:
        return max(0.0, 1 + 1 / max(overlap, 1e-12) - 2 * correlation)
    kept = {
        "substitute_plain_conv": known.constant_share,
        "substitute_separable_conv": known.attention_share * known.rank_one_share,
        "substitute_modulated_conv": 1.0,
    }[choice.replacement]
    return min(1.0, max(0.0, 1 - correlation**2 * min(1.0, overlap) * kept))


def decibels(error: float) -> float | None:
    """SQNR of a share of the energy that is wrong; None for an exact one, as in a verdict."""
    return None if error == 0 else -10 * math.log10(error)
