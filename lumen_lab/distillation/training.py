"""The training loop: deterministic from (seed, step), checkpointed, resumable, with an averaged copy of the weights.

The network trains in its grid-sample form (``decompose_deform_conv``), the same function with a backward pass that
uses every core, and comes back in its own form. Accelerate places it on whatever is there: one CPU, a GPU in mixed
precision, or several processes started by ``accelerate launch``.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from lumen_lab.distillation.attention_limit import largest_logits, limit_logits
from lumen_lab.distillation.checkpoint import TrainingState, load_state, save_state
from lumen_lab.distillation.gates import gate_loss, gate_maps
from lumen_lab.distillation.losses import supervised_loss
from lumen_lab.distillation.recipe import Recipe, recipe_record
from lumen_lab.distillation.run_log import RunLog
from lumen_lab.distillation.stopping import STOPS, deaf_to_interrupts, held_back
from lumen_lab.errors import LumenError
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV, GridSampleConv
from lumen_lab.rewrites.plan import place
from lumen_lab.rewrites.record import Rewrite, Site

CHECKPOINT = "checkpoint.pt"
LIMIT_EVERY = 10  # steps between two looks at the attention logits: they grow over hundreds
Validation = Callable[[nn.Module], Mapping[str, float | None]]


def train(
    network: nn.Module,
    scenes_at: Callable[[tuple[int, int]], Dataset],
    recipe: Recipe,
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
) -> nn.Module:
    """Train a copy of ``network`` and return it with the averaged weights, on the CPU and in eval mode.

    ``scenes_at((H, W))`` gives a dataset of scenes (``image``, ``matte``) whose item i depends on i alone. The state is
    kept in ``out_dir/checkpoint.pt``; a second call goes on from it, with as many threads to the same bits, and refuses
    a checkpoint of another recipe, precision, number of processes or network (``ArtifactError``), and one that names
    another start or sources than ``made_from`` does (name → words). Ctrl-C and SIGTERM wait until the step is made and
    kept; after a kill, the steps since the last checkpoint are made again. ``stop_after`` ends early.

    ``accelerator`` says where and in which precision; by default what ``accelerate launch`` or the machine offers, in
    float32. Each process takes its share of every batch; batch statistics are those of the share. ``validate`` scores
    the averaged network every ``validate_every`` steps, in the first process, once the step is kept. The log is
    ``train.csv`` (a line is of the step with that index), ``validation.csv`` (after so many steps) and TensorBoard.
    torch's global random state is left as it was found. ``LumenError`` if the loss or gradient is no longer finite, or
    a loading process dies.
    """
    accelerator, out_dir = accelerator or Accelerator(), Path(out_dir)
    check_accelerator(accelerator, recipe)
    check_intervals(validate_every, checkpoint_every, log_every)
    out_dir.mkdir(parents=True, exist_ok=True)
    last = min(recipe.steps, recipe.steps if stop_after is None else stop_after)

    def due(made: int) -> bool:
        return validate is not None and made > 0 and (made % validate_every == 0 or made == recipe.steps)

    with own_random_state(accelerator.device), held_back(*STOPS) as stops:
        run = begin(network, recipe, out_dir, accelerator, made_from=made_from)
        loaded = batches(scenes_at, recipe, run.start, last, workers, accelerator)
        with closing(run), closing(loaded), worker_deaths_in_words():
            if due(run.start) and not run.is_scored(run.start):  # kept, and then the score failed
                run.score(run.start, validate)
            for step, scene in loaded:
                terms, made = run.make(step, scene), step + 1
                if step % log_every == 0:
                    run.report(step, terms)
                stopping = asked_to_stop(stops, accelerator)
                if stopping or due(made) or made % checkpoint_every == 0 or made == last:
                    run.keep(made)
                if due(made):
                    run.score(made, validate)
                if stopping:
                    run.progress.write(f"Stopped after step {made}, which is kept; call again to go on.", sys.stderr)
                    break
    accelerator.wait_for_everyone()
    with own_random_state(accelerator.device):
        return averaged_network(network, recipe, broadcast(run.state.average))


@dataclass(frozen=True)
class Run:
    """One call of ``train``: what its parts share. ``log`` and ``progress`` write in the first process alone."""

    network: nn.Module
    recipe: Recipe
    accelerator: Accelerator
    model: nn.Module
    state: TrainingState
    checkpoint: Path
    start: int
    log: RunLog | None
    progress: tqdm

    def make(self, step: int, scene: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One update of the weights and of their average; the terms of the loss over this process's share."""
        due = self.recipe.max_attention_logit is not None and step % LIMIT_EVERY == 0
        with largest_logits(self.state.model) if due else nullcontext({}) as seen:
            terms = one_step(self.model, self.state.optimizer, scene, self.recipe, step, self.accelerator)
        largest = {path: self.accelerator.gather(value[None]).amax(0) for path, value in seen.items()}
        limit_logits(self.state.model, largest, self.recipe.max_attention_logit)
        decay = min(self.recipe.ema_decay, (1 + step) / (10 + step))
        update_average(self.state.average, self.state.model.state_dict(), decay)
        self.progress.update()
        return terms

    def report(self, step: int, terms: Mapping[str, Tensor]) -> None:
        """Log the terms' mean over the processes."""
        terms = {name: float(value) for name, value in self.accelerator.reduce(dict(terms), "mean").items()}
        if self.log:
            self.log.add("train", step, {"learning_rate": self.recipe.rate_at(step), **terms})
            self.progress.set_postfix(loss=f"{sum(terms.values()):.3f}")

    def score(self, made: int, validate: Validation) -> None:
        """Log what ``validate`` says of the averaged network after so many steps."""
        if self.log:
            self.log.add("validation", made, validate(averaged_network(self.network, self.recipe, self.state.average)))
            self.log.flush()

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
    network: nn.Module,
    recipe: Recipe,
    out_dir: Path,
    accelerator: Accelerator,
    *,
    made_from: Mapping[str, str] | None = None,
) -> Run:
    """Place a copy of ``network`` and its optimizer, and take up what ``out_dir`` keeps of an earlier call."""
    inner = trainable_form(network, recipe)
    optimizer = torch.optim.AdamW(parameter_groups(inner, recipe), lr=recipe.learning_rate, fused=True)
    model, optimizer = accelerator.prepare(inner, optimizer)
    average = {name: value.detach().clone() for name, value in inner.state_dict().items()}
    key = {"recipe": recipe_record(recipe), "precision": accelerator.mixed_precision}
    key["processes"] = accelerator.num_processes
    state = TrainingState(key, inner, optimizer, average, accelerator.scaler, made_from or {})
    start = load_state(out_dir / CHECKPOINT, state)
    check_start(start, out_dir, accelerator)
    first = accelerator.is_main_process
    log = RunLog(out_dir, {"train": start, "validation": start + 1}) if first else None
    progress = tqdm(total=recipe.steps, initial=start, desc="training", unit="step", mininterval=2, disable=not first)
    return Run(network, recipe, accelerator, model, state, out_dir / CHECKPOINT, start, log, progress)


