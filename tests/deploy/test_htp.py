"""The real compiler on tiny networks: what it takes, what it refuses, and what is left when it fails."""

import os
import resource
import shutil
import stat
import tempfile
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest
import torch

from lumen_lab.deploy import htp
from lumen_lab.deploy.htp import compile_for_chip, require_one_partition
from lumen_lab.deploy.report import CompileReport
from lumen_lab.errors import ChipError, CompileError
from lumen_lab.specs import Manifest, file_sha256

pytestmark = pytest.mark.npu


def left_in(folder):
    """Everything in a folder but the log of a failure."""
    return [path.name for path in Path(folder).iterdir() if not path.name.endswith(".failed.log")]


@pytest.mark.parametrize(("chip", "arch"), [("SM8850", 81), ("SM8650", 75), ("SM8450", 69)])
def test_a_plain_network_is_one_partition(compiled, chip, arch):
    report = require_one_partition(compiled("conv", chip))
    assert (report.partitions, report.cpu_nodes, report.htp_arch) == (1, (), arch)
    assert report.qnn_ops["Conv2d"] == 2 and report.qnn_ops["Relu"] == 1
    places = {node.onnx_node: (node.place, node.site, node.qnn_ops[0]) for node in report.nodes}
    assert places["stem"] == ("npu", "net.stem", "Conv2d") and places["act"] == ("npu", "net.act", "Relu")
    assert len(report.float_ops) == len(report.ops)
    assert report.binary_bytes > 10_000 and report.compile_s > 0
    assert 20 * 2**20 < report.peak_memory_bytes < 2**30


def test_a_deformable_conv_stays_on_the_cpu_and_cuts_the_network_in_two(compiled):
    report = compiled("deform")
    assert report.partitions == 2
    (node,) = report.cpu_nodes
    assert (node.onnx_node, node.op_type, node.site) == ("deform", "DeformConv", "net.deform")
    assert "no translation of DeformConv" in node.reason
    assert report.partition_rows[1].bytes_in == 4 * 32 * 32 * 4
    with pytest.raises(CompileError, match=r"1 DeformConv at net\.deform"):
        require_one_partition(report)


def test_a_refusal_by_htp_carries_its_number(compiled):
    report = compiled("rank_seven")
    codes = {node.onnx_node: node.code for node in report.cpu_nodes}
    assert codes == {"unfold": 3110, "swap": 3110, "fold": 3110}


def test_an_integer_network_has_no_float_operation_and_its_ends_are_on_the_npu(compiled):
    report = require_one_partition(compiled("quantised"))
    assert report.float_ops == ()
    assert {op.kind for op in report.ops if op.at_boundary} == {"Quantize", "Dequantize"}
    assert {op.dtype for op in report.ops if op.kind == "Gelu"} == {"u8"}
    assert all(op.site for op in report.ops if op.kind in ("Conv2d", "Gelu"))


def test_a_float_island_inside_the_partition_is_seen(compiled):
    report = require_one_partition(compiled("half_quantised"))
    assert "Gelu" in {op.kind for op in report.float_ops}
    assert "Conv2d" not in {op.kind for op in report.float_ops}


