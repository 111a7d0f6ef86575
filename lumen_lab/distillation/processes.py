"""Where a run computes, and what may befall it there: processes that share a batch, signals, loaders that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

from lumen_lab.distillation.recipe import Schedule
from lumen_lab.errors import LumenError


def check_accelerator(accelerator: Accelerator, recipe: Schedule) -> None:
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
    if recipe.batch % (processes * recipe.accumulate) or recipe.batch < recipe.least_batch * processes:
        raise LumenError(
            f"A batch of {recipe.batch} cannot be shared by {processes} processes; take a multiple of "
            f"{processes * recipe.accumulate}, at least {recipe.least_batch} scenes for each."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise LumenError(
            f"The accelerator gathers gradients over {accelerator.gradient_accumulation_steps} steps; "
            f"make it without, and give the recipe accumulate={accelerator.gradient_accumulation_steps}."
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


def best_precision() -> str:
    """The mixed precision that this machine computes natively, in accelerate's word: "bf16", "fp16" or "no"."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16") else "no"
