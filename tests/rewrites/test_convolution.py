"""Norms folded into what the deformable convs have become, and where the norm's output goes on."""

import dataclasses

import pytest
import torch
from torch import nn

from lumen_lab.network.deform import AsppBranch
from lumen_lab.network.golden import golden_state_dict
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.channels import split_conv_over_outputs
from lumen_lab.rewrites.convolution import DEFORM_REWRITES, FOLD_BATCH_NORM, scale_and_shift, summed_convs
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_shifts import APPROXIMATE_DEFORM_CONV_BY_SHIFTS
from lumen_lab.rewrites.deform_substitutes import (
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
)

DEFORM = (
    DECOMPOSE_DEFORM_CONV,
    APPROXIMATE_DEFORM_CONV_BY_SHIFTS,
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
)
SAMPLE = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def golden(module):
    """``module`` with golden weights, in eval mode and float64; norms with statistics far from a fresh one's."""
    module.load_state_dict(golden_state_dict(module.state_dict()))
    for norm in (part for part in module.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    return module.double().eval()


@pytest.fixture(scope="module", params=[1, 3, 7])
def branch(request):
    torch.manual_seed(request.param)
    return golden(nn.Sequential(AsppBranch(4, 6, request.param)))


def test_the_order_names_every_way_to_write_a_deformable_conv():
    assert {rule.name for rule in DEFORM} == set(DEFORM_REWRITES) == {c.other for c in FOLD_BATCH_NORM.after}


@pytest.mark.parametrize("rule", DEFORM, ids=lambda rule: rule.name)
def test_a_norm_is_folded_into_whatever_the_deformable_conv_has_become(branch, rule):
    before = rewrite(branch, (rule,), example_inputs=(SAMPLE,)).model
    done = rewrite(before, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,))
    (entry,) = done.log.applied()
    assert entry.replaced[-1] == "0.bn" and all(path.startswith("0.atrous_conv") for path in entry.replaced[:-1])
    assert isinstance(done.model[0].bn, nn.Identity)
    table = check_plan(before, (FOLD_BATCH_NORM,), samples=[SAMPLE])
    assert table.passed, table.failed


def parts_of(branch):
    return rewrite(branch, (DECOMPOSE_DEFORM_CONV,), example_inputs=(SAMPLE,)).model


def test_a_sum_of_convs_takes_the_shift_once():
    torch.manual_seed(0)
    before = parts_of(golden(nn.Sequential(AsppBranch(4, 6, 7))))
    after = rewrite(before, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,)).model
    convs = after[0].atrous_conv.tap_convs
    assert len(convs) > 1
    assert [conv.bias is not None for conv in convs] == [True] + [False] * (len(convs) - 1)


def shift_in_every_part(modules, norm):
    _, shift = scale_and_shift(norm)
    for conv in (module for module in modules.values() if isinstance(module, nn.Conv2d)):
        conv.bias = nn.Parameter(shift.clone())


def last_part_left_as_it_was(modules, norm):
    scale, _ = scale_and_shift(norm)
    *_, conv = (module for module in modules.values() if isinstance(module, nn.Conv2d))
    conv.weight.data /= scale[:, None, None, None]


def first_weight_nudged(modules, norm):
    next(iter(modules.values())).weight.data[0, 0] *= 1.001


@pytest.mark.parametrize("harm", [shift_in_every_part, last_part_left_as_it_was, first_weight_nudged])
def test_a_spoiled_fold_into_a_sum_fails(harm):
    def built(site):
        modules = FOLD_BATCH_NORM.built(site)
        harm(modules, site.module)
        return modules

    torch.manual_seed(0)
    before = parts_of(golden(nn.Sequential(AsppBranch(4, 6, 7))))
    table = check_plan(before, (dataclasses.replace(FOLD_BATCH_NORM, built=built),), samples=[SAMPLE])
    assert {verdict.name for verdict in table.failed} == {"fold_batch_norm", "whole network"}


