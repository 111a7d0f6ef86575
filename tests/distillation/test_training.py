"""The training loop: the same numbers after a kill, a refusal of what does not belong, and a loss that falls."""

import csv
import dataclasses
import math

import pytest
import torch
from torch.utils.data import Dataset

from lumen_lab.distillation import training
from lumen_lab.distillation.losses import LossWeights
from lumen_lab.distillation.training import Recipe, open_log, parameter_groups, recipe_record, train, update_average
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.network import BiRefNet
from lumen_lab.network.deform import DeformableConv2d

RECIPE = Recipe(steps=6, batch=2, warmup_steps=2, sizes=((0.0, (64, 64)), (0.5, (64, 96))))


class KilledError(Exception):
    """In place of a kill from outside."""


class Ellipses(Dataset):
    """A bright ellipse on noise; item i depends on i alone."""

    def __init__(self, size, *, kill_at=None):
        self.size, self.kill_at = size, kill_at

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if self.kill_at is not None and index >= self.kill_at:
            raise KilledError
        draw = torch.Generator().manual_seed(index)
        y = torch.linspace(-1, 1, self.size[0])[:, None]
        x = torch.linspace(-1, 1, self.size[1])[None]
        center, radius = torch.rand(2, generator=draw) - 0.5, 0.3 + 0.4 * torch.rand(2, generator=draw)
        inside = ((x - center[0]) / radius[0]) ** 2 + ((y - center[1]) / radius[1]) ** 2 < 1
        matte = inside.float()[None]
        return {"image": 2 * matte + 0.3 * torch.randn(3, *self.size, generator=draw), "matte": matte}


def started(config, folder, recipe=RECIPE, scenes=Ellipses, **options):
    """Train a network, always with the same first weights."""
    torch.manual_seed(0)
    options = {"workers": 0, "log_every": 1, "checkpoint_every": 100} | options
    return train(BiRefNet(config), scenes, recipe, folder, **options)


