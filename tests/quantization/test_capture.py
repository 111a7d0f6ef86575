"""A network as a graph for any batch: the same function, the same names, nothing that only the exporter needs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import capture, live_nodes, module_stack, site_of
from lumen_lab.quantization.node_rules import op_name


@pytest.mark.parametrize("batch", [1, 3])
def test_the_graph_computes_what_the_network_does(tiny_student, tiny_captured, batch):
    x = torch.randn(batch, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = tiny_student(x), tiny_captured(x)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_weights_keep_their_names_and_are_its_own(tiny_student, tiny_captured):
    ours, theirs = dict(tiny_captured.named_parameters()), dict(tiny_student.named_parameters())
    assert ours.keys() <= theirs.keys()
    assert all(torch.equal(value, theirs[name]) and value is not theirs[name] for name, value in ours.items())


def test_what_only_the_exporter_needs_is_gone(tiny_captured):
    names = {op_name(node) for node in tiny_captured.graph.nodes if node.op == "call_function"}
    assert not names & {"aten.dropout.default", "aten.alias.default", "aten.contiguous.default", "aten.relu_.default"}
    assert not [node for node in tiny_captured.graph.nodes if node.op == "call_module"]


def test_nodes_know_the_module_they_come_from(tiny_student, tiny_captured):
    modules = dict(tiny_student.named_modules())
    convs = [node for node in tiny_captured.graph.nodes if op_name_or_none(node) == "aten.conv2d.default"]
    assert convs and all(isinstance(modules[site_of(node)], nn.Conv2d) for node in convs)
    assert all(module_stack(node)[0][0] == "" for node in convs)


def op_name_or_none(node):
    return op_name(node) if node.op == "call_function" else None


def test_constants_are_computed_once_and_weights_are_not():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 2))
            self.register_buffer("index", torch.tensor([0, 3, 4]))

        def forward(self, x):
            ramp = torch.arange(3.0).exp() * 2  # of nothing: a constant
            return x + ramp + self.table[self.index, 0]

    graph = capture(Net().eval(), torch.zeros(1, 3))
    names = [op_name(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert "aten.exp.default" not in names and "aten.arange.default" not in names
    graph(torch.zeros(4, 3)).sum().backward()
    assert graph.table.grad is not None
    live = {node.name for node in live_nodes(graph)}
    assert live == {"x", "add", "add_1", "output"}


def test_a_batch_that_only_gives_sizes_is_not_live():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.randn(4, 3))

        def forward(self, x):
            return x.reshape(-1, 3) + self.mask.repeat(x.shape[0], 1)

    graph = capture(Net().eval(), torch.zeros(1, 4, 3))
    live = live_nodes(graph)
    assert [node.name for node in graph.graph.nodes if op_name_or_none(node) == "aten.repeat.default"] == ["repeat"]
    assert "repeat" not in {node.name for node in live}
    x = torch.randn(5, 4, 3)
    assert torch.equal(graph(x), Net.forward(graph, x))


def test_the_graph_can_be_copied(tiny_captured):
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(tiny_captured)(x), tiny_captured(x))


def test_training_mode_is_refused(tiny_student):
    with pytest.raises(QuantizationError, match="training mode"):
        capture(copy.deepcopy(tiny_student).train(), torch.zeros(1, 3, 64, 96))


def test_a_network_that_looks_at_values_is_refused():
    class Net(nn.Module):
        def forward(self, x):
            return x * 2 if float(x.sum()) > 0 else x

    with pytest.raises(QuantizationError, match="cannot be exported with an open batch"):
        capture(Net().eval(), torch.zeros(1, 3))


class InPlace(nn.Module):
    """A conv, and what changes its result in place."""

    def __init__(self, then):
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 4, 1), then

    def forward(self, image):
        return self.then(self.conv(image))


def relu_then_read(x):
    F.relu_(x)
    return 2 * x


def read_before_and_after(x):
    before = x * 3
    x += before
    return x * before


def twice(x):
    x.mul_(2)
    x.sub_(1.0)
    return x.sigmoid_()


@pytest.mark.parametrize("then", [relu_then_read, read_before_and_after, twice])
def test_what_is_read_after_a_change_in_place_is_what_was_changed(then):
    """Reading the tensor by its old name would give what it was before."""
    torch.manual_seed(0)
    net, images = InPlace(then).eval(), torch.randn(2, 3, 4, 4)
    graph = capture(net, images[:1])
    assert not any(str(node.target).partition(".")[2].split(".")[0].endswith("_") for node in graph.graph.nodes)
    with torch.no_grad():
        assert torch.equal(graph(images), net(images))


def test_a_change_that_views_would_see_is_refused():
    def seen(x):
        part = x[:, :2]
        x.add_(1.0)
        return part

    with pytest.raises(
        QuantizationError, match=r"aten.add_.Tensor at .* changes a tensor of which 'slice_1'"
    ):
        capture(InPlace(seen).eval(), torch.zeros(1, 3, 4, 4))
