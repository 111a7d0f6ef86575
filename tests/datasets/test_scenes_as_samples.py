"""Composed scenes as samples: what a score is taken on, under a name, of a data set that can be told from others."""

import dataclasses

import numpy as np
import pytest

from lumen_lab.datasets import ATTRIBUTES, ComposedScenes
from lumen_lab.datasets import scenes as scenes_module
from lumen_lab.datasets.sources import SourceBank

SIZE, LENGTH = (64, 96), 12


def scenes(bank, **options):
    return ComposedScenes(bank, **{"split": "test", "size": SIZE, "length": LENGTH, "seed": 3} | options)


def test_a_sample_is_the_scene_its_image_rounded_to_eight_bits(bank):
    data = scenes(bank, normalise=False)
    for index in range(LENGTH):
        sample, item = data.sample(index), data[index]
        assert (sample.image.shape, sample.image.dtype) == ((*SIZE, 3), np.uint8)
        assert (sample.matte.shape, sample.matte.dtype) == (SIZE, np.float32)
        planes = item["image"].numpy().transpose(1, 2, 0)
        assert np.abs(sample.image / 255 - planes).max() <= 0.5 / 255 + 1e-6
        assert np.array_equal(sample.matte, item["matte"][0].numpy())
        assert sample.matte.min() >= 0
        assert sample.matte.max() <= 1
        assert sample.attributes == dict(zip(ATTRIBUTES, item["attributes"].tolist(), strict=True))


def test_normalisation_for_training_leaves_samples_alone(bank):
    plain, normalised = scenes(bank, normalise=False).sample(4), scenes(bank).sample(4)
    assert np.array_equal(plain.image, normalised.image)
    assert np.array_equal(plain.matte, normalised.matte)


def test_names_are_unique_serve_as_paths_and_say_split_seed_and_number(bank):
    data = scenes(bank)
    names = [data.name(index) for index in range(LENGTH)]
    assert len(set(names)) == LENGTH
    assert names[7] == "test/3/000007" == data.sample(7).name
    assert scenes(bank, split="train", seed=4).name(7) == "train/4/000007"


@pytest.mark.parametrize("index", [-1, LENGTH])
def test_there_is_no_name_and_no_sample_beyond_the_ends(bank, index):
    for read in (scenes(bank).name, scenes(bank).sample):
        with pytest.raises(IndexError, match=f"scene {index} of {LENGTH}"):
            read(index)


def changed_by_one_level(bank):
    """The bank with one value of one picture of the test split moved by 1."""
    place = next(k for k, s in enumerate(bank.index.sources) if (s.kind, s.split) == ("background", "test"))
    pixels = [picture.copy() for picture in bank.pixels]
    pixels[place][5, 5, 0] ^= 1
    return SourceBank(bank.index, tuple(pixels))


def without_groups(bank):
    """The bank with every picture in a group of its own."""
    sources = [dataclasses.replace(source, group=source.name) for source in bank.index.sources]
    return SourceBank(dataclasses.replace(bank.index, sources=tuple(sources)), bank.pixels)


def all_in_one_group(bank):
    sources = [dataclasses.replace(source, group="one") for source in bank.index.sources]
    return SourceBank(dataclasses.replace(bank.index, sources=tuple(sources)), bank.pixels)


@pytest.mark.parametrize(
    "options",
    [
        {"split": "train"},
        {"size": (96, 64)},
        {"seed": 4},
        {"mixture": {"thin": 1.0}},
        {"mixture": {"shape": 0.10, "thin": 0.12, "cutout": 0.78}},  # the default's shares in another order
    ],
)
def test_the_identity_tells_data_sets_apart_that_draw_other_scenes(bank, options):
    first, other = scenes(bank), scenes(bank, **options)
    assert other.identity() != first.identity()
    same = [
        first.sample(k).image.shape == other.sample(k).image.shape
        and np.array_equal(first.sample(k).image, other.sample(k).image)
        for k in range(6)
    ]
    assert not all(same)


@pytest.mark.parametrize("spoil", [changed_by_one_level, all_in_one_group])
def test_the_identity_sees_every_pixel_and_every_group(bank, spoil):
    first, other = scenes(bank), scenes(spoil(bank))
    assert other.sources_sha256() != first.sources_sha256()
    assert other.identity()["sources"] == other.sources_sha256()
    assert {k: v for k, v in other.identity().items() if k != "sources"} == {
        k: v for k, v in first.identity().items() if k != "sources"
    }


@pytest.mark.parametrize("name", ["attributes", "compose", "drawn", "scenes", "thin"])
def test_the_identity_sees_the_code_that_draws(bank, tmp_path, monkeypatch, name):
    known = scenes(bank).identity()
    code = list(scenes_module.SCENE_CODE)
    (place,) = [k for k, path in enumerate(code) if path.stem == name]
    changed = tmp_path / f"{name}.py"
    changed.write_bytes(code[place].read_bytes() + b"#")
    monkeypatch.setattr(scenes_module, "SCENE_CODE", (*code[:place], changed, *code[place + 1 :]))
    found = scenes(bank).identity()
    assert {key for key in known if known[key] != found[key]} == {"scene code"}


def test_what_does_not_decide_a_scene_is_not_in_the_identity(bank, source_folder):
    first = scenes(bank)
    assert scenes(bank, length=5, normalise=False).identity() == first.identity()
    assert scenes(source_folder).identity() == first.identity()
    assert scenes(without_groups(bank)).identity() == first.identity()  # they are groups of one already
    assert all(isinstance(value, str) for value in first.identity().values())


def test_pictures_of_other_splits_do_not_matter(bank):
    touched = changed_by_one_level(bank)
    assert scenes(touched, split="train").identity() == scenes(bank, split="train").identity()
