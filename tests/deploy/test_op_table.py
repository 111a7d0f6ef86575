"""One row an operation, joined over torch, ONNX and the NPU, with encodings; composites grouped; CSV and JSON."""

import csv
import json

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from lumen_lab.auditing.onnx_join import ExportedOp
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.op_table import OpTable, fused_operations, op_table
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.deploy.qnn_graph import QnnOp
from lumen_lab.errors import ArtifactError, CompileError
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers

pytestmark = pytest.mark.npu
SIZE = (8, 8)


class Head(nn.Module):
    """One attention head over tokens."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens):
        logits = self.query(tokens) @ self.key(tokens).transpose(-2, -1) * 0.35
        return logits.softmax(-1) @ self.value(tokens)


class Net(nn.Module):
    """conv - ReLU - attention head: a composite of each kind."""

    def __init__(self):
        super().__init__()
        self.stem, self.act, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Head()

    def forward(self, image):
        return self.head(self.act(self.stem(image)).flatten(2).transpose(1, 2))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(graph, file, report) of the network."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("op_table")
    graph = NPUGraph(put_quantisers(capture(Net().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    calibrate(graph, torch.randn(4, 3, *SIZE).split(1), method="min_max", progress=False)
    path = export_qdq(graph, folder / "net.onnx", output_name="tokens")
    return graph, path, compile_for_chip(path, "SM8850", out_dir=folder, traffic=False, progress=False)


@pytest.fixture(scope="module")
def table(made):
    _, path, report = made
    return op_table(report, path)


def test_every_torch_operation_has_a_row_with_its_site_and_nodes(made, table):
    graph = made[0].graph_module.graph
    wanted = [n.name for n in graph.nodes if n.op == "call_function"]
    names = [row.torch_name for row in table.operations]
    assert set(names) <= set(wanted) and len(set(names)) == len(names) == 12
    assert {row.torch_op for row in table.at("head")} >= {"linear", "matmul", "softmax", "mul"}
    assert all(row.onnx_nodes for row in table.operations)
    assert not any("Quantize" in op for row in table.operations for op in row.onnx_ops)


def test_encodings_are_those_of_the_graph(made, table):
    quantisers = made[0].quantisers
    rows = [row for row in table.operations if row.torch_name in quantisers and row.writes]
    assert len(rows) >= 7
    for row in rows:
        encoding = quantisers[row.torch_name].encoding
        assert row.writes[0].scale == pytest.approx(encoding.scale, rel=1e-6), row
        assert (row.writes[0].dtype, row.writes[0].zero_point) == ("u8", encoding.zero_point)


def test_a_conv_with_a_relu_is_the_convs_and_the_relu_is_fused_into_it(made, table):
    conv, relu = (next(row for row in table.operations if row.site == site) for site in ("stem", "act"))
    assert (conv.qnn_ops, conv.runs_on, conv.fused_into, conv.macs) == (("Conv2d",), "npu", "", 8 * 8 * 9 * 3 * 8)
    assert (relu.qnn_ops, relu.runs_on, relu.fused_into, relu.macs) == ((), "npu", "conv2d", 0)
    assert conv.weights and not relu.weights and relu.writes == conv.writes
    assert sum(row.macs for row in table.operations) == sum(op.macs for op in made[2].ops) > 0
    assert {row.fused_into for row in table.operations} == {"", "conv2d"}


@pytest.mark.parametrize(
    ("kinds", "of_relu", "of_conv", "found"),
    [
        (("Conv", "Relu"), "Conv2d", None, {1: 0}),
        (("Conv", "Relu"), "Conv2d", "Conv2d", {}),  # the conv has an operation of its own
        (("Conv", "Relu"), "Relu", None, {}),  # computed ahead
        (("Conv", "Conv"), "Conv2d", None, {}),  # the second is a product itself
        (("Transpose", "Relu"), "Conv2d", None, {}),
    ],
)
def test_only_what_a_product_computes_as_well_is_fused_into_it(kinds, of_relu, of_conv, found):
    exported = [ExportedOp(f"op{i}", kind.lower(), "", ((f"node{i}", kind),), None) for i, kind in enumerate(kinds)]
    made = [[QnnOp(0, kind, kind, (1,), "u8", False, False)] if kind else [] for kind in (of_conv, of_relu)]
    assert fused_operations(exported, [[], [0]], made) == found


def test_every_scale_of_a_weight_is_in_the_table(made, table):
    conv = next(row for row in table.operations if row.site == "stem")
    weights, _ = conv.weight_scales
    assert len(weights) == 8 == conv.weights[0].channels and len(set(weights)) == 8
    written = {tensor.name: tensor for tensor in onnx.load(made[1]).graph.initializer}
    (node,) = [n for n in onnx.load(made[1]).graph.node if n.input[0] == conv.weights[0].name]
    np.testing.assert_array_equal(numpy_helper.to_array(written[node.input[1]]), np.float32(weights))
    flat = conv.flat()
    assert (flat["least weight scale"], flat["greatest weight scale"]) == (min(weights), max(weights))
    softmax = next(row for row in table.operations if row.torch_op == "softmax")
    assert softmax.weight_scales == () and softmax.flat()["least weight scale"] is None


def test_a_report_of_another_file_is_refused(made, tmp_path):
    _, path, report = made
    other = onnx.load(path)
    other.producer_name = "another"
    onnx.save(other, tmp_path / path.name)
    with pytest.raises(ArtifactError, match=r"not the file that the report of net.onnx for SM8850 is of: SHA-256"):
        op_table(report, tmp_path / path.name)
    with pytest.raises(CompileError, match="There is no ONNX file"):
        op_table(report, tmp_path / "none.onnx")


def test_arguments_in_the_wrong_order_are_refused_in_a_sentence(made):
    with pytest.raises(ArtifactError, match=r"found PosixPath and CompileReport; write op_table\(report, onnx_path\)"):
        op_table(made[1], made[2])


def test_a_linear_shows_its_weight_and_bias(table):
    (row,) = [row for row in table.operations if row.site == "head.query" and row.torch_op == "linear"]
    assert row.onnx_ops == ("MatMul", "Add") and "FullyConnected" in row.qnn_ops and row.macs == 64 * 8 * 8
    assert [operand.dtype for operand in row.weights] == ["s8", "s32"] and row.weights[0].axis == 0


def test_composites_are_grouped(table):
    groups = {name: [row.torch_op for row in rows] for name, rows in table.groups().items()}
    assert groups.pop("attention head 1") == ["matmul", "mul", "softmax", "matmul"]
    assert groups.pop("conv + relu conv2d") == ["conv2d", "relu"]
    assert all(name.startswith("linear + bias ") for name in groups) and len(groups) == 3


def test_the_table_goes_to_disk_and_back(table, tmp_path):
    assert OpTable.load(table.save(tmp_path / "ops.json")) == table
    assert len(json.loads((tmp_path / "ops.json").read_text())["operations"][0]["weight_scales"][0]) == 8
    assert json.loads((tmp_path / "ops.json").read_text())["operations"][0]["site"] == "stem"
    with open(table.save_csv(tmp_path / "ops.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(table.operations)
    assert rows[0]["torch op"] == "conv2d" and float(rows[0]["scale"] or 1) > 0
    assert float(rows[0]["least weight scale"]) < float(rows[0]["greatest weight scale"])
    assert {row["runs on"] for row in rows} <= {"npu", "folded"} and {row["float"] for row in rows} == {"False"}
    assert "attention head 1" in table._repr_html_()
