"""Windows of another size in the Swin encoder: 8 or 16 tokens a side, or one window over the whole map.

A window of 7 holds 49 tokens, which fill neither the NPU's 32-wide tiles nor maps of 160, 80 or 40 without padding.
Another window is another function, so training must make it good; it starts from the published weights.

The position bias starts so that a pair of tokens weighs what it weighs on average in the published windows. Tokens
(dy, dx) apart share a window of side w for v_w = (1 − |dy|/w)(1 − |dx|/w) of the places where a window may lie, so the
published bias gets log(v_7 / v_w), and offsets that no window of 7 holds get its floor. (An offset keeps its meaning,
since the map stays as it is: stretching the table bicubically is further from the teacher, with and without this.)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.swin import SwinBlock, WindowAttention
from lumen_lab.rewrites.convolution import parts_unlike, unlike
from lumen_lab.rewrites.parameters import is_whole, whole_number
from lumen_lab.rewrites.record import AS_GOOD_AS_THE_TEACHER, Constraint, FixedTensors, Rewrite, Site, by_name

STAGES = 4
LEAST_LOG_WEIGHT = -6.0  # of a pair that no published window holds: little, and still within reach of training

Size = tuple[int, int]


def position_index(reach: Size, size: Size) -> Tensor:
    """For each pair of tokens of a map (H, W), the row of a bias table made for maps up to ``reach``: (H·W, H·W).

    The table holds (2H−1)(2W−1) offsets (row-major) for ``reach`` = (H, W); a smaller map reads its middle, and a
    larger one its edge for offsets beyond it.
    """
    offsets = []
    for farthest, token in zip(reach, torch.meshgrid(*map(torch.arange, size), indexing="ij")):
        token = token.flatten()
        offsets.append((token[:, None] - token[None]).clamp(1 - farthest, farthest - 1) + farthest - 1)
    return offsets[0] * (2 * reach[1] - 1) + offsets[1]


class RelativePositions(nn.Module):
    """The position bias of every pair of tokens, from a table ((2H−1)(2W−1), heads): one (tokens, tokens) a head.

    Without parameters: the table belongs to the attention, where training finds it under its published name. What is
    looked up depends on no input, so that a compiler computes it ahead.
    """

    def __init__(self, reach: Size):
        super().__init__()
        self.reach = reach
        self.index = FixedTensors(partial(position_index, reach))
        self.register_buffer("whole_numbers", torch.zeros(0, dtype=torch.int64), persistent=False)

    def forward(self, table: Tensor, size: Size) -> list[Tensor]:
        index = self.index(size, self.whole_numbers)
        return [column[index] for column in table.unbind(1)]


class GlobalAttention(WindowAttention):
    """``WindowAttention`` over a whole map: one window, as high and wide as the map is.

    ``reach``: the largest map (H, W) that the bias table has an entry for every pair of.
    """

    def __init__(self, channels: int, heads: int, reach: Size):
        super().__init__(channels, heads, 1)
        del self.relative_position_index
        self.positions = RelativePositions(reach)
        table = self.relative_position_bias_table
        self.relative_position_bias_table = nn.Parameter(table.new_zeros(table_rows(reach), heads))

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """x: (N, H·W, C) of a map ``size`` = (H, W) -> the same shape."""
        count, tokens, channels = x.shape
        qkv = self.qkv(x).view(count, tokens, 3, self.heads, channels // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each N, heads, tokens, C / heads
        bias = torch.stack(self.positions(self.relative_position_bias_table, size))
        mixed = ((query * self.scale) @ key.transpose(-2, -1) + bias).softmax(-1) @ value
        return self.proj(mixed.transpose(1, 2).reshape(count, tokens, channels))


class GlobalSwinBlock(nn.Module):
    """A Swin block whose one window is the map (N, H, W, C): no padding, no shift, nothing to cut or put back."""

    def __init__(self, block: SwinBlock, attention: GlobalAttention):
        super().__init__()
        self.norm1, self.norm2 = copy.deepcopy(block.norm1), copy.deepcopy(block.norm2)
        self.drop_path, self.mlp = copy.deepcopy(block.drop_path), copy.deepcopy(block.mlp)
        self.attn = attention

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attend(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Every token attends to every token of its map: (N, H, W, C) -> the same shape."""
        return self.attn(x.flatten(1, 2), (x.shape[1], x.shape[2])).view(x.shape)


