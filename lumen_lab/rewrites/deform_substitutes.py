"""Deformable convolution replaced by a simpler conv that must learn: no offsets, or no modulator either.

None of the three is the same function; each starts as near as it can. Without data it starts from the weights alone;
with ``deform_statistics`` from where the taps look on the average; with ``deform_fit`` from a least-squares fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform import not_as_published, tap_major
from lumen_lab.rewrites.deform_data import DeformStatistics, FittedConv, SiteStatistics, load_fits
from lumen_lab.rewrites.deform_shifts import Shifts, tap_places
from lumen_lab.rewrites.record import AS_GOOD_AS_THE_TEACHER, Rewrite, Site, with_weights

KnownStatistics = DeformStatistics | str | Path | None
KnownFits = Mapping[str, FittedConv] | str | Path | None
"""What a substitute starts from, or the path of the file that keeps it (then the rewrite can be written as code)."""


class ModulatedConv(nn.Module):
    """A k×k conv whose taps are weighted at every pixel by a modulator in (0, 2), in their own places.

    (N, C, H, W) -> (N, O, H, W); ``tap_conv`` is 1×1 over the k² weighted shifts of the input, tap by tap.
    """

    def __init__(self, modulator_conv: nn.Conv2d, tap_conv: nn.Conv2d, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.modulator_conv, self.tap_conv = modulator_conv, tap_conv
        self.shifts = Shifts(modulator_conv.in_channels)

    def forward(self, x: Tensor) -> Tensor:
        modulator = 2.0 * torch.sigmoid(self.modulator_conv(x))
        maps = modulator.split(1, 1)
        return self.tap_conv(
            torch.cat([self.shifts(x, place) * m for place, m in zip(tap_places(self.kernel), maps, strict=True)], 1)
        )


class AttentiveSeparableConv(nn.Module):
    """Depthwise k×k, times one attention map in (0, 2), then 1×1: (N, C, H, W) -> (N, O, H, W)."""

    def __init__(self, depthwise: nn.Conv2d, attention_conv: nn.Conv2d, pointwise: nn.Conv2d):
        super().__init__()
        self.depthwise, self.attention_conv, self.pointwise = depthwise, attention_conv, pointwise

    def forward(self, x: Tensor) -> Tensor:
        attention = 2.0 * torch.sigmoid(self.attention_conv(x))
        return self.pointwise(self.depthwise(x) * attention)


# What the substitutes start from


def mean_modulator(deform: DeformableConv2d, known: SiteStatistics | None = None) -> Tensor:
    """Mean modulator of each tap, (k²,): measured, or that of an input of zeros (2·sigmoid of the bias)."""
    bias = deform.modulator_conv.bias
    if known is not None:
        return torch.tensor(known.tap_modulator_mean, dtype=torch.float64).to(bias)
    return 2.0 * torch.sigmoid(bias)


def moved_kernel(weight: Tensor, offset_px: Tensor) -> Tensor:
    """A kernel (O, C, k, k) whose taps are moved by ``offset_px`` (k², 2: dy, dx), bilinearly.

    What a tap would read outside the k×k window is read at the window's nearest place.
    """
    kernel = weight.shape[-1]
    place = torch.tensor(tap_places(kernel), dtype=torch.float64, device=weight.device) + kernel // 2
    place = (place + offset_px.to(place)).clamp(0, kernel - 1)
    grid = torch.arange(kernel, dtype=torch.float64, device=weight.device)
    down, across = (F.relu(1 - (place[:, axis, None] - grid).abs()) for axis in (0, 1))  # k², k
    spread = (down[:, :, None] * across[:, None, :]).flatten(1)  # k², k²: from tap, to place
    return (weight.flatten(2) @ spread.to(weight)).view_as(weight)


def regular_kernel(deform: DeformableConv2d, known: SiteStatistics | None = None) -> Tensor:
    """The kernel of the regular conv; with statistics, multiplied by ``shrinkage``."""
    return deform.regular_conv.weight * (1.0 if known is None else known.shrinkage)


def mean_kernel(deform: DeformableConv2d, known: SiteStatistics | None = None) -> Tensor:
    """The regular kernel times the mean modulator of each tap.

    With statistics, moved to where the taps look and multiplied by ``shrinkage``: without the latter a kernel whose
    taps look far gives an output of many times the energy that is wanted.
    """
    weight = deform.regular_conv.weight
    kernel = weight.shape[-1]
    weighted = weight * mean_modulator(deform, known).view(kernel, kernel)
    if known is None:
        return weighted
    return known.shrinkage * moved_kernel(weighted, torch.tensor(known.tap_offset_mean_px))


def attention_conv(deform: DeformableConv2d) -> nn.Conv2d:
    """One map in place of k²: the modulator conv's mean over taps, each counted by the energy of its weights."""
    conv = deform.modulator_conv
    energy = deform.regular_conv.weight.square().sum((0, 1)).flatten()
    share = (energy + 1e-12) / (energy + 1e-12).sum()
    weight = (share[:, None, None, None] * conv.weight).sum(0, keepdim=True)
    return with_weights(conv, weight, (share * conv.bias).sum(0, keepdim=True))


