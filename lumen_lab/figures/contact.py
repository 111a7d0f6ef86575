"""Many small pictures on one sheet, and two curves: what a person looks at before believing a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lumen_lab.errors import ImageError
from lumen_lab.figures.sheet import BLUE, GREY, VERMILLION, new_sheet
from lumen_lab.images import check_image, check_mask

TILE_IN = 1.25


def contact_sheet(
    tiles: Sequence[Mapping[str, np.ndarray]], *, captions: Sequence[str] = (), columns: int = 4
) -> Figure:
    """Tiles in ``columns``; a tile is a row of named pictures, e.g. {"image": …, "matte": …, "mask": …}.

    A picture is an image (uint8 H×W×3) or a mask (H×W in [0, 1]); all tiles have the same names, written once above
    each column. ``captions`` stand below the tiles.
    """
    if not tiles:
        raise ImageError("contact_sheet was given no tiles; pass at least one.")
    if len({tuple(tile) for tile in tiles}) > 1:
        raise ImageError("The tiles of a contact sheet have the same names; these differ.")
    names = list(tiles[0])
    rows = -(-len(tiles) // columns)
    tallest = max(np.shape(picture)[0] / np.shape(picture)[1] for tile in tiles for picture in tile.values())
    height_in = TILE_IN * tallest + 0.2 * bool(captions)
    sheet = new_sheet(columns * len(names) * TILE_IN, rows * height_in + 0.3)
    grid = sheet.subplots(rows, columns * len(names), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for index, tile in enumerate(tiles):
        row, first = index // columns, index % columns * len(names)
        for offset, (name, picture) in enumerate(tile.items()):
            axes = grid[row, first + offset]
            axes.imshow(_as_image(picture))
            if row == 0:
                axes.set_title(name, fontsize=8)
        if captions:
            grid[row, first].text(0, -0.04, captions[index], transform=grid[row, first].transAxes, fontsize=7, va="top")
    return sheet


def _as_image(picture: np.ndarray) -> np.ndarray:
    if np.ndim(picture) == 2:
        return np.repeat(np.rint(check_mask(picture) * 255).astype(np.uint8)[..., None], 3, axis=2)
    return check_image(picture)


def reliability_diagram(rows: Sequence[Mapping[str, float]], *, title: str = "") -> Figure:
    """Share of foreground against confidence, and how many pixels each bin holds, from ``Reliability.rows()``."""
    rows = [row for row in rows if row["pixels"]]
    sheet = new_sheet(4.6, 4.4)
    upper, lower = sheet.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence = [row["confidence"] for row in rows]
    upper.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    upper.plot(confidence, [row["foreground"] for row in rows], color=BLUE, marker="o", markersize=4)
    upper.set(ylabel="share of foreground", xlim=(0, 1), ylim=(0, 1), title=title)
    lower.bar(confidence, [row["pixels"] for row in rows], width=0.04, color=BLUE)
    lower.set(xlabel="confidence", ylabel="pixels", yscale="log")
    return sheet


def learning_curve(
    curves: Mapping[str, Sequence[tuple[int, float]]], *, marks: Mapping[int, str] | None = None
) -> Figure:
    """Values over steps, one panel a curve; ``marks`` names steps at which something changed."""
    sheet = new_sheet(2.9 * len(curves), 2.6)
    panels = sheet.subplots(1, len(curves), squeeze=False)[0]
    for axes, (name, points) in zip(panels, curves.items(), strict=True):
        axes.plot(*zip(*points), color=BLUE, linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        for step, text in (marks or {}).items():
            axes.axvline(step, color=VERMILLION, linewidth=0.7, linestyle=":")
            axes.text(step, axes.get_ylim()[0], f" {text}", fontsize=6, color=VERMILLION, va="bottom")
    return sheet
