"""What the head browser ships to the page, and its picture for where no widget can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib import colormaps
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from lumen_lab import images
from lumen_lab.distillation.head_readings import KINDS, cell_of

if TYPE_CHECKING:
    from lumen_lab.distillation.head_readings import HeadReadings

FINAL = 0  # in place of a stage: the masks
LARGE_PX, SMALL_PX, GAP_PX, LINE_PX = 240, 84, 8, 17
COLUMN_PX = 92  # of the table
MARK = ((0, 0, 0), (255, 255, 255))


@dataclass(frozen=True, eq=False)
class ShownMap:
    """One map as it is shipped: float32 (h, w), or uint8 (h, w, 3), the palette it is painted with, and its limits."""

    values: np.ndarray
    palette: str
    low: float
    high: float

    def painted(self) -> np.ndarray:
        """uint8 (h, w, 3)."""
        if self.values.ndim == 3:
            return self.values
        colours = PALETTES[self.palette]
        share = (self.values.astype(np.float64) - self.low) / (self.high - self.low)
        return colours[np.floor(np.clip(share, 0, 1) * (len(colours) - 1) + 0.5).astype(int)]

    def described(self) -> dict[str, object]:
        """What the page must know to read the bytes."""
        return {"size": list(self.values.shape[:2]), "palette": self.palette, "low": self.low, "high": self.high}


def _palettes() -> dict[str, np.ndarray]:
    """Name → colours (n, 3), uint8, least first; that of signed maps has an odd number, so that zero is white."""
    steps = np.linspace(0, 1, 256)
    found = {name: np.rint(255 * colormaps[of](steps)[:, :3]) for name, of in (("norm", "viridis"), ("error", "magma"))}
    found["unit"] = np.repeat(np.arange(256)[:, None], 3, 1)
    found["signed"] = images.paint_difference(np.linspace(-1, 1, 255)[None], limit=1.0)[0]
    return {name: colours.astype(np.uint8) for name, colours in found.items()}


PALETTES = _palettes()


def shown_maps(readings: HeadReadings, max_side_px: int) -> dict[tuple[int, str], dict[str, ShownMap]]:
    """(stage, view) → network → the map to be shipped, no side longer than ``max_side_px``; the masks last."""
    found = {}
    for (level, view), maps in readings.maps.items():
        palette = "error" if view == "error" else KINDS.get(view, "norm")
        low, high = readings.limits[level, view]
        found[level, view] = {
            name: ShownMap(smaller(one, max_side_px), palette, low, high) for name, one in maps.items()
        }
    masks = {name: network.mask for name, network in readings.networks.items()}
    found[FINAL, "mask"] = {
        name: ShownMap(smaller(mask, max_side_px), "unit", 0.0, 1.0) for name, mask in masks.items()
    }
    return found


def smaller(shown: np.ndarray, max_side_px: int) -> np.ndarray:
    """The map itself, or a smaller one whose longer side has that many cells."""
    shrink = max_side_px / max(shown.shape[:2])
    if shrink >= 1:
        return np.ascontiguousarray(shown)
    size = tuple(max(1, round(side * shrink)) for side in shown.shape[:2])
    if shown.ndim == 3:
        return images.resize_image(shown, size=size)
    return np.array(PILImage.fromarray(shown).resize(size[::-1], PILImage.Resampling.BILINEAR))


def static_picture(
    photograph: np.ndarray,
    maps: Mapping[tuple[int, str], Mapping[str, ShownMap]],
    rows: Sequence[Mapping[str, object]],
    *,
    stage: int,
    view: str,
    pixel: tuple[int, int],
    size: tuple[int, int],
    views: Sequence[str],
) -> np.ndarray:
    """The browser's state as one picture, uint8 (H, W, 3): large panels, all heads of the stage, the pixel's values."""
    networks = list(maps[FINAL, "mask"])
    large = [("photograph", photograph)]
    chosen = maps.get(key_of(stage, view), {})
    large += [(f"{name}: {view}", chosen[name].painted()) for name in networks if name in chosen]
    parts = [panel_row(large, LARGE_PX, pixel, size)]
    there = [one for one in views if key_of(stage, one) in maps]
    for name in networks:
        shown = [(one, maps[key_of(stage, one)].get(name)) for one in there]
        small = [(one, None if found is None else found.painted()) for one, found in shown]
        parts.append(panel_row(small, SMALL_PX, pixel, size, name))
    table = [*header(networks, stage, pixel), *(table_line(row, networks) for row in rows if row["stage"] == stage)]
    parts.append(text_rows(table + [table_line(row, networks) for row in rows if row["stage"] == "final"]))
    return stacked(parts)


def key_of(stage: int, view: str) -> tuple[int, str]:
    """Where the map of a view is kept: masks belong to no stage."""
    return (FINAL if view == "mask" else stage), view


def header(networks: Sequence[str], stage: int, pixel: tuple[int, int]) -> list[list[str]]:
    return [[f"Stage {stage} at row {pixel[0]}, column {pixel[1]}"], ["head", *networks]]


def table_line(row: Mapping[str, object], networks: Sequence[str]) -> list[str]:
    return [str(row["head"]), *("–" if row[name] is None else f"{row[name]:.4g}" for name in networks)]


def font() -> ImageFont.FreeTypeFont:
    """The font that comes with matplotlib."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", 11)


