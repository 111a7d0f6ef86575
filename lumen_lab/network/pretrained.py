"""An encoder that starts from ImageNet: the weights of a timm Swin, put into the layout of this network's encoder.

The two layouts differ in three places. timm merges patches at the start of stages 1..3, this encoder (like Swin's own
files) at the end of stages 0..2; the merging itself, the order of its four neighbours included, is the same. timm does
not store ``relative_position_index``, which follows from the window. And timm has one norm and a classifier behind the
last stage, where this encoder has a norm for each of its four maps: ``norm0``..``norm3`` have no counterpart.

With equal weights the maps before those norms are equal wherever they are multiples of the window. timm differs on
purpose at two others: a map no larger than one window is not shifted (unless ``always_partition``), and a shifted map
is rolled before it is padded; this encoder shifts every second block, and pads first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from lumen_lab.errors import CheckpointError
from lumen_lab.network.checkpoints import FILE_ENDINGS, by_prefix, describe, read_weights
from lumen_lab.network.config import LARGE, LITE, BiRefNetConfig
from lumen_lab.network.swin import SwinTransformer
from lumen_lab.specs import Record

SWIN_T = "swin_tiny_patch4_window7_224.ms_in1k"
SWIN_L = "swin_large_patch4_window12_384.ms_in22k"
DERIVED = ("relative_position_index", "attn_mask")  # buffers that follow from the window and the size of the map
CLASSIFIER = re.compile(r"^(?:norm|head)\.")
OWN_NORM = re.compile(r"^norm[0-3]\.")
MERGING = re.compile(r"^layers\.(\d+)\.downsample\.")


@dataclass(frozen=True)
class EncoderStart(Record):
    """Where an encoder's weights came from: its names that were ``loaded`` and those ``kept`` as they were (the norms
    of the four maps), and the source's names that were ``dropped`` (its classifier and buffers)."""

    source: str
    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]

    def rows(self) -> list[dict[str, object]]:
        """What became of the names, how many, and under which prefixes."""
        fates = {"loaded": self.loaded, "kept": self.kept, "dropped": self.dropped}
        return [{"names": fate, "count": len(names), "by prefix": by_prefix(names)} for fate, names in fates.items()]


def load_pretrained_encoder(
    model: nn.Module, source: str | Path | Mapping[str, Tensor] = SWIN_T, *, revision: str = "main"
) -> EncoderStart:
    """Fill ``model.bb`` in place with the weights of a timm Swin; ``norm0``..``norm3`` keep the values they have.

    ``source``: the name of a pretrained timm Swin v1 (its weights come from the hub at ``revision``, or from the local
    cache), a ``.safetensors`` or ``.pth`` file in timm's layout or in that of Swin's own files, or a state dict. The
    image is normalised with ImageNet's mean and deviation, as everywhere here.

    Raises ``CheckpointError``, and leaves the model as it was, if the sizes differ, a name is missing or left over, or
    the weights cannot be fetched.
    """
    encoder = getattr(model, "bb", None)
    if not isinstance(encoder, SwinTransformer):
        raise CheckpointError(f"{type(model).__name__} has no Swin encoder at .bb; give a network of load_network().")
    named = describe(source)
    found = read_source(source, encoder, revision)
    weights = to_encoder_layout(found)
    check_fit(encoder, weights, named)
    encoder.load_state_dict(weights, strict=False)  # what stays as it was is known: check_fit allows nothing else
    kept = tuple(name for name in encoder.state_dict() if OWN_NORM.match(name))
    return EncoderStart(named, tuple(weights), kept, tuple(name for name in found if is_dropped(name)))


def read_source(source: str | Path | Mapping[str, Tensor], encoder: nn.Module, revision: str) -> dict[str, Tensor]:
    """The tensors of a file, a state dict or a timm name, under their own names."""
    if isinstance(source, Mapping):
        return read_weights(source)
    if isinstance(source, Path) or source.endswith(FILE_ENDINGS) or Path(source).is_file():
        return read_weights(Path(source))
    return fetch_timm(source, encoder, revision)


