"""The yardstick: how good a predicted mask is, in the field's measures and in what they lack.

Pure functions on arrays. ``score_mask`` compares one prediction with its matte, ``summarise`` makes the tables of a
data set, and ``METRICS`` says what each column is. Every metric is finite or None (undefined on this image), and a
mean says over how many images it was taken.
"""

from lumen_lab.metrics.confidence import Reliability
from lumen_lab.metrics.definitions import METRICS, READINGS, Metric
from lumen_lab.metrics.edges import boundary_band, soft_edge_px, thin_part
from lumen_lab.metrics.scores import ImageScores, Scores, summarise
from lumen_lab.metrics.scoring import MaskScores, score_mask, stretched

__all__ = [
    "METRICS",
    "READINGS",
    "ImageScores",
    "MaskScores",
    "Metric",
    "Reliability",
    "Scores",
    "boundary_band",
    "score_mask",
    "soft_edge_px",
    "stretched",
    "summarise",
    "thin_part",
]
