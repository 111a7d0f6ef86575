"""What the pictures of masks show, and that they show it without a display, a warning or a figure left open."""

import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
from PIL import Image as PILImage

from lumen_lab.errors import ImageError
from lumen_lab.figures import difference_map, mask_grid, mask_overlay
from lumen_lab.images import paint_overlay

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
MASK = np.zeros((40, 60), np.float32)
MASK[10:30, 15:45] = 1


def pixels_of(figure):
    return np.asarray(PILImage.open(io.BytesIO(figure._repr_png_())).convert("RGB"))


def test_overlay_shows_the_tint_and_the_outline():
    axes = mask_overlay(IMAGE, MASK, title="float").axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), paint_overlay(IMAGE, MASK))
    assert axes.get_title() == "float"
    outline = np.concatenate([path.vertices for path in axes.collections[-1].get_paths()])
    np.testing.assert_allclose(outline.min(axis=0), (14.5, 9.5), atol=0.01)
    np.testing.assert_allclose(outline.max(axis=0), (44.5, 29.5), atol=0.01)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4000), (4000, 3), (40, 60)])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_masks_without_an_edge_and_extreme_sizes_raise_no_warning(shape, value):
    image, mask = np.zeros((*shape, 3), np.uint8), np.full(shape, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pixels_of(mask_overlay(image, mask)).size
        assert pixels_of(difference_map(mask, mask)).size


@pytest.mark.parametrize("shape", [(1, 60), (60, 1)])
def test_an_edge_in_a_single_line_of_pixels(shape):
    mask = np.linspace(0, 1, 60).reshape(shape)
    assert pixels_of(mask_overlay(np.zeros((*shape, 3), np.uint8), mask)).size


def test_grid_has_the_photograph_and_two_panels_a_mask():
    axes = mask_grid(IMAGE, {"float": MASK, "NPU": MASK * 0.5}).axes
    assert [panel.get_title() for panel in axes] == ["photograph", "float", "", "NPU", ""]
    shown = [panel.images[0] for panel in axes]
    np.testing.assert_array_equal(shown[0].get_array(), IMAGE)
    np.testing.assert_array_equal(shown[3].get_array(), MASK * 0.5)
    np.testing.assert_array_equal(shown[4].get_array(), paint_overlay(IMAGE, MASK * 0.5))
    # A faint mask must look faint: the greys are never stretched.
    assert shown[3].get_clim() == (0, 1)


def test_grid_without_masks_or_with_one_that_does_not_fit():
    with pytest.raises(ImageError, match="no masks"):
        mask_grid(IMAGE, {})
    with pytest.raises(ImageError, match="60 × 40"):
        mask_grid(IMAGE, {"float": MASK.T})


def test_difference_is_signed_even_and_measured():
    actual = MASK.copy()
    actual[0, 0], actual[20, 20] = 0.1, 0.6
    axes = difference_map(MASK, actual, reference_name="float", actual_name="NPU").axes[0]
    shown = axes.images[0]
    assert shown.get_array()[0, 0] == pytest.approx(0.1) and shown.get_array()[20, 20] == pytest.approx(-0.4)
    assert shown.get_clim() == pytest.approx((-0.4, 0.4))
    assert axes.get_title() == "NPU − float\nmax 0.4, mean 0.000208"
    colors = [shown.to_rgba(value)[:3] for value in (-0.4, 0.0, 0.4)]
    assert colors[1] == (1, 1, 1) and colors[0][2] > colors[0][0] and colors[2][0] > colors[2][2]


def test_difference_at_a_given_limit_and_between_equal_masks():
    assert difference_map(MASK, MASK * 0.9, limit=0.5).axes[0].images[0].get_clim() == (-0.5, 0.5)
    same = difference_map(MASK, MASK).axes[0]
    assert same.get_title().endswith("identical") and same.images[0].get_clim() == pytest.approx((-1 / 255, 1 / 255))
    with pytest.raises(ImageError, match="60 × 40"):
        difference_map(MASK, MASK.T)


def test_difference_has_its_title_above_what_was_measured():
    axes = difference_map(MASK, MASK * 0.5, title="portrait").axes[0]
    assert axes.get_title() == "portrait\nactual − reference\nmax 0.5, mean 0.125"


def test_a_notebook_shows_the_figure_as_png():
    pixels = pixels_of(mask_overlay(IMAGE, MASK))
    assert pixels.shape[0] > 200 and pixels.std() > 10


def test_figures_need_no_pyplot_and_no_torch():
    code = (
        "import sys, numpy as np; from lumen_lab.figures import difference_map;"
        "difference_map(np.zeros((4, 4)), np.ones((4, 4)))._repr_png_();"
        "print([name for name in ('matplotlib.pyplot', 'torch', 'anywidget') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
