"""The field's measures, computed by PySODMetrics; only what it leaves undefined is settled here.

All functions take a prediction, float64 (H, W) in [0, 1], and a mask, bool (H, W), both already checked. Settled:

- *Empty mask*: S is 1 − mean(prediction) and E the share left empty, as in PySODMetrics. F, IoU and Dice are 1 at a
  threshold that leaves the prediction empty as well, else 0. Weighted F is 1 for a black prediction, else 0. A black
  prediction counts as empty at every threshold, 0 included, for E as for F, so that a perfect empty pair has 1 in all.
- *Full mask*: S is mean(prediction). The 256 thresholds begin with 0, which takes every pixel, so that the best E and F
  of a full mask are 1 whatever was predicted.
- *Black prediction*: its adaptive threshold, twice its mean, is 0 and would take every pixel; it takes none instead.
- *Foreground along a border*: S cuts the frame at the centroid; an empty quadrant has no weight, instead of NaN.
- *Constant quadrant of the prediction*: its term of S is 1 if the mask is constant there too, else 0. That is the
  formula's value, which rounding would decide otherwise.
- PySODMetrics divides E by H·W − 1, so that a perfect mask gets more than 1: it is cut at 1.

Left as it is: weighted F averages errors over 7 × 7 pixels, outside the frame with zeros, so that missing a mask that
fills a small frame still scores (0.3 at 16 × 20 pixels).
"""

from __future__ import annotations

import numpy as np

THRESHOLDS = 256


def s_measure(prediction: np.ndarray, mask: np.ndarray) -> float:
    """S-measure with α = 0.5."""
    from py_sod_metrics import Smeasure

    measure = Smeasure()
    similarity = measure.ssim

    def quadrant(part: np.ndarray, mask_part: np.ndarray) -> float:
        if part.size == 0:
            return 0.0
        if part.min() == part.max():
            return float(mask_part.min() == mask_part.max())
        return similarity(part, mask_part)

    measure.ssim = quadrant
    return float(measure.cal_sm(prediction, mask))


def e_measure(prediction: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, float]:
    """E-measure: the curve over the thresholds 0/255, 1/255 … 255/255 (a pixel is taken from its threshold on), and E
    at the adaptive threshold."""
    from py_sod_metrics import Emeasure

    measure = Emeasure()
    measure.step(prediction, mask, normalize=False)
    both_empty = not mask.any() and not prediction.any()
    curve = np.ones(THRESHOLDS) if both_empty else np.minimum(measure.changeable_ems[0][::-1], 1.0)
    adaptive = measure.cal_em_with_threshold(prediction, mask, threshold=adaptive_threshold(prediction))
    return curve, min(float(adaptive), 1.0)


def f_measure(prediction: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, float]:
    """F-measure with β² = 0.3: the curve over the same thresholds, and F at the adaptive threshold."""
    from py_sod_metrics import FmeasureHandler, FmeasureV2

    taken = prediction >= adaptive_threshold(prediction)
    if not mask.any():
        return _empty_mask_curve(prediction), float(not taken.any())
    handler = FmeasureHandler(with_dynamic=True, with_adaptive=False)
    FmeasureV2({"f": handler}).step(prediction, mask, normalize=False)
    foreground = int(np.count_nonzero(mask))
    counts = FmeasureV2.get_statistics(taken, mask, foreground, mask.size - foreground)
    return handler.dynamic_results[0][::-1], float(handler(**counts))


def _empty_mask_curve(prediction: np.ndarray) -> np.ndarray:
    highest = int(prediction.max() * 255)
    return (np.arange(THRESHOLDS) > highest).astype(float) if highest else np.ones(THRESHOLDS)


def adaptive_threshold(prediction: np.ndarray) -> float:
    """Twice the mean, at most 1; 1 for a black prediction."""
    from py_sod_metrics.utils import get_adaptive_threshold

    return float(get_adaptive_threshold(prediction)) or 1.0


def weighted_f(prediction: np.ndarray, mask: np.ndarray) -> float:
    """Weighted F-measure with β² = 1."""
    from py_sod_metrics import WeightedFmeasure

    if not mask.any():
        return float(not prediction.any())
    return float(np.clip(WeightedFmeasure().cal_wfm(prediction, mask), 0, 1))


def mean_absolute_error(prediction: np.ndarray, target: np.ndarray) -> float:
    """MAE; ``target`` may be the mask or a matte in [0, 1]."""
    from py_sod_metrics import MAE

    return float(MAE().cal_mae(prediction, target.astype(np.float64)))


def iou_and_dice(found: np.ndarray, mask: np.ndarray) -> tuple[float, float]:
    """IoU and Dice of two bool masks (H, W)."""
    from py_sod_metrics import DICEHandler, FmeasureV2, IOUHandler

    if not mask.any() and not found.any():
        return 1.0, 1.0
    foreground = int(np.count_nonzero(mask))
    counts = FmeasureV2.get_statistics(found, mask, foreground, mask.size - foreground)
    return float(IOUHandler(False, False)(**counts)), float(DICEHandler(False, False)(**counts))


def correction_effort(found: np.ndarray, mask: np.ndarray) -> float:
    """HCE of two bool masks (H, W): control points and regions to correct by hand."""
    from py_sod_metrics import HumanCorrectionEffortMeasure

    return float(HumanCorrectionEffortMeasure().cal_hce(found.astype(np.float64), mask))
