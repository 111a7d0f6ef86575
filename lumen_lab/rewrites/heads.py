"""Attention head by head, with no tensor above rank four.

The NPU keeps (N, H, W, C) in tiles. A tensor (windows, heads, tokens, channels) is cut out of one (windows, tokens,
3·C) by a transpose that touches memory at almost every element; a head's own query, key and value are best computed by
linears of their own. The position bias keeps its table, so that it can be trained, and is looked up ahead.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from lumen_lab.network.swin import WindowAttention
from lumen_lab.rewrites.attention import WINDOWS_FIRST
from lumen_lab.rewrites.convolution import unlike
from lumen_lab.rewrites.record import Constraint, Rewrite, Site
from lumen_lab.rewrites.windows import GlobalAttention, RelativePositions, Size
from lumen_lab.specs import Exact

Heads = list[tuple[Tensor, Tensor, Tensor]]


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """One head: (B, tokens, C / heads) each, bias (tokens, tokens), mask (B, 1 or tokens, tokens) or None.

    Swin, equation 4, with the scale of 1/√d in the query already.
    """
    logits = query @ key.transpose(-2, -1) + bias
    if mask is not None:
        logits = logits + mask
    return logits.softmax(-1) @ value


class SplitProjection(nn.Module):
    """A linear a head for query, key and value, with the scale in the query's weights: (B, tokens, C) -> ``Heads``."""

    def __init__(self, attention: WindowAttention):
        super().__init__()
        self.query = linears_of_rows(attention.qkv, 0, attention.heads, scale=attention.scale)
        self.key = linears_of_rows(attention.qkv, 1, attention.heads)
        self.value = linears_of_rows(attention.qkv, 2, attention.heads)

    def forward(self, x: Tensor) -> Heads:
        return [(query(x), key(x), value(x)) for query, key, value in zip(self.query, self.key, self.value)]


class SlicedProjection(nn.Module):
    """The published linear for all heads, each head's part cut out of its output by slices."""

    def __init__(self, attention: WindowAttention):
        super().__init__()
        self.heads, self.scale = attention.heads, attention.scale
        self.qkv = copy.deepcopy(attention.qkv)

    def forward(self, x: Tensor) -> Heads:
        parts = self.qkv(x).split(x.shape[-1] // self.heads, -1)  # queries of all heads, then keys, then values
        queries, keys, values = parts[: self.heads], parts[self.heads : 2 * self.heads], parts[2 * self.heads :]
        return [(query * self.scale, key, value) for query, key, value in zip(queries, keys, values)]


def linears_of_rows(qkv: nn.Linear, third: int, heads: int, *, scale: float = 1.0) -> nn.ModuleList:
    """Linears for the heads of one third (query, key, value) of a fused projection, their outputs times ``scale``."""
    made = nn.ModuleList()
    for rows in torch.arange(qkv.out_features).chunk(3)[third].chunk(heads):
        linear = nn.Linear(qkv.in_features, len(rows), bias=qkv.bias is not None).to(qkv.weight)
        with torch.no_grad():
            linear.weight.copy_(qkv.weight[rows] * scale)
            if qkv.bias is not None:
                linear.bias.copy_(qkv.bias[rows] * scale)
        made.append(linear)
    return made


class HeadwiseAttention(nn.Module):
    """Attention one head after the other over tokens (B, tokens, C); ``projection`` gives the heads.

    The bias table keeps its published name and stays trainable.
    """

    def __init__(self, attention: WindowAttention, projection: nn.Module):
        super().__init__()
        self.projection = projection
        self.proj = copy.deepcopy(attention.proj)
        self.relative_position_bias_table = nn.Parameter(attention.relative_position_bias_table.detach().clone())
        self.positions = positions_of(attention)

    def over(self, x: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        """Tokens of maps or windows ``size``, attended and projected: the shape of x."""
        biases = self.positions(self.relative_position_bias_table, size)
        mixed = [attend(*head, bias, mask) for head, bias in zip(self.projection(x), biases)]
        return self.proj(torch.cat(mixed, -1))


class HeadsInWindows(HeadwiseAttention):
    """In place of ``WindowAttention``."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (N * windows, tokens, C); mask: (windows, 1 or tokens, tokens) or None."""
        if mask is not None:
            mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1)
        return self.over(x, self.positions.reach, mask)


class HeadsOverMap(HeadwiseAttention):
    """In place of ``GlobalAttention``."""

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """x: (N, H·W, C) of a map ``size`` = (H, W)."""
        return self.over(x, size, None)


def positions_of(attention: WindowAttention) -> RelativePositions:
    """Where the bias of a pair of tokens stands in the table of ``attention``, the sizes known to it included."""
    if isinstance(attention, GlobalAttention):
        return copy.deepcopy(attention.positions)
    positions = RelativePositions((attention.window, attention.window))
    positions.to(attention.relative_position_bias_table.device)
    positions.index(positions.reach, positions.whole_numbers)
    return positions


def _headwise(projection: type[nn.Module], site: Site) -> dict[str, nn.Module]:
    attention = site.module
    kind = HeadsOverMap if isinstance(attention, GlobalAttention) else HeadsInWindows
    return {site.path: kind(attention, projection(attention))}


def _projection_rewritten(site: Site) -> str | None:
    attention = site.module
    if hasattr(attention.qkv, "rewritten_by"):
        return f"its projection is a {type(attention.qkv).__name__}, no Linear; take the heads apart first"
    kind = GlobalAttention if isinstance(attention, GlobalAttention) else WindowAttention
    return unlike(attention, kind) or unlike(attention.qkv, nn.Linear, called="its projection")


SPLIT_ATTENTION_BY_HEADS = Rewrite(
    name="split_attention_by_heads",
    replaces=WindowAttention,
    built=partial(_headwise, SplitProjection),
    refused=_projection_rewritten,
    claim=Exact(),
    because="heads cut out of a fused projection by a transpose cost 1.3 GB of DRAM in one block of stage 2 at 640 in "
    "float16 (3.1 GB where it is shifted); a head's own linears cost 11 MB, and half of what slices cost in stage 1",
    source="one Swin block compiled for SM8850 (onnxruntime-qnn 2.7.0, QAIRT 2.51) in each form",
    after=WINDOWS_FIRST,
    excludes=(Constraint("reduce_attention_rank", "both replace the window attention"),),
)

REDUCE_ATTENTION_RANK = Rewrite(
    name="reduce_attention_rank",
    replaces=WindowAttention,
    built=partial(_headwise, SlicedProjection),
    refused=_projection_rewritten,
    claim=Exact(),
    because="the published attention goes through rank 5; slices of its fused projection do the same in rank 3, with "
    "the published weights as they are",
    source="Lumen Cutout's published recipe",
    after=WINDOWS_FIRST,
    excludes=(Constraint("split_attention_by_heads", "both replace the window attention"),),
)
