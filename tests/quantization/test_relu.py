"""A ReLU and what it reads: one operation on the NPU, so that both are on one grid."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import QUANTISER, put_quantisers

SIZE = (8, 8)


class Read(nn.Module):
    """What a ReLU reads, with or without another reader."""

    def __init__(self, *, twice, summed):
        super().__init__()
        self.conv, self.other, self.end = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 1, 1)
        self.twice, self.summed = twice, summed

    def forward(self, image):
        x = self.conv(image) + self.other(image) if self.summed else self.conv(image)
        return self.end(F.relu(x) + x if self.twice else F.relu(x))


@pytest.mark.parametrize("summed", [False, True], ids=["conv", "sum"])
@pytest.mark.parametrize("twice", [False, True], ids=["alone", "read again"])
def test_a_relu_and_what_it_reads_are_in_one_encoding(twice, summed):
    """The compiler makes one operation of them, so that two grids would be one too many."""
    graph = NPUGraph(put_quantisers(capture(Read(twice=twice, summed=summed).eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    before = "add" if summed else "conv2d"
    assert (before in graph.quantisers) == twice
    assert ("relu" in graph.quantisers) == (not twice)
    called = [node.target for node in graph.graph_module.graph.nodes if node.op == "call_module"]
    assert called.count(QUANTISER + before) == (2 if twice else 0)


def test_a_relu_behind_a_layer_norm_has_its_own():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.ReLU()).eval()
    graph = NPUGraph(put_quantisers(capture(net, torch.zeros(1, 3, *SIZE))), SIZE)
    assert {"layer_norm", "relu"} <= set(graph.quantisers)
