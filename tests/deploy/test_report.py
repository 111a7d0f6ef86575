"""The compile report: figures, tables, gate, and the way to disk and back."""

import json
from dataclasses import replace

import pytest

from lumen_lab.deploy.qdq_faults import Fault
from lumen_lab.deploy.qnn_graph import Operand, Partition, QnnOp
from lumen_lab.deploy.report import CompileReport, NodePlace, quantised_bits, require_int8, require_one_partition
from lumen_lab.deploy.traffic import HtpKindTraffic, OpTraffic, Traffic
from lumen_lab.errors import ArtifactError, CompileError


def op(name, kind="Conv2d", **values):
    return QnnOp(0, name, kind, (1, 8, 8, 4), **{"dtype": "u8", "is_float": False, "at_boundary": False, **values})


@pytest.fixture
def report(tmp_path):
    nodes = [
        NodePlace(f"deform_{i}", "DeformConv", f"decoder.{i}", "cpu", (), None, "no translation") for i in range(20)
    ]
    nodes += [NodePlace("conv", "Conv", "stem", "npu", ("Conv2d", "Transpose")), NodePlace("bias", "Add", "", "folded")]
    return CompileReport(
        model="net.onnx",
        chip="SM8850",
        htp_arch=81,
        soc_model=87,
        options={"soc_model": "87"},
        onnx_sha256="00ff",
        versions={"qairt": "v2"},
        partition_rows=(Partition("a", 2, ("x",), ("u",), 100, 20), Partition("b", 1, ("v",), ("y",), 30, 4)),
        nodes=tuple(nodes),
        ops=(
            op("c"),
            op("t", "Transpose"),
            op("f", is_float=True),
            op("q", "Quantize", is_float=True, at_boundary=True),
        ),
        binary_bytes=123_456,
        compile_s=1.25,
        peak_memory_bytes=2**30,
        log_path=str(tmp_path / "artefact" / "net.log"),
        context_path=str(tmp_path / "artefact" / "net_ctx.onnx"),
    )


@pytest.fixture
def measured(report):
    """The report with its traffic: 20 operations at sites of their own."""
    ops = tuple(OpTraffic(0, f"c{i}", "Conv2d", 2, 1_000_000 * i, 4000, 50, 60, site=f"<{i}>") for i in range(20))
    kinds = (HtpKindTraffic("ConvLayer", 40, 0, 190_000_000, 80_000, 1000, 1200),)
    return replace(report, traffic=Traffic(ops, kinds), no_traffic_because="")


def test_figures_are_counted_from_the_rows(report):
    assert report.partitions == 2
    assert len(report.cpu_nodes) == 20 and report.cpu_nodes[3].site == "decoder.3"
    assert report.qnn_ops == {"Conv2d": 2, "Transpose": 1, "Quantize": 1}
    assert [op.name for op in report.float_ops] == ["f"]
    figures = {row["figure"]: row["value"] for row in report.summary_rows()}
    assert figures["bytes across partition borders"] == 154
    assert figures["peak memory, MiB"] == 1024
    assert figures["ONNX nodes on the NPU / folded / on the CPU"] == "1 / 1 / 20"


def test_what_stays_on_the_cpu_comes_first_and_by_kind(report):
    assert [row["place"] for row in report.rows()] == ["cpu"] * 20 + ["npu", "folded"]
    assert report.rows()[-1]["site"] == "(network)"
    (row,) = report.cpu_rows()
    assert (row["op type"], row["nodes"], row["reason"]) == ("DeformConv", 20, "no translation")
    assert row["sites"].startswith("decoder.0, decoder.1") and row["sites"].endswith("and 12 more")


def test_the_notebook_page_shows_figures_and_escapes_names(report):
    spoiled = replace(report, nodes=(replace(report.nodes[0], site="<script>"),))
    page = spoiled._repr_html_()
    assert "2 partitions" in page and "DeformConv" in page and "&lt;script&gt;" in page and "<script>" not in page
    assert "Nothing is left on the CPU" in replace(report, nodes=report.nodes[20:])._repr_html_()


def test_a_report_comes_back_from_disk_the_same_and_moves_with_its_folder(report, tmp_path):
    path = report.save(tmp_path / "artefact" / "net.report.json")
    assert str(tmp_path) not in path.read_text()
    assert CompileReport.load(path) == report
    (tmp_path / "artefact").rename(tmp_path / "moved")
    moved = CompileReport.load(tmp_path / "moved" / "net.report.json")
    assert moved.context_path == str(tmp_path / "moved" / "net_ctx.onnx")


