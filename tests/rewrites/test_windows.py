"""Windows of another size: where they go, what they keep of the published weights, and how near they start."""

import copy
import math

import pytest
import torch
from torch import nn

from lumen_lab.equivalence import random_samples
from lumen_lab.errors import RewriteError
from lumen_lab.network.swin import SwinBlock, WindowAttention, relative_position_index
from lumen_lab.rewrites import check_plan, rewrite, windows
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
)
from lumen_lab.rewrites.heads import REDUCE_ATTENTION_RANK, SPLIT_ATTENTION_BY_HEADS
from lumen_lab.rewrites.linear import CONVERT_LINEAR_TO_CONV
from lumen_lab.rewrites.plan import check_order
from lumen_lab.rewrites.windows import (
    LEAST_LOG_WEIGHT,
    SUBSTITUTE_GLOBAL_WINDOW,
    SUBSTITUTE_WINDOW,
    GlobalAttention,
    GlobalSwinBlock,
    carried_over,
    position_index,
    seen_together,
    stage_of,
    substitute_global_window,
    substitute_window,
)


@pytest.fixture(scope="module")
def blocks():
    """A plain and a shifted block that differ, and a map (2, 9, 12, 8)."""
    torch.manual_seed(0)
    made = nn.Sequential(SwinBlock(8, 2, 7, 0, 0.0), SwinBlock(8, 2, 7, 3, 0.0)).eval()
    for block in made:
        nn.init.normal_(block.attn.relative_position_bias_table)
        nn.init.normal_(block.attn.qkv.bias)
    return made, torch.randn(2, 9, 12, 8)


# The bias table


@pytest.mark.parametrize("window", [2, 7])
def test_positions_of_a_window_are_the_published_ones(window):
    assert torch.equal(position_index((window, window), (window, window)), relative_position_index(window))


@pytest.mark.parametrize(("reach", "size"), [((3, 5), (3, 5)), ((3, 5), (2, 3)), ((2, 2), (3, 4))])
def test_a_pair_of_tokens_finds_its_offset(reach, size):
    """Also on maps that are not square, smaller than the table (its middle) or larger (its edge)."""
    height, width = reach
    offsets = torch.cartesian_prod(torch.arange(1 - height, height), torch.arange(1 - width, width))
    tokens = torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1]))
    apart = tokens[:, None] - tokens[None]
    farthest = torch.tensor([height - 1, width - 1])
    assert torch.equal(offsets[position_index(reach, size)], apart.clamp(-farthest, farthest))


def test_a_table_carried_over_to_its_own_window_is_unchanged():
    table = torch.randn(13**2, 3, dtype=torch.float64)
    same = carried_over(table, 7, (7, 7), lambda offsets: seen_together(7, offsets))
    assert float((same - table).abs().max()) <= 1e-15


def test_an_offset_keeps_its_bias_and_loses_what_the_larger_window_sees_more_often():
    table = torch.randn(13**2, 2, dtype=torch.float64)
    new = carried_over(table, 7, (8, 8), lambda offsets: seen_together(8, offsets)).view(15, 15, 2)
    old = table.view(13, 13, 2)
    assert torch.equal(new[7, 7], old[6, 6])
    weight = (1 - 6 / 7) * (1 - 2 / 7) / ((1 - 6 / 8) * (1 - 2 / 8))
    assert torch.allclose(new[7 - 6, 7 + 2], old[6 - 6, 6 + 2] + math.log(weight))
    assert torch.allclose(new[7 + 7, 7 - 3], old[6 + 6, 6 - 3] + LEAST_LOG_WEIGHT)


def test_shares_of_places_are_those_counted():
    """Of all places of a window of 5 on a line, that hold a token, those that hold its neighbour at each offset."""
    counted = [sum(0 <= place + offset < 5 for place in range(5)) / 5 for offset in range(-6, 7)]
    assert torch.allclose(seen_together(5, torch.arange(-6, 7)), torch.tensor(counted))


# What is built


def test_blocks_get_the_window_and_half_of_it_as_shift(blocks):
    module, x = blocks
    new = rewrite(module, (SUBSTITUTE_WINDOW,), example_inputs=x).model
    assert [(block.window, block.attn.window, block.shift.shift) for block in new] == [(8, 8, 0), (8, 8, 4)]
    assert [(block.window, block.shift.shift) for block in module] == [(7, 0), (7, 3)]
    old, weights = module.state_dict(), new.state_dict()
    kept = [name for name in weights if "relative_position" not in name]
    assert len(kept) == 24
    assert all(torch.equal(weights[name], old[name]) for name in kept)
    assert not {value.data_ptr() for value in weights.values()} & {value.data_ptr() for value in old.values()}


