"""Modulated deformable convolution and the ASPP built from it (DCNv2, Zhu et al., 2019, arXiv:1811.11168)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.ops import deform_conv2d

from lumen_lab.network.config import BiRefNetConfig

ASPP_KERNELS = (1, 3, 7)


class DeformableConv2d(nn.Module):
    """Each tap of a k×k conv looks at its own learned place, weighted by a modulator in (0, 2).

    ``offset_conv`` gives 2k² channels (dy, dx interleaved per tap), ``modulator_conv`` k²; places outside the image
    read zero. With zero offsets and a zero modulator pre-activation it equals ``regular_conv``.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int):
        super().__init__()
        self.padding = kernel // 2
        self.offset_conv = nn.Conv2d(in_channels, 2 * kernel**2, kernel, padding=self.padding)
        self.modulator_conv = nn.Conv2d(in_channels, kernel**2, kernel, padding=self.padding)
        self.regular_conv = nn.Conv2d(in_channels, out_channels, kernel, padding=self.padding, bias=False)
        for conv in (self.offset_conv, self.modulator_conv):
            nn.init.zeros_(conv.weight)
            nn.init.zeros_(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        offset = self.offset_conv(x)
        modulator = 2.0 * torch.sigmoid(self.modulator_conv(x))
        offset, modulator = with_readable_places(x, offset, modulator)
        return deform_conv2d(x, offset, self.regular_conv.weight, padding=self.padding, mask=modulator)


def with_readable_places(x: Tensor, offset: Tensor, modulator: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets (N, 2k², H, W) without NaN, and modulators (N, k², H, W) that are NaN where one was: the output is too.

    torchvision's look-up reads out of bounds where a place is NaN, which ends the process. A graph that is being
    recorded holds nothing of this.
    """
    recorded = type(offset) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or offset.is_meta or offset.detach().sum().isfinite():  # one NaN makes the sum NaN
        return offset, modulator
    lost = offset.isnan()
    outside = 2.0 * (x.shape[-2] + x.shape[-1]) + offset.shape[1]  # of the image, from any place
    by_tap = lost.unflatten(1, (-1, 2)).any(2)
    return offset.masked_fill(lost, outside), modulator.masked_fill(by_tap, float("nan"))


class AsppBranch(nn.Module):
    """Deformable conv, BN, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int):
        super().__init__()
        self.atrous_conv = DeformableConv2d(in_channels, out_channels, kernel)
        self.bn = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.atrous_conv(x)))


class SpatialMean(nn.Module):
    """(N, C, H, W) -> (N, C, 1, 1); a plain mean, since adaptive pooling to 1×1 does not survive ``torch.export``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)


class AsppDeformable(nn.Module):
    """Four deformable branches (1×1, then 1×1, 3×3, 7×7) and the image mean, concatenated and projected back."""

    def __init__(self, config: BiRefNetConfig):
        super().__init__()
        width, branch = config.decoder_width, config.aspp_width
        self.aspp1 = AsppBranch(width, branch, 1)
        self.aspp_deforms = nn.ModuleList(AsppBranch(width, branch, kernel) for kernel in ASPP_KERNELS)
        self.global_avg_pool = nn.Sequential(
            SpatialMean(), nn.Conv2d(width, branch, 1, bias=False), nn.BatchNorm2d(branch), nn.ReLU(inplace=True)
        )
        self.conv1 = nn.Conv2d((len(ASPP_KERNELS) + 2) * branch, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.aspp1(x), *(branch(x) for branch in self.aspp_deforms)]
        mean = self.global_avg_pool(x).expand(-1, -1, *x.shape[-2:])
        return self.dropout(self.relu(self.bn1(self.conv1(torch.cat([*branches, mean], 1)))))
