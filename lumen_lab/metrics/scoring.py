"""One prediction against its matte: every metric, in both readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lumen_lab.errors import ArtifactError, MetricError
from lumen_lab.metrics import edges, field_measures
from lumen_lab.metrics.confidence import Reliability, counted
from lumen_lab.metrics.definitions import METRICS, READINGS
from lumen_lab.specs import Record

Values = dict[str, dict[str, float | None]]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class MaskScores(Record):
    """Every metric of one prediction.

    ``values``: reading → metric → value, None where the metric is undefined on this image. ``curves``: reading → "e"
    and "f" → 256 values, at the thresholds 0/255, 1/255 … 255/255. ``grey_share``: share of the matte's pixels that are
    neither 0 nor 1. ``bins``: the raw reading's confidence, to be added up over images.
    """

    values: Values
    curves: dict[str, dict[str, tuple[float, ...]]]
    grey_share: float
    bins: Reliability

    def rows(self) -> list[dict[str, object]]:
        """One line a metric, with both readings."""
        return [{"metric": name, **{reading: self.values[reading][name] for reading in READINGS}} for name in METRICS]

    @classmethod
    def from_json(cls, values: Mapping[str, object]):
        values = dict(values)
        check_metrics(values["values"])
        values["curves"] = {
            reading: {name: tuple(curve) for name, curve in pair.items()} for reading, pair in values["curves"].items()
        }
        values["bins"] = Reliability.from_json(values["bins"])
        return super().from_json(values)


def check_metrics(values: Values) -> None:
    """``ArtifactError`` unless ``values`` holds both readings of just the metrics that this version knows."""
    for reading in READINGS:
        different = set(METRICS) ^ set(values.get(reading, ()))
        if different:
            raise ArtifactError(
                f"The saved scores ({reading}) and this version differ in {', '.join(sorted(different))}; score again."
            )


def score_mask(prediction: np.ndarray, matte: np.ndarray, *, hce: bool = True) -> MaskScores:
    """Every metric of ``METRICS`` of a prediction, float (H, W) in [0, 1], against its matte, of the same kind or bool.

    The prediction is first rounded to 8 bits, as the field's predictions are files: a predictor and the folder of its
    masks get the same scores. (It matters: in a quadrant without foreground, S-measure asks whether the prediction is
    exactly 0; a background of 1e-4 can cost it 0.25.) The matte is taken as it is,
    and the mask is ``matte > 0.5``, as for the attributes of a scene: of an 8-bit file the grey levels 128 to 255, so
    that a composed matte and its saved file have the same mask (but for a matte of exactly 0.5, which is background).
    BiRefNet's evaluator and PySODMetrics begin at level 129.

    ``hce=False`` leaves out the human correction effort, the slowest metric; it is then None. ``MetricError`` if the
    sizes differ, or if either is not one map of finite numbers in [0, 1].
    """
    prediction, matte = _checked_pair(prediction, matte)
    truth = _Truth.of(matte)
    maps = {"raw": prediction, "stretched": stretched(prediction)}
    values, curves = {}, {}
    for reading, probabilities in maps.items():
        if values and np.array_equal(probabilities, prediction):
            values[reading], curves[reading] = dict(values["raw"]), dict(curves["raw"])
            continue
        same_outline = bool(values) and np.array_equal(probabilities > 0.5, prediction > 0.5)
        outlined = values["raw"] if same_outline else _outline_values(probabilities > 0.5, truth, hce=hce)
        soft, curves[reading] = _soft_values(probabilities, truth)
        values[reading] = {name: (soft if name in soft else outlined)[name] for name in METRICS}
    grey = float(np.mean((matte > 0) & (matte < 1)))
    return MaskScores(values, curves, grey, counted(prediction, truth.mask))


def stretched(prediction: np.ndarray) -> np.ndarray:
    """(p − min) / (max − min) of a prediction, float (H, W) in [0, 1]: float64; a constant one stays as it is."""
    prediction = _checked(prediction, "prediction")
    low, high = prediction.min(), prediction.max()
    return prediction if low == high else (prediction - low) / (high - low)


@dataclass(frozen=True)
class _Truth:
    """What both readings compare with, worked out once."""

    matte: np.ndarray
    mask: np.ndarray
    thin: np.ndarray
    soft_edge_px: float | None

    @classmethod
    def of(cls, matte: np.ndarray) -> _Truth:
        mask = matte > 0.5
        return cls(matte, mask, edges.thin_part(mask), edges.soft_edge_px(matte))


def _soft_values(probabilities: np.ndarray, truth: _Truth) -> tuple[dict, dict]:
    """The metrics that see the grey levels of a prediction, and the curves of E and F."""
    e_curve, e_adaptive = field_measures.e_measure(probabilities, truth.mask)
    f_curve, f_adaptive = field_measures.f_measure(probabilities, truth.mask)
    edge_px = edges.soft_edge_px(probabilities)
    comparable = edge_px is not None and truth.soft_edge_px is not None
    values = {
        "s_measure": field_measures.s_measure(probabilities, truth.mask),
        "e_max": float(e_curve.max()),
        "e_mean": float(e_curve.mean()),
        "e_adaptive": e_adaptive,
        "f_max": float(f_curve.max()),
        "f_mean": float(f_curve.mean()),
        "f_adaptive": f_adaptive,
        "weighted_f": field_measures.weighted_f(probabilities, truth.mask),
        "mae": field_measures.mean_absolute_error(probabilities, truth.mask),
        "matte_mae": field_measures.mean_absolute_error(probabilities, truth.matte),
        "soft_edge_px": edge_px,
        "soft_edge_gap_px": edge_px - truth.soft_edge_px if comparable else None,
    }
    return values, {"e": tuple(e_curve.tolist()), "f": tuple(f_curve.tolist())}


def _outline_values(found: np.ndarray, truth: _Truth, *, hce: bool) -> dict[str, float | None]:
    """The metrics that see only where a prediction is above 0.5."""
    iou, dice = field_measures.iou_and_dice(found, truth.mask)
    return {
        "iou": iou,
        "dice": dice,
        "hce": field_measures.correction_effort(found, truth.mask) if hce else None,
        "boundary_iou": edges.boundary_iou(found, truth.mask),
        "thin_recall": edges.recall(found, truth.thin),
    }


def _checked_pair(prediction: np.ndarray, matte: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 (H, W), the prediction rounded to 8 bits; ``MetricError`` if they cannot be compared."""
    prediction, matte = _checked(prediction, "prediction"), _checked(matte, "matte")
    if prediction.shape != matte.shape:
        raise MetricError(
            f"The prediction is {prediction.shape}, its matte {matte.shape}; "
            "bring the prediction to the size of its image first."
        )
    return np.rint(prediction * 255) / 255, matte


def _checked(values: np.ndarray, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MetricError(f"The {what} cannot be read as an array ({error}); pass a NumPy array.") from None
    if array.ndim != 2 or array.size == 0:
        raise MetricError(f"A {what} is one map (H, W) with pixels in it; found shape {array.shape}.")
    if array.dtype.kind not in "bf":
        raise MetricError(f"A {what} is float in [0, 1]; found {array.dtype}: divide by its full value, 255 at 8 bits.")
    array = np.ascontiguousarray(array, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):
        raise MetricError(f"A {what} is in [0, 1] without NaN; found {low:g} to {high:g}.")
    return np.clip(array, 0, 1)
