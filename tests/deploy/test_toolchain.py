"""Machines without Qualcomm's libraries: one clear sentence, and everything else works."""

import platform
import subprocess
import sys

import pytest

from lumen_lab.deploy import toolchain
from lumen_lab.deploy.htp import compile_for_chip, emulate
from lumen_lab.errors import MissingDependencyError


@pytest.fixture
def linux_x86(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def test_without_the_wheel_both_doors_say_what_to_install(linux_x86, monkeypatch, tmp_path, nets):
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    for call in (
        lambda: compile_for_chip(nets.conv(tmp_path / "net.onnx"), "SM8850", out_dir=tmp_path / "out"),
        lambda: emulate(tmp_path / "net_ctx.onnx", {}),
    ):
        with pytest.raises(MissingDependencyError, match="onnxruntime-qnn, which is not installed: pip install"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64")])
def test_on_other_platforms_both_doors_say_so(monkeypatch, tmp_path, nets, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(MissingDependencyError, match=f"Linux x86-64 only, and this is {system} {machine}"):
        compile_for_chip(nets.conv(tmp_path / "net.onnx"), "SM8850", out_dir=tmp_path / "out")


def test_the_room_opens_without_loading_the_npu_libraries():
    program = (
        "import sys\n"
        "sys.modules['onnxruntime_qnn'] = sys.modules['onnxruntime'] = None\n"
        "import lumen_lab.deploy.htp, lumen_lab.chips\n"
        "assert 'torch' not in sys.modules and 'onnx' not in sys.modules\n"
        "print(lumen_lab.chips.find_chip('SM8850').htp_arch)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "81"


@pytest.mark.npu
def test_the_installed_qairt_is_named_by_its_build():
    assert toolchain.installed_qairt().startswith("v2.")
    assert toolchain.npu_versions()["onnxruntime-qnn"] != "absent"


def test_qairt_is_unknown_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert toolchain.installed_qairt.__wrapped__() == "unknown"
