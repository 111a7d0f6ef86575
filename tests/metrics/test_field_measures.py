"""The field's measures: what PySODMetrics gives when it is called directly, on the file and on the array."""

import numpy as np
import py_sod_metrics as pysod
import pytest

from lumen_lab.metrics import METRICS, score_mask, summarise
from tests.metrics.pictures import eight_bit, mattes, predicted

FIELD = "s_measure e_max e_mean e_adaptive f_max f_mean f_adaptive weighted_f mae iou dice hce".split()


def directly(prediction, mask, *, normalize):
    """Every measure of the field from PySODMetrics alone."""
    measures = {
        "s": pysod.Smeasure(),
        "e": pysod.Emeasure(),
        "w": pysod.WeightedFmeasure(),
        "m": pysod.MAE(),
        "h": pysod.HumanCorrectionEffortMeasure(),
    }
    handlers = {
        "f": pysod.FmeasureHandler(with_dynamic=True, with_adaptive=True),
        "iou": pysod.IOUHandler(with_dynamic=False, with_adaptive=False, with_binary=True),
        "dice": pysod.DICEHandler(with_dynamic=False, with_adaptive=False, with_binary=True),
    }
    overlap = pysod.FmeasureV2(handlers)
    for measure in [*measures.values(), overlap]:
        measure.step(prediction, mask, normalize=normalize)
    em, counted = measures["e"].get_results()["em"], overlap.get_results()
    return {
        "s_measure": measures["s"].get_results()["sm"],
        "e_max": em["curve"].max(),
        "e_mean": em["curve"].mean(),
        "e_adaptive": em["adp"],
        "f_max": counted["f"]["dynamic"].max(),
        "f_mean": counted["f"]["dynamic"].mean(),
        "f_adaptive": counted["f"]["adaptive"],
        "weighted_f": measures["w"].get_results()["wfm"],
        "mae": measures["m"].get_results()["mae"],
        "iou": counted["iou"]["binary"],
        "dice": counted["dice"]["binary"],
        "hce": measures["h"].get_results()["hce"],
    }


@pytest.mark.parametrize("name", mattes())
def test_stretched_is_what_the_field_gets_from_the_files(name):
    matte = mattes()[name]
    prediction = predicted(matte)
    expected = directly(eight_bit(prediction), eight_bit(matte > 0.5), normalize=True)
    found = score_mask(prediction, matte).values["stretched"]
    assert {metric: found[metric] for metric in FIELD} == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", mattes())
def test_raw_is_what_the_array_itself_gets(name):
    matte = mattes()[name]
    prediction = predicted(matte)
    expected = directly(prediction, matte > 0.5, normalize=False)
    found = score_mask(prediction, matte).values["raw"]
    assert {metric: found[metric] for metric in FIELD} == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_golden_pictures_tell_the_readings_and_the_metrics_apart():
    for name, matte in mattes().items():
        values = score_mask(predicted(matte), matte).values
        different = [metric for metric in FIELD if values["raw"][metric] != values["stretched"][metric]]
        assert len(different) >= 5, name
        assert all(0 < values["raw"][metric] < 1 for metric in FIELD if METRICS[metric].unit == ""), name


def test_values_worked_out_by_hand():
    """Two rows of four: the mask is the left half; 0.8 and 0.4 inside, 0.6 and 0 outside."""
    mask = np.zeros((2, 4), dtype=bool)
    mask[:, :2] = True
    prediction = np.tile([0.8, 0.4, 0.6, 0.0], (2, 1))
    values = score_mask(prediction, mask).values["raw"]
    assert values["mae"] == pytest.approx((0.2 + 0.6 + 0.6 + 0.0) / 4)
    assert values["iou"] == pytest.approx(1 / 3) and values["dice"] == pytest.approx(1 / 2)
    # Precision, recall and F of the steps of the threshold: {0}, (0, 0.4], (0.4, 0.6], (0.6, 0.8], above.
    f = [1.3 * p * r / (0.3 * p + r) for p, r in ((1 / 2, 1), (2 / 3, 1), (1 / 2, 1 / 2), (1, 1 / 2))]
    steps = [1, 102, 51, 51]  # thresholds of 256 in each: 0.4, 0.6 and 0.8 are the levels 102, 153 and 204
    assert values["f_mean"] == pytest.approx(np.dot(f, steps) / 256)
    assert values["f_max"] == pytest.approx(1.3 * 0.5 / (0.3 + 0.5))
    assert values["f_adaptive"] == 0, "twice the mean is 0.9: nothing is taken"
    object_part = 2 * 0.6 / (0.36 + 1 + np.std([0.8, 0.4] * 2, ddof=1))
    background = 2 * 0.7 / (0.49 + 1 + np.std([0.4, 1.0] * 2, ddof=1))
    # The centroid (0.5, 0.5) rounds to (0, 0): the frame is cut after the first row and column. Left: 1 × 1, constant
    # against constant. Right: 0.4, 0.6, 0 against 1, 0, 0; means 1/3, variances 7/75 and 1/3, covariance 1/30.
    right = 4 / 9 / 30 / (2 / 9 * (7 / 75 + 1 / 3))
    region = 2 / 8 * 1 + 6 / 8 * right
    assert values["s_measure"] == pytest.approx(0.5 * (object_part + background) / 2 + 0.5 * region)


