"""The parts of the rewrite picker as HTML: the choices, and what a plan does. Pure: plain rows in, text out.

The browser and the static page show the same text, so they cannot disagree.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from lumen_lab.specs import cell_text, escaped

# Okabe and Ito's colours, as in lumen_lab.figures.
BLUE, SKY, VERMILLION = "#0072B2", "#56B4E9", "#D55E00"
STRIP_HEIGHT_PX = 28
MINUS = "−"
STATIC_NOTE = "A picture of the choice that was run, ☑; in a running notebook the rewrites can be ticked here."

Effect = Mapping[str, object]


def choices_html(choices: Sequence[Mapping], picked: Sequence[str], *, blocked: Mapping[str, str], live: bool) -> str:
    """The rewrites by family, each with its claim and reason; ``live`` gives checkboxes, else ☑ and ☐."""
    families: dict[str, list[Mapping]] = {}
    for choice in choices:
        families.setdefault(str(choice["family"]), []).append(choice)
    places = {name: place for place, name in enumerate(picked, 1)}
    return "".join(
        f"<fieldset class='lumen-picker-family'><legend>{_text(family)}</legend>"
        + "".join(_choice_html(choice, places, blocked.get(choice["name"], ""), live) for choice in members)
        + "</fieldset>"
        for family, members in families.items()
    )


def _choice_html(choice: Mapping, places: Mapping[str, int], reason: str, live: bool) -> str:
    name = _text(choice["name"])
    place = f"#{places[choice['name']]}" if choice["name"] in places else ""
    tick = f"<input type='checkbox' value='{name}'>" if live else f"<span>{'☑' if place else '☐'}</span>"
    because = _sentence(choice["because"]) + "".join(f" {sentence}" for sentence in _order_sentences(choice["after"]))
    return (
        f"<div class='lumen-picker-choice'><label>{tick} <span class='lumen-picker-name'>{name}</span></label>"
        f"<span class='lumen-picker-place'>{place}</span>"
        f"<div class='lumen-picker-claim'>{escaped(choice['claim'])}</div>"
        f"<div class='lumen-picker-because' title='{because}'><span>{because}</span></div>"
        f"<div class='lumen-picker-reason'>{_text(reason)}</div></div>"
    )


def _order_sentences(after: Sequence[Sequence[str]]) -> list[str]:
    """One sentence a reason for an order, which holds only where a plan has both rewrites."""
    reasons: dict[str, list[str]] = {}
    for other, why in after:
        reasons.setdefault(str(why), []).append(str(other))
    return [
        f"If the plan also has {_text(' or '.join(others))}: after {'it' if len(others) == 1 else 'them'}, since "
        f"{_sentence(why)}"
        for why, others in reasons.items()
    ]


def page_html(choices: str, summary: str, error: str, panel: str, *, style: str) -> str:
    """The static page: choices on the left, the plan in one line (or the reason for having none) and its panel."""
    told = f"<p class='lumen-picker-error'>{_text(error)}</p>" if error else f"<p>{_text(summary)}</p>"
    return (
        f"<style>{style}</style><div class='lumen-picker lumen-picker-static'>"
        f"<p class='lumen-picker-note'>{STATIC_NOTE}</p><div class='lumen-picker-columns'>"
        f"<div class='lumen-picker-choices'>{choices}</div><div class='lumen-picker-result'>{told}"
        f"<div class='lumen-picker-panel'>{panel}</div></div></div></div>"
    )


def panel_html(before: Effect, after: Effect, recorded: Sequence[Mapping[str, object]]) -> str:
    """What the plan of ``after`` does, against ``before``: figures, partitions, operations, checks, compiler, code."""
    parts = [
        _table("Figures", ("", "original", "this plan", "change"), _figure_lines(before, after), numbers=True),
        _strips(before, after),
        _blocking(after),
        _operations(before["operations"], after["operations"]),
        _rewrites(after),
        _recorded(recorded) if recorded else "",
        code_html(str(after.get("code", ""))),
    ]
    return "".join(parts)


def code_html(code: str) -> str:
    """The plan as code, under a head that a copy button can be put in."""
    return (
        "<section><div class='lumen-picker-code-head'><b>The plan as code</b></div>"
        f"<pre class='lumen-picker-code' tabindex='0'>{_text(code)}</pre></section>"
    )


def summary_text(effect: Effect) -> str:
    """One line on a plan: rewrites, partitions, what is left on the CPU, checks, and how long measuring took."""
    rows, count = effect["partition_rows"], len(effect["plan"])
    on_cpu = sum(row["runs_on"] == "CPU" for row in rows)
    left = f"{on_cpu:,} of {len(rows):,} operations on the CPU" if on_cpu else "nothing on the CPU"
    rewrites = f"{count} rewrite{'' if count == 1 else 's'}" if count else "The network as it is"
    seconds = sum(effect.get("seconds", {}).values())
    took = f"; measured in {seconds:.1f} s" if seconds else ""
    return f"{rewrites}: {_partitions(effect)} predicted for {effect['chip']}, {left}{_checks(effect)}{took}"


def _checks(effect: Effect) -> str:
    statuses = ("failed", "pending", "passed")
    counts = {status: sum(row[status] for row in effect.get("verdicts", ())) for status in statuses}
    told = [f"{count} {status}" for status, count in counts.items() if count]
    return f", checks: {', '.join(told)}" if told else ""


def _partitions(effect: Effect) -> str:
    count = _partition_count(effect)
    return f"{count} NPU partition{'' if count == 1 else 's'}"


def _figure_lines(before: Effect, after: Effect) -> list[tuple[str, ...]]:
    figures = [(name, value(before), value(after), write) for name, value, write in _FIGURES]
    return [(name, write(was), write(now), _change(was, now, write)) for name, was, now, write in figures if was or now]


def _partition_count(effect: Effect) -> int:
    return len({row["partition"] for row in effect["partition_rows"] if row["runs_on"] == "NPU"})


def _on(side: str) -> Callable[[Effect], int]:
    return lambda effect: sum(row["runs_on"] == side for row in effect["partition_rows"])


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _giga(value: float) -> str:
    return f"{value / 1e9:.3f} G"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


_FIGURES: tuple[tuple[str, Callable[[Effect], int], Callable[[float], str]], ...] = (
    ("operations on the NPU, predicted", _on("NPU"), _count),
    ("operations on the CPU, predicted", _on("CPU"), _count),
    ("NPU partitions, predicted", _partition_count, _count),
    ("MACs", lambda effect: effect["macs"], _giga),
    ("MACs of interpolation", lambda effect: effect.get("interpolation_macs", 0), _giga),
    ("parameters", lambda effect: effect["parameters"], _count),
    ("peak of activations in memory", lambda effect: effect["peak_activation_bytes"], _megabytes),
    ("largest rank of a tensor", lambda effect: effect["largest_rank"], _count),
)


def _change(before: float, after: float, write: Callable[[float], str]) -> str:
    if before == after:
        return ""
    sign = "+" if after > before else MINUS
    share = f" ({sign}{abs(after - before) / before:.1%})" if before and write is not _count else ""
    return f"{sign}{write(abs(after - before))}{share}"


def _strips(before: Effect, after: Effect) -> str:
    pictures = [_strip_figure("original", before)]
    pictures += [_strip_figure("this plan", after)] if after["plan"] else []
    key = _key("NPU, a shade a partition", BLUE, SKY) + " " + _key("CPU (taller)", VERMILLION)
    return f"<section><b>Partitions</b>, in order of execution: {key}{''.join(pictures)}</section>"


def _key(name: str, *colors: str) -> str:
    squares = "".join(f"<span style='background:{color}'></span>" for color in colors)
    return f"<span class='lumen-picker-key'>{squares} {_text(name)}</span>"


def _strip_figure(name: str, effect: Effect) -> str:
    rows = effect["partition_rows"]
    on_cpu = [row["kind"] for row in rows if row["runs_on"] == "CPU"]
    kinds = ", ".join(f"{kind} ×{on_cpu.count(kind)}" for kind in dict.fromkeys(on_cpu))
    left = f"on the CPU: {kinds}" if on_cpu else "nothing on the CPU"
    label = f"{name}: {_partitions(effect)} of {len(rows):,} operations, {left}"
    return (
        f"<figure class='lumen-picker-strip'>{strip_svg(rows, label=label)}"
        f"<figcaption>{_text(label)}</figcaption></figure>"
    )


def strip_svg(rows: Sequence[Mapping[str, object]], *, label: str) -> str:
    """The operations from left to right: a blue bar a piece on the NPU, a taller orange one on the CPU."""
    count, start, bars, shades = max(len(rows), 1), 0, [], {}
    for partition, group in groupby(rows, key=lambda row: row["partition"] if row["runs_on"] == "NPU" else None):
        kinds = [str(row["kind"]) for row in group]
        bars.append(_bar(start, len(kinds), partition, kinds, shades, count))
        start += len(kinds)
    bars.sort(key=lambda bar: bar[0])  # the CPU's pieces, which may be a pixel wide, lie on top
    return (
        f"<svg role='img' aria-label='{_text(label)}' width='100%' height='{STRIP_HEIGHT_PX}' "
        f"viewBox='0 0 {count} {STRIP_HEIGHT_PX}' preserveAspectRatio='none'>{''.join(bar for _, bar in bars)}</svg>"
    )


def _bar(start: int, length: int, partition: object, kinds: list[str], shades: dict, count: int) -> tuple[bool, str]:
    """Whether the bar is the CPU's, and its SVG."""
    if partition is None:
        width = max(length, count / 300)
        x, y, color, told = start + (length - width) / 2, 0, VERMILLION, "CPU: " + ", ".join(dict.fromkeys(kinds))
    else:
        shade = shades.setdefault(partition, len(shades) % 2)
        x, y, width, color, told = (
            start,
            5,
            length,
            (BLUE, SKY)[shade],
            f"NPU partition {partition}: {length} operations",
        )
    height = STRIP_HEIGHT_PX - 2 * y
    rect = f"<rect x='{x:g}' y='{y}' width='{width:g}' height='{height}' fill='{color}'>"
    return partition is None, f"{rect}<title>{_text(told)}</title></rect>"


