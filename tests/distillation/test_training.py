"""The training loop: the same numbers after a kill, refusals, and what it leaves behind."""

import csv
import dataclasses
import math

import pytest
import torch
from torch.utils.data import Dataset

from lumen_lab.distillation.training import Recipe, parameter_groups, recipe_record, train, update_average
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.network.birefnet import BiRefNet

SIZE = (64, 96)
SHORT = Recipe(steps=6, batch=2, warmup_steps=2, sizes=((0.0, SIZE),), seed=3)


class Ellipses(Dataset):
    """A bright ellipse on noise; scene i depends on i alone. From scene ``nan_from`` on, images hold a NaN."""

    def __init__(self, size, *, only=None, nan_from=math.inf):
        self.size, self.only, self.nan_from = size, only, nan_from

    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index if self.only is None else self.only)
        y, x, radius = torch.rand(3, generator=generator).tolist()
        rows = torch.linspace(-1, 1, self.size[0])[:, None] - (y - 0.5)
        columns = torch.linspace(-1, 1, self.size[1])[None] - (x - 0.5)
        matte = (rows**2 + 2 * columns**2 < (0.3 + 0.3 * radius) ** 2).float()[None]
        image = 0.3 * torch.randn(3, *self.size, generator=generator) + 2 * matte - 1
        if index >= self.nan_from:
            image[0, 0, 0] = math.nan
        return {"image": image, "matte": matte}


@pytest.fixture(scope="module")
def network(tiny_config):
    """A freshly initialised small network."""
    torch.manual_seed(0)
    return BiRefNet(tiny_config)


def run(network, out_dir, recipe=SHORT, scenes_at=Ellipses, **more):
    return train(network, scenes_at, recipe, out_dir, workers=0, log_every=1, **more)


@pytest.fixture(scope="module")
def uninterrupted(network, tmp_path_factory):
    """(trained network, folder) of six steps in one go."""
    folder = tmp_path_factory.mktemp("whole")
    return run(network, folder), folder


