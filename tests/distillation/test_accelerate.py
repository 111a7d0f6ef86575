"""Two processes behind ``accelerate launch``: each takes half of every batch, and together they make one run."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from lumen_lab.distillation.processes import check_accelerator, check_start
from lumen_lab.distillation.recipe import Recipe
from lumen_lab.distillation.training import train
from lumen_lab.errors import LumenError
from tests.distillation.ellipses import Ellipses, equal, kept, new_network, rows

# Without dropout, which each process draws for itself, a process computes what one alone would on its half.
RECIPE = {"steps": 4, "batch": 4, "warmup_steps": 2, "sizes": [[0.0, [64, 64]]], "dropout": 0.0, "drop_path": 0.0}
TERMS = ("bce", "iou", "ssim", "mae", "gradient")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launched(config, folder, **options):
    """Train in two CPU processes; the finished launcher.

    With ``--cpu`` accelerate starts several processes through MPI only, and without it one; the launcher that it has
    for GPUs starts two wherever it is, and ACCELERATE_USE_CPU says where they compute.
    """
    options = {"config": dataclasses.asdict(config), "recipe": RECIPE, "folder": str(folder), "log_every": 1} | options
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", str(free_port()), "--module", "tests.distillation.ellipses"]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, json.dumps(options)], env=os.environ | variables, capture_output=True, text=True, timeout=240
    )


def weights(folder, process):
    return torch.load(f"{folder}.{process}.pt", weights_only=True)


@pytest.fixture(scope="module")
def two(tiny_config, tmp_path_factory):
    """A run of two processes that nothing disturbed: its folder."""
    folder = tmp_path_factory.mktemp("two") / "whole"
    done = launched(tiny_config, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_make_one_run(two):
    assert sorted(path.name for path in two.iterdir()) == ["checkpoint.pt", "tensorboard", "train.csv"]
    assert len(list((two / "tensorboard" / "train").iterdir())) == 1
    assert [row["step"] for row in rows(two)] == list("0123")
    assert equal(weights(two, 0), weights(two, 1))
    state = kept(two)
    assert (state["step"], state["processes"], state["precision"]) == (4, 2, "no")


def test_the_first_loss_is_the_mean_over_the_two_halves_of_the_batch(two, tiny_config, tmp_path):
    """Scene 0 and 2 go to one process, 1 and 3 to the other; batch statistics are those of the half."""
    halves = []
    for process in (0, 1):

        class Half(Ellipses):
            def __getitem__(self, index, process=process):
                return super().__getitem__(2 * index + process)

        alone = Recipe(**RECIPE | {"batch": 2, "sizes": ((0.0, (64, 64)),)})
        folder = tmp_path / str(process)
        train(new_network(tiny_config), Half, alone, folder, workers=0, log_every=1, stop_after=1)
        halves.append(rows(folder)[0])
    together = rows(two)[0]
    for name in TERMS:
        apart = [float(half[name]) for half in halves]
        assert float(together[name]) == pytest.approx(sum(apart) / 2, rel=2e-5), name
        assert abs(apart[0] - apart[1]) > 1e-4 * abs(apart[0]), "the halves must be told apart"


def test_a_run_of_which_one_process_was_killed_ends_and_goes_on_to_the_same_numbers(two, tiny_config, tmp_path):
    """Scene 13 is of step 3 in the second process; the checkpoint is of step 2, and the other must not wait."""
    folder = tmp_path / "killed"
    started = time.monotonic()
    done = launched(tiny_config, folder, checkpoint_every=2, signals={13: "SIGKILL"})
    assert done.returncode != 0 and time.monotonic() - started < 120
    assert kept(folder)["step"] == 2
    again = launched(tiny_config, folder)
    assert again.returncode == 0, again.stderr
    assert (folder / "train.csv").read_bytes() == (two / "train.csv").read_bytes()
    assert equal(weights(folder, 0), weights(two, 0)) and equal(weights(folder, 1), weights(two, 0))


def test_an_interrupt_of_one_process_stops_both_after_the_same_step(two, tiny_config, tmp_path):
    folder = tmp_path / "stopped"
    done = launched(tiny_config, folder, signals={5: "SIGINT"})
    assert done.returncode != 0
    assert kept(folder)["step"] == 2
    assert done.stderr.count("KeyboardInterrupt") >= 2
    assert (folder / "train.csv").read_text() == "".join((two / "train.csv").read_text().splitlines(True)[:3])


def seen(processes, *, steps=1, kind=DistributedType.MULTI_CPU):
    """What the loop asks an accelerator before it begins."""
    return SimpleNamespace(
        mixed_precision="no", num_processes=processes, gradient_accumulation_steps=steps, distributed_type=kind
    )


@pytest.mark.parametrize(
    ("batch", "accelerator", "said"),
    [
        (5, seen(2), "A batch of 5 cannot be shared by 2 processes; take a multiple of 2, at least 2 scenes for each."),
        (4, seen(4), "A batch of 4 cannot be shared by 4 processes; take a multiple of 4, at least 2 scenes for each."),
        (4, seen(2, steps=4), "The accelerator gathers gradients over 4 steps; make it without"),
        (4, seen(2, kind=DistributedType.FSDP), "Each process needs the whole network, and FSDP cuts it up"),
    ],
)
def test_what_cannot_be_shared_is_refused(monkeypatch, batch, accelerator, said):
    monkeypatch.setenv("WORLD_SIZE", str(accelerator.num_processes))
    with pytest.raises(LumenError) as refusal:
        check_accelerator(accelerator, Recipe(steps=1, batch=batch))
    assert str(refusal.value).startswith(said)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    """Where there is no GPU, a launcher for GPUs starts processes that each take themselves for the only one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LumenError, match="The launcher started 2 processes that do not know of each other"):
        check_accelerator(seen(1, kind=DistributedType.NO), Recipe(steps=1))


def test_processes_that_found_different_checkpoints_are_refused(tmp_path):
    others = SimpleNamespace(device="cpu", gather=lambda own: torch.cat([own, torch.zeros_like(own)]))
    check_start(0, tmp_path, others)
    with pytest.raises(LumenError, match=r"The processes found checkpoints of the steps \[7, 0\] in "):
        check_start(7, tmp_path, others)
