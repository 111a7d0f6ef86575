"""The full-resolution tail folded (the same function, its border included) and slim (the same from 18 channels on)."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.equivalence import check_equivalence
from lumen_lab.errors import RewriteError
from lumen_lab.network.decoder import FullResolutionTail, TileBlock
from lumen_lab.network.golden import golden_state_dict
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.rewrites.tail import (
    FOLD_FULL_RESOLUTION_TAIL,
    SUBSTITUTE_SLIM_TAIL,
    TAPS,
    BlockTail,
    blocked_input,
    blocked_output,
    fold_full_resolution_tail,
    substitute_slim_tail,
)
from lumen_lab.specs import Exact


class Tail(nn.Module):
    """The tail with the decoder's convs beside it; the features are a quarter of the image, cut at the border."""

    def __init__(self, config, *, features=6, from_image=5, bias=True):
        super().__init__()
        self.ipt_blk1 = TileBlock(1, from_image, dataclasses.replace(config, tile_width=12))
        self.conv_out1 = nn.Sequential(nn.Conv2d(features + from_image, 1, 1, bias=bias))
        self.tail = FullResolutionTail()
        self.features = features

    def forward(self, image):
        features = image.repeat(1, self.features // 3, 1, 1)[..., 1::4, 2::4]
        return self.tail(features, image, self.ipt_blk1, self.conv_out1)


@pytest.fixture(scope="module")
def tail(tiny_config):
    return filled(Tail(tiny_config))


def filled(module):
    """Golden weights; the biases large, since what they do at the border is easily lost."""
    module.load_state_dict(golden_state_dict(module.state_dict()))
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.add_(1.0)
    return module.eval()


def images(*sizes, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 3, *size, generator=generator) for size in sizes]


EVEN = images((8, 16), (4, 4), (12, 8))
WIDE = images((32, 64))
ANY = images((7, 10), (3, 5), (2, 3), (9, 3))


@pytest.mark.parametrize(("block", "samples"), [(16, WIDE), (4, EVEN), (2, EVEN), (1, EVEN), (1, ANY)])
def test_the_folded_tail_is_the_same_to_the_last_pixel_of_the_border(tail, block, samples):
    rule = fold_full_resolution_tail(block)
    table = check_plan(tail, (rule,), samples=samples)
    assert table.passed, table.failed
    assert [verdict.name for verdict in table.verdicts] == [rule.name, "whole network"]
    assert table.verdicts[0].max_abs <= 1e-12


def test_convs_without_bias_and_one_pixel_fold_too(tiny_config):
    model = filled(Tail(tiny_config, bias=False))
    model.ipt_blk1.conv1.bias = model.ipt_blk1.conv_out.bias = None
    table = check_plan(model, (fold_full_resolution_tail(1),), samples=images((3, 3), (3, 8)))
    assert table.passed, table.failed


def test_the_tail_of_the_network_and_its_weights(tiny):
    done = rewrite(tiny, (FOLD_FULL_RESOLUTION_TAIL,))
    (entry,) = done.log.applied()
    assert entry.site == "decoder"
    assert entry.replaced == ("decoder.tail", "decoder.ipt_blk1", "decoder.conv_out1")
    names = [name for name in done.model.state_dict() if name.startswith("decoder.tail")]
    assert len(names) == 1 + 4  # the 1×1 conv, without bias, and the two of the image
    assert not any("ipt_blk1" in name or "conv_out1" in name for name in done.model.state_dict())
    image = images((64, 96))[0]
    with torch.no_grad():
        assert torch.allclose(done.model(image), tiny(image), atol=1e-5)


def test_training_mode_returns_the_side_outputs(tiny):
    model = rewrite(tiny, (FOLD_FULL_RESOLUTION_TAIL,)).model.train()
    with torch.no_grad():
        outputs = model(images((64, 96))[0])
    assert [tuple(mask.shape[-2:]) for mask in outputs.masks] == [(2, 3), (4, 6), (8, 12), (64, 96)]


@pytest.mark.parametrize("rule", [FOLD_FULL_RESOLUTION_TAIL, SUBSTITUTE_SLIM_TAIL], ids=lambda rule: rule.name)
def test_gradients_reach_every_weight(tail, rule):
    model = rewrite(tail, (rule,), example_inputs=(EVEN[0],)).model.train()
    model(EVEN[0]).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.tail.parameters())


