"""The bench lists: seeds that always give the same scenes, and a refusal of other photographs."""

import dataclasses
import json

import numpy as np
import pytest

from lumen_lab.bench import BENCH_DIR, BenchList, read_lists, scenes_of
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.errors import ArtifactError, DatasetError

SMALL = BenchList("small", "a test", "drawn", "", "test", 7, 3, (64, 96), {"thin": 1.0})


def test_shipped_lists_hold_out_the_training_split_and_have_seeds_of_their_own():
    lists = read_lists()
    assert set(lists) == {"composed", "thin", "drawn"}
    assert {entry.split for entry in lists.values()} == {"test"}
    assert len({entry.seed for entry in lists.values()}) == len(lists)
    assert lists["thin"].mixture == {"thin": 1.0}
    assert all(len(entry.matte_means) == 5 for entry in lists.values())
    assert lists["composed"].aims == {"s_measure": 0.92, "weighted_f": 0.86, "mae": 0.025}
    assert lists["thin"].aims == {"thin_recall": 0.75}
    assert all(len(entry.sources_sha256) == 64 for entry in lists.values() if entry.sources == "photographs")


def test_a_drawn_list_needs_nothing_and_gives_the_same_scenes_twice():
    first, second = scenes_of(SMALL), scenes_of(SMALL)
    assert len(first) == 3
    for index in range(3):
        one, other = first.sample(index), second.sample(index)
        assert one.image.shape == (64, 96, 3)
        assert np.array_equal(one.image, other.image)
        assert np.array_equal(one.matte, other.matte)
    assert not np.array_equal(first.sample(0).matte, scenes_of(dataclasses.replace(SMALL, seed=8)).sample(0).matte)


def test_photographs_that_were_not_given_or_are_others_are_refused():
    entry = dataclasses.replace(SMALL, sources="photographs", sources_sha256="0" * 64)
    with pytest.raises(DatasetError, match="The list small is composed from photographs; fetch them with"):
        scenes_of(entry)
    bank = drawn_sources(pictures=10, side_px=64)
    with pytest.raises(DatasetError, match="was made with other photographs .SHA-256 000000000000…, found"):
        scenes_of(entry, bank)
    found = scenes_of(dataclasses.replace(entry, sources_sha256=""), bank).sources_sha256()
    assert len(scenes_of(dataclasses.replace(entry, sources_sha256=found), bank)) == 3


def test_scenes_that_these_versions_compose_otherwise_are_refused():
    means = tuple(float(scenes_of(SMALL).scene(index).matte.mean()) for index in range(2))
    assert len(scenes_of(dataclasses.replace(SMALL, matte_means=means))) == 3
    moved = dataclasses.replace(SMALL, matte_means=(means[0], means[1] + 0.01))
    with pytest.raises(DatasetError, match="The list small is composed otherwise here .its first mattes cover"):
        scenes_of(moved)


def test_lists_survive_the_file_and_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([SMALL.to_json()]))
    assert read_lists(path) == {"small": SMALL}
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ArtifactError, match="Cannot read .*lists.json as bench lists"):
        read_lists(path)
    assert (BENCH_DIR / "lists.json").is_file()
