"""The coverage figure: what it draws is what the report says."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from lumen_lab.errors import LumenError
from lumen_lab.figures import coverage_figure
from lumen_lab.figures.sheet import BLUE, VERMILLION
from lumen_lab.quantization.coverage import CoverageReport, PictureKind, TensorCoverage


def kind(measure, name, low, high, calibration, larger):
    return PictureKind(measure, name, low, high, calibration, larger)


@pytest.fixture
def report():
    rng = np.random.default_rng(0)
    values = tuple(rng.random(8).tolist()), tuple(rng.random(40).tolist())
    kinds = (
        kind("brightness", "dark", 0.0, 0.5, 1.0, 0.6),
        kind("brightness", "bright", 0.5, 1.0, 0.0, 0.4),
        kind("attribute", "thin", None, None, 0.5, 0.4),
        kind("attribute", "multiple", None, None, 0.0, 0.3),
    )
    tensors = tuple(
        TensorCoverage(f"conv2d_{k}", "decoder.block", -1.0, 1.0, -1.0, 1.0 + k, 0.01 * k, 0.0, k / 2, 1 / (1 + k))
        for k in range(4)
    )
    return CoverageReport(8, 40, kinds, tensors, (0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 1.0, 1.0), {"brightness": values})


def panel(figure, title):
    return next(axes for axes in figure.axes if title in axes.get_title())


def test_the_curve_is_the_reports(report):
    (line,) = panel(coverage_figure(report), "range reached").lines
    assert tuple(line.get_ydata()) == report.curve and line.get_color() == BLUE


def test_every_picture_is_a_tick_and_missing_parts_are_shaded(report):
    axes = panel(coverage_figure(report), "brightness")
    (ticks,) = axes.collections
    assert len(ticks.get_segments()) == 8
    shaded = [patch for patch in axes.patches if to_hex(patch.get_facecolor()).upper() == VERMILLION]
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in shaded] == [(0.5, 1.0)]


def test_bars_are_of_the_tensors_that_clip_worst_first(report):
    axes = panel(coverage_figure(report), "farthest past")
    assert [bar.get_width() for bar in axes.patches] == [1.5, 1.0, 0.5]
    assert "3.00% of values" in axes.texts[0].get_text()


def test_a_missing_attribute_stands_out(report):
    labels = panel(coverage_figure(report), "attribute").get_yticklabels()
    assert {label.get_text(): label.get_color() for label in labels} == {"thin": "black", "multiple": VERMILLION}


def test_without_mattes_there_is_no_panel_of_attributes(report):
    bare = CoverageReport(**{**vars(report), "kinds": report.kinds[:2], "tensors": report.tensors[:1]})
    figure = coverage_figure(bare)
    assert not [axes for axes in figure.axes if "attribute" in axes.get_title()]
    assert panel(figure, "none of 1 tensors clips")


def test_a_report_without_measures_is_refused(report):
    with pytest.raises(LumenError, match="compares no measures"):
        coverage_figure(CoverageReport(**{**vars(report), "measures": {}}))
