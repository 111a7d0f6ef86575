"""The full-resolution tail with few channels: folded (the same function), or slim (to be learned).

The published tail resizes all features to the image's size and draws 64 and 24 channels from the image there, to give
one. Both forms here make the 1×1 conv before the resize (they commute, since bilinear weights sum to one), and keep
for the image branch only what reaches the one output.

That branch is linear: t = K₁ * image + b₁ inside the image and nothing outside it, then one output from the 3×3
neighbourhood of t, Σ_d k_d · t(p + d), with k the second conv times the 1×1 conv's row. So t is needed only through
its nine products s_d = k_d · t: one 3×3 conv from 3 to 9 channels and one from 9 to 1 compute the branch exactly. The
nine maps are zero outside the image, as t is, which a single 5×5 conv cannot know on the outermost ring of pixels.

The convs run on blocks of pixels (space to depth): with stride 4 and 16 outputs a pixel's worth of channels, so that
the NPU's tiles of 32 channels are full and no map with a few channels at full size has to be kept.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.errors import RewriteError
from lumen_lab.network.decoder import FullResolutionTail, TileBlock, resize
from lumen_lab.rewrites.channels import MEASURED, checked_channels
from lumen_lab.rewrites.convolution import has_hooks, unlike
from lumen_lab.rewrites.record import AS_GOOD_AS_THE_TEACHER, Constraint, Rewrite, Site, by_name, with_weights
from lumen_lab.specs import Exact

TAPS = 9  # products of the hidden map that one output pixel reads: the rank of the image branch
BLOCK = 4
BLOCKS = (1, 2, 4, 8, 16)


class PixelsToBlocks(nn.Module):
    """(N, 1, H, W) -> (N, block², H / block, W / block), row by row, as a conv with ones: no tensor above rank four."""

    def __init__(self, block: int):
        super().__init__()
        self.block = block
        self.register_buffer("ones", torch.eye(block**2).view(block**2, 1, block, block), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.ones, stride=self.block)


class BlockTail(nn.Module):
    """Features (N, C, h, w) and the image (N, 3, H, W) -> logits (N, 1, H, W), H and W multiples of ``block``.

    ``project``: features to one channel, before the resize. ``image_branch``: the image to block² channels at
    (H, W) / block, one a pixel of the block. The decoder's own branch and 1×1 conv are handed over and not used.
    """

    def __init__(self, project: nn.Conv2d, image_branch: nn.Sequential, block: int):
        super().__init__()
        self.project, self.image_branch = project, image_branch
        self.to_blocks = PixelsToBlocks(block) if block > 1 else nn.Identity()
        self.to_pixels = nn.PixelShuffle(block) if block > 1 else nn.Identity()

    def forward(self, features: Tensor, image: Tensor, image_branch: nn.Module, project: nn.Module) -> Tensor:
        logits = resize(self.project(features), image.shape[-2:])
        return self.to_pixels(self.image_branch(image) + self.to_blocks(logits))


def tap_products(branch: TileBlock, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The image branch and its row of the 1×1 conv, (1, channels), as nine products of the hidden map.

    Weights (9, 3, 3, 3) and biases (9,) of s_d = k_d · t, and what is added to their sum: (1,). All in float64.
    """
    first, second = branch.conv1, branch.conv_out
    taps = torch.einsum("o,ohyx->yxh", row[0], second.weight.double()).flatten(0, 1)  # 9, hidden
    weight = torch.einsum("dh,hcyx->dcyx", taps, first.weight.double())
    return weight, taps @ bias_of(first), row @ bias_of(second)


def bias_of(conv: nn.Conv2d) -> Tensor:
    """The bias in float64; zeros if the conv has none."""
    return conv.weight.new_zeros(conv.out_channels).double() if conv.bias is None else conv.bias.double()


def blocked_input(weight: Tensor, block: int) -> Tensor:
    """A 3×3 conv (R, C, 3, 3) as one that gives all pixels of a block: (R·block², C, block + 2, block + 2).

    It slides with stride ``block`` and padding 1; channel order is R, row, column of the block.
    """
    rank, colours = weight.shape[:2]
    new = weight.new_zeros(rank, block, block, colours, block + 2, block + 2)
    for row in range(block):
        for column in range(block):
            new[:, row, column, :, row : row + 3, column : column + 3] = weight
    return new.flatten(0, 2)


