"""Gate health: what tells a gate that works from one that is about to die, long before a mask shows it.

A gate is a map g = sigmoid(z) (N, 1, h, w) that multiplies a branch's features F (N, C, h, w), whose product is
resized and added to the rest R of the decoder (N, C, H, W). Each measure is defined at ``measures``;
docs/gate_health.md has the reasons, ``lumen_lab.distillation.health_rules`` the thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lumen_lab.distillation.gates import Gate
from lumen_lab.distillation.transfer import at_size_of
from lumen_lab.distillation.views import RAW
from lumen_lab.network.decoder import resize

SATURATED = 0.02  # a gate value nearer to 0 or 1 than this: five of the 256 steps of an 8-bit sigmoid
CODES = 256
CONSTANT = 1e-3  # a channel that varies by less than this share of the branch's own spread is dead

MEASURES = (
    "mean",
    "saturated_low",
    "saturated_high",
    "swing",
    "entropy",
    "contribution",
    "passed",
    "gradient",
    "teacher_gap",
    "teacher_rms",
    "dead_channels",
    "codes",
)


@torch.no_grad()
def measures(
    gate: Gate,
    shown: Mapping[str, Tensor],
    *,
    teacher: Mapping[str, Tensor] | None = None,
    limits: tuple[float, float] | None = None,
    gradient: Tensor | None = None,
) -> dict[str, float | None]:
    """``MEASURES`` of one gate over a batch; None where what they need was not given.

    ``shown``: path → value, as a view returns it, of the gate's own ``paths``; ``teacher``: the same of the teacher.
    ``limits``: the least and greatest logit that the student's integers hold; ``gradient``: of the loss by the logits.

    - mean of g; saturated_low, saturated_high: shares of g below .02 and above .98
    - swing: √ of the variance of g over the pictures, at each place, averaged over places; None for one picture
    - entropy: mean of −g log₂ g − (1 − g) log₂(1 − g), in bits: 0 where the gate has decided, 1 where it is ½
    - contribution: ‖resize(F · g)‖ ÷ ‖R‖, what the branch adds over what is there without it
    - passed: mean of 4 g (1 − g), with 0 where rounding clips z: the share of a gradient that reaches z, 1 at g = ½
    - gradient: root mean square of ∂loss/∂z
    - teacher_gap: |mean g − mean g of the teacher|; teacher_rms: root mean square of their difference
    - dead_channels: share of channels of F whose standard deviation is under a thousandth of that of all F
    - codes: different values of round(256 g), as a share of as many as there could be
    """
    logits = shown[gate.path].float()
    value = torch.sigmoid(logits)
    found = _of_the_map(value) | _of_the_branch(gate, shown, value)
    found["passed"] = _mean(4 * value * (1 - value) * _unclipped(gate, shown, limits))
    found["gradient"] = None if gradient is None else float(gradient.float().square().mean().sqrt())
    found |= _against(value, None if teacher is None else torch.sigmoid(teacher[gate.path].float()))
    return {name: found[name] for name in MEASURES}


def _mean(values: Tensor) -> float:
    return float(values.float().mean())


def _of_the_map(value: Tensor) -> dict[str, float | None]:
    inside = value.clamp(1e-12, 1 - 1e-7)
    codes = (value * CODES).round().clamp(max=CODES - 1).unique().numel()
    return {
        "mean": _mean(value),
        "saturated_low": _mean(value < SATURATED),
        "saturated_high": _mean(value > 1 - SATURATED),
        "swing": _mean(value.std(0, correction=0)) if len(value) > 1 else None,
        "entropy": _mean(-inside * inside.log2() - (1 - inside) * (1 - inside).log2()),
        "codes": codes / min(CODES, value.numel()),
    }


def _of_the_branch(gate: Gate, shown: Mapping[str, Tensor], value: Tensor) -> dict[str, float | None]:
    features = shown[gate.branch].float()
    spread = features.transpose(0, 1).flatten(1).std(1, correction=0)
    dead = _mean(spread <= CONSTANT * features.std(correction=0))
    if gate.joins is None:
        return {"contribution": None, "dead_channels": dead}
    rest = shown[gate.joins].float()
    added = resize(features * value, rest.shape[-2:])
    return {"contribution": float(added.norm() / rest.norm().clamp_min(1e-12)), "dead_channels": dead}


def _unclipped(gate: Gate, shown: Mapping[str, Tensor], limits: tuple[float, float] | None) -> Tensor:
    raw = shown.get(RAW.format(gate.path))
    if raw is None or limits is None:
        return torch.ones((), device=shown[gate.path].device)
    return ((raw >= limits[0]) & (raw <= limits[1])).float()


def _against(value: Tensor, teacher: Tensor | None) -> dict[str, float | None]:
    if teacher is None:
        return {"teacher_gap": None, "teacher_rms": None}
    difference = value - at_size_of(value, teacher)
    return {"teacher_gap": abs(_mean(value) - _mean(teacher)), "teacher_rms": float(difference.square().mean().sqrt())}
