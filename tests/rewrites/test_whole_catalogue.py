"""What holds for every rewrite of the catalogue: it applies, keeps its claim, and a spoiled version of it is caught."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lumen_lab.equivalence import random_samples
from lumen_lab.network.checkpoints import weights_sha256
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.catalogue import CATALOGUE, find_rewrite
from lumen_lab.rewrites.channels import split_conv_over_outputs
from lumen_lab.rewrites.deform import RECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.plan import check_order
from lumen_lab.specs import Exact, Learned

INPUTS = (torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)),)
SAMPLES = random_samples([(64, 96), (96, 32)], batch=2)
# What a rewrite needs to find sites, where the published network or a tiny one has none for it.
FIRST = {"fold_batch_norm": ("decompose_deform_conv",), "recompose_deform_conv": ("decompose_deform_conv",)}
TINY = {"split_conv_over_outputs": split_conv_over_outputs(64)}
RULES = [*(TINY.get(rule.name, rule) for rule in CATALOGUE), RECOMPOSE_DEFORM_CONV]

each_rewrite = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
each_checked = pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not isinstance(rule.claim, Learned)], ids=lambda rule: rule.name
)


def plan_with(rule):
    return (*(find_rewrite(name) for name in FIRST.get(rule.name, ())), rule)


def classes(model):
    return {path: type(module) for path, module in model.named_modules()}


@pytest.fixture(scope="session")
def rewritten(tiny):
    """Rewrite -> the network after it, made once."""
    made = {}

    def of(rule):
        if rule.name not in made:
            made[rule.name] = rewrite(tiny, plan_with(rule), example_inputs=INPUTS)
        return made[rule.name]

    return of


def test_every_kind_of_claim_is_named_as_such():
    for rule in RULES:
        verb = rule.name.split("_")[0]
        expected = {"approximate": "Bounded", "substitute": "Learned"}.get(verb, "Exact")
        assert type(rule.claim).__name__ == expected, rule.name
        assert rule.because and rule.source, rule.name


@each_rewrite
def test_it_applies_marks_what_it_made_and_leaves_the_original_as_it_was(tiny, rewritten, rule):
    before, weights = classes(tiny), weights_sha256(tiny)
    model, log = rewritten(rule).model, rewritten(rule).log
    applied = log.applied(rule.name)
    assert applied
    for entry in applied:
        assert any(module.rewritten_by == rule.name for module in map(model.get_submodule, entry.replaced))
    assert classes(tiny) == before
    assert weights_sha256(tiny) == weights
    ours = {id(tensor) for tensor in (*tiny.parameters(), *tiny.buffers())}
    assert not ours & {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


@each_rewrite
def test_its_weights_load_into_another_network_rewritten_alike(tiny_config, rewritten, rule):
    from lumen_lab.network import load_network

    model = rewritten(rule).model
    torch.manual_seed(1)
    other = rewrite(load_network(tiny_config, None), plan_with(rule), example_inputs=INPUTS).model
    with torch.no_grad():
        assert not torch.equal(other(*INPUTS), model(*INPUTS))
        other.load_state_dict(model.state_dict(), strict=True)
        assert torch.allclose(other(*INPUTS), model(*INPUTS), atol=1e-5)


@each_rewrite
def test_it_exports_and_computes_the_same_there(rewritten, rule):
    model = rewritten(rule).model
    with torch.no_grad():
        expected = model(*INPUTS)
        program = torch.export.export(model, INPUTS)
        assert torch.allclose(program.module()(*INPUTS), expected, atol=1e-4 * float(expected.abs().max()))


@each_rewrite
def test_it_trains(rewritten, rule):
    model = copy.deepcopy(rewritten(rule).model).train()
    outputs = model(torch.cat([INPUTS[0], -INPUTS[0]]))
    sum(output.square().mean() for output in (*outputs.masks, *outputs.gradients)).backward()
    made = [module for module in model.modules() if getattr(module, "rewritten_by", None) == rule.name]
    weights = [parameter for module in made for parameter in module.parameters()]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in weights)


@each_rewrite
def test_a_second_application_finds_nothing_or_says_why_not(rewritten, rule):
    entries = rewrite(rewritten(rule).model, (rule,), example_inputs=INPUTS).log.entries
    assert all(entry.refused for entry in entries)


@each_checked
def test_it_keeps_its_claim(tiny, rule):
    table = check_plan(tiny, plan_with(rule), samples=SAMPLES)
    mine = [verdict for verdict in table.verdicts if verdict.name == rule.name]
    assert mine and all(verdict.passed for verdict in mine), table.failed


def nudged(modules):
    """The largest weight of the first module that has weights, a tenth larger."""
    parameter = next((p for module in modules.values() for p in module.parameters() if p.numel()), None)
    if parameter is None:
        pytest.skip("moves data only: it has no weight")
    flat = parameter.data.view(-1)
    flat[flat.abs().argmax()] *= 1.1


def rolled(modules):
    """Everything that the first module returns, one place further."""
    path = next(iter(modules))
    modules[path] = Rolled(modules[path])


class Rolled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *given):
        output = self.inner(*given)
        first = output[0] if isinstance(output, tuple) else output
        moved = first.roll(1, -2 if first.shape[-2] > 1 else 1)  # a map of one pixel: its channels
        return (moved, *output[1:]) if isinstance(output, tuple) else moved


@pytest.mark.parametrize("spoil", [nudged, rolled])
@each_checked
def test_a_spoiled_version_is_caught(tiny, rule, spoil):
    def built(site):
        modules = dict(rule.built(site))
        spoil(modules)
        return modules

    spoiled = dataclasses.replace(rule, built=built)
    table = check_plan(tiny, (*plan_with(rule)[:-1], spoiled), samples=SAMPLES[:1])
    *mine, whole = [verdict for verdict in table.verdicts if verdict.name in (rule.name, "whole network")]
    failed = sum(verdict.status == "failed" for verdict in mine)
    least = 1 if spoil is rolled else 0.6  # where no input reaches a channel, one weight of it does not show
    assert failed >= least * len(mine) > 0
    assert whole.status == ("failed" if isinstance(rule.claim, Exact) else "pending")


def test_a_learned_claim_is_pending_until_it_has_a_score(tiny):
    for rule in (rule for rule in CATALOGUE if isinstance(rule.claim, Learned)):
        table = check_plan(tiny, plan_with(rule), samples=SAMPLES[:1])
        assert {verdict.status for verdict in table.verdicts} == {"pending"}, rule.name


def conflict(rule, other):
    return any(c.other == other.name for c in rule.excludes) or any(c.other == rule.name for c in other.excludes)


@each_rewrite
def test_with_all_that_it_goes_with_it_makes_a_plan_in_the_order_of_the_catalogue(rule):
    kept = [rule]
    for other in RULES:
        if other is not rule and not any(conflict(other, one) for one in kept):
            kept.append(other)
    check_order(tuple(sorted(kept, key=RULES.index)))


def test_names_are_unique_and_constraints_name_what_is_there():
    names = [rule.name for rule in CATALOGUE]
    assert len(set(names)) == len(names)
    for rule in CATALOGUE:
        for constraint in (*rule.after, *rule.excludes):
            assert constraint.other in names, f"{rule.name} names {constraint.other}, which is not there"
