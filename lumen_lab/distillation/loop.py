"""The training loop: deterministic from (seed, step), checkpointed, resumable, with an averaged copy of the weights.

What is trained, and by which loss, is a ``Task``. Accelerate places it on whatever is there: one CPU, a GPU in mixed
precision, or several processes started by ``accelerate launch``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from lumen_lab.distillation.checkpoint import TrainingState, load_state, save_state
from lumen_lab.distillation.processes import (
    asked_to_stop,
    check_accelerator,
    check_intervals,
    check_start,
    own_random_state,
    worker_deaths_in_words,
)
from lumen_lab.distillation.recipe import Schedule, recipe_record
from lumen_lab.distillation.run_log import RunLog
from lumen_lab.distillation.stopping import STOPS, deaf_to_interrupts, held_back
from lumen_lab.errors import LumenError

CHECKPOINT = "checkpoint.pt"
Terms = dict[str, Tensor]
Validation = Callable[[nn.Module], Mapping[str, float | None]]
Seen = Callable[[str, int, Mapping[str, float | None]], None]


class Task:
    """What a run trains, and how; the loop asks nothing else of it.

    ``network`` is trained in place: checkpoints keep its state dict, and the average follows it. ``view`` is what is
    called with images, on one device or several; it holds the network. ``kinds`` names what ``measured`` reports
    besides the terms of the loss.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self, network: nn.Module, recipe: Schedule, *, view: nn.Module | None = None):
        self.network, self.recipe = network, recipe
        self.view = network if view is None else view

    def scenes_at(self, size: tuple[int, int] | None) -> Dataset:
        """Scenes, item i of which depends on i alone."""
        raise NotImplementedError

    def groups(self) -> list[dict]:
        """Of parameters, for the optimizer: ``params``, ``weight_decay``, ``rate_scale``."""
        raise NotImplementedError

    def terms(self, view: nn.Module, scene: Mapping[str, Tensor], step: int) -> Terms:
        """The weighted terms of the loss over a batch; a mean over its scenes, so that parts of it can be averaged."""
        raise NotImplementedError

    def updated(self, run: Run, step: int) -> str | None:
        """What is to be done once step's update is made; a sentence if the run should stop here."""

    def measured(self, step: int) -> Mapping[str, Mapping[str, float | None]]:
        """Kind → values to log of that step, where there are any."""
        return {}

    def result(self, average: Mapping[str, Tensor]) -> nn.Module:
        """The network with averaged weights, as it is given back."""
        raise NotImplementedError

    def judged(self, average: Mapping[str, Tensor]) -> nn.Module:
        """The same as it is validated."""
        return self.result(average)

    def state(self) -> dict[str, object]:
        """What else the next step depends on, for the checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on from what ``state`` returned."""


def run_task(
    task: Task,
    out_dir: str | Path,
    *,
    accelerator: Accelerator | None = None,
    validate: Validation | None = None,
    validate_every: int = 500,
    made_from: Mapping[str, str] | None = None,
    workers: int = 1,
    checkpoint_every: int = 200,
    log_every: int = 20,
    stop_after: int | None = None,
    seen: Seen | None = None,
    title: str = "training",
) -> nn.Module:
    """Run ``task`` as far as its recipe goes, or what is left of it, and return its result; options as for ``train``.

    ``seen`` is called with all that is logged: (kind, step, values).
    """
    accelerator, out_dir, recipe = accelerator or Accelerator(), Path(out_dir), task.recipe
    check_accelerator(accelerator, recipe)
    check_intervals(validate_every, checkpoint_every, log_every)
    out_dir.mkdir(parents=True, exist_ok=True)
    last = min(recipe.steps, recipe.steps if stop_after is None else stop_after)

    def due(made: int) -> bool:
        return validate is not None and made > 0 and (made % validate_every == 0 or made == recipe.steps)

    with own_random_state(accelerator.device), held_back(*STOPS) as stops:
        run = begin(task, out_dir, accelerator, made_from=made_from, seen=seen, title=title)
        loaded = batches(task, run.start, last, workers, accelerator)
        with closing(run), closing(loaded), worker_deaths_in_words():
            if due(run.start) and not run.is_scored(run.start):  # kept, and then the score failed
                run.score(run.start, validate)
            for step, scene in loaded:
                (terms, why), made = run.make(step, scene), step + 1
                if step % log_every == 0:
                    run.report(step, terms)
                run.report_measured(step)
                stopping = asked_to_stop(stops, accelerator)
                if stopping or why or due(made) or made % checkpoint_every == 0 or made == last:
                    run.keep(made)
                if due(made):
                    run.score(made, validate)
                if stopping or why:
                    why = why or f"Stopped after step {made}, which is kept; call again to go on."
                    run.progress.write(why, sys.stderr)
                    break
    accelerator.wait_for_everyone()
    with own_random_state(accelerator.device):
        return task.result(broadcast(run.state.average))


