"""Deformable convolution as a sum over whole-pixel shifts, for offsets of a few pixels: no look-up at all.

A bilinear look-up at p + δ is Σ_s h(δy − sy)·h(δx − sx)·x[p + s] over whole shifts s, with the hat
h(t) = max(0, 1 − |t|) and zeros outside the image. Offsets of at most r pixels need the (2r + 1)² shifts of [−r, r]²
alone, the same at every pixel, so that shifts, products and one 1×1 conv are the whole of it (DCNv2, arXiv:1811.11168,
equation 1; the hat form is that of Jaderberg et al., 2015, arXiv:1506.02025, equation 5).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform import not_as_published, tap_major
from lumen_lab.rewrites.parameters import whole_number
from lumen_lab.rewrites.record import FixedTensors, Rewrite, Site, by_name, with_weights
from lumen_lab.specs import Bounded

LEAST_RANGE_PX = 1e-3  # an offset that varies less over an input is a constant: stretching it would stretch rounding
LARGEST_RADIUS_PX = 8  # 289 products a tap; the grid sample is far cheaper long before


def one_hot_kernel(channels: int, shift: tuple[int, int]) -> Tensor:
    """Depthwise kernel (C, 1, 2|dy| + 1, 2|dx| + 1) that reads the pixel at ``shift`` = (dy, dx); same padding."""
    dy, dx = shift
    kernel = torch.zeros(channels, 1, 2 * abs(dy) + 1, 2 * abs(dx) + 1, dtype=torch.float64)
    kernel[:, :, abs(dy) + dy, abs(dx) + dx] = 1
    return kernel


class Shifts(nn.Module):
    """``x`` read at whole-pixel shifts, zeros outside: a depthwise conv with a one-hot kernel each.

    The compiler keeps depthwise convs in the layout and memory of the products beside them. With slices of a padded
    map in their place, a 7×7 modulated conv (64 → 256 channels, 64 × 64, float16) moves 98 MB of DRAM, not 12.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.kernels = FixedTensors(partial(one_hot_kernel, channels))

    def forward(self, x: Tensor, shift: tuple[int, int]) -> Tensor:
        """x[p + shift] for every pixel p: the shape of ``x``."""
        if shift == (0, 0):
            return x
        return F.conv2d(x, self.kernels(shift, x), padding=(abs(shift[0]), abs(shift[1])), groups=x.shape[1])

    def prepare(self, shifts: set[tuple[int, int]], like: Tensor) -> None:
        """Make the kernels of ``shifts``, so that an exported graph holds them as constants."""
        for shift in sorted(shifts - {(0, 0)}):
            self.kernels(shift, like)


def tap_places(kernel: int) -> list[tuple[int, int]]:
    """(dy, dx) of the taps of a k×k conv with padding k//2, row by row."""
    reach = kernel // 2
    return [(row - reach, column - reach) for row in range(kernel) for column in range(kernel)]


def hats(offset: Tensor, radius: int) -> list[Tensor]:
    """h(offset − s) for s = −radius … radius; they sum to one where |offset| ≤ radius."""
    return [F.relu(1.0 - (offset - float(s)).abs()) for s in range(-radius, radius + 1)]


