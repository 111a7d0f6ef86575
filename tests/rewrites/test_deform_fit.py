"""The least-squares start of a substitute: exact where an exact one exists, and never fooled by few pictures."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform_fit import (
    POSITIONS,
    NormalEquations,
    fit_modulated_convs,
    fit_plain_convs,
    fit_separable_convs,
)
from lumen_lab.rewrites.deform_substitutes import mean_kernel, rank_one


def network(kernel=3, *, modulated=False, offsets_px=0.0):
    torch.manual_seed(kernel)
    conv = DeformableConv2d(3, 4, kernel).double()
    if modulated:
        conv.modulator_conv.weight.data.normal_(std=0.3)
    if offsets_px:
        conv.offset_conv.weight.data.normal_(std=0.1)
        conv.offset_conv.bias.data.normal_(std=offsets_px)
    return nn.Sequential(conv).eval()


def pictures(count=8, size=(12, 15)):
    torch.manual_seed(0)
    return [F.avg_pool2d(torch.randn(1, 3, *size), 3, 1, 1).double() for _ in range(count)]


def missed(conv, fitted, images):
    """Share of the energy that a fitted kernel misses."""
    with torch.no_grad():
        pairs = [(conv(x), F.conv2d(x, fitted.weight, fitted.bias, padding=conv.padding)) for x in images]
    return sum(float((y - z).square().sum()) for y, z in pairs) / sum(float(y.square().sum()) for y, _ in pairs)


def test_a_plain_kernel_is_found_although_the_start_is_elsewhere():
    """All taps look one pixel to the right; only the left and middle columns weigh, so a 3×3 kernel holds it all."""
    model = network()
    conv = model[0]
    conv.offset_conv.bias.data[1::2] = 1.0
    conv.regular_conv.weight.data[..., 2] = 0
    (fitted,) = fit_plain_convs(model, pictures()).values()
    expected = torch.zeros_like(conv.regular_conv.weight)
    expected[..., 1:] = conv.regular_conv.weight.data[..., :2]
    assert fitted.weight.shape == (4, 3, 3, 3)
    assert fitted.held_out_db > 60
    assert torch.allclose(fitted.weight, expected, atol=1e-3)
    assert missed(conv, fitted, pictures(2)) < 1e-6


def test_a_fit_beats_the_start_on_pictures_it_has_not_seen():
    model = network(3, modulated=True, offsets_px=1.5)
    conv, images = model[0], pictures(24)
    (fitted,) = fit_plain_convs(model, images[:16]).values()
    start = type(fitted)(mean_kernel(conv).detach(), torch.zeros(4).double(), 0.0, None, fitted.substitute)
    assert missed(conv, fitted, images[16:]) < 0.5 * missed(conv, start, images[16:])
    assert 10 ** (-fitted.held_out_db / 10) == pytest.approx(missed(conv, fitted, images[16:]), rel=0.5)


def test_few_pictures_leave_the_kernel_near_its_start():
    """Four pixels of one picture say nothing about 27 · 7 unknowns."""
    model = network(7, offsets_px=0.5)
    (fitted,) = fit_plain_convs(model, pictures(1, size=(2, 2))).values()
    start = mean_kernel(model[0]).detach()
    assert float((fitted.weight - start).norm() / start.norm()) < 0.5
    assert (fitted.ridge, fitted.held_out_db) == (0.1, None)


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_modulated_kernel_is_the_regular_one_where_no_offset_is(kernel):
    model = network(kernel, modulated=True)
    (fitted,) = fit_modulated_convs(model, pictures()).values()
    assert torch.allclose(fitted.weight, model[0].regular_conv.weight, atol=1e-6)
    assert float(fitted.bias.abs().max()) < 1e-6


def test_a_separable_kernel_is_found_and_is_separable():
    model = network()
    conv = model[0]
    conv.regular_conv.weight.data = torch.randn(4, 3, 1, 1).double() * torch.randn(1, 3, 3, 3)
    (fitted,) = fit_separable_convs(model, pictures()).values()
    assert torch.allclose(fitted.weight, conv.regular_conv.weight, atol=1e-4)
    conv.regular_conv.weight.data += 0.3 * torch.randn(4, 3, 3, 3).double()
    (fitted,) = fit_separable_convs(model, pictures()).values()
    assert all(float(torch.linalg.svdvals(fitted.weight[:, c].flatten(1))[1]) < 1e-9 for c in range(3))


def test_fitting_both_factors_in_the_datas_own_measure_beats_cutting_the_kernel():
    model = network(3, modulated=False, offsets_px=1.0)
    conv, images = model[0], pictures(16)
    (plain,) = fit_plain_convs(model, images).values()
    (separable,) = fit_separable_convs(model, images).values()
    depthwise, pointwise = rank_one(plain.weight)
    cut = type(plain)(pointwise * depthwise.transpose(0, 1), plain.bias, 0.0, None, plain.substitute)
    assert missed(conv, plain, images) < missed(conv, separable, images) < 0.98 * missed(conv, cut, images)


def test_sums_of_pictures_add_up_and_the_error_is_the_error():
    torch.manual_seed(0)
    features, target = torch.randn(50, 5).double(), torch.randn(50, 2).double()
    one, two, whole = (NormalEquations.empty(5, 2) for _ in range(3))
    one.add(features[:20], target[:20])
    two.add(features[20:], target[20:])
    whole.add(features, target)
    both = one.plus(two)
    assert torch.allclose(both.gram, whole.gram) and torch.allclose(both.cross, whole.cross) and both.pixels == 50
    solution = whole.solved(torch.zeros(6, 2).double(), 1e-9)
    extended = F.pad(features, (0, 1), value=1.0)
    assert torch.allclose(solution, torch.linalg.lstsq(extended, target).solution, atol=1e-6)
    expected = float((target - extended @ solution).square().sum() / target.square().sum())
    assert whole.error(solution) == pytest.approx(expected)


def test_a_strong_ridge_keeps_the_start_but_for_the_bias():
    torch.manual_seed(0)
    sums = NormalEquations.empty(5, 2)
    sums.add(torch.randn(50, 5).double(), torch.randn(50, 2).double() + 3)
    start = F.pad(torch.randn(5, 2).double(), (0, 0, 0, 1))
    held = sums.solved(start, 1e6)
    assert torch.allclose(held[:-1], start[:-1], atol=1e-4) and float(held[-1].min()) > 2


def test_a_large_picture_is_thinned_and_a_site_may_be_named(tiny):
    model = network(1, offsets_px=0.5)
    wide = torch.randn(1, 3, 70, 70).double()
    assert wide[0, 0].numel() > 2 * POSITIONS
    (fitted,) = fit_plain_convs(model, [wide]).values()
    assert fitted.weight.isfinite().all()
    name = "decoder.decoder_block4.dec_att.aspp_deforms.1.atrous_conv"
    assert list(fit_plain_convs(tiny, [torch.randn(1, 3, 64, 96)], sites=[name])) == [name]


def test_a_fit_without_pictures_is_refused():
    with pytest.raises(RewriteError, match="needs pictures"):
        fit_plain_convs(network(), [])
