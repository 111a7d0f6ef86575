"""What a plan does, as a record: on parts of the network, with figures that can be counted by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lumen_lab.auditing import audit
from lumen_lab.equivalence import random_samples
from lumen_lab.errors import AuditError, ChipError, RewriteError
from lumen_lab.rewrites import Constraint, rewrite
from lumen_lab.rewrites.catalogue import CATALOGUE
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_shifts import APPROXIMATE_DEFORM_CONV_BY_SHIFTS
from lumen_lab.rewrites.effect import (
    PlanEffect,
    choice_rows,
    difference_rows,
    effect_of_names,
    plan_effect,
    verdict_rows,
)
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.specs import Bounded, Learned

PLAN = (DECOMPOSE_DEFORM_CONV, FOLD_BATCH_NORM)
EXAMPLE = (torch.empty(1, 4, 8, 12),)


@pytest.fixture(scope="module")
def block(parts):
    """A decoder block: four deformable convs, six norms."""
    return parts["deform"][0]


@pytest.fixture(scope="module")
def before(block):
    return plan_effect(block, (), example_inputs=EXAMPLE)


@pytest.fixture(scope="module")
def after(block):
    return plan_effect(block, PLAN, example_inputs=EXAMPLE, samples=[torch.randn(2, 4, 5, 9)])


def test_figures_are_those_of_an_audit_of_the_rewritten_network(block, after):
    report = audit(rewrite(block, PLAN, example_inputs=EXAMPLE).model, EXAMPLE)
    assert after.macs == report.macs and after.peak_activation_bytes == report.peak_activation_bytes
    assert after.interpolation_macs == report.interpolation_macs > 0
    assert after.partitions == report.partitions == 1
    assert list(after.partition_rows) == report.partition_rows()
    assert sum(after.operations.values()) == len(after.partition_rows)
    assert after.operations["grid_sample"] == 1 + 1 + 1 + 6 and "deform_conv2d" not in after.operations


def test_the_network_as_it_is_has_its_own_figures(block, before):
    assert before.plan == () and before.code == "plan = ()\n" and not before.log and not before.verdicts
    assert before.operations["deform_conv2d"] == before.cpu_operations == 4
    assert before.npu_operations == len(before.partition_rows) - 4
    assert before.parameters == sum(p.numel() for p in block.parameters())
    (blocking,) = before.blocking
    assert (blocking["kind"], blocking["operations"]) == ("deform_conv2d", 4) and blocking["reason"]


def test_folded_norms_take_their_parameters_with_them(block, before, after):
    """γ and β go, a bias comes where the conv had none."""
    norms = [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)]
    (row,) = [row for row in after.log if row["rewrite"] == "fold_batch_norm"]
    assert row["sites"] == len(norms) and row["refused"] == 0
    added = after.parameters - before.parameters
    assert -2 * sum(n.num_features for n in norms) <= added < 0


def test_log_and_verdicts_have_a_row_a_rewrite(after):
    assert [row["rewrite"] for row in after.log] == [rule.name for rule in PLAN]
    assert [row["rewrite"] for row in after.verdicts] == [*(rule.name for rule in PLAN), "whole network"]
    assert all(row["failed"] == row["pending"] == 0 < row["passed"] == row["sites"] for row in after.verdicts)
    assert set(after.seconds) == {"rewrite", "audit", "check"}


def test_a_spoiled_rewrite_is_counted_as_failed(block):
    def nudged(site):
        built = DECOMPOSE_DEFORM_CONV.built(site)
        next(built[site.path].parameters()).view(-1)[0] += 0.1
        return built

    effect = plan_effect(
        block,
        (replace(DECOMPOSE_DEFORM_CONV, built=nudged),),
        example_inputs=EXAMPLE,
        samples=[torch.randn(2, 4, 5, 9)],
    )
    assert effect.verdicts[0]["failed"] == 4 and effect.verdicts[0]["passed"] == 0
    assert "failed" in str(effect.rows()[2])


def test_what_is_learned_or_bounded_is_pending(block):
    learned = replace(FOLD_BATCH_NORM, claim=Learned("S-measure", 0.9))
    effect = plan_effect(
        block, (DECOMPOSE_DEFORM_CONV, learned), example_inputs=EXAMPLE, samples=[torch.randn(1, 4, 5, 9)]
    )
    rows = {row["rewrite"]: row for row in effect.verdicts}
    assert rows["fold_batch_norm"]["pending"] == rows["fold_batch_norm"]["sites"] > 0
    assert rows["whole network"]["pending"] == 1 and rows["whole network"]["passed"] == 0


def test_a_refused_site_keeps_its_reason(block):
    effect = plan_effect(block, (FOLD_BATCH_NORM,), example_inputs=EXAMPLE)
    (row,) = effect.log
    assert row["refused"] == 4 and "decompose the deformable convs first" in row["why refused"]
    assert effect.verdicts == () and "check" not in effect.seconds
    assert {r["figure"]: r["value"] for r in effect.rows()}["checks"] == "not made"


def test_the_network_is_left_as_it_was(block, after):
    assert not any(hasattr(module, "rewritten_by") for module in block.modules())
    assert sum(isinstance(module, nn.BatchNorm2d) for module in block.modules()) > 0


def test_what_moved_is_told_and_what_stayed_is_not(before, after):
    rows = difference_rows(before, after)
    changes = {row["what"]: row["change"] for row in rows}
    assert changes["operations on the CPU, predicted"] == -4
    assert changes["operations: deform_conv2d"] == -4 and changes["operations: grid_sample"] == 9
    assert "chip" not in changes and all(row["change"] == row["after"] - row["before"] != 0 for row in rows)
    kinds = [abs(row["change"]) for row in rows if row["what"].startswith("operations: ")]
    assert kinds == sorted(kinds, reverse=True)
    assert difference_rows(after, after) == []
    assert next(row["change"] for row in difference_rows(after, before)) == -rows[0]["change"]


def test_effects_that_do_not_compare(before):
    with pytest.raises(RewriteError, match="SM8850 and for SM8750 do not compare"):
        difference_rows(before, replace(before, chip="SM8750"))
    with pytest.raises(RewriteError, match="refused plan has no figures to compare: a reason"):
        difference_rows(before, replace(before, refused="a reason"))


def test_a_saved_effect_comes_back_equal(after, tmp_path):
    assert PlanEffect.load(after.save(tmp_path / "effect.json")) == after


def test_a_plan_out_of_order_is_raised_by_the_function_and_answered_by_the_names(block):
    with pytest.raises(RewriteError, match="fold_batch_norm before decompose_deform_conv"):
        plan_effect(block, PLAN[::-1], example_inputs=EXAMPLE)
    effect = effect_of_names(block, CATALOGUE, example_inputs=EXAMPLE)(["fold_batch_norm", "decompose_deform_conv"])
    assert "fold_batch_norm before decompose_deform_conv" in effect.refused and effect.chip == "SM8850"
    assert effect.rows() == [{"figure": "refused", "value": effect.refused}]


def test_names_are_measured_once_a_plan(block, monkeypatch):
    made = []

    def counted(model, plan, **options):
        made.append(plan)
        return PlanEffect(tuple(rule.name for rule in plan), "", "SM8850")

    monkeypatch.setattr("lumen_lab.rewrites.effect.plan_effect", counted)
    effect = effect_of_names(block, CATALOGUE)
    first = effect(("fold_batch_norm",))
    assert effect(["fold_batch_norm"]) is first and effect(()) is not first
    assert made == [(FOLD_BATCH_NORM,), ()]
    with pytest.raises(RewriteError, match="nearest are fold_batch_norm"):
        effect(["fold_batchnorm"])


def test_wrong_asks_are_refused(block):
    with pytest.raises(ChipError):
        plan_effect(block, (), chip="SM9999999", example_inputs=EXAMPLE)
    with pytest.raises(AuditError, match="training mode"):
        plan_effect(nn.Sequential(nn.BatchNorm2d(4)), (), example_inputs=EXAMPLE)
    with pytest.raises(RewriteError, match="pass example_inputs"):
        plan_effect(nn.Sequential(nn.ReLU()), ())


def test_choices_say_what_the_records_say():
    rival = replace(
        CONVERT_IMAGE_TILES_TO_4D,
        claim=Bounded(0.5, "images"),
        excludes=(Constraint("fold_batch_norm", "a reason"),),
    )
    rows = choice_rows((rival, FOLD_BATCH_NORM))
    assert rows[0]["claim"] == "within 0.5 for images" and rows[0]["excludes"] == [["fold_batch_norm", "a reason"]]
    assert rows[1]["after"][0][0] == "decompose_deform_conv" and rows[1]["family"] == "convolution"
    assert [row["because"] for row in rows] == [rival.because, FOLD_BATCH_NORM.because]


def test_a_rewrite_made_in_a_notebook_still_has_an_effect(block):
    mine = replace(FOLD_BATCH_NORM, name="fold_mine")
    effect = plan_effect(block, (DECOMPOSE_DEFORM_CONV, mine), example_inputs=EXAMPLE)
    assert "    DECOMPOSE_DEFORM_CONV,\n    # left out: fold_mine is written FOLD_MINE, but no module" in effect.code
    assert effect.log[1]["sites"] > 0


def test_what_is_printed_are_the_figures_and_not_every_operation(after):
    printed = str(after).splitlines()
    assert printed[0] == "plan: decompose_deform_conv, fold_batch_norm" and len(printed) == len(after.rows())
    assert "partitions predicted: 1" in printed and "failed" not in str(after)
    assert len(after.partition_rows) > 30 and "runs_on" not in repr(after)


def test_a_bounded_rewrite_has_its_difference_on_real_inputs_beside_that_at_its_edges(block):
    plan = (APPROXIMATE_DEFORM_CONV_BY_SHIFTS, FOLD_BATCH_NORM)
    row, *others = plan_effect(block, plan, example_inputs=EXAMPLE, samples=[torch.randn(2, 4, 5, 9)]).verdicts
    assert row["passed"] == row["sites"] == 4 and row["worst"] < 1e-9 < 1e-3 < row["worst on real inputs"]
    assert [other["worst on real inputs"] for other in others] == [None] * len(others)


def test_no_verdicts_no_rows():
    assert verdict_rows(()) == []
    assert random_samples([(5, 9)])[0].shape == (2, 3, 5, 9)
