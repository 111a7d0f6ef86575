"""The watch over a student's gates while it trains: measured, judged, and restored from the teacher where asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lumen_lab.distillation.gate_health import MEASURES, measures
from lumen_lab.distillation.gates import Gate
from lumen_lab.distillation.health_rules import DEAD, ORDER, Watch
from lumen_lab.distillation.loop import Run
from lumen_lab.distillation.recipe import DistillRecipe
from lumen_lab.distillation.views import RAW, Shown
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.values import output_of
from lumen_lab.specs import write_whole

LOUDER = 4.0  # by how much the feature and gate losses grow when a gate is healed
MOST_HEALS = 3  # of one gate: what dies a fourth time will not be kept alive by healing


class GateWatch:
    """Measures of every gate at the steps that are kept, the alarms they raised, and what was done about them.

    ``line`` holds the last measures, named "gate/measure"; ``alarms`` (step, gate, verdict, sentence), the first dead
    or drifting step of each; ``louder`` multiplies the feature and gate losses, which are then at least 1.
    ``healthy``: name → the weight that a gate is restored to.
    """

    def __init__(
        self, gates: Mapping[str, Gate], recipe: DistillRecipe, graph: NPUGraph, healthy: Mapping[str, Tensor]
    ):
        self.gates, self.recipe, self.graph = dict(gates), recipe, graph
        owned = [name for name in graph.weights() for gate in self.gates.values() if is_own(name, gate)]
        self.healthy = {name: healthy[name].detach().cpu().clone() for name in owned}
        self.watch = Watch(patience=recipe.patience)
        self.line: dict[str, float | None] = {}
        self.alarms: list[dict[str, object]] = []
        self.heals: dict[str, int] = {}
        self.louder = 1.0
        self._kept: tuple[Shown, Shown] | None = None

    def keep(self, shown: Shown, taught: Shown) -> None:
        """Hold on to the values of a step that is looked at, until its gradients are there."""
        for gate in self.gates.values():
            if (raw := raw_logits(gate, shown)).requires_grad:
                raw.retain_grad()
        self._kept = (shown, taught)

    def look(self, run: Run, step: int, pictures: Iterable) -> str | None:
        """Measure and judge each gate; a sentence if the run should stop."""
        (shown, taught), self._kept = self._kept, None
        self.line, whys = {}, []
        for name, gate in self.gates.items():
            found = self._measured(gate, shown, taught, run)
            verdict, alarm = self.watch.look(name, found, teacher=measures(gate, taught))
            self.line |= {f"{name}/{measure}": value for measure, value in found.items()}
            self.line[f"{name}/verdict"] = float(ORDER.index(verdict))
            if alarm:
                self._note(run, step, name, verdict, f"Step {step}: {alarm}")
            if verdict == DEAD:
                whys.append(self._act(run, step, name, pictures))
        return next(filter(None, whys), None)

    def _measured(self, gate: Gate, shown: Shown, taught: Shown, run: Run) -> dict[str, float | None]:
        """The mean over the processes, so that all of them judge alike."""
        found = measures(gate, shown, teacher=taught, limits=self._limits(gate), gradient=raw_logits(gate, shown).grad)
        numbers = torch.tensor([float("nan") if found[name] is None else found[name] for name in MEASURES])
        means = run.accelerator.reduce(numbers.to(run.accelerator.device), "mean").tolist()
        return {name: None if value != value else value for name, value in zip(MEASURES, means)}

    def _limits(self, gate: Gate) -> tuple[float, float] | None:
        node = output_of(self.graph, gate.path)
        if not self.recipe.integers or node.op != "call_module":
            return None
        return getattr(self.graph.graph_module, node.target).encoding.range

    def _note(self, run: Run, step: int, gate: str, verdict: str, sentence: str) -> None:
        self.alarms.append({"step": step, "gate": gate, "verdict": verdict, "sentence": sentence})
        if run.log:
            run.progress.write(sentence, sys.stderr)
            write_whole(run.checkpoint.parent / "alarms.json", json.dumps(self.alarms, indent=1) + "\n")

    def _act(self, run: Run, step: int, gate: str, pictures: Iterable) -> str | None:
        if self.recipe.on_alarm == "stop":
            return (
                f"Stopped after step {step + 1}: the {gate} gate is dead. Give on_alarm='heal', or look at gates.csv."
            )
        if self.recipe.on_alarm == "heal":
            self.heals[gate] = self.heals.get(gate, 0) + 1
            if self.heals[gate] > MOST_HEALS:
                return f"Stopped after step {step + 1}: the {gate} gate died again after {MOST_HEALS} restorations."
            self._heal(run, gate, pictures)
            self._note(run, step, gate, "healed", f"Step {step}: the {gate} gate and its branch were restored.")
        return None

    def _heal(self, run: Run, name: str, pictures: Iterable) -> None:
        """Restore the gate's and its branch's weights, raise the losses that hold them, and observe their ranges."""
        gate, weights = self.gates[name], self.graph.weights()
        with torch.no_grad():
            for own in (one for one in weights if is_own(one, gate)):
                weights[own].copy_(self.healthy[own])
                run.state.average[f"graph_module.{own}"].copy_(self.healthy[own])
                run.state.optimizer.state.pop(weights[own], None)
        self.louder *= LOUDER
        self.watch.forgive(name)
        if self.recipe.integers:
            observe_again(self.graph, gate, pictures)

    def raised(self, weight: float) -> float:
        """The weight of a loss that holds the gates, as it is after so many restorations."""
        return weight if self.louder == 1.0 else self.louder * max(weight, 1.0)

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        kept = {"alarms": self.alarms, "heals": self.heals, "louder": self.louder, "line": self.line}
        return {**kept, "watch": self.watch.state()}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on from what ``state`` returned."""
        self.alarms, self.heals = list(state["alarms"]), dict(state["heals"])
        self.louder, self.line = state["louder"], dict(state["line"])
        self.watch.load_state(state["watch"])


def raw_logits(gate: Gate, shown: Shown) -> Tensor:
    """A gate's logits before they are rounded, where a view shows them."""
    return shown.get(RAW.format(gate.path), shown[gate.path])


def is_own(name: str, gate: Gate) -> bool:
    """Whether a weight serves this gate and its branch alone."""
    return any(name.startswith(f"{path}.") for path in gate.own)


def observe_again(graph: NPUGraph, gate: Gate, pictures: Iterable) -> None:
    """Calibrate what the gate's own modules return; all other ranges stay."""
    sites = graph.sites()
    others = {
        name: quantiser.encoding for name, quantiser in graph.quantisers.items() if not is_own(f"{sites[name]}.", gate)
    }
    calibrate(graph, pictures, progress=False)
    for name, encoding in others.items():
        graph.quantisers[name].encoding = encoding
