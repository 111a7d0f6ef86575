"""Attention maps against what the module computed, and places worked out by hand."""

import copy

import numpy as np
import pytest
import torch

from lumen_lab.distillation import attention_maps
from lumen_lab.distillation.attention_maps import attention_of, find_block, place_of
from lumen_lab.errors import LumenError
from lumen_lab.network.swin import SwinBlock

SIZE = (64, 96)


@pytest.fixture(scope="module")
def given():
    return torch.randn(1, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def softmaxed(monkeypatch):
    """Every result of Tensor.softmax, in order."""
    found, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda self, dim: found.append(softmax(self, dim)) or found[-1])
    return found


EVERY = [(stage, block, name) for stage in (1, 2, 3, 4) for block in (1, 2) for name in ("image", "half")]


@pytest.mark.parametrize("stage, block, name", EVERY)
def test_maps_are_the_rows_that_the_module_computed(tiny, given, softmaxed, stage, block, name):
    """The pixel's row, cell by cell: the window of the rolled map that holds it, and what of it lies in the map."""
    pixel = (50, 20)
    with torch.no_grad():
        tiny(given)
    passes = len(softmaxed) // 2
    rows = softmaxed[(name == "half") * passes + 2 * (stage - 1) + block - 1]
    found = attention_of(tiny, given, pixel, stage=stage, block=block, pass_=name)
    height, width = found.reach.shape
    assert (height, width) == tuple(-(-side // (2 ** (stage + 1) * (1 + (name == "half")))) for side in SIZE)
    shift, padded = 3 * (block - 1), [side + -side % 7 for side in (height, width)]
    at = [(cell - shift) % side for cell, side in zip(found.cell, padded)]
    window = at[0] // 7 * (padded[1] // 7) + at[1] // 7
    row = rows[window, :, at[0] % 7 * 7 + at[1] % 7]
    for token in range(49):
        place = [(at[0] // 7 * 7 + token // 7 + shift) % padded[0], (at[1] // 7 * 7 + token % 7 + shift) % padded[1]]
        if place[0] < height and place[1] < width and found.reach[place[0], place[1]]:
            np.testing.assert_allclose(found.maps[:, place[0], place[1]], row[:, token], atol=1e-6)
    np.testing.assert_allclose(found.maps.sum((1, 2)) + found.outside, 1, atol=1e-5)
    assert (found.maps[:, ~found.reach] == 0).all() and found.reach[found.cell]


@pytest.mark.parametrize("shift", [0, 3])
def test_reach_is_the_window_without_what_the_roll_brought_from_the_other_side(tiny, given, shift):
    """Stage 1 of 64 × 96: 16 × 24 tokens. The token (0, 0) of a shifted block shares its window with the last rows."""
    found = attention_of(tiny, given, (0, 0), stage=1, block=1 + (shift > 0))
    assert found.cell == (0, 0)
    wanted = np.zeros((16, 24), bool)
    wanted[: shift or 7, : shift or 7] = True
    np.testing.assert_array_equal(found.reach, wanted)
    inside = attention_of(tiny, given, (30, 40), stage=1, block=1 + (shift > 0))
    assert inside.cell == (7, 10) and inside.reach.sum() == 49
    assert inside.reach[3:10, 10:17].all() if shift else inside.reach[7:14, 7:14].all()


def test_the_window_of_a_cell_by_the_block_s_own_modules(tiny):
    _, plain = find_block(tiny, 1, 1)
    _, shifted = find_block(tiny, 1, 2)
    assert place_of(plain, (0, 0), (16, 24)) == (0, 0)
    assert place_of(plain, (8, 9), (16, 24)) == (5, 9)  # padded to 21 × 28: four windows a row
    assert place_of(shifted, (3, 3), (16, 24)) == (0, 0)
    assert place_of(shifted, (0, 0), (16, 24)) == (11, 4 * 7 + 4)  # rolled to the end


def test_padding_gets_its_share(tiny, given):
    """Stage 4 of the half pass is 1 × 2 in a window of 7 × 7: 47 of 49 tokens are padding."""
    found = attention_of(tiny, given, (0, 0), stage=4, block=1, pass_="half")
    assert found.maps.shape == (8, 1, 2) and found.reach.all()
    assert (found.outside > 0.5).all()


def test_an_attention_that_is_spoilt_is_not_believed(tiny, given, monkeypatch):
    rows = attention_maps.attention_rows
    monkeypatch.setattr(attention_maps, "attention_rows", lambda *given: rows(*given).roll(1, -1))
    with pytest.raises(LumenError, match=r"attention read at 'bb.layers.2.blocks.0' gives another output"):
        attention_of(tiny, given, (5, 5), stage=3, block=1)


def test_a_mask_that_is_left_out_is_not_believed(tiny, given, monkeypatch):
    rows = attention_maps.attention_rows
    monkeypatch.setattr(
        attention_maps, "attention_rows", lambda attention, windows, mask: rows(attention, windows, None)
    )
    attention_of(tiny, given, (5, 5), stage=1, block=1)  # has no mask
    with pytest.raises(LumenError, match="gives another output"):
        attention_of(tiny, given, (5, 5), stage=1, block=2)


def test_another_pixel_of_the_token_has_the_same_maps_and_another_token_others(tiny, given):
    first, same, other = (attention_of(tiny, given, (0, c), stage=2, block=1).maps for c in (0, 7, 8))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 0


def test_a_head_that_looks_only_at_itself(tiny, given):
    """A position bias that forbids all but offset (0, 0)."""
    network = copy.deepcopy(tiny)
    table = network.bb.layers[1].blocks[0].attn.relative_position_bias_table
    with torch.no_grad():
        table.fill_(-1000.0)
        table[13 * 6 + 6] = 0.0
    found = attention_of(network, given, (20, 30), stage=2, block=1)
    assert [row["to itself"] for row in found.rows()] == pytest.approx([1.0, 1.0])
    for row in found.rows():
        assert row["mean distance, tokens"] == pytest.approx(0, abs=1e-6)
        assert row["tokens in effect"] == pytest.approx(1) and row["outside"] == pytest.approx(0, abs=1e-6)


def test_what_there_is_not_is_refused(tiny, tiny_student, given):
    with pytest.raises(LumenError, match=r"Block 3 of stage 1 was asked for, 'bb.layers.0.blocks.2'; the network has"):
        attention_of(tiny, given, (0, 0), stage=1, block=3)
    with pytest.raises(LumenError, match="runs on 'image' and on 'half'"):
        attention_of(tiny, given, (0, 0), stage=1, block=1, pass_="third")
    with pytest.raises(LumenError, match="row 64, column 0"):
        attention_of(tiny, given, (64, 0), stage=1, block=1)
    with pytest.raises(LumenError, match="was rewritten"):
        attention_of(tiny_student, given, (0, 0), stage=1, block=1)
    with pytest.raises(LumenError, match="in eval mode"):
        attention_of(copy.deepcopy(tiny).train(), given, (0, 0), stage=1, block=1)
    assert isinstance(find_block(tiny, 4, 2)[1], SwinBlock)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny.modules())
