"""Whether calibration pictures are like those to come: by what they show, and by what they make of every tensor.

A range that was never seen is clipped. So the same statistics are taken of the calibration pictures and of a larger
set: which kind of picture is missing, which tensors clip on the larger set and by how much, and how much range each
picture still added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lumen_lab.datasets.attributes import ATTRIBUTES
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD
from lumen_lab.quantization.calibration import input_name, length_of, observed, observers_of
from lumen_lab.quantization.encoding import Encoding
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.observers import Observer
from lumen_lab.specs import Record, html_table

LUMA = (0.299, 0.587, 0.114)
PARTS = 5  # of the larger set's distribution, each of as many pictures
MISSING = 0.2  # of the share that a kind of picture should have, below which it is called missing
STILL_ADDING = 0.02  # of the range, by the last quarter of the pictures
BARE = 0.05  # share of the larger set from which on a kind of picture is looked for

MEASURES = {
    "brightness": "mean of luma (0.299 R + 0.587 G + 0.114 B), 0 to 1",
    "contrast": "standard deviation of luma",
    "saturation": "mean of (largest − smallest channel), 0 to 1",
    "warmth": "mean of red − blue, −1 to 1",
    "detail": "mean absolute difference of luma between neighbouring pixels",
    "subject size": "share of the frame that the matte covers",
}
WORDS = {
    "brightness": ("dark", "bright"),
    "contrast": ("flat", "contrasty"),
    "saturation": ("grey", "colourful"),
    "warmth": ("bluish", "reddish"),
    "detail": ("smooth", "detailed"),
    "subject size": ("small-subject", "large-subject"),
}


@dataclass(frozen=True)
class PictureKind(Record):
    """One part of a distribution: pictures whose ``measure`` lies from ``low`` to ``high``, or that have an attribute
    (no ends), as shares of the calibration pictures and of the larger set."""

    measure: str
    kind: str
    low: float | None
    high: float | None
    calibration: float
    larger: float

    @property
    def missing(self) -> bool:
        """Whether calibration has next to none of what the larger set has."""
        return self.larger >= BARE and self.calibration < MISSING * self.larger

    @property
    def words(self) -> str:
        """The kind in words."""
        return f"pictures with the attribute '{self.kind}'" if self.low is None else f"{self.kind} pictures"

    def rows(self) -> list[dict[str, object]]:
        ends = "" if self.low is None else f"{self.low:.3g} to {self.high:.3g}"
        shares = {"calibration": self.calibration, "larger set": self.larger}
        return [{"measure": self.measure, "kind": self.kind, "range": ends, **shares, "missing": self.missing}]


@dataclass(frozen=True)
class TensorCoverage(Record):
    """One tensor's encoding (``low`` to ``high``) against the larger set, as its reader sees it: ``lowest`` to
    ``highest`` there.

    ``outside``: share of the larger set's values beyond the encoding, ``outside_before``: of the calibration pictures',
    which the method left out. ``beyond``: how far the larger set goes past both the encoding and those pictures, as a
    share of the encoding's range. ``reached``: how much of the larger set's range they reached.
    """

    name: str
    site: str
    low: float
    high: float
    lowest: float
    highest: float
    outside: float
    outside_before: float
    beyond: float
    reached: float


@dataclass(frozen=True)
class CoverageReport(Record):
    """Calibration pictures against a larger set: kinds of picture, tensors, and what each picture still added.

    ``curve``: after each calibration picture, the mean over tensors of the range reached so far, as a share of that of
    all calibration pictures. ``measures``: by name, the values of the calibration pictures and of the larger set.
    """

    pictures: int
    larger: int
    kinds: tuple[PictureKind, ...]
    tensors: tuple[TensorCoverage, ...]
    curve: tuple[float, ...]
    measures: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]

    def rows(self) -> list[dict[str, object]]:
        """One dict a kind of picture."""
        return [row for kind in self.kinds for row in kind.rows()]

    def clipped(self, *, least_beyond: float = 0.02) -> tuple[TensorCoverage, ...]:
        """The tensors that the larger set takes farther out of their encoding than so many ranges, worst first."""
        far = [tensor for tensor in self.tensors if tensor.beyond > least_beyond]
        return tuple(sorted(far, key=lambda tensor: -tensor.beyond))

    def added(self) -> tuple[float, ...]:
        """What each picture added to the mean range, as a share of the whole."""
        return tuple(float(step) for step in np.diff(self.curve, prepend=0.0))

    def sentences(self) -> list[str]:
        """What to do: which pictures are missing, whether more would help, which tensors clip."""
        said = [f"Missing: {kind.words}, {kind.larger:.0%} of the larger set." for kind in self.kinds if kind.missing]
        last = self.added()[-max(1, self.pictures // 4) :]
        more = "more would still add" if sum(last) > STILL_ADDING else "more of the same would add little"
        said.append(f"The last {len(last)} of {self.pictures} pictures added {sum(last):.1%} of the range; {more}.")
        reached = float(np.mean([tensor.reached for tensor in self.tensors]))
        said.append(
            f"They reached {reached:.0%} of the larger set's range, in the mean over {len(self.tensors)} tensors."
        )
        clipped = self.clipped()
        worst = f", farthest {clipped[0].name} at '{clipped[0].site}' ({clipped[0].beyond:.0%})" if clipped else ""
        said.append(f"{len(clipped)} tensors go past their encoding by more than 2 % of its range{worst}.")
        return said

    def _repr_html_(self) -> str:
        words = "".join(f"<li>{sentence}</li>" for sentence in self.sentences())
        clipped = [row for tensor in self.clipped() for row in tensor.rows()]
        caption = f"{self.pictures} calibration pictures against {self.larger}"
        tables = html_table(self.rows(), caption=caption), html_table(clipped, caption="Tensors that clip", limit=20)
        return f"<ul>{words}</ul>{''.join(tables)}"

    @classmethod
    def from_json(cls, values: Mapping[str, object]):
        measures = {name: tuple(map(tuple, pair)) for name, pair in dict(values.get("measures") or {}).items()}
        return super().from_json({**values, "measures": measures})


def coverage_report(
    graph: NPUGraph, calibration: Iterable, larger: Iterable, *, progress: bool = True
) -> CoverageReport:
    """How the calibration pictures of a calibrated ``graph`` cover a ``larger`` set, from one pass over each.

    Both are what ``calibrate`` takes; where they are dicts with a "matte" (and "attributes"), as ``ComposedScenes``
    gives them, subjects are compared as well. The graph stays as it is.
    """
    ours, theirs = (looked_at(graph, pictures, progress=progress) for pictures in (calibration, larger))
    measures = {
        name: (tuple(ours.measures[name]), tuple(theirs.measures[name]))
        for name in MEASURES
        if ours.measures[name] and theirs.measures[name]
    }
    kinds = [kind for name, values in measures.items() for kind in parts_of(name, *values)]
    return CoverageReport(
        pictures=len(ours.ends),
        larger=len(theirs.ends),
        kinds=(*kinds, *attribute_kinds(ours.attributes, theirs.attributes)),
        tensors=tuple(tensor_rows(graph, ours.observers, theirs.observers)),
        curve=growth(ours.ends),
        measures=measures,
    )


@dataclass
class Look:
    """What one pass over pictures found: their measures, their attributes, and of every tensor that depends on them a
    histogram (``observers``) and, picture by picture, (low, high) (``ends``)."""

    observers: dict[str, Observer]
    ends: list[list[tuple[float, float]]]
    measures: dict[str, list[float]]
    attributes: list[Sequence[bool]]


def looked_at(graph: NPUGraph, pictures: Iterable, *, progress: bool) -> Look:
    """One pass over ``pictures``, in float."""
    observers = observers_of(graph, "mse", by_reader=True)
    live = {name: one for name, one in observers.items() if one.shape and name != input_name(graph)}
    look = Look(live, [], {name: [] for name in MEASURES}, [])
    noted = with_subjects(pictures, look)
    for picture, ends in observed(graph, live, noted, total=length_of(pictures), progress=progress):
        look.ends.append(ends)
        for name, value in picture_measures(picture[0]).items():
            look.measures[name].append(value)
    return look


def with_subjects(pictures: Iterable, look: Look) -> Iterator:
    """The batches as they are; the mattes and attributes that come with them are noted in ``look``."""
    for batch in pictures:
        if isinstance(batch, Mapping) and "matte" in batch:
            mattes = batch["matte"].reshape(-1, *batch["matte"].shape[-2:])
            look.measures["subject size"].extend(mattes.float().mean((1, 2)).tolist())
        if isinstance(batch, Mapping) and "attributes" in batch:
            look.attributes.extend(batch["attributes"].reshape(-1, len(ATTRIBUTES)).tolist())
        yield batch


def picture_measures(picture: Tensor) -> dict[str, float]:
    """``MEASURES`` of a normalised picture (3, H, W), but for the subject's."""
    mean, std = (picture.new_tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    rgb = (picture * std + mean).clamp(0, 1)
    luma = (rgb * rgb.new_tensor(LUMA)[:, None, None]).sum(0)
    across, down = luma.diff(dim=1).abs().mean(), luma.diff(dim=0).abs().mean()
    return {
        "brightness": float(luma.mean()),
        "contrast": float(luma.std(correction=0)),
        "saturation": float((rgb.amax(0) - rgb.amin(0)).mean()),
        "warmth": float((rgb[0] - rgb[2]).mean()),
        "detail": float((across + down) / 2),
    }


def parts_of(measure: str, ours: Sequence[float], theirs: Sequence[float]) -> list[PictureKind]:
    """The larger set's distribution in ``PARTS`` of as many pictures each, the outer ones open to their side."""
    inner = np.quantile(theirs, np.linspace(0, 1, PARTS + 1)[1:-1])
    counts = [np.bincount(np.searchsorted(inner, values, side="right"), minlength=PARTS) for values in (ours, theirs)]
    shares = [count / count.sum() for count in counts]
    edges = [min(*ours, *theirs), *inner, max(*ours, *theirs)]
    low, high = WORDS[measure]
    kinds = [f"very {low}", low, f"medium-{measure}", high, f"very {high}"]
    return [
        PictureKind(measure, kinds[part], float(edges[part]), float(edges[part + 1]), *(float(s[part]) for s in shares))
        for part in range(PARTS)
    ]


def attribute_kinds(ours: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]]) -> list[PictureKind]:
    """The share of pictures with each attribute; none where a set has no mattes."""
    if not ours or not theirs:
        return []
    shares = [np.mean(np.array(flags, float), axis=0) for flags in (ours, theirs)]
    return [
        PictureKind("attribute", name, None, None, float(shares[0][place]), float(shares[1][place]))
        for place, name in enumerate(ATTRIBUTES)
    ]


