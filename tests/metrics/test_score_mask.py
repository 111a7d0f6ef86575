"""What a score is at the edges of its definition: empty, full, one pixel, constant, not binary; and what is refused."""

import dataclasses
import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from lumen_lab.errors import ArtifactError, MetricError
from lumen_lab.metrics import METRICS, READINGS, MaskScores, score_mask, stretched
from tests.metrics.pictures import eight_bit, mattes, predicted

H, W = 16, 20
EMPTY, FULL = np.zeros((H, W)), np.ones((H, W))
PIXEL = EMPTY.copy()
PIXEL[5, 7] = 1
BAR = EMPTY.copy()
BAR[4:12, 5:15] = 1  # a quarter of the frame, centred
GREY = np.full((H, W), 76 / 255)

PIXELS = H * W
NOTHING_TAKEN = 0.25 * PIXELS / (PIXELS - 1)  # E where prediction or mask, centred, is 0 everywhere
UNDEFINED = dict.fromkeys(("thin_recall", "soft_edge_px", "soft_edge_gap_px"))
WORST = dict.fromkeys("s_measure e_max e_mean e_adaptive f_max f_mean f_adaptive weighted_f iou dice".split(), 0.0)
BEST = dict.fromkeys(WORST, 1.0) | {"mae": 0, "matte_mae": 0, "hce": 0, "boundary_iou": 1} | UNDEFINED
WORST |= {"mae": 1, "matte_mae": 1, "hce": 1, "boundary_iou": 0} | UNDEFINED


def from_all(share):
    """F of a prediction that takes everything, on a mask of this share of the frame."""
    return 1.3 * share / (0.3 * share + 1)


def alike(value, share):
    """What a constant region, of this share of the frame, adds to S: the half for objects."""
    return 0.5 * share * 2 * value / (value**2 + 1)


def false_weight(top, bottom, left, right):
    """Of weighted F: Σ 2 − ½^(d/5) over the pixels outside a box, d away from it, for an error of 1 in each."""
    y, x = np.mgrid[:H, :W]
    rows, columns = np.maximum(top - y, y - bottom).clip(0), np.maximum(left - x, x - right).clip(0)
    away = np.hypot(rows, columns)
    return float((2 - 0.5 ** (away[away > 0] / 5)).sum())


def missed_share():
    """Of weighted F: the mean, over the frame, of a Gaussian of 7 × 7 pixels, σ 5, as far as it lies in the frame."""
    step = np.arange(-3, 4)
    weight = np.exp(-(step**2) / 50)
    beyond = float((abs(step) * weight).sum() / weight.sum())
    return (1 - beyond / H) * (1 - beyond / W)


def f1(recall, precision):
    return 2 * recall * precision / (recall + precision)


FAINT = 76 / 255
FALSE_BESIDE_PIXEL, FALSE_BESIDE_BAR = false_weight(5, 5, 7, 7), false_weight(4, 11, 5, 14)


BLIND = {"e_max": NOTHING_TAKEN, "e_mean": NOTHING_TAKEN, "e_adaptive": NOTHING_TAKEN}

