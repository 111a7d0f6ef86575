"""Boundary, thin part and soft edge: on shapes for which they can be worked out."""

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy import ndimage

from lumen_lab.datasets.attributes import matte_attributes
from lumen_lab.metrics import boundary_band, score_mask, soft_edge_px, thin_part
from lumen_lab.metrics.edges import boundary_iou, thin_width_px
from tests.metrics.pictures import averaged, axes, body_and_rod, disc, mattes, predicted


def square(size, start, side, shift=0):
    mask = np.zeros(size, dtype=bool)
    mask[start : start + side, start + shift : start + side + shift] = True
    return mask


def polygon(points, size):
    picture = Image.new("1", size[::-1])
    ImageDraw.Draw(picture).polygon([tuple(point) for point in points], fill=1)
    return np.array(picture)


def rectangle(angle, side):
    """A rectangle of 0.6 × 0.4 of a frame of ``side`` pixels, turned."""
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    corners = np.array([(-0.3, -0.2), (0.3, -0.2), (0.3, 0.2), (-0.3, 0.2)])
    return polygon(corners @ turn.T * side + side / 2, (side, side))


class TestBoundary:
    def test_iou_of_a_shifted_square_worked_out_by_hand(self):
        """2 % of the diagonal of 100 × 100 is 3 px: rings of 40² − 34²; they share 40·39 less the 34·35 inside."""
        mask, found = square((100, 100), 30, 40), square((100, 100), 30, 40, shift=1)
        assert boundary_band(mask).sum() == 40**2 - 34**2
        shared = 40 * 39 - 34 * 35
        assert boundary_iou(found, mask) == shared / (2 * (40**2 - 34**2) - shared)

    @pytest.mark.parametrize("name", mattes())
    def test_band_is_what_a_distance_transform_gives(self, name):
        """A golden value by another way: king's moves to the nearest pixel outside, beyond the frame included."""
        mask = mattes()[name] > 0.5
        found = predicted(mattes()[name]) > 0.5
        bands = []
        for region in (mask, found):
            distance = ndimage.distance_transform_cdt(np.pad(region, 1), "chessboard")[1:-1, 1:-1]
            bands.append(region & (distance <= round(0.02 * np.hypot(*mask.shape))))
            assert np.array_equal(boundary_band(region), bands[-1])
        expected = (bands[0] & bands[1]).sum() / (bands[0] | bands[1]).sum()
        assert score_mask(found, mask).values["raw"]["boundary_iou"] == pytest.approx(expected)

    def test_the_band_grows_with_the_picture_and_has_at_least_a_pixel(self):
        assert boundary_band(square((10, 10), 2, 6)).sum() == 6**2 - 4**2
        assert boundary_band(square((1000, 1000), 200, 600)).sum() == 600**2 - 544**2

    def test_a_thick_object_hides_its_edge_from_iou(self):
        mask, found = square((200, 200), 30, 140), square((200, 200), 33, 134)
        values = score_mask(found, mask).values["raw"]
        assert values["iou"] > 0.9 and values["boundary_iou"] < 0.4


