"""How far one tensor is from another: as real numbers, and in steps of an integer encoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from scipy.special import expit, ndtr

from lumen_lab.equivalence.layer_report import AFTER, UNJUDGED, WITHIN, LayerRow
from lumen_lab.equivalence.layers import LayerTensor
from lumen_lab.equivalence.tolerance import Tolerance
from lumen_lab.equivalence.verdict import finite

SEEN_BY: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": expit,
    "Gelu": lambda x: x * ndtr(x),
}
"""What an operator makes of a tensor: its range is chosen for that, and clips what makes no difference there."""


def measured(reference: LayerTensor, actual: LayerTensor, tolerance: Tolerance, *, order: str = "") -> LayerRow:
    """The row of two tensors of one shape; outside its tolerance it is "after", until the first is known.

    SQNR, cosine and maximum are of the real values in float64; equal infinities do not differ, a NaN always does. An
    integer tensor that one kind of operator reads is compared as that operator sees it (``SEEN_BY``).
    """
    read_by = next((one.read_by for one in (actual, reference) if one.scale is not None and one.read_by in SEEN_BY), "")
    r, a = (SEEN_BY.get(read_by, np.asarray)(one.real) for one in (reference, actual))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(r == a, 0.0, np.abs(r - a))
    worst = float(gap.max(initial=0.0))
    known = np.abs(r[np.isfinite(r)])
    row = LayerRow(
        site=reference.site,
        call=reference.call,
        output=reference.output,
        kind=_kind(reference, actual),
        shape=tuple(reference.values.shape),
        status="",
        sqnr_db=_sqnr_db(r, gap) if worst > 0 and math.isfinite(worst) else None,
        cosine=_cosine(r, a) if math.isfinite(worst) else None,
        max_abs=finite(worst),
        scale=float(known.max(initial=0.0)),
        **_steps(reference, actual),
        order=order,
        read_by=read_by,
    )
    judged, broken = _judged(row, tolerance)
    return replace(row, status=AFTER if broken else WITHIN if judged else UNJUDGED, why="; ".join(broken))


def _judged(row: LayerRow, tolerance: Tolerance) -> tuple[bool, list[str]]:
    """Whether any bound applies to the row, and in words those that it breaks."""
    if row.max_abs is None:
        return True, ["the difference is not finite"]
    if not math.prod(row.shape):
        return False, []  # without values there is nothing that could differ
    checks = [
        (tolerance.max_of_scale, row.max_abs, lambda b: row.max_abs <= b * row.scale, "max {:.3g} > {:.3g}"),
        (tolerance.min_sqnr_db, row.sqnr_db, lambda b: row.identical or row.sqnr_db >= b, "SQNR {:.1f} < {:.1f} dB"),
        (tolerance.max_steps, row.max_steps, lambda b: row.max_steps <= b, "{} > {} steps off"),
        (tolerance.min_within_one, row.within_one, lambda b: row.within_one >= b, "{:.1%} < {:.1%} within one step"),
    ]
    broken, judged = [], False
    if tolerance.min_sqnr_db is not None and row.sqnr_db is None and not row.identical:
        broken, judged = ["it differs from a reference of zeros"], True
    for bound, figure, holds, words in checks:
        if bound is None or (figure is None and not row.identical):
            continue
        judged = True
        if figure is not None and not holds(bound):
            broken.append(words.format(figure, bound * row.scale if bound is tolerance.max_of_scale else bound))
    return judged, broken


def _kind(reference: LayerTensor, actual: LayerTensor) -> str:
    return " / ".join(dict.fromkeys(filter(None, (reference.kind, actual.kind))))


def _sqnr_db(r: np.ndarray, gap: np.ndarray) -> float | None:
    """10·log10(Σ r² / Σ gap²), infinities that agree left out; None for a reference of zeros."""
    signal = float(np.square(r[np.isfinite(r)]).sum())
    return 10 * math.log10(signal / float(np.square(gap).sum())) if signal > 0 else None


def _cosine(r: np.ndarray, a: np.ndarray) -> float | None:
    r, a = r[np.isfinite(r)], a[np.isfinite(r)]
    lengths = float(np.linalg.norm(r)) * float(np.linalg.norm(a))
    return float(np.vdot(r, a)) / lengths if lengths > 0 else None


def _steps(reference: LayerTensor, actual: LayerTensor) -> dict[str, float | int]:
    """Shares of integers that are equal and within one step, and the largest difference; nothing for real numbers.

    Both are written in the encoding of the actual layer, or the reference's where the actual has none; what lies
    outside its range is clipped.
    """
    encoding = next((layer for layer in (actual, reference) if layer.scale is not None), None)
    if encoding is None or not reference.values.size:
        return {}
    steps = np.abs(_integers(reference, encoding) - _integers(actual, encoding))
    return {
        "equal": float(np.mean(steps == 0)),
        "within_one": float(np.mean(steps <= 1)),
        "max_steps": int(steps.max()),
    }


def _integers(layer: LayerTensor, encoding: LayerTensor) -> np.ndarray:
    if (layer.scale, layer.zero_point) == (encoding.scale, encoding.zero_point):
        return layer.values.astype(np.int64)
    limits = np.iinfo(encoding.values.dtype)
    real = np.nan_to_num(layer.real, posinf=np.finfo(np.float64).max, neginf=np.finfo(np.float64).min)
    integers = np.rint(real / encoding.scale) + (encoding.zero_point or 0)
    return np.clip(integers, limits.min, limits.max).astype(np.int64)
