"""The figure of quality against bytes: unbeaten choices joined, beaten ones hollow."""

import pytest

from lumen_lab.errors import LumenError
from lumen_lab.figures.pareto import pareto_figure
from lumen_lab.quantization.precision import ParetoCurve, ParetoPoint

POINTS = (
    ParetoPoint(0, 1_000_000, 0, 30.0, 0.010),
    ParetoPoint(10, 1_500_000, 3, 29.0, 0.009),
    ParetoPoint(20, 2_000_000, 5, 35.0, 0.005),
)
CURVE = ParetoCurve(POINTS, 6)


def marks(axes):
    """(MB, quality, filled) of every mark."""
    lines = [line for line in axes.lines if line.get_marker() != "None"]
    return [(line.get_xdata()[0], line.get_ydata()[0], line.get_markerfacecolor() != "none") for line in lines]


def front(axes):
    (line,) = [line for line in axes.lines if line.get_marker() == "None"]
    return list(line.get_xdata())


def test_beaten_choices_are_hollow_and_not_on_the_line():
    ratios, masks = pareto_figure({"one": CURVE}).axes
    assert marks(ratios) == [(1.0, 30.0, True), (1.5, 29.0, False), (2.0, 35.0, True)]
    assert front(ratios) == [1.0, 2.0]
    assert [filled for *_, filled in marks(masks)] == [True, True, True] and front(masks) == [1.0, 1.5, 2.0]


def test_marks_say_how_many_operations_are_wide():
    ratios, masks = pareto_figure({"one": CURVE}).axes
    assert [text.get_text() for text in ratios.texts] == [text.get_text() for text in masks.texts] == ["0", "3", "5"]


def test_two_curves_have_a_legend_and_the_masks_axis_begins_at_0():
    ratios, masks = pareto_figure({"one": CURVE, "other": CURVE}).axes
    assert [text.get_text() for text in ratios.get_legend().get_texts()] == ["one", "other"]
    assert masks.get_ylim()[0] == 0


def test_nothing_to_draw_is_refused():
    for curves in ({}, {"one": ParetoCurve((), 0)}):
        with pytest.raises(LumenError, match="no curve, or one without a point"):
            pareto_figure(curves)