# name → (prediction, matte, every metric of the raw reading)
EDGES = {
    "both empty": (EMPTY, EMPTY, BEST),
    "full prediction of an empty mask": (FULL, EMPTY, WORST),
    "faint prediction of an empty mask": (
        GREY,
        EMPTY,
        BEST
        | {"s_measure": 1 - 76 / 255, "mae": 76 / 255, "matte_mae": 76 / 255, "weighted_f": 0}
        | {"e_mean": 179 / 256, "f_mean": 179 / 256},
    ),
    "both full": (FULL, FULL, BEST),
    "empty prediction of a full mask": (
        EMPTY,
        FULL,
        WORST | {"e_max": 1, "e_mean": 1 / 256, "f_max": 1, "f_mean": 1 / 256, "weighted_f": f1(1 - missed_share(), 1)},
    ),
    "grey prediction of a full mask": (
        GREY,
        FULL,
        WORST
        | {"s_measure": 76 / 255, "mae": 179 / 255, "matte_mae": 179 / 255}
        | {"weighted_f": f1(1 - (1 - FAINT) * missed_share(), 1)}
        | {"e_max": 1, "e_mean": 77 / 256, "f_max": 1, "f_mean": 77 / 256},
    ),
    "one pixel, found": (
        PIXEL,
        PIXEL,
        BEST
        | {"e_mean": (255 + NOTHING_TAKEN) / 256}  # threshold 0 takes everything
        | {"f_mean": (255 + from_all(1 / 320)) / 256, "soft_edge_px": 0, "soft_edge_gap_px": 0},
    ),
    "one pixel, not found": (
        EMPTY,
        PIXEL,
        # S: the background, 319 of 320 pixels, is right as an object; of the quadrants, 6 × 8 pixels are not.
        WORST
        | BLIND
        | {"s_measure": 0.5 * 319 / 320 + 0.5 * (320 - 48) / 320}
        | {"f_max": from_all(1 / 320), "f_mean": from_all(1 / 320) / 256, "mae": 1 / 320, "matte_mae": 1 / 320},
    ),
    "constant grey, one pixel": (
        GREY,
        PIXEL,
        # Of the quadrants only the 6 × 8 pixels with the pixel in them are not constant in the mask.
        WORST
        | BLIND
        | {"s_measure": alike(76 / 255, 1 / 320) + alike(179 / 255, 319 / 320) + 0.5 * (320 - 48) / 320}
        | {"f_max": from_all(1 / 320), "f_mean": 77 / 256 * from_all(1 / 320)}
        | {"weighted_f": f1(FAINT, 1 / (1 + FALSE_BESIDE_PIXEL))}
        | {"mae": (179 + 319 * 76) / 81600, "matte_mae": (179 + 319 * 76) / 81600},
    ),
    "nothing found": (
        EMPTY,
        BAR,
        WORST
        | BLIND
        | {"s_measure": 0.5 * 0.75, "f_max": from_all(0.25), "f_mean": from_all(0.25) / 256}
        | {"mae": 0.25, "matte_mae": 0.25, "hce": 4},
    ),
    "everything found": (
        FULL,
        BAR,
        WORST
        | BLIND
        | {
            "s_measure": 0.5 * 0.25,
            "f_max": from_all(0.25),
            "f_mean": from_all(0.25),
            "weighted_f": f1(1, 80 / (80 + FALSE_BESIDE_BAR)),
        }
        | {"f_adaptive": from_all(0.25), "mae": 0.75, "matte_mae": 0.75, "iou": 0.25, "dice": 0.4, "hce": 5},
    ),
    "constant grey": (
        GREY,
        BAR,
        WORST
        | BLIND
        | {
            "s_measure": alike(76 / 255, 0.25) + alike(179 / 255, 0.75),
            "f_max": from_all(0.25),
            "f_mean": 77 / 256 * from_all(0.25),
        }
        | {
            "weighted_f": f1(FAINT, 80 / (80 + FALSE_BESIDE_BAR)),
            "mae": (179 + 3 * 76) / 1020,
            "matte_mae": (179 + 3 * 76) / 1020,
            "hce": 4,
        },
    ),
}


def assert_finite_or_none(scores):
    for reading in READINGS:
        assert list(scores.values[reading]) == list(METRICS)
        for name, value in scores.values[reading].items():
            assert value is None or (type(value) is float and math.isfinite(value)), name