def check_accelerator(accelerator: Accelerator, recipe: Recipe) -> None:
    """Refuse a batch that cannot be shared out, and a way of training that this loop does not carry."""
    if accelerator.mixed_precision != "no" and not accelerator.native_amp:
        raise LumenError(
            f"{accelerator.mixed_precision} was asked for, and on this device accelerate would compute in float32; "
            "take bf16 or no."
        )
    processes, kind = accelerator.num_processes, accelerator.distributed_type.value
    launched = int(os.environ.get("WORLD_SIZE", processes))
    if launched != processes:
        raise LumenError(
            f"The launcher started {launched} processes that do not know of each other and would write the same files; "
            "to share a batch among CPUs, set ACCELERATE_USE_CPU=true."
        )
    if recipe.batch % processes or recipe.batch < 2 * processes:
        raise LumenError(
            f"A batch of {recipe.batch} cannot be shared by {processes} processes; take a multiple of {processes}, "
            "at least 2 scenes for each."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise LumenError(
            f"The accelerator gathers gradients over {accelerator.gradient_accumulation_steps} steps; "
            "make it without, and give the recipe the batch that is wanted."
        )
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise LumenError(f"Each process needs the whole network, and {kind} cuts it up; launch it as data parallel.")


def check_intervals(*every: int) -> None:
    """Refuse to do something every 0 steps."""
    if min(every) < 1:
        raise LumenError(
            f"Validation, checkpoints and log lines come every {', '.join(map(str, every))} steps; 1 or more."
        )


def check_start(start: int, out_dir: Path, accelerator: Accelerator) -> None:
    """Refuse processes that found different checkpoints, as on machines that do not share a disk."""
    starts = accelerator.gather(torch.tensor([start], device=accelerator.device)).tolist()
    if len(set(starts)) > 1:
        raise LumenError(
            f"The processes found checkpoints of the steps {starts} in {out_dir}; give a folder that all of them see."
        )


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Give torch's global generators back as they were: a run seeds them at every step."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def worker_deaths_in_words() -> Iterator[None]:
    """Say in one sentence that a loading process died; torch raises a RuntimeError wherever the loop then is."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        said = str(error).strip().rstrip(".")
        raise LumenError(
            f"A process that loads scenes died ({said}); memory is the usual cause: call again, with fewer workers. "
            "The last checkpoint is unharmed."
        ) from error


def asked_to_stop(stops: list[int], accelerator: Accelerator) -> bool:
    """Whether a signal came to any process; all must leave after the same step, or one would wait for ever."""
    if accelerator.num_processes > 1:
        asked = torch.tensor(float(bool(stops)), device=accelerator.device)
        if float(accelerator.reduce(asked, "sum")) and not stops:
            stops.append(signal.SIGINT)
    return bool(stops)


def trainable_form(network: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy in its grid-sample form and in training mode, with dropout and stochastic depth as the recipe says."""
    model = converted(network, DECOMPOSE_DEFORM_CONV)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and recipe.dropout is not None:
            module.p = recipe.dropout
        if isinstance(module, DropPath) and recipe.drop_path is not None:
            module.drop_prob = recipe.drop_path
    return model.train()


def converted(network: nn.Module, rule: Rewrite) -> nn.Module:
    """A copy on the CPU in which ``rule`` has replaced every module of its kind.

    ``rewrite`` would trace a forward pass to make the constants of one size ahead; here each size makes its own when
    it comes.
    """
    with torch.inference_mode(False), torch.no_grad():
        model = copy.deepcopy(network).cpu()
        for path, module in list(model.named_modules()):
            if isinstance(module, rule.replaces):
                for place_of, built in rule.built(Site(path, module, (), None)).items():
                    place(model, place_of, built, rule.name)
    return model


def averaged_network(network: nn.Module, recipe: Recipe, average: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``network`` in eval mode on the CPU, with the weights ``average`` of its trainable form."""
    form = trainable_form(network, recipe)
    form.load_state_dict({name: value.cpu() for name, value in average.items()})
    if not any(isinstance(module, GridSampleConv) for module in network.modules()):
        form = converted(form, RECOMPOSE_DEFORM_CONV)
    result = copy.deepcopy(network).cpu().eval()
    result.load_state_dict(form.state_dict())
    return result


def one_step(model, optimizer, scene, recipe: Recipe, step: int, accelerator: Accelerator) -> dict[str, Tensor]:
    """One update; dropout and stochastic depth draw from generators that are seeded at each step."""
    torch.manual_seed(step_seed(recipe.seed, step, accelerator.process_index))
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate_at(step) * group["rate_scale"]
    image, matte = (scene[name].to(accelerator.device) for name in ("image", "matte"))
    with gate_maps(accelerator.unwrap_model(model)) if recipe.weights.gate else nullcontext() as gates:
        outputs = model(image)
    terms = supervised_loss(outputs, image, matte, recipe.weights)
    if gates:
        terms["gate"] = recipe.weights.gate * gate_loss(gates)
    loss = sum(terms.values())
    optimizer.zero_grad(set_to_none=True)
    accelerator.backward(loss)
    accelerator.unscale_gradients(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
    # Half precision scales its loss: there an overflow of the gradient is skipped, and no sign of trouble.
    found = {"loss": loss.detach()} | ({} if accelerator.scaler else {"gradient": norm})
    for name, value in found.items():
        if not math.isfinite(value):
            raise LumenError(
                f"The {name} became {float(value)} at step {step}; the last checkpoint is unharmed. "
                "Lower the learning rate or the gradient norm of the recipe."
            )
    optimizer.step()
    return {name: value.detach() for name, value in terms.items()}


def step_seed(seed: int, step: int, process: int) -> int:
    """What a process draws in a step: another seed for each of a million steps and of 64 processes."""
    return (seed * 1_000_003 + step) * 64 + process


def batches(
    scenes_at, recipe: Recipe, start: int, last: int, workers: int, accelerator: Accelerator
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(step, batch): step s takes scenes s·batch … s·batch + batch − 1 at its size; a process every n-th of them."""
    own, processes = accelerator.process_index, accelerator.num_processes
    step = start
    while step < last:
        size = recipe.size_at(step)
        end = next((s for s in range(step, last) if recipe.size_at(s) != size), last)
        indices = [range(s * recipe.batch + own, (s + 1) * recipe.batch, processes) for s in range(step, end)]
        loader = DataLoader(
            scenes_at(size),
            batch_sampler=indices,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=accelerator.device.type == "cuda",
            worker_init_fn=deaf_to_interrupts,
        )
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


def best_precision() -> str:
    """The mixed precision that this machine computes natively, in accelerate's word: "bf16", "fp16" or "no"."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16") else "no"
