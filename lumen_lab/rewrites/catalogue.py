"""Every rewrite by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
)
from lumen_lab.rewrites.channels import PAD_CHANNELS, SPLIT_CONV_OVER_INPUTS, SPLIT_CONV_OVER_OUTPUTS
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_shifts import APPROXIMATE_DEFORM_CONV_BY_SHIFTS
from lumen_lab.rewrites.deform_substitutes import (
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
)
from lumen_lab.rewrites.heads import REDUCE_ATTENTION_RANK, SPLIT_ATTENTION_BY_HEADS
from lumen_lab.rewrites.input_paths import SUBSTITUTE_INPUT_PATHS
from lumen_lab.rewrites.linear import CONVERT_LINEAR_TO_CONV
from lumen_lab.rewrites.record import Rewrite
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.rewrites.tail import FOLD_FULL_RESOLUTION_TAIL, SUBSTITUTE_SLIM_TAIL
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW

CATALOGUE: tuple[Rewrite, ...] = (
    SUBSTITUTE_INPUT_PATHS,
    SUBSTITUTE_GLOBAL_WINDOW,
    SUBSTITUTE_WINDOW,
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_PARTITION_TO_4D,
    CONVERT_WINDOW_MERGE_TO_4D,
    SPLIT_ATTENTION_BY_HEADS,
    REDUCE_ATTENTION_RANK,
    CONVERT_LINEAR_TO_CONV,
    DECOMPOSE_DEFORM_CONV,
    APPROXIMATE_DEFORM_CONV_BY_SHIFTS,
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
    FOLD_FULL_RESOLUTION_TAIL,
    SUBSTITUTE_SLIM_TAIL,
    CONVERT_IMAGE_TILES_TO_4D,
    PAD_CHANNELS,
    FOLD_BATCH_NORM,
    SPLIT_CONV_OVER_INPUTS,
    SPLIT_CONV_OVER_OUTPUTS,
)
"""The rewrites to choose from, in an order in which any of them may follow one another."""


def find_rewrite(name: str, catalogue: Sequence[Rewrite] | None = None) -> Rewrite:
    """The rewrite of that name in ``CATALOGUE``, or another; ``RewriteError`` with the nearest names if it has none."""
    by_name = {rule.name: rule for rule in (CATALOGUE if catalogue is None else catalogue)}
    if name not in by_name:
        near = difflib.get_close_matches(str(name), by_name, 3) or list(by_name)
        raise RewriteError(f"There is no rewrite '{name}' in the catalogue; the nearest are {', '.join(near)}.")
    return by_name[name]
