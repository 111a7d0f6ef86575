"""Draw the teacher's masks on the sample photographs, and its learning curve: ``python docs/draw_teacher.py``."""

from __future__ import annotations

import csv
from pathlib import Path

from lumen_lab import load_network
from lumen_lab.bench.report import photograph_sheet
from lumen_lab.figures import learning_curve

ROOT = Path(__file__).resolve().parents[1]
MICRO = ROOT / "data" / "micro"
SIZES = {0: "96 px", 7000: "128 px", 16000: "192 px"}  # what the network is trained at, from these steps on


def curve():
    """Scores on scenes of the validation split, always at 192 px, over the steps."""
    with (MICRO / "validation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "step"]
    curves = {name: [(int(row["step"]), float(row[name])) for row in rows] for name in names}
    return learning_curve(curves, marks=SIZES)


if __name__ == "__main__":
    photograph_sheet(load_network("micro")).savefig(ROOT / "docs" / "teacher_photographs.png", facecolor="white")
    curve().savefig(ROOT / "docs" / "teacher_learning_curve.png", facecolor="white")
