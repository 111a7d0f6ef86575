"""Attention head by head: the same function, in rank four, with a position bias that is a constant when deployed."""

import copy

import onnx
import pytest
import torch
from torch import nn

from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.errors import RewriteError
from lumen_lab.network.swin import SwinBlock, WindowAttention
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
)
from lumen_lab.rewrites.heads import (
    REDUCE_ATTENTION_RANK,
    SPLIT_ATTENTION_BY_HEADS,
    HeadsInWindows,
    HeadsOverMap,
)
from lumen_lab.rewrites.linear import CONVERT_LINEAR_TO_CONV
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW
from tests.rewrites.spoiling import as_class, spoiled

RULES = [SPLIT_ATTENTION_BY_HEADS, REDUCE_ATTENTION_RANK]
WINDOWS = (CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D, CONVERT_WINDOW_MERGE_TO_4D)

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@pytest.fixture(scope="module", params=["windows", "whole map"])
def attention(request, parts):
    """A plain and a shifted block with windows, or the same with one window over the map; and samples."""
    module, samples = parts["attention"]
    if request.param == "whole map":
        module = rewrite(module, (SUBSTITUTE_GLOBAL_WINDOW,), example_inputs=samples[0]).model
    return module, samples


@each_rule
def test_heads_one_by_one_compute_the_same(attention, rule):
    module, samples = attention
    table = check_plan(module, (rule,), samples=samples)
    assert table.passed, table.failed
    assert [verdict.site for verdict in table.verdicts] == ["stage.blocks.0.attn", "stage.blocks.1.attn", ""]


@each_rule
def test_they_do_so_beside_the_rewrites_of_the_windows(parts, rule):
    module, samples = parts["attention"]
    for plan in ((*WINDOWS, rule), (rule, *WINDOWS)):
        table = check_plan(module, plan, samples=samples)
        assert table.passed, table.failed


def test_both_forms_agree_on_what_is_left_of_the_original(parts):
    """One attention module by itself, with a mask for each pair of tokens as the roll makes it."""
    attention = copy.deepcopy(parts["attention"][0].stage.blocks[1].attn).double()
    x, mask = torch.randn(6, 49, 8).double(), torch.randn(3, 49, 49).double()
    with torch.no_grad():
        expected = attention(x, mask)
        for rule in RULES:
            new = rewrite(nn.ModuleDict({"attn": attention}), (), example_inputs=x).model
            new = rule.built(site_of(new))["attn"]
            assert float((new(x, mask) - expected).abs().max()) <= 1e-12


def site_of(module):
    from lumen_lab.rewrites import Site

    return Site("attn", module["attn"], ((6, 49, 8),), None)


# Spoiled versions


def scale_forgotten(attention):
    for query in attention.projection.query:
        query.weight.data *= 2
        query.bias.data *= 2


def keys_for_values(attention):
    projection = attention.projection
    projection.key, projection.value = projection.value, projection.key


def weight_nudged(attention):
    attention.projection.value[1].weight.data[2, 3] += 1e-6


def heads_exchanged(attention):
    attention.projection.query = attention.projection.query[::-1]


def bias_of_the_next_head(attention):
    attention.relative_position_bias_table.data = attention.relative_position_bias_table.data.roll(1, 1)


def bias_of_the_key_from_the_query(attention):
    """dy and dx with the other sign."""
    attention.relative_position_bias_table.data = attention.relative_position_bias_table.data.flip(0)


def concatenated_in_another_order(attention):
    half = attention.proj.in_features // 2
    attention.proj.weight.data = attention.proj.weight.data.roll(half, 1)


class TokensRolled(HeadsInWindows):
    def forward(self, x, mask):
        return super().forward(x, mask).roll(1, 1)


class MaskOfTheNextWindow(HeadsInWindows):
    def forward(self, x, mask):
        return super().forward(x, None if mask is None else mask.roll(1, 0))


