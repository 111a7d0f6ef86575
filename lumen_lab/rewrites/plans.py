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
from lumen_lab.rewrites.plan import Plan, only_at
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

WIDE_CONVS_OF_LARGEST_MAP = tuple(
    f"decoder.decoder_block1.dec_att.aspp_deforms.{index}.atrous_conv" for index in (1, 2)
)
"""The deformable convs with 3 × 3 and 7 × 7 kernels at a quarter of the input's size."""

LEAN_PLAN: Plan = (
    SUBSTITUTE_INPUT_PATHS,
    SUBSTITUTE_GLOBAL_WINDOW,
    SUBSTITUTE_WINDOW,
    *WINDOWS_IN_4D,
    SPLIT_ATTENTION_BY_HEADS,
    only_at(SUBSTITUTE_PLAIN_CONV, WIDE_CONVS_OF_LARGEST_MAP),
    DECOMPOSE_DEFORM_CONV,
    FOLD_FULL_RESOLUTION_TAIL,
    CONVERT_IMAGE_TILES_TO_4D,
    FOLD_BATCH_NORM,
    SPLIT_CONV_OVER_INPUTS,
)
"""The same two input paths and less else to learn: windows of 8, and 2 of the 20 deformable convs.

Those two alone move 432 MB at 640 (``tests/benchmarks/exact_deform_traffic.py``); the other 18, heads and tail stay
exact. The roll stays: windows of 8 fit the maps, and padding would add windows (``tests/benchmarks/
attention_traffic.py``). It moves less than ``LUMEN_PLAN`` and starts nearer to the teacher, with more MACs and more,
smaller operations (docs/rewrites.md).
"""
