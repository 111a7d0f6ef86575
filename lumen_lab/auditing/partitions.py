"""The pieces that a runtime cuts a network into when some operations must run on the CPU.

onnxruntime walks the graph in waves (``core/providers/partitioning_utils.cc``): one wave takes every operation that
can run on the NPU without waiting for an operation on the CPU that itself waits for this wave. So the partition of an
operation is the largest number of hand-overs from NPU to CPU on any path that leads to it, and the pieces can always
be run one after the other. Operations of one partition need not be connected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lumen_lab.auditing.operations import CPU, NPU, OpRow
from lumen_lab.specs import Record


@dataclass(frozen=True)
class Cut(Record):
    """What crosses from one piece into another: ``tensors`` different ones, ``bytes`` in all.

    ``source`` and ``target`` are "NPU 0", "CPU 1" and so on; what runs on the CPU before partition n is "CPU n".
    """

    source: str
    target: str
    tensors: int
    bytes: int


def partition_numbers(operations: Sequence[OpRow], runs_on: Mapping[int, str]) -> dict[int, int]:
    """Number of the piece that each operation in ``runs_on`` (index -> "NPU" or "CPU") belongs to, from 0."""
    numbers: dict[int, int] = {}
    sources = _sources_through_folded(operations, runs_on)
    for row in operations:
        if row.index in runs_on:
            before = [_after(producer, row.index, numbers, runs_on) for producer, _ in sources[row.index]]
            numbers[row.index] = max(before, default=0)
    return numbers


def _after(producer: int, reader: int, numbers: Mapping[int, int], runs_on: Mapping[int, str]) -> int:
    """The earliest piece that can read from ``producer``: a hand-over from NPU to CPU starts a new one."""
    handed_over = runs_on[producer] == NPU and runs_on[reader] == CPU
    return numbers[producer] + handed_over


def _sources_through_folded(
    operations: Sequence[OpRow], runs_on: Mapping[int, str]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """The (operation, output) pairs behind each operation's inputs, looking through those that do not run."""
    by_index = {row.index: row for row in operations}
    sources: dict[int, tuple[tuple[int, int], ...]] = {}
    for row in operations:
        found: dict[tuple[int, int], None] = {}
        for producer, output in row.reads:
            if producer in runs_on:
                found[producer, output] = None
            elif producer >= 0 and not by_index[producer].folded:
                found |= dict.fromkeys(sources[producer])
        sources[row.index] = tuple(found)
    return sources


def count_partitions(numbers: Mapping[int, int], runs_on: Mapping[int, str]) -> int:
    """How many graphs the NPU is called with."""
    return len({numbers[index] for index, where in runs_on.items() if where == NPU})


def find_cuts(operations: Sequence[OpRow], numbers: Mapping[int, int], runs_on: Mapping[int, str]) -> tuple[Cut, ...]:
    """Every pair of pieces between which tensors cross; a tensor counts once a pair, network inputs and outputs not."""
    by_index = {row.index: row for row in operations}
    crossing: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for reader, sources in _sources_through_folded(operations, runs_on).items():
        if reader not in runs_on:
            continue
        for producer, output in sources:
            pair = tuple(f"{runs_on[index]} {numbers[index]}" for index in (producer, reader))
            if pair[0] != pair[1]:
                crossing.setdefault(pair, set()).add((producer, output))
    return tuple(
        Cut(source, target, len(tensors), sum(by_index[index].output_bytes[output] for index, output in tensors))
        for (source, target), tensors in sorted(crossing.items(), key=lambda item: min(item[1]))
    )