@pytest.mark.filterwarnings("error")
class TestEdges:
    @pytest.mark.parametrize("case", EDGES)
    def test_every_metric_has_its_stated_value(self, case):
        prediction, matte, expected = EDGES[case]
        scores = score_mask(prediction, matte)
        assert_finite_or_none(scores)
        assert set(expected) == set(METRICS)
        assert scores.values["raw"] == pytest.approx(expected, abs=2e-6)

    @pytest.mark.parametrize("case", EDGES)
    def test_a_constant_or_binary_prediction_is_not_stretched(self, case):
        prediction, matte, _ = EDGES[case]
        scores = score_mask(prediction, matte)
        assert scores.values["raw"] == scores.values["stretched"] and scores.curves["raw"] == scores.curves["stretched"]

    def test_a_stretched_speck_on_an_empty_mask_is_a_false_find(self):
        prediction = EMPTY + 0.02
        prediction[3, 3] = 0.2
        values = score_mask(prediction, EMPTY).values
        for metric in ("iou", "dice", "boundary_iou"):
            assert values["raw"][metric] == 1 and values["stretched"][metric] == 0
        assert values["raw"]["f_mean"] == 204 / 256 and values["stretched"]["f_mean"] == 0

    def test_any_two_maps_have_finite_scores(self):
        rng = np.random.default_rng(0)
        kinds = [
            lambda shape: np.zeros(shape),
            lambda shape: np.ones(shape),
            lambda shape: np.full(shape, rng.random()),
            lambda shape: (rng.random(shape) > rng.random()).astype(float),
            lambda shape: rng.random(shape) * rng.random(),
            lambda shape: np.eye(*shape),
        ]
        for number in range(300):
            shape = tuple(rng.integers(1, 30 if number % 2 else 4, 2))
            prediction, matte = (kinds[rng.integers(len(kinds))](shape) for _ in range(2))
            scores = score_mask(prediction, matte)
            assert_finite_or_none(scores)
            for metric in METRICS.values():
                value = scores.values["raw"][metric.name]
                assert value is None or metric.unit or 0 <= value <= 1, metric.name


class TestMatte:
    def test_a_matte_that_is_not_binary(self):
        """0.2 counts as background, 0.8 as foreground; MAE is against that mask, matte MAE against the matte."""
        matte = np.where(BAR > 0, 0.8, 0.2)
        matte[0] = 0
        scores = score_mask(BAR, matte)
        assert scores.grey_share == pytest.approx(15 / 16)
        assert scores.values["raw"]["mae"] == 0 and scores.values["raw"]["iou"] == 1
        assert scores.values["raw"]["matte_mae"] == pytest.approx(0.2 * 15 / 16)
        assert score_mask(BAR, BAR).grey_share == 0

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_it_is_binarised_between_the_grey_levels_127_and_128(self, dtype):
        matte = (np.where(BAR > 0, 128, 127).astype(np.uint8) / dtype(255)).astype(dtype)
        assert score_mask(BAR, matte).values["raw"]["mae"] == 0
        assert score_mask(matte, BAR).values["raw"]["iou"] == 1, "a prediction is cut at the same place"

    @pytest.mark.parametrize(("value", "iou"), [(0.499, 1), (0.5, 1), (0.501, 0)])
    def test_a_composed_matte_is_cut_at_a_half(self, value, iou):
        assert score_mask(EMPTY, BAR * value).values["raw"]["iou"] == iou

    @pytest.mark.parametrize("value", [0.4981, 0.499, 0.4999, 0.5001, 0.501, 0.5019])
    def test_its_saved_file_has_the_same_mask(self, value):
        composed = BAR * value
        saved = eight_bit(composed) / np.float32(255)
        for prediction in (EMPTY, BAR):
            values = [score_mask(prediction, matte).values["raw"] for matte in (composed, saved)]
            assert values[0]["iou"] == values[1]["iou"] == float((value > 0.5) == prediction.any())

    def test_nothing_but_the_prediction_is_rounded(self):
        matte = BAR * 0.7012
        assert score_mask(BAR, matte).values["raw"]["matte_mae"] == pytest.approx(0.25 * (1 - 0.7012), abs=1e-12)

    def test_a_boolean_matte_is_the_mask(self):
        prediction = predicted(mattes()["ring"])
        mask = mattes()["ring"] > 0.5
        assert score_mask(prediction, mask) == score_mask(prediction, mask.astype(np.float32))


