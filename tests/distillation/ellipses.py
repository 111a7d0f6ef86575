"""What tests of training train on, how a run is read, and a program that trains in a process of its own.

``python -m tests.distillation.ellipses OPTIONS``, alone or behind ``accelerate launch``; OPTIONS is JSON:
the network's ``config``, the ``recipe``, the ``folder``, the number of ``threads``, ``signals`` that the process sends
itself when a scene is loaded (scene → name), and what ``train`` takes. The weights are left beside the folder, a file
a process.
"""

import csv
import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import Dataset

from lumen_lab.distillation.recipe import Recipe
from lumen_lab.distillation.training import train
from lumen_lab.network import BiRefNet
from lumen_lab.network.config import BiRefNetConfig

RECIPE = Recipe(steps=6, batch=2, warmup_steps=2, sizes=((0.0, (64, 64)), (0.5, (64, 96))))


class KilledError(Exception):
    """In place of a kill from outside."""


def killed():
    raise KilledError


class Ellipses(Dataset):
    """A bright ellipse on noise; item i depends on i alone. ``at`` maps an item to what happens when it is loaded."""

    def __init__(self, size, *, at=None):
        self.size, self.at = size, at or {}

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index in self.at:
            self.at[index]()
        draw = torch.Generator().manual_seed(index)
        y = torch.linspace(-1, 1, self.size[0])[:, None]
        x = torch.linspace(-1, 1, self.size[1])[None]
        center, radius = torch.rand(2, generator=draw) - 0.5, 0.3 + 0.4 * torch.rand(2, generator=draw)
        inside = ((x - center[0]) / radius[0]) ** 2 + ((y - center[1]) / radius[1]) ** 2 < 1
        matte = inside.float()[None]
        return {"image": 2 * matte + 0.3 * torch.randn(3, *self.size, generator=draw), "matte": matte}


def new_network(config):
    """A network of ``config``, always with the same first weights; the caller's random numbers are left alone."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return BiRefNet(config)


def equal(first, second):
    """Whether two state dicts are the same bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def signal_self(number):
    """A function that sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def started(config, folder, recipe=RECIPE, scenes=Ellipses, **options):
    """Train a network, always with the same first weights."""
    options = {"workers": 0, "log_every": 1, "checkpoint_every": 100} | options
    return train(new_network(config), scenes, recipe, folder, **options)


def weight_of(network):
    """A validation that is quick and sees the weights."""
    return {"weight": float(network.decoder.conv_out1[0].weight.detach().double().sum())}


def rows(folder, kind="train"):
    with (folder / f"{kind}.csv").open() as file:
        return list(csv.DictReader(file))


def logs(folder):
    return [(folder / f"{kind}.csv").read_bytes() for kind in ("train", "validation")]


def kept(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def events(folder, kind, name):
    """The (step, value) pairs that TensorBoard shows."""
    accumulator = EventAccumulator(str(folder / "tensorboard" / kind)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(f"{kind}/{name}")]


def forget_accelerator():
    """Let the next ``Accelerator`` choose anew: accelerate keeps one precision a process until it is told."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main(options):
    folder, signals = Path(options.pop("folder")), options.pop("signals", {})
    torch.set_num_threads(options.pop("threads", 1))
    network = new_network(BiRefNetConfig(**options.pop("config")))
    recipe = Recipe(**options.pop("recipe"))
    at = {int(item): signal_self(signal.Signals[name]) for item, name in signals.items()}
    trained = train(network, lambda size: Ellipses(size, at=at), recipe, folder, workers=0, **options)
    torch.save(trained.state_dict(), f"{folder}.{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
