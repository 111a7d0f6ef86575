"""Distillation through the NPU graph: what is trained, resumed, stopped, restored, and refused."""

import copy
import dataclasses
import json

import pytest
import torch

from lumen_lab.distillation import student as student_module
from lumen_lab.distillation.distill import SIDE_HEADS, distill, unused_at_inference
from lumen_lab.distillation.gates import GATES
from lumen_lab.distillation.history import read_history
from lumen_lab.distillation.losses import MaskWeights
from lumen_lab.distillation.recipe import DistillRecipe
from lumen_lab.distillation.transfer import TransferWeights
from lumen_lab.errors import LumenError
from lumen_lab.quantization.quantize import quantize
from tests.distillation.ellipses import Ellipses, KilledError, equal, kept, killed, rows

SIZE = (64, 96)
RECIPE = DistillRecipe(steps=6, batch=2, scenes=8, warmup_steps=1, learning_rate=1e-2, health_every=2, ema_decay=0.5)
MASK_ALONE = TransferWeights(teacher=MaskWeights(0, 0, 0, 0), feature=0.0, gate=0.0, boundary=0.0)


@pytest.fixture(scope="package")
def scenes():
    return Ellipses(SIZE)


@pytest.fixture(scope="package")
def pictures(scenes):
    return [scenes[index]["image"].clamp(-2.1, 2.6) for index in range(2)]


@pytest.fixture(scope="package")
def graph(tiny_student, pictures):
    """The student before training; no test may change it."""
    return quantize(tiny_student, pictures, progress=False)


@pytest.fixture
def teach(graph, tiny, scenes, pictures, tmp_path):
    """``teach(name, recipe, ...)`` distils in a folder of that name."""

    def run(name, recipe=RECIPE, *, student=graph, data=scenes, **options):
        options = {"workers": 0, "log_every": 1, "checkpoint_every": 2, "pictures": pictures} | options
        return distill(student, tiny, data, recipe, tmp_path / name, **options)

    return run


def loss_of(row):
    return sum(float(value) for name, value in row.items() if name not in ("step", "learning_rate"))


# What is trained


@pytest.mark.parametrize("integers", [True, False], ids=["in integers", "in float"])
def test_the_losses_fall_and_the_student_that_was_given_is_not_changed(teach, graph, tmp_path, integers):
    class Same(Ellipses):
        def __getitem__(self, index):
            return super().__getitem__(3)

    before = copy.deepcopy(graph.state_dict())
    recipe = dataclasses.replace(RECIPE, steps=16, integers=integers, health_every=100)
    trained = teach("falls", recipe, data=Same(SIZE)).graph
    losses = [loss_of(row) for row in rows(tmp_path / "falls")]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert equal(before, graph.state_dict())
    assert not equal(before, trained.state_dict())
    assert not trained.training and all(
        not one.requires_grad or name in before for name, one in trained.named_parameters()
    )


def test_in_float_no_range_matters_and_in_integers_it_does(teach, graph, tmp_path):
    """A graph whose ranges are nonsense learns as well in float as another."""
    odd = copy.deepcopy(graph)
    for quantiser in odd.quantisers.values():
        quantiser.scale.mul_(3)
    recipe = dataclasses.replace(RECIPE, steps=1)
    for name, integers in (("float", False), ("integers", True)):
        chosen = dataclasses.replace(recipe, integers=integers)
        teach(f"good {name}", chosen)
        teach(f"odd {name}", chosen, student=odd)
        same = loss_of(rows(tmp_path / f"good {name}")[0]) == pytest.approx(loss_of(rows(tmp_path / f"odd {name}")[0]))
        assert same == (name == "float")


def test_each_weight_of_the_recipe_is_a_term_and_without_it_there_is_none(teach, tmp_path):
    everything = TransferWeights(side=1.0, attention=1.0, teacher=MaskWeights())
    teach("all", dataclasses.replace(RECIPE, steps=1, weights=everything))
    said = set(rows(tmp_path / "all")[0]) - {"step", "learning_rate"}
    masks = {f"{who}_{term}" for who in ("truth", "teacher") for term in ("bce", "iou", "ssim", "mae")}
    assert said == masks | {"side", "feature", "attention", "gate"}
    teach("mask", dataclasses.replace(RECIPE, steps=1, weights=MASK_ALONE))
    assert set(rows(tmp_path / "mask")[0]) == {"step", "learning_rate", *(name for name in masks if "truth" in name)}


