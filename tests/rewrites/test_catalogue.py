"""The catalogue, and plans as code: what is executed gives the plan back."""

from dataclasses import replace
from functools import partial

import pytest

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import EXACT_PLAN, Constraint
from lumen_lab.rewrites.catalogue import CATALOGUE, family_of, find_rewrite, plan_code
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV


def executed(code):
    found = {}
    exec(compile(code, "plan", "exec"), found)
    return found["plan"]


@pytest.mark.parametrize("plan", [EXACT_PLAN, CATALOGUE, (), CATALOGUE[-1:], (RECOMPOSE_DEFORM_CONV,)])
def test_executed_code_gives_equal_records_in_order(plan):
    assert executed(plan_code(plan)) == plan


def test_code_tells_a_plan_from_its_reverse():
    assert executed(plan_code(CATALOGUE[::-1])) == CATALOGUE[::-1] != CATALOGUE


def test_code_is_as_a_formatter_would_write_it():
    code = plan_code((DECOMPOSE_DEFORM_CONV, FOLD_BATCH_NORM))
    assert code == (
        "from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM\n"
        "from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV\n"
        "\n"
        "plan = (\n    DECOMPOSE_DEFORM_CONV,\n    FOLD_BATCH_NORM,\n)\n"
    )
    assert max(map(len, plan_code(CATALOGUE).splitlines())) <= 120
    assert plan_code(()) == "plan = ()\n"


def test_a_rewrite_with_parameters_stands_as_its_call():
    """Everything that the expression names is imported, from the file that defines it and from no other."""
    call = "replace(FOLD_BATCH_NORM, name=max('fold', 'a'))"
    with pytest.raises(RewriteError, match="no module of lumen_lab.rewrites defines replace"):
        plan_code((replace(FOLD_BATCH_NORM, code=call),))
    code = plan_code((replace(FOLD_BATCH_NORM, code="has_hooks(Rewrite) or FOLD_BATCH_NORM"),))
    assert "from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM, has_hooks\n" in code
    assert "from lumen_lab.rewrites.record import Rewrite\n" in code and "max" not in code
    assert code.endswith("plan = (\n    has_hooks(Rewrite) or FOLD_BATCH_NORM,\n)\n")


def test_code_that_cannot_be_written_is_refused_with_the_reason():
    with pytest.raises(RewriteError, match=r"fold_batch_norm is no Python expression: 'fold\('"):
        plan_code((replace(FOLD_BATCH_NORM, code="fold("),))
    with pytest.raises(RewriteError, match="is written MINE, but no module of lumen_lab.rewrites defines MINE"):
        plan_code((replace(FOLD_BATCH_NORM, name="mine"),))


def test_every_rewrite_of_the_catalogue_has_a_name_of_its_own_and_is_found_by_it():
    assert len({rule.name for rule in CATALOGUE}) == len(CATALOGUE)
    assert [find_rewrite(rule.name) for rule in CATALOGUE] == list(CATALOGUE)
    assert set(EXACT_PLAN) <= set(CATALOGUE)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        RewriteError, match="no rewrite 'fold_batchnorm' in the catalogue; the nearest are fold_batch_norm"
    ):
        find_rewrite("fold_batchnorm")
    with pytest.raises(RewriteError, match="the nearest are decompose_deform_conv"):
        find_rewrite("qqq", (DECOMPOSE_DEFORM_CONV,))


@pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.name)
def test_the_order_of_the_catalogue_keeps_every_constraint(rule):
    names = [other.name for other in CATALOGUE]
    assert not {constraint.other for constraint in rule.after} & set(names[names.index(rule.name) :])


def test_a_broken_order_would_be_seen():
    late = replace(DECOMPOSE_DEFORM_CONV, after=(Constraint(CATALOGUE[-1].name, "a reason"),))
    assert {constraint.other for constraint in late.after} & {
        rule.name for rule in CATALOGUE[CATALOGUE.index(DECOMPOSE_DEFORM_CONV) :]
    }


def test_a_family_is_the_file_that_builds_the_rewrite():
    assert family_of(DECOMPOSE_DEFORM_CONV) == "deform" and family_of(FOLD_BATCH_NORM) == "convolution"
    assert family_of(replace(FOLD_BATCH_NORM, built=partial(partial(FOLD_BATCH_NORM.built)))) == "convolution"