def test_traffic_is_among_the_figures_and_its_top_sites_on_the_page(report, measured):
    figures = {row["figure"]: row["value"] for row in measured.summary_rows()}
    assert (figures["DRAM read, MB"], figures["DRAM written, MB"], figures["tiles"]) == (190.0, 0.08, 40)
    without = {row["figure"]: row["value"] for row in report.summary_rows()}
    assert without.keys() == figures.keys() and without["tiles"] is None
    page = measured._repr_html_()
    assert "&lt;19&gt;" in page and "&lt;3&gt;" not in page and "ConvLayer" in page
    assert "was not measured: the network was compiled without asking" in report._repr_html_()


def test_traffic_is_saved_with_the_report_and_an_older_report_has_none(report, measured, tmp_path):
    path = measured.save(tmp_path / "artefact" / "net.report.json")
    assert CompileReport.load(path) == measured
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: values[name] for name in values.keys() - {"traffic", "no_traffic_because"}}))
    assert CompileReport.load(path) == report
    path.write_text(json.dumps(values | {"traffic": {"ops": []}}))
    with pytest.raises(ArtifactError, match="damaged"):
        CompileReport.load(path)


def test_a_file_that_is_no_report_is_refused(report, tmp_path):
    path = report.save(tmp_path / "net.report.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "ops"} | {"more": 1}))
    with pytest.raises(ArtifactError, match="more"):
        CompileReport.load(path)
    path.write_text("no json")
    with pytest.raises(ArtifactError, match="Cannot read"):
        CompileReport.load(path)


def test_the_gate_passes_one_partition_only_and_names_the_sites(report):
    whole = replace(report, partition_rows=report.partition_rows[:1], nodes=report.nodes[20:])
    assert require_one_partition(whole) is whole
    with pytest.raises(CompileError, match=r"20 DeformConv at decoder\.0, .*no translation"):
        require_one_partition(replace(report, partition_rows=report.partition_rows[:1]))
    with pytest.raises(CompileError, match="it is 2, and on the CPU stay no nodes"):
        require_one_partition(replace(report, nodes=report.nodes[20:]))


# Integers


@pytest.fixture
def quantised(report):
    """Two sound operations, a float island between conversions, and one that is wrong in silence."""
    bias = Fault("aten.linear.default", "its bias is not in steps of input scale × weight scale", silent=True)
    float_gelu = Fault("aten.gelu.default", "nothing quantises what it returns")
    weight = Operand("w", "constant", "s8", (8, 8), axis=0, channels=8)
    ops = (
        op("c", macs=300, operands=(weight,), onnx_node="c", site="stem"),
        op("d", "Dequantize", is_float=True, onnx_node="c", site="stem"),
        op("g", "Gelu", is_float=True, onnx_node="g", site="<act>", faults=(float_gelu,)),
        op("q", "Quantize", is_float=True, onnx_node="g", site="<act>", faults=(float_gelu,)),
        op("m", "MatMul", macs=100, is_float=True, onnx_node="m", site="attn"),
        op("f", "FullyConnected", macs=600, onnx_node="f", site="head", faults=(bias,)),
    )
    return replace(report, ops=ops, nodes=report.nodes[20:])


def test_the_gate_names_islands_with_their_rules_and_silent_faults(quantised):
    with pytest.raises(CompileError) as caught:
        require_int8(quantised)
    text = str(caught.value)
    assert "4 of 6 QNN ops are float and 1 silently wrong, 90.0% of the NPU's MACs in integers" in text
    assert "Gelu at <act> (g): nothing quantises what it returns [aten.gelu.default]" in text
    assert "MatMul at attn (m): no rule of the table is seen to be broken" in text
    assert "FullyConnected at head (f): its bias is not in steps" in text
    assert "Dequantize" not in text and "On the CPU" not in text


def test_conversions_are_named_where_nothing_else_is_float(quantised):
    only = replace(quantised, ops=quantised.ops[:2])
    assert [row["QNN op"] for row in only.fault_rows()] == ["Dequantize"]
    assert require_int8(replace(quantised, ops=quantised.ops[:1])).fault_rows() == []


def test_a_network_without_operations_or_with_nodes_on_the_cpu_is_no_int8(quantised, report):
    with pytest.raises(CompileError, match="There is no operation on the NPU"):
        require_int8(replace(quantised, ops=()))
    with pytest.raises(CompileError, match=r"on the NPU\. On the CPU stay 20 DeformConv .*rewrite what was") as caught:
        require_int8(replace(quantised, ops=quantised.ops[:1], nodes=report.nodes))
    assert "float" not in str(caught.value) and "encodings" not in str(caught.value)
    with pytest.raises(CompileError, match="On the CPU stay 20 DeformConv .*4 of 6 QNN ops are float"):
        require_int8(replace(quantised, nodes=report.nodes))


def test_a_file_without_quantisers_is_named_as_such(quantised):
    weight = Operand("w", "constant", "float32", (8, 8))
    plain = tuple(
        op(kind, kind, dtype="float32", is_float=True, onnx_node=kind, operands=(weight,))
        for kind in ("Conv2d", "Gelu")
    )
    with pytest.raises(CompileError, match="has no quantisers, so all 2 QNN ops are float: .*export_qdq") as caught:
        require_int8(replace(quantised, ops=plain))
    assert "no rule" not in str(caught.value) and "Gelu" not in str(caught.value)
    assert "Not computed in integers" not in replace(quantised, ops=plain)._repr_html_()
    one_weight = replace(plain[0], operands=(replace(weight, dtype="s8"),))
    with pytest.raises(CompileError, match="2 of 2 QNN ops are float"):
        require_int8(replace(quantised, ops=(one_weight, plain[1])))


def test_operations_with_the_same_fault_are_told_together(quantised):
    more = tuple(op("m", "MatMul", is_float=True, onnx_node=f"m{i}", site=f"attn{i}") for i in range(9))
    with pytest.raises(CompileError) as caught:
        require_int8(replace(quantised, ops=(quantised.ops[0], *more)))
    assert str(caught.value).count("no rule of the table") == 1
    assert "MatMul at attn0 (m0), MatMul at attn1 (m1)" in str(caught.value) and "and 1 more: no rule" in str(
        caught.value
    )


def test_what_moves_data_beside_a_float_operation_is_not_its_cause(quantised):
    moved = op("t", "Transpose", is_float=True, onnx_node="m", site="attn")
    assert "Transpose" not in {row["QNN op"] for row in replace(quantised, ops=(*quantised.ops, moved)).fault_rows()}
    guilty = replace(moved, faults=(Fault("aten.permute.default", "it returns one and reads another"),))
    assert "Transpose" in {row["QNN op"] for row in replace(quantised, ops=(*quantised.ops, guilty)).fault_rows()}
    assert [row["QNN op"] for row in replace(quantised, ops=(quantised.ops[0], moved)).fault_rows()] == ["Transpose"]


def test_sixteen_bits_pass_unless_eight_are_asked_for(quantised):
    wide = op("w", "ElementWiseAdd", dtype="u16", onnx_node="add", site="stem.sum")
    mixed = replace(quantised, ops=(quantised.ops[0], wide, wide))
    assert require_int8(mixed) is mixed is require_int8(mixed, widths=(8, 16))
    assert mixed.ops_by_width == {8: 1, 16: 2} and mixed.figures()["of them writing 8 / 16 bits"] == "1 / 2"
    words = (
        r"2 of 3 QNN ops write 16 bits, and activations of 8 bits were asked for: ElementWiseAdd at stem\.sum \(add\)"
    )
    with pytest.raises(CompileError, match=words):
        require_int8(mixed, widths=(8,))
    with pytest.raises(CompileError, match="1 of 3 QNN ops write 8 bits"):
        require_int8(mixed, widths=(16,))
    for strange in ((), (4,), (8, 32)):
        with pytest.raises(CompileError, match=r"widths is of \(8, 16\)"):
            require_int8(mixed, widths=strange)


@pytest.mark.parametrize(
    ("dtype", "bits"), [("u8", 8), ("s16", 16), ("s32", 32), ("uint8", None), ("float32", None), ("bool8", None)]
)
def test_only_fixed_point_types_have_a_width(dtype, bits):
    assert quantised_bits(dtype) == bits


def test_figures_of_integers_are_on_the_page_and_come_back_from_disk(quantised, report, tmp_path):
    figures = {row["figure"]: row["value"] for row in quantised.summary_rows()}
    assert figures["share of MACs in integers"] == 0.9 and figures["of them silently wrong in integers"] == 1
    assert quantised.ops_by_dtype == {"u8": 6} and report.int8_mac_share is None
    page = quantised._repr_html_()
    assert "&lt;act&gt;" in page and "the decomposed form needs Erf" in page
    assert CompileReport.load(quantised.save(tmp_path / "net.report.json")).ops == quantised.ops


def test_a_report_from_before_encodings_were_kept_is_read(report, tmp_path):
    path = report.save(tmp_path / "net.report.json")
    values = json.loads(path.read_text())
    for one in values["ops"]:
        for name in ("operands", "macs", "faults"):
            del one[name]
    path.write_text(json.dumps(values))
    assert CompileReport.load(path).ops == report.ops
