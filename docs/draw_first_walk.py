"""Draw the README's picture from what ``make run`` left in ``build/``: ``python docs/draw_first_walk.py``."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from lumen_lab import EXACT_PLAN, audit, load_image, load_network, rewrite
from lumen_lab.auditing import actual_partition_rows, compare_with_actual
from lumen_lab.deploy.report import CompileReport
from lumen_lab.figures import mask_grid, partition_strip
from lumen_lab.images import load_mask

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
CHIP = "SM8850"
PHOTOGRAPHS = ("cat", "coffee")


def pixels(figure: Figure, *, width_px: int) -> Image.Image:
    """A figure as a picture of the given width."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, facecolor="white")
    picture = Image.open(buffer).convert("RGB")
    return picture.resize((width_px, round(picture.height * width_px / picture.width)), Image.Resampling.LANCZOS)


def strip(model: torch.nn.Module, name: str, title: str) -> Figure:
    """Where the compiler put each operation of ``model``."""
    report = audit(model, (torch.empty(1, 3, *model.config.image_size, device="meta"),), chip=CHIP)
    compiled = CompileReport.load(BUILD / "compiled" / f"{name}_{CHIP}" / f"{name}_{CHIP}.report.json")
    comparison = compare_with_actual(report, compiled, onnx_path=BUILD / f"{name}.onnx")
    return partition_strip(actual_partition_rows(report, comparison), title=title)


def masks(name: str) -> Figure:
    """One photograph with both masks."""
    found = {label: load_mask(BUILD / "masks" / f"{name}_{file}.png") for label, file in FILES.items()}
    return mask_grid(load_image(ROOT / "data" / "photographs" / f"{name}.jpg"), found)


FILES = {"float32": "float32", "NPU (emulated)": "npu"}


def stacked(pictures: list[Image.Image]) -> Image.Image:
    """Pictures of one width, one below the other."""
    return Image.fromarray(np.concatenate([np.asarray(picture) for picture in pictures]))


def main() -> None:
    network = load_network("micro")
    before = strip(network, "micro_original", f"as published, compiled for {CHIP}")
    after = strip(rewrite(network, EXACT_PLAN).model, "micro_exact", f"rewritten exactly, compiled for {CHIP}")
    tiles = [pixels(masks(name), width_px=600) for name in PHOTOGRAPHS]
    sheet = Image.new("RGB", (1200, max(tile.height for tile in tiles)), "white")
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (600 * place, 0))
    picture = stacked([pixels(before, width_px=1200), pixels(after, width_px=1200), sheet])
    picture.quantize(256).save(ROOT / "docs" / "first_walk.png", optimize=True)


if __name__ == "__main__":
    main()