def assert_same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert list(one) == list(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def test_the_rate_warms_up_and_then_falls_as_half_a_cosine():
    recipe = Recipe(steps=100, learning_rate=0.8, warmup_steps=10)
    assert recipe.rate_at(0) == pytest.approx(0.8 * 0.1)
    assert recipe.rate_at(9) == pytest.approx(0.4 * (1 + math.cos(0.09 * math.pi)))
    assert recipe.rate_at(50) == pytest.approx(0.4)
    assert recipe.rate_at(75) == pytest.approx(0.4 * (1 - math.sqrt(0.5)))
    assert 0 < recipe.rate_at(99) < 0.001 * 0.8
    assert dataclasses.replace(recipe, warmup_steps=0).rate_at(0) == pytest.approx(0.8)


def test_the_size_changes_at_its_share_of_the_steps():
    recipe = Recipe(steps=10, sizes=((0.0, (64, 64)), (0.5, (64, 96)), (0.8, (96, 128))))
    sizes = [recipe.size_at(step) for step in range(10)]
    assert sizes == [(64, 64)] * 5 + [(64, 96)] * 3 + [(96, 128)] * 2


def test_an_interrupted_run_ends_with_the_same_numbers(network, uninterrupted, tmp_path):
    whole, folder = uninterrupted
    halfway = run(network, tmp_path, stop_after=3)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3
    with (tmp_path / "log.csv").open("a") as log:  # what a kill leaves: steps after the checkpoint, half a line
        log.write("3,9.999e-04,9.00000,9.00000,9.00000,9.00000,9.00000\n4,9.9")
    resumed = run(network, tmp_path)
    assert_same_weights(resumed, whole)
    assert (tmp_path / "log.csv").read_bytes() == (folder / "log.csv").read_bytes()
    assert any(not torch.equal(a, b) for a, b in zip(halfway.parameters(), whole.parameters(), strict=True))


def test_the_log_has_a_line_for_every_step(uninterrupted):
    with (uninterrupted[1] / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(6))
    assert list(rows[0]) == ["step", "learning_rate", "bce", "iou", "ssim", "mae", "gradient"]
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(
        [SHORT.rate_at(s) for s in range(6)], rel=1e-3
    )
    assert all(float(row["bce"]) > 0 for row in rows)


def test_a_finished_run_is_not_trained_again(network, uninterrupted):
    whole, folder = uninterrupted
    before = (folder / "checkpoint.pt").stat().st_mtime_ns
    assert_same_weights(run(network, folder), whole)
    assert (folder / "checkpoint.pt").stat().st_mtime_ns == before


def test_a_checkpoint_of_another_recipe_is_refused(network, uninterrupted):
    folder = uninterrupted[1]
    before = (folder / "checkpoint.pt").read_bytes()
    with pytest.raises(ArtifactError, match=r"checkpoint\.pt was made with another recipe"):
        run(network, folder, dataclasses.replace(SHORT, learning_rate=2e-3))
    assert (folder / "checkpoint.pt").read_bytes() == before


def test_every_setting_of_a_recipe_tells_it_from_another():
    other = dataclasses.replace(SHORT, weights=dataclasses.replace(SHORT.weights, ssim=9.0))
    assert recipe_record(other) != recipe_record(SHORT)
    assert recipe_record(dataclasses.replace(SHORT)) == recipe_record(SHORT)


def test_the_result_has_the_published_layout_and_is_in_eval_mode(network, uninterrupted, tiny_config):
    trained = uninterrupted[0]
    layout = {name: value.shape for name, value in BiRefNet(tiny_config).state_dict().items()}
    assert {name: value.shape for name, value in trained.state_dict().items()} == layout
    assert not any(module.training for module in trained.modules())
    with torch.no_grad():
        logits = trained(torch.zeros(1, 3, *SIZE))
    assert logits.shape == (1, 1, *SIZE)
    assert logits.isfinite().all()


def test_the_given_network_is_left_as_it_was(network, uninterrupted, tiny_config):
    torch.manual_seed(0)
    assert_same_weights(network, BiRefNet(tiny_config))
    moved = [n for n, p in uninterrupted[0].named_parameters() if not torch.equal(p, network.get_parameter(n))]
    assert len(moved) > 0.9 * len(list(network.parameters()))


def test_one_scene_can_be_learnt_by_heart(network, tmp_path):
    recipe = dataclasses.replace(SHORT, steps=24, warmup_steps=4, learning_rate=3e-3)
    run(network, tmp_path, recipe, lambda size: Ellipses(size, only=5))
    with (tmp_path / "log.csv").open(newline="") as file:
        terms = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    losses = [sum(row.values()) - row["step"] - row["learning_rate"] for row in terms]
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    assert terms[-1]["iou"] < 0.6 * terms[0]["iou"]


def test_a_loss_that_is_not_a_number_stops_the_run_and_spares_the_checkpoint(network, uninterrupted, tmp_path):
    with pytest.raises(LumenError, match="loss became nan at step 5"):
        run(network, tmp_path, scenes_at=lambda size: Ellipses(size, nan_from=10), checkpoint_every=2)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 4
    assert all(value.isfinite().all() for part in ("model", "average") for value in state[part].values())
    assert_same_weights(run(network, tmp_path), uninterrupted[0])


def test_the_encoder_learns_slower_and_biases_norms_and_position_tables_do_not_decay(network):
    recipe = Recipe(steps=1, encoder_rate=0.25, weight_decay=0.125)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = parameter_groups(network, recipe)
    found = {names[id(p)]: (g["rate_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found) == len(names)
    assert all(rate == (0.25 if name.startswith("bb.") else 1.0) for name, (rate, _) in found.items())
    still = {name for name, (_, decay) in found.items() if decay == 0}
    assert {decay for name, (_, decay) in found.items() if name not in still} == {0.125}
    weights = {f"{n}.weight" for n, m in network.named_modules() if type(m).__name__ in ("Conv2d", "Linear")}
    assert still == set(found) - weights
    assert any(name.endswith("relative_position_bias_table") for name in still)


def test_the_average_moves_by_its_share_and_counters_are_copied():
    average = {"weight": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
    update_average(average, {"weight": torch.tensor([2.0, 0.0]), "count": torch.tensor(7)}, 0.75)
    assert average["weight"].tolist() == [1.25, 1.5]
    assert average["count"].item() == 7
