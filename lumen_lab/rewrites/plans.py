"""The plans by name."""

from __future__ import annotations

from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
)
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.plan import Plan
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D

EXACT_PLAN: Plan = (
    DECOMPOSE_DEFORM_CONV,
    CONVERT_IMAGE_TILES_TO_4D,
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_PARTITION_TO_4D,
    CONVERT_WINDOW_MERGE_TO_4D,
    FOLD_BATCH_NORM,
)
"""Provably the same network: no training is needed after it."""
