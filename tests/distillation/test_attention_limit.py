"""Logits that passed the limit come back to it; heads that did not are left alone."""

import pytest
import torch

from lumen_lab.distillation.attention_limit import head_logits, largest_logits, limit_logits
from lumen_lab.distillation.teacher import RECIPE
from lumen_lab.network.swin import WindowAttention


@pytest.fixture
def attention():
    torch.manual_seed(0)
    module = WindowAttention(8, 2, 7).eval()
    with torch.no_grad():
        module.qkv.weight[:4] *= 40  # queries of the first head
        module.qkv.bias.uniform_(-1, 1)
    return module


@pytest.fixture
def tokens():
    return torch.randn(3, 49, 8, generator=torch.Generator().manual_seed(1))


def test_head_logits_are_those_of_the_softmax(attention, tokens):
    """Against a hand-made loop over heads."""
    qkv = (tokens @ attention.qkv.weight.T + attention.qkv.bias).detach()
    found = head_logits(attention, tokens).detach()
    for head in range(2):
        query, key = qkv[..., 4 * head : 4 * head + 4], qkv[..., 8 + 4 * head : 12 + 4 * head]
        logits = torch.einsum("wqc,wkc->wqk", query, key) / 2  # √4
        assert float(found[head]) == pytest.approx(float(logits.abs().max()), rel=1e-5)


def test_a_head_past_the_limit_comes_back_to_it_and_the_other_is_left(attention, tokens):
    before = head_logits(attention, tokens)
    limit = float(before[1]) * 1.5
    assert float(before[0]) > 4 * limit
    other = attention.qkv.weight[4:8].clone(), attention.qkv.weight[12:].clone(), attention.qkv.bias[16:].clone()
    with largest_logits(attention) as seen, torch.no_grad():
        attention(tokens, None)
    limit_logits(attention, seen, limit)
    after = head_logits(attention, tokens)
    assert float(after[0]) == pytest.approx(limit, rel=1e-5)
    assert float(after[1]) == pytest.approx(float(before[1]), rel=1e-6)
    for value, then in zip((attention.qkv.weight[4:8], attention.qkv.weight[12:], attention.qkv.bias[16:]), other):
        assert torch.equal(value, then)


def test_the_largest_of_several_calls_counts_and_no_hook_stays(attention, tokens):
    with largest_logits(attention) as seen, torch.no_grad():
        attention(tokens, None)
        attention(0.01 * tokens, None)
    assert torch.equal(seen[""], head_logits(attention, tokens))
    assert not attention._forward_pre_hooks


def test_within_the_limit_of_the_recipe_a_masked_window_is_a_mask():
    """The mask of a shifted window against a softmax that leaves the masked pairs out, at the limit and past it."""
    tokens = torch.randn(1, 49, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    apart = torch.zeros(49, 49, dtype=torch.bool)
    apart[:21, 21:] = apart[21:, :21] = True
    mask = torch.where(apart, -100.0, 0.0).double()[None]
    for factor, leaks in ((1.0, False), (8.0, True)):
        attention = attention_at(factor * RECIPE.max_attention_logit, tokens)
        with torch.no_grad():
            difference = attention(tokens, mask) - attention(tokens, torch.where(apart, -torch.inf, 0.0).double()[None])
        assert (float(difference.abs().max()) > 1e-9) == leaks, (factor, float(difference.abs().max()))


def attention_at(largest, tokens):
    """Attention whose largest logit on ``tokens`` is ``largest`` in each head."""
    torch.manual_seed(0)
    module = WindowAttention(8, 2, 7).double().eval()
    with torch.no_grad():
        module.qkv.weight[:16] *= 20
        scale = (largest / head_logits(module, tokens)).sqrt().repeat_interleave(4).repeat(2)
        module.qkv.weight[:16] *= scale[:, None]
        module.qkv.bias[:16] *= scale
    return module
