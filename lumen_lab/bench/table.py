"""Scores of one predictor on the bench lists, and how two such tables differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.distillation.gates import gate_rows
from lumen_lab.evaluation import TOOLS, evaluate
from lumen_lab.metrics import METRICS, READINGS, Scores
from lumen_lab.prediction import Predictor
from lumen_lab.specs import Record, html_table, tool_versions

SHARE_TOLERANCE = 2e-3
"""How far a mean of shares in [0, 1] may move with the processor and still match (docs/measurements.md)."""
RELATIVE_TOLERANCE = 2e-2
"""The same for metrics in pixels or points, relative to the recorded value."""
LEAST_IMAGES = 10
"""A mean over fewer images is shown and not compared: one rounding can turn over one image of three."""
GATE_SCENES = 24


@dataclass(frozen=True)
class BenchTable(Record):
    """List → reading → one line for "all" and for each attribute, with every metric; what was scored, with what.

    ``gates``: list → lines of ``lumen_lab.distillation.gates`` on its first scenes; empty for a predictor without.
    """

    predictor: str
    versions: dict[str, str]
    lists: dict[str, dict[str, tuple[dict[str, object], ...]]]
    gates: dict[str, tuple[dict[str, object], ...]]

    def value(self, name: str, metric: str, *, reading: str = "raw") -> float | None:
        """The mean of one metric over all images of a list."""
        return self.lists[name][reading][0][metric]

    def rows(self) -> list[dict[str, object]]:
        """One line a list and reading: every metric over all images."""
        return [
            {"list": name, "reading": reading} | {key: tables[reading][0][key] for key in ("images", *METRICS)}
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

    A list that was recorded and not scored now is not compared; ``not_compared`` names it.
    """
    rows = []
    for name, tables in found.lists.items():
        for reading in READINGS:
            rows += _differences(name, reading, recorded.lists.get(name, {}).get(reading, ()), tables[reading])
        for then, now in zip(recorded.gates.get(name, ()), found.gates.get(name, ()), strict=False):
            if abs(then["mean"] - now["mean"]) > SHARE_TOLERANCE:
                where = {"list": name, "reading": "", "attribute": "all", "metric": f"gate {now['gate']}"}
                rows.append({**where, "recorded": then["mean"], "found": now["mean"]})
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
    expected = {row["attribute"]: row for row in recorded}
    return [
        {"list": name, "reading": reading, "attribute": row["attribute"], "metric": key, "recorded": then, "found": now}
        for row in found
        for key in ("images", *METRICS)
        for then, now in [(expected.get(row["attribute"], {}).get(key), row[key])]
        if not _matches(key, then, now, images=row["images"])
    ]


def _matches(key: str, recorded: float | None, found: float | None, *, images: int) -> bool:
    if key == "images" or recorded is None or found is None:
        return recorded == found
    if images < LEAST_IMAGES:
        return True
    if METRICS[key].unit:
        return math.isclose(recorded, found, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)
    return math.isclose(recorded, found, rel_tol=0, abs_tol=SHARE_TOLERANCE)
