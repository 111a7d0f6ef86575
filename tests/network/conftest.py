"""The published network's recorded outputs, and BiRefNet-lite with the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from lumen_lab.network import load_network

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def recorded():
    """``recorded(H, W)``: name -> array that the published network computed on ``golden_image(H, W)``."""

    def read(height, width):
        with np.load(GOLDEN / f"golden_{height}x{width}_salt0.npz") as file:
            return dict(file)

    return read


@pytest.fixture(scope="session")
def published_layout():
    """Name -> (shape, dtype) of the published lite state dict."""
    entries = json.loads((GOLDEN / "lite_layout.json").read_text())
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in entries.items()}


@pytest.fixture(scope="session")
def lite():
    """BiRefNet-lite with golden weights; a test that changes it works on a copy of the part."""
    return load_network("lite", "golden")
