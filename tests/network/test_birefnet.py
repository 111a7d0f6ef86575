"""Parts of the network: shifted windows at odd sizes, side outputs, the deformable conv, the three presets."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import lumen_lab
from lumen_lab.errors import CheckpointError, ImageError
from lumen_lab.network import LARGE, LITE, MICRO, BiRefNet, load_network
from lumen_lab.network.decoder import ImageTiles, SideOutputs
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.network.swin import (
    MASKED,
    CyclicShift,
    CyclicUnshift,
    PatchEmbed,
    PatchMerging,
    SwinBlock,
    WindowMerge,
    WindowPartition,
)


def numbered(height, width, channels=1):
    """A map whose every value is different: (1, H, W, C)."""
    return torch.arange(height * width * channels, dtype=torch.float64).view(1, height, width, channels)


def attention_by_hand(block, x):
    """Shifted-window attention token by token: who sees whom is decided in image coordinates."""
    _, height, width, channels = x.shape
    w, attn = block.window, block.attn
    normed = block.norm1(x)
    padded = nn.functional.pad(normed, (0, 0, 0, -width % w, 0, -height % w))[0]
    rows, columns = padded.shape[:2]
    tokens = [(r, c) for r in range(rows) for c in range(columns)]
    shift = block.shift.shift
    # On the shifted grid a window starts at a multiple of w, less w − shift, and is cut at the edge of the map.
    window = {(r, c): ((r + w - shift) // w if shift else r // w, (c + w - shift) // w if shift else c // w)
              for r, c in tokens}  # fmt: skip
    qkv = attn.qkv(padded.reshape(-1, channels)).view(-1, 3, attn.heads, channels // attn.heads)
    position = torch.tensor(tokens)
    apart = position[:, None] - position[None] + w - 1
    same = torch.tensor([[window[a] == window[b] for b in tokens] for a in tokens])
    index = (apart[..., 0] * (2 * w - 1) + apart[..., 1]).masked_fill(~same, 0)
    bias = attn.relative_position_bias_table[index].permute(2, 0, 1)
    logits = torch.einsum("qhc,khc->hqk", qkv[:, 0] * attn.scale, qkv[:, 1]) + bias
    weights = logits.masked_fill(~same, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khc->qhc", weights, qkv[:, 2]).reshape(rows, columns, channels)
    return attn.proj(mixed)[None, :height, :width]


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("size", [(5, 7), (6, 6), (7, 4), (2, 9)])
def test_attention_at_odd_and_padded_sizes_is_that_of_each_token_by_hand(size, shift):
    torch.manual_seed(0)
    block = SwinBlock(8, 2, 3, shift, 0.0).double()
    nn.init.normal_(block.attn.relative_position_bias_table)
    nn.init.normal_(block.attn.qkv.bias)
    x = torch.randn(1, *size, 8, dtype=torch.float64)
    with torch.no_grad():
        found, expected = block.attend(block.norm1(x)), attention_by_hand(block, x)
    # A token that is masked keeps exp(−100) of its weight: nothing in float64.
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [0, 3])
def test_shift_and_partition_come_back_to_the_same_map(shift):
    x = numbered(14, 21, 2)
    shifted, mask = CyclicShift(7, shift)(x)
    back = WindowMerge(7)(WindowPartition(7)(shifted), (14, 21))
    assert torch.equal(CyclicUnshift(shift)(back, (12, 20)), x[:, :12, :20])
    assert (mask is None) == (shift == 0)
    assert mask is None or set(mask.unique().tolist()) == {MASKED, 0.0}


def test_windows_are_in_row_major_order():
    windows = WindowPartition(2)(numbered(4, 6))
    assert windows[1].flatten().tolist() == [2, 3, 8, 9]
    assert windows[3].flatten().tolist() == [12, 13, 18, 19]


def test_patch_merging_pads_an_odd_map_with_zeros():
    merging = PatchMerging(1).double()
    merging.norm = nn.Identity()
    merging.reduction = nn.Identity()
    merged = merging(numbered(3, 3) + 1)
    assert merged[0, 0, 0].tolist() == [1, 4, 2, 5]  # (0,0), (1,0), (0,1), (1,1)
    assert merged[0, 1, 1].tolist() == [9, 0, 0, 0]


def test_patch_embedding_pads_an_image_that_four_does_not_divide():
    embed = PatchEmbed(8)
    image = torch.randn(1, 3, 6, 9)
    padded = nn.functional.pad(image, (0, 3, 0, 2))
    assert torch.equal(embed(image), embed(padded))
    assert embed(image).shape == (1, 2, 3, 8)


def test_tiles_are_contiguous_pieces_ordered_by_colour_row_and_column():
    image = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    tiles = ImageTiles()(image, (2, 2))
    assert tiles.shape == (2, 18, 2, 2)
    for channel, (colour, row, column) in enumerate(np.ndindex(3, 2, 3)):
        piece = image[:, colour, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert torch.equal(tiles[:, channel], piece)


@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_deformable_conv_with_zero_offsets_is_the_regular_conv(kernel):
    torch.manual_seed(kernel)
    deform = DeformableConv2d(3, 5, kernel)  # offsets and modulators are initialised with zeros
    x = torch.randn(2, 3, 6, 9)
    with torch.no_grad():
        assert torch.allclose(deform(x), deform.regular_conv(x), atol=1e-5)
        deform.offset_conv.bias.fill_(0.5)
        assert not torch.allclose(deform(x), deform.regular_conv(x), atol=1e-2)


def test_deformable_conv_looks_where_the_offset_points():
    deform = DeformableConv2d(1, 1, 1)
    x = numbered(4, 5).permute(0, 3, 1, 2).float() + 1
    with torch.no_grad():
        deform.regular_conv.weight.fill_(1.0)
        deform.offset_conv.bias.copy_(torch.tensor([1.0, -2.0]))  # dy, dx
        out = deform(x)[0, 0]
    assert out[0].tolist() == [0, 0, 6, 7, 8]  # one row below, two columns to the left; outside is zero
    assert out[3].tolist() == [0] * 5


def test_training_mode_returns_side_outputs_whose_last_mask_is_the_output(tiny_config):
    network = BiRefNet(tiny_config).train()
    image = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        side = network(image)
        output = network.eval()(image)
    assert isinstance(side, SideOutputs)
    assert [tuple(mask.shape) for mask in side.masks] == [(2, 1, 2, 3), (2, 1, 4, 6), (2, 1, 8, 12), (2, 1, 64, 96)]
    assert [tuple(edge.shape) for edge in side.gradients] == [(2, 1, 2, 3), (2, 1, 4, 6), (2, 1, 8, 12)]
    assert side.masks[-1].shape == output.shape


def test_last_side_output_is_the_logit_map_of_evaluation_when_nothing_is_random(tiny, tiny_config):
    still = BiRefNet(dataclasses.replace(tiny_config, drop_path_rate=0.0)).train()
    still.load_state_dict(tiny.state_dict())
    for module in still.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.eval()
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(still(image).masks[-1], tiny(image))


def test_every_parameter_learns_from_the_side_outputs(tiny_config):
    network = BiRefNet(tiny_config).train()
    side = network(torch.randn(2, 3, 64, 64))
    sum(x.float().square().sum() for x in (*side.masks, *side.gradients)).backward()
    still = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert still == []


def test_images_of_a_batch_do_not_see_each_other(tiny):
    images = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        together, alone = tiny(images), torch.cat([tiny(images[:1]), tiny(images[1:])])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3, 65, 96), (1, 3, 64, 80), (1, 1, 64, 64), (3, 64, 64)])
def test_image_that_the_tiles_cannot_cut_is_refused(tiny, shape):
    with pytest.raises(ImageError, match="multiples of 32, found"):
        tiny(torch.zeros(shape))


@pytest.mark.parametrize(
    ("config", "millions", "tolerance"),
    [(LITE, 44.313720, 0), (LARGE, 220.2, 0.1), (MICRO, 6.1, 0.1)],  # LARGE: published as about 220 million
)
def test_presets_build_on_the_meta_device_with_the_expected_parameters(config, millions, tolerance):
    with torch.device("meta"):
        network = BiRefNet(config)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert abs(count / 1e6 - millions) <= tolerance
    assert sum(isinstance(module, DeformableConv2d) for module in network.modules()) == 20


def test_presets_are_found_by_name_and_unknown_ones_are_listed():
    assert load_network("micro", weights=None).config is MICRO
    with pytest.raises(CheckpointError, match="No preset 'nope'; the presets are micro, lite, large"):
        load_network("nope")


def test_loaded_network_is_in_eval_mode_and_the_door_is_the_same_function():
    assert lumen_lab.load_network is load_network
    assert not load_network("micro", "golden").training
