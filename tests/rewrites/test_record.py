"""The record of a rewrite: what it may hold, how it is shown; and the pass that finds sites."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import Constraint
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.plan import only_at
from lumen_lab.rewrites.record import evaluating, watch_flow
from lumen_lab.specs import Exact


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("name", "", "text, such as"),
        ("replaces", "BatchNorm2d", "a class of modules, such as nn.Conv2d; found 'BatchNorm2d'"),
        ("replaces", nn.BatchNorm2d(3), "a class of modules"),
        ("built", None, "a function of a site; found None"),
        ("refused", "never", "a function of a site; found 'never'"),
        ("claim", "exact", "Exact(), Bounded(…) or Learned(…); found 'exact'"),
        ("claim", Exact, "Exact(), Bounded(…) or Learned(…); found <class"),
        ("because", None, "text; found None"),
        ("after", Constraint("a", "b"), "a tuple of Constraint; found Constraint("),
        ("excludes", ("reduce_attention_rank",), "a tuple of Constraint; found ('reduce"),
        ("edge_cases", (), "a function of a module and its inputs, or None"),
        ("code", None, "text; found None"),
        ("sites", "decoder", "a tuple of paths, or None; found 'decoder'"),
    ],
)
def test_a_field_of_another_type_is_refused_in_one_sentence(field, value, told):
    with pytest.raises(RewriteError) as error:
        replace(FOLD_BATCH_NORM, **{field: value})
    assert f"`{field}` is {told}" in str(error.value) and str(error.value).count("\n") == 0


def test_a_record_is_shown_by_its_expression():
    assert repr(FOLD_BATCH_NORM) == "<Rewrite FOLD_BATCH_NORM of BatchNorm2d, Exact>"
    assert repr(only_at(FOLD_BATCH_NORM, "1")) == "<Rewrite only_at(FOLD_BATCH_NORM, ('1',)) of BatchNorm2d, Exact>"


def test_modes_are_put_back_one_by_one_even_after_an_error():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()).train()
    model[0].eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, False, True]


def test_finding_sites_in_training_mode_touches_no_counter_and_takes_a_batch_of_one():
    norm = nn.BatchNorm2d(3)
    flow = watch_flow(nn.Sequential(nn.AdaptiveAvgPool2d(1), norm).train(), (torch.zeros(1, 3, 4, 4),))
    assert flow.shapes["1"] == [(1, 3, 1, 1)] and norm.training
    assert int(norm.num_batches_tracked) == 0 and float(norm.running_var[0]) == 1


def test_a_pass_that_fails_is_told_with_the_inputs_and_the_reason():
    told = (
        r"Sequential does not run on example inputs of \(1, 4, 4, 4\) float32 \(RuntimeError: .*; give inputs of a size"
    )
    with pytest.raises(RewriteError, match=told):
        watch_flow(nn.Sequential(nn.Conv2d(3, 3, 1)), (torch.zeros(1, 4, 4, 4),))
