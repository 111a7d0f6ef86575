"""The door: network and pictures in, calibrated graph out; what is refused before it takes time."""

import copy
import importlib
import time

import numpy as np
import pytest
import torch
from torch import nn

import lumen_lab
from lumen_lab import quantize
from lumen_lab.errors import QuantizationError
from lumen_lab.images import to_network_input
from lumen_lab.network.checkpoints import weights_sha256
from lumen_lab.quantization.graph_file import load_graph, save_graph
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.specs import Manifest

SIZE = (8, 12)
quantize_module = importlib.import_module("lumen_lab.quantization.quantize")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, image):
        return 6 * self.head(self.conv(image).relu())


@pytest.fixture
def net():
    return Net().eval()


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8) for _ in range(4)]


@pytest.fixture(scope="module")
def example():
    return torch.zeros(1, 3, *SIZE)


def inputs(images):
    return torch.from_numpy(np.concatenate([to_network_input(image, size=SIZE) for image in images]))


def test_the_mask_is_the_sigmoid_in_steps_of_a_256th(net, images, example):
    graph = quantize(net, images, example=example, progress=False)
    assert isinstance(graph, NPUGraph) and graph.size == SIZE
    with torch.no_grad():
        mask, reference = graph(inputs(images)), net(inputs(images)).sigmoid()
    steps = mask * 256
    assert torch.equal(steps, steps.round()) and steps.max() <= 255
    assert float((mask - reference).abs().mean()) < 0.01


def test_logits_are_those_of_the_network(net, images, example):
    graph = quantize(net, images, example=example, output="logits", method="min_max", progress=False)
    with torch.no_grad():
        logits, reference = graph(inputs(images)), net(inputs(images))
    assert float((logits - reference).abs().max()) < 0.05 * float(reference.abs().max())
    assert graph.made_from["output"] == "logits"


def test_weights_keep_their_names_and_the_network_its_state(net, images, example):
    before = weights_sha256(net)
    graph = quantize(net, images, example=example, progress=False)
    assert set(graph.weights()) == set(net.state_dict())
    with torch.no_grad():
        graph.graph_module.conv.weight.zero_()
    assert weights_sha256(net) == before


def test_what_it_was_made_from(net, images, example):
    first = quantize(net, images, example=example, progress=False).made_from
    assert first["calibration_pictures"] == "4" and first["calibration_method"] == "min_max, by reader"
    assert (first["network"], first["weights_sha256"]) == ("Net", weights_sha256(net))
    assert first["rewrites"] == "none" and first["bits"] == "8" and first["input_shapes"] == "1x3x8x12"
    again = quantize(net, (image for image in images), example=example, progress=False).made_from
    assert again == first
    changed = {
        "calibration_sha256": quantize(net, [*images[:3], images[0]], example=example, progress=False),
        "calibration_method": quantize(net, images, example=example, method="mse", progress=False),
        "bits": quantize(net, images, example=example, bits={"conv2d_1": 16}, progress=False),
    }
    for key, graph in changed.items():
        assert {name for name, value in graph.made_from.items() if value != first[name]} == {key}


def test_bits_widen_an_operation(net, images, example):
    graph = quantize(net, images, example=example, bits={"conv2d_1": 16}, output="logits", progress=False)
    assert graph.quantisers["conv2d_1"].bits == 16 and graph.quantisers["image"].bits == 8


def test_the_student_at_its_own_size(tiny_student, tiny_captured, monkeypatch):
    monkeypatch.setattr(quantize_module, "capture", lambda model, example: copy.deepcopy(tiny_captured))  # takes long
    pictures = torch.randn(2, 3, *tiny_student.config.image_size, generator=torch.Generator().manual_seed(0)) / 2
    graph = quantize(tiny_student, pictures, method="min_max", progress=False)
    assert graph.size == tiny_student.config.image_size
    assert "substitute_slim_tail" in graph.made_from["rewrites"]
    with torch.no_grad():
        mask, reference = graph(pictures), tiny_student(pictures).sigmoid()
    assert mask.shape == reference.shape and float((mask - reference).abs().mean()) < 0.05


def test_pictures_of_another_precision_are_read(net, images, example):
    pictures = inputs(images)
    first, second = (
        quantize(net, [one], example=example, progress=False).calibration.tensors
        for one in (pictures, pictures.double())
    )
    assert first == second


@pytest.mark.parametrize("value", [-2.1, 0.0, 2.2])
def test_pictures_of_one_colour_give_the_network_of_that_colour(net, example, value):
    picture = torch.full((1, 3, *SIZE), value)
    graph = quantize(net, [picture], example=example, output="logits", progress=False)
    with torch.no_grad():
        reference = net(picture)
        assert float((graph(picture) - reference).abs().max()) < 0.03 * float(reference.abs().max())


def test_doors_are_open():
    assert lumen_lab.quantize is quantize
    assert lumen_lab.export_qdq.__module__ == "lumen_lab.deploy.qdq_export"


class Norm(nn.Module):
    def forward(self, image):
        return image.cumsum(-1)