class ReadTwice(nn.Module):
    """A norm whose output two others read, and a norm behind a norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.other = nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return self.second(y).relu() + self.other(y)


def test_a_norms_output_may_have_several_readers():
    torch.manual_seed(0)
    model = golden(ReadTwice())
    once = rewrite(model, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,))
    assert [entry.replaced for entry in once.log.applied()] == [("conv", "norm")]
    with torch.no_grad():
        assert float((once.model(SAMPLE) - model(SAMPLE)).abs().max()) <= 1e-12
    again = rewrite(once.model, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,))
    assert again.log.applied() == []  # the conv now feeds the second norm through the Identity, and another conv


def test_of_norms_behind_each_other_the_first_is_folded_and_the_second_left():
    """The Identity that a fold leaves counts as a reader of the conv: refused rather than guessed."""
    torch.manual_seed(0)
    model = golden(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)))
    once = rewrite(model, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,)).model
    twice = rewrite(once, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,))
    assert [type(module) for module in twice.model] == [nn.Conv2d, nn.Identity, nn.BatchNorm2d]
    with torch.no_grad():
        assert float((twice.model(SAMPLE) - model(SAMPLE)).abs().max()) <= 1e-12


def test_a_conv_that_pads_by_reflection_keeps_its_norm():
    model = golden(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4)))
    (entry,) = rewrite(model, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,)).log.entries
    assert "pads with 'reflect'" in entry.refused


def test_what_is_no_conv_is_no_sum_of_convs():
    from lumen_lab.rewrites.record import Site

    site = Site("b", nn.BatchNorm2d(4), ((1, 4, 8, 8),), "a", {"a": nn.ReLU()})
    assert summed_convs(site) == {}


class WithActivation(nn.BatchNorm2d):
    """As timm's ``BatchNormAct2d``: a norm that is a ReLU as well."""

    def forward(self, x):
        return super().forward(x).relu()


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class UnderTwoNames(nn.Module):
    """The pass calls the conv by its second name, and a rewrite would replace it at its first."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.alias = self.conv

    def forward(self, x):
        return self.norm(self.alias(x))


def with_own_forward():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[1].forward = lambda x: x.relu()
    return model


MORE_THAN_WEIGHTS = {
    "it is a WithActivation": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), WithActivation(4)),
    "the conv before it is a Doubled": lambda: nn.Sequential(Doubled(4, 4, 3), nn.BatchNorm2d(4)),
    "has two names in the network": UnderTwoNames,
    "it has hooks or a forward of its own": with_own_forward,
}


@pytest.mark.parametrize("reason", MORE_THAN_WEIGHTS)
def test_what_is_more_than_its_weights_is_not_folded(reason):
    model = golden(MORE_THAN_WEIGHTS[reason]())
    (entry,) = rewrite(model, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,)).log.entries
    assert reason in entry.refused


def test_a_sum_of_convs_with_a_part_that_was_cut_keeps_its_norm():
    """In two calls: within a plan the order forbids it."""
    before = parts_of(golden(nn.Sequential(AsppBranch(4, 6, 7))))
    cut = rewrite(before, (split_conv_over_outputs(4),), example_inputs=(SAMPLE,)).model
    (entry,) = rewrite(cut, (FOLD_BATCH_NORM,), example_inputs=(SAMPLE,)).log.entries
    assert "the conv before it is a OutputSplitConv" in entry.refused


class ReadAside(nn.Module):
    """A conv and its norm, and a second reader of the conv's output, given by keyword or in a list."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.norm, self.aside, self.how = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Aside(), how

    def forward(self, x):
        x = self.conv(x)
        other = self.aside(x=x) if self.how == "keyword" else self.aside([x])
        return self.norm(x) + other


class Aside(nn.Module):
    def forward(self, x):
        return torch.relu(x[0] if isinstance(x, list) else x)


@pytest.mark.parametrize("how", ["keyword", "list"])
def test_a_norm_is_not_folded_into_a_conv_that_is_read_by_keyword_or_in_a_list(how):
    net, image = ReadAside(how).eval(), torch.randn(2, 3, 8, 8)
    net.norm.running_mean += 1
    rewritten = rewrite(net, (FOLD_BATCH_NORM,), example_inputs=(image,))
    assert torch.equal(rewritten.model(image), net(image))
    assert rewritten.log.applied() == []
