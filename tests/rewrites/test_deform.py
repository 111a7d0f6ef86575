"""The deformable conv as a grid sample, and constants that follow the network's dtype."""

import copy

import pytest
import torch
from torch import nn

from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV, tap_grid, xy_order
from lumen_lab.rewrites.record import FixedTensors, with_weights


def pair(kernel, reach, size, *, channels=(3, 4)):
    """A deformable conv with offsets of about ``reach`` pixels, its grid-sample form and an input, in float64."""
    torch.manual_seed(kernel)
    deform = nn.Sequential(DeformableConv2d(*channels, kernel)).double()
    for conv in (deform[0].offset_conv, deform[0].modulator_conv):
        nn.init.normal_(conv.weight, std=0.1)
        nn.init.normal_(conv.bias, std=reach)
    x = torch.randn(2, channels[0], *size, dtype=torch.float64)
    return deform, rewrite(deform, (DECOMPOSE_DEFORM_CONV,), example_inputs=(x,)).model, x


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize(
    ("reach", "size"), [(0.5, (6, 9)), (20.0, (6, 9)), (1.0, (1, 1)), (1.0, (1, 5)), (3.0, (5, 1))]
)
def test_grid_sample_is_the_deformable_conv_inside_and_outside_the_image(kernel, reach, size):
    deform, sampled, x = pair(kernel, reach, size)
    with torch.no_grad():
        assert float((deform(x) - sampled(x)).abs().max()) <= 1e-11


def test_gradients_are_the_deformable_convs_own():
    """Training goes through the grid-sample form, so its backward pass must be the published one's."""
    deform, sampled, x = pair(3, 1.0, (6, 5))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, value in zip((deform, sampled), inputs, strict=True):
        model(value).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-9)
    weight = sampled[0].tap_conv.weight.grad.view_as(deform[0].regular_conv.weight)
    assert torch.allclose(weight, deform[0].regular_conv.weight.grad, atol=1e-9)
    order = xy_order(9)
    assert torch.allclose(sampled[0].offset_conv.weight.grad, deform[0].offset_conv.weight.grad[order], atol=1e-9)


def test_recomposed_conv_has_the_same_weights_and_numbers():
    deform, sampled, x = pair(7, 1.0, (6, 9))
    back = rewrite(sampled, (RECOMPOSE_DEFORM_CONV,), example_inputs=(x,)).model
    assert back.state_dict().keys() == deform.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], value) for name, value in deform.state_dict().items())
    with torch.no_grad():
        assert torch.equal(back(x), deform(x))


def test_offset_order_is_all_x_then_all_y():
    assert xy_order(2).tolist() == [1, 3, 0, 2]


def test_grid_points_at_pixel_centres():
    """A grid without offsets reads the image itself at the middle tap."""
    image = torch.arange(6.0, dtype=torch.float64).view(1, 1, 2, 3)
    grid = tap_grid(3, (2, 3))
    assert grid.shape == (1, 18, 3, 2)
    read = nn.functional.grid_sample(image, grid, align_corners=False).view(9, 2, 3)
    assert torch.allclose(read[4], image[0, 0])
    assert torch.allclose(read[1], torch.tensor([[0, 0, 0], [0, 1, 2]], dtype=torch.float64))  # the tap above


def test_exported_graph_holds_the_grid_as_a_constant():
    _, sampled, x = pair(3, 1.0, (6, 9))
    made = rewrite(sampled.float(), (), example_inputs=(x.float(),)).model
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
    deform, sampled, x = pair(3, 1.0, (6, 9))
    with torch.no_grad():
        back_and_forth = sampled.float().double()(x)
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
