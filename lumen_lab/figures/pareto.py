"""Quality against bytes moved: what 16-bit activations buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from lumen_lab.quantization.precision import ParetoCurve, ParetoPoint

STYLES = ((BLUE, "o"), (VERMILLION, "s"), (SKY, "D"), (GREY, "^"))


def pareto_figure(curves: Mapping[str, ParetoCurve], *, title: str = "") -> Figure:
    """SQNR of the output (left) and the mask's mean absolute difference (right) over megabytes of activations moved.

    One line a curve through the choices that no other beats; a hollow mark is beaten: another moves no more and is no
    worse. The number beside a mark is how many operations have 16 bits. ``LumenError`` if a curve has no point.
    """
    if not curves or any(not curve.points for curve in curves.values()):
        raise LumenError("pareto_figure was given no curve, or one without a point; make them with measure_pareto.")
    sheet = new_sheet(10.0, 4.2)
    ratios, masks = sheet.subplots(1, 2)
    for (name, curve), (color, marker) in zip(curves.items(), STYLES * len(curves)):
        draw_curve(ratios, curve.points, name, color, marker, of=lambda point: point.sqnr_db, better=1)
        draw_curve(masks, curve.points, name, color, marker, of=lambda point: point.mask_error, better=-1)
    ratios.set_ylabel("SQNR of the output, dB", fontsize=9)
    masks.set_ylabel("mean absolute difference of the mask", fontsize=9)
    masks.set_ylim(bottom=0)
    for axes in (ratios, masks):
        axes.set_xlabel("activations read and written for one picture, MB", fontsize=9)
        axes.spines[["right", "top"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.08)
    if len(curves) > 1:
        ratios.legend(frameon=False, fontsize=8, loc="lower right")
    sheet.suptitle(title or "Quality against bytes moved; numbers: operations of 16 bits", fontsize=10)
    return sheet


def draw_curve(
    axes: Axes, points: Sequence[ParetoPoint], name: str, color: str, marker: str, *, of, better: int
) -> None:
    """The marks of one curve, its unbeaten ones joined."""
    known = {(point.moved_bytes, of(point)): point for point in points if of(point) is not None}
    known = sorted(known.items(), key=lambda item: (item[0][0], -better * item[0][1]))
    front = []
    for (moved, quality), point in known:
        beaten = any(better * (quality - best) <= 0 for _, best in front)
        axes.plot(moved / 1e6, quality, marker, color=color, markerfacecolor="none" if beaten else color, markersize=5)
        axes.annotate(
            str(point.wide_operations), (moved / 1e6, quality), xytext=(4, 4), textcoords="offset points", fontsize=7
        )
        if not beaten:
            front.append((moved / 1e6, quality))
    axes.plot(*zip(*front), color=color, linewidth=1.2, label=name)
