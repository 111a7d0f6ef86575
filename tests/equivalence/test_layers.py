"""Two executions layer by layer: what is matched, what is not and why, and which layer is the first to differ."""

import copy
import dataclasses
import html
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.equivalence import (
    DEFAULT_TOLERANCES,
    LayerReport,
    LayerTensor,
    LayerTrace,
    Tolerance,
    compare_layers,
    trace_torch,
)
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.attention import CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV

PLAN = (DECOMPOSE_DEFORM_CONV, CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D, FOLD_BATCH_NORM)
CLOSE = Tolerance("close", max_of_scale=1e-6)


def trace(*layers, name="a", precision="float32", **more):
    """A trace of layers given as (site, values) or as whole tensors."""
    made = [x if isinstance(x, LayerTensor) else LayerTensor(x[0], 0, 0, np.array(x[1])) for x in layers]
    return LayerTrace(name, precision, tuple(made), **more)


def ramp(*shape):
    return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).eval()


IMAGE = torch.randn(1, 3, 6, 7, generator=torch.Generator().manual_seed(3))


# Traces of a torch module


def test_a_trace_holds_what_each_module_returned_in_order_before_anything_in_place():
    model = small()
    found = trace_torch(model, IMAGE)
    assert [layer.site for layer in found.layers] == ["0", "1", "2", "3", ""]
    assert [layer.kind for layer in found.layers][1:3] == ["BatchNorm2d", "ReLU"]
    (norm,), (relu,), (whole,) = found.at("1"), found.at("2"), found.at("")
    assert norm.values.min() < 0 <= relu.values.min()
    assert not relu.handed_on  # the same tensor object as its input, but changed in place
    np.testing.assert_array_equal(relu.values, np.maximum(norm.values, 0))
    with torch.no_grad():
        np.testing.assert_array_equal(whole.values, model(IMAGE).numpy())
    assert found.precision == "float32" and found.rewritten == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_tensor_that_two_modules_return_is_held_once_and_one_handed_on_is_marked():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Identity()), nn.Dropout()).eval()
    found = trace_torch(model, torch.ones(2, 3))
    assert len({id(layer.values) for layer in found.layers}) == 1
    assert {layer.site: layer.handed_on for layer in found.layers} == {
        "0.0": False, "0.1": True, "0": False, "1": True, "": False,
    }  # fmt: skip


def test_calls_outputs_and_modules_that_never_ran_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, y):
            return {"first": self.twice(x), "rest": (self.twice(y), None, x + y)}

    x, y = torch.ones(1, 2), torch.zeros(1, 2)
    found = trace_torch(Twice().eval(), (x, y))
    assert [(layer.site, layer.call, layer.output) for layer in found.layers] == [
        ("twice", 0, 0), ("twice", 1, 0), ("", 0, 0), ("", 0, 1), ("", 0, 2),
    ]  # fmt: skip
    assert found.absent == {"idle": "it was never called"}
    assert found.calls == {"twice": 2, "": 1}
    assert not np.array_equal(found.at("twice", 0)[0].values, found.at("twice", 1)[0].values)


def test_a_trace_of_chosen_sites_holds_no_others_and_unknown_ones_are_refused():
    assert [layer.site for layer in trace_torch(small(), IMAGE, sites=["2", "0"]).layers] == ["0", "2"]
    with pytest.raises(LumenError, match="no site '0.conv' in Sequential; the nearest are"):
        trace_torch(small(), IMAGE, sites=["0.conv"])
    with pytest.raises(LumenError, match="training mode"):
        trace_torch(small().train(), IMAGE)


def test_a_trace_runs_in_the_precision_of_the_model_and_inside_inference_mode():
    with torch.inference_mode():
        found = trace_torch(small().double(), IMAGE.double())
    assert found.precision == "float64" and found.at("0")[0].values.dtype == np.float64
    with pytest.raises(LumenError, match="precision float64, float32, float16, int8; 'int4' was given"):
        trace(("a", ramp(2)), precision="int4")


# The first layer that differs


