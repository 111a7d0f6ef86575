"""The quantised graph in torch beside its QDQ file, tensor by tensor."""

import copy

import pytest
import torch
from torch import nn

from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.deploy.torch_steps import torch_steps
from lumen_lab.errors import ArtifactError
from lumen_lab.quantization.quantize import quantize

SIZE = (8, 12)


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Sigmoid(), nn.Conv2d(8, 1, 1))
    example = torch.zeros(1, 3, *SIZE)
    return quantize(net.eval(), [torch.rand(4, 3, *SIZE)], example=example, progress=False)


@pytest.fixture
def path(graph, tmp_path):
    return export_qdq(graph, tmp_path / "net.onnx")


def test_the_same_integers_at_every_tensor(graph, path):
    report = torch_steps(graph, path, [torch.rand(2, 3, *SIZE), torch.rand(1, 3, *SIZE)])
    assert report.samples == 3
    assert [row.tensor for row in report.outputs] == ["mask"]
    assert report.outputs[0].max_steps == 0
    assert len(report.operations) == 4 and report.first is None
    assert "against torch" in str(report)


def test_a_weight_of_another_integer_is_the_first_that_is_off(graph, path):
    spoiled = copy.deepcopy(graph)
    with torch.no_grad():
        weight = spoiled.weights()["3.weight"]
        weight[0, 0] += weight.abs().max() / 4
    report = torch_steps(spoiled, path, [torch.rand(2, 3, *SIZE)])
    assert report.first.site == "3"
    assert report.outputs[0].max_steps > 0


def test_a_file_with_float_ends_is_refused(graph, tmp_path):
    path = export_qdq(graph, tmp_path / "net.onnx", float_ends=True)
    with pytest.raises(ArtifactError, match="in integers, input to output"):
        torch_steps(graph, path, [torch.rand(1, 3, *SIZE)])


@pytest.mark.parametrize(
    "end",
    [nn.Flatten(2), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)],
    ids=["moved", "resized"],
)
def test_an_output_without_an_encoding_of_its_own(end, tmp_path):
    """What is moved, or resized to the encoding of its input."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), end).eval()
    pictures = torch.rand(2, 3, 8, 8)
    graph = quantize(net, pictures, example=pictures[:1], output="logits", progress=False)
    report = torch_steps(graph, export_qdq(graph, tmp_path / "net.onnx"), [pictures])
    (output,) = report.outputs
    assert output.max_steps <= 1 and output.equal > 0.97