class TestReadings:
    def test_stretched_is_min_max_and_leaves_a_constant_alone(self):
        assert stretched(np.array([[0.2, 0.3, 0.6]])) == pytest.approx(np.array([[0, 0.25, 1]]))
        assert np.array_equal(stretched(np.full((2, 3), 0.3)), np.full((2, 3), 0.3))

    def test_a_saturated_prediction_is_seen_raw_only(self):
        """An INT8 graph whose output range was cut: all values in [0.3, 0.6]."""
        matte = mattes()["disc with a rod"]
        good = predicted(matte)
        saturated = 0.3 + 0.3 * stretched(good)
        sound, squeezed = score_mask(good, matte).values, score_mask(saturated, matte).values
        for metric, least in {"s_measure": 0.2, "weighted_f": 0.3, "e_mean": 0.3, "f_mean": 0.4}.items():
            assert squeezed["raw"][metric] < sound["raw"][metric] - least, metric
            assert squeezed["stretched"][metric] == pytest.approx(sound["stretched"][metric], abs=0.01), metric
        assert squeezed["raw"]["mae"] > 0.3 and squeezed["stretched"]["mae"] < 0.06
        # The best over thresholds hides it even raw.
        assert squeezed["raw"]["f_max"] == pytest.approx(sound["raw"]["f_max"], abs=0.01)

    def test_a_prediction_scores_as_the_file_it_is_saved_to(self):
        matte = mattes()["two apart"]
        prediction = np.clip(predicted(matte) + np.random.default_rng(0).uniform(-2e-3, 2e-3, matte.shape), 0, 1)
        read_back = (eight_bit(prediction) / np.float32(255)).astype(np.float32)
        assert score_mask(prediction, matte) == score_mask(read_back, matte)

    def test_a_background_under_half_a_grey_level_costs_nothing(self):
        """Two of the four quadrants of S hold no foreground: there it asks for exactly 0."""
        matte = (mattes()["two apart"] > 0.5).astype(float)
        noise = np.random.default_rng(0).uniform(size=matte.shape)
        clean, faint, grey = (score_mask(np.maximum(matte, noise * top), matte) for top in (0, 1e-3, 0.02))
        assert faint.values == clean.values
        assert grey.values["raw"]["s_measure"] < clean.values["raw"]["s_measure"] - 0.1

    def test_without_hce_only_hce_is_missing(self):
        matte = mattes()["disc with a rod"]
        whole, without = score_mask(predicted(matte), matte), score_mask(predicted(matte), matte, hce=False)
        for reading in READINGS:
            assert without.values[reading] == whole.values[reading] | {"hce": None}
            assert whole.values[reading]["hce"] > 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("prediction", "matte", "sentence"),
        [
            (np.zeros((4, 6)), np.zeros((6, 4)), r"prediction is \(4, 6\), its matte \(6, 4\)"),
            (np.zeros((4, 6)), np.zeros((1, 4, 6)), "matte is one map"),
            (np.zeros((4, 6, 1)), np.zeros((4, 6)), "prediction is one map"),
            (np.zeros((0, 6)), np.zeros((0, 6)), "prediction is one map"),
            (np.full((4, 6), 1.01), np.zeros((4, 6)), "found 1.01 to 1.01"),
            (np.zeros((4, 6)), np.full((4, 6), -0.1), r"matte is in \[0, 1\]"),
            (np.full((4, 6), np.nan), np.zeros((4, 6)), "without NaN"),
            (np.where(np.eye(4) > 0, np.nan, 0.5), np.zeros((4, 4)), "without NaN"),
            (np.full((4, 6), np.inf), np.zeros((4, 6)), "prediction is in"),
            (np.zeros((4, 6)), np.full((4, 6), 255, np.uint8), "divide by its full value"),
            (np.zeros((4, 6), np.complex64), np.zeros((4, 6)), "float in"),
        ],
    )
    def test_one_sentence_says_what_is_wrong(self, prediction, matte, sentence):
        with pytest.raises(MetricError, match=sentence):
            score_mask(prediction, matte)

    @pytest.mark.parametrize(
        "unread",
        [
            torch.zeros(H, W, requires_grad=True),
            torch.zeros(H, W, dtype=torch.bfloat16),
            torch.zeros(H, W, device="meta"),
            [[0.0, 1.0], [0.0]],
        ],
        ids=["with a gradient", "bfloat16", "without values", "ragged"],
    )
    def test_what_is_no_array_is_refused_on_either_side(self, unread):
        with pytest.raises(MetricError, match="prediction cannot be read as an array .*; pass a NumPy array"):
            score_mask(unread, BAR)
        with pytest.raises(MetricError, match="matte cannot be read as an array"):
            score_mask(BAR, unread)

    def test_rounding_and_other_floats_are_taken(self):
        matte = mattes()["disc"]
        prediction = predicted(matte)
        expected = score_mask(prediction, matte)
        assert score_mask(prediction + np.where(prediction == 1, 1e-7, 0), matte) == expected
        assert score_mask(BAR, BAR * (1 + 5e-7) - (1 - BAR) * 5e-7) == score_mask(BAR, BAR)
        assert score_mask(torch.from_numpy(prediction).float(), torch.from_numpy(matte)) == expected
        assert score_mask(np.asfortranarray(prediction), matte[:, ::-1][:, ::-1]) == expected


