"""Pieces and cuts of small graphs, worked out by hand, and of random ones, against the runtime's own procedure."""

import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import nn

from lumen_lab.auditing import audit
from lumen_lab.auditing.operations import CPU, NPU
from lumen_lab.auditing.partitions import count_partitions, find_cuts, partition_numbers


class Calls(nn.Module):
    """A function as a module; in these, erf is what the NPU refuses."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def report(function):
    return audit(Calls(function).eval(), (torch.empty(16),))


def pieces(function):
    return [(row.kind, row.predicted, row.partition) for row in report(function).operations]


def test_one_refusal_in_a_chain_makes_two_partitions():
    assert pieces(lambda x: x.relu().erf().sigmoid()) == [("relu", NPU, 0), ("erf", CPU, 1), ("sigmoid", NPU, 1)]
    assert report(lambda x: x.relu().erf().sigmoid()).partitions == 2


def side_by_side(x):
    kept = x.relu()
    return kept.erf() + (kept * 2).erf()


def kept_across_cuts(x):
    kept = x.relu()
    total = kept.erf() + kept
    return total.erf() * kept


def two_readers(x):
    refused = x.relu().erf()
    return refused.sigmoid() + refused.tanh()


def dropped_out(x):
    return nn.functional.dropout(x.relu(), training=False).erf() + torch.arange(16)


def test_refusals_side_by_side_share_one_cut():
    assert report(side_by_side).partitions == 2


def test_refusals_in_a_row_share_one_cut():
    assert report(lambda x: x.relu().erf().erf().sigmoid()).partitions == 2


@pytest.mark.parametrize(
    ("function", "partitions"),
    [
        (lambda x: x.erf().sigmoid(), 1),
        (lambda x: x.relu().erf(), 1),
        (lambda x: x.erf(), 0),
        (lambda x: x.relu(), 1),
        (lambda x: x.relu() + x.sigmoid().erf(), 2),
        (lambda x: x.relu().erf().relu().erf().relu(), 3),
    ],
    ids=["first", "last", "alone", "none", "one branch", "twice"],
)
def test_number_of_partitions(function, partitions):
    assert report(function).partitions == partitions


def test_what_crosses_each_cut():
    """Sum and product wait for the CPU, so that the ReLU is kept for them; 16 floats are 64 bytes."""
    audited = report(kept_across_cuts)
    assert [(cut.source, cut.target, cut.tensors, cut.bytes) for cut in audited.cuts] == [
        ("NPU 0", "CPU 1", 1, 64),
        ("NPU 0", "NPU 1", 1, 64),
        ("NPU 0", "NPU 2", 1, 64),
        ("CPU 1", "NPU 1", 1, 64),
        ("NPU 1", "CPU 2", 1, 64),
        ("CPU 2", "NPU 2", 1, 64),
    ]
    assert audited.cut_bytes == 6 * 64


def test_a_tensor_with_two_readers_crosses_once():
    cuts = [(cut.source, cut.target, cut.tensors) for cut in report(two_readers).cuts]
    assert cuts == [("NPU 0", "CPU 1", 1), ("CPU 1", "NPU 1", 1)]


def test_only_the_output_that_is_read_crosses():
    audited = report(lambda x: x.relu().split([4, 12])[1].erf())
    assert [(cut.target, cut.bytes) for cut in audited.cuts] == [("CPU 1", 48)]


def test_constants_and_what_has_no_effect_belong_to_no_piece():
    rows = {row.kind: row for row in report(dropped_out).operations}
    assert rows["arange"].partition is None
    assert rows["dropout"].partition is None
    assert rows["erf"].partition == 1
    assert [cut.source for cut in report(dropped_out).cuts] == ["NPU 0", "CPU 1"]


def random_graph(seed):
    """Forty operations that each read up to three earlier ones, a quarter of them on the CPU."""
    dice = random.Random(seed)
    row = report(lambda x: x.relu()).operations[0]
    rows = []
    for index in range(40):
        sources = sorted(dice.sample(range(index), min(index, dice.randint(0, 3))))
        rows.append(replace(row, index=index, reads=tuple((source, 0) for source in sources)))
    return rows, {index: CPU if dice.random() < 0.25 else NPU for index in range(40)}


def waves(rows, runs_on):
    """The runtime's procedure, simulated: take what is ready, put off what reads from the group being made."""
    missing = {row.index: len(row.reads) for row in rows}
    readers = {row.index: [other.index for other in rows if (row.index, 0) in other.reads] for row in rows}
    ready, later = deque(index for index, count in missing.items() if not count), deque()
    groups, group, border = [], [], set()
    while ready or later:
        if not ready:
            if group:
                groups.append(set(group))
            group, border, ready, later = [], set(), later, deque()
            continue
        index = ready.popleft()
        if runs_on[index] == CPU and index in border:
            later.append(index)
            continue
        if runs_on[index] == NPU:
            group.append(index)
            border |= set(readers[index])
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return groups + ([set(group)] if group else [])


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_those_of_the_runtime(seed):
    rows, runs_on = random_graph(seed)
    numbers = partition_numbers(rows, runs_on)
    mine = {}
    for index, number in numbers.items():
        if runs_on[index] == NPU:
            mine.setdefault(number, set()).add(index)
    assert [mine[number] for number in sorted(mine)] == waves(rows, runs_on)
    assert count_partitions(numbers, runs_on) == len(mine)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_can_run_one_after_the_other(seed):
    rows, runs_on = random_graph(seed)
    numbers = partition_numbers(rows, runs_on)
    turn = {index: (number, runs_on[index] == NPU) for index, number in numbers.items()}  # CPU n before NPU n
    assert all(turn[source] <= turn[row.index] for row in rows for source, _ in row.reads)
    crossing = {(turn[source], turn[row.index]) for row in rows for source, _ in row.reads}
    assert len(find_cuts(rows, numbers, runs_on)) == len({pair for pair in crossing if pair[0] != pair[1]})