class TwoOutputs(Net):
    def forward(self, image):
        return super().forward(image), image.mean(1, keepdim=True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("pictures", "reason"),
        [
            ([], "no pictures"),
            ([torch.zeros(1, 3, 8, 10)], "picture 0 is 8 × 10"),
            ([torch.full((1, 3, *SIZE), torch.nan)], "holds NaN"),
            ([torch.zeros(1, 1, *SIZE)], "picture 0 has 1 channels, the network takes 3; a grey one is repeated"),
            ([torch.full((1, 3, *SIZE), 200.0)], "goes from 200 to 200, a normalised one lies between -2.12 and 2.64"),
        ],
    )
    def test_pictures_are_looked_into_first(self, net, example, pictures, reason):
        started = time.perf_counter()
        with pytest.raises(QuantizationError, match=reason):
            quantize(net, pictures, example=example, progress=False)
        assert time.perf_counter() - started < 1

    def test_training_mode(self, net, images, example):
        with pytest.raises(QuantizationError, match=r"training mode.*call \.eval\(\)"):
            quantize(net.train(), images, example=example, progress=False)

    def test_no_size(self, net, images):
        with pytest.raises(QuantizationError, match="Give example="):
            quantize(net, images, progress=False)

    def test_an_example_that_is_no_image(self, net, images):
        with pytest.raises(QuantizationError, match=r"one image \(1, 3, H, W\); found shape \(3, 8, 12\)"):
            quantize(net, images, example=torch.zeros(3, *SIZE), progress=False)

    def test_an_operation_without_a_rule(self, images, example):
        with pytest.raises(QuantizationError, match=r"aten\.cumsum\.default .*has no rule"):
            quantize(Norm().eval(), images, example=example, progress=False)

    @pytest.mark.parametrize("output", ["mask", "logits"])
    def test_two_outputs(self, images, example, output):
        with pytest.raises(QuantizationError, match="this one has 2 in a tuple: wrap it"):
            quantize(TwoOutputs().eval(), images, example=example, output=output, progress=False)

    def test_an_unknown_output_or_method(self, net, images, example):
        with pytest.raises(QuantizationError, match="'alpha' was asked for; there are 'mask'"):
            quantize(net, images, example=example, output="alpha", progress=False)
        with pytest.raises(QuantizationError, match="No calibration method 'best'"):
            quantize(net, images, example=example, method="best", progress=False)


def test_other_precisions_and_graphs_are_refused(net, images, example):
    graph = quantize(net, images, example=example, progress=False)
    with pytest.raises(QuantizationError, match="an NPU graph already; calibrate"):
        quantize(graph, images, example=example)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        with pytest.raises(QuantizationError, match=r"computes in (b?float\d\d); integers .* give model.float\(\)"):
            quantize(copy.deepcopy(net).to(dtype), images, example=example.to(dtype))


# Contract


class Ends(nn.Module):
    """Six channels in, and an end of one's choice."""

    def __init__(self, end=None, *, channels=6, out=3):
        super().__init__()
        self.conv, self.end = nn.Conv2d(channels, out, 1), end or nn.Identity()

    def forward(self, image):
        return self.end(self.conv(image))


def six(count=2):
    return torch.rand(count, 6, 8, 8, generator=torch.Generator().manual_seed(0))


def test_other_channels_and_outputs_are_in_the_contract_and_come_back(tmp_path):
    net = Ends().eval()
    graph = quantize(net, six(), example=six(1), output="logits", progress=False)
    path = save_graph(graph, tmp_path / "six.safetensors")
    manifest = Manifest.beside(path)
    assert [spec.shape for spec in (*manifest.inputs, *manifest.outputs)] == [(1, 6, 8, 8), (1, 3, 8, 8)]
    assert torch.equal(load_graph(path, net)(six()), graph(six()))


def test_a_network_that_ends_in_a_sigmoid_gets_no_second_one():
    net = Ends(nn.Sigmoid(), out=1).eval()
    graph = quantize(net, six(), example=six(1), progress=False)
    assert graph.ends_in_mask
    with torch.no_grad():
        assert float((graph(six()) - net(six())).abs().max()) < 0.02
    with pytest.raises(QuantizationError, match="ends in a softmax over classes; give output='logits'"):
        quantize(Ends(nn.Softmax(1)).eval(), six(), example=six(1), progress=False)


def test_a_range_other_than_imagenets_is_asked_for():
    wide = 8 * six() - 4
    with pytest.raises(QuantizationError, match="say with input_range= between what it lies"):
        quantize(Ends().eval(), wide, example=six(1), output="logits", progress=False)
    for given, ends in (((-4.0, 4.0), (-4.0, 4.0)), (None, (float(wide.min()), float(wide.max())))):
        graph = quantize(Ends().eval(), wide, example=six(1), output="logits", input_range=given, progress=False)
        quantiser = next(iter(graph.quantisers.values()))
        assert quantiser.encoding.range == pytest.approx(ends, abs=0.04)
        assert quantiser.fixed == (given is not None)


def test_autocast_has_no_say_and_other_types_are_refused():
    graph = quantize(Ends().eval(), six(), example=six(1), output="logits", progress=False)
    expected = graph(six())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(graph(six()), expected)
    with pytest.raises(QuantizationError, match=r"reads float32 images, found torch.float64; give image.float\(\)"):
        graph(six().double())


def test_a_graph_in_float_is_in_the_mode_that_it_was_in():
    graph = quantize(Ends().eval(), six(), example=six(1), output="logits", progress=False)
    with graph.in_float():
        assert not any(module.training for module in graph.modules())


def test_a_channel_to_which_nothing_comes_and_without_a_bias_is_zero():
    """Its scale times that of an input of zeros must be a number that can be divided by."""
    net = nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    with torch.no_grad():
        net[0].bias.fill_(-100)
        net[2].weight[0], net[2].bias[0] = 0, 0
    found = quantize(net, six(), example=six(1), output="logits", progress=False)(six())
    assert found.isfinite().all() and float(found[:, 0].abs().max()) == 0


def test_a_learnt_scale_that_steps_over_zero_is_that_of_its_encoding():
    graph = quantize(Ends().eval(), six(), example=six(1), output="logits", progress=False)
    graph.learn_scales()
    with torch.no_grad():
        graph.quantisers["conv2d"].scale.mul_(-1)
    before = graph(six())
    graph.freeze_scales()
    assert torch.equal(graph(six()), before)
