"""The widget without a browser: its traits, what it sends, and the static picture that stands in for it."""

import base64
import io
import subprocess
import sys

import nbconvert
import nbformat
import numpy as np
import pytest
import traitlets
from PIL import Image as PILImage

from lumen_lab import images
from lumen_lab.errors import ImageError
from lumen_lab.widgets import MaskCompare, mask_compare

HEIGHT, WIDTH = 60, 300
IMAGE = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
FLOAT = np.linspace(0, 1, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
MASKS = {"float": FLOAT, "NPU": 0.1 + 0.8 * FLOAT, "empty": np.zeros_like(FLOAT)}


@pytest.fixture
def widget():
    return MaskCompare(IMAGE, MASKS)


def decoded(png):
    return np.asarray(PILImage.open(io.BytesIO(png)))


def picture(widget):
    """The rows of the static picture above its caption, without the three columns of the line."""
    edge = int(widget.position * WIDTH + 0.5)
    pixels = decoded(widget.static_png())[:HEIGHT]
    return pixels[:, : max(0, edge - 1)], pixels[:, edge + 2 :], edge


def expected(widget, mask):
    rounded = np.rint(MASKS[mask] * 255) / 255
    painters = {
        "overlay": images.paint_overlay,
        "cut-out": images.paint_cutout,
        "masks": lambda image, mask: np.dstack([np.rint(mask * 255).astype(np.uint8)] * 3),
    }
    return painters[widget.mode](IMAGE, rounded.astype(np.float32))


def test_it_starts_with_the_first_two_masks(widget):
    assert (widget.left, widget.right, widget.mode, widget.position) == ("float", "NPU", "overlay", 0.5)


def test_it_sends_png_bytes_of_the_photograph_and_each_mask(widget):
    state = widget.get_state()
    np.testing.assert_array_equal(decoded(state["photograph"]), IMAGE)
    assert list(state["masks"]) == ["float", "NPU", "empty"]
    assert all(isinstance(value, bytes) for value in (state["photograph"], *state["masks"].values()))
    np.testing.assert_array_equal(decoded(state["masks"]["NPU"]), np.rint((0.1 + 0.8 * FLOAT) * 255))


@pytest.mark.parametrize("mode", ["overlay", "masks", "cut-out"])
@pytest.mark.parametrize("position", [0.0, 0.25, 1.0])
def test_static_picture_is_left_before_the_line_and_right_after_it(widget, mode, position):
    widget.mode, widget.position, widget.left, widget.right = mode, position, "NPU", "empty"
    before, after, edge = picture(widget)
    np.testing.assert_array_equal(before, expected(widget, "NPU")[:, : before.shape[1]])
    np.testing.assert_array_equal(after, expected(widget, "empty")[:, edge + 2 :])


def test_static_difference_is_the_photograph_against_right_minus_left(widget):
    widget.mode = "difference"
    before, after, edge = picture(widget)
    np.testing.assert_array_equal(before, IMAGE[:, : edge - 1])
    steps = np.rint(MASKS["NPU"] * 255) - np.rint(FLOAT * 255)
    # The largest difference, a tenth, has full colour.
    wanted = images.paint_difference(steps, limit=np.abs(steps).max())[:, edge + 2 :]
    assert np.abs(after.astype(int) - wanted).max() <= 1
    # The right mask is higher at the top and lower at the bottom: red above, blue below.
    assert after[0, :, 0].mean() > after[0, :, 2].mean() and after[-1, :, 0].mean() < after[-1, :, 2].mean()


def test_equal_masks_have_a_white_difference():
    widget = MaskCompare(IMAGE, {"a": FLOAT, "b": FLOAT}, mode="difference", position=0)
    assert (picture(widget)[1] == 255).all()


def test_the_line_is_drawn_where_the_halves_meet(widget):
    widget.mode, widget.position = "masks", 0.3985
    line = decoded(widget.static_png())[:HEIGHT, 119:122]
    assert (line[:, 1] == 255).all() and (line[:, [0, 2]] == 0).all()


@pytest.mark.parametrize("change", [{"left": "empty"}, {"right": "empty"}, {"mode": "masks"}, {"position": 0.7}])
def test_static_picture_follows_every_trait(widget, change):
    before = widget.static_png()
    assert widget.static_png() == before
    for name, value in change.items():
        setattr(widget, name, value)
    assert widget.static_png() != before


def test_the_caption_names_both_sides_and_takes_a_second_line_where_it_must():
    short = MaskCompare(IMAGE, {"a": FLOAT, "b": FLOAT})
    renamed = MaskCompare(IMAGE, {"a": FLOAT, "c": FLOAT})
    captions = [decoded(widget.static_png())[HEIGHT:] for widget in (short, renamed)]
    assert captions[0].shape[0] == mask_compare.CAPTION_PX
    left, right = np.array_split((captions[0] != captions[1]).any(axis=(0, 2)), 2)
    assert right.any() and not left.any()
    long = MaskCompare(IMAGE, {"float at 640": FLOAT, "INT8 after distillation, SM8850 (v81)": FLOAT})
    assert decoded(long.static_png()).shape[0] == HEIGHT + 2 * mask_compare.CAPTION_PX


@pytest.mark.parametrize("shape", [(1, 1), (3, 4000), (4000, 3)])
@pytest.mark.parametrize("mode", mask_compare.MODES)
def test_extreme_photographs(shape, mode):
    masks = {"a": np.zeros(shape), "b": np.ones(shape)}
    widget = MaskCompare(np.zeros((*shape, 3), np.uint8), masks, mode=mode)
    assert max(decoded(widget.photograph).shape) <= 1024
    assert decoded(widget.static_png()).shape[1] >= mask_compare.CAPTION_WIDTH_PX


def test_large_photographs_are_shown_smaller():
    widget = MaskCompare(IMAGE, MASKS, max_side_px=100)
    assert decoded(widget.photograph).shape == (20, 100, 3)
    np.testing.assert_array_equal(
        decoded(widget.masks["float"]), np.rint(images.resize_mask(FLOAT, size=(20, 100)) * 255)
    )


@pytest.mark.parametrize("name, value", [("left", "int8"), ("right", ""), ("mode", "heat"), ("position", 1.2)])
def test_states_that_are_none_are_refused(widget, name, value):
    before = getattr(widget, name)
    with pytest.raises(traitlets.TraitError, match=name):
        setattr(widget, name, value)
    assert getattr(widget, name) == before


def test_an_unknown_name_lists_the_known_ones(widget):
    with pytest.raises(traitlets.TraitError, match=r"\['float', 'NPU', 'empty'\]; found 'int8'"):
        widget.left = "int8"


def test_pictures_cannot_be_exchanged_under_the_widget(widget):
    for name, value in {"photograph": b"", "masks": {}, "paint": {}}.items():
        with pytest.raises(traitlets.TraitError):
            setattr(widget, name, value)


def test_arrays_that_do_not_fit():
    with pytest.raises(ImageError, match="two masks or more, found 1"):
        MaskCompare(IMAGE, {"float": FLOAT})
    with pytest.raises(ImageError, match="300 × 60 but its image is 60 × 300"):
        MaskCompare(IMAGE, {"float": FLOAT, "NPU": FLOAT.T})
    with pytest.raises(ImageError, match="take the sigmoid"):
        MaskCompare(IMAGE, {"float": FLOAT, "NPU": FLOAT - 4})


def test_the_mime_bundle_holds_widget_and_picture_of_the_same_state(widget):
    widget.position = 0.8
    data, _ = widget._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id
    assert base64.b64decode(data["image/png"]) == widget.static_png()
    assert data["text/plain"] == "MaskCompare: float | NPU, overlay, line at 80%"


@pytest.mark.parametrize("exporter", [nbconvert.HTMLExporter, nbconvert.MarkdownExporter])
def test_a_page_without_widget_state_shows_the_picture(widget, exporter):
    data, _ = widget._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data=data)
    cell = nbformat.v4.new_code_cell("compare", outputs=[output])
    page, resources = exporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert data["image/png"][:200] in page or widget.static_png() in resources["outputs"].values()


def test_widgets_need_no_torch():
    code = "import sys, lumen_lab.widgets; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_without_anywidget_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['anywidget'] = None\n"
        "from lumen_lab.errors import MissingDependencyError\n"
        "try: import lumen_lab.widgets\n"
        "except MissingDependencyError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs anywidget" in shown.stdout and "lumen-lab[notebooks]" in shown.stdout
