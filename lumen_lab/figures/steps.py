"""Integers of two executions beside each other: equal, one step off, two, more; and at which operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lumen_lab.deploy.steps_off import StepsOff, StepsReport

COLORS = (BLUE, SKY, GREY, VERMILLION)
WORDS = ("equal", "1 off", "2 off", "more")


def steps_figure(reports: Mapping[str, StepsReport], *, title: str = "") -> Figure:
    """Left: one bar a comparison, its output's integers by how far they are off. Right: the operations of the last
    report that has any, each a dot where it stands in the graph, at the share of its values that are off.

    ``LumenError`` without a report.
    """
    if not reports:
        raise LumenError("steps_figure was given no report; make them with torch_steps, output_steps, operation_steps.")
    inside = [report for report in reports.values() if report.operations]
    sheet = new_sheet(11.0, 1.6 + 0.5 * max(len(reports), 4))
    axes = sheet.subplots(1, 2 if inside else 1, width_ratios=(1, 1.3) if inside else None, squeeze=False)[0]
    draw_shares(axes[0], {name: report.outputs[0] for name, report in reports.items()})
    if inside:
        draw_operations(axes[1], inside[-1])
    for one in axes:
        one.spines[["right", "top"]].set_visible(False)
        one.tick_params(labelsize=8)
    sheet.suptitle(title or "Steps between two executions of one integer graph", fontsize=10)
    return sheet


def draw_shares(axes: Axes, outputs: Mapping[str, StepsOff]) -> None:
    """One stacked bar an output."""
    for place, row in enumerate(outputs.values()):
        shares, left = np.array(row.grouped) / sum(row.grouped), 0.0
        for share, color in zip(shares, COLORS, strict=True):
            axes.barh(place, share, left=left, height=0.6, color=color)
            left += share
        axes.text(1.01, place, f"{row.equal:.1%} equal, at most {row.max_steps} off", va="center", fontsize=7)
    axes.set_yticks(range(len(outputs)), list(outputs), fontsize=8)
    axes.set_ylim(len(outputs) - 0.4, -0.6)
    axes.set_xlim(0, 1.55)
    axes.set_xticks([0, 0.5, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    handles = [axes.barh(0, 0, color=color) for color in COLORS]
    axes.legend(handles, WORDS, ncols=4, frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.12))
    axes.set_title("the output's integers", fontsize=9)


def draw_operations(axes: Axes, report: StepsReport) -> None:
    """A dot an operation, the kinds that are off most often in colour."""
    rows = report.operations
    off = np.array([1 - row.equal for row in rows])
    kinds = list(dict.fromkeys(row.op_type for row in sorted(rows, key=lambda row: row.equal) if row.max_steps))[:4]
    for kind, color in zip([*kinds, None], (VERMILLION, BLUE, SKY, "black", GREY)):
        chosen = [i for i, row in enumerate(rows) if (row.op_type == kind if kind else row.op_type not in kinds)]
        axes.plot(chosen, off[chosen], ".", color=color, markersize=5, label=kind or "others")
    axes.set_xlabel("operations in the order of the graph", fontsize=8)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(bottom=0)
    given = "the NPU" if report.chip else "torch"
    axes.set_title(f"off by itself, each given what {given} wrote before it", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
