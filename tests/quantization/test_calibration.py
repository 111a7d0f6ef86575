"""One pass over pictures: what is set, what is refused, and that nothing else changes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lumen_lab.errors import QuantizationError
from lumen_lab.images import to_network_input
from lumen_lab.quantization.calibration import NORMALISED_RANGE, Calibration, calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.quantization.ranges import LEAST_ERROR, METHODS
from lumen_lab.quantization.readers import sigmoid_ends

SIZE = (8, 12)


class Gate(nn.Module):
    """A conv, attention between its pixels with a mask as shifted windows have it, and a sigmoid gate."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.register_buffer("mask", -100.0 * (torch.arange(96) > 60))

    def forward(self, image):
        x = self.conv(image).relu()
        tokens = x.flatten(2).transpose(1, 2)
        mixed = (tokens @ tokens.transpose(1, 2) + self.mask).softmax(-1) @ tokens
        return (self.gate(x) * 4).sigmoid() * mixed.transpose(1, 2).reshape(x.shape)


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return capture(Gate().eval(), torch.zeros(1, 3, *SIZE))


@pytest.fixture
def graph(captured):
    return NPUGraph(put_quantisers(copy.deepcopy(captured)), SIZE)


@pytest.fixture(scope="module")
def pictures():
    low, high = NORMALISED_RANGE
    return low + (high - low) * torch.rand(6, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def encodings(graph):
    return {name: quantiser.encoding for name, quantiser in graph.quantisers.items()}


def error_db(graph, pictures):
    """SQNR of the quantised graph's output against the same graph in float."""
    with torch.no_grad(), graph.in_float():
        reference = graph(pictures)
    with torch.no_grad():
        noise = (graph(pictures) - reference).square().sum()
    return float(10 * torch.log10(reference.square().sum() / noise))


@pytest.mark.parametrize("method", [*METHODS, LEAST_ERROR])
def test_every_method_calibrates(graph, pictures, method):
    found = calibrate(graph, [pictures], method=method, progress=False)
    assert (found.method, found.pictures) == (method, 6)
    assert {row.name for row in found.tensors} == {n for n, q in graph.quantisers.items() if not q.fixed} | {"image"}
    assert error_db(graph, pictures) > 15
    for row in found.tensors:
        assert (row.low, row.high) == graph.quantisers[row.name].encoding.range


def test_batches_and_kinds_of_pictures_change_nothing(graph, pictures):
    reference = calibrate(graph, [pictures], progress=False)
    set_once = encodings(graph)
    for given in (pictures, list(pictures), pictures.split(4), ({"image": part} for part in pictures.split(2))):
        assert calibrate(graph, given, progress=False) == reference
        assert encodings(graph) == set_once


def test_images_are_resized_and_normalised(graph):
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    ready = torch.from_numpy(to_network_input(image, size=SIZE))
    assert calibrate(graph, [image], progress=False) == calibrate(graph, [ready], progress=False)


def test_the_order_of_pictures_matters_to_the_average_alone(graph, pictures):
    for method in METHODS:
        there, back = (calibrate(graph, p, method=method, progress=False).tensors for p in (pictures, pictures.flip(0)))
        assert (there == back) == (method != "moving_average")


def test_the_input_has_the_range_of_black_to_white(graph, pictures):
    calibrate(graph, [0.1 * pictures], progress=False)
    assert graph.quantisers["image"].encoding.range == pytest.approx(NORMALISED_RANGE, abs=0.01)
    assert graph.quantisers["image"].fixed
    assert list(NORMALISED_RANGE) == pytest.approx([-2.1179, 2.64], abs=1e-4)


def test_the_input_can_be_observed(graph, pictures):
    calibrate(graph, [0.1 * pictures], method="min_max", input_range=None, progress=False)
    low, high = float(0.1 * pictures.min()), float(0.1 * pictures.max())
    assert graph.quantisers["image"].encoding.range == pytest.approx((low, high), abs=0.01)


def test_ranges_by_reader_are_those_of_softmax_and_sigmoid(graph, pictures):
    found = {row.name: row for row in calibrate(graph, pictures, method="min_max", progress=False).tensors}
    softmaxed, gated = (next(r for r in found.values() if r.reader == kind) for kind in ("softmax", "sigmoid"))
    assert softmaxed.lowest < -90 and softmaxed.low > -10
    assert gated.low >= sigmoid_ends()[0] - 0.1 and gated.high <= sigmoid_ends()[1] + 0.1
    alike = {row.name: row for row in calibrate(graph, pictures, by_reader=False, progress=False).tensors}
    assert alike[softmaxed.name].low < -90 and alike[softmaxed.name].reader == "anything"


def test_by_reader_the_network_is_nearer_to_float(graph, pictures):
    errors = {}
    for by_reader in (True, False):
        calibrate(graph, pictures, method="min_max", by_reader=by_reader, progress=False)
        errors[by_reader] = error_db(graph, pictures)
    assert errors[True] > errors[False] + 3


def test_constants_keep_what_they_are(graph, pictures):
    found = calibrate(graph, pictures, progress=False)
    mask = next(row for row in found.tensors if "mask" in row.name)
    assert mask.method == "constant" and mask.low == pytest.approx(-100)


def test_it_is_a_record(graph, pictures, tmp_path):
    found = calibrate(graph, pictures, progress=False)
    assert Calibration.load(found.save(tmp_path / "calibration.json")) == found
    assert len(found.rows()) == len(found.tensors) and "image" in found._repr_html_()


class Stopped:
    """Pictures whose second cannot be had."""

    def __init__(self, pictures, error):
        self.pictures, self.error = pictures, error

    def __iter__(self):
        yield self.pictures
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("gone")], ids=repr)
def test_an_interrupted_pass_leaves_the_graph_as_it_was(graph, pictures, error):
    calibrate(graph, pictures, progress=False)
    before, result = encodings(graph), graph(pictures).detach()
    with pytest.raises(type(error)):
        calibrate(graph, Stopped(3 * pictures, error), progress=False)
    assert encodings(graph) == before
    assert torch.equal(graph(pictures), result)


