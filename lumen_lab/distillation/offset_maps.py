"""Where the taps of a deformable conv look on one picture, and how much each weighs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import deform_conv2d

from lumen_lab.distillation.head_readings import cell_of, check_pixel
from lumen_lab.distillation.heads import array_of, network_input
from lumen_lab.errors import LumenError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform_shifts import tap_places
from lumen_lab.rewrites.deform_sites import deform_sites
from lumen_lab.taps import tap

SAME_WITHIN = 1e-4  # of the largest value: float32 sums in another order


@dataclass(frozen=True, eq=False)
class OffsetMaps:
    """The offsets of one deformable conv: ``offsets`` (k², 2, h, w), (dy, dx) in pixels of its map, and ``modulators``
    (k², h, w) in 0 to 2, taps row by row; ``size`` is (H, W) of the picture."""

    site: str
    size: tuple[int, int]
    offsets: np.ndarray
    modulators: np.ndarray

    @property
    def kernel(self) -> int:
        """k of the k×k taps."""
        return round(len(self.offsets) ** 0.5)

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the picture to one of the map, down and across."""
        height, width = self.offsets.shape[-2:]
        return self.size[0] / height, self.size[1] / width

    @property
    def lengths_px(self) -> np.ndarray:
        """(k², h, w): the larger of |dy| and |dx|, in pixels of the map, as ``deform_statistics`` counts them."""
        return np.abs(self.offsets).max(1)

    def samples_at(self, pixel: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the cell that covers a pixel (row, column): where its taps are without offsets, where they look, both
        (k², 2) as (y, x) in pixels of the picture, and their modulators (k²,).

        ``LumenError`` for a pixel outside of the picture; places may be outside: zeros are read there.
        """
        cell = cell_of(check_pixel(pixel, self.size), self.size, self.offsets.shape[-2:])
        regular = np.array(cell, float) + np.array(tap_places(self.kernel), float)
        looked = regular + self.offsets[:, :, cell[0], cell[1]]
        return self._in_picture(regular), self._in_picture(looked), self.modulators[:, cell[0], cell[1]]

    def field(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every cell: its place and how far its taps look from theirs on average, weighted by their modulators;
        both (h, w, 2) as (y, x) in pixels of the picture."""
        weights = self.modulators[:, None]
        mean = (self.offsets * weights).sum(0) / np.maximum(weights.sum(0), 1e-12)  # 2, h, w
        cells = np.moveaxis(np.indices(self.offsets.shape[-2:]).astype(float), 0, -1)
        return self._in_picture(cells), np.moveaxis(mean, 0, -1) * np.array(self.scale)

    def share_outside(self) -> float:
        """Share of all looks that end outside of the map, where zeros are read."""
        height, width = self.offsets.shape[-2:]
        places = np.indices((height, width))[None] + np.array(tap_places(self.kernel))[:, :, None, None] + self.offsets
        inside = (places > -1).all(1) & (places[:, 0] < height) & (places[:, 1] < width)
        return float(1 - inside.mean())

    def _in_picture(self, places: np.ndarray) -> np.ndarray:
        return (places + 0.5) * np.array(self.scale) - 0.5


@torch.no_grad()
def offsets_of(
    network: nn.Module, image: np.ndarray | Tensor, site: str, *, size: tuple[int, int] | None = None
) -> OffsetMaps:
    """Offsets and modulators of the deformable conv at ``site`` on one picture; there are 20 in a BiRefNet.

    ``image`` and ``size`` as for ``read_heads``. They are read off the network's own convs, and the site's output is
    computed from them and compared. ``LumenError`` if it differs, and for a network in training mode; ``RewriteError``
    for a path without a deformable conv, such as in a student that has substitutes, with those that there are.
    """
    conv = deform_sites(network, site)[site]
    if network.training:
        raise LumenError("Offsets are read in eval mode, found a network in training mode; call .eval().")
    given = network_input(network, image, size=size)
    with tap(network, [site, f"{site}.offset_conv", f"{site}.modulator_conv"]) as taps:
        network(given)
    offset = taps[f"{site}.offset_conv"].outputs[0]
    modulator = 2 * torch.sigmoid(taps[f"{site}.modulator_conv"].outputs[0])
    check_site(conv, taps[site].inputs[0][0], offset, modulator, taps[site].outputs[0], site)
    pairs = array_of(offset).reshape(-1, 2, *offset.shape[-2:])
    return OffsetMaps(site, tuple(given.shape[-2:]), pairs, array_of(modulator))


def check_site(conv: DeformableConv2d, x: Tensor, offset: Tensor, modulator: Tensor, output: Tensor, site: str) -> None:
    """``LumenError`` unless these offsets and modulators give what the site gave."""
    expected = deform_conv2d(x, offset, conv.regular_conv.weight, padding=conv.padding, mask=modulator)
    apart = float((expected - output).abs().max())
    if not apart <= SAME_WITHIN * max(1.0, float(output.abs().max())):
        raise LumenError(f"The offsets read at '{site}' give another output than the module did, by {apart:.2g}.")
