"""Substitutes for a deformable conv: the same function where what they drop is absent, pending everywhere else."""

import copy
import dataclasses

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.equivalence import learned_verdict
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.deform_data import FittedConv
from lumen_lab.rewrites.deform_statistics import deform_statistics
from lumen_lab.rewrites.deform_substitutes import (
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
    attention_conv,
    mean_kernel,
    moved_kernel,
    rank_one,
    substitute_modulated_conv,
    substitute_plain_conv,
    substitute_separable_conv,
)
from lumen_lab.rewrites.record import AS_GOOD_AS_THE_TEACHER
from lumen_lab.specs import Exact
from tests.rewrites.spoiling import spoiled

ALL = (SUBSTITUTE_MODULATED_CONV, SUBSTITUTE_PLAIN_CONV, SUBSTITUTE_SEPARABLE_CONV)


def network(kernel=3, *, offset_px=0.0, constant=True, separable=False):
    """One deformable conv 3 → 4 in float64 with the same offset everywhere; ``constant``: the modulator too."""
    torch.manual_seed(kernel)
    conv = DeformableConv2d(3, 4, kernel).double()
    conv.offset_conv.bias.data += offset_px
    conv.modulator_conv.bias.data.normal_()
    if separable:
        conv.modulator_conv.bias.data.fill_(0.7)
        conv.regular_conv.weight.data = torch.randn(4, 3, 1, 1).double() * torch.randn(1, 3, kernel, kernel)
    if not constant:
        conv.modulator_conv.weight.data.normal_(std=0.3)
    return nn.Sequential(conv).eval()


CASES = {
    "modulated": (SUBSTITUTE_MODULATED_CONV, {"constant": False}),
    "plain": (SUBSTITUTE_PLAIN_CONV, {}),
    "separable": (SUBSTITUTE_SEPARABLE_CONV, {"separable": True}),
}


def pictures():
    torch.manual_seed(0)
    return [torch.randn(2, 3, 6, 9, dtype=torch.float64), torch.randn(1, 3, 5, 4, dtype=torch.float64)]


def as_exact(rule, change=lambda module: None):
    return dataclasses.replace(spoiled(rule, change), claim=Exact())


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_function_where_nothing_is_dropped(case, kernel):
    rule, form = CASES[case]
    table = check_plan(network(kernel, **form), (as_exact(rule),), samples=pictures())
    assert table.passed, table.rows()


@pytest.mark.parametrize("case", CASES)
def test_offsets_of_half_a_pixel_are_seen(case):
    rule, form = CASES[case]
    table = check_plan(network(offset_px=0.5, **form), (as_exact(rule),), samples=pictures())
    assert len(table.failed) == 2


def first_parameter_nudged(module):
    next(module.parameters()).data.view(-1)[0] += 1e-5


def last_parameter_nudged(module):
    list(module.parameters())[-1].data[-1] += 1e-6


def rolled(module):
    module.register_forward_hook(lambda module, inputs, output: output.roll(1, 2))


def taps_reversed(module):
    """The largest kernel turned upside down, or the taps of the 1×1 conv in reverse."""
    weight = max((p for p in module.parameters() if p.dim() == 4), key=lambda p: p.numel())
    weight.data = (
        weight.data.flip(2, 3) if weight.shape[-1] > 1 else weight.data.unflatten(1, (-1, 3)).flip(1).flatten(1, 2)
    )


def attention_halved(module):
    module.attention_conv.bias.data -= 0.1


SPOILED = [
    *((case, change) for case in CASES for change in (first_parameter_nudged, last_parameter_nudged, rolled)),
    ("modulated", taps_reversed),
    ("plain", taps_reversed),
    ("separable", attention_halved),
]


@pytest.mark.parametrize(("case", "change"), SPOILED)
def test_a_spoiled_version_is_not_the_same_function(case, change):
    rule, form = CASES[case]
    table = check_plan(network(**form), (as_exact(rule, change),), samples=pictures())
    assert len(table.failed) == 2


# What they start from


def test_a_tap_is_moved_to_where_it_looks():
    weight = torch.zeros(1, 1, 3, 3)
    weight[0, 0, 1, 0], weight[0, 0, 2, 2] = 1.0, 5.0
    offset = torch.zeros(9, 2)
    offset[3] = torch.tensor([-0.5, 1.0])  # the left one: half a pixel up, one to the right
    offset[8] = torch.tensor([3.0, 0.25])  # the last one: out of the window, so it stays at its edge
    assert moved_kernel(weight, offset)[0, 0].tolist() == [[0, 0.5, 0], [0, 0.5, 0], [0, 0, 5]]


def test_with_statistics_a_plain_conv_stands_where_the_taps_look():
    """Every tap looks one pixel to the right: the kernel's left and middle columns move there."""
    model = network(3)
    conv = model[0]
    conv.offset_conv.bias.data[1::2] = 1.0
    conv.regular_conv.weight.data[..., 2] = 0
    known = deform_statistics(model, pictures()).by_site["0"]
    weighted = conv.regular_conv.weight * 2 * torch.sigmoid(conv.modulator_conv.bias).view(3, 3)
    expected = torch.zeros_like(weighted)
    expected[..., 1:] = weighted[..., :2]
    assert torch.allclose(mean_kernel(conv, known), known.shrinkage * expected)
    assert 0 < known.shrinkage < 1


def test_taps_that_look_outside_shrink_the_kernel_to_nothing():
    model = network(3, offset_px=40.0)
    known = deform_statistics(model, pictures()).by_site["0"]
    assert known.inside_share == 0 and known.shrinkage == 0
    assert float(mean_kernel(model[0], known).detach().abs().max()) == 0


