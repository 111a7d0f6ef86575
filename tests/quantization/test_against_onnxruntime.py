"""Our encodings beside those of quantisers that nobody here wrote, on the same graph and pictures.

onnxruntime's is a dependency. AIMET's is compared where it is installed (the ``peers`` extra).
"""

import copy
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.deploy.qdq_builder import integers_of
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.quantization.calibration import NORMALISED_RANGE, calibrate
from lumen_lab.quantization.encoding import Encoding, encoding_for_range
from lumen_lab.quantization.quantize import quantize

SIZE = (8, 12)
ROUNDING = 1e-5  # of a scale: two libraries add float32 products in different orders

SAME = {"image", "relu", "layer_norm", "linear", "mean"}
SAME |= {"mul", "mul_1", "mul_2", "mul_3", "conv2d_1", "conv2d_2", "conv2d_3"}
"""Activations for which both have the rule "uint8 over what occurred"."""

ON_PURPOSE = {
    "softmax": "the NPU fixes steps of 1/256, onnxruntime takes its range of 0 to 1 in 255 steps",
    "sigmoid": "as softmax: the NPU writes a sigmoid in steps of 1/256 and in no others",
}
"""Activations that we encode otherwise, and why."""


class Net(nn.Module):
    """One operation of each kind whose encoding the two quantisers might see differently."""

    def __init__(self):
        super().__init__()
        self.begin, self.inside = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.widen = nn.LayerNorm(8), nn.Linear(8, 12)
        self.gate, self.end = nn.Conv2d(12, 1, 1), nn.Conv2d(12, 1, 1)
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(0.2, 1.7, 8))
            self.norm.bias.normal_()

    def forward(self, image):
        x = self.begin(image).relu()
        x = self.norm((x * self.inside(x)).permute(0, 2, 3, 1))
        x = torch.softmax(self.widen(x), -1).permute(0, 3, 1, 2)
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        return self.end(x * self.gate(x).sigmoid() * (0.5 * x.mean((2, 3), keepdim=True)))


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
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def graph(net, pictures):
    """Ours by min-max alone: what onnxruntime cannot know (readers, the range of pictures) is left out."""
    made = quantize(net, [pictures], example=pictures[:1], output="logits", progress=False)
    calibrate(made, [pictures], by_reader=False, input_range=None, progress=False)
    return made


def initializers(path):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.fixture(scope="module")
def float_model(net, pictures, tmp_path_factory):
    """The file that the others quantise; its tensors have the names that ours have."""
    path = tmp_path_factory.mktemp("float") / "net.onnx"
    return export_onnx(net, path, example_inputs=(pictures[:1],), output_names=["conv2d_3"])