class ShiftedTaps(nn.Module):
    """``DeformableConv2d`` whose taps look at most ``radius`` pixels away from their place, on each axis.

    Offsets beyond are clamped to ±radius: the tap then reads the nearest place within reach. ``offset_conv`` gives all
    dy before all dx; ``tap_conv`` is 1×1 over the samples of all taps, tap by tap.
    """

    def __init__(
        self, offset_conv: nn.Conv2d, modulator_conv: nn.Conv2d, tap_conv: nn.Conv2d, kernel: int, radius: int
    ):
        super().__init__()
        self.kernel, self.radius = kernel, radius
        self.offset_conv, self.modulator_conv, self.tap_conv = offset_conv, modulator_conv, tap_conv
        self.shifts = Shifts(offset_conv.in_channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.shift_weights(x)
        shifted = {place: self.shifts(x, place) for place in self.places()}
        samples = [
            reduce(torch.add, (maps[tap] * shifted[dy + sy, dx + sx] for (sy, sx), maps in weights.items()))
            for tap, (dy, dx) in enumerate(tap_places(self.kernel))
        ]
        return self.tap_conv(torch.cat(samples, 1))

    def shift_weights(self, x: Tensor) -> dict[tuple[int, int], tuple[Tensor, ...]]:
        """For each shift (sy, sx), what every tap takes of it: k² maps (N, 1, H, W), modulator included."""
        offset = self.offset_conv(x).clamp(-self.radius, self.radius)
        dy, dx = offset.chunk(2, 1)
        modulator = 2.0 * torch.sigmoid(self.modulator_conv(x))
        down = [hat * modulator for hat in hats(dy, self.radius)]
        across = hats(dx, self.radius)
        reach = range(2 * self.radius + 1)
        return {
            (i - self.radius, j - self.radius): (down[i] * across[j]).split(1, 1) for i in reach for j in reach
        }  # fmt: skip

    def places(self) -> set[tuple[int, int]]:
        """Every whole-pixel place that some tap reads."""
        reach = range(-self.radius, self.radius + 1)
        return {(dy + sy, dx + sx) for dy, dx in tap_places(self.kernel) for sy in reach for sx in reach}


def yx_order(taps: int) -> Tensor:
    """Channel order that turns (dy, dx) per tap into all dy, then all dx."""
    return torch.cat([torch.arange(0, 2 * taps, 2), torch.arange(1, 2 * taps, 2)])


def _shifted(radius: int, site: Site) -> dict[str, nn.Module]:
    deform: DeformableConv2d = site.module
    weight = deform.regular_conv.weight
    order = yx_order(weight.shape[-1] ** 2)
    offset = with_weights(deform.offset_conv, deform.offset_conv.weight[order], deform.offset_conv.bias[order])
    modulator = with_weights(deform.modulator_conv, deform.modulator_conv.weight, deform.modulator_conv.bias)
    tap_conv = with_weights(nn.Conv2d(1, 1, 1), tap_major(weight))
    module = ShiftedTaps(offset, modulator, tap_conv, weight.shape[-1], radius)
    module.shifts.prepare(module.places(), weight)
    return {site.path: module}


# Edge cases: the site's own conv, its offsets stretched to the edges of the domain


def with_offsets(deform: DeformableConv2d, weight: Tensor, bias: Tensor) -> DeformableConv2d:
    """A copy of ``deform`` with another offset conv."""
    made = copy.deepcopy(deform)
    made.offset_conv = with_weights(deform.offset_conv, weight, bias)
    return made


def stretched(deform: DeformableConv2d, x: Tensor, radius: int) -> DeformableConv2d:
    """A copy whose every offset, over ``x``, runs from −radius to radius and touches both.

    Each channel of the offset conv is mapped affinely; one that is constant over ``x`` becomes ±radius.
    """
    conv = deform.offset_conv
    with torch.no_grad():
        offset = conv(x).transpose(0, 1).flatten(1)
        low, high = offset.amin(1), offset.amax(1)
        varies = high - low > LEAST_RANGE_PX
        gain = torch.where(varies, 2 * radius / (high - low).clamp(min=LEAST_RANGE_PX), 0.0)
        sign = 1 - 2 * (torch.arange(len(low), device=low.device) % 2)
        bias = torch.where(varies, (conv.bias - low) * gain - radius, radius * sign.to(low))
        return with_offsets(deform, conv.weight * gain[:, None, None, None], bias)


def cornered(deform: DeformableConv2d, radius: int, first: int) -> DeformableConv2d:
    """A copy whose taps look at the corners (±radius, ±radius), from corner ``first`` on, one after the other."""
    conv = deform.offset_conv
    corners = torch.tensor([(1, 1), (1, -1), (-1, 1), (-1, -1)], device=conv.weight.device)
    taps = torch.arange(conv.out_channels // 2, device=conv.weight.device)
    bias = radius * corners[(taps + first) % 4].flatten().to(conv.weight)
    return with_offsets(deform, torch.zeros_like(conv.weight), bias)


def offsets_at_the_edges(
    radius: int, deform: DeformableConv2d, inputs: tuple
) -> Iterator[tuple[DeformableConv2d, tuple]]:
    """Deformable convs like the one given whose offsets fill [−radius, radius] and touch its corners; real inputs."""
    yield stretched(deform, inputs[0], radius), inputs
    for first in range(4):
        yield cornered(deform, radius, first), inputs


def approximate_deform_conv_by_shifts(*, radius: int = 1) -> Rewrite:
    """Each look-up as the hat-weighted sum of the (2·radius + 1)² whole-pixel shifts around its tap.

    Exact while both offsets of a tap are within ``radius`` pixels; beyond, they are clamped to it, and
    ``lumen_lab.rewrites.deform_statistics`` says how often that happens on real pictures. ``RewriteError`` unless
    ``radius`` is a whole number from 1 to 8.
    """
    far_or_none = "0 drops the offsets (substitute_modulated_conv), far ones are looked up (decompose_deform_conv)"
    whole_number("radius", radius, of="pixels", most=LARGEST_RADIUS_PX, instead=far_or_none)
    return Rewrite(
        name="approximate_deform_conv_by_shifts",
        replaces=DeformableConv2d,
        built=partial(_shifted, radius),
        refused=not_as_published,
        claim=Bounded(1e-9, f"offsets within {radius} px on both axes (float64)"),
        because="no look-up at all: shifts, products and convs, which every HTP and every bit width has",
        source="hat form of the bilinear look-up: arXiv:1506.02025, equation 5; DeformConv is refused by QAIRT 2.51",
        edge_cases=partial(offsets_at_the_edges, radius),
        code=f"approximate_deform_conv_by_shifts(radius={radius})",
    )


APPROXIMATE_DEFORM_CONV_BY_SHIFTS = by_name(approximate_deform_conv_by_shifts())
