"""Statistics of deformable convs, compared with what a plain look at all values gives."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import deform_conv2d

from lumen_lab.errors import ArtifactError, RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform_statistics import (
    LAGS_PX,
    DeformStatistics,
    deform_statistics,
    inside,
    rank_one_share,
)


def network(kernel=3, spread_px=1.5):
    torch.manual_seed(kernel)
    conv = DeformableConv2d(3, 4, kernel).double()
    for part, spread in ((conv.offset_conv, spread_px), (conv.modulator_conv, 0.5)):
        nn.init.normal_(part.weight, std=0.1)
        nn.init.normal_(part.bias, std=spread)
    return nn.Sequential(conv).eval()


def pictures():
    torch.manual_seed(0)
    return [torch.randn(2, 3, 7, 9).double(), torch.randn(1, 3, 8, 5).double(), torch.randn(1, 3, 7, 9).double()]


@pytest.fixture(scope="module")
def known():
    return deform_statistics(network(), pictures(), radii=(1, 2)).sites[0]


@pytest.fixture(scope="module")
def values():
    """All offsets (pairs by tap) and modulators of the pictures, tap first."""
    conv = network()[0]
    with torch.no_grad():
        offset = torch.cat([conv.offset_conv(x).transpose(0, 1).flatten(1) for x in pictures()], 1)
        modulator = torch.cat([conv.modulator_conv(x).transpose(0, 1).flatten(1) for x in pictures()], 1)
    return offset.view(9, 2, -1), 2 * torch.sigmoid(modulator)


def test_offsets_are_counted_over_taps_pixels_and_pictures(known, values):
    far = values[0].abs().amax(1).flatten().numpy()
    assert (known.site, known.kernel, known.pictures, known.size) == ("0", 3, 4, (7, 9))
    assert known.offset_mean_px == pytest.approx(far.mean())
    assert known.offset_max_px == pytest.approx(far.max())
    assert known.share_beyond == pytest.approx([(far > 1).mean(), (far > 2).mean()])
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert getattr(known, f"offset_{name}_px") == pytest.approx(np.percentile(far, percent), rel=0.02)
    quantiles = np.array(known.offset_quantiles_px)
    assert len(quantiles) == 101 and (np.diff(quantiles) >= 0).all()
    assert np.allclose(quantiles[1:], np.percentile(far, np.arange(1, 101)), rtol=0.04)


def test_the_larger_axis_decides_how_far_a_tap_looks():
    model = network()
    for part in (model[0].offset_conv.weight, model[0].offset_conv.bias):
        part.data.zero_()
    model[0].offset_conv.bias.data[0::2] = -2.5  # dy
    model[0].offset_conv.bias.data[1::2] = 0.5  # dx
    found = deform_statistics(model, pictures()).sites[0]
    assert found.offset_p50_px == pytest.approx(2.5, rel=0.02) and found.offset_max_px == 2.5
    assert found.share_beyond == (1.0, 1.0, 0.0)
    assert found.tap_offset_mean_px == ((-2.5, 0.5),) * 9


def test_modulators_and_means_by_tap(known, values):
    offset, modulator = values
    assert known.modulator_mean == pytest.approx(float(modulator.mean()))
    assert known.modulator_std == pytest.approx(float(modulator.std(unbiased=False)))
    off = ((modulator < 0.9) | (modulator > 1.1)).double().mean()
    assert known.modulator_share_off == pytest.approx(float(off))
    assert known.tap_modulator_mean == pytest.approx(modulator.mean(1).tolist())
    assert known.tap_modulator_square == pytest.approx(modulator.square().mean(1).tolist())
    assert np.allclose(known.tap_offset_mean_px, offset.mean(2))
    energy = network()[0].regular_conv.weight.detach().square().sum((0, 1)).flatten()
    constant = (energy * modulator.mean(1).square()).sum() / (energy * modulator.square().mean(1)).sum()
    assert known.constant_share == pytest.approx(float(constant))


def test_a_map_explains_modulators_that_are_alike_and_a_pointwise_kernel_is_its_own_rank_one():
    model = network()
    conv = model[0].modulator_conv
    conv.weight.data[:] = conv.weight.data[:1].clone()
    conv.bias.data[:] = conv.bias.data[:1].clone()
    alike = deform_statistics(model, pictures()).sites[0]
    assert alike.attention_share == pytest.approx(1.0) and alike.constant_share < 0.999
    assert alike.attention_mean == pytest.approx(alike.modulator_mean)
    assert deform_statistics(network(1), pictures()).sites[0].rank_one_share == pytest.approx(1.0)
    weight = torch.randn(4, 3, 3, 3)
    expected = sum(float(torch.linalg.svdvals(weight[:, c].flatten(1))[0] ** 2) for c in range(3))
    assert rank_one_share(weight) == pytest.approx(expected / float(weight.square().sum()), rel=1e-4)


def test_what_lies_inside_is_what_a_picture_of_ones_gives_back():
    """torchvision's own look-up in a picture of ones reads the bilinear weight that lies inside."""
    torch.manual_seed(0)
    offset = 3 * torch.randn(2, 18, 5, 7).double()
    for tap in range(9):
        weight = torch.zeros(1, 1, 3, 3).double()
        weight.view(-1)[tap] = 1
        expected = deform_conv2d(torch.ones(2, 1, 5, 7).double(), offset, weight, padding=1)[:, 0]
        assert torch.allclose(inside(offset.unflatten(1, (9, 2)))[:, tap], expected)