@pytest.mark.parametrize("site", ["0", "1", "3"])
def test_the_first_layer_is_the_one_whose_weight_was_nudged(site):
    model = small()
    spoiled = copy.deepcopy(model)
    with torch.no_grad():
        spoiled.get_submodule(site).weight.view(-1)[0] += 1e-2
    report = compare_layers(trace_torch(model, IMAGE, name="good"), trace_torch(spoiled, IMAGE, name="spoiled"))
    order = [layer.site for layer in report.layers]
    place = order.index(site)
    assert report.first.site == site
    assert [layer.status for layer in report.layers] == ["within"] * place + ["first"] + ["after"] * (3 - place)
    assert all(layer.identical for layer in report.layers[:place])
    assert not report.passed
    assert report.layers[-1].also == ("(network)",)
    assert str(report).startswith(
        "spoiled against good: 5 of 5 tensors compared (100%), the network’s own output among them; "
        f"{4 - place} left their tolerance, {site} first"
    )


def test_a_rewritten_network_is_the_same_layer_by_layer(executions):
    published, rewritten, _ = executions
    report = compare_layers(published, rewritten)
    assert report.passed and report.first is None
    calls = {(layer.site, layer.call) for layer in report.layers}
    assert {("bb.norm0", 0), ("bb.norm0", 1), ("decoder.decoder_block1.bn_out", 0)} <= calls
    assert len(report.layers) > 250 and report.matched_share > 0.7
    reasons = {layer.why for layer in report.unmatched}
    assert "one tensor in rewritten stands for this and a later layer" in reasons  # a conv with its norm folded in
    assert "inside what decompose_deform_conv put there" in reasons
    assert "made by decompose_deform_conv" in reasons
    assert all(layer.why for layer in report.unmatched)
    compared = {layer.site for layer in report.layers} | {site for layer in report.layers for site in layer.also}
    missed = {layer.site for layer in report.unmatched}
    assert {layer.site for layer in published.layers} - {""} <= compared | missed
    assert {layer.site for layer in rewritten.layers} - {""} <= compared | missed


def test_a_rewrite_in_float32_is_seen_by_the_tolerance_of_float64(executions):
    published, rewritten, _ = executions
    exact = compare_layers(published, rewritten, tolerance=DEFAULT_TOLERANCES["float64"])
    assert exact.first.site == "squeeze_module.0.bn_in"  # the first fold: everything before it only moves data


@pytest.mark.parametrize(
    ("nudged", "first"),
    [
        ("bb.layers.1.blocks.1.mlp.fc1", "bb.layers.1.blocks.1.mlp.fc1"),
        ("decoder.decoder_block3.conv_in", "decoder.decoder_block3.bn_in"),  # the norm is folded into that conv
        (
            "decoder.decoder_block3.dec_att.aspp1.atrous_conv.offset_conv",
            "decoder.decoder_block3.dec_att.aspp1.bn",  # replaced as a whole, down to the norm behind it
        ),
    ],
)
def test_the_first_layer_of_a_rewritten_network_with_a_nudged_weight(executions, nudged, first):
    published, _, model = executions
    spoiled = copy.deepcopy(model)
    with torch.no_grad():
        spoiled.get_submodule(nudged).weight.view(-1)[0] += 0.3
    report = compare_layers(published, trace_torch(spoiled, image_of(published), name="spoiled"))
    place = report.layers.index(report.first)
    assert report.first.site == first and report.first.call == 0
    assert sum(layer.status == "after" for layer in report.layers[place:]) > 5
    assert not any(layer.outside for layer in report.layers[:place])
    assert report.layers[-1].outside  # the mask itself


def test_a_rolled_output_is_found_where_it_was_rolled(executions):
    published, _, model = executions

    class Rolled(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, *inputs):
            return self.inside(*inputs).roll(1, -1)

    spoiled = copy.deepcopy(model)
    spoiled.decoder.lateral_block3 = Rolled(spoiled.decoder.lateral_block3).eval()
    report = compare_layers(published, trace_torch(spoiled, image_of(published), name="spoiled"))
    assert report.first.site == "decoder.lateral_block3"
    missing = {layer.site: layer for layer in report.unmatched}
    assert missing["decoder.lateral_block3.conv"].why == "in spoiled: there is no such module"
    assert missing["decoder.lateral_block3.inside"].why == "in published: there is no such module"


def image_of(published):
    return torch.from_numpy(published.at("input_paths")[0].values)


@pytest.fixture(scope="module")
def executions(tiny):
    """(trace of the network as published, trace of it rewritten, the rewritten network)."""
    image = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    model = rewrite(tiny, PLAN).model
    return trace_torch(tiny, image, name="published"), trace_torch(model, image, name="rewritten"), model


