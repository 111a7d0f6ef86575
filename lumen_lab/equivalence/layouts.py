"""The same values in another order of axes: N C H W or N H W C."""

from __future__ import annotations

import numpy as np

from lumen_lab.equivalence.layers import LayerTensor

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
AXES = {"NHWC → NCHW": TO_NCHW, "NCHW → NHWC": TO_NHWC}


def order_for(reference: LayerTensor, actual: LayerTensor) -> str | None:
    """How ``actual`` must be turned to lie as ``reference`` does; None if nothing makes their shapes agree.

    "" for not at all, a key of ``AXES``, or "unit axes" where the shapes differ by axes of length one only. Layouts
    that both tensors declare decide; otherwise the shapes do, as they are first.
    """
    expected, found = reference.values.shape, actual.values.shape
    declared = (actual.layout, reference.layout)
    if all(declared) and declared[0] != declared[1]:
        order = " → ".join(declared)
        return order if order in AXES and _turned(found, AXES[order]) == expected else None
    if expected == found:
        return ""
    turned = next((name for name, axes in AXES.items() if _turned(found, axes) == expected), None)
    same_but_units = [n for n in expected if n != 1] == [n for n in found if n != 1]
    return turned or ("unit axes" if same_but_units else None)


def possible_orders(one: LayerTensor, other: LayerTensor) -> list[str]:
    """Every way in which ``other`` may be turned to have the shape of ``one``: "" and the keys of ``AXES``."""
    shapes = {"": other.values.shape} | {name: _turned(other.values.shape, axes) for name, axes in AXES.items()}
    return [name for name, shape in shapes.items() if shape == one.values.shape]


def in_order(values: np.ndarray, order: str, shape: tuple[int, ...]) -> np.ndarray:
    """``values`` turned as ``order_for`` said."""
    return values.reshape(shape) if order == "unit axes" else np.transpose(values, AXES[order]) if order else values


def _turned(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...] | None:
    return tuple(shape[axis] for axis in axes) if len(shape) == 4 else None
