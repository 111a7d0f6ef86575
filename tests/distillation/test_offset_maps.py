"""Offsets against the site's output, looked up by hand."""

import copy

import numpy as np
import pytest
import torch

from lumen_lab.distillation.offset_maps import OffsetMaps, offsets_of
from lumen_lab.errors import LumenError, RewriteError
from lumen_lab.rewrites.deform_sites import deform_sites
from lumen_lab.rewrites.deform_statistics import deform_statistics
from lumen_lab.taps import tap

SIZE = (64, 96)
SITE = "decoder.decoder_block2.dec_att.aspp_deforms.1.atrous_conv"  # 3 × 3, on 8 × 12


@pytest.fixture(scope="module")
def network(tiny):
    """Golden weights with offsets that reach over the edges."""
    changed = copy.deepcopy(tiny)
    draw = torch.Generator().manual_seed(0)
    for conv in deform_sites(changed).values():
        conv.offset_conv.bias.data.copy_(2 * torch.randn(conv.offset_conv.bias.shape, generator=draw))
        conv.modulator_conv.bias.data.copy_(torch.randn(conv.modulator_conv.bias.shape, generator=draw))
    return changed


@pytest.fixture(scope="module")
def given():
    return torch.randn(1, 3, *SIZE, generator=torch.Generator().manual_seed(0))


def read(x, y, column):
    """x (C, h, w) at a real place, bilinear, zeros outside."""
    total = np.zeros(len(x))
    for row in (int(np.floor(y)), int(np.floor(y)) + 1):
        for at in (int(np.floor(column)), int(np.floor(column)) + 1):
            weight = (1 - abs(y - row)) * (1 - abs(column - at))
            if 0 <= row < x.shape[1] and 0 <= at < x.shape[2]:
                total += weight * x[:, row, at]
    return total


@pytest.mark.parametrize("kernel", [0, 1, 2], ids=["1×1", "3×3", "7×7"])
@pytest.mark.parametrize("pixel", [(0, 0), (37, 50), (63, 95)])
def test_what_the_taps_look_at_is_what_the_site_returns(network, given, kernel, pixel):
    site = SITE.replace("deforms.1", f"deforms.{kernel}")
    found = offsets_of(network, given, site)
    with tap(network, [site]) as taps, torch.no_grad():
        network(given)
    x, output = taps[site].inputs[0][0][0].numpy(), taps[site].outputs[0][0].numpy()
    weight = network.get_submodule(site).regular_conv.weight.detach().flatten(2).numpy()  # O, C, k²
    _, looked, modulators = found.samples_at(pixel)
    looked = (looked + 0.5) / found.scale - 0.5  # back to the map's own pixels
    values = np.stack([m * read(x, *place) for m, place in zip(modulators, looked)], 1)  # C, k²
    row, column = pixel[0] * 8 // 64, pixel[1] * 12 // 96
    np.testing.assert_allclose((weight * values).sum((1, 2)), output[:, row, column], rtol=1e-3, atol=1e-4)
    swapped = np.stack([m * read(x, *place[::-1]) for m, place in zip(modulators, looked)], 1)
    assert np.abs((weight * swapped).sum((1, 2)) - output[:, row, column]).max() > 1e-3  # dy and dx exchanged


def test_lengths_are_those_of_the_statistics(network, given):
    for site, statistics in deform_statistics(network, [given]).by_site.items():
        found = offsets_of(network, given, site)
        assert found.kernel == statistics.kernel
        assert found.lengths_px.max() == pytest.approx(statistics.offset_max_px, rel=1e-5)
        assert found.lengths_px.mean() == pytest.approx(statistics.offset_mean_px, rel=1e-5)
        assert found.modulators.mean() == pytest.approx(statistics.modulator_mean, rel=1e-5)


def test_there_are_twenty(network):
    assert len(deform_sites(network)) == 20


def constant(dy, dx, kernel=1):
    """Every tap moved by (dy, dx), on a map of 4 × 6 over 32 × 48."""
    offsets = np.zeros((kernel**2, 2, 4, 6), np.float32)
    offsets[:, 0], offsets[:, 1] = dy, dx
    return OffsetMaps("site", (32, 48), offsets, np.ones((kernel**2, 4, 6), np.float32))


def test_places_and_arrows_by_hand():
    """A cell is 8 × 8 pixels, its middle at 3.5, 11.5, …"""
    regular, looked, modulators = constant(1.0, -0.5).samples_at((9, 17))
    np.testing.assert_allclose(regular, [[11.5, 19.5]])
    np.testing.assert_allclose(looked, [[19.5, 15.5]])
    assert modulators.tolist() == [1.0]
    places, arrows = constant(1.0, -0.5).field()
    np.testing.assert_allclose(places[0, 0], [3.5, 3.5])
    np.testing.assert_allclose(arrows, np.broadcast_to([8.0, -4.0], (4, 6, 2)))


def test_arrows_are_means_weighted_by_the_modulators():
    found = constant(0.0, 0.0, kernel=3)
    found.offsets[4, 0] = 3.0
    found.modulators[:] = 0.0
    found.modulators[4], found.modulators[0] = 1.0, 2.0
    np.testing.assert_allclose(found.field()[1][..., 0], 8.0)  # 3 px of the map, a third of the weight, 8 px each


@pytest.mark.parametrize("dy, share", [(0.0, 0.0), (1.0, 0.25), (0.9, 0.0), (-4.0, 1.0), (-3.5, 0.75)])
def test_looks_past_the_edge_by_hand(dy, share):
    """Of 4 rows; a place less than a pixel past the edge still reads some of it."""
    assert constant(dy, 0.0).share_outside() == pytest.approx(share)


def test_what_there_is_not_is_refused(network, tiny_student, given):
    with pytest.raises(RewriteError, match="No deformable conv at decoder.tail"):
        offsets_of(network, given, "decoder.tail")
    with pytest.raises(RewriteError, match="has no deformable conv"):
        offsets_of(tiny_student, given, SITE)
    with pytest.raises(LumenError, match="in eval mode"):
        offsets_of(copy.deepcopy(network).train(), given, SITE)
    with pytest.raises(LumenError, match="row 0, column 96"):
        offsets_of(network, given, SITE).samples_at((0, 96))


def test_offsets_that_the_site_did_not_use_are_not_believed(network, given):
    """The conv is called, and the site looks elsewhere."""
    changed = copy.deepcopy(network)
    site = changed.get_submodule(SITE)
    site.register_forward_hook(lambda module, inputs, output: output.roll(1, -1))
    with pytest.raises(LumenError, match="gives? another output"):
        offsets_of(changed, given, SITE)