class TestThinPart:
    def test_a_rod_counts_and_the_body_does_not(self):
        body, rod = body_and_rod()
        thin = thin_part(body + rod > 0.5)
        assert (thin & (rod > 0.5)).sum() > 0.97 * (rod > 0.5).sum()
        assert (thin & (body > 0.5) & (rod == 0)).sum() == 0

    @pytest.mark.parametrize("side", [192, 512])
    @pytest.mark.parametrize("angle", np.linspace(0, np.pi / 2, 10))
    def test_corners_of_a_turned_rectangle_do_not_count(self, angle, side):
        mask = rectangle(angle, side)
        assert not thin_part(mask).any()

    def test_the_opening_alone_would_count_them(self):
        mask = rectangle(np.pi / 4, 192)
        width = thin_width_px(mask.shape)
        assert (mask & ~ndimage.binary_opening(mask, np.ones((width, width)))).sum() > 30

    @pytest.mark.parametrize("name", ["disc", "ring", "cut by the border", "two apart"])
    def test_thick_shapes_have_no_thin_part(self, name):
        matte = mattes()[name]
        assert not thin_part(matte > 0.5).any()
        assert score_mask(predicted(matte), matte).values["raw"]["thin_recall"] is None

    def test_a_needle_counts_and_an_equilateral_tip_does_not(self):
        def tip(degrees):
            half = 300 * np.tan(np.radians(degrees / 2))
            return polygon([(256, 80), (256 - half, 380), (256 + half, 380)], (512, 512))

        assert thin_part(tip(30)).any() and not thin_part(tip(60)).any()
        assert thin_part(tip(45)).any(), "under 53° along the frame"

    def test_a_diagonal_tip_has_to_be_sharper(self):
        def tip(degrees):
            ends = [np.radians(45 + turn * degrees / 2) for turn in (-1, 1)]
            return polygon([(60, 60), *((60 + 420 * np.cos(end), 60 + 420 * np.sin(end)) for end in ends)], (512, 512))

        near_the_tip = np.s_[:200, :200]  # the triangle's two other corners are sharp as well
        assert thin_part(tip(30))[near_the_tip].any() and not thin_part(tip(45))[near_the_tip].any()

    @pytest.mark.parametrize(("degrees", "widest"), [(0, 6), (15, 7), (30, 8), (45, 8)])
    def test_a_leaning_bar_may_be_wider(self, degrees, widest):
        """The square of 7 px needs more room in a bar that leans: 6 √2 from corner to corner on a diagonal."""
        y, x = np.mgrid[:192, :192] - 95.5
        turn = np.radians(degrees)
        along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
        for width, thin in ((widest, True), (widest + 1, False)):
            mask = (abs(along) < 60) & (-width / 2 <= across) & (across < width / 2)
            assert thin_width_px(mask.shape) == 7 and np.array_equal(thin_part(mask), mask & thin)

    @pytest.mark.parametrize(("side", "width"), [(192, 7), (1024, 33), (800, 27), (20, 3)])
    def test_the_square_is_that_of_the_attribute_thin(self, side, width):
        """Frames of lines one pixel thinner than the square have the attribute, lines as wide have not."""
        assert thin_width_px((side, side + 50)) == width
        for line_px, thin in ((width - 1, True), (width, False)):
            mask = np.zeros((side, side + 50))
            mask[: side // 2, 4 : 4 + line_px] = 1
            image = np.zeros((*mask.shape, 3))
            assert matte_attributes(mask, image)["thin"] == thin and thin_part(mask > 0).any() == thin

    @pytest.mark.parametrize(("length", "counts"), [(7, True), (6, False)])
    def test_the_smallest_is_a_line_as_long_as_the_square_is_wide(self, length, counts):
        mask = np.zeros((192, 192), dtype=bool)
        mask[50, 60 : 60 + length] = True
        assert thin_width_px(mask.shape) == 7 and thin_part(mask).any() == counts

    @pytest.mark.parametrize(("length", "counts"), [(7, False), (8, True)])
    def test_a_rod_has_to_stick_out_farther_than_that(self, length, counts):
        mask = square((192, 192), 60, 60)
        mask[90:92, 120 : 120 + length] = True
        assert thin_part(mask).sum() == (2 * length if counts else 0)

    def test_a_hook_beside_its_body_counts(self):
        """It is the way inside the mask that is measured, not how near the body lies."""
        mask = square((192, 192), 60, 60)
        mask[80:82, 120:125] = True
        mask[80:110, 123:125] = True
        assert thin_part(mask).sum() == 2 * 5 + 28 * 2

    def test_a_diagonal_line_of_single_pixels_is_one_piece(self):
        mask = np.zeros((96, 96), dtype=bool)
        mask[np.arange(20, 60), np.arange(20, 60)] = True
        assert thin_part(mask).sum() == 40

    def test_it_is_the_same_part_at_twice_the_size(self):
        body, rod = body_and_rod()
        mask = body + rod > 0.5
        small, large = thin_part(mask), thin_part(np.kron(mask, np.ones((2, 2), dtype=bool)))
        assert large.sum() / 4 == pytest.approx(small.sum(), rel=0.05)

    def test_recall_is_the_share_that_is_found(self):
        mask = np.zeros((192, 192), dtype=bool)
        mask[50:52, 40:140] = True
        found = mask.copy()
        found[:, 115:] = False
        assert score_mask(found, mask).values["raw"]["thin_recall"] == 0.75
        found[50, 115:] = True
        assert score_mask(found * 0.5, mask).values["raw"]["thin_recall"] == 0.875, "0.5 rounds to 128 of 255"


class TestSoftEdge:
    @staticmethod
    def ramp(width, degrees=0.0, size=(200, 200)):
        y, x = np.mgrid[: size[0], : size[1]] - 99.3
        turn = np.radians(degrees)
        return np.clip((x * np.cos(turn) + y * np.sin(turn)) / width + 0.5, 0, 1)

    @pytest.mark.parametrize("degrees", [0, 10, 26.6, 45, 90])
    @pytest.mark.parametrize("width", [2, 4, 8, 12, 18])
    def test_a_linear_ramp_has_its_own_width(self, width, degrees):
        assert soft_edge_px(self.ramp(width, degrees)) == pytest.approx(width, rel=0.03, abs=0.3)

    @pytest.mark.parametrize("name", mattes())
    def test_a_hard_edge_has_none(self, name):
        assert soft_edge_px((mattes()[name] > 0.5).astype(float)) == 0

    @pytest.mark.parametrize("degrees", [0, 15, 30, 45])
    def test_an_antialiased_edge_has_about_a_pixel(self, degrees):
        """On the mean over where it lies between the pixels; along an axis or a diagonal it lies alike everywhere."""
        y, x = axes((60, 60))
        turn = np.radians(degrees)
        places = 30.03 + np.arange(8) / 8
        mattes = [averaged((x - place) * np.cos(turn) + (y - place) * np.sin(turn) > 0) for place in places]
        widths = [soft_edge_px(matte) for matte in mattes]
        assert 0.6 < np.mean(widths) < 1.4 and max(widths) <= 3

    @pytest.mark.parametrize("inside", [1.0, 0.9, 0.8, 0.76])
    def test_a_dull_object_has_the_edge_of_a_bright_one(self, inside):
        """What an INT8 range that was cut makes of a disc with a one-pixel edge."""
        assert 0.6 < soft_edge_px(disc(64, 70, 40) * inside) < 1.4

    @pytest.mark.parametrize("haze", [0.05, 0.1, 0.2, 0.24])
    def test_a_haze_over_the_background_is_not_an_edge(self, haze):
        assert 0.6 < soft_edge_px(haze + (1 - haze) * disc(64, 70, 40)) < 1.4

    @pytest.mark.parametrize("grey", [0.35, 0.65])
    def test_grey_between_the_quarters_is(self, grey):
        matte = disc(64, 70, 40)
        assert soft_edge_px(np.maximum(matte, grey) if grey < 0.5 else matte * grey) > 5

    def test_it_grows_with_the_blur_of_a_step(self):
        """With t = erf(x/√2), 12 σ ∫ (1/4 − t²) dx while |t| < 1/2 is 2.62 σ; the pixels add up to half of one."""
        step = (self.ramp(1) > 0.5).astype(float)
        sigmas = np.array([1, 1.5, 2, 3, 4, 5])
        widths = [soft_edge_px(ndimage.gaussian_filter(step, sigma)) for sigma in sigmas]
        assert widths == pytest.approx(2.62 * sigmas, abs=0.5)

    def test_grey_far_from_the_contour_is_not_its_edge(self):
        ramp = self.ramp(6)
        ramp[:, :60] = 0.3
        assert soft_edge_px(ramp) == pytest.approx(6, rel=0.05)

    @pytest.mark.parametrize(("low", "high"), [(0.03, 0.97), (0, 0.8), (0.2, 1), (0.2, 0.8)])
    def test_a_ramp_between_two_plateaus_has_the_width_of_its_slope(self, low, high):
        ramp = low + (high - low) * self.ramp(6)
        assert soft_edge_px(ramp) == pytest.approx(6 / (high - low), abs=0.3)

    def test_nothing_wider_than_a_tenth_of_the_short_side_is_seen(self):
        assert soft_edge_px(self.ramp(150)) == 20
        faint = 0.5 + np.where(self.ramp(1) > 0.5, 1e-6, -1e-6)
        assert soft_edge_px(faint) == 20

    @pytest.mark.parametrize("value", [0.0, 0.3, 0.5, 0.7, 1.0])
    def test_without_a_contour_there_is_no_edge(self, value):
        assert soft_edge_px(np.full((20, 30), value)) is None

    def test_the_gap_says_which_is_softer(self):
        matte = self.ramp(4)
        for width, gap in ((8, 4), (2, -2), (4, 0)):
            values = score_mask(self.ramp(width), matte).values["raw"]
            assert values["soft_edge_px"] == pytest.approx(width, rel=0.03, abs=0.3)
            assert values["soft_edge_gap_px"] == pytest.approx(gap, abs=0.4)
