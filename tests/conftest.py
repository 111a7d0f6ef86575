"""What every test shares: the cores divided between workers, reasons for skipping, a browser, a small network."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)

# Set before torch or numpy is imported, and inherited by notebook kernels and compiler processes: two workers that
# take every core each are slower than two that share.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = str(min(THREADS, int(os.environ.get(variable, THREADS))))
os.environ.setdefault("MPLBACKEND", "agg")
# No test may fetch anything: a hub id must fail at once, as it does on a closed machine.
os.environ["HF_HUB_OFFLINE"] = "1"

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)


def pytest_collection_modifyitems(items):
    """Skip the `npu` tests, with the reason, where onnxruntime-qnn is not installed."""
    if importlib.util.find_spec("onnxruntime_qnn") is None:
        skip = pytest.mark.skip(reason="onnxruntime-qnn is not installed (Linux x86-64 only): no NPU compiler here")
        for item in items:
            if item.get_closest_marker("npu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium that reaches nothing but this machine; skips, with the reason, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser tests")
    with playwright.sync_playwright() as driver:
        bundled = driver.chromium.executable_path
        installed = (shutil.which(name) for name in ("chromium", "google-chrome", "chromium-browser"))
        executable = bundled if Path(bundled).exists() else next(filter(None, installed), None)
        if executable is None:
            pytest.skip("no Chromium here (apt-get install chromium, or playwright install chromium)")
        chromium = driver.chromium.launch(executable_path=executable, headless=True, args=list(CHROMIUM_FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def tiny_config():
    """Every part of the network (shifted windows, padding, gates, deformable convs) in 0.8 million parameters."""
    from lumen_lab.network.config import BiRefNetConfig

    widths = {"decoder_width": 8, "aspp_width": 8, "tile_width": 8}
    return BiRefNetConfig("tiny", (64, 96), 8, (2, 2, 2, 2), (1, 2, 4, 8), 7, **widths)


@pytest.fixture(scope="session")
def tiny(tiny_config):
    """A network of ``tiny_config`` with golden weights, in eval mode; tests must not change it."""
    from lumen_lab.network import load_network

    return load_network(tiny_config, "golden")


@pytest.fixture(scope="session")
def tiny_student(tiny):
    """The tiny network under ``LUMEN_PLAN``, in eval mode; tests must not change it."""
    import torch

    from lumen_lab.rewrites import LUMEN_PLAN, rewrite

    return rewrite(tiny, LUMEN_PLAN, example_inputs=(torch.zeros(1, 3, *tiny.config.image_size),)).model


@pytest.fixture(scope="session")
def tiny_captured(tiny_student):
    """Its graph of operations, without quantisers; copy before changing it."""
    import torch

    from lumen_lab.quantization.capture import capture

    return capture(tiny_student, torch.zeros(1, 3, *tiny_student.config.image_size))
