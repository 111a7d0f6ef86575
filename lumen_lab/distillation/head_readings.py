"""What the heads of a decoder show of one picture: records of arrays, which figures, widgets and tests read.

Stages are numbered as the published state dict numbers its blocks: 4 is the deepest, 1 the last, which has no gate.
Nothing here needs torch; ``lumen_lab.distillation.heads`` makes the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lumen_lab.errors import LumenError

LEVELS = (4, 3, 2, 1)
CODES = 256
VIEWS = {
    "features": "norm of the features before the gate",
    "components": "their three strongest principal components, in the teacher's axes",
    "gate": "the gate",
    "gated": "norm of the features after the gate",
    "side mask": "mask that the teacher's side head reads off the features (at inference nothing computes it)",
    "gradient": "edges that the teacher's gradient head reads (at inference nothing computes them)",
    "adds": "final mask minus the mask without this stage",
    "error": "squared distance of what is passed on to the teacher's, 1: no nearer than its mean",
}
"""What there is to see of a stage, in the order in which it is shown."""
KINDS = {"components": "colour", "gate": "unit", "side mask": "unit", "gradient": "unit", "adds": "signed"}
"""How a view is painted; those not named are "norm": 0 to the largest."""
DEVIATIONS = 2.0  # of a principal component that full colour stands for

Maps = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class StageReading:
    """One decoder stage of one network on one picture of (H, W).

    ``features`` (C, h, w): what the block returns. ``gate`` (h, w), 0 to 1; ``gated`` (C, h, w): the features as they
    are passed on. ``side`` and ``gradient`` (h, w): the probabilities that the teacher's heads read off this network's
    features; dead by design at inference, where nothing computes them. ``without`` (H, W): the final mask with what
    this stage passes on set to zero. ``error`` (h, w): of a student, squared distance to the teacher (``VIEWS``);
    its mean is ``transfer.feature_distance``. None: the stage has no such thing, or the widths differ.

    ``codes``: of an NPU graph, tensor ("features", "gate", "gated") → how often each of its 256 codes is used, empty
    for a network in float; 16 bits are counted by their upper eight.
    """

    level: int
    features: np.ndarray
    without: np.ndarray
    gate: np.ndarray | None = None
    gated: np.ndarray | None = None
    side: np.ndarray | None = None
    gradient: np.ndarray | None = None
    error: np.ndarray | None = None
    codes: Maps = field(default_factory=dict)

    @property
    def passed_on(self) -> np.ndarray:
        """What the next stage gets of this one, (C, h, w)."""
        return self.features if self.gated is None else self.gated


@dataclass(frozen=True, eq=False)
class NetworkReading:
    """All stages of one network, deepest first, and its mask (H, W) in [0, 1]."""

    name: str
    mask: np.ndarray
    stages: tuple[StageReading, ...]

    def stage(self, level: int) -> StageReading:
        """That stage; ``LumenError`` for a number that is none."""
        check_level(level)
        return next(stage for stage in self.stages if stage.level == level)


@dataclass(frozen=True, eq=False)
class HeadReadings:
    """Teacher and, where there is one, student on one picture: ``image`` is uint8 (H, W, 3), as the network saw it."""

    image: np.ndarray
    teacher: NetworkReading
    student: NetworkReading | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the picture and of the masks."""
        return self.image.shape[0], self.image.shape[1]

    @property
    def networks(self) -> dict[str, NetworkReading]:
        """By name, the teacher first."""
        return {one.name: one for one in (self.teacher, self.student) if one is not None}

    @cached_property
    def maps(self) -> dict[tuple[int, str], dict[str, np.ndarray]]:
        """(stage, view) → network → its map: float32 (h, w), or uint8 (h, w, 3) of "components".

        Only what there is: stage 1 has no gate and no side heads, a teacher no error.
        """
        found: dict[tuple[int, str], dict[str, np.ndarray]] = {}
        for level in LEVELS:
            axes = PrincipalAxes.of(self.teacher.stage(level).features)
            for name, network in self.networks.items():
                for view, shown in stage_maps(network, level, axes).items():
                    found.setdefault((level, view), {})[name] = shown
        return {(level, view): found[level, view] for level in LEVELS for view in VIEWS if (level, view) in found}

    @cached_property
    def limits(self) -> dict[tuple[int, str], tuple[float, float]]:
        """(stage, view) → the values of least and full colour, the same for both networks.

        Features before and after the gate share theirs; what is added shares it over all stages.
        """
        most = max(float(np.abs(shown).max()) for shown in self._all("adds")) or 1.0
        return {key: limits_of(key, self.maps, most) for key in self.maps}

    def _all(self, view: str) -> list[np.ndarray]:
        return [shown for key, maps in self.maps.items() if key[1] == view for shown in maps.values()]

    def adds(self, level: int) -> dict[str, float]:
        """Network → mean |final mask − mask without that stage|, 0 to 1."""
        return {name: float(np.abs(one.mask - one.stage(level).without).mean()) for name, one in self.networks.items()}

    def rows(self) -> list[dict[str, object]]:
        """A row for each stage and network: the means of what the maps show."""
        return [
            {
                "stage": level,
                "network": name,
                "gate, mean": mean_of(network.stage(level).gate),
                "adds to the mask": self.adds(level)[name],
                "distance to the teacher": mean_of(network.stage(level).error),
                "codes used": codes_used(network.stage(level).codes.get("features")),
                "codes of the gate": codes_used(network.stage(level).codes.get("gate")),
            }
            for level in LEVELS
            for name, network in self.networks.items()
        ]

    def values_at(self, pixel: tuple[int, int]) -> list[dict[str, object]]:
        """What every head says of a pixel (row, column) of the picture: a row for each stage and view, and the mask."""
        masks = {name: network.mask for name, network in self.networks.items()}
        return value_rows(self.maps, masks, pixel, self.size)


