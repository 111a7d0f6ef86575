"""What an operation costs: multiply-accumulates, bytes, and the activations that are alive while it runs.

One MAC is one multiply and one add. ``macs`` counts matrix products and convolutions, biases left out, which is the
figure that papers give. Interpolation (the taps of a grid sample, of a resize and of the look-ups in a deformable
conv) is counted beside it: it is done by other units than the matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import accumulate

from torch import Tensor

from lumen_lab.auditing.trace import Trace, TracedOp

GRID_SAMPLE_MODES = ("bilinear", "nearest", "bicubic")


def macs(op: TracedOp) -> int:
    """Multiply-accumulates of matrix products and convolutions in ``op``; 0 for every other kind."""
    return MACS[op.kind](op) if op.kind in MACS else 0


def interpolation_macs(op: TracedOp) -> int:
    """Multiply-accumulates of the interpolation in ``op``: taps times values; 0 where nothing is interpolated."""
    return INTERPOLATION[op.kind](op) if op.kind in INTERPOLATION else 0


def _conv(op: TracedOp) -> int:
    """One filter of (in / groups) × kernel per output value."""
    return op.outputs[0].numel() * math.prod(op.arguments["weight"].shape[1:])


def _conv_transpose(op: TracedOp) -> int:
    """One filter of (out / groups) × kernel per input value."""
    return op.arguments["input"].numel() * math.prod(op.arguments["weight"].shape[1:])


def _linear(op: TracedOp) -> int:
    return op.outputs[0].numel() * op.arguments["weight"].shape[-1]


def _matmul(op: TracedOp) -> int:
    """Also mm, bmm, and addmm and baddbmm, whose first argument is added."""
    first = _tensor_arguments(op)[-2]
    return op.outputs[0].numel() * first.shape[-1]


def _attention(op: TracedOp) -> int:
    """Queries × keys and weights × values."""
    query, key, value = _tensor_arguments(op)[:3]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return pairs * (query.shape[-1] + value.shape[-1])


def _einsum(op: TracedOp) -> int:
    """One for each combination of labels, if two tensors or more are multiplied; 0 with an ellipsis."""
    terms = op.arguments["equation"].split("->")[0].replace(" ", "").split(",")
    tensors = op.arguments["tensors"]
    if len(tensors) < 2 or any("." in term for term in terms):
        return 0
    sizes = {label: n for term, tensor in zip(terms, tensors, strict=True) for label, n in zip(term, tensor.shape)}
    return math.prod(sizes.values())


def _sampled(op: TracedOp) -> int:
    output = op.outputs[0]
    mode = GRID_SAMPLE_MODES[op.arguments.get("interpolation_mode", 0)]
    taps = {"bilinear": 2, "nearest": 0, "bicubic": 4}[mode] ** (output.dim() - 2)
    return taps * output.numel()


def _resized(taps: int) -> Callable[[TracedOp], int]:
    return lambda op: taps * op.outputs[0].numel()


def _deform_lookups(op: TracedOp) -> int:
    """Four taps for every (channel, tap of the kernel, output pixel)."""
    weight, channels = op.arguments["weight"], op.arguments["input"].shape[1]
    n, _, height, width = op.outputs[0].shape
    return 4 * n * channels * weight.shape[-2] * weight.shape[-1] * height * width


def _tensor_arguments(op: TracedOp) -> list[Tensor]:
    return [value for value in op.arguments.values() if isinstance(value, Tensor)]


MACS: dict[str, Callable[[TracedOp], int]] = {
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d", "deform_conv2d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm"), _matmul),
    "linear": _linear,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
}
INTERPOLATION: dict[str, Callable[[TracedOp], int]] = {
    "grid_sample": _sampled,
    "deform_conv2d": _deform_lookups,
    "resize_linear": _resized(2),
    "resize_bilinear": _resized(4),
    "resize_trilinear": _resized(8),
    "resize_bicubic": _resized(16),
}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the values of ``tensors`` fill, each counted by its shape."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def parameter_bytes(traced: Trace) -> int:
    """Bytes of the weights, buffers and constants that are read, each counted once however often it is read."""
    read = {name: tensor for op in traced.operations for name, tensor in op.parameters.items()}
    return tensor_bytes(read.values())


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share if they share memory."""
    return tensor.untyped_storage()._cdata


def live_bytes(traced: Trace, folded: set[int]) -> list[int]:
    """Activation bytes alive while each operation runs, its inputs and outputs included.

    A storage lives from the operation that fills it to the last that reads it, through whatever views; a view costs
    nothing. Network inputs live throughout (the caller holds them), results to the end. Weights, and operations in
    ``folded``, are no activations. Working memory inside an operation is not counted.
    """
    end = len(traced.operations)
    storages = _Lifetimes()
    for tensor in traced.inputs:
        storages.born(tensor, 0)
        storages.used(tensor, end)
    fixed = {storage_of(tensor) for op in traced.operations for tensor in op.parameters.values()}
    for op in traced.operations:
        for read in op.reads:
            storages.used(read.tensor, op.index)
        for tensor in op.outputs:
            if op.index not in folded and storage_of(tensor) not in fixed:
                storages.born(tensor, op.index)
    for read in traced.results:
        storages.used(read.tensor, end)
    return storages.alive(end)


class _Lifetimes:
    """First and last use of each storage, by the index of the operation."""

    def __init__(self):
        self.spans: dict[int, tuple[int, int, int]] = {}  # storage -> bytes, first, last

    def born(self, tensor: Tensor, index: int) -> None:
        self.spans.setdefault(storage_of(tensor), (tensor.untyped_storage().nbytes(), index, index))
        self.used(tensor, index)

    def used(self, tensor: Tensor, index: int) -> None:
        """Extend the life of a storage; one that was never born (a weight, a constant) is ignored."""
        if (span := self.spans.get(storage_of(tensor))) is not None:
            size, first, last = span
            self.spans[storage_of(tensor)] = (size, first, max(last, index))

    def alive(self, count: int) -> list[int]:
        """Bytes alive during each of ``count`` operations."""
        change = [0] * (count + 2)
        for size, first, last in self.spans.values():
            change[first] += size
            change[last + 1] -= size
        return list(accumulate(change))[:count]