def test_rank_one_is_the_best_that_a_depthwise_and_a_pointwise_kernel_can_do():
    torch.manual_seed(0)
    weight = torch.randn(5, 2, 3, 3).double()
    depthwise, pointwise = rank_one(weight)
    assert (depthwise.shape, pointwise.shape) == ((2, 1, 3, 3), (5, 2, 1, 1))
    rest = weight - pointwise * depthwise.transpose(0, 1)
    expected = [torch.linalg.svdvals(weight[:, channel].flatten(1))[1:].square().sum() for channel in range(2)]
    assert float(rest.square().sum()) == pytest.approx(float(sum(expected)))


def test_the_attention_map_listens_to_the_taps_that_weigh():
    conv = network(3, constant=False)[0]
    conv.regular_conv.weight.data.zero_()
    conv.regular_conv.weight.data[..., 2, 0] = 1.0
    made = attention_conv(conv)
    assert torch.allclose(made.weight[0], conv.modulator_conv.weight[6], atol=1e-9)
    assert torch.allclose(made.bias, conv.modulator_conv.bias[6:7], atol=1e-9)


@pytest.mark.parametrize("make", [substitute_modulated_conv, substitute_plain_conv, substitute_separable_conv])
def test_fitted_kernels_are_taken_as_they_are(make):
    model, x = network(), pictures()[0]
    kernel = torch.randn(4, 1, 1, 1).double() * torch.randn(1, 3, 3, 3).double()
    fitted = {"0": FittedConv(kernel, torch.full((4,), 0.5).double(), 0.1, None, make.__name__)}
    made = rewrite(model, (make(fitted=fitted),), example_inputs=(x,)).model
    with torch.no_grad():
        level = 2 * torch.sigmoid(model[0].modulator_conv.bias).view(3, 3)
        if make is substitute_plain_conv:
            level = 1.0
        elif make is substitute_separable_conv:
            level = 2 * torch.sigmoid(attention_conv(model[0]).bias)
        expected = nn.functional.conv2d(x, kernel * level, torch.full((4,), 0.5).double(), padding=1)
        assert torch.allclose(made(x), expected)


@pytest.mark.parametrize("make", [substitute_modulated_conv, substitute_plain_conv, substitute_separable_conv])
def test_a_site_that_the_data_do_not_know_is_refused(make):
    model, x = network(), pictures()[0]
    other = deform_statistics(nn.Sequential(nn.Identity(), *network()).eval(), pictures())
    for rule in (make(statistics=other), make(fitted={"elsewhere": None})):
        (entry,) = rewrite(model, (rule,), example_inputs=(x,)).log.entries
        assert "have no entry for 0" in entry.refused


@pytest.mark.parametrize("make", [substitute_modulated_conv, substitute_plain_conv, substitute_separable_conv])
def test_data_of_another_network_or_for_another_rewrite_are_refused(make):
    model, x = network(), pictures()[0]
    fit = FittedConv(torch.zeros(4, 3, 3, 3), torch.zeros(4), 0.1, None, make.__name__)
    wide = dataclasses.replace(fit, weight=torch.zeros(4, 5, 3, 3))
    cases = {
        "kernel fitted for 0 is (4, 5, 3, 3), not (4, 3, 3, 3)": make(fitted={"0": wide}),
        "was fitted for another_rewrite, not for": make(
            fitted={"0": dataclasses.replace(fit, substitute="another_rewrite")}
        ),
        "have a kernel of 7 and not 3 for 0": make(statistics=deform_statistics(network(7), pictures())),
    }
    for reason, rule in cases.items():
        (entry,) = rewrite(model, (rule,), example_inputs=(x,)).log.entries
        assert reason in entry.refused


# What a learned rewrite owes to the rest of the house


def test_they_are_pending_before_a_score_and_judged_by_it(parts):
    module, samples = parts["deform"]
    for rule in ALL:
        verdicts = check_plan(module, (rule,), samples=samples).verdicts
        assert [verdict.status for verdict in verdicts] == ["pending"] * 5
        assert verdicts[-1].sqnr_db is not None
    assert learned_verdict(AS_GOOD_AS_THE_TEACHER, -0.005, "plain", "").passed
    assert learned_verdict(AS_GOOD_AS_THE_TEACHER, -0.02, "plain", "").status == "failed"


def test_the_code_names_the_constant_or_what_was_given():
    assert [rule.expression for rule in ALL] == [rule.name.upper() for rule in ALL]
    assert substitute_plain_conv(fitted={}).expression == "substitute_plain_conv(fitted=fitted)"


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_weights_are_copies_and_load_into_another_network_of_the_plan(rule):
    model, x = network(constant=False), pictures()[0]
    before = copy.deepcopy(model.state_dict())
    one = rewrite(model, (rule,), example_inputs=(x,)).model
    two = rewrite(network(separable=True), (rule,), example_inputs=(x,)).model
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(two(x), one(x))
        for parameter in one.parameters():
            parameter.zero_()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_it_trains_in_every_part_and_survives_a_copy_in_half_precision(rule):
    x = pictures()[0]
    made = rewrite(network(constant=False), (rule,), example_inputs=(x,)).model.train()
    made(x).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())
    half = copy.deepcopy(made).half()(x.half())
    assert torch.allclose(half.double(), made(x), atol=0.05)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_the_exported_graph_has_convs_and_products_only(rule, tmp_path):
    x = pictures()[1].float()
    made = rewrite(network(constant=False).float(), (rule,), example_inputs=(x,)).model
    path = export_onnx(made, tmp_path / "x.onnx", example_inputs=(x,), input_names=["x"], output_names=["y"])
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert kinds <= {"Conv", "Split", "Sigmoid", "Mul", "Concat"}
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    with torch.no_grad():
        assert float((torch.from_numpy(found) - made(x)).abs().max()) <= 1e-5
