"""The deformable conv as a grid sample, and constants that follow the network's dtype."""

import copy

import pytest
import torch
from torch import nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.channels import OutputSplitConv
from lumen_lab.rewrites.deform import (
    DECOMPOSE_DEFORM_CONV,
    RECOMPOSE_DEFORM_CONV,
    decompose_deform_conv,
    pixel_size,
    sampled,
    swapped_pairs,
    tap_grid,
)
from lumen_lab.rewrites.deform_shifts import APPROXIMATE_DEFORM_CONV_BY_SHIFTS
from lumen_lab.rewrites.deform_substitutes import (
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
)
from lumen_lab.rewrites.record import FixedTensors, with_weights

GROUPS = {1: [1], 3: [9], 7: [9, 9, 9, 9, 9, 4]}  # taps of one sample, by kernel


def pair(kernel, reach, size, *, channels=(3, 4), rule=DECOMPOSE_DEFORM_CONV):
    """A deformable conv with offsets of about ``reach`` pixels, its grid-sample form and an input, in float64."""
    torch.manual_seed(kernel)
    deform = nn.Sequential(DeformableConv2d(*channels, kernel)).double()
    for conv in (deform[0].offset_conv, deform[0].modulator_conv):
        nn.init.normal_(conv.weight, std=0.1)
        nn.init.normal_(conv.bias, std=reach)
    x = torch.randn(2, channels[0], *size, dtype=torch.float64)
    return deform, rewrite(deform, (rule,), example_inputs=(x,)).model, x


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize(
    ("reach", "size"), [(0.5, (6, 9)), (20.0, (6, 9)), (1.0, (1, 1)), (1.0, (1, 5)), (3.0, (5, 1))]
)
def test_grid_sample_is_the_deformable_conv_inside_and_outside_the_image(kernel, reach, size):
    deform, form, x = pair(kernel, reach, size)
    assert form[0].taps == GROUPS[kernel]
    with torch.no_grad():
        assert float((deform(x) - form(x)).abs().max()) <= 1e-11


@pytest.mark.parametrize("taps_at_once", [1, 4, 7, 100])
def test_the_number_of_taps_at_once_changes_the_form_and_not_the_function(taps_at_once):
    rule = decompose_deform_conv(taps_at_once=taps_at_once)
    deform, form, x = pair(3, 2.0, (6, 9), rule=rule)
    assert len(form[0].tap_convs) == -(-9 // taps_at_once)
    assert eval(rule.expression, {"decompose_deform_conv": decompose_deform_conv}).expression == rule.expression
    back = rewrite(form, (RECOMPOSE_DEFORM_CONV,), example_inputs=(x,)).model
    with torch.no_grad():
        assert float((deform(x) - form(x)).abs().max()) <= 1e-11
        assert torch.equal(back(x), deform(x))


@pytest.mark.parametrize("taps", [0, 2.5, "3", True])
def test_taps_at_once_are_a_whole_number(taps):
    with pytest.raises(RewriteError, match=f"whole number of taps from 1 on, asked for {taps!r}; 9 is the default"):
        decompose_deform_conv(taps_at_once=taps)


def test_the_default_is_called_by_its_constant():
    assert decompose_deform_conv(taps_at_once=9).expression == "DECOMPOSE_DEFORM_CONV"


@pytest.mark.parametrize("kernel", [3, 7])
def test_gradients_are_the_deformable_convs_own(kernel):
    """Training goes through the grid-sample form, so its backward pass must be the published one's."""
    deform, form, x = pair(kernel, 1.0, (6, 5))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, value in zip((deform, form), inputs, strict=True):
        model(value).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-9, atol=1e-9)
    taps = torch.cat([conv.weight.grad for conv in form[0].tap_convs], 1).unflatten(1, (kernel, kernel, -1))
    reference = deform[0].regular_conv.weight.grad.permute(0, 2, 3, 1)
    assert torch.allclose(taps.flatten(3), reference, rtol=1e-9, atol=1e-9)
    order = swapped_pairs(kernel**2)
    for name, weight in form[0].offset_conv.named_parameters():
        expected = deform[0].offset_conv.get_parameter(name).grad[order]
        assert torch.allclose(weight.grad, expected, rtol=1e-9, atol=1e-9)
    for name, weight in form[0].modulator_conv.named_parameters():
        expected = deform[0].modulator_conv.get_parameter(name).grad
        assert torch.allclose(weight.grad, expected, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_finite_differences():
    _, form, x = pair(3, 0.7, (2, 3), channels=(1, 2))
    assert torch.autograd.gradcheck(form, (x[:1].requires_grad_(),), eps=1e-7, atol=1e-5)


def test_recomposed_conv_has_the_same_weights_and_numbers():
    deform, form, x = pair(7, 1.0, (6, 9))
    back = rewrite(form, (RECOMPOSE_DEFORM_CONV,), example_inputs=(x,)).model
    assert back.state_dict().keys() == deform.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], value) for name, value in deform.state_dict().items())
    with torch.no_grad():
        assert torch.equal(back(x), deform(x))