@dataclass(frozen=True)
class Run:
    """One call of ``run_task``: what its parts share. ``log`` and ``progress`` write in the first process alone."""

    task: Task
    accelerator: Accelerator
    view: nn.Module
    state: TrainingState
    checkpoint: Path
    start: int
    log: RunLog | None
    progress: tqdm
    seen: Seen | None

    def make(self, step: int, scene: Mapping[str, Tensor]) -> tuple[Terms, str | None]:
        """One update of the weights and of their average: the terms of the loss over this process's share, and why the
        run should stop, if the task says so."""
        terms = one_step(self.task, self.view, self.state.optimizer, scene, step, self.accelerator)
        why = self.task.updated(self, step)
        decay = min(self.task.recipe.ema_decay, (1 + step) / (10 + step))
        update_average(self.state.average, self.state.model.state_dict(), decay)
        self.progress.update()
        return terms, why

    def report(self, step: int, terms: Mapping[str, Tensor]) -> None:
        """Log the terms' mean over the processes."""
        terms = {name: float(value) for name, value in self.accelerator.reduce(dict(terms), "mean").items()}
        self.note("train", step, {"learning_rate": self.task.recipe.rate_at(step), **terms})
        self.progress.set_postfix(loss=f"{sum(terms.values()):.3f}")

    def report_measured(self, step: int) -> None:
        """Log what the task has measured in that step."""
        for kind, values in self.task.measured(step).items():
            self.note(kind, step, values)

    def score(self, made: int, validate: Validation) -> None:
        """Log what ``validate`` says of the averaged network after so many steps."""
        if self.log:
            self.note("validation", made, validate(self.task.judged(self.state.average)))
            self.log.flush()

    def note(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """One line of the log, which whoever listens is told as well."""
        if self.log:
            self.log.add(kind, step, values)
            if self.seen:
                self.seen(kind, step, values)

    def is_scored(self, made: int) -> bool:
        """Whether the log has a score after so many steps; a process without a log has none to make."""
        return self.log is None or self.log.has("validation", made)

    def keep(self, made: int) -> None:
        """Write the checkpoint after so many steps."""
        if self.log:
            self.log.flush()
            save_state(self.checkpoint, self.state, made)

    def close(self) -> None:
        """End the progress bar and the log."""
        self.progress.close()
        if self.log:
            self.log.close()


def begin(
    task: Task,
    out_dir: Path,
    accelerator: Accelerator,
    *,
    made_from: Mapping[str, str] | None = None,
    seen: Seen | None = None,
    title: str = "training",
) -> Run:
    """Place the task's network and its optimizer, and take up what ``out_dir`` keeps of an earlier call."""
    recipe = task.recipe
    optimizer = torch.optim.AdamW(task.groups(), lr=recipe.learning_rate, fused=True)
    view, optimizer = accelerator.prepare(task.view, optimizer)
    average = {name: value.detach().clone() for name, value in task.network.state_dict().items()}
    key = {"recipe": recipe_record(recipe), "precision": accelerator.mixed_precision}
    key["processes"] = accelerator.num_processes
    state = TrainingState(key, task.network, optimizer, average, accelerator.scaler, made_from or {}, task)
    start = load_state(out_dir / CHECKPOINT, state)
    check_start(start, out_dir, accelerator)
    first = accelerator.is_main_process
    begins = {"train": start, "validation": start + 1, **dict.fromkeys(task.kinds, start)}
    log = RunLog(out_dir, begins) if first else None
    progress = tqdm(total=recipe.steps, initial=start, desc=title, unit="step", mininterval=2, disable=not first)
    return Run(task, accelerator, view, state, out_dir / CHECKPOINT, start, log, progress, seen)


def one_step(task: Task, view: nn.Module, optimizer, scene, step: int, accelerator: Accelerator) -> Terms:
    """One update, the batch in as many parts as the recipe says; dropout and stochastic depth draw from generators
    that are seeded at each step."""
    recipe, total = task.recipe, {}
    torch.manual_seed(step_seed(recipe.seed, step, accelerator.process_index))
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate_at(step) * group["rate_scale"]
    optimizer.zero_grad(set_to_none=True)
    for part in range(recipe.accumulate):
        share = {name: value[part :: recipe.accumulate].to(accelerator.device) for name, value in scene.items()}
        is_last = part == recipe.accumulate - 1
        with nullcontext() if is_last else accelerator.no_sync(view):
            terms = {name: value / recipe.accumulate for name, value in task.terms(view, share, step).items()}
            loss = sum(terms.values())
            accelerator.backward(loss)
        check_finite("loss", loss.detach(), step)
        total = {name: value.detach() + total.get(name, 0) for name, value in terms.items()}
    accelerator.unscale_gradients(optimizer)
    norm = nn.utils.clip_grad_norm_(view.parameters(), recipe.max_gradient_norm)
    if not accelerator.scaler:  # half precision scales its loss: there an overflow is skipped, and no sign of trouble
        check_finite("gradient", norm, step)
    optimizer.step()
    return total


def check_finite(name: str, value: Tensor, step: int) -> None:
    """``LumenError`` for a loss or gradient that is no number, before it reaches the weights."""
    if not math.isfinite(value):
        raise LumenError(
            f"The {name} became {float(value)} at step {step}; the last checkpoint is unharmed. "
            "Lower the learning rate or the gradient norm of the recipe."
        )


def step_seed(seed: int, step: int, process: int) -> int:
    """What a process draws in a step: another seed for each of a million steps and of 64 processes."""
    return (seed * 1_000_003 + step) * 64 + process


def batches(
    task: Task, start: int, last: int, workers: int, accelerator: Accelerator
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(step, batch): the scenes of each step at its size; a process takes every n-th of them."""
    recipe, own, processes = task.recipe, accelerator.process_index, accelerator.num_processes
    step = start
    while step < last:
        size = recipe.size_at(step)
        end = next((s for s in range(step, last) if recipe.size_at(s) != size), last)
        loader = DataLoader(
            task.scenes_at(size),
            batch_sampler=[recipe.scenes_at_step(s)[own::processes] for s in range(step, end)],
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=accelerator.device.type == "cuda",
            worker_init_fn=deaf_to_interrupts,
        )
        for batch in loader:
            yield step, batch
            step += 1


def update_average(average: dict[str, Tensor], current: dict[str, Tensor], decay: float) -> None:
    """Exponential moving average of weights and statistics; counters are copied."""
    for name, value in current.items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - decay)
        else:
            average[name].copy_(value)
