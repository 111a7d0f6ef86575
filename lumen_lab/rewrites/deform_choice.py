"""Which of the five ways to write each deformable conv: predicted from its statistics, measured, and made a plan.

The prediction is the share of a site's output energy that a replacement gets wrong. It treats taps, modulators and
input as independent of each other, which they are not: ``measure_choices`` sets the measured error beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_fit import (
    FittedConv,
    fit_modulated_convs,
    fit_plain_convs,
    fit_separable_convs,
)
from lumen_lab.rewrites.deform_shifts import approximate_deform_conv_by_shifts
from lumen_lab.rewrites.deform_sites import deform_sites, site_inputs
from lumen_lab.rewrites.deform_statistics import DeformStatistics, SiteStatistics
from lumen_lab.rewrites.deform_substitutes import (
    substitute_modulated_conv,
    substitute_plain_conv,
    substitute_separable_conv,
)
from lumen_lab.rewrites.plan import Plan, only_at
from lumen_lab.rewrites.record import Rewrite, Site
from lumen_lab.specs import Record

DECOMPOSE, SHIFTS = DECOMPOSE_DEFORM_CONV.name, "approximate_deform_conv_by_shifts"
FITS = {
    "substitute_plain_conv": fit_plain_convs,
    "substitute_separable_conv": fit_separable_convs,
    "substitute_modulated_conv": fit_modulated_convs,
}
SUBSTITUTES = {
    "substitute_plain_conv": substitute_plain_conv,
    "substitute_separable_conv": substitute_separable_conv,
    "substitute_modulated_conv": substitute_modulated_conv,
}
CHEAPEST_FIRST = ("substitute_plain_conv", "substitute_separable_conv", DECOMPOSE, "substitute_modulated_conv", SHIFTS)
"""By the tiles that the compiler makes of one conv alone (64 → 256 channels, 64 × 64, float16, SM8850), for kernels of
1, 3 and 7: plain 336, 337, 337; separable 367, 368, 368; decomposed 396, 470, 1,233; modulated 357, 511, 1,678; shifts
of radius 1 739, 3,583, 18,031. How long a tile of look-ups takes on a phone is not known from this."""

LARGEST_SUM = 100
"""Products that shifts may take, k²·(2r + 1)²: about as many tiles as eleven 3×3 convs. A 7×7 conv takes 441 at
radius 1: 18,031 tiles, and 166 MB of DRAM where the conv itself moves 7."""

Fits = Mapping[str, Mapping[str, FittedConv]]


@dataclass(frozen=True)
class Choice:
    """A way to write a deformable conv: the name of a rewrite, and the radius of shifts (0 for the others)."""

    replacement: str
    radius: int = 0

    def __str__(self) -> str:
        return f"{self.replacement}(radius={self.radius})" if self.radius else self.replacement


def all_choices(radii: Sequence[int]) -> tuple[Choice, ...]:
    """Every choice, cheapest first."""
    return (*map(Choice, CHEAPEST_FIRST[:-1]), *(Choice(SHIFTS, radius) for radius in radii))


def rewrite_for(choice: Choice, *, statistics: DeformStatistics | None = None, fitted: Fits | None = None) -> Rewrite:
    """The record of a choice; a substitute starts from its fit in ``fitted``, else from ``statistics``."""
    if choice.replacement == SHIFTS:
        return approximate_deform_conv_by_shifts(radius=choice.radius)
    if choice.replacement == DECOMPOSE:
        return DECOMPOSE_DEFORM_CONV
    kernels = (fitted or {}).get(choice.replacement)
    made = SUBSTITUTES[choice.replacement](statistics=None if kernels else statistics, fitted=kernels)
    return replace(made, code=f"{choice.replacement}(fitted=fitted[{choice.replacement!r}])") if kernels else made


def fit_substitutes(
    model: nn.Module, images: Sequence[Tensor], *, sites: Sequence[str] | None = None
) -> dict[str, dict[str, FittedConv]]:
    """The least-squares start of all three substitutes, by the rewrite's name and then by site."""
    return {name: fit(model, images, sites=sites) for name, fit in FITS.items()}


