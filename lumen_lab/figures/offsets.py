"""How far each deformable conv looks, how much it weighs, and how often it looks past the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from lumen_lab.rewrites.deform_statistics import DeformStatistics, SiteStatistics

LEAST_PX = 0.02  # where the axis of offsets begins: what is nearer is as good as no offset
STYLES = ((BLUE, "o"), (SKY, "s"), (VERMILLION, "D"))  # colour and marker by kernel, smallest first


def offset_figure(statistics: DeformStatistics, *, title: str = "") -> Figure:
    """One row a site: its offsets in pixels (median, 95 %, largest), its modulator, what it reads outside the image.

    ``statistics``: the record of ``rewrites.deform_statistics``. Dotted lines mark the radii whose shares are written
    at the right of the offsets: how many of them no sum of shifts of that radius would reach.
    """
    sites = statistics.sites
    if not sites:
        raise LumenError("offset_figure was given statistics without a site; make them with deform_statistics.")
    kernels = sorted({site.kernel for site in sites})
    styles = {kernel: STYLES[min(place, len(STYLES) - 1)] for place, kernel in enumerate(kernels)}
    sheet = new_sheet(11.0, 1.7 + 0.27 * len(sites))
    offsets, modulators, outside = sheet.subplots(1, 3, sharey=True, width_ratios=(5, 2.4, 1.6))
    draw_offsets(offsets, sites, styles)
    draw_modulators(modulators, sites, styles)
    draw_outside(outside, sites, styles)
    offsets.set_yticks(range(len(sites)), [short_name(site) for site in sites], fontsize=8)
    offsets.set_ylim(len(sites) - 0.4, -0.6)
    for axes in (offsets, modulators, outside):
        axes.spines[["right", "top"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        draw_groups(axes, sites)
    sheet.suptitle(title or f"Deformable convs over {sites[0].pictures} pictures", fontsize=11)
    draw_legend(sheet, styles)
    return sheet


def draw_offsets(axes: Axes, sites: Sequence[SiteStatistics], styles: dict) -> None:
    """Median to 95 % as a bar, to the largest as a thin line, on a logarithmic axis; shares beyond each radius."""
    largest = max(max(site.offset_max_px for site in sites), 4.0)
    for row, site in enumerate(sites):
        color, marker = styles[site.kernel]
        middle, most, far = (max(px, LEAST_PX) for px in (site.offset_p50_px, site.offset_p95_px, site.offset_max_px))
        axes.plot([middle, far], [row, row], color=color, linewidth=1.0)
        axes.plot([middle, most], [row, row], color=color, linewidth=5.0, solid_capstyle="butt")
        axes.plot(middle, row, marker, color=color, markeredgecolor="black", markeredgewidth=0.6, markersize=6)
        axes.plot(far, row, "|", color=color, markersize=8, markeredgewidth=1.4)
        shares = " ".join(f"{share:>5.0%}" for share in site.share_beyond)
        axes.annotate(
            shares, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=7, family="monospace"
        )
    for radius in sites[0].radii:
        axes.axvline(radius, color="black", linewidth=0.8, linestyle=":", zorder=0)
    header = " ".join(f"{f'>{radius}px':>5}" for radius in sites[0].radii)
    axes.annotate(header, (1.01, -0.85), xycoords=("axes fraction", "data"), fontsize=7, family="monospace")
    axes.set(xscale="log", xlim=(LEAST_PX, 1.3 * largest))
    axes.set_xlabel("offset in pixels, the larger of |dy| and |dx|", fontsize=9)
    ticks = [px for px in (0.03, 0.1, 0.3, 1, 2, 3, 10, 30, 100, 300) if px < 1.3 * largest]
    axes.set_xticks(ticks, [f"{px:g}" for px in ticks])
    axes.minorticks_off()


def draw_modulators(axes: Axes, sites: Sequence[SiteStatistics], styles: dict) -> None:
    """Mean ± one deviation; the band is where a modulator is as good as none."""
    axes.axvspan(0.9, 1.1, color=GREY, alpha=0.25, linewidth=0)
    for row, site in enumerate(sites):
        color, marker = styles[site.kernel]
        low, high = site.modulator_mean - site.modulator_std, site.modulator_mean + site.modulator_std
        axes.plot(np.clip([low, high], 0, 2), [row, row], color=color, linewidth=3.0, solid_capstyle="butt")
        axes.plot(
            site.modulator_mean, row, marker, color=color, markeredgecolor="black", markeredgewidth=0.6, markersize=6
        )
    axes.set(xlim=(0, 2), xticks=[0, 0.5, 1, 1.5, 2])
    axes.set_xlabel("modulator, mean ± deviation", fontsize=9)


def draw_outside(axes: Axes, sites: Sequence[SiteStatistics], styles: dict) -> None:
    """Share of what is read that lies outside the image, where it is zero."""
    shares = [1 - site.inside_share for site in sites]
    axes.barh(range(len(sites)), shares, height=0.55, color=[styles[site.kernel][0] for site in sites])
    for row, share in enumerate(shares):
        axes.text(share + 0.03, row, f"{share:.0%}", va="center", fontsize=7)
    axes.set_xlim(0, 1.25)
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_xlabel("read past the image", fontsize=9)


def draw_groups(axes: Axes, sites: Sequence[SiteStatistics]) -> None:
    """A thin line between the blocks of the network."""
    for row in range(1, len(sites)):
        if block_of(sites[row]) != block_of(sites[row - 1]):
            axes.axhline(row - 0.5, color=GREY, linewidth=0.6)


def draw_legend(sheet: Figure, styles: dict) -> None:
    handles = [
        Line2D([], [], color=color, marker=marker, linewidth=5, markersize=6, markeredgecolor="black", label=label)
        for (color, marker), label in zip(styles.values(), [f"{k}×{k}" for k in styles], strict=True)
    ]
    handles.append(
        Line2D([], [], color="black", linewidth=1, marker="|", label="median ●, bar to 95 %, line to the largest")
    )
    handles.append(Line2D([], [], color=GREY, alpha=0.5, linewidth=8, label="modulator within 0.1 of 1"))
    sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def block_of(site: SiteStatistics) -> str:
    """The path up to the pyramid that the conv is in."""
    return site.site.partition(".dec_att")[0]


def short_name(site: SiteStatistics) -> str:
    """The path without the parts that are the same at every site, and the kernel."""
    name = site.site.replace(".dec_att", "").removesuffix(".atrous_conv").removeprefix("decoder.")
    return f"{name}  {site.kernel}×{site.kernel}"