def rank_one(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest depthwise (C, 1, k, k) and pointwise (O, C, 1, 1) kernels to ``weight`` (O, C, k, k).

    For each input channel, the first singular pair of its O × k² matrix (Eckart and Young, 1936).
    """
    kernel = weight.shape[-1]
    left, size, right = torch.linalg.svd(weight.flatten(2).transpose(0, 1).double(), full_matrices=False)
    scale = size[:, :1].sqrt()
    depthwise = (right[:, 0] * scale).view(-1, 1, kernel, kernel)
    pointwise = (left[:, :, 0] * scale).T[:, :, None, None]
    return depthwise.to(weight), pointwise.to(weight)


def attention_kernel(deform: DeformableConv2d, known: SiteStatistics | None = None) -> Tensor:
    """The kernel that stands behind the attention map: each tap by its modulator over that of the map."""
    bias = attention_conv(deform).bias
    level = 2.0 * torch.sigmoid(bias) if known is None else bias.new_tensor(known.attention_mean)
    return mean_kernel(deform, known) / level


# The rewrites


def _refused(
    name: str, statistics: DeformStatistics | None, fitted: Mapping[str, FittedConv] | None, site: Site
) -> str | None:
    return (
        not_as_published(site)
        or _not_the_statistics_of(site, None if statistics is None else statistics.by_site)
        or _not_the_fit_of(site, fitted, name)
    )


def _not_the_statistics_of(site: Site, known: Mapping[str, SiteStatistics] | None) -> str | None:
    kernel = site.module.regular_conv.kernel_size[0]
    if known is None or (site.path in known and known[site.path].kernel == kernel):
        return None
    found = f"a kernel of {known[site.path].kernel} and not {kernel}" if site.path in known else "no entry"
    return f"the statistics given have {found} for {site.path}; make them with the network that is rewritten"


def _not_the_fit_of(site: Site, fitted: Mapping[str, FittedConv] | None, name: str) -> str | None:
    if fitted is None:
        return None
    if site.path not in fitted:
        return f"the fitted kernels given have no entry for {site.path}; make them with the network that is rewritten"
    given, expected = fitted[site.path], tuple(site.module.regular_conv.weight.shape)
    if tuple(given.weight.shape) != expected or len(given.bias) != expected[0]:
        found = tuple(given.weight.shape)
        return f"the kernel fitted for {site.path} is {found}, not {expected}: it was fitted to another network"
    if given.substitute != name:
        return f"the kernel given for {site.path} was fitted for {given.substitute}, not for {name}"
    return None


def _start(
    site: Site,
    from_weights: Callable[[DeformableConv2d, SiteStatistics | None], Tensor],
    statistics: DeformStatistics | None,
    fitted: Mapping[str, FittedConv] | None,
) -> tuple[Tensor, Tensor]:
    """Kernel (O, C, k, k) and bias (O,) of the site: the fitted ones, or from the weights and statistics."""
    like = site.module.regular_conv.weight
    if fitted is not None:
        return fitted[site.path].weight.to(like), fitted[site.path].bias.to(like)
    known = None if statistics is None else statistics.by_site[site.path]
    return from_weights(site.module, known), torch.zeros_like(like[:, 0, 0, 0])


def _modulated(
    statistics: DeformStatistics | None, fitted: Mapping[str, FittedConv] | None, site: Site
) -> dict[str, nn.Module]:
    weight, bias = _start(site, regular_kernel, statistics, fitted)
    conv = site.module.modulator_conv
    tap_conv = with_weights(nn.Conv2d(1, 1, 1), tap_major(weight), bias)
    module = ModulatedConv(with_weights(conv, conv.weight, conv.bias), tap_conv, weight.shape[-1])
    module.shifts.prepare(set(tap_places(weight.shape[-1])), weight)
    return {site.path: module}


def _plain(
    statistics: DeformStatistics | None, fitted: Mapping[str, FittedConv] | None, site: Site
) -> dict[str, nn.Module]:
    weight, bias = _start(site, mean_kernel, statistics, fitted)
    return {site.path: with_weights(site.module.regular_conv, weight, bias)}


def _separable(
    statistics: DeformStatistics | None, fitted: Mapping[str, FittedConv] | None, site: Site
) -> dict[str, nn.Module]:
    weight, bias = _start(site, attention_kernel, statistics, fitted)
    depthwise, pointwise = rank_one(weight)
    channels, padding = len(depthwise), site.module.padding
    spatial = nn.Conv2d(channels, channels, 1, padding=padding, groups=channels)
    attention = attention_conv(site.module)
    module = AttentiveSeparableConv(
        with_weights(spatial, depthwise), attention, with_weights(nn.Conv2d(1, 1, 1), pointwise, bias)
    )
    return {site.path: module}


def _substitute(
    name: str,
    built: Callable[[DeformStatistics | None, Mapping[str, FittedConv] | None, Site], dict[str, nn.Module]],
    statistics: KnownStatistics,
    fitted: KnownFits,
    *,
    because: str,
    source: str,
) -> Rewrite:
    """What the three records share. Their code holds the paths of files; data in memory stand under their name."""
    given = {"statistics": statistics, "fitted": fitted}
    arguments = ", ".join(f"{key}={in_code(key, value)}" for key, value in given.items() if value is not None)
    statistics = DeformStatistics.load(statistics) if is_file(statistics) else statistics
    fitted = fits_of(name, fitted) if is_file(fitted) else fitted
    return Rewrite(
        name=name,
        replaces=DeformableConv2d,
        built=partial(built, statistics, fitted),
        refused=partial(_refused, name, statistics, fitted),
        claim=AS_GOOD_AS_THE_TEACHER,
        because=because,
        source=source,
        code=f"{name}({arguments})" if arguments else "",
    )


def is_file(value: object) -> bool:
    """Whether data are given by the path of the file that keeps them."""
    return isinstance(value, str | os.PathLike)


def in_code(name: str, value: object) -> str:
    """What stands for ``value`` in the code of a rewrite."""
    return repr(os.fspath(value)) if is_file(value) else name


def fits_of(name: str, path: str | Path) -> Mapping[str, FittedConv]:
    """The kernels of one rewrite in a file of fits; ``RewriteError`` if it has none for it."""
    fits = load_fits(path)
    if name not in fits:
        raise RewriteError(f"{path} holds fits for {', '.join(fits) or 'nothing'}, none for {name}; fit that as well.")
    return fits[name]


def substitute_modulated_conv(*, statistics: KnownStatistics = None, fitted: KnownFits = None) -> Rewrite:
    """Offsets dropped, modulator kept: the same function where all offsets are zero.

    Starts from the regular conv's kernel; with ``statistics``, multiplied by what a sample in the tap's own place has
    in common with the one that is looked up. ``fitted``: kernels by site from ``fit_modulated_convs``, which win.
    Either may be the path of its file.
    """
    return _substitute(
        "substitute_modulated_conv",
        _modulated,
        statistics,
        fitted,
        because="no look-up: shifts by whole taps, products and a 1×1 conv",
        source="DCNv2, arXiv:1811.11168, equation 1 with all offsets zero",
    )


def substitute_plain_conv(*, statistics: KnownStatistics = None, fitted: KnownFits = None) -> Rewrite:
    """One k×k conv: the regular conv, each tap times its mean modulator.

    ``statistics``: from ``deform_statistics``; the mean modulator is then the measured one, and each tap stands where
    it looks on the average, within the k×k window. ``fitted``: kernels by site from ``fit_plain_convs``, which win.
    Either may be the path of its file (``DeformStatistics.save``, ``save_fits``).
    """
    return _substitute(
        "substitute_plain_conv",
        _plain,
        statistics,
        fitted,
        because="a k×k conv is the operator that the NPU does best; the published phone network took it",
        source="Lumen Cutout replaces every deformable conv; with offsets and modulator constant it is the same",
    )


def substitute_separable_conv(*, statistics: KnownStatistics = None, fitted: KnownFits = None) -> Rewrite:
    """Depthwise k×k, one spatial attention map in place of the k² modulators, and 1×1.

    Starts from the best rank-one kernel of each input channel. ``statistics``: as for ``substitute_plain_conv``;
    ``fitted``: kernels by site from ``fit_separable_convs``, which win.
    """
    return _substitute(
        "substitute_separable_conv",
        _separable,
        statistics,
        fitted,
        because="about k² times fewer multiplications than a k×k conv, and still weighted by place",
        source="depthwise-separable conv: MobileNets, arXiv:1704.04861; Eckart and Young (1936) for where it starts",
    )


SUBSTITUTE_MODULATED_CONV = substitute_modulated_conv()
SUBSTITUTE_PLAIN_CONV = substitute_plain_conv()
SUBSTITUTE_SEPARABLE_CONV = substitute_separable_conv()
