"""A scene has the same bits whoever draws it: this process, workers of either kind, or another interpreter.

A scene may depend on its seed and index alone, so nothing that differs between processes may reach it: the number of
workers, how they were started, the order of the work, other generators' state, the threads of the numeric libraries.
"""

import hashlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from lumen_lab.datasets import ComposedScenes

SIZE, LENGTH, SEED = (48, 64), 10, 3


def scenes(sources, **options):
    return ComposedScenes(sources, **{"size": SIZE, "length": LENGTH, "seed": SEED} | options)


def digest(item) -> str:
    """SHA-256 of everything that an item holds."""
    parts = (item[name].numpy().tobytes() for name in ("image", "matte", "attributes"))
    return hashlib.sha256(b"".join((*parts, str(int(item["index"])).encode()))).hexdigest()


def loaded(data, *, order=range(LENGTH), **options) -> dict[int, str]:
    """Digest by index, as a loader hands the items out; a batch of ``None`` is a single item."""
    loader = torch.utils.data.DataLoader(data, batch_size=None, sampler=list(order), **options)
    return {int(item["index"]): digest(item) for item in loader}


@pytest.fixture(scope="module")
def expected(bank):
    """Digest by index, drawn here one after the other."""
    data = scenes(bank)
    found = {index: digest(data[index]) for index in range(LENGTH)}
    assert len(set(found.values())) == LENGTH
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than there are cores, on purpose
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_any_number_of_workers_draws_the_same_scenes(bank, expected, workers):
    assert loaded(scenes(bank), num_workers=workers) == expected


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_started_either_way_draw_the_same_scenes(bank, expected, start):
    if start not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {start}")
    assert loaded(scenes(bank), num_workers=2, multiprocessing_context=start) == expected


def test_workers_that_stay_draw_the_same_scenes_again(bank, expected):
    loader = torch.utils.data.DataLoader(scenes(bank), batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert {int(item["index"]): digest(item) for item in loader} == expected


def test_batches_hold_the_scenes_unchanged(bank, expected):
    (batch,) = torch.utils.data.DataLoader(scenes(bank), batch_size=LENGTH, num_workers=2)
    items = [{name: values[k] for name, values in batch.items()} for k in range(LENGTH)]
    assert {k: digest(item) for k, item in enumerate(items)} == expected


def test_the_order_of_access_does_not_matter(bank, expected):
    data = scenes(bank)
    for order in (reversed(range(LENGTH)), np.random.default_rng(0).permutation(LENGTH).tolist()):
        assert loaded(data, order=order) == expected
    assert {digest(data[7]) for _ in range(3)} == {expected[7]}
    assert loaded(data, order=[4, 9, 1], num_workers=2) == {k: expected[k] for k in (4, 9, 1)}


def test_other_generators_are_neither_read_nor_moved(bank, expected):
    data = scenes(bank)
    for seed in (0, 1):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        before = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
        assert digest(data[2]) == expected[2]
        assert before == (
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            torch.get_rng_state().numpy().tobytes(),
        )


def test_sources_are_left_as_they_are(bank):
    def state():
        return hashlib.sha256(b"".join(pixels.tobytes() for pixels in bank.pixels)).hexdigest()

    before = state()
    loaded(scenes(bank, length=30))
    assert state() == before


@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_fresh_interpreter_draws_the_same_scenes(source_folder, expected, threads):
    program = (
        "import sys; from tests.datasets.test_parallel_loading import digest, scenes; data = scenes(sys.argv[1])\n"
        "print(*(digest(data[k]) for k in reversed(range(len(data)))))"
    )
    numbers = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    done = subprocess.run(
        [sys.executable, "-c", program, str(source_folder)],
        capture_output=True,
        text=True,
        env=os.environ | numbers | {"PYTHONHASHSEED": threads, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected[k] for k in reversed(range(LENGTH))]


def test_sources_given_in_another_process_or_scanned_anew_are_the_same(source_folder, expected):
    assert loaded(scenes(source_folder), num_workers=1) == expected


@pytest.mark.parametrize("change", [{"seed": SEED + 1}, {"split": "validation"}, {"size": (64, 48)}])
def test_another_seed_split_or_size_draws_other_scenes(bank, expected, change):
    found = loaded(scenes(bank, **change))
    assert not set(found.values()) & set(expected.values())


def test_the_first_scenes_do_not_depend_on_how_many_there_are(bank, expected):
    longer = scenes(bank, length=5 * LENGTH)
    assert {k: digest(longer[k]) for k in range(LENGTH)} == expected
