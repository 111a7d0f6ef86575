"""Convs cut over their channels, and channels filled up with zeros."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn

from lumen_lab.equivalence import random_samples
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.catalogue import find_rewrite
from lumen_lab.rewrites.channels import (
    CHANNEL_GROUPS,
    PAD_CHANNELS,
    InputSplitConv,
    OutputSplitConv,
    pad_channels,
    slices,
    split_conv_over_inputs,
    split_conv_over_outputs,
)
from lumen_lab.rewrites.convolution import DEFORM_REWRITES, FOLD_BATCH_NORM
from lumen_lab.rewrites.plan import check_order
from tests.rewrites.spoiling import spoiled

CONVS = {
    "plain": dict(kernel_size=3, padding=1),
    "without bias": dict(kernel_size=3, padding=1, bias=False),
    "strided": dict(kernel_size=3, stride=2, padding=1),
    "dilated": dict(kernel_size=3, padding=(4, 2), dilation=(4, 2)),
    "same": dict(kernel_size=(5, 1), padding="same"),
    "two groups": dict(kernel_size=3, padding=1, groups=2),
    "four groups": dict(kernel_size=1, groups=4),
    "depthwise": dict(kernel_size=3, padding=1, groups=24),
}


def conv_net(form, *, inputs=24, outputs=48):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(inputs, outputs, **CONVS[form])).eval()


def samples(channels=24):
    return random_samples([(9, 12), (6, 5)], batch=2, channels=channels)


@pytest.mark.parametrize("form", [form for form in CONVS if form != "depthwise"])
@pytest.mark.parametrize("most", [5, 4])
def test_a_conv_cut_over_its_inputs_is_the_same(form, most):
    model, rule = conv_net(form), split_conv_over_inputs(most)
    table = check_plan(model, (rule,), samples=samples())
    assert table.passed and len(table.verdicts) == 2, table.failed
    split = rewrite(model, (rule,), example_inputs=(samples()[0],)).model[0]
    assert isinstance(split, InputSplitConv)
    assert [part.bias is not None for part in split.parts] == [form != "without bias"] + [False] * (
        len(split.parts) - 1
    )
    assert max(part.weight.shape[1] for part in split.parts) <= most


@pytest.mark.parametrize("form", CONVS)
@pytest.mark.parametrize("most", [20, 7, 1])
def test_a_conv_cut_over_its_outputs_is_the_same(form, most):
    model, rule = conv_net(form), split_conv_over_outputs(most)
    table = check_plan(model, (rule,), samples=samples())
    assert table.passed and len(table.verdicts) == 2, table.failed
    split = rewrite(model, (rule,), example_inputs=(samples()[0],)).model[0]
    assert isinstance(split, OutputSplitConv)
    assert max(part.out_channels for part in split.parts) <= most
    assert sum(part.weight.numel() for part in split.parts) == model[0].weight.numel()


def parts_exchanged(split):
    split.parts = nn.ModuleList([split.parts[1], split.parts[0], *split.parts[2:]])


def weight_nudged(split):
    split.parts[-1].weight.data[0, 0] += 1e-6


def bias_in_every_part(split):
    for part in split.parts[1:]:
        part.bias = nn.Parameter(split.parts[0].bias.detach().clone())


def bias_dropped(split):
    split.parts[0].bias = None


@pytest.mark.parametrize("change", [parts_exchanged, weight_nudged, bias_in_every_part, bias_dropped])
def test_a_spoiled_cut_over_inputs_fails(change):
    table = check_plan(conv_net("plain"), (spoiled(split_conv_over_inputs(8), change),), samples=samples())
    assert len(table.failed) == 2


@pytest.mark.parametrize("change", [parts_exchanged, weight_nudged, bias_dropped])
def test_a_spoiled_cut_over_outputs_fails(change):
    table = check_plan(conv_net("plain"), (spoiled(split_conv_over_outputs(16), change),), samples=samples())
    assert len(table.failed) == 2


class GroupsForgotten(InputSplitConv):
    """Slices of all channels in place of a slice of every group."""

    def slice_of(self, x, start, stop):
        return x[:, self.groups * start : self.groups * stop]


def test_a_cut_that_forgets_the_groups_fails():
    def forget(split):
        split.__class__ = GroupsForgotten

    table = check_plan(conv_net("two groups"), (spoiled(split_conv_over_inputs(6), forget),), samples=samples())
    assert len(table.failed) == 2


class Odd(nn.Conv2d):
    pass


CUT_AGAIN = {
    "inputs, then outputs": ((split_conv_over_inputs(8), split_conv_over_outputs(16)),),
    "inputs twice": ((split_conv_over_inputs(8),), (split_conv_over_inputs(5),)),
    "outputs, then inputs": ((split_conv_over_outputs(16),), (split_conv_over_inputs(8),)),
    "outputs twice": ((split_conv_over_outputs(24),), (split_conv_over_outputs(10),)),
}


@pytest.mark.parametrize("form", ["plain", "two groups", "strided"])
@pytest.mark.parametrize("order", CUT_AGAIN)
def test_a_conv_that_was_cut_may_be_cut_again(form, order):
    """Plans one after the other, each on what the one before has made."""
    model = conv_net(form).double()
    made, x = model, samples()[0].double()
    for plan in CUT_AGAIN[order]:
        done = rewrite(made, plan, example_inputs=(x,))
        made = done.model
        assert all(done.log.applied(rule.name) for rule in plan)
    with torch.no_grad():
        for sample in samples():
            assert torch.allclose(made(sample.double()), model(sample.double()), atol=1e-12)


@pytest.mark.parametrize("cut", [split_conv_over_outputs(64), split_conv_over_inputs(4)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("name", DEFORM_REWRITES)
def test_deformable_convs_are_rewritten_whole_or_refused(tiny, cut, name):
    """In one plan by its order; in two calls a conv in parts is refused, site by site."""
    image = torch.zeros(1, 3, 64, 96)
    rule = find_rewrite(name)
    with pytest.raises(RewriteError, match=f"{cut.name} before {name}; it must come after"):
        check_order((cut, rule))
    if name == DEFORM_REWRITES[0]:
        before = rewrite(tiny, (cut,), example_inputs=(image,)).model
        log = rewrite(before, (rule,), example_inputs=(image,)).log
        reasons = [entry.refused for entry in log.entries if entry.refused]
        assert reasons and all("SplitConv, which may compute something else than a Conv2d" in r for r in reasons)


REFUSED = {
    "reads no more than 24": (nn.Conv2d(24, 48, 1), split_conv_over_inputs(24)),
    "reads no more than 12 channels a group": (nn.Conv2d(24, 48, 1, groups=2), split_conv_over_inputs(12)),
    "gives no more than 48": (nn.Conv2d(24, 48, 1), split_conv_over_outputs(48)),
    "pads with 'circular'": (
        nn.Conv2d(24, 48, 3, padding=1, padding_mode="circular"),
        split_conv_over_inputs(8),
    ),
    "it is a Odd": (Odd(24, 48, 1), split_conv_over_outputs(8)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_conv_that_is_not_cut_is_left_with_the_reason(reason):
    conv, rule = REFUSED[reason]
    (entry,) = rewrite(nn.Sequential(conv), (rule,), example_inputs=(samples()[0],)).log.entries
    assert reason in entry.refused


def test_a_conv_with_a_hook_is_not_cut():
    model = conv_net("plain")
    model[0].register_forward_hook(lambda conv, inputs, output: 2 * output)
    (entry,) = rewrite(model, (split_conv_over_inputs(8),), example_inputs=(samples()[0],)).log.entries
    assert "has hooks" in entry.refused


@pytest.mark.parametrize(
    ("channels", "most", "widths"),
    [
        (3072, 1024, [1024, 1024, 1024]),
        (2880, 1024, [960, 960, 960]),
        (3072, 1000, [768] * 4),
        (33, 32, [32, 1]),
        (10, 4, [4, 4, 2]),
        (9, 7, [5, 4]),
    ],
)
def test_slices_are_few_even_and_whole_tiles_where_they_fit(channels, most, widths):
    cut = slices(channels, most)
    assert [stop - start for start, stop in cut] == widths
    assert cut[0][0] == 0 and cut[-1][1] == channels
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cut))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "32"])
@pytest.mark.parametrize("make", [split_conv_over_inputs, split_conv_over_outputs, pad_channels])
def test_a_number_of_channels_is_a_whole_number(make, value):
    with pytest.raises(RewriteError, match="whole number of channels"):
        make(value)


def test_the_code_of_a_record_makes_it_again():
    for rule in (split_conv_over_inputs(512), split_conv_over_outputs(96), pad_channels(16)):
        assert eval(rule.expression).expression == rule.expression


# Padding


SAMPLES = random_samples([(64, 96), (96, 32)], batch=2)


@pytest.fixture(scope="module")
def padded(tiny):
    return rewrite(tiny, (PAD_CHANNELS,)).model


def test_a_padded_decoder_is_the_same(tiny):
    table = check_plan(tiny, (PAD_CHANNELS,), samples=SAMPLES)
    assert table.passed and len(table.verdicts) == 2, table.failed


@pytest.mark.parametrize(("plan", "multiple"), [((FOLD_BATCH_NORM, PAD_CHANNELS), 32), ((pad_channels(5),), 5)])
def test_every_group_is_padded_behind_folded_norms_and_to_any_multiple(tiny, plan, multiple):
    model = rewrite(tiny, plan).model
    for makers, readers in CHANNEL_GROUPS:
        made = model.decoder.get_submodule(makers[0]).out_channels
        assert made % multiple == 0
        assert all(model.decoder.get_submodule(path).in_channels >= made for path in readers)
    with torch.no_grad():
        assert torch.allclose(model(SAMPLES[1]), tiny(SAMPLES[1]), atol=1e-5)


def test_padding_stays_zero_in_training(padded):
    model = copy.deepcopy(padded).train()
    outputs = model(SAMPLES[0])
    sum(x.square().sum() for x in (*outputs.masks, *outputs.gradients)).backward()
    gate, norm = model.decoder.gdt_convs_4[0], model.decoder.gdt_convs_4[1]
    assert gate.weight.grad[:16].abs().max() > 0 and norm.weight.grad[:16].abs().max() > 0
    assert gate.weight.grad[16:].abs().max() == 0 and norm.bias.grad[16:].abs().max() == 0
    for head in ("attn", "pred"):
        conv = model.decoder.get_submodule(f"gdt_convs_{head}_4.0")
        assert conv.weight.grad[:, 16:].abs().max() == 0


def test_training_mode_gives_the_same_side_outputs(tiny, padded):
    from lumen_lab.network.deform import AsppDeformable

    reference, actual = (copy.deepcopy(m).double() for m in (tiny, padded))
    for model in (reference, actual):  # gates and side outputs in training mode, without chance
        model.decoder.training = True
        assert not any(m.training for m in model.modules() if isinstance(m, AsppDeformable))
    with torch.no_grad():
        expected, found = reference(SAMPLES[0].double()), actual(SAMPLES[0].double())
    for side, other in zip((*expected.masks, *expected.gradients), (*found.masks, *found.gradients), strict=True):
        assert torch.allclose(side, other, atol=1e-12)


def test_what_has_no_group_to_pad_is_refused(padded):
    (entry,) = rewrite(padded, (PAD_CHANNELS,)).log.entries
    assert "multiples of 32 channels everywhere" in entry.refused


def reader_filled(modules):
    """Weights where zeros belong, on channels that are not zero: a bias in the padding as well."""
    modules["decoder.ipt_blk2.conv_out"].bias.data[-1] = 1.0
    modules["decoder.decoder_block1.conv_in"].weight.data[:, -1] = 1e-3


def zeros_in_front(modules):
    weight = modules["decoder.decoder_block1.conv_in"].weight
    weight.data = weight.data.roll(1, 1)


def norm_shifted(modules):
    modules["decoder.gdt_convs_4.1"].bias.data[-1] = 1.0
    modules["decoder.gdt_convs_attn_4.0"].weight.data[:, -1] = 1e-3


@pytest.mark.parametrize("harm", [reader_filled, zeros_in_front, norm_shifted])
def test_spoiled_padding_fails(tiny, harm):
    def built(site):
        modules = PAD_CHANNELS.built(site)
        harm(modules)
        return modules

    table = check_plan(tiny, (dataclasses.replace(PAD_CHANNELS, built=built),), samples=SAMPLES[1:])
    assert len(table.failed) == 2
