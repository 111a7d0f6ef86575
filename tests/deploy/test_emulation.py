"""The emulated NPU against onnxruntime on the CPU, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from lumen_lab.deploy import emulation
from lumen_lab.deploy.emulation import emulate
from lumen_lab.errors import ArtifactError, CompileError
from lumen_lab.specs import manifest_path

pytestmark = pytest.mark.npu

# float16 has a 10-bit mantissa; sums of up to 72 products of order 1 stay within a few steps of it.
FLOAT16_STEP = 2.0**-10


def pictures(count, shape=(1, 3, 32, 32)):
    rng = np.random.default_rng(7)
    return [rng.random(shape, dtype=np.float32) for _ in range(count)]


def on_cpu(path, x):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def onnx_of(report):
    return Path(report.context_path).parents[2] / report.model


@pytest.mark.parametrize(("net", "chip"), [("conv", "SM8850"), ("conv", "SM8450"), ("deform", "SM8850")])
def test_a_float_network_agrees_with_the_cpu_to_float16(compiled, net, chip):
    report = compiled(net, chip)
    (x,) = pictures(1)
    actual = emulate(report.context_path, {"x": x}, progress=False)
    reference = on_cpu(onnx_of(report), x)
    assert set(actual) == {"y"} and actual["y"].shape == reference.shape and actual["y"].dtype == np.float32
    step = FLOAT16_STEP * np.abs(reference).max()
    difference = np.abs(actual["y"] - reference).max()
    assert difference < 8 * step
    assert difference > 0  # the float32 reference itself would mean that the CPU ran it


def test_an_integer_network_agrees_with_the_cpu_to_one_step(compiled):
    report = compiled("quantised")
    (x,) = pictures(1)
    actual = emulate(report.context_path, x, progress=False)["g_f"]
    steps = np.abs(actual - on_cpu(onnx_of(report), x)) * 16
    assert steps.max() <= 1.01 and np.mean(steps < 0.5) > 0.9


def test_samples_come_back_in_their_order_and_the_same_every_time(compiled):
    context = compiled("conv").context_path
    samples = pictures(3)
    together = emulate(context, samples, progress=False)
    assert isinstance(together, list) and len(together) == 3
    for sample, outputs in zip(samples, together, strict=True):
        np.testing.assert_array_equal(outputs["y"], emulate(context, {"x": sample}, progress=False)["y"])
    assert not np.array_equal(together[0]["y"], together[1]["y"])
    assert emulate(context, [], progress=False) == []


def test_float_arrays_are_converted_and_others_refused(compiled):
    context = compiled("conv").context_path
    (x,) = pictures(1)
    np.testing.assert_array_equal(
        emulate(context, x.astype(np.float64), progress=False)["y"], emulate(context, x, progress=False)["y"]
    )
    with pytest.raises(ArtifactError, match=r"takes float32 of shape \(1, 3, 32, 32\), and uint8"):
        emulate(context, (x * 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"image": np.zeros((1, 3, 32, 32), np.float32)}, "has the inputs x, and image were given"),
        ({}, "none were given"),
        (np.zeros((1, 3, 16, 16), np.float32), r"shape \(1, 3, 16, 16\) was given"),
        (np.zeros((3, 32, 32), np.float32), r"shape \(3, 32, 32\) was given"),
    ],
)
def test_inputs_that_do_not_fit_the_contract_are_refused(compiled, inputs, words):
    with pytest.raises(ArtifactError, match=words):
        emulate(compiled("conv").context_path, inputs)


@pytest.mark.parametrize("ending", ["_ctx.onnx", "_ctx_qnn.bin"])
def test_a_changed_byte_is_refused(own_copy, ending):
    context = own_copy("conv")
    file = context.with_name(f"conv_SM8850{ending}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="does not fit its manifest: SHA-256"):
        emulate(context, pictures(1)[0])


def test_another_version_of_qairt_is_refused(own_copy):
    context = own_copy("conv")
    manifest = manifest_path(context)
    values = json.loads(manifest.read_text())
    values["versions"]["qairt"] = "v2.40.0.250101000000"
    manifest.write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"built by QAIRT v2\.40\.0\.250101000000, and v2\.\S+ is installed"):
        emulate(context, pictures(1)[0])


def test_a_missing_file_or_manifest_is_refused(own_copy):
    context = own_copy("conv")
    manifest_path(context).unlink()
    with pytest.raises(ArtifactError, match="no manifest"):
        emulate(context, pictures(1)[0])
    with pytest.raises(ArtifactError, match="no artefact .*none_ctx.onnx"):
        emulate(context.with_name("none_ctx.onnx"), pictures(1)[0])


def test_a_binary_for_another_chip_is_refused_by_the_emulation_itself(own_copy):
    context = own_copy("conv")
    manifest = manifest_path(context)
    manifest.write_text(manifest.read_text().replace('"SM8850"', '"SM8650"'))
    with pytest.raises(CompileError, match="does not fit this chip"):
        emulate(context, pictures(1)[0], progress=False)


def test_the_time_limit_ends_the_emulation(compiled):
    with pytest.raises(CompileError, match=r"after 0 samples: it was stopped at the time limit of 0\.1 s"):
        emulate(compiled("conv").context_path, pictures(1)[0], time_limit_s=0.1, progress=False)


def test_a_crash_of_the_emulation_is_an_error(compiled, monkeypatch, tmp_path):
    crashing = tmp_path / "crashing.py"
    crashing.write_text("import os; os.abort()")
    monkeypatch.setattr(emulation, "CHILD", crashing)
    with pytest.raises(CompileError, match="crashed with SIGABRT"):
        emulate(compiled("conv").context_path, pictures(1)[0], progress=False)


def test_progress_counts_finished_samples(compiled, capsys):
    emulate(compiled("conv").context_path, pictures(2))
    assert "Emulating the NPU" in capsys.readouterr().err
