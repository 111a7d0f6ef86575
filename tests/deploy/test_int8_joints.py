"""What a concatenation reads: the NPU writes it in the encoding of the concatenation at once, movements between or not.

Ranges are set to half of what occurs, so that a range that is not asked for, or not kept, is seen as clipped values.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.deploy.steps_off import output_steps
from lumen_lab.quantization import placing
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.npu_graph import NPUGraph

pytestmark = pytest.mark.npu
SIZE = (16, 16)
JOINED = {"conv2d", "conv2d_1", "add", "gelu", "linear", "layer_norm"}
"""What is written in the encoding of the concatenation; behind all others stand a slice, a padding and the like."""


class Joint(nn.Module):
    """Convs, a linear, a layer norm, a sum and a GELU, each moved on its way to one concatenation."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 8, 3, padding=1) for _ in range(8))
        self.one, self.fc, self.norm = nn.Conv2d(3, 1, 3, padding=1), nn.Linear(3, 8), nn.LayerNorm(3)
        nn.init.normal_(self.norm.bias, std=0.5)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        c = [conv(x) for conv in self.convs]
        parts = [
            c[0].permute(0, 1, 3, 2),
            c[1].reshape(-1, 4, 2, *SIZE).transpose(1, 2).reshape(-1, 8, *SIZE),
            c[2][:, :4],
            F.pad(c[3][..., 1:-1], (1, 1)),
            F.max_pool2d(c[4], 3, 1, 1),
            self.one(x).expand(-1, 4, -1, -1),
            (c[5] + c[6]).repeat(1, 2, 1, 1),
            F.gelu(c[7]).unsqueeze(1).squeeze(1),
            self.fc(tokens).transpose(1, 2).unflatten(2, SIZE),
            self.norm(tokens).transpose(1, 2).unflatten(2, SIZE),
        ]
        return torch.cat(parts, 1)


def most_steps_off(folder):
    """The emulated NPU beside the CPU, each range that a tensor has for itself cut in half."""
    torch.manual_seed(0)
    graph = NPUGraph(placing.put_quantisers(capture(Joint().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    pictures = torch.randn(2, 3, *SIZE)
    calibrate(graph, pictures.split(1), method="min_max", progress=False)
    for name, quantiser in graph.quantisers.items():
        if name not in ("x", "cat", "norm_weight"):
            low, high = quantiser.encoding.range
            quantiser.encoding = encoding_for_range(low / 2, high / 2)
    path = export_qdq(graph, folder / "joint.onnx", output_name="joint")
    report = compile_for_chip(path, "SM8850", out_dir=folder, traffic=False, progress=False)
    assert report.partitions == 1 and not report.float_ops
    pixels = [graph.quantisers["x"].encoding.quantise(picture.numpy()) for picture in pictures.split(1)]
    return set(graph.quantisers), output_steps(path, report.context_path, pixels).outputs[0].max_steps


def test_what_is_moved_to_a_concatenation_is_written_as_the_npu_writes_it(tmp_path):
    names, steps = most_steps_off(tmp_path)
    assert names == {"x", "norm_weight", "cat", *(f"conv2d_{number}" for number in range(2, 9))}
    assert steps <= 1


def test_ranges_of_their_own_are_not_kept_by_the_npu(tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "share_with_inputs", lambda *given: None)
    names, steps = most_steps_off(tmp_path)
    assert names > JOINED and steps > 10
