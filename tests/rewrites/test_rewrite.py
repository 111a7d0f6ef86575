"""What ``rewrite`` does to a model, what it refuses and with which reason, and what the log keeps."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lumen_lab.errors import ArtifactError, RewriteError
from lumen_lab.network.decoder import ImageTiles
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.network.swin import CyclicShift, SwinBlock, WindowPartition
from lumen_lab.rewrites import EXACT_PLAN, LUMEN_PLAN, RewriteLog, check_plan, rewrite
from lumen_lab.rewrites.attention import CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D, PaddedShift
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV, GridSampleConv
from lumen_lab.rewrites.plan import common_parent
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D

IMAGE = (torch.zeros(2, 4, 8, 8),)


@pytest.fixture(scope="module")
def before(tiny):
    """The modules of the tiny network and copies of its weights, taken before anything is rewritten."""
    return kinds(tiny), {name: value.clone() for name, value in tiny.state_dict().items()}


@pytest.fixture(scope="module")
def rewritten(tiny, before):
    return rewrite(tiny, EXACT_PLAN)


def kinds(model):
    return [(path, type(module), id(module)) for path, module in model.named_modules()]


def test_the_original_is_untouched(tiny, before, rewritten):
    modules, weights = before
    assert kinds(tiny) == modules
    assert all(torch.equal(weights[name], value) for name, value in tiny.state_dict().items())
    assert not any(hasattr(module, "rewritten_by") for module in tiny.modules())


def test_the_new_model_shares_no_memory_with_the_original(tiny, rewritten):
    old, new = ({value.data_ptr() for value in model.state_dict().values()} for model in (tiny, rewritten.model))
    assert old.isdisjoint(new)


def test_every_new_module_says_which_rewrite_made_it(tiny, rewritten):
    for entry in rewritten.log.applied():
        assert {rewritten.model.get_submodule(path).rewritten_by for path in entry.replaced} == {entry.rewrite}
    old, new = dict(tiny.named_modules()), dict(rewritten.model.named_modules())
    changed = [path for path, module in old.items() if path in new and type(new[path]) is not type(module)]
    tail_and_tile_conv = 4
    assert len(changed) == 20 + 4 + 8 + 8 + 8 + 8 + 43 + tail_and_tile_conv
    assert all(hasattr(new[path], "rewritten_by") for path in changed)


def test_nothing_that_was_to_go_is_left_where_it_is_called(rewritten):
    left = {type(module) for module in rewritten.model.modules()}
    assert not left & {DeformableConv2d, ImageTiles, nn.BatchNorm2d}
    shifts = [module.shift for module in rewritten.model.modules() if isinstance(module, SwinBlock)]
    assert [(type(shift), shift.shift) for shift in shifts] == 4 * [(CyclicShift, 0), (PaddedShift, 3)]


def test_mask_in_float32_is_the_original_ones(tiny, rewritten):
    image = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        assert float((tiny(image).sigmoid() - rewritten.model(image).sigmoid()).abs().max()) <= 1e-5


def test_a_size_that_was_not_known_when_rewriting_works_and_is_kept(tiny, rewritten):
    new = copy.deepcopy(rewritten.model)
    image = torch.randn(1, 3, 96, 64)
    names = {name for name, _ in new.named_buffers()}
    with torch.no_grad():
        assert torch.allclose(new(image), tiny(image), atol=1e-5)
        more = {name for name, _ in new.named_buffers()}
        new(image)
    assert names < more == {name for name, _ in new.named_buffers()}


def test_the_log_counts_sites_and_gives_reasons(rewritten):
    rows = {row["rewrite"]: row for row in rewritten.log.rows()}
    assert list(rows) == [rule.name for rule in EXACT_PLAN]
    assert {name: row["sites"] for name, row in rows.items()} == {
        "convert_cyclic_shift_to_padding": 4,
        "convert_window_partition_to_4d": 8,
        "convert_window_merge_to_4d": 8,
        "split_attention_by_heads": 8,
        "decompose_deform_conv": 20,
        "fold_full_resolution_tail": 1,
        "convert_image_tiles_to_4d": 4,
        "fold_batch_norm": 43,
        "split_conv_over_inputs": 1,
    }
    shift = rows["convert_cyclic_shift_to_padding"]
    assert (shift["refused"], shift["why refused"]) == (4, "this block does not shift its windows")
    assert len(rewritten.log.applied()) == 97


def test_the_log_is_saved_and_read_again(rewritten, tmp_path):
    path = rewritten.log.save(tmp_path / "log.json")
    assert RewriteLog.load(path) == rewritten.log
    with pytest.raises(ArtifactError, match="RewriteLog"):
        RewriteLog.load(check_plan_file(tmp_path))


def check_plan_file(folder):
    path = folder / "other.json"
    path.write_text('{"verdicts": []}')
    return path


def test_a_second_pass_refuses_what_has_been_rewritten(rewritten):
    again = rewrite(rewritten.model, (DECOMPOSE_DEFORM_CONV, CONVERT_CYCLIC_SHIFT_TO_PADDING, FOLD_BATCH_NORM))
    assert again.log.applied() == []
    assert "rewritten already" in str(again.log.rows())


def test_decomposed_and_recomposed_weights_are_the_same_bit_for_bit(tiny):
    there = rewrite(tiny, (DECOMPOSE_DEFORM_CONV,)).model
    back = rewrite(there, (RECOMPOSE_DEFORM_CONV,)).model
    assert sum(isinstance(module, GridSampleConv) for module in there.modules()) == 20
    expected, found = tiny.state_dict(), back.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(back(image), tiny(image))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_new_modules_have_the_dtype_and_the_mode_of_the_model(parts, dtype):
    module, _ = parts["deform"]
    module = copy.deepcopy(module).to(dtype).train()
    new = rewrite(module, (DECOMPOSE_DEFORM_CONV,), example_inputs=(IMAGE[0].to(dtype),)).model
    assert {value.dtype for value in new.parameters()} == {dtype}
    assert all(part.training for part in new.modules())


# Plans and inputs that are refused


def test_a_plan_in_the_wrong_order_is_refused(parts):
    module, samples = parts["deform"]
    plan = (FOLD_BATCH_NORM, DECOMPOSE_DEFORM_CONV)
    told = "fold_batch_norm before decompose_deform_conv; it must come after"
    with pytest.raises(RewriteError, match=told):
        rewrite(module, plan, example_inputs=IMAGE)
    with pytest.raises(RewriteError, match=told):
        check_plan(module, plan, samples=samples)


def test_the_order_is_declared_because_it_matters(parts):
    """Folding first leaves the norms behind the deformable convs."""
    careless = dataclasses.replace(FOLD_BATCH_NORM, after=())
    row = rewrite(parts["deform"][0], (careless, DECOMPOSE_DEFORM_CONV), example_inputs=IMAGE).log.rows()[0]
    assert (row["sites"], row["refused"]) == (4, 4)
    assert "reads DeformableConv2d, not the output of a Conv2d; decompose the deformable convs first" in str(row)


def test_a_model_that_does_not_say_its_size_needs_example_inputs(parts):
    with pytest.raises(RewriteError, match="no config.image_size, .* pass example_inputs"):
        rewrite(parts["tiles"][0], (CONVERT_IMAGE_TILES_TO_4D,))


@pytest.mark.parametrize("kind", ["deform", "tiles"])
def test_a_network_that_would_itself_be_replaced_is_refused_with_the_way_out(kind):
    module = DeformableConv2d(4, 4, 3) if kind == "deform" else WindowPartition(2)
    rule = DECOMPOSE_DEFORM_CONV if kind == "deform" else CONVERT_WINDOW_PARTITION_TO_4D
    example = IMAGE if kind == "deform" else (torch.zeros(1, 4, 4, 1),)
    with pytest.raises(RewriteError, match=r"put it in a module, such as nn.Sequential\(network\)"):
        rewrite(module, (rule,), example_inputs=example)


def test_one_block_alone_can_be_rewritten():
    block = SwinBlock(8, 2, 3, 1, 0.0).eval()
    x = torch.randn(1, 7, 5, 8)
    new = rewrite(block, (CONVERT_CYCLIC_SHIFT_TO_PADDING,), example_inputs=(x,))
    assert new.log.applied()[0].replaced == ("shift", "unshift")
    with torch.no_grad():
        assert torch.allclose(new.model(x), block(x), atol=1e-5)


def test_a_network_rewritten_inside_inference_mode_can_be_trained_afterwards(parts):
    module, samples = parts["deform"]
    with torch.inference_mode():
        new = rewrite(module, (DECOMPOSE_DEFORM_CONV, FOLD_BATCH_NORM), example_inputs=(samples[0] * 1,))
        for sample in samples:
            assert torch.allclose(new.model(sample), module(sample), atol=1e-5)
    assert new.log.rows()[1]["refused"] == 0
    new.model(samples[1]).sum().backward()
    assert all(parameter.grad is not None for parameter in new.model.parameters())


# Norms that must not be folded


class Net(nn.Module):
    """Four convs' worth of ways in which a norm can come after a conv."""

    def __init__(self, form):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.other = nn.Conv2d(4, 4, 1)
        self.form = form

    def forward(self, x):
        return getattr(self, self.form)(x)

    def plain(self, x):
        return self.act(self.norm(self.conv(x)))

    def after_activation(self, x):
        return self.norm(self.act(self.conv(x)))

    def after_sum(self, x):
        return self.norm(self.conv(x) + x)

    def two_norms(self, x):
        y = self.conv(x)
        return self.norm(y) + self.second(y)

    def read_by_a_conv_too(self, x):
        y = self.conv(x)
        return self.norm(y) + self.other(y)

    def shared_conv(self, x):
        return self.second(self.conv(self.norm(self.conv(x))))

    def shared_norm(self, x):
        return self.norm(self.other(self.norm(self.conv(x))))

    def several_sizes(self, x):
        return self.norm(self.conv(x))[..., ::2, ::2] + self.norm(self.conv(x[..., ::2, ::2]))

    def conv_used_alone_too(self, x):
        return self.norm(self.conv(x)) + self.conv(x)


