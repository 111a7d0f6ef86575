"""The steps of composing a scene, on pictures whose answer is known."""

import numpy as np
import pytest

from lumen_lab.datasets import compose, thin
from tests.datasets.pictures import cut_out, grainy

SIZE = (60, 80)


def test_placing_at_scale_one_keeps_the_pixels():
    pixels = cut_out(1, (20, 24), 9)
    rgb, alpha = compose.place_cutout(pixels, size=SIZE, centre_px=(30, 40), scale=1.0)
    inside = np.zeros(SIZE)
    inside[20:40, 28:52] = pixels[..., 3] / 255
    assert np.allclose(alpha, inside, atol=1e-6)
    solid = pixels[..., 3] == 255
    assert np.allclose(rgb[20:40, 28:52][solid], pixels[..., :3][solid] / 255, atol=1e-6)


def test_a_quarter_turn_turns_clockwise():
    bar = np.full((4, 40, 4), 255, np.uint8)
    bar[:, :20, :3] = 0
    rgb, alpha = compose.place_cutout(bar, size=(61, 61), centre_px=(30.5, 30.5), scale=1.0, angle_deg=90)
    assert alpha[12:48, 30].min() > 0.9
    assert alpha[30, :25].max() == 0
    assert rgb[15, 30].max() < 0.1
    assert rgb[45, 30].min() > 0.9


def test_scaling_scales_the_area_and_the_frame_cuts_off():
    pixels = cut_out(1, (60, 60), 25)
    _, whole = compose.place_cutout(pixels, size=(200, 200), centre_px=(100, 100), scale=2.0)
    _, cut = compose.place_cutout(pixels, size=(200, 200), centre_px=(200, 100), scale=2.0)
    assert whole.sum() == pytest.approx(4 * np.pi * 25**2, rel=0.02)
    assert cut.sum() == pytest.approx(whole.sum() / 2, rel=0.02)


def test_hidden_colours_do_not_bleed():
    pixels = np.zeros((40, 40, 4), np.uint8)
    pixels[..., 1] = 255
    pixels[10:30, 10:30] = (255, 0, 0, 255)
    rgb, alpha = compose.place_cutout(pixels, size=SIZE, centre_px=(30, 40), scale=0.77, angle_deg=31)
    assert rgb[alpha > 0.1][:, 1].max() < 0.05


def test_the_colour_of_one_hue_is_the_same_at_every_alpha():
    pixels = cut_out(1, (40, 40), 15)
    pixels[..., :3] = (128, 64, 200)
    rgb, alpha = compose.place_cutout(pixels, size=SIZE, centre_px=(30, 40), scale=1.3, angle_deg=20)
    edge = (alpha > 0.2) & (alpha < 0.8)
    assert edge.sum() > 20
    assert np.abs(rgb[edge] * 255 - (128, 64, 200)).max() < 8


def test_the_window_holds_all_of_a_placed_cutout():
    pixels, rng = np.full((20, 50, 4), 255, np.uint8), np.random.default_rng(0)
    for _ in range(20):
        centre, angle_deg = rng.uniform(0, 1, 2) * SIZE, rng.uniform(-180, 180)
        where = {"size": SIZE, "centre_px": tuple(centre), "scale": rng.uniform(0.3, 1.5)}
        _, alpha = compose.place_cutout(pixels, angle_deg=angle_deg, shear=0.1, stretch=1.1, **where)
        window = compose.cutout_window(pixels, **where)
        assert alpha.sum() == pytest.approx(alpha[window].sum())
    assert compose.cutout_window(pixels, size=SIZE, centre_px=(-200, 10), scale=1.0) is None


def test_composite_and_over_are_the_alpha_equations():
    front, back = (grainy(SIZE, k).astype(np.float32) / 255 for k in (1, 2))
    alpha = np.linspace(0, 1, SIZE[1], dtype=np.float32)[None].repeat(SIZE[0], 0)
    image = compose.composite(front, alpha, back)
    assert np.allclose(image, alpha[..., None] * front + (1 - alpha[..., None]) * back, atol=1e-6)
    assert compose.over(np.float32(0.5), np.float32(0.5)) == 0.75


def test_harmonising_fully_reaches_the_mean_of_the_ground():
    rgb = grainy(SIZE, 1, 100, 140).astype(np.float32) / 255
    ground = grainy(SIZE, 2, 60, 100).astype(np.float32) / 255
    alpha = np.ones(SIZE, np.float32)
    moved = compose.harmonise(rgb, alpha, ground, strength=1.0)
    kept = compose.harmonise(rgb, alpha, ground, strength=0.0)
    assert np.allclose(moved.mean((0, 1)), ground.mean((0, 1)), atol=0.01)
    assert np.allclose(kept, rgb, atol=1e-5)


def test_a_blurred_layer_keeps_its_matte_exact():
    """Blurring a layer and its alpha together equals blurring its premultiplied picture over black."""
    rgb = grainy(SIZE, 1).astype(np.float32) / 255
    alpha = np.zeros(SIZE, np.float32)
    alpha[20:40, 30:50] = 1
    soft_rgb, soft = compose.blur_layer(rgb, alpha, 2.0)
    shown = soft_rgb * soft[..., None]
    expected = compose.blur(rgb * alpha[..., None], 2.0)
    assert np.abs(shown - expected).max() < 0.01
    assert soft.sum() == pytest.approx(alpha.sum(), rel=0.02)
    assert ((soft > 0.05) & (soft < 0.95)).sum() > 150


