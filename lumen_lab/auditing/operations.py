"""One row an operation: where it is, what goes in and out, what it costs, and what is predicted of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lumen_lab.auditing import cost
from lumen_lab.auditing.kinds import LAYOUT_ONLY, NO_EFFECT_WHEN_SAME, category_of
from lumen_lab.auditing.trace import Trace, TracedOp
from lumen_lab.specs import Record

NPU, CPU, FOLDED = "NPU", "CPU", "folded"
CHANNELS_FIRST = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d deform_conv2d batch_norm group_norm "
    "grid_sample resize_bilinear resize_nearest resize_bicubic max_pool2d avg_pool2d".split()
)
SAID_BY_SHAPES = frozenset({"size", "shape", "output_size"})
CHANNELS_LAST = frozenset({"linear", "matmul", "bmm", "layer_norm", "rms_norm"})


@dataclass(frozen=True)
class OpRow(Record):
    """One operation of the network, in order of execution.

    ``site`` is the path of its module ("" for the network itself), ``call`` which call of that module it belongs to,
    from 0; ``name`` its name in the exported graph. ``input_shapes`` are those of activations and computed constants;
    weights, buffers and stored constants are in ``parameter_shapes``. ``rank`` is the largest among all but the
    weights. ``settings`` are the operator's other arguments (stride, mode, axis …). ``macs`` and
    ``interpolation_macs`` are explained in ``auditing.cost``. ``output_bytes`` has one number an output;
    ``live_bytes`` are the activations alive while it runs. ``channels_mod_32`` is the remainder of its output channels
    (of the last axis, for matrix products): 0 fills the NPU's 32-wide tiles, None has no channels.

    ``view``: the output shares its input's memory. ``folded``: it depends on weights and constants alone, so that
    it is computed ahead; ``no_effect``: it changes nothing in evaluation mode; ``unused``: no result of the network
    depends on it. None of these runs on a device.
    ``reads`` lists (operation, output) pairs; -1 - i is network input i.

    ``predicted`` is "NPU", "CPU" or "folded", with ``reason`` and ``source``; ``notes`` warn of costs. ``partition``
    numbers the stretch between two hand-overs that it would run in (None if it does not run).
    """

    index: int
    name: str
    site: str
    call: int
    kind: str
    category: str
    input_shapes: tuple[tuple[int, ...], ...]
    parameter_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    rank: int
    dtype: str
    settings: tuple[tuple[str, object], ...]
    macs: int
    interpolation_macs: int
    parameter_bytes: int
    output_bytes: tuple[int, ...]
    live_bytes: int
    channels_mod_32: int | None
    view: bool
    folded: bool
    no_effect: bool
    unused: bool
    reads: tuple[tuple[int, int], ...]
    predicted: str = ""
    reason: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()
    partition: int | None = None

    def setting(self, name: str, default: object = None) -> object:
        """The operator's argument ``name``, or ``default`` where it was not given."""
        return dict(self.settings).get(name, default)

    @property
    def activation_bytes(self) -> int:
        """Bytes of its outputs, by their shapes."""
        return sum(self.output_bytes)

    @property
    def runs(self) -> bool:
        """Whether a device has anything to do for it."""
        return not (self.folded or self.no_effect or self.unused)

    @property
    def place(self) -> str:
        """Site and call in one text: "bb.norm0", "bb.norm0 (call 2)" or "(network)"."""
        return f"{self.site or '(network)'}{f' (call {self.call + 1})' if self.call else ''}"


def operation_rows(traced: Trace) -> list[OpRow]:
    """A row for each traced operation, nothing predicted yet."""
    folded = folded_operations(traced)
    used = used_operations(traced)
    alive = cost.live_bytes(traced, folded)
    return [
        _row(op, live_bytes=alive[op.index], folded=op.index in folded, unused=op.index not in used)
        for op in traced.operations
    ]


def folded_operations(traced: Trace) -> set[int]:
    """Indices of the operations that no network input reaches."""
    folded: set[int] = set()
    for op in traced.operations:
        if all(read.producer in folded for read in op.reads):
            folded.add(op.index)
    return folded


def used_operations(traced: Trace) -> set[int]:
    """Indices of the operations on which a result of the network depends."""
    used = {read.producer for read in traced.results}
    for op in reversed(traced.operations):
        if op.index in used:
            used |= {read.producer for read in op.reads}
    return used


def _row(op: TracedOp, *, live_bytes: int, folded: bool, unused: bool) -> OpRow:
    inputs = [read.tensor for read in op.reads]
    return OpRow(
        index=op.index,
        name=op.name,
        site=op.site,
        call=op.call,
        kind=op.kind,
        category=category_of(op.kind),
        input_shapes=_shapes(inputs),
        parameter_shapes=_shapes(op.parameters.values()),
        output_shapes=_shapes(op.outputs),
        rank=max(tensor.dim() for tensor in (*inputs, *op.outputs)),
        dtype=str(op.outputs[0].dtype).removeprefix("torch."),
        settings=_settings(op),
        macs=cost.macs(op),
        interpolation_macs=cost.interpolation_macs(op),
        parameter_bytes=cost.tensor_bytes(op.parameters.values()),
        output_bytes=tuple(cost.tensor_bytes([tensor]) for tensor in op.outputs),
        live_bytes=live_bytes,
        channels_mod_32=_channels_mod_32(op),
        view=_is_view(op),
        folded=folded,
        no_effect=not folded and _has_no_effect(op),
        unused=unused,
        reads=tuple((read.producer, read.output) for read in op.reads),
    )


def _settings(op: TracedOp) -> tuple[tuple[str, object], ...]:
    """Arguments that are plain values, but for those that the shapes and the type say already."""
    found = []
    for name, value in op.arguments.items():
        values = tuple(value) if isinstance(value, list | tuple) else (value,)
        if all(isinstance(item, int | float | str) for item in values) and name not in SAID_BY_SHAPES:
            values = tuple(map(_with_a_word_in_json, values))
            found.append((name, values if isinstance(value, list | tuple) else values[0]))
    return tuple(found)


def _with_a_word_in_json(value: object) -> object:
    """``value``, or the text "inf", "-inf" or "nan" (a mask is often filled with -inf, for which JSON has no word)."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shapes(tensors) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _channels_mod_32(op: TracedOp) -> int | None:
    shape = op.outputs[0].shape
    if op.kind in CHANNELS_FIRST and len(shape) > 1:
        return shape[1] % 32
    return shape[-1] % 32 if op.kind in CHANNELS_LAST and len(shape) else None


def _is_view(op: TracedOp) -> bool:
    read = [*(read.tensor for read in op.reads), *op.parameters.values()]
    return cost.storage_of(op.outputs[0]) in {cost.storage_of(tensor) for tensor in read}


def _has_no_effect(op: TracedOp) -> bool:
    if not op.reads or len(op.outputs) != 1 or op.kind not in NO_EFFECT_WHEN_SAME | LAYOUT_ONLY:
        return False
    before, after = op.reads[0].tensor, op.outputs[0]
    return before.shape == after.shape and before.dtype == after.dtype