class MaskOfTheBatch(HeadsInWindows):
    """Windows of an image stand together; this repeats each window's mask instead."""

    def forward(self, x, mask):
        if mask is not None:
            mask = mask.repeat_interleave(x.shape[0] // mask.shape[0], 0)
        return self.over(x, self.positions.reach, mask)


SPOILED = {
    "scale forgotten": scale_forgotten,
    "keys for values": keys_for_values,
    "one weight nudged": weight_nudged,
    "queries of another head": heads_exchanged,
    "bias of another head": bias_of_the_next_head,
    "bias the wrong way round": bias_of_the_key_from_the_query,
    "heads in another order": concatenated_in_another_order,
    "tokens rolled by one": as_class(TokensRolled),
    "mask off by one window": as_class(MaskOfTheNextWindow),
    "mask over the batch": as_class(MaskOfTheBatch),
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_a_spoiled_split_fails(parts, mistake):
    module, samples = parts["attention"]
    wrong = spoiled(SPLIT_ATTENTION_BY_HEADS, SPOILED[mistake])
    table = check_plan(module, (wrong,), samples=samples)
    assert {verdict.name for verdict in table.failed} == {wrong.name, "whole network"}


def slices_in_another_order(attention):
    attention.projection.qkv.weight.data = attention.projection.qkv.weight.data.roll(4, 0)


@pytest.mark.parametrize("spoil", [slices_in_another_order, bias_of_the_next_head, concatenated_in_another_order])
def test_a_spoiled_reduction_fails(attention, spoil):
    module, samples = attention
    table = check_plan(module, (spoiled(REDUCE_ATTENTION_RANK, spoil),), samples=samples)
    assert len(table.failed) == 3


# What comes out


@each_rule
def test_no_tensor_has_more_than_four_dimensions(attention, rule):
    module, samples = attention
    assert highest_rank(module, samples[0]) > 4
    assert highest_rank(rewritten(module, rule, samples), samples[0]) == 4


def highest_rank(model, x):
    program = torch.export.export(model, (x,))
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    return max(value.ndim for value in values if isinstance(value, torch.Tensor))


def rewritten(module, rule, samples):
    plan = (*WINDOWS, rule) if isinstance(module.stage.blocks[0], SwinBlock) else (rule,)
    return rewrite(module, plan, example_inputs=samples[0]).model


LOOK_UPS = {"Gather", "GatherElements", "GatherND", "GatherNd"}


@each_rule
def test_the_bias_of_a_window_is_a_constant_in_the_exported_graph(parts, rule, tmp_path):
    """One (tokens, tokens) a head, and nothing left that looks it up."""
    module, samples = parts["attention"]
    model = rewritten(module, rule, samples)
    graph = onnx.load(export_onnx(model, tmp_path / "heads.onnx", example_inputs=(samples[0][:1],))).graph
    assert not LOOK_UPS & {node.op_type for node in graph.node}
    biases = {value.name for value in graph.initializer if list(value.dims) == [49, 49]}
    read = {name for node in graph.node if node.op_type == "Add" for name in node.input}
    assert len(biases & read) == 4  # two blocks of two heads


@each_rule
def test_everything_can_be_trained_the_bias_table_by_its_name(attention, rule):
    module, samples = attention
    model = rewritten(module, rule, samples).train()
    model(samples[1]).square().sum().backward()
    parameters = dict(model.named_parameters())
    assert "stage.blocks.0.attn.relative_position_bias_table" in parameters
    assert all(value.grad is not None and value.grad.isfinite().all() for value in parameters.values())
    assert all(value.grad.abs().max() > 0 for name, value in parameters.items() if "bias_table" in name)


@each_rule
def test_weights_load_into_another_network_of_the_same_plan(attention, rule):
    module, samples = attention
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(std=0.2)
    model, twin = rewritten(module, rule, samples), rewritten(other, rule, samples)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(twin(samples[1]), model(samples[1]))


@each_rule
def test_it_keeps_its_type_and_its_place_in_copies(attention, rule):
    module, samples = attention
    model = copy.deepcopy(rewritten(module, rule, samples)).half()
    assert {value.dtype for value in model.state_dict().values()} == {torch.float16}
    assert model(samples[0].half()).dtype == torch.float16
    with torch.no_grad():
        wide = model.double()(samples[0].half().double())
    assert wide.dtype == torch.float64


def test_which_attention_becomes_what(parts):
    module, samples = parts["attention"]
    whole_map = rewrite(module, (SUBSTITUTE_GLOBAL_WINDOW, SPLIT_ATTENTION_BY_HEADS), example_inputs=samples[0]).model
    assert isinstance(whole_map.stage.blocks[0].attn, HeadsOverMap)
    windows = rewrite(module, (SPLIT_ATTENTION_BY_HEADS,), example_inputs=samples[0]).model
    assert isinstance(windows.stage.blocks[0].attn, HeadsInWindows)
    assert not any(isinstance(part, WindowAttention) for model in (windows, whole_map) for part in model.modules())


# Refusals


@pytest.mark.parametrize("first", [SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW])
@each_rule
def test_windows_are_chosen_first(parts, rule, first):
    module, samples = parts["attention"]
    with pytest.raises(RewriteError, match=f"{rule.name} before {first.name}; it must come after"):
        rewrite(module, (rule, first), example_inputs=samples[0])


def test_the_two_forms_exclude_each_other(parts):
    module, samples = parts["attention"]
    with pytest.raises(RewriteError, match="both split_attention_by_heads and reduce_attention_rank"):
        rewrite(module, tuple(RULES), example_inputs=samples[0])


@each_rule
def test_a_projection_that_is_a_conv_by_now_is_refused(parts, rule):
    module, samples = parts["attention"]
    done = rewrite(module, (CONVERT_LINEAR_TO_CONV,), example_inputs=samples[0]).model
    log = rewrite(done, (rule,), example_inputs=samples[0]).log
    assert log.applied() == []
    assert "its projection is a PointwiseConv, no Linear" in str(log.rows())


@pytest.mark.npu
@pytest.mark.parametrize("rule", [*RULES, "whole map"], ids=lambda rule: getattr(rule, "name", rule))
def test_the_npu_computes_it_with_nothing_looked_up(rule, tmp_path):
    """A shifted block in the emulation: a compiler that drops windows (it happens) is far outside the tolerance.

    The bias of a whole map is too large for the exporter to fold; the compiler does.
    """
    from lumen_lab.deploy.htp import compile_for_chip, emulate, require_one_partition

    x = torch.randn(1, 14, 7, 32, generator=torch.Generator().manual_seed(0))
    block = block_of_some_size()
    if rule == "whole map":
        block = rewrite(nn.Sequential(block).eval(), (SUBSTITUTE_GLOBAL_WINDOW,), example_inputs=x).model
        plan = (SPLIT_ATTENTION_BY_HEADS,)
    else:
        plan = (*WINDOWS, rule)
    model = rewrite(block, plan, example_inputs=x).model
    path = export_onnx(model, tmp_path / "block.onnx", example_inputs=x, input_names=("x",), output_names=("y",))
    report = require_one_partition(compile_for_chip(path, "SM8850", out_dir=tmp_path, progress=False))
    assert not LOOK_UPS & report.qnn_ops.keys()
    (actual,) = emulate(report.context_path, {"x": x.numpy()}, progress=False).values()
    with torch.no_grad():
        assert float((torch.from_numpy(actual) - block(x)).abs().max()) <= 0.05


def block_of_some_size():
    """A shifted block whose attention is no rounding error beside the residual."""
    torch.manual_seed(0)
    block = SwinBlock(32, 2, 7, 3, 0.0).eval()
    for parameter in (block.attn.qkv.weight, block.attn.proj.weight, block.attn.relative_position_bias_table):
        nn.init.normal_(parameter, std=0.3)
    return block
