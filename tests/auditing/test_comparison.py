"""Predicted beside actual: each operation finds its own ONNX nodes, nothing is dropped, disagreements come first."""

from dataclasses import replace

import onnx
import pytest
import torch
from torch import nn

from lumen_lab.auditing import Comparison, ExportedOp, audit, compare_with_actual, onnx_nodes_by_operation
from lumen_lab.auditing.onnx_join import join_operations
from lumen_lab.errors import AuditError


class Block(nn.Module):
    """What exporting does to operations: one becomes several nodes, two become one, some vanish."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0, 1, 64).view(8, 8))

    def forward(self, x):
        x = self.drop(x.relu())
        tokens = x.flatten(2).transpose(1, 2)
        first, second = self.fc(tokens).chunk(2, -1)
        again = first.sigmoid() * first.sigmoid()
        return (again + second).roll(1, 1), (self.table.t() * 2).sum(0) + tokens


class Network(nn.Module):
    """The block twice, at two sizes, after a conv and its normalisation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = Block()

    def forward(self, x):
        x = self.norm(self.conv(x))
        large, _ = self.block(x)
        small, other = self.block(x[:, :, ::2, ::2])
        return large.mean(1) + small.mean(1), other


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(report, path of the ONNX file) of the network."""
    torch.manual_seed(0)
    model, inputs = Network().eval(), (torch.rand(1, 4, 8, 8),)
    nn.init.normal_(model.norm.running_mean)
    path = tmp_path_factory.mktemp("onnx") / "network.onnx"
    torch.onnx.export(model, inputs, path, dynamo=True, opset_version=20, verbose=False)
    return audit(model, inputs), path


def nodes(path, **changed):
    """Rows as a compile report has them: every node on the NPU, but for those in ``changed``."""
    graph = onnx.load(path).graph
    return [
        {"onnx_node": node.name, "op_type": node.op_type, "place": changed.get(node.op_type, "npu")}
        for node in graph.node
    ]


def compared(exported, **changed):
    report, path = exported
    return compare_with_actual(report, nodes(path, **changed), onnx_path=path)


def test_each_node_says_where_it_comes_from(exported):
    operations = onnx_nodes_by_operation(exported[1])
    assert {op.kind for op in operations if not op.name} == {"split"}  # made by the exporter from chunk
    assert all(op.site is not None for op in operations)
    linear = [op for op in operations if op.kind == "linear"]
    assert [op.site for op in linear] == ["block.fc", "block.fc"]
    assert {op.op_types[-1] for op in linear} == {"Add"}
    assert linear[0].shape == (1, 64, 8)


def test_every_operation_has_a_line_and_every_node_an_operation(exported):
    report, path = exported
    comparison = compared(exported)
    assert [op.index for op in comparison.operations] == [row.index for row in report.operations]
    assert comparison.unclaimed == ()
    claimed = [name for op in comparison.operations for name in op.onnx_nodes]
    assert sorted(claimed) == sorted(node["onnx_node"] for node in nodes(path))


def test_both_calls_find_their_own_nodes(exported):
    report, path = exported
    shapes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in onnx.load(path).graph.value_info
    }
    outputs = {node.name: shapes.get(node.output[0]) for node in onnx.load(path).graph.node}
    for op, row in zip(compared(exported).operations, report.operations, strict=True):
        if op.kind in ("linear", "relu", "roll") and op.onnx_nodes:
            assert outputs[op.onnx_nodes[-1]] == list(row.output_shapes[0])


def test_what_became_of_each_kind(exported):
    became = {(op.kind, op.call): op for op in compared(exported).operations}
    norm, conv = became["batch_norm", 0], became["conv2d", 0]
    assert norm.became == "Conv"
    assert (conv.became, conv.onnx_nodes) == (f"part of #{norm.index} batch_norm", ())
    assert became["roll", 0].became == "Slice + Slice + Concat"
    assert became["chunk", 0].became == "Split"
    assert became["dropout", 0].became == "folded away"
    assert became["linear", 1].became.endswith("MatMul + Add")


def test_of_two_equal_operations_one_is_part_of_the_other(exported):
    first, second = [op for op in compared(exported).operations if op.kind == "sigmoid" and op.call == 0]
    assert first.became == "Sigmoid"
    assert second.became == f"part of #{first.index} sigmoid"


def test_all_on_the_npu_agrees(exported):
    comparison = compared(exported)
    assert comparison.agrees
    assert {row["agrees"] for row in comparison.summary_rows()} == {"yes"}


def test_a_refusal_that_was_not_foreseen_is_on_top(exported):
    comparison = compared(exported, Sigmoid="cpu")
    assert not comparison.agrees
    wrong = comparison.disagreements()
    assert {op.kind for op in wrong} == {"sigmoid"}
    assert len(wrong) == 4  # two calls, each with a twin that the exporter merged
    rows = comparison.rows()
    assert [row["agrees"] for row in rows] == ["NO"] * 4 + ["yes"] * (len(rows) - 4)
    assert "Disagreements" in comparison._repr_html_()


def test_one_node_on_the_cpu_puts_a_fused_conv_there_too(exported):
    wrong = compared(exported, Conv="CPU").disagreements()
    assert {op.kind for op in wrong} == {"batch_norm", "conv2d"}


def test_a_refusal_that_did_not_come_disagrees(exported):
    from lumen_lab.auditing import Rule

    model, path = Network().eval(), exported[1]
    pessimist = Rule("no roll", lambda row, around: row.kind == "roll", "CPU", "spoiled", "this test")
    report = audit(model, (torch.rand(1, 4, 8, 8),), rules=(pessimist,))
    wrong = compare_with_actual(report, nodes(path), onnx_path=path).disagreements()
    assert [(op.kind, op.predicted, op.actual) for op in wrong] == [("roll", "CPU", "NPU")] * 2


def test_what_the_runtime_folded_agrees(exported):
    assert compared(exported, Slice="folded").agrees


def test_a_node_without_origin_is_listed(exported, tmp_path):
    report, path = exported
    model = onnx.load(path)
    model.graph.node.append(onnx.helper.make_node("Neg", [model.graph.output[0].name], ["made"], name="made_later"))
    onnx.save(model, tmp_path / "more.onnx")
    rows = [*nodes(path), {"onnx_node": "made_later", "runs_on": "CPU"}]
    comparison = compare_with_actual(report, rows, onnx_path=tmp_path / "more.onnx")
    assert [(node.onnx_node, node.op_type, node.actual) for node in comparison.unclaimed] == [
        ("made_later", "Neg", "CPU")
    ]
    assert not comparison.agrees
    assert comparison.rows()[0]["became"] == "Neg"


def test_of_two_reshapes_the_one_with_its_shape_has_the_node():
    """The exporter keeps the second of two reshapes in a row."""
    rows = audit(nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 8))).eval(), (torch.rand(1, 4, 4),)).operations
    kept = ExportedOp(name="view", kind="view", site=rows[1].site, nodes=(("n", "Reshape"),), shape=(1, 2, 8))
    same_site = [replace(row, site=rows[1].site) for row in rows]
    assert join_operations(same_site, [kept]).nodes == {1: (kept,)}


def test_a_missing_product_is_not_explained_away(exported, tmp_path):
    report, path = exported
    model = onnx.load(path)
    lost = {name for op in onnx_nodes_by_operation(path) if op.kind == "linear" for name, _ in op.nodes}
    kept = [node for node in model.graph.node if node.name not in lost]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, tmp_path / "less.onnx")
    wrong = compare_with_actual(report, nodes(path), onnx_path=tmp_path / "less.onnx").disagreements()
    assert {(op.kind, op.became) for op in wrong} == {("linear", "no counterpart found")}


def test_a_saved_comparison_is_the_same(exported, tmp_path):
    comparison = compared(exported, Sigmoid="cpu")
    assert Comparison.load(comparison.save(tmp_path / "comparison.json")) == comparison


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"onnx_node": "elsewhere", "place": "npu"}], "knows 0 of the .* give the ONNX file that was compiled"),
        ([{"op_type": "Conv", "site": "block.conv"}], "needs onnx_node and runs_on, found only op_type, site"),
    ],
)
def test_rows_that_do_not_belong_are_refused(exported, rows, message):
    with pytest.raises(AuditError, match=message):
        compare_with_actual(exported[0], rows, onnx_path=exported[1])


def test_a_file_that_is_no_onnx_is_refused(exported, tmp_path):
    (tmp_path / "notes.onnx").write_text("not a graph")
    with pytest.raises(AuditError, match=r"notes\.onnx cannot be read as an ONNX model"):
        onnx_nodes_by_operation(tmp_path / "notes.onnx")
    with pytest.raises(AuditError, match="missing"):
        onnx_nodes_by_operation(tmp_path / "missing.onnx")


def test_a_file_without_origins_is_refused(exported, tmp_path):
    report, path = exported
    model = onnx.load(path)
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, tmp_path / "silent.onnx")
    with pytest.raises(AuditError, match="do not say which torch operation"):
        compare_with_actual(report, nodes(path), onnx_path=tmp_path / "silent.onnx")
