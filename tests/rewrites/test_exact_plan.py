"""Every rewrite of EXACT_PLAN keeps the function, and a spoiled version of each is caught.

The spoiled versions are the mistakes that are easy to make; most of them leave a plausible mask.
"""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.equivalence import claim_text, random_samples
from lumen_lab.errors import RewriteError
from lumen_lab.network.golden import golden_image
from lumen_lab.network.swin import MASKED, WindowPartition
from lumen_lab.rewrites import EXACT_PLAN, check_plan, rewrite
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
    PaddedShift,
    PaddedUnshift,
    WindowMerge4d,
    WindowPartition4d,
    shifted_mask,
)
from lumen_lab.rewrites.check import network_runs, whole_verdict
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, GridSampleConv, tap_grid
from lumen_lab.rewrites.record import FixedTensors
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D, ImageTiles4d
from lumen_lab.specs import Bounded, Exact, Learned
from tests.rewrites.spoiling import as_class, spoiled

PART = {
    DECOMPOSE_DEFORM_CONV: "deform",
    CONVERT_IMAGE_TILES_TO_4D: "tiles",
    CONVERT_CYCLIC_SHIFT_TO_PADDING: "attention",
    CONVERT_WINDOW_PARTITION_TO_4D: "attention",
    CONVERT_WINDOW_MERGE_TO_4D: "attention",
    FOLD_BATCH_NORM: "deform",
}


def test_the_plan_passes_on_every_site_at_sizes_that_are_not_square(tiny):
    table = check_plan(tiny, EXACT_PLAN, samples=random_samples([(64, 96), (96, 32)], batch=2))
    assert table.passed, table.failed
    sites = {row["check"]: row["sites"] for row in table.summary()}
    assert list(sites) == [*(rule.name for rule in EXACT_PLAN), "whole network"]
    assert sites["decompose_deform_conv"] == 20
    assert sites["convert_image_tiles_to_4d"] == 4  # the folded tail cuts none
    assert sites["convert_cyclic_shift_to_padding"] == 4
    assert sites["convert_window_partition_to_4d"] == sites["convert_window_merge_to_4d"] == 8
    assert all(verdict.samples >= 2 for verdict in table.verdicts)
    moved = [v for v in table.verdicts if v.claim == "exact, bit for bit"]
    assert len(moved) == 8 + 8 + 4
    assert {v.max_abs for v in moved} == {0.0}


@pytest.mark.parametrize("rule", PART, ids=lambda rule: rule.name)
def test_each_rewrite_alone_passes_on_a_part_of_the_network(parts, rule):
    module, samples = parts[PART[rule]]
    table = check_plan(module, (rule,), samples=samples)
    assert table.passed, table.failed
    assert any(verdict.name == rule.name for verdict in table.verdicts)


# Spoiled versions: each takes the modules that the rewrite has built and harms one thing.


class AlignedCorners(GridSampleConv):
    def forward(self, x):
        sample = F.grid_sample
        F.grid_sample = lambda *given, align_corners, **more: sample(*given, align_corners=True, **more)
        try:
            return super().forward(x)
        finally:
            F.grid_sample = sample


class BorderRepeated(GridSampleConv):
    def forward(self, x):
        sample = F.grid_sample
        F.grid_sample = lambda *given, padding_mode, **more: sample(*given, padding_mode="border", **more)
        try:
            return super().forward(x)
        finally:
            F.grid_sample = sample


def offsets_swapped(module):
    """dx where dy belongs."""
    for parameter in module.offset_conv.parameters():
        parameter.data = parameter.data.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def taps_before_channels(module):
    for conv, taps in zip(module.tap_convs, module.taps, strict=True):
        weight = conv.weight.data
        conv.weight.data = weight.view(len(weight), taps, -1).transpose(1, 2).reshape(weight.shape)


def taps_reversed(module):
    """The last tap's weights where the first tap's belong, through all the convs."""
    weight = torch.cat([conv.weight.data for conv in module.tap_convs], 1)
    channels = module.offset_conv.in_channels
    turned = weight.unflatten(1, (-1, channels)).flip(1).flatten(1, 2)
    for conv, part in zip(module.tap_convs, turned.split([taps * channels for taps in module.taps], 1), strict=True):
        conv.weight.data = part


def columns_before_rows(module):
    def transposed(size):
        kernel = module.kernel
        grid = tap_grid(kernel, size).view(kernel, kernel, 2, *size)
        return grid.transpose(0, 1).reshape(1, 2 * kernel**2, *size)

    module.grid = FixedTensors(transposed)


def grid_in_float32(module):
    module.grid = FixedTensors(lambda size: tap_grid(module.kernel, size).float().double())


