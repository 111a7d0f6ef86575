"""Rules that predict what becomes of an operation, as data: the first that applies gives the verdict.

A rule that the compiler contradicts is corrected to what the compiler does, and names the version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lumen_lab.auditing import support
from lumen_lab.auditing.cost_notes import COST_NOTES
from lumen_lab.auditing.operations import CPU, FOLDED, NPU, OpRow
from lumen_lab.chips import Chip


@dataclass(frozen=True)
class Surroundings:
    """What a rule may look at beside the operation itself."""

    chip: Chip
    operations: Sequence[OpRow]
    readers: dict[int, tuple[OpRow, ...]]

    def only_reader(self, row: OpRow) -> OpRow | None:
        """The one operation that reads ``row``, past those that have no effect; None if there are several or none."""
        readers = self.readers.get(row.index, ())
        if len(readers) != 1:
            return None
        return self.only_reader(readers[0]) if readers[0].no_effect else readers[0]

    def producer(self, row: OpRow) -> OpRow | None:
        """The operation behind the first input, past those that have no effect; None for a network input."""
        if not row.reads or row.reads[0][0] < 0:
            return None
        before = self.operations[row.reads[0][0]]
        return self.producer(before) if before.no_effect else before


Condition = Callable[[OpRow, Surroundings], bool]


@dataclass(frozen=True)
class Rule:
    """``verdict`` ("NPU", "CPU" or "folded") for the operations to which it ``applies``.

    ``reason`` is a sentence, or makes one from the operation; ``source`` says who knows.
    """

    name: str
    applies: Condition
    verdict: str
    reason: str | Callable[[OpRow], str]
    source: str

    def reason_for(self, row: OpRow) -> str:
        """The reason, in a sentence about ``row``."""
        return self.reason if isinstance(self.reason, str) else self.reason(row)


def judge(operations: Sequence[OpRow], chip: Chip, *, rules: Sequence[Rule] | None = None) -> list[OpRow]:
    """The rows with verdict, reason, source and notes.

    ``rules`` are tried before ``RULES``, whose last applies to everything.
    """
    readers: dict[int, tuple[OpRow, ...]] = {}
    for row in operations:
        for producer in () if row.unused else dict.fromkeys(producer for producer, _ in row.reads):
            readers[producer] = (*readers.get(producer, ()), row)
    around = Surroundings(chip, operations, readers)
    judged = []
    for row in operations:
        rule = next(rule for rule in (*(rules or ()), *RULES) if rule.applies(row, around))
        notes = tuple(note.text for note in COST_NOTES if row.runs and note.applies(row))
        reason = rule.reason_for(row)
        judged.append(replace(row, predicted=rule.verdict, reason=reason, source=rule.source, notes=notes))
    return judged


def _float_without_float16(row: OpRow, around: Surroundings) -> bool:
    return around.chip.supports_fp16 is False and row.dtype.startswith("float")


def _refused_setting(row: OpRow, around: Surroundings) -> bool:
    return _refused_setting_reason(row) != ""


def _refused_setting_reason(row: OpRow) -> str:
    if row.kind == "grid_sample" and row.setting("interpolation_mode", 0) == 2:
        return "a bicubic grid sample is refused"
    if row.kind == "pad" and row.setting("mode", "constant") in support.REFUSED_PAD_MODES:
        return "padding by wrapping around is refused; concatenate slices"
    if row.kind == "layer_norm" and len(row.setting("normalized_shape", (1,))) > 1:
        return "a layer norm over more than the last axis is refused"
    if row.kind == "einsum" and relabelled(row.setting("equation")) not in map(relabelled, support.TAKEN_EQUATIONS):
        return f"einsum {row.setting('equation')} is not among the equations that were taken; write it as a matmul"
    if row.kind in support.PERMUTES and row.dtype == "int64":
        return "HTP does not move 64-bit integers (error 3110)"
    return ""


def relabelled(equation: str) -> str:
    """The equation with its labels renamed a, b, c … in order of appearance: equal for equations that do the same."""
    labels = dict.fromkeys(character for character in equation if character.isalpha())
    names = {label: chr(ord("a") + number) for number, label in enumerate(labels)}
    return "".join(names.get(character, character) for character in equation if character != " ")


def _rank_6_taken_apart(row: OpRow, around: Surroundings) -> bool:
    """Part of reshape, permutation, reshape, where the two tensors between have rank 6 and an axis to spare."""
    for start in (row, around.producer(row), around.producer(around.producer(row) or row)):
        chain = _three_from(start, around)
        if row in chain and _can_drop_an_axis(chain[0], chain[1]):
            return True
    return False


def _three_from(row: OpRow | None, around: Surroundings) -> tuple[OpRow, ...]:
    """(reshape, permutation, reshape) if they follow each other from ``row`` with no other reader, else ()."""
    chain: list[OpRow] = []
    for kinds in (support.RESHAPES, support.PERMUTES, support.RESHAPES):
        if row is None or row.kind not in kinds:
            return ()
        chain.append(row)
        row = around.only_reader(row)
    return tuple(chain)


def _can_drop_an_axis(first: OpRow, permutation: OpRow) -> bool:
    """The first axis of length 1 that both rank-6 tensors have in common is one that the permutation leaves alone."""
    before, after = first.output_shapes[0], permutation.output_shapes[0]
    if len(before) != 6:
        return False
    common = [axis for axis in range(6) if before[axis] == after[axis] == 1]
    return bool(common) and permuted_axes(permutation)[common[0]] == common[0]


def permuted_axes(row: OpRow) -> tuple[int, ...]:
    """Which input axis each output axis of a permute or transpose is."""
    rank = len(row.output_shapes[0])
    if row.kind == "permute":
        return tuple(axis % rank for axis in row.setting("dims"))
    first, second = (row.setting(name) % rank for name in ("dim0", "dim1"))
    swapped = {first: second, second: first}
    return tuple(swapped.get(axis, axis) for axis in range(rank))


def _two_reshapes(row: OpRow, around: Surroundings) -> bool:
    """Of two reshapes in a row the exporter keeps one, so that the rank between them does not matter."""
    for first in (row, around.producer(row)):
        second = around.only_reader(first) if first is not None and first.kind in support.RESHAPES else None
        if second is not None and second.kind in support.RESHAPES and row in (first, second):
            return max(map(len, first.input_shapes + second.output_shapes)) <= 5 < row.rank
    return False


def _above_rank_5(row: OpRow, around: Surroundings) -> bool:
    return row.rank > 5


RULES: tuple[Rule, ...] = (
    Rule(
        "constant",
        lambda row, around: row.folded,
        FOLDED,
        "depends on weights and constants alone, so it is computed ahead",
        "torch.onnx.export and onnxruntime fold constants",
    ),
    Rule(
        "unused",
        lambda row, around: row.unused,
        FOLDED,
        "no result of the network depends on it, so it is left out",
        "torch.onnx.export removes what is not used",
    ),
    Rule(
        "no effect",
        lambda row, around: row.no_effect,
        FOLDED,
        "changes nothing in evaluation mode, so nothing is exported for it",
        "torch.onnx.export: no node",
    ),
    Rule(
        "float data moved on a chip without float16",
        lambda row, around: _float_without_float16(row, around) and row.kind in support.MOVED_WITHOUT_FLOAT16,
        NPU,
        "reshapes and transposes are taken even without float16",
        support.MEASURED_WITHOUT_FLOAT16,
    ),
    Rule(
        "float on a chip without float16",
        _float_without_float16,
        CPU,
        "the chip has no float16: it takes quantised networks only",
        support.MEASURED_WITHOUT_FLOAT16 + " (error 3110, or 1002 when the graph is finalised)",
    ),
    Rule(
        "refused type",
        lambda row, around: row.dtype in support.REFUSED_TYPES or row.dtype.startswith("complex"),
        CPU,
        lambda row: support.REFUSED_TYPES.get(row.dtype, "HTP has no complex numbers"),
        support.MEASURED,
    ),
    Rule(
        "refused kind",
        lambda row, around: row.kind in support.REFUSED,
        CPU,
        lambda row: support.REFUSED[row.kind],
        support.MEASURED,
    ),
    Rule("refused setting", _refused_setting, CPU, _refused_setting_reason, support.MEASURED),
    Rule(
        "rank 6 with an axis to spare",
        _rank_6_taken_apart,
        NPU,
        "a reshape, a transpose and a reshape through rank 6 are taken if an axis of length 1 stays in place",
        support.MEASURED + "; provider's rank-6-to-5 fusion",
    ),
    Rule("two reshapes in a row", _two_reshapes, NPU, "merged with the reshape beside it", support.MEASURED),
    Rule(
        "rank above 5",
        _above_rank_5,
        CPU,
        lambda row: f"rank {row.rank}: HTP takes 5 at most (error 3110)",
        support.MEASURED,
    ),
    Rule(
        "refused at rank 5",
        lambda row, around: row.rank == 5 and row.kind in support.REFUSED_AT_RANK_5,
        CPU,
        lambda row: f"{row.kind} is refused at rank 5 (error 3110) and taken at rank 4",
        support.MEASURED,
    ),
    Rule(
        "taken at rank 5",
        lambda row, around: row.rank == 5 and row.kind in support.TAKEN_AT_RANK_5,
        NPU,
        "taken at rank 5",
        support.MEASURED,
    ),
    Rule(
        "taken kind",
        lambda row, around: row.rank <= 4 and row.kind in support.TAKEN,
        NPU,
        "taken",
        support.MEASURED,
    ),
    Rule(
        "not measured",
        lambda row, around: True,
        CPU,
        lambda row: f"{row.kind} at rank {row.rank} has not been tried with the compiler; compile it alone to know",
        "none",
    ),
)
"""In order; the last applies to everything."""