@pytest.fixture(scope="module")
def theirs(float_model, pictures, tmp_path_factory):
    """onnxruntime's constants by name; those of the linear, which lose their names in the export, found by readers."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    path = tmp_path_factory.mktemp("onnxruntime") / "quantised.onnx"
    quantize_static(
        str(float_model),
        str(path),
        Pictures(pictures),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    (product,) = [node for node in onnx.load(float_model).graph.node if node.op_type == "MatMul"]
    found = initializers(path)
    return {name.replace(f"{product.input[1]}_", "widen.weight_"): values for name, values in found.items()}


@pytest.fixture
def exported(tmp_path):
    """The constants of our file for a graph."""
    return lambda made: initializers(export_qdq(made, tmp_path / "ours.onnx"))


def activations(graph, ours, theirs):
    """Whether scale and zero point are theirs, for each activation that both have, by its name."""
    alike = {}
    for name in graph.quantisers:
        if f"{name}_scale" in theirs and f"{name}_scale" in ours:
            zero_points = (int(values[f"{name}_zero_point"]) for values in (ours, theirs))
            scales = (float(values[f"{name}_scale"]) for values in (ours, theirs))
            alike[name] = len(set(zero_points)) == 1 and np.isclose(*scales, rtol=ROUNDING, atol=0)
    return alike


def differing(graph, ours, theirs):
    return {name for name, same in activations(graph, ours, theirs).items() if not same}


def test_every_activation_is_encoded_as_theirs_or_otherwise_on_purpose(graph, theirs, exported):
    ours = exported(graph)
    assert set(activations(graph, ours, theirs)) == SAME | set(ON_PURPOSE)
    assert differing(graph, ours, theirs) == set(ON_PURPOSE)


def nudged(encoding, how):
    if how == "zero point":
        return Encoding(encoding.scale, encoding.zero_point + 1)
    factor = {"a hundredth wider": 1.01, "a thousandth wider": 1.001}[how]
    return encoding_for_range(*(factor * end for end in encoding.range))


@pytest.mark.parametrize("how", ["zero point", "a hundredth wider", "a thousandth wider"])
@pytest.mark.parametrize("name", ["image", "mul", "layer_norm", "linear"])
def test_one_nudged_range_is_seen(graph, theirs, exported, name, how):
    spoiled = copy.deepcopy(graph)
    spoiled.quantisers[name].encoding = nudged(spoiled.quantisers[name].encoding, how)
    assert differing(spoiled, exported(spoiled), theirs) == {name} | set(ON_PURPOSE)


def test_softmax_and_sigmoid_have_the_steps_that_the_npu_fixes(theirs, exported, graph):
    ours = exported(graph)
    for name in ON_PURPOSE:
        assert (float(ours[f"{name}_scale"]), int(ours[f"{name}_zero_point"])) == (1 / 256, 0)
        assert float(theirs[f"{name}_scale"]) != 1 / 256
    assert float(theirs["softmax_scale"]) == pytest.approx(1 / 255)


WEIGHTS = {"begin": "begin_weight", "inside": "inside_weight", "end": "end_weight", "widen": "widen_weight_transposed"}
"""Per channel on the axis of outputs: 0 of a conv, 1 of a product's (in, out)."""


def weight_differences(ours, theirs):
    """Layers whose weights have other scales, or integers that are more than a tie apart."""
    found = set()
    for layer, name in WEIGHTS.items():
        mine, expected = ours[integers_of(name)], theirs[f"{layer}.weight_quantized"]
        scale, their_scale = ours[f"{name}_scale"], theirs[f"{layer}.weight_scale"]
        if (mine.shape, mine.dtype, scale.shape) != (expected.shape, expected.dtype, their_scale.shape):
            found.add(layer)
            continue
        apart = np.abs(mine.astype(int) - expected)
        if not np.allclose(scale, their_scale, rtol=ROUNDING, atol=0) or apart.max() > 1 or (apart > 0).mean() > 0.01:
            found.add(layer)
    return found


def test_scales_and_integers_of_weights_are_theirs(graph, theirs, exported):
    ours = exported(graph)
    assert ours["widen_weight_transposed_scale"].shape == (12,)
    assert weight_differences(ours, theirs) == set()


@pytest.mark.parametrize("layer", sorted(WEIGHTS))
def test_one_nudged_channel_of_a_weight_is_seen(graph, theirs, exported, layer):
    spoiled = copy.deepcopy(graph)
    with torch.no_grad():
        spoiled.weights()[f"{layer}.weight"][0] *= 1.01
    assert weight_differences(exported(spoiled), theirs) == {layer}


def test_scales_on_the_other_axis_are_seen(graph, theirs, exported):
    ours = exported(graph)
    ours["widen_weight_transposed_scale"] = np.abs(ours[integers_of("widen_weight_transposed")]).max(1) / 127.0
    assert weight_differences(ours, theirs) == {"widen"}


@pytest.mark.parametrize("layer, call", [("begin", "conv2d"), ("inside", "conv2d_1"), ("end", "conv2d_3")])
def test_biases_of_convs_are_counted_in_input_times_weight_as_theirs(graph, theirs, exported, layer, call):
    ours = exported(graph)
    np.testing.assert_allclose(
        ours[f"{call}_bias_scale"].reshape(-1), theirs[f"{layer}.bias_quantized_scale"], rtol=ROUNDING
    )
    mine, expected = ours[integers_of(f"{call}_bias")], theirs[f"{layer}.bias_quantized"]
    assert mine.dtype == expected.dtype == np.int32
    np.testing.assert_allclose(mine, expected, rtol=ROUNDING, atol=1)


