"""Deformable convolution written with operators that the NPU has.

The NPU compiler has no DeformConv (QAIRT 2.51). A modulated deformable conv is a bilinear look-up at k² places per
pixel, a weight per look-up, and a 1×1 conv over all of them (DCNv2, arXiv:1811.11168, equation 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.convolution import SumOfConvs, parts_unlike, unlike
from lumen_lab.rewrites.parameters import whole_number
from lumen_lab.rewrites.record import SIZES_FIRST, FixedTensors, Rewrite, Site, with_weights
from lumen_lab.specs import Exact

TAPS_AT_ONCE = 9  # those of a 3×3 kernel


def pixel_size(kernel: int, size: tuple[int, int]) -> Tensor:
    """Width and height of a pixel in grid coordinates, for each tap: (1, 2k², 1, 1), (x, y) interleaved."""
    height, width = size
    return torch.tensor([2 / width, 2 / height], dtype=torch.float64).repeat(kernel**2)[None, :, None, None]


def tap_grid(kernel: int, size: tuple[int, int]) -> Tensor:
    """Where each tap of a k×k conv with padding k//2 looks, before offsets: (1, 2k², H, W), (x, y) in [-1, 1] per tap.

    Taps row by row; coordinates as ``grid_sample(align_corners=False)`` reads them, which is defined for one pixel too.
    """
    height, width = size
    reach = torch.arange(kernel, dtype=torch.float64) - kernel // 2
    rows = torch.arange(height, dtype=torch.float64)
    columns = torch.arange(width, dtype=torch.float64)
    y = (rows[None, None, :, None] + reach[:, None, None, None]).expand(kernel, kernel, height, width)
    x = (columns[None, None, None, :] + reach[None, :, None, None]).expand(kernel, kernel, height, width)
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], 2)
    return grid.reshape(1, 2 * kernel**2, height, width)


def sampled(x: Tensor, places: Tensor, modulator: Tensor) -> Tensor:
    """``x`` at ``t`` places per pixel, each look-up weighted: (N, C, H, W) -> (N, t·C, H, W), tap by tap.

    ``places``: (N, 2t, H, W), (x, y) interleaved; ``modulator``: (N, t, H, W). The look-ups of one pixel lie side by
    side in one row of the sample, so that both reshapes leave N H W C memory, the NPU's own, as it is.
    """
    n, taps, height, width = modulator.shape
    grid = places.permute(0, 2, 3, 1).reshape(n, height, width * taps, 2)
    weight = modulator.permute(0, 2, 3, 1).reshape(n, height, width * taps, 1)
    samples = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    weighted = samples.permute(0, 2, 3, 1) * weight  # N, H, W·t, C
    return weighted.reshape(n, height, width, taps * x.shape[1]).permute(0, 3, 1, 2)


class GridSampleConv(SumOfConvs):
    """``DeformableConv2d`` as a ``grid_sample`` and a 1×1 conv for every few taps, summed.

    Of the k² samples of a pixel only a few are alive at a time, and those fit the NPU's on-chip memory; each of
    ``tap_convs`` takes as many taps as it has input channels for. ``offset_conv`` gives (dx, dy) per tap, in the order
    in which ``grid_sample`` reads them.
    """

    summed = "tap_convs"

    def __init__(self, offset_conv: nn.Conv2d, modulator_conv: nn.Conv2d, tap_convs: Sequence[nn.Conv2d]):
        super().__init__()
        self.kernel = math.isqrt(modulator_conv.out_channels)
        self.taps = [conv.in_channels // offset_conv.in_channels for conv in tap_convs]
        self.offset_conv, self.modulator_conv = offset_conv, modulator_conv
        self.tap_convs = nn.ModuleList(tap_convs)
        self.grid = FixedTensors(partial(tap_grid, self.kernel))
        self.pixel = FixedTensors(partial(pixel_size, self.kernel))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        places = self.grid(size, x) + self.offset_conv(x) * self.pixel(size, x)
        modulator = 2.0 * torch.sigmoid(self.modulator_conv(x))
        places_by_conv = places.split([2 * taps for taps in self.taps], 1)
        groups = zip(self.tap_convs, places_by_conv, modulator.split(self.taps, 1), strict=True)
        return sum_in_pairs([conv(sampled(x, *group)) for conv, *group in groups])


def sum_in_pairs(terms: list[Tensor]) -> Tensor:
    """The sum of ``terms`` as a tree.

    With 7, 9 or 14 taps at once the compiler spills less of the decoder at 256² than for one running sum; larger inputs
    are mixed.
    """
    while len(terms) > 1:
        terms = [reduce(torch.add, terms[start : start + 2]) for start in range(0, len(terms), 2)]
    return terms[0]


def swapped_pairs(taps: int) -> Tensor:
    """Channel order that turns (dy, dx) per tap into (dx, dy), and back."""
    return torch.arange(2 * taps).view(taps, 2).flip(1).flatten()


def tap_major(weight: Tensor) -> Tensor:
    """A conv's weight (O, C, k, k) as that of a 1×1 conv over the samples of all taps: (O, k²·C, 1, 1), tap by tap."""
    return weight.flatten(2).transpose(1, 2).reshape(len(weight), -1, 1, 1)


