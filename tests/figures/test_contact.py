"""Contact sheets and curves: what is on them, read back from the figure."""

import numpy as np
import pytest

from lumen_lab.errors import ImageError
from lumen_lab.figures import contact_sheet, learning_curve, reliability_diagram


def tile(level):
    return {
        "scene": np.full((8, 12, 3), level, np.uint8),
        "matte": np.full((8, 12), level / 255, np.float32),
    }


def shown(figure):
    """The picture of each panel that has one, as arrays."""
    return [axes.images[0].get_array() for axes in figure.axes if axes.images]


def test_tiles_lie_in_reading_order_each_with_its_pictures():
    figure = contact_sheet([tile(10), tile(20), tile(30)], columns=2)
    pictures = shown(figure)
    assert [int(picture[0, 0, 0]) for picture in pictures] == [10, 10, 20, 20, 30, 30]
    assert all(picture.shape == (8, 12, 3) for picture in pictures)
    assert len(figure.axes) == 2 * 2 * 2  # two rows of two tiles of two pictures; the last tile's place is empty


def test_names_stand_above_each_column_and_captions_below_each_tile():
    figure = contact_sheet([tile(10), tile(20), tile(30)], columns=2, captions=["one", "two", "three"])
    assert [axes.get_title() for axes in figure.axes[:4]] == ["scene", "matte", "scene", "matte"]
    assert not any(axes.get_title() for axes in figure.axes[4:])
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["one", "two", "three"]


def test_a_sheet_without_tiles_or_with_unlike_ones_is_refused():
    with pytest.raises(ImageError, match="given no tiles"):
        contact_sheet([])
    with pytest.raises(ImageError, match="these differ"):
        contact_sheet([tile(1), {"scene": tile(1)["scene"]}])
    with pytest.raises(ImageError):
        contact_sheet([{"matte": np.full((4, 4), 1.5)}])


def test_reliability_leaves_out_empty_bins():
    rows = [
        {"pixels": 10, "confidence": 0.1, "foreground": 0.2},
        {"pixels": 0, "confidence": None, "foreground": None},
        {"pixels": 30, "confidence": 0.9, "foreground": 0.7},
    ]
    upper, lower = reliability_diagram(rows).axes
    assert upper.lines[1].get_xydata().tolist() == [[0.1, 0.2], [0.9, 0.7]]
    assert [bar.get_height() for bar in lower.patches] == [10, 30]


def test_learning_curve_has_a_panel_a_curve_and_its_marks():
    figure = learning_curve({"mae": [(0, 0.3), (500, 0.2)], "s": [(0, 0.5), (500, 0.7)]}, marks={250: "192 px"})
    first, second = figure.axes
    assert first.lines[0].get_xydata().tolist() == [[0, 0.3], [500, 0.2]]
    assert second.get_title() == "s"
    assert all(axes.texts[0].get_text().strip() == "192 px" for axes in (first, second))
