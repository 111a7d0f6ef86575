"""The training loop: what comes back, what is left as it was, and a loss that falls."""

import dataclasses
import math
import signal

import numpy as np
import pytest
import torch

from lumen_lab.distillation import loop, training
from lumen_lab.distillation.attention_limit import largest_logits
from lumen_lab.distillation.gates import GATES
from lumen_lab.distillation.loop import step_seed, update_average
from lumen_lab.distillation.losses import LossWeights
from lumen_lab.distillation.recipe import Recipe
from lumen_lab.distillation.training import parameter_groups, train
from lumen_lab.errors import LumenError
from lumen_lab.network import BiRefNet
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, GridSampleConv
from lumen_lab.rewrites.plan import rewrite
from tests.distillation.ellipses import (
    RECIPE,
    Ellipses,
    KilledError,
    kept,
    killed,
    new_network,
    rows,
    signal_self,
    weight_of,
)


def test_another_seed_draws_other_dropout(run, tmp_path):
    run("a", stop_after=2)
    run("b", dataclasses.replace(RECIPE, seed=1), stop_after=2)
    assert rows(tmp_path / "a")[0]["bce"] != rows(tmp_path / "b")[0]["bce"]


def test_every_step_and_process_draws_its_own(run, monkeypatch):
    """And the same in a run that was stopped between."""
    drawn = []
    loss = training.supervised_loss
    monkeypatch.setattr(training, "supervised_loss", lambda *given: drawn.append(float(torch.rand(()))) or loss(*given))
    run("whole", stop_after=3)
    run("parts", stop_after=1)
    run("parts", stop_after=3)
    assert drawn[:3] == drawn[3:] and len(set(drawn)) == 3
    places = [(seed, step, process) for seed in (0, 1) for step in (0, 1, 7199) for process in (0, 1, 63)]
    assert len({step_seed(*place) for place in places}) == len(places)


def test_the_result_has_the_published_layout_and_is_the_average(whole, tiny_config):
    folder, trained = whole
    expected = BiRefNet(tiny_config)
    assert list(trained.state_dict()) == list(expected.state_dict())
    assert sum(isinstance(module, DeformableConv2d) for module in trained.modules()) == 20
    assert not any(module.training for module in trained.modules())
    assert {value.device.type for value in trained.state_dict().values()} == {"cpu"}
    state = kept(folder)
    name = "decoder.conv_out1.0.weight"
    assert torch.equal(trained.state_dict()[name], state["average"][name])
    assert not torch.equal(trained.state_dict()[name], state["model"][name])
    with torch.no_grad():
        assert trained(torch.zeros(1, 3, 64, 96)).shape == (1, 1, 64, 96)


def rates(network):
    """Every rate of dropout and of stochastic depth."""
    modules = network.modules()
    return [
        getattr(m, "p", getattr(m, "drop_prob", None)) for m in modules if type(m).__name__ in ("Dropout", "DropPath")
    ]


def test_the_recipe_sets_the_dropout_while_training_only(run, tiny_config, monkeypatch):
    seen = []
    one_step = loop.one_step
    monkeypatch.setattr(loop, "one_step", lambda task, *rest: seen.append(rates(task.network)) or one_step(task, *rest))
    own = rates(BiRefNet(tiny_config))
    trained = run("a", dataclasses.replace(RECIPE, dropout=0.125, drop_path=0.0625), stop_after=1)
    assert set(seen[0]) == {0.125, 0.0625} and len(seen[0]) == len(own)
    assert rates(trained) == own and len(set(own)) > 2


def test_the_average_has_the_mean_of_the_statistics_and_the_count_of_the_steps(whole):
    state = kept(whole[0])["average"]
    counters = [value for name, value in state.items() if name.endswith("num_batches_tracked")]
    assert counters and {int(value) for value in counters} == {6}
    assert whole[1].state_dict()["squeeze_module.0.bn_in.num_batches_tracked"].dtype == torch.int64


def test_the_network_that_was_given_is_not_changed(tiny_config, tmp_path):
    network = BiRefNet(tiny_config).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train(network, Ellipses, RECIPE, tmp_path, workers=0, stop_after=1)
    assert network.training
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_a_network_in_its_grid_sample_form_comes_back_in_it(tiny_config, tmp_path, whole):
    network = rewrite(new_network(tiny_config).eval(), (DECOMPOSE_DEFORM_CONV,)).model
    trained = train(network, Ellipses, RECIPE, tmp_path, workers=0)
    assert sum(isinstance(module, GridSampleConv) for module in trained.modules()) == 20
    image = Ellipses((64, 96))[0]["image"][None]
    with torch.no_grad():
        assert float((trained(image) - whole[1](image)).abs().max()) < 1e-4


