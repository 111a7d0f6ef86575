"""Deformable convolution written with operators that the NPU has.

The NPU compiler has no DeformConv (QAIRT 2.51). A modulated deformable conv is a bilinear look-up at k² places per
pixel, a weight per look-up, and a 1×1 conv over all of them (DCNv2, arXiv:1811.11168, equation 1).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.record import FixedTensors, Rewrite, Site, with_weights
from lumen_lab.specs import Exact


def pixel_size(size: tuple[int, int]) -> Tensor:
    """Width and height of a pixel in grid coordinates: (2,), (x, y)."""
    return torch.tensor([2 / size[1], 2 / size[0]], dtype=torch.float64)


def tap_grid(kernel: int, size: tuple[int, int]) -> Tensor:
    """Where each tap of a k×k conv with padding k//2 looks, before offsets: (1, k²·H, W, 2), (x, y) in [-1, 1].

    Tap-major rows; coordinates as ``grid_sample(align_corners=False)`` reads them, which is defined for one pixel too.
    """
    height, width = size
    reach = torch.arange(kernel, dtype=torch.float64) - kernel // 2
    rows = torch.arange(height, dtype=torch.float64)
    columns = torch.arange(width, dtype=torch.float64)
    y = (rows[None, None, :, None] + reach[:, None, None, None]).expand(kernel, kernel, height, width)
    x = (columns[None, None, None, :] + reach[None, :, None, None]).expand(kernel, kernel, height, width)
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1)
    return grid.reshape(1, kernel**2 * height, width, 2)


class GridSampleConv(nn.Module):
    """``DeformableConv2d`` as one ``grid_sample`` over k²·H rows, the modulator, and a 1×1 conv.

    ``offset_conv`` gives all dx before all dy, so that the grid needs no axis beyond the fourth.
    """

    def __init__(self, offset_conv: nn.Conv2d, modulator_conv: nn.Conv2d, tap_conv: nn.Conv2d, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.offset_conv, self.modulator_conv, self.tap_conv = offset_conv, modulator_conv, tap_conv
        self.grid = FixedTensors(partial(tap_grid, kernel))
        self.pixel = FixedTensors(pixel_size)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        taps = self.kernel**2
        offset = self.offset_conv(x).view(n, 2, taps * height, width).permute(0, 2, 3, 1)  # N, taps·H, W, (x, y)
        grid = self.grid((height, width), x) + offset * self.pixel((height, width), x)
        samples = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        modulator = 2.0 * torch.sigmoid(self.modulator_conv(x)).view(n, 1, taps * height, width)
        return self.tap_conv((samples * modulator).view(n, channels * taps, height, width))


def xy_order(taps: int) -> Tensor:
    """Channel order that turns (dy, dx) per tap into all dx, then all dy."""
    return torch.cat([torch.arange(1, 2 * taps, 2), torch.arange(0, 2 * taps, 2)])


def _decomposed(site: Site) -> dict[str, nn.Module]:
    deform: DeformableConv2d = site.module
    weight = deform.regular_conv.weight
    order = xy_order(weight.shape[-1] ** 2)
    offset = with_weights(deform.offset_conv, deform.offset_conv.weight[order], deform.offset_conv.bias[order])
    modulator = with_weights(deform.modulator_conv, deform.modulator_conv.weight, deform.modulator_conv.bias)
    tap_conv = with_weights(nn.Conv2d(1, 1, 1), weight.reshape(weight.shape[0], -1, 1, 1))
    module = GridSampleConv(offset, modulator, tap_conv, weight.shape[-1])
    for size in {shape[-2:] for shape in site.input_shapes}:
        module.grid((size[0], size[1]), weight)
        module.pixel((size[0], size[1]), weight)
    return {site.path: module}


def _recomposed(site: Site) -> dict[str, nn.Module]:
    sampled: GridSampleConv = site.module
    kernel = sampled.kernel
    out_channels, stacked = sampled.tap_conv.weight.shape[:2]
    in_channels = stacked // kernel**2
    deform = DeformableConv2d(in_channels, out_channels, kernel).to(sampled.tap_conv.weight)
    order = torch.argsort(xy_order(kernel**2))
    offset, modulator = sampled.offset_conv, sampled.modulator_conv
    deform.offset_conv = with_weights(offset, offset.weight[order], offset.bias[order])
    deform.modulator_conv = with_weights(modulator, modulator.weight, modulator.bias)
    regular = sampled.tap_conv.weight.reshape(out_channels, in_channels, kernel, kernel)
    deform.regular_conv = with_weights(deform.regular_conv, regular)
    return {site.path: deform}


DECOMPOSE_DEFORM_CONV = Rewrite(
    name="decompose_deform_conv",
    replaces=DeformableConv2d,
    built=_decomposed,
    claim=Exact(),
    because="the NPU compiler has no DeformConv; GridSample, Mul and a 1×1 Conv compute the same numbers",
    source="onnxruntime-qnn 2.7.0 (QAIRT 2.51): DeformConv is left on the CPU; DCNv2, equation 1",
)

RECOMPOSE_DEFORM_CONV = Rewrite(
    name="recompose_deform_conv",
    replaces=GridSampleConv,
    built=_recomposed,
    claim=Exact(),
    because="a network trained in the grid-sample form is saved under the published names",
    source="the inverse of decompose_deform_conv",
)
