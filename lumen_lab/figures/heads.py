"""The heads of a decoder on one picture, where a Swin block's heads look, and where a deformable conv's taps do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lumen_lab.errors import LumenError
from lumen_lab.figures.masks import SIGNED
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet
from lumen_lab.images import check_image

if TYPE_CHECKING:
    from matplotlib.gridspec import GridSpec

    from lumen_lab.distillation.attention_maps import AttentionMaps
    from lumen_lab.distillation.head_readings import HeadReadings, StageReading
    from lumen_lab.distillation.offset_maps import OffsetMaps

COLUMNS = {
    "features": "norm before\nthe gate",
    "components": "3 components",
    "gate": "gate",
    "gated": "norm after\nthe gate",
    "side mask": "side mask",
    "gradient": "edges",
    "adds": "adds to\nthe mask",
    "error": "error against\nthe teacher",
}
COLORMAPS = {"gate": "gray", "side mask": "gray", "gradient": "gray", "adds": SIGNED, "error": "magma"}
CODES_COLUMN = "codes of\nthe features"
PANEL_IN = 1.28
HEADS_ACROSS, HEAD_IN = 8, 1.6
ARROWS_ACROSS = 16


def head_figure(readings: HeadReadings, *, pixel: tuple[int, int] | None = None, title: str = "") -> Figure:
    """Photograph and masks above; below, a row for each stage and network, a column for each head.

    Colours mean the same in both networks; what a stage adds has one scale over all stages: red where it raises the
    mask, blue where it lowers it. Under a panel stands its mean (of what is added: of the absolute values). The side
    heads are the teacher's, read off each network's features. ``pixel`` (row, column) of the picture is marked
    everywhere. The last column, of an NPU graph, counts the 256 codes of the features.
    """
    names = list(readings.networks)
    coded = any(stage.codes for network in readings.networks.values() for stage in network.stages)
    views = [view for view in COLUMNS if any(key[1] == view for key in readings.maps)]
    width = PANEL_IN * (len(views) + coded) + 0.7
    rows = len({level for level, _ in readings.maps}) * len(names)
    above = 2.3
    sheet = new_sheet(max(width, 9.0), above + rows * (PANEL_IN * panel_aspect(readings) + 0.2) + 0.5)
    upper, lower = sheet.subfigures(2, 1, height_ratios=(above, sheet.get_figheight() - above))
    draw_masks(upper, readings, pixel)
    grid = lower.add_gridspec(rows, len(views) + coded)
    for row, (level, name) in enumerate((stage, name) for stage in levels_of(readings) for name in names):
        draw_stage(lower, grid, row, readings, (level, name), views, pixel)
        if coded:
            draw_codes(lower.add_subplot(grid[row, -1]), readings.networks[name].stage(level), first=row == 0)
    sheet.suptitle(title, fontsize=11)
    return sheet


def levels_of(readings: HeadReadings) -> list[int]:
    """The stages, deepest first."""
    return list(dict.fromkeys(level for level, _ in readings.maps))


def panel_aspect(readings: HeadReadings) -> float:
    """Height over width of the picture, within reason."""
    return float(np.clip(readings.size[0] / readings.size[1], 0.5, 2))


def draw_masks(part: Figure, readings: HeadReadings, pixel: tuple[int, int] | None) -> None:
    """The photograph, the mask of each network and their difference."""
    masks = {name: network.mask for name, network in readings.networks.items()}
    axes = part.subplots(1, len(masks) + (3 if len(masks) > 1 else 2), squeeze=False)[0]
    show(axes[0], readings.image, "photograph", readings.size, pixel)
    for panel, (name, mask) in zip(axes[1:], masks.items()):
        show(panel, mask, f"mask, {name}", readings.size, pixel, cmap="gray", vmin=0, vmax=1)
    if len(masks) > 1:
        difference = readings.student.mask - readings.teacher.mask
        said = f"student − teacher\nmean |difference| {np.abs(difference).mean():.3f}"
        show(axes[3], difference, said, readings.size, pixel, cmap=SIGNED, vmin=-1, vmax=1)
    draw_adds(axes[-1], readings)


def draw_adds(axes: Axes, readings: HeadReadings) -> None:
    """What each stage adds to the mask, as bars: mean |mask − mask without it|."""
    names = list(readings.networks)
    for place, (name, color) in enumerate(zip(names, (BLUE, VERMILLION))):
        for row, level in enumerate(levels_of(readings)):
            value = readings.adds(level)[name]
            at = row + (place - (len(names) - 1) / 2) * 0.36
            axes.barh(at, value, height=0.32, color=color, label=name if row == 0 else None)
            axes.text(value, at, f" {value:.3f}", va="center", fontsize=6)
    axes.set_yticks(range(len(levels_of(readings))), [f"stage {level}" for level in levels_of(readings)], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.tick_params(axis="x", labelsize=6)
    axes.spines[["right", "top"]].set_visible(False)
    axes.set_title("mask changes without\nthe stage, on average", fontsize=8)
    axes.legend(fontsize=6, frameon=False, loc="best")


def draw_stage(
    part: Figure,
    grid: GridSpec,
    row: int,
    readings: HeadReadings,
    which: tuple[int, str],
    views: Sequence[str],
    pixel: tuple[int, int] | None,
) -> None:
    """One row: the maps of one stage of one network; where there is none the place stays empty."""
    level, name = which
    for column, view in enumerate(views):
        axes = part.add_subplot(grid[row, column])
        shown = readings.maps.get((level, view), {}).get(name)
        heading = COLUMNS[view] if row == 0 else ""
        if shown is None:
            axes.set_axis_off()
            axes.set_title(heading, fontsize=8)
            axes.text(0.5, 0.5, "–", ha="center", va="center", color=GREY)
            continue
        low, high = readings.limits[level, view]
        options = {} if shown.ndim == 3 else {"cmap": COLORMAPS.get(view, "viridis"), "vmin": low, "vmax": high}
        show(axes, shown, heading, readings.size, pixel, **options)
        axes.set_xlabel(figure_under(view, shown), fontsize=6, labelpad=1)
        if column == 0:
            axes.set_ylabel(f"stage {level}\n{name}", fontsize=8)


def figure_under(view: str, shown: np.ndarray) -> str:
    """The size of the map and, unless it is of colours, its mean."""
    size = f"{shown.shape[0]} × {shown.shape[1]}"
    if view == "components":
        return size
    return f"{np.abs(shown).mean():.3g}" if view == "adds" else f"{size}: {shown.mean():.3g}"


def draw_codes(axes: Axes, stage: StageReading, *, first: bool) -> None:
    """How often each code of the features is used, on a logarithmic axis."""
    axes.set_title(CODES_COLUMN if first else "", fontsize=8)
    counts = stage.codes.get("features")
    if counts is None:
        axes.set_axis_off()
        return
    axes.bar(np.arange(len(counts)), counts, width=1.0, color=SKY)
    axes.set(yscale="log", xlim=(-1, len(counts)), ylim=(0.5, None), xticks=[0, 128, 255], yticks=[])
    axes.minorticks_off()
    axes.tick_params(labelsize=6)
    axes.spines[["right", "top", "left"]].set_visible(False)
    axes.set_xlabel(f"{(counts > 0).sum()} of {len(counts)} used", fontsize=6, labelpad=1)


def show(
    axes: Axes,
    shown: np.ndarray,
    title: str,
    size: tuple[int, int],
    pixel: tuple[int, int] | None = None,
    **options: object,
):
    """A map of any size over the whole picture (H, W), each of its cells a flat square; the pixel marked."""
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=8)
    drawn = axes.imshow(shown, extent=extent_of(size), interpolation="nearest", **options)
    if pixel is not None:
        for color, width in (("black", 2.2), ("white", 1.0)):
            axes.plot(pixel[1], pixel[0], "+", color=color, markersize=7 + width, markeredgewidth=width)
    return drawn


def extent_of(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Left, right, bottom, top of a picture (H, W) whose pixels have whole numbers for their middles."""
    return -0.5, size[1] - 0.5, size[0] - 0.5, -0.5


