"""How the NPU comes from a sum of products to eight bits: found by looking at where its results step.

A conv's int32 sum is not multiplied by its factor, input scale × weight scale ÷ output scale, and rounded. Of the sum
the lowest bits are dropped first, so that four stay behind the output's point; the factor has twelve significant bits.
With factor = M · 2⁻ᵏ, 1 ≤ M < 2, and s = ⌊−log₂ factor⌋ − 3:

    steps = ⌊ (⌊sum ÷ 2ˢ⌋ + ½) · 2ˢ · round(2¹¹ · M) · 2⁻¹¹⁻ᵏ + ½ ⌋

A power of two gives what half up gives; another factor is off by one in 1.5 to 3 % of values. Seen in the emulation of
v81 (QAIRT 2.51); ``tests/deploy/test_htp_arithmetic.py`` holds it against the compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR_BITS = 11  # of the factor, behind its leading one
BITS_BEHIND_THE_POINT = 3  # that are kept of a sum at least


def requantised(sums: Tensor, factor: Tensor) -> Tensor:
    """The NPU's steps for int32 ``sums`` of products (any float type that holds them exactly), without zero point.

    ``factor`` broadcasts over ``sums``: input scale × weight scale ÷ output scale, above zero.
    """
    exponent = -torch.log2(factor)
    point = exponent.ceil()
    mantissa = (factor * torch.exp2(point + FACTOR_BITS)).round() * torch.exp2(-point - FACTOR_BITS)
    dropped = torch.exp2(exponent.floor() - BITS_BEHIND_THE_POINT)
    return (((sums / dropped).floor() + 0.5) * dropped * mantissa + 0.5).floor()