def modulator_off(module):
    module.modulator_conv.bias.data -= 0.01


class UnshuffledTiles(ImageTiles4d):
    def forward(self, image, size):
        return F.pixel_unshuffle(image, image.shape[-1] // size[1])


class TilesColumnFirst(ImageTiles4d):
    def forward(self, image, size):
        h, w = size
        n, colours, height, width = image.shape
        grid = image.view(n, colours, height // h, h, width // w, w)
        return grid.permute(0, 1, 4, 2, 3, 5).reshape(n, -1, h, w)


def with_mask(make):
    def change(module):
        if isinstance(module, PaddedShift):
            window, shift = module.window, module.shift
            module.mask = FixedTensors(lambda size: make(window, shift, size))

    return change


def no_mask(window, shift, size):
    return torch.zeros_like(shifted_mask(window, shift, size))


def padding_attended(window, shift, size):
    """The padding of the shift takes part, as if it were part of the map."""
    regions = torch.zeros(1, *size, 1)
    regions = F.pad(regions, (0, 0, window - shift, shift, window - shift, shift), value=0.0)
    windows = WindowPartition(window)(regions).squeeze(-1)
    return torch.zeros(len(windows), window**2, window**2, dtype=torch.float64)


def weak_mask(window, shift, size):
    return shifted_mask(window, shift, size) * (-10 / MASKED)


def padding_of_the_map_masked(window, shift, size):
    """The zeros that fill the map up to whole windows are masked too; the published network attends to them."""
    mask = shifted_mask(window, shift, size)
    regions = torch.ones(1, size[0] - 2, size[1] - 2, 1)
    regions = F.pad(regions, (0, 0, window - shift, shift + 2, window - shift, shift + 2), value=0.0)
    real = WindowPartition(window)(regions).squeeze(-1)
    return mask.masked_fill(real[:, None, :] == 0, MASKED)


def cut_one_off(module):
    if isinstance(module, PaddedUnshift):
        module.start -= 1


class WindowsColumnFirst(WindowPartition4d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2))


class TokensColumnFirst(WindowPartition4d):
    def forward(self, x):
        w = self.window
        return super().forward(x).unflatten(1, (w, w)).transpose(1, 2).flatten(1, 2)


class MergedColumnFirst(WindowMerge4d):
    def forward(self, windows, size):
        return super().forward(windows, size[::-1]).transpose(1, 2)


class TokensMergedColumnFirst(WindowMerge4d):
    def forward(self, windows, size):
        w = self.window
        return super().forward(windows.unflatten(1, (w, w)).transpose(1, 2).flatten(1, 2), size)


def bias_dropped(module):
    if isinstance(module, nn.Conv2d):
        module.bias.data.zero_()


def rounded_to_float32(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.float().double()


SPOILED = {
    "corners aligned": (DECOMPOSE_DEFORM_CONV, as_class(AlignedCorners)),
    "outside is the border": (DECOMPOSE_DEFORM_CONV, as_class(BorderRepeated)),
    "x and y swapped": (DECOMPOSE_DEFORM_CONV, offsets_swapped),
    "taps before channels": (DECOMPOSE_DEFORM_CONV, taps_before_channels),
    "taps in reverse": (DECOMPOSE_DEFORM_CONV, taps_reversed),
    "taps column by column": (DECOMPOSE_DEFORM_CONV, columns_before_rows),
    "modulator a little off": (DECOMPOSE_DEFORM_CONV, modulator_off),
    "grid through float32": (DECOMPOSE_DEFORM_CONV, grid_in_float32),
    "pixel-unshuffle": (CONVERT_IMAGE_TILES_TO_4D, as_class(UnshuffledTiles)),
    "tiles column by column": (CONVERT_IMAGE_TILES_TO_4D, as_class(TilesColumnFirst)),
    "mask of zeros": (CONVERT_CYCLIC_SHIFT_TO_PADDING, with_mask(no_mask)),
    "shift's padding attended": (CONVERT_CYCLIC_SHIFT_TO_PADDING, with_mask(padding_attended)),
    "mask of −10": (CONVERT_CYCLIC_SHIFT_TO_PADDING, with_mask(weak_mask)),
    "map's padding masked": (CONVERT_CYCLIC_SHIFT_TO_PADDING, with_mask(padding_of_the_map_masked)),
    "cut one pixel off": (CONVERT_CYCLIC_SHIFT_TO_PADDING, cut_one_off),
    "windows column by column": (CONVERT_WINDOW_PARTITION_TO_4D, as_class(WindowsColumnFirst)),
    "tokens column by column": (CONVERT_WINDOW_PARTITION_TO_4D, as_class(TokensColumnFirst)),
    "windows merged column by column": (CONVERT_WINDOW_MERGE_TO_4D, as_class(MergedColumnFirst)),
    "tokens merged column by column": (CONVERT_WINDOW_MERGE_TO_4D, as_class(TokensMergedColumnFirst)),
    "bias dropped": (FOLD_BATCH_NORM, bias_dropped),
    "folded through float32": (FOLD_BATCH_NORM, rounded_to_float32),
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_a_spoiled_rewrite_fails_where_it_acted_and_in_the_whole(parts, mistake):
    rule, change = SPOILED[mistake]
    module, samples = parts[PART[rule]]
    table = check_plan(module, (spoiled(rule, change),), samples=samples)
    assert {verdict.name for verdict in table.failed} == {rule.name, "whole network"}
    assert not table.passed


@pytest.mark.parametrize("neglected", ["eps", "running_mean", "running_var", "weight"])
def test_a_fold_that_forgets_a_part_of_the_norm_fails(parts, neglected):
    def built(site):
        norm = copy.deepcopy(site.module)
        if neglected == "eps":
            norm.eps = 0.0
        else:
            getattr(norm, neglected).data.fill_(0.0 if neglected == "running_mean" else 1.0)
        return FOLD_BATCH_NORM.built(dataclasses.replace(site, module=norm))

    module, samples = parts["deform"]
    table = check_plan(module, (dataclasses.replace(FOLD_BATCH_NORM, built=built),), samples=samples)
    assert len(table.failed) >= 2


def test_a_plan_is_not_checked_on_nothing(parts):
    with pytest.raises(RewriteError, match="cannot be checked without samples"):
        check_plan(parts["tiles"][0], (CONVERT_IMAGE_TILES_TO_4D,), samples=[])


def test_a_bounded_claim_is_checked_where_it_acted_and_leaves_the_network_pending(parts):
    module, samples = parts["deform"]
    bounded = dataclasses.replace(spoiled(DECOMPOSE_DEFORM_CONV, modulator_off), claim=Bounded(0.5, "any image"))
    table = check_plan(module, (bounded,), samples=samples)
    assert {(v.name, v.status) for v in table.verdicts} == {(bounded.name, "passed"), ("whole network", "pending")}
    assert not table.passed
    tight = dataclasses.replace(bounded, claim=Bounded(1e-6, "any image"))
    assert len(check_plan(module, (tight,), samples=samples).failed) == 4


def test_a_learned_substitution_is_pending_and_so_is_the_plan(parts):
    module, samples = parts["deform"]
    learned = dataclasses.replace(spoiled(DECOMPOSE_DEFORM_CONV, offsets_swapped), claim=Learned("S-measure", 0.9))
    table = check_plan(module, (learned,), samples=samples)
    assert {verdict.status for verdict in table.verdicts} == {"pending"}
    assert not table.passed
    assert table.failed == []


def test_a_plan_claims_no_more_than_its_weakest_rewrite():
    images = [torch.randn(1, 3, 4, 4)]
    made = network_runs(images, images, images)
    learned = dataclasses.replace(CONVERT_IMAGE_TILES_TO_4D, claim=Learned("S-measure", 0.9))
    bounded = dataclasses.replace(CONVERT_IMAGE_TILES_TO_4D, claim=Bounded(0.1, "any image"))

    def claimed(*plan) -> tuple[str, str]:
        verdict = whole_verdict(plan, made)
        return verdict.claim, verdict.status

    assert claimed(CONVERT_IMAGE_TILES_TO_4D, CONVERT_WINDOW_MERGE_TO_4D) == (
        claim_text(Exact(movement=True)),
        "passed",
    )
    assert claimed(*EXACT_PLAN) == (claim_text(Exact()), "passed")
    assert claimed(*EXACT_PLAN, bounded) == ("bounded parts", "pending")
    assert claimed(*EXACT_PLAN, bounded, learned) == (claim_text(Learned("S-measure", 0.9)), "pending")


@pytest.mark.slow
def test_lite_rewritten_has_the_published_mask():
    from lumen_lab.network import load_network

    image = torch.from_numpy(golden_image(96, 160))
    lite = load_network("lite", "golden")
    rewritten = rewrite(lite, EXACT_PLAN, example_inputs=(image,))
    assert len(rewritten.log.applied("decompose_deform_conv")) == 20
    with torch.no_grad():
        reference, actual = lite(image).sigmoid(), rewritten.model(image).sigmoid()
        assert float((reference - actual).abs().max()) <= 1e-5
        lite.double()
        rewritten = rewrite(lite, EXACT_PLAN, example_inputs=(image.double(),))
        reference, actual = lite(image.double()), rewritten.model(image.double())
    assert float((reference - actual).abs().max()) <= 1e-9
