"""Window attention with static, low-rank data movement.

Windows are cut and put back in four dimensions, and the cyclic shift becomes zero padding with a fixed mask, so that
a window never holds tokens from two sides of the image. That is the same function while −100 masks: while no attention
logit lies some 80 below another of its window (exp(−20) of what is masked would show in float64 at 1e-9). Beyond that
the published network attends across its own mask, and the check of the rewrite fails, as it should.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.swin import (
    MASKED,
    CyclicShift,
    CyclicUnshift,
    SwinBlock,
    WindowMerge,
    WindowPartition,
)
from lumen_lab.rewrites.convolution import parts_unlike, unlike
from lumen_lab.rewrites.record import SIZES_FIRST, Constraint, FixedTensors, Rewrite, Site
from lumen_lab.specs import Exact

NOTHING = (0, 0, 0, 0, 0, 0)


class WindowPartition4d(nn.Module):
    """``WindowPartition`` with no tensor above rank four: rows of windows first, then windows of a row.

    The pad adds nothing and is one Pad node of the ONNX file for each partition: without an operation of its own here
    the compiler joins the reshape with those inside the linear layers behind it, and then cuts every window out of
    tiles that hold several.
    """

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        w = self.window
        strips = x.reshape(n * height // w, w, width // w, w * channels)  # N·rows, w, columns, w·C
        return F.pad(strips.transpose(1, 2).reshape(-1, w * w, channels), NOTHING)


class WindowMerge4d(nn.Module):
    """``WindowMerge`` with no tensor above rank four."""

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def forward(self, windows: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        w, channels = self.window, windows.shape[-1]
        strips = windows.reshape(-1, width // w, w, w * channels)  # N·rows, columns, w, w·C
        return strips.transpose(1, 2).reshape(-1, height, width, channels)


def shifted_mask(window: int, shift: int, size: tuple[int, int]) -> Tensor:
    """Attention mask of the padded map in place of the rolled one: (windows, 1, window²), 0 or ``MASKED``.

    ``size`` is that of the map before the shift's own padding. Without the roll a window holds tokens of one region
    and padding, so it is enough to say which keys are padding; what padding itself attends to is cut off again. Said
    for each pair of tokens, the mask would be ``window``² times the bytes.
    """
    padding = torch.ones(1, *size, 1)
    padding = F.pad(padding, (0, 0, window - shift, shift, window - shift, shift)) == 0
    keys = WindowPartition(window)(padding).squeeze(-1)
    return torch.zeros(keys.shape, dtype=torch.float64).masked_fill(keys, MASKED)[:, None]


class PaddedShift(nn.Module):
    """In place of the roll: pad so that windows fall on the shifted grid; returns (map, fixed mask)."""

    def __init__(self, window: int, shift: int):
        super().__init__()
        self.window, self.shift = window, shift
        self.mask = FixedTensors(partial(shifted_mask, window, shift))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before, after = self.window - self.shift, self.shift
        mask = self.mask((x.shape[1], x.shape[2]), x)
        return F.pad(x, (0, 0, before, after, before, after)), mask


class PaddedUnshift(nn.Module):
    """Cut the padding off again: (N, Hp, Wp, C) -> (N, H, W, C)."""

    def __init__(self, window: int, shift: int):
        super().__init__()
        self.start = window - shift

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return x[:, self.start : self.start + size[0], self.start : self.start + size[1]]


def _partition_4d(site: Site) -> dict[str, nn.Module]:
    return {site.path: WindowPartition4d(site.module.window)}


def _no_partition(site: Site) -> str | None:
    return unlike(site.module, WindowPartition)


def _no_merge(site: Site) -> str | None:
    return unlike(site.module, WindowMerge)


def _merge_4d(site: Site) -> dict[str, nn.Module]:
    return {site.path: WindowMerge4d(site.module.window)}


def _padded_shift(site: Site) -> dict[str, nn.Module]:
    block: SwinBlock = site.module
    shift = PaddedShift(block.shift.window, block.shift.shift)
    weight = block.norm1.weight
    for _, height, width, _ in site.input_shapes:
        padded = (height + -height % block.window, width + -width % block.window)
        shift.mask(padded, weight)
    unshift = PaddedUnshift(block.shift.window, block.shift.shift)
    inside = f"{site.path}." if site.path else ""
    return {f"{inside}shift": shift, f"{inside}unshift": unshift}


def _not_shifted(site: Site) -> str | None:
    shift = site.module.shift
    if not isinstance(shift, CyclicShift):
        return "the shift of this block has been rewritten already"
    if shift.shift == 0:
        return "this block does not shift its windows"
    return parts_unlike(site.module, {"shift": CyclicShift, "unshift": CyclicUnshift})


WINDOWS_FIRST = tuple(
    Constraint(name, "it builds the blocks anew with other windows, and finds none in what has been rewritten")
    for name in ("substitute_window", "substitute_global_window")
)
SIZES_AND_WINDOWS_FIRST = (SIZES_FIRST, *WINDOWS_FIRST)

CONVERT_WINDOW_PARTITION_TO_4D = Rewrite(
    name="convert_window_partition_to_4d",
    replaces=WindowPartition,
    built=_partition_4d,
    refused=_no_partition,
    claim=Exact(movement=True),
    because="the published partition goes through rank 6, which HTP takes at batch 1 only (the provider drops an axis) "
    "and refuses from batch 2 on",
    source="one-operation graphs through onnxruntime-qnn 2.7.0 (QAIRT 2.51): lumen_lab.auditing.rules",
    after=WINDOWS_FIRST,
)

CONVERT_WINDOW_MERGE_TO_4D = Rewrite(
    name="convert_window_merge_to_4d",
    replaces=WindowMerge,
    built=_merge_4d,
    refused=_no_merge,
    claim=Exact(movement=True),
    because="the inverse of the partition, through rank 6 as well",
    source=CONVERT_WINDOW_PARTITION_TO_4D.source,
    after=WINDOWS_FIRST,
)

CONVERT_CYCLIC_SHIFT_TO_PADDING = Rewrite(
    name="convert_cyclic_shift_to_padding",
    replaces=SwinBlock,
    built=_padded_shift,
    refused=_not_shifted,
    claim=Exact(),
    because="a roll is two slices and a concat on each axis, twice a block, and its mask says for each pair of tokens "
    "what padding says for each key. This compiler takes either: with windows of 7 padding saves a third of the DRAM "
    "of stage 1 at 640 for 7 to 24 % more tiles; with windows of 8 or 16 the roll is the cheaper one",
    source="Swin, figure 4 (the roll is an optimisation of padding); Lumen Cutout's published recipe",
    after=SIZES_AND_WINDOWS_FIRST,
)
