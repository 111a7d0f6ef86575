"""What integers stand for: real = scale · (integer − zero point), as ONNX and the NPU read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lumen_lab.errors import QuantizationError
from lumen_lab.specs import Record

SMALLEST_SCALE = 2.0**-60  # a tensor of zeros still needs a scale, and two such a product that is a normal number


@dataclass(frozen=True)
class Encoding(Record):
    """One tensor's encoding: ``bits`` wide, signed or not; a scale and a zero point for all of it.

    ``scale`` is a float32 value: ONNX keeps no more, and a scale that is rounded later would give other integers.
    """

    scale: float
    zero_point: int
    bits: int = 8
    signed: bool = False

    def __post_init__(self) -> None:
        if not (self.scale > 0 and np.isfinite(self.scale) and float(np.float32(self.scale)) == self.scale):
            raise QuantizationError(f"A scale is a positive float32 number; {self.scale!r} was given.")
        if not self.lowest <= self.zero_point <= self.highest:
            raise QuantizationError(
                f"A zero point of {self.dtype} lies between {self.lowest} and {self.highest}; found {self.zero_point}."
            )

    @property
    def lowest(self) -> int:
        """The smallest integer."""
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        """The largest integer."""
        return self.lowest + 2**self.bits - 1

    @property
    def dtype(self) -> str:
        """The integers' type, as numpy calls it."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest real number that can be written."""
        return self.scale * (self.lowest - self.zero_point), self.scale * (self.highest - self.zero_point)

    def quantise(self, real: np.ndarray) -> np.ndarray:
        """Integers nearest to ``real``, halves to even, clipped: ONNX QuantizeLinear in float32 arithmetic."""
        steps = np.rint(np.asarray(real, np.float32) / np.float32(self.scale))
        return np.clip(steps + self.zero_point, self.lowest, self.highest).astype(self.dtype)

    def dequantise(self, integers: np.ndarray) -> np.ndarray:
        """float32 values of ``integers``: ONNX DequantizeLinear."""
        return (np.asarray(integers, np.int64) - self.zero_point).astype(np.float32) * np.float32(self.scale)


def encoding_for_range(low: float, high: float, *, bits: int = 8) -> Encoding:
    """The unsigned encoding that reaches from ``low`` to ``high``, widened to hold zero, which is written exactly.

    Padding and ReLU need an exact zero (Jacob et al., 2018, section 2.1).
    """
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise QuantizationError(f"A range goes from a finite number to one not below it; found {low} to {high}.")
    low, high = min(low, 0.0), max(high, 0.0)
    steps = 2**bits - 1
    scale = float(np.float32(max((high - low) / steps, SMALLEST_SCALE)))
    return Encoding(scale, round(min(max(-low / scale, 0.0), steps)), bits)


def unit_encoding(*, bits: int = 8) -> Encoding:
    """That of softmax and sigmoid, which the NPU fixes: steps of 1/256 (16 bits: 1/65536) from zero on."""
    return Encoding(2.0**-bits, 0, bits)
