"""A quantised graph of the small student, and pictures for it."""

import copy

import pytest
import torch

from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers

SIZE = (64, 96)


@pytest.fixture
def tiny_graph(tiny_captured):
    """A fresh ``NPUGraph``, encodings not yet set."""
    return NPUGraph(put_quantisers(copy.deepcopy(tiny_captured)), SIZE)


@pytest.fixture
def noise():
    """Pictures of noise (2, 3, H, W), the same every time."""
    return torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))