def table_rows(reach: Size) -> int:
    """Offsets that two tokens of a map (H, W) may have: (2H−1)(2W−1)."""
    return (2 * reach[0] - 1) * (2 * reach[1] - 1)


def seen_together(window: int, offsets: Tensor) -> Tensor:
    """Share of the places of a window in which it holds both of two tokens that are ``offsets`` apart on one axis."""
    return (1 - offsets.abs() / window).clamp(min=0)


def carried_over(table: Tensor, window: int, reach: Size, together: Callable[[Tensor], Tensor]) -> Tensor:
    """A bias table of ``window`` (offsets, heads) as one for maps up to ``reach``: ((2H−1)(2W−1), heads).

    An offset keeps its bias, one beyond the table gets that of the table's edge; added is the logarithm of how often
    the old window held such a pair, over how often the new one does (``together`` of the offsets on one axis).
    """
    span = 2 * window - 1
    places, weights = [], []
    for side in reach:
        offsets = torch.arange(1 - side, side, dtype=torch.float64)
        places.append(offsets.long().clamp(1 - window, window - 1) + window - 1)
        weights.append(seen_together(window, offsets) / together(offsets))
    weight = (weights[0][:, None] * weights[1][None]).log().clamp(min=LEAST_LOG_WEIGHT).flatten()
    rows = (places[0][:, None] * span + places[1][None]).flatten()
    return table[rows.to(table.device)] + weight.to(table)[:, None]


def with_weights_of(attention: WindowAttention, new: WindowAttention, table: Tensor) -> WindowAttention:
    """``new`` with copies of the projections of ``attention`` and with ``table`` as its position bias."""
    new.qkv, new.proj = copy.deepcopy(attention.qkv), copy.deepcopy(attention.proj)
    new.relative_position_bias_table = nn.Parameter(table.clone())
    return new.to(table.device)


