"""Where each ONNX node went, through the names that onnxruntime changes on the way."""

import pytest
from onnx import helper

from lumen_lab.deploy.errors_in_words import Refusal
from lumen_lab.deploy.placement import node_places, refused_in_words
from lumen_lab.deploy.qnn_graph import QnnOp


def net(*nodes):
    made = [helper.make_node(kind, [source], [target], name=name) for name, kind, source, target in nodes]
    return helper.make_model(helper.make_graph(made, "net", [], []))


MODEL = net(
    ("matmul", "MatMul", "x", "a"),
    ("add", "Add", "a", "b"),
    ("conv", "Conv", "b", "c"),
    ("resize", "Resize", "c", "d"),
    ("dequantise", "DequantizeLinear", "d", "y"),
)


def op(kind, onnx_node, joined_by="output"):
    return QnnOp(0, kind.lower(), kind, (1,), "u8", False, False, onnx_node, joined_by)


def places(*context_nodes, ops=(), refusals=None):
    context = net(("part_0", "EPContext", "x", "c"), *context_nodes)
    return {node.onnx_node: node for node in node_places(MODEL, context, tuple(ops), refusals or {})}


def test_nodes_are_on_the_npu_if_an_operation_stands_for_them_and_folded_otherwise():
    found = places(ops=[op("Conv2d", "conv"), op("Transpose", "conv"), op("Transpose", "resize", "neighbour")])
    assert (found["conv"].place, found["conv"].qnn_ops) == ("npu", ("Conv2d", "Transpose"))
    assert found["resize"].place == found["add"].place == "folded"


@pytest.mark.parametrize(
    ("context_node", "expected"),
    [
        (("conv", "Conv", "b", "c"), "conv"),
        (("matmul/MatMulAddFusion", "Gemm", "x", "b"), "matmul"),
        (("conv_token_12", "Conv", "b", "c_nhwc"), "conv"),
        (("DequantizeLinear_token_57", "DequantizeLinear", "d", "y"), "dequantise"),
    ],
)
def test_a_cpu_node_is_traced_to_the_onnx_node_it_was(context_node, expected):
    found = places(context_node)
    assert [name for name, node in found.items() if node.place == "cpu"] == [expected]
    assert len(found) == 5


def test_a_node_that_onnxruntime_made_itself_gets_its_own_row():
    found = places(("Transpose_token_9", "Transpose", "d_nhwc", "d"))
    assert found["resize"].place == "folded"
    assert (found["Transpose_token_9"].place, found["Transpose_token_9"].op_type) == ("cpu", "Transpose")


def test_the_reason_is_that_of_the_refusal_under_either_name():
    refusal = Refusal("conv_token_12", "Conv", 3110, "HTP refused it")
    found = places(("conv_token_12", "Conv", "b", "c_nhwc"), refusals={"conv_token_12": refusal})
    assert (found["conv"].code, found["conv"].reason) == (3110, "HTP refused it")
    found = places(("conv", "Conv", "b", "c"))
    assert found["conv"].code is None and "with its neighbours" in found["conv"].reason


def test_refusals_of_a_failed_compile_are_told_by_kind_the_most_frequent_first():
    refusals = {
        "conv_token_12": Refusal("conv_token_12", "Conv", 3110, "HTP refused QNN Conv2d"),
        "matmul": Refusal("matmul", "MatMul", None, "no shape"),
        "conv_token_13": Refusal("conv_token_13", "Conv", 3110, "HTP refused QNN Conv2d"),
    }
    told = refused_in_words(refusals, MODEL)
    assert told == "2 Conv at (unknown) (HTP refused QNN Conv2d); 1 MatMul at (unknown) (no shape)"
    assert refused_in_words({}, MODEL) == ""