# Predicted


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
    """SQNR of a share of the energy that is wrong; None for an exact one."""
    return -10 * math.log10(error) if error > 0 else None


@dataclass(frozen=True)
class Suggestion(Record):
    """What one site would be replaced with, why, and the error that this should cost (None dB: exact)."""

    site: str
    kernel: int
    replacement: str
    radius: int
    predicted_error: float
    predicted_db: float | None
    reason: str

    @property
    def choice(self) -> Choice:
        return Choice(self.replacement, self.radius)


@dataclass(frozen=True)
class SuggestionTable(Record):
    """One suggestion a site."""

    suggestions: tuple[Suggestion, ...]

    def rows(self) -> list[dict[str, object]]:
        return [row for entry in self.suggestions for row in entry.rows()]


def suggest(statistics: DeformStatistics, *, at_least_db: float = 20.0, look_up: bool = True) -> SuggestionTable:
    """For each site the cheapest choice whose predicted SQNR is ``at_least_db`` (20 dB: 1 % of the energy wrong).

    ``look_up=False`` leaves the grid sample out, as full INT8 may have to: its grid spans the whole map, so that eight
    bits tell places W/255 pixels apart. Where nothing reaches the level then, the substitute that errs least is taken.
    """
    return SuggestionTable(tuple(suggested(known, at_least_db, look_up) for known in statistics.sites))


def affordable(choice: Choice, known: SiteStatistics, look_up: bool) -> bool:
    """Whether a choice is open at this site: no look-up where none is allowed, and no sum of too many shifts."""
    products = known.kernel**2 * (2 * choice.radius + 1) ** 2
    return (look_up or choice.replacement != DECOMPOSE) and (choice.replacement != SHIFTS or products <= LARGEST_SUM)


def suggested(known: SiteStatistics, at_least_db: float, look_up: bool) -> Suggestion:
    """The suggestion for one site."""
    choices = [choice for choice in all_choices(known.radii) if affordable(choice, known, look_up)]
    errors = {choice: predicted_error(known, choice) for choice in choices}
    good = [choice for choice in choices if errors[choice] <= 10 ** (-at_least_db / 10)]
    learned = [choice for choice in choices if choice.replacement in SUBSTITUTES]
    choice = good[0] if good else min(learned, key=errors.get)
    reason = f"{in_words(known)}; {why(choice, known, at_least_db, enough=bool(good))}"
    found = errors[choice]
    return Suggestion(known.site, known.kernel, choice.replacement, choice.radius, found, decibels(found), reason)


def in_words(known: SiteStatistics) -> str:
    """How far the site looks and what its modulator does."""
    return (
        f"offsets of {known.offset_p50_px:.2g} px (95 %: {known.offset_p95_px:.2g}, most {known.offset_max_px:.2g}), "
        f"{1 - known.inside_share:.0%} of what is read lies outside the image, modulator {known.modulator_mean:.2f} ± "
        f"{known.modulator_std:.2f}"
    )


def why(choice: Choice, known: SiteStatistics, at_least_db: float, *, enough: bool) -> str:
    """Why this choice and no cheaper one."""
    if not enough:
        return f"nothing affordable should reach {at_least_db:g} dB: the nearest of those that training can make good"
    if choice.replacement == DECOMPOSE:
        return f"nothing cheaper should reach {at_least_db:g} dB, and this is exact"
    if choice.replacement == SHIFTS:
        beyond = known.share_beyond[known.radii.index(choice.radius)]
        if known.offset_max_px <= choice.radius:
            return f"no offset is beyond {choice.radius} px, where shifts are exact"
        return f"{beyond:.1%} of the offsets are beyond {choice.radius} px, and by so little that clamping them will do"
    return f"the cheapest that should reach {at_least_db:g} dB"


# Measured


def exact_at(db: float | None, level_db: float = 100.0) -> float:
    """The SQNR, at most the level above which what is left is the rounding of float32."""
    return level_db if db is None else min(db, level_db)


@dataclass(frozen=True)
class ChoiceRow(Record):
    """One choice at one site: SQNR of the site's output against the original's, in dB (None: no difference)."""

    site: str
    kernel: int
    replacement: str
    radius: int
    predicted_db: float | None
    measured_db: float | None