def test_shares_inside_count_taps_by_their_energy(known):
    assert known.inside_share_within[0] > known.inside_share_within[1] > known.inside_share_within[2]
    assert known.inside_share < known.inside_share_within[2] < 1
    model = network()
    model[0].regular_conv.weight.data.zero_()
    model[0].regular_conv.weight.data[..., 1, 1] = 1  # only the middle tap, which without offsets reads itself
    assert deform_statistics(model, pictures()).sites[0].inside_share_within[0] == pytest.approx(1.0)


def test_correlation_is_that_of_rows_and_columns():
    ramp = torch.arange(40.0).double().expand(1, 3, 6, 40).contiguous()
    found = deform_statistics(network(), [ramp]).sites[0]
    row = ramp[0, 0, 0]
    down, across = [row, row], [row[:-1], row[1:]]
    products = 5 * (down[0] @ down[1]) + 6 * (across[0] @ across[1])
    here, there = (5 * (down[i] @ down[i]) + 6 * (across[i] @ across[i]) for i in (0, 1))
    assert found.correlation[0] == pytest.approx(float(products / (here * there).sqrt()))
    assert len(found.correlation) == len(LAGS_PX)
    distance = np.array([0.0, 0.5, 1.0, 1.5, 100.0])
    first, second, last = found.correlation[0], found.correlation[1], found.correlation[-1]
    expected = [1, 1 - 0.25 * (1 - first), first, (first + second) / 2, last]
    assert found.correlation_at(distance) == pytest.approx(expected)


def test_a_lag_longer_than_the_map_counts_as_the_longest_that_fits():
    found = deform_statistics(network(), [torch.randn(1, 3, 3, 3).double()]).sites[0]
    assert set(found.correlation[2:]) == {found.correlation[1]}
    lone = deform_statistics(network(), [torch.randn(1, 3, 1, 1).double()]).sites[0]
    assert lone.correlation == (1.0,) * len(LAGS_PX)


def test_pictures_one_by_one_or_in_a_batch_are_the_same():
    torch.manual_seed(1)
    batch = torch.randn(4, 3, 6, 6).double()
    one, many = deform_statistics(network(), [batch]), deform_statistics(network(), iter(batch.split(1)))
    for name, value in vars(one.sites[0]).items():
        other = getattr(many.sites[0], name)
        flat = [np.ravel(entry) for entry in (value, other)] if not isinstance(value, str) else [value, other]
        assert list(flat[0]) == pytest.approx(list(flat[1])) if not isinstance(value, str) else value == other


def test_fresh_deformable_convs_look_nowhere():
    found = deform_statistics(nn.Sequential(DeformableConv2d(3, 4, 3)).eval(), [torch.randn(1, 3, 6, 6)]).sites[0]
    assert found.offset_max_px == found.offset_p99_px == 0 and found.share_beyond == (0, 0, 0)
    assert (found.modulator_mean, found.modulator_std, found.modulator_share_off) == (1, 0, 0)
    assert (found.shrinkage, found.constant_share) == pytest.approx((1, 1))


def test_all_sites_of_a_network_in_order_or_those_that_are_named(tiny):
    torch.manual_seed(0)
    images = [torch.randn(1, 3, 64, 96), torch.randn(1, 3, 96, 64)]
    found = deform_statistics(tiny, images)
    assert len(found.sites) == len(found.rows()) == 20
    assert [site.kernel for site in found.sites] == [1, 1, 3, 7] * 5
    assert all(math.isfinite(v) for row in found.rows() for v in row.values() if isinstance(v, float))
    name = found.sites[7].site
    assert deform_statistics(tiny, images, sites=[name]).sites == (found.by_site[name],)


def test_the_record_is_kept_as_json_and_its_rows_have_a_column_a_radius(known, tmp_path):
    kept = DeformStatistics((known,))
    assert DeformStatistics.load(kept.save(tmp_path / "statistics.json")) == kept
    (row,) = kept.rows()
    assert {"site", "offset_p95_px", "beyond_1_px", "beyond_2_px", "modulator_std", "inside_share"} <= set(row)
    assert not any(isinstance(value, tuple) for value in row.values())
    (tmp_path / "other.json").write_text('{"record": "RewriteLog", "entries": []}')
    with pytest.raises(ArtifactError, match="DeformStatistics"):
        DeformStatistics.load(tmp_path / "other.json")


@pytest.mark.parametrize("radii", [(), (0, 1), (2, 1), (1, 1), (1.5,), (True,), 3, "12"])
def test_radii_are_rising_whole_pixels(radii):
    with pytest.raises(RewriteError, match="rising whole pixels"):
        deform_statistics(network(), pictures(), radii=radii)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(RewriteError, match="needs pictures"):
        deform_statistics(network(), [])
    with pytest.raises(RewriteError, match=r"training mode.*call \.eval"):
        deform_statistics(network().train(), pictures())
    with pytest.raises(RewriteError, match="has no deformable conv"):
        deform_statistics(nn.Sequential(nn.Conv2d(3, 3, 1)).eval(), pictures())
    for sites, named in ((["5"], "5"), ("a.b", r"a\.b"), ([], "no path at all")):
        with pytest.raises(RewriteError, match=f"No deformable conv at {named}; they are at 0"):
            deform_statistics(network(), pictures(), sites=sites)
    for wrong in (np.zeros((4, 4, 3), np.uint8), torch.zeros(3, 4, 4)):
        with pytest.raises(RewriteError, match=r"normalised tensors \(N, 3, H, W\)"):
            deform_statistics(network(), [wrong])