def blocked_output(weight: Tensor, block: int) -> Tensor:
    """A 3×3 conv (1, R, 3, 3) between maps kept as blocks: (block², R·block², 3, 3), padding 1 block."""
    rank = weight.shape[1]
    new = weight.new_zeros(block, block, rank, block, block, 3, 3)
    for row in range(block):
        for column in range(block):
            for dy in range(3):
                for dx in range(3):
                    (y, from_row), (x, from_column) = divmod(row + dy - 1, block), divmod(column + dx - 1, block)
                    new[row, column, :, from_row, from_column, y + 1, x + 1] = weight[0, :, dy, dx]
    return new.reshape(block**2, rank * block**2, 3, 3)


def blocked_branch(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], block: int, between: list[nn.Module]):
    """conv 3→R and conv R→1, each given as (weight, bias), as convs over blocks with ``between`` between them."""
    (weight, bias), (weight_out, bias_out) = first, second
    template = nn.Conv2d(1, 1, 1, stride=block, padding=1)
    conv_in = with_weights(template, blocked_input(weight, block), bias.repeat_interleave(block**2))
    template = nn.Conv2d(1, 1, 1, padding=1)
    conv_out = with_weights(template, blocked_output(weight_out, block), bias_out.expand(block**2))
    return nn.Sequential(conv_in, *between, conv_out)


def siblings(site: Site) -> tuple[str, nn.Module | None, nn.Module | None]:
    """The prefix of the tail's siblings, the image branch and the 1×1 conv (None where there is none)."""
    parent = site.path.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return prefix, site.modules.get(f"{prefix}ipt_blk1"), site.modules.get(f"{prefix}conv_out1")


def _with_tail(site: Site, block: int, branch: nn.Sequential) -> dict[str, nn.Module]:
    """The tail with that image branch, and nothing where the decoder's own convs were."""
    prefix, published, (project,) = siblings(site)
    weight = project.weight
    reduced = with_weights(project, weight[:, : weight.shape[1] - published.conv_out.out_channels])
    tail = BlockTail(reduced, branch, block).to(weight)
    return {site.path: tail, f"{prefix}ipt_blk1": nn.Identity(), f"{prefix}conv_out1": nn.Identity()}


def image_row(site: Site) -> tuple[Tensor, Tensor]:
    """What the 1×1 conv does with the image branch: its row (1, channels) and bias (1,), in float64."""
    _, branch, (project,) = siblings(site)
    return project.weight[:, -branch.conv_out.out_channels :, 0, 0].double(), bias_of(project)


def _folded(block: int, site: Site) -> dict[str, nn.Module]:
    row, bias = image_row(site)
    weight, tap_bias, constant = tap_products(siblings(site)[1], row)
    shift_and_add = torch.eye(TAPS).view(1, TAPS, 3, 3).to(weight)
    branch = blocked_branch((weight, tap_bias), (shift_and_add, bias + constant), block, [])
    return _with_tail(site, block, branch)


def _not_the_published_tail(site: Site) -> str | None:
    prefix, branch, project = siblings(site)
    if not isinstance(branch, TileBlock) or not isinstance(project, nn.Sequential) or len(project) != 1:
        return f"beside it are no {prefix}ipt_blk1 and {prefix}conv_out1 as published, whose weights it would take"
    convs = {"conv1": branch.conv1, "conv_out": branch.conv_out, "1×1 conv": project[0]}
    for name, conv in convs.items():
        side = 1 if name == "1×1 conv" else 3
        if unlike(conv, nn.Conv2d) or not _as_published(conv, side):
            return f"its {name} is no plain {side}×{side} Conv2d; fold the tail before its convs are rewritten"
    if branch.conv1.in_channels != 3:
        return f"its image branch reads {branch.conv1.in_channels} channels of tiles, not the image itself"
    if any(map(has_hooks, (site.module, branch, project))):
        return "it or what stands beside it has hooks, which would be lost; remove them first"
    return unlike(site.module, FullResolutionTail)


