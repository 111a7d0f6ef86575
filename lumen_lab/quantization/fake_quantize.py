"""Rounding to integers and back, in float and with gradients: what ONNX QuantizeLinear and DequantizeLinear compute.

The arithmetic is that of the ONNX pair in float32 (a division, halves to even, a multiplication), so that torch and
onnxruntime give the same integers. ``torch.fake_quantize_per_tensor_affine`` multiplies by the inverse of the scale,
which moves ties.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lumen_lab.quantization.encoding import SMALLEST_SCALE, Encoding

WEIGHT_STEPS = 127  # int8 without −128, so that a weight and its negative are both exact
BIAS_STEPS = 2**30  # of int32, so that there is room for the sum


class _ToGrid(torch.autograd.Function):
    """x -> scale · clip(round(x / scale)); gradients pass inside the clip, and to the scale as LSQ has them.

    Esser et al., 2020, equation 3: inside the clip the scale's gradient is the rounding error, outside the bound.
    """

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
        exact = x / scale
        steps = exact.round()
        clipped = steps.clamp(low, high)
        inside = steps == clipped
        ctx.shape = scale.shape
        learnt = (torch.where(inside, clipped - exact, clipped),) if scale.requires_grad else ()
        ctx.save_for_backward(inside, *learnt)
        return clipped.mul_(scale)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        inside, *learnt = ctx.saved_tensors
        of_scale = None
        if learnt and ctx.needs_input_grad[1]:
            of_scale = (gradient * learnt[0]).sum().reshape(ctx.shape)
        return gradient * inside, of_scale, None, None


def to_grid(x: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
    """``x`` rounded to multiples of ``scale`` between ``low`` and ``high`` steps; differentiable."""
    return _ToGrid.apply(x, scale, low, high)


class FakeQuantize(nn.Module):
    """The quantised value of an activation or constant; ``encoding`` may be set anew at any time unless ``fixed``.

    ``scale`` is a buffer, or a parameter once ``learn_scale`` was called. Zero points are not learnt. LSQ's factor on
    the scale's gradient, 1/√(N·Q), is left out: an optimiser that divides by the gradient's size undoes it.
    """

    def __init__(self, encoding: Encoding, *, fixed: bool = False):
        super().__init__()
        self.fixed = fixed
        self.register_buffer("scale", torch.tensor(encoding.scale))
        self.register_buffer("zero_point", torch.tensor(encoding.zero_point, dtype=torch.int32))
        self.encoding = encoding

    @property
    def encoding(self) -> Encoding:
        return Encoding(float(self.scale.detach().abs()), int(self.zero_point), self.bits)

    @encoding.setter
    def encoding(self, encoding: Encoding) -> None:
        self.bits = encoding.bits
        with torch.no_grad():
            self.scale.fill_(encoding.scale)
            self.zero_point.fill_(encoding.zero_point)
        self._set_bounds()

    def _set_bounds(self) -> None:
        zero_point = int(self.zero_point)
        self.low, self.high = float(-zero_point), float(2**self.bits - 1 - zero_point)

    def _load_from_state_dict(self, *given) -> None:
        super()._load_from_state_dict(*given)
        self._set_bounds()

    def learn_scale(self) -> None:
        """Make the scale a parameter (LSQ)."""
        if not isinstance(self.scale, nn.Parameter):
            scale = self.scale
            del self.scale
            self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        if isinstance(scale, nn.Parameter):  # one that is learnt may step over zero; its encoding is that of its size
            scale = scale.abs().clamp_min(SMALLEST_SCALE)
        return to_grid(x, scale, self.low, self.high)

    def extra_repr(self) -> str:
        return f"scale={float(self.scale):.4g}, zero_point={int(self.zero_point)}, bits={self.bits}"


class WeightQuantize(nn.Module):
    """A weight on the int8 grid of ``scale``; the largest of each channel is exact, so that every gradient passes."""

    def forward(self, weight: Tensor, scale: Tensor) -> Tensor:
        return to_grid(weight, scale, -WEIGHT_STEPS, WEIGHT_STEPS)


class BiasQuantize(nn.Module):
    """A bias as int32 in steps of input scale × weight scale, the unit in which the NPU sums products."""

    def forward(self, bias: Tensor, input_scale: Tensor, weight_scale: Tensor) -> Tensor:
        return to_grid(bias, bias_scale(input_scale, weight_scale), -(2.0**31), 2.0**31 - 1)


class First(nn.Module):
    """What stands in for a quantiser that is switched off: its first argument."""

    def forward(self, value: Tensor, *scales: Tensor) -> Tensor:
        return value


def weight_scale(weight: Tensor, axis: int, *biases: Tensor) -> Tensor:
    """One symmetric scale for each channel of ``axis``, shaped to broadcast over the weight.

    ``biases``: bias, input scale, and so on for every call. A bias is counted in input scale × weight scale, and lost
    where that is too small for int32: of a channel without weights, or of inputs that are as good as zero. There the
    scale is as large as the bias needs, and weights that make no difference become 0.
    """
    others = [dim for dim in range(weight.ndim) if dim != axis]
    scale = (weight.detach().abs().amax(others, keepdim=True) / WEIGHT_STEPS).clamp_min(SMALLEST_SCALE)
    for bias, input_scale in zip(biases[::2], biases[1::2], strict=True):
        scale = torch.maximum(scale, (bias.detach().abs() / (input_scale.detach() * BIAS_STEPS)).view_as(scale))
    return scale


def bias_scale(input_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """One scale for each channel."""
    return input_scale.detach() * weight_scale.detach().reshape(-1)
