"""8 and 16 bits in one network: one partition, no float operation, and the integers of the CPU in the emulation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.deploy.report import require_int8
from lumen_lab.deploy.steps_off import output_steps
from lumen_lab.quantization.quantize import quantize

pytestmark = pytest.mark.npu
SIZE = (8, 8)


class Net(nn.Module):
    """A residual stream with a gate, an attention head with a mask, two resizes and a joint."""

    def __init__(self):
        super().__init__()
        self.begin, self.twice = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.gate, self.norm, self.end = nn.Conv2d(16, 1, 1), nn.LayerNorm(16), nn.Conv2d(32, 1, 1)
        self.query, self.key, self.value, self.mix = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.zeros(1, 64, 64))
        self.mask[:, :, :8] = -8

    def forward(self, image):
        x = F.relu(self.begin(image))
        x = self.twice(x) + x
        x = x * torch.sigmoid(self.gate(x))
        tokens = x.flatten(2).transpose(1, 2)
        seen = self.norm(tokens)
        weights = torch.softmax(self.query(seen) * 0.25 @ self.key(seen).transpose(1, 2) + self.mask, -1)
        tokens = tokens + self.mix(F.gelu(weights @ self.value(seen)))
        y = tokens.transpose(1, 2).reshape(-1, 16, 8, 8)
        both = [F.interpolate(one, size=(16, 16), mode="bilinear", align_corners=True) for one in (y, x)]
        return self.end(torch.cat(both, 1))


WIDE = {
    "residual stream": ["add", "mul", "sigmoid", "layer_norm", "add_2"],
    "attention": ["matmul", "mul_1", "add_1", "softmax", "matmul_1", "gelu"],
    "end": ["cat", "conv2d_3"],
}
MOST_STEPS = {8: 3, 16: 3 * 257}  # off at the output: what eight-bit rounding before it leaves, in its own steps


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def pictures():
    return torch.rand(6, 3, *SIZE, generator=torch.Generator().manual_seed(0)) * 4 - 2


@pytest.mark.parametrize("part", WIDE)
def test_a_part_in_16_bits_is_integers_on_the_npu(net, pictures, tmp_path, part):
    bits = dict.fromkeys(WIDE[part], 16)
    mixed = quantize(net, [pictures], example=pictures[:1], output="logits", bits=bits, progress=False)
    assert {name for name, one in mixed.quantisers.items() if one.bits == 16} >= set(bits)
    path = export_qdq(mixed, tmp_path / "mixed.onnx")
    report = require_int8(compile_for_chip(path, "SM8850", out_dir=tmp_path, traffic=False, progress=False))
    assert report.partitions == 1
    assert {op.dtype for op in report.ops} >= {"u8", "u16"}
    pixels = mixed.quantisers["image"].encoding.quantise(pictures[:1].numpy())
    (steps,) = output_steps(path, report.context_path, pixels).outputs
    assert steps.max_steps <= MOST_STEPS[mixed.quantisers["conv2d_3"].bits]


def test_sixteen_bits_are_nearer_to_float(net, pictures):
    bits = {name: 16 for part in WIDE.values() for name in part}
    how = {"example": pictures[:1], "output": "logits", "progress": False}
    with torch.no_grad():
        reference = net(pictures)
        errors = [
            float((quantize(net, [pictures], bits=one, **how)(pictures) - reference).square().mean())
            for one in (None, bits)
        ]
    assert errors[1] < errors[0] / 4
