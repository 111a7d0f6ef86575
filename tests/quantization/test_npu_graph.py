"""The NPU's graph as a module: copied, saved, moved, trained, its weights those of the network by name."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun
from lumen_lab.quantization.placing import put_quantisers

SIZE = (8, 12)


class Small(nn.Module):
    """Convs, a norm, a linear and a number; a head that only training uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.linear, self.last = nn.LayerNorm(6), nn.Linear(6, 6), nn.Conv2d(12, 1, 1)
        self.only_training = nn.Conv2d(6, 1, 1)

    def forward(self, image):
        x = F.relu(self.first(image))
        y = torch.sigmoid(self.second(x)) * x
        z = self.linear(self.norm(y.permute(0, 2, 3, 1))) * 0.5
        return self.last(torch.cat([y, z.permute(0, 3, 1, 2)], 1))


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def captured(module):
    return capture(module, torch.zeros(1, 3, *SIZE))


@pytest.fixture
def graph(captured):
    return calibrated(captured)


@pytest.fixture
def image():
    return torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def calibrated(captured, *, reach=4.0, **bits):
    graph = NPUGraph(put_quantisers(copy.deepcopy(captured), bits=bits), SIZE)
    for quantiser in graph.quantisers.values():
        if not quantiser.fixed:
            quantiser.encoding = encoding_for_range(-reach, reach, bits=quantiser.bits)
    return graph


def test_a_batch_is_its_pictures_one_by_one(graph, image):
    with torch.no_grad():
        together, alone = graph(image), torch.cat([graph(one) for one in image.split(1)])
    assert torch.allclose(together, alone, atol=1e-6)


def test_a_copy_is_independent_and_keeps_names_and_sites(graph, image):
    other = copy.deepcopy(graph)
    with torch.no_grad():
        before = graph(image)
        assert torch.equal(other(image), before)
        other.quantisers["relu"].encoding = encoding_for_range(0, 0.5)
        other.weights()["first.weight"].mul_(2)
        assert torch.equal(graph(image), before) and not torch.equal(other(image), before)
    assert other.sites() == graph.sites()
    assert all(node.graph is other.graph_module.graph for node in other.calls().values())


def test_the_state_dict_carries_encodings(graph, captured, image):
    fresh = calibrated(captured, reach=1.0)
    with torch.no_grad():
        assert not torch.equal(fresh(image), graph(image))
        fresh.load_state_dict(graph.state_dict())
        assert torch.equal(fresh(image), graph(image))
    assert {n: q.encoding for n, q in fresh.quantisers.items()} == {n: q.encoding for n, q in graph.quantisers.items()}


def test_learnt_scales_load_into_learnt_and_frozen_graphs(graph, captured, image):
    graph.learn_scales()
    with torch.no_grad():
        for quantiser in graph.quantisers.values():
            quantiser.scale.mul_(1.25)
    for learnt in (True, False):
        fresh = calibrated(captured)
        if learnt:
            fresh.learn_scales()
        fresh.load_state_dict(graph.state_dict())
        with torch.no_grad():
            assert torch.equal(fresh(image), graph(image))


def test_a_state_dict_of_other_widths_is_refused(graph, captured):
    mixed = calibrated(captured, mul=16)
    same_names = {name: value for name, value in mixed.state_dict().items() if name in graph.state_dict()}
    with pytest.raises(RuntimeError, match="quantisers have other widths; place them with the same bits"):
        graph.load_state_dict(same_names, strict=False)
    calibrated(captured, mul=16).load_state_dict(mixed.state_dict())


def test_nothing_stays_behind_on_another_device(graph):
    """On "meta" every operation between devices fails."""
    moved = graph.to("meta")
    assert moved(torch.zeros(2, 3, *SIZE, device="meta")).device.type == "meta"
    assert {value.device.type for value in moved.state_dict().values()} == {"meta"}


# Training


def step(graph, image, target):
    optimiser = torch.optim.SGD(graph.parameters(), lr=0.05)
    loss = (graph(image) - target).square().mean()
    loss.backward()
    optimiser.step()
    return float(loss.detach())


