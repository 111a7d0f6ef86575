"""The plans by name."""

from __future__ import annotations

from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
)
from lumen_lab.rewrites.channels import SPLIT_CONV_OVER_INPUTS
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_substitutes import SUBSTITUTE_PLAIN_CONV
from lumen_lab.rewrites.heads import REDUCE_ATTENTION_RANK, SPLIT_ATTENTION_BY_HEADS
from lumen_lab.rewrites.input_paths import SUBSTITUTE_INPUT_PATHS
from lumen_lab.rewrites.plan import Plan
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.rewrites.tail import FOLD_FULL_RESOLUTION_TAIL, SUBSTITUTE_SLIM_TAIL
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW

WINDOWS_IN_4D: Plan = (CONVERT_WINDOW_PARTITION_TO_4D, CONVERT_WINDOW_MERGE_TO_4D)
"""Windows cut and merged below rank five: a part of every plan."""

EXACT_PLAN: Plan = (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    *WINDOWS_IN_4D,
    SPLIT_ATTENTION_BY_HEADS,
    DECOMPOSE_DEFORM_CONV,
    FOLD_FULL_RESOLUTION_TAIL,
    CONVERT_IMAGE_TILES_TO_4D,
    FOLD_BATCH_NORM,
    SPLIT_CONV_OVER_INPUTS,
)
"""Provably the same network: no training is needed after it."""

LUMEN_PLAN: Plan = (
    SUBSTITUTE_INPUT_PATHS,
    SUBSTITUTE_GLOBAL_WINDOW,
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    *WINDOWS_IN_4D,
    REDUCE_ATTENTION_RANK,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SLIM_TAIL,
    CONVERT_IMAGE_TILES_TO_4D,
    FOLD_BATCH_NORM,
    SPLIT_CONV_OVER_INPUTS,
)
"""The recipe that Lumen Cutout has published: what it substitutes must be trained (backbone at 640, mask at 1024)."""

LEAN_PLAN: Plan = (
    SUBSTITUTE_INPUT_PATHS,
    SUBSTITUTE_GLOBAL_WINDOW,
    SUBSTITUTE_WINDOW,
    *WINDOWS_IN_4D,
    SPLIT_ATTENTION_BY_HEADS,
    DECOMPOSE_DEFORM_CONV,
    FOLD_FULL_RESOLUTION_TAIL,
    CONVERT_IMAGE_TILES_TO_4D,
    FOLD_BATCH_NORM,
    SPLIT_CONV_OVER_INPUTS,
)
"""The same two input paths with exact deformable convs, heads and tail, and windows of 8: less to train and to move.

The roll stays: windows of 8 fit the maps, and padding would add windows (tests/benchmarks/attention_traffic.py).
"""
