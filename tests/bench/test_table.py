"""The bench table: what is compared with the recorded one, and that a spoiled predictor is told apart."""

import copy
import dataclasses

import numpy as np
import pytest

from lumen_lab.bench import BenchTable, differences, run_bench
from lumen_lab.bench.lists import BenchList
from lumen_lab.bench.report import worst, write_report
from lumen_lab.bench.table import RELATIVE_TOLERANCE, SHARE_TOLERANCE
from lumen_lab.errors import ArtifactError

LIST = BenchList("small", "a test", "drawn", "", "test", 7, 6, (64, 64), {"shape": 0.5, "thin": 0.5})


class BrightParts:
    """The brighter a pixel, the likelier foreground; ``bias`` moves the threshold."""

    config = type("Config", (), {"image_size": (64, 64)})

    def __init__(self, bias=0.0):
        self.bias = bias

    def __call__(self, image):
        return 3 * image.mean(1, keepdims=True) + self.bias


@pytest.fixture(scope="module")
def scores():
    return run_bench(BrightParts(), [LIST], workers=0)


@pytest.fixture(scope="module")
def table(scores):
    return BenchTable.from_scores("bright parts", scores)


def changed(table, metric, by, *, attribute="all"):
    other = copy.deepcopy(table)
    for row in other.lists["small"]["raw"]:
        if row["attribute"] == attribute:
            row[metric] += by
    return other


def test_the_table_is_the_mean_of_the_scores(scores, table):
    values = [image.values["raw"]["s_measure"] for image in scores["small"].images]
    assert table.value("small", "s_measure") == pytest.approx(np.mean(values), abs=1e-12)
    assert table.rows()[0]["images"] == 6


def test_a_second_run_matches_and_a_moved_threshold_does_not(table):
    again = BenchTable.from_scores("again", run_bench(BrightParts(), [LIST], workers=0))
    assert differences(table, again) == []
    moved = BenchTable.from_scores("moved", run_bench(BrightParts(bias=0.3), [LIST], workers=0))
    found = {row["metric"] for row in differences(table, moved)}
    assert {"mae", "s_measure", "iou"} <= found
    assert "images" not in found


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


def test_a_difference_in_one_attribute_alone_is_found(table):
    attribute = next(row["attribute"] for row in table.lists["small"]["raw"][1:] if row["images"])
    (row,) = differences(table, changed(table, "mae", 0.01, attribute=attribute))
    assert (row["attribute"], row["metric"]) == (attribute, "mae")


def test_a_metric_that_was_defined_and_is_no_more_is_a_difference(table):
    other = copy.deepcopy(table)
    other.lists["small"]["raw"][0]["mae"] = None
    assert [row["metric"] for row in differences(table, other)] == ["mae"]
    assert differences(other, other) == []


def test_a_list_that_was_not_recorded_differs_everywhere(table):
    unknown = dataclasses.replace(table, lists={"other": table.lists["small"]})
    assert len(differences(table, unknown)) > 20


def test_a_table_survives_the_file(table, tmp_path):
    path = table.save(tmp_path / "table.json")
    assert differences(table, BenchTable.load(path)) == []
    path.write_text("{}")
    with pytest.raises(ArtifactError):
        BenchTable.load(path)


def test_the_report_shows_tables_and_scenes_and_needs_no_other_file(scores, table, tmp_path):
    from lumen_lab.bench import scenes_of

    path = write_report(tmp_path / "bench.html", BrightParts(), table, scores, {"small": scenes_of(LIST)})
    page = path.read_text()
    assert "By attribute, stretched" in page
    assert page.count("data:image/png;base64,") == 3
    assert "src='http" not in page
    lowest = min(range(6), key=lambda index: scores["small"].images[index].values["raw"]["s_measure"])
    assert worst(scores["small"], 3)[0] == lowest
