"""What a plan may be, the sites that it names, what a rewrite may build, and what new modules inherit."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import EXACT_PLAN, Rewrite, check_plan, rewrite
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, GridSampleConv, decompose_deform_conv
from lumen_lab.rewrites.effect import plan_effect
from lumen_lab.rewrites.plan import check_order, inputs_for, only_at
from lumen_lab.rewrites.plan_code import plan_code
from lumen_lab.rewrites.windows import substitute_window
from lumen_lab.specs import Exact

IMAGE = (torch.zeros(2, 4, 8, 8),)
CONV = "0.dec_att.aspp1.atrous_conv"


def by_a_clone(site):
    return {site.path: copy.deepcopy(site.module)}


CLONE = Rewrite(
    "clone_conv", nn.Conv2d, built=by_a_clone, claim=Exact(), because="an example", source="this test", code="CLONE"
)


@pytest.fixture
def convs():
    """Two convs and a ReLU between them, eval mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


SMALL = (torch.zeros(1, 3, 6, 5),)


# Plans


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (DECOMPOSE_DEFORM_CONV, r"found decompose_deform_conv alone; write \(rewrite,\)"),
        ("decompose_deform_conv", "A plan is a tuple of rewrites, such as EXACT_PLAN; found 'decompose"),
        (None, "such as EXACT_PLAN; found None"),
        (("decompose_deform_conv",), "A plan holds rewrites, found 'decompose_deform_conv' in it"),
        ([None], "A plan holds rewrites, found None"),
        (nn.Sequential(nn.ReLU()), r"A plan holds rewrites, found ReLU\(\)"),
    ],
)
def test_what_is_no_plan_is_refused_at_every_door(convs, plan, told):
    doors = [
        lambda: rewrite(convs, plan, example_inputs=SMALL),
        lambda: check_plan(convs, plan, samples=SMALL),
        lambda: plan_effect(convs, plan, example_inputs=SMALL),
        lambda: plan_code(plan),
    ]
    for door in doors:
        with pytest.raises(RewriteError, match=told):
            door()


def test_a_plan_may_be_given_as_a_generator(convs):
    def plan():
        return (rule for rule in [CLONE])

    assert len(rewrite(convs, plan(), example_inputs=SMALL).log.applied()) == 2
    verdicts = check_plan(convs, plan(), samples=[torch.randn(2, 3, 6, 5)]).verdicts
    assert [verdict.name for verdict in verdicts] == ["clone_conv", "clone_conv", "whole network"]


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ((CLONE, CLONE), r"clone_conv 2 times \(CLONE\); one application reaches every site: keep one"),
        ((substitute_window(window=8), substitute_window(window=16)), r"\(substitute_window\(window=8\), substitute_w"),
        ((DECOMPOSE_DEFORM_CONV, decompose_deform_conv(taps_at_once=2)), "decompose_deform_conv 2 times"),
        ((only_at(CLONE, "0"), CLONE), "one application reaches every site"),
        ((only_at(CLONE, "0"), only_at(CLONE, ["2", "0"])), "0 would be rewritten twice"),
    ],
)
def test_a_plan_has_a_rewrite_once_whatever_its_parameters(plan, told):
    with pytest.raises(RewriteError, match=told):
        check_order(plan)


def test_two_forms_of_a_rewrite_may_each_have_sites_of_their_own(parts):
    module, samples = parts["deform"]
    two = decompose_deform_conv(taps_at_once=2)
    plan = (only_at(DECOMPOSE_DEFORM_CONV, CONV), only_at(two, "0.dec_att.aspp_deforms.1.atrous_conv"))
    new = rewrite(module, plan, example_inputs=IMAGE).model.get_submodule
    assert [len(new(rule.sites[0]).tap_convs) for rule in plan] == [1, 5]
    assert check_plan(module, plan, samples=samples).passed


# Named sites


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        (
            "0.dec_att.aspp1.atrous_con",
            "'0.dec_att.aspp1.atrous_con', where there is no module; .* 0.dec_att.aspp1.atrous_",
        ),
        (
            [CONV, "0"],
            "'0', where there is a DecoderBlock; its sites are each a DeformableConv2d: the nearest are 0.dec",
        ),
        (["0.dec_att"], "where there is a AsppDeformable"),
        (["0.unused"], "where there is a DeformableConv2d, which no forward pass calls"),
    ],
)
def test_a_path_that_is_no_site_is_refused_with_those_that_are(parts, sites, told):
    module, samples = parts["deform"]
    module = copy.deepcopy(module)
    module[0].register_module("unused", copy.deepcopy(module.get_submodule(CONV)))
    plan = (only_at(DECOMPOSE_DEFORM_CONV, sites),)
    for door in (
        lambda: rewrite(module, plan, example_inputs=IMAGE),
        lambda: check_plan(module, plan, samples=samples),
    ):
        with pytest.raises(RewriteError, match=told):
            door()


