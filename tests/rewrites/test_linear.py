"""Linear layers as 1×1 convs: any number of leading axes, the same numbers, and nothing where there is no map."""

import copy

import pytest
import torch
from torch import nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.heads import REDUCE_ATTENTION_RANK, SPLIT_ATTENTION_BY_HEADS
from lumen_lab.rewrites.linear import CONVERT_LINEAR_TO_CONV, PointwiseConv
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW
from tests.rewrites.spoiling import as_class, spoiled

SHAPES = {"map": (2, 5, 3, 8), "windows": (6, 49, 8), "heads": (2, 3, 4, 5, 8)}


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8, bias=False)).eval()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_the_same_whatever_stands_before_the_channels(layers, shape):
    table = check_plan(layers, (CONVERT_LINEAR_TO_CONV,), samples=[torch.randn(shape)])
    assert table.passed, table.failed
    assert [verdict.site for verdict in table.verdicts] == ["0", "2", ""]


def test_blocks_of_the_encoder_hold_their_function(parts):
    module, samples = parts["attention"]
    for plan in ((CONVERT_LINEAR_TO_CONV,), (SPLIT_ATTENTION_BY_HEADS, CONVERT_LINEAR_TO_CONV)):
        table = check_plan(module, plan, samples=samples)
        assert table.passed, table.failed
        new = rewrite(module, plan, example_inputs=samples[0]).model
        assert not any(isinstance(part, nn.Linear) for part in new.modules())


def test_windows_become_rows_of_one_map_and_are_never_cut_up(layers):
    """As maps of their own they compile to something else than they say."""
    new = rewrite(layers, (CONVERT_LINEAR_TO_CONV,), example_inputs=torch.zeros(6, 49, 8)).model
    seen = []
    new[0].conv.register_forward_pre_hook(lambda conv, inputs: seen.append(tuple(inputs[0].shape)))
    for shape in SHAPES.values():
        new(torch.zeros(shape))
    assert seen == [(2, 8, 5, 3), (1, 8, 6, 49), (1, 8, 24, 5)]


def bias_dropped(conv):
    if conv.conv.bias is not None:
        conv.conv.bias.data.zero_()


def weight_nudged(conv):
    conv.conv.weight.data[1, 2] += 1e-6


def weight_rolled(conv):
    conv.conv.weight.data = conv.conv.weight.data.roll(1, 1)


class RolledByOne(PointwiseConv):
    def forward(self, x):
        return super().forward(x).roll(1, -2)


class RowsForColumns(PointwiseConv):
    """The layout changed once too often."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).reshape(*x.shape[:-1], -1)


SPOILED = {
    "bias dropped": bias_dropped,
    "weight nudged": weight_nudged,
    "channels rolled": weight_rolled,
    "rolled by one": as_class(RolledByOne),
    "rows for columns": as_class(RowsForColumns),
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_a_spoiled_conversion_fails(layers, mistake):
    wrong = spoiled(CONVERT_LINEAR_TO_CONV, SPOILED[mistake])
    table = check_plan(layers, (wrong,), samples=[torch.randn(2, 5, 3, 8)])
    assert {verdict.name for verdict in table.failed} == {wrong.name, "whole network"}


def test_weights_load_type_and_mode_stay_and_it_trains(layers):
    other = copy.deepcopy(layers).half().train()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    x = torch.randn(2, 5, 3, 8)
    one = rewrite(layers, (CONVERT_LINEAR_TO_CONV,), example_inputs=x).model
    two = rewrite(other, (CONVERT_LINEAR_TO_CONV,), example_inputs=x.half()).model
    assert {value.dtype for value in two.parameters()} == {torch.float16}
    assert two[0].training and not one[0].training
    two.float().load_state_dict(one.state_dict())
    y = two(x)
    assert torch.equal(y, one(x))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in two.parameters())


def test_rows_of_features_are_refused(layers):
    log = rewrite(layers, (CONVERT_LINEAR_TO_CONV,), example_inputs=torch.zeros(3, 8)).log
    assert log.applied() == []
    assert "one row of features a sample, (N, C): there is no map for a conv to run over" in str(log.rows())


def test_hooks_are_not_lost(layers):
    hooked = copy.deepcopy(layers)
    hooked[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    log = rewrite(hooked, (CONVERT_LINEAR_TO_CONV,), example_inputs=torch.zeros(2, 5, 3, 8)).log
    assert [entry.site for entry in log.applied()] == ["2"]
    assert "it has hooks" in str(log.rows())


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def test_a_linear_layer_with_another_forward_is_left_as_it_is():
    model = nn.Sequential(Scaled(8, 6), nn.Linear(6, 8)).eval()
    log = rewrite(model, (CONVERT_LINEAR_TO_CONV,), example_inputs=torch.zeros(2, 5, 3, 8)).log
    assert [entry.site for entry in log.applied()] == ["1"]
    assert "it is a Scaled, which may compute something else than a Linear" in str(log.rows())


@pytest.mark.parametrize(
    "late", [SPLIT_ATTENTION_BY_HEADS, REDUCE_ATTENTION_RANK, SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW]
)
def test_attention_is_taken_apart_first(parts, late):
    module, samples = parts["attention"]
    with pytest.raises(RewriteError, match=f"convert_linear_to_conv before {late.name}; it must come after"):
        rewrite(module, (CONVERT_LINEAR_TO_CONV, late), example_inputs=samples[0])
