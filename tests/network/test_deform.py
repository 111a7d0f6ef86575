"""The deformable conv where its places are NaN: no look-up out of bounds, and no trace of that in a recorded graph."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.ops import deform_conv2d

from lumen_lab.network.deform import DeformableConv2d, with_readable_places


def conv(kernel=3):
    torch.manual_seed(kernel)
    made = DeformableConv2d(2, 3, kernel)
    for part in (made.offset_conv, made.modulator_conv):
        nn.init.normal_(part.weight, std=0.2)
    return made.eval()


CHILD = """
import torch
from tests.network.test_deform import conv
for kernel in (1, 3, 7):
    for spoil in ("picture", "weight", "infinite", "training"):
        net, x = conv(kernel), torch.randn(2, 2, 9, 6)
        if spoil == "weight":
            net.offset_conv.weight.data[0, 0, 0, 0] = float("nan")
        elif spoil == "infinite":
            x = x * float("inf")
        else:
            x[1] = float("nan")
        y = net(x)
        assert y.isnan().any(), (kernel, spoil)
        assert spoil != "picture" or not y[0].isnan().any(), "the other picture of the batch is as it was"
        if spoil == "training":
            y.nansum().backward()
print("alive")
"""


def test_nan_in_front_gives_nan_and_leaves_the_process_alive(repository):
    """In a process of its own: torchvision's look-up at a NaN place ends the one it runs in."""
    run = subprocess.run([sys.executable, "-c", CHILD], cwd=repository, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "alive"), run.stderr[-2000:]


@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_finite_places_are_looked_up_as_they_are(kernel):
    net, x = conv(kernel), torch.randn(2, 2, 9, 6)
    with torch.no_grad():
        offset, modulator = net.offset_conv(x), 2 * torch.sigmoid(net.modulator_conv(x))
        same = with_readable_places(x, offset, modulator)
        expected = deform_conv2d(x, offset, net.regular_conv.weight, padding=kernel // 2, mask=modulator)
        assert same[0] is offset and same[1] is modulator
        assert torch.equal(net(x), expected)


def test_only_the_taps_that_are_lost_are_nan():
    x, modulator = torch.zeros(1, 2, 4, 5), torch.ones(1, 9, 4, 5)
    offset = torch.zeros(1, 18, 4, 5)
    offset[0, 7, 2, 3] = float("nan")  # dx of the fourth tap
    places, weights = with_readable_places(x, offset, modulator)
    assert places.isfinite().all() and int((places != offset).sum()) == 1
    assert weights.isnan().nonzero().tolist() == [[0, 3, 2, 3]]


def test_a_recorded_graph_and_a_fake_tensor_see_the_look_up_alone():
    net, x = conv(), torch.randn(1, 2, 9, 6)
    graph = torch.export.export(net, (x,)).graph
    names = [str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function"]
    assert names == ["conv2d", "conv2d", "sigmoid", "mul", "zeros", "deform_conv2d"]  # zeros: torchvision's bias
    traced = torch.jit.trace(net, (x,)).inlined_graph
    assert not {"aten::isfinite", "aten::sum", "aten::masked_fill"} & {node.kind() for node in traced.nodes()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert net(torch.empty(1, 2, 9, 6)).shape == (1, 3, 9, 6)
    assert net.to("meta")(x.to("meta")).shape == (1, 3, 9, 6)