def test_the_random_numbers_of_the_caller_go_on_as_if_nothing_had_been(run):
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3).tolist(), np.random.rand(3).tolist()
    torch.manual_seed(5)
    np.random.seed(5)
    run("a", stop_after=2, validate=weight_of, validate_every=1)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected


# Numbers


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
    state = kept(tmp_path / "a")
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


def test_a_loading_process_that_dies_is_said_in_words(run):
    scenes = {4: signal_self(signal.SIGKILL)}
    with pytest.raises(LumenError) as refusal:
        run("a", scenes=lambda size: Ellipses(size, at=scenes), workers=1)
    said = str(refusal.value)
    assert said.startswith("A process that loads scenes died (DataLoader worker (pid") and "\n" not in said
    assert said.endswith("call again, with fewer workers. The last checkpoint is unharmed.")


def test_an_error_in_a_loading_process_keeps_its_name(run):
    with pytest.raises(KilledError):
        run("a", scenes=lambda size: Ellipses(size, at={0: killed}), workers=1)


# Parts


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


def test_average_moves_by_its_decay_and_counters_are_copied():
    average = {"weight": torch.tensor([0.0, 4.0]), "count": torch.tensor(3), "seen": torch.tensor(False)}
    current = {"weight": torch.tensor([1.0, 0.0]), "count": torch.tensor(9), "seen": torch.tensor(True)}
    update_average(average, current, 0.75)
    assert average["weight"].tolist() == [0.25, 3.0]
    assert int(average["count"]) == 9 and bool(average["seen"])


def test_attention_logits_stay_within_the_recipes_limit(run, tiny_config, tmp_path):
    """Of two equal runs the one with a limit ends within it; the other does not. The last look is at the last step."""
    limit, recipe = 0.01, dataclasses.replace(RECIPE, steps=1, ema_decay=0.0)
    largest = {}
    for name, chosen in (("free", None), ("limited", limit)):
        run(name, dataclasses.replace(recipe, max_attention_logit=chosen))
        network = new_network(tiny_config)
        network.load_state_dict(training.averaged_network(network, recipe, kept(tmp_path / name)["model"]).state_dict())
        images = torch.stack([Ellipses((64, 64))[index]["image"] for index in range(RECIPE.batch)])
        with largest_logits(network) as seen, torch.no_grad():
            network.eval()(images)
        largest[name] = max(float(heads.max()) for heads in seen.values())
    assert largest["free"] > 1.5 * limit
    assert largest["limited"] <= 1.2 * limit  # seen in training mode, before the update that the look follows


def test_a_gate_that_has_opened_is_drawn_back_where_the_recipe_says_so(tiny_config, tmp_path):
    """Two runs from one network whose deep gate is open: the weight of the term decides, and only then is it logged."""
    open_gate = new_network(tiny_config)
    with torch.no_grad():
        open_gate.get_submodule(GATES["deep"].path)[0].bias.fill_(4.0)
    moved = {}
    for name, weight in (("free", 0.0), ("held", 1000.0)):
        recipe = dataclasses.replace(RECIPE, steps=3, ema_decay=0.0, weights=LossWeights(gate=weight))
        trained = train(open_gate, Ellipses, recipe, tmp_path / name, workers=0, log_every=1)
        moved[name] = 4.0 - float(trained.get_submodule(GATES["deep"].path)[0].bias.detach())
        assert ("gate" in rows(tmp_path / name)[0]) == bool(weight)
    assert moved["held"] > 0
    assert moved["held"] > moved["free"]


def test_a_batch_in_parts_is_the_batch_where_no_statistics_are_taken(tiny_config, tmp_path):
    """Batch norms, whose statistics are those of a part, are left out of the network; a part that counts double, or
    is left out, would show."""
    network = new_network(tiny_config)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.BatchNorm2d):
                setattr(module, name, torch.nn.Identity())
    lines, weights = [], []
    for name, accumulate in (("whole", 1), ("parts", 2)):
        recipe = dataclasses.replace(RECIPE, batch=4, steps=1, accumulate=accumulate, dropout=0.0, drop_path=0.0)
        trained = train(network, Ellipses, recipe, tmp_path / name, workers=0, log_every=1)
        lines.append(rows(tmp_path / name)[0])
        weights.append(trained.decoder.conv_out1[0].weight.detach())
    for term in ("bce", "iou", "ssim", "mae", "gradient"):
        assert float(lines[0][term]) == pytest.approx(float(lines[1][term]), rel=1e-4), term
    assert not torch.equal(weights[0], network.decoder.conv_out1[0].weight)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-5)
