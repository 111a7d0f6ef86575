"""Scores of a data set: means that leave out the undefined and count, one line an attribute, saved and read back."""

import json
import math

import numpy as np
import pytest

from lumen_lab.errors import ArtifactError, MetricError
from lumen_lab.metrics import METRICS, READINGS, ImageScores, Reliability, Scores, score_mask, summarise
from tests.metrics.pictures import mattes, predicted

ATTRIBUTES = {
    "disc": (),
    "disc with a rod": ("thin",),
    "two apart": ("multiple",),
    "ring": ("hole",),
    "cut by the border": ("touching_border",),
    "soft": ("soft_edge",),
    "small": ("small",),
}
NAMES = ("thin", "soft_edge", "small", "large", "multiple", "hole", "touching_border")


def held(name):
    return {attribute: attribute in ATTRIBUTES[name] for attribute in NAMES}


def scored(*, spoil=()):
    """Every matte as an image; those that hold an attribute of ``spoil`` are predicted empty."""
    for name, matte in mattes().items():
        prediction = predicted(matte) * (0 if set(spoil) & set(ATTRIBUTES[name]) else 1)
        yield name, held(name), score_mask(prediction, matte)


@pytest.fixture(scope="module")
def images():
    return list(scored())


@pytest.fixture(scope="module")
def scores(images):
    return summarise(images)


def line(rows, key, value):
    (row,) = [row for row in rows if row[key] == value]
    return row


class TestMeans:
    def test_the_mean_is_that_of_the_images(self, scores, images):
        for reading in READINGS:
            for metric in ("s_measure", "mae", "hce"):
                values = [scored.values[reading][metric] for _, _, scored in images]
                assert scores.mean(metric, reading=reading) == pytest.approx(np.mean(values))
                assert scores.counted(metric, reading=reading) == 7

    def test_what_is_undefined_is_left_out_and_counted(self, scores, images):
        values = [scored.values["raw"]["thin_recall"] for _, _, scored in images]
        defined = [value for value in values if value is not None]
        assert len(defined) == 1 < len(values)
        row = line(scores.summary(), "metric", "thin_recall")
        assert row["raw"] == defined[0] and row["images"] == 1
        assert line(scores.summary(), "metric", "s_measure")["images"] == 7

    def test_a_metric_undefined_on_every_image_has_no_mean(self):
        flat = summarise([("flat", {}, score_mask(np.zeros((8, 8)), np.zeros((8, 8)), hce=False))])
        for metric in ("thin_recall", "soft_edge_px", "soft_edge_gap_px", "hce"):
            row = line(flat.summary(), "metric", metric)
            assert row["raw"] is row["stretched"] is None and row["images"] == 0
        assert flat.mean("iou") == 1

    def test_the_readings_are_counted_apart(self):
        """A faint prediction has a contour only once it is stretched."""
        matte = mattes()["disc"]
        row = line(summarise([("faint", {}, score_mask(matte * 0.4, matte))]).summary(), "metric", "soft_edge_px")
        assert row["raw"] is None and row["images"] == 0
        assert row["stretched"] > 0 and row["images_stretched"] == 1

    def test_summary_has_one_line_a_metric(self, scores):
        rows = scores.summary()
        assert [row["metric"] for row in rows] == [*METRICS, "calibration_error", "grey_share"]
        assert all(list(row) == list(rows[0]) for row in rows)
        assert {row["better"] for row in scores.summary()} == {"higher", "lower", "zero", "neither"}

    def test_summary_shows_the_calibration_and_how_grey_the_mattes_are(self, scores, images):
        error, grey = scores.summary()[-2:]
        assert 0 < error["raw"] == scores.reliability.calibration_error < 1
        assert error["stretched"] is None and (error["images"], error["images_stretched"]) == (7, 0)
        shares = [np.mean((matte > 0) & (matte < 1)) for matte in mattes().values()]
        assert grey["raw"] == grey["stretched"] == pytest.approx(np.mean(shares)) and grey["raw"] > 0.02
        assert "calibration_error" in scores._repr_html_() and "grey_share" in scores._repr_html_()

    def test_raw_is_the_default_since_stretching_hides_a_saturated_model(self):
        """Published tables are stretched: there, a graph whose range was cut to [0.3, 0.6] is as good as before."""
        matte = mattes()["disc"]
        sound, cut = (
            summarise([("disc", {}, score_mask(p, matte))]) for p in (predicted(matte), 0.3 + 0.3 * predicted(matte))
        )
        assert READINGS[0] == "raw"
        assert cut.mean("weighted_f") == cut.mean("weighted_f", reading="raw") < sound.mean("weighted_f") - 0.3
        assert cut.attribute_rows() == cut.attribute_rows(reading="raw")
        assert cut.counted("soft_edge_px") == cut.counted("soft_edge_px", reading="raw")
        hidden = cut.mean("weighted_f", reading="stretched")
        assert hidden == pytest.approx(sound.mean("weighted_f", reading="stretched"), abs=0.01)

    def test_the_order_of_the_images_does_not_matter(self, images):
        forth, back = summarise(images), summarise(images[::-1])
        for reading in READINGS:
            for metric in set(METRICS) - {"e_max", "f_max"}:
                assert forth.mean(metric, reading=reading) == back.mean(metric, reading=reading)
            for metric in ("e_max", "f_max"):
                assert forth.mean(metric, reading=reading) == pytest.approx(back.mean(metric, reading=reading))

    def test_the_best_of_a_group_is_that_of_its_own_mean_curve(self, scores, images):
        _, _, ring = line([{"name": image[0], "image": image} for image in images], "name", "ring")["image"]
        assert scores.mean("f_max", attribute="hole") == pytest.approx(ring.values["raw"]["f_max"])
        curves = np.mean([scored.curves["raw"]["f"] for _, _, scored in images], axis=0)
        assert scores.mean("f_max") == pytest.approx(curves.max())


