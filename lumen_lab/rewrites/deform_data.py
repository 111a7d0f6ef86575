"""What pictures say of the deformable convs of a network, and how that is kept: statistics, and fitted kernels.

``deform_statistics`` and ``deform_fit`` make these; a rewrite is given them, or the path of the file that keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
from torch import Tensor

from lumen_lab.errors import ArtifactError
from lumen_lab.specs import Record, write_whole

LAGS_PX = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class SiteStatistics(Record):
    """One deformable conv over pictures. An *offset* is max(|dy|, |dx|) of one tap at one pixel, in pixels.

    ``size``: (H, W) of the largest map, by its pixels; ``share_beyond``: of the offsets, for each of ``radii``;
    ``offset_quantiles_px``: the 0 %, 1 % … 100 % quantiles; ``modulator_share_off``: outside of [0.9, 1.1].
    By tap, k² entries each: ``tap_modulator_mean``, ``tap_modulator_square`` (mean of squares) and
    ``tap_offset_mean_px``, pairs (dy, dx).

    What a prediction of errors needs: ``correlation`` of the input with itself at ``LAGS_PX`` (Σ x(p)·x(p + d) over
    √(Σ x(p)² · Σ x(p + d)²), rows and columns); ``inside_share``, how much of what the taps read lies inside the image,
    each tap counted by its kernel's energy and its squared modulator, and ``inside_share_within`` the same with the
    offsets clamped to 0 and to each of ``radii``; ``constant_share``, of the modulators' energy, that lies in their
    means; ``attention_mean`` of the one map of the separable substitute, and ``attention_share``, of the modulators'
    energy, that is in proportion to it; ``rank_one_share``, of the kernel's energy, that one depthwise and one
    pointwise kernel hold.
    """

    site: str
    kernel: int
    pictures: int
    size: tuple[int, int]
    offset_mean_px: float
    offset_p50_px: float
    offset_p95_px: float
    offset_p99_px: float
    offset_max_px: float
    radii: tuple[int, ...]
    share_beyond: tuple[float, ...]
    offset_quantiles_px: tuple[float, ...]
    modulator_mean: float
    modulator_std: float
    modulator_share_off: float
    tap_modulator_mean: tuple[float, ...]
    tap_modulator_square: tuple[float, ...]
    tap_offset_mean_px: tuple[tuple[float, float], ...]
    correlation: tuple[float, ...]
    inside_share: float
    inside_share_within: tuple[float, ...]
    constant_share: float
    attention_mean: float
    attention_share: float
    rank_one_share: float

    def correlation_at(self, distance_px: np.ndarray) -> np.ndarray:
        """Correlation of the input with itself at a distance, 1 at none.

        Below a pixel 1 − d²·(1 − correlation at one pixel), as a bilinear look-up mixes two neighbours; then straight
        lines between ``LAGS_PX``, and level beyond the last.
        """
        near = 1 - np.square(distance_px) * (1 - self.correlation[0])
        return np.where(distance_px < 1, near, np.interp(distance_px, LAGS_PX, self.correlation))

    def mean_correlation(self, radius: float = 0.0) -> float:
        """Mean correlation of what is looked up with what is read when offsets are clamped to ``radius`` pixels."""
        excess = np.maximum(np.array(self.offset_quantiles_px) - radius, 0.0)
        return float(self.correlation_at(excess).mean())

    @property
    def shrinkage(self) -> float:
        """The factor by which a kernel without offsets is best multiplied: ρ·min(1, S/S₀).

        Of a sample that correlates by ρ with the one wanted, of which the share S lies inside the image where its own
        is S₀, the multiple nearest to it in the mean square.
        """
        return self.mean_correlation() * min(1.0, self.inside_share / max(self.inside_share_within[0], 1e-12))

    def rows(self) -> list[dict[str, object]]:
        """One row: how far, how often beyond each radius, and the modulator."""
        row = {"site": self.site, "kernel": self.kernel, "pictures": self.pictures}
        named = [f"offset_{name}_px" for name in ("mean", "p50", "p95", "p99", "max")]
        row |= {name: getattr(self, name) for name in named}
        row |= {f"beyond_{radius}_px": share for radius, share in zip(self.radii, self.share_beyond, strict=True)}
        named = ["modulator_mean", "modulator_std", "modulator_share_off", "inside_share"]
        return [row | {name: getattr(self, name) for name in named}]


@dataclass(frozen=True)
class DeformStatistics(Record):
    """The statistics of every deformable conv that was asked for, in the network's order."""

    sites: tuple[SiteStatistics, ...]

    @property
    def by_site(self) -> dict[str, SiteStatistics]:
        """The statistics by site path."""
        return {entry.site: entry for entry in self.sites}

    def rows(self) -> list[dict[str, object]]:
        return [row for entry in self.sites for row in entry.rows()]


# Fitted kernels


@dataclass(frozen=True)
class FittedConv:
    """Kernel (O, C, k, k) and bias (O,) of one site, the λ that was taken and the SQNR on the pictures held out.

    ``substitute``: the name of the rewrite that it was fitted for.
    """

    weight: Tensor
    bias: Tensor
    ridge: float
    held_out_db: float | None
    substitute: str


Fits = Mapping[str, Mapping[str, FittedConv]]
"""Fitted kernels by the name of the rewrite, then by the path of the site."""


def save_fits(fits: Fits, path: str | Path) -> Path:
    """Write fits (of ``fit_substitutes``) as one safetensors file, the figures beside the kernels as JSON; the path."""
    tensors, entries = {}, []
    for name, by_site in fits.items():
        for site, conv in by_site.items():
            entry = {"substitute": name, "site": site, "ridge": conv.ridge, "held_out_db": conv.held_out_db}
            tensors[f"{len(entries)}.weight"] = conv.weight.contiguous()
            tensors[f"{len(entries)}.bias"] = conv.bias.contiguous()
            entries.append(entry)
    return write_whole(path, safetensors.torch.save(tensors, {"fits": json.dumps(entries, allow_nan=False)}))


def load_fits(path: str | Path) -> dict[str, dict[str, FittedConv]]:
    """Fits written by ``save_fits``; ``ArtifactError`` if the file holds none."""
    fits: dict[str, dict[str, FittedConv]] = {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for place, entry in enumerate(json.loads(file.metadata()["fits"])):
                weight, bias = (file.get_tensor(f"{place}.{part}") for part in ("weight", "bias"))
                conv = FittedConv(weight, bias, entry["ridge"], entry["held_out_db"], entry["substitute"])
                fits.setdefault(entry["substitute"], {})[entry["site"]] = conv
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"Cannot read {path} as saved fits ({error!r}); make them with save_fits.") from None
    return fits
