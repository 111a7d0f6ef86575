"""Deformable convs as sums over whole-pixel shifts: exact within the radius, clamped beyond, caught when spoiled."""

import copy
import dataclasses

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import deform_conv2d

from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.equivalence import claim_text
from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.deform_shifts import (
    APPROXIMATE_DEFORM_CONV_BY_SHIFTS,
    ShiftedTaps,
    Shifts,
    approximate_deform_conv_by_shifts,
    offsets_at_the_edges,
    stretched,
    yx_order,
)
from tests.rewrites.spoiling import as_class, spoiled


def deform(kernel, reach_px, *, channels=(3, 4)):
    """A deformable conv whose offsets are of about ``reach_px`` pixels, in float64, in a network of its own."""
    torch.manual_seed(kernel)
    conv = DeformableConv2d(*channels, kernel).double()
    for part, spread in ((conv.offset_conv, reach_px), (conv.modulator_conv, 0.5)):
        nn.init.normal_(part.weight, std=0.1)
        nn.init.normal_(part.bias, std=spread)
    return nn.Sequential(conv).eval()


def shifted(model, radius, x):
    return rewrite(model, (approximate_deform_conv_by_shifts(radius=radius),), example_inputs=(x,)).model


def clamped(conv, radius, x):
    """What the deformable conv gives with its offsets clamped: torchvision's own look-up."""
    offset = conv.offset_conv(x).clamp(-radius, radius)
    modulator = 2.0 * torch.sigmoid(conv.modulator_conv(x))
    return deform_conv2d(x, offset, conv.regular_conv.weight, padding=conv.padding, mask=modulator)


@pytest.mark.parametrize(("kernel", "radius"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 1)])
@pytest.mark.parametrize("size", [(6, 9), (1, 5)])
def test_shifts_are_the_deformable_conv_up_to_the_radius(kernel, radius, size):
    model, x = deform(kernel, 1.0), torch.randn(2, 3, *size, dtype=torch.float64)
    model[0] = stretched(model[0], x, radius)
    with torch.no_grad():
        offset = model[0].offset_conv(x)
        assert float(offset.abs().max()) == pytest.approx(radius, abs=1e-9)
        assert float((model(x) - shifted(model, radius, x)(x)).abs().max()) <= 1e-11


@pytest.mark.parametrize("kernel", [1, 3])
def test_offsets_beyond_the_radius_are_clamped_to_it(kernel):
    model, x = deform(kernel, 8.0), torch.randn(2, 3, 6, 9, dtype=torch.float64)
    with torch.no_grad():
        found = shifted(model, 2, x)(x)
        assert float((found - clamped(model[0], 2, x)).abs().max()) <= 1e-11
        assert float((found - model(x)).abs().max()) > 0.1


def test_a_shift_reads_its_neighbour_and_zeros_outside():
    x = torch.arange(1.0, 7.0).view(1, 1, 2, 3)
    shifts = Shifts(1)
    assert shifts(x, (0, 1))[0, 0].tolist() == [[2, 3, 0], [5, 6, 0]]
    assert shifts(x, (-1, -2))[0, 0].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert shifts(x, (0, 0)) is x
    assert float(shifts(x, (5, 0)).abs().sum()) == 0


def test_order_is_all_dy_then_all_dx():
    assert yx_order(2).tolist() == [0, 2, 1, 3]


# The claim, and what breaks it


def test_the_claim_holds_at_its_edges_and_the_note_says_what_real_inputs_give(parts):
    module, samples = parts["deform"]
    table = check_plan(module, (APPROXIMATE_DEFORM_CONV_BY_SHIFTS,), samples=samples)
    *sites, whole = table.verdicts
    assert len(sites) == 4 and all(verdict.passed for verdict in sites)
    assert all(verdict.samples == 5 * len(samples) for verdict in sites)
    assert all(verdict.claim == claim_text(APPROXIMATE_DEFORM_CONV_BY_SHIFTS.claim) for verdict in sites)
    assert "on the network's own inputs it differs by" in sites[-1].note
    assert whole.status == "pending" and whole.max_abs > 0


def test_edge_cases_touch_the_radius_in_every_channel():
    conv, x = deform(3, 0.3)[0], torch.randn(2, 3, 5, 7, dtype=torch.float64)
    (filled, inputs), *corners = offsets_at_the_edges(2, conv, (x,))
    with torch.no_grad():
        offset = filled.offset_conv(inputs[0]).transpose(0, 1).flatten(1)
        assert torch.allclose(offset.amin(1), torch.full((18,), -2.0).double())
        assert torch.allclose(offset.amax(1), torch.full((18,), 2.0).double())
        seen = {tuple(case.offset_conv(x)[0, :2, 2, 2].tolist()) for case, _ in corners}
    assert seen == {(2.0, 2.0), (2.0, -2.0), (-2.0, 2.0), (-2.0, -2.0)}
    assert all(torch.equal(case.regular_conv.weight, conv.regular_conv.weight) for case, _ in corners)


def test_constant_offsets_are_moved_to_the_edge_and_not_stretched():
    """A fresh deformable conv has offsets of zero everywhere; their rounding must not be blown up."""
    conv, x = DeformableConv2d(3, 4, 3).double(), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    offset = stretched(conv, x, 2).offset_conv(x)
    assert set(offset.flatten().tolist()) == {2.0, -2.0}


class WideHats(ShiftedTaps):
    def forward(self, x):
        relu = F.relu
        F.relu = lambda value: relu(value + 0.05)
        try:
            return super().forward(x)
        finally:
            F.relu = relu


class ShiftMissing(ShiftedTaps):
    def shift_weights(self, x):
        weights = super().shift_weights(x)
        del weights[self.radius, -self.radius]
        return weights


