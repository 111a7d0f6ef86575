"""QNN operations joined to ONNX nodes, data types, and what counts as float."""

import json

import onnx
import pytest
from onnx import TensorProto, helper

from lumen_lab.deploy.qnn_graph import OnnxJoin, _op, base_name, dtype_name, encodings, read_partitions

U8, S8, S32, F32 = 0x408, 0x308, 0x332, 0x232


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0x408, "u8"),
        (0x308, "s8"),
        (0x332, "s32"),
        (0x416, "u16"),
        (0x216, "float16"),
        (0x232, "float32"),
        (0x132, "uint32"),
        (0x64, "int64"),
        (0x508, "bool8"),
        (0x7FFFFFFF, "type 0x7fffffff"),
    ],
)
def test_data_types_have_names(code, name):
    assert dtype_name(code) == name


@pytest.mark.parametrize(
    "name", ["conv", "conv_token_7", "conv/MatMulAddFusion_2", "conv/duplicated", "conv_token_12_out0"]
)
def test_what_onnxruntime_adds_to_a_name_comes_off(name):
    assert base_name(name) == "conv"


def onnx_net(*nodes):
    """Nodes given as (name, op type, input, output)."""
    made = [helper.make_node(kind, [source], [target], name=name) for name, kind, source, target in nodes]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    return helper.make_model(helper.make_graph(made, "net", values[:1], values[1:]))


VIEWS = onnx_net(
    ("node_view", "Reshape", "x", "view"),
    ("node_view_2", "Reshape", "view", "view_2"),
    ("node_conv_2", "Conv", "view_2", "conv_2"),
    ("q", "QuantizeLinear", "conv_2", "conv_2_q"),
    ("dq", "DequantizeLinear", "conv_2_q", "conv_2_f"),
    ("node_sig", "Sigmoid", "conv_2_f", "y"),
)


@pytest.mark.parametrize(
    ("name", "output", "node", "how"),
    [
        ("node_view_2", "view", "node_view", "output"),  # _2 only because the name was taken
        ("node_view_2_2", "view_2", "node_view_2", "output"),
        ("node_conv_2_token_9", "node_conv_2", "node_conv_2", "output"),
        ("anything", "conv_2_q", "node_conv_2", "output"),  # behind the quantiser
        ("Convert", "q_token_4", "node_conv_2", "output"),
        ("view_2Reshape", "tmp", "node_view_2", "name"),
        ("node_sig/GemmFusion_3", "tmp_fc_out", "node_sig", "name"),
        ("node_sig_2", "tmp", "node_sig", "name"),
        ("Transpose_token_3", "Transpose_token_3_out0", None, None),
    ],
)
def test_the_node_behind_an_operation_is_found_by_its_output_first(name, output, node, how):
    assert OnnxJoin(VIEWS).behind(name, [output]) == (node, how)


def tensor(code, kind=3, dims=(1, 2, 2, 8), scale=0.0, offset=0):
    return {
        "data_type": code,
        "type": kind,
        "dims": list(dims),
        "quant_params": {"scale_offset": {"scale": scale, "offset": offset}},
    }


@pytest.fixture
def dumped(tmp_path):
    """A partition: quantise the input, a float island, an integer op, a layout transpose to the output."""
    tensors = {
        "x": tensor(F32, kind=0),
        "x_q": tensor(U8),
        "island": tensor(F32),
        "view": tensor(U8),
        "w": tensor(S8, kind=4),
        "y": tensor(U8, kind=1, scale=0.5, offset=-3),
    }
    ops = {
        "q_in": ("Quantize", ["x"], ["x_q"]),
        "deq": ("Dequantize", ["x_q"], ["island"]),
        "node_view": ("Reshape", ["island"], ["view"]),
        "node_sig": ("Sigmoid", ["view", "w"], ["sig_out"]),
        "Transpose": ("Transpose", ["sig_out"], ["y_nhwc"]),
        "copy": ("Convert", ["y_nhwc"], ["y"]),
    }
    tensors |= {"sig_out": tensor(U8), "y_nhwc": tensor(U8)}
    nodes = {k: {"type": t, "input_names": i, "output_names": o} for k, (t, i, o) in ops.items()}
    (tmp_path / "part_0.json").write_text(json.dumps({"graph": {"nodes": nodes, "tensors": tensors}}))
    (tmp_path / "part_0_tensor_log.json").write_text(json.dumps({"graph_name": "part_0"}))
    context = helper.make_graph([helper.make_node("EPContext", ["x"], ["y"], name="part_0")], "context", [], [])
    return tmp_path, helper.make_model(context)


