"""What happens to an image after it is loaded: the way into the network and back, and the paintings of a mask."""

import numpy as np
import pytest
from PIL import Image as PILImage
from torchvision import transforms

from lumen_lab import images
from lumen_lab.errors import ImageError


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


class TestNetworkDoors:
    @pytest.mark.parametrize("shape", [(300, 451), (40, 33), (64, 96)])
    def test_input_is_what_the_published_preprocessing_gives(self, shape):
        image = noise(*shape, 3)
        published = transforms.Compose(
            [
                transforms.Resize((64, 96)),
                transforms.ToTensor(),
                transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )
        expected = published(PILImage.fromarray(image)).numpy()[None]
        given = images.to_network_input(image, size=(64, 96))
        assert given.dtype == np.float32 and given.shape == (1, 3, 64, 96) and given.flags.c_contiguous
        np.testing.assert_allclose(given, expected, atol=1e-6)

    @pytest.mark.parametrize("shape", [(1, 1), (3, 4000), (4000, 3), (1023, 1023)])
    def test_any_size_goes_through_and_comes_back(self, shape, tmp_path):
        image = noise(*shape, 3)
        given = images.to_network_input(image, size=(128, 128))
        assert given.shape == (1, 3, 128, 128) and np.isfinite(given).all()
        mask = images.resize_mask(1 / (1 + np.exp(-given[0, 0])), size=image.shape[:2])
        assert mask.shape == shape and mask.dtype == np.float32
        assert images.load_mask(images.save_mask(mask, tmp_path / "mask.png")).shape == shape

    def test_shrinking_averages_instead_of_dropping_pixels(self):
        lines = np.zeros((256, 256), np.float32)
        lines[:, ::4] = 1
        shrunk = images.resize_mask(lines, size=(64, 64))
        assert np.abs(shrunk[4:-4, 4:-4] - 0.25).max() < 0.05

    def test_enlarging_keeps_the_frame(self):
        mask = np.zeros((32, 32), np.float32)
        mask[:16, :8] = 1
        large = images.resize_mask(mask, size=(320, 640))
        assert large[:150, :150].min() == 1 and large[170:].max() == 0 and large[:, 170:].max() == 0

    def test_same_size_is_left_alone(self):
        mask = np.linspace(0, 1, 54, dtype=np.float32).reshape(6, 9)
        np.testing.assert_array_equal(images.resize_mask(mask, size=(6, 9)), mask)

    def test_logits_and_stacks_are_refused(self):
        with pytest.raises(ImageError, match="take the sigmoid"):
            images.resize_mask(np.full((4, 4), -8.0), size=(8, 8))
        with pytest.raises(ImageError, match="one map"):
            images.resize_mask(np.zeros((1, 1, 4, 4)), size=(8, 8))

    @pytest.mark.parametrize("size", [(0, 8), (8.5, 8), (8, 8, 3)])
    def test_sizes_that_are_none(self, size):
        with pytest.raises(ImageError, match=r"A size is \(H, W\)"):
            images.to_network_input(noise(4, 4, 3), size=size)

    @pytest.mark.parametrize("image", [noise(4, 4), noise(4, 4, 4), np.zeros((4, 4, 3), np.float32), "photo.png"])
    def test_arrays_that_are_no_image(self, image):
        with pytest.raises(ImageError, match="An image is uint8"):
            images.to_network_input(image, size=(8, 8))


class TestPainting:
    def test_overlay_tints_the_foreground_only(self):
        image, mask = noise(4, 6, 3), np.zeros((4, 6), np.float32)
        mask[1, 2] = 1
        painted = images.paint_overlay(image, mask, color=(0, 100, 200), opacity=0.5)
        expected = image.copy()
        expected[1, 2] = np.rint((image[1, 2] + np.array([0, 100, 200])) / 2)
        np.testing.assert_array_equal(painted, expected)

    def test_cutout_shows_the_image_where_the_mask_is_and_squares_elsewhere(self):
        image, mask = noise(16, 16, 3), np.zeros((16, 16), np.float32)
        mask[:, 8:] = 1
        painted = images.paint_cutout(image, mask, square_px=4)
        np.testing.assert_array_equal(painted[:, 8:], image[:, 8:])
        assert painted[0, 0].tolist() == painted[4, 4].tolist() == [236] * 3
        assert painted[0, 4].tolist() == painted[4, 0].tolist() == [192] * 3

    def test_difference_is_white_at_zero_and_even_on_both_sides(self):
        painted = images.paint_difference(np.array([[-0.2, -0.1, 0.0, 0.1, 0.2, 5.0]]), limit=0.2)[0].tolist()
        assert painted[2] == [255, 255, 255]
        assert painted[0] == list(images.LOWER_COLOR)
        assert painted[4] == painted[5] == list(images.HIGHER_COLOR)
        assert painted[1] == [144, 178, 214]