def bias_folded(form):
    form.tap_convs[0].bias = nn.Parameter(torch.ones(4).double())


def part_split(form):
    form.tap_convs[1] = nn.Sequential(form.tap_convs[1])


def offsets_replaced(form):
    form.offset_conv = nn.Sequential(form.offset_conv)


NOT_RECOMPOSED = {
    "have a bias (a norm was folded into them), for which a DeformableConv2d has no place": bias_folded,
    "one of its tap_convs is a Sequential": part_split,
    "its offset_conv is a Sequential": offsets_replaced,
}


@pytest.mark.parametrize("reason", NOT_RECOMPOSED)
def test_a_form_that_is_more_than_a_deformable_conv_is_not_recomposed(reason):
    _, form, x = pair(7, 1.0, (6, 9))
    NOT_RECOMPOSED[reason](form[0])
    (entry,) = rewrite(form, (RECOMPOSE_DEFORM_CONV,), example_inputs=(x,)).log.entries
    assert reason in entry.refused


class TwiceAsFar(DeformableConv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def as_subclass(conv):
    conv.__class__ = TwiceAsFar


def regular_conv_split(conv):
    conv.regular_conv = OutputSplitConv([conv.regular_conv], [(0, 3)])
    conv.forward = lambda x: x


def hooked(conv):
    conv.modulator_conv.register_forward_hook(lambda module, inputs, output: output + 1)


NOT_PLAIN = {
    "it is a TwiceAsFar, which may compute something else": as_subclass,
    "has hooks or a forward of its own": regular_conv_split,
    "its modulator_conv has hooks": hooked,
}
FAMILY = (
    DECOMPOSE_DEFORM_CONV,
    APPROXIMATE_DEFORM_CONV_BY_SHIFTS,
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
)


@pytest.mark.parametrize("rule", FAMILY, ids=lambda rule: rule.name)
@pytest.mark.parametrize("reason", NOT_PLAIN)
def test_a_conv_that_is_no_plain_deformable_conv_is_left_as_it_is(rule, reason):
    deform, _, x = pair(3, 1.0, (6, 9))
    NOT_PLAIN[reason](deform[0])
    (entry,) = rewrite(deform, (rule,), example_inputs=(x,)).log.entries
    assert reason in entry.refused


def test_a_form_takes_other_sizes_and_another_forms_weights():
    deform, form, x = pair(7, 1.0, (6, 9))
    _, other, _ = pair(7, 5.0, (4, 4))
    other.load_state_dict(form.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), form(x))
        assert float((deform(x[..., :4]) - copy.deepcopy(other)(x[..., :4])).abs().max()) <= 1e-11


def test_offset_order_is_x_then_y_for_each_tap():
    assert swapped_pairs(2).tolist() == [1, 0, 3, 2]
    assert swapped_pairs(9)[swapped_pairs(9)].tolist() == list(range(18))


