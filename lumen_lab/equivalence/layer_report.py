"""A layer-by-layer difference report as a record: which layer left its tolerance first, and how far the others are."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lumen_lab.equivalence.sqnr_bars import sqnr_bars
from lumen_lab.equivalence.tolerance import Tolerance
from lumen_lab.specs import Record, html_table

NETWORK = "(network)"
HANDED_ON = "it hands on what it is given"
WITHIN, FIRST, AFTER, UNJUDGED = "within", "first", "after", "not judged"
WORST_SHOWN = 10


@dataclass(frozen=True)
class LayerRow(Record):
    """How far one layer is from the reference.

    ``status``: "within" its tolerance, the "first" outside it, outside "after" that one, or "not judged" (no bound of
    the tolerance applies to it). ``also``: sites that return the same tensor (a container and its last part).
    ``shape`` is the reference's and ``order`` how the other was turned to it. ``sqnr_db``: 10·log10(Σ reference² /
    Σ difference²), None where nothing differs (``max_abs`` is 0) or the difference is not finite (``max_abs`` is
    None). ``cosine``: of the two as vectors. ``scale``: the reference's largest absolute value.
    Integers: ``equal`` and ``within_one`` are shares of values, ``max_steps`` the largest difference in steps of the
    encoding, in which both are written first; ``why``: the bounds that were broken. ``read_by``: the operator through
    which both were compared, where one is quantised for it: what it cannot tell apart was not meant to be kept.
    """

    site: str
    call: int
    output: int
    kind: str
    shape: tuple[int, ...]
    status: Literal["within", "first", "after", "not judged"]
    sqnr_db: float | None
    cosine: float | None
    max_abs: float | None
    scale: float
    equal: float | None = None
    within_one: float | None = None
    max_steps: int | None = None
    order: str = ""
    also: tuple[str, ...] = ()
    why: str = ""
    read_by: str = ""

    @property
    def place(self) -> str:
        """The site, with the numbers of its call and output where they are not the first."""
        call = f", call {self.call}" if self.call else ""
        output = f", output {self.output}" if self.output else ""
        return f"{self.site or NETWORK}{call}{output}"

    @property
    def outside(self) -> bool:
        """Whether it has left its tolerance."""
        return self.status in (FIRST, AFTER)

    @property
    def of_network(self) -> bool:
        """Whether it is what the network itself returns."""
        return self.site == "" or NETWORK in self.also

    @property
    def identical(self) -> bool:
        """Whether not a single value differs."""
        return self.max_abs == 0


@dataclass(frozen=True)
class UnmatchedLayer(Record):
    """A tensor that was not compared: of which execution it is, why not (the same words for the same reason), where
    to look instead."""

    site: str
    call: int
    output: int
    found_in: str
    why: str
    detail: str = ""


@dataclass(frozen=True)
class LayerReport(Record):
    """Two executions of a network, layer by layer, in the order in which the reference ran."""

    reference: str
    actual: str
    precisions: tuple[str, str]
    tolerance: Tolerance
    layers: tuple[LayerRow, ...]
    unmatched: tuple[UnmatchedLayer, ...]

    @property
    def first(self) -> LayerRow | None:
        """The first layer that left its tolerance, None if none did."""
        return next((layer for layer in self.layers if layer.status == FIRST), None)

    @property
    def passed(self) -> bool:
        """True if none left its tolerance, and what the network itself returned was compared and is within.

        Where a trace was made of chosen sites without the network's own (""), any layer within its tolerance does.
        """
        within = [layer for layer in self.layers if layer.status == WITHIN]
        whole = [layer for layer in self.layers if layer.of_network]
        return self.first is None and bool(within) and not self.missed_output and all(x in within for x in whole)

    @property
    def missed_output(self) -> bool:
        """Whether something that the network itself returned, in either execution, was not compared."""
        return any(layer.site == "" and layer.why != HANDED_ON for layer in self.unmatched)

    @property
    def matched(self) -> int:
        """How many of the reference's tensors were compared; one that several sites return counts for each."""
        return sum(1 + len(layer.also) for layer in self.layers)

    @property
    def missed(self) -> int:
        """How many of the reference's tensors were not compared, those that a module only hands on left out."""
        return sum(layer.found_in == self.reference and layer.why != HANDED_ON for layer in self.unmatched)

    @property
    def matched_share(self) -> float:
        """The share of the reference's tensors that were compared."""
        return self.matched / (self.matched + self.missed)

    def at(self, site: str, call: int = 0, output: int = 0) -> LayerRow | None:
        """The row of one tensor, by its own site only; None if it was not compared."""
        wanted = (site, call, output)
        return next((x for x in self.layers if (x.site, x.call, x.output) == wanted), None)

    def rows(self) -> list[dict[str, object]]:
        """One dict a layer, in order of execution."""
        return [_row(layer) for layer in self.layers]

    def worst(self, count: int = WORST_SHOWN) -> list[LayerRow]:
        """The layers of the lowest SQNR, those that are not finite before all, identical ones left out."""
        differing = [layer for layer in self.layers if not layer.identical]
        return sorted(differing, key=lambda x: (x.max_abs is not None, x.sqnr_db or 0.0))[:count]

    def unmatched_rows(self) -> list[dict[str, object]]:
        """What was not compared, by reason: how many tensors, in which execution, at which sites."""
        groups: dict[tuple[str, str], list[str]] = {}
        for layer in self.unmatched:
            groups.setdefault((layer.found_in, layer.why), []).append(layer.site or NETWORK)
        return [
            {"only in": found_in, "tensors": len(sites), "why": why, "sites": _listed(sites)}
            for (found_in, why), sites in groups.items()
        ]

    def __str__(self) -> str:
        return f"{self.actual} against {self.reference}: {self._coverage()}; {self._outcome()}"

    def _coverage(self) -> str:
        of_all = f"{self.matched:,} of {self.matched + self.missed:,} tensors compared ({self.matched_share:.0%})"
        if self.missed_output:
            return f"{of_all}, the network's own output not among them"
        asked = any(layer.of_network for layer in self.layers)
        return f"{of_all}, {'the network’s own output among them' if asked else 'its own output not asked for'}"

    def _outcome(self) -> str:
        if self.first is not None:
            outside = sum(layer.outside for layer in self.layers)
            return f"{outside} left their tolerance, {self.first.place} first ({self.first.why})"
        if not any(layer.status == WITHIN for layer in self.layers):
            return "none of them could be judged"
        if self.missed_output:
            return "none left its tolerance, which proves nothing without the output"
        return "none left its tolerance" if self.passed else "the output could not be judged"

    def _repr_html_(self) -> str:
        tolerance = f"{self.tolerance.name}: {self.tolerance.text}. {self.tolerance.because}"
        first = self.layers.index(self.first) if self.first else None
        near = [] if first is None else self.layers[max(0, first - 2) : first + 4]
        tables = [
            html_table(_shown(near, short=True), caption="Around the first layer that left its tolerance")
            if near
            else "",
            html_table(_shown(self.worst(), short=True), caption=f"The {WORST_SHOWN} layers of the lowest SQNR"),
            _folded(f"All {len(self.layers)} layers in order of execution", html_table(_shown(self.layers))),
        ]
        if self.unmatched:
            summary = f"{len(self.unmatched)} tensors that could not be compared, and why"
            tables.append(_folded(summary, html_table(self.unmatched_rows())))
        head = f"<p><b>{html.escape(str(self))}</b><br>Tolerance, {html.escape(tolerance)}</p>"
        return f"<div>{head}{sqnr_bars(self.layers, least_db=self.tolerance.min_sqnr_db)}{''.join(tables)}</div>"