@pytest.mark.parametrize("rule", [FOLD_FULL_RESOLUTION_TAIL, substitute_slim_tail(18)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_new_tail_follows_the_networks_dtype(tail, rule, dtype):
    done = rewrite(copy.deepcopy(tail).to(dtype), (rule,), example_inputs=(EVEN[0].to(dtype),)).model
    assert {value.dtype for value in (*done.parameters(), *done.buffers())} == {dtype}
    again = copy.deepcopy(done).double()
    with torch.no_grad():
        expected = copy.deepcopy(tail).double()(EVEN[0].double())
        assert torch.allclose(again(EVEN[0].double()), expected, atol=0.1 if dtype == torch.float16 else 1e-9)


# Convs over blocks


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_a_conv_over_blocks_is_the_conv_over_pixels(block):
    torch.manual_seed(block)
    image = torch.randn(2, 3, 12, 24, dtype=torch.float64)
    first, second = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 3, 3, 3), (1, 5, 3, 3)))
    hidden = F.conv2d(image, first, padding=1)
    blocks = F.conv2d(image, blocked_input(first, block), stride=block, padding=1)
    assert torch.allclose(F.pixel_shuffle(blocks, block), hidden, atol=1e-12)
    assert torch.allclose(
        F.pixel_shuffle(F.conv2d(blocks, blocked_output(second, block), padding=1), block),
        F.conv2d(hidden, second, padding=1),
        atol=1e-12,
    )


# Spoiled


class FiveByFive(BlockTail):
    """The two convs as one 5×5: right inside, wrong on the ring where the hidden map ends."""

    def forward(self, features, image, image_branch, project):
        conv_in, conv_out = self.image_branch
        ring = F.pad(image, (1, 1, 1, 1))
        branch = F.conv2d(F.conv2d(ring, conv_in.weight, conv_in.bias, padding=1), conv_out.weight, conv_out.bias)
        return (
            F.interpolate(self.project(features), size=image.shape[-2:], mode="bilinear", align_corners=True) + branch
        )


def with_class(kind):
    def change(module):
        module.__class__ = kind

    return change


class PixelCentres(BlockTail):
    def forward(self, features, image, image_branch, project):
        logits = F.interpolate(self.project(features), size=image.shape[-2:], mode="bilinear", align_corners=False)
        return logits + self.to_pixels(self.image_branch(image))


def weight_nudged(module):
    weight = module.image_branch[0].weight.data
    weight.view(-1)[weight.abs().argmax()] *= 1.0001


def rolled(module):
    module.image_branch[1].weight.data = module.image_branch[1].weight.data.roll(1, -1)


def blocks_column_first(module):
    b = module.to_blocks.block
    for parameter in module.image_branch[1].parameters():
        parameter.data = parameter.data.unflatten(0, (b, b)).transpose(0, 1).flatten(0, 1)


def hidden_bias_dropped(module):
    module.image_branch[0].bias.data.zero_()


def bias_of_the_projection_twice(module):
    module.project.bias = nn.Parameter(module.image_branch[1].bias.data[:1].clone())


SPOILED = {
    "one 5×5 conv": (1, with_class(FiveByFive)),
    "corners not aligned": (4, with_class(PixelCentres)),
    "weight nudged": (4, weight_nudged),
    "rolled one block": (4, rolled),
    "blocks column first": (4, blocks_column_first),
    "hidden bias dropped": (4, hidden_bias_dropped),
    "bias twice": (4, bias_of_the_projection_twice),
}


def spoiled(rule, change):
    def built(site):
        modules = rule.built(site)
        change(modules[site.path])
        return modules

    return dataclasses.replace(rule, built=built)


@pytest.mark.parametrize("mistake", SPOILED)
def test_a_spoiled_fold_fails(tail, mistake):
    block, change = SPOILED[mistake]
    table = check_plan(tail, (spoiled(fold_full_resolution_tail(block), change),), samples=EVEN[:1])
    assert {verdict.name for verdict in table.failed} == {"fold_full_resolution_tail", "whole network"}


def test_one_five_by_five_conv_is_wrong_on_the_ring_alone(tail):
    rule = fold_full_resolution_tail(1)
    wrong = rewrite(tail, (spoiled(rule, with_class(FiveByFive)),), example_inputs=(EVEN[0],)).model
    with torch.no_grad():
        difference = (wrong(EVEN[0]) - tail(EVEN[0])).abs()
    assert difference[..., 1:-1, 1:-1].max() <= 1e-5 < 1e-3 < difference.max()


# Slim


def errors(model, channels, block=1):
    """Largest difference of the slim tail's logits before training, in float64."""
    model = copy.deepcopy(model).double()
    samples = [image.double() for image in EVEN]
    slim = rewrite(model, (substitute_slim_tail(channels, block=block),), example_inputs=(samples[0],)).model
    with torch.no_grad():
        return max(float((slim(image) - model(image)).abs().max()) for image in samples)


def test_a_slim_tail_comes_nearer_with_every_pair_of_channels_and_is_there_at_eighteen(tail):
    found = [errors(tail, channels) for channels in (2, 8, 14, 16, 18, 19, 32)]
    assert found[0] > found[1] > found[2] > found[3] > 1e-4
    assert max(found[4:]) <= 1e-12
    assert errors(tail, 18, block=4) <= 1e-12
    assert abs(errors(tail, 6, block=4) - errors(tail, 6)) <= 1e-12


