"""What the figure of offsets shows, read back from it."""

import dataclasses
import subprocess
import sys
import warnings

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lumen_lab.errors import LumenError
from lumen_lab.figures.offsets import LEAST_PX, offset_figure
from lumen_lab.rewrites.deform_statistics import DeformStatistics, SiteStatistics


def site(path, kernel, middle_px, **more):
    values = dict.fromkeys((field.name for field in dataclasses.fields(SiteStatistics)), 0.0) | {
        "site": path,
        "kernel": kernel,
        "pictures": 7,
        "radii": (1, 2, 3),
        "share_beyond": (0.5, 0.25, 0.125),
        "offset_p50_px": middle_px,
        "offset_p95_px": 2 * middle_px,
        "offset_max_px": 4 * middle_px,
        "modulator_mean": 1.2,
        "modulator_std": 0.3,
        "inside_share": 0.6,
    }
    return SiteStatistics(**(values | more))


STATISTICS = DeformStatistics(
    (
        site("decoder.decoder_block1.dec_att.aspp1.atrous_conv", 1, 0.2),
        site("decoder.decoder_block1.dec_att.aspp_deforms.2.atrous_conv", 7, 9.0, inside_share=0.1),
        site("decoder.decoder_block2.dec_att.aspp1.atrous_conv", 3, 0.0),
    )
)


@pytest.fixture(scope="module")
def panels():
    return offset_figure(STATISTICS).axes


def test_each_site_has_a_row_with_its_median_its_95_percent_and_its_largest(panels):
    drawn = [line.get_xdata() for line in panels[0].lines]
    bars = [tuple(x) for x in drawn if len(x) == 2 and tuple(x) not in {(1, 1), (2, 2), (3, 3)}]
    assert (0.2, 0.8) in bars and (0.2, 0.4) in bars  # to the largest, to 95 %
    assert (9.0, 36.0) in bars and (9.0, 18.0) in bars
    assert (LEAST_PX, LEAST_PX) in bars, "an offset of zero has no logarithm; it stands at the axis' beginning"
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["decoder_block1.aspp1  1×1", "decoder_block1.aspp_deforms.2  7×7", "decoder_block2.aspp1  3×3"]
    low, high = panels[0].get_xlim()
    assert low == LEAST_PX and high > 36
    assert panels[0].yaxis_inverted()


def test_radii_are_marked_and_the_shares_beyond_them_written(panels):
    dotted = [line.get_xdata()[0] for line in panels[0].lines if line.get_linestyle() == ":"]
    assert dotted == [1, 2, 3]
    texts = [text.get_text() for text in panels[0].texts]
    assert texts.count("  50%   25%   12%") == 3 and ">1px" in texts[-1]


def test_modulators_and_what_is_read_outside(panels):
    intervals = [tuple(line.get_xdata()) for line in panels[1].lines if len(line.get_xdata()) == 2]
    assert intervals.count(pytest.approx((0.9, 1.5))) == 3
    assert [bar.get_width() for bar in panels[2].patches] == pytest.approx([0.4, 0.9, 0.4])
    assert [text.get_text() for text in panels[2].texts] == ["40%", "90%", "40%"]


def test_kernels_differ_by_marker_and_not_by_colour_alone(panels):
    sheet = offset_figure(STATISTICS, title="three sites")
    handles = sheet.legends[0].legend_handles[:3]
    assert len({handle.get_marker() for handle in handles}) == len({handle.get_color() for handle in handles}) == 3
    assert [text.get_text() for text in sheet.legends[0].texts[:3]] == ["1×1", "3×3", "7×7"]
    assert sheet.get_suptitle() == "three sites"


def test_it_is_drawn_without_a_warning_and_nothing_leaves_the_sheet():
    sheet = offset_figure(STATISTICS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sheet._repr_png_().startswith(b"\x89PNG")
    renderer = FigureCanvasAgg(sheet).get_renderer()
    for axes in sheet.axes:
        box = axes.get_tightbbox(renderer)
        assert box.x0 >= 0 and box.x1 <= sheet.bbox.width and box.y0 >= 0 and box.y1 <= sheet.bbox.height


def test_statistics_without_a_site_are_refused():
    with pytest.raises(LumenError, match="without a site"):
        offset_figure(DeformStatistics(()))


def test_the_figure_needs_no_torch():
    code = "import sys, lumen_lab.figures.offsets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