def _row(layer: LayerRow) -> dict[str, object]:
    return {
        "layer": layer.place,
        "kind": layer.kind,
        "shape": "×".join(map(str, layer.shape)) + (f" ({layer.order})" if layer.order else ""),
        "status": layer.status,
        "SQNR, dB": "identical" if layer.identical else None if layer.sqnr_db is None else round(layer.sqnr_db, 1),
        "cosine": None if layer.cosine is None else round(layer.cosine, 7),
        "max |difference|": "not finite" if layer.max_abs is None else layer.max_abs,
        "largest value": layer.scale,
        "steps off: none": _percent(layer.equal),
        "at most 1": _percent(layer.within_one),
        "max": layer.max_steps,
        "as read by": layer.read_by,
        "broken bounds": layer.why,
        "also returned by": ", ".join(layer.also),
    }


def _shown(layers: Sequence[LayerRow], *, short: bool = False) -> list[dict[str, object]]:
    """Rows for a page: columns that are empty throughout left out, and of ``short`` tables those of long texts."""
    rows = [row | {"cosine": row["cosine"] and f"{row['cosine']:.7f}"} for row in map(_row, layers)]
    empty = {key for key in (rows[0] if rows else ()) if all(row[key] in (None, "") for row in rows)}
    dropped = empty | ({"broken bounds", "also returned by"} if short else set())
    return [{key: value for key, value in row.items() if key not in dropped} for row in rows]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def _listed(sites: Sequence[str], limit: int = 4) -> str:
    distinct = list(dict.fromkeys(sites))
    more = f" and {len(distinct) - limit} more" if len(distinct) > limit else ""
    return ", ".join(distinct[:limit]) + more
