"""Which stored levels are those of a mask, and which would read as a picture without foreground."""

import numpy as np
import pytest
from PIL import Image as PILImage

from lumen_lab import images
from lumen_lab.errors import ImageError


def save(levels, kind, path):
    PILImage.fromarray(np.array(levels, dtype=kind)).save(path)
    return path


@pytest.mark.parametrize(
    ("levels", "kind", "sentence"),
    [
        ((0, 1), np.uint8, "only the levels 0, 1 of 255, as class indices or a trimap do"),
        ((0, 2), np.uint8, "only the levels 0, 2 of 255.*whose foreground is 255"),
        ((1, 2, 3), np.uint8, "only the levels 1, 2, 3 of 255"),
        ((31,), np.uint8, "only the levels 31 of 255"),
        ((0, 1, 255), np.uint8, "0, 1, 255 of 255, as class indices do with 255 for a border to ignore"),
        ((1, 255), np.uint8, "a border to ignore; save it as 0 and 255 alone"),
        ((0, 1), np.uint16, "only the levels 0, 1 of 65535.*whose foreground is 65535"),
        ((0, 255), np.uint16, "nothing above 255 of 65535, as an 8-bit mask .* 16 bits; save it as 8 bits"),
        (tuple(range(256)), np.uint16, "nothing above 255 of 65535"),
    ],
)
def test_class_indices_are_no_mask(tmp_path, levels, kind, sentence):
    path = save([levels], kind, tmp_path / "indices.png")
    with pytest.raises(ImageError, match=f"indices.png holds .*{sentence}"):
        images.load_mask(path)
    full = np.float32(np.iinfo(kind).max)
    with pytest.warns(UserWarning, match=sentence):
        np.testing.assert_array_equal(images.load_mask(path, any_levels=True), np.float32([levels]) / full)


@pytest.mark.parametrize(
    ("levels", "kind"),
    [
        ((0,), np.uint8),
        ((255,), np.uint8),
        ((0, 255), np.uint8),
        ((0, 1, 2, 3, 4), np.uint8),
        ((0, 32), np.uint8),
        ((0, 128, 255), np.uint8),
        ((0, 1, 2, 3, 255), np.uint8),
        ((0, 65535), np.uint16),
        ((0, 10, 20, 30, 40), np.uint16),
        ((0, 256), np.uint16),
    ],
)
@pytest.mark.filterwarnings("error")
def test_empty_full_dim_and_soft_masks_are_taken(tmp_path, levels, kind):
    stored = np.array([levels], dtype=kind)
    mask = images.load_mask(save(stored, kind, tmp_path / "mask.png"))
    np.testing.assert_array_equal(mask, stored / np.float32(np.iinfo(kind).max))