@pytest.mark.parametrize("rule", [SUBSTITUTE_WINDOW, substitute_window(window=16), SUBSTITUTE_GLOBAL_WINDOW])
@pytest.mark.parametrize("size", [(9, 12), (4, 3), (17, 5)])
def test_any_size_batch_and_type_passes(blocks, rule, size):
    module, x = blocks
    new = rewrite(copy.deepcopy(module).train(), (rule,), example_inputs=x).model
    for model, dtype in ((new, torch.float32), (copy.deepcopy(new).double(), torch.float64)):
        y = model(torch.randn(3, *size, 8, dtype=dtype))
        assert (y.shape, y.dtype) == ((3, *size, 8), dtype)
        y.square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_window_as_large_as_the_map_is_the_published_attention(blocks):
    """Without padding and shift, with the published table, one window over a map of 7 × 7 is the published block."""
    module, _ = blocks
    x = torch.randn(2, 7, 7, 8)
    new = rewrite(module[:1], (SUBSTITUTE_GLOBAL_WINDOW,), example_inputs=x).model
    assert isinstance(new[0], GlobalSwinBlock)
    new[0].attn.relative_position_bias_table.data = module[0].attn.relative_position_bias_table.data.clone()
    with torch.no_grad():
        assert torch.allclose(new(x), module[:1](x), atol=1e-6)


def test_the_bias_of_a_map_that_is_not_square():
    torch.manual_seed(0)
    attention = GlobalAttention(8, 2, (3, 5)).eval()
    nn.init.normal_(attention.relative_position_bias_table)
    nn.init.zeros_(attention.qkv.weight[:8])  # no query: the logits are the bias alone
    nn.init.zeros_(attention.qkv.bias[:8])
    x = torch.randn(1, 10, 8)
    table = attention.relative_position_bias_table.view(5, 9, 2)
    value = attention.qkv(x)[0, :, 16:].view(10, 2, 4)
    rows = []
    for query in range(10):
        offsets = [(query // 5 - key // 5, query % 5 - key % 5) for key in range(10)]
        weight = torch.stack([table[dy + 2, dx + 4] for dy, dx in offsets]).softmax(0)  # keys, heads
        rows.append((weight[..., None] * value).sum(0).flatten())
    expected = attention.proj(torch.stack(rows))
    assert torch.allclose(attention(x, (2, 5))[0], expected, atol=1e-6)


def test_the_last_stage_gets_one_window_and_knows_both_sizes(tiny):
    done = rewrite(tiny, (SUBSTITUTE_GLOBAL_WINDOW,))
    assert [entry.site for entry in done.log.applied()] == ["bb.layers.3.blocks.0", "bb.layers.3.blocks.1"]
    assert "it is in stage 2; one window over the whole map is asked for in stage 4" in str(done.log.rows())
    attention = done.model.bb.layers[3].blocks[1].attn
    assert attention.relative_position_bias_table.shape == (3 * 5, 8)  # a map of 2 × 3, and of 1 × 2
    assert {tuple(value.shape) for value in attention.positions.index.buffers()} == {(6, 6), (2, 2)}
    first = rewrite(tiny, (substitute_global_window(stage=1),)).log.applied()
    assert [entry.site for entry in first] == ["bb.layers.0.blocks.0", "bb.layers.0.blocks.1"]


def test_windows_by_stage(tiny):
    done = rewrite(tiny, (SUBSTITUTE_GLOBAL_WINDOW, substitute_window(window=(16, 8, 7, 8))))
    found = [[getattr(block, "window", None) for block in layer.blocks] for layer in done.model.bb.layers]
    assert found == [[16, 16], [8, 8], [7, 7], [None, None]]
    assert "its window is 7 already" in str(done.log.rows())
    image = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        assert done.model(image).shape == (2, 1, 96, 64)


@pytest.mark.parametrize("heads", [SPLIT_ATTENTION_BY_HEADS, REDUCE_ATTENTION_RANK])
def test_what_is_exact_stays_exact_behind_them_and_the_whole_is_pending(tiny, heads):
    exact = (CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D, CONVERT_WINDOW_MERGE_TO_4D, heads)
    plan = (SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW, *exact)
    table = check_plan(tiny.bb, plan, samples=random_samples([(64, 96), (96, 32)], batch=2))
    assert table.failed == []
    pending = {"substitute_global_window", "substitute_window", "whole network"}
    assert {verdict.name for verdict in table.verdicts if verdict.status == "pending"} == pending
    assert {verdict.name for verdict in table.verdicts if verdict.passed} == {rule.name for rule in exact}


def test_weights_load_into_another_network_of_the_same_plan(tiny):
    plan = (SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW)
    one, other = (rewrite(tiny, plan).model for _ in range(2))
    with torch.no_grad():
        for parameter in one.bb.parameters():
            parameter.normal_(std=0.1)
    other.load_state_dict(one.state_dict())
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(one(image), other(image))


def test_the_start_is_nearer_to_the_teacher_than_the_bare_table(monkeypatch, repository):
    """A spoiled start: the same table without what larger windows see too often."""
    from lumen_lab.images import load_image, to_network_input
    from lumen_lab.network import load_network

    teacher = load_network("micro")
    photograph = to_network_input(load_image(repository / "data" / "photographs" / "cat.jpg"), size=(96, 96))
    image = torch.as_tensor(photograph).view(1, 3, 96, 96)

    def error():
        student = rewrite(teacher, (substitute_window(window=16),), example_inputs=image).model
        with torch.no_grad():
            return sum(float((s - t).square().sum() / t.square().sum()) for s, t in zip(student.bb(image), maps))

    with torch.no_grad():
        maps = teacher.bb(image)
    ours = error()
    monkeypatch.setattr(windows, "LEAST_LOG_WEIGHT", 0.0)
    monkeypatch.setattr(windows, "seen_together", lambda window, offsets: torch.ones_like(offsets))
    assert ours < 0.9 * error()


# Refusals


@pytest.mark.parametrize("window", [1, 0, -8, 7.5, True, (8, 8), (8, 8, 8, 1), "8"])
def test_a_window_that_is_none_is_refused(window):
    with pytest.raises(RewriteError, match="side of at least 2 tokens, or 4 of them"):
        substitute_window(window=window)


@pytest.mark.parametrize("stage", [0, 5, True, "4"])
def test_a_stage_that_is_none_is_refused(stage):
    with pytest.raises(RewriteError, match="from 1 to 4"):
        substitute_global_window(stage=stage)


def test_windows_by_stage_need_a_path_that_names_it(blocks):
    module, x = blocks
    log = rewrite(module, (substitute_window(window=(8, 8, 8, 8)),), example_inputs=x).log
    assert log.applied() == []
    assert "its path names no stage" in str(log.rows())


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("bb.layers.0.blocks.1", 1),
        ("layers.3.blocks.12", 4),
        ("stage.blocks.0", None),
        ("bb.layers.0.blocks.1.attn", None),
    ],
)
def test_stage_of_a_path(path, stage):
    assert stage_of(path) == stage


