"""Sensitivity: the figures are those of whole runs, kept as they are made, and nothing else is taken for them."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization import sensitivity
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.quantization.sensitivity import Sensitivity, compared, measure_sensitivity, spearman

SIZE = (8, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return F.relu(self.conv(x)) * torch.sigmoid(self.gate(x))


class Net(nn.Module):
    """Two blocks, the first called twice, and two ends."""

    def __init__(self):
        super().__init__()
        self.begin, self.one, self.two, self.end = nn.Conv2d(3, 4, 3, padding=1), Block(), Block(), nn.Conv2d(4, 1, 1)

    def forward(self, image):
        x = self.begin(image)
        return self.end(self.two(self.one(self.one(x)) + x))


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graph():
    torch.manual_seed(0)
    graph = NPUGraph(put_quantisers(capture(Net().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    for name, quantiser in graph.quantisers.items():
        if not quantiser.fixed:
            reach = {"mul_2": 400.0, "conv2d_7": 1.0}.get(name, 4.0)
            quantiser.encoding = encoding_for_range(-4 if reach > 1 else -1, reach)
    return graph


def measured(graph, images, **options):
    return measure_sensitivity(graph, [images[:2], images[2:]], progress=False, **options)


@torch.no_grad()
def by_whole_runs(graph, images, quantisers):
    """The two figures of one part from the graph itself."""
    with graph.in_float():
        reference = graph(images)
    with graph.in_float([name for name in graph.calls() if name not in quantisers]):
        alone = graph(images)
    with graph.in_float(quantisers):
        left_out = graph(images)
    return compared(reference, alone), compared(reference, left_out)


@pytest.mark.parametrize("by", ["site", "tensor"])
def test_figures_are_those_of_whole_runs(graph, images, by):
    found = measured(graph, images, by=by)
    for row in found.entries:
        alone, left_out = by_whole_runs(graph, images, row.quantisers)
        assert (row.alone_db, row.alone_mask) == pytest.approx(alone, abs=1e-6), row.name
        assert (row.left_out_db, row.left_out_mask) == pytest.approx(left_out, abs=1e-6), row.name
    assert (found.all_db, found.all_mask) == pytest.approx(by_whole_runs(graph, images, [])[1], abs=1e-6)
    assert found.pictures == 3


def test_every_quantiser_is_in_one_site_and_every_tensor_but_biases_is_a_row(graph, images):
    sites, tensors = measured(graph, images), measured(graph, images, by="tensor")
    inside = [name for row in sites.entries for name in row.quantisers]
    assert sorted(inside) == sorted(graph.calls())
    assert {row.name for row in sites.entries} >= {"", "begin", "one.conv", "one.gate", "one", "two", "end"}
    biases = {name for name in graph.calls() if name.endswith("_bias")}
    assert {row.name for row in tensors.entries} == set(graph.calls()) - biases
    kinds = {row.name: row.kind for row in tensors.entries}
    assert (kinds["image"], kinds["one_conv_weight"]) == ("activation", "weight")


def test_parts_are_in_order_and_know_their_size(graph, images):
    rows = measured(graph, images, by="tensor").entries
    places = {row.name: row.position for row in rows}
    assert places["image"] < places["conv2d"] < places["mul"] < places["conv2d_7"] <= 1
    assert list(places.values()) == sorted(places.values())
    elements = {row.name: row.elements for row in rows}
    assert (elements["conv2d"], elements["one_conv_weight"]) == (4 * 64, 0)


def test_the_coarsest_tensor_is_the_worst(graph, images):
    found = measured(graph, images, by="tensor")
    assert found.worst(1)[0].name == "mul_2"
    assert found.worst(1, by="left_out")[0].name == "mul_2"
    with pytest.raises(QuantizationError, match="'alone' or 'left_out', found 'size'"):
        found.worst(by="size")


def test_a_group_is_one_row_of_all_its_parts(graph, images):
    found = measured(graph, images, groups=["one", "two"])
    kinds = {row.name: row.kind for row in found.entries}
    assert kinds == {"": "site", "begin": "site", "one": "group", "two": "group", "end": "site"}
    (group,) = [row for row in found.entries if row.name == "one"]
    parts = [row for row in measured(graph, images).entries if row.name.startswith("one")]
    assert sorted(group.quantisers) == sorted(name for row in parts for name in row.quantisers)
    _, left_out = by_whole_runs(graph, images, group.quantisers)
    assert (group.left_out_db, group.left_out_mask) == pytest.approx(left_out, abs=1e-6)
    with pytest.raises(QuantizationError, match="No site lies in the group 'three'"):
        measured(graph, images, groups=["three"])
    with pytest.raises(QuantizationError, match="by 'site' or by 'tensor', found 'block'"):
        measured(graph, images, by="block")


def test_parts_within_a_module_have_the_figures_that_they_have_among_all(graph, images):
    every = {row.name: row for row in measured(graph, images, by="tensor").entries}
    some = measured(graph, images, by="tensor", within=["one"]).entries
    sites = graph.sites()
    assert {row.name for row in some} == {name for name in every if sites[name].startswith("one")}
    assert 0 < len(some) < len(every) and all(row == every[row.name] for row in some)
    with pytest.raises(QuantizationError, match="No site lies in 'on'"):
        measured(graph, images, within=["on"])


def test_a_stopped_run_goes_on(graph, images, tmp_path, monkeypatch):
    whole = measured(graph, images)
    branch, made = sensitivity.Sweep.branch, []

    def stopping(*given):
        made.append(1)
        if len(made) > 5:
            raise KeyboardInterrupt
        return branch(*given)

    monkeypatch.setattr(sensitivity.Sweep, "branch", stopping)
    with pytest.raises(KeyboardInterrupt):
        measured(graph, images, out_dir=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 5
    counted = []
    monkeypatch.setattr(sensitivity.Sweep, "branch", lambda *given: counted.append(1) or branch(*given))
    assert measured(graph, images, out_dir=tmp_path) == whole
    assert len(counted) == 2 * len(whole.entries) - 5


@pytest.mark.parametrize("change", ["encoding", "weight", "pictures", "damage"])
def test_kept_figures_of_something_else_are_not_taken(graph, images, tmp_path, change):
    before = measured(graph, images, out_dir=tmp_path)
    if change == "encoding":
        graph.quantisers["mul"].encoding = encoding_for_range(-4, 20)
    elif change == "weight":
        graph.weights()["end.weight"].data.mul_(1.5)
    elif change == "pictures":
        images = images.flip(-1) * 0.9
    else:
        for path in tmp_path.glob("alone_*.json"):
            path.write_text(path.read_text()[:-9])
    again, afresh = measured(graph, images, out_dir=tmp_path), measured(graph, images)
    assert again == afresh
    assert (again == before) == (change == "damage")


def test_the_record_is_saved_whole(graph, images, tmp_path):
    found = measured(graph, images)
    assert Sensitivity.load(found.save(tmp_path / "sensitivity.json")) == found
    assert json.dumps(found.rows()) and len(found.rows()) == len(found.entries)


def test_nothing_is_left_changed(graph, images):
    state = {name: value.clone() for name, value in graph.state_dict().items()}
    measured(graph, images)
    assert all(torch.equal(value, state[name]) for name, value in graph.state_dict().items())
    assert not any(weight.grad is not None for weight in graph.parameters())


def test_rank_correlation_is_spearmans():
    assert spearman([1, 2, 3, 4], [10, 20, 25, 80]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0
    one, other = np.array([1, 2, 2, 3, 5]), np.array([2, 1, 4, 4, 9])  # ties at mean ranks, by hand
    assert spearman(one, other) == pytest.approx(np.corrcoef([0, 1.5, 1.5, 3, 4], [1, 0, 2.5, 2.5, 4])[0, 1])
