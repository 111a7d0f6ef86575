"""Fitted kernels kept in one file, with the figures beside them, and read again as they were."""

import pytest
import torch

from lumen_lab.errors import ArtifactError, RewriteError
from lumen_lab.rewrites.deform_data import FittedConv, load_fits, save_fits
from lumen_lab.rewrites.deform_substitutes import substitute_plain_conv

PLAIN, MODULATED = "substitute_plain_conv", "substitute_modulated_conv"


def some_fits():
    torch.manual_seed(0)

    def conv(name, kernel, db):
        weight = torch.randn(kernel, kernel, 3, 4).double().permute(3, 2, 0, 1)  # as a fit leaves it: not contiguous
        return FittedConv(weight, torch.randn(4).double(), 0.1, db, name)

    return {PLAIN: {"a.b": conv(PLAIN, 3, 12.5), "c": conv(PLAIN, 1, None)}, MODULATED: {"c": conv(MODULATED, 1, 3.0)}}


def test_fits_come_back_bit_for_bit_with_their_figures(tmp_path):
    fits = some_fits()
    again = load_fits(save_fits(fits, tmp_path / "new" / "fits.safetensors"))
    assert {name: list(by_site) for name, by_site in again.items()} == {PLAIN: ["a.b", "c"], MODULATED: ["c"]}
    for name, by_site in fits.items():
        for site, conv in by_site.items():
            found = again[name][site]
            assert torch.equal(found.weight, conv.weight) and torch.equal(found.bias, conv.bias)
            assert (found.ridge, found.held_out_db, found.substitute) == (conv.ridge, conv.held_out_db, name)


def test_what_holds_no_fits_is_refused(tmp_path):
    (tmp_path / "torn.safetensors").write_bytes(save_fits(some_fits(), tmp_path / "fits.safetensors").read_bytes()[:99])
    import safetensors.torch

    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "weights.safetensors")
    for name in ("torn.safetensors", "weights.safetensors", "absent.safetensors"):
        with pytest.raises(ArtifactError, match=f"{name} as saved fits .*; make them with save_fits"):
            load_fits(tmp_path / name)


def test_a_file_without_fits_for_the_rewrite_is_refused(tmp_path):
    path = save_fits({MODULATED: some_fits()[MODULATED]}, tmp_path / "fits.safetensors")
    with pytest.raises(RewriteError, match=f"holds fits for {MODULATED}, none for {PLAIN}"):
        substitute_plain_conv(fitted=path)