def net(form):
    torch.manual_seed(0)
    made = Net(form).eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return made


def test_a_norm_behind_a_conv_is_folded():
    log = rewrite(net("plain"), (FOLD_BATCH_NORM,), example_inputs=IMAGE).log
    assert log.applied()[0].replaced == ("conv", "norm")


NOT_FOLDED = {
    "after_activation": "reads ReLU",
    "after_sum": "no single module makes",
    "two_norms": "no single module makes",
    "read_by_a_conv_too": "no single module makes",
    "shared_conv": "no single module makes",
    "shared_norm": "no single module makes",
    "conv_used_alone_too": "no single module makes",
    "several_sizes": "called at several sizes",
}


@pytest.mark.parametrize("form", NOT_FOLDED)
def test_a_norm_that_cannot_be_folded_is_left_with_the_reason(form):
    model, x = net(form), torch.randn(2, 4, 8, 8)
    new = rewrite(model, (FOLD_BATCH_NORM,), example_inputs=IMAGE)
    assert new.log.applied() == []
    assert NOT_FOLDED[form] in new.log.rows()[0]["why refused"]
    with torch.no_grad():
        assert torch.equal(new.model(x), model(x))


def test_norms_are_not_folded_in_training_mode(parts):
    module, _ = parts["deform"]
    new = rewrite(copy.deepcopy(module).train(), (FOLD_BATCH_NORM,), example_inputs=IMAGE)
    assert new.log.applied() == []
    assert "training mode" in new.log.rows()[0]["why refused"]