def test_groups_that_were_replaced_together_are_compared_at_their_last():
    conv, out = ramp(1, 2, 3, 4), ramp(1, 2, 3, 4) ** 2
    before = trace(("wrap.conv", conv), ("wrap", conv), ("mid", conv), ("norm", out), ("tail", out), name="before")
    after = trace(("wrap.conv", out), ("wrap", out), ("mid", out), ("tail", out), name="folded")
    assert compare_layers(before, after).first.site == "wrap.conv"
    for pair in ((before, after), (after, before)):
        report = compare_layers(*pair, replaced=[("wrap.conv", "norm")])
        assert report.passed and [layer.site for layer in report.layers] == ["tail"]
        between = [layer for layer in report.unmatched if layer.why.startswith("between modules")]
        assert {layer.site for layer in between} >= {"wrap.conv", "wrap"}
        assert {layer.detail for layer in between} == {"compared from norm on"}


# Layouts and shapes


def tensor(site, values, **more):
    return LayerTensor(site, 0, 0, np.array(values), **more)


@pytest.mark.parametrize(
    ("turn", "order"),
    [((0, 2, 3, 1), "NHWC → NCHW"), ((0, 3, 1, 2), "NCHW → NHWC")],
)
def test_a_map_in_the_other_layout_is_matched(turn, order):
    x = ramp(1, 2, 3, 5)
    report = compare_layers(trace(("a", x)), trace(("a", x.transpose(turn)), name="b"))
    assert report.passed and report.layers[0].order == order and report.layers[0].identical
    spoiled = x.transpose(turn).copy()
    spoiled[0, 0, 0, 0] += 1
    assert compare_layers(trace(("a", x)), trace(("a", spoiled), name="b")).layers[0].max_abs == pytest.approx(1)


def test_declared_layouts_decide_where_the_shapes_cannot():
    x = np.random.default_rng(0).random((1, 4, 4, 4))
    turned = trace(tensor("a", x.transpose(0, 2, 3, 1), layout="NHWC"), name="b")
    assert not compare_layers(trace(("a", x)), turned).passed
    assert compare_layers(trace(tensor("a", x, layout="NCHW")), turned).passed
    assert not compare_layers(trace(tensor("a", x.swapaxes(2, 3), layout="NCHW")), turned).passed


def test_unit_axes_do_not_matter_and_other_shapes_are_not_compared():
    x = ramp(1, 6, 1, 1)
    assert compare_layers(trace(("a", x)), trace(("a", x.reshape(1, 6)), name="b")).layers[0].order == "unit axes"
    report = compare_layers(trace(("a", x), ("z", x)), trace(("a", x.reshape(2, 3)), ("z", x), name="b"))
    (left,) = report.unmatched
    assert (left.site, left.found_in, left.detail) == ("a", "a", "(1, 6, 1, 1), and in b (2, 3)")


def test_outputs_of_one_call_are_told_apart_by_their_shapes_or_not_at_all():
    wide, narrow = ramp(2, 9), ramp(2, 3)
    both = trace(tensor("a", wide), LayerTensor("a", 0, 1, narrow), ("z", narrow), name="two")
    one = trace(tensor("a", narrow), ("z", narrow), name="one")
    report = compare_layers(both, one)
    assert report.at("a", output=1).identical
    assert [(layer.output, layer.found_in) for layer in report.unmatched] == [(0, "two")]
    alike = trace(tensor("a", wide), LayerTensor("a", 0, 1, wide + 1), ("z", narrow), name="two")
    unclear = compare_layers(alike, trace(tensor("a", wide), ("z", narrow), name="one"))
    assert [layer.site for layer in unclear.layers] == ["z"]
    assert {layer.why for layer in unclear.unmatched} >= {"several tensors of the call have its shape"}


def test_a_site_called_more_often_on_one_side_is_not_compared():
    twice = trace(tensor("a", ramp(3)), LayerTensor("a", 1, 0, ramp(3)), ("z", ramp(3)), name="two")
    report = compare_layers(twice, trace(("a", ramp(3)), ("z", ramp(3)), name="one"))
    assert [layer.site for layer in report.layers] == ["z"]
    assert {(layer.why, layer.detail) for layer in report.unmatched} == {
        ("not called as often in both", "2 in two, 1 in one")
    }


