"""What proves INT8: the gate finds every spoiled encoding, those that the compiler takes in silence included."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lumen_lab.deploy.emulation import emulate
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.qdq_faults import faults_in
from lumen_lab.deploy.report import CompileReport, require_int8
from lumen_lab.deploy.steps_off import output_steps
from lumen_lab.errors import ArtifactError, CompileError

SHAPE, OUT = (1, 8, 8, 8), (1, 16, 16, 8)
SCOPES = "pkg.torch.onnx.name_scopes"


class Net:
    """conv, resize, transpose, linear with bias, times a half: a QDQ graph in the making."""

    def __init__(self):
        self.nodes, self.constants = [], {}
        self.op("DequantizeLinear", ["x", *self.encoding("x", 1 / 32, 128)], "x_f")

    def op(self, kind, inputs, output, **attributes):
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        if "Linear" not in kind:
            scopes = str(["", f"net.{output}", output])
            self.nodes[-1].metadata_props.append(onnx.StringStringEntryProto(key=SCOPES, value=scopes))
        return output

    def constant(self, name, values):
        self.constants[name] = np.asarray(values)
        return name

    def encoding(self, name, scale, zero_point, dtype=np.uint8):
        return [
            self.constant(f"{name}_s", np.asarray(scale, np.float32)),
            self.constant(f"{name}_z", np.full(np.shape(scale), zero_point, dtype)),
        ]

    def weight(self, name, values, scale, **axis):
        given = self.encoding(name, scale, 0, values.dtype)
        return self.op("DequantizeLinear", [self.constant(name, values), *given], f"{name}_f", **axis)

    def quantised(self, value, scale, *, name=None):
        given = self.encoding(value, scale, 128)
        self.op("QuantizeLinear", [value, *given], name or f"{value}_q")
        return self.op("DequantizeLinear", [name or f"{value}_q", *given], f"{value}_d")

    def saved(self, path):
        ends = [helper.make_tensor_value_info(n, TensorProto.UINT8, s) for n, s in (("x", SHAPE), ("y", OUT))]
        constants = [numpy_helper.from_array(values, name) for name, values in self.constants.items()]
        graph = helper.make_graph(self.nodes[:-1], "net", ends[:1], ends[1:], constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        return path


def write_net(path, *, axis=1, bias_factor=1.0, half=None, resized=0.05):
    """The network sound, or with one encoding spoiled."""
    rng, net = np.random.default_rng(0), Net()
    scales = rng.uniform(0.5, 1, 8).astype(np.float32) / 512
    kernel, matrix = (rng.integers(-99, 99, shape).astype(np.int8) for shape in ((8, 8, 3, 3), (8, 8)))
    bias = rng.integers(-9000, 9000, 8).astype(np.int32)
    value = net.op("Conv", ["x_f", net.weight("kernel", kernel, scales, axis=0)], "conv", pads=[1] * 4)
    sizes = net.constant("sizes", np.array([1, 8, 16, 16]))
    mode = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    value = net.op("Resize", [net.quantised(value, 0.05), "", "", sizes], "resize", **mode)
    value = net.op("Transpose", [net.quantised(value, resized)], "turn", perm=[0, 2, 3, 1])
    value = net.quantised(value, resized)
    value = net.op("MatMul", [value, net.weight("matrix", matrix, scales, axis=axis)], "product")
    steps = np.float32(resized * bias_factor) * scales
    value = net.quantised(net.op("Add", [value, net.weight("bias", bias, steps, axis=0)], "linear"), 0.05)
    half = net.weight("half", np.array(255, np.uint8), 0.5 / 255) if half is None else net.constant("half", half)
    net.quantised(net.op("Mul", [value, half], "halved"), 0.025, name="y")
    return net.saved(path)


SPOILED = {
    "axis": ({"axis": 0}, "FullyConnected at net.product .*scale for each index of axis 0.*aten.linear.default", True),
    "bias": ({"bias_factor": 3.0}, "at net.product .*not in steps of input scale × weight scale", True),
    "constant": ({"half": np.float32(0.5)}, "ElementWiseMultiply at net.halved .*constant half is float", False),
    "resize": (
        {"resized": 0.06},
        "ResizeBilinear at net.resize .*0.06 from 128 and reads uint8 in steps of 0.05",
        False,
    ),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """``compiled(name)``: (file, report) of the network, sound ("") or spoiled."""
    folder, found = tmp_path_factory.mktemp("proof"), {}

    def get(name=""):
        if name not in found:
            path = write_net(folder / f"net_{name}.onnx", **SPOILED[name][0] if name else {})
            found[name] = path, compile_for_chip(path, "SM8750", out_dir=folder, traffic=False, progress=False)
        return found[name]

    return get


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(1).integers(0, 256, SHAPE, dtype=np.uint8)


@pytest.mark.npu
def test_a_sound_network_passes_and_its_figures_say_so(compiled, image):
    path, report = compiled()
    assert require_int8(report) is report and faults_in(onnx.load(path)) == {}
    assert report.int8_mac_share == 1 and set(report.ops_by_dtype) == {"u8"}
    assert sum(op.macs for op in report.ops) == 8 * 8 * 8 * 9 * 8 + 16 * 16 * 8 * 8
    steps = output_steps(path, report.context_path, [image, image[:, ::-1].copy()])
    assert steps.samples == 2 and steps.outputs[0].max_steps <= 1 and 0.9 < steps.outputs[0].equal < 1
    assert "at most 1" in steps._repr_html_() and steps.first is None


@pytest.mark.npu
def test_encodings_are_kept_with_every_operation(compiled):
    ops = {op.kind: op for op in compiled()[1].ops}
    data, weight, bias, written = ops["FullyConnected"].operands
    assert (data.role, data.dtype, data.scale, data.zero_point) == ("input", "u8", pytest.approx(0.05), 128)
    assert (weight.role, weight.dtype, weight.axis, weight.channels) == ("constant", "s8", 0, 8)
    assert (bias.dtype, bias.channels) == ("s32", 8)
    assert (written.role, str(written)) == ("output", "u8 × 0.05, zero at 128")
    assert ops["Conv2d"].operands[1].axis == 3, "the NPU has a conv's output channels last"


@pytest.mark.npu
@pytest.mark.parametrize("name", SPOILED)
def test_every_spoiled_encoding_is_found_and_named(compiled, name):
    report = compiled(name)[1]
    assert report.partitions == 1 and not report.cpu_nodes, "a strict compile sees nothing"
    _, words, silent = SPOILED[name]
    with pytest.raises(CompileError, match=words):
        require_int8(report)
    assert bool(report.float_ops) is not silent
    assert len(report.silent_faults) == (1 if silent else 0)
    (row,) = report.fault_rows()
    assert row["computed"] == ("wrongly" if silent else "in float") and row["because"]
    assert row["broken"] in report._repr_html_().replace("&#x27;", "'")


@pytest.mark.npu
@pytest.mark.parametrize("name", ["axis", "bias"])
def test_what_is_called_silent_computes_something_else(compiled, image, name):
    path, report = compiled(name)
    assert output_steps(path, report.context_path, image).outputs[0].max_steps > 2


@pytest.mark.npu
def test_a_report_with_encodings_comes_back_from_disk(compiled, tmp_path):
    report = compiled("axis")[1]
    assert CompileReport.load(report.save(tmp_path / "net.report.json")).ops == report.ops


@pytest.mark.npu
def test_operations_on_the_cpu_are_no_int8(compiled):
    _, report = compiled()
    moved = replace(report, nodes=(replace(report.nodes[0], place="cpu", reason="refused"), *report.nodes[1:]))
    with pytest.raises(CompileError, match="On the CPU stay 1 DequantizeLinear"):
        require_int8(moved)


@pytest.mark.npu
def test_a_context_of_float_outputs_has_no_steps(compiled, nets, tmp_path):
    path = nets.quantised(tmp_path / "float_ends.onnx")
    report = compile_for_chip(path, "SM8750", out_dir=tmp_path, traffic=False, progress=False)
    assert require_int8(report), "the conversions of float ends are allowed"
    inputs = np.zeros((1, 3, 32, 32), np.float32)
    assert emulate(report.context_path, inputs, progress=False)
    with pytest.raises(ArtifactError, match="float32, which has no steps"):
        output_steps(path, report.context_path, inputs)


# Faults without a compiler


def node_faults(nodes, constants):
    graph = helper.make_graph(nodes, "net", [], [], [numpy_helper.from_array(v, k) for k, v in constants.items()])
    return faults_in(helper.make_model(graph))


def through(value, name, *, scale="s", zero="z"):
    return [
        helper.make_node("QuantizeLinear", [value, scale, zero], [f"{name}_q"]),
        helper.make_node("DequantizeLinear", [f"{name}_q", scale, zero], [name]),
    ]


@pytest.mark.parametrize(
    ("kind", "zero", "words"),
    [
        ("Sigmoid", np.uint16(0), "writes steps of 1/65536 from 0"),
        ("Softmax", np.int8(0), "writes steps of 1/256 from -128"),
        ("Sigmoid", np.uint8(0), None),
    ],
)
def test_a_softmax_or_sigmoid_in_other_steps_is_silent(kind, zero, words):
    nodes = [*through("x", "a"), helper.make_node(kind, ["a"], ["b"], name="it"), *through("b", "c")]
    found = node_faults(nodes, {"s": np.float32(1 / 250), "z": zero})
    assert (words is None and not found) or (words in found["it"][0].what and found["it"][0].silent)


def test_a_layer_norm_with_scales_for_each_channel_and_a_small_shift_is_named():
    read = [helper.make_node("DequantizeLinear", [f"{n}_i", f"{n}_s", f"{n}_z"], [n], axis=0) for n in ("w", "b")]
    norm = helper.make_node("LayerNormalization", ["a", "w", "b"], ["y"], name="norm")
    constants = {"s": np.float32(0.1), "z": np.uint8(128)}
    constants |= {"w_i": np.ones(4, np.int8), "w_s": np.ones(4, np.float32), "w_z": np.zeros(4, np.int8)}
    constants |= {"b_i": np.ones(4, np.uint8), "b_s": np.float32(0.1), "b_z": np.uint8(0)}
    found = node_faults([*read, *through("x", "a"), norm, *through("y", "c")], constants)["norm"]
    assert [fault.silent for fault in found] == [False, False]
    assert "int8 with 4 scales" in found[0].what and "its shift is uint8" in found[1].what
    assert "uint8 for all channels" in found[0].because


def test_types_that_do_not_go_together_are_named():
    two = [*through("x", "a"), *through("g", "b", zero="wide")]
    sample = helper.make_node("GridSample", ["a", "b"], ["y"], name="sample")
    constants = {"s": np.float32(0.1), "z": np.uint8(128), "wide": np.uint16(9)}
    (fault,) = node_faults([*two, sample, *through("y", "c")], constants)["sample"]
    assert "uint8 and uint16" in fault.what and "uint16 for both" in fault.because


def test_a_network_without_quantisers_has_no_faults():
    assert node_faults([helper.make_node("Relu", ["x"], ["y"])], {}) == {}
