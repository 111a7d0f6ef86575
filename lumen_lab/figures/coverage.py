"""Calibration pictures against a larger set, drawn: what they show, what each still added, which tensors clip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from lumen_lab.quantization.coverage import CoverageReport, PictureKind, TensorCoverage

SHOWN = 10
BARS = 12


def coverage_figure(report: CoverageReport) -> Figure:
    """Above: each measure, calibration pictures as ticks under the larger set's histogram, missing parts shaded.

    Below: range reached after each picture; attributes, where there are mattes; the tensors that clip most.
    ``LumenError`` for a report without measures.
    """
    if not report.measures:
        raise LumenError("This coverage report compares no measures; make it from pictures with coverage_report.")
    sheet = new_sheet(11.5, 5.6)
    grid = sheet.add_gridspec(2, 1, height_ratios=(1, 1.5))
    above = grid[0].subgridspec(1, len(report.measures))
    for place, (name, (ours, theirs)) in enumerate(report.measures.items()):
        axes = sheet.add_subplot(above[place])
        draw_measure(axes, name, ours, theirs, [kind for kind in report.kinds if kind.measure == name])
    attributes = [kind for kind in report.kinds if kind.measure == "attribute"]
    below = grid[1].subgridspec(1, 3 if attributes else 2, width_ratios=(1, 1.1, 1.3) if attributes else (1, 1.5))
    draw_curve(sheet.add_subplot(below[0]), report.curve)
    if attributes:
        draw_attributes(sheet.add_subplot(below[1]), attributes)
    draw_clipped(sheet.add_subplot(below[-1]), report.clipped(least_beyond=0.0)[:SHOWN], len(report.tensors))
    sheet.suptitle(
        f"{report.pictures} calibration pictures (blue), {report.larger} of a larger set (grey); missing kinds: orange",
        fontsize=10,
    )
    return sheet


def draw_measure(
    axes: Axes, name: str, ours: Sequence[float], theirs: Sequence[float], kinds: Sequence[PictureKind]
) -> None:
    """A histogram of the larger set, a tick for each calibration picture, and missing parts shaded."""
    edges = np.histogram_bin_edges([*ours, *theirs], BARS)
    axes.hist(theirs, edges, color=GREY)
    top = axes.get_ylim()[1]
    axes.vlines(ours, -0.16 * top, -0.02 * top, color=BLUE, linewidth=1)
    for kind in kinds:
        if kind.missing:
            axes.axvspan(kind.low, kind.high, color=VERMILLION, alpha=0.25, linewidth=0)
    axes.set_ylim(-0.18 * top, top)
    axes.set_title(name, fontsize=9)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(3))
    finish(axes)


def draw_curve(axes: Axes, curve: Sequence[float]) -> None:
    """Mean range reached after each picture."""
    axes.plot(range(1, len(curve) + 1), curve, color=BLUE, marker="o", markersize=3, linewidth=1.2)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("calibration pictures", fontsize=8)
    axes.set_title("range reached, mean over tensors", fontsize=9)
    axes.grid(axis="y", linewidth=0.4)
    finish(axes)


def draw_attributes(axes: Axes, kinds: Sequence[PictureKind]) -> None:
    """The share of pictures with each attribute, in both sets."""
    rows = np.arange(len(kinds))
    axes.barh(rows - 0.2, [kind.calibration for kind in kinds], 0.38, color=BLUE)
    axes.barh(rows + 0.2, [kind.larger for kind in kinds], 0.38, color=GREY)
    axes.set_yticks(rows, [kind.kind for kind in kinds], fontsize=8)
    for label, kind in zip(axes.get_yticklabels(), kinds, strict=True):
        label.set_color(VERMILLION if kind.missing else "black")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("pictures with each attribute", fontsize=9)
    finish(axes)


def draw_clipped(axes: Axes, tensors: Sequence[TensorCoverage], of: int) -> None:
    """How far the tensors that the larger set takes farthest out go past their encodings."""
    rows = np.arange(len(tensors))
    axes.barh(rows, [tensor.beyond for tensor in tensors], color=VERMILLION)
    for row, tensor in enumerate(tensors):
        axes.text(tensor.beyond, row, f" {tensor.outside:.2%} of values", va="center", fontsize=7)
    axes.set_yticks(rows, [site_label(tensor) for tensor in tensors], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max([tensor.beyond for tensor in tensors], default=1.0))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    title = f"farthest past their encodings, of {of} tensors" if tensors else f"none of {of} tensors clips"
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("share of the encoding's range", fontsize=8)
    finish(axes)


def site_label(tensor: TensorCoverage, most: int = 34) -> str:
    """The tensor's name with the end of its site."""
    site = tensor.site if len(tensor.site) <= most else "…" + tensor.site[1 - most :]
    return f"{site}\n{tensor.name}" if site else tensor.name


def finish(axes: Axes) -> None:
    axes.tick_params(labelsize=7)
    axes.spines[["right", "top"]].set_visible(False)
