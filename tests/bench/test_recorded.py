"""The recorded table of the micro teacher is what its weights give: anyone's run of the bench matches it."""

import os
from pathlib import Path

import pytest

from lumen_lab.bench import BENCH_DIR, BenchTable, bench_table, differences, read_lists, run_bench, scenes_of
from lumen_lab.bench.__main__ import main
from lumen_lab.bench.report import aim_rows
from lumen_lab.datasets.sources import open_sources
from lumen_lab.errors import LumenError
from lumen_lab.network import MICRO_WEIGHTS, load_network
from lumen_lab.specs import file_sha256

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded():
    return BenchTable.load(BENCH_DIR / "teacher.json")


@pytest.fixture(scope="module")
def photographs():
    """The Debian photographs, where `make bench` or continuous integration has fetched them."""
    folder = Path(os.environ.get("LUMEN_SOURCES", ROOT / "build" / "sources"))
    try:
        bank = open_sources(folder)
        scenes_of(read_lists()["composed"], bank)
    except LumenError as error:
        pytest.skip(f"the photographs of the bench are not here (make bench fetches them): {error}")
    return bank


def found_on(*names, bank=None):
    """The table of the shipped weights on these lists, computed here."""
    network = load_network("micro")
    scenes = {name: scenes_of(read_lists()[name], bank) for name in names}
    return bench_table("found", network, run_bench(network, scenes, workers=0), scenes)


def test_the_recorded_table_is_of_the_shipped_weights(recorded):
    assert recorded.predictor == f"{MICRO_WEIGHTS.name} sha256 {file_sha256(MICRO_WEIGHTS)}"
    assert set(recorded.lists) == set(read_lists())
    for name, entry in read_lists().items():
        assert [tables[0]["images"] for tables in recorded.lists[name].values()] == [entry.images] * 2


def test_gates_are_recorded_for_every_list(recorded):
    """That these means are those of the weights is for the tests below."""
    assert set(recorded.gates) == set(read_lists())
    assert all([row["gate"] for row in rows] == ["deep", "middle", "shallow"] for rows in recorded.gates.values())


SHORT = "the teacher has seen too few scenes: data/micro/README.md says how far it came and why"


def test_the_gates_of_the_teacher_are_alive(recorded):
    assert all(0.1 <= row["mean"] <= 0.9 for rows in recorded.gates.values() for row in rows)


@pytest.mark.xfail(strict=True, reason=SHORT)
@pytest.mark.parametrize(("name", "metric"), [(n, m) for n, entry in read_lists().items() for m in entry.aims])
def test_the_teacher_reaches_its_aim(recorded, name, metric):
    (row,) = [row for row in aim_rows(recorded, read_lists()) if (row["list"], row["metric"]) == (name, metric)]
    assert row["reached"], row


@pytest.mark.slow
def test_drawn_scenes_give_the_recorded_scores_and_gates(recorded):
    assert differences(recorded, found_on("drawn")) == []


@pytest.mark.slow
def test_photographs_give_the_recorded_scores(recorded, photographs):
    assert differences(recorded, found_on("composed", "thin", bank=photographs)) == []


def test_no_scene_of_the_lists_shares_a_picture_with_the_training_split(photographs):
    held_out = scenes_of(read_lists()["composed"], photographs)
    for kind, groups in (("foreground", held_out.foregrounds), ("background", held_out.backgrounds)):
        trained = {picture.tobytes() for group in photographs.select(kind, "train") for picture in group}
        assert not trained & {picture.tobytes() for group in groups for picture in group}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lists", "hard"], "There is no list hard; the lists are composed, thin, drawn."),
        (["--lists", "composed"], "The list composed is composed from photographs; fetch them"),
        (["--weights", "gone.safetensors"], "gone.safetensors was asked for and is not there"),
        (["nowhere"], "nowhere was asked for cut-outs and backgrounds; found no such folder"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments, sentence, capsys, tmp_path):
    assert main([*arguments, "--out", str(tmp_path), "--workers", "0"]) == 2
    assert capsys.readouterr().err.startswith(sentence)
    assert list(tmp_path.iterdir()) == []
