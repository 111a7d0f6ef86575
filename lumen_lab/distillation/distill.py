"""The door to distillation: a student's NPU graph, its teacher and scenes in, the trained graph and its history out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from lumen_lab.distillation.gates import GATES, Gate
from lumen_lab.distillation.history import History, read_history
from lumen_lab.distillation.loop import Seen, Validation, run_task
from lumen_lab.distillation.recipe import DistillRecipe, recipe_record
from lumen_lab.distillation.student import DistillTask, paths_of
from lumen_lab.distillation.teacher_cache import TeacherOutputs
from lumen_lab.errors import LumenError
from lumen_lab.quantization.npu_graph import NPUGraph

SIDE_HEADS = {f"decoder.decoder_block{level}": f"decoder.conv_ms_spvn_{level}" for level in (4, 3, 2)}
"""Of a BiRefNet: tap → the module that reads a mask off it."""


@dataclass(frozen=True)
class Distilled:
    """What a run gives: the student with its averaged weights, and what happened on the way."""

    graph: NPUGraph
    history: History


def distill(
    student: NPUGraph,
    teacher: nn.Module,
    scenes: Dataset,
    recipe: DistillRecipe,
    out_dir: str | Path,
    *,
    pictures: Iterable = (),
    gates: Mapping[str, Gate] | None = None,
    side_heads: Mapping[str, str] | None = None,
    healthy: Mapping[str, Tensor] | None = None,
    cache: str | Path | None = None,
    accelerator: Accelerator | None = None,
    validate: Validation | None = None,
    validate_every: int = 100,
    made_from: Mapping[str, str] | None = None,
    workers: int = 1,
    checkpoint_every: int = 100,
    log_every: int = 10,
    stop_after: int | None = None,
    seen: Seen | None = None,
) -> Distilled:
    """Train a copy of ``student`` against the float network ``teacher``; the copy, averaged, and its history.

    ``scenes``: item i → {"image" (3, H, W) normalised, "matte" (1, H, W)} of the student's size, depending on i alone;
    ``recipe.scenes`` of them, or as many as the steps need. ``pictures`` calibrate ranges that are observed again.
    ``gates`` (name → where it is) are watched, ``side_heads`` (tap → the teacher's module) read side masks; by default
    those of a BiRefNet, if the teacher is one. ``healthy``: weights (name → tensor) that a dead gate is restored to,
    by default those that the student began with. ``cache``: a folder for what the teacher says, shared by runs.
    ``seen(kind, step, values)`` is told all that is logged: "train", "gates" and "validation".

    Out_dir keeps ``checkpoint.pt``, ``train.csv``, ``gates.csv``, ``validation.csv``, ``alarms.json`` and TensorBoard's
    events; stopping, resuming and the options not named here are those of ``training.train``. ``LumenError`` for a
    student that is no NPU graph, scenes of another size, and a recipe that wants pictures where there are none.
    """
    check_given(student, scenes, recipe, pictures)
    gates = default_gates(teacher) if gates is None else gates
    heads = default_side_heads(teacher) if side_heads is None else side_heads
    task = DistillTask(
        student,
        TeacherOutputs(teacher, paths_of(recipe.taps, gates, heads), folder=cache),
        scenes,
        recipe,
        gates=gates,
        side_heads={tap: teacher.get_submodule(path) for tap, path in heads.items()},
        pictures=pictures,
        healthy=healthy,
    )
    graph = run_task(
        task,
        out_dir,
        accelerator=accelerator,
        validate=validate,
        validate_every=validate_every,
        made_from=made_from,
        workers=workers,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
        stop_after=stop_after,
        seen=seen,
        title="training in integers" if recipe.integers else "training in float",
    )
    stages = [said for said in (student.made_from.get("distilled"), recipe_record(recipe)) if said]
    graph.made_from = student.made_from | {"distilled": "; then ".join(stages)}
    return Distilled(graph, read_history(out_dir))


def check_given(student: object, scenes: Dataset, recipe: DistillRecipe, pictures: Iterable) -> None:
    """``LumenError`` for what would fail after the teacher has been asked."""
    if not isinstance(student, NPUGraph):
        raise LumenError(
            f"A student is an NPU graph, found {type(student).__name__}; quantize(rewrite(network, plan).model, "
            "pictures) makes one."
        )
    scene = scenes[0]
    found, wanted = tuple(scene["image"].shape[-2:]), student.size
    if found != wanted:
        raise LumenError(f"The student takes images of {wanted}, the scenes have {found}; compose them at its size.")
    if recipe.integers and not tuple(pictures) and (recipe.ranges == "observed" or recipe.on_alarm == "heal"):
        raise LumenError(
            f"ranges='{recipe.ranges}' and on_alarm='{recipe.on_alarm}' calibrate on the way; give pictures=."
        )


def default_gates(teacher: nn.Module) -> Mapping[str, Gate]:
    """The gates of a BiRefNet, none of another network."""
    modules = dict(teacher.named_modules())
    return GATES if all(path in modules for gate in GATES.values() for path in gate.paths) else {}


def default_side_heads(teacher: nn.Module) -> Mapping[str, str]:
    """The side heads of a BiRefNet, none of another network."""
    modules = dict(teacher.named_modules())
    return SIDE_HEADS if all(path in modules for path in SIDE_HEADS.values()) else {}


def unused_at_inference(network: nn.Module, graph: NPUGraph) -> tuple[str, ...]:
    """Modules with weights of which nothing is left in the graph: heads that are dead by design, used in training
    only, outermost first. ``network`` is the rewritten network that the graph was captured from."""
    used = set(graph.weights())
    own = {
        path: [f"{path}.{name}" for name, _ in module.named_parameters()] for path, module in network.named_modules()
    }
    unused = [path for path, names in own.items() if path and names and not used & set(names)]
    return tuple(path for path in unused if not any(path.startswith(f"{outer}.") for outer in unused))
