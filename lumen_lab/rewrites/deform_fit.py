"""Where a substitute for a deformable conv starts from, given pictures: the least-squares fit to what the site gives.

With its offsets dropped, a site's output is linear in the input's k×k patches, weighted or not by the modulator. The
kernel W and bias that come nearest to the real output y over pictures solve the normal equations of

    Σ ‖y − W φ‖² + λ ‖W − W₀‖²,      φ: the C·k² values of a patch (times the modulator of each tap, or the attention)

so that where pictures say little, W stays at the start W₀ made from the weights (ridge regression: Hoerl and Kennard,
1970). Only the sums Σφφᵀ and Σφyᵀ are kept, in float64. λ is the one of ``RIDGES`` that errs least on pictures which
were held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform_data import FittedConv
from lumen_lab.rewrites.deform_sites import Sites, deform_sites, site_inputs
from lumen_lab.rewrites.deform_substitutes import (
    attention_conv,
    attention_kernel,
    mean_kernel,
    rank_one,
    regular_kernel,
)

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Strengths λ that are tried, in units of the mean square of a patch's values times the number of pixels."""

POSITIONS = 2048
"""Pixels that a site takes from one picture at most; they are spread evenly over the map."""

HELD_OUT_EVERY = 4
SWEEPS = 5


@dataclass
class NormalEquations:
    """Σφφᵀ, Σφyᵀ and Σ‖y‖² over pixels, φ with a one at its end for the bias; float64."""

    gram: Tensor
    cross: Tensor
    energy: float = 0.0
    pixels: int = 0

    @classmethod
    def empty(cls, values: int, outputs: int) -> NormalEquations:
        return cls(torch.zeros(values + 1, values + 1).double(), torch.zeros(values + 1, outputs).double())

    def add(self, features: Tensor, target: Tensor) -> None:
        """One picture: ``features`` (pixels, values), ``target`` (pixels, outputs)."""
        features = F.pad(features.double(), (0, 1), value=1.0)
        target = target.double()
        self.gram += features.T @ features
        self.cross += features.T @ target
        self.energy += float(target.square().sum())
        self.pixels += len(features)

    def plus(self, other: NormalEquations) -> NormalEquations:
        """The sums over both sets of pictures."""
        return NormalEquations(
            self.gram + other.gram, self.cross + other.cross, self.energy + other.energy, self.pixels + other.pixels
        )

    def solved(self, start: Tensor, ridge: float) -> Tensor:
        """The minimiser (values + 1, outputs) nearest to ``start``; the bias is not held."""
        strength = ridge * float(self.gram.diagonal()[:-1].mean()) + 1e-12
        held = torch.full_like(self.gram.diagonal(), strength)
        held[-1] = 1e-9 * strength
        left = self.gram + torch.diag(held)
        return start + torch.cholesky_solve(self.cross - self.gram @ start, torch.linalg.cholesky(left))

    def error(self, solution: Tensor) -> float:
        """Share of the output's energy that ``solution`` misses on these pictures."""
        missed = self.energy - 2 * float((solution * self.cross).sum())
        missed += float((solution * (self.gram @ solution)).sum())
        return max(missed, 0.0) / max(self.energy, 1e-300)


def fit_plain_convs(model: nn.Module, images: Iterable, *, sites: Sites = None) -> dict[str, FittedConv]:
    """The k×k conv nearest to each deformable conv of ``model`` over ``images``, by site path.

    ``images``: normalised batches (N, 3, H, W), gone through once; ``sites``: paths, or all. At most ``POSITIONS``
    pixels of a picture are looked at, and the sums of a site take 2·(C·k² + 1)² float64.
    """
    return fit(model, images, sites, "substitute_plain_conv", patches, mean_kernel)


def fit_modulated_convs(model: nn.Module, images: Iterable, *, sites: Sites = None) -> dict[str, FittedConv]:
    """As ``fit_plain_convs``, the taps weighted by the site's own modulator."""

    def weighted(deform: DeformableConv2d, x: Tensor) -> Tensor:
        modulator = 2.0 * torch.sigmoid(deform.modulator_conv(x)).flatten(2)  # N, k², H·W
        taps = patches(deform, x).unflatten(1, (x.shape[1], -1))
        return (taps * modulator[:, None]).flatten(1, 2)

    return fit(model, images, sites, "substitute_modulated_conv", weighted, regular_kernel)


def fit_separable_convs(model: nn.Module, images: Iterable, *, sites: Sites = None) -> dict[str, FittedConv]:
    """As ``fit_plain_convs``, patches times the attention map, and the kernel depthwise k×k and pointwise.

    The kernel is fitted whole, cut to rank one per input channel, then its two factors are fitted in turn.
    """

    def attended(deform: DeformableConv2d, x: Tensor) -> Tensor:
        attention = 2.0 * torch.sigmoid(attention_conv(deform)(x)).flatten(2)
        return patches(deform, x) * attention

    return fit(model, images, sites, "substitute_separable_conv", attended, attention_kernel, finish=separated)


def patches(deform: DeformableConv2d, x: Tensor) -> Tensor:
    """k×k patches with zeros outside: (N, C·k², H·W), the order of a flattened kernel."""
    return F.unfold(x, deform.regular_conv.kernel_size, padding=deform.padding)