@dataclass(frozen=True)
class ChoiceTable(Record):
    """Predicted and measured, site by site; ``pictures`` were measured on."""

    choices: tuple[ChoiceRow, ...]
    pictures: int

    def rows(self) -> list[dict[str, object]]:
        return [row for entry in self.choices for row in entry.rows()]

    def by_site(self) -> list[dict[str, object]]:
        """One row a site, a column a choice: the measured SQNR in dB."""
        table: dict[str, dict[str, object]] = {}
        for entry in self.choices:
            row = table.setdefault(entry.site, {"site": entry.site, "kernel": entry.kernel})
            row[str(Choice(entry.replacement, entry.radius))] = entry.measured_db
        return list(table.values())

    def rank_correlation(self) -> float:
        """Spearman's: 1 if the prediction puts all choices at all sites in the measured order; exact ones on top."""
        from scipy.stats import spearmanr

        pairs = [(exact_at(entry.predicted_db), exact_at(entry.measured_db)) for entry in self.choices]
        return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def measure_choices(
    model: nn.Module,
    images: Iterable[Tensor],
    *,
    statistics: DeformStatistics,
    fitted: Fits | None = None,
    sites: Sequence[str] | None = None,
) -> ChoiceTable:
    """The SQNR of every choice at every site, on the inputs that flow there, beside the predicted one.

    A site is measured with everything before it as it was: Σ y² over Σ (y − y')², all pixels of all ``images`` (gone
    through once). Substitutes start from ``fitted`` (``fit_substitutes``), else from the statistics; give other images
    than they were fitted to.
    """
    convs = deform_sites(model, sites if sites is not None else list(statistics.by_site))
    choices = {path: all_choices(statistics.by_site[path].radii) for path in convs}
    signal = dict.fromkeys(convs, 0.0)
    noise = {path: dict.fromkeys(choices[path], 0.0) for path in convs}
    pictures = 0
    with torch.no_grad():
        make = partial(rewrite_for, statistics=statistics, fitted=fitted)
        built = {path: {c: built_at(path, convs[path], make(c)) for c in choices[path]} for path in convs}
        for given in site_inputs(model, images, convs):
            pictures += 1
            for path, x in given:
                expected = convs[path](x)
                signal[path] += float(expected.double().square().sum())
                for choice, module in built[path].items():
                    noise[path][choice] += float((expected - module(x)).double().square().sum())
    rows = [
        ChoiceRow(
            path,
            convs[path].regular_conv.kernel_size[0],
            choice.replacement,
            choice.radius,
            decibels(predicted_error(statistics.by_site[path], choice)),
            decibels(noise[path][choice] / max(signal[path], 1e-300)),
        )
        for path in convs
        for choice in choices[path]
    ]
    return ChoiceTable(tuple(rows), pictures)


def built_at(path: str, conv: nn.Module, rule: Rewrite) -> nn.Module:
    """What ``rule`` would put at ``path``, in evaluation mode."""
    weight = conv.regular_conv.weight
    site = Site(path, conv, ((1, weight.shape[1], 1, 1),), None)
    if reason := rule.refused(site):
        raise RewriteError(f"{rule.name} is refused at {path}: {reason}.")
    return rule.built(site)[path].eval()


# A plan with different replacements


def plan_for(
    suggestions: SuggestionTable, *, statistics: DeformStatistics | None = None, fitted: Fits | None = None
) -> Plan:
    """The plan that makes the suggestions true: one rewrite a kind, each at its sites.

    Shifts of several radii become one rewrite of the largest, which errs no more: a plan has a rewrite once.
    """
    sites: dict[str, list[Suggestion]] = {}
    for entry in suggestions.suggestions:
        sites.setdefault(entry.replacement, []).append(entry)
    plan = []
    for name, entries in sites.items():
        choice = Choice(name, max(entry.radius for entry in entries))
        rule = rewrite_for(choice, statistics=statistics, fitted=fitted)
        plan.append(only_at(rule, [entry.site for entry in entries]))
    return tuple(plan)