def _as_published(conv: nn.Conv2d, side: int) -> bool:
    """Whether a conv slides over each pixel once with zeros outside: the settings of the published tail."""
    steps = (conv.stride, conv.dilation, conv.groups)
    return conv.kernel_size == (side, side) and conv.padding == (side // 2,) * 2 and steps == ((1, 1), (1, 1), 1)


def checked_block(block: int) -> int:
    """The value itself; ``RewriteError`` unless the sides of every image, multiples of 32, are multiples of it."""
    if type(block) is not int or block not in BLOCKS:
        raise RewriteError(
            f"block is the side of a block of pixels, one of {', '.join(map(str, BLOCKS))}, asked for {block!r}: it "
            "must divide images, whose sides are multiples of 32, and from 32 on its convs hold 85 million weights."
        )
    return block


def fold_full_resolution_tail(block: int = BLOCK) -> Rewrite:
    """The tail with the 1×1 conv before the resize and nine products of the image branch's hidden map.

    ``block``: side in pixels of the blocks that its convs work on; 1 keeps them at full size. ``RewriteError`` unless
    it is 1, 2, 4, 8 or 16.
    """
    checked_block(block)
    return Rewrite(
        name="fold_full_resolution_tail",
        replaces=FullResolutionTail,
        built=partial(_folded, block),
        refused=_not_the_published_tail,
        claim=Exact(),
        because="maps of a few channels at full size are spilled to DRAM. With a stand-in for the network at 1024², "
        "read + written: in INT8 9.1 + 6.7 MB as published (38.5 + 39.1 once its image is not cut into tiles any more) "
        "and 3.6 + 0.5 on blocks of 4; in float16 573 + 148 and 48 + 35. 2.4 GMAC in place of 16.4",
        source=f"bilinear weights sum to one; rank 9 of the image branch; {MEASURED}",
        excludes=(Constraint("substitute_slim_tail", "both replace the full-resolution tail"),),
        code="fold_full_resolution_tail()" if block == BLOCK else f"fold_full_resolution_tail(block={block})",
    )


FOLD_FULL_RESOLUTION_TAIL = by_name(fold_full_resolution_tail())


# Slim: a few channels with a ReLU between them, so that training can make more of them than a linear map


def signed_pairs(weight: Tensor, bias: Tensor, constant: Tensor, pairs: int) -> tuple[tuple, tuple]:
    """The ``pairs`` strongest components of the image branch, each as relu(s) − relu(−s).

    The nine products, seen as a matrix (9, 3·3·3 + 1) with the bias as one more input, are cut to that rank by SVD;
    returns (weight, bias) of the conv before the ReLU, 2·pairs channels, and of the one behind it.
    """
    products = torch.cat([weight.flatten(1), bias[:, None]], 1)
    u, s, v = torch.linalg.svd(products, full_matrices=False)
    before = s[:pairs, None].sqrt() * v[:pairs]
    behind = (u[:, :pairs] * s[:pairs].sqrt()).t()  # pairs, 9
    before, behind = torch.cat([before, -before]), torch.cat([behind, -behind])
    return (before[:, :-1].view(-1, *weight.shape[1:]), before[:, -1]), (behind.view(1, -1, 3, 3), constant)


def spare_channels(first: tuple, second: tuple, channels: int) -> tuple[tuple, tuple]:
    """The two convs with ``channels`` channels between them; those beyond read something and give nothing yet."""
    (weight, bias), (weight_out, constant) = first, second
    spare = channels - len(weight)
    generator = torch.Generator().manual_seed(spare)
    read = torch.randn((spare, *weight.shape[1:]), generator=generator, dtype=weight.dtype) / weight[0].numel() ** 0.5
    more = (torch.cat([weight, read.to(weight.device)]), F.pad(bias, (0, spare)))
    return more, (F.pad(weight_out, (0, 0, 0, 0, 0, spare)), constant)


def _slim(channels: int, block: int, site: Site) -> dict[str, nn.Module]:
    row, bias = image_row(site)
    weight, tap_bias, constant = tap_products(siblings(site)[1], row)
    first, second = signed_pairs(weight, tap_bias, bias + constant, min(channels // 2, TAPS))
    branch = blocked_branch(*spare_channels(first, second, channels), block, [nn.ReLU(inplace=True)])
    return _with_tail(site, block, branch)


def substitute_slim_tail(channels: int = 16, *, block: int = 1) -> Rewrite:
    """A tail of ``channels`` channels at full size: conv 3×3, ReLU, conv 3×3 on the image, plus the resized logits.

    It starts as the published tail cut to the rank channels // 2: from 18 channels on, as the same function. ``block``
    as for ``fold_full_resolution_tail``; ``RewriteError`` below two channels.
    """
    checked_block(block)
    if checked_channels("channels", channels) < 2:
        raise RewriteError("A slim tail needs at least 2 channels, one for each sign of a component; asked for 1.")
    arguments = f"channels={channels}" + ("" if block == 1 else f", block={block}")
    return Rewrite(
        name="substitute_slim_tail",
        replaces=FullResolutionTail,
        built=partial(_slim, channels, block),
        refused=_not_the_published_tail,
        claim=AS_GOOD_AS_THE_TEACHER,
        because="fewer channels at full size; yet 8, 16 and 32 channels move the same bytes, and more than the folded "
        "tail on blocks, so that it is worth its training only where it draws better edges",
        source=f"Lumen Cutout's published recipe; {MEASURED}",
        excludes=(Constraint("fold_full_resolution_tail", "both replace the full-resolution tail"),),
        code=f"substitute_slim_tail({arguments})",
    )


SUBSTITUTE_SLIM_TAIL = by_name(substitute_slim_tail())
