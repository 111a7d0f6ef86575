"""Losses between a student and its teacher: on masks, features, gates and where the features attend.

Features are compared after normalisation, so that one weight serves taps of any scale. What the student's graph has at
another size than the teacher is compared at the student's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.distillation.losses import MaskWeights, boundary_weight, mask_loss

NOTHING = MaskWeights(0, 0, 0, 0)
TINY = 1e-6


@dataclass(frozen=True)
class TransferWeights:
    """What a student is told, and how loudly.

    ``truth``: the final mask against the matte; ``teacher``: against the teacher's mask; ``side``: masks that the
    teacher's own side heads read off the student's features, against the matte (one factor for all of ``truth``).
    ``feature``, ``gate``, ``attention``: distances to the teacher's (``feature_distance``, ``gate_distance``,
    ``attention_distance``). ``boundary``: how much more a pixel at an edge counts (``losses.boundary_weight``).
    """

    truth: MaskWeights = MaskWeights(1.0, 1.0, 0.5, 1.0)
    teacher: MaskWeights = MaskWeights(1.0, 0.0, 0.0, 1.0)
    side: float = 0.0
    feature: float = 1.0
    gate: float = 1.0
    attention: float = 0.0
    boundary: float = 2.0


def at_size_of(student: Tensor, teacher: Tensor) -> Tensor:
    """The teacher's map (N, C, h, w) at the student's size: means of what is larger, bilinear where it is smaller."""
    size = student.shape[-2:]
    if teacher.shape[-2:] == size:
        return teacher
    if teacher.shape[-2] >= size[0] and teacher.shape[-1] >= size[1]:
        return F.adaptive_avg_pool2d(teacher, size)
    return F.interpolate(teacher, size, mode="bilinear", align_corners=True)


def feature_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ (s − t)² ÷ Σ (t − mean t)² of each picture, averaged: 0 for the same maps, 1 for no more than their mean.

    The mean is that of each channel, so that a tap which is mostly constant does not look learnt.
    """
    teacher = at_size_of(student, teacher.float())
    spread = teacher - teacher.mean((2, 3), keepdim=True)
    return ((student - teacher).square().sum((1, 2, 3)) / (spread.square().sum((1, 2, 3)) + TINY)).mean()


def gate_distance(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Mean squared difference of two gates, of their values after the sigmoid; 0 to 1."""
    teacher = torch.sigmoid(teacher_logits.float())
    return (torch.sigmoid(student_logits) - at_size_of(student_logits, teacher)).square().mean()


def attention_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the maps of Σ over channels of squares, each scaled to length 1.

    Zagoruyko & Komodakis, 2017 (arXiv:1612.03928), equation 2, with the square of the difference: 0 to 2 divided by
    nothing; widths may differ.
    """
    student_map = student.square().sum(1).flatten(1)
    teacher_map = at_size_of(student, teacher.float()).square().sum(1).flatten(1)
    return (F.normalize(student_map, dim=1) - F.normalize(teacher_map, dim=1)).square().sum(1).mean()


class Projections(nn.Module):
    """A 1×1 convolution for each tap whose width differs between student and teacher: student → teacher's channels.

    They start orthogonal, are learnt beside the student and dropped after training.
    """

    def __init__(self, student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], taps: Iterable[str]):
        super().__init__()
        self.taps = tuple(taps)
        pairs = {tap: (student[tap].shape[1], teacher[tap].shape[1]) for tap in self.taps}
        self.names = {tap: f"tap_{index}" for index, (tap, (own, its)) in enumerate(pairs.items()) if own != its}
        for tap, name in self.names.items():
            own, its = pairs[tap]
            conv = nn.Conv2d(own, its, 1, bias=False)
            nn.init.orthogonal_(conv.weight)
            self.add_module(name, conv)

    def forward(self, tap: str, value: Tensor) -> Tensor:
        return getattr(self, self.names[tap])(value) if tap in self.names else value


def mask_terms(logits: Tensor, matte: Tensor, teacher_logits: Tensor, weights: TransferWeights) -> dict[str, Tensor]:
    """The final mask against matte and teacher; terms are named after both: "truth_bce", "teacher_mae"."""
    found = {}
    for name, told, mask in (
        ("truth", weights.truth, lambda: matte),
        ("teacher", weights.teacher, lambda: at_size_of(logits, torch.sigmoid(teacher_logits.float()))),
    ):
        if told.any:
            goal = mask()
            edges = boundary_weight(goal, weights.boundary) if weights.boundary else None
            terms = mask_loss(logits, goal, told, pixel_weight=edges)
            found |= {f"{name}_{term}": value for term, value in terms.items() if getattr(told, term)}
    return found


def side_term(shown: Mapping[str, Tensor], heads: Mapping[str, nn.Module], matte: Tensor, told: MaskWeights) -> Tensor:
    """Mean over ``heads`` (tap → the teacher's head there) of the mask terms of what they read, at their own sizes."""
    total = []
    for tap, head in heads.items():
        logits = head(shown[tap])
        goal = F.adaptive_avg_pool2d(matte, logits.shape[-2:])
        total.append(sum(mask_loss(logits, goal, told).values()))
    return torch.stack(total).mean()
