"""Shifted windows without the roll, and windows cut in four dimensions."""

import onnx
import pytest
import torch
from torch import nn

from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.errors import RewriteError
from lumen_lab.network.swin import MASKED, CyclicShift, SwinBlock, WindowMerge, WindowPartition
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_PARTITION_TO_4D,
    PaddedShift,
    WindowMerge4d,
    WindowPartition4d,
    shifted_mask,
)
from lumen_lab.rewrites.plan import check_order
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW

SHIFT = (CONVERT_CYCLIC_SHIFT_TO_PADDING,)


@pytest.mark.parametrize("size", [(259, 133), (133, 70), (70, 35), (35, 35), (7, 14)])
def test_attention_with_padding_is_that_with_the_roll(size):
    """Sizes are those of the padded maps of the four stages at 1024 px."""
    torch.manual_seed(0)
    block = SwinBlock(2, 1, 7, 3, 0.0).double().eval()
    nn.init.normal_(block.attn.relative_position_bias_table)
    nn.init.normal_(block.attn.qkv.bias)
    x = torch.randn(1, *size, 2, dtype=torch.float64)
    padded = rewrite(block, SHIFT, example_inputs=(x,)).model
    assert isinstance(block.shift, CyclicShift)
    assert isinstance(padded.shift, PaddedShift)
    with torch.no_grad():
        assert float((padded.attend(x) - block.attend(x)).abs().max()) <= 1e-12


@pytest.mark.parametrize("size", [(14, 21), (7, 7)])
@pytest.mark.parametrize("shift", [1, 3, 6])
def test_mask_lets_a_token_see_the_same_tokens_as_the_rolled_one(size, shift):
    """Every token of the map, by its number, sees the same numbers in both ways."""
    numbers = torch.arange(1, 1 + size[0] * size[1]).view(1, *size, 1).double()

    def seen(shifted, mask):
        windows = WindowPartition(7)(shifted).squeeze(-1).long()
        pairs = (mask.expand(-1, 49, -1) == 0).nonzero()
        found = {}
        for window, query, key in pairs.tolist():
            if windows[window, query] and windows[window, key]:
                found.setdefault(int(windows[window, query]), set()).add(int(windows[window, key]))
        return found

    rolled = seen(*CyclicShift(7, shift)(numbers))
    padded = seen(*PaddedShift(7, shift)(numbers))
    assert padded == rolled
    assert len(rolled) == size[0] * size[1]


def test_mask_is_finite_and_hides_the_padding():
    mask = shifted_mask(7, 3, (14, 7))
    assert mask.shape == (6, 1, 49)
    assert mask.dtype == torch.float64
    assert set(mask.unique().tolist()) == {MASKED, 0.0}
    corner = mask[0].view(7, 7)  # the first window holds 4 + 3 rows: padding first, then the map
    assert (corner[:4] == MASKED).all()
    assert (corner[:, :4] == MASKED).all()
    assert (corner[4:, 4:] == 0).all()
    assert int((mask == 0).sum()) == 14 * 7


def test_the_constant_of_a_shifted_block_says_no_more_than_which_keys_are_padding():
    """A mask for each pair of tokens is 49 times as large, and is read from DRAM once a head."""
    block = rewrite(SwinBlock(8, 2, 7, 3, 0.0), SHIFT, example_inputs=(torch.zeros(1, 14, 21, 8),)).model
    assert {tuple(buffer.shape) for buffer in block.shift.buffers()} == {(3 * 4, 1, 49)}


@pytest.mark.parametrize("window", [2, 7])
def test_windows_in_four_dimensions_are_the_same_bit_for_bit(window):
    x = torch.randn(2, 3 * window, 2 * window, 5)
    windows = WindowPartition(window)(x)
    assert torch.equal(WindowPartition4d(window)(x), windows)
    assert torch.equal(WindowMerge4d(window)(windows, x.shape[1:3]), WindowMerge(window)(windows, x.shape[1:3]))
    assert torch.equal(WindowMerge4d(window)(WindowPartition4d(window)(x), x.shape[1:3]), x)


def ranks(module, *inputs):
    """Ranks of every tensor in the exported graph."""
    program = torch.export.export(module, inputs)
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    return {value.ndim for value in values if isinstance(value, torch.Tensor)}


def test_no_tensor_has_more_than_four_dimensions():
    x = torch.zeros(2, 14, 21, 3)
    assert max(ranks(WindowPartition(7), x)) == 6
    assert max(ranks(WindowPartition4d(7), x)) == 4
    windows = WindowPartition(7)(x)
    assert max(ranks(Merge(WindowMerge(7)), windows)) == 6
    assert max(ranks(Merge(WindowMerge4d(7)), windows)) == 4


class Merge(nn.Module):
    """A merge that knows its size."""

    def __init__(self, merge):
        super().__init__()
        self.merge = merge

    def forward(self, windows):
        return self.merge(windows, (14, 21))


def test_a_pad_by_nothing_stays_behind_the_windows_in_the_exported_graph(tmp_path):
    """Without an operation there, the compiler joins the reshape with the linear layers behind it, at a price."""
    path = export_onnx(WindowPartition4d(7).eval(), tmp_path / "cut.onnx", example_inputs=(torch.zeros(1, 14, 21, 3),))
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds == ["Reshape", "Transpose", "Reshape", "Pad"]


@pytest.mark.parametrize("rule", [CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D])
@pytest.mark.parametrize("late", [SUBSTITUTE_WINDOW, SUBSTITUTE_GLOBAL_WINDOW])
def test_windows_are_chosen_before_their_parts_are_rewritten(rule, late):
    with pytest.raises(RewriteError, match=f"{rule.name} before {late.name}; it must come after"):
        check_order((rule, late))
    check_order((late, rule))