def test_each_weight_moves_by_its_share_of_its_own_size(teach, graph):
    """The first step of Adam moves each element by the rate: here a hundredth of the weight's root mean square."""
    recipe = dataclasses.replace(RECIPE, steps=1, warmup_steps=0, integers=False, ema_decay=0.0)
    trained = teach("one", recipe).graph.weights()
    moved = 0
    for name, weight in graph.weights().items():
        size = max(float(weight.detach().square().mean().sqrt()), student_module.SMALLEST_SIZE)
        largest = float((trained[name] - weight).detach().abs().max())
        assert largest <= 1.02 * 0.01 * size, name
        moved += largest > 0.5 * 0.01 * size
    assert moved > 0.7 * len(trained)


def test_learnt_ranges_move_until_they_are_frozen(teach, graph, tmp_path):
    recipe = dataclasses.replace(RECIPE, ranges="learnt", range_rate=1.0, freeze_ranges_at=0.5, ema_decay=0.0)
    half = teach("learnt", recipe, stop_after=3).graph
    whole = teach("learnt", recipe).graph
    names = [name for name, quantiser in graph.quantisers.items() if not quantiser.fixed]
    before, then, after = ({n: float(g.quantisers[n].scale) for n in names} for g in (graph, half, whole))
    assert sum(before[name] != then[name] for name in names) > 0.7 * len(names)
    assert then == after
    assert all(not isinstance(q.scale, torch.nn.Parameter) for q in whole.quantisers.values())
    fixed = teach("fixed", dataclasses.replace(recipe, ranges="fixed")).graph
    assert {n: float(fixed.quantisers[n].scale) for n in names} == before


def test_observed_ranges_follow_the_weights(teach, graph):
    recipe = dataclasses.replace(RECIPE, ranges="observed", observe_every=2, freeze_ranges_at=1.0, learning_rate=5e-2)
    trained = teach("observed", recipe).graph
    names = [name for name, quantiser in graph.quantisers.items() if not quantiser.fixed]
    assert sum(graph.quantisers[n].encoding != trained.quantisers[n].encoding for n in names) > 0.5 * len(names)


def test_heads_that_serve_training_alone_are_named(tiny_student, graph):
    assert set(unused_at_inference(tiny_student, graph)) == {
        f"decoder.{head}_{level}" for head in ("conv_ms_spvn", "gdt_convs_pred") for level in (4, 3, 2)
    }
    assert set(SIDE_HEADS.values()) <= set(unused_at_inference(tiny_student, graph))


# Stopped and resumed


def test_a_run_that_was_killed_goes_on_to_the_same_bits(teach, tmp_path):
    options = {"validate": weight_in_graph, "validate_every": 2}
    whole = teach("whole", **options)
    with pytest.raises(KilledError):
        teach("parts", data=Ellipses(SIZE, at={RECIPE.scenes_at_step(3)[0]: killed}), **options)
    assert kept(tmp_path / "parts")["step"] == 2
    resumed = teach("parts", **options)
    assert equal(whole.graph.state_dict(), resumed.graph.state_dict())
    assert whole.history == resumed.history
    for kind in ("train", "gates", "validation"):
        assert (tmp_path / "whole" / f"{kind}.csv").read_bytes() == (tmp_path / "parts" / f"{kind}.csv").read_bytes()


def weight_in_graph(graph):
    return {"weight": float(graph.weights()["decoder.gdt_convs_attn_4.0.weight"].detach().double().sum())}


def test_a_cached_teacher_teaches_the_same(teach, tmp_path):
    plain = teach("plain").graph
    first = teach("first", cache=tmp_path / "cache").graph
    again = teach("again", cache=tmp_path / "cache").graph
    assert equal(plain.state_dict(), first.state_dict()) and equal(first.state_dict(), again.state_dict())
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) >= RECIPE.scenes


def test_a_graph_computed_in_parts_learns_the_same(teach, tmp_path):
    plain = teach("plain", dataclasses.replace(RECIPE, steps=2)).graph
    parts = teach("parts", dataclasses.replace(RECIPE, steps=2, recompute=3)).graph
    assert equal(plain.state_dict(), parts.state_dict())


def test_a_checkpoint_of_other_taps_is_refused(teach):
    teach("a", stop_after=2)
    with pytest.raises(LumenError, match="made with another recipe"):
        teach("a", dataclasses.replace(RECIPE, taps=RECIPE.taps[:1]))


# Gates


