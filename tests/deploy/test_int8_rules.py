"""The rows of ``htp_rules.json`` proved: every operation compiled in integers, its error as recorded."""

import ast

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.auditing.onnx_join import CLASSES
from lumen_lab.chips import load_chips
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.model_file import node_key
from lumen_lab.deploy.qdq_export import export_qdq
from lumen_lab.deploy.qdq_faults import faults_in
from lumen_lab.deploy.report import require_int8, require_one_partition
from lumen_lab.deploy.steps_off import operation_steps
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.quantization.rules import INPUT, htp_rules

pytestmark = pytest.mark.npu

SIZE = (16, 24)
ARCHITECTURES = (68, 69, 73, 75, 79, 81, 85)


class EveryOperation(nn.Module):
    """The operations of the table that compute something, on maps large enough for shares of values."""

    def __init__(self):
        super().__init__()
        self.conv, self.wide = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.norm, self.fc, self.back = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.offset = nn.Conv2d(16, 2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, SIZE[0]), torch.linspace(-1, 1, SIZE[1]), indexing="ij")
        self.register_buffer("positions", torch.stack([columns, rows], -1)[None])
        nn.init.normal_(self.norm.bias, std=0.3)

    def forward(self, x):
        x = self.conv(x).relu()
        x = x - self.wide(x)
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        tokens = self.back(F.gelu(self.fc(tokens)))
        rows = tokens.unflatten(1, SIZE)
        weighed = (rows @ rows.transpose(-1, -2) * 0.25).softmax(-1) @ rows
        x = torch.cat([x, weighed.permute(0, 3, 1, 2)], 1)[:, 4:20]
        x = F.grid_sample(x, self.positions + self.offset(x).permute(0, 2, 3, 1) * 0.1, align_corners=True)
        x = x + x.mean((2, 3), keepdim=True).expand(-1, -1, *SIZE)
        x = F.interpolate(F.pad(x, (1, 1, 1, 1)), size=(20, 33), mode="bilinear", align_corners=True)
        return self.shuffle(F.max_pool2d(x, 3, 1, 1)).sigmoid()


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """The network as a QDQ file, and an image in its input's integers."""
    torch.manual_seed(0)
    graph = NPUGraph(put_quantisers(capture(EveryOperation().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    pictures = torch.randn(4, 3, *SIZE)
    calibrate(graph, pictures.split(1), method="min_max", progress=False)
    path = export_qdq(graph, tmp_path_factory.mktemp("rules") / "every.onnx")
    return path, next(iter(graph.quantisers.values())).encoding.quantise(pictures[:1].numpy())


@pytest.fixture(scope="module")
def measured(quantised):
    return operation_steps(*quantised[:1], "SM8750", quantised[1])


def kinds_of(path):
    """The table's operation behind each node."""
    found = {}
    for node in onnx.load(path).graph.node:
        classes = next((entry.value for entry in node.metadata_props if entry.key == CLASSES), None)
        if classes:
            found[node_key(node)] = ast.literal_eval(classes)[-1]
    return found


def test_every_operation_is_off_no_further_than_its_row_says(quantised, measured):
    kinds, rules, seen = kinds_of(quantised[0]), htp_rules(), set()
    for row in measured.operations:
        rule = rules[kinds[row.onnx_node]]
        seen.add(rule.op)
        assert row.max_steps <= 1, row
        if sum(row.counts) > 2000:
            assert 1 - row.equal <= rule.off_by_one + 0.02, (row, rule)
    computing = {op for op, rule in rules.items() if rule.output != INPUT}
    assert computing - seen == set(), "rows that no operation of the network has"


def test_movements_and_tables_are_exact(measured):
    exact = {"Reshape", "Transpose", "Slice", "Expand", "Pad", "DepthToSpace", "MaxPool", "Gelu", "Sigmoid"}
    rows = [row for row in measured.operations if row.op_type in exact]
    assert {row.op_type for row in rows} == exact
    assert {row.max_steps for row in rows} == {0}


def test_the_first_operation_that_is_off_is_named_and_the_report_comes_back(measured, tmp_path):
    assert measured.first is not None and measured.first.max_steps == 1
    assert measured.first.op_type in str(measured)
    assert type(measured).load(measured.save(tmp_path / "steps.json")) == measured
    assert "Each operation given what the NPU" in measured._repr_html_()
    assert sum(measured.outputs[0].counts) == 4 * 4 * 20 * 33


def test_no_rule_is_broken(quantised):
    assert faults_in(onnx.load(quantised[0])) == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_takes_the_network_whole_in_integers(quantised, tmp_path, architecture):
    """Of v68 the chip whose compiler has no float16, soc_model 35: it refuses what others compute in float."""
    candidates = [chip for chip in load_chips() if chip.htp_arch == architecture and chip.soc_model is not None]
    chip = next((chip for chip in candidates if chip.soc_model == 35), candidates[0])
    report = compile_for_chip(quantised[0], chip, out_dir=tmp_path, traffic=False, progress=False)
    require_int8(require_one_partition(report))
    assert report.int8_mac_share == 1 and report.htp_arch == architecture