def panel_row(
    panels: Sequence[tuple[str, np.ndarray | None]],
    height_px: int,
    pixel: tuple[int, int],
    size: tuple[int, int],
    name: str = "",
) -> np.ndarray:
    """Pictures side by side, names above, the pixel's cell marked, on white; None leaves its place empty."""
    width_px = round(height_px * float(np.clip(size[1] / size[0], 1 / 3, 3)))
    left = 58 if name else GAP_PX
    sheet = PILImage.new(
        "RGB", (left + len(panels) * (width_px + GAP_PX), height_px + LINE_PX + GAP_PX), (255, 255, 255)
    )
    draw, written = ImageDraw.Draw(sheet), font()
    draw.text((4, LINE_PX + height_px // 2), name, fill="black", font=written, anchor="lm")
    for place, (title, pixels) in enumerate(panels):
        x = left + place * (width_px + GAP_PX)
        draw.text((x, LINE_PX // 2), title, fill="black", font=written, anchor="lm")
        if pixels is None:
            continue
        resized = PILImage.fromarray(pixels).resize((width_px, height_px), PILImage.Resampling.NEAREST)
        sheet.paste(resized, (x, LINE_PX))
        draw.rectangle((x - 1, LINE_PX - 1, x + width_px, LINE_PX + height_px), outline=(153, 153, 153))
        mark_cell(draw, pixels.shape[:2], pixel, size, (x, LINE_PX, width_px, height_px))
    return np.array(sheet)


def mark_cell(
    draw: ImageDraw.ImageDraw,
    shape: tuple[int, int],
    pixel: tuple[int, int],
    size: tuple[int, int],
    box: tuple[int, int, int, int],
) -> None:
    """A frame around the cell of a map (h, w), drawn in the box (x, y, width, height), that covers the pixel."""
    row, column = cell_of(pixel, size, shape)
    x, y, width, height = box
    left, right = (x + width * (column + end) / shape[1] for end in (0, 1))
    top, bottom = (y + height * (row + end) / shape[0] for end in (0, 1))
    grow = max(0.0, (7 - (right - left)) / 2)
    for around, color in zip((2, 1), MARK):
        reach = grow + around
        draw.rectangle((left - reach, top - reach, right + reach, bottom + reach), outline=color)


def text_rows(lines: Sequence[Sequence[str]]) -> np.ndarray:
    """Lines of cells as a picture, black on white."""
    across = max(len(line) for line in lines)
    sheet = PILImage.new("RGB", (COLUMN_PX * max(across, 4), LINE_PX * len(lines) + 2 * GAP_PX), (255, 255, 255))
    draw, written = ImageDraw.Draw(sheet), font()
    for row, line in enumerate(lines):
        for column, cell in enumerate(line):
            at = (GAP_PX + column * COLUMN_PX, GAP_PX + LINE_PX * row + LINE_PX // 2)
            draw.text(at, cell, fill="black", font=written, anchor="lm")
    return np.array(sheet)


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures below each other, the narrower ones filled up with white."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0)), constant_values=255) for part in parts]
    )
