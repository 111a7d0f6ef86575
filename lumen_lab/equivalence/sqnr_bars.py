"""One bar a layer, as inline SVG that stands alone in a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lumen_lab.equivalence.layer_report import LayerRow

WIDTH, HEIGHT, LEFT, BASE, TOP = 960, 170, 48, 140, 14
COLOURS = {"within": "#0072b2", "first": "#d55e00", "after": "#e69f00", "not judged": "#999999"}
IDENTICAL = "#bcd9ea"
WORDS = {"within": "within tolerance", "first": "first to leave it", "after": "outside, later"}


def sqnr_bars(layers: Sequence[LayerRow], *, least_db: float | None = None) -> str:
    """SQNR in dB of each layer, in order: taller is closer to the reference; pale bars are identical to it.

    ``least_db`` draws the bound. A layer whose difference is not finite, or as large as the signal, is a stump.
    """
    if not layers:
        return ""
    top_db = _top_db(layers)
    step = (WIDTH - LEFT) / len(layers)
    bars = "".join(_bar(layer, LEFT + place * step, step, top_db) for place, layer in enumerate(layers))
    bound = "" if least_db is None else _line(least_db, top_db, "stroke='#d55e00' stroke-dasharray='4 3'")
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='SQNR of each layer' "
        f"style='width:100%;max-width:{WIDTH}px;font:11px sans-serif' fill='currentColor'>"
        f"{_scale(top_db)}{bars}{bound}{_legend(layers)}</svg>"
    )


def _top_db(layers: Sequence[LayerRow]) -> float:
    """The next 20 dB above the best layer that differs at all."""
    best = max((layer.sqnr_db for layer in layers if layer.sqnr_db is not None), default=0.0)
    return 20.0 * max(2, int(best // 20) + 1)


def _height(sqnr_db: float, top_db: float) -> float:
    return (BASE - TOP) * min(max(sqnr_db / top_db, 0.0), 1.0)


def _bar(layer: LayerRow, x: float, step: float, top_db: float) -> str:
    height = BASE - TOP if layer.identical else max(2.0, _height(layer.sqnr_db or 0.0, top_db))
    colour = IDENTICAL if layer.identical and not layer.outside else COLOURS[layer.status]
    figure = "identical" if layer.identical else "not finite" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f} dB"
    width = max(0.5, step - (1 if step > 4 else 0))
    marker = f"<path d='M{x + step / 2:.1f} {BASE + 2}l-5 9h10z' fill='{colour}'/>" if layer.status == "first" else ""
    return (
        f"<rect x='{x:.2f}' y='{BASE - height:.1f}' width='{width:.2f}' height='{height:.1f}' fill='{colour}'>"
        f"<title>{html.escape(f'{layer.place}: {figure}, {layer.status}')}</title></rect>{marker}"
    )


def _scale(top_db: float) -> str:
    every = 20 if top_db <= 80 else 40
    marks = range(0, int(top_db) + 1, every)
    lines = "".join(_line(db, top_db, "stroke='currentColor' stroke-opacity='0.2'") for db in marks)
    texts = "".join(
        f"<text x='{LEFT - 6}' y='{BASE - _height(db, top_db) + 4:.1f}' text-anchor='end'>{db}</text>" for db in marks
    )
    return lines + texts


def _line(db: float, top_db: float, style: str) -> str:
    y = BASE - _height(db, top_db)
    return f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' {style}/>"


def _legend(layers: Sequence[LayerRow]) -> str:
    differing = {layer.status for layer in layers if layer.outside or not layer.identical}
    shown = [(colour, WORDS.get(status, status)) for status, colour in COLOURS.items() if status in differing]
    if any(layer.identical for layer in layers):
        shown.append((IDENTICAL, "identical"))
    texts, x = [f"<text x='{LEFT}' y='{HEIGHT - 8}'>SQNR of each layer in dB, in order of execution</text>"], 380
    for colour, words in shown:
        texts.append(f"<rect x='{x}' y='{HEIGHT - 17}' width='10' height='10' fill='{colour}'/>")
        texts.append(f"<text x='{x + 14}' y='{HEIGHT - 8}'>{html.escape(words)}</text>")
        x += 140
    return "".join(texts)
