"""The NPU's rounding of a conv, in closed form, against the real compiler and its emulation."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lumen_lab as lab
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.quantization.encoding import Encoding
from lumen_lab.quantization.htp_arithmetic import requantised
from lumen_lab.quantization.quantize import placed

SIDE, CHANNELS, ZERO_POINT, INPUT_ZERO_POINT = 96, 12, 128, 117


@pytest.fixture(scope="module")
def conv(tmp_path_factory):
    """Sums of products, factors, and what the emulated NPU makes of them: (C, H, W), (C, 1, 1), (C, H, W)."""
    folder, draw = tmp_path_factory.mktemp("conv"), torch.Generator().manual_seed(0)
    net = nn.Conv2d(16, CHANNELS, 3, padding=1).eval()
    graph = placed(net, torch.zeros(1, 16, SIDE, SIDE), output="logits")
    source, end = graph.quantisers
    input_scale, output_scale = np.float32(0.0173), np.float32(0.0419)
    graph.quantisers[source].encoding = Encoding(float(input_scale), INPUT_ZERO_POINT)
    graph.quantisers[end].encoding = Encoding(float(output_scale), ZERO_POINT)
    weights = torch.randint(-127, 128, net.weight.shape, generator=draw).double()
    weights.view(CHANNELS, -1)[:, 0] = 127
    factors = torch.exp2(-11 + 3 * torch.rand(CHANNELS, generator=draw, dtype=torch.float64))
    factors[0] = 2.0**-10
    scales = (factors.numpy() * output_scale / input_scale).astype(np.float32)
    with torch.no_grad():
        graph.weights()["weight"].copy_(weights * torch.from_numpy(scales).double().view(-1, 1, 1, 1))
        graph.weights()["bias"].zero_()
    report = lab.compile_for_chip(export_qdq(graph, folder / "conv.onnx"), "SM8850", out_dir=folder, progress=False)
    image = torch.randint(0, 256, (1, 16, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    (found,) = lab.emulate(report.context_path, {source: image.numpy()}).values()
    sums = F.conv2d(image.double() - INPUT_ZERO_POINT, weights, padding=1)[0]
    exact = torch.from_numpy(input_scale.astype(float) * scales.astype(float) / output_scale.astype(float))
    return sums, exact.view(-1, 1, 1), torch.from_numpy(np.asarray(found)).view_as(sums).double()


def equal(steps, found):
    """The share of values that are the NPU's, each channel."""
    return ((steps + ZERO_POINT).clamp(0, 255) == found).double().mean((1, 2))


@pytest.mark.npu
def test_every_value_of_a_conv_is_the_npus(conv):
    sums, factor, found = conv
    assert float(equal(requantised(sums, factor), found).min()) > 0.9995


@pytest.mark.npu
def test_the_plain_product_is_not_and_each_part_of_the_formula_matters(conv, monkeypatch):
    sums, factor, found = conv
    module = requantised.__globals__
    plain = equal((sums * factor).round(), found)
    assert float(plain[1:].max()) < 0.99 and float(plain[0]) > 0.999, "a power of two alone is rounded as it should be"
    for name, value in (("FACTOR_BITS", 8), ("BITS_BEHIND_THE_POINT", 4), ("BITS_BEHIND_THE_POINT", 2)):
        monkeypatch.setitem(module, name, value)
        assert float(equal(requantised(sums, factor), found)[1:].median()) < 0.999, name
        monkeypatch.undo()


def test_a_power_of_two_rounds_halves_up():
    sums = torch.arange(-40.0, 41.0, dtype=torch.float64)
    expected = (sums / 16 + 0.5).floor()
    assert torch.equal(requantised(sums * 64, torch.tensor(2.0**-10, dtype=torch.float64)), expected)
