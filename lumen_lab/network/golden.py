"""Deterministic weights from a tensor's name and shape alone: they prove graphs, never masks.

Two implementations with the same state-dict layout are filled alike without shipping their weights, which is how this
network was compared with the published one (``tests/network/golden``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def golden_state_dict(layout: Mapping[str, Tensor], *, salt: int = 0) -> dict[str, Tensor]:
    """Weights for every entry of ``layout`` (a state dict); index buffers and counters are kept as they are."""
    return {
        name: value.clone()
        if not value.is_floating_point()
        else torch.from_numpy(golden_tensor(name, value.shape, salt))
        for name, value in layout.items()
    }


def golden_tensor(name: str, shape: tuple[int, ...], salt: int) -> np.ndarray:
    """float32 values that depend on (salt, name, shape): fan-in scaled kernels, norms near one, small biases."""
    draw = np.random.default_rng([salt, zlib.crc32(name.encode())])
    leaf = name.rpartition(".")[2]
    if leaf == "running_var":
        values = draw.uniform(0.5, 1.5, shape)
    elif leaf == "relative_position_bias_table":
        values = 0.5 * draw.standard_normal(shape)
    elif leaf in ("bias", "running_mean"):
        values = 0.1 * draw.standard_normal(shape)
    elif len(shape) == 1:
        values = 1 + 0.1 * draw.standard_normal(shape)
    else:
        gain = 1.5 if "offset_conv" in name else 1.0
        values = gain * draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return values.astype(np.float32)


def golden_image(height: int, width: int, *, salt: int = 0) -> np.ndarray:
    """float32 (1, 3, H, W) in the range of a normalised photograph: waves, noise and a bright ellipse."""
    draw = np.random.default_rng([salt, height, width])
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    waves = [np.sin(3 * x + k) * np.cos(2 * y - k) + 0.3 * draw.standard_normal((height, width)) for k in range(3)]
    ellipse = (x**2 + (1.3 * y) ** 2 < 0.4).astype(np.float64)
    return (np.stack(waves) + 1.5 * ellipse)[None].astype(np.float32)
