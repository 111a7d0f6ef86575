"""One row an operation, joined over torch, ONNX and the NPU, with encodings; composites grouped; CSV and JSON."""

import csv
import json

import pytest
import torch
from torch import nn

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.op_table import OpTable, op_table
from lumen_lab.deploy.qdq_export import export_qdq
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
    assert json.loads((tmp_path / "ops.json").read_text())["operations"][0]["site"] == "stem"
    with open(table.save_csv(tmp_path / "ops.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(table.operations)
    assert rows[0]["torch op"] == "conv2d" and float(rows[0]["scale"] or 1) > 0
    assert {row["runs on"] for row in rows} <= {"npu", "folded"} and {row["float"] for row in rows} == {"False"}
    assert "attention head 1" in table._repr_html_()
