"""The catalogue: names, and an order in which every rewrite can stand."""

import inspect
from dataclasses import replace

import pytest

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import EXACT_PLAN, Constraint
from lumen_lab.rewrites.catalogue import CATALOGUE, find_rewrite
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV


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
    assert "CATALOGUE" not in str(inspect.signature(find_rewrite)) and len(str(inspect.signature(find_rewrite))) < 120


@pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.name)
def test_the_order_of_the_catalogue_keeps_every_constraint(rule):
    names = [other.name for other in CATALOGUE]
    assert not {constraint.other for constraint in rule.after} & set(names[names.index(rule.name) :])


def test_a_broken_order_would_be_seen():
    late = replace(DECOMPOSE_DEFORM_CONV, after=(Constraint(CATALOGUE[-1].name, "a reason"),))
    assert {constraint.other for constraint in late.after} & {
        rule.name for rule in CATALOGUE[CATALOGUE.index(DECOMPOSE_DEFORM_CONV) :]
    }
