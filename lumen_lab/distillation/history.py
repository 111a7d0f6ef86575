"""What happened in a run: its logs as one record."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from lumen_lab.specs import Record

KINDS = ("train", "gates", "validation")


@dataclass(frozen=True)
class History(Record):
    """Lines of a run, each with its "step": terms of the loss, measures of the gates ("gate/measure"), validation
    scores, and alarms (step, gate, verdict, sentence)."""

    train: tuple[dict[str, float | None], ...] = ()
    gates: tuple[dict[str, float | None], ...] = ()
    validation: tuple[dict[str, float | None], ...] = ()
    alarms: tuple[dict[str, object], ...] = ()

    def rows(self) -> list[dict[str, object]]:
        """The validation scores; the alarms where there are none."""
        return [dict(line) for line in self.validation or self.alarms]

    def series(self, kind: str, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of one column of "train", "gates" or "validation"."""
        lines = [line for line in getattr(self, kind) if name in line]
        return [int(line["step"]) for line in lines], [line[name] for line in lines]


def read_history(folder: str | Path) -> History:
    """The logs of a run that were left in ``folder``; what is not there is empty."""
    folder = Path(folder)
    lines = {kind: tuple(csv_lines(folder / f"{kind}.csv")) for kind in KINDS}
    alarms = folder / "alarms.json"
    return History(**lines, alarms=tuple(json.loads(alarms.read_text())) if alarms.exists() else ())


def csv_lines(path: Path) -> list[dict[str, float | None]]:
    """A log's lines as numbers, an empty cell as None."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) if value else None for name, value in row.items()} for row in csv.DictReader(file)]
