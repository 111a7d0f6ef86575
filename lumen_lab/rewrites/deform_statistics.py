"""How far the deformable convs of a network look, and how much they weigh, over pictures.

One pass, picture by picture; of each site only sums and a histogram are kept. From them ``deform_choice`` predicts what
a replacement costs, ``deform_substitutes`` takes its starting weights, and ``figures.offset_figure`` draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform_data import LAGS_PX, DeformStatistics, SiteStatistics
from lumen_lab.rewrites.deform_shifts import tap_places
from lumen_lab.rewrites.deform_sites import deform_sites, site_inputs
from lumen_lab.rewrites.deform_substitutes import attention_conv, rank_one
from lumen_lab.rewrites.parameters import is_whole

BIN_EDGES_PX = torch.cat([torch.zeros(1), torch.logspace(-10, 12, 1023, base=2)]).double()
"""Edges of the histogram of offsets: 1.5 % apart from 1/1024 of a pixel to 4096, so that percentiles are as near."""
QUANTILES = 100


def deform_statistics(
    model: nn.Module,
    images: Iterable[Tensor],
    *,
    radii: Sequence[int] = (1, 2, 3),
    sites: Sequence[str] | None = None,
) -> DeformStatistics:
    """Statistics of the offsets, modulators and inputs of every deformable conv of ``model`` over ``images``.

    ``images``: normalised batches (N, 3, H, W), gone through once; memory does not grow with their number. ``radii``:
    whole pixels for ``share_beyond``; ``sites``: paths, or all. ``RewriteError`` without a picture, without a
    deformable conv, for a network in training mode, or for radii that are not rising whole numbers.
    """
    radii = checked_radii(radii)
    sums = {path: SiteSums(conv, radii) for path, conv in deform_sites(model, sites).items()}
    with torch.no_grad():
        for _, given in site_inputs(model, images, sums):
            for path, x in given:
                sums[path].add(x)
    return DeformStatistics(tuple(each.statistics(path) for path, each in sums.items()))


def checked_radii(radii: Sequence[int]) -> tuple[int, ...]:
    """The radii as a tuple; ``RewriteError`` unless they are rising whole pixels."""
    given = tuple(radii) if isinstance(radii, Iterable) else ()
    if not given or not all(map(is_whole, given)) or list(given) != sorted(set(given)):
        raise RewriteError(f"radii={radii!r} was asked for; give rising whole pixels, such as (1, 2, 3).")
    return given


class SiteSums:
    """What is kept of one site while pictures go by: sums, extremes and a histogram, in float64."""

    def __init__(self, conv: DeformableConv2d, radii: tuple[int, ...]):
        self.conv, self.radii = conv, radii
        weight = conv.regular_conv.weight.detach().double().cpu()
        self.kernel, self.taps = weight.shape[-1], weight.shape[-1] ** 2
        self.energy = weight.square().sum((0, 1)).flatten()  # k²
        self.attention = attention_conv(conv)
        self.pictures, self.pixels, self.size = 0, 0, (0, 0)
        self.histogram = torch.zeros(len(BIN_EDGES_PX), dtype=torch.float64)
        self.beyond = torch.zeros(len(radii), dtype=torch.float64)
        self.offset_sum, self.offset_max, self.modulator_off = 0.0, 0.0, 0.0
        self.tap_offset = torch.zeros(self.taps, 2, dtype=torch.float64)
        self.tap_modulator = torch.zeros(3, self.taps, dtype=torch.float64)  # m, m², m·a
        self.attention_sums = torch.zeros(2, dtype=torch.float64)  # a, a²
        self.inside = torch.zeros(len(radii) + 2, dtype=torch.float64)  # unlimited, clamped to 0 and radii
        self.lags = torch.zeros(len(LAGS_PX), 3, dtype=torch.float64)  # Σ x(p)x(p+d), Σ x(p)², Σ x(p+d)²

    def add(self, x: Tensor) -> None:
        """One picture's input (N, C, H, W)."""
        offset = self.conv.offset_conv(x).double().cpu().unflatten(1, (self.taps, 2))  # N, k², (dy, dx), H, W
        modulator = (2.0 * torch.sigmoid(self.conv.modulator_conv(x))).double().cpu()
        attention = (2.0 * torch.sigmoid(self.attention(x))).double().cpu()
        self.pictures += x.shape[0]
        self.pixels += x.shape[0] * x.shape[2] * x.shape[3]
        self.size = max(self.size, tuple(x.shape[-2:]), key=math.prod)
        self.add_offsets(offset)
        self.add_modulators(modulator, attention)
        self.add_inside(offset, modulator)
        self.add_lags(x.double().cpu())

    def add_offsets(self, offset: Tensor) -> None:
        far = offset.abs().amax(2).flatten()
        self.histogram += torch.bincount(
            torch.bucketize(far, BIN_EDGES_PX, right=True) - 1, minlength=len(self.histogram)
        )
        self.offset_sum += float(far.sum())
        self.offset_max = max(self.offset_max, float(far.max()))
        self.beyond += torch.stack([(far > radius).sum() for radius in self.radii])
        self.tap_offset += offset.sum((0, 3, 4))

    def add_modulators(self, modulator: Tensor, attention: Tensor) -> None:
        parts = [modulator, modulator.square(), modulator * attention]
        self.tap_modulator += torch.stack([part.sum((0, 2, 3)) for part in parts])
        self.attention_sums += torch.stack([attention.sum(), attention.square().sum()])
        self.modulator_off += float(((modulator < 0.9) | (modulator > 1.1)).sum())

    def add_inside(self, offset: Tensor, modulator: Tensor) -> None:
        """Bilinear weight of every looked-up place that lies inside the image, by energy."""
        weight = modulator.square() * self.energy[:, None, None]
        limits = [math.inf, 0, *self.radii]
        self.inside += torch.stack([(weight * inside(offset.clamp(-limit, limit))).sum() for limit in limits])

    def add_lags(self, x: Tensor) -> None:
        """Products of the input with itself, each of ``LAGS_PX`` rows down and columns across."""
        for place, lag in enumerate(LAGS_PX):
            for axis in (2, 3):
                if lag < x.shape[axis]:
                    here = x.narrow(axis, 0, x.shape[axis] - lag)
                    there = x.narrow(axis, lag, x.shape[axis] - lag)
                    self.lags[place] += torch.stack([(here * there).sum(), here.square().sum(), there.square().sum()])

    def quantiles(self) -> list[float]:
        """Offsets at 0 %, 1 % … 100 %, straight lines within a bin of the histogram."""
        below = torch.cat([torch.zeros(1).double(), self.histogram.cumsum(0)])
        edges = [*BIN_EDGES_PX.tolist(), math.inf]
        found = []
        for rank in torch.linspace(0, float(below[-1]), QUANTILES + 1).double():
            place = int(torch.searchsorted(below, rank, right=False).clamp(1, len(self.histogram))) - 1
            share = float((rank - below[place]) / self.histogram[place].clamp(min=1))
            low, high = edges[place], min(edges[place + 1], self.offset_max)
            found.append(min(low + share * (high - low), self.offset_max))
        return found

    def statistics(self, path: str) -> SiteStatistics:
        """The record of what was summed."""
        count = self.pixels * self.taps
        mean, square, _ = (self.tap_modulator / self.pixels).tolist()
        quantiles = self.quantiles()
        unlimited, *clamped = (self.inside / max(self.whole, 1e-300)).tolist()
        return SiteStatistics(
            site=path,
            kernel=self.kernel,
            pictures=self.pictures,
            size=self.size,
            offset_mean_px=self.offset_sum / count,
            offset_p50_px=quantiles[50],
            offset_p95_px=quantiles[95],
            offset_p99_px=quantiles[99],
            offset_max_px=self.offset_max,
            radii=self.radii,
            share_beyond=tuple((self.beyond / count).tolist()),
            offset_quantiles_px=tuple(quantiles),
            modulator_mean=sum(mean) / self.taps,
            modulator_std=max(sum(square) / self.taps - (sum(mean) / self.taps) ** 2, 0.0) ** 0.5,
            modulator_share_off=self.modulator_off / count,
            tap_modulator_mean=tuple(mean),
            tap_modulator_square=tuple(square),
            tap_offset_mean_px=tuple(map(tuple, (self.tap_offset / self.pixels).tolist())),
            correlation=self.correlation(),
            inside_share=unlimited,
            inside_share_within=tuple(clamped),
            constant_share=self.constant_share(),
            attention_mean=float(self.attention_sums[0]) / self.pixels,
            attention_share=self.attention_share(),
            rank_one_share=rank_one_share(self.conv.regular_conv.weight.detach()),
        )

    def correlation(self) -> tuple[float, ...]:
        """At each lag; one that is longer than the map counts as the longest that fits."""
        found: list[float] = []
        for product, here, there in self.lags.tolist():
            scale = (here * there) ** 0.5
            found.append(product / scale if scale > 0 else (found[-1] if found else 1.0))
        return tuple(found)

    @property
    def whole(self) -> float:
        """Σ e_t Σ m_t²: the energy of the modulated kernel, e_t that of tap t."""
        return float((self.tap_modulator[1] * self.energy).sum())

    def constant_share(self) -> float:
        """Σ e_t (Σ m_t)² / pixels over the whole: the modulators' energy in their means."""
        explained = float((self.energy * self.tap_modulator[0].square()).sum()) / self.pixels
        return explained / max(self.whole, 1e-300)

    def attention_share(self) -> float:
        """Σ e_t (Σ m_t·a)² / Σ a² over the whole: the modulators' energy in proportion to the map a."""
        explained = float((self.energy * self.tap_modulator[2].square()).sum())
        return explained / max(float(self.attention_sums[1]), 1e-300) / max(self.whole, 1e-300)


def inside(offset: Tensor) -> Tensor:
    """Bilinear weight inside the image of the places that taps look at: (N, k², 2, H, W) offsets -> (N, k², H, W)."""
    taps, height, width = offset.shape[1], *offset.shape[-2:]
    tap = torch.tensor(tap_places(math.isqrt(taps)), dtype=offset.dtype)
    share = torch.ones(())
    for axis, length in ((0, height), (1, width)):
        line = torch.arange(length, dtype=offset.dtype).view(-1, 1) if axis == 0 else torch.arange(length).double()
        place = offset[:, :, axis] + tap[:, axis, None, None] + line
        share = share * (1 + place).clamp(0, 1) * (length - place).clamp(0, 1)
    return share


def rank_one_share(weight: Tensor) -> float:
    """Energy of the nearest depthwise-and-pointwise kernel over that of ``weight`` (O, C, k, k)."""
    depthwise, pointwise = rank_one(weight.double())
    whole = float(weight.double().square().sum())
    return float((depthwise.flatten(1) ** 2).sum(1) @ (pointwise[:, :, 0, 0] ** 2).sum(0)) / max(whole, 1e-300)