def block_with_window(block: SwinBlock, window: int) -> SwinBlock:
    """A copy of ``block`` with windows of ``window``, shifted by half of that if it shifts its own."""
    channels, heads = block.attn.proj.in_features, block.attn.heads
    new = SwinBlock(channels, heads, window, window // 2 if block.shift.shift else 0, 0.0)
    new.norm1, new.norm2 = copy.deepcopy(block.norm1), copy.deepcopy(block.norm2)
    new.drop_path, new.mlp = copy.deepcopy(block.drop_path), copy.deepcopy(block.mlp)
    table = block.attn.relative_position_bias_table.detach()
    table = carried_over(table, block.window, (window, window), partial(seen_together, window))
    with_weights_of(block.attn, new.attn, table)
    return new


def block_with_global_window(block: SwinBlock, reach: Size) -> GlobalSwinBlock:
    """A copy of ``block`` that attends over its whole map; the bias table is made for maps up to ``reach``."""
    channels, heads = block.attn.proj.in_features, block.attn.heads
    table = block.attn.relative_position_bias_table.detach()
    table = carried_over(table, block.window, reach, torch.ones_like)  # every pair of the map is seen
    return GlobalSwinBlock(block, with_weights_of(block.attn, GlobalAttention(channels, heads, reach), table))


def stage_of(path: str) -> int | None:
    """Encoder stage of a block, from 1, by its path ``….layers.<stage − 1>.blocks.<i>``; None for any other path."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.blocks\.\d+$", path)
    return int(found[1]) + 1 if found else None


def _not_as_published(block: SwinBlock) -> str | None:
    """Why a block cannot be built anew: a rewrite made it or parts of it, or it is more than a published block."""
    maker = getattr(block, "rewritten_by", None)
    if maker:
        return f"{maker} has made it already, and its bias table would be carried over twice"
    parts = [path for path, part in block.named_modules() if path and hasattr(part, "rewritten_by")]
    outermost = [path for path in parts if not any(path.startswith(f"{above}.") for above in parts)]
    if outermost:
        return f"its {', '.join(outermost)} has been rewritten already; choose the windows first"
    return unlike(block, SwinBlock) or parts_unlike(block, {"attn": WindowAttention})


def _side_at(sides: tuple[int, ...], path: str) -> int | None:
    """Side of the windows at a block's path; None if they are given by stage and the path names none."""
    stage = stage_of(path)
    return sides[0] if len(sides) == 1 else None if stage is None else sides[stage - 1]


def _window_refused(sides: tuple[int, ...], site: Site) -> str | None:
    side = _side_at(sides, site.path)
    if side is None:
        return "its path names no stage (layers.<i>.blocks.<j>), and the windows are given by stage"
    if side == site.module.window:
        return f"its window is {side} already"
    return _not_as_published(site.module)


def _windowed(sides: tuple[int, ...], site: Site) -> dict[str, nn.Module]:
    return {site.path: block_with_window(site.module, _side_at(sides, site.path))}


def substitute_window(*, window: int | tuple[int, int, int, int] = 8) -> Rewrite:
    """Windows of another side in the encoder's blocks; four numbers give one a stage.

    ``RewriteError`` for a window below 2. Maps that are no multiple of it are padded, as the published blocks do.
    """
    sides = window if isinstance(window, tuple) else (window,)
    if len(sides) not in (1, STAGES) or not all(is_whole(side, least=2) for side in sides):
        raise RewriteError(f"window is a side of at least 2 tokens, or {STAGES} of them, asked for {window!r}.")
    return Rewrite(
        name="substitute_window",
        replaces=SwinBlock,
        built=partial(_windowed, sides),
        refused=partial(_window_refused, sides),
        claim=AS_GOOD_AS_THE_TEACHER,
        because="windows of 8 or 16 cut maps of 160, 80 and 40 without padding and fill the NPU's 32-wide tiles; 49 "
        "tokens are padded to 64 there",
        source="one block compiled for SM8850 (onnxruntime-qnn 2.7.0, QAIRT 2.51), windows of 7, 8 and 16",
        after=(Constraint("substitute_global_window", "the last stage's bias tables would be carried over twice"),),
        code=f"substitute_window(window={window!r})",
    )


def _other_stage(stage: int, site: Site) -> str | None:
    found = stage_of(site.path)
    if found not in (None, stage):
        return f"it is in stage {found}; one window over the whole map is asked for in stage {stage}"
    return _not_as_published(site.module)


def _global(site: Site) -> dict[str, nn.Module]:
    sizes = {(height, width) for _, height, width, _ in site.input_shapes}
    block = block_with_global_window(site.module, tuple(map(max, zip(*sizes))))
    positions = block.attn.positions
    for size in sizes:
        positions.index(size, positions.whole_numbers)
    return {site.path: block}


def substitute_global_window(*, stage: int = STAGES) -> Rewrite:
    """One window over the whole map in the blocks of an encoder stage (from 1, the last by default).

    Blocks whose path names no stage are taken as well. The bias table covers the largest map that the site sees, on
    each axis. ``RewriteError`` for a stage that is none.
    """
    whole_number("stage", stage, of="the encoder", most=STAGES, instead=f"{STAGES} is the last, the default")
    return Rewrite(
        name="substitute_global_window",
        replaces=SwinBlock,
        built=_global,
        refused=partial(_other_stage, stage),
        claim=AS_GOOD_AS_THE_TEACHER,
        because="the last stage's map (20×20 at 640) is little more than some windows of 7: one window needs no "
        "padding, no shift, no mask and no cutting, and its matrix products are large",
        source="Lumen Cutout's published recipe",
        after=(Constraint("substitute_input_paths", "it decides how large the maps are that the bias table is for"),),
        code=f"substitute_global_window(stage={stage})",
    )


SUBSTITUTE_WINDOW = by_name(substitute_window())
SUBSTITUTE_GLOBAL_WINDOW = by_name(substitute_global_window())
