"""Which tensors of a graph belong to which torch module, and whether they are what the module computed."""

import copy
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from lumen_lab.deploy.layer_trace import trace_emulation, trace_onnx
from lumen_lab.deploy.module_calls import FX_NODE, module_calls
from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.equivalence import Tolerance, compare_layers, trace_torch
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.rewrites import EXACT_PLAN, rewrite

SCOPES = "pkg.torch.onnx.name_scopes"
IMAGE = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
ROUNDING = Tolerance("rounding", max_of_scale=5e-5)


class Small(nn.Module):
    """Three convs, a ReLU and a GELU."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.head(self.body(self.act(self.stem(x))))


SMALL = Small().eval()
X = torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def small_onnx(tmp_path_factory):
    return export_onnx(SMALL, tmp_path_factory.mktemp("small") / "small.onnx", example_inputs=(X,))


@pytest.fixture(scope="module")
def small_qdq(small_onnx):
    """Quantised by onnxruntime: uint8 activations, int8 weights per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Pictures(CalibrationDataReader):
        samples = iter([{"image": X.numpy()}, {"image": X.flip(2).numpy()}])

        def get_next(self):
            return next(self.samples, None)

    path = small_onnx.with_name("small_qdq.onnx")
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(small_onnx, path, Pictures(), quant_format=QuantFormat.QDQ, per_channel=True, **types)
    return path


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Name -> (torch trace, trace of its ONNX file), and the groups of paths that the plan replaced together."""
    folder = tmp_path_factory.mktemp("whole")
    done = rewrite(tiny, EXACT_PLAN)
    traces = {}
    for name, model in {"published": tiny, "rewritten": done.model}.items():
        path = export_onnx(model, folder / f"{name}.onnx")
        traces[name] = trace_torch(model, IMAGE, name=name), trace_onnx(path, IMAGE.numpy(), name=f"ONNX {name}")
    return traces, [entry.replaced for entry in done.log.applied()]


def nudged(path, initializer, amount=0.3):
    """A copy of an ONNX file with one value of a float tensor changed."""
    model = onnx.load(path)
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == initializer]
    values = numpy_helper.to_array(tensor).copy()
    values.flat[0] += amount
    tensor.CopyFrom(numpy_helper.from_array(values, initializer))
    onnx.save(model, spoiled := path.with_name("nudged.onnx"))
    return spoiled


# The whole network


@pytest.mark.parametrize(("name", "tensors", "share"), [("published", 385, 0.92), ("rewritten", 300, 0.8)])
def test_torch_and_onnx_agree_at_every_site_that_is_in_both(whole, name, tensors, share):
    report = compare_layers(*whole[0][name], tolerance=ROUNDING)
    assert report.passed, str(report)
    assert len(report.layers) >= tensors and report.matched_share >= share
    assert {layer.call for layer in report.layers} == {0, 1}  # the encoder runs on the image and on its half
    assert report.at("bb.patch_embed.proj", call=1).shape == (1, 8, 8, 12)
    assert report.layers[-1].also[-1] == "(network)"


@pytest.mark.parametrize("name", ["published", "rewritten"])
def test_every_leaf_module_that_is_not_compared_says_why(whole, name):
    expected, _ = whole[0][name]
    report = compare_layers(*whole[0][name])
    compared = {x.site for x in report.layers} | {site for x in report.layers for site in x.also}
    containers = {site.rpartition(".")[0] for site in expected.calls}
    leaves = {x.site: x for x in expected.layers if x.site not in containers and x.site not in compared}
    why = {x.site: x.why for x in report.unmatched}
    kinds = Counter(leaves[site].kind for site in leaves if "hands on" not in why[site])
    if name == "published":
        assert kinds == {"Conv2d": 23, "WindowPartition": 4}  # norms folded in by the exporter; the shift's constant
    else:
        assert not kinds.keys() & {"Conv2d", "Linear", "LayerNorm", "GELU", "ReLU"}
        assert kinds["FixedTensors"] > 0
    handed_on = {leaves[site].kind for site in leaves if "hands on" in why[site]}
    assert handed_on <= {"Identity", "Dropout", "DropPath", "CyclicShift"}


def test_the_published_network_against_the_rewritten_one_in_onnx(whole):
    traces, groups = whole
    (published, published_onnx), (_, rewritten_onnx) = traces["published"], traces["rewritten"]
    for reference in (published, published_onnx):
        report = compare_layers(reference, rewritten_onnx, tolerance=ROUNDING, replaced=groups)
        assert report.passed and len(report.layers) >= 200
    blind = compare_layers(published, rewritten_onnx, tolerance=ROUNDING)
    assert blind.first.site == "squeeze_module.0.conv_in"  # without the groups, a norm folded in looks like a fault


def test_a_nudged_weight_in_the_middle_is_the_first_layer_to_differ(whole, tiny):
    spoiled = copy.deepcopy(tiny)
    with torch.no_grad():
        spoiled.decoder.lateral_block3.conv.weight[0, 0] += 0.3
    trace = trace_torch(spoiled, IMAGE, name="spoiled")
    report = compare_layers(whole[0]["published"][1], trace)
    assert report.first.site == "decoder.lateral_block3.conv"
    assert report.first.also == ("decoder.lateral_block3",)
    assert report.layers[-1].status == "after"


# Calls read from a graph


def graph(*nodes, outputs=("out",)):
    """A model of nodes given as (op, inputs, output, path of modules, parameters); "x" is the input."""
    made = []
    for op, inputs, output, path, *parameters in nodes:
        node = helper.make_node(op, inputs.split(), [output], name=output)
        entries = {SCOPES: str(["", *path.split(), output]), FX_NODE: " ".join(f"%p_{p}" for p in parameters)}
        node.metadata_props.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in entries.items())
        made.append(node)
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", *outputs)]
    return helper.make_model(helper.make_graph(made, "g", floats[:1], floats[1:]))


def calls_of(*nodes, **options):
    return [(call.site, call.call, call.values) for call in module_calls(graph(*nodes, **options))]


def test_a_module_entered_again_is_called_again():
    found = calls_of(("Relu", "x", "a", "m"), ("Neg", "a", "b", ""), ("Relu", "b", "out", "m"))
    assert found == [("m", 0, ("a",)), ("m", 1, ("out",)), ("", 0, ("out",))]


def test_a_module_called_twice_in_a_row_is_told_by_what_is_inside():
    found = calls_of(
        ("Relu", "x", "a", "m m.one"), ("Neg", "a", "b", "m"),
        ("Relu", "b", "c", "m m.one"), ("Neg", "c", "out", "m"),
    )  # fmt: skip
    assert found == [
        ("m.one", 0, ("a",)), ("m", 0, ("b",)), ("m.one", 1, ("c",)), ("m", 1, ("out",)), ("", 0, ("out",)),
    ]  # fmt: skip


def test_a_leaf_called_twice_in_a_row_is_told_by_its_weights_alone():
    twice = [("Abs", "x", "a", "m", "w"), ("Abs", "a", "out", "m", "w")]
    assert [site for site, *_ in calls_of(*twice)] == ["m", "m", ""]
    other = [("Abs", "x", "a", "m", "w"), ("Abs", "a", "out", "m", "v")]
    assert [site for site, *_ in calls_of(*other)] == ["m", ""]
    none = [("Abs", "x", "a", "m"), ("Abs", "a", "out", "m")]
    assert [site for site, *_ in calls_of(*none)] == ["m", ""]


def test_what_leaves_a_module_is_what_is_read_outside_and_depends_on_the_input():
    found = calls_of(
        ("Abs", "x", "a", "m"), ("Neg", "a", "b", "m"), ("Constant", "", "k", "m"), ("Exp", "k", "e", "m"),
        ("Sum", "a b e", "out", ""),
    )  # fmt: skip
    assert found[0] == ("m", 0, ("a", "b"))


@pytest.mark.parametrize(("reader", "first"), [("m", ("m", ("out",))), ("n", ("m", ("a",)))])
def test_a_node_without_modules_belongs_to_what_its_neighbours_share(reader, first):
    model = graph(("Abs", "x", "a", "m"), ("Split", "a", "b", ""), ("Neg", "b", "out", reader))
    del model.graph.node[1].metadata_props[:]
    calls = [(call.site, call.values) for call in module_calls(model)]
    assert (calls[0], calls[-1]) == (first, ("", ("out",)))


def test_a_module_used_inside_another_that_does_not_own_it_belongs_to_both():
    found = calls_of(("Abs", "x", "a", "tail other"), ("Neg", "a", "out", "tail"))
    assert found == [("other", 0, ("a",)), ("tail", 0, ("out",)), ("", 0, ("out",))]


def test_a_graph_without_sites_is_refused(nets, tmp_path):
    model = onnx.load(nets.conv(tmp_path / "net.onnx"))
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, tmp_path / "bare.onnx")
    with pytest.raises(ArtifactError, match="No node of this ONNX graph says which torch module"):
        trace_onnx(tmp_path / "bare.onnx", np.zeros((1, 3, 32, 32), np.float32))


# On the CPU


def test_a_small_network_in_onnx(small_onnx):
    found = trace_onnx(small_onnx, {"image": X.numpy()})
    report = compare_layers(trace_torch(SMALL, X), found, tolerance=ROUNDING)
    assert [layer.site for layer in report.layers] == ["stem", "act", "body.0", "body.1", "head"]
    assert report.layers[3].also == ("body",) and report.layers[1].kind == "ReLU / Relu"
    assert report.passed and not report.unmatched and found.precision == "float32"


def test_a_nudged_weight_of_the_file_is_found(small_onnx):
    report = compare_layers(trace_torch(SMALL, X), trace_onnx(nudged(small_onnx, "body.0.weight"), X.numpy()))
    assert [layer.status for layer in report.layers] == ["within", "within", "first", "after", "after"]


def test_chosen_sites_and_inputs_that_do_not_fit(small_onnx):
    assert [layer.site for layer in trace_onnx(small_onnx, X.numpy(), sites=["head", "act"]).layers] == ["act", "head"]
    with pytest.raises(LumenError, match="no site 'heads' in small.onnx; the nearest are 'head'"):
        trace_onnx(small_onnx, X.numpy(), sites=["heads"])
    with pytest.raises(LumenError, match="sites was given without a site"):
        trace_onnx(small_onnx, X.numpy(), sites=[])
    with pytest.raises(LumenError, match="different inputs"):
        compare_layers(trace_torch(SMALL, X), trace_onnx(small_onnx, X.numpy() + 1))
    with pytest.raises(ArtifactError, match=r"Input image has shape \(1, 3, 16, 24\), given \(1, 3, 16, 16\)"):
        trace_onnx(small_onnx, X.numpy()[..., :16])
    with pytest.raises(ArtifactError, match="The graph takes image, and picture were given"):
        trace_onnx(small_onnx, {"picture": X.numpy()})


def test_the_file_is_left_as_it_was(small_onnx):
    before = small_onnx.read_bytes()
    trace_onnx(small_onnx, X.numpy())
    assert small_onnx.read_bytes() == before


def test_a_quantised_network_reports_steps(small_qdq):
    quantised = trace_onnx(small_qdq, X.numpy(), name="QDQ")
    assert quantised.precision == "int8" and quantised.at("head")[0].values.dtype == np.uint8
    report = compare_layers(trace_torch(SMALL, X), quantised)
    assert report.passed and report.tolerance.name == "int8 against float"
    # The quantiser has taken the ReLU out: the conv's encoding has no negative values, and stands for it.
    assert [layer.site for layer in report.layers] == ["act", "body.0", "body.1", "head"]
    assert [(layer.site, layer.detail) for layer in report.unmatched] == [("stem", "compared at act")]
    assert all(layer.within_one > 0.8 and layer.max_steps <= 4 for layer in report.layers)
    assert report.layers[0].equal > report.layers[-1].equal  # errors add up


def test_a_spoiled_scale_is_found_in_the_quantised_network(small_qdq):
    spoiled = nudged(small_qdq, "conv2d_1_scale", 0.5)
    report = compare_layers(trace_onnx(small_qdq, X.numpy()), trace_onnx(spoiled, X.numpy(), name="spoiled"))
    assert report.tolerance.name == "int8 against int8" and report.first.site == "body.0"
    assert report.layers[0].equal == 1.0 and report.layers[0].identical
    assert report.layers[1].max_steps is not None and report.layers[2].outside


# In the emulation


@pytest.mark.npu
def test_the_emulated_npu_differs_by_float16(small_onnx, tmp_path):
    on_cpu = trace_onnx(small_onnx, X.numpy())
    emulated = trace_emulation(small_onnx, "SM8850", X.numpy(), out_dir=tmp_path)
    report = compare_layers(on_cpu, emulated)
    assert emulated.precision == "float16" and emulated.name == "emulated SM8850"
    assert report.passed and report.tolerance.name == "float16" and len(report.layers) == 5
    assert all(50 < layer.sqnr_db < 90 for layer in report.layers)
    assert (tmp_path / "small_layers_SM8850").is_dir()


@pytest.mark.npu
def test_a_spoiled_layer_is_found_in_the_emulation(small_onnx):
    emulated = trace_emulation(
        nudged(small_onnx, "body.0.weight"), "SM8850", X.numpy(), sites=["act", "body.0", "head"]
    )
    report = compare_layers(trace_torch(SMALL, X), emulated)
    assert [(layer.site, layer.status) for layer in report.layers] == [
        ("act", "within"), ("body.0", "first"), ("head", "after"),
    ]  # fmt: skip


@pytest.mark.npu
def test_the_emulated_integers_are_within_steps_of_the_cpu(small_qdq):
    on_cpu = trace_onnx(small_qdq, X.numpy(), name="QDQ on CPU")
    report = compare_layers(on_cpu, trace_emulation(small_qdq, "SM8850", X.numpy()))
    assert report.passed and report.tolerance.name == "int8 against int8"
    assert [layer.site for layer in report.layers] == ["stem", "body.0", "body.1", "head"]
    assert max(layer.max_steps for layer in report.layers) in (1, 2, 3)
