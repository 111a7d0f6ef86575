"""What rewrites buy, drawn: bars of the recorded figures, part results hatched, failed compiles crossed."""

import dataclasses
import itertools

import pytest

from lumen_lab.deploy.plan_costs import CostTable, PlanCost
from lumen_lab.errors import LumenError
from lumen_lab.figures import cost_figure

FULL = PlanCost(
    "whole", "PLAN", ("A", "B"), "SM8850", 81, 10, 10, 1, 0, {"Conv2d": 3}, 5, 1.0, 5, 3_000_000, 1_000_000, 200
)


def table(*costs):
    return CostTable("net", "0" * 64, "1x3x8x8", {}, "command", costs)


def texts(figure):
    return [text.get_text().strip() for axes in figure.axes for text in axes.texts]


def test_bars_carry_the_figures_and_the_ratios():
    dearer = dataclasses.replace(FULL, kind="without", about="a_from_PLAN", dram_read_bytes=7_000_000, tiles=100)
    figure = cost_figure(table(FULL, dearer), chip="SM8850", plan="PLAN")
    assert texts(figure) == ["4", "200", "×2.00", "×0.50"]
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()] == ["without a"]


def test_a_part_of_the_network_is_hatched_and_a_failed_compile_is_a_cross():
    cut = dataclasses.replace(FULL, kind="without", about="a_from_PLAN", partitions=6, cpu_nodes=20)
    failed = dataclasses.replace(FULL, kind="without", about="b_from_PLAN", tiles=None, error="it gave up")
    figure = cost_figure(table(FULL, cut, failed), chip="SM8850", plan="PLAN")
    right = figure.axes[2]
    assert [patch.get_hatch() for patch in right.patches] == ["///"]
    assert [line.get_marker() for line in right.lines if line.get_marker() == "x"] == ["x"]
    assert figure.axes[0].patches[0].get_hatch() is None


def test_a_plan_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(LumenError, match="no OTHER on SM8850; it has PLAN on SM8850"):
        cost_figure(table(FULL), chip="SM8850", plan="OTHER")


def test_axes_start_at_0_with_ticks_that_do_not_collide_and_a_legend_says_what_is_drawn():
    plans = [dataclasses.replace(FULL, tiles=35_079), dataclasses.replace(FULL, about="OTHER", partitions=6)]
    cheaper = dataclasses.replace(FULL, kind="without", about="a_from_PLAN", dram_read_bytes=7_000_000, tiles=30_000)
    figure = cost_figure(table(*plans, cheaper), chip="SM8850", plan="PLAN")
    figure.draw_without_rendering()
    assert [axes.get_xlim()[0] for axes in figure.axes] == [0, 0, 0, 0]
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes = [label.get_window_extent() for label in ticks]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))
    assert "20,000" in [label.get_text() for label in figure.axes[1].get_xticklabels()]
    (legend,) = figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told[0] == "a plan" and told[-1].startswith("a part of the network only")


def test_the_legend_names_the_cross_only_where_there_is_one():
    failed = dataclasses.replace(FULL, kind="without", about="b_from_PLAN", tiles=None, error="it gave up")
    labels = [
        {text.get_text() for text in cost_figure(table(*costs), chip="SM8850", plan="PLAN").legends[0].get_texts()}
        for costs in ((FULL,), (FULL, failed))
    ]
    assert labels[1] - labels[0] == {"the compiler gave up"}