class TestRecord:
    def test_it_can_be_saved_and_read_back(self, tmp_path):
        scores = score_mask(predicted(mattes()["soft"]), mattes()["soft"])
        assert MaskScores.load(scores.save(tmp_path / "one.json")) == scores
        empty = score_mask(EMPTY, EMPTY, hce=False)
        assert MaskScores.load(empty.save(tmp_path / "empty.json")) == empty

    def test_scores_of_another_version_are_refused(self, tmp_path):
        values = score_mask(BAR, BAR).to_json()
        del values["values"]["raw"]["iou"]
        (tmp_path / "old.json").write_text(json.dumps(values))
        with pytest.raises(ArtifactError, match=r"\(raw\) and this version differ in iou"):
            MaskScores.load(tmp_path / "old.json")

    def test_every_metric_says_what_it_is(self):
        for name, metric in METRICS.items():
            assert metric.name == name and metric.better in ("higher", "lower", "zero", "neither")
            assert metric.unit in ("", "px", "points") and metric.definition.endswith(".") and metric.source
        assert len({metric.title for metric in METRICS.values()}) == len(METRICS)
        better = {name for name, metric in METRICS.items() if metric.better == "higher"}
        found = score_mask(predicted(mattes()["disc with a rod"]), mattes()["disc with a rod"]).values["raw"]
        blank = score_mask(np.zeros_like(mattes()["disc"]), mattes()["disc with a rod"]).values["raw"]
        assert {name for name in METRICS if (blank[name] or 0) < (found[name] or 0) and name in better} == better

    def test_rows_and_html_are_one_line_a_metric(self):
        scores = score_mask(EMPTY, EMPTY)
        assert [row["metric"] for row in scores.rows()] == list(METRICS)
        assert scores._repr_html_().count("<tr>") == len(METRICS) + 1

    def test_it_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            score_mask(BAR, BAR).grey_share = 1


def test_the_inputs_stay_as_they_were():
    matte = mattes()["disc with a rod"]
    prediction = predicted(matte) * 0.5 + 0.2
    copies = prediction.copy(), matte.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score_mask(prediction, matte)
    assert np.array_equal(prediction, copies[0]) and np.array_equal(matte, copies[1])


def test_opening_the_room_imports_no_opencv():
    """A second of import, for PySODMetrics and OpenCV, is paid by the first score."""
    program = "import sys, lumen_lab.metrics; print(sorted({'py_sod_metrics', 'cv2', 'skimage'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
