"""Each loss against a value worked out by hand, and its gradient against finite differences."""

import math

import pytest
import torch
from torch.nn import functional as F

from lumen_lab.distillation.losses import (
    LossWeights,
    gradient_target,
    mask_loss,
    soft_iou_loss,
    ssim_loss,
    supervised_loss,
)
from lumen_lab.network.decoder import SideOutputs, resize

LN2 = math.log(2)
EVEN = LossWeights(bce=1.0, iou=1.0, ssim=1.0, mae=1.0, gradient=1.0)


def maps(*values, size=(2, 2)):
    """(N, 1, H, W) from N lists of pixels."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, *size)


def drawn(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_soft_iou_of_known_maps():
    half, two_of_four = maps([0.5] * 4), maps([1, 1, 0, 0])
    assert soft_iou_loss(half, two_of_four).item() == pytest.approx(1 - (1 + 1) / (3 + 1))
    assert soft_iou_loss(two_of_four, two_of_four).item() == 0
    assert soft_iou_loss(1 - two_of_four, two_of_four).item() == pytest.approx(1 - 1 / 5)


def test_soft_iou_is_the_mean_over_images_not_over_the_pixels_of_all():
    probability, mask = maps([1, 1, 1, 1], [1, 0, 0, 0]), maps([1, 1, 1, 1], [0, 0, 0, 0])
    assert soft_iou_loss(probability, mask).item() == pytest.approx((0 + (1 - 1 / 2)) / 2)


def test_nothing_found_where_nothing_is_costs_nothing():
    empty = torch.zeros(2, 1, 8, 8)
    assert soft_iou_loss(empty, empty).item() == 0
    assert ssim_loss(empty, empty).item() == pytest.approx(0, abs=1e-6)


def test_ssim_of_equal_masks_is_zero():
    mask = (drawn(2, 1, 24, 32) > 0.5).double()
    assert ssim_loss(mask, mask).item() == pytest.approx(0, abs=1e-12)


def test_ssim_with_a_window_of_one_pixel_is_the_luminance_term():
    found = ssim_loss(maps([0.5, 0.5, 0, 1]), maps([1, 1, 1, 0]), window=1).item()
    luminance = [(1 + 1e-4) / (1.25 + 1e-4)] * 2 + [1e-4 / (1 + 1e-4)] * 2
    assert found == pytest.approx(1 - sum(luminance) / 4, abs=1e-12)


def test_ssim_of_one_pixel_weighs_the_window_as_a_gaussian():
    """On a 1×1 map a window of three sees its centre only; the weight of the centre is 1 / (1 + 2·exp(−1/2σ²))²."""
    sigma = 0.8
    w = (1 + 2 * math.exp(-1 / (2 * sigma**2))) ** -2
    found = ssim_loss(maps([0.5], size=(1, 1)), maps([1], size=(1, 1)), window=3, sigma=sigma).item()
    mean_p, mean_m = 0.5 * w, w
    var_p, var_m, covariance = 0.25 * w - mean_p**2, w - mean_m**2, 0.5 * w - mean_p * mean_m
    luminance = (2 * mean_p * mean_m + 1e-4) / (mean_p**2 + mean_m**2 + 1e-4)
    assert found == pytest.approx(1 - luminance * (2 * covariance + 9e-4) / (var_p + var_m + 9e-4), abs=1e-12)


def test_ssim_sees_a_shifted_edge_that_leaves_the_mean_error_small():
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 16:] = 1
    assert ssim_loss(mask.roll(1, 3), mask).item() > 2 * (mask.roll(1, 3) - mask).abs().mean().item()


def test_the_terms_of_one_side_output_carry_their_weights():
    weights = LossWeights(bce=2.0, iou=3.0, ssim=0.0, mae=5.0)
    terms = mask_loss(maps([0.0] * 4), maps([1, 1, 0, 0]), weights)
    assert terms["bce"].item() == pytest.approx(2 * LN2)
    assert terms["iou"].item() == pytest.approx(3 * 0.5)
    assert terms["ssim"].item() == 0
    assert terms["mae"].item() == pytest.approx(5 * 0.5)
    unequal = mask_loss(maps([math.log(3)] * 4), maps([1, 0, 0, 0]), EVEN)
    assert unequal["bce"].item() == pytest.approx((math.log(4 / 3) + 3 * math.log(4)) / 4)
    assert unequal["mae"].item() == pytest.approx((0.25 + 3 * 0.75) / 4)


@pytest.mark.parametrize("loss", [soft_iou_loss, ssim_loss])
def test_the_gradient_of_a_loss_is_that_of_finite_differences(loss):
    probability = (0.1 + 0.8 * drawn(2, 1, 6, 7)).requires_grad_()
    mask = drawn(2, 1, 6, 7, seed=1).round()
    assert torch.autograd.gradcheck(lambda p: loss(p, mask), (probability,))


@pytest.mark.parametrize("term", ["bce", "iou", "ssim", "mae"])
def test_the_gradient_on_logits_is_that_of_finite_differences(term):
    logits = (4 * drawn(2, 1, 5, 6) - 2).requires_grad_()
    mask = drawn(2, 1, 5, 6, seed=1).round()
    assert torch.autograd.gradcheck(lambda x: mask_loss(x, mask, EVEN)[term], (logits,))


def test_edges_of_a_step_have_the_values_of_the_laplacian():
    """Across a step from 0 to 1, a 5×5 window holds 10 (or 5) pixels of the other side: 10/24 and 5/24."""
    image = torch.zeros(1, 3, 16, 20, dtype=torch.float64)
    image[..., 10:] = 1
    target = gradient_target(image, torch.ones(1, 1, 16, 20, dtype=torch.float64))
    assert target.shape == (1, 1, 16, 20)
    expected = torch.zeros(20, dtype=torch.float64)
    expected[8:12] = torch.tensor([5, 10, 10, 5]) / 24
    torch.testing.assert_close(target, expected.expand(1, 1, 16, 20))


def test_edges_far_from_the_object_do_not_count():
    image, mask = drawn(2, 3, 40, 48), torch.zeros(2, 1, 40, 48, dtype=torch.float64)
    mask[..., 10:20, 12:24] = 1
    target = gradient_target(image, mask)
    near = torch.zeros_like(mask, dtype=torch.bool)
    near[..., 10 - 4 : 20 + 4, 12 - 4 : 24 + 4] = True
    assert not target[~near].any()
    assert (target[near] > 0).float().mean() > 0.99
    assert not gradient_target(image, torch.zeros_like(mask)).any()


def test_edges_lie_between_zero_and_one_for_normalised_images():
    image = 6 * drawn(2, 3, 24, 32) - 3
    target = gradient_target(image, torch.ones(2, 1, 24, 32, dtype=torch.float64))
    assert 0 <= target.min() < 0.1
    assert target.max() == 1


def side_outputs(make):
    """Four mask maps, coarse to fine, and three gradient maps for an image of 64×96."""
    sizes = [(2, 3), (4, 6), (8, 12)]
    return SideOutputs(tuple(make(2, 1, *s) for s in [*sizes, (64, 96)]), tuple(make(2, 1, *s) for s in sizes))


def test_every_side_output_and_the_gradient_heads_are_counted():
    mask = torch.zeros(2, 1, 64, 96)
    mask[..., :48] = 1
    terms = supervised_loss(side_outputs(torch.zeros), torch.rand(2, 3, 64, 96), mask, EVEN)
    pixels = 64 * 96
    assert set(terms) == {"bce", "iou", "ssim", "mae", "gradient"}
    assert terms["bce"].item() == pytest.approx(4 * LN2, rel=1e-5)
    assert terms["mae"].item() == pytest.approx(4 * 0.5, rel=1e-5)
    assert terms["iou"].item() == pytest.approx(4 * (1 - (pixels / 4 + 1) / (pixels * 3 / 4 + 1)), rel=1e-5)
    assert terms["gradient"].item() == pytest.approx(LN2, rel=1e-5)


def test_side_outputs_are_summed_at_the_size_of_the_mask():
    generator = torch.Generator().manual_seed(0)
    outputs = side_outputs(lambda *shape: torch.randn(shape, generator=generator).requires_grad_())
    image, mask = torch.rand(2, 3, 64, 96), drawn(2, 1, 64, 96).round().float()
    weights = LossWeights(gradient=0.25)
    terms = supervised_loss(outputs, image, mask, weights)
    single = [mask_loss(resize(logits, (64, 96)), mask, weights) for logits in outputs.masks]
    for name in single[0]:
        torch.testing.assert_close(terms[name], sum(one[name] for one in single))
    target = gradient_target(image, mask)
    edges = [
        F.binary_cross_entropy_with_logits(logits, F.adaptive_max_pool2d(target, logits.shape[-2:]))
        for logits in outputs.gradients
    ]
    torch.testing.assert_close(terms["gradient"], 0.25 * sum(edges) / 3)
    sum(terms.values()).backward()
    assert all(logits.grad.abs().sum() > 0 for logits in (*outputs.masks, *outputs.gradients))
