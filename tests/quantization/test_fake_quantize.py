"""Fake quantisation: the values of ONNX's pair, gradients of the straight-through estimator and of LSQ."""

import copy

import numpy as np
import pytest
import torch

from lumen_lab.quantization.encoding import Encoding, encoding_for_range
from lumen_lab.quantization.fake_quantize import (
    BiasQuantize,
    FakeQuantize,
    WeightQuantize,
    bias_scale,
    to_grid,
    weight_scale,
)


@pytest.mark.parametrize("bits", [8, 16])
def test_values_are_those_of_the_integers(bits):
    encoding = encoding_for_range(-1.3, 2.1, bits=bits)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 2
    x[:100] = encoding.scale * (torch.arange(100) + 0.5)  # ties
    expected = encoding.dequantise(encoding.quantise(x.numpy()))
    assert np.array_equal(FakeQuantize(encoding)(x).numpy(), expected)


def test_torch_own_operator_moves_ties():
    """The reason for an own one: it multiplies by the inverse of the scale."""
    encoding = encoding_for_range(-1.7, 2.9)
    x = encoding.scale * (torch.arange(-90, 150) + 0.5)
    theirs = torch.fake_quantize_per_tensor_affine(x, encoding.scale, encoding.zero_point, 0, 255)
    assert not torch.equal(theirs, FakeQuantize(encoding)(x))


def test_gradients_pass_inside_the_range_and_stop_outside():
    quantiser = FakeQuantize(Encoding(1.0, 10))
    x = torch.tensor([-11.0, -10.0, 0.3, 245.0, 246.0], requires_grad=True)
    quantiser(x).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_the_scale_learns_by_lsq():
    """Inside, the rounding error; outside, the bound (Esser et al., 2020, equation 3)."""
    quantiser = FakeQuantize(Encoding(0.5, 10))
    quantiser.learn_scale()
    x = torch.tensor([0.6, -100.0, 1000.0])
    quantiser(x).sum().backward()
    expected = (1 - 0.6 / 0.5) + (0 - 10) + (255 - 10)
    assert float(quantiser.scale.grad) == pytest.approx(expected, rel=1e-6)


def test_the_learnt_scale_follows_a_numerical_gradient_of_the_bound():
    x = torch.full((7,), 1e3)
    scale = torch.tensor(0.5, requires_grad=True)
    to_grid(x, scale, -10.0, 245.0).sum().backward()
    moved = [float(to_grid(x, torch.tensor(0.5 + step), -10.0, 245.0).sum()) for step in (-0.01, 0.01)]
    assert float(scale.grad) == pytest.approx((moved[1] - moved[0]) / 0.02, rel=1e-3)


def test_the_largest_weight_of_each_channel_is_exact_and_every_gradient_passes():
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    scale = weight_scale(weight, 0)
    assert scale.shape == (4, 1, 1, 1)
    quantised = WeightQuantize()(weight, scale)
    largest = weight.detach().abs().flatten(1).argmax(1)
    kept = quantised.detach().flatten(1).gather(1, largest[:, None])
    assert torch.allclose(kept, weight.detach().flatten(1).gather(1, largest[:, None]), rtol=1e-6)
    quantised.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_a_channel_of_zeros_has_a_scale():
    assert float(weight_scale(torch.zeros(2, 3), 0).min()) > 0


def test_a_scale_leaves_room_for_every_bias_and_is_else_that_of_the_weight():
    weight = torch.tensor([[0.0, 0.0], [1e-12, 0.0], [0.5, 0.1]])
    bias, more = torch.tensor([0.3, -2.0, 1.0]), torch.tensor([0.6, 0.0, 0.0])
    small, tiny = torch.tensor(0.02), torch.tensor(2.0**-100)
    alone = weight_scale(weight, 0)
    scale = weight_scale(weight, 0, bias, small, more, small)
    assert float(scale[2]) == float(alone[2]) and (scale[:2] > alone[:2]).all()
    for one, given in ((bias, small), (more, small)):
        steps = one / bias_scale(given, scale)
        assert float(steps.abs().max()) <= 2**30
        assert torch.allclose(BiasQuantize()(one, given, scale), one, rtol=1e-6, atol=0.02 * 0.5 / 127)
    behind_zeros = weight_scale(weight, 0, bias, tiny)
    assert torch.allclose(BiasQuantize()(bias, tiny, behind_zeros), bias)
    assert torch.equal(WeightQuantize()(weight, behind_zeros), torch.zeros_like(weight))
    assert not torch.allclose(BiasQuantize()(bias, tiny, alone), bias)  # saturated, as without room


def test_a_bias_stands_in_steps_of_input_times_weight_scale():
    input_scale, weights = torch.tensor(0.25), torch.tensor([[0.5], [0.125]])
    bias = torch.tensor([1.01, -0.99])
    scale = bias_scale(input_scale, weights)
    assert scale.tolist() == [0.125, 0.03125]
    steps = BiasQuantize()(bias, input_scale, weights) / scale
    assert steps.tolist() == [8.0, -32.0]


def test_state_and_copies_carry_the_encoding():
    quantiser, other = FakeQuantize(encoding_for_range(-1, 3)), FakeQuantize(Encoding(1.0, 0))
    other.load_state_dict(quantiser.state_dict())
    assert other.encoding == quantiser.encoding == copy.deepcopy(quantiser).encoding
    x = torch.randn(100) * 3
    assert torch.equal(other(x), quantiser(x))  # bounds follow the zero point that was loaded


def test_it_works_in_half_of_the_batch_as_in_the_whole():
    quantiser, x = FakeQuantize(encoding_for_range(-1, 1)), torch.randn(4, 5)
    assert torch.equal(quantiser(x)[:2], quantiser(x[:2]))
