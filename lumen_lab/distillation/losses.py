"""Losses on mask logits: BCE, soft IoU, SSIM and MAE on every side output, BCE on the gradient heads.

The mix is that of BiRefNet (Zheng et al., 2024, arXiv:2401.03407, section 3.4). Masks are (N, 1, H, W) in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lumen_lab.network.decoder import SideOutputs, resize


@dataclass(frozen=True)
class MaskWeights:
    """Weight of each term of a mask. The published general weights had 30, 0.5, 10 and 100 (FP32, 1024 px)."""

    bce: float = 1.0
    iou: float = 1.0
    ssim: float = 0.5
    mae: float = 1.0

    @property
    def any(self) -> bool:
        """Whether a mask costs anything."""
        return any((self.bce, self.iou, self.ssim, self.mae))


@dataclass(frozen=True)
class LossWeights(MaskWeights):
    """Those of the masks, and of a BiRefNet's own heads."""

    gradient: float = 0.5
    gate: float = 0.0  # of lumen_lab.distillation.gates.gate_loss


def soft_iou_loss(probability: Tensor, mask: Tensor) -> Tensor:
    """1 − (Σ p·m + 1) / (Σ (p + m − p·m) + 1), the mean over images; an empty mask and an empty prediction cost 0."""
    overlap = (probability * mask).sum((1, 2, 3))
    union = (probability + mask).sum((1, 2, 3)) - overlap
    return 1 - ((overlap + 1) / (union + 1)).mean()


def ssim_loss(probability: Tensor, mask: Tensor, *, window: int = 11, sigma: float = 1.5) -> Tensor:
    """1 − SSIM with a Gaussian window (Wang et al., 2004, equation 13; C1 = 0.01², C2 = 0.03²)."""
    position = torch.arange(window, dtype=mask.dtype, device=mask.device) - window // 2
    gaussian = torch.exp(-(position**2) / (2 * sigma**2))
    gaussian = gaussian / gaussian.sum()

    def blur(x: Tensor) -> Tensor:
        x = F.conv2d(x, gaussian.view(1, 1, 1, -1), padding=(0, window // 2))
        return F.conv2d(x, gaussian.view(1, 1, -1, 1), padding=(window // 2, 0))

    mean_p, mean_m = blur(probability), blur(mask)
    var_p = blur(probability**2) - mean_p**2
    var_m = blur(mask**2) - mean_m**2
    covariance = blur(probability * mask) - mean_p * mean_m
    luminance = (2 * mean_p * mean_m + 1e-4) / (mean_p**2 + mean_m**2 + 1e-4)
    contrast = (2 * covariance + 9e-4) / (var_p + var_m + 9e-4)
    return 1 - (luminance * contrast).mean()


def gradient_target(image: Tensor, mask: Tensor) -> Tensor:
    """Where the object's own edges are: |5×5 Laplacian| of the channel mean inside the dilated mask, in [0, 1]."""
    kernel = torch.ones(1, 1, 5, 5, dtype=image.dtype, device=image.device)
    kernel[..., 2, 2] = -24
    edges = F.conv2d(F.pad(image.mean(1, keepdim=True), (2, 2, 2, 2), mode="replicate"), kernel).abs() / 24
    near = F.max_pool2d(mask, 9, stride=1, padding=4)
    return (edges * near).clamp(0, 1)


def boundary_weight(mask: Tensor, strength: float, *, width_px: int = 5) -> Tensor:
    """1 + strength · (highest − lowest mask value within a square of ``width_px``): the pixels at and beside an edge
    count more, a soft edge by how far it goes."""
    margin = width_px // 2
    highest = F.max_pool2d(mask, width_px, stride=1, padding=margin)
    lowest = -F.max_pool2d(-mask, width_px, stride=1, padding=margin)
    return 1 + strength * (highest - lowest)


def mask_loss(
    logits: Tensor, mask: Tensor, weights: MaskWeights, *, pixel_weight: Tensor | None = None
) -> dict[str, Tensor]:
    """The four weighted terms of one side output, with the mask (N, 1, H, W) at the logits' size.

    BCE and MAE are means over pixels, weighted by ``pixel_weight`` (N, 1, H, W) where it is given: each picture's own
    weighted mean, and the mean of those.
    """
    probability = torch.sigmoid(logits)

    def mean(values: Tensor) -> Tensor:
        if pixel_weight is None:
            return values.mean()
        return ((values * pixel_weight).sum((1, 2, 3)) / pixel_weight.sum((1, 2, 3))).mean()

    return {
        "bce": weights.bce * mean(F.binary_cross_entropy_with_logits(logits, mask, reduction="none")),
        "iou": weights.iou * soft_iou_loss(probability, mask),
        "ssim": weights.ssim * ssim_loss(probability, mask),
        "mae": weights.mae * mean((probability - mask).abs()),
    }


def supervised_loss(outputs: SideOutputs, image: Tensor, mask: Tensor, weights: LossWeights) -> dict[str, Tensor]:
    """Every term summed over side outputs (each resized to the mask), and the gradient heads; keys name the terms."""
    total: dict[str, Tensor] = {}
    for logits in outputs.masks:
        for name, value in mask_loss(resize(logits.float(), mask.shape[-2:]), mask, weights).items():
            total[name] = total.get(name, 0) + value
    target = gradient_target(image, mask)
    edges = [
        F.binary_cross_entropy_with_logits(logits.float(), F.adaptive_max_pool2d(target, logits.shape[-2:]))
        for logits in outputs.gradients
    ]
    total["gradient"] = weights.gradient * torch.stack(edges).mean()
    return total
