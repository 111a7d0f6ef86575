"""Verdicts: what is refused, why, and that the real compiler says the same."""

from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from lumen_lab.auditing import COST_NOTES, RULES, Rule, audit, compare_with_actual, support
from lumen_lab.auditing.rules import relabelled
from lumen_lab.errors import ChipError


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def audited(function, *shapes, dtype=torch.float32, **options):
    return audit(Calls(function).eval(), tuple(torch.empty(shape, dtype=dtype) for shape in shapes), **options)


def blocked(function, *shapes, **options):
    return [row.kind for row in audited(function, *shapes, **options).blocking()]


def windows(x, side=4):
    n, height, width, channels = x.shape
    grid = x.view(n, height // side, side, width // side, side, channels)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, side * side, channels)


def windows_with_work_inside(x):
    grid = x.relu().view(1, 4, 4, 4, 4, 8).abs()
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 8).relu()


def windows_with_two_readers(x):
    grid = x.relu().view(1, 4, 4, 4, 4, 8)
    return grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 8) + grid.reshape(-1, 16, 8)


def reshape_through_rank_6(x):
    return x.relu().view(1, 2, 4, 4, 4, 8).reshape(1, 8, 128).relu()


def moved_axis(x):
    return x.relu().view(4, 1, 4, 4, 4, 8).permute(1, 0, 3, 2, 4, 5).reshape(-1, 4, 8).relu()


def swapped_unit_axes(x):
    return x.relu().view(1, 1, 4, 4, 4, 8).permute(1, 0, 3, 2, 4, 5).reshape(-1, 4, 8).relu()


def rank_7(x):
    return x.relu().view(1, 2, 2, 4, 2, 4, 8).permute(0, 2, 1, 4, 3, 6, 5).reshape(1, -1).relu()


def to_channels_last(x):
    return x.relu().permute(0, 2, 3, 1)


def deform(x, offset, mask):
    return torchvision.ops.deform_conv2d(x, offset, torch.ones(4, 4, 3, 3), padding=1, mask=mask)


MAP = (1, 8, 16, 16)
REFUSALS = [
    (lambda x: x.relu().erf(), [MAP], ["erf"]),
    (deform, [(1, 4, 8, 8), (1, 18, 8, 8), (1, 9, 8, 8)], ["deform_conv2d"]),
    (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [MAP], []),
    (lambda x, grid: F.grid_sample(x, grid, align_corners=True), [MAP, (1, 4, 4, 2)], []),
    (lambda x, grid: F.grid_sample(x, grid, mode="bicubic", align_corners=True), [MAP, (1, 4, 4, 2)], ["grid_sample"]),
    (lambda x, grid: F.grid_sample(x, grid, align_corners=True), [(1, 2, 4, 4, 4), (1, 2, 2, 2, 3)], ["grid_sample"]),
    (lambda x: F.layer_norm(x, (16,)), [MAP], []),
    (lambda x: F.layer_norm(x, (16, 16)), [MAP], ["layer_norm"]),
    (lambda x: F.layer_norm(x, (16,)), [(1, 2, 4, 16, 16)], ["layer_norm"]),
    (lambda x: F.interpolate(x, (8, 8), mode="bilinear", align_corners=True), [MAP], []),
    (lambda x: F.interpolate(x, (8, 8), mode="bilinear", antialias=True), [MAP], ["resize_bilinear_antialiased"]),
    (lambda x: x.roll((3, 3), (2, 3)), [MAP], []),
    (partial(torch.einsum, "bnid,bnjd->bnij"), [MAP, MAP], []),
    (partial(torch.einsum, "nchw,nkhw->nck"), [MAP, MAP], ["einsum"]),
    (torch.tanh, [(1, 2, 4, 4, 4)], ["tanh"]),
    (torch.sigmoid, [(1, 2, 4, 4, 4)], []),
    (torch.sigmoid, [(1, 2, 2, 4, 4, 4)], ["sigmoid"]),
    (windows, [(1, 16, 16, 8)], []),
    (windows, [(2, 16, 16, 8)], ["view", "permute", "reshape"]),
    (windows_with_work_inside, [(1, 16, 16, 8)], ["view", "abs", "permute", "reshape"]),
    (windows_with_two_readers, [(1, 16, 16, 8)], ["view", "permute", "reshape", "reshape"]),
    (reshape_through_rank_6, [(1, 2, 16, 32)], []),
    (moved_axis, [(4, 4, 16, 8)], ["view", "permute", "reshape"]),
    (swapped_unit_axes, [(1, 4, 16, 8)], ["view", "permute", "reshape"]),
    (rank_7, [(1, 2, 8, 64)], ["view", "permute", "reshape"]),
    (lambda x: torch.fft.fft(x).abs(), [(1, 8)], ["fft_fft"]),
]


