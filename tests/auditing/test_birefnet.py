"""BiRefNet audited: published totals, what blocks, and that reading LITE at 1024×1024 runs nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lumen_lab.auditing import Rule, audit, compare_with_actual
from lumen_lab.network.birefnet import BiRefNet
from lumen_lab.network.config import LITE, MICRO
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites import EXACT_PLAN, rewrite

MICRO_IMAGE = torch.empty(1, 3, *MICRO.image_size, device="meta")


@pytest.fixture(scope="module")
def lite():
    with torch.device("meta"):
        model = BiRefNet(LITE).eval()
    return audit(model, (torch.empty(1, 3, 1024, 1024, device="meta"),))


@pytest.fixture(scope="module")
def micro():
    """Random offsets: with those of an untrained network the exporter would merge equal convs."""
    torch.manual_seed(0)
    model = BiRefNet(MICRO).eval()
    for module in model.modules():
        if isinstance(module, DeformableConv2d):
            nn.init.normal_(module.offset_conv.weight, std=0.01)
            nn.init.normal_(module.modulator_conv.weight, std=0.01)
    return model


def test_total_macs_of_lite(lite):
    assert lite.macs / 1e9 == pytest.approx(321.0, rel=0.02)


@pytest.mark.parametrize(
    ("site", "depth", "gmac"),
    [
        ("bb", 1, 98.4),
        ("bb (call 2)", 1, 25.5),
        ("decoder.decoder_block1", 2, 113.7),
        ("decoder.decoder_block2", 2, 31.6),
        ("decoder.ipt_blk1", 2, 16.3),
        ("decoder.decoder_block3", 2, 9.5),
    ],
)
def test_macs_of_each_part_of_lite(lite, site, depth, gmac):
    assert lite.macs_by_site(depth=depth, by_call=True)[site] / 1e9 == pytest.approx(gmac, rel=0.02)


def test_sites_add_up(lite):
    assert sum(lite.macs_by_site(depth=9).values()) == sum(lite.macs_by_site(depth=1).values()) == lite.macs


def test_parameters_of_lite(lite):
    assert lite.parameter_bytes == pytest.approx(4 * 44_313_720, rel=0.01)


def test_only_the_deformable_convs_block(lite):
    assert [row.kind for row in lite.blocking()] == ["deform_conv2d"] * 20
    assert all(row.site.endswith("atrous_conv") for row in lite.blocking())
    assert lite.partitions == 6


def test_nothing_is_predicted_for_want_of_a_measurement(lite):
    assert not [row for row in lite.operations if row.source == "none"]


def test_without_the_rule_for_deformable_convs_nothing_blocks(micro):
    optimist = Rule("spoiled", lambda row, around: row.kind == "deform_conv2d", "NPU", "spoiled", "this test")
    assert audit(micro, (MICRO_IMAGE,)).partitions == 6
    assert audit(micro, (MICRO_IMAGE,), rules=(optimist,)).partitions == 1


def test_a_batch_of_two_blocks_at_rank_6(micro):
    blocking = audit(micro, (torch.empty(2, 3, *MICRO.image_size, device="meta"),)).blocking()
    assert {row.kind for row in blocking} == {"deform_conv2d", "view", "permute", "reshape"}
    assert {row.rank for row in blocking if row.kind == "permute"} == {6}


def test_the_exact_plan_leaves_nothing_on_the_cpu(micro):
    model = rewrite(micro, EXACT_PLAN).model
    report = audit(model, (MICRO_IMAGE,))
    assert report.blocking() == ()
    assert report.partitions == 1
    assert report.cuts == ()


def test_reading_lite_at_1024_is_quick_and_small():
    """Seconds of processor time, which another process on the machine does not lengthen."""
    program = """
import json, resource, sys, time, torch
from lumen_lab import audit
from lumen_lab.network.birefnet import BiRefNet
from lumen_lab.network.config import LITE
model = BiRefNet(LITE).eval()
start = time.process_time()
audit(model, (torch.empty(1, 3, 1024, 1024),))
seconds = time.process_time() - start
unit = 1024 if sys.platform == "darwin" else 1
print(json.dumps({"cpu_seconds": seconds, "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    measured = json.loads(run.stdout.splitlines()[-1])
    assert measured["cpu_seconds"] < 60
    assert measured["kib"] < 4 * 2**20


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True], ids=["published", "rewritten"])
def test_the_compiler_does_with_micro_what_was_predicted(micro, rewritten, tmp_path):
    from lumen_lab.deploy.htp import compile_for_chip
    from lumen_lab.deploy.onnx_export import export_onnx

    model = rewrite(micro, EXACT_PLAN).model if rewritten else micro
    path = export_onnx(model, tmp_path / "micro.onnx")
    actual = compile_for_chip(path, "SM8850", out_dir=tmp_path / "out", optimization_mode=1, progress=False)
    report = audit(model, (MICRO_IMAGE,))
    comparison = compare_with_actual(report, actual, onnx_path=path)
    assert comparison.agrees, comparison.disagreements()
    assert comparison.unclaimed == ()
    assert report.partitions == actual.partitions == (1 if rewritten else 6)
