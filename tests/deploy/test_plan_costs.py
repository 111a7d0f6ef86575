"""What rewrites buy: the cases that are compiled, rows kept as they are made, and a plan that the compiler refuses."""

import copy
import dataclasses
import json
import os
from dataclasses import dataclass, field

import pytest
import torch
from filelock import FileLock
from torch import nn

from lumen_lab.deploy import plan_costs
from lumen_lab.deploy.plan_costs import CostTable, PlanCase, measure_costs, plan_cases
from lumen_lab.errors import ArtifactError, CompileError, RewriteError
from lumen_lab.rewrites import EXACT_PLAN
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.record import Rewrite
from lumen_lab.specs import Exact

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


@dataclass(frozen=True)
class Figures:
    """What a compile reports, as far as a row takes it."""

    partitions: int = 1
    cpu_nodes: tuple = ()
    binary_bytes: int = 5
    compile_s: float = 1.0
    peak_memory_bytes: int = 7
    traffic: None = None
    qnn_ops: dict = field(default_factory=lambda: {"Conv2d": 1})


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Measures plans with a compiler that is not there; ``compiled`` counts, ``answer`` may be an error."""

    class Measure:
        compiled, answer = 0, Figures()

        def __call__(self, network, *cases, out_dir=tmp_path / "rows"):
            asked = {"out_dir": out_dir, "example_inputs": INPUTS, "progress": False}
            return measure_costs(network, cases, ["SM8850"], **asked)

    measure = Measure()

    def compile_for_chip(path, chip, **more):
        measure.compiled += 1
        if isinstance(measure.answer, Exception):
            raise measure.answer
        return measure.answer

    monkeypatch.setattr(plan_costs, "compile_for_chip", compile_for_chip)
    return measure


PUBLISHED = PlanCase("whole", "published", ())


def scaled(factor):
    """A rewrite of one name that is built in another way by each factor."""

    def built(site):
        conv = copy.deepcopy(site.module)
        conv.weight.data *= factor
        return {site.path: conv}

    return Rewrite("scale_conv", nn.Conv2d, built, Exact(), "a test", "test", code="SCALE_CONV")


def test_a_row_is_of_what_was_built(network, measure):
    other = nn.Sequential(*network[:2], nn.Sigmoid()).eval()  # the same weights
    cases = [PlanCase("alone", "scale_conv", (scaled(factor),)) for factor in (1.0, 2.0)]
    for count, asked in enumerate([(network, PUBLISHED), (other, PUBLISHED), (network, cases[0]), (network, cases[1])]):
        for _ in range(2):
            measure(*asked)
            assert measure.compiled == count + 1


def test_a_row_of_the_same_graph_stays_when_the_code_around_it_changes(network, measure, monkeypatch):
    table = measure(network, PUBLISHED)
    monkeypatch.setattr(plan_costs, "code_sha256", lambda: "changed")
    assert measure(network, PUBLISHED) == dataclasses.replace(table, code_sha256="changed")
    assert measure.compiled == 1 and len(table.code_sha256) == 64


def test_a_table_of_before_does_not_say_its_code(tmp_path):
    values = CostTable("net", "0", "1x3x8x8", {}, "command", ()).to_json()
    del values["code_sha256"]
    assert CostTable.from_json(values).code_sha256 == ""


@pytest.mark.parametrize(
    "spoiled",
    [
        {"macs": "many"},
        {"qnn_ops": None},
        {"chip": "SM8650"},
        {"htp_arch": 79},
        {"about": "other"},
        {"rewrites": ["A"]},
    ],
)
def test_a_row_that_is_damaged_or_of_something_else_is_made_again(network, measure, tmp_path, spoiled):
    table = measure(network, PUBLISHED)
    path = tmp_path / "rows" / "whole_published_SM8850.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"cost": held["cost"] | spoiled}))
    assert measure(network, PUBLISHED) == table and measure.compiled == 2
    path.write_text("[]")
    assert measure(network, PUBLISHED) == table and measure.compiled == 3


@pytest.mark.parametrize(
    ("what", "final"),
    [
        ("it gave up (exit code 1). Cause: QNN error 3110. Log: /a/b.log.", True),
        ("it crashed with SIGSEGV.", True),
        ("the NPU took none of its 3 nodes.", True),
        ("it was stopped at the time limit of 5 s; allow more with time_limit_s.", False),
        ("it was killed from outside, holding 9 MiB, most likely because memory ran out; use a smaller input.", False),
        ("it gave up (exit code 1). Cause: the compiler ran out of this machine's memory; free memory.", False),
        ("it gave up (exit code 1). The disk of /a is full: free some space.", False),
    ],
)
def test_what_was_of_the_machine_and_the_moment_is_tried_again(network, measure, what, final):
    measure.answer = CompileError(f"Compiling plan for SM8850 left nothing: {what}\nLast lines: …")
    (cost,) = measure(network, PUBLISHED).costs
    assert cost.error.startswith("Compiling plan for SM8850 left nothing: ") and "Log" not in cost.error
    measure.answer = Figures()
    (again,) = measure(network, PUBLISHED).costs
    assert (again.error == cost.error, measure.compiled) == ((True, 1) if final else (False, 2))


def test_all_plans_are_checked_before_anything_is_compiled(network, measure, tmp_path):
    wrong = PlanCase("whole", "wrong", (FOLD_BATCH_NORM, DECOMPOSE_DEFORM_CONV))
    with pytest.raises(RewriteError, match="it must come after"):
        measure(network, PUBLISHED, wrong)
    with pytest.raises(RewriteError, match="Two cases are called whole_published"):
        measure(network, PUBLISHED, PUBLISHED)
    assert measure.compiled == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "about", "words"),
    [
        ("hole", "a", "alone, without, whole, found 'hole'"),
        ("whole", "a/b", "found 'a/b'; use up to 120"),
        ("whole", "a" * 121, "use up to 120"),
        ("whole", "", "found ''"),
        ("whole", "..", "found '..'"),
    ],
)
def test_a_case_that_no_file_can_be_named_after_is_refused(kind, about, words):
    with pytest.raises(RewriteError, match=words):
        PlanCase(kind, about, ())


def test_a_folder_that_is_a_file_is_refused(network, measure, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="Asked to write in .*file, which cannot be"):
        measure(network, PUBLISHED, out_dir=tmp_path / "file")


def test_folders_of_killed_runs_are_removed_and_those_of_runs_at_work_are_not(network, measure, tmp_path):
    folders = {name: tmp_path / "rows" / f".plan_{name}" for name in ("killed", "at_work", "just_made", "bare")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        if name != "bare":
            (folder / "lock").touch()
            os.utime(folder / "lock", (0, 0) if name != "just_made" else None)
    with FileLock(folders["at_work"] / "lock"):
        os.utime(folders["at_work"] / "lock", (0, 0))
        measure(network, PUBLISHED)
    left = {path.name.removeprefix(".plan_") for path in (tmp_path / "rows").glob(".plan_*")}
    assert left == {"at_work", "just_made", "bare"}


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
