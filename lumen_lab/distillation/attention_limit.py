"""Attention logits kept small enough for the shifted-window mask of −100 to stay a mask.

Swin adds −100 to the logits of pairs that the cyclic shift brought together. While every logit, the position bias
included, lies within ±30 the masked ones weigh at most e^−40 of the others; from ±50 on the mask can leak, an exact
rewrite of the padding is exact no more, and eight bits have no step left for what matters. Training at a high rate gets
there in a few thousand steps.

The cure follows QK-clip (Kimi K2, 2025, arXiv:2507.20534, section 2.1): a head whose logits pass the limit has its
query and key projections scaled down by the square root of the excess each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lumen_lab.network.swin import WindowAttention


@contextmanager
def largest_logits(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While the block runs: attention path → largest |query · key| of each head, scaled, before bias and mask.

    The position bias is left out: it stays within a few units, and scaling the projections would not move it.
    """
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(_recorder(path, seen))
        for path, module in model.named_modules()
        if isinstance(module, WindowAttention)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def limit_logits(model: nn.Module, seen: dict[str, Tensor], limit: float | None) -> None:
    """Scale the queries and keys of every head whose logits were ``seen`` to pass ``limit``, in place.

    Several processes must agree on what was seen, or their copies part.
    """
    for path, largest in seen.items():
        attention = model.get_submodule(path)
        scale = (limit / largest.clamp(min=limit)).sqrt()  # one a head
        channels = attention.qkv.in_features
        rows = scale.repeat_interleave(channels // attention.heads).repeat(2)  # of queries, then of keys
        with torch.no_grad():
            attention.qkv.weight[: 2 * channels] *= rows[:, None]
            attention.qkv.bias[: 2 * channels] *= rows


def _recorder(path: str, seen: dict[str, Tensor]):
    def record(module: WindowAttention, inputs: tuple) -> None:
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            largest = head_logits(module, inputs[0].float())
        seen[path] = torch.maximum(seen[path], largest) if path in seen else largest

    return record


def head_logits(attention: WindowAttention, x: Tensor) -> Tensor:
    """Largest |logit| of each head for tokens (windows, tokens, C): (heads,)."""
    count, tokens, channels = x.shape
    weight, bias = attention.qkv.weight[: 2 * channels], attention.qkv.bias[: 2 * channels]
    pairs = nn.functional.linear(x, weight, bias).view(count, tokens, 2, attention.heads, channels // attention.heads)
    query, key = pairs.permute(2, 0, 3, 1, 4).unbind(0)
    return ((query * attention.scale) @ key.transpose(-2, -1)).abs().amax((0, 2, 3))
