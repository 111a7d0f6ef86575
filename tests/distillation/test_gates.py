"""Gates that are alive, and one that was killed."""

import pytest
import torch

from lumen_lab.distillation.gates import GATES, gate_loss, gate_maps, gate_rows
from lumen_lab.errors import LumenError
from lumen_lab.network import BiRefNet


@pytest.fixture
def network(tiny_config):
    torch.manual_seed(0)
    return BiRefNet(tiny_config).eval()


@pytest.fixture
def images():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, 64, 96, generator=draw) for _ in range(2)]


def fixed(network, path, bias):
    """The gate at ``path`` becomes sigmoid(bias) everywhere."""
    conv = network.get_submodule(path)[0]
    torch.nn.init.zeros_(conv.weight)
    torch.nn.init.constant_(conv.bias, bias)


def test_a_constant_gate_by_hand(network, images):
    for gate, bias in zip(GATES.values(), (-25.0, 0.0, 4.0)):
        fixed(network, gate.path, bias)
    dead, alive, open_ = gate_rows(network, images)
    assert dead["mean"] == pytest.approx(1.3888e-11, rel=1e-3)
    assert (dead["alive"], dead["under_5_percent"]) == (False, 1.0)
    assert (alive["mean"], alive["alive"], alive["under_5_percent"], alive["over_95_percent"]) == (0.5, True, 0.0, 0.0)
    assert open_["mean"] == pytest.approx(0.98201, abs=1e-4)
    assert (open_["alive"], open_["over_95_percent"]) == (False, 1.0)


def test_one_dead_picture_shows_in_the_lowest_mean(network, images):
    rows = gate_rows(network, images)
    alone = [gate_rows(network, [image]) for image in images]
    for row, first, second in zip(rows, *alone):
        assert row["lowest_mean"] == pytest.approx(min(first["mean"], second["mean"]))
        assert row["highest_mean"] == pytest.approx(max(first["mean"], second["mean"]))
        assert row["mean"] == pytest.approx((first["mean"] + second["mean"]) / 2)


def test_nothing_is_left_hooked(network, images):
    gate_rows(network, images)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_a_network_in_training_and_no_images_are_refused(network, images):
    with pytest.raises(LumenError, match="found training=False, 0 images"):
        gate_rows(network, [])
    with pytest.raises(LumenError, match="found training=True"):
        gate_rows(network.train(), images)


def test_the_loss_by_hand():
    """Means .05 and .9 are .15 and .1 outside .2 … .8; one of .5 costs nothing."""
    maps = {name: torch.full((2, 1, 3, 4), mean, dtype=torch.float64) for name, mean in zip(GATES, (0.05, 0.5, 0.9))}
    assert float(gate_loss(maps)) == pytest.approx(0.15**2 + 0.1**2)
    assert float(gate_loss({"deep": maps["middle"]})) == 0


def test_the_loss_draws_an_open_gate_back_and_leaves_the_alive_ones(network, images):
    fixed(network, GATES["deep"].path, 4.0)
    for path in (GATES["middle"].path, GATES["shallow"].path):
        fixed(network, path, 0.0)
    with gate_maps(network) as maps:
        network(torch.stack(images))
    gate_loss(maps).backward()
    gradients = [float(network.get_submodule(gate.path)[0].bias.grad or 0) for gate in GATES.values()]
    assert gradients[0] > 0 and gradients[1:] == [0.0, 0.0]
    assert not any(module._forward_hooks for module in network.modules())