@pytest.fixture
def run(tiny_config, tmp_path):
    """``run(name, ...)`` trains in a folder of that name."""
    return lambda name, *given, **options: started(tiny_config, tmp_path / name, *given, **options)


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory):
    """A run that nothing disturbed: its folder and the network that it gave."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, started(tiny_config, folder)


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rows(folder):
    with (folder / "log.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_that_was_stopped_and_resumed_is_the_same_bit_for_bit(run, whole, tmp_path):
    folder, expected = whole
    run("parts", stop_after=3)
    assert len(rows(tmp_path / "parts")) == 3
    torch.manual_seed(99)  # whatever was drawn before a run has no say in it
    resumed = run("parts")
    assert equal(resumed, expected)
    assert (tmp_path / "parts" / "log.csv").read_bytes() == (folder / "log.csv").read_bytes()
    assert [row["step"] for row in rows(folder)] == list("012345")


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(run, whole, tmp_path):
    folder, expected = whole
    with pytest.raises(KilledError):
        run("killed", scenes=lambda size: Ellipses(size, kill_at=10), checkpoint_every=2)
    assert len(rows(tmp_path / "killed")) == 5  # one line more than the checkpoint, which is of step 4
    with (tmp_path / "killed" / "log.csv").open("a") as file:
        file.write("5,9.1e-0")  # a line that the kill has cut
    assert equal(run("killed"), expected)
    assert (tmp_path / "killed" / "log.csv").read_bytes() == (folder / "log.csv").read_bytes()
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["checkpoint.pt", "log.csv"]


def test_a_worker_process_loads_the_same_scenes(run, tmp_path):
    run("here", stop_after=2)
    run("there", stop_after=2, workers=1)
    assert rows(tmp_path / "here") == rows(tmp_path / "there")


def test_a_finished_run_is_not_trained_again(tiny_config, whole):
    folder, expected = whole
    again = started(tiny_config, folder, scenes=lambda size: pytest.fail("scenes were asked for"))
    assert equal(again, expected)


def test_stopping_after_no_step_trains_nothing(run, tmp_path, tiny_config):
    untrained = run("none", stop_after=0)
    torch.manual_seed(0)
    assert equal(untrained, BiRefNet(tiny_config))
    assert not (tmp_path / "none" / "checkpoint.pt").exists()


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 7}, {"weights": LossWeights(mae=2.0)}])
def test_a_checkpoint_of_another_recipe_is_refused(run, tmp_path, change):
    run("a", stop_after=1)
    before = (tmp_path / "a" / "checkpoint.pt").read_bytes()
    with pytest.raises(ArtifactError, match="checkpoint.pt was made with another recipe; give another out_dir"):
        run("a", dataclasses.replace(RECIPE, **change))
    assert (tmp_path / "a" / "checkpoint.pt").read_bytes() == before
    assert len(rows(tmp_path / "a")) == 1


def test_another_seed_draws_other_dropout(run, tmp_path):
    run("a", stop_after=2)
    run("b", dataclasses.replace(RECIPE, seed=1), stop_after=2)
    assert rows(tmp_path / "a")[0]["bce"] != rows(tmp_path / "b")[0]["bce"]


def test_the_result_has_the_published_layout_and_is_the_average(whole, tiny_config):
    folder, trained = whole
    expected = BiRefNet(tiny_config)
    assert list(trained.state_dict()) == list(expected.state_dict())
    assert sum(isinstance(module, DeformableConv2d) for module in trained.modules()) == 20
    assert not any(module.training for module in trained.modules())
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    name = "decoder.conv_out1.0.weight"
    assert torch.equal(trained.state_dict()[name], state["average"][name])
    assert not torch.equal(trained.state_dict()[name], state["model"][name])
    with torch.no_grad():
        assert trained(torch.zeros(1, 3, 64, 96)).shape == (1, 1, 64, 96)


def test_the_network_that_was_given_is_not_changed(tiny_config, tmp_path):
    network = BiRefNet(tiny_config).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train(network, Ellipses, RECIPE, tmp_path, workers=0, stop_after=1)
    assert network.training
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_loss_falls_on_one_scene(run, tmp_path):
    class Same(Ellipses):
        def __getitem__(self, index):
            return super().__getitem__(7)

    recipe = Recipe(steps=30, batch=2, warmup_steps=1, learning_rate=2e-2, sizes=((0.0, (64, 64)),), ema_decay=0.9)
    trained = run("one", recipe, Same)
    losses = [sum(float(row[name]) for name in ("bce", "iou", "ssim", "mae")) for row in rows(tmp_path / "one")]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    scene = Same((64, 64))[0]
    with torch.no_grad():
        mask = trained(scene["image"][None]).sigmoid()[0]
    assert float((mask - scene["matte"]).abs().mean()) < 0.1


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(run, tmp_path):
    class Spoiled(Ellipses):
        def __getitem__(self, index):
            scene = super().__getitem__(index)
            return scene if index < 4 else {**scene, "image": scene["image"] * math.nan}

    with pytest.raises(LumenError, match="The loss became nan at step 2; the last checkpoint is unharmed"):
        run("a", scenes=Spoiled, checkpoint_every=1)
    state = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    assert all(value.isfinite().all() for value in state["model"].values())


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_reaches_the_weights(run, tmp_path, monkeypatch):
    """A finite loss may have an infinite gradient: here that of a square root at zero."""

    def steep(outputs, image, mask, weights):
        return {"bce": outputs.masks[-1].square().mean() + (0 * outputs.masks[-1]).abs().sum().sqrt()}

    monkeypatch.setattr(training, "supervised_loss", steep)
    with pytest.raises(LumenError, match="The gradient became nan at step 0"):
        run("a")
    assert list((tmp_path / "a").iterdir()) == []


# Recipes


def test_rate_warms_up_and_ends_at_zero():
    recipe = Recipe(steps=100, learning_rate=1.0, warmup_steps=10)
    assert recipe.rate_at(0) == pytest.approx(0.1)
    assert recipe.rate_at(4) == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 0.04)))
    assert recipe.rate_at(50) == pytest.approx(0.5)
    assert recipe.rate_at(99) < 1e-3
    assert recipe.rate_at(100) == 0
    rates = [recipe.rate_at(step) for step in range(10, 100)]
    assert rates == sorted(rates, reverse=True)
    assert Recipe(steps=10, warmup_steps=0, learning_rate=1.0).rate_at(0) == 1.0


def test_size_grows_at_its_share_of_the_steps():
    recipe = Recipe(steps=10, sizes=((0.0, (64, 96)), (0.5, (96, 96)), (0.8, (128, 160))))
    assert [recipe.size_at(step) for step in (0, 4, 5, 7, 8, 9)] == [
        (64, 96), (64, 96), (96, 96), (96, 96), (128, 160), (128, 160)
    ]  # fmt: skip


def test_a_recipe_is_told_apart_by_everything_in_it():
    assert recipe_record(RECIPE) == recipe_record(dataclasses.replace(RECIPE))
    fields = {"steps": 7, "weight_decay": 0.5, "sizes": ((0.0, (64, 64)),), "weights": LossWeights(iou=2)}
    others = [dataclasses.replace(RECIPE, **{name: value}) for name, value in fields.items()]
    assert len({recipe_record(recipe) for recipe in [RECIPE, *others]}) == 5


def test_every_parameter_is_in_one_group_and_norms_do_not_decay(tiny_config):
    network = BiRefNet(tiny_config)
    groups = parameter_groups(network, Recipe(steps=1, weight_decay=0.25, encoder_rate=0.5))
    found = {id(parameter): group for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found) == len(list(network.parameters()))
    for name, parameter in network.named_parameters():
        group = found[id(parameter)]
        plain = parameter.ndim < 2 or "bias_table" in name
        assert group["weight_decay"] == (0.0 if plain else 0.25), name
        assert group["rate_scale"] == (0.5 if name.startswith("bb.") else 1.0), name


# Parts


def test_average_moves_by_its_decay_and_counters_are_copied():
    average = {"weight": torch.tensor([0.0, 4.0]), "count": torch.tensor(3)}
    update_average(average, {"weight": torch.tensor([1.0, 0.0]), "count": torch.tensor(9)}, 0.75)
    assert average["weight"].tolist() == [0.25, 3.0]
    assert int(average["count"]) == 9


def test_log_of_a_new_run_replaces_the_old_one_and_a_resumed_one_keeps_its_start(tmp_path):
    path = tmp_path / "log.csv"
    write = open_log(path, 0)
    for step in range(4):
        write(step, 1e-3 / (step + 1), {"bce": 1 / 3, "iou": 2.0})
    before = path.read_text().splitlines()
    assert before[0] == "step,learning_rate,bce,iou"
    assert before[2] == "1,5.000e-04,0.33333,2.00000"
    with path.open("a") as file:
        file.write("1")  # of "12,…": a kill has cut the line, and the step it seems to be of is not to be trusted
    open_log(path, 2)(2, 7e-4, {"bce": 0.5, "iou": 1.0})
    after = path.read_text().splitlines()
    assert after[:3] == before[:3]
    assert after[3:] == ["2,7.000e-04,0.50000,1.00000"]
    open_log(path, 0)
    assert not path.exists()
