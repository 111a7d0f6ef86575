"""Scores of one predictor on the bench lists, and how two such tables differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from torch import nn

from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.distillation.gates import gate_rows
from lumen_lab.errors import ArtifactError
from lumen_lab.evaluation import TOOLS, evaluate
from lumen_lab.metrics import METRICS, READINGS, Scores
from lumen_lab.prediction import Predictor
from lumen_lab.specs import Record, html_table, tool_versions

SHARE_TOLERANCE = 5e-4
"""How far a mean of shares in [0, 1] may move and still match: a processor without AVX-512 moves none by 1e-7, and one
scene of 300 that a rounding turns over may move S-measure by half of this (docs/measurements.md)."""
RELATIVE_TOLERANCE = 5e-3
"""The same for metrics in pixels or points, relative to the recorded value."""
LEAST_IMAGES = 10
"""A mean over fewer images is shown and not compared: one rounding can turn over one image of three."""
GATE_SCENES = 24
TEXTS = ("attribute", "gate", "site")  # of a line; all else are numbers


@dataclass(frozen=True)
class BenchTable(Record):
    """List → reading → one line for "all" and for each attribute, with every metric; what was scored, with what.

    ``gates``: list → lines of ``lumen_lab.distillation.gates`` on its first scenes; empty for a predictor without.
    """

    predictor: str
    versions: dict[str, str]
    lists: dict[str, dict[str, tuple[dict[str, object], ...]]]
    gates: dict[str, tuple[dict[str, object], ...]]

    @classmethod
    def from_json(cls, values: Mapping[str, object]):
        """The table of ``to_json()``'s values; ``ArtifactError`` if it is not of means and gates."""
        table = super().from_json(values)
        wrong = next(_faults(table), None)
        if wrong:
            raise ArtifactError(f"The saved BenchTable is damaged ({wrong}); record it again.")
        return table

    def value(self, name: str, metric: str, *, reading: str = "raw") -> float | None:
        """The mean of one metric over all images of a list."""
        return self.lists[name][reading][0][metric]

    def rows(self) -> list[dict[str, object]]:
        """One line a list and reading: every metric over all images."""
        return [
            {"list": name, "reading": reading} | {key: tables[reading][0].get(key) for key in ("images", *METRICS)}
            for name, tables in self.lists.items()
            for reading in READINGS
        ]

    def gate_rows(self) -> list[dict[str, object]]:
        """One line a list and gate."""
        return [{"list": name, **row} for name, rows in self.gates.items() for row in rows]

    def _repr_html_(self) -> str:
        tables = [html_table(self.rows(), caption=self.predictor), html_table(self.gate_rows(), caption="Gates")]
        tables += [
            html_table(lists[reading], caption=f"{name}, {reading}")
            for name, lists in self.lists.items()
            for reading in READINGS
        ]
        return "".join(tables)


def run_bench(
    predictor: Predictor,
    scenes: Mapping[str, ComposedScenes],
    *,
    out_dir: str | Path | None = None,
    workers: int | None = None,
) -> dict[str, Scores]:
    """Scores of ``predictor`` on each list's scenes, by name; kept in ``out_dir``, where a killed bench goes on."""
    keep = {name: None if out_dir is None else Path(out_dir) / f"{name}.json" for name in scenes}
    return {name: evaluate(predictor, data, out=keep[name], workers=workers) for name, data in scenes.items()}


def bench_table(
    described: str, predictor: Predictor, scores: Mapping[str, Scores], scenes: Mapping[str, ComposedScenes]
) -> BenchTable:
    """The table of several lists' scores, with the gates of a network that has them."""
    lists = {
        name: {reading: tuple(found.attribute_rows(reading=reading)) for reading in READINGS}
        for name, found in scores.items()
    }
    gates = {name: _gates(predictor, scenes[name]) for name in scores} if _has_gates(predictor) else {}
    return BenchTable(described, tool_versions(*TOOLS), lists, gates)


def _has_gates(predictor: Predictor) -> bool:
    return isinstance(predictor, nn.Module) and hasattr(getattr(predictor, "decoder", None), "gdt_convs_attn_4")


