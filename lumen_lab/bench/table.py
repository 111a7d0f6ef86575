"""Scores of one predictor on the bench lists, and how two such tables differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lumen_lab.bench.lists import BenchList, scenes_of
from lumen_lab.datasets.sources import SourceBank
from lumen_lab.evaluation import TOOLS, evaluate
from lumen_lab.metrics import METRICS, READINGS, Scores
from lumen_lab.prediction import Predictor
from lumen_lab.specs import Record, html_table, tool_versions

SHARE_TOLERANCE = 2e-3
"""Largest difference of a mean of shares in [0, 1] that another processor's rounding explains."""
RELATIVE_TOLERANCE = 2e-2
"""The same for metrics in pixels or points, relative to the recorded value."""


@dataclass(frozen=True)
class BenchTable(Record):
    """List → reading → one line for "all" and for each attribute, with every metric; what was scored, with what.

    ``gates``: lines of ``lumen_lab.distillation.gates`` on scenes of the first list, where the predictor has gates.
    """

    predictor: str
    versions: dict[str, str]
    lists: dict[str, dict[str, tuple[dict[str, object], ...]]]
    gates: tuple[dict[str, object], ...] = ()

    def value(self, name: str, metric: str, *, reading: str = "raw", attribute: str = "all") -> float | None:
        """One mean of the table."""
        return next(row for row in self.lists[name][reading] if row["attribute"] == attribute)[metric]

    def rows(self) -> list[dict[str, object]]:
        """One line a list and reading: every metric over all images."""
        return [
            {"list": name, "reading": reading} | {key: tables[reading][0][key] for key in ("images", *METRICS)}
            for name, tables in self.lists.items()
            for reading in READINGS
        ]

    @classmethod
    def from_scores(
        cls, predictor: str, scores: Mapping[str, Scores], *, gates: Iterable[dict[str, object]] = ()
    ) -> BenchTable:
        """The table of several lists' scores."""
        lists = {
            name: {reading: tuple(found.attribute_rows(reading=reading)) for reading in READINGS}
            for name, found in scores.items()
        }
        return cls(predictor, tool_versions(*TOOLS), lists, tuple(gates))

    def _repr_html_(self) -> str:
        tables = [html_table(self.rows(), caption=self.predictor), html_table(self.gates, caption="Gates")]
        tables += [
            html_table(lists[reading], caption=f"{name}, {reading}")
            for name, lists in self.lists.items()
            for reading in READINGS
        ]
        return "".join(tables)


def run_bench(
    predictor: Predictor,
    lists: Iterable[BenchList],
    *,
    bank: SourceBank | None = None,
    out_dir: str | Path | None = None,
    workers: int | None = None,
) -> dict[str, Scores]:
    """Scores of ``predictor`` on each list, by name; kept in ``out_dir``, where an interrupted bench goes on."""
    scenes = {entry.name: scenes_of(entry, bank) for entry in lists}  # before any work: a refusal comes at once
    keep = {name: None if out_dir is None else Path(out_dir) / f"{name}.json" for name in scenes}
    return {name: evaluate(predictor, data, out=keep[name], workers=workers) for name, data in scenes.items()}


def differences(recorded: BenchTable, found: BenchTable) -> list[dict[str, object]]:
    """One line for each mean of ``found`` that is not the recorded one within the tolerances; empty if they match."""
    rows = []
    for name, tables in found.lists.items():
        for reading in READINGS:
            rows += _differences(name, reading, recorded.lists.get(name, {}).get(reading, ()), tables[reading])
    return rows


def _differences(name: str, reading: str, recorded, found) -> list[dict[str, object]]:
    expected = {row["attribute"]: row for row in recorded}
    return [
        {"list": name, "reading": reading, "attribute": row["attribute"], "metric": key, "recorded": then, "found": now}
        for row in found
        for key in ("images", *METRICS)
        for then, now in [(expected.get(row["attribute"], {}).get(key), row[key])]
        if not _matches(key, then, now)
    ]


def _matches(key: str, recorded: float | None, found: float | None) -> bool:
    if recorded is None or found is None:
        return recorded is found
    if key == "images":
        return recorded == found
    if METRICS[key].unit:
        return math.isclose(recorded, found, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)
    return math.isclose(recorded, found, rel_tol=0, abs_tol=SHARE_TOLERANCE)
