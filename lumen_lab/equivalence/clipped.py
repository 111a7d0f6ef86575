"""ReLUs that a quantiser has taken out: an encoding without negative values clips as they do."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lumen_lab.equivalence.layers import LayerTensor

Call = tuple[str, int]


def past_relus(
    real: Mapping[Call, list[LayerTensor]], quantised: Mapping[Call, list[LayerTensor]]
) -> tuple[dict[Call, list[LayerTensor]], dict[Call, Call]]:
    """``quantised`` with each layer that was clipped given the place of the ReLU that it stands for; and who stands so.

    That is a layer whose integers start at zero, before a ReLU of ``real`` that ``quantised`` does not have and whose
    output is just what the layer's would be without its negative values.
    """
    standing: dict[Call, Call] = {}
    calls = list(real)
    for place, relu in enumerate(calls):
        if relu not in quantised and len(real[relu]) == 1 and "relu" in real[relu][0].kind.lower():
            before = next((c for c in reversed(calls[:place]) if _clips_to(real[c], real[relu][0])), None)
            same = [c for c in calls[:place] if before and real[c][0].values is real[before][0].values]
            standing |= {call: relu for call in same if call in quantised and starts_at_zero(quantised[call])}
    moved: dict[Call, list[LayerTensor]] = {}
    for call, layers in quantised.items():
        moved.setdefault(standing.get(call, call), layers)
    return moved, standing


def starts_at_zero(layers: list[LayerTensor]) -> bool:
    """Whether a call returned one quantised tensor that has no room for negative values."""
    return (
        len(layers) == 1
        and layers[0].scale is not None
        and layers[0].zero_point == np.iinfo(layers[0].values.dtype).min
    )


def _clips_to(layers: list[LayerTensor], relu: LayerTensor) -> bool:
    same_shape = len(layers) == 1 and layers[0].values.shape == relu.values.shape
    return same_shape and np.array_equal(np.maximum(layers[0].values, 0), relu.values)
