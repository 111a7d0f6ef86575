"""The sheet that every figure is drawn on, and the colours that they share."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey print ("Color Universal Design", 2008).
BLUE, SKY, VERMILLION, GREY = "#0072B2", "#56B4E9", "#D55E00", "#999999"

DPI = 110


class Sheet(Figure):
    """A ``Figure`` that a notebook shows as PNG although pyplot knows nothing of it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_sheet(width_in: float, height_in: float) -> Sheet:
    """An empty sheet of that size in inches whose parts are laid out without overlap."""
    return Sheet(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
