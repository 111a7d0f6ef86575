"""Draw the teacher's masks on the sample photographs, and its learning curve: ``python docs/draw_teacher.py``."""

from __future__ import annotations

import csv
from pathlib import Path

from lumen_lab import load_image, load_network
from lumen_lab.figures.contact import contact_sheet, learning_curve
from lumen_lab.images import paint_cutout, resize_image, resize_mask
from lumen_lab.prediction import predict_all

ROOT = Path(__file__).resolve().parents[1]
PHOTOGRAPHS = ("cat", "astronaut", "coffee", "rocket", "flower", "china")
SHOWN_PX = 240


def photographs():
    """Photograph, mask and cut-out, at one height."""
    images = [load_image(ROOT / "data" / "photographs" / f"{name}.jpg") for name in PHOTOGRAPHS]
    masks = predict_all(load_network("micro"), images)
    tiles = []
    for image, mask in zip(images, masks, strict=True):
        size = (SHOWN_PX, round(SHOWN_PX * image.shape[1] / image.shape[0]))
        image, mask = resize_image(image, size=size), resize_mask(mask, size=size)
        tiles.append({"photograph": image, "mask": mask, "cut-out": paint_cutout(image, mask)})
    return contact_sheet(tiles, columns=2, captions=PHOTOGRAPHS)


def curve():
    """Held-out scores over the steps of the run."""
    with (ROOT / "data" / "micro" / "validation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "step"]
    return learning_curve({name: [(int(row["step"]), float(row[name])) for row in rows] for name in names})


if __name__ == "__main__":
    photographs().savefig(ROOT / "docs" / "teacher_photographs.png", dpi=90, facecolor="white")
    curve().savefig(ROOT / "docs" / "teacher_learning_curve.png", facecolor="white")