class TestAttributes:
    def test_a_class_that_fell_is_seen_in_its_line_only(self, scores):
        """Of seven images, the one with a hole is lost; 20 times as many sound ones keep the mean up."""
        names = [name for name in mattes() if name != "ring"]
        many = [(f"{name} {n}", held(name), scored) for name, _, scored in scored() if name in names for n in range(20)]
        (lost,) = [image for image in scored(spoil=("hole",)) if image[0] == "ring"]
        (sound,) = [image for image in scored() if image[0] == "ring"]
        before, after = summarise([*many, sound]), summarise([*many, lost])
        for metric in ("s_measure", "weighted_f", "iou"):
            everything, hole = (
                line(after.attribute_rows(), "attribute", attribute)[metric]
                - line(before.attribute_rows(), "attribute", attribute)[metric]
                for attribute in ("all", "hole")
            )
            assert -0.01 < everything < 0 and hole < -0.3, metric
        for attribute in ("thin", "small", "multiple"):
            assert line(after.attribute_rows(), "attribute", attribute) == line(
                before.attribute_rows(), "attribute", attribute
            )

    def test_one_line_an_attribute_in_the_order_given(self, scores):
        for reading in READINGS:
            rows = scores.attribute_rows(reading=reading)
            assert [row["attribute"] for row in rows] == ["all", *NAMES]
            assert [row["images"] for row in rows] == [7, 1, 1, 1, 0, 1, 1, 1]
            assert all(list(row) == ["attribute", "images", *METRICS] for row in rows)
            assert rows[0]["mae"] == scores.mean("mae", reading=reading)

    def test_an_attribute_that_no_image_has_is_empty_not_nan(self, scores):
        row = line(scores.attribute_rows(), "attribute", "large")
        assert row["images"] == 0 and {row[metric] for metric in METRICS} == {None}
        assert scores.having("large") == [] and scores.counted("iou", attribute="large") == 0

    def test_an_unknown_attribute_metric_or_reading_is_named(self, scores):
        with pytest.raises(MetricError, match="no attribute 'tiny'; there are all, thin"):
            scores.mean("iou", attribute="tiny")
        with pytest.raises(MetricError, match="no 'miou'"):
            scores.mean("miou")
        with pytest.raises(MetricError, match="reading 'max'; .* readings raw, stretched"):
            scores.attribute_rows(reading="max")


