"""A conv and its ReLU, which are one operation on the NPU only in an encoding without negative numbers."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.qdq_faults import faults_in
from lumen_lab.deploy.report import require_int8
from lumen_lab.errors import CompileError

SHAPE = (1, 8, 8, 8)


def conv_with_relu(path, *, zero_point=0, between=False):
    """A conv of 8 channels in INT8 and its ReLU, with its 0 at ``zero_point``; ``between``: quantised there too."""
    rng = np.random.default_rng(0)
    constants = {
        "s": np.float32(1 / 32),
        "z": np.uint8(128),
        "z_relu": np.uint8(zero_point),
        "w": rng.integers(-99, 99, (8, 8, 3, 3)).astype(np.int8),
        "w_s": (rng.uniform(0.5, 1, 8) / 512).astype(np.float32),
        "w_z": np.zeros(8, np.int8),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["x_f"]),
        helper.make_node("DequantizeLinear", ["w", "w_s", "w_z"], ["w_f"], axis=0),
        helper.make_node("Conv", ["x_f", "w_f"], ["conv"], name="conv", pads=[1] * 4),
        helper.make_node("QuantizeLinear", ["conv", "s", "z"], ["conv_q"]),
        helper.make_node("DequantizeLinear", ["conv_q", "s", "z"], ["conv_f"]),
        helper.make_node("Relu", ["conv_f" if between else "conv"], ["relu"], name="relu"),
        helper.make_node("QuantizeLinear", ["relu", "s", "z_relu"], ["y"]),
    ]
    nodes = nodes if between else [node for node in nodes if not {"conv_q", "conv_f"} & set(node.output)]
    ends = [helper.make_tensor_value_info(name, TensorProto.UINT8, SHAPE) for name in ("x", "y")]
    given = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], given)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("net", "named"),
    [({}, set()), ({"zero_point": 1}, {"conv", "relu"}), ({"zero_point": 9, "between": True}, set())],
    ids=["from 0", "below 0", "apart"],
)
def test_a_range_below_zero_is_a_fault_only_where_conv_and_relu_are_to_be_one(tmp_path, net, named):
    found = faults_in(onnx.load(conv_with_relu(tmp_path / "net.onnx", **net)))
    assert set(found) == named
    assert all("steps of 0.03125 from 1" in fault.what and not fault.silent for one in found.values() for fault in one)


@pytest.mark.npu
def test_the_compiler_leaves_such_a_conv_in_float_and_the_gate_says_why(tmp_path):
    how = {"out_dir": tmp_path, "traffic": False, "progress": False}
    assert require_int8(compile_for_chip(conv_with_relu(tmp_path / "sound.onnx"), "SM8850", **how))
    report = compile_for_chip(conv_with_relu(tmp_path / "spoiled.onnx", zero_point=1), "SM8850", **how)
    assert {op.kind for op in report.float_ops} >= {"Conv2d", "Relu"}
    with pytest.raises(CompileError, match="one operation only where 0 is the least that is held") as caught:
        require_int8(report)
    assert "no rule" not in str(caught.value)
