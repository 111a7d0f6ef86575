"""What the figures of heads, attention and offsets show, read back from them."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lumen_lab.distillation.head_readings import LEVELS
from lumen_lab.errors import ImageError, LumenError
from lumen_lab.figures.heads import arrow_figure, attention_figure, head_figure
from tests.widgets.heads import SIZE, readings

IMAGE = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def given():
    return readings()


@pytest.fixture(scope="module")
def sheet(given):
    return head_figure(given, pixel=(40, 50), title="two networks")


def panels(sheet):
    return [axes for part in sheet.subfigs for axes in part.axes]


def drawn(sheet, shown):
    """The panels whose picture is this array."""
    found = []
    for axes in panels(sheet) or sheet.axes:
        for image in axes.images:
            if np.array_equal(np.asarray(image.get_array()), shown):
                found.append(axes)
    return found


def check_drawing(sheet):
    """No warning, nothing outside of the sheet."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sheet._repr_png_().startswith(b"\x89PNG")
    renderer = FigureCanvasAgg(sheet).get_renderer()
    for axes in panels(sheet) or sheet.axes:
        box = axes.get_tightbbox(renderer)
        assert box.x0 >= -1 and box.x1 <= sheet.bbox.width + 1 and box.y0 >= -1 and box.y1 <= sheet.bbox.height + 1


# Heads


def test_every_map_of_every_stage_is_drawn_once(sheet, given):
    for maps in given.maps.values():
        for shown in maps.values():
            assert len(drawn(sheet, shown)) == 1
    for shown in (given.image, given.teacher.mask, given.student.mask, given.student.mask - given.teacher.mask):
        assert len(drawn(sheet, shown)) == 1


def test_both_networks_are_drawn_in_the_same_colours(sheet, given):
    for key, maps in given.maps.items():
        if key[1] != "components":
            limits = {drawn(sheet, shown)[0].images[0].get_clim() for shown in maps.values()}
            assert limits == {given.limits[key]}
    assert given.limits[4, "features"] == given.limits[4, "gated"]


def test_rows_are_named_and_panels_say_their_mean(sheet, given):
    labels = [axes.get_ylabel() for axes in panels(sheet) if axes.get_ylabel()]
    assert labels == [f"stage {level}\n{name}" for level in LEVELS for name in ("teacher", "student")]
    gate = drawn(sheet, given.student.stage(3).gate)[0]
    assert gate.get_xlabel() == f"6 × 8: {given.student.stage(3).gate.mean():.3g}"
    adds = drawn(sheet, given.maps[2, "adds"]["teacher"])[0]
    assert adds.get_xlabel() == f"{given.adds(2)['teacher']:.3g}"


def test_bars_are_what_each_stage_adds(sheet, given):
    (axes,) = [one for one in panels(sheet) if one.get_title().startswith("mask changes")]
    found = sorted(bar.get_width() for bar in axes.patches)
    assert found == pytest.approx(sorted(value for level in LEVELS for value in given.adds(level).values()))
    assert [text.get_text() for text in axes.get_legend().texts] == ["teacher", "student"]


def test_codes_are_those_of_the_student(sheet, given):
    labels = [axes.get_xlabel() for axes in panels(sheet) if axes.get_xlabel().endswith("used")]
    assert labels == [f"{20 * level} of 256 used" for level in LEVELS]
    (axes,) = [one for one in panels(sheet) if one.get_xlabel() == "60 of 256 used"]
    np.testing.assert_array_equal([bar.get_height() for bar in axes.patches], given.student.stage(3).codes["features"])


def test_the_pixel_is_marked_on_every_map(sheet, given):
    for maps in given.maps.values():
        for shown in maps.values():
            line = drawn(sheet, shown)[0].lines[0]
            assert (line.get_xdata()[0], line.get_ydata()[0]) == (50, 40)
    assert not any(axes.lines for axes in panels(head_figure(given)) if axes.images)


def test_a_teacher_alone_has_a_row_a_stage():
    alone = readings(student=False)
    sheet = head_figure(alone)
    labels = [axes.get_ylabel() for axes in panels(sheet) if axes.get_ylabel()]
    assert labels == [f"stage {level}\nteacher" for level in LEVELS]
    assert not [axes for axes in panels(sheet) if "codes" in axes.get_title() or "error" in axes.get_title()]
    check_drawing(sheet)


def test_heads_are_drawn_within_the_sheet(sheet):
    check_drawing(sheet)
    assert sheet.get_suptitle() == "two networks"


# Attention