def test_gradients_reach_every_weight_and_the_loss_falls(graph, image):
    target = torch.zeros(3, 1, *SIZE)
    before = {name: weight.detach().clone() for name, weight in graph.weights().items()}
    scales = {name: float(quantiser.scale) for name, quantiser in graph.quantisers.items()}
    losses = [step(graph, image, target)]
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in graph.weights().values())
    graph.zero_grad()
    losses += [step(graph, image, target) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert all(not torch.equal(weight, before[name]) for name, weight in graph.weights().items())
    assert scales == {name: float(quantiser.scale) for name, quantiser in graph.quantisers.items()}


def test_gradients_reach_every_weight_of_the_whole_network(tiny_graph, noise):
    for quantiser in tiny_graph.quantisers.values():
        if not quantiser.fixed:
            quantiser.encoding = encoding_for_range(-8, 8)
    tiny_graph(noise).square().mean().backward()
    without = [name for name, weight in tiny_graph.weights().items() if weight.grad is None]
    assert without == []


def test_learnt_scales_learn_and_can_be_frozen(graph, image):
    graph.learn_scales()
    fixed = [name for name, quantiser in graph.quantisers.items() if quantiser.fixed]
    before = {name: float(quantiser.scale) for name, quantiser in graph.quantisers.items()}
    step(graph, image, torch.zeros(3, 1, *SIZE))
    after = {name: float(quantiser.scale) for name, quantiser in graph.quantisers.items()}
    assert fixed == ["sigmoid"] and after["sigmoid"] == before["sigmoid"]
    assert after["relu"] != before["relu"]
    assert "relu" in graph.quantisers and set(graph.weights()) == set(calibrated_names(graph))
    graph.freeze_scales()
    assert not any("quantiser" in name for name, _ in graph.named_parameters())
    assert {name: float(quantiser.scale) for name, quantiser in graph.quantisers.items()} == pytest.approx(after)


def calibrated_names(graph):
    return [name for name, _ in graph.graph_module.named_parameters() if not name.startswith("quantiser_")]


# Weights by the network's names


def test_weights_go_to_the_network_and_back(graph, module, image):
    network = copy.deepcopy(module)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    unused = graph.load_weights(network.state_dict())
    assert set(unused) == {"only_training.weight", "only_training.bias"}
    with torch.no_grad(), graph.in_float():
        assert torch.equal(graph(image), network(image))
    other = copy.deepcopy(module)
    missing, unexpected = other.load_state_dict(graph.weights(), strict=False)
    assert unexpected == [] and set(missing) == set(unused)
    with torch.no_grad():
        assert torch.equal(other(image), network(image))


def test_the_whole_students_weights_are_found_by_name(tiny_graph, tiny_student, noise):
    with torch.no_grad():
        for weight in tiny_graph.weights().values():
            weight.zero_()
        tiny_graph.load_weights(tiny_student.state_dict())
        with tiny_graph.in_float():
            assert torch.allclose(tiny_graph(noise), tiny_student(noise), atol=1e-4)


@pytest.mark.parametrize("spoil", ["missing", "shape"])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_copied(graph, module, spoil):
    state = {name: value + 1 for name, value in module.state_dict().items()}
    if spoil == "missing":
        del state["last.bias"]
    else:
        state["last.bias"] = torch.zeros(2)
    with pytest.raises(QuantizationError, match="'last.bias' of shape .1,.; the state dict has"):
        graph.load_weights(state)
    assert all(torch.equal(weight, module.state_dict()[name]) for name, weight in graph.weights().items())


# Parts of it


def test_ranges_are_carried_to_a_graph_of_other_widths_and_back(graph, captured):
    graph.quantisers["mul"].encoding = encoding_for_range(-1, 3)
    graph.quantisers["relu"].encoding = encoding_for_range(0, 2)
    graph.quantisers["norm_weight"].encoding = encoding_for_range(0, 1.5)
    mixed = calibrated(captured, mul=16, mul_1=16, reach=9.0)
    mixed.carry_encodings(graph)
    found = {name: quantiser.encoding for name, quantiser in mixed.quantisers.items()}
    assert (found["mul"].bits, found["mul"].range) == (16, pytest.approx((-1, 3), rel=1e-2))
    assert found["mul_8bit"] == graph.quantisers["mul"].encoding
    assert (found["relu_16bit"].bits, found["relu_16bit"].range[1]) == (16, pytest.approx(2))
    assert found["norm_weight"] == graph.quantisers["norm_weight"].encoding
    assert found["constant_mul_1_16bit"].range == pytest.approx((-4, 4), rel=1e-2)
    assert found["sigmoid_16bit"].range[1] == pytest.approx(255 / 256)
    back = calibrated(captured, reach=9.0)
    back.carry_encodings(mixed)
    assert back.quantisers["relu"].encoding == graph.quantisers["relu"].encoding


def test_ranges_of_another_network_are_refused(graph, tiny_graph):
    with pytest.raises(QuantizationError, match="is it of the same network"):
        tiny_graph.carry_encodings(graph)


def test_another_module_is_in_place_only_inside_the_block(graph, image):
    before = graph.quantisers["relu"]
    with torch.no_grad():
        expected = graph(image)
        with pytest.raises(ZeroDivisionError), graph.in_float(["relu"]):
            assert not torch.equal(graph(image), expected)
            raise ZeroDivisionError
        assert graph.quantisers["relu"] is before and torch.equal(graph(image), expected)
    with (
        pytest.raises(QuantizationError, match="No quantiser of this graph is called 'relu9'"),
        graph.in_float(["relu9"]),
    ):
        pass


@torch.no_grad()
def test_a_partial_run_is_the_run_in_pieces(graph, image):
    run = PartialRun(graph)
    for off in (frozenset(), frozenset({graph.calls()["relu"].target, graph.calls()["first_weight"].target})):
        values = run.start(off, image)
        run.advance(values, run.nodes[:20], off=off)
        run.advance(values, run.nodes[20:-1], off=off)
        with graph.in_float(["relu", "first_weight"] if off else []):
            assert torch.equal(values[run.result], graph(image))
        assert set(values) & run.open == {run.result}  # what nobody reads any more is dropped


def test_it_is_not_pickled_but_kept_and_copied(graph, image):
    for keep in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(QuantizationError, match=r"save_graph\(graph, path\)"):
            keep(graph)
    assert torch.equal(copy.deepcopy(nn.Sequential(graph))(image), graph(image))


def test_a_network_without_weights_has_elements_and_channels():
    graph = calibrated(capture(nn.ReLU().eval(), torch.zeros(1, 5, *SIZE)))
    assert graph.channels == 5
    counts = PartialRun(graph).element_counts(SIZE)
    assert {node.name: count for node, count in counts.items()}["relu"] == 5 * 96


def test_elements_are_counted_for_one_picture(graph):
    counts = {node.name: count for node, count in PartialRun(graph).element_counts(SIZE).items()}
    assert (counts["image"], counts["relu"], counts["cat"], counts["conv2d_2"]) == (3 * 96, 6 * 96, 12 * 96, 96)
    assert "first_weight" not in counts
