"""A training run as it goes on: one picture in the notebook, drawn again at every look; no browser is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from lumen_lab.distillation.history import History
from lumen_lab.figures.training import gates_figure, runs_figure


class LiveRun:
    """What ``distill(seen=…)`` is given: the loss, or with ``gate`` that gate's measures, over the steps so far.

    Drawn at most every ``seconds``, where IPython is there to show it; ``history`` holds what was told.
    """

    def __init__(self, name: str = "run", *, gate: str | None = None, seconds: float = 3.0):
        self.name, self.gate, self.seconds = name, gate, seconds
        self.history = History()
        self.drawn = 0
        self._handle, self._last = None, 0.0

    def __call__(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        line = {"step": float(step), **values}
        self.history = History(
            **{
                name: (*getattr(self.history, name), line) if name == kind else getattr(self.history, name)
                for name in ("train", "gates", "validation")
            }
        )
        if time.monotonic() - self._last >= self.seconds and self.is_ready():
            self.draw()

    def is_ready(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.history.train and (self.gate is None or self.history.gates))

    def figure(self):
        """The picture as it is now."""
        runs = {self.name: self.history}
        return runs_figure(runs) if self.gate is None else gates_figure(runs, self.gate)

    def draw(self) -> None:
        """Show the picture, in place of the one before."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(self.figure(), display_id=True)
        else:
            self._handle.update(self.figure())
        self.drawn, self._last = self.drawn + 1, time.monotonic()
