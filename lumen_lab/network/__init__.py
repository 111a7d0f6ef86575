"""BiRefNet as the paper draws it, and the door that builds one with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from lumen_lab.errors import ArtifactError, CheckpointError
from lumen_lab.network.birefnet import BiRefNet
from lumen_lab.network.checkpoints import PUBLISHED_LITE, describe, load_weights, read_weights
from lumen_lab.network.config import LARGE, LITE, MICRO, PRESETS, BiRefNetConfig
from lumen_lab.network.golden import golden_state_dict
from lumen_lab.specs import Manifest

__all__ = ["LARGE", "LITE", "MICRO", "BiRefNet", "BiRefNetConfig", "load_network"]

MICRO_WEIGHTS = Path(__file__).parents[2] / "data" / "micro" / "teacher.safetensors"


def load_network(
    preset: str | BiRefNetConfig = "micro",
    weights: str | Path | Mapping[str, Tensor] | None = "published",
    *,
    revision: str | None = None,
) -> nn.Module:
    """A BiRefNet in eval mode: normalised image (N, 3, H, W) -> mask logits (N, 1, H, W), H and W multiples of 32.

    ``preset``: "micro", "lite", "large" or a ``BiRefNetConfig``. ``weights``: "published" (micro: the trained ones in
    ``data/``; lite: the hub's, at a pinned revision), a ``.safetensors`` or ``.pth`` path, a hub id (with
    ``revision``), a state dict, "golden" (deterministic stand-ins that prove graphs, not masks) or None (freshly
    initialised). Raises ``CheckpointError`` with a summary unless every tensor fits.

    >>> load_network("micro", weights=None).config.image_size
    (192, 192)
    """
    config = find_config(preset)
    if weights is None:
        return BiRefNet(config).eval()
    if isinstance(weights, str) and weights == "golden":
        model = BiRefNet(config).eval()
        model.load_state_dict(golden_state_dict(model.state_dict()))
        return model
    source = published(config) if isinstance(weights, str) and weights == "published" else weights
    found = read_weights(source, revision=revision)  # before the network is built: a missing file is known at once
    model = BiRefNet(config).eval()
    load_weights(model, found, source=describe(source))
    return model


def find_config(preset: str | BiRefNetConfig) -> BiRefNetConfig:
    """The configuration of a preset's name; ``CheckpointError`` that lists the names."""
    if isinstance(preset, BiRefNetConfig):
        return preset
    if preset not in PRESETS:
        raise CheckpointError(f"No preset '{preset}'; the presets are {', '.join(PRESETS)}, or pass a BiRefNetConfig.")
    return PRESETS[preset]


def published(config: BiRefNetConfig) -> str | Path:
    """Where the trained weights of a preset are; a file in ``data/`` is checked against its manifest."""
    if config == MICRO and MICRO_WEIGHTS.exists():
        try:
            Manifest.beside(MICRO_WEIGHTS)
        except ArtifactError as error:
            raise CheckpointError(f"The micro weights do not fit their manifest: {error}") from None
        return MICRO_WEIGHTS
    if config == LITE:
        return PUBLISHED_LITE.hub_id
    raise CheckpointError(
        f"No trained weights are known for '{config.name}' here; pass weights=path, or None for a fresh network."
    )
