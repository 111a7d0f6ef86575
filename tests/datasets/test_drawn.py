"""Drawn sources: the same pictures everywhere, split as photographs are, good enough to compose scenes from."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from lumen_lab.datasets import ComposedScenes
from lumen_lab.datasets.drawn import draw_backdrop, draw_cutout, drawn_sources
from lumen_lab.datasets.sources import SPLITS
from lumen_lab.errors import DatasetError

PROGRAM = (
    "import hashlib; from lumen_lab.datasets.drawn import drawn_sources\n"
    "bank = drawn_sources(pictures=5, side_px=48, seed=3)\n"
    "print(hashlib.sha256(b''.join(pixels.tobytes() for pixels in bank.pixels)).hexdigest())"
)


@pytest.fixture(scope="module")
def bank():
    return drawn_sources(pictures=10, side_px=64)


def by_name(bank):
    return {source.name: (source, pixels) for source, pixels in zip(bank.index.sources, bank.pixels, strict=True)}


def test_cut_outs_show_something_from_edge_to_edge_and_backgrounds_fill_their_frame(bank):
    for source, pixels in by_name(bank).values():
        assert pixels.dtype == np.uint8
        assert source.size == pixels.shape[:2]
        if source.kind == "background":
            assert pixels.shape == (64, 64, 3)
            assert pixels.std() > 0
            continue
        alpha = pixels[..., 3]
        assert pixels.shape[2] == 4
        assert max(pixels.shape[:2]) <= 64
        assert all(side.any() for side in (alpha[0], alpha[-1], alpha[:, 0], alpha[:, -1]))
        assert alpha.max() == 255
        assert 0 < (alpha == 0).mean() < 1  # an outline of its own, not a filled frame


def test_thin_structures_are_among_the_cut_outs():
    """A thin structure leaves most of its bounding box free; so few solid shapes do that one in four must be thin."""
    alphas = [draw_cutout((64, 64), rng=np.random.default_rng([9, k]))[..., 3] for k in range(60)]
    opened = [np.minimum.reduce([np.roll(a, s, ax) for ax in (0, 1) for s in range(-3, 4)]) for a in alphas]
    vanished = [(thin > 127).sum() < 0.15 * (a > 127).sum() for a, thin in zip(alphas, opened, strict=True)]
    assert 6 <= sum(vanished) <= 30


def test_every_split_has_its_share_and_no_picture_is_in_two(bank):
    for kind in ("foreground", "background"):
        names = {split: [s.name for s in bank.index.sources if (s.kind, s.split) == (kind, split)] for split in SPLITS}
        assert {split: len(found) for split, found in names.items()} == {"train": 6, "validation": 2, "test": 2}
        assert len({name for found in names.values() for name in found}) == 10
        assert all(len(bank.select(kind, split)) == len(names[split]) for split in SPLITS)
    assert bank.index.found == bank.index.kept == {"foreground": 10, "background": 10}


def test_more_pictures_leave_the_earlier_ones_and_their_splits_as_they_are(bank):
    few = by_name(drawn_sources(pictures=5, side_px=64))
    many = by_name(bank)
    assert len(few) == 10
    for name, (source, pixels) in few.items():
        assert many[name][0] == source
        assert np.array_equal(many[name][1], pixels)


def test_another_seed_draws_others_and_every_picture_is_its_own(bank):
    other = drawn_sources(pictures=10, side_px=64, seed=1)
    prints = [hashlib.sha256(pixels.tobytes()).hexdigest() for pixels in (*bank.pixels, *other.pixels)]
    assert len(set(prints)) == 40
    assert not by_name(bank).keys() & by_name(other).keys()


def test_another_process_draws_the_same_bits():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    here = b"".join(pixels.tobytes() for pixels in drawn_sources(pictures=5, side_px=48, seed=3).pixels)
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_frames_need_not_be_square():
    rng = np.random.default_rng(0)
    assert draw_backdrop((40, 72), rng=rng).shape == (40, 72, 3)
    for _ in range(20):
        height, width, channels = draw_cutout((40, 72), rng=rng).shape
        assert (height <= 40, width <= 72, channels) == (True, True, 4)


@pytest.mark.parametrize("split", SPLITS)
def test_scenes_can_be_composed_from_every_split_of_the_smallest_bank(split):
    data = ComposedScenes(drawn_sources(pictures=5, side_px=32), split=split, size=(48, 64), length=6)
    mattes = [data.sample(index).matte for index in range(6)]
    assert all(0.004 < matte.mean() < 0.985 for matte in mattes)
    assert len({matte.tobytes() for matte in mattes}) == 6


@pytest.mark.parametrize(("options", "found"), [({"pictures": 4}, "4 drawn"), ({"side_px": 31}, "of 31 px")])
def test_too_few_or_too_small_is_refused(options, found):
    with pytest.raises(DatasetError, match=f"Asked for .*{found}.*it takes 5 for one in every split, and 32 px"):
        drawn_sources(**options)


@pytest.mark.parametrize(
    "options", [{"pictures": 5.5}, {"pictures": "9"}, {"side_px": 40.5}, {"seed": -1}, {"seed": None}, {"seed": 0.5}]
)
def test_numbers_that_are_none_are_refused(options):
    (name,) = options
    with pytest.raises(DatasetError, match=f"{name}=.* was asked for; give a whole number"):
        drawn_sources(**{"pictures": 5, "side_px": 32} | options)