def test_grid_points_at_pixel_centres():
    """A grid without offsets reads the image itself at the middle tap."""
    image = torch.arange(6.0, dtype=torch.float64).view(1, 1, 2, 3)
    grid = tap_grid(3, (2, 3))
    assert grid.shape == (1, 18, 2, 3)
    read = sampled(image, grid, torch.ones(1, 9, 2, 3, dtype=torch.float64))[0]
    assert torch.allclose(read[4], image[0, 0])
    assert torch.allclose(read[1], torch.tensor([[0, 0, 0], [0, 1, 2]], dtype=torch.float64))  # the tap above


def test_an_offset_of_one_pixel_is_the_next_pixel():
    image = torch.arange(6.0, dtype=torch.float64).view(1, 1, 2, 3)
    image_size, ones = (2, 3), torch.ones(1, 1, 2, 3, dtype=torch.float64)
    expected = {(1, 0): [[1, 2, 0], [4, 5, 0]], (0, 1): [[3, 4, 5], [0, 0, 0]]}
    for offset, read in expected.items():
        step = torch.tensor(offset, dtype=torch.float64)[None, :, None, None] * pixel_size(1, image_size)
        found = sampled(image, tap_grid(1, image_size) + step, ones)[0, 0]
        assert torch.allclose(found, torch.tensor(read, dtype=torch.float64))


def test_samples_lie_tap_by_tap_and_are_weighted():
    image = torch.stack([torch.full((2, 3), 1.0), torch.full((2, 3), 10.0)])[None].double()
    weight = torch.arange(1.0, 3.0, dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 2, 3)
    places = tap_grid(1, (2, 3)).repeat(1, 2, 1, 1)
    assert sampled(image, places, weight)[0, :, 1, 2].tolist() == pytest.approx([1, 10, 2, 20])


def test_exported_graph_holds_the_grid_as_a_constant():
    _, form, x = pair(3, 1.0, (6, 9))
    made = rewrite(form.float(), (), example_inputs=(x.float(),)).model
    for inputs, expected in ((x.float(), 0), (torch.zeros(1, 3, 4, 4), 1)):
        graph = torch.export.export(copy.deepcopy(made), (inputs,)).graph
        computed = sum("arange" in str(node.target) for node in graph.nodes)
        assert min(computed, 1) == expected


# Constants


def thirds(size):
    return torch.full(size, 1 / 3, dtype=torch.float64)


def test_constants_are_made_anew_in_float64_and_not_rounded():
    constants = FixedTensors(thirds)
    like = torch.zeros(1)
    assert constants((2, 3), like).dtype == torch.float32
    constants.double()
    assert torch.equal(constants((2, 3), like.double()), thirds((2, 3)))
    assert torch.equal(copy.deepcopy(constants).float().double()((2, 3), like.double()), thirds((2, 3)))


def test_a_constant_is_made_once_a_size_and_never_saved():
    made = []
    constants = FixedTensors(lambda size: made.append(size) or thirds(size))
    like = torch.zeros(1)
    first = constants((2, 3), like)
    assert constants((2, 3), like) is first
    constants((3, 2), like)
    assert made == [(2, 3), (3, 2)]
    assert dict(constants.state_dict()) == {}
    assert {name for name, _ in constants.named_buffers()} == {"at_2x3", "at_3x2"}


def test_a_constant_has_the_dtype_of_what_it_meets():
    constants = FixedTensors(thirds)
    constants((2,), torch.zeros(1))
    assert constants((2,), torch.zeros(1, dtype=torch.float16)).dtype == torch.float16
    assert constants((2,), torch.zeros(1)).dtype == torch.float32


def test_a_grid_sample_form_works_after_a_change_of_dtype():
    deform, form, x = pair(3, 1.0, (6, 9))
    with torch.no_grad():
        back_and_forth = form.float().double()(x)
        there = deform.float().double()(x)
    assert float((back_and_forth - there).abs().max()) <= 1e-11


def test_weights_are_copied_and_settings_kept():
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2)
    weight = torch.randn(6, 2, 3, 3)
    new = with_weights(conv, weight, torch.zeros(6))
    assert (new.stride, new.padding, new.dilation, new.groups) == ((2, 2), (1, 1), (2, 2), 2)
    weight.zero_()
    assert new.weight.abs().min() > 0
    assert with_weights(conv, weight).bias is None