def test_the_cut_is_the_nearest_of_its_rank(tail):
    """The products of the nine taps differ from the cut ones by the singular values left out (Eckart and Young)."""
    model = copy.deepcopy(tail).double()
    full, cut = (rewrite(model, (substitute_slim_tail(n),), example_inputs=(EVEN[0].double(),)).model for n in (18, 8))

    def products(model):
        conv_in, _, conv_out = model.tail.image_branch
        half = conv_in.out_channels // 2  # the second half is the first with its sign changed
        before = torch.cat([conv_in.weight.flatten(1), conv_in.bias[:, None]], 1)[:half]
        return conv_out.weight[0].flatten(1)[:half].t() @ before

    with torch.no_grad():
        left = torch.linalg.svdvals(products(full))[4:]
        assert torch.allclose((products(full) - products(cut)).norm(), left.norm())


def test_spare_channels_are_silent_until_they_learn(tail):
    slim = rewrite(tail, (substitute_slim_tail(32),), example_inputs=(EVEN[0],)).model.train()
    conv_in, _, conv_out = slim.tail.image_branch
    assert conv_in.weight[2 * TAPS :].abs().min() > 0 and conv_out.weight[:, 2 * TAPS :].abs().max() == 0
    slim(EVEN[0]).square().sum().backward()
    assert conv_out.weight.grad[:, 2 * TAPS :].abs().amax((0, 2, 3)).min() > 0


def test_a_slim_tail_is_pending_until_it_has_a_score(tail):
    table = check_plan(tail, (SUBSTITUTE_SLIM_TAIL,), samples=EVEN)
    assert {verdict.status for verdict in table.verdicts} == {"pending"}
    claim = check_equivalence(tail, tail, claim=Exact(), samples=EVEN)
    assert claim.passed


# Refused


def test_a_tail_is_replaced_once(tail):
    with pytest.raises(RewriteError, match="do not go together: both replace the full-resolution tail"):
        rewrite(tail, (FOLD_FULL_RESOLUTION_TAIL, SUBSTITUTE_SLIM_TAIL), example_inputs=(EVEN[0],))
    done = rewrite(tail, (FOLD_FULL_RESOLUTION_TAIL,), example_inputs=(EVEN[0],)).model
    assert rewrite(done, (SUBSTITUTE_SLIM_TAIL,), example_inputs=(EVEN[0],)).log.entries == ()


def test_tiles_are_rewritten_after_the_tail_not_before(tiny):
    with pytest.raises(RewriteError, match="must come after .the image branch of the tail cuts no tiles"):
        rewrite(tiny, (CONVERT_IMAGE_TILES_TO_4D, FOLD_FULL_RESOLUTION_TAIL))
    done = rewrite(tiny, (FOLD_FULL_RESOLUTION_TAIL, CONVERT_IMAGE_TILES_TO_4D))
    assert len(done.log.applied("convert_image_tiles_to_4d")) == 4


def test_a_tail_whose_convs_are_not_the_published_ones_is_refused(tail):
    changes = {
        "conv1 is no plain 3×3": lambda model: setattr(model.ipt_blk1, "conv1", nn.Conv2d(3, 12, 5, padding=2)),
        "conv_out is no plain 3×3": lambda model: model.ipt_blk1.conv_out.register_forward_hook(lambda *_: None),
        "no ipt_blk1 and conv_out1 as published": lambda model: setattr(model, "ipt_blk1", nn.Conv2d(3, 5, 1)),
        "has hooks": lambda model: model.ipt_blk1.register_forward_hook(lambda *_: None),
    }
    for reason, change in changes.items():
        model = copy.deepcopy(tail)
        change(model)
        if "no ipt_blk1" in reason:
            model.ipt_blk1.forward = lambda image, size: torch.zeros(2, 5, *size)
        (entry,) = rewrite(model, (FOLD_FULL_RESOLUTION_TAIL,), example_inputs=(EVEN[0],)).log.entries
        assert reason in entry.refused


@pytest.mark.parametrize("block", [0, 3, 5, 6, 32, 64, 2.0, True, "4"])
@pytest.mark.parametrize("make", [fold_full_resolution_tail, lambda block: substitute_slim_tail(block=block)])
def test_a_block_divides_every_image(make, block):
    with pytest.raises(RewriteError, match=f"one of 1, 2, 4, 8, 16, asked for {block!r}"):
        make(block)


@pytest.mark.parametrize("channels", [0, 1, 2.0])
def test_a_slim_tail_has_two_channels_at_least(channels):
    with pytest.raises(RewriteError, match="channels"):
        substitute_slim_tail(channels)


@pytest.mark.parametrize(
    "rule", [fold_full_resolution_tail(2), FOLD_FULL_RESOLUTION_TAIL, substitute_slim_tail(8, block=4)]
)
def test_the_code_of_a_record_makes_it_again(rule):
    assert eval(rule.expression).expression == rule.expression
