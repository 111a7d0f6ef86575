"""Is the rewritten network the same? The claim owns the tolerance, and the check can fail.

An ``Exact`` claim is checked in float64, where an algebraic identity shrinks to rounding and an approximation does
not; pure data movement must agree bit for bit. ``Bounded`` must hold on samples that reach the edges of its domain.
``Learned`` is pending until a held-out score exists, never passed before. Samples that cannot tell one function from
another prove nothing: a check on them is pending too.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn

from lumen_lab.errors import LumenError
from lumen_lab.specs import Bounded, Claim, Exact, Learned, Record, html_table

Sample = Tensor | tuple
ORDER = ("failed", "pending", "passed")

CANCELLED = 1e-4
"""An output counts as no smaller than this part of the largest number that went in or came out with it. One that is
zero but for what was cancelled keeps the rounding of the terms, 1e-14 of the largest; 1e-9 · 1e-4 = 1e-13 will do."""


@dataclass(frozen=True)
class Verdict(Record):
    """The outcome of one check: ``status`` is "passed", "failed" or "pending".

    ``max_abs`` is the largest difference (None if it is not finite) of the output that comes nearest to what it may
    differ, or goes furthest beyond; ``tolerance`` is what the claim allows that output (None: not a numeric claim),
    ``sqnr_db`` the signal-to-difference ratio (None when bit-identical), ``samples`` how many comparisons.
    ``real_max_abs``: the largest difference on the network's own inputs, where edge cases were judged instead.
    """

    name: str
    site: str
    claim: str
    status: str
    max_abs: float | None
    tolerance: float | None
    sqnr_db: float | None
    samples: int
    note: str = ""
    real_max_abs: float | None = None

    @property
    def passed(self) -> bool:
        """True only for a check that was made and held."""
        return self.status == "passed"


@dataclass(frozen=True)
class VerdictTable(Record):
    """Verdicts in order, failures first in the table."""

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """True if there are verdicts and every one passed."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def failed(self) -> list[Verdict]:
        """The verdicts that failed."""
        return [verdict for verdict in self.verdicts if verdict.status == "failed"]

    def rows(self) -> list[dict[str, object]]:
        return [row for v in sorted(self.verdicts, key=lambda v: ORDER.index(v.status)) for row in v.rows()]

    def summary(self) -> list[dict[str, object]]:
        """One row a name: at how many sites its claim passed, is pending or failed, and the worst difference.

        With a column more, "worst on real inputs", if a claim was judged on edge cases.
        """
        groups: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            groups.setdefault(verdict.name, []).append(verdict)
        real = any(verdict.real_max_abs is not None for verdict in self.verdicts)
        return [_summary_row(name, group, real) for name, group in groups.items()]

    def __str__(self) -> str:
        counts = Counter(verdict.status for verdict in self.verdicts)
        return f"{len(self.verdicts)} checks: " + (
            ", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status]) or "nothing was checked"
        )

    def _repr_html_(self) -> str:
        open_rows = [row for row in self.rows() if row["status"] != "passed"]
        return (
            html_table(self.summary(), caption=str(self))
            + (html_table(open_rows, caption="Not passed", limit=60) if open_rows else "")
            + f"<details><summary>Every check</summary>{html_table(self.rows())}</details>"
        )


def _summary_row(name: str, verdicts: Sequence[Verdict], real: bool) -> dict[str, object]:
    def worst(differences: Iterable[float | None]) -> float | None:
        return max((value for value in differences if value is not None), default=None)

    status = Counter(verdict.status for verdict in verdicts)
    counts = {key: status[key] for key in reversed(ORDER)}
    row = {"check": name, "claim": verdicts[0].claim, "sites": len(verdicts), **counts}
    row["worst"] = worst(verdict.max_abs for verdict in verdicts)
    return row | ({"worst on real inputs": worst(v.real_max_abs for v in verdicts)} if real else {})


def check_equivalence(
    reference: nn.Module | Callable,
    actual: nn.Module | Callable,
    *,
    claim: Claim,
    samples: Iterable[Sample],
    name: str = "network",
    site: str = "",
    score: float | None = None,
) -> Verdict:
    """Compare two modules (or functions) on ``samples`` and judge the difference by ``claim``.

    ``samples`` are tensors or tuples of positional inputs; none at all is an error. For an ``Exact`` claim, modules
    are copied to float64 first; weights that a rewrite *computes* (a folded norm) must have been computed in float64
    too, so rewrite a float64 model, or use ``lumen_lab.rewrites.check_plan``, which does. ``score`` is the held-out
    figure of a ``Learned`` claim.
    """
    if isinstance(claim, Learned):
        return learned_verdict(claim, score, name, site)
    dtype = torch.float64 if isinstance(claim, Exact) else None
    made = list(runs(in_dtype(reference, dtype), in_dtype(actual, dtype), samples, dtype))
    return judge_runs(made, claim, name=name, site=site)