def test_e_of_a_mask_that_misses_half_worked_out_by_hand():
    """Alignment of a centred mask and a centred prediction, each a bar of a quarter of the frame, half overlapping."""
    mask, prediction = np.zeros((8, 8)), np.zeros((8, 8))
    mask[:, 2:4], prediction[:, 3:5] = 1, 1
    both, one = 0.75, -0.25  # either is 1 − 1/4 inside and −1/4 outside
    parts = {(both, both): 8, (both, one): 8, (one, both): 8, (one, one): 40}
    total = sum(n * (2 * a * b / (a * a + b * b) + 1) ** 2 / 4 for (a, b), n in parts.items())
    values = score_mask(prediction, mask).values["raw"]
    assert values["e_adaptive"] == pytest.approx(total / 63)
    assert values["e_max"] == pytest.approx(total / 63)
    assert values["e_mean"] == pytest.approx((255 * total / 63 + 0.25 * 64 / 63) / 256)


def test_weighted_f_of_a_bar_worked_out_by_hand():
    """A full-height bar found twice as wide, all of it foreground: recall 1, and false pixels weigh by distance."""
    mask, prediction = np.zeros((9, 12)), np.zeros((9, 12))
    mask[:, 2:6], prediction[:, 2:10] = 1, 1
    false = 9 * sum(2 - 0.5 ** (distance / 5) for distance in (1, 2, 3, 4))
    precision = 36 / (36 + false)
    assert score_mask(prediction, mask).values["raw"]["weighted_f"] == pytest.approx(
        2 * precision / (1 + precision), abs=1e-9
    )


def test_curves_rise_with_the_threshold():
    """Index k is the threshold k / 255: from 0 on everything is taken, above the highest value nothing."""
    matte = mattes()["cut by the border"]
    prediction = np.where(matte > 0.5, 0.8, 0.2)
    curves = score_mask(prediction, matte).curves["raw"]
    share = float(np.mean(matte > 0.5))
    assert curves["f"][0] == pytest.approx(1.3 * share / (0.3 * share + 1))
    assert curves["f"][52] == curves["f"][204] == 1 and curves["f"][205] == 0
    assert curves["e"][0] == curves["e"][205] == pytest.approx(0.25, rel=1e-4), "all and nothing say nothing"
    assert curves["e"][52] == curves["e"][204] == 1, "cut at 1: PySODMetrics divides by one pixel less"
    assert all(len(curve) == 256 for curve in curves.values())


def test_the_best_of_a_data_set_is_that_of_the_mean_curve():
    """As PySODMetrics has it when one instance sees all images; the mean of each image's best is higher."""
    e, f = pysod.Emeasure(), pysod.FmeasureV2({"f": pysod.FmeasureHandler(with_dynamic=True, with_adaptive=False)})
    images = []
    for number, (name, matte) in enumerate(mattes().items()):
        prediction = np.clip(predicted(matte) ** (0.4 + 0.5 * number), 0, 1)
        images.append((name, {}, score_mask(prediction, matte, hce=False)))
        for measure in (e, f):
            measure.step(eight_bit(prediction), eight_bit(matte > 0.5), normalize=True)
    scores = summarise(images)
    assert scores.mean("e_max", reading="stretched") == pytest.approx(e.get_results()["em"]["curve"].max())
    assert scores.mean("f_max", reading="stretched") == pytest.approx(f.get_results()["f"]["dynamic"].max())
    own = np.mean([image.values["stretched"]["f_max"] for image in scores.images])
    assert own > scores.mean("f_max", reading="stretched") + 0.001


@pytest.mark.parametrize("edge", [np.s_[-1, :], np.s_[:, -1], np.s_[0, :], np.s_[-1, -1]])
def test_s_of_foreground_along_a_border(edge):
    """The centroid lies on the border and a quadrant is empty, of which PySODMetrics makes NaN."""
    mask = np.zeros((10, 12), dtype=bool)
    mask[edge] = True
    assert score_mask(mask, mask).values["raw"]["s_measure"] == pytest.approx(1)
    half = score_mask(mask * 0.5, mask).values["raw"]["s_measure"]
    assert 0.3 < half < 1


def test_hce_counts_regions_and_control_points():
    """A false square in an empty frame is one region to remove; a perfect mask needs nothing."""
    found, mask = np.zeros((64, 64)), np.zeros((64, 64))
    assert score_mask(mask, mask).values["raw"]["hce"] == 0
    found[10:40, 10:40] = 1
    assert score_mask(found, mask).values["raw"]["hce"] == 1
    found[45:60, 45:60] = 1
    assert score_mask(found, mask).values["raw"]["hce"] == 2
