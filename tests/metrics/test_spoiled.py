"""A prediction is spoiled in one known way: the metrics that should see it move, and the others stay."""

import numpy as np
import pytest
from scipy import ndimage

from lumen_lab.metrics import METRICS, score_mask
from tests.metrics.pictures import body_and_rod

HIGHER = [name for name, metric in METRICS.items() if metric.better == "higher"]


@pytest.fixture(scope="module")
def matte():
    body, rod = body_and_rod()
    return body + rod


@pytest.fixture(scope="module")
def good(matte):
    """The matte, a little softer and a little unsure: what a good network gives."""
    return 0.001 + 0.998 * ndimage.gaussian_filter(matte, 0.7)


@pytest.fixture
def moves(good, matte):
    """Metric → how far spoiling the good prediction moves it, in one reading."""

    def measure(spoiled, reading="raw"):
        before, after = score_mask(good, matte).values[reading], score_mask(spoiled, matte).values[reading]
        assert None not in (*before.values(), *after.values())
        return {name: after[name] - before[name] for name in METRICS}

    return measure


def check(moved, *, falls=(), rises=(), stays=()):
    """``falls`` and ``rises``: metric → by at least; ``stays``: metric → within. Every metric is named once."""
    named = [*falls, *rises, *stays]
    assert sorted(named) == sorted(METRICS)
    wrong = {name: moved[name] for name, least in dict(falls).items() if not moved[name] <= -least}
    wrong |= {name: moved[name] for name, least in dict(rises).items() if not moved[name] >= least}
    wrong |= {name: moved[name] for name, most in dict(stays).items() if not abs(moved[name]) <= most}
    assert wrong == {}


def logits(p):
    return np.log(p / (1 - p))


def test_a_good_prediction_scores_well(good, matte):
    values = score_mask(good, matte).values["raw"]
    assert min(values[name] for name in HIGHER) > 0.85
    assert values["mae"] < 0.03 and values["hce"] <= 2 and 0 < values["soft_edge_gap_px"] < 2


def test_nothing_moves_where_nothing_is_spoiled(moves, good):
    assert set(moves(good.copy()).values()) == {0}


def test_shifted_by_two_pixels(moves, good):
    """All that compares places falls, boundary and thin part most; the edge is as soft; HCE forgives five pixels."""
    check(
        moves(np.roll(good, 2, axis=0)),
        falls={"thin_recall": 0.5, "boundary_iou": 0.3, "iou": 0.1, "dice": 0.06, "s_measure": 0.04}
        | {"weighted_f": 0.04, "f_max": 0.03, "f_mean": 0.03, "f_adaptive": 0.03}
        | {"e_max": 0.01, "e_mean": 0.01, "e_adaptive": 0.01},
        rises={"mae": 0.01, "matte_mae": 0.01},
        stays={"hce": 3, "soft_edge_px": 0.001, "soft_edge_gap_px": 0.001},
    )


def test_eroded_by_a_pixel(moves, good):
    """At 0.5 the outline is lost and a thin rod breaks, which HCE counts; the best threshold finds it again."""
    check(
        moves(ndimage.minimum_filter(good, 3)),
        falls={"thin_recall": 0.6, "boundary_iou": 0.3, "iou": 0.1, "dice": 0.05}
        | {"s_measure": 0.02, "weighted_f": 0.02, "e_mean": 0.01, "e_adaptive": 0.004, "f_mean": 0.004},
        rises={"hce": 8, "mae": 0.006, "matte_mae": 0.008},
        stays={"e_max": 0.002, "f_max": 0.002, "f_adaptive": 0.02, "soft_edge_px": 0.3, "soft_edge_gap_px": 0.3},
    )


def test_threshold_moved(moves, good):
    """All logits 2 lower, so that 0.5 lies where 0.88 did: what cuts at 0.5 falls, what tries every cut stays."""
    check(
        moves(1 / (1 + np.exp(2 - logits(good)))),
        falls={"thin_recall": 0.5, "boundary_iou": 0.25, "iou": 0.08, "dice": 0.04}
        | {"s_measure": 0.01, "weighted_f": 0.01, "e_mean": 0.01, "f_mean": 0.004},
        rises={"hce": 4, "mae": 0.004, "matte_mae": 0.005},
        stays={"e_max": 1e-3, "f_max": 1e-3, "e_adaptive": 1e-3, "f_adaptive": 0.03}
        | {"soft_edge_px": 0.3, "soft_edge_gap_px": 0.3},
    )


def test_contrast_squeezed(moves, good):
    """All values in [0.3, 0.6]: what reads grey levels falls, and what cuts at 0.5 does a little, as 0.5 lies higher
    up the edge; both plateaus count as soft, as neither is settled; stretched, nothing moves."""
    squeezed = 0.3 + 0.3 * good
    check(
        moves(squeezed),
        falls={"f_adaptive": 0.9, "weighted_f": 0.5, "f_mean": 0.4, "e_mean": 0.4, "e_adaptive": 0.4, "s_measure": 0.2}
        | {"thin_recall": 0.2, "boundary_iou": 0.1, "iou": 0.03, "dice": 0.015},
        rises={"mae": 0.25, "matte_mae": 0.25, "soft_edge_px": 9, "soft_edge_gap_px": 9},
        stays={"e_max": 1e-9, "f_max": 1e-9, "hce": 0},
    )
    stretched = moves(squeezed, "stretched")
    assert max(abs(stretched[name]) for name in METRICS if METRICS[name].unit == "") < 0.002
    assert stretched["hce"] == 0 and abs(stretched["soft_edge_px"]) < 0.05


def test_thin_part_cut_off(moves, good):
    """The rod is 6 % of the mask: its recall says so, the measures of the whole hardly do."""
    check(
        moves(np.where(np.arange(good.shape[1]) > 68, 0, good)),
        falls={"thin_recall": 0.9, "boundary_iou": 0.1, "iou": 0.04, "dice": 0.02}
        | {"s_measure": 0.02, "weighted_f": 0.01, "f_max": 0.01, "f_mean": 0.002, "e_max": 0.005, "e_mean": 0.002},
        rises={"mae": 0.003, "matte_mae": 0.003, "hce": 2},
        stays={"e_adaptive": 0.006, "f_adaptive": 0.006, "soft_edge_px": 0.1, "soft_edge_gap_px": 0.1},
    )


def test_softened(moves, good):
    """Blurred by 2 pixels: the edge is twice as wide and more, and the rod sinks below 0.5."""
    check(
        moves(ndimage.gaussian_filter(good, 2)),
        falls={"thin_recall": 0.7, "boundary_iou": 0.1, "iou": 0.04, "dice": 0.02, "s_measure": 0.02}
        | {"weighted_f": 0.04, "f_mean": 0.03, "f_adaptive": 0.04, "e_mean": 0.02, "e_adaptive": 0.01},
        rises={"soft_edge_px": 4, "soft_edge_gap_px": 4, "mae": 0.01, "matte_mae": 0.01, "hce": 6},
        stays={"e_max": 0.005, "f_max": 0.01},
    )