# Attention


def attention_figure(
    image: np.ndarray, attention: AttentionMaps | Sequence[AttentionMaps], *, title: str = ""
) -> Figure:
    """Every head of a Swin block from one pixel, or of several blocks below each other.

    ``image``: the photograph, uint8 (H, W, 3). Tokens that the pixel's token may look at are coloured, dark to bright
    from nothing to the head's largest, which stands above; all else is dimmed. The red square is the token itself.
    """
    image = check_image(image)
    blocks = list(attention) if isinstance(attention, Sequence) else [attention]
    if not blocks:
        raise LumenError("attention_figure was given no maps; make them with attention_of.")
    lines = [(block, start) for block in blocks for start in range(0, len(block.maps), HEADS_ACROSS)]
    across = min(HEADS_ACROSS, max(len(block.maps) for block in blocks))
    aspect = float(np.clip(image.shape[0] / image.shape[1], 0.5, 2))
    sheet = new_sheet(max(HEAD_IN * (across + 1), 5.0), (HEAD_IN * aspect + 0.5) * len(lines) + 0.4)
    axes = sheet.subplots(len(lines), across + 1, squeeze=False)
    for row, (block, start) in zip(axes, lines):
        draw_token(row[0], image, block)
        for panel, number in zip(row[1:], range(start, start + across)):
            if number < len(block.maps):
                draw_head(panel, image, block, number)
            else:
                panel.set_axis_off()
    sheet.suptitle(
        title or f"Attention from pixel (row {blocks[0].pixel[0]}, column {blocks[0].pixel[1]})", fontsize=10
    )
    return sheet


