"""Where the heads of a Swin block look from one pixel, in either pass of the encoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lumen_lab.distillation.head_readings import cell_of, check_pixel
from lumen_lab.distillation.heads import array_of, network_input
from lumen_lab.errors import LumenError
from lumen_lab.network.swin import MASKED, SwinBlock, WindowAttention
from lumen_lab.taps import Tap, tap

PASSES = ("image", "half")
SITE = "bb.layers.{}.blocks.{}"
SAME_WITHIN = 1e-4  # of the largest value: float32 sums in another order


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """What one token of a Swin block attends to: ``maps`` (heads, h, w), zero outside of its window.

    ``site``: the block's path; ``pass_``: "image" or "half", the encoder's run on the picture or on its half. ``cell``:
    the token's (row, column) in the map; ``pixel`` and ``size``: what was asked for, in the picture (H, W). ``reach``
    (h, w): which tokens it may look at: those of its window that the cyclic shift did not bring from the other side.
    ``outside`` (heads,): the share that goes to padding, and past the mask; maps and it sum to 1.
    """

    site: str
    pass_: str
    pixel: tuple[int, int]
    size: tuple[int, int]
    cell: tuple[int, int]
    maps: np.ndarray
    reach: np.ndarray
    outside: np.ndarray

    def rows(self) -> list[dict[str, object]]:
        """A row for each head: how much it gives to its own token, how far it looks in tokens, how spread it is."""
        rows, columns = np.indices(self.reach.shape)
        distance = np.hypot(rows - self.cell[0], columns - self.cell[1])
        return [
            {
                "head": number,
                "to itself": float(each[self.cell]),
                "mean distance, tokens": float((each * distance).sum() / max(float(each.sum()), 1e-12)),
                "tokens in effect": float(1 / max(float(np.square(each / max(float(each.sum()), 1e-12)).sum()), 1e-12)),
                "outside": float(self.outside[number - 1]),
            }
            for number, each in enumerate(self.maps, start=1)
        ]


@torch.no_grad()
def attention_of(
    network: nn.Module,
    image: np.ndarray | Tensor,
    pixel: tuple[int, int],
    *,
    stage: int,
    block: int,
    pass_: str = "image",
    size: tuple[int, int] | None = None,
) -> AttentionMaps:
    """Where every head of one Swin block looks from ``pixel`` (row, column) of the picture at the network's size.

    ``stage`` 1 to 4 and ``block`` from 1, shallow to deep; ``pass_``: which of the encoder's two runs. ``image`` and
    ``size`` as for ``read_heads``. The softmax is computed from the block's own weights and input, and the block's
    output is computed from it and compared: ``LumenError`` if that differs, for a block that is not there or whose
    attention was rewritten, and for a pixel outside of the picture.
    """
    given = network_input(network, image, size=size)
    pixel = check_pixel(pixel, tuple(given.shape[-2:]))
    site, swin = find_block(network, stage, block)
    if pass_ not in PASSES:
        raise LumenError(f"pass_='{pass_}' was asked for; the encoder runs on 'image' and on 'half'.")
    if network.training:
        raise LumenError("Attention is read in eval mode, found a network in training mode; call .eval().")
    with tap(network, [site, f"{site}.attn"]) as taps:
        network(given)
    call = PASSES.index(pass_)
    height, width = taps[site].inputs[call][0].shape[1:3]
    cell = cell_of(pixel, tuple(given.shape[-2:]), (height, width))
    windows, mask = attention_inputs(taps[f"{site}.attn"], call)
    rows = attention_rows(swin.attn, windows, mask)
    check_output(swin.attn, windows, rows, taps[f"{site}.attn"].outputs[call], site)
    window, token = place_of(swin, cell, (height, width))
    weights = rows[window, :, token]  # heads, tokens
    free = torch.ones_like(weights[:1]) if mask is None else (mask[window, token] > MASKED / 2).to(weights)[None]
    maps = put_back(swin, weights * free, window, len(rows), (height, width))
    reach = put_back(swin, free, window, len(rows), (height, width))[0] > 0
    return AttentionMaps(
        site, pass_, pixel, tuple(given.shape[-2:]), cell, maps, reach, np.clip(1 - maps.sum((1, 2)), 0, 1)
    )


def find_block(network: nn.Module, stage: int, block: int) -> tuple[str, SwinBlock]:
    """Path and module of a Swin block; ``LumenError`` that says what there is."""
    modules = dict(network.named_modules())
    site = SITE.format(stage - 1, block - 1)
    if site not in modules:
        there = sorted(path for path in modules if isinstance(modules[path], SwinBlock))
        names = ", ".join(there) or "no Swin block at all"
        raise LumenError(f"Block {block} of stage {stage} was asked for, '{site}'; the network has {names}.")
    found = modules[site]
    if not isinstance(found, SwinBlock) or type(found.attn) is not WindowAttention:
        kind = type(getattr(found, "attn", found)).__name__
        raise LumenError(f"The attention at '{site}' was rewritten ({kind}); read it off the float network.")
    return site, found


def attention_inputs(taps: Tap, call: int) -> tuple[Tensor, Tensor | None]:
    """Windows (count, tokens, C) and their mask (count, tokens, tokens) or None, as one call got them."""
    windows, mask = taps.inputs[call]
    return windows, mask


def attention_rows(attention: WindowAttention, windows: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d + position bias + mask) of every window: (windows, heads, tokens, tokens), rows sum to 1."""
    count, tokens, channels = windows.shape
    qkv = attention.qkv(windows).view(count, tokens, 3, attention.heads, channels // attention.heads)
    query, key, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    logits = (query * attention.scale) @ key.transpose(-2, -1) + attention.position_bias()
    return (logits if mask is None else logits + mask[:, None]).softmax(-1)


def check_output(attention: WindowAttention, windows: Tensor, rows: Tensor, output: Tensor, site: str) -> None:
    """``LumenError`` unless these rows give the output that the module gave."""
    count, tokens, channels = windows.shape
    value = attention.qkv(windows).view(count, tokens, 3, attention.heads, channels // attention.heads)[:, :, 2]
    mixed = (rows @ value.transpose(1, 2)).transpose(1, 2).reshape(count, tokens, channels)
    apart = float((attention.proj(mixed) - output).abs().max())
    if not apart <= SAME_WITHIN * max(1.0, float(output.abs().max())):
        raise LumenError(f"The attention read at '{site}' gives another output than the module did, by {apart:.2g}.")


def place_of(block: SwinBlock, cell: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """(window, token) where the block's own shift and partition bring a cell of its map (h, w)."""
    marked = torch.zeros(1, *size, 1)
    marked[0, cell[0], cell[1], 0] = 1
    padding = (0, 0, 0, -size[1] % block.window, 0, -size[0] % block.window)
    shifted, _ = block.shift(nn.functional.pad(marked, padding))
    window, token = block.partition(shifted)[..., 0].nonzero()[0].tolist()
    return window, token


def put_back(block: SwinBlock, weights: Tensor, window: int, windows: int, size: tuple[int, int]) -> np.ndarray:
    """Weights (heads, tokens) of one window at their places in the map: float32 (heads, h, w), zero elsewhere."""
    all_windows = torch.zeros(windows, weights.shape[1], len(weights))
    all_windows[window] = weights.float().cpu().T
    padded = tuple(side + -side % block.window for side in size)
    return array_of(block.unshift(block.merge(all_windows, padded), size).permute(0, 3, 1, 2))