def judge_runs(made: Sequence[Run], claim: Exact | Bounded, *, name: str, site: str) -> Verdict:
    """The verdict on the outputs of ``runs`` under a numeric claim."""
    largest = []
    for run in made:
        seen = max(map(magnitude, [*run.inputs, *(reference for reference, _ in run.outputs)]), default=0.0)
        largest += [seen] * len(run.outputs)
    return judge([pair for run in made for pair in run.outputs], claim, name=name, site=site, largest=largest)


def judge(
    pairs: Sequence[tuple[Tensor, Tensor]],
    claim: Exact | Bounded,
    *,
    name: str,
    site: str,
    largest: Sequence[float] | None = None,
) -> Verdict:
    """The verdict on (reference, actual) tensors under a numeric claim.

    An ``Exact`` claim allows each pair ``max_abs_float64`` of its own scale: the reference's largest value, or the part
    ``CANCELLED`` of ``largest``, for each pair the largest number that it was computed from or beside (by default that
    of all references). Pending if it holds, but every reference is zero throughout.
    """
    if not pairs:
        raise LumenError(f"The check of {name} {site} was given no samples; a check without samples proves nothing.")
    shapes = [(tuple(r.shape), tuple(a.shape)) for r, a in pairs if r.shape != a.shape]
    if shapes:
        note = f"shapes differ: expected {shapes[0][0]}, found {shapes[0][1]}"
        return Verdict(name, site, claim_text(claim), "failed", None, None, None, len(pairs), note)
    if not sum(reference.numel() for reference, _ in pairs):
        return Verdict(name, site, claim_text(claim), "failed", None, None, None, len(pairs), "nothing to compare")
    worst, tolerance = _nearest_to_failing(pairs, claim, largest)
    identical = all(torch.equal(r, a) for r, a in pairs)
    held = identical if tolerance == 0 else worst <= tolerance
    told = any(bool(reference.any()) for reference, _ in pairs)
    status = "failed" if not held else "passed" if told else "pending"
    notes = ["bit for bit" if identical else "" if math.isfinite(worst) else "the difference is not finite"]
    notes += [] if told or not held else ["every output is zero on these samples, which proves nothing: give others"]
    figures = finite(worst), tolerance, finite(sqnr_db(pairs))
    return Verdict(name, site, claim_text(claim), status, *figures, len(pairs), "; ".join(filter(None, notes)))


def _nearest_to_failing(
    pairs: Sequence[tuple[Tensor, Tensor]], claim: Exact | Bounded, largest: Sequence[float] | None
) -> tuple[float, float]:
    """(difference, tolerance) of the pair whose difference is the largest part of what it may be."""
    scales = [magnitude(reference) for reference, _ in pairs]
    least = [CANCELLED * number for number in largest or len(scales) * [max(scales)]]
    judged = [
        (difference(*pair), allowed(claim, max(bounds))) for pair, *bounds in zip(pairs, scales, least, strict=True)
    ]
    return max(judged, key=lambda pair: (pair[0] / pair[1] if pair[1] else math.inf if pair[0] else 0.0, pair[0]))


def finite(value: float) -> float | None:
    """The value itself, or None: a table kept as JSON has no word for infinity."""
    return value if math.isfinite(value) else None


def allowed(claim: Exact | Bounded, scale: float) -> float:
    """The largest difference a claim allows, for outputs of magnitude ``scale``."""
    if isinstance(claim, Bounded):
        return claim.max_abs
    return 0.0 if claim.movement else claim.max_abs_float64 * scale


def learned_verdict(claim: Learned, score: float | None, name: str, site: str) -> Verdict:
    """Pending without a score; then passed or failed by it. ``LumenError`` for a score that is no number."""
    text = claim_text(claim)
    if score is not None and (isinstance(score, bool) or not isinstance(score, Real)):
        raise LumenError(f"The score of {name} is its {claim.metric}, a number; found {score!r}.")
    if score is None:
        return Verdict(name, site, text, "pending", None, None, None, 0, "no held-out score yet")
    status = "passed" if score >= claim.at_least else "failed"
    return Verdict(name, site, text, status, None, None, None, 1, f"{claim.metric} = {score:.4f}")


