"""Scores of a data set: means that leave out what is undefined and say so, for all images and for each attribute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lumen_lab.errors import ArtifactError, MetricError
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
        try:
            values["reliability"] = Reliability.from_json(values["reliability"])
        except MetricError as error:
            raise ArtifactError(f"The saved Scores are damaged: {error} Score again.") from None
        scores = super().from_json(values)
        damage = _damage(scores)
        if damage:
            raise ArtifactError(f"The saved Scores are damaged ({damage}); score again.")
        return scores

    def _repr_html_(self) -> str:
        tables = [html_table(self.summary(), caption=f"{len(self.images)} images")]
        tables += [html_table(self.attribute_rows(reading=r), caption=f"By attribute, {r}") for r in READINGS]
        return "".join(tables)


def summarise(images: Sequence[Scored]) -> Scores:
    """Scores of a data set from (name, attribute → whether it holds, scores) of each image.

    ``MetricError`` without an image, with a name given twice, with images that know different attributes, or with an
    attribute that is neither True nor False.
    """
    images = list(images)
    for image in images:
        _check_image(image)
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


def _check_image(image: Scored) -> None:
    if not (isinstance(image, tuple | list) and len(image) == 3 and isinstance(image[2], MaskScores)):
        raise MetricError(f"An image is given as (name, attributes, what score_mask gave); found {str(image)[:60]!r}.")
    name, held, _ = image
    if not isinstance(name, str) or not isinstance(held, Mapping):
        raise MetricError(
            f"An image has a name and a dict of attributes, each True or False; found {name!r} with {held!r}."
        )
    for attribute, holds in held.items():
        if not isinstance(attribute, str) or not isinstance(holds, bool | np.bool_):
            raise MetricError(f"{name} has the attribute {attribute!r} as {holds!r}; say True or False of each name.")


def _damage(scores: Scores) -> str:
    """What is not as ``summarise`` leaves it, or ""."""
    if not scores.images or not all(isinstance(attribute, str) for attribute in scores.attributes):
        return "no image, or attributes that are no names"
    for image in scores.images:
        named = isinstance(image.name, str) and tuple(image.attributes) == tuple(scores.attributes)
        if not named or not all(isinstance(holds, bool) for holds in image.attributes.values()):
            return f"name or attributes of {image.name!r}"
        if not all(_is_number(value, or_none=True) for reading in READINGS for value in image.values[reading].values()):
            return f"values of {image.name}"
        if not _is_number(image.grey_share):
            return f"grey share of {image.name}"
    lines = {(reading, line) for reading in READINGS for line in (ALL, *scores.attributes)}
    if not all(_is_best(scores.best[reading][line]) for reading, line in lines):
        return "best of the mean curves"
    columns = (scores.reliability.pixels, scores.reliability.confidence, scores.reliability.foreground)
    return "" if all(_is_number(value) for column in columns for value in column) else "reliability"


def _is_best(best: Mapping[str, object]) -> bool:
    return set(best) == set(_OF_THE_MEAN_CURVE) and all(_is_number(value, or_none=True) for value in best.values())


def _is_number(value: object, *, or_none: bool = False) -> bool:
    if value is None:
        return or_none
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
