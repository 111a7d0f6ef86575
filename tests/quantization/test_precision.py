"""16 bits where they remove most error per byte: within the budget, with reasons, and worth it when placed."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.quantization.precision import (
    Moves,
    ParetoCurve,
    PrecisionChoice,
    choose_precision,
    in_widths,
    measure_pareto,
)
from lumen_lab.quantization.sensitivity import compared, measure_sensitivity, parts_of

SIZE = (8, 8)
EVERYWHERE = ((1.0, 200.0),)
PLENTY = 10**9


class Net(nn.Module):
    """A product of two activations between convs, with a resize and a joint at the end."""

    def __init__(self):
        super().__init__()
        self.begin, self.middle, self.end = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(16, 1, 1)

    def forward(self, image):
        x = F.relu(self.begin(image))
        y = self.middle(x)
        z = x @ y.transpose(2, 3) * 0.25
        z = F.interpolate(z, size=(4, 4), mode="bilinear", align_corners=True)
        x = F.interpolate(x + 1, size=(4, 4), mode="bilinear", align_corners=True)
        return self.end(torch.cat([x, z], 1))


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return capture(Net().eval(), torch.zeros(1, 3, *SIZE))


@pytest.fixture(scope="module")
def graph(captured):
    graph = NPUGraph(put_quantisers(copy.deepcopy(captured)), SIZE)
    for quantiser in graph.quantisers.values():
        quantiser.encoding = encoding_for_range(-6, 6)
    return graph


@pytest.fixture(scope="module")
def sensitivity(graph, images):
    return measure_sensitivity(graph, [images], by="tensor", progress=False)


def test_bytes_are_those_read_and_written(graph):
    moves = Moves(graph)
    read = {name: (w.elements, sorted(w.readers)) for name, w in moves.tensors.items()}
    assert read["image"] == (192, [("relu", 192, False)])
    assert read["relu"] == (512, [("add", 512, False), ("conv2d_1", 512, False), ("matmul", 512, False)])
    assert read["conv2d_1"] == (512, [("matmul", 512, True)])
    assert read["add"] == (512, [("cat", 128, False)])  # a resize is part of the way
    written, reads = 192 + 5 * 512 + 256 + 16, 192 + 3 * 512 + 512 + 512 + 128 + 128 + 256
    assert moves.total_bytes(frozenset()) == written + reads


def test_a_conversion_costs_what_it_reads_and_writes(graph):
    moves = Moves(graph)
    alone = moves.extra_bytes(frozenset(), frozenset({"add"}))
    relu_again, twice_as_wide, back = 512 * 3 + 512, 512, 128 * 3
    assert alone == relu_again + twice_as_wide + back
    assert moves.extra_bytes(frozenset({"add"}), frozenset({"cat"})) < moves.extra_bytes(
        frozenset(), frozenset({"cat"})
    )


def test_the_budget_is_kept_and_the_sum_is_that_of_the_picks(graph, sensitivity):
    for budget in (0, 1500, 4000, 9000, PLENTY):
        choice = choose_precision(graph, sensitivity, budget_bytes=budget, positions_db=EVERYWHERE)
        assert choice.extra_bytes == sum(pick.extra_bytes for pick in choice.picks) <= budget
        assert set(choice.bits) == {name for pick in choice.picks for name in pick.operations}
        moved = Moves(graph)
        assert moved.total_bytes(frozenset(choice.bits)) == choice.bytes_at_8_bits + choice.extra_bytes
    assert choice.picks and all(0 <= pick.error_removed <= 1 for pick in choice.picks)


def test_a_tensor_gets_its_maker_and_all_who_read_it(graph, sensitivity):
    choice = choose_precision(graph, sensitivity, budget_bytes=PLENTY, positions_db=EVERYWHERE)
    (pick,) = [pick for pick in choice.picks if pick.tensor == "relu"]
    assert {"relu", "conv2d_1", "matmul", "add"} <= set(choice.bits)
    assert "16 bits remove" in pick.reason and pick.reason.endswith("bytes")


def test_the_most_error_per_byte_comes_first(graph, sensitivity):
    choice = choose_precision(graph, sensitivity, budget_bytes=PLENTY, positions_db=EVERYWHERE)
    first = choice.picks[0]
    worth = first.error_removed / first.extra_bytes
    for row in sensitivity.entries:
        tensor = Moves(graph).tensors.get(row.name)
        if row.kind == "activation" and row.name != first.tensor and tensor and not tensor.in_8_bits():
            only = dataclasses.replace(sensitivity, entries=tuple(e for e in sensitivity.entries if e == row))
            (pick,) = choose_precision(graph, only, budget_bytes=PLENTY, positions_db=EVERYWHERE).picks
            share = row.noise / sum(e.noise for e in sensitivity.entries if e.kind == "activation")
            assert share / pick.extra_bytes <= worth


def test_what_cannot_be_is_passed_over_with_the_reason(graph, sensitivity):
    options = {"positions_db": EVERYWHERE, "keep_at_8_bits": ["image"]}
    choice = choose_precision(graph, sensitivity, budget_bytes=3000, **options)
    assert choice.passed_over["conv2d_1"].startswith("it is the second factor of a product")
    assert choice.passed_over["image"] == "image is to stay at 8 bits"
    assert any("more than the" in reason for reason in choice.passed_over.values())


def test_thresholds_go_by_position(graph, sensitivity):
    positions = {row.name: row.position for row in sensitivity.entries}
    middle = positions["matmul"]
    strict_ends = ((middle - 0.01, 200.0), (middle + 0.01, 0.0), (1.0, 200.0))
    taken = choose_precision(graph, sensitivity, budget_bytes=PLENTY, positions_db=strict_ends).picks
    assert "matmul" not in {pick.tensor for pick in taken} and len(taken) > 2
    assert choose_precision(graph, sensitivity, budget_bytes=PLENTY, positions_db=((1.0, 0.0),)).picks == ()
    with pytest.raises(QuantizationError, match="thresholds end before position"):
        choose_precision(graph, sensitivity, budget_bytes=PLENTY, positions_db=((0.2, 50.0),))


def test_sites_are_no_tensors(graph, images):
    sites = measure_sensitivity(graph, [images], progress=False)
    with pytest.raises(QuantizationError, match='measure it with by="tensor"'):
        choose_precision(graph, sites, budget_bytes=PLENTY)


@torch.no_grad()
def test_the_choice_is_worth_it_when_placed(graph, sensitivity, images):
    choice = choose_precision(graph, sensitivity, budget_bytes=PLENTY, positions_db=EVERYWHERE)
    mixed = in_widths(graph, choice.bits)
    assert mixed.quantisers["relu"].bits == 16 and graph.quantisers["relu"].bits == 8
    with graph.in_float():
        reference = graph(images)
    before, after = (compared(reference, one(images))[0] for one in (graph, mixed))
    assert after > before + 6


def test_more_bytes_buy_more_quality(graph, sensitivity, images, tmp_path):
    budgets = [3000, PLENTY]
    curve = measure_pareto(graph, sensitivity, [images], budgets_bytes=budgets, positions_db=EVERYWHERE, progress=False)
    assert [point.budget_bytes for point in curve.points] == [0, *budgets]
    assert curve.points[0].wide_operations == 0 and curve.points[0].sqnr_db == pytest.approx(sensitivity.all_db)
    assert curve.points[0].moved_bytes < curve.points[1].moved_bytes < curve.points[2].moved_bytes
    assert curve.points[2].sqnr_db > curve.points[0].sqnr_db + 6
    assert curve.points[2].mask_error < curve.points[0].mask_error
    assert ParetoCurve.load(curve.save(tmp_path / "curve.json")) == curve


def test_a_choice_is_saved_whole(graph, sensitivity, tmp_path):
    choice = choose_precision(graph, sensitivity, budget_bytes=5000, positions_db=EVERYWHERE)
    assert PrecisionChoice.load(choice.save(tmp_path / "choice.json")) == choice
    assert len(choice.rows()) == len(choice.picks)


def test_a_mask_repeated_for_the_batch_is_no_activation(tiny_graph):
    for quantiser in tiny_graph.quantisers.values():
        if not quantiser.fixed:
            quantiser.encoding = encoding_for_range(-8, 8)
    repeated = {name for name, node in tiny_graph.calls().items() if "repeat" in str(node.args[0].target)}
    parts = parts_of(tiny_graph, PartialRun(tiny_graph), by="tensor")
    assert repeated and {part.kind for part in parts if part.name in repeated} == {"constant"}
    tensors = Moves(tiny_graph).tensors
    assert not repeated & set(tensors)
    assert {part.name for part in parts if part.kind == "activation"} < set(tensors)


def test_a_concatenation_asks_for_those_who_write_its_parts(tiny_graph):
    moves = Moves(tiny_graph)
    shared = {name: tensor.sharing for name, tensor in moves.tensors.items() if tensor.sharing}
    assert shared and all(name.startswith("cat") for name in shared)
    for name, writers in shared.items():
        assert set(writers) < moves.tensors[name].operations()
        assert not set(writers) & set(tiny_graph.quantisers)
