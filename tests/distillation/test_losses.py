"""Each loss against a value worked out by hand, and its gradient against finite differences."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from lumen_lab.distillation.losses import (
    LossWeights,
    gradient_target,
    mask_loss,
    soft_iou_loss,
    ssim_loss,
    supervised_loss,
)
from lumen_lab.network.decoder import SideOutputs

WEIGHTS = LossWeights()


def map_of(*rows):
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def drawn(height=8, width=10):
    """A mask with a soft edge and logits that half agree with it, for two images, in float64."""
    torch.manual_seed(0)
    column = torch.linspace(-3, 3, width, dtype=torch.float64).expand(2, 1, height, width)
    return column.sigmoid(), column + torch.randn(2, 1, height, width, dtype=torch.float64)


# Soft IoU


def test_soft_iou_by_hand():
    half, mask = map_of([0.5, 0.5], [0.5, 0.5]), map_of([1, 1], [0, 0])
    # overlap 1, union 2 + 2 − 1 = 3; one is added to both
    assert float(soft_iou_loss(half, mask)) == pytest.approx(1 - 2 / 4)


def test_soft_iou_is_the_mean_over_images():
    mask = torch.ones(2, 1, 2, 2, dtype=torch.float64)
    probability = mask.clone()
    probability[1] = 0  # the second image: overlap 0, union 4
    assert float(soft_iou_loss(probability, mask)) == pytest.approx((0 + (1 - 1 / 5)) / 2)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_soft_iou_of_a_perfect_mask_is_zero_empty_ones_included(value):
    mask = torch.full((3, 1, 4, 4), value)
    assert float(soft_iou_loss(mask, mask)) == 0


# SSIM


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 9, 7), torch.ones(1, 1, 3, 3), torch.rand(2, 1, 16, 12)])
def test_ssim_of_equal_masks_is_zero(mask):
    assert float(ssim_loss(mask, mask)) == 0


@pytest.mark.parametrize(("p", "m"), [(0.2, 0.9), (1.0, 0.0), (0.5, 0.25)])
def test_ssim_of_single_pixels_by_hand(p, m):
    """Around one pixel there are only zeros, so a blurred value is the value times the window's middle weight."""
    w = (1 / sum(math.exp(-(k**2) / 4.5) for k in range(-5, 6))) ** 2
    mean_p, mean_m = w * p, w * m
    var_p, var_m, covariance = w * p**2 - mean_p**2, w * m**2 - mean_m**2, w * p * m - mean_p * mean_m
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * mean_p * mean_m + c1) * (2 * covariance + c2) / ((mean_p**2 + mean_m**2 + c1) * (var_p + var_m + c2))
    assert float(ssim_loss(map_of([p]), map_of([m]))) == pytest.approx(1 - ssim, abs=1e-12)


def test_ssim_of_flat_masks_far_from_the_border_compares_their_means():
    p, m = torch.full((1, 1, 64, 64), 0.5).double(), torch.full((1, 1, 64, 64), 1.0).double()
    expected = (2 * 0.5 + 1e-4) / (0.25 + 1 + 1e-4)
    assert 1 - float(ssim_loss(p, m)) == pytest.approx(expected, abs=0.05)  # the border is 31 % of the pixels


def test_ssim_sees_a_blurred_edge_that_the_mean_error_hardly_sees():
    sharp = torch.zeros(1, 1, 32, 32)
    sharp[..., 16:] = 1
    blurred = torch.nn.functional.avg_pool2d(sharp, 9, 1, 4)
    noisy = (sharp - (blurred - sharp).abs().mean()).abs()
    assert float(ssim_loss(blurred, sharp)) > 0.05
    assert float(ssim_loss(sharp, sharp)) < float(ssim_loss(blurred, sharp)) != float(ssim_loss(noisy, sharp))


# Edges


def test_gradient_target_of_one_bright_pixel_by_hand():
    image = torch.zeros(1, 3, 9, 9, dtype=torch.float64)
    image[..., 4, 4] = 1
    target = gradient_target(image, torch.ones(1, 1, 9, 9, dtype=torch.float64))[0, 0]
    assert float(target[4, 4]) == pytest.approx(1.0)  # |−24 · 1| / 24
    assert float(target[2, 6]) == pytest.approx(1 / 24)
    assert float(target.sum()) == pytest.approx(1 + 24 / 24)  # the pixel and its 24 neighbours


