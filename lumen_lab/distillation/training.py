"""The training loop: deterministic from (seed, step), checkpointed, resumable, with an averaged copy of the weights.

The network trains in its grid-sample form (``decompose_deform_conv``), the same function with a backward pass that
uses every core, and is saved under the published names.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from lumen_lab.distillation.losses import LossWeights, supervised_loss
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.plan import rewrite
from lumen_lab.specs import replacing


@dataclass(frozen=True)
class Recipe:
    """How to train. ``sizes`` lists (from this share of the steps on, (H, W)); the rate follows a cosine to zero.

    ``encoder_rate`` scales the rate of the transformer (parameters under ``bb.``): at the rate that suits the
    convolutions its attention logits grow past 100, where softmax is one-hot and the shifted-window mask of −100 leaks.
    """

    steps: int
    batch: int = 8
    learning_rate: float = 1e-3
    encoder_rate: float = 0.3
    weight_decay: float = 1e-2
    warmup_steps: int = 200
    sizes: tuple[tuple[float, tuple[int, int]], ...] = ((0.0, (128, 128)),)
    ema_decay: float = 0.998
    max_gradient_norm: float = 5.0
    weights: LossWeights = LossWeights()
    seed: int = 0

    def size_at(self, step: int) -> tuple[int, int]:
        """Training size (H, W) at ``step``."""
        return [size for start, size in self.sizes if step >= start * self.steps][-1]

    def rate_at(self, step: int) -> float:
        """Learning rate at ``step``: linear warm-up, then half a cosine."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def train(
    network: nn.Module,
    scenes_at: Callable[[tuple[int, int]], Dataset],
    recipe: Recipe,
    out_dir: str | Path,
    *,
    workers: int = 1,
    checkpoint_every: int = 200,
    log_every: int = 20,
    stop_after: int | None = None,
) -> nn.Module:
    """Train and return the averaged network, in eval mode and with the published layout.

    ``scenes_at((H, W))`` gives a dataset of scenes (``image``, ``matte``) whose item i depends on i alone. The state is
    kept in ``out_dir/checkpoint.pt``; a second call goes on from it to the same numbers, and refuses a checkpoint of
    another recipe. ``stop_after`` ends early, as a kill would. The log is ``out_dir/log.csv``.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    height, width = recipe.size_at(0)
    example = torch.zeros(2, 3, height, width)
    network = copy.deepcopy(network).eval()
    model = rewrite(network, (DECOMPOSE_DEFORM_CONV,), example_inputs=(example,)).model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.learning_rate)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    start = resume(out_dir, recipe, model, optimizer, average)
    last = min(recipe.steps, recipe.steps if stop_after is None else stop_after)
    log = open_log(out_dir / "log.csv", start)
    progress = tqdm(total=recipe.steps, initial=start, desc="training", unit="step", mininterval=2)
    for step, scene in batches(scenes_at, recipe, start, last, workers):
        terms = one_step(model, optimizer, scene["image"], scene["matte"], recipe, step)
        update_average(average, model.state_dict(), min(recipe.ema_decay, (1 + step) / (10 + step)))
        if step % log_every == 0:
            log(step, recipe.rate_at(step), terms)
            progress.set_postfix(loss=f"{sum(terms.values()):.3f}")
        progress.update()
        if (step + 1) % checkpoint_every == 0 or step + 1 == last:
            save_state(out_dir, recipe, model, optimizer, average, step + 1)
    progress.close()
    model.load_state_dict(average)
    return rewrite(model.eval(), (RECOMPOSE_DEFORM_CONV,), example_inputs=(example,)).model


def one_step(model, optimizer, image: Tensor, matte: Tensor, recipe: Recipe, step: int) -> dict[str, float]:
    """One update; dropout and stochastic depth draw from a generator seeded with (seed, step)."""
    torch.manual_seed(recipe.seed * 1_000_003 + step)
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate_at(step) * group["rate_scale"]
    terms = supervised_loss(model(image), image, matte, recipe.weights)
    loss = sum(terms.values())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
    for name, value in (("loss", float(loss.detach())), ("gradient", float(norm))):
        if not math.isfinite(value):
            raise LumenError(
                f"The {name} became {value} at step {step}; the last checkpoint is unharmed. "
                "Lower the learning rate or the gradient norm of the recipe."
            )
    optimizer.step()
    return {name: float(value.detach()) for name, value in terms.items()}


def batches(scenes_at, recipe: Recipe, start: int, last: int, workers: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(step, batch): step s takes scenes s·batch … s·batch + batch − 1 at the size of that step."""
    step = start
    while step < last:
        size = recipe.size_at(step)
        end = next((s for s in range(step, last) if recipe.size_at(s) != size), last)
        indices = [range(s * recipe.batch, (s + 1) * recipe.batch) for s in range(step, end)]
        ahead = 4 if workers else None
        loader = DataLoader(scenes_at(size), batch_sampler=indices, num_workers=workers, prefetch_factor=ahead)
        for batch in loader:
            yield step, batch
            step += 1


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict]:
    """Four groups: encoder or not, decayed or not; biases, norms and position tables do not decay."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim >= 2 and not name.endswith("relative_position_bias_table")
        groups.setdefault((name.startswith("bb."), decayed), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if decayed else 0.0,
            "rate_scale": recipe.encoder_rate if encoder else 1.0,
        }
        for (encoder, decayed), parameters in groups.items()
    ]


def update_average(average: dict[str, Tensor], current: dict[str, Tensor], decay: float) -> None:
    """Exponential moving average of weights and statistics; counters are copied."""
    for name, value in current.items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - decay)
        else:
            average[name].copy_(value)


def recipe_record(recipe: Recipe) -> str:
    """The recipe as JSON text, to tell whether a checkpoint belongs to it."""
    return json.dumps(dataclasses.asdict(recipe), sort_keys=True)


def save_state(out_dir: Path, recipe: Recipe, model, optimizer, average, step: int) -> None:
    """Write ``checkpoint.pt`` whole: a reader sees the old state or the new one."""
    state = {
        "recipe": recipe_record(recipe),
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "average": average,
    }
    with replacing(out_dir / "checkpoint.pt") as temporary:
        torch.save(state, temporary)


def resume(out_dir: Path, recipe: Recipe, model, optimizer, average) -> int:
    """Load ``checkpoint.pt`` if there is one; returns the step to go on from."""
    path = out_dir / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["recipe"] != recipe_record(recipe):
        raise ArtifactError(f"{path} was made with another recipe; give another out_dir, or remove it to start anew.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for name, value in state["average"].items():
        average[name].copy_(value)
    return state["step"]


def open_log(path: Path, start: int) -> Callable[[int, float, dict[str, float]], None]:
    """A function that appends one line to the CSV log; lines at or after ``start`` (of a killed run) are dropped."""
    kept = []
    if path.exists() and start:
        with path.open(newline="") as file:
            whole = [row for row in csv.DictReader(file) if None not in row.values()]  # a kill may cut the last line
        kept = [row for row in whole if int(row["step"]) < start]
    path.unlink(missing_ok=True)

    def write(step: int, rate: float, terms: dict[str, float]) -> None:
        row = {"step": step, "learning_rate": f"{rate:.3e}", **{name: f"{value:.5f}" for name, value in terms.items()}}
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row.keys())
            if new:
                writer.writeheader()
            writer.writerow(row)

    for row in kept:
        write(int(row.pop("step")), float(row.pop("learning_rate")), {k: float(v) for k, v in row.items()})
    return write