def test_sites_that_one_trace_was_not_asked_for_are_no_gap():
    report = compare_layers(trace_torch(small(), IMAGE), trace_torch(small(), IMAGE, sites=["2"], name="few"))
    assert [layer.site for layer in report.layers] == ["2"] and not report.unmatched and report.matched_share == 1


def test_traces_without_a_common_layer_are_refused():
    with pytest.raises(LumenError, match="b and a have no layer in common"):
        compare_layers(trace(("x", ramp(2))), trace(("y", ramp(2)), name="b"))


# Figures


def row_of(reference, actual, tolerance=CLOSE, **encoding):
    layers = tensor("a", reference), tensor("a", actual, **encoding)
    return compare_layers(trace(layers[0]), trace(layers[1], name="b"), tolerance=tolerance).layers[0]


def test_figures_by_hand():
    row = row_of([3.0, 4.0], [3.0, 4.5])
    assert row.sqnr_db == pytest.approx(20.0)  # 25 to 0.25
    assert row.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert (row.max_abs, row.scale, row.equal, row.max_steps) == (0.5, 4.0, None, None)
    alike = row_of([3.0, 4.0], [3.0, 4.0])
    assert (alike.sqnr_db, alike.max_abs, alike.identical, alike.status) == (None, 0.0, True, "within")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_every_tolerance(bad):
    row = row_of([1.0, 2.0], [1.0, bad], Tolerance("loose", max_of_scale=1e9))
    assert (row.status, row.max_abs, row.sqnr_db, row.why) == ("first", None, None, "the difference is not finite")
    assert row_of([1.0, -math.inf], [1.0, -math.inf]).identical


def test_what_the_tolerance_bounds():
    assert row_of([1.0, 100.0], [1.00011, 100.0]).status == "first"
    assert row_of([1.0, 100.0], [1.00009, 100.0]).status == "within"  # a millionth of 100
    assert row_of([0.0, 0.0], [0.0, 1e-12]).status == "first"
    assert row_of([3.0, 4.0], [3.0, 4.5], Tolerance("t", min_sqnr_db=20.1)).status == "first"
    assert row_of([3.0, 4.0], [3.0, 4.5], Tolerance("t", min_sqnr_db=19.9)).status == "within"
    assert row_of([3.0, 4.0], [3.0, 4.5], Tolerance("t", max_steps=3)).status == "not judged"
    with pytest.raises(LumenError, match="'nothing' bounds nothing"):
        Tolerance("nothing")


def test_a_report_in_which_nothing_was_judged_has_not_passed():
    layers = trace(("a", ramp(3)))
    report = compare_layers(layers, trace(("a", ramp(3) + 1), name="b"), tolerance=Tolerance("t", max_steps=3))
    assert not report.passed and report.first is None and "none of them could be judged" in str(report)


def test_a_tolerance_may_be_given_for_single_sites():
    reference, actual = trace(("a", ramp(9)), ("b", ramp(9))), trace(("a", ramp(9) + 0.1), ("b", ramp(9)), name="b")
    assert compare_layers(reference, actual).first.site == "a"
    assert compare_layers(reference, actual, tolerance={"a": Tolerance("wide", max_of_scale=0.2)}).passed


def test_integers_are_compared_in_steps_of_their_encoding():
    real = np.array([0.0, 0.1, 0.2, 0.3, 0.4], np.float32)
    steps = np.array([128, 129, 131, 131, 134], np.uint8)  # 0, 0, +1, 0 and +2 steps of 0.1 off
    encoding = {"scale": 0.1, "zero_point": 128}
    row = row_of(real, steps, Tolerance("steps", max_steps=1), **encoding)
    assert (row.equal, row.within_one, row.max_steps) == (0.6, 0.8, 2)
    assert row.max_abs == pytest.approx(0.2) and row.status == "first" and row.why == "2 > 1 steps off"
    assert row_of(real, steps, Tolerance("steps", max_steps=2, min_within_one=0.8), **encoding).status == "within"
    assert row_of(real, steps, Tolerance("steps", min_within_one=0.9), **encoding).status == "first"
    assert (
        row_of([0.0, 9e9], np.array([0, 255], np.uint8), Tolerance("s", max_steps=0), scale=0.1, zero_point=0).equal
        == 1
    )


