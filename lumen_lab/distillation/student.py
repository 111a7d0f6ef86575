"""The task of distillation: an NPU graph trained against its teacher, ranges and gates looked after on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lumen_lab.distillation.gate_watch import GateWatch
from lumen_lab.distillation.gates import Gate
from lumen_lab.distillation.loop import Run, Task, Terms
from lumen_lab.distillation.recipe import DistillRecipe
from lumen_lab.distillation.teacher_cache import TeacherOutputs
from lumen_lab.distillation.transfer import (
    Projections,
    attention_distance,
    feature_distance,
    gate_distance,
    mask_terms,
    side_term,
)
from lumen_lab.distillation.views import LOGITS, GraphView, Shown
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import QUANTISER, without_quantisers

SMALLEST_SIZE = 1e-4  # a bias of zeros moves as if it were as large


class StudentView(nn.Module):
    """What is called with images: the student's view, the projections that are learnt beside it, and the teacher's
    side heads (tap → head), which learn nothing."""

    def __init__(self, shown: GraphView, projections: Projections, heads: Mapping[str, nn.Module]):
        super().__init__()
        self.shown, self.projections = shown, projections
        self.head_taps = tuple(heads)
        self.heads = nn.ModuleList(copy.deepcopy(head) for head in heads.values()).requires_grad_(False).eval()

    @property
    def side_heads(self) -> dict[str, nn.Module]:
        """By the tap that each reads."""
        return dict(zip(self.head_taps, self.heads))

    def forward(self, image: Tensor) -> tuple[Shown, Shown]:
        """Logits and taps; and the taps in the teacher's widths."""
        shown = self.shown(image)
        return shown, {tap: self.projections(tap, shown[tap]) for tap in self.projections.taps}


class DistillTask(Task):
    """A copy of ``student`` trained as ``recipe`` says; see ``distill`` for the rest."""

    recipe: DistillRecipe
    kinds = ("gates",)

    def __init__(
        self,
        student: NPUGraph,
        teacher: TeacherOutputs,
        scenes: Dataset,
        recipe: DistillRecipe,
        *,
        gates: Mapping[str, Gate],
        side_heads: Mapping[str, nn.Module],
        pictures: Iterable = (),
        healthy: Mapping[str, Tensor] | None = None,
    ):
        graph = copy.deepcopy(student).train()
        if recipe.integers and recipe.ranges == "learnt":
            graph.learn_scales()
        self.scenes, self.teacher, self.pictures = scenes, teacher, pictures
        self.gates, self.taps = dict(gates), recipe.taps
        paths = paths_of(recipe.taps, gates, side_heads)
        view = GraphView(
            graph,
            paths,
            raw=[gate.path for gate in gates.values()],
            in_float=not recipe.integers,
            parts=recipe.recompute,
        )
        with torch.random.fork_rng([]), torch.no_grad():
            blank = torch.zeros(1, graph.channels, *graph.size)
            projections = Projections(view(blank), teacher(blank), self.taps)
        super().__init__(graph, recipe, view=StudentView(view, projections, side_heads))
        self.watch = GateWatch(self.gates, recipe, graph, healthy or graph.weights())

    def scenes_at(self, size: tuple[int, int] | None) -> Dataset:
        return self.scenes

    def groups(self) -> list[dict]:
        """One a parameter, whose rate goes by its own size: folded batch norms leave weights of very different ones."""
        recipe, names = self.recipe, {id(one): name for name, one in self.view.named_parameters()}
        groups = []
        for one in (one for one in self.view.parameters() if one.requires_grad):
            is_scale = QUANTISER in names[id(one)]
            size = max(float(one.detach().square().mean().sqrt()), SMALLEST_SIZE)
            decay = recipe.weight_decay if one.ndim >= 2 else 0.0
            groups.append(
                {
                    "params": [one],
                    "weight_decay": 0.0 if is_scale else decay / size,
                    "rate_scale": size * (recipe.range_rate if is_scale else 1.0),
                }
            )
        return groups

    def terms(self, view: nn.Module, scene: Mapping[str, Tensor], step: int) -> Terms:
        image, matte, told = scene["image"], scene["matte"], self.recipe.weights
        if step >= self.recipe.frozen_from:
            self.freeze_ranges()
        shown, projected = view(image)
        taught = self.teacher(image)
        if step % self.recipe.health_every == 0:
            self.watch.keep(shown, taught)
        terms = mask_terms(shown[LOGITS], matte, taught[LOGITS], told)
        if told.side and self.view.side_heads:
            terms["side"] = told.side * side_term(shown, self.view.side_heads, matte, told.truth)
        gates = [gate.path for gate in self.gates.values()]
        for name, distance, values, taps, weight in (
            ("feature", feature_distance, projected, self.taps, self.watch.raised(told.feature)),
            ("attention", attention_distance, shown, self.taps, told.attention),
            ("gate", gate_distance, shown, gates, self.watch.raised(told.gate)),
        ):
            if weight and taps:
                terms[name] = weight * torch.stack([distance(values[tap], taught[tap]) for tap in taps]).mean()
            elif taps and name != "attention" and self.recipe.on_alarm == "heal":  # raised later, and logged throughout
                terms[name] = torch.zeros((), device=matte.device)
        return terms

    def updated(self, run: Run, step: int) -> str | None:
        recipe = self.recipe
        observed = recipe.integers and recipe.ranges == "observed" and 0 < step < recipe.frozen_from
        if observed and step % recipe.observe_every == 0:
            calibrate(self.network, self.pictures, progress=False)
        if step % recipe.health_every == 0:
            return self.watch.look(run, step, self.pictures)
        return None

    def freeze_ranges(self) -> None:
        """Ranges that are learnt stay as they are."""
        for quantiser in self.network.quantisers.values():
            quantiser.scale.requires_grad_(False)

    def measured(self, step: int) -> Mapping[str, Mapping[str, float | None]]:
        return {"gates": self.watch.line} if step % self.recipe.health_every == 0 and self.gates else {}

    def result(self, average: Mapping[str, Tensor]) -> NPUGraph:
        graph = copy.deepcopy(self.network).cpu()
        ranges = {} if self.recipe.ranges == "learnt" else self.network.state_dict()
        own = {name: ranges[name] for name in ranges if name.startswith(f"graph_module.{QUANTISER}")}
        graph.load_state_dict({name: value.cpu() for name, value in {**average, **own}.items()})
        graph.freeze_scales()
        return graph.eval()

    def judged(self, average: Mapping[str, Tensor]) -> nn.Module:
        graph = self.result(average)
        return graph if self.recipe.integers else without_quantisers(graph.graph_module)

    def state(self) -> dict[str, object]:
        return {"watch": self.watch.state(), "projections": self.view.projections.state_dict()}

    def load_state(self, state: Mapping[str, object]) -> None:
        self.watch.load_state(state["watch"])
        self.view.projections.load_state_dict(state["projections"])


def paths_of(taps: Iterable[str], gates: Mapping[str, Gate], side_heads: Iterable[str]) -> tuple[str, ...]:
    """Every module whose output the losses and the watch want, once."""
    return tuple(dict.fromkeys((*taps, *side_heads, *(path for gate in gates.values() for path in gate.paths))))
