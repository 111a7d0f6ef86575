"""How a graph is cut between the NPU and the CPU, and where its multiplications are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

WIDTH_IN = 11.0
FLOOR = 0.36  # height of a line of labels, as a part of the strip's
_CHARACTERS_ACROSS = 150  # of 8-point text in the width of a sheet
_CPU_STYLE = {"facecolor": VERMILLION, "edgecolor": "black", "hatch": "////", "linewidth": 0.5}


def partition_strip(rows: Iterable[Mapping[str, object]], *, title: str = "") -> Figure:
    """The operations of a graph in execution order, as a strip: blue on the NPU, hatched orange on the CPU.

    Each row is a dict with ``index`` (place in the order), ``kind``, ``runs_on`` ("NPU" or "CPU"), ``partition``
    (the number of the NPU's graph; on the CPU it may be None or the number that an audit gives to the piece, and is not
    looked at) and, optionally, ``bytes_crossing``: what the operation fetches from the other side, drawn below in MB.
    Partitions carry their numbers, CPU islands the kinds of their operations.
    """
    rows = sorted(_checked(rows, {"index", "kind", "partition", "runs_on"}), key=lambda row: row["index"])
    strangers = {row["runs_on"] for row in rows} - {"NPU", "CPU"}
    if strangers:
        raise LumenError(f"partition_strip knows runs_on 'NPU' and 'CPU'; found {sorted(map(str, strangers))}.")
    crossing = [row.get("bytes_crossing") or 0 for row in rows]
    runs = _runs(rows)
    above = _staggered(_island_labels(runs, len(rows)), len(rows))
    below = _staggered(_narrow_numbers(runs, len(rows)), len(rows))
    low, high = -0.3 - FLOOR * _floors(below), 1.25 + FLOOR * _floors(above)
    heights = [0.75 * (high - low)] + ([0.9] if any(crossing) else [])
    sheet = new_sheet(WIDTH_IN, sum(heights) + 1.3)
    axes = sheet.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_strip(axes[0], runs, len(rows))
    _draw_labels(axes[0], above, below)
    axes[0].set(xlim=(-len(rows) / 200, len(rows) * 1.005), ylim=(low, high), yticks=[])
    if any(crossing):
        _draw_crossing(axes[1], crossing)
    axes[-1].set_xlabel("operation, in execution order", fontsize=9)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    sheet.suptitle("\n".join(filter(None, [title, _summary(rows)])), fontsize=10)
    _draw_legend(sheet, cpu=any(run[2] is None for run in runs))
    return sheet


def macs_by_site(macs: Mapping[str, int], *, top: int = 16, title: str = "") -> Figure:
    """Horizontal bars of the multiply-accumulates of each site, largest first, with their share of the whole.

    ``macs`` maps sites to their MACs, as ``AuditReport.macs_by_site`` gives them. What comes after the ``top`` largest
    is one grey bar.
    """
    if not isinstance(macs, Mapping):
        raise LumenError(
            f"This figure takes a mapping {{site: MACs}}; found {type(macs).__name__}. "
            "An audit's macs_by_site() gives one."
        )
    ranked = sorted(((str(site), count) for site, count in macs.items() if count), key=lambda item: -item[1])
    if not ranked:
        raise LumenError("macs_by_site found no multiplications; pass an audit's macs_by_site().")
    shown, rest = ranked[:top], ranked[top:]
    bars = [(site, count, BLUE) for site, count in shown]
    bars += [(f"{len(rest)} more", sum(count for _, count in rest), GREY)] if rest else []
    total = sum(count for _, count in ranked)
    sheet = new_sheet(8.0, 1.0 + 0.3 * len(bars))
    _draw_bars(sheet.subplots(), bars, total)
    sheet.suptitle(f"{title or 'Multiply-accumulates by site'}: {_macs(total)} in all", fontsize=10)
    return sheet


def _checked(rows: Iterable[Mapping[str, object]], keys: set[str]) -> list[Mapping[str, object]]:
    rows = list(rows)
    missing = keys - set(rows[0]) if rows else keys
    if missing:
        found = f"rows without {', '.join(sorted(missing))}" if rows else "no rows"
        raise LumenError(f"This figure needs rows with {', '.join(sorted(keys))}; found {found}.")
    return rows


def _runs(rows: Sequence[Mapping[str, object]]) -> list[tuple[int, int, object, list[str]]]:
    """Consecutive operations of one partition: (start, length, partition or None on the CPU, kinds)."""
    runs, start = [], 0
    for partition, group in groupby(rows, key=lambda row: row["partition"] if row["runs_on"] == "NPU" else None):
        kinds = [str(row["kind"]) for row in group]
        runs.append((start, len(kinds), partition, kinds))
        start += len(kinds)
    return runs


def _draw_strip(axes: Axes, runs: list, count: int) -> None:
    wide = _wide_runs(runs, count)
    for (start, length, partition, _), is_dark in zip(runs, _is_dark(runs), strict=True):
        middle = start + length / 2
        if partition is None:
            width = max(length, count / 400)
            axes.broken_barh([(middle - width / 2, width)], (-0.12, 1.24), zorder=3, **_CPU_STYLE)
            continue
        axes.broken_barh(
            [(start, length)], (0, 1), facecolor=BLUE if is_dark else SKY, edgecolor="white", linewidth=0.5
        )
        if (start, partition) in wide:
            color = "white" if is_dark else "black"
            axes.text(middle, 0.5, str(partition), ha="center", va="center", color=color, weight="bold")
    axes.spines[["left", "right", "top"]].set_visible(False)


def _is_dark(runs: list) -> list[bool]:
    """Shades that alternate with the partitions, in the order in which they first run."""
    order = list(dict.fromkeys(partition for _, _, partition, _ in runs if partition is not None))
    return [partition is not None and order.index(partition) % 2 == 0 for _, _, partition, _ in runs]


def _wide_runs(runs: list, count: int) -> set[tuple[int, object]]:
    """(start, partition) of the runs that their number fits into."""
    return {
        (start, partition)
        for start, length, partition, _ in runs
        if partition is not None and length > (len(str(partition)) + 1) * count / _CHARACTERS_ACROSS
    }


def _narrow_numbers(runs: list, count: int) -> list[tuple[float, str]]:
    """(place, numbers) below the strip for the partitions that have no run wide enough for their number."""
    numbered = {partition for _, partition in _wide_runs(runs, count)}
    longest: dict[object, tuple[int, int]] = {}
    for start, length, partition, _ in runs:
        if partition is not None and partition not in numbered and length > longest.get(partition, (0, 0))[1]:
            longest[partition] = (start, length)
    places = sorted((start + length / 2, [str(partition)]) for partition, (start, length) in longest.items())
    groups = _gathered(places, count)
    return [(place, names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}") for place, names in groups]


def _island_labels(runs: list, count: int) -> list[tuple[float, str]]:
    """(place, kinds) above the strip for the CPU islands."""
    islands = [(start + length / 2, kinds) for start, length, partition, kinds in runs if partition is None]
    return [(place, _counted(kinds)) for place, kinds in _gathered(islands, count)]


def _gathered(places: list[tuple[float, list[str]]], count: int) -> list[tuple[float, list[str]]]:
    """Places too near to be told apart, joined at their middle with all their names."""
    groups: list[tuple[list[float], list[str]]] = []
    for place, names in places:
        if groups and place - groups[-1][0][-1] < count / 50:
            groups[-1][0].append(place)
            groups[-1][1].extend(names)
        else:
            groups.append(([place], list(names)))
    return [(sum(middles) / len(middles), names) for middles, names in groups]


def _staggered(labels: list[tuple[float, str]], count: int) -> list[tuple[float, str, int]]:
    """Each label with the lowest floor on which it overlaps none before it."""
    right_edges: list[float] = []
    placed = []
    for place, text in labels:
        half = (len(text) + 2) * count / _CHARACTERS_ACROSS / 2
        floor = next((at for at, edge in enumerate(right_edges) if edge < place - half), len(right_edges))
        right_edges[floor : floor + 1] = [place + half]
        placed.append((place, text, floor))
    return placed


def _floors(labels: list[tuple[float, str, int]]) -> int:
    return 1 + max((floor for _, _, floor in labels), default=-1)


def _draw_labels(axes: Axes, above: list[tuple[float, str, int]], below: list[tuple[float, str, int]]) -> None:
    """Kinds of the CPU islands above the strip, numbers of the narrow partitions below it, each with its line."""
    places = [(place, text, 1.12, 1.3 + FLOOR * floor, "bottom", VERMILLION) for place, text, floor in above]
    places += [(place, text, 0, -0.3 - FLOOR * floor, "top", "black") for place, text, floor in below]
    for place, text, foot, head, side, color in places:
        axes.vlines(place, foot, head, color=color, linewidth=0.8)
        axes.text(place, head, text, ha="center", va=side, fontsize=8)


def _draw_legend(sheet: Figure, *, cpu: bool) -> None:
    handles = [Patch(facecolor=BLUE, label="NPU (shade and number: partition)")]
    handles += [Patch(**_CPU_STYLE, label="CPU")] if cpu else []
    sheet.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _draw_crossing(axes: Axes, crossing: list[int]) -> None:
    places = [place + 0.5 for place, size_bytes in enumerate(crossing) if size_bytes]
    axes.vlines(places, 0, [size_bytes / 1e6 for size_bytes in crossing if size_bytes], color="black", linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MB across", fontsize=8)
    axes.set_title(f"{sum(crossing) / 1e6:,.1f} MB cross between NPU and CPU", fontsize=9)
    axes.spines[["right", "top"]].set_visible(False)


def _draw_bars(axes: Axes, bars: list[tuple[str, int, str]], total: int) -> None:
    names, macs, colors = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), macs, color=colors)
    axes.bar_label(drawn, [f"{_macs(value)}, {value / total:.1%}" for value in macs], padding=4, fontsize=8)
    axes.set_yticks(range(len(bars)), names, fontsize=8)
    axes.set(xticks=[], xlim=(0, 1.3 * max(macs)))
    axes.invert_yaxis()
    axes.spines[["right", "top", "bottom"]].set_visible(False)


def _summary(rows: Sequence[Mapping[str, object]]) -> str:
    partitions = len({row["partition"] for row in rows if row["runs_on"] == "NPU"})
    on_cpu = [str(row["kind"]) for row in rows if row["runs_on"] == "CPU"]
    left = (
        f"{len(on_cpu):,} of {len(rows):,} operations on the CPU ({_counted(on_cpu)})"
        if on_cpu
        else (f"nothing of {len(rows):,} operations on the CPU")
    )
    return f"{partitions} NPU partition{'' if partitions == 1 else 's'}, {left}"


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kind} ×{times}" if times > 1 else kind for kind, times in Counter(kinds).most_common())


def _macs(value: float) -> str:
    for unit, size in (("TMAC", 1e12), ("GMAC", 1e9), ("MMAC", 1e6), ("kMAC", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} MAC"