class TestRefusals:
    def test_nothing_to_summarise(self):
        with pytest.raises(MetricError, match="no image"):
            summarise([])

    def test_an_image_given_twice(self, images):
        with pytest.raises(MetricError, match="more than once: disc;"):
            summarise([*images, images[0]])

    def test_images_that_know_different_attributes(self, images):
        name, attributes, score = images[1]
        attributes = {key: value for key, value in attributes.items() if key != "thin"}
        with pytest.raises(MetricError, match=f"{name} and disc know different attributes"):
            summarise([images[0], (name, attributes, score)])

    @pytest.mark.parametrize("holds", ["False", None, 1, 0.0, math.nan, np.array([True])])
    def test_an_attribute_that_is_neither_true_nor_false(self, images, holds):
        with pytest.raises(MetricError, match="one has the attribute 'thin' as .*say True or False"):
            summarise([("one", {"thin": holds}, images[0][2])])

    def test_numpy_s_true_and_false_are_taken(self, images):
        scores = summarise([("one", {"thin": np.bool_(False), "large": np.bool_(True)}, images[0][2])])
        assert scores.images[0].attributes == {"thin": False, "large": True}

    def test_images_that_are_given_in_another_shape(self, images):
        score = images[0][2]
        for image in (("one", score), ("one", {}, None), "one"):
            with pytest.raises(MetricError, match="given as .name, attributes, what score_mask gave"):
                summarise([image])
        for image in (("one", ["thin"], score), ("one", None, score), (1, {}, score)):
            with pytest.raises(MetricError, match="a name and a dict of attributes"):
                summarise([image])

    def test_an_attribute_named_like_the_line_of_all_images(self, images):
        with pytest.raises(MetricError, match='"all" stands for every image'):
            summarise([("one", {"all": True}, images[0][2])])


class TestRecord:
    def test_saved_and_read_back_it_is_the_same(self, scores, tmp_path):
        path = scores.save(tmp_path / "scores.json")
        again = Scores.load(path)
        assert again == scores
        assert again.summary() == scores.summary() and again.attribute_rows() == scores.attribute_rows()
        assert again.reliability.calibration_error == scores.reliability.calibration_error
        assert isinstance(again.images[0], ImageScores) and isinstance(again.reliability, Reliability)

    def test_the_file_holds_no_curves_and_no_nan(self, scores, tmp_path):
        text = scores.save(tmp_path / "scores.json").read_text()
        assert "NaN" not in text and "curves" not in text and len(text) < 3000 * len(scores.images)

    def test_scores_of_another_version_are_refused(self, scores, tmp_path):
        values = json.loads(scores.save(tmp_path / "scores.json").read_text())
        values["images"][2]["values"]["stretched"]["new_measure"] = 1.0
        (tmp_path / "scores.json").write_text(json.dumps(values))
        with pytest.raises(ArtifactError, match="differ in new_measure"):
            Scores.load(tmp_path / "scores.json")

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("images",), []),
            (("images", 0, "name"), None),
            (("images", 0, "attributes"), {"thin": True}),
            (("images", 0, "attributes", "thin"), "False"),
            (("images", 0, "values", "raw", "iou"), "x"),
            (("images", 0, "values", "raw", "iou"), math.nan),
            (("images", 0, "values", "raw"), None),
            (("images", 0, "grey_share"), None),
            (("attributes",), None),
            (("attributes",), [3]),
            (("best",), {}),
            (("best", "raw"), {"all": {"e_max": 1, "f_max": 1}}),
            (("best", "stretched", "thin"), {"e_max": 1}),
            (("best", "raw", "all", "e_max"), [1, 2]),
            (("reliability", "pixels"), [1, 2]),
            (("reliability", "pixels", 3), None),
        ],
    )
    def test_a_damaged_file_is_refused(self, scores, tmp_path, place, value):
        values = json.loads(scores.save(tmp_path / "scores.json").read_text())
        within = values
        for key in place[:-1]:
            within = within[key]
        within[place[-1]] = value
        (tmp_path / "scores.json").write_text(json.dumps(values))
        with pytest.raises(ArtifactError, match="again"):
            Scores.load(tmp_path / "scores.json")

    def test_a_file_nested_without_end_is_refused(self, tmp_path):
        (tmp_path / "scores.json").write_text("[" * 100_000)
        with pytest.raises(ArtifactError, match="Cannot read .*scores.json as a saved Scores"):
            Scores.load(tmp_path / "scores.json")

    def test_rows_are_two_lines_an_image(self, scores):
        rows = scores.rows()
        assert len(rows) == 14 and [row["reading"] for row in rows[:2]] == list(READINGS)
        row = rows[2]
        assert row["image"] == "disc with a rod" and row["attributes"] == "thin" and row["thin_recall"] > 0.5
        values = [value for row in rows for value in row.values() if isinstance(value, float)]
        assert all(map(math.isfinite, values))

    def test_html_shows_the_mean_and_the_attributes_of_both_readings(self, scores):
        page = scores._repr_html_()
        assert "7 images" in page and page.count("touching_border") == 2
        assert page.count("<table>") == 3 and "nan" not in page.lower()

    def test_a_name_cannot_break_the_page(self, images):
        assert "<b>" not in summarise([("<b>", {"<b>": True}, images[0][2])])._repr_html_()
