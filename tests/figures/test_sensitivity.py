"""The figure of sensitivities: the worst both ways, in order, with their figures."""

import pytest

from lumen_lab.errors import LumenError
from lumen_lab.figures.sensitivity import sensitivity_figure, short_name
from lumen_lab.quantization.sensitivity import Sensitivity, SensitivityRow


def part(name, position, alone_db, left_out_db):
    return SensitivityRow(name, "site", (name,), position, 10, alone_db, 0.1, left_out_db, 0.1)


ROWS = (
    part("a", 0.1, 40.0, 31.0),
    part("b", 0.3, 20.0, 30.5),
    part("c", 0.5, 60.0, 34.0),
    part("d", 0.9, None, 29.0),
)
RECORD = Sensitivity(ROWS, 30.0, 0.01, 6, "0" * 64)


def drawn(axes):
    return [text.get_text().strip() for text in axes.texts]


def test_the_worst_by_either_measure_are_shown_in_order_of_execution():
    alone, gained, along = sensitivity_figure(RECORD, count=1).axes
    assert [label.get_text() for label in alone.get_yticklabels()] == ["b", "c"]
    assert drawn(alone) == ["20.0", "60.0"] and drawn(gained) == ["+0.50", "+4.00"]
    assert len([line for line in along.lines if line.get_marker() == "o"]) == 3


def test_colours_say_by_which_measure():
    alone, gained, _ = sensitivity_figure(RECORD, count=1).axes
    colors = [[patch.get_facecolor() for patch in axes.patches] for axes in (alone, gained)]
    assert colors[0][0] != colors[0][1] and colors[1][0] != colors[1][1]


def test_a_part_without_error_and_one_that_loses_in_float_are_told():
    alone, gained, _ = sensitivity_figure(RECORD, count=4).axes
    assert drawn(alone)[-1] == "exact" and drawn(gained)[-1] == "-1.00"
    assert min(patch.get_x() + min(patch.get_width(), 0) for patch in gained.patches) == -1.0


def test_the_correlation_is_in_the_title_and_an_empty_record_is_refused():
    title = sensitivity_figure(RECORD).get_suptitle()
    assert title == f"4 parts, 6 pictures; rank correlation of the two {RECORD.rank_correlation():+.2f}"
    with pytest.raises(LumenError, match="was given no part"):
        sensitivity_figure(Sensitivity((), None, 0.0, 0, ""))


def test_a_long_name_keeps_its_end():
    assert short_name("") == "(network)" and short_name("a" * 60 + ".end").endswith(".end")
    assert len(short_name("a" * 60)) == 48
