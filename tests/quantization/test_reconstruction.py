"""Rounding learnt against a block's float output: better on pictures that it has not seen, or left as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization import reconstruction
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.fake_quantize import weight_scale
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.quantization.reconstruction import Reconstruction, SoftRounding, reconstruct_block

SIZE = (8, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return self.two(F.relu(self.one(x))) + x


class Net(nn.Module):
    """A block between two ends; its weights have one large value in each channel, so that steps are
    coarse."""

    def __init__(self):
        super().__init__()
        self.begin, self.block, self.end = nn.Conv2d(3, 16, 3, padding=1), Block(), nn.Conv2d(16, 1, 1)
        with torch.no_grad():
            for conv in (self.block.one, self.block.two):
                conv.weight[:, 0, 0, 0] = 4.0

    def forward(self, image):
        return self.end(self.block(self.begin(image)))


@pytest.fixture(scope="module")
def images():
    """Smooth pictures (16, 3, 8, 8)."""
    return F.interpolate(torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0)), SIZE, mode="bilinear")


@pytest.fixture(scope="module")
def calibrated():
    torch.manual_seed(0)
    graph = NPUGraph(put_quantisers(capture(Net().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    for quantiser in graph.quantisers.values():
        quantiser.encoding = encoding_for_range(-400, 400)
    for name in ("image", "conv2d"):
        graph.quantisers[name].encoding = encoding_for_range(-4, 4)
    return graph


@pytest.fixture
def graph(calibrated):
    """Activations nearly exact, so that the weights' rounding is what errs."""
    graph = copy.deepcopy(calibrated)
    for quantiser in graph.quantisers.values():
        quantiser.encoding = encoding_for_range(*quantiser.encoding.range, bits=16)
    return graph


def weights_of(graph):
    return {name: weight.detach().clone() for name, weight in graph.weights().items()}


def learnt(graph, images, **options):
    options = {"steps": 150, "progress": False, **options}
    return reconstruct_block(graph, "block", [images[:6], images[6:12]], [images[12:]], **options)


def test_it_is_better_on_pictures_it_has_not_seen(graph, images):
    before = weights_of(graph)
    found = learnt(graph, images)
    assert found.kept and found.after_db > found.before_db + 0.4
    assert 0.02 < found.weights_moved < 0.6
    after = weights_of(graph)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"block.one.weight", "block.two.weight"}
    assert "it is kept" in found.reason and found.rows()[0]["gain_db"] == found.after_db - found.before_db


def test_weights_end_on_one_of_their_two_steps(graph, images):
    before = weights_of(graph)
    learnt(graph, images)
    for name in ("block.one.weight", "block.two.weight"):
        scale = weight_scale(before[name], 0)
        assert torch.allclose(weight_scale(graph.weights()[name], 0), scale, rtol=1e-6)
        steps = graph.weights()[name].detach() / scale
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert float((steps - before[name] / scale).abs().max()) < 1 + 1e-3


def test_the_network_is_nearer_to_float_too(graph, images):
    with torch.no_grad():
        with graph.in_float():
            reference = graph(images[12:])
        before = (graph(images[12:]) - reference).square().mean()
        learnt(graph, images)
        assert (graph(images[12:]) - reference).square().mean() < before


def test_what_does_not_help_is_put_back(graph, images):
    before = weights_of(graph)
    found = learnt(graph, images, steps=0, learn_scales=True)
    assert not found.kept and "left as it was" in found.reason
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(graph).items())
    spoilt = learnt(graph, images, learning_rate=50.0, decision=0.0, steps=3)
    assert not spoilt.kept and spoilt.after_db < spoilt.before_db
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(graph).items())


def test_the_seed_decides(graph, images):
    graphs = [copy.deepcopy(graph) for _ in range(3)]
    for one, seed in zip(graphs, (1, 1, 2)):
        learnt(one, images, seed=seed, steps=100)
    first, same, other = (one.weights()["block.one.weight"] for one in graphs)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_scales_are_learnt_where_asked_and_are_buffers_afterwards(calibrated, images):
    """At 8 bits in ranges far too wide, it is the activations that err."""
    graph, other = copy.deepcopy(calibrated), copy.deepcopy(calibrated)
    with_scales, without = learnt(graph, images, learn_scales=True), learnt(other, images)
    assert with_scales.after_db > without.after_db
    inside = {name for name in graph.quantisers if name not in ("image", "conv2d", "conv2d_3")}
    moved = {n for n in graph.quantisers if graph.quantisers[n].encoding != calibrated.quantisers[n].encoding}
    assert moved == inside
    assert not any("quantiser" in name for name, _ in graph.named_parameters())


def test_soft_rounding_begins_at_the_float_weight():
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    soft = SoftRounding(weight, weight_scale(weight, 0))
    begun = soft(weight, weight_scale(weight, 0))
    assert torch.allclose(begun, weight, atol=0.02 * float(weight_scale(weight, 0).max()))
    assert torch.equal(soft.rounded(), soft.nearest)
    assert bool((soft.pinned.sum(1) >= 1).all())
    with torch.no_grad():
        soft.offset.fill_(20.0)
    assert float(soft.undecided(2.0).detach()) == 0 and float(soft.rounded().detach().abs().max()) == 127


def test_a_block_without_weights_and_too_many_pictures_are_refused(graph, images, monkeypatch):
    with pytest.raises(QuantizationError, match="No weight with scales of its own lies under 'blok'"):
        reconstruct_block(graph, "blok", [images], [images])
    with pytest.raises(QuantizationError, match="was given no picture"):
        reconstruct_block(graph, "block", [images], [])
    monkeypatch.setattr(reconstruction, "LARGEST_BYTES", 20_000)
    with pytest.raises(QuantizationError, match="give fewer, or a smaller block"):
        learnt(graph, images)


def test_the_record_is_saved_whole(graph, images, tmp_path):
    found = learnt(graph, images, steps=2)
    assert Reconstruction.load(found.save(tmp_path / "block.json")) == found
