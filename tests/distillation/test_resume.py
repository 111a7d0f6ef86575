"""A run that was stopped, killed or moved: the same numbers again, or a refusal of what does not belong."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from accelerate import Accelerator

from lumen_lab.distillation.losses import LossWeights
from lumen_lab.errors import ArtifactError, LumenError
from tests.distillation.ellipses import (
    RECIPE,
    Ellipses,
    KilledError,
    equal,
    events,
    forget_accelerator,
    kept,
    killed,
    logs,
    new_network,
    rows,
    signal_self,
    started,
    weight_of,
)


def test_a_run_that_was_stopped_and_resumed_is_the_same_bit_for_bit(run, whole, tmp_path):
    folder, expected = whole
    run("parts", stop_after=2, validate=weight_of, validate_every=2)
    assert len(rows(tmp_path / "parts")) == 2
    torch.manual_seed(99)  # whatever was drawn before a run has no say in it
    resumed = run("parts", validate=weight_of, validate_every=2)
    assert equal(resumed.state_dict(), expected.state_dict())
    assert logs(tmp_path / "parts") == logs(folder)
    assert [row["step"] for row in rows(folder)] == list("012345")
    assert [row["step"] for row in rows(folder, "validation")] == list("246")
    run("parts", validate=lambda network: pytest.fail("a finished run was scored"))
    assert logs(tmp_path / "parts") == logs(folder)


def test_a_run_that_failed_goes_on_from_its_last_checkpoint(run, whole, tmp_path):
    folder, expected = whole
    options = {"validate": weight_of, "validate_every": 2}
    with pytest.raises(KilledError):
        run("killed", scenes=lambda size: Ellipses(size, at={10: killed}), checkpoint_every=2, **options)
    assert len(rows(tmp_path / "killed")) == 5  # one line more than the checkpoint, which is of step 4
    with (tmp_path / "killed" / "train.csv").open("a") as file:
        file.write("5,9.1e-0")  # a line that the kill has cut
    assert equal(run("killed", **options).state_dict(), expected.state_dict())
    assert logs(tmp_path / "killed") == logs(folder)
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["checkpoint.pt", "tensorboard", "train.csv", "validation.csv"]


def test_a_step_is_kept_before_it_is_scored_and_a_missed_score_is_made_up_for(run, whole, tmp_path):
    folder, expected = whole

    calls = []

    def fails_at_4(network):
        calls.append(network)
        return weight_of(network) if len(calls) < 2 else killed()

    with pytest.raises(KilledError):
        run("scored", validate=fails_at_4, validate_every=2)
    assert kept(tmp_path / "scored")["step"] == 4
    assert [row["step"] for row in rows(tmp_path / "scored", "validation")] == ["2"]
    again = run("scored", validate=weight_of, validate_every=2)
    assert equal(again.state_dict(), expected.state_dict())
    assert logs(tmp_path / "scored") == logs(folder)
    assert [step for step, _ in events(tmp_path / "scored", "validation", "weight")] == [2, 4, 6]


@pytest.mark.parametrize(("number", "made"), [(signal.SIGKILL, 3), (signal.SIGTERM, 5)])
def test_a_process_that_was_killed_goes_on_to_the_same_numbers(whole, tiny_config, tmp_path, number, made):
    """After SIGKILL from the last checkpoint, of step 3; SIGTERM waits until the step is made and kept."""
    folder, expected = whole
    options = {"config": dataclasses.asdict(tiny_config), "recipe": as_given(RECIPE), "folder": str(tmp_path / "run")}
    options |= {"threads": torch.get_num_threads(), "log_every": 1, "checkpoint_every": 3, "signals": {9: number.name}}
    done = program(options)
    assert done.returncode == -number, done.stderr
    assert kept(tmp_path / "run")["step"] == made
    resumed = started(tiny_config, tmp_path / "run")
    assert equal(resumed.state_dict(), expected.state_dict())
    assert (tmp_path / "run" / "train.csv").read_bytes() == (folder / "train.csv").read_bytes()
    assert [step for step, _ in events(tmp_path / "run", "train", "bce")] == list(range(6))
    assert not list((tmp_path / "run").glob(".*")), "half a file was left"


def as_given(recipe):
    """The fields of a recipe that JSON has words for."""
    return {name: value for name, value in dataclasses.asdict(recipe).items() if name != "weights"}


def program(options):
    """Train in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.distillation.ellipses", json.dumps(options)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_an_interrupt_waits_until_the_step_is_kept(run, whole, tmp_path, capsys):
    _, expected = whole
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", scenes=lambda size: Ellipses(size, at={3: signal_self(signal.SIGINT)}))
    assert signal.getsignal(signal.SIGINT) is before
    assert kept(tmp_path / "stopped")["step"] == len(rows(tmp_path / "stopped")) == 2
    assert "Stopped after step 2, which is kept; call again to go on." in capsys.readouterr().err
    assert equal(run("stopped").state_dict(), expected.state_dict())


