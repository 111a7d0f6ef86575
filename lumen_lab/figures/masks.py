"""Masks seen over their photograph, side by side, and subtracted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from lumen_lab.errors import ImageError
from lumen_lab.figures.sheet import new_sheet
from lumen_lab.images import HIGHER_COLOR, LOWER_COLOR, check_image, check_mask, paint_overlay

PANEL_IN = 3.2
SIGNED = LinearSegmentedColormap.from_list(
    "signed", [np.divide(color, 255) for color in (LOWER_COLOR, (255, 255, 255), HIGHER_COLOR)], N=257
)  # an odd number of colours, so that zero is white


def mask_overlay(image: np.ndarray, mask: np.ndarray, *, title: str = "") -> Figure:
    """The image tinted where the mask is, outlined where the mask crosses 0.5.

    ``image`` is uint8 (H, W, 3), ``mask`` (H, W) in [0, 1]; ``ImageError`` if they do not fit.
    """
    image = check_image(image)
    sheet = new_sheet(*_panel_size(image.shape, scale=1.6))
    _show_overlay(sheet.subplots(), image, mask, title)
    return sheet


def mask_grid(image: np.ndarray, masks: Mapping[str, np.ndarray], *, title: str = "") -> Figure:
    """The photograph, and for each named mask a column: the mask above, its overlay below."""
    image = check_image(image)
    if not masks:
        raise ImageError("mask_grid was given no masks; pass them as {name: mask}.")
    width_in, height_in = _panel_size(image.shape)
    sheet = new_sheet(width_in * (len(masks) + 1), 2 * height_in + 0.3)
    grid = sheet.add_gridspec(2, len(masks) + 1)
    _show(sheet.add_subplot(grid[:, 0]), image, "photograph")
    for column, (name, mask) in enumerate(masks.items(), start=1):
        mask = check_mask(mask, size=image.shape[:2])
        _show(sheet.add_subplot(grid[0, column]), mask, name, cmap="gray", vmin=0, vmax=1)
        _show_overlay(sheet.add_subplot(grid[1, column]), image, mask, "")
    sheet.suptitle(title)
    return sheet


def difference_map(
    reference: np.ndarray,
    actual: np.ndarray,
    *,
    reference_name: str = "reference",
    actual_name: str = "actual",
    limit: float | None = None,
    title: str = "",
) -> Figure:
    """``actual`` − ``reference``, two masks (H, W) in [0, 1], in colours that are even on both sides of white.

    Below ``title`` stand the largest and the mean absolute difference. Full colour is ``limit``, or else the largest
    difference; pass one ``limit`` to several figures to compare them.
    """
    reference = check_mask(reference)
    difference = check_mask(actual, size=reference.shape).astype(np.float64) - reference
    largest = float(np.abs(difference).max())
    limit = limit or largest or 1 / 255
    width_in, height_in = _panel_size(reference.shape, scale=1.6)
    sheet = new_sheet(max(width_in, 4.6) + 0.8, height_in + 0.2)
    axes = sheet.subplots()
    measured = f"max {largest:.3g}, mean {np.abs(difference).mean():.3g}" if largest else "identical"
    lines = [*filter(None, [title]), f"{actual_name} − {reference_name}", measured]
    shown = _show(axes, difference, "\n".join(lines), cmap=SIGNED, vmin=-limit, vmax=limit)
    sheet.colorbar(shown, ax=axes, shrink=0.9, label="difference of the mask")
    return sheet


def _show(axes: Axes, pixels: np.ndarray, title: str, **options):
    axes.set_title(title, fontsize=10)
    axes.set(xticks=[], yticks=[])
    return axes.imshow(pixels, **options)


def _show_overlay(axes: Axes, image: np.ndarray, mask: np.ndarray, title: str) -> None:
    mask = check_mask(mask, size=image.shape[:2])
    _show(axes, paint_overlay(image, mask), title)
    # contour needs a cell of four pixels, and warns where no edge exists.
    if min(mask.shape) > 1 and mask.min() < 0.5 < mask.max():
        axes.contour(mask, levels=[0.5], colors="black", linewidths=2.2)
        axes.contour(mask, levels=[0.5], colors="white", linewidths=1.0)


def _panel_size(shape: tuple[int, ...], scale: float = 1.0) -> tuple[float, float]:
    """Inches (width, height) of a panel for a picture of ``shape`` (H, W, …), kept within 1:3 and 3:1."""
    aspect = float(np.clip(shape[1] / shape[0], 1 / 3, 3))
    return scale * PANEL_IN * aspect**0.5, scale * PANEL_IN / aspect**0.5 + 0.25