def fetch_timm(name: str, encoder: nn.Module, revision: str) -> dict[str, Tensor]:
    """Weights of a pretrained timm model; one that cannot fit is refused before anything is fetched."""
    if not name.startswith("swin_") or not timm.is_model(name):
        raise CheckpointError(
            f"'{name}' is neither a weights file nor a Swin v1 of timm; give a file, or a name such as '{SWIN_T}'."
        )
    try:
        hub_id = timm.models.get_pretrained_cfg(name).hf_hub_id
    except RuntimeError as error:  # an unknown tag
        tags = ", ".join(timm.list_models(name.partition(".")[0] + ".*", pretrained=True))
        raise CheckpointError(f"timm has no such weights ({error}); it has {tags}.") from None
    with torch.device("meta"):
        layout = timm.create_model(name.partition(".")[0]).state_dict()
    check_fit(encoder, to_encoder_layout(layout), name)
    try:
        return read_weights(hub_id, revision=revision)
    except CheckpointError as error:
        raise CheckpointError(
            f"{str(error).partition(' Offline,')[0]} Offline, pass source='path/to/model.safetensors' (a copy of that "
            "file, or Swin's own .pth), or train the encoder from load_network(…, weights=None) without ImageNet."
        ) from None


def to_encoder_layout(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm (or Swin's own) state dict under this encoder's names, without classifier and derived buffers."""
    named = {re.sub(r"^layers_(\d+)\.", r"layers.\1.", name): value for name, value in found.items()}  # features_only
    merges_first = not any(name.startswith("layers.0.downsample.") for name in named)
    return {
        earlier_merging(name) if merges_first else name: value for name, value in named.items() if not is_dropped(name)
    }


def earlier_merging(name: str) -> str:
    """``layers.2.downsample.norm.bias`` -> ``layers.1.downsample.norm.bias``; other names as they are."""
    return MERGING.sub(lambda match: f"layers.{int(match[1]) - 1}.downsample.", name)


def is_dropped(name: str) -> bool:
    """Whether a source's name has no place in an encoder."""
    return name.endswith(DERIVED) or bool(CLASSIFIER.match(name))


def check_fit(encoder: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """``CheckpointError`` with counts by prefix and both sizes, unless every tensor has its place."""
    own = encoder.state_dict()
    expected = {name: value for name, value in own.items() if not (OWN_NORM.match(name) or name.endswith(DERIVED))}
    problems = {
        "missing": [name for name in expected if name not in weights],
        "unexpected": [name for name in weights if name not in expected],
        "of another shape": [n for n, v in expected.items() if n in weights and weights[n].shape != v.shape],
    }
    counted = [f"{len(names)} {word} ({by_prefix(names)})" for word, names in problems.items() if names]
    if counted:
        cause = misfit(expected, weights)
        raise CheckpointError("; ".join([f"{source} does not fit the encoder", *counted]) + f". {cause}")


def misfit(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Why weights do not fit, and what would do."""
    if any(name.startswith("bb.") for name in weights):
        return "These are weights of a whole BiRefNet: give them to load_network(…, weights=…)."
    wanted, found = swin_sizes(expected), swin_sizes(weights)
    if found is None:
        return f"They are not of a Swin v1, e.g. '{next(iter(weights), 'no names')[:60]}'; take '{SWIN_T}'."
    if found == wanted:
        return "Its sizes are the encoder's: the file is incomplete, or not of this layout."
    named = {swin_sizes_of(LITE): SWIN_T, swin_sizes_of(LARGE): SWIN_L}.get(wanted)
    cure = f"take '{named}'" if named else f"no source is known; only {LITE.name} and {LARGE.name} have one"
    return f"It has {found} and the encoder {wanted}: {cure}."


def swin_sizes(weights: Mapping[str, Tensor]) -> str | None:
    """Width, blocks a stage, heads and windows of a Swin state dict, in words; None if it is not one."""
    patch = weights.get("patch_embed.proj.weight")
    tables = [weights.get(f"layers.{stage}.blocks.0.attn.relative_position_bias_table") for stage in range(4)]
    if patch is None or any(table is None for table in tables):
        return None
    blocks = {tuple(name.split(".")[1:4:2]) for name in weights if re.match(r"layers\.\d+\.blocks\.", name)}
    depths = tuple(sum(stage == str(index) for stage, _ in blocks) for index in range(4))
    windows = {(round(table.shape[0] ** 0.5) + 1) // 2 for table in tables}
    return sizes_in_words(patch.shape[0], depths, tuple(table.shape[1] for table in tables), windows)


def swin_sizes_of(config: BiRefNetConfig) -> str:
    """The same words for a configuration."""
    return sizes_in_words(config.embed_dim, config.depths, config.heads, {config.window})


def sizes_in_words(embed: int, depths: tuple[int, ...], heads: tuple[int, ...], windows: set[int]) -> str:
    depth, head, window = ("/".join(map(str, values)) for values in (depths, heads, sorted(windows)))
    return f"embed {embed}, depths {depth}, heads {head}, window {window}"
