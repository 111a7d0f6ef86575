"""The bench lists: seeds that always give the same scenes, and a refusal of other photographs."""

import dataclasses

import numpy as np
import pytest

from lumen_lab.bench import BENCH_DIR, BenchList, read_lists, scenes_of
from lumen_lab.bench.lists import write_lists
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.errors import ArtifactError, DatasetError

SMALL = BenchList("small", "a test", "drawn", "", "test", 7, 3, (64, 96), {"thin": 1.0})


def test_shipped_lists_hold_out_the_training_split_and_have_seeds_of_their_own():
    lists = read_lists()
    assert set(lists) == {"composed", "thin", "drawn"}
    assert {entry.split for entry in lists.values()} == {"test"}
    assert len({entry.seed for entry in lists.values()}) == len(lists)
    assert lists["thin"].mixture == {"thin": 1.0}
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


def test_lists_survive_the_file_and_a_damaged_one_is_refused(tmp_path):
    path = write_lists({"small": SMALL}, tmp_path / "lists.json")
    assert read_lists(path) == {"small": SMALL}
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ArtifactError, match="Cannot read .*lists.json as bench lists"):
        read_lists(path)
    assert (BENCH_DIR / "lists.json").is_file()