def draw_token(axes: Axes, image: np.ndarray, block: AttentionMaps) -> None:
    """The photograph with the pixel that was asked for."""
    show(axes, image, f"{block.site}\n{block.pass_} pass", block.size, block.pixel)
    axes.title.set_fontsize(7)


def draw_head(axes: Axes, image: np.ndarray, block: AttentionMaps, number: int) -> None:
    """One head: its map over the dimmed photograph."""
    weights, most = block.maps[number], float(block.maps[number].max()) or 1.0
    said = f"head {number + 1}, most {most:.2g}"
    if block.outside[number] >= 0.005:
        said += f"\npadding {block.outside[number]:.0%}"
    show(axes, (image * 0.35).astype(np.uint8), said, block.size)
    axes.title.set_fontsize(7)
    heat = colormaps["magma"](weights / most)
    heat[..., 3] = np.where(block.reach, 0.9, 0.0)
    axes.imshow(heat, extent=extent_of(block.size), interpolation="nearest")
    high, wide = (side / cells for side, cells in zip(block.size, block.reach.shape))
    corner = (block.cell[1] * wide - 0.5, block.cell[0] * high - 0.5)
    axes.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor="#ff3030", linewidth=1.2))


# Offsets


def arrow_figure(
    image: np.ndarray, offsets: OffsetMaps, *, pixels: Sequence[tuple[int, int]] = (), title: str = ""
) -> Figure:
    """The photograph with the mean arrow of each place (taps weighted by their modulators), and for each of ``pixels``
    (row, column) a panel with every tap: from where it is without an offset to where it looks.

    Dots are larger and brighter the more a tap weighs (modulator 0 to 2). The frame is the picture's edge; beyond it
    zeros are read. ``image``: uint8 (H, W, 3).
    """
    image = check_image(image)
    aspect = float(np.clip(image.shape[0] / image.shape[1], 0.5, 2))
    sheet = new_sheet(4.2 * (1 + len(pixels)) + 0.6, 4.2 * aspect + 0.8)
    axes = sheet.subplots(1, 1 + len(pixels), squeeze=False)[0]
    draw_field(axes[0], image, offsets)
    for panel, pixel in zip(axes[1:], pixels):
        dots = draw_taps(panel, image, offsets, pixel)
    if pixels:
        sheet.colorbar(dots, ax=axes[-1], shrink=0.7, label="modulator")
    sheet.suptitle(title or f"{offsets.site}, {offsets.kernel}×{offsets.kernel}", fontsize=9)
    return sheet


def draw_field(axes: Axes, image: np.ndarray, offsets: OffsetMaps) -> None:
    """One arrow a place, thinned to ``ARROWS_ACROSS``, in the picture's own pixels."""
    show(axes, image, f"mean arrow, {offsets.share_outside():.0%} of looks past the edge", offsets.size)
    places, arrows = offsets.field()
    step = -(-max(places.shape[:2]) // ARROWS_ACROSS)
    places, arrows = (each[step // 2 :: step, step // 2 :: step].reshape(-1, 2) for each in (places, arrows))
    axes.quiver(
        places[:, 1], places[:, 0], arrows[:, 1], arrows[:, 0], color="white", edgecolor="black", linewidth=0.5,
        width=0.006, angles="xy", scale_units="xy", scale=1, minlength=0,
    )  # fmt: skip


def draw_taps(axes: Axes, image: np.ndarray, offsets: OffsetMaps, pixel: tuple[int, int]):
    """Every tap of the cell that covers one pixel; returns the dots, for a colour bar."""
    regular, looked, modulators = offsets.samples_at(pixel)
    show(axes, (image * 0.6).astype(np.uint8), f"taps at (row {pixel[0]}, column {pixel[1]})", offsets.size, pixel)
    for start, end in zip(regular, looked):
        axes.annotate("", end[::-1], start[::-1], arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.7}, zorder=3)
    axes.plot(regular[:, 1], regular[:, 0], "s", color="none", markeredgecolor=SKY, markersize=3.5, zorder=4)
    dots = axes.scatter(
        looked[:, 1], looked[:, 0], c=modulators, s=8 + 24 * modulators, cmap="plasma", vmin=0, vmax=2, zorder=5,
        edgecolors="black", linewidths=0.4,
    )  # fmt: skip
    height, width = offsets.size
    axes.add_patch(Rectangle((-0.5, -0.5), width, height, fill=False, edgecolor="black", linewidth=1.0, zorder=2))
    places = np.concatenate([looked, regular, [(-0.5, -0.5), (height - 0.5, width - 0.5)]])
    margin = 0.03 * max(height, width)
    low, high = places.min(0) - margin, places.max(0) + margin
    axes.set(xlim=(low[1], high[1]), ylim=(high[0], low[0]))
    return dots
