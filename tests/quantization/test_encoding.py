"""Encodings: what can be written exactly, and what is refused."""

import numpy as np
import pytest

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.encoding import Encoding, encoding_for_range, unit_encoding


@pytest.mark.parametrize("low, high", [(-1.0, 2.0), (0.5, 4.0), (-3.0, -1.0), (0.0, 0.0), (-1e-30, 1e30), (-7.3, 0.0)])
@pytest.mark.parametrize("bits", [8, 16])
def test_zero_is_exact_and_the_range_is_reached(low, high, bits):
    encoding = encoding_for_range(low, high, bits=bits)
    zero = encoding.quantise(np.zeros(1))
    assert zero[0] == encoding.zero_point
    assert encoding.dequantise(zero)[0] == 0.0
    reached = encoding.range
    assert reached[0] <= min(low, 0.0) + encoding.scale and reached[1] >= max(high, 0.0) - encoding.scale
    assert encoding.dtype == f"uint{bits}"


def test_values_come_back_within_half_a_step_and_are_clipped_outside():
    encoding = encoding_for_range(-2.0, 3.0)
    real = np.linspace(-2.0, 3.0, 1001, dtype=np.float32)
    back = encoding.dequantise(encoding.quantise(real))
    assert np.abs(back - real).max() <= 0.5001 * encoding.scale
    assert encoding.quantise([-100.0, 100.0]).tolist() == [0, 255]
    assert np.array_equal(encoding.quantise(back), encoding.quantise(real))


def test_halves_go_to_the_even_step_whatever_the_zero_point():
    """ONNX rounds before it adds the zero point: with an odd one the other order gives other integers."""
    steps = np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    for zero_point in (10, 11):
        assert (Encoding(1.0, zero_point).quantise(steps).astype(int) - zero_point).tolist() == [0, 2, 2, 0, -2]


def test_integers_are_those_of_onnxruntime():
    """Ties and clipped values among them."""
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    encoding = encoding_for_range(-1.7, 2.9)
    ties = encoding.scale * (np.arange(-120, 200, dtype=np.float32) + 0.5)
    real = np.concatenate([ties, np.random.default_rng(0).normal(0, 2, 4096)]).astype(np.float32)
    helper, kind = onnx.helper, onnx.TensorProto
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["y"])
    constants = [
        helper.make_tensor("scale", kind.FLOAT, [], [encoding.scale]),
        helper.make_tensor("zero_point", kind.UINT8, [], [encoding.zero_point]),
    ]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", kind.FLOAT, real.shape)],
        [helper.make_tensor_value_info("y", kind.UINT8, real.shape)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": real})[0], encoding.quantise(real))


def test_softmax_and_sigmoid_have_steps_of_a_power_of_two():
    assert unit_encoding() == Encoding(1 / 256, 0, 8)
    assert unit_encoding(bits=16).scale == 1 / 65536


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Encoding(0.0, 0), "positive float32"),
        (lambda: Encoding(float("nan"), 0), "positive float32"),
        (lambda: Encoding(0.1, 0), "positive float32"),  # no float32 number
        (lambda: Encoding(1.0, 256), "between 0 and 255"),
        (lambda: Encoding(1.0, 128, signed=True), "between -128 and 127"),
        (lambda: encoding_for_range(float("nan"), 1.0), "finite"),
        (lambda: encoding_for_range(2.0, 1.0), "not below"),
    ],
)
def test_what_is_no_encoding_is_refused(make, words):
    with pytest.raises(QuantizationError, match=words):
        make()


def test_it_is_kept_as_json(tmp_path):
    encoding = encoding_for_range(-0.3, 0.9)
    assert Encoding.load(encoding.save(tmp_path / "encoding.json")) == encoding
