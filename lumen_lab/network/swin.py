"""Swin Transformer v1 as BiRefNet uses it: any input size, one map per stage (Liu et al., 2021, arXiv:2103.14030).

Maps travel as (N, H, W, C). The parts that only move data (partition, shift and their inverses) are modules without
parameters, so that a rewrite can replace one of them by its path.
"""

from __future__ import annotations

import torch
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.config import BiRefNetConfig

MASKED = -100.0  # added to the logits of tokens that are not neighbours: finite, so that it can be quantised


class WindowPartition(nn.Module):
    """(N, H, W, C) with H, W multiples of the window -> (N * windows, window², C), windows in row-major order."""

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        w = self.window
        grid = x.view(n, height // w, w, width // w, w, channels)  # N, rows, w, columns, w, C
        return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, channels)


class WindowMerge(nn.Module):
    """The inverse of ``WindowPartition``: (N * windows, window², C) -> (N, H, W, C) for the given padded (H, W)."""

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def forward(self, windows: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        w = self.window
        grid = windows.view(-1, height // w, width // w, w, w, windows.shape[-1])  # N, rows, columns, w, w, C
        return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, windows.shape[-1])


def shifted_window_regions(size: tuple[int, int], window: int, shift: int, device=None) -> Tensor:
    """Which of the nine regions each token of the rolled map belongs to: int64, (1, H, W, 1).

    After a roll by ``shift`` the last rows and columns sit beside tokens from the far side of the image; tokens
    attend only within their own region (Swin, figure 4).
    """
    zones = []
    for length in size:
        position = torch.arange(length, device=device)
        zones.append((position >= length - window).long() + (position >= length - shift).long())
    return (zones[0][:, None] * 3 + zones[1][None, :])[None, :, :, None]


class CyclicShift(nn.Module):
    """Roll the padded map up and left by ``shift``; returns it with the attention mask (windows, window², window²)."""

    def __init__(self, window: int, shift: int):
        super().__init__()
        self.window, self.shift = window, shift
        self.partition = WindowPartition(window)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.shift == 0:
            return x, None
        regions = shifted_window_regions(x.shape[1:3], self.window, self.shift, x.device)
        regions = self.partition(regions).squeeze(-1)
        apart = regions[:, None, :] != regions[:, :, None]
        mask = torch.zeros(apart.shape, dtype=x.dtype, device=x.device).masked_fill(apart, MASKED)
        return torch.roll(x, (-self.shift, -self.shift), (1, 2)), mask


class CyclicUnshift(nn.Module):
    """The inverse roll, then the crop that undoes the padding: (N, Hp, Wp, C) -> (N, H, W, C)."""

    def __init__(self, shift: int):
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x[:, : size[0], : size[1]]


def relative_position_index(window: int) -> Tensor:
    """For each pair of tokens of a window, the row of the bias table: int64, (window², window²)."""
    row, column = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    row, column = row.flatten(), column.flatten()
    span = 2 * window - 1
    return (row[:, None] - row[None] + window - 1) * span + (column[:, None] - column[None] + window - 1)


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows with a learned relative position bias (Swin, equation 4)."""

    def __init__(self, channels: int, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window
        self.scale = (channels // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_position_index(window))
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def position_bias(self) -> Tensor:
        """(1, heads, window², window²)."""
        tokens = self.window**2
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return bias.view(tokens, tokens, self.heads).permute(2, 0, 1)[None]

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (N * windows, tokens, C); mask: (windows, tokens, tokens) or None."""
        count, tokens, channels = x.shape
        qkv = self.qkv(x).view(count, tokens, 3, self.heads, channels // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each N * windows, heads, tokens, C / heads
        logits = (query * self.scale) @ key.transpose(-2, -1) + self.position_bias()
        if mask is not None:
            windows = mask.shape[0]
            logits = logits.view(count // windows, windows, self.heads, tokens, tokens) + mask[None, :, None]
            logits = logits.view(count, self.heads, tokens, tokens)
        mixed = logits.softmax(-1) @ value
        return self.proj(mixed.transpose(1, 2).reshape(count, tokens, channels))


class Mlp(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, channels: int, ratio: int = 4):
        super().__init__()
        self.fc1 = nn.Linear(channels, ratio * channels)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(ratio * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class SwinBlock(nn.Module):
    """Windowed attention and an MLP, each after a LayerNorm and with a residual (Swin, figure 3b).

    The map is padded with zeros *after* norm1, and the padded tokens are attended to: they act as keys and values
    equal to the bias of ``qkv``. An exact rewrite must keep them.
    """

    def __init__(self, channels: int, heads: int, window: int, shift: int, drop_path: float):
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(channels)
        self.shift = CyclicShift(window, shift)
        self.partition = WindowPartition(window)
        self.attn = WindowAttention(channels, heads, window)
        self.merge = WindowMerge(window)
        self.unshift = CyclicUnshift(shift)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = Mlp(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attend(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Pad, shift, attend inside each window, and put everything back: (N, H, W, C) -> the same shape."""
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -width % self.window, 0, -height % self.window))
        x, mask = self.shift(x)
        windows = self.attn(self.partition(x), mask)
        return self.unshift(self.merge(windows, x.shape[1:3]), (height, width))


class PatchMerging(nn.Module):
    """Halve the map: 2×2 neighbours are concatenated, normalised and projected to twice the channels.

    Odd sizes are padded with zeros; the order of the four neighbours is (0,0), (1,0), (0,1), (1,1) in (row, column).
    """

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        neighbours = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduction(self.norm(torch.cat(neighbours, -1)))


class SwinStage(nn.Module):
    """Blocks of one resolution, every second one shifted by half a window, and the merging that follows."""

    def __init__(self, channels: int, heads: int, window: int, drop_paths: list[float], merging: bool):
        super().__init__()
        self.blocks = nn.ModuleList(
            SwinBlock(channels, heads, window, window // 2 if index % 2 else 0, drop_path)
            for index, drop_path in enumerate(drop_paths)
        )
        self.downsample = PatchMerging(channels) if merging else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(map of this stage, input of the next stage)."""
        for block in self.blocks:
            x = block(x)
        return x, x if self.downsample is None else self.downsample(x)


class PatchEmbed(nn.Module):
    """A 4×4 conv with stride 4 and a LayerNorm: image (N, 3, H, W) -> (N, H/4, W/4, C); odd sizes are padded."""

    def __init__(self, channels: int, patch: int = 4):
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(3, channels, patch, patch)
        self.norm = nn.LayerNorm(channels)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        if height % self.patch or width % self.patch:
            image = F.pad(image, (0, -width % self.patch, 0, -height % self.patch))
        return self.norm(self.proj(image).permute(0, 2, 3, 1))


class SwinTransformer(nn.Module):
    """Image (N, 3, H, W) -> four maps (N, C·2^i, H/4·2^-i, W/4·2^-i), each after a LayerNorm of its own."""

    def __init__(self, config: BiRefNetConfig):
        super().__init__()
        self.patch_embed = PatchEmbed(config.embed_dim)
        rates = torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").tolist()
        starts = [sum(config.depths[:stage]) for stage in range(4)]
        self.layers = nn.ModuleList(
            SwinStage(channels, heads, config.window, rates[start : start + depth], merging=stage < 3)
            for stage, (channels, heads, start, depth) in enumerate(
                zip(config.stage_channels, config.heads, starts, config.depths, strict=True)
            )
        )
        for stage, channels in enumerate(config.stage_channels):
            self.add_module(f"norm{stage}", nn.LayerNorm(channels))
        self.apply(initialise_transformer)

    def forward(self, image: Tensor) -> list[Tensor]:
        x = self.patch_embed(image)
        maps = []
        for stage, layer in enumerate(self.layers):
            out, x = layer(x)
            maps.append(getattr(self, f"norm{stage}")(out).permute(0, 3, 1, 2).contiguous())
        return maps


def initialise_transformer(module: nn.Module) -> None:
    """Truncated normal (std 0.02) for linears and zero biases, as Swin is trained from scratch."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