def test_a_layer_norms_factor_is_unsigned_on_purpose(graph, theirs, exported):
    """HTP refuses a signed one (error 3110): with onnxruntime's every layer norm stays on the CPU."""
    ours = exported(graph)
    integers, scale = ours[integers_of("norm_weight")], float(ours["norm_weight_scale"])
    assert (integers.dtype, theirs["norm.weight_quantized"].dtype) == (np.uint8, np.int8)
    assert scale == pytest.approx(1.7 / 255) and float(theirs["norm.weight_scale"]) == pytest.approx(1.7 / 127)


def test_a_layer_norms_shift_is_counted_in_steps_of_its_output_on_purpose(graph, theirs, exported):
    """The NPU rounds it to those whatever the file says; onnxruntime counts in input × factor, as for a conv."""
    ours = exported(graph)
    assert float(ours["layer_norm_bias_scale"]) == float(ours["layer_norm_scale"])
    in_conv_steps = float(theirs["mul_scale"]) * float(theirs["norm.weight_scale"])
    assert float(theirs["norm.bias_quantized_scale"].item()) == pytest.approx(in_conv_steps)


def test_a_linears_bias_is_counted_in_input_times_weight_on_purpose(graph, theirs, exported):
    """The NPU's FullyConnected adds it in those steps; onnxruntime's is an addition of its own, uint8, behind a
    quantiser that rounds the product first."""
    ours = exported(graph)
    expected = ours["layer_norm_scale"] * ours["widen_weight_transposed_scale"]
    np.testing.assert_allclose(ours["linear_bias_scale"], expected, rtol=ROUNDING)
    assert ours[integers_of("linear_bias")].dtype == np.int32
    assert theirs["widen.bias_zero_point"].dtype == np.uint8


def test_a_pictures_range_is_known_and_not_observed_on_purpose(graph, theirs, pictures):
    """A normalised picture reaches from black to white whatever the calibration pictures show."""
    whole = copy.deepcopy(graph)
    calibrate(whole, [pictures], by_reader=False, progress=False)
    low, high = whole.quantisers["image"].encoding.range
    assert (low, high) == pytest.approx(NORMALISED_RANGE, abs=whole.quantisers["image"].encoding.scale)
    assert whole.quantisers["image"].encoding.scale > 1.1 * float(theirs["image_scale"])


@pytest.fixture(scope="module")
def aimets(float_model, pictures):
    """AIMET's encodings of activations by name: min-max, unsigned, no settings of an NPU.

    Its weights stay in float here: by default it looks at activations with the weights rounded already, as nothing
    else here does, and its ranges are then up to a hundredth away.
    """
    pytest.importorskip("aimet_onnx", reason="AIMET is not installed: pip install aimet-onnx (the peers extra)")
    from aimet_onnx.quantsim import QuantizationSimModel

    widths = {"param_type": "int8", "activation_type": "int8"}
    sim = QuantizationSimModel(onnx.load(float_model), quant_scheme="min_max", **widths)
    for name in sim.param_names:
        sim.qc_quantize_op_dict[name].enabled = False
    sim.compute_encodings([{"image": picture.numpy()} for picture in pictures.split(1)])
    found = {}
    for name, quantiser in sim.qc_quantize_op_dict.items():
        encodings = quantiser.get_encodings() if quantiser.enabled else None
        if encodings:
            found[name] = SimpleNamespace(scale=encodings[0].delta, zero_point=-round(encodings[0].offset))
    return found


def test_ranges_of_activations_are_aimets(graph, aimets):
    found = {name: graph.quantisers[name].encoding for name in SAME & set(aimets)}
    assert SAME - set(found) <= {"conv2d_3"}  # its name for what leaves the network is another
    for name, encoding in found.items():
        assert encoding.scale == pytest.approx(aimets[name].scale, rel=ROUNDING), name
        assert encoding.zero_point == aimets[name].zero_point, name


def test_a_range_that_is_not_aimets_is_seen(graph, aimets):
    spoiled = nudged(graph.quantisers["mul"].encoding, "a thousandth wider")
    assert spoiled.scale != pytest.approx(aimets["mul"].scale, rel=ROUNDING)