def test_motion_blur_spreads_along_its_angle_only():
    rgb, alpha = np.ones((*SIZE, 3), np.float32), np.zeros(SIZE, np.float32)
    alpha[20:40, 30:50] = 1
    _, moved = compose.motion_blur(rgb, alpha, length_px=8, angle_deg=0)
    assert moved[:20].max() == 0
    assert moved[40:].max() == 0
    assert moved[30, 26] > 0
    assert moved[30, 34] == pytest.approx(1)
    assert moved.sum() == pytest.approx(alpha.sum(), rel=0.01)


def test_wide_blur_keeps_the_mean_and_widens():
    impulse = np.zeros((101, 101), np.float32)
    impulse[50, 50] = 1
    rows = np.arange(101) - 50
    for sigma_px in (1.0, 2.0, 4.0, 8.0):
        spread = compose.blur(impulse, sigma_px)
        assert spread.sum() == pytest.approx(1, abs=1e-3)
        assert np.sqrt((spread.sum(1) * rows**2).sum()) == pytest.approx(sigma_px, rel=0.15)


def test_a_shadow_darkens_only_where_it_falls():
    ground, alpha = np.ones((*SIZE, 3), np.float32), np.zeros(SIZE, np.float32)
    alpha[10:20, 10:20] = 1
    shadowed = compose.cast_shadow(ground, alpha, offset_px=(15, 20), sigma_px=1.0, strength=0.5)
    assert shadowed[30, 35, 0] == pytest.approx(0.5, abs=0.01)
    assert shadowed[5, 60, 0] == 1


def test_the_seam_is_softened_only_at_the_edge():
    rng = np.random.default_rng(0)
    image = rng.random((*SIZE, 3), dtype=np.float32)
    alpha = np.zeros(SIZE, np.float32)
    alpha[:, 40:] = 1
    alpha[:, 39] = 0.5
    softened = compose.blur_seam(image, alpha, sigma_px=1.0)
    changed = np.abs(softened - image).max((0, 2))
    assert changed[39] > 0.1
    assert changed[:30].max() == 0
    assert changed[50:].max() == 0


def test_noise_has_the_asked_variance_and_jpeg_loses_little_at_high_quality():
    image = np.full((200, 200, 3), 0.5, np.float32)
    noisy = compose.sensor_noise(image, rng=np.random.default_rng(0), shot=0.04, read=0.03)
    assert np.std(noisy - image) == pytest.approx(np.sqrt(0.04**2 * 0.5 + 0.03**2), rel=0.05)
    smooth = compose.blur(grainy(SIZE, 3).astype(np.float32) / 255, 2.0)
    good, bad = (np.abs(compose.jpeg_round_trip(smooth, quality=q) - smooth).mean() for q in (95, 20))
    assert good < 0.01 < bad


def test_the_camera_keeps_values_in_range_and_never_moves_the_picture():
    smooth = compose.blur(grainy((96, 96), 3).astype(np.float32) / 255, 4.0)
    for seed in range(12):
        seen = compose.camera(smooth, np.zeros((96, 96), np.float32), rng=np.random.default_rng(seed))
        assert seen.min() >= 0
        assert seen.max() <= 1
        before, after = (a.mean(-1).ravel() for a in (smooth, seen))
        assert np.corrcoef(before, after)[0, 1] > 0.7


def test_a_colour_turn_keeps_greys():
    grey = np.linspace(0, 1, 30, dtype=np.float32)[:, None, None].repeat(3, 2)
    red = np.zeros((1, 1, 3), np.float32) + np.array([0.6, 0.4, 0.4], np.float32)
    assert np.allclose(compose.mix_channels(grey, rng=np.random.default_rng(1)), grey, atol=1e-5)
    turned = [compose.mix_channels(red, rng=np.random.default_rng(s)) for s in range(5)]
    assert np.ptp(np.array(turned), axis=0).max() > 0.1


@pytest.mark.parametrize("kind", list(thin.STRUCTURES))
def test_thin_structures_are_thin_at_several_sizes(kind):
    for size, seed in (((96, 96), 0), ((96, 160), 1), ((192, 192), 2)):
        alpha = thin.draw_thin(kind, size=size, rng=np.random.default_rng(seed))
        assert alpha.shape == size
        assert 0.004 < alpha.mean() < 0.45
        assert alpha.max() == 1
        assert ((alpha > 0.02) & (alpha < 0.98)).sum() > 20


def test_the_drawn_alpha_is_the_covered_share(monkeypatch):
    def bar(draw, fine, rng):
        draw.rectangle([8, 6, 21, 17], fill=255)  # x 8…21, y 6…17 on the canvas four times finer

    monkeypatch.setitem(thin.STRUCTURES, "bar", bar)
    alpha = thin.draw_thin("bar", size=(8, 8), rng=np.random.default_rng(0))
    rows, columns = np.array([0, 0.5, 1, 1, 0.5, 0, 0, 0]), np.array([0, 0, 1, 1, 1, 0.5, 0, 0])
    assert np.allclose(alpha, np.outer(rows, columns), atol=1 / 255)


def test_shapes_vary_and_some_have_holes():
    alphas = [thin.draw_shape(size=(64, 64), rng=np.random.default_rng(seed)) for seed in range(20)]
    areas = np.array([alpha.mean() for alpha in alphas])
    assert areas.min() > 0.01
    assert np.ptp(areas) > 0.2
