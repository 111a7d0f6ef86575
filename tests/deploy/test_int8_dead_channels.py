"""What comes out where nothing goes in: biases of channels without weights, and behind inputs that are zero."""

import pytest
import torch
from torch import nn

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.deploy.report import require_int8
from lumen_lab.deploy.steps_off import output_steps
from lumen_lab.quantization.quantize import quantize

pytestmark = pytest.mark.npu
SIZE = (16, 16)


class Dead(nn.Module):
    """Convs behind zeros, behind a gate that is shut, and with a channel of no weights; the same of a linear."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.pruned = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.behind_zeros, self.behind_gate = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.fc, self.fc_of_zeros = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.pruned.weight[:4] = self.fc.weight[:4] = 0
            self.pruned.weight[4] *= 1e-9

    def forward(self, image):
        x = self.begin(image)
        zeros, shut = (x - 100).relu(), x * 1e-11
        tokens, of_zeros = (y.flatten(2).transpose(1, 2) for y in (x, zeros))
        rows = torch.cat([self.fc(tokens), self.fc_of_zeros(of_zeros)], -1).transpose(1, 2)
        maps = [self.pruned(x), self.behind_zeros(zeros), self.behind_gate(shut), rows.unflatten(2, SIZE)]
        return torch.cat(maps, 1)


def test_biases_come_through_on_the_npu_as_in_float(tmp_path):
    net, pictures = Dead().eval(), torch.rand(2, 3, *SIZE) * 2 - 1
    graph = quantize(net, [pictures], example=pictures[:1], output="logits", progress=False)
    with torch.no_grad():
        reference = net(pictures)
        off = (graph(pictures) - reference).abs().amax((0, 2, 3)) / graph.quantisers["cat_1"].encoding.scale
    path = export_qdq(graph, tmp_path / "dead.onnx")
    report = require_int8(compile_for_chip(path, "SM8850", out_dir=tmp_path, traffic=False, progress=False))
    pixels = [graph.quantisers["image"].encoding.quantise(picture.numpy()) for picture in pictures.split(1)]
    steps = output_steps(path, report.context_path, pixels).outputs[0]
    assert off.max() < 4  # steps of the output from float: 77 and more where a bias is lost
    assert steps.max_steps <= 1