def test_the_artefact_is_whole_and_its_manifest_fits(compiled):
    report = compiled("conv")
    folder = Path(report.context_path).parent
    endings = ("_ctx.onnx", "_ctx_qnn.bin", "_ctx.onnx.manifest.json", ".report.json", ".log")
    assert {path.name for path in folder.iterdir()} == {f"conv_SM8850{ending}" for ending in endings}
    assert [path for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    manifest = Manifest.load(folder / "conv_SM8850_ctx.onnx.manifest.json")
    manifest.check_files(folder)
    assert manifest.chip == "SM8850" and manifest.made_from["onnx"] == report.onnx_sha256
    assert report.onnx_sha256 == file_sha256(folder.parents[1] / "conv.onnx")
    assert (manifest.inputs[0].name, manifest.outputs[0].shape) == ("x", (1, 4, 32, 32))
    assert manifest.versions["qairt"].startswith("v2.") and manifest.versions["onnxruntime-qnn"] != "absent"
    assert CompileReport.load(folder / "conv_SM8850.report.json") == report
    assert "FinalizeGraphs completed" in Path(report.log_path).read_text()
    assert str(folder) not in Path(report.context_path).read_bytes().decode(errors="replace")


def test_integer_inputs_have_their_encoding_in_the_contract(tmp_path, nets):
    path = nets.quantised(tmp_path / "net.onnx")
    model = onnx.load(path)
    first = next(node for node in model.graph.node if node.name == "x_q")
    model.graph.node.remove(first)
    model.graph.input[0].name = "x_q"
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    onnx.save(model, path)
    report = compile_for_chip(path, "SM8850", out_dir=tmp_path, progress=False)
    manifest = Manifest.load(tmp_path / "net_SM8850" / "net_SM8850_ctx.onnx.manifest.json")
    assert (manifest.inputs[0].dtype, manifest.inputs[0].scale, manifest.inputs[0].zero_point) == (
        "uint8",
        1 / 128,
        128,
    )
    assert report.float_ops == ()


def test_a_second_compile_replaces_the_first_and_reuse_takes_it_only_if_it_fits(tmp_path, nets):
    path = nets.conv(tmp_path / "net.onnx")
    out_dir = tmp_path / "out"

    def compiled(**more):
        return compile_for_chip(path, "SM8850", out_dir=out_dir, progress=False, **more)

    first = compiled()
    assert compiled(reuse=True) == first
    assert compiled(reuse=True, optimization_mode=1) != first
    (out_dir / "net_SM8850" / "net_SM8850_ctx_qnn.bin").write_bytes(b"spoiled")
    again = compiled(reuse=True)
    assert again.binary_bytes == first.binary_bytes
    nets.deform(path)
    assert compiled(reuse=True).partitions == 2
    assert left_in(out_dir) == ["net_SM8850"]


def test_a_failed_compile_leaves_the_earlier_artefact_alone(tmp_path, nets):
    path = nets.conv(tmp_path / "net.onnx")
    first = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    nets.only_deform(path)
    with pytest.raises(CompileError, match=r"took none of its 1 nodes.*1 DeformConv at net\.deform"):
        compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == ["net_SM8850"]
    assert CompileReport.load(tmp_path / "out" / "net_SM8850" / "net_SM8850.report.json") == first
    assert "DeformConv" in (tmp_path / "out" / "net_SM8850.failed.log").read_text()
    compile_for_chip(nets.conv(path), "SM8850", out_dir=tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "net_SM8850.failed.log").exists()


def test_a_chip_without_float16_refuses_a_float_network_in_words(tmp_path, nets):
    with pytest.raises(CompileError, match="3110.*SM7325 .*has no float16: it takes full INT8 networks only"):
        compile_for_chip(nets.conv(tmp_path / "net.onnx"), "SM7325", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == []


def test_a_chip_without_float16_takes_the_integer_network(compiled):
    assert require_one_partition(compiled("quantised", "SM7325")).float_ops == ()


@pytest.mark.parametrize(("chip", "words"), [("SM8851", "Did you mean SM8850"), ("SM7425", "soc_model")])
def test_chips_that_cannot_be_compiled_for_are_refused_before_anything_is_written(tmp_path, nets, chip, words):
    with pytest.raises(ChipError, match=words):
        compile_for_chip(nets.conv(tmp_path / "net.onnx"), chip, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_chip_decides_its_own_numbers(tmp_path, nets):
    path = nets.conv(tmp_path / "net.onnx")
    with pytest.raises(CompileError, match="may not set soc_model"):
        compile_for_chip(path, "SM8850", out_dir=tmp_path, provider_options={"soc_model": "57"})


def test_options_reach_the_compiler_and_the_report(tmp_path, nets):
    path = nets.conv(tmp_path / "net.onnx")
    report = compile_for_chip(path, "SM8850", out_dir=tmp_path, vtcm_mb=2, optimization_mode=1, progress=False)
    assert (report.options["vtcm_mb"], report.options["soc_model"], report.options["htp_arch"]) == ("2", "87", "81")
    assert report.options["htp_graph_finalization_optimization_mode"] == "1"


def test_the_time_limit_ends_the_compiler(tmp_path, nets):
    with pytest.raises(CompileError, match="stopped at the time limit of 0.1 s"):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "out", time_limit_s=0.1)
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; print('deep in the compiler', flush=True); os.abort()", "crashed with SIGABRT"),
        ("import os; print('deep in the compiler', flush=True); os.kill(os.getpid(), 9)", "memory ran out"),
        ("print('deep in the compiler'); raise SystemExit(5)", "exit code 5"),
    ],
)
def test_a_crash_of_the_compiler_is_an_error_with_its_last_words(tmp_path, nets, monkeypatch, program, words):
    crashing = tmp_path / "crashing.py"
    crashing.write_text(program)
    monkeypatch.setattr(htp, "CHILD", crashing)
    with pytest.raises(CompileError, match=f"(?s){words}.*failed.log.*deep in the compiler"):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == []


