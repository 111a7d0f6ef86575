"""A training run over its steps: loss, scores, and the health of its gates with the alarms they raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lumen_lab.errors import LumenError
from lumen_lab.figures.sheet import BLUE, GREY, SKY, VERMILLION, new_sheet

if TYPE_CHECKING:
    from lumen_lab.distillation.history import History

STYLES = ((BLUE, "-"), (VERMILLION, "-"), (SKY, "-"), (GREY, "-"), (BLUE, ":"), (VERMILLION, ":"))
VERDICTS = {"drifting": SKY, "dead": VERMILLION, "healed": BLUE}
GATE_MEASURES = {
    "mean": "mean of the gate",
    "passed": "share of the gradient that reaches it",
    "contribution": "what its branch adds",
    "teacher_gap": "distance of its mean to the teacher's",
}
NOT_TERMS = ("step", "learning_rate")


def runs_figure(
    runs: Mapping[str, History], *, terms: Sequence[str] | None = None, score: str | None = None, title: str = ""
) -> Figure:
    """The loss of each run over its steps (the sum of ``terms``, by default of all), and one ``score`` of validation.

    ``LumenError`` for a run without a line, or a term or score that none has.
    """
    check_runs(runs)
    scores = score is not None
    sheet = new_sheet(10.0 if scores else 6.0, 3.6)
    axes = np.atleast_1d(sheet.subplots(1, 2 if scores else 1))
    for (name, run), (color, style) in zip(runs.items(), STYLES * len(runs)):
        steps = [line["step"] for line in run.train]
        axes[0].plot(steps, smoothed(totals(run, terms)), style, color=color, linewidth=1.3, label=name)
        if scores:
            axes[1].plot(*run.series("validation", score), f"o{style}", color=color, markersize=4, linewidth=1.3)
    axes[0].set_ylabel("loss" if terms is None else " + ".join(terms), fontsize=9)
    if scores:
        axes[1].set_ylabel(f"validation: {score}", fontsize=9)
    finish(sheet, axes, title or "The loss, a running mean")
    if len(runs) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    return sheet


def gates_figure(
    runs: Mapping[str, History], gate: str, *, measures: Sequence[str] = tuple(GATE_MEASURES), title: str = ""
) -> Figure:
    """One gate over the steps of each run, a panel a measure; marks stand where an alarm was raised.

    ``LumenError`` for a run in which no such gate was watched.
    """
    check_runs(runs)
    if any(not run.gates or f"{gate}/mean" not in run.gates[0] for run in runs.values()):
        raise LumenError(f"Not every run has watched a gate '{gate}'; distil with gates= that hold it.")
    sheet = new_sheet(10.0, 2.6 * ((len(measures) + 1) // 2))
    axes = sheet.subplots((len(measures) + 1) // 2, 2, squeeze=False).ravel()
    for place, measure in zip(axes, measures):
        for (name, run), (color, style) in zip(runs.items(), STYLES * len(runs)):
            steps, values = run.series("gates", f"{gate}/{measure}")
            place.plot(steps, [np.nan if one is None else one for one in values], style, color=color, label=name)
            mark_alarms(place, run, gate)
        place.set_ylabel(GATE_MEASURES.get(measure, measure), fontsize=9)
        place.set_ylim(bottom=0)
    for place in axes[len(measures) :]:
        place.remove()
    finish(sheet, axes[: len(measures)], title or f"The {gate} gate")
    if len(runs) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    return sheet


def mark_alarms(axes: Axes, run: History, gate: str) -> None:
    """A line where the gate was called drifting, dead or healed."""
    for alarm in run.alarms:
        if alarm["gate"] == gate:
            axes.axvline(alarm["step"], color=VERDICTS[alarm["verdict"]], linewidth=0.8, linestyle="--")
            axes.annotate(
                alarm["verdict"],
                (alarm["step"], 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(2, -8),
                textcoords="offset points",
                fontsize=7,
                color=VERDICTS[alarm["verdict"]],
            )


def totals(run: History, terms: Sequence[str] | None) -> list[float]:
    """The sum of the terms of each line."""
    known = [name for name in run.train[0] if name not in NOT_TERMS]
    unknown = [name for name in terms or () if name not in known]
    if unknown:
        raise LumenError(f"No term '{unknown[0]}' was logged; there are {', '.join(known)}.")
    return [sum(line[name] or 0.0 for name in (terms or known)) for line in run.train]


def smoothed(values: Sequence[float], *, share: float = 0.1) -> np.ndarray:
    """An exponential running mean over about ``share`` of the values, the first counted in full."""
    keep = 1 - 1 / max(1.0, share * len(values))
    found, weight, total = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return np.array(found)


def check_runs(runs: Mapping[str, History]) -> None:
    """``LumenError`` where there is nothing to draw."""
    empty = next((name for name, run in runs.items() if not run.train), None)
    if not runs or empty is not None:
        raise LumenError(f"There is no line to draw of {'any run' if not runs else repr(empty)}; give histories.")


def finish(sheet: Figure, axes: Sequence[Axes], title: str) -> None:
    """What all panels share."""
    for place in axes:
        place.set_xlabel("step", fontsize=9)
        place.spines[["right", "top"]].set_visible(False)
        place.tick_params(labelsize=8)
    sheet.suptitle(title, fontsize=10)
