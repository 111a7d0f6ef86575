"""The state of a training run on disk: written whole, and taken up again only by the run that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from lumen_lab.distillation.recipe import recipe_difference
from lumen_lab.errors import ArtifactError
from lumen_lab.network.checkpoints import reason
from lumen_lab.specs import replacing


class Keeps(Protocol):
    """Whatever has a state besides weights, to be kept with them."""

    def state(self) -> dict[str, object]: ...

    def load_state(self, state: Mapping[str, object]) -> None: ...


@dataclass(frozen=True)
class TrainingState:
    """Everything that the next step depends on. ``run``: recipe, precision and number of processes.

    ``average`` is the state dict of the averaged weights; ``scaler`` scales the loss in float16, else None.
    ``made_from`` names what the run began with, in words; a checkpoint that does not say is taken at its word.
    ``task`` has a state of its own, of tensors, numbers and texts.
    """

    run: Mapping[str, object]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Mapping[str, Tensor]
    scaler: torch.amp.GradScaler | None = None
    made_from: Mapping[str, str] = field(default_factory=dict)
    task: Keeps | None = None


def save_state(path: Path, state: TrainingState, step: int) -> None:
    """Write the checkpoint whole: a reader sees the old state or the new one."""
    parts = {"model": state.model, "optimizer": state.optimizer, "scaler": state.scaler}
    dicts = {name: part.state_dict() for name, part in parts.items() if part is not None}
    with replacing(path) as temporary:
        rest = {"made_from": dict(state.made_from), "average": dict(state.average)}
        rest["task"] = state.task.state() if state.task else {}
        torch.save({**state.run, "step": step, **dicts, **rest}, temporary)


def load_state(path: Path, state: TrainingState) -> int:
    """Fill ``state`` from the checkpoint, if there is one; returns the step to go on from.

    ``ArtifactError`` for a checkpoint that is damaged, or of another run or network.
    """
    if not path.exists():
        return 0
    saved = read_checkpoint(path)
    try:
        refuse_another(path, saved, state)
        state.model.load_state_dict(saved["model"])
        state.optimizer.load_state_dict(saved["optimizer"])
        if state.scaler is not None:
            state.scaler.load_state_dict(saved["scaler"])
        for name, value in saved["average"].items():
            state.average[name].copy_(value)
        if state.task is not None:
            state.task.load_state(saved.get("task", {}))
        return saved["step"]
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is no checkpoint that this version writes ({reason(error)}); remove it to start anew."
        ) from None


def read_checkpoint(path: Path, *, remedy: str = "remove it to start anew") -> dict[str, object]:
    """The checkpoint as it was saved, on the CPU; ``ArtifactError`` with ``remedy`` if none can be read."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a cut file fails in a dozen ways
        raise ArtifactError(f"{path} cannot be read as a checkpoint ({reason(error)}); {remedy}.") from None


def refuse_another(path: Path, saved: Mapping[str, object], state: TrainingState) -> None:
    """Raise ``ArtifactError`` with the difference if the checkpoint is of another run or of another network."""
    began = {name: saved[name] for name in state.run} | saved.get("made_from", {})
    for name, now in {**state.run, **state.made_from}.items():
        then = began.get(name, now)
        if then != now:
            what = (
                f"another recipe ({recipe_difference(then, now)})" if name == "recipe" else f"{name} {then}, now {now}"
            )
            raise ArtifactError(
                f"{path} was made with {what}; go on as it began, give another out_dir, or remove it to start anew."
            )
    here, there = state.model.state_dict(), saved["model"]
    odd = [
        name for name in {**here, **there} if not (name in here and name in there and alike(here[name], there[name]))
    ]
    if odd:
        raise ArtifactError(
            f"{path} is of another network: {len(odd)} tensors differ in name or shape, {odd[0]} is the first; "
            "give another out_dir, or remove it to start anew."
        )


def alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape
