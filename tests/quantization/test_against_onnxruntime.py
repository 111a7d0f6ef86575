"""Our encodings beside those of onnxruntime's quantiser, which nobody here wrote, on the same graph and pictures."""

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.deploy.qdq_builder import integers_of
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.quantize import quantize

SIZE = (8, 12)


class Net(nn.Module):
    """Operations whose encodings follow from what was seen: here both quantisers have the same rules."""

    def __init__(self):
        super().__init__()
        self.begin, self.end = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
        self.inside = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, image):
        x = self.begin(image)
        x = x * self.inside(x)
        return self.end(x + 0.5 * x.mean((2, 3), keepdim=True))


class Pictures:
    """Calibration pictures as onnxruntime reads them."""

    def __init__(self, pictures):
        self.pictures = iter(pictures.split(1))

    def get_next(self):
        picture = next(self.pictures, None)
        return None if picture is None else {"image": picture.numpy()}


@pytest.fixture(scope="module")
def pictures():
    return torch.rand(6, 3, *SIZE, generator=torch.Generator().manual_seed(0)) * 4 - 2


@pytest.fixture(scope="module")
def ours(pictures):
    torch.manual_seed(0)
    net = Net().eval()
    graph = quantize(net, [pictures], example=pictures[:1], output="logits", progress=False)
    calibrate(graph, [pictures], by_reader=False, input_range=None, progress=False)
    return net, graph


@pytest.fixture(scope="module")
def theirs(ours, pictures, tmp_path_factory):
    """Scales and zero points by the name of the tensor they belong to."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    folder = tmp_path_factory.mktemp("onnxruntime")
    model = export_onnx(ours[0], folder / "net.onnx", example_inputs=(pictures[:1],))
    quantize_static(
        str(model),
        str(folder / "quantised.onnx"),
        Pictures(pictures),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    found = onnx.load(folder / "quantised.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in found.graph.initializer}


def compared(graph, theirs):
    """Whether each activation that both have is encoded alike, by its name."""
    alike = {}
    for name, quantiser in graph.quantisers.items():
        scale = theirs.get(f"{name}_scale")
        if scale is not None and scale.size == 1:
            encoding, zero_point = quantiser.encoding, int(theirs[f"{name}_zero_point"])
            alike[name] = encoding.zero_point == zero_point and np.isclose(encoding.scale, float(scale), rtol=1e-5)
    return alike


def test_ranges_of_activations_are_theirs(ours, theirs):
    alike = compared(ours[1], theirs)
    assert {"image", "conv2d", "conv2d_1", "mul"} <= set(alike)
    assert all(alike.values()), alike


def test_one_range_a_hundredth_wider_is_seen(ours, theirs):
    spoiled = copy.deepcopy(ours[1])
    low, high = spoiled.quantisers["mul"].encoding.range
    spoiled.quantisers["mul"].encoding = encoding_for_range(1.01 * low, 1.01 * high)
    assert [name for name, same in compared(spoiled, theirs).items() if not same] == ["mul"]


def test_scales_and_integers_of_weights_are_theirs(ours, theirs, tmp_path):
    path = export_qdq(ours[1], tmp_path / "net.onnx")
    mine = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    for layer in ("begin", "inside", "end"):
        expected, scale = theirs[f"{layer}.weight_quantized"], theirs[f"{layer}.weight_scale"]
        found = mine[integers_of(f"{layer}_weight")]
        np.testing.assert_allclose(mine[f"{layer}_weight_scale"], scale, rtol=1e-5)
        assert found.shape == expected.shape and found.dtype == expected.dtype == np.int8
        assert np.abs(found.astype(int) - expected).max() <= 1  # a half may fall on either side
        assert (found == expected).mean() > 0.99