def test_finding_sites_does_not_touch_the_statistics_of_a_norm(parts):
    module, _ = parts["deform"]
    module = copy.deepcopy(module).train()
    before = {name: value.clone() for name, value in module.state_dict().items() if "running" in name}
    after = rewrite(module, (DECOMPOSE_DEFORM_CONV,), example_inputs=IMAGE).model.state_dict()
    assert before
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("paths", "parent"),
    [(["a.b.c", "a.b.d"], "a.b"), (["a.b"], "a.b"), (["a.b", "a"], "a"), (["a", "b"], ""), (["ab.c", "a.c"], "")],
)
def test_common_parent_of_paths(paths, parent):
    assert common_parent(paths) == parent


@pytest.mark.parametrize("harm", ["hook", "no statistics"])
def test_a_norm_that_is_more_than_its_numbers_is_not_folded(harm):
    norm = nn.BatchNorm2d(3, track_running_stats=harm != "no statistics")
    module = nn.Sequential(nn.Conv2d(3, 3, 1), norm).eval()
    if harm == "hook":
        module[0].register_forward_hook(lambda conv, inputs, output: 2 * output)
    done = rewrite(module, (FOLD_BATCH_NORM,), example_inputs=torch.zeros(1, 3, 4, 4))
    (entry,) = done.log.entries
    assert entry.refused and ("hooks" in entry.refused or "statistics" in entry.refused)


def test_one_pass_for_shapes_serves_several_rewrites_and_finds_what_a_pass_for_each_finds(tiny, monkeypatch):
    from lumen_lab.rewrites import plan as plan_module

    passes = []
    real = plan_module.watch_flow
    monkeypatch.setattr(plan_module, "watch_flow", lambda *given: passes.append(1) or real(*given))
    at_once = rewrite(tiny, LUMEN_PLAN)
    assert len(passes) < len(LUMEN_PLAN) - 3
    one_by_one, entries = tiny, []
    for rule in LUMEN_PLAN:
        done = rewrite(one_by_one, (rule,), example_inputs=(torch.zeros(1, 3, 64, 96),))
        one_by_one, entries = done.model, entries + list(done.log.entries)
    assert list(at_once.log.entries) == entries
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(at_once.model(image), one_by_one(image))