def _gates(network: nn.Module, scenes: ComposedScenes) -> tuple[dict[str, object], ...]:
    return tuple(gate_rows(network, [scenes[index]["image"] for index in range(min(GATE_SCENES, len(scenes)))]))


def differences(recorded: BenchTable, found: BenchTable) -> list[dict[str, object]]:
    """One line for each mean of ``found`` that is not the recorded one within the tolerances; empty if they match.

    A line or gate that only one of the two has counts, its other value is None. A list that was recorded and not scored
    now is not compared; ``not_compared`` names it.
    """
    rows = []
    for name, tables in found.lists.items():
        for reading in READINGS:
            rows += _differences(name, reading, recorded.lists.get(name, {}).get(reading, ()), tables[reading])
        if name in recorded.lists:
            rows += _differences_of_gates(name, recorded.gates.get(name, ()), found.gates.get(name, ()))
    return rows


def not_compared(recorded: BenchTable, found: BenchTable) -> list[str]:
    """What a match of two tables does not say: lists that were not scored, other weights, other versions."""
    notes = [f"the list {name} was not scored" for name in recorded.lists if name not in found.lists]
    if recorded.predictor != found.predictor:
        notes.append(f"the recorded table is of {recorded.predictor}, this one of {found.predictor}")
    tools = sorted(recorded.versions.keys() | found.versions.keys())
    pairs = [(tool, recorded.versions.get(tool), found.versions.get(tool)) for tool in tools]
    return notes + [f"{tool} was {then}, is {now}" for tool, then, now in pairs if then != now]


def _differences(name: str, reading: str, recorded, found) -> list[dict[str, object]]:
    before, after = ({row["attribute"]: row for row in rows} for rows in (recorded, found))
    return [
        {"list": name, "reading": reading, "attribute": attribute, "metric": key, "recorded": then, "found": now}
        for attribute in before | after
        for key in ("images", *METRICS)
        for then, now in [(before.get(attribute, {}).get(key), after.get(attribute, {}).get(key))]
        if not _matches(key, then, now, images=after.get(attribute, {}).get("images", 0))
    ]


def _differences_of_gates(name: str, recorded, found) -> list[dict[str, object]]:
    before, after = ({row["gate"]: row["mean"] for row in rows} for rows in (recorded, found))
    where = {"list": name, "reading": "", "attribute": "all"}
    return [
        {**where, "metric": f"gate {gate}", "recorded": before.get(gate), "found": after.get(gate)}
        for gate in before | after
        if not (gate in before and gate in after and abs(before[gate] - after[gate]) <= SHARE_TOLERANCE)
    ]


def _faults(table: BenchTable) -> Iterator[str]:
    """What is no table of means and gates, in words."""
    for field in ("versions", "lists", "gates"):
        if not isinstance(getattr(table, field), dict):
            yield f"{field} is a {type(getattr(table, field)).__name__}, not a map of names"
    for name, tables in table.lists.items():
        for reading in READINGS:
            rows = tables.get(reading) if isinstance(tables, dict) else None
            if not _are_rows(rows, "attribute", required=("images",)) or not rows:
                yield f"{name} has no means of the {reading} reading"
    for name, rows in table.gates.items():
        if not _are_rows(rows, "gate", required=("mean",)):
            yield f"{name} has no means of its gates"


def _are_rows(rows: object, label: str, *, required: tuple[str, ...]) -> bool:
    """Whether these are lines with a label, these numbers, and numbers or None for the rest."""
    return isinstance(rows, list | tuple) and all(
        isinstance(row, dict)
        and isinstance(row.get(label), str)
        and all(isinstance(row.get(name), Real) for name in required)
        and all(value is None or isinstance(value, Real) for name, value in row.items() if name not in TEXTS)
        for row in rows
    )


def _matches(key: str, recorded: float | None, found: float | None, *, images: int) -> bool:
    if key == "images" or recorded is None or found is None:
        return recorded == found
    if images < LEAST_IMAGES:
        return True
    if METRICS[key].unit:
        return math.isclose(recorded, found, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)
    return math.isclose(recorded, found, rel_tol=0, abs_tol=SHARE_TOLERANCE)
