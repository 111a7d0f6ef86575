"""The strip of partitions and the bars of multiplications say what their rows say, and their labels can be read."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex

from lumen_lab.errors import LumenError
from lumen_lab.figures import macs_by_site, partition_strip
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION


def rows_of(*runs):
    """Rows from (how many, kind, partition or None on the CPU)."""
    rows = []
    for times, kind, partition in runs:
        side = "CPU" if partition is None else "NPU"
        rows += [{"kind": kind, "partition": partition, "runs_on": side, "site": "decoder"} for _ in range(times)]
    return [{"index": index, **row} for index, row in enumerate(rows)]


CUT = rows_of((30, "Conv", 1), (1, "DeformConv", None), (20, "Conv", 2), (2, "DeformConv", None), (10, "Conv", 1))


def bars_of(axes):
    """(start, width, colour) of the strip's bars, in order."""
    found = []
    for bars in axes.collections:
        if not hasattr(bars, "get_facecolor") or not len(bars.get_facecolor()):
            continue
        extents = bars.get_paths()[0].get_extents()
        found.append((extents.x0, extents.width, to_hex(bars.get_facecolor()[0]).upper()))
    return sorted(found)


def texts_of(axes):
    return [text.get_text() for text in axes.texts]


def test_bars_lie_where_the_operations_are():
    assert bars_of(partition_strip(CUT).axes[0]) == [
        (0, 30, BLUE.upper()),
        (30, 1, VERMILLION),
        (31, 20, SKY.upper()),
        (51, 2, VERMILLION),
        (53, 10, BLUE.upper()),
    ]


def test_rows_may_come_in_any_order():
    assert bars_of(partition_strip(CUT[::-1]).axes[0]) == bars_of(partition_strip(CUT).axes[0])


def test_numbers_of_pieces_on_the_cpu_are_not_looked_at():
    """An audit numbers every piece, those on the CPU too, and two of them may follow one another."""
    numbers = iter((7, 8, 9))
    numbered = [row if row["runs_on"] == "NPU" else {**row, "partition": next(numbers)} for row in CUT]
    without, with_numbers = partition_strip(CUT), partition_strip(numbered)
    assert bars_of(with_numbers.axes[0]) == bars_of(without.axes[0])
    assert texts_of(with_numbers.axes[0]) == texts_of(without.axes[0])
    assert with_numbers.get_suptitle() == without.get_suptitle()
    assert len(with_numbers.legends[0].get_texts()) == 2


def test_partitions_are_numbered_and_islands_named():
    assert texts_of(partition_strip(CUT).axes[0]) == ["1", "2", "1", "DeformConv", "DeformConv ×2"]


def test_title_counts_partitions_and_what_is_left_on_the_cpu():
    title = partition_strip(CUT, title="micro, as published").get_suptitle()
    assert title == "micro, as published\n2 NPU partitions, 3 of 63 operations on the CPU (DeformConv ×3)"
    whole = partition_strip(rows_of((12, "Conv", 1))).get_suptitle()
    assert whole == "1 NPU partition, nothing of 12 operations on the CPU"


def test_one_operation_among_thousands_can_be_seen():
    bars = bars_of(partition_strip(rows_of((2000, "Conv", 1), (1, "DeformConv", None), (2000, "Conv", 2))).axes[0])
    (start, width, _), *_ = (bar for bar in bars if bar[2] == VERMILLION)
    assert width > 4001 / 500 and start < 2000.5 < start + width


def test_partitions_too_narrow_for_their_number_share_a_label_below():
    runs = [run for number in range(1, 9) for run in ((2, "Conv", number), (1, "Gather", None))]
    axes = partition_strip(rows_of(*runs, (2000, "Conv", 9))).axes[0]
    assert texts_of(axes) == ["9", "Gather ×8", "1–8"]


def published_like():
    runs = [(1300, "Conv", 1)]
    for block in range(5):
        runs += [run for _ in range(4) for run in ((9, "Conv", 1), (1, "DeformConv", None))] + [(60, "Conv", block + 2)]
    return rows_of(*runs)


@pytest.mark.parametrize("rows", [CUT, published_like()], ids=["short", "as published"])
def test_no_label_lies_on_another(rows):
    figure = partition_strip([{**row, "bytes_crossing": 10**6} for row in rows], title="a title")
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in [*axes.texts, axes.title, axes.xaxis.label]]
    texts += [figure._suptitle, *figure.legends[0].get_texts()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    clashes = [(a, b) for (a, box), (b, other) in itertools.combinations(boxes, 2) if box.overlaps(other)]
    assert not clashes
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1 for _, box in boxes)


def test_the_strip_keeps_its_height_however_many_labels_it_has():
    def strip_height_px(rows):
        figure = partition_strip(rows)
        figure.draw_without_rendering()
        (_, low), (_, high) = figure.axes[0].transData.transform([(0, 0), (0, 1)])
        return high - low

    stacked = rows_of(
        *[run for kind in "ABCDEF" for run in ((10, "Conv", 1), (1, f"A long name {kind}", None))], (240, "Conv", 1)
    )
    assert strip_height_px(stacked) == pytest.approx(strip_height_px(rows_of((300, "Conv", 1))), rel=0.15)


def test_bytes_that_cross_are_drawn_at_their_operation():
    rows = [dict(row) for row in CUT]
    rows[30]["bytes_crossing"], rows[31]["bytes_crossing"] = 3_000_000, 500_000
    crossing = partition_strip(rows).axes[1]
    segments = crossing.collections[0].get_segments()
    np.testing.assert_allclose(segments, [[(30.5, 0), (30.5, 3)], [(31.5, 0), (31.5, 0.5)]])
    assert crossing.get_title() == "3.5 MB cross between NPU and CPU"
    assert len(partition_strip(CUT).axes) == 1


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([], "found no rows"),
        ([{"index": 0, "kind": "Conv"}], "rows without partition, runs_on"),
        ([{**CUT[0], "runs_on": "GPU"}], r"found \['GPU'\]"),
    ],
)
def test_rows_that_say_too_little(rows, sentence):
    with pytest.raises(LumenError, match=sentence):
        partition_strip(rows)


MACS = {"decoder": 750_000_000, "bb": 1_200_000_000, "aside": 50_000_000, "resize": 0}


def bars_and_labels(figure):
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    return [(name, bar.get_width(), text.get_text()) for name, bar, text in zip(names, axes.patches, axes.texts)]


def test_macs_are_shown_largest_first_with_their_share():
    assert bars_and_labels(macs_by_site(MACS)) == [
        ("bb", 1_200_000_000, "1.2 GMAC, 60.0%"),
        ("decoder", 750_000_000, "750 MMAC, 37.5%"),
        ("aside", 50_000_000, "50 MMAC, 2.5%"),
    ]
    assert macs_by_site(MACS).get_suptitle() == "Multiply-accumulates by site: 2 GMAC in all"


def test_macs_beyond_the_largest_are_one_grey_bar():
    figure = macs_by_site(MACS, top=1, title="lite, 1024 × 1024")
    assert bars_and_labels(figure)[1:] == [("2 more", 800_000_000, "800 MMAC, 40.0%")]
    assert [to_hex(bar.get_facecolor()) for bar in figure.axes[0].patches] == [BLUE.lower(), GREY]
    assert figure.get_suptitle() == "lite, 1024 × 1024: 2 GMAC in all"


def test_no_multiplications_are_no_figure():
    with pytest.raises(LumenError, match="no multiplications"):
        macs_by_site({"resize": 0})
    with pytest.raises(LumenError, match="found list.*macs_by_site"):
        macs_by_site([{"site": "resize", "macs": 1}])