class Attention:
    """With the fields of ``AttentionMaps``: 3 heads on 4 × 6, the token at (1, 2), its window the left half."""

    site, pass_, pixel, size, cell = "bb.layers.2.blocks.0", "half", (30, 50), SIZE, (1, 2)
    reach = np.zeros((4, 6), bool)
    reach[:, :3] = True
    maps = np.zeros((3, 4, 6))
    maps[0, 1, 2], maps[1, 0, 0], maps[2, 3, 1] = 1.0, 0.4, 0.9
    outside = np.array([0.0, 0.6, 0.001])


def test_each_head_has_a_panel_with_its_largest_and_its_padding():
    axes = attention_figure(IMAGE, Attention()).axes
    titles = [panel.get_title() for panel in axes]
    assert titles == [
        "bb.layers.2.blocks.0\nhalf pass",
        "head 1, most 1",
        "head 2, most 0.4\npadding 60%",
        "head 3, most 0.9",
    ]
    assert (axes[0].lines[0].get_xdata()[0], axes[0].lines[0].get_ydata()[0]) == (50, 30)


def test_heat_is_bright_where_the_head_looks_and_clear_out_of_reach():
    heat = np.asarray(attention_figure(IMAGE, Attention()).axes[2].images[1].get_array())
    assert (heat[..., 3] > 0).tolist() == Attention.reach.tolist()
    brightness = heat[..., :3].sum(-1) * (heat[..., 3] > 0)
    assert np.unravel_index(brightness.argmax(), brightness.shape) == (0, 0)


def test_the_token_is_framed_where_it_is():
    frame = attention_figure(IMAGE, Attention()).axes[1].patches[0]
    high, wide = SIZE[0] / 4, SIZE[1] / 6
    assert frame.get_xy() == pytest.approx((2 * wide - 0.5, 1 * high - 0.5))
    assert (frame.get_height(), frame.get_width()) == pytest.approx((high, wide))


def test_blocks_stand_below_each_other_and_many_heads_take_several_lines():
    many = Attention()
    many.maps, many.outside = np.ones((12, 4, 6)), np.zeros(12)
    sheet = attention_figure(IMAGE, [Attention(), many], title="both")
    titles = [panel.get_title() for panel in sheet.axes if panel.get_title().startswith("head")]
    assert [title.split(",")[0] for title in titles] == [
        *(f"head {n}" for n in (1, 2, 3)),
        *(f"head {n}" for n in range(1, 13)),
    ]
    check_drawing(sheet)
    with pytest.raises(LumenError, match="given no maps"):
        attention_figure(IMAGE, [])
    with pytest.raises(ImageError):
        attention_figure(IMAGE[..., 0], Attention())


# Offsets


@pytest.fixture
def offsets():
    from lumen_lab.distillation.offset_maps import OffsetMaps

    values = np.zeros((9, 2, 12, 16), np.float32)
    values[:, 0], values[:, 1] = 1.0, -2.0
    modulators = np.linspace(0, 2, 9, dtype=np.float32)[:, None, None] * np.ones((1, 12, 16), np.float32)
    return OffsetMaps("decoder.site", SIZE, values, modulators)


def test_arrows_are_the_mean_field_in_the_picture_s_pixels(offsets):
    axes = arrow_figure(IMAGE, offsets).axes[0]
    (quiver,) = axes.collections
    np.testing.assert_allclose(quiver.V, 8.0)  # a pixel of the map is 8 × 8 of the picture, rows go down
    np.testing.assert_allclose(quiver.U, -16.0)
    assert len(quiver.U) == 12 * 16 and quiver.scale == 1
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_taps_are_where_they_look_and_as_bright_as_they_weigh(offsets):
    panel = arrow_figure(IMAGE, offsets, pixels=[(40, 50)]).axes[1]
    (dots,) = panel.collections
    _, looked, modulators = offsets.samples_at((40, 50))
    np.testing.assert_allclose(dots.get_offsets(), looked[:, ::-1])
    np.testing.assert_allclose(dots.get_array(), modulators)
    assert dots.get_clim() == (0, 2) and np.diff(dots.get_sizes()).min() > 0


def test_looks_past_the_edge_are_within_the_panel(offsets):
    sheet = arrow_figure(IMAGE, offsets, pixels=[(0, 0), (95, 127)])
    for panel, pixel in zip(sheet.axes[1:3], [(0, 0), (95, 127)]):
        _, looked, _ = offsets.samples_at(pixel)
        assert panel.get_xlim()[0] < looked[:, 1].min() and panel.get_xlim()[1] > looked[:, 1].max()
        assert panel.get_ylim()[1] < looked[:, 0].min() and panel.get_ylim()[0] > looked[:, 0].max()
    check_drawing(sheet)


def test_figures_of_heads_need_no_torch():
    code = "import sys, lumen_lab.figures.heads; print([n for n in ('torch', 'matplotlib.pyplot') if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