def test_a_site_that_an_earlier_rewrite_took_is_no_site_any_more(parts):
    module, _ = parts["deform"]
    rewritten = rewrite(module, (DECOMPOSE_DEFORM_CONV,), example_inputs=IMAGE).model
    with pytest.raises(RewriteError, match="where there is a GridSampleConv; .*: this network has none"):
        rewrite(rewritten, (only_at(DECOMPOSE_DEFORM_CONV, CONV),), example_inputs=IMAGE)


def test_sites_that_are_named_already_can_be_named_more_narrowly_and_no_wider():
    both = only_at(CLONE, ["0", "2"])
    assert only_at(both, "2").sites == ("2",)
    with pytest.raises(RewriteError, match="kept to 0, 2 already; asked for 1 too"):
        only_at(both, ["0", "1"])
    with pytest.raises(RewriteError, match="`sites` is a tuple of paths"):
        only_at(CLONE, [0])


# What a rewrite builds


def raising(site):
    return site.module.no_such_thing


@pytest.mark.parametrize(
    ("built", "told"),
    [
        (raising, "AttributeError: 'Conv2d' object has no attribute 'no_such_thing'"),
        (lambda site: None, r"built gives new modules by path, such as \{site.path: module\}; found a NoneType"),
        (lambda site: nn.Identity(), "found a Identity"),
        (lambda site: {}, "built gave no module, so that nothing would change"),
        (lambda site: {site.path: 3}, "built gave 3 for '0', which is no module"),
        (lambda site: {"conv": nn.Identity()}, "built gave a module for 'conv', where there is none to replace"),
        (lambda site: {site.path: copy.deepcopy(site.module).double()}, r"weights in \['torch.float64'\] to a network"),
    ],
)
def test_what_cannot_be_put_in_place_is_told_with_the_rewrite_and_the_site(convs, built, told):
    with pytest.raises(RewriteError, match=rf"^clone_conv at 0: .*{told}"):
        rewrite(convs, (replace(CLONE, built=built),), example_inputs=SMALL)


@pytest.mark.parametrize(
    ("refused", "told"),
    [(raising, "AttributeError: 'Conv2d'"), (lambda site: True, "in a sentence, or gives None; found T")],
)
def test_a_refusal_is_a_sentence(convs, refused, told):
    with pytest.raises(RewriteError, match=rf"^clone_conv at 0: .*{told}"):
        rewrite(convs, (replace(CLONE, refused=refused),), example_inputs=SMALL)


# What new modules inherit


def test_a_frozen_network_is_frozen_after_every_rewrite(tiny):
    frozen = copy.deepcopy(tiny).requires_grad_(False)
    assert not any(p.requires_grad for p in rewrite(frozen, EXACT_PLAN).model.parameters())


def test_what_is_built_is_frozen_only_where_all_that_it_replaces_was(parts):
    module = copy.deepcopy(parts["deform"][0])
    module.get_submodule(CONV).requires_grad_(False)
    module.get_submodule("0.dec_att.aspp_deforms.0.atrous_conv").offset_conv.requires_grad_(False)
    new = rewrite(module, (DECOMPOSE_DEFORM_CONV,), example_inputs=IMAGE).model
    made = {path: part for path, part in new.named_modules() if isinstance(part, GridSampleConv)}
    frozen = [path for path, part in made.items() if not any(p.requires_grad for p in part.parameters())]
    assert frozen == [CONV]
    assert all(all(p.requires_grad for p in part.parameters()) for path, part in made.items() if path != CONV)


def test_a_network_in_training_mode_keeps_its_mode_and_its_counters(tiny):
    training = copy.deepcopy(tiny).train()
    training.bb.eval()
    new = rewrite(training, EXACT_PLAN).model
    counters = {name: value for name, value in new.state_dict().items() if "num_batches" in name}
    assert counters and all(torch.equal(value, training.state_dict()[name]) for name, value in counters.items())
    modes = {path: module.training for path, module in training.named_modules()}
    assert all(module.training == modes[path] for path, module in new.named_modules() if path in modes)
    assert not any(module.training for module in new.bb.modules())


# Example inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_example_inputs_of_another_floating_type_give_their_sizes(convs, dtype):
    (given,) = inputs_for(convs, torch.zeros(1, 3, 6, 5, dtype=dtype))
    assert (given.dtype, given.shape) == (torch.float32, (1, 3, 6, 5))
    assert rewrite(convs, (CLONE,), example_inputs=torch.zeros(1, 3, 6, 5, dtype=dtype)).log.applied()


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (torch.zeros(0, 3, 6, 5), r"one of shape \(0, 3, 6, 5\) holds none"),
        (torch.zeros(1, 3, 0, 5), "holds none"),
        (torch.zeros(1, 3, 6, 5, dtype=torch.uint8), r"does not run on example inputs of \(1, 3, 6, 5\) uint8"),
        (2 * SMALL, r"\(1, 3, 6, 5\) float32, \(1, 3, 6, 5\) float32 .*positional arguments"),
        ((), "must be tensors"),
        (5, "must be tensors, .*found \\['int'\\]"),
    ],
)
def test_example_inputs_that_the_model_does_not_take_are_refused_in_a_sentence(convs, inputs, told):
    with pytest.raises(RewriteError, match=told):
        rewrite(convs, (CLONE,), example_inputs=inputs)
