"""What rewrites buy, drawn: whole plans side by side, and what leaving one rewrite out of a plan does to its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from lumen_lab.deploy.plan_costs import CostTable, PlanCost

MOVED = {"DRAM, MB": lambda cost: (cost.dram_read_bytes + cost.dram_write_bytes) / 1e6, "tiles": lambda c: c.tiles}
SAME = 0.005  # a change of less than half a percent is drawn grey


def cost_figure(table: CostTable, *, chip: str, plan: str) -> Figure:
    """Left: DRAM traffic and tiles of each whole plan. Right: both without each rewrite of ``plan``, as ratios.

    A bar to the right of 1 is what the rewrite saves; all axes start at 0. Hatched: the compiler left nodes on the CPU
    or made several partitions, so its figures are of a part of the network; a cross: it gave up. ``LumenError`` if the
    table has no such plan or chip.
    """
    whole, full = table.of("whole", chip), table.of("whole", chip, plan)
    if not full:
        known = sorted({f"{cost.about} on {cost.chip}" for cost in table.costs if cost.kind == "whole"})
        raise LumenError(f"The table has no {plan} on {chip}; it has {', '.join(known) or 'no whole plan'}.")
    suffix = f"_from_{plan}"
    left_out = [cost for cost in table.of("without", chip) if cost.about.endswith(suffix)]
    sheet = new_sheet(11.5, 1.7 + 0.3 * max(len(whole), len(left_out)))
    axes = sheet.subplots(1, 4, width_ratios=(1.2, 1.2, 2, 2))
    for place, (name, of) in enumerate(MOVED.items()):
        draw_whole(axes[place], whole, of, name, labels=place == 0)
        draw_left_out(axes[2 + place], left_out, of, full[0], name, suffix, labels=place == 0)
    draw_legend(sheet, [*whole, *left_out])
    sheet.suptitle(
        f"{table.network} at {table.input_shapes}, {chip}: whole plans, and {plan} without one rewrite", fontsize=10
    )
    return sheet


def draw_whole(axes: Axes, costs: Sequence[PlanCost], of, name: str, *, labels: bool) -> None:
    """One bar a plan, with its figure."""
    for row, cost in enumerate(costs):
        if cost.tiles is None:
            axes.plot(0, row, "x", color=VERMILLION)
            continue
        axes.barh(row, of(cost), color=BLUE, hatch=None if whole_on_npu(cost) else "///")
        axes.text(of(cost), row, f" {of(cost):,.0f}", va="center", fontsize=7)
    axes.set_yticks(range(len(costs)), [cost.about for cost in costs] if labels else [""] * len(costs), fontsize=8)
    finish(axes, name, len(costs), room=0.3)


def draw_left_out(
    axes: Axes, costs: Sequence[PlanCost], of, full: PlanCost, name: str, suffix: str, *, labels: bool
) -> None:
    """One bar a rewrite left out: the figure without it, as a multiple of the plan's."""
    for row, cost in enumerate(costs):
        if cost.tiles is None:
            axes.plot(1, row, "x", color=VERMILLION)
            continue
        ratio = of(cost) / of(full)
        color = GREY if abs(ratio - 1) < SAME else VERMILLION if ratio > 1 else SKY
        axes.barh(row, ratio - 1, left=1, color=color, hatch=None if whole_on_npu(cost) else "///")
        axes.text(max(ratio, 1), row, f" ×{ratio:.2f}", va="center", fontsize=7)
    names = [f"without {cost.about.removesuffix(suffix)}" for cost in costs]
    axes.set_yticks(range(len(costs)), names if labels else [""] * len(costs), fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    finish(axes, f"{name}, as a multiple of the plan's", len(costs), room=0.2)


def draw_legend(sheet: Figure, costs: Sequence[PlanCost]) -> None:
    """What the colours, the hatching and the cross mean, as far as the sheet has them."""
    handles = [
        Patch(color=BLUE, label="a plan"),
        Patch(color=VERMILLION, label="dearer without the rewrite"),
        Patch(color=SKY, label="cheaper without it"),
        Patch(color=GREY, label=f"within {SAME:.1%} of the plan's"),
    ]
    if any(cost.tiles is not None and not whole_on_npu(cost) for cost in costs):
        words = "a part of the network only: several partitions, or nodes on the CPU"
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="///", label=words))
    if any(cost.tiles is None for cost in costs):
        handles.append(Line2D([], [], color=VERMILLION, marker="x", linestyle="", label="the compiler gave up"))
    sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=7)


def whole_on_npu(cost: PlanCost) -> bool:
    """Whether the figures are those of the whole network."""
    return cost.partitions == 1 and cost.cpu_nodes == 0


def finish(axes: Axes, name: str, rows: int, *, room: float) -> None:
    """Axes from 0, with ``room`` beside the longest bar for its figure, as a share of it, and few ticks."""
    axes.set_xlim(0, (1 + room) * max(axes.dataLim.x1, 1))
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(max(rows, 1) - 0.4, -0.6)
    axes.set_xlabel(name, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["right", "top"]].set_visible(False)
