"""What a training run writes while it goes on: CSV lines that survive a kill, and the same numbers for TensorBoard."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path

from lumen_lab.errors import LumenError
from lumen_lab.specs import write_whole


class RunLog:
    """One CSV file a kind of line (``train.csv``, ``validation.csv``), and TensorBoard events a kind, in ``folder``.

    ``begins`` maps each kind to the step that it goes on with: lines of that step and later, which a killed run left,
    are dropped, and TensorBoard is told to forget them. Nothing is written before the first ``add``.
    """

    def __init__(self, folder: str | Path, begins: Mapping[str, int]):
        self.folder, self.begins = Path(folder), dict(begins)
        self._columns: dict[str, list[str]] = {}
        self._writers: dict[str, object] = {}
        for kind, step in self.begins.items():
            keep_before(self._path(kind), step)

    def add(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """Append one line to ``<kind>.csv``: the step and ``values``, an undefined one (None) as an empty cell.

        ``LumenError`` if ``values`` are not those that the file began with.
        """
        columns = self._columns_of(kind, values)
        with self._path(kind).open("a", newline="") as file:
            cells = {name: "" if value is None else f"{value:.6g}" for name, value in values.items()}
            csv.DictWriter(file, columns, lineterminator="\n").writerow({"step": step, **cells})
        for name, value in values.items():
            if value is not None:
                self._writer(kind).add_scalar(f"{kind}/{name}", value, step)

    def has(self, kind: str, step: int) -> bool:
        """Whether ``<kind>.csv`` holds a line of that step."""
        lines = self._path(kind).read_text().splitlines()[1:] if self._path(kind).exists() else []
        return any(_step_of(line) == step for line in lines)

    def flush(self) -> None:
        """Hand to the disk what TensorBoard has not yet written; before a checkpoint, so that nothing is missing."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flush, and let go of TensorBoard's files."""
        for writer in self._writers.values():
            writer.close()

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}.csv"

    def _columns_of(self, kind: str, values: Mapping[str, float | None]) -> list[str]:
        """The columns that the file has; a new one is begun with the step and ``values``."""
        path = self._path(kind)
        if kind not in self._columns:
            if not path.exists():
                path.write_text(",".join(["step", *values]) + "\n")
            with path.open(newline="") as file:
                self._columns[kind] = next(csv.reader(file))
        columns = self._columns[kind]
        if set(columns) != {"step", *values}:
            raise LumenError(
                f"{path} began with {', '.join(columns[1:])}, and {', '.join(values)} came at a later step; "
                "log the same values at each."
            )
        return columns

    def _writer(self, kind: str):
        if kind not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.folder / "tensorboard" / kind
            await_later_name(folder)
            self._writers[kind] = SummaryWriter(folder, purge_step=self.begins[kind])
        return self._writers[kind]


def await_later_name(folder: Path) -> None:
    """Wait while an event file of this second is there, at most a second.

    Event files are named after the second they were begun in, and read in the order of their names: of two with one
    second the process number would decide, and the steps of the later one be forgotten instead of the earlier one's.
    """
    while any(path.name.split(".")[3] == f"{int(time.time()):010d}" for path in folder.glob("events.out.tfevents.*")):
        time.sleep(0.02)


def keep_before(path: Path, step: int) -> None:
    """Drop from a CSV log the lines at or after ``step`` and one that a kill has cut; an empty log is removed."""
    if not path.exists():
        return
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in whole[1:] if line.count(",") == whole[0].count(",") and _step_of(line) < step]
    if kept:
        write_whole(path, "".join([whole[0], *kept]))
    else:
        path.unlink()


def _step_of(line: str) -> float:
    number = line.split(",")[0]
    return int(number) if number.isdecimal() else float("inf")
