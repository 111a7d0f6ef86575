"""The encoder reads a smaller image than the one whose mask is drawn."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.birefnet import InputPaths
from lumen_lab.network.decoder import resize
from lumen_lab.prediction import predict
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.attention import CONVERT_CYCLIC_SHIFT_TO_PADDING
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.input_paths import (
    SUBSTITUTE_INPUT_PATHS,
    ReducedInputPaths,
    encoder_size,
    substitute_input_paths,
)
from lumen_lab.rewrites.record import Site
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.rewrites.tail import FOLD_FULL_RESOLUTION_TAIL
from lumen_lab.taps import tap

PLAN = (
    SUBSTITUTE_INPUT_PATHS,
    FOLD_FULL_RESOLUTION_TAIL,
    DECOMPOSE_DEFORM_CONV,
    CONVERT_IMAGE_TILES_TO_4D,
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
)
IMAGE = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))


class Mean(nn.Module):
    """One value an image and colour, so that the output's shape does not depend on the encoder's size."""

    def forward(self, pair):
        return pair[0].mean((2, 3))


@pytest.fixture(scope="module")
def reduced(tiny):
    return rewrite(tiny, (SUBSTITUTE_INPUT_PATHS,)).model


@pytest.mark.parametrize(
    ("size", "ratio", "expected"),
    [
        ((1024, 1024), 0.625, (640, 640)),
        ((192, 192), 0.625, (128, 128)),
        ((64, 96), 0.625, (32, 64)),
        ((1024, 768), 0.5, (512, 384)),
        ((96, 32), 0.1, (32, 32)),
    ],
)
def test_the_encoders_size_is_the_nearest_multiple_of_32(size, ratio, expected):
    assert encoder_size(size, ratio) == expected


def test_the_encoder_sees_the_image_and_its_half_at_the_reduced_size():
    image, half = ReducedInputPaths(0.625)(IMAGE)
    assert (tuple(image.shape), tuple(half.shape)) == ((1, 3, 32, 64), (1, 3, 16, 32))
    assert torch.equal(image, resize(IMAGE, (32, 64)))
    assert torch.equal(half, resize(image, (16, 32)))
    for seen in (image, half):  # corners stay where they are
        assert torch.allclose(seen[..., [0, 0, -1, -1], [0, -1, 0, -1]], IMAGE[..., [0, 0, -1, -1], [0, -1, 0, -1]])


def test_the_network_computes_what_its_parts_do_at_two_sizes(tiny, reduced):
    """The encoder and the tiles read the small image, the tail the large one; the mask has the large one's size."""
    with torch.no_grad():
        small = resize(IMAGE, (32, 64))
        with tap(tiny, ["decoder.decoder_block1"]) as taps:
            tiny(small)
        features = taps["decoder.decoder_block1"].outputs[0]
        with tap(reduced, ["decoder.decoder_block1"]) as taps:
            found = reduced(IMAGE)
        assert torch.equal(taps["decoder.decoder_block1"].outputs[0], features)
        decoder = tiny.decoder
        assert torch.equal(found, decoder.tail(features, IMAGE, decoder.ipt_blk1, decoder.conv_out1))
    assert found.shape == (1, 1, 64, 96)


def test_side_outputs_have_the_encoders_sizes_and_the_last_mask_the_images(reduced):
    model = copy.deepcopy(reduced).train()
    with torch.no_grad():
        outputs = model(torch.cat([IMAGE, -IMAGE]))  # norms of one value a channel need two images
    assert [tuple(mask.shape[-2:]) for mask in outputs.masks] == [(1, 2), (2, 4), (4, 8), (64, 96)]
    assert [tuple(edge.shape[-2:]) for edge in outputs.gradients] == [(1, 2), (2, 4), (4, 8)]


def test_it_predicts_masks_of_the_photographs_own_size(tiny, reduced):
    photograph = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    mask = predict(reduced, photograph)
    assert mask.shape == (50, 70) and reduced.config.image_size == (64, 96)
    assert not np.allclose(mask, predict(tiny, photograph), atol=1e-3)


def test_it_goes_with_the_exact_rewrites_and_only_the_encoders_size_changes(tiny, reduced):
    """The rewrites behind it make their constants for the smaller maps and change nothing more."""
    done = rewrite(tiny, PLAN)
    assert {row["rewrite"] for row in done.log.rows() if row["sites"]} == {rule.name for rule in PLAN}
    with torch.no_grad():
        made = {name for name, _ in done.model.named_buffers()}
        assert torch.allclose(done.model(IMAGE), reduced(IMAGE), atol=1e-5)
    assert {name for name, _ in done.model.named_buffers()} == made


def test_it_is_learned_and_so_pending():
    paths = nn.Sequential(InputPaths(), Mean()).eval()
    table = check_plan(paths, (SUBSTITUTE_INPUT_PATHS,), samples=[IMAGE])
    assert len(table.verdicts) == 2
    assert {verdict.status for verdict in table.verdicts} == {"pending"}


def test_a_ratio_that_gives_the_same_size_is_refused(tiny, reduced):
    (entry,) = rewrite(tiny, (substitute_input_paths(0.9),)).log.entries
    assert entry.refused == "0.9 of (64, 96) is that size again in multiples of 32"
    assert rewrite(reduced, (SUBSTITUTE_INPUT_PATHS,)).log.entries == ()


@pytest.mark.parametrize("ratio", [0, 1, -0.5, 1.5, True, "half", float("nan")])
def test_a_ratio_lies_between_0_and_1(ratio):
    with pytest.raises(RewriteError, match="between 0 and 1"):
        substitute_input_paths(ratio)


def test_the_code_of_a_record_makes_it_again():
    rule = substitute_input_paths(2 / 3)
    assert eval(rule.expression).expression == rule.expression
    site = Site("input_paths", InputPaths(), ((1, 3, 96, 96),), None)
    assert rule.built(site)["input_paths"].ratio == 2 / 3