def _blocking(effect: Effect) -> str:
    if not effect.get("blocking"):
        return ""
    lines = [(row["kind"], _count(row["operations"]), row["first"], row["reason"]) for row in effect["blocking"]]
    return _table("Would stay on the CPU", ("kind", "operations", "first at", "because"), lines)


def _operations(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Kinds whose count moved, largest change first; the others folded away."""
    pairs = {kind: (before.get(kind, 0), after.get(kind, 0)) for kind in {**before, **after}}
    moved = sorted(
        (kind for kind, (was, now) in pairs.items() if was != now), key=lambda k: -abs(pairs[k][1] - pairs[k][0])
    )
    same = [kind for kind in pairs if kind not in moved]
    head = ("kind", "original", "this plan", "change")
    lines = [(kind, *map(_count, pairs[kind]), _change(*pairs[kind], _count)) for kind in moved]
    table = _table("Operations by kind", head, lines, numbers=True) if moved else ""
    rest = _table("", ("kind", "operations"), [(kind, _count(pairs[kind][0])) for kind in same], numbers=True)
    title = f"Kinds of operation {'whose number stays the same' if moved else 'in the network'}: {len(same)}"
    return table + (f"<details><summary>{title}</summary>{rest}</details>" if same else "")


def _rewrites(effect: Effect) -> str:
    """A line a rewrite: sites, what was refused and why, the verdict of its check."""
    if not effect["plan"]:
        return ""
    log = {row["rewrite"]: row for row in effect.get("log", ())}
    verdicts = {row["rewrite"]: row for row in effect.get("verdicts", ())}
    lines = [
        (name, _sites(log.get(name)), _verdict(verdicts.get(name), log[name]["sites"] if name in log else None))
        for name in effect["plan"]
    ]
    others = [(name, "", _verdict(row)) for name, row in verdicts.items() if name not in effect["plan"]]
    return _table("Sites and checks", ("rewrite", "sites", "check"), [*lines, *others])


def _sites(row: Mapping | None) -> str:
    if row is None:
        return "none found"
    refused = f", refused at {_count(row['refused'])}: {row['why refused']}" if row["refused"] else ""
    return _count(row["sites"]) + refused


def _verdict(row: Mapping | None, sites: int | None = None) -> str:
    """The verdict of a check; where several sites lie in one module, which is checked as a whole, it says so."""
    if row is None:
        return "not checked"
    counts = {status: row[status] for status in ("failed", "pending", "passed") if row[status]}
    sign = "✗" if row["failed"] else "…" if row["pending"] else "✓"
    told = ", ".join(f"{_count(count)} {status}" for status, count in counts.items())
    modules = sum(counts.values())
    of = "" if sites in (None, modules) else f"in {_count(modules)} module{'' if modules == 1 else 's'}: "
    worst = f", worst {row['worst']:.1e}" if row["worst"] else ""
    return f"{sign} {of}{told}{worst}"


def _recorded(rows: Sequence[Mapping[str, object]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[cell_text(row.get(key)) for key in head] for row in rows]
    return _table("What the compiler recorded", head, lines)


def _table(caption: str, head: Sequence[str], lines: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table whose first column heads its lines; ``numbers`` puts the other columns to the right."""
    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    top = "".join(f"<th scope='col'>{_text(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th scope='row'>{escaped(first)}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in lines
    )
    kind = "lumen-picker-table lumen-picker-numbers" if numbers else "lumen-picker-table"
    return f"<table class='{kind}'>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: object) -> str:
    return html.escape(str(value))


def _sentence(value: object) -> str:
    return f"{_text(value).rstrip('.')}."
