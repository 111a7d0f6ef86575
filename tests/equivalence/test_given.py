"""What a comparison is given: other inputs, names that do not fit, and how little was compared, are all said."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lumen_lab.equivalence import LayerReport, LayerTensor, LayerTrace, Tolerance, compare_layers, trace_torch
from lumen_lab.equivalence.given import same_input
from lumen_lab.equivalence.rewritten import compare_rewritten
from lumen_lab.errors import LumenError
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.record import Rewrite
from lumen_lab.specs import Exact

IMAGE = torch.randn(1, 3, 6, 7, generator=torch.Generator().manual_seed(3))


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


def trace(*layers, name="a", **more):
    """A trace of layers given as (site, values) or (site, values, output)."""
    made = [LayerTensor(site, 0, *(output or [0]), np.array(values)) for site, values, *output in layers]
    return LayerTrace(name, "float32", tuple(made), **more)


# The same inputs


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.cat([IMAGE, IMAGE]), r"\(1, 3, 6, 7\) and \(2, 3, 6, 7\)"),
        (IMAGE[..., :6], r"\(1, 3, 6, 7\) and \(1, 3, 6, 6\)"),
        (IMAGE.roll(1, -1), r"other values of \(1, 3, 6, 7\)"),
        (IMAGE + 1e-3, "other values"),
    ],
)
def test_executions_on_different_inputs_are_refused(other, words):
    with pytest.raises(LumenError, match=f"were given different inputs .*{words}.*; trace both with the same"):
        compare_layers(trace_torch(small(), IMAGE), trace_torch(small(), other))


def given(values, **encoding):
    return LayerTensor("input 0", 0, 0, np.asarray(values), **encoding)


X = np.random.default_rng(0).uniform(-1, 1, (1, 4, 4, 4)).astype(np.float32)
U8 = {"scale": 1 / 127.5, "zero_point": 128}
STEPS = np.clip(np.rint(X * 127.5) + 128, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (given(X.astype(np.float64)), True), (given(X.astype(np.float16)), True), (given(STEPS, **U8), True),
        (given(X.transpose(0, 2, 3, 1)), True), (given(STEPS.transpose(0, 2, 3, 1), **U8), True),
        (given(X[0]), True),
        (given(X + 1e-3), False), (given(X[:, ::-1]), False), (given((X + 0.02).astype(np.float16)), False),
        (given(STEPS + np.uint8(2), **U8), False), (given(STEPS), False), (given(X[..., :3]), False),
    ],
)  # fmt: skip
def test_layout_type_and_encoding_do_not_make_another_input(other, same):
    assert same_input(given(X), other) is same_input(other, given(X)) is same


def test_values_that_an_encoding_cannot_hold_are_clipped():
    wide = given(3 * X)
    clipped = given(np.clip(np.rint(3 * X * 127.5) + 128, 0, 255).astype(np.uint8), **U8)
    assert same_input(wide, clipped)
    assert not same_input(wide, given(STEPS, **U8))


def test_an_input_that_an_exported_graph_has_dropped_is_no_difference():
    a, b = given(X), given(-X)
    layers = ("", [1.0])
    assert compare_layers(trace(layers, inputs=(a, b)), trace(layers, name="b", inputs=(b,))).passed
    with pytest.raises(LumenError, match="different inputs"):
        compare_layers(trace(layers, inputs=(a, b)), trace(layers, name="b", inputs=(b, a)))


# How much was compared


def test_a_network_whose_output_was_not_compared_has_not_passed():
    layers = ("a", [1.0, 2.0]), ("b", [3.0]), ("", [1.0, 2.0, 3.0])
    other = ("a", [1.0, 2.0]), ("b", [3.0, 4.0]), ("", [1.0, 2.0])
    report = compare_layers(trace(*layers), trace(*other, name="b"))
    assert report.first is None and report.missed_output and not report.passed
    assert str(report) == (
        "b against a: 1 of 3 tensors compared (33%), the network's own output not among them; "
        "none left its tolerance, which proves nothing without the output"
    )
    assert compare_layers(trace(*layers), trace(*layers, name="b")).passed
    one = compare_layers(trace(*layers, ("", [1.0], 1)), trace(*layers, name="b"))
    assert not one.passed, "one of two outputs is missing"


def test_an_output_that_could_not_be_judged_has_not_passed():
    layers = ("a", [1.0]), ("", np.zeros((0, 3)))
    report = compare_layers(trace(*layers), trace(*layers, name="b"))
    assert [layer.status for layer in report.layers] == ["within", "not judged"]
    assert not report.passed and str(report).endswith("the output could not be judged")


def test_tensors_without_values_alone_prove_nothing():
    report = compare_layers(trace(("a", np.zeros((0, 3)))), trace(("a", np.zeros((0, 3))), name="b"))
    assert not report.passed and report.layers[0].status == "not judged"


def test_of_chosen_sites_any_that_was_judged_will_do():
    report = compare_layers(trace_torch(small(), IMAGE), trace_torch(small(), IMAGE, sites=["2"]))
    assert report.passed and "its own output not asked for" in str(report)


@pytest.mark.parametrize("tolerance", [Tolerance("t", min_sqnr_db=20.0), None])
def test_a_difference_from_zeros_breaks_the_bound_on_sqnr(tolerance):
    zeros = LayerTensor("a", 0, 0, np.zeros(4, np.float32))
    steps = LayerTensor("a", 0, 0, np.full(4, 100, np.int8), scale=0.1, zero_point=0)
    traces = LayerTrace("a", "float32", (zeros,)), LayerTrace("b", "int8", (steps,))
    report = compare_layers(*traces, tolerance=tolerance)
    assert not report.passed and report.first.why == "it differs from a reference of zeros"
    alike = LayerTrace("b", "int8", (LayerTensor("a", 0, 0, np.zeros(4, np.int8), scale=0.1, zero_point=0),))
    assert compare_layers(traces[0], alike, tolerance=tolerance).passed


# Names


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tolerance": "float16"}, r"found 'float16'; write DEFAULT_TOLERANCES\['float16'\]"),
        ({"tolerance": 1e-3}, r"a map of sites to such, found 0\.001"),
        ({"tolerance": {"0": None}}, "found None"),
        ({"tolerance": {"typo": Tolerance("t", max_steps=1)}}, "no site 'typo' in .*; the nearest are"),
        ({"replaced": ["x"]}, r"is like \('norm2', 'fc1'\), found 'x'"),
        ({"replaced": "norm"}, "a list of groups of paths, found 'norm'"),
        ({"replaced": [("nope",)]}, "no site 'nope'"),
        ({"replaced": [()]}, r"found \(\)"),
    ],
)
def test_names_that_do_not_fit_are_refused_in_one_sentence(asked, words):
    with pytest.raises(LumenError, match=words):
        compare_layers(trace_torch(small(), IMAGE), trace_torch(small(), IMAGE), **asked)


@pytest.mark.parametrize(("sites", "words"), [([], "without a site"), ("2", r"write \['2'\]")])
def test_sites_that_are_none_are_refused(sites, words):
    with pytest.raises(LumenError, match=words):
        trace_torch(small(), IMAGE, sites=sites)


def test_a_part_in_training_mode_is_refused():
    model = small()
    model[1].train()
    with pytest.raises(LumenError, match="1 of Sequential is in training mode"):
        trace_torch(model, IMAGE)


def test_two_traces_of_one_name_are_told_apart():
    wider, fewer = nn.Sequential(*small(), nn.ReLU()).eval(), nn.Sequential(*small(), nn.ReLU(), nn.ReLU()).eval()
    wider[4] = nn.Sequential(nn.ReLU()).eval()
    report = compare_layers(trace_torch(fewer, IMAGE), trace_torch(wider, IMAGE))
    assert (report.reference, report.actual) == ("Sequential (reference)", "Sequential (actual)")
    assert {layer.found_in for layer in report.unmatched} == {report.reference, report.actual}


def test_a_tolerance_for_a_container_holds_for_what_its_last_part_returns():
    model = nn.Sequential(small()).eval()
    other = copy.deepcopy(model)
    other[0][3].weight.data *= 1.1
    traces = trace_torch(model, IMAGE), trace_torch(other, IMAGE)
    assert not compare_layers(*traces).passed
    assert compare_layers(*traces, tolerance={"": Tolerance("wide", max_of_scale=0.5)}).passed


# A part of the sites


def only(trace, *sites):
    """The same execution, of which other programs kept these sites and know no others."""
    kept = tuple(layer for layer in trace.layers if layer.site in sites)
    return LayerTrace("part", trace.precision, kept, chosen=sites, inputs=trace.inputs)


def test_a_group_inside_what_another_put_there_may_lie_outside_the_sites():
    whole = trace_torch(small(), IMAGE)
    inside = [("0",), ("0.taps.0",), ("0.taps.1", "1")]
    assert compare_layers(whole, only(whole, "3", ""), replaced=inside).passed
    for unknown in ("4", "taps.0", "00.taps"):
        with pytest.raises(LumenError, match=f"no site '{unknown}'"):
            compare_layers(whole, only(whole, "3", ""), replaced=[*inside, (unknown,)])


def test_a_site_between_replaced_ones_is_not_compared_alone_either():
    network, inputs = nn.Sequential(Part()).eval(), (torch.randn(4, 5),)
    done = rewrite(network, (FUSE_GAIN,), example_inputs=inputs)
    report = compare_rewritten(network, done, inputs, sites=["0.first", "0.act"])
    assert report.first is None and [layer.site for layer in report.layers] == ["0.first"]
    (left, right) = report.unmatched if len(report.unmatched) == 2 else (*report.unmatched, None)
    assert left.site == "0.act" and "replaced together" in left.why and left.detail == "compared from 0.last on"
    assert right is None or right.site == "0.act"
    replaced = [entry.replaced for entry in done.log.applied()]
    part = only(trace_torch(done.model, inputs), "0.act", "0.last")
    report = compare_layers(trace_torch(network, inputs), part, replaced=replaced)
    assert report.first is None and [layer.site for layer in report.layers] == ["0.last"]


def test_sites_of_which_none_can_be_compared_are_refused_with_the_reason():
    network, inputs = nn.Sequential(Part()).eval(), (torch.randn(4, 5),)
    done = rewrite(network, (FUSE_GAIN,), example_inputs=inputs)
    words = r"no layer in common: 0\.act \(between modules .* together, compared from 0\.last on\)\. Choose other"
    with pytest.raises(LumenError, match=words):
        compare_rewritten(network, done, inputs, sites=["0.act"])
    whole = trace_torch(network, inputs)
    with pytest.raises(LumenError, match="they were asked for other sites"):
        compare_layers(trace_torch(network, inputs, sites=["0.act"]), only(whole, "0.last"))


def test_the_order_of_all_calls_is_kept_with_a_part_of_the_sites():
    whole, part = trace_torch(small(), IMAGE), trace_torch(small(), IMAGE, sites=["2"])
    assert part.finished == whole.finished == (*((str(i), 0) for i in range(4)), ("", 0))
    assert part.calls == {"2": 1} and only(whole, "2").finished == (("2", 0),)


# A network and what rewrites made of it


class Gain(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return x * self.gain


class Part(nn.Module):
    """A gain, something that commutes with it, and a layer that can take it in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gain, self.act, self.last = nn.Linear(5, 5), Gain(3.0), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.act(self.gain(self.first(x))))


def fused(site):
    last = copy.deepcopy(site.modules["0.last"])
    last.weight.data *= site.module.gain
    return {"0.gain": nn.Identity(), "0.last": last}


FUSE_GAIN = Rewrite("fuse_gain", Gain, fused, Exact(), "one operation less", "test")


def test_what_was_replaced_together_is_not_compared_inside(tmp_path):
    network, inputs = nn.Sequential(Part()).eval(), (torch.randn(4, 5),)
    done = rewrite(network, (FUSE_GAIN,), example_inputs=inputs)
    report = compare_rewritten(network, done, inputs)
    assert report.passed and report.at("0.last") and report.at("0.first")
    assert {layer.site for layer in report.unmatched} >= {"0.act"}
    assert (report.reference, report.actual) == ("Sequential", "Sequential, rewritten")
    assert LayerReport.load(report.save(tmp_path / "report.json")) == report
    blind = compare_layers(trace_torch(network, inputs), trace_torch(done.model, inputs))
    assert blind.first.site == "0.gain"
    done.model[0].last.weight.data[0] += 0.1
    assert compare_rewritten(network, done, inputs).first.site == "0.last"
