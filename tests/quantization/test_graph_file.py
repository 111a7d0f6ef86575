"""A graph that was saved comes back as it was, and into no other network."""

import copy

import pytest
import torch
from torch import nn

from lumen_lab.errors import ArtifactError, QuantizationError
from lumen_lab.quantization.graph_file import bits_in, load_graph, save_graph
from lumen_lab.quantization.quantize import quantize
from lumen_lab.specs import Manifest, manifest_path

SIZE = (8, 12)


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1)).eval()


@pytest.fixture(scope="module")
def graph():
    return quantize(
        net(), [torch.rand(4, 3, *SIZE)], example=torch.zeros(1, 3, *SIZE), bits={"relu": 16}, progress=False
    )


@pytest.fixture
def path(graph, tmp_path):
    return save_graph(graph, tmp_path / "graph.safetensors")


def test_it_comes_back_bit_for_bit_whatever_weights_the_network_has(graph, path):
    other = net()
    with torch.no_grad():
        other[0].weight += 1
    found, image = load_graph(path, other), torch.rand(2, 3, *SIZE)
    assert torch.equal(found(image), graph(image))
    assert {name: one.encoding for name, one in found.quantisers.items()} == {
        name: one.encoding for name, one in graph.quantisers.items()
    }
    assert found.quantisers["relu"].bits == 16
    assert {name for name, one in found.quantisers.items() if one.fixed} == {
        name for name, one in graph.quantisers.items() if one.fixed
    }
    assert found.made_from == graph.made_from and found.size == SIZE


def test_a_trained_graph_comes_back_with_learnt_scales(graph, tmp_path):
    trained = copy.deepcopy(graph)
    trained.learn_scales()
    with torch.no_grad():
        trained.quantisers["relu"].scale *= 1.5
        trained.weights()["0.weight"][0] += 0.25
    image = torch.rand(1, 3, *SIZE)
    found = load_graph(save_graph(trained, tmp_path / "trained.safetensors"), net())
    assert torch.equal(found(image), trained(image))
    assert not torch.equal(found(image), graph(image))


def test_another_network_is_refused_with_what_differs(path):
    with pytest.raises(QuantizationError, match="does not fit this network"):
        load_graph(path, net(width=4))
    with pytest.raises(QuantizationError, match="made with network = Sequential, the network given has Conv2d"):
        load_graph(path, nn.Conv2d(3, 1, 1).eval())


def test_what_is_no_graph_or_damaged_is_refused(graph, path, tmp_path):
    manifest = Manifest.beside(path)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ArtifactError):
        load_graph(path, net())
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with pytest.raises(ArtifactError, match="make it first|manifest"):
        load_graph(tmp_path / "other.safetensors", net())
    with pytest.raises(QuantizationError, match="change the ending"):
        save_graph(graph, tmp_path / "graph.pt")
    assert manifest.kind == "npu graph" and manifest_path(path).is_file()


def test_a_graph_of_unknown_origin_is_not_saved(graph, tmp_path):
    bare = copy.deepcopy(graph)
    bare.made_from = {}
    with pytest.raises(QuantizationError, match="make it with quantize"):
        save_graph(bare, tmp_path / "graph.safetensors")
    assert not list(tmp_path.iterdir())


def test_widths_are_read_as_they_were_written():
    assert bits_in("8") == {}
    assert bits_in("add_3: 16, softmax: 8") == {"add_3": 16, "softmax": 8}