class TestRefusals:
    @pytest.mark.parametrize("none", [[], torch.zeros(0, 3, *SIZE), iter(())], ids=["list", "tensor", "iterator"])
    def test_no_pictures(self, graph, none):
        with pytest.raises(QuantizationError, match="no pictures; give a few dozen"):
            calibrate(graph, none, progress=False)

    def test_another_size(self, graph, pictures):
        with pytest.raises(QuantizationError, match="picture 6 is 8 × 10, the network takes 8 × 12"):
            calibrate(graph, [pictures, pictures[..., :10]], progress=False)

    def test_nan(self, graph, pictures):
        spoiled = pictures.clone()
        spoiled[4, 0, 0, 0] = torch.nan
        with pytest.raises(QuantizationError, match="picture 4 holds NaN"):
            calibrate(graph, [spoiled], progress=False)

    def test_a_network_that_makes_nan(self, graph, pictures):
        before = encodings(graph)
        with torch.no_grad():
            graph.graph_module.gate.weight[0] = torch.inf
        with pytest.raises(QuantizationError, match="picture 0 makes 'conv2d_1' at 'gate' NaN or infinite"):
            calibrate(graph, [pictures], progress=False)
        assert encodings(graph) == before

    @pytest.mark.parametrize("wrong", [torch.zeros(1, 3, *SIZE, dtype=torch.uint8), torch.zeros(8, 12), "cat.jpg"])
    def test_what_is_no_picture(self, graph, wrong):
        with pytest.raises(QuantizationError, match="calibration picture is a normalised float tensor"):
            calibrate(graph, [wrong], progress=False)

    def test_an_unknown_method(self, graph, pictures):
        with pytest.raises(QuantizationError, match="No calibration method 'median'; there are min_max, .*least_error"):
            calibrate(graph, pictures, method="median", progress=False)
