"""Emitters and ends that no other test covers: grid sampling, pooling, float ends, sixteen bits."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.specs import Manifest

SIZE = (10, 14)


class Sampled(nn.Module):
    """A map read at places that are computed from it."""

    def __init__(self, **how):
        super().__init__()
        self.places, self.how = nn.Conv2d(3, 2, 3, padding=1), {"align_corners": True} | how

    def forward(self, image):
        return F.grid_sample(image, self.places(image).permute(0, 2, 3, 1), **self.how)


class Pooled(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 1), how

    def forward(self, image):
        return F.max_pool2d(self.conv(image), 3, **self.how)


def graph_of(module, **placed):
    torch.manual_seed(0)
    graph = NPUGraph(put_quantisers(capture(module.eval(), torch.zeros(1, 3, *SIZE)), **placed), SIZE)
    calibrate(graph, torch.randn(3, 3, *SIZE).split(1), method="min_max", progress=False)
    return graph


def run(path, value):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: value})[0]


def both(graph, path, *, float_ends=False):
    """(torch, onnxruntime) as real numbers, and the output's scale, for one image."""
    encoding = next(iter(graph.quantisers.values())).encoding
    image = torch.randn(1, 3, *SIZE).numpy()
    integers = encoding.quantise(image)
    with torch.no_grad():
        expected = graph(torch.from_numpy(encoding.dequantise(integers))).numpy()
    if float_ends:
        return expected, run(path, image)
    returned = Manifest.beside(path).outputs[0]
    real = (run(path, integers).astype(np.float32) - returned.zero_point) * np.float32(returned.scale)
    return expected, real


@pytest.mark.parametrize(
    "module",
    [Sampled(), Sampled(align_corners=False), Pooled(), Pooled(stride=1, padding=1), Pooled(stride=(2, 1))],
    ids=["aligned", "half pixels", "pool", "pool padded", "pool strided"],
)
def test_it_gives_the_numbers_of_torch(module, tmp_path):
    graph = graph_of(module)
    expected, found = both(graph, export_qdq(graph, tmp_path / "net.onnx"))
    assert np.ptp(expected) > 0 and found.shape == expected.shape
    step = Manifest.beside(tmp_path / "net.onnx").outputs[0].scale
    off = np.abs(found - expected) / step
    assert off.max() < 1.01 and (off > 0.01).mean() < 0.02, "a tie at most, of two ways to add up four products"


def test_float_ends_are_quantised_inside_and_give_the_same_numbers(tmp_path):
    graph = graph_of(Pooled(stride=1))
    path = export_qdq(graph, tmp_path / "net.onnx", output_name="logits", float_ends=True)
    model, manifest = onnx.load(path), Manifest.beside(path)
    kinds = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    assert kinds == [onnx.TensorProto.FLOAT] * 2
    assert [(spec.dtype, spec.scale) for spec in (*manifest.inputs, *manifest.outputs)] == [("float32", None)] * 2
    expected, found = both(graph, path, float_ends=True)
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_sixteen_bits_take_the_opset_that_has_them(tmp_path):
    graph = graph_of(Pooled(stride=1), bits={"conv2d": 16})
    path = export_qdq(graph, tmp_path / "wide.onnx")
    assert onnx.load(path).opset_import[0].version == 21
    assert onnx.load(export_qdq(graph_of(Pooled(stride=1)), tmp_path / "net.onnx")).opset_import[0].version == 20
    assert Manifest.beside(path).outputs[0].dtype == "uint16"
    expected, found = both(graph, path)
    assert np.array_equal(found, expected)