def test_gradient_target_averages_colours_and_is_zero_on_a_flat_image():
    image = torch.zeros(1, 3, 9, 9, dtype=torch.float64)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.float64)
    image[:, 0, 4, 4] = 1
    assert float(gradient_target(image, mask)[0, 0, 4, 4]) == pytest.approx(1 / 3)
    assert float(gradient_target(torch.full_like(image, 0.7), mask).max()) == pytest.approx(0, abs=1e-12)


def test_gradient_target_is_zero_where_the_mask_is_far():
    torch.manual_seed(0)
    image = torch.rand(1, 3, 32, 32) * 5
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 16, 16] = 1
    target = gradient_target(image, mask)[0, 0]
    near = torch.zeros(32, 32, dtype=torch.bool)
    near[12:21, 12:21] = True  # four pixels around
    assert (target[~near] == 0).all()
    assert (target[near] > 0).all()
    assert float(target.max()) <= 1


# Sums


def test_terms_of_an_undecided_mask_by_hand():
    mask = map_of([1, 1], [0, 0])
    terms = mask_loss(torch.zeros_like(mask), mask, LossWeights(bce=2, iou=3, ssim=5, mae=7))
    assert float(terms["bce"]) == pytest.approx(2 * math.log(2))
    assert float(terms["iou"]) == pytest.approx(3 * 0.5)
    assert float(terms["mae"]) == pytest.approx(7 * 0.5)
    assert float(terms["ssim"]) == pytest.approx(5 * float(ssim_loss(torch.full_like(mask, 0.5), mask)))


def test_side_outputs_are_summed_and_gradient_heads_averaged():
    mask = drawn()[0].float()
    image = torch.zeros(2, 3, 8, 10)
    undecided = torch.zeros_like(mask)
    edges = tuple(torch.zeros(2, 1, h, h + 1) for h in (1, 2, 4))
    one = supervised_loss(SideOutputs((undecided,), edges), image, mask, WEIGHTS)
    four = supervised_loss(SideOutputs((undecided,) * 4, edges), image, mask, WEIGHTS)
    assert list(one) == ["bce", "iou", "ssim", "mae", "gradient"]
    for name in ("bce", "iou", "ssim", "mae"):
        assert float(four[name]) == pytest.approx(4 * float(one[name]))
    assert float(four["gradient"]) == pytest.approx(0.5 * math.log(2))


def test_a_small_side_output_is_brought_to_the_size_of_the_mask():
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., 4:] = 1
    coarse = torch.tensor([[-9.0, 9.0]] * 2)[None, None]
    image, edges = torch.zeros(1, 3, 8, 8), (torch.zeros(1, 1, 2, 2),)
    right = supervised_loss(SideOutputs((coarse,), edges), image, mask, WEIGHTS)
    wrong = supervised_loss(SideOutputs((-coarse,), edges), image, mask, WEIGHTS)
    assert float(sum(right.values())) < float(sum(wrong.values())) / 3


def test_a_perfect_prediction_costs_nothing_and_a_wrong_one_more_in_every_term():
    mask = (drawn()[0] > 0.5).double()
    sure = 60 * (2 * mask - 1)
    perfect, wrong = mask_loss(sure, mask, WEIGHTS), mask_loss(-sure, mask, WEIGHTS)
    assert max(float(value) for value in perfect.values()) < 1e-12
    assert all(float(wrong[name]) > 0.1 for name in perfect)


@pytest.mark.parametrize("loss", [soft_iou_loss, ssim_loss], ids=lambda loss: loss.__name__)
def test_gradients_of_probabilities(loss):
    mask, logits = drawn(4, 5)
    assert gradcheck(lambda p: loss(p, mask), logits.sigmoid().requires_grad_())


@pytest.mark.parametrize("term", ["bce", "iou", "ssim", "mae"])
def test_gradients_of_logits(term):
    mask, logits = drawn(4, 5)
    assert gradcheck(lambda x: mask_loss(x, mask, WEIGHTS)[term], logits.requires_grad_())


def test_gradients_reach_every_head():
    mask, _ = drawn()
    torch.manual_seed(0)
    image = torch.rand(2, 3, 8, 10)
    masks = tuple(torch.randn(2, 1, h, h, requires_grad=True) for h in (2, 4, 8))
    edges = tuple(torch.randn(2, 1, h, h, requires_grad=True) for h in (2, 4))
    sum(supervised_loss(SideOutputs(masks, edges), image, mask.float(), WEIGHTS).values()).backward()
    assert all(float(head.grad.abs().min()) > 0 for head in edges)
    assert all(float(head.grad.abs().max()) > 0 for head in masks)
