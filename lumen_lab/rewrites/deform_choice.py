"""Which of the five ways to write each deformable conv: suggested from its statistics, measured, and made a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_data import DeformStatistics, Fits, FittedConv, SiteStatistics, load_fits
from lumen_lab.rewrites.deform_fit import (
    fit_modulated_convs,
    fit_plain_convs,
    fit_separable_convs,
)
from lumen_lab.rewrites.deform_prediction import (
    DECOMPOSE,
    LARGEST_SUM,
    SHIFTS,
    SUBSTITUTES,
    Choice,
    all_choices,
    decibels,
    predicted_error,
)
from lumen_lab.rewrites.deform_shifts import approximate_deform_conv_by_shifts
from lumen_lab.rewrites.deform_sites import Sites, deform_sites, site_inputs
from lumen_lab.rewrites.deform_substitutes import KnownStatistics, is_file
from lumen_lab.rewrites.plan import Plan, only_at
from lumen_lab.rewrites.record import Rewrite, Site
from lumen_lab.specs import Record

FITS = {
    "substitute_plain_conv": fit_plain_convs,
    "substitute_separable_conv": fit_separable_convs,
    "substitute_modulated_conv": fit_modulated_convs,
}


def rewrite_for(
    choice: Choice, *, statistics: KnownStatistics = None, fitted: Fits | str | Path | None = None
) -> Rewrite:
    """The record of a choice; a substitute starts from its fit in ``fitted``, else from ``statistics``.

    Either may be the path of the file that keeps it, which the record's code then names.
    """
    if choice.replacement == SHIFTS:
        return approximate_deform_conv_by_shifts(radius=choice.radius)
    if choice.replacement == DECOMPOSE:
        return DECOMPOSE_DEFORM_CONV
    substitute = SUBSTITUTES[choice.replacement]
    kernels = fits_in(fitted).get(choice.replacement)
    if not kernels:
        return substitute(statistics=statistics)
    if is_file(fitted):
        return substitute(fitted=fitted)
    return replace(substitute(fitted=kernels), code=f"{choice.replacement}(fitted=fitted[{choice.replacement!r}])")


def fits_in(fitted: Fits | str | Path | None) -> Fits:
    """The fits themselves, read if they are in a file."""
    return load_fits(fitted) if is_file(fitted) else fitted or {}


def fit_substitutes(
    model: nn.Module, images: Sequence[Tensor], *, sites: Sites = None
) -> dict[str, dict[str, FittedConv]]:
    """The least-squares start of all three substitutes, by the rewrite's name and then by site."""
    return {name: fit(model, images, sites=sites) for name, fit in FITS.items()}


def with_exact(row: dict[str, object]) -> dict[str, object]:
    """The row of a table with "exact" where a SQNR is None."""
    return {key: "exact" if key.endswith("_db") and value is None else value for key, value in row.items()}


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

    def rows(self) -> list[dict[str, object]]:
        return [with_exact(row) for row in super().rows()]

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
    choices = [choice for choice in all_choices(known.kernel, known.radii) if affordable(choice, known, look_up)]
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

    def rows(self) -> list[dict[str, object]]:
        return [with_exact(row) for row in super().rows()]


@dataclass(frozen=True)
class ChoiceTable(Record):
    """Predicted and measured, site by site; ``pictures`` were measured on."""

    choices: tuple[ChoiceRow, ...]
    pictures: int

    def rows(self) -> list[dict[str, object]]:
        return [row for entry in self.choices for row in entry.rows()]

    def by_site(self) -> list[dict[str, object]]:
        """One row a site, a column a choice: the measured SQNR in dB, or "exact"."""
        table: dict[str, dict[str, object]] = {}
        for entry in self.choices:
            row = table.setdefault(entry.site, {"site": entry.site, "kernel": entry.kernel})
            row[str(Choice(entry.replacement, entry.radius))] = entry.rows()[0]["measured_db"]
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
    fitted: Fits | str | Path | None = None,
    sites: Sites = None,
) -> ChoiceTable:
    """The SQNR of every choice at every site, on the inputs that flow there, beside the predicted one.

    A site is measured with everything before it as it was: Σ y² over Σ (y − y')², all pixels of all ``images`` (gone
    through once). Substitutes start from ``fitted`` (``fit_substitutes``), else from the statistics; give other images
    than they were fitted to. ``sites``: paths, or all that there are statistics of. ``RewriteError`` without a picture,
    for a site that has no statistics, and where pictures or weights are not finite.
    """
    convs = deform_sites(model, sites if sites is not None else list(statistics.by_site))
    kept = fits_in(fitted)
    sums = {path: SiteErrors(path, conv, known_at(path, statistics), kept) for path, conv in convs.items()}
    pictures = 0
    with torch.no_grad():
        for count, given in site_inputs(model, images, convs):
            pictures += count
            for path, x in given:
                sums[path].add(x)
    return ChoiceTable(tuple(row for each in sums.values() for row in each.rows()), pictures)


def known_at(path: str, statistics: DeformStatistics) -> SiteStatistics:
    """The statistics of one site; ``RewriteError`` if there are none."""
    known = statistics.by_site.get(path)
    if known is None:
        found = ", ".join(statistics.by_site) or "no site"
        raise RewriteError(f"The statistics given have no entry for {path}, only for {found}; measure it as well.")
    return known


class SiteErrors:
    """Σ y² of one site, and Σ (y − y')² of every choice there, while pictures go by."""

    def __init__(self, path: str, conv: DeformableConv2d, known: SiteStatistics, fitted: Fits):
        self.path, self.conv, self.known = path, conv, known
        choices = all_choices(known.kernel, known.radii)
        only = DeformStatistics((known,))
        with torch.no_grad():
            self.built = {c: built_at(path, conv, rewrite_for(c, statistics=only, fitted=fitted)) for c in choices}
        self.signal, self.noise = 0.0, dict.fromkeys(choices, 0.0)

    def add(self, x: Tensor) -> None:
        """One batch's input (N, C, H, W)."""
        expected = self.conv(x)
        self.signal += float(expected.double().square().sum())
        for choice, module in self.built.items():
            self.noise[choice] += float((expected - module(x)).double().square().sum())

    def rows(self) -> list[ChoiceRow]:
        """A row a choice."""
        return [self.row(choice, noise / max(self.signal, 1e-300)) for choice, noise in self.noise.items()]

    def row(self, choice: Choice, error: float) -> ChoiceRow:
        predicted_db = decibels(predicted_error(self.known, choice))
        name, radius = choice.replacement, choice.radius
        return ChoiceRow(self.path, self.known.kernel, name, radius, predicted_db, decibels(error))


def built_at(path: str, conv: nn.Module, rule: Rewrite) -> nn.Module:
    """What ``rule`` would put at ``path``, in evaluation mode."""
    weight = conv.regular_conv.weight
    site = Site(path, conv, ((1, weight.shape[1], 1, 1),), None)
    if reason := rule.refused(site):
        raise RewriteError(f"{rule.name} is refused at {path}: {reason}.")
    return rule.built(site)[path].eval()


# A plan with different replacements


def plan_for(
    suggestions: SuggestionTable, *, statistics: KnownStatistics = None, fitted: Fits | str | Path | None = None
) -> Plan:
    """The plan that makes the suggestions true: one rewrite a kind, each at its sites.

    Given the paths of files (``statistics.save``, ``save_fits``), the plan can be written as code and made again.
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