def test_integers_of_two_encodings_are_written_in_one():
    a = tensor("a", np.array([10, 20], np.uint8), scale=0.2, zero_point=0)
    b = tensor("a", np.array([20, 43], np.uint8), scale=0.1, zero_point=0)
    report = compare_layers(trace(a, precision="int8"), trace(b, name="b", precision="int8"))
    assert (report.layers[0].equal, report.layers[0].max_steps) == (0.5, 3)
    assert report.tolerance == DEFAULT_TOLERANCES["int8 against int8"]


@pytest.mark.parametrize(
    ("precisions", "name"),
    [
        (("float64", "float64"), "float64"),
        (("float64", "float32"), "float32"),
        (("float16", "float32"), "float16"),
        (("float32", "int8"), "int8 against float"),
        (("int8", "int8"), "int8 against int8"),
    ],
)
def test_the_default_tolerance_is_that_of_the_coarser_execution(precisions, name):
    layers = [trace(("a", ramp(4)), name=f"{place}", precision=p) for place, p in enumerate(precisions)]
    assert compare_layers(*layers).tolerance == DEFAULT_TOLERANCES[name]
    assert all(len(tolerance.because) > 40 and tolerance.text for tolerance in DEFAULT_TOLERANCES.values())


# The record


def spoiled_report():
    reference = trace(("a<b>", ramp(9)), ("lost", ramp(2)), ("c", ramp(9)), name="torch & co")
    return compare_layers(reference, trace(("a<b>", ramp(9)), ("c", ramp(9) * math.nan), name="b"))


def test_a_report_is_saved_and_read_again(tmp_path):
    report = spoiled_report()
    assert LayerReport.load(report.save(tmp_path / "report.json")) == report
    assert report.first.site == "c"
    (tmp_path / "other.json").write_text('{"record": "VerdictTable", "verdicts": []}')
    with pytest.raises(ArtifactError, match="LayerReport"):
        LayerReport.load(tmp_path / "other.json")


def test_a_report_holds_no_tensors():
    def plain(value):
        if dataclasses.is_dataclass(value):
            return all(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
        return all(map(plain, value)) if isinstance(value, tuple) else isinstance(value, str | int | float | None)

    assert plain(spoiled_report())


def test_the_page_names_the_first_layer_draws_each_and_escapes_names():
    report = spoiled_report()
    page = report._repr_html_()
    assert page.count("<rect") == len(report.layers) + 2  # a bar each and the legend of the two kinds
    assert "c first (the difference is not finite)" in page and html.escape("a<b>") in page and "a<b>" not in page
    assert "torch &amp; co" in page and "1 tensors that could not be compared" in page
    assert [row["layer"] for row in report.rows()] == ["a<b>", "c"]
    assert report.unmatched_rows()[0]["why"] == "in b: there is no such module"
    assert [layer.site for layer in report.worst()] == ["c"]


def test_resize_of_another_kind_is_found():
    class Up(nn.Module):
        def __init__(self, aligned):
            super().__init__()
            self.aligned = aligned

        def forward(self, x):
            return F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=self.aligned)

    def network(aligned):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 2, 1), Up(aligned), nn.Conv2d(2, 1, 3)).eval()

    report = compare_layers(trace_torch(network(True), IMAGE, name="good"), trace_torch(network(False), IMAGE))
    assert (report.first.site, report.first.kind) == ("1", "Up")


@pytest.mark.parametrize(
    ("read_by", "tells"), [("Relu", False), ("Sigmoid", False), ("Gelu", False), ("Conv", True), ("", True)]
)
def test_integers_are_compared_as_the_one_operator_behind_them_reads_them(read_by, tells):
    values = np.array([[-60.0, -40.0, 1.0, 2.0]], np.float32)
    clipped = np.array([[0, 0, 148, 168]], np.uint8)  # −6.4 to 6.35 in steps of .05
    row = row_of(values, clipped, scale=0.05, zero_point=128, read_by=read_by)
    assert (row.identical or row.sqnr_db > 40) != tells
    assert row.read_by == ("" if tells else read_by)
    real = row_of(values, np.clip(values, -6.4, 6.35), read_by=read_by)
    assert real.sqnr_db < 10 and real.read_by == ""
