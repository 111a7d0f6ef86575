"""Qualcomm's libraries as installed: whether they are here, and which version they are."""

from __future__ import annotations

import importlib.util
import mmap
import platform
import re
import sys
from functools import cache
from pathlib import Path

from lumen_lab.errors import MissingDependencyError
from lumen_lab.specs import tool_versions

DISTRIBUTIONS = ("onnx", "onnxruntime", "onnxruntime-qnn", "torch")


def require_npu_toolchain() -> None:
    """``MissingDependencyError``, in one sentence, where the HTP compiler and emulation cannot run."""
    here = f"{sys.platform} {platform.machine()}"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise MissingDependencyError(
            f"The NPU compiler and emulation run on Linux x86-64 only, and this is {here}; the rest of lumen_lab works."
        )
    missing = [name for name in ("onnxruntime", "onnxruntime_qnn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"The NPU compiler and emulation need the package {missing[-1].replace('_', '-')}, which is not installed: "
            "pip install 'onnxruntime-qnn>=2.7' (Linux x86-64); the rest of lumen_lab works without it."
        )


def npu_versions() -> dict[str, str]:
    """Versions of what takes part in a compile, the build of Qualcomm's QAIRT included."""
    return {**tool_versions(*DISTRIBUTIONS), "qairt": installed_qairt()}


@cache
def installed_qairt() -> str:
    """QAIRT build id of the installed HTP library ("v2.51.0.…"), or "unknown"."""
    spec = importlib.util.find_spec("onnxruntime_qnn")
    library = Path(spec.submodule_search_locations[0]) / "libQnnHtp.so" if spec else Path()
    if not library.is_file():
        return "unknown"
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.search(rb"v\d+\.\d+\.\d+\.\d{9,}", content)
        return found[0].decode() if found else "unknown"