class ShiftsSwapped(ShiftedTaps):
    def shift_weights(self, x):
        return {(sx, sy): maps for (sy, sx), maps in super().shift_weights(x).items()}


class Rolled(ShiftedTaps):
    def forward(self, x):
        return super().forward(x).roll(1, 3)


class BorderRepeated(Shifts):
    def forward(self, x, shift):
        dy, dx = shift
        reach = max(abs(dy), abs(dx))
        padded = F.pad(x, (reach,) * 4, mode="replicate")
        return padded[:, :, reach + dy : reach + dy + x.shape[2], reach + dx : reach + dx + x.shape[3]]


def taps_exchanged(module):
    weight = module.tap_conv.weight.data
    channels = module.offset_conv.in_channels
    module.tap_conv.weight.data = weight.roll(channels, 1) if module.kernel > 1 else weight.flip(1)


def axes_exchanged(module):
    for parameter in module.offset_conv.parameters():
        parameter.data = parameter.data.roll(len(parameter) // 2, 0)


def reach_cut(module):
    module.offset_conv = Tighter(module.offset_conv, 0.98 * module.radius)


class Tighter(nn.Module):
    def __init__(self, conv, limit):
        super().__init__()
        self.conv, self.limit, self.in_channels = conv, limit, conv.in_channels

    def forward(self, x):
        return self.conv(x).clamp(-self.limit, self.limit)


def weight_nudged(module):
    module.tap_conv.weight.data[0, 0] += 1e-6


def modulator_off(module):
    module.modulator_conv.bias.data -= 0.01


SPOILED = {
    "hats too wide": as_class(WideHats),
    "one shift missing": as_class(ShiftMissing),
    "shifts exchanged": as_class(ShiftsSwapped),
    "output rolled one pixel": as_class(Rolled),
    "outside is the border": lambda module: as_class(BorderRepeated)(module.shifts),
    "taps exchanged": taps_exchanged,
    "dy and dx exchanged": axes_exchanged,
    "clamped before the radius": reach_cut,
    "a weight nudged": weight_nudged,
    "modulator a little off": modulator_off,
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_a_spoiled_version_fails_at_every_site(parts, mistake):
    module, samples = parts["deform"]
    wrong = spoiled(APPROXIMATE_DEFORM_CONV_BY_SHIFTS, SPOILED[mistake])
    table = check_plan(module, (wrong,), samples=samples[:1])
    assert [verdict.status for verdict in table.verdicts] == ["failed"] * 4 + ["pending"]


def test_a_radius_smaller_than_the_claim_fails(parts):
    """Shifts of radius 1 do not hold for a claim that reaches two pixels."""
    rule = dataclasses.replace(
        approximate_deform_conv_by_shifts(radius=2), built=approximate_deform_conv_by_shifts(radius=1).built
    )
    module, samples = parts["deform"]
    assert len(check_plan(module, (rule,), samples=samples[:1]).failed) == 4


# What a rewrite owes to the rest of the house


@pytest.mark.parametrize("radius", [0, -1, 9, 1.5, True, None])
def test_a_radius_that_is_no_small_whole_number_is_refused(radius):
    with pytest.raises(RewriteError, match="whole number of pixels from 1 to 8"):
        approximate_deform_conv_by_shifts(radius=radius)


def test_the_default_is_the_constant_and_the_code_makes_the_record():
    rule = approximate_deform_conv_by_shifts(radius=3)
    assert rule.expression == "approximate_deform_conv_by_shifts(radius=3)"
    assert rule.name.upper() == "APPROXIMATE_DEFORM_CONV_BY_SHIFTS"
    assert "3 px" in rule.claim.domain
    assert eval(rule.expression).claim == rule.claim


def test_weights_are_copies_and_load_into_another_network_of_the_plan():
    model, x = deform(3, 0.3), torch.randn(1, 3, 5, 7, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    one, two = shifted(model, 1, x), shifted(deform(3, 0.9), 1, x)
    assert not any("kernels" in name for name in one.state_dict())
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(two(x), one(x))
        for parameter in one.parameters():
            parameter.zero_()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_follows_the_networks_dtype_and_batch(dtype):
    x = torch.randn(1, 3, 5, 7, dtype=torch.float64)
    made = copy.deepcopy(shifted(deform(3, 0.3), 1, x))
    expected = made(x.expand(3, -1, -1, -1))
    found = made.to(dtype)(x.to(dtype).expand(3, -1, -1, -1))
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, atol=0.05 if dtype == torch.float16 else 1e-5)


def test_it_trains_and_offsets_within_the_radius_get_their_gradient():
    model, x = deform(3, 0.3), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    model[0] = stretched(model[0], x, 1)
    model[0].offset_conv.bias.data *= 0.5
    model[0].offset_conv.weight.data *= 0.5
    made = shifted(model, 1, x).train()
    for network in (model, made):
        network(x).square().sum().backward()
    expected = model[0].offset_conv.weight.grad[yx_order(9)]
    assert torch.allclose(made[0].offset_conv.weight.grad, expected, atol=1e-9)


def test_the_exported_graph_looks_nothing_up_and_gives_the_same(tmp_path):
    x = torch.randn(1, 3, 5, 7)
    made = shifted(deform(3, 0.6).float(), 1, x)
    path = export_onnx(made, tmp_path / "shifts.onnx", example_inputs=(x,), input_names=["x"], output_names=["y"])
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert kinds <= {"Conv", "Clip", "Split", "Sub", "Abs", "Relu", "Sigmoid", "Mul", "Add", "Concat"}
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    with torch.no_grad():
        assert float((torch.from_numpy(found) - made(x)).abs().max()) <= 1e-5
