"""How the NPU wants each operation encoded, as one table: ``htp_rules.json``, a row an operation with its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lumen_lab.specs import Record

OWN, UNIT, INPUT, TIED = "own", "unit", "input", "tied"
TABLE = Path(__file__).with_name("htp_rules.json")


@dataclass(frozen=True)
class OpRule(Record):
    """One row. ``output``: "own" (by its range), "unit" (1/256, fixed), "input" (what it reads is moved, and nothing
    rounded), or "tied" (rounded to the encoding of what it reads).

    ``weight`` and ``bias`` are places among the arguments, ``axis`` that of the weight's scales (None: one scale).
    ``unsigned_weight``: uint8, as layer norm has it. ``bias_in_output_steps``: the NPU rounds the bias to whole steps
    of the output, so it is counted in those; else in input scale × weight scale. ``fuses_relu``: written with no
    quantiser between it and a ReLU.
    ``shared_with_inputs``: an input that nothing else reads is written in the encoding of the output, also where it is
    moved on the way by operations that are ``seen_through``.

    ``eight_bits``: places among the arguments that are read in 8 bits, whatever the operation's width.

    ``off_by_one``: the share of values that the emulated NPU has one step off the CPU, given the same integers; none
    is further off. Uniform and normal values, scales that are no powers of two.
    """

    op: str
    output: str
    because: str
    weight: int | None = None
    bias: int | None = None
    axis: int | None = None
    unsigned_weight: bool = False
    bias_in_output_steps: bool = False
    fuses_relu: bool = False
    shared_with_inputs: bool = False
    seen_through: bool = False
    eight_bits: tuple[int, ...] = ()
    off_by_one: float = 0.0


@cache
def htp_rules() -> Mapping[str, OpRule]:
    """The table by operation."""
    return {row["op"]: OpRule.from_json(row) for row in json.loads(TABLE.read_text())["rules"]}