@pytest.mark.parametrize(("function", "shapes", "expected"), REFUSALS)
def test_what_is_refused(function, shapes, expected):
    assert blocked(function, *shapes) == expected


@pytest.mark.parametrize(
    ("dtype", "refused"), [("float64", 1), ("bfloat16", 1), ("int8", 1), ("int32", 0), ("float16", 0)]
)
def test_types(dtype, refused):
    assert len(blocked(torch.add, MAP, MAP, dtype=getattr(torch, dtype))) == refused


def test_a_chip_without_float16_takes_no_float_but_moves_it():
    assert blocked(to_channels_last, MAP, chip="SM8850") == []
    report = audited(to_channels_last, MAP, chip="SM7750")
    assert [(row.kind, row.predicted) for row in report.operations] == [("relu", "CPU"), ("permute", "NPU")]
    assert "no float16" in report.blocking()[0].reason


def test_an_unknown_chip_is_refused():
    with pytest.raises(ChipError, match="SM8850"):
        audited(torch.relu, MAP, chip="SM885O")


def test_every_operation_has_a_verdict_with_reason_and_source():
    for row in audited(windows_with_work_inside, (1, 16, 16, 8)).operations:
        assert row.predicted in ("NPU", "CPU", "folded")
        assert row.reason and row.source


def test_an_untried_kind_blocks_and_says_so():
    (row,) = audited(torch.special.i0, MAP).blocking()
    assert row.reason == "special_i0 at rank 4 has not been tried with the compiler; compile it alone to know"


def test_own_rules_come_first():
    no_relu = Rule("no relu", lambda row, around: row.kind == "relu", "CPU", "spoiled on purpose", "this test")
    (row,) = audited(torch.relu, MAP, rules=(no_relu,)).blocking()
    assert (row.reason, row.source) == ("spoiled on purpose", "this test")
    assert blocked(torch.relu, MAP) == []


def test_rules_are_named_once_and_the_last_takes_everything():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert RULES[-1].applies(None, None)


def test_no_kind_is_both_taken_and_refused():
    assert not support.TAKEN & support.REFUSED.keys()
    assert not support.TAKEN_AT_RANK_5 & support.REFUSED_AT_RANK_5


@pytest.mark.parametrize(
    ("function", "shapes", "name"),
    [
        (torch.matmul, [(64, 3, 49, 32), (64, 3, 32, 49)], "batched heads"),
        (torch.matmul, [(64, 49, 32), (64, 32, 49)], "one product a window"),
        (lambda x: x.roll(1, 2), [MAP], "cyclic shift"),
        (lambda x: F.conv2d(x, torch.ones(18, 8, 3, 3)), [MAP], "idle lanes"),
        (lambda x: x.relu().view(1, 2, 4, 16, 16), [MAP], "rank above 4"),
    ],
)
def test_costs_are_noted(function, shapes, name):
    (text,) = [note.text for note in COST_NOTES if note.name == name]
    assert text in audited(function, *shapes).operations[-1].notes


def test_a_plain_operation_has_no_note():
    assert [row.notes for row in audited(lambda x: F.conv2d(x, torch.ones(32, 8, 1, 1)), MAP).operations][-1] == ()


def test_equations_are_compared_by_what_they_do():
    assert relabelled("bhid, bhjd -> bhij") == relabelled("xyqc,xykc->xyqk")
    assert relabelled("ij,jk->ik") != relabelled("ij,kj->ik")


def test_rank_6_windows_are_refused_without_the_rule_for_them(monkeypatch):
    monkeypatch.setattr(support, "PERMUTES", frozenset())
    assert blocked(windows, (1, 16, 16, 8)) == ["view", "permute", "reshape"]


@pytest.mark.npu
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (windows, [(1, 16, 16, 8)]),
        (lambda x: windows(x.relu()).relu(), [(2, 16, 16, 8)]),
        (windows_with_work_inside, [(1, 16, 16, 8)]),
        (swapped_unit_axes, [(1, 4, 16, 8)]),
        (rank_7, [(1, 2, 8, 64)]),
        (lambda x: F.layer_norm(x.relu(), (16,)), [(1, 2, 4, 16, 16)]),
        (lambda x: x.relu().roll((3, 3), (2, 3)).tril(), [MAP]),
    ],
)
def test_the_compiler_agrees(function, shapes, tmp_path):
    from lumen_lab.deploy.htp import compile_for_chip

    model, inputs = Calls(function).eval(), tuple(torch.rand(shape) for shape in shapes)
    path = tmp_path / "case.onnx"
    torch.onnx.export(model, inputs, path, dynamo=True, opset_version=20, verbose=False)
    actual = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", optimization_mode=1, progress=False)
    comparison = compare_with_actual(audit(model, inputs), actual, onnx_path=path)
    assert comparison.agrees, comparison.rows()
