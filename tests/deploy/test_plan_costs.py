"""What rewrites buy: the cases that are compiled, rows kept as they are made, and a plan that the compiler refuses."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from lumen_lab.deploy import plan_costs
from lumen_lab.deploy.plan_costs import CostTable, PlanCase, PlanCost, measure_costs, plan_cases
from lumen_lab.errors import CompileError, RewriteError
from lumen_lab.rewrites import EXACT_PLAN
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV

INPUTS = (torch.zeros(1, 8, 16, 24),)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).eval()


@pytest.fixture
def compiles(monkeypatch):
    """Counts compiles, which are made for real."""
    counted = []
    real = plan_costs.compile_for_chip

    def compile_and_count(path, chip, **more):
        counted.append(chip.name)
        return real(path, chip, **more)

    monkeypatch.setattr(plan_costs, "compile_for_chip", compile_and_count)
    return counted


def test_the_cases_are_the_network_itself_plans_whole_each_alone_and_each_left_out():
    cases = plan_cases(EXACT_PLAN, {"EXACT_PLAN": EXACT_PLAN}, {"EXACT_PLAN": EXACT_PLAN})
    kinds = [case.kind for case in cases]
    assert [kinds.count(kind) for kind in ("whole", "alone", "without")] == [2, len(EXACT_PLAN), len(EXACT_PLAN)]
    assert len({case.name for case in cases}) == len(cases)
    left_out = next(case for case in cases if case.name == "without_fold_batch_norm_from_EXACT_PLAN")
    assert left_out.plan == tuple(rule for rule in EXACT_PLAN if rule is not FOLD_BATCH_NORM)


def test_a_plan_out_of_order_is_refused_before_anything_is_compiled():
    with pytest.raises(RewriteError, match="it must come after"):
        plan_cases((), {}, {"wrong": (FOLD_BATCH_NORM, DECOMPOSE_DEFORM_CONV)})


def test_rows_are_measured_kept_and_taken_up_again(network, compiles, tmp_path):
    cases = [PlanCase("whole", "published", ()), PlanCase("alone", FOLD_BATCH_NORM.name, (FOLD_BATCH_NORM,))]
    asked = {"out_dir": tmp_path / "rows", "example_inputs": INPUTS, "progress": False}
    table = measure_costs(network, cases, ["SM8850"], **asked)
    published, folded = table.costs
    assert published.partitions == folded.partitions == 1
    assert published.macs == folded.macs == 16 * 24 * 32 * 8 * 9
    weights_bytes = 32 * 8 * 9 * 2
    assert published.dram_read_bytes > weights_bytes
    assert published.tiles > 0
    assert "BatchNorm" not in folded.qnn_ops
    assert folded.rewrites == ("FOLD_BATCH_NORM",)

    again = measure_costs(network, cases, ["SM8850"], **asked)
    assert again == table
    assert len(compiles) == 2
    (tmp_path / "rows" / "whole_published_SM8850.json").write_text('{"made_from": ')
    assert measure_costs(network, cases, ["SM8850"], **asked).costs[0].tiles == published.tiles
    assert len(compiles) == 3

    kept = table.save(tmp_path / "table.json")
    assert CostTable.load(kept) == table
    assert CostTable.load(kept).of("alone", "SM8850") == (folded,)


def test_other_weights_are_measured_again(network, tmp_path):
    case = PlanCase("whole", "published", ())
    key = plan_costs._key(case, "a", INPUTS)
    assert key != plan_costs._key(case, "b", INPUTS)
    assert key != plan_costs._key(PlanCase("whole", "published", (FOLD_BATCH_NORM,)), "a", INPUTS)
    cost = PlanCost("whole", "published", (), "SM8850", 81, 1, 1)
    path = tmp_path / "row.json"
    path.write_text(json.dumps({"made_from": key, "cost": cost.to_json()}))
    assert plan_costs._earlier(path, key) == cost
    assert plan_costs._earlier(path, "another") is None


def test_what_the_compiler_refuses_is_a_row_with_its_sentence(network, monkeypatch, tmp_path):
    def refused(*given, **more):
        raise CompileError("Compiling plan for SM8850 left nothing: it gave up.\nLast lines: …")

    monkeypatch.setattr(plan_costs, "compile_for_chip", refused)
    cases = [PlanCase("whole", "published", ())]
    table = measure_costs(network, cases, ["SM8850"], out_dir=tmp_path, example_inputs=INPUTS, progress=False)
    (cost,) = table.costs
    assert cost == dataclasses.replace(cost, error="Compiling plan for SM8850 left nothing: it gave up.")
    assert cost.partitions is None
    assert table.rows()[0]["DRAM, MB"] is None