def test_a_second_interrupt_does_not_wait(run, tmp_path):
    def twice():
        signal_self(signal.SIGINT)()
        signal_self(signal.SIGINT)()

    with pytest.raises(KeyboardInterrupt):
        run("stopped", scenes=lambda size: Ellipses(size, at={3: twice}))
    assert not (tmp_path / "stopped" / "checkpoint.pt").exists()


def test_an_interrupt_does_not_reach_the_loading_processes(run, tmp_path):
    """Ctrl-C goes to every process of a terminal: here a loader sends it to itself, and its scene still comes."""
    scenes = dict.fromkeys((0, 1), signal_self(signal.SIGINT))
    run("loaded", scenes=lambda size: Ellipses(size, at=scenes), workers=1, stop_after=1)
    assert kept(tmp_path / "loaded")["step"] == 1


def test_a_run_can_be_in_another_thread(run, tmp_path):
    """Which may not set signal handlers."""
    thread = threading.Thread(target=run, args=("thread",), kwargs={"stop_after": 1})
    thread.start()
    thread.join()
    assert kept(tmp_path / "thread")["step"] == 1


def test_half_precision_is_the_same_bit_for_bit_too_and_is_not_float32(run, whole, tmp_path):
    precise = Accelerator(mixed_precision="bf16")
    expected = run("whole", accelerator=precise)
    run("parts", stop_after=3, accelerator=precise)
    assert equal(run("parts", accelerator=precise).state_dict(), expected.state_dict())
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert rows(tmp_path / "parts") != rows(whole[0])
    assert not equal(expected.state_dict(), whole[1].state_dict())
    assert {value.dtype for value in expected.state_dict().values()} == {torch.float32, torch.int64}


def half(init_scale):
    """float16 with its scaled loss: accelerate keeps it for GPUs, so that on the CPU it is put in place by hand."""
    forget_accelerator()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return accelerator


def test_the_scale_of_the_loss_is_kept(run, tmp_path):
    whole, first, second = half(64.0), half(64.0), half(64.0)
    expected = run("whole", accelerator=whole)
    run("parts", stop_after=3, accelerator=first)
    assert first.scaler.get_scale() == 128
    resumed = run("parts", accelerator=second)
    assert second.scaler.get_scale() == whole.scaler.get_scale() == 512
    assert equal(resumed.state_dict(), expected.state_dict())


def test_a_gradient_that_overflows_in_float16_is_skipped_and_no_sign_of_trouble(run, tmp_path, tiny_config):
    accelerator = half(2.0**60)
    run("over", stop_after=1, accelerator=accelerator)
    assert accelerator.scaler.get_scale() == 2.0**59
    name = "decoder.conv_out1.0.weight"
    assert torch.equal(kept(tmp_path / "over")["model"][name], new_network(tiny_config).state_dict()[name])


def test_a_worker_process_loads_the_same_scenes(run, tmp_path):
    run("here", stop_after=2)
    run("there", stop_after=2, workers=1)
    assert rows(tmp_path / "here") == rows(tmp_path / "there")


