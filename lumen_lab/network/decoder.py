"""The decoder of BiRefNet: four blocks from deep to shallow, each fed with image tiles, three with a gate.

Reconstruction and inward reference of Zheng et al., 2024 (arXiv:2401.03407), figure 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.config import BiRefNetConfig
from lumen_lab.network.deform import AsppDeformable


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear with aligned corners, as everywhere in BiRefNet; (N, C, h, w) -> (N, C, H, W)."""
    return F.interpolate(x, size=size, mode="bilinear", align_corners=True)


class DecoderBlock(nn.Module):
    """conv3×3, BN, ReLU, deformable ASPP, conv3×3, BN."""

    def __init__(self, in_channels: int, out_channels: int, config: BiRefNetConfig):
        super().__init__()
        width = config.decoder_width
        self.conv_in = nn.Conv2d(in_channels, width, 3, padding=1)
        self.relu_in = nn.ReLU(inplace=True)
        self.dec_att = AsppDeformable(config)
        self.conv_out = nn.Conv2d(width, out_channels, 3, padding=1)
        self.bn_in = nn.BatchNorm2d(width)
        self.bn_out = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu_in(self.bn_in(self.conv_in(x)))
        return self.bn_out(self.conv_out(self.dec_att(x)))


class LateralBlock(nn.Module):
    """A 1×1 conv on an encoder map."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class ImageTiles(nn.Module):
    """Cut the image into contiguous (h, w) tiles and stack them on channels: (N, 3, H, W) -> (N, 3·gh·gw, h, w).

    Channel order is colour, tile row, tile column: not a pixel-unshuffle.
    """

    def forward(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        n, colours, height, width = image.shape
        h, w = size
        grid = image.view(n, colours, height // h, h, width // w, w)  # N, C, gh, h, gw, w
        return grid.permute(0, 1, 2, 4, 3, 5).reshape(n, -1, h, w)


class TileBlock(nn.Module):
    """Two 3×3 convs on image tiles with no activation between them."""

    def __init__(self, tiles: int, out_channels: int, config: BiRefNetConfig):
        super().__init__()
        self.tiles = ImageTiles()
        self.conv1 = nn.Conv2d(3 * tiles, config.tile_width, 3, padding=1)
        self.conv_out = nn.Conv2d(config.tile_width, out_channels, 3, padding=1)

    def forward(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        return self.conv_out(self.conv1(self.tiles(image, size)))


class FullResolutionTail(nn.Module):
    """Features (N, C, h, w) and the image (N, 3, H, W) -> logits (N, 1, H, W).

    ``image_branch`` and ``project`` belong to the decoder, where the published state dict has them; only the order of
    the steps is here, so that a rewrite can replace it.
    """

    def forward(self, features: Tensor, image: Tensor, image_branch: nn.Module, project: nn.Module) -> Tensor:
        size = image.shape[-2:]
        return project(torch.cat([resize(features, size), image_branch(image, size)], 1))


def gate_features(channels: int, width: int = 16) -> nn.Sequential:
    """conv3×3, BN, ReLU: what the gate and its gradient head read."""
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class SideOutputs(NamedTuple):
    """What the network returns while training; every entry is a logit map (N, 1, h, w).

    ``masks``: at 1/32, 1/16, 1/8 and full size, coarse to fine; the last is the output of evaluation mode.
    ``gradients``: edge heads at 1/32, 1/16, 1/8, deep to shallow.
    """

    masks: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


class Decoder(nn.Module):
    """Encoder maps and the image -> one logit map at the image's size.

    ``encoder_image`` is the image as the encoder saw it, which the tiles are cut from: (N, 3, 32·h4, 32·w4) for a
    deepest map of (h4, w4).
    """

    def __init__(self, config: BiRefNetConfig):
        super().__init__()
        c1, c2, c3, c4 = config.lateral_channels
        block_outputs = {4: c3, 3: c2, 2: c1, 1: c1 // 2}
        tile_outputs = {5: c4 // 8, 4: c4 // 8, 3: c3 // 8, 2: c2 // 8, 1: c1 // 8}
        for level, channels in tile_outputs.items():
            tiles = 1 if level == 1 else 4**level
            self.add_module(f"ipt_blk{level}", TileBlock(tiles, channels, config))
        feature_inputs = {4: c4, 3: c3, 2: c2, 1: c1}
        for level, channels in block_outputs.items():
            in_channels = feature_inputs[level] + tile_outputs[level + 1]
            self.add_module(f"decoder_block{level}", DecoderBlock(in_channels, channels, config))
        for level, channels in {4: c3, 3: c2, 2: c1}.items():
            self.add_module(f"lateral_block{level}", LateralBlock(channels))
            self.add_module(f"conv_ms_spvn_{level}", nn.Conv2d(channels, 1, 1))
            self.add_module(f"gdt_convs_{level}", gate_features(channels))
            self.add_module(f"gdt_convs_pred_{level}", nn.Sequential(nn.Conv2d(16, 1, 1)))
            self.add_module(f"gdt_convs_attn_{level}", nn.Sequential(nn.Conv2d(16, 1, 1)))
        self.conv_out1 = nn.Sequential(nn.Conv2d(c1 // 2 + tile_outputs[1], 1, 1))
        self.tail = FullResolutionTail()

    def part(self, name: str, level: int) -> nn.Module:
        """The module ``<name><level>``, as the published state dict numbers them."""
        return getattr(self, f"{name}{level}")

    def with_tiles(self, features: Tensor, image: Tensor, level: int) -> Tensor:
        """Features with the image tiles of their own size concatenated behind them."""
        size = features.shape[-2:]
        return torch.cat([features, self.part("ipt_blk", level)(image, size)], 1)

    def gated(self, features: Tensor, level: int, side: SideOutputs) -> Tensor:
        """Features times their one-channel gate; in training the heads' outputs are added to ``side``."""
        gate_input = self.part("gdt_convs_", level)(features)
        if self.training:
            side.masks.append(self.part("conv_ms_spvn_", level)(features))
            side.gradients.append(self.part("gdt_convs_pred_", level)(gate_input))
        return features * torch.sigmoid(self.part("gdt_convs_attn_", level)(gate_input))

    def forward(
        self, image: Tensor, encoder_image: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor
    ) -> Tensor | SideOutputs:
        side = SideOutputs([], [])
        features = x4
        for level, lateral in ((4, x3), (3, x2), (2, x1)):
            features = self.part("decoder_block", level)(self.with_tiles(features, encoder_image, level + 1))
            features = self.gated(features, level, side)
            features = resize(features, lateral.shape[-2:]) + self.part("lateral_block", level)(lateral)
        features = self.decoder_block1(self.with_tiles(features, encoder_image, 2))
        logits = self.tail(features, image, self.ipt_blk1, self.conv_out1)
        if self.training:
            return SideOutputs((*side.masks, logits), tuple(side.gradients))
        return logits
