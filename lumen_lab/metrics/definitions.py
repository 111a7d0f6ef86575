"""What is measured: one record a metric, with its sentence and its source, in the order of every table."""

from __future__ import annotations

from dataclasses import dataclass

from lumen_lab.specs import Record

READINGS = ("raw", "stretched")
"""The prediction as it is, and min-max stretched to [0, 1].

BiRefNet's evaluator stretches, so published tables are compared with ``stretched``. Here ``raw`` is the default and
comes first, because stretching hides what this library looks for: a model whose INT8 range was cut scores as the sound
one, though nobody stretches a mask before using it. Tables show both side by side.
"""


@dataclass(frozen=True)
class Metric(Record):
    """One metric: ``better`` is "higher", "lower", "zero" (nearer to it) or "neither"; ``unit`` "" is a share of 1."""

    name: str
    title: str
    better: str
    unit: str
    definition: str
    source: str


_E = "Fan et al., Enhanced-alignment measure, IJCAI 2018; PySODMetrics"
_F = "Achanta et al., Frequency-tuned salient region detection, CVPR 2009 (β² = 0.3); PySODMetrics"
_PERRAZI = "Perazzi et al., Saliency filters, CVPR 2012; PySODMetrics"
_HERE = "lumen_lab.metrics.edges"

_ALL = (
    Metric(
        "s_measure",
        "S-measure",
        "higher",
        "",
        "Mean of how alike objects and four quadrants are in brightness and contrast (α = 0.5).",
        "Fan et al., Structure-measure, ICCV 2017; PySODMetrics",
    ),
    Metric(
        "e_max",
        "max E-measure",
        "higher",
        "",
        "E at the best of 256 thresholds; for a data set, the best of the mean curve.",
        _E,
    ),
    Metric("e_mean", "mean E-measure", "higher", "", "E, averaged over 256 thresholds.", _E),
    Metric("e_adaptive", "adaptive E-measure", "higher", "", "E at twice the prediction's mean.", _E),
    Metric(
        "f_max",
        "max F-measure",
        "higher",
        "",
        "F at the best of 256 thresholds; for a data set, the best of the mean curve.",
        _F,
    ),
    Metric("f_mean", "mean F-measure", "higher", "", "F, averaged over 256 thresholds.", _F),
    Metric("f_adaptive", "adaptive F-measure", "higher", "", "F at twice the prediction's mean.", _F),
    Metric(
        "weighted_f",
        "weighted F-measure",
        "higher",
        "",
        "F₁ without a threshold, errors weighted by where they lie.",
        "Margolin et al., How to evaluate foreground maps?, CVPR 2014; PySODMetrics",
    ),
    Metric("mae", "MAE", "lower", "", "Mean absolute difference to the binary mask.", _PERRAZI),
    Metric("matte_mae", "MAE to the matte", "lower", "", "Mean absolute difference to the soft matte.", _PERRAZI),
    Metric("iou", "IoU", "higher", "", "Intersection over union at the fixed threshold 0.5.", "PySODMetrics, binary"),
    Metric("dice", "Dice", "higher", "", "Twice the intersection over both areas, at 0.5.", "PySODMetrics, binary"),
    Metric(
        "hce",
        "HCE",
        "lower",
        "points",
        "Control points and regions that a person would have to correct at 0.5.",
        "Qin et al., Dichotomous image segmentation, ECCV 2022 (γ = 5, ε = 2); PySODMetrics",
    ),
    Metric(
        "boundary_iou",
        "boundary IoU",
        "higher",
        "",
        "IoU at 0.5 of the bands within 2 % of the diagonal inside either outline.",
        "Cheng et al., Boundary IoU, CVPR 2021, arXiv:2103.16562",
    ),
    Metric(
        "thin_recall",
        "thin recall",
        "higher",
        "",
        "Share of the mask's thin part that the prediction holds at 0.5.",
        f"{_HERE}.thin_part",
    ),
    Metric(
        "soft_edge_px",
        "soft edge",
        "neither",
        "px",
        "Width of the prediction's soft edge; a linear ramp of w pixels has width w, a hard edge 0.",
        f"{_HERE}.soft_edge_px",
    ),
    Metric(
        "soft_edge_gap_px",
        "soft edge − matte's",
        "zero",
        "px",
        "Soft edge of the prediction minus that of the matte; above 0, the prediction is softer.",
        f"{_HERE}.soft_edge_px",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
