"""The audit itself: trace, cost, verdicts, pieces, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from lumen_lab.auditing import cost
from lumen_lab.auditing.operations import FOLDED, OpRow, operation_rows
from lumen_lab.auditing.partitions import find_cuts, partition_numbers
from lumen_lab.auditing.report import AuditReport
from lumen_lab.auditing.rules import Rule, judge
from lumen_lab.auditing.trace import trace
from lumen_lab.chips import Chip, find_chip
from lumen_lab.specs import tool_versions


def audit(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    chip: str | Chip = "SM8850",
    rules: Sequence[Rule] = (),
    name: str | None = None,
) -> AuditReport:
    """Read ``model`` operation by operation for ``chip``: cost, predicted place with reason and source, pieces, peak.

    Nothing is run: of ``example_inputs`` (a tuple with one tensor an argument, on any device, "meta" included) only
    shapes and types count. ``rules`` are tried before the library's own; ``name`` stands in the report in place of the
    model's class.

    Raises ``AuditError`` for a model in training mode, inputs that are no tuple of tensors and a model that cannot be
    exported, and ``ChipError`` for an unknown chip.
    """
    chip = find_chip(chip)
    traced = trace(model, example_inputs)
    rows = judge(operation_rows(traced), chip, rules=rules)
    runs_on = {row.index: row.predicted for row in rows if row.predicted != FOLDED}
    numbers = partition_numbers(rows, runs_on)
    return AuditReport(
        model=name or type(model).__name__,
        chip=chip.name,
        htp_arch=chip.htp_arch,
        input_shapes=tuple(tuple(tensor.shape) for tensor in traced.inputs),
        operations=_numbered(rows, numbers),
        cuts=find_cuts(rows, numbers, runs_on),
        parameter_bytes=cost.parameter_bytes(traced),
        versions=tool_versions("torch", "torchvision"),
    )


def _numbered(rows: Sequence[OpRow], numbers: dict[int, int]) -> tuple[OpRow, ...]:
    return tuple(replace(row, partition=numbers.get(row.index)) for row in rows)
