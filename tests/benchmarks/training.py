"""Speed of training: ``python tests/benchmarks/training.py [--precision bf16] [--json PATH] [--profile]``.

Training steps of ``train`` on the micro preset, batches of 8 drawn scenes that one worker process composes. The peer is
measured in the same run, in turns with it: a bare loop (forward, the same losses, backward, AdamW) on batches that lie
ready in memory, without a worker, clipping, averaged weights, log or checkpoint; in the grid-sample form that ``train``
uses and in the form with torchvision's ``deform_conv2d`` that the network has otherwise (always in float32: it has no
bfloat16 on a CPU).

The ratio is the figure to compare. It is one of medians of the CPU time of a step (of this process, all threads), so
that other work on the machine counts little. ``waits for data`` is the share of wall time that the loop spends in
asking for the next batch: it should be near nothing on two cores, one of which composes. ``--profile`` says where the
time of ``train`` goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from lumen_lab.datasets import ComposedScenes, SourceBank
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.distillation import loop, training
from lumen_lab.distillation.losses import supervised_loss
from lumen_lab.distillation.recipe import Recipe
from lumen_lab.network import load_network
from lumen_lab.specs import tool_versions, write_whole

TOOLS = ("torch", "torchvision", "accelerate", "tensorboard", "numpy", "scipy")
WARM_UP = 3  # steps that are not counted: memory is found, kernels are chosen, the worker starts


def recipe_of(options: argparse.Namespace) -> Recipe:
    side = (options.side_px, options.side_px)
    return Recipe(steps=10_000, batch=options.batch, sizes=((0.0, side),), dropout=0.0, drop_path=0.0)


def scenes_at(bank: SourceBank, size: tuple[int, int]) -> ComposedScenes:
    return ComposedScenes(bank, size=size, length=1_000_000)


@contextmanager
def clocked(cpu: list[float], wall: list[float], waits: list[float], saves: list[float]) -> Iterator[None]:
    """Note how long ``train`` takes for each step, waits for each batch, and takes for each checkpoint."""
    batches, save_state = loop.batches, loop.save_state

    def clocked_batches(*given):
        loaded = batches(*given)
        while True:
            asked = time.perf_counter()
            batch = next(loaded, None)
            got = time.perf_counter()
            if batch is None:
                return
            waits.append(got - asked)
            started = time.process_time()
            yield batch
            cpu.append(time.process_time() - started)
            wall.append(time.perf_counter() - got)

    def clocked_save(*given):
        started = time.perf_counter()
        save_state(*given)
        saves.append(time.perf_counter() - started)

    with mock.patch.multiple(loop, batches=clocked_batches, save_state=clocked_save):
        yield


def train_times(bank: SourceBank, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the steps (CPU and wall), waits and checkpoints of one call of ``train``."""
    times: dict[str, list[float]] = {"cpu": [], "wall": [], "waits": [], "saves": []}
    network, recipe = load_network("micro", weights="golden"), recipe_of(options)
    accelerator = Accelerator(mixed_precision=options.precision)
    count = options.steps + WARM_UP
    with tempfile.TemporaryDirectory() as folder, clocked(**times):
        training.train(
            network,
            partial(scenes_at, bank),
            recipe,
            folder,
            accelerator=accelerator,
            workers=options.workers,
            stop_after=count + 1,
        )
    # The last step, which keeps a checkpoint, is left out: there is one in two hundred.
    return times | {name: times[name][WARM_UP:count] for name in ("cpu", "wall", "waits")}


def bare_times(ready: list[dict], options: argparse.Namespace, *, sampled: bool) -> dict[str, list[float]]:
    """CPU seconds of the steps of a bare loop over ready batches, in the grid-sample form or the published one."""
    network, recipe = load_network("micro", weights="golden"), recipe_of(options)
    model = training.trainable_form(network, recipe) if sampled else without_dropout(network.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for step in range(options.steps + WARM_UP):
        scene = ready[step % len(ready)]
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=sampled and options.precision == "bf16"):
            outputs = model(scene["image"])
        terms = supervised_loss(outputs, scene["image"], scene["matte"], recipe.weights)
        optimizer.zero_grad(set_to_none=True)
        sum(terms.values()).backward()
        optimizer.step()
        times.append(time.process_time() - started)
    return {"cpu": times[WARM_UP:]}


def without_dropout(model: nn.Module) -> nn.Module:
    """The same work as ``train`` does with a recipe that has no dropout and no stochastic depth."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model


def measured(options: argparse.Namespace) -> dict[str, object]:
    """Rates, their ratios and the share of waiting, over ``rounds`` in turns."""
    bank = drawn_sources(pictures=options.pictures)
    data = scenes_at(bank, (options.side_px, options.side_px))
    ready = [next(iter(DataLoader(data, batch_sampler=[range(k, k + options.batch)]))) for k in range(0, 40, 10)]
    contenders: dict[str, Callable[[], dict[str, list[float]]]] = {
        "train": lambda: train_times(bank, options),
        "bare loop, grid-sample form": lambda: bare_times(ready, options, sampled=True),
        "bare loop, deform_conv2d": lambda: bare_times(ready, options, sampled=False),
    }
    times: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            for kind, seconds in run().items():
                times[name].setdefault(kind, []).extend(seconds)
    cpu_s = {name: statistics.median(kinds["cpu"]) for name, kinds in times.items()}
    own = times["train"]
    return {
        "steps per CPU second": {name: round(1 / seconds, 3) for name, seconds in cpu_s.items()},
        **{f"train : {name}": round(cpu_s[name] / cpu_s["train"], 2) for name in contenders if name != "train"},
        "waits for data": round(sum(own["waits"]) / sum(own["waits"] + own["wall"]), 4),
        "longest wait, s": round(max(own["waits"]), 3),
        "checkpoint, s": round(statistics.median(own["saves"]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="per round and contender, after a warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side-px", type=int, default=128)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(train_times, drawn_sources(pictures=options.pictures), options)
        pstats.Stats(profile, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(25)
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count())}
    asked = {name: value for name, value in vars(options).items() if name not in ("json", "profile")}
    header = {"command": "python tests/benchmarks/training.py", "options": asked}
    text = json.dumps(header | {"versions": tool_versions(*TOOLS) | machine, **measured(options)}, indent=1)
    print(text)
    if options.json:
        write_whole(options.json, text + "\n")


if __name__ == "__main__":
    main()