def test_an_interrupt_leaves_nothing(tmp_path, nets, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(htp, "run_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == []


def test_too_little_room_is_told_before_the_compiler_starts(tmp_path, nets, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 10 * 2**20))
    monkeypatch.setattr(htp, "run_child", lambda *a, **k: pytest.fail("the compiler was started"))
    with pytest.raises(CompileError, match="about 64 MiB in .* and 10 MiB are free"):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "out")
    assert left_in(tmp_path / "out") == []


def test_a_disk_that_fills_up_during_the_compile_leaves_nothing(tmp_path, nets):
    """A limit on file size stands in for the full disk: the compiler's write fails half-way in the same place."""
    path = nets.wide(tmp_path / "n.onnx")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        with pytest.raises(CompileError, match="context binary could not be written: free disk space"):
            compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(tmp_path / "out") == []


def test_a_full_disk_is_told_even_if_the_log_does_not_say_so(tmp_path, nets, monkeypatch):
    usage, free = namedtuple("usage", "total used free"), [2**40, 1000]
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit(1)")
    monkeypatch.setattr(htp, "CHILD", failing)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, free.pop(0)))
    with pytest.raises(CompileError, match="The disk of .*out is full: free some space"):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == []


def test_a_failure_to_write_the_report_leaves_nothing(tmp_path, nets, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CompileReport, "save", full)
    with pytest.raises(CompileError, match="could not be written into .*No space left"):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == []


def test_an_out_dir_that_is_a_file_is_refused(tmp_path, nets):
    path = nets.conv(tmp_path / "n.onnx")
    for out_dir in (path, path / "below"):
        with pytest.raises(CompileError, match="Cannot write into out_dir"):
            compile_for_chip(path, "SM8850", out_dir=out_dir)
    assert onnx.load(path).graph.node


def test_an_out_dir_that_may_not_be_written_is_refused(tmp_path, nets, monkeypatch):
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.geteuid() == 0:  # root may write anywhere
        monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(CompileError, match="Cannot write into out_dir .*Permission denied"):
        compile_for_chip(nets.conv(tmp_path / "n.onnx"), "SM8850", out_dir=tmp_path / "closed")


def test_something_else_in_the_artefacts_place_is_not_lost_on_failure(tmp_path, nets, monkeypatch):
    path = nets.conv(tmp_path / "n.onnx")
    first = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    renamed, rename = [], Path.rename

    def failing(self, target):
        renamed.append(self.name)
        if len(renamed) == 2:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CompileError, match="Input/output error"):
        compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    assert left_in(tmp_path / "out") == ["n_SM8850"]
    assert CompileReport.load(tmp_path / "out" / "n_SM8850" / "n_SM8850.report.json") == first


def test_weights_beside_the_model_are_compiled_too(tmp_path, nets):
    path = nets.conv(tmp_path / "n.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="n.weights", size_threshold=0)
    report = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", progress=False)
    manifest = Manifest.load(tmp_path / "out" / "n_SM8850" / "n_SM8850_ctx.onnx.manifest.json")
    assert report.partitions == 1 and set(manifest.made_from) == {"onnx", "n.weights", "options"}


def test_what_is_no_path_is_refused_in_a_sentence(compiled, tmp_path):
    for given in (torch.nn.Identity(), compiled("conv"), 3):
        words = f"takes the path of an ONNX file, found a {type(given).__name__}; give the path that export_onnx or"
        with pytest.raises(CompileError, match=words):
            compile_for_chip(given, "SM8850", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_tells_the_step(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    assert htp._step(log) == "starting"
    log.write_text("x [V: LogNodeSupport] …\nx [V: FinalizeGraphs] FinalizeGraphs started.\n")
    assert htp._step(log) == "finalising"