def fit(
    model: nn.Module,
    images: Iterable,
    sites: Sites,
    substitute: str,
    features: Callable[[DeformableConv2d, Tensor], Tensor],
    start: Callable[[DeformableConv2d], Tensor],
    finish: Callable[[NormalEquations, Tensor, torch.Size], Tensor] | None = None,
) -> dict[str, FittedConv]:
    """Sums over the batches, every ``HELD_OUT_EVERY``-th apart, then one solution a site."""
    convs = deform_sites(model, sites)
    sums = {path: [blank(conv), blank(conv)] for path, conv in convs.items()}
    with torch.no_grad():
        for seen, (_, given) in enumerate(site_inputs(model, images, convs), start=1):
            for path, x in given:
                add_picture(sums[path][seen % HELD_OUT_EVERY == 0], convs[path], x, features)
        found = {path: solution(*sums[path], convs[path], start(convs[path]), finish) for path in convs}
    return {path: FittedConv(*parts, substitute) for path, parts in found.items()}


def blank(deform: DeformableConv2d) -> NormalEquations:
    weight = deform.regular_conv.weight
    return NormalEquations.empty(weight[0].numel(), len(weight))


def add_picture(sums: NormalEquations, deform: DeformableConv2d, x: Tensor, features) -> None:
    """One picture's pixels (N, C, H, W), thinned evenly to ``POSITIONS``."""
    taken = slice(None, None, -(-x.shape[0] * x.shape[2] * x.shape[3] // POSITIONS))
    rows = features(deform, x).transpose(1, 2).flatten(0, 1)[taken]
    target = deform(x).flatten(2).transpose(1, 2).flatten(0, 1)[taken]
    sums.add(rows.cpu(), target.cpu())


def solution(
    shown: NormalEquations, held_out: NormalEquations, deform: DeformableConv2d, start: Tensor, finish
) -> tuple[Tensor, Tensor, float, float | None]:
    """Kernel and bias, λ, and the SQNR held out: λ is what errs least on the pictures held out, then all are fitted to.

    Without a picture held out λ is 0.1. What ``finish`` does to a solution is done before it is judged.
    """
    shape = deform.regular_conv.weight.shape
    first = F.pad(start.detach().double().cpu().flatten(1).T, (0, 0, 0, 1))
    finish = finish or (lambda sums, found, shape: found)
    errors = {}
    for ridge in RIDGES if held_out.pixels and shown.pixels else ():
        errors[ridge] = held_out.error(finish(shown, shown.solved(first, ridge), shape))
    ridge = min(errors, key=errors.get, default=0.1)
    whole = shown.plus(held_out)
    found = finish(whole, whole.solved(first, ridge), shape)
    db = -10 * math.log10(errors[ridge]) if errors and errors[ridge] else None
    return found[:-1].T.reshape(shape), found[-1], ridge, db


def separated(sums: NormalEquations, found: Tensor, shape: torch.Size) -> Tensor:
    """The depthwise-and-pointwise kernel nearest to the site's output, from ``found`` on; (values + 1, outputs).

    Each factor in turn is the least-squares solution with the other fixed (alternating least squares); the bias is
    fitted with the pointwise factor.
    """
    depthwise, pointwise = rank_one(found[:-1].T.reshape(shape))
    depthwise, pointwise = depthwise.flatten(1), pointwise.flatten(1)  # C, k²;  O, C
    for _ in range(SWEEPS):
        pointwise, bias = fitted_pointwise(sums, depthwise)
        depthwise = fitted_depthwise(sums, pointwise, bias, depthwise.shape)
    pointwise, bias = fitted_pointwise(sums, depthwise)
    weight = pointwise[:, :, None] * depthwise[None]
    return torch.cat([weight.flatten(1).T, bias[None]])


def fitted_pointwise(sums: NormalEquations, depthwise: Tensor) -> tuple[Tensor, Tensor]:
    """Pointwise kernel (O, C) and bias (O,) for a depthwise kernel (C, k²)."""
    mix = torch.block_diag(*depthwise[:, :, None], torch.ones(1, 1).double())  # C·k² + 1, C + 1
    found = ridge_solve(mix.T @ sums.gram @ mix, mix.T @ sums.cross)
    return found[:-1].T, found[-1]


def fitted_depthwise(sums: NormalEquations, pointwise: Tensor, bias: Tensor, shape: torch.Size) -> Tensor:
    """Depthwise kernel (C, k²) for a pointwise kernel (O, C) and a bias."""
    taps = shape[1]
    together = (pointwise.T @ pointwise).repeat_interleave(taps, 0).repeat_interleave(taps, 1)
    wanted = (sums.cross - sums.gram[:, -1:] * bias)[:-1]  # C·k², O
    right = (wanted * pointwise.T.repeat_interleave(taps, 0)).sum(1, keepdim=True)
    return ridge_solve(sums.gram[:-1, :-1] * together, right).view(shape)


def ridge_solve(gram: Tensor, right: Tensor, strength: float = 1e-6) -> Tensor:
    """gram⁻¹ · right with a diagonal just large enough for a singular matrix."""
    held = strength * float(gram.diagonal().mean()) + 1e-12
    return torch.linalg.solve(gram + held * torch.eye(len(gram)).double(), right)
