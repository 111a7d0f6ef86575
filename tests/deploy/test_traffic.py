"""Memory traffic: grouped without losing a byte, the same in every compile, and no less than physics asks for."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lumen_lab.deploy import htp
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.qnn_graph import QnnOp
from lumen_lab.deploy.report import CompileReport
from lumen_lab.deploy.traffic import OpTraffic, Traffic, read_traffic
from lumen_lab.errors import ArtifactError

MINIATURE = Path(__file__).with_name("fixtures") / "miniature_schematic.txt"
TOTALS = (6282, 6164, 14622, 10408, 8)  # of the miniature: DRAM read and written, VTCM read and written, tiles
GROUPINGS = ("by_htp_kind", "by_qnn_kind", "by_qnn_op", "by_onnx_node", "by_site")
COLUMNS = ("DRAM read, bytes", "DRAM written, bytes", "VTCM read, bytes", "VTCM written, bytes", "tiles")


def context(*names):
    """What stands in for a context model of these partitions."""
    nodes = [SimpleNamespace(op_type="EPContext", name=name) for name in names]
    return SimpleNamespace(graph=SimpleNamespace(node=nodes))


def op(name, node, site, partition=0):
    return QnnOp(partition, name, "Conv2d", (1,), "u8", False, False, node, "output", site)


OPS = (op("stem_token_1", "stem", "net.encoder.stem"), op("act", "act", "net.encoder.act"))


@pytest.fixture
def folder(tmp_path):
    for name in ("net_1", "net_2"):
        (tmp_path / f"{name}_schematic.bin").write_text(MINIATURE.read_text().replace("net_1", name))
    return tmp_path


def totals(traffic):
    return (
        traffic.dram_read_bytes,
        traffic.dram_write_bytes,
        traffic.vtcm_read_bytes,
        traffic.vtcm_write_bytes,
        traffic.tiles,
    )


def sums(rows):
    return tuple(sum(row[column] for row in rows) for column in COLUMNS)


def by_name(rows):
    return {next(iter(row.values())): tuple(row[column] for column in COLUMNS) for row in rows}


def test_the_totals_are_those_of_the_tiles(folder):
    traffic = read_traffic(folder, context("net_1"), OPS)
    assert totals(traffic) == TOTALS
    assert traffic.dram_bytes == traffic.dram_read_bytes + traffic.dram_write_bytes
    figures = {row["figure"]: row["value"] for row in traffic.rows()}
    assert figures["of them spilled"] == figures["of them filled back after a spill"] == 2048


@pytest.mark.parametrize("partitions", [("net_1",), ("net_1", "net_2")])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_no_grouping_loses_a_byte(folder, grouping, partitions):
    traffic = read_traffic(folder, context(*partitions), OPS)
    assert sums(getattr(traffic, grouping)()) == totals(traffic)
    assert totals(traffic) == tuple(len(partitions) * figure for figure in TOTALS)


def test_what_nothing_stands_behind_has_rows_of_its_own(folder):
    traffic = read_traffic(folder, context("net_1", "net_2"), OPS)
    sites = by_name(traffic.by_site())
    assert sites["(network input)"] == (2 * 4096, 0, 0, 2 * 4096, 2)
    assert sites["(made by the compiler)"] == (20, 40, 60, 80, 2)
    assert sites["(unknown)"][-1] == 5  # the second partition's operations, which `ops` does not know
    assert sites["net.encoder.act"] == (2048, 2048, 10496, 6144, 4)
    assert by_name(traffic.by_onnx_node())["(no ONNX node)"] == sites["(unknown)"]
    assert by_name(traffic.by_qnn_op())["act (partition 1)"] == sites["net.encoder.act"]


def test_sites_are_grouped_by_a_prefix_of_their_path(folder):
    traffic = read_traffic(folder, context("net_1"), OPS)
    assert {row["site"] for row in traffic.by_site(1)} >= {"net", "(network output)"}
    both = by_name(traffic.by_site(2))["net.encoder"]
    apart = by_name(traffic.by_site())
    assert both == tuple(map(sum, zip(apart["net.encoder.stem"], apart["net.encoder.act"], strict=True)))


def test_the_most_bytes_come_first(folder):
    rows = read_traffic(folder, context("net_1"), OPS).by_qnn_op()
    moved = [row["DRAM read, bytes"] + row["DRAM written, bytes"] for row in rows]
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[-1]


def test_kinds_of_htp_operations_say_what_dma_does(folder):
    kinds = {row.kind: row for row in read_traffic(folder, context("net_1", "net_2"), OPS).htp_kinds}
    assert (kinds["ConvLayer_s1.opt"].tiles, kinds["ConvLayer_s1.opt"].dma_tiles) == (4, 0)
    assert (kinds["@Spill"].tiles, kinds["@Spill"].dma_tiles) == (2, 2)


def test_a_partition_without_its_schematic_is_refused(folder):
    with pytest.raises(ArtifactError, match="no schematic of the partition net_3"):
        read_traffic(folder, context("net_1", "net_3"), OPS)
    (folder / "net_1_schematic.bin").rename(folder / "net_3_schematic.bin")
    with pytest.raises(ArtifactError, match="is the schematic of net_1, not of net_3"):
        read_traffic(folder, context("net_3"), OPS)


def test_traffic_comes_back_from_disk_the_same(folder):
    traffic = read_traffic(folder, context("net_1", "net_2"), OPS)
    assert Traffic.load(traffic.save(folder / "traffic.json")) == traffic
    (folder / "traffic.json").write_text('{"record": "Traffic", "ops": [{"tiles": 3}], "htp_kinds": []}')
    with pytest.raises(ArtifactError, match="OpTraffic is incomplete"):
        Traffic.load(folder / "traffic.json")


def test_in_words_it_is_its_totals():
    traffic = Traffic((OpTraffic(0, "a", "Conv2d", 8532, 10_000_000, 2_500_000, 30, 40),), ())
    assert str(traffic) == "DRAM: 10.0 MB read, 2.5 MB written; 8,532 tiles"


def test_names_are_escaped_in_the_notebook():
    page = Traffic((OpTraffic(0, "a", "Conv2d", 1, 10, 20, 30, 40, site="<script>"),), ())._repr_html_()
    assert "&lt;script&gt;" in page and "<script>" not in page


@pytest.mark.npu
@pytest.mark.parametrize("net", ["conv", "deform", "quantised"])
def test_the_compiler_tells_the_same_in_every_grouping_and_every_compile(compiled, nets, tmp_path, net):
    report = compiled(net)
    assert report.traffic.tiles > 3 and report.no_traffic_because == ""
    for grouping in GROUPINGS:
        assert sums(getattr(report.traffic, grouping)()) == totals(report.traffic)
    path = getattr(nets, net)(tmp_path / f"{net}.onnx")
    again = compile_for_chip(path, report.chip, out_dir=tmp_path / "again", progress=False)
    assert again.traffic == report.traffic


@pytest.mark.npu
def test_weights_are_read_once_and_the_ends_are_moved_whole(compiled, nets, tmp_path):
    path = nets.wide(tmp_path / "wide.onnx")
    traffic = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False).traffic
    rows = by_name(traffic.by_site())
    weights, ends = 512 * 256 * 9 * 2, (256 * 8 * 8 * 4, 512 * 8 * 8 * 4)  # the compiler computes in float16
    assert weights <= rows["net.wide"][0] < 1.1 * weights
    assert rows["(network input)"][0] == ends[0] and rows["(network output)"][1] == ends[1]
    assert traffic.dram_read_bytes >= weights + ends[0]
    stem = by_name(compiled("conv").traffic.by_site())
    assert stem["(network input)"][0] >= 3 * 32 * 32 * 4 and stem["(network output)"][1] == 4 * 32 * 32 * 4


@pytest.mark.npu
def test_the_traffic_of_all_partitions_is_added(compiled):
    report = compiled("deform")
    assert report.partitions == 2 and {row.partition for row in report.traffic.ops} == {0, 1}
    entered = by_name(report.traffic.by_site())["(network input)"][0]
    assert entered >= sum(part.bytes_in for part in report.partition_rows)


@pytest.mark.npu
def test_every_operation_with_a_name_is_joined_to_its_node(compiled):
    report = compiled("conv")
    known = {(op.partition, op.name): (op.onnx_node, op.site) for op in report.ops}
    named = [row for row in report.traffic.ops if row.qnn_op is not None]
    assert named and all(known[row.partition, row.qnn_op] == (row.onnx_node, row.site) for row in named)
    assert {row.qnn_kind for row in report.traffic.ops if row.qnn_op is None} == {"Input", "Output"}


@pytest.mark.npu
def test_measuring_changes_nothing_in_the_artefact_and_leaves_nothing_behind(nets, tmp_path):
    path = nets.conv(tmp_path / "conv.onnx")  # one path: the name of the graph, which is in the binary, hangs on it
    report, without = (
        compile_for_chip(path, "SM8850", out_dir=tmp_path / str(traffic), traffic=traffic, progress=False)
        for traffic in (True, False)
    )
    assert report.traffic is not None
    assert without.traffic is None and "traffic=True" in without.no_traffic_because
    assert without.options == report.options
    folders = [Path(each.context_path).parent for each in (report, without)]
    binaries = [(folder / "conv_SM8850_ctx_qnn.bin").read_bytes() for folder in folders]
    assert binaries[0] == binaries[1]
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [
        [
            f"conv_SM8850{end}"
            for end in (".log", ".report.json", "_ctx.onnx", "_ctx.onnx.manifest.json", "_ctx_qnn.bin")
        ]
    ] * 2


@pytest.mark.npu
def test_an_artefact_without_traffic_is_reused_only_if_none_is_wanted(nets, tmp_path, monkeypatch):
    path = nets.conv(tmp_path / "net.onnx")

    def compiled(**more):
        return compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", reuse=True, progress=False, **more)

    without = compiled(traffic=False)
    assert compiled(traffic=False) == without
    measured = compiled()
    assert measured.traffic is not None and measured.options == without.options
    monkeypatch.setattr(htp, "run_child", lambda *a, **k: pytest.fail("the compiler was started"))
    assert compiled() == compiled(traffic=False) == measured


@pytest.mark.npu
def test_a_schematic_that_cannot_be_read_does_not_lose_the_compile(nets, tmp_path, monkeypatch):
    def unreadable(folder, *_):
        raise ArtifactError(f"{folder / 'a_schematic.bin'} is cut off.")

    monkeypatch.setattr(htp, "read_traffic", unreadable)
    path = nets.conv(tmp_path / "net.onnx")
    with pytest.warns(UserWarning, match="compiled for SM8850, without its traffic: .*is cut off"):
        report = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    assert report.traffic is None and report.no_traffic_because == "a_schematic.bin is cut off."
    assert CompileReport.load(tmp_path / "out" / "net_SM8850" / "net_SM8850.report.json") == report
    monkeypatch.setattr(htp, "run_child", lambda *a, **k: pytest.fail("the compiler was started"))
    assert compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", reuse=True, progress=False) == report


@pytest.mark.npu
def test_another_profile_wins_and_the_report_says_that_nothing_was_measured(nets, tmp_path):
    options = {"profiling_level": "basic"}
    with pytest.warns(UserWarning, match="wrote no schematic of the partition"):
        report = compile_for_chip(
            nets.conv(tmp_path / "net.onnx"), "SM8850", out_dir=tmp_path, provider_options=options, progress=False
        )
    assert report.traffic is None and report.options["profiling_level"] == "basic"