def claim_text(claim: Claim) -> str:
    """The claim in words."""
    if isinstance(claim, Exact):
        return "exact, bit for bit" if claim.movement else f"exact (float64, ≤ {claim.max_abs_float64:g} of the scale)"
    if isinstance(claim, Bounded):
        return f"within {claim.max_abs:g} for {claim.domain}"
    return f"learned: {claim.metric} ≥ {claim.at_least:g}"


@dataclass(frozen=True)
class Run:
    """One sample through both: the tensors that went in, and (reference, actual) pairs.

    ``outputs`` are the pairs that came out, ``inputs_left`` what each side has left of its own copy of the inputs.
    """

    inputs: list[Tensor]
    outputs: list[tuple[Tensor, Tensor]]
    inputs_left: list[tuple[Tensor, Tensor]]


def runs(reference, actual, samples: Iterable[Sample], dtype: torch.dtype | None) -> Iterator[Run]:
    """Run both on each sample, in ``dtype`` if one is given, without gradients."""
    with torch.no_grad():
        for sample in samples:
            inputs = tuple(cast(value, dtype) for value in (sample if isinstance(sample, tuple) else (sample,)))
            given = own(inputs), own(inputs)
            outputs = paired(reference(*given[0]), actual(*given[1]))
            yield Run(tensors_of(inputs), outputs, paired(*given))


def paired(expected: object, found: object) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two outputs side by side; ``LumenError`` if there are more of them in one."""
    reference, actual = tensors_of(expected), tensors_of(found)
    if len(reference) != len(actual):
        raise LumenError(f"The reference returns {len(reference)} tensors, the other {len(actual)}; compare alike.")
    return list(zip(reference, actual, strict=True))


def output_pairs(reference, actual, samples: Iterable[Sample], dtype: torch.dtype | None):
    """Run both on each sample without gradients; yields (reference, actual) tensors of every output."""
    for run in runs(reference, actual, samples, dtype):
        yield from run.outputs


def in_dtype(module: nn.Module | Callable, dtype: torch.dtype | None) -> nn.Module | Callable:
    """A copy of the module in ``dtype``; functions and modules without a change are returned as they are."""
    if dtype is None or not isinstance(module, nn.Module):
        return module
    tensors = [*module.parameters(), *module.buffers()]
    if all(t.dtype == dtype for t in tensors if t.is_floating_point()):
        return module
    return copy.deepcopy(module).to(dtype)


def cast(value: object, dtype: torch.dtype | None) -> object:
    """Floating-point tensors in ``dtype``; everything else as it is."""
    if dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def own(inputs: tuple) -> tuple:
    """Copies of the tensors, so that an in-place operation of one side does not reach the other."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in inputs)


def tensors_of(output: object) -> list[Tensor]:
    """Every tensor in an output, in order, through tuples, lists and dicts; None is skipped."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def difference(reference: Tensor, actual: Tensor) -> float:
    """Largest absolute difference; infinite if either holds a NaN, zero where both hold the same infinity."""
    if reference.numel() == 0:
        return 0.0
    worst = float(gap(reference, actual).max())
    return math.inf if math.isnan(worst) else worst


def gap(reference: Tensor, actual: Tensor) -> Tensor:
    """|reference − actual| in float64, zero where the two are equal."""
    return (reference.double() - actual.double()).abs().masked_fill(reference == actual, 0.0)


def magnitude(x: Tensor) -> float:
    """Largest finite absolute value, 0 if there is none: an infinity must not stretch a tolerance."""
    finite = x[x.isfinite()].double()
    return float(finite.abs().max()) if finite.numel() else 0.0


def sqnr_db(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """10·log10(Σ reference² / Σ (reference − actual)²) over all pairs, in dB; −∞ if the difference is not finite."""
    signal = sum(float(r.double().square().sum()) for r, _ in pairs)
    noise = sum(float(gap(r, a).square().sum()) for r, a in pairs)
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def random_samples(
    sizes: Sequence[tuple[int, int]], *, batch: int = 2, channels: int = 3, seed: int = 0
) -> list[Tensor]:
    """Normal noise images (batch, channels, H, W), one for each (H, W): non-square and odd sizes are the caller's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, channels, height, width, generator=generator) for height, width in sizes]
