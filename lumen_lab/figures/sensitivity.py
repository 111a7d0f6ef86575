"""Which parts of a network lose most to their integers: each alone quantised, and each alone left in float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from lumen_lab.quantization.sensitivity import Sensitivity, SensitivityRow

LONGEST_NAME = 48


def sensitivity_figure(sensitivity: Sensitivity, *, count: int = 10, title: str = "") -> Figure:
    """The ``count`` worst parts by either measure, in order of execution, and all parts along the network.

    Left: SQNR of the output with one part alone quantised (short bars are bad). Middle: what the quantised network
    gains when that part alone is left in float. Right: SQNR alone over the position of every part; parts shown at the
    left are filled. ``LumenError`` if there is no part.
    """
    shown = worst_both_ways(sensitivity, count)
    if not shown:
        raise LumenError("sensitivity_figure was given no part; make the record with measure_sensitivity.")
    sheet = new_sheet(12.0, 1.9 + 0.26 * max(len(shown), 8))
    alone, gained, along = sheet.subplots(1, 3, width_ratios=(2.2, 1.8, 2.4))
    draw_alone(alone, sensitivity, shown, count)
    draw_gained(gained, sensitivity, shown, count)
    draw_along(along, sensitivity, shown)
    for axes in (alone, gained, along):
        axes.spines[["right", "top"]].set_visible(False)
        axes.tick_params(labelsize=7)
    sheet.legend(
        handles=[
            Patch(color=BLUE, label=f"among the {count} worst alone"),
            Patch(color=SKY, label="not among them"),
            Patch(color=VERMILLION, label=f"among the {count} that gain most in float"),
            Patch(color=GREY, label="not among them"),
            Line2D([], [], color="black", linestyle=":", label="everything quantised"),
        ],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    words = f"rank correlation of the two {sensitivity.rank_correlation():+.2f}"
    sheet.suptitle(title or f"{len(sensitivity.entries)} parts, {sensitivity.pictures} pictures; {words}", fontsize=10)
    return sheet


def worst_both_ways(sensitivity: Sensitivity, count: int) -> list[SensitivityRow]:
    """The worst by either measure, in order of execution."""
    names = {row.name for by in ("alone", "left_out") for row in sensitivity.worst(count, by=by)}
    return [row for row in sensitivity.entries if row.name in names]


def draw_alone(axes: Axes, sensitivity: Sensitivity, shown: Sequence[SensitivityRow], count: int) -> None:
    """One bar a part: SQNR alone, from 0 dB."""
    worst = {row.name for row in sensitivity.worst(count)}
    for place, row in enumerate(shown):
        if row.alone_db is None:
            axes.text(0, place, " exact", va="center", fontsize=7)
            continue
        axes.barh(place, row.alone_db, height=0.6, color=BLUE if row.name in worst else SKY)
        axes.text(row.alone_db, place, f" {row.alone_db:.1f}", va="center", fontsize=7)
    if sensitivity.all_db is not None:
        axes.axvline(sensitivity.all_db, color="black", linestyle=":", linewidth=0.9)
    axes.set_yticks(range(len(shown)), [short_name(row.name) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.15 * max([row.alone_db or 0 for row in shown] + [1]))
    axes.set_xlabel("SQNR of the output, this part alone quantised, dB", fontsize=8)


def draw_gained(axes: Axes, sensitivity: Sensitivity, shown: Sequence[SensitivityRow], count: int) -> None:
    """One bar a part: what leaving it in float gains; to the left of 0, what it loses."""
    best = {row.name for row in sensitivity.worst(count, by="left_out")}
    for place, row in enumerate(shown):
        gain = sensitivity.gain_db(row)
        axes.barh(place, gain, height=0.6, color=VERMILLION if row.name in best else GREY)
        axes.text(max(gain, 0), place, f" {gain:+.2f}", va="center", fontsize=7)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks([])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.set_xlabel("gain when it alone is left in float, dB", fontsize=8)


def draw_along(axes: Axes, sensitivity: Sensitivity, shown: Sequence[SensitivityRow]) -> None:
    """Every part where it stands in the order of execution."""
    names = {row.name for row in shown}
    for row in sensitivity.entries:
        if row.alone_db is not None:
            filled = BLUE if row.name in names else "none"
            axes.plot(row.position, row.alone_db, "o", markersize=4, markerfacecolor=filled, markeredgecolor=BLUE)
    if sensitivity.all_db is not None:
        axes.axhline(sensitivity.all_db, color="black", linestyle=":", linewidth=0.9)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("position, from input to output", fontsize=8)
    axes.set_ylabel("SQNR alone, dB", fontsize=8)


def short_name(name: str) -> str:
    """The end of a long path."""
    name = name or "(network)"
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
