"""The bench table: what is compared with the recorded one, and that a spoiled predictor is told apart."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from lumen_lab.bench import BenchList, BenchTable, bench_table, differences, not_compared, run_bench, scenes_of
from lumen_lab.bench import __main__ as command
from lumen_lab.bench.report import aim_rows, worst, write_report
from lumen_lab.bench.table import LEAST_IMAGES, RELATIVE_TOLERANCE, SHARE_TOLERANCE
from lumen_lab.errors import ArtifactError

LIST = BenchList(
    "small", "a test", "drawn", "", "test", 7, 12, (32, 32), {"shape": 1.0}, aims={"mae": 0.5, "iou": 0.99}
)


class BrightParts:
    """The brighter a pixel, the likelier foreground; ``bias`` moves the threshold."""

    config = type("Config", (), {"image_size": (32, 32)})

    def __init__(self, bias=0.0):
        self.bias = bias

    def __call__(self, image):
        return 3 * image.mean(1, keepdims=True) + self.bias


@pytest.fixture(scope="module")
def scenes():
    return {"small": scenes_of(LIST)}


@pytest.fixture(scope="module")
def scores(scenes):
    return run_bench(BrightParts(), scenes, workers=0)


@pytest.fixture(scope="module")
def table(scores, scenes):
    return bench_table("bright parts", BrightParts(), scores, scenes)


def changed(table, metric, by, *, attribute="all"):
    other = copy.deepcopy(table)
    for row in other.lists["small"]["raw"]:
        if row["attribute"] == attribute:
            row[metric] += by
    return other


def test_the_table_is_the_mean_of_the_scores(scores, table):
    values = [image.values["raw"]["s_measure"] for image in scores["small"].images]
    assert table.value("small", "s_measure") == pytest.approx(np.mean(values), abs=1e-12)
    assert table.rows()[0]["images"] == 12


def test_a_second_run_matches_and_a_moved_threshold_does_not(table, scenes):
    again = bench_table("again", BrightParts(), run_bench(BrightParts(), scenes, workers=0), scenes)
    assert differences(table, again) == []
    moved = BrightParts(bias=0.3)
    found = bench_table("moved", moved, run_bench(moved, scenes, workers=0), scenes)
    metrics = {row["metric"] for row in differences(table, found)}
    assert {"mae", "s_measure", "iou"} <= metrics
    assert "images" not in metrics


@pytest.mark.parametrize(
    ("metric", "by", "rows"),
    [
        ("s_measure", 0.9 * SHARE_TOLERANCE, 0),
        ("s_measure", 1.1 * SHARE_TOLERANCE, 1),
        ("hce", 0.9 * RELATIVE_TOLERANCE, 0),
        ("images", 1, 1),
    ],
)
def test_what_counts_as_a_difference(table, metric, by, rows):
    assert len(differences(table, changed(table, metric, by))) == rows


def test_an_attribute_of_few_images_is_not_compared_and_one_of_many_is(table):
    few = next(row["attribute"] for row in table.lists["small"]["raw"][1:] if 0 < row["images"] < LEAST_IMAGES)
    assert differences(table, changed(table, "mae", 0.01, attribute=few)) == []
    many = copy.deepcopy(table)
    for row in many.lists["small"]["raw"]:
        row["images"] = LEAST_IMAGES
    (row,) = differences(many, changed(many, "mae", 0.01, attribute=few))
    assert (row["attribute"], row["metric"]) == (few, "mae")


def test_a_metric_that_was_defined_and_is_no_more_is_a_difference(table):
    other = copy.deepcopy(table)
    other.lists["small"]["raw"][0]["mae"] = None
    assert [row["metric"] for row in differences(table, other)] == ["mae"]
    assert differences(other, other) == []


def test_a_gate_that_moved_is_a_difference(table):
    alive = dataclasses.replace(table, gates={"small": ({"gate": "deep", "mean": 0.46},)})
    dead = dataclasses.replace(table, gates={"small": ({"gate": "deep", "mean": 1e-11},)})
    assert differences(alive, alive) == []
    assert [row["metric"] for row in differences(alive, dead)] == ["gate deep"]


def test_a_gate_or_a_line_that_only_one_table_has_is_a_difference(table):
    gates = ({"gate": "deep", "mean": 0.46}, {"gate": "middle", "mean": 0.5})
    both = dataclasses.replace(table, gates={"small": gates})
    one = dataclasses.replace(table, gates={"small": gates[1:]})
    expected = [("gate deep", 0.46, None), ("gate middle", 0.5, None)]
    rows = differences(both, dataclasses.replace(table, gates={}))
    assert [(row["metric"], row["recorded"], row["found"]) for row in rows] == expected
    assert [row["metric"] for row in differences(both, one)] == ["gate deep"]
    assert [row["metric"] for row in differences(one, both)] == ["gate deep"]
    fewer = copy.deepcopy(table)
    *kept, dropped = fewer.lists["small"]["raw"]
    fewer.lists["small"]["raw"] = tuple(kept)
    gone = differences(table, fewer)
    assert {(row["attribute"], row["found"]) for row in gone} == {(dropped["attribute"], None)}
    assert ("images", dropped["images"]) in {(row["metric"], row["recorded"]) for row in gone}


def test_what_was_not_compared_is_named(table):
    unknown = dataclasses.replace(table, lists={"other": table.lists["small"]})
    assert len(differences(table, unknown)) > 20
    assert not_compared(table, unknown) == ["the list small was not scored"]
    other = dataclasses.replace(table, predictor="mine", versions={**table.versions, "torch": "0"})
    notes = not_compared(table, other)
    assert notes[0] == "the recorded table is of bright parts, this one of mine"
    assert notes[1].startswith("torch was ") and notes[1].endswith(", is 0")
    assert not_compared(table, table) == []


def test_aims_are_held_against_the_raw_mean(table):
    rows = {row["metric"]: row for row in aim_rows(table, {"small": LIST})}
    assert rows["mae"]["found"] == table.value("small", "mae")
    assert (rows["mae"]["reached"], rows["iou"]["reached"]) == (True, False)


def test_a_table_survives_the_file(table, tmp_path):
    path = table.save(tmp_path / "table.json")
    assert differences(table, BenchTable.load(path)) == []
    path.write_text("{}")
    with pytest.raises(ArtifactError):
        BenchTable.load(path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda values: values.update(lists=[1]), "lists is dict"),
        (lambda values: values.update(gates=None), "gates is dict"),
        (lambda values: values.update(versions=None), "versions is dict"),
        (lambda values: values["lists"]["small"].pop("raw"), "small has no means of the raw reading"),
        (lambda values: values["lists"]["small"].update(raw=[]), "small has no means of the raw reading"),
        (lambda values: values["lists"]["small"]["raw"][0].update(mae="x"), "small has no means of the raw reading"),
        (lambda values: values["gates"].update(small=[{"gate": "deep"}]), "small has no means of its gates"),
    ],
)
def test_a_damaged_table_is_refused_when_it_is_read(table, tmp_path, spoil, words):
    path = table.save(tmp_path / "table.json")
    values = json.loads(path.read_text())
    spoil(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=words):
        BenchTable.load(path)


def test_the_report_shows_tables_and_scenes_and_needs_no_other_file(scores, scenes, table, tmp_path):
    path = write_report(tmp_path / "bench.html", BrightParts(), table, {"small": LIST}, scores, scenes)
    page = path.read_text()
    assert "By attribute, stretched" in page
    assert page.count("data:image/png;base64,") == 4
    assert "src='http" not in page
    lowest = min(range(12), key=lambda index: scores["small"].images[index].values["raw"]["s_measure"])
    assert worst(scores["small"], 3)[0] == lowest


# The command


@pytest.fixture
def at_hand(tmp_path, monkeypatch, table):
    """The command with the small list, the predictor above and a recorded table of its own."""
    monkeypatch.setattr(command, "read_lists", lambda: {"small": LIST})
    monkeypatch.setattr(command, "chosen_predictor", lambda weights: (BrightParts(0.3 if weights else 0.0), "it"))
    monkeypatch.setattr(command, "write_report", lambda path, *given: path)
    monkeypatch.setattr(command, "RECORDED", table.save(tmp_path / "teacher.json"))
    return lambda *arguments: command.main([*arguments, "--out", str(tmp_path / "out"), "--workers", "0"])


def test_the_command_matches_what_was_recorded_and_notices_what_was_not(at_hand, capsys, tmp_path, monkeypatch):
    assert at_hand() == 0
    assert "Every mean is that of teacher.json." in capsys.readouterr().out
    monkeypatch.setattr(command, "chosen_predictor", lambda weights: (BrightParts(0.3), "it"))
    with pytest.warns(UserWarning, match="held the scores of another evaluation"):
        assert at_hand() == 1
    assert " means differ from teacher.json." in capsys.readouterr().out


def test_a_record_is_of_the_shipped_weights_on_every_list(at_hand, capsys, tmp_path):
    before = (tmp_path / "teacher.json").read_bytes()
    assert at_hand("--record", "--weights", "mine.safetensors") == 2
    assert (tmp_path / "teacher.json").read_bytes() == before
    assert at_hand("--record") == 0
    assert json.loads((tmp_path / "teacher.json").read_text())["predictor"] == "it"
    assert capsys.readouterr().err.startswith("A record is of the shipped weights on every list")


def test_photographs_that_cannot_be_fetched_leave_the_drawn_list(at_hand, monkeypatch, capsys):
    def refuse(folder):
        raise command.DatasetError("apt-get is not here.")

    monkeypatch.setattr(command, "fetch_debian_sources", refuse)
    assert at_hand("nowhere", "--fetch") == 0
    assert (
        "apt-get is not here. Without photographs the list of drawn scenes alone is scored." in capsys.readouterr().err
    )


def test_a_report_that_cannot_be_written_is_refused_before_the_work(at_hand, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_bench", lambda *given, **options: pytest.fail("the work began"))
    (tmp_path / "out" / "bench.html").mkdir(parents=True)
    assert at_hand() == 2
    assert "bench.html, which is a folder; move it, or give another --out." in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert command.main(["--out", str(tmp_path / "file")]) == 2
    assert f"Asked to write in {tmp_path / 'file'}, which cannot be" in capsys.readouterr().err


def test_a_disk_that_fails_and_an_interrupt_end_quietly(at_hand, monkeypatch, capsys):
    def full(path, *given):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_report", full)
    assert at_hand() == 2
    assert "bench.html (No space left on device)." in capsys.readouterr().err

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_bench", interrupted)
    assert at_hand() == 130
    assert capsys.readouterr().err == ""


def test_without_a_recorded_table_the_command_says_how_to_get_on(at_hand, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "RECORDED", tmp_path / "none.json")
    assert at_hand() == 2
    err = capsys.readouterr().err
    assert "none.json" in err and "--record" in err and "--weights" in err and err.count("\n") == 1