def not_as_published(site: Site) -> str | None:
    """Why a deformable conv has no weights to take: it or one of its convs is something else by now."""
    names = ("offset_conv", "modulator_conv", "regular_conv")
    return unlike(site.module, DeformableConv2d) or parts_unlike(site.module, dict.fromkeys(names, nn.Conv2d))


def _decomposed(taps_at_once: int, site: Site) -> dict[str, nn.Module]:
    deform: DeformableConv2d = site.module
    weight = deform.regular_conv.weight
    kernel, in_channels = weight.shape[-1], weight.shape[1]
    order = swapped_pairs(kernel**2)
    offset = with_weights(deform.offset_conv, deform.offset_conv.weight[order], deform.offset_conv.bias[order])
    modulator = with_weights(deform.modulator_conv, deform.modulator_conv.weight, deform.modulator_conv.bias)
    parts = tap_major(weight).split(taps_at_once * in_channels, 1)
    module = GridSampleConv(offset, modulator, [with_weights(nn.Conv2d(1, 1, 1), part) for part in parts])
    for size in {shape[-2:] for shape in site.input_shapes}:
        module.grid((size[0], size[1]), weight)
        module.pixel((size[0], size[1]), weight)
    return {site.path: module}


def _not_as_decomposed(site: Site) -> str | None:
    """Why a grid-sample form is no deformable conv any more."""
    form: GridSampleConv = site.module
    reason = unlike(form, GridSampleConv) or parts_unlike(form, {"offset_conv": nn.Conv2d, "modulator_conv": nn.Conv2d})
    reasons = [reason, *(unlike(conv, nn.Conv2d, called="one of its tap_convs") for conv in form.tap_convs)]
    if not any(reasons) and any(conv.bias is not None for conv in form.tap_convs):
        return "its tap_convs have a bias (a norm was folded into them), for which a DeformableConv2d has no place"
    return next(filter(None, reasons), None)


def _recomposed(site: Site) -> dict[str, nn.Module]:
    parts: GridSampleConv = site.module
    kernel, in_channels = parts.kernel, parts.offset_conv.in_channels
    weight = torch.cat([conv.weight for conv in parts.tap_convs], 1)
    deform = DeformableConv2d(in_channels, len(weight), kernel).to(weight)
    order = swapped_pairs(kernel**2)
    offset, modulator = parts.offset_conv, parts.modulator_conv
    deform.offset_conv = with_weights(offset, offset.weight[order], offset.bias[order])
    deform.modulator_conv = with_weights(modulator, modulator.weight, modulator.bias)
    regular = weight.view(len(weight), kernel, kernel, in_channels).permute(0, 3, 1, 2)
    deform.regular_conv = with_weights(deform.regular_conv, regular)
    return {site.path: deform}


def decompose_deform_conv(*, taps_at_once: int = TAPS_AT_ONCE) -> Rewrite:
    """A deformable conv as grid samples of up to ``taps_at_once`` taps each; ``RewriteError`` unless that is whole.

    Of 7, 9 and 14 taps, compiled in BiRefNet-lite's decoder at 256² to 640² (``tests/benchmarks/
    exact_deform_traffic.py``), the default moves the least DRAM bytes in sum, not at every size: more samples crowd the
    on-chip memory, fewer leave more partial sums, and what is spilled is not monotonic in either.
    """
    whole_number("taps_at_once", taps_at_once, of="taps", instead=f"{TAPS_AT_ONCE} is the default")
    return Rewrite(
        name="decompose_deform_conv",
        replaces=DeformableConv2d,
        built=partial(_decomposed, taps_at_once),
        refused=not_as_published,
        claim=Exact(),
        after=(SIZES_FIRST,),
        because="the NPU compiler has no DeformConv; GridSample, Mul and 1×1 Convs compute the same numbers",
        source="onnxruntime-qnn 2.7.0 (QAIRT 2.51): DeformConv is left on the CPU; DCNv2, equation 1",
        code="" if taps_at_once == TAPS_AT_ONCE else f"decompose_deform_conv(taps_at_once={taps_at_once})",
    )


DECOMPOSE_DEFORM_CONV = decompose_deform_conv()

RECOMPOSE_DEFORM_CONV = Rewrite(
    name="recompose_deform_conv",
    replaces=GridSampleConv,
    built=_recomposed,
    refused=_not_as_decomposed,
    claim=Exact(),
    because="a network trained in the grid-sample form is saved under the published names",
    source="the inverse of decompose_deform_conv",
)