def test_partitions_count_operations_and_bytes_across_their_border(dumped):
    folder, context = dumped
    (partition,), ops = read_partitions(context, folder, VIEWS)
    assert (partition.name, partition.ops, len(ops)) == ("part_0", 6, 6)
    assert (partition.inputs, partition.outputs) == (("x",), ("y",))
    assert (partition.bytes_in, partition.bytes_out) == (32 * 4, 32)


def test_float_operations_are_found_and_the_input_conversion_is_told_apart(dumped):
    folder, context = dumped
    ops = {op.name: op for op in read_partitions(context, folder, VIEWS)[1]}
    assert {name for name, op in ops.items() if op.is_float} == {"q_in", "deq", "node_view"}
    assert {name for name, op in ops.items() if op.at_boundary} == {"q_in"}
    assert (ops["node_view"].shape, ops["node_view"].dtype) == ((1, 2, 2, 8), "u8")


def test_a_change_of_layout_is_told_by_its_neighbour(dumped):
    folder, context = dumped
    ops = {op.name: op for op in read_partitions(context, folder, VIEWS)[1]}
    assert (ops["Transpose"].onnx_node, ops["Transpose"].joined_by) == ("node_sig", "neighbour")
    assert (ops["copy"].onnx_node, ops["copy"].joined_by) == ("node_sig", "output")


def test_encodings_of_integer_inputs_and_outputs_are_read(dumped):
    folder, _ = dumped
    assert encodings(folder, ["x", "y", "none"]) == {"y": (0.5, 3)}


def test_encodings_of_every_operand_are_kept(dumped):
    folder, _ = dumped
    path = folder / "part_0.json"
    graph = json.loads(path.read_text())
    for name, given in {"sig_out": (0, 1 / 256, 0), "w": (1, 4.203895392974451e-45, 32)}.items():
        encoding, scale, offset = given
        quantised = {"definition": 1, "encoding": encoding, "scale_offset": {"scale": scale, "offset": offset}}
        graph["graph"]["tensors"][name]["quant_params"] = quantised
    path.write_text(json.dumps(graph))
    ops = {op.name: op for op in read_partitions(dumped[1], folder, VIEWS)[1]}
    view, weight, written = ops["node_sig"].operands
    assert (view.role, weight.role, written.role) == ("input", "constant", "output")
    assert (written.scale, written.zero_point, written.axis) == (1 / 256, 0, None)
    assert (weight.scale, weight.axis, weight.channels) == (None, 3, 32), "32 scales along axis 3"
    assert (view.scale, view.axis) == (None, None), "not quantised"


@pytest.mark.parametrize(
    ("kind", "data", "weight", "written", "macs"),
    [
        ("Conv2d", (1, 8, 8, 4), (3, 3, 4, 16), (1, 8, 8, 16), 8 * 8 * 16 * 9 * 4),
        ("DepthWiseConv2d", (1, 8, 8, 4), (3, 3, 1, 4), (1, 8, 8, 4), 8 * 8 * 4 * 9),
        ("TransposeConv2d", (1, 4, 4, 8), (2, 2, 8, 3), (1, 8, 8, 3), 4 * 4 * 8 * 2 * 2 * 3),
        ("FullyConnected", (49, 32), (96, 32), (49, 96), 49 * 96 * 32),
        ("MatMul", (2, 49, 32), (2, 32, 49), (2, 49, 49), 2 * 49 * 49 * 32),
        ("ElementWiseAdd", (1, 8), (1, 8), (1, 8), 0),
    ],
)
def test_multiplications_are_counted_from_shapes(kind, data, weight, written, macs):
    names = {"a": data, "w": weight, "y": written}
    tensors = {name: tensor(U8, kind=4 if name == "w" else 3, dims=shape) for name, shape in names.items()}
    body = {"type": kind, "input_names": ["a", "w"], "output_names": ["y"]}
    assert _op(0, "it", body, tensors, set()).macs == macs


def test_the_join_keeps_sites():
    model = onnx.ModelProto.FromString(VIEWS.SerializeToString())
    for node in model.graph.node:
        entry = onnx.StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value=str(["", f"m.{node.name}", "op"]))
        node.metadata_props.append(entry)
    assert OnnxJoin(model).sites["node_sig"] == "m.node_sig"
