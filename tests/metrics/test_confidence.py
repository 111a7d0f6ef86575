"""The histogram of confidence and its reliability."""

import numpy as np
import pytest

from lumen_lab.errors import MetricError
from lumen_lab.metrics import Reliability, score_mask, summarise
from lumen_lab.metrics.confidence import BINS, pooled
from tests.metrics.pictures import mattes, predicted


def reliability(prediction, matte):
    return score_mask(prediction, matte, hce=False).bins


def test_bins_worked_out_by_hand():
    """Ten pixels at 0.2 (51 of 255), three of them foreground; ten at 0.8, nine of them; the matte is binarised."""
    prediction = np.array([[0.2] * 10, [0.8] * 10])
    matte = np.array([[0.9] * 3 + [0.1] * 7, [1.0] * 9 + [0.0]])
    result = reliability(prediction, matte)
    low, high = result.rows()[4], result.rows()[16]
    assert low == {
        "from": 0.2,
        "to": 0.25,
        "pixels": 10,
        "share": 0.5,
        "confidence": pytest.approx(0.2),
        "foreground": 0.3,
    }
    assert high["pixels"] == 10 and high["foreground"] == 0.9 and high["confidence"] == pytest.approx(0.8)
    assert result.calibration_error == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)
    empty = result.rows()[7]
    assert empty["pixels"] == 0 and empty["confidence"] is None and empty["foreground"] is None


def test_a_right_and_sure_prediction_is_calibrated_and_a_wrong_one_is_not():
    mask = mattes()["ring"] > 0.5
    assert reliability(mask, mask).calibration_error == 0
    assert reliability(~mask, mask).calibration_error == 1
    assert reliability(np.full(mask.shape, 0.8), mask).calibration_error == pytest.approx(0.8 - mask.mean())


def test_errors_of_one_bin_cancel_and_those_of_two_do_not():
    """Guo et al. compare per bin: 0.5 for everything is calibrated where half of it is foreground."""
    half = np.arange(100).reshape(10, 10) % 2 == 1
    assert reliability(np.full((10, 10), 0.5), half).calibration_error == pytest.approx(0.5 / 255)
    assert reliability(np.where(half, 0.3, 0.7), half).calibration_error == pytest.approx(0.7, abs=0.003)


def test_overconfidence_raises_it():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.2, 0.8, (200, 200))
    drawn = rng.uniform(size=truth.shape) < truth
    sharper = np.clip(0.5 + 2 * (truth - 0.5), 0, 1)
    assert reliability(truth, drawn).calibration_error < 0.02
    assert reliability(sharper, drawn).calibration_error > 0.1


def test_the_ends_are_inside():
    result = reliability(np.array([[0.0, 1.0, 0.96, 0.06]]), np.ones((1, 4)))
    assert result.pixels[0] == 1 and result.pixels[-1] == 2 and result.pixels[1] == 1
    assert sum(result.pixels) == 4 and len(result.pixels) == BINS


def test_they_add_up_over_images():
    pairs = [(predicted(matte), matte) for matte in mattes().values()]
    parts = [reliability(*pair) for pair in pairs]
    together = reliability(np.hstack([p for p, _ in pairs]), np.hstack([m for _, m in pairs]))
    scores = summarise([(name, {}, score_mask(predicted(m), m, hce=False)) for name, m in mattes().items()])
    total = scores.reliability
    assert total == pooled(parts)
    assert total.pixels == together.pixels and total.foreground == together.foreground
    assert total.confidence == pytest.approx(together.confidence)


def test_without_a_pixel_there_is_no_error():
    nothing = pooled([])
    assert nothing.pixels == (0,) * BINS and nothing.calibration_error is None
    assert pooled([nothing, reliability(np.eye(3), np.eye(3))]) == reliability(np.eye(3), np.eye(3))
    assert nothing.rows()[0]["share"] is None


def test_saved_and_read_back_it_is_the_same(tmp_path):
    result = reliability(predicted(mattes()["soft"]), mattes()["soft"])
    assert Reliability.load(result.save(tmp_path / "bins.json")) == result
    assert result._repr_html_().count("<tr>") == BINS + 1


def test_other_bins_are_refused():
    with pytest.raises(MetricError, match="20 bins"):
        Reliability((1,), (0.5,), (1,))