def with_bias(graph, gate, bias):
    """A copy whose gate's bias is raised by so much."""
    changed = copy.deepcopy(graph)
    with torch.no_grad():
        changed.weights()[f"{GATES[gate].path}.0.bias"].add_(bias)
    return changed


DYING = dataclasses.replace(RECIPE, steps=8, weights=MASK_ALONE, integers=False, health_every=1, learning_rate=1e-4)


def test_a_dead_gate_raises_the_alarm_after_its_patience_and_a_living_one_does_not(teach, graph, tmp_path):
    dead = teach("dead", DYING, student=with_bias(graph, "deep", -40.0))
    (alarm,) = (one for one in dead.history.alarms if one["gate"] == "deep" and one["verdict"] == "dead")
    assert alarm["step"] == DYING.patience - 1
    assert "The deep gate is dead: " in alarm["sentence"]
    assert dead.history.alarms == tuple(json.loads((tmp_path / "dead" / "alarms.json").read_text()))
    assert not [one for one in teach("alive", DYING).history.alarms if one["verdict"] == "dead"]


def test_a_run_that_is_told_to_stops_at_the_alarm(teach, graph, tmp_path):
    recipe = dataclasses.replace(DYING, on_alarm="stop")
    stopped = teach("stop", recipe, student=with_bias(graph, "deep", -40.0))
    assert kept(tmp_path / "stop")["step"] == DYING.patience == len(stopped.history.train)


def test_a_gate_is_healed(teach, graph, tmp_path):
    """Its weights come from those that are known to be healthy, in the student and in the average; the losses that hold
    it grow; and it stays alive."""
    recipe = dataclasses.replace(DYING, on_alarm="heal", weights=TransferWeights(), learning_rate=1e-5)
    healthy = {name: weight.detach() for name, weight in graph.weights().items()}
    killed_graph = with_bias(graph, "deep", -40.0)
    healed = teach("heal", recipe, student=killed_graph, healthy=healthy)
    bias = f"{GATES['deep'].path}.0.bias"
    assert float(killed_graph.weights()[bias]) < float(graph.weights()[bias]) - 39
    assert float(healed.graph.weights()[bias]) == pytest.approx(float(graph.weights()[bias]), abs=0.01)
    verdicts = [row["deep/verdict"] for row in healed.history.gates]
    assert verdicts[DYING.patience - 1] == 2 and verdicts[-1] < 2
    assert [one["verdict"] for one in healed.history.alarms if one["gate"] == "deep"][-1] == "healed"
    assert kept(tmp_path / "heal")["task"]["watch"]["louder"] > 1
    mean = [row["deep/mean"] for row in healed.history.gates]
    assert mean[0] < 1e-10 and mean[-1] > 0.1


def test_a_gate_that_dies_again_and_again_ends_the_run(teach, graph):
    """What it is restored to is as dead."""
    killed_graph = with_bias(graph, "deep", -40.0)
    recipe = dataclasses.replace(DYING, steps=30, on_alarm="heal", patience=1)
    stopped = teach("again", recipe, student=killed_graph)
    assert [one["verdict"] for one in stopped.history.alarms].count("healed") == 3
    assert len(stopped.history.train) == 4


# What is refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranges": "learned"}, "ranges 'learned'; there are fixed, learnt, observed"),
        ({"on_alarm": "panic"}, "on_alarm 'panic'; there are warn, stop, heal"),
        ({"freeze_ranges_at": 1.5}, "freeze_ranges_at 1.5; it is a share of the steps"),
        ({"health_every": 0}, "health_every 0; it is a number above 0"),
        ({"batch": 0}, "batch 0; 1 is the least"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(change, said):
    with pytest.raises(LumenError) as refusal:
        dataclasses.replace(RECIPE, **change)
    assert str(refusal.value).startswith(f"A recipe cannot have {said}")


def test_what_is_no_graph_or_of_another_size_is_refused(teach, tiny_student, tmp_path):
    with pytest.raises(LumenError, match="A student is an NPU graph, found BiRefNet; quantize"):
        teach("a", student=tiny_student)
    with pytest.raises(LumenError, match=r"takes images of \(64, 96\), the scenes have \(32, 32\)"):
        teach("a", data=Ellipses((32, 32)))
    with pytest.raises(LumenError, match=r"calibrate on the way; give pictures="):
        teach("a", dataclasses.replace(RECIPE, ranges="observed"), pictures=())
    assert not (tmp_path / "a").exists()


def test_a_history_of_an_empty_folder_is_empty(tmp_path):
    assert read_history(tmp_path).rows() == []