def test_rewritten_blocks_are_left_as_they_are(blocks):
    """A second pass, which the order of a plan would forbid in one."""
    module, x = blocks
    done = rewrite(module, (CONVERT_CYCLIC_SHIFT_TO_PADDING,), example_inputs=x).model
    for rule in (SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW):
        again = rewrite(done, (rule,), example_inputs=x).log
        assert [entry.site for entry in again.applied()] == ["0"]
        assert "its shift, unshift has been rewritten already; choose the windows first" in str(again.rows())


@pytest.mark.parametrize("later", [substitute_window(window=16), SUBSTITUTE_GLOBAL_WINDOW], ids=lambda rule: rule.name)
def test_bias_tables_are_carried_over_once(blocks, later):
    module, x = blocks
    once = rewrite(module, (SUBSTITUTE_WINDOW,), example_inputs=x).model
    log = rewrite(once, (later,), example_inputs=x).log
    assert log.applied() == []
    assert "substitute_window has made it already, and its bias table would be carried over twice" in str(log.rows())


@pytest.mark.parametrize("rule", [SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW], ids=lambda rule: rule.name)
def test_a_block_with_rewritten_parts_of_parts_or_another_attention_is_refused(blocks, rule):
    module, x = blocks
    convs = rewrite(module, (CONVERT_LINEAR_TO_CONV,), example_inputs=x).model
    reason = "its attn.qkv, attn.proj, mlp.fc1, mlp.fc2 has been rewritten already"
    assert reason in str(rewrite(convs, (rule,), example_inputs=x).log.rows())
    other = copy.deepcopy(module)
    for block in other:
        block.attn.__class__ = Louder
    assert "its attn is a Louder" in str(rewrite(other, (rule,), example_inputs=x).log.rows())


class Louder(WindowAttention):
    def forward(self, x, mask):
        return 2 * super().forward(x, mask)


def test_the_whole_map_comes_before_other_windows():
    with pytest.raises(RewriteError, match="substitute_window before substitute_global_window"):
        check_order((SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW))


@pytest.mark.parametrize("rule", [SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW, substitute_window(window=(16, 8, 8, 7))])
def test_the_code_of_a_rewrite_makes_it_again(rule):
    again = eval(rule.expression, vars(windows))
    assert (again.name, again.code) == (rule.name, rule.code)