def check_level(level: int) -> None:
    """``LumenError`` unless it is the number of a stage."""
    if level not in LEVELS:
        raise LumenError(f"Decoder stage {level!r} was asked for; they are {', '.join(map(str, LEVELS))}, 4 deepest.")


def channel_norm(features: np.ndarray) -> np.ndarray:
    """(C, h, w) → √ Σ over channels of squares, float32 (h, w)."""
    return np.sqrt(np.square(features, dtype=np.float32).sum(0))


def stage_maps(network: NetworkReading, level: int, axes: PrincipalAxes) -> dict[str, np.ndarray]:
    """View → map of one stage of one network; "components" only where the widths are the teacher's."""
    stage = network.stage(level)
    found = {
        "features": channel_norm(stage.features),
        "components": axes.colours(stage.features) if len(stage.features) == len(axes.mean) else None,
        "gate": stage.gate,
        "gated": None if stage.gated is None else channel_norm(stage.gated),
        "side mask": stage.side,
        "gradient": stage.gradient,
        "adds": network.mask - stage.without,
        "error": stage.error,
    }
    return {view: shown for view, shown in found.items() if shown is not None}


def limits_of(key: tuple[int, str], maps: Mapping[tuple[int, str], Maps], most_added: float) -> tuple[float, float]:
    """The values of least and full colour of one view of one stage."""
    level, view = key
    kind = KINDS.get(view, "norm")
    if kind == "signed":
        return -most_added, most_added
    if kind in ("unit", "colour"):
        return 0.0, 1.0
    shared = ("features", "gated") if view == "gated" else (view,)
    return 0.0, max(float(shown.max()) for name in shared for shown in maps[level, name].values()) or 1.0


@dataclass(frozen=True, eq=False)
class PrincipalAxes:
    """The strongest directions in which the features of a map vary over its places: their mean (C,), unit ``axes``
    (3, C) and the standard deviation along each (3,). Fewer than three have zeros for the rest."""

    mean: np.ndarray
    axes: np.ndarray
    deviations: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> PrincipalAxes:
        """Of features (C, h, w): eigenvectors of their covariance, each with its largest entry above zero."""
        flat = features.reshape(len(features), -1).astype(np.float64)
        mean = flat.mean(1)
        centred = flat - mean[:, None]
        values, vectors = np.linalg.eigh(centred @ centred.T / flat.shape[1])
        axes, deviations = np.zeros((3, len(mean))), np.zeros(3)
        count = min(3, len(mean))
        axes[:count] = vectors[:, ::-1].T[:count]
        deviations[:count] = np.sqrt(np.clip(values[::-1][:count], 0, None))
        axes *= np.sign(axes[np.arange(3), np.abs(axes).argmax(1)])[:, None]
        return cls(mean, axes, deviations)

    def colours(self, features: np.ndarray) -> np.ndarray:
        """Features (C, h, w) as uint8 (h, w, 3): grey at the mean, full colour two deviations away."""
        along = np.tensordot(self.axes, features - self.mean[:, None, None], 1)
        least = 1e-6 * max(float(self.deviations.max()), 1e-12)
        share = along / (DEVIATIONS * np.maximum(self.deviations, least))[:, None, None]
        share[self.deviations <= least] = 0
        return np.rint(255 * np.clip(0.5 + share / 2, 0, 1)).astype(np.uint8).transpose(1, 2, 0)


def mean_of(values: np.ndarray | None) -> float | None:
    return None if values is None else float(values.mean())


def codes_used(counts: np.ndarray | None) -> int | None:
    """How many of the codes occur."""
    return None if counts is None else int((counts > 0).sum())


def cell_of(pixel: tuple[int, int], size: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, int]:
    """The cell of a map (h, w) that covers a pixel (row, column) of a picture (H, W)."""
    return pixel[0] * shape[0] // size[0], pixel[1] * shape[1] // size[1]


def check_pixel(pixel: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """The pixel as two ints; ``LumenError`` if it lies outside of the picture."""
    row, column = (int(place) for place in pixel)
    if not (0 <= row < size[0] and 0 <= column < size[1]):
        raise LumenError(f"Pixel (row {row}, column {column}) was asked for; the picture is {size[0]} × {size[1]}.")
    return row, column


def value_rows(
    maps: Mapping[tuple[int, str], Maps], masks: Maps, pixel: tuple[int, int], size: tuple[int, int]
) -> list[dict[str, object]]:
    """Rows with stage, head, and the value of each network at the cell that covers the pixel; colours have none."""
    pixel = check_pixel(pixel, size)
    rows = []
    for (level, view), shown in [*maps.items(), ((0, "mask"), masks)]:
        if KINDS.get(view) != "colour":
            found = {name: float(each[cell_of(pixel, size, each.shape)]) for name, each in shown.items()}
            rows.append({"stage": level or "final", "head": view} | {name: found.get(name) for name in masks})
    return rows
