"""Scores of a data set: means that leave out what is undefined and say so, for all images and for each attribute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lumen_lab.errors import MetricError
from lumen_lab.metrics.confidence import Reliability, pooled
from lumen_lab.metrics.definitions import METRICS, READINGS
from lumen_lab.metrics.scoring import MaskScores, Values, check_metrics
from lumen_lab.specs import Record, html_table

ALL = "all"
_OF_THE_MEAN_CURVE = {"e_max": "e", "f_max": "f"}

Scored = tuple[str, Mapping[str, bool], MaskScores]


@dataclass(frozen=True)
class ImageScores(Record):
    """One image of a data set: its metrics without the curves. ``e_max`` and ``f_max`` are those of its own curve."""

    name: str
    attributes: dict[str, bool]
    values: Values
    grey_share: float

    def rows(self) -> list[dict[str, object]]:
        """One line a reading."""
        held = ", ".join(attribute for attribute, holds in self.attributes.items() if holds)
        return [{"image": self.name, "attributes": held, "reading": r, **self.values[r]} for r in READINGS]


@dataclass(frozen=True)
class Scores(Record):
    """Scores of a data set.

    ``attributes`` in the order of the tables; ``best``: reading → "all" or attribute → ``e_max`` and ``f_max`` of the
    mean curve, None without an image (the curves themselves are not kept); ``reliability``: the raw reading's, over
    all pixels. Where a reading can be chosen, raw is the default: ``READINGS`` says why.
    """

    images: tuple[ImageScores, ...]
    attributes: tuple[str, ...]
    best: dict[str, dict[str, dict[str, float | None]]]
    reliability: Reliability

    def mean(self, metric: str, *, reading: str = "raw", attribute: str = ALL) -> float | None:
        """A metric over the images on which it is defined, None if there are none.

        For ``e_max`` and ``f_max``, the best of the mean curve, as the field reports them; else the mean.
        """
        values = self._values(metric, reading, attribute)
        if metric in _OF_THE_MEAN_CURVE:
            return self.best[reading][attribute][metric]
        return math.fsum(values) / len(values) if values else None

    def counted(self, metric: str, *, reading: str = "raw", attribute: str = ALL) -> int:
        """On how many images the metric is defined."""
        return len(self._values(metric, reading, attribute))

    def having(self, attribute: str) -> list[ImageScores]:
        """The images with the attribute; "all" gives every one."""
        if attribute not in (ALL, *self.attributes):
            raise MetricError(f"There is no attribute {attribute!r}; there are {', '.join((ALL, *self.attributes))}.")
        return [image for image in self.images if attribute == ALL or image.attributes[attribute]]

    def _values(self, metric: str, reading: str, attribute: str) -> list[float]:
        if metric not in METRICS or reading not in READINGS:
            raise MetricError(
                f"There is no {metric!r} in the reading {reading!r}; metrics are {', '.join(METRICS)}, "
                f"readings {', '.join(READINGS)}."
            )
        values = (image.values[reading][metric] for image in self.having(attribute))
        return [value for value in values if value is not None]

    def summary(self) -> list[dict[str, object]]:
        """One line a metric, over all images: both readings, and on how many images each is defined.

        Then the ``calibration_error`` of the raw reading, over all pixels (a stretched confidence is none), and the
        mean ``grey_share`` of the mattes: with much grey, the cut at 0.5 decides the scores.
        """
        rows = []
        for name, metric in METRICS.items():
            means = {reading: self.mean(name, reading=reading) for reading in READINGS}
            counts = {"images": self.counted(name), "images_stretched": self.counted(name, reading="stretched")}
            rows.append({"metric": name, "better": metric.better, "unit": metric.unit, **means, **counts})
        grey = math.fsum(image.grey_share for image in self.images) / len(self.images)
        return [
            *rows,
            self._raw_row("calibration_error", "lower", self.reliability.calibration_error),
            self._raw_row("grey_share", "neither", grey) | {"stretched": grey, "images_stretched": len(self.images)},
        ]

    def _raw_row(self, name: str, better: str, value: float | None) -> dict[str, object]:
        counts = {"images": len(self.images), "images_stretched": 0}
        return {"metric": name, "better": better, "unit": "", "raw": value, "stretched": None, **counts}

    def attribute_rows(self, *, reading: str = "raw") -> list[dict[str, object]]:
        """One line for all images and one for each attribute: how many images have it, and every metric over them."""
        return [
            {
                "attribute": attribute,
                "images": len(self.having(attribute)),
                **{name: self.mean(name, reading=reading, attribute=attribute) for name in METRICS},
            }
            for attribute in (ALL, *self.attributes)
        ]

    def rows(self) -> list[dict[str, object]]:
        """Two lines an image, one a reading."""
        return [row for image in self.images for row in image.rows()]

    @classmethod
    def from_json(cls, values: Mapping[str, object]):
        values = dict(values)
        values["images"] = [ImageScores.from_json(image) for image in values["images"]]
        for image in values["images"]:
            check_metrics(image.values)
        values["reliability"] = Reliability.from_json(values["reliability"])
        return super().from_json(values)

    def _repr_html_(self) -> str:
        tables = [html_table(self.summary(), caption=f"{len(self.images)} images")]
        tables += [html_table(self.attribute_rows(reading=r), caption=f"By attribute, {r}") for r in READINGS]
        return "".join(tables)


def summarise(images: Sequence[Scored]) -> Scores:
    """Scores of a data set from (name, attribute → whether it holds, scores) of each image.

    ``MetricError`` without an image, with a name given twice, or with images that know different attributes.
    """
    images = list(images)
    attributes = _attributes(images)
    rows = []
    for name, held, scores in images:
        ordered = {attribute: bool(held[attribute]) for attribute in attributes}
        rows.append(ImageScores(name, ordered, scores.values, scores.grey_share))
    best = {
        reading: {
            attribute: _best([scores for _, held, scores in images if attribute == ALL or held[attribute]], reading)
            for attribute in (ALL, *attributes)
        }
        for reading in READINGS
    }
    return Scores(tuple(rows), attributes, best, pooled(scores.bins for _, _, scores in images))


def _best(scores: list[MaskScores], reading: str) -> dict[str, float | None]:
    """The highest point of the mean curve of E and of F."""
    if not scores:
        return dict.fromkeys(_OF_THE_MEAN_CURVE)
    return {
        metric: float(np.mean([score.curves[reading][curve] for score in scores], axis=0).max())
        for metric, curve in _OF_THE_MEAN_CURVE.items()
    }


def _attributes(images: list[Scored]) -> tuple[str, ...]:
    if not images:
        raise MetricError("There is no image to summarise; score at least one.")
    names = [name for name, _, _ in images]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise MetricError(f"These images are given more than once: {', '.join(twice[:5])}; give each one once.")
    attributes = tuple(images[0][1])
    odd = next((name for name, held, _ in images if set(held) != set(attributes)), None)
    if odd is not None:
        raise MetricError(f"{odd} and {names[0]} know different attributes; say of each image whether each one holds.")
    if ALL in attributes:
        raise MetricError(f'"{ALL}" stands for every image; give that attribute another name.')
    return attributes
