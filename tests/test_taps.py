"""Named activations: what is recorded, and that hooks come off."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from lumen_lab.taps import shapes_only, tap, watch


class Pair(NamedTuple):
    mask: torch.Tensor
    edge: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(2, 2, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.head = Heads()
        nn.init.constant_(self.scale.weight, -1.0)

    def forward(self, x):
        return self.head(self.act(self.scale(x)) + self.scale(-x), "both")


class Heads(nn.Module):
    def forward(self, x, form):
        return Pair(x, {"list": [x, x + 1], "name": form})


@pytest.fixture
def net():
    return Net().eval()


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


X = torch.tensor([[1.0, 2.0]])


def test_each_call_is_recorded_in_order(net):
    with tap(net, ["scale", "act"]) as taps:
        net(X)
    assert [len(taps["scale"].outputs), len(taps["act"].outputs)] == [2, 1]
    assert torch.equal(taps["scale"].inputs[0][0], X)
    assert torch.equal(taps["scale"].inputs[1][0], -X)
    assert torch.equal(taps["scale"].outputs[1], torch.tensor([[3.0, 3.0]]))


def test_an_operation_in_place_behind_the_module_does_not_show(net):
    with tap(net, ["scale", "act"]) as taps:
        net(X)
    assert torch.equal(taps["scale"].outputs[0], torch.tensor([[-3.0, -3.0]]))
    assert torch.equal(taps["act"].inputs[0][0], torch.tensor([[-3.0, -3.0]]))
    assert torch.equal(taps["act"].outputs[0], torch.zeros(1, 2))


def test_named_tuples_and_nested_outputs_keep_their_form(net):
    with tap(net, ["head", ""]) as taps:
        out = net(X)
    assert taps["head"].inputs[0][1] == "both"
    recorded = taps[""].outputs[0]
    assert isinstance(recorded, Pair)
    assert recorded.edge["name"] == "both"
    assert torch.equal(recorded.edge["list"][1], out.edge["list"][1])
    out.edge["list"][0].add_(9)
    assert not torch.equal(recorded.mask, out.mask)


def test_recorded_tensors_carry_no_gradient(net):
    with tap(net, ["scale"]) as taps:
        net(X)
    assert not taps["scale"].outputs[0].requires_grad


def test_hooks_come_off_when_the_block_ends(net):
    with tap(net, ["scale", "act"]) as taps, watch(net, lambda *call: None):
        assert hooks(net) == 4 + 4
    net(X)
    assert hooks(net) == 0
    assert taps["scale"].outputs == []


@pytest.mark.parametrize("opened", [lambda net: tap(net, ["scale"]), lambda net: watch(net, lambda *call: None)])
def test_hooks_come_off_when_the_block_fails(net, opened):
    with pytest.raises(RuntimeError, match="mat1 and mat2|size"), opened(net):
        net(torch.zeros(1, 5))
    assert hooks(net) == 0


def test_an_unknown_path_names_the_nearest_and_leaves_no_hook(net):
    with pytest.raises(KeyError, match="No module at 'haed'; the nearest are .'head'"):
        tap(net, ["act", "haed"]).__enter__()
    assert hooks(net) == 0


def test_a_path_near_nothing_names_some(net):
    with pytest.raises(KeyError, match="the nearest are .'scale', 'act', 'head'"), tap(net, ["zzzzzz"]):
        pass


def test_watching_sees_inner_modules_first(net):
    seen = []
    with watch(net, lambda path, module, inputs, output: seen.append((path, type(module).__name__))):
        net(X)
    assert seen == [("scale", "Linear"), ("act", "ReLU"), ("scale", "Linear"), ("head", "Heads"), ("", "Net")]


def test_training_outputs_of_the_network_can_be_tapped(tiny_config):
    from lumen_lab.network import BiRefNet
    from lumen_lab.network.decoder import SideOutputs

    network = BiRefNet(tiny_config).train()
    with torch.no_grad(), tap(network, ["decoder", "bb"]) as taps:
        network(torch.randn(2, 3, 64, 64))
    assert isinstance(taps["decoder"].outputs[0], SideOutputs)
    assert len(taps["bb"].outputs) == 2


def test_with_shapes_only_nothing_is_computed():
    huge = nn.Conv2d(3, 64, 3, padding=1)
    with shapes_only():
        out = huge(torch.empty(1000, 3, 4096, 4096))  # 4 TiB, were it real
    assert tuple(out.shape) == (1000, 64, 4096, 4096)
    assert not out.requires_grad
    assert torch.zeros(1).item() == 0


def test_with_shapes_only_a_network_in_training_mode_keeps_its_statistics():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train()
    with shapes_only():
        network(torch.ones(2, 3, 8, 8))
    assert torch.equal(network[1].running_mean, torch.zeros(4))
    assert torch.equal(network[1].running_var, torch.ones(4))


def test_with_shapes_only_no_value_is_there_to_be_read():
    from torch._subclasses.fake_tensor import DataDependentOutputException

    with shapes_only(), pytest.raises(DataDependentOutputException):
        nn.Linear(2, 1)(torch.ones(1, 2)).item()
