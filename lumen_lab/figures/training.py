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
VERDICTS = {"drifting": "^", "dead": "X", "healed": "P"}
GATE_MEASURES = {
    "mean": "mean of the gate",
    "passed": "gradient let through",
    "contribution": "branch ÷ rest",
    "teacher_gap": "gap to the teacher's mean",
}
NOT_TERMS = ("step", "learning_rate")


def runs_figure(
    runs: Mapping[str, History],
    *,
    terms: Sequence[str] | None = None,
    score: str | None = None,
    loss: str = "loss",
    title: str = "",
) -> Figure:
    """The loss of each run over its steps (the sum of ``terms``, by default of all; ``loss`` is its label), a running
    mean, and one ``score`` of validation.

    ``LumenError`` for a run without a line, or a term that none has.
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
    axes[0].set_ylabel(f"{loss}, running mean", fontsize=9)
    if scores:
        axes[1].set_ylabel(f"validation: {score}", fontsize=9)
    finish(sheet, axes, title)
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
            mark_alarms(place, run, gate, measure, color)
        place.set_ylabel(GATE_MEASURES.get(measure, measure), fontsize=9)
        place.set_ylim(bottom=0)
    for place in axes[len(measures) :]:
        place.remove()
    finish(sheet, axes[: len(measures)], title or f"The {gate} gate")
    explain_marks(axes[0])
    sheet.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return sheet


def mark_alarms(axes: Axes, run: History, gate: str, measure: str, color: str) -> None:
    """A mark on the run's line where the gate was called drifting, dead or healed."""
    known = dict(zip(*run.series("gates", f"{gate}/{measure}")))
    for alarm in run.alarms:
        value = known.get(alarm["step"])
        if alarm["gate"] == gate and value is not None:
            shape = VERDICTS[alarm["verdict"]]
            axes.plot(alarm["step"], value, shape, color=color, markeredgecolor="black", markersize=8, clip_on=False)


def explain_marks(axes: Axes) -> None:
    """A line of words for the marks."""
    for verdict, shape in VERDICTS.items():
        axes.plot([], [], shape, color="white", markeredgecolor="black", markersize=7, linestyle="none", label=verdict)


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
    if title:
        sheet.suptitle(title, fontsize=10)