def tensor_rows(
    graph: NPUGraph, ours: Mapping[str, Observer], theirs: Mapping[str, Observer]
) -> Iterator[TensorCoverage]:
    """Every tensor's encoding against what the larger set holds."""
    sites, quantisers = graph.sites(), graph.quantisers
    for name, observer in theirs.items():
        encoding = quantisers[name].encoding
        low, high = encoding.range
        seen, known = observer.seen, ours[name].seen
        least = observer.reader.least_told(seen.low, seen.high)
        past = max(min(low, known.low) - max(seen.low, least), seen.high - max(high, known.high), 0.0)
        spread = seen.high - seen.low
        reached = (min(known.high, seen.high) - max(known.low, seen.low)) / spread if spread > 0 else 1.0
        yield TensorCoverage(
            name,
            sites[name],
            *(low, high, seen.low, seen.high),
            outside=share_outside(observer, encoding),
            outside_before=share_outside(ours[name], encoding),
            beyond=past / (high - low),
            reached=max(reached, 0.0),
        )


def share_outside(observer: Observer, encoding: Encoding) -> float:
    """The share of an observer's values that an encoding clips, by the middles of its bins: half a step beyond its
    ends, since up to there they round to them; not those that its reader cannot tell from the low end."""
    low, high = (end + by * encoding.scale / 2 for end, by in zip(encoding.range, (-1, 1), strict=True))
    centres, counts = observer.seen.centres(), observer.seen.counts
    told = observer.reader.least_told(observer.seen.low, observer.seen.high) < low
    return float(counts[((centres < low) & told) | (centres > high)].sum() / counts.sum())


def growth(ends: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, ...]:
    """After each picture, the mean over tensors of the range so far as a share of the whole; constant tensors are left
    out."""
    lows, highs = np.moveaxis(np.array(ends, float), -1, 0)
    reached = np.maximum.accumulate(highs, axis=0) - np.minimum.accumulate(lows, axis=0)
    moving = reached[-1] > 0
    return tuple(float(share) for share in (reached[:, moving] / reached[-1, moving]).mean(axis=1))
