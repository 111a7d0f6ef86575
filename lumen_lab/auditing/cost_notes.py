"""What costs more on the NPU than its MACs say: warnings, not refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lumen_lab.auditing.operations import OpRow

TRAFFIC = "measured: compiler's DRAM traffic, QAIRT 2.51, one Swin block at 160×160×96, INT8, SM8850"


@dataclass(frozen=True)
class CostNote:
    """``text`` for the operations to which it ``applies``; ``source`` says who measured it."""

    name: str
    applies: Callable[[OpRow], bool]
    text: str
    source: str


def _activation_product(row: OpRow) -> bool:
    """A matrix product of two activations, many at once."""
    return row.kind in ("matmul", "bmm") and len(row.input_shapes) == 2 and math.prod(row.output_shapes[0][:-2]) > 1


def _batched_heads(row: OpRow) -> bool:
    leading = row.output_shapes[0][:-2]
    return _activation_product(row) and sum(length > 1 for length in leading) > 1


def _one_product_a_window(row: OpRow) -> bool:
    return _activation_product(row) and not _batched_heads(row)


def _idle_lanes(row: OpRow) -> bool:
    return row.category == "compute" and row.macs > 0 and bool(row.channels_mod_32)


COST_NOTES: tuple[CostNote, ...] = (
    CostNote(
        "rank above 4",
        lambda row: row.rank > 4,
        "rank above 4: HTP's layouts are for four axes, so the compiler moves the data more than the graph says",
        "QNN HTP operator definitions",
    ),
    CostNote(
        "batched heads",
        _batched_heads,
        "windows and heads batched in one matrix product: 31.6 GB of DRAM reads where a product per head takes 2.6 MB",
        TRAFFIC,
    ),
    CostNote(
        "one product a window",
        _one_product_a_window,
        "one small matrix product a window: their tiles dominate the schedule, and windows of 49 tokens fill 64",
        TRAFFIC,
    ),
    CostNote(
        "cyclic shift",
        lambda row: row.kind == "roll",
        "two slices and a concat an axis; padding and a fixed mask move less",
        "onnx export of roll; QAIRT 2.51",
    ),
    CostNote(
        "grid sample",
        lambda row: row.kind == "grid_sample",
        "a layout transpose beside a large grid sample can cost more than the sample: 2.95 of 3.3 GB read at 256×256",
        "measured: compiler's DRAM traffic, QAIRT 2.51, BiRefNet-lite with exact deformable convs",
    ),
    CostNote(
        "layer norm at INT8",
        lambda row: row.kind == "layer_norm",
        "at INT8 its scale must be unsigned and per tensor: a signed or per-channel one is refused (error 3110)",
        "measured: QAIRT 2.51, 36 one-operation graphs",
    ),
    CostNote(
        "idle lanes",
        _idle_lanes,
        "output channels are no multiple of 32: part of each 32-wide tile idles",
        "HTP tile width; a 7-wide window pads 49 tokens to 64",
    ),
)