def test_a_finished_run_is_not_trained_again(tiny_config, whole):
    folder, expected = whole
    again = started(tiny_config, folder, scenes=lambda size: pytest.fail("scenes were asked for"))
    assert equal(again.state_dict(), expected.state_dict())


def test_stopping_after_no_step_trains_nothing(run, tmp_path, tiny_config):
    untrained = run("none", stop_after=0)
    assert equal(untrained.state_dict(), new_network(tiny_config).state_dict())
    assert not (tmp_path / "none" / "checkpoint.pt").exists()


# What does not belong is refused


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        ({"steps": 7}, "steps 6, now 7"),
        ({"weights": LossWeights(mae=2.0)}, "weights {.*'mae': 1.0.*}, now {.*'mae': 2.0.*}"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(run, tmp_path, change, difference):
    run("a", stop_after=1)
    before = (tmp_path / "a" / "checkpoint.pt").read_bytes()
    with pytest.raises(
        ArtifactError, match=rf"checkpoint.pt was made with another recipe \({difference}\); go on as it"
    ):
        run("a", dataclasses.replace(RECIPE, **change))
    assert (tmp_path / "a" / "checkpoint.pt").read_bytes() == before
    assert len(rows(tmp_path / "a")) == 1


def test_a_checkpoint_in_another_precision_is_refused(run, tmp_path):
    run("a", stop_after=1, accelerator=Accelerator(mixed_precision="bf16"))
    before = (tmp_path / "a" / "checkpoint.pt").read_bytes()
    forget_accelerator()
    with pytest.raises(
        ArtifactError, match="checkpoint.pt was made with precision bf16, now no; go on as it began, give"
    ):
        run("a", accelerator=Accelerator(mixed_precision="no"))
    assert (tmp_path / "a" / "checkpoint.pt").read_bytes() == before


def test_a_precision_that_the_device_does_not_compute_in_is_refused(run, tmp_path):
    """On a CPU accelerate takes "fp16" and computes in float32; the record would say what was not done."""
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    with pytest.raises(LumenError, match="fp16 was asked for, and on this device accelerate would compute in float32"):
        run("a", accelerator=accelerator)
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_of_another_network_is_refused(run, tmp_path, tiny_config):
    run("a", stop_after=1)
    wider = dataclasses.replace(tiny_config, decoder_width=16)
    with pytest.raises(
        ArtifactError, match=r"checkpoint.pt is of another network: \d+ tensors differ in name or shape"
    ):
        started(wider, tmp_path / "a")


@pytest.mark.parametrize("spoil", ["cut", "emptied", "text", "another pickle", "without the optimizer"])
def test_a_damaged_checkpoint_is_refused_in_one_sentence(run, tmp_path, spoil):
    run("a", stop_after=1)
    path = tmp_path / "a" / "checkpoint.pt"
    whole, state = path.read_bytes(), kept(tmp_path / "a")
    if spoil == "another pickle":
        torch.save([1, 2, 3], path)
    elif spoil == "without the optimizer":
        torch.save({name: value for name, value in state.items() if name != "optimizer"}, path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "emptied": b"", "text": b"not a checkpoint at all"}[spoil])
    with pytest.raises(ArtifactError) as refusal:
        run("a")
    said = str(refusal.value)
    assert said.startswith(str(path)) and said.endswith("; remove it to start anew.") and "\n" not in said
    assert len(rows(tmp_path / "a")) == 1, "the log of a run that may be saved is not thrown away"


@pytest.mark.parametrize("name", ["validate_every", "checkpoint_every", "log_every"])
def test_every_zero_steps_is_refused(run, name):
    with pytest.raises(LumenError, match="come every .*0.* steps; 1 or more"):
        run("a", **{name: 0})


def test_gathering_gradients_over_steps_is_refused(run):
    with pytest.raises(LumenError, match="The accelerator gathers gradients over 4 steps"):
        run("a", accelerator=Accelerator(gradient_accumulation_steps=4))
