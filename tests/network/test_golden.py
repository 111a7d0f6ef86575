"""BiRefNet-lite against what the published network computed with the same weights, and spoiled networks against both.

The golden weights depend on names and shapes alone, so the comparison needs no trained weights.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.network import birefnet, decoder, deform, swin
from lumen_lab.network.golden import golden_image, golden_state_dict, golden_tensor
from lumen_lab.taps import tap

TOLERANCE = 1e-4  # float32 over about a hundred layers, another order of summation


def image(height, width):
    return torch.from_numpy(golden_image(height, width))


def worst(found, expected):
    assert tuple(found.shape) == expected.shape
    return float((found - torch.from_numpy(expected)).abs().max())


def test_layout_is_the_published_one(lite, published_layout):
    found = {n: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for n, v in lite.state_dict().items()}
    assert len(published_layout) == 586
    assert found == published_layout


def test_lite_has_the_published_number_of_parameters(lite):
    assert sum(parameter.numel() for parameter in lite.parameters()) == 44_313_720


@pytest.mark.parametrize("size", [(96, 96), (160, 224)])
def test_logits_are_those_of_the_published_network(lite, recorded, size):
    with torch.no_grad():
        assert worst(lite(image(*size)), recorded(*size)["logits"]) <= TOLERANCE


def test_every_recorded_intermediate_agrees(lite, recorded):
    expected = recorded(96, 96)
    paths = [name for name in expected if name != "logits" and not name.startswith("encoder.")]
    with torch.no_grad(), tap(lite, paths) as taps:
        maps = lite.encode(*lite.input_paths(image(96, 96)))
        lite(image(96, 96))
    encoder = dict(zip(("x1", "x2", "x3", "x4_with_context"), maps, strict=True))
    differences = {f"encoder.{name}": worst(value, expected[f"encoder.{name}"]) for name, value in encoder.items()}
    differences |= {path: worst(taps[path].outputs[0], expected[path]) for path in paths}
    assert len(differences) == 14
    assert max(differences.values()) <= TOLERANCE, differences


# What another implementation gets wrong most easily; each must show in the numbers.


def neighbours_row_by_row(self, x):
    height, width = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
    neighbours = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
    return self.reduction(self.norm(torch.cat(neighbours, -1)))


def padded_before_the_norm(self, x):
    height, width = x.shape[1:3]
    pad = (0, 0, 0, -width % self.window, 0, -height % self.window)
    full = self.norm1(F.pad(x, pad))
    shifted, mask = self.shift(full)
    windows = self.attn(self.partition(shifted), mask)
    attended = self.unshift(self.merge(windows, full.shape[1:3]), (height, width))
    x = x + attended
    return x + self.mlp(self.norm2(x))


def padding_not_attended(self, x, mask):
    real = (x != 0).any(-1)  # padding is zero after the norm
    count, tokens, channels = x.shape
    qkv = self.qkv(x).view(count, tokens, 3, self.heads, channels // self.heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    logits = (query * self.scale) @ key.transpose(-2, -1) + self.position_bias()
    if mask is not None:
        logits = logits + mask.repeat(count // mask.shape[0], 1, 1)[:, None]
    logits = logits.masked_fill(~real[:, None, None, :], -1e4)
    return self.proj((logits.softmax(-1) @ value).transpose(1, 2).reshape(count, tokens, channels))


def no_regions(size, window, shift, device=None):
    return torch.zeros(1, *size, 1, dtype=torch.int64)


def corners_not_aligned(x, size):
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def pixel_unshuffled(self, image, size):
    return F.pixel_unshuffle(image, image.shape[-1] // size[1])


def modulator_up_to_one(self, x):
    modulator = torch.sigmoid(self.modulator_conv(x))
    return deform.deform_conv2d(x, self.offset_conv(x), self.regular_conv.weight, padding=self.padding, mask=modulator)


def offsets_x_first(self, x):
    offset = self.offset_conv(x).unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
    modulator = 2 * torch.sigmoid(self.modulator_conv(x))
    return deform.deform_conv2d(x, offset, self.regular_conv.weight, padding=self.padding, mask=modulator)


def activated_tiles(self, image, size):
    return self.conv_out(F.relu(self.conv1(self.tiles(image, size))))


def roll_the_other_way(self, x):
    rolled, mask = SHIFT(self, x)
    return (torch.roll(rolled, (2 * self.shift, 2 * self.shift), (1, 2)), mask) if self.shift else (x, None)


def no_gate(self, features, level, side):
    return features


def context_behind(self, image, half):
    x1, x2, x3, x4 = ENCODE(self, image, half)
    last = self.config.lateral_channels[3]
    return x1, x2, x3, torch.cat([x4[:, -last:], x4[:, :-last]], 1)


SHIFT = swin.CyclicShift.forward
ENCODE = birefnet.BiRefNet.encode

SPOILED = {
    "neighbours in another order": (swin.PatchMerging, "forward", neighbours_row_by_row),
    "padding before the norm": (swin.SwinBlock, "forward", padded_before_the_norm),
    "padded tokens masked": (swin.WindowAttention, "forward", padding_not_attended),
    "no mask on shifted windows": (swin, "shifted_window_regions", no_regions),
    "roll in the other direction": (swin.CyclicShift, "forward", roll_the_other_way),
    "corners not aligned in the encoder": (birefnet, "resize", corners_not_aligned),
    "corners not aligned in the decoder": (decoder, "resize", corners_not_aligned),
    "pixel-unshuffle in place of tiles": (decoder.ImageTiles, "forward", pixel_unshuffled),
    "activation between the tile convs": (decoder.TileBlock, "forward", activated_tiles),
    "modulator in (0, 1)": (deform.DeformableConv2d, "forward", modulator_up_to_one),
    "offsets as (x, y)": (deform.DeformableConv2d, "forward", offsets_x_first),
    "gates left out": (decoder.Decoder, "gated", no_gate),
    "context behind the deepest map": (birefnet.BiRefNet, "encode", context_behind),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_spoiled_network_leaves_the_tolerance(lite, recorded, monkeypatch, spoiled):
    owner, name, replacement = SPOILED[spoiled]
    monkeypatch.setattr(owner, name, replacement)
    with torch.no_grad():
        assert worst(lite(image(96, 96)), recorded(96, 96)["logits"]) > TOLERANCE


def test_another_eps_of_the_norms_leaves_the_tolerance(lite, recorded, monkeypatch):
    for module in lite.modules():
        if isinstance(module, nn.LayerNorm):
            monkeypatch.setattr(module, "eps", 1e-3)
    with torch.no_grad():
        assert worst(lite(image(96, 96)), recorded(96, 96)["logits"]) > TOLERANCE


def test_golden_weights_depend_on_salt_name_and_shape_alone():
    layout = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).state_dict()
    first, second = golden_state_dict(layout), golden_state_dict(layout, salt=1)
    assert torch.equal(first["0.weight"], torch.from_numpy(golden_tensor("0.weight", (3, 2, 3, 3), 0)))
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert (first["1.running_var"] > 0.4).all()
    assert first["1.num_batches_tracked"].dtype == torch.int64
