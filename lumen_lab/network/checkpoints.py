"""Weights in and out: safetensors or weights-only ``.pth``, from a file or a hub; a full match or a clear refusal."""

from __future__ import annotations

import hashlib
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import safetensors.torch
import torch
from torch import Tensor, nn

from lumen_lab.errors import CheckpointError
from lumen_lab.network.config import PRESETS, BiRefNetConfig
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path, replacing, tool_versions

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
FILE_ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


@dataclass(frozen=True)
class HubPin:
    """One published file: the revision that is fetched, and the size and hash that it must have."""

    hub_id: str
    revision: str
    size_bytes: int
    sha256: str
    filename: str = "model.safetensors"


PUBLISHED_LITE = HubPin(
    hub_id="ZhengPeng7/BiRefNet_lite",
    revision="7838f1c3472f827cd8ce13ab5ccc2ce48077360f",
    size_bytes=177_634_392,
    sha256="4417d89795250e698c3cb0ae8df15743810065f646f48a694fdfa7ca052d0815",
)
PINS = {PUBLISHED_LITE.hub_id: PUBLISHED_LITE}


def read_weights(source: str | Path | Mapping[str, Tensor], *, revision: str | None = None) -> dict[str, Tensor]:
    """The state dict of a file, hub id or mapping, with ``module.`` and ``_orig_mod.`` prefixes taken off.

    Nothing in the file is executed. Raises ``CheckpointError``. float16 and bfloat16 come back as float32.
    """
    if isinstance(source, Mapping):
        raw = source
    elif is_hub_id(source):
        raw = read_file(fetch(source, revision=revision))
    else:
        raw = read_file(Path(source))
    tensors = {WRAPPERS.sub("", name): value for name, value in raw.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"Expected weights in {describe(source)}, found no tensors; give a state dict.")
    half = (torch.float16, torch.bfloat16)
    return {name: value.float() if value.dtype in half else value for name, value in tensors.items()}


def is_hub_id(source: str | Path) -> bool:
    """True for "owner/name"; a path that exists, or a name with the ending of a weights file, is a file."""
    named_as_file = str(source).endswith(FILE_ENDINGS)
    return isinstance(source, str) and bool(HUB_ID.match(source)) and not named_as_file and not Path(source).exists()


def read_file(path: Path) -> Mapping[str, Tensor]:
    """Tensors of a ``.safetensors`` or PyTorch file; ``CheckpointError`` if it is neither."""
    if not path.is_file():
        raise CheckpointError(f"No weights at {path}; give a .safetensors or .pth file, or a hub id like 'owner/name'.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in a dozen ways
        raise CheckpointError(
            f"{path} cannot be read as weights ({reason(error)}); it may be cut short, hold more than tensors, or be "
            "another kind of file."
        ) from None
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"Expected a state dict in {path}, found {type(found).__name__}.")
    return found


def reason(error: Exception) -> str:
    """What a reader objected to, in at most 160 characters and without its advice to run the file's code."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    lines = text.partition(". Please")[0].strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def fetch(hub_id: str, *, revision: str | None = None) -> Path:
    """Download (or find in the local cache) the weights of a hub repository at a pinned revision.

    A repository without a pin needs ``revision``. Size and hash of a pinned file are checked. Without a network the
    error says so and names the offline choices.
    """
    pin = PINS.get(hub_id)
    if revision is None and pin is None:
        raise CheckpointError(
            f"No revision is pinned for '{hub_id}'; pass revision='<commit>', so that the weights cannot change."
        )
    filename = pin.filename if pin else "model.safetensors"
    path = _download(hub_id, filename, revision or pin.revision)
    if pin and (revision or pin.revision) == pin.revision:
        check_pin(path, pin)
    return path


def _download(hub_id: str, filename: str, revision: str) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        cached = try_to_load_from_cache(hub_id, filename, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT):
            raise ConnectionError(f"{constants.ENDPOINT} cannot be reached")
        return Path(hf_hub_download(hub_id, filename, revision=revision, etag_timeout=5))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"Cannot fetch {filename} of '{hub_id}': {reason(error)}. Offline, use load_network('micro'), a local file "
            "(weights='path/to/model.safetensors'), or weights='golden' to prove graphs without trained weights."
        ) from None


def reachable(url: str, *, timeout_s: float = 3) -> bool:
    """Whether the host of ``url``, or the proxy in front of it, takes a connection.

    The hub's client asks six times over half a minute before it gives up; this asks once.
    """
    target = urlsplit(url)
    if not proxy_bypass(target.hostname):
        target = urlsplit(getproxies().get(target.scheme, url))
    port = target.port or {"http": 80}.get(target.scheme, 443)
    try:
        socket.create_connection((target.hostname, port), timeout_s).close()
    except OSError:
        return False
    return True


def check_pin(path: Path, pin: HubPin) -> None:
    """Refuse a file that is not the pinned one."""
    size = path.stat().st_size
    if size != pin.size_bytes:
        raise CheckpointError(f"{path} should have {pin.size_bytes:,} bytes, found {size:,}; remove it and try again.")
    found = file_sha256(path)
    if found != pin.sha256:
        raise CheckpointError(f"{path} should have SHA-256 {pin.sha256[:12]}…, found {found[:12]}…; do not use it.")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Load a full match into ``model``; else ``CheckpointError`` with a summary and the likely cause."""
    expected = model.state_dict()
    missing = [name for name in expected if name not in weights]
    unexpected = [name for name in weights if name not in expected]
    misshapen = [n for n, value in expected.items() if n in weights and weights[n].shape != value.shape]
    if not (missing or unexpected or misshapen):
        refuse_not_finite(weights, source)
        model.load_state_dict(weights)
        return
    parts = [f"{source} does not fit {model_name(model)}"]
    for word, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen)):
        if names:
            parts.append(f"{len(names)} {word} ({by_prefix(names)})")
    raise CheckpointError("; ".join(parts) + f". {likely_cause(model, weights, missing, unexpected)}")


def refuse_not_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raise ``CheckpointError`` if any value is NaN or infinite: a deformable conv would look outside its memory."""
    bad = [name for name, value in weights.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(weights)} tensors of {source} hold NaN or infinity, the first is {bad[0]}; "
            "the training that made them diverged: take an earlier checkpoint."
        )


def by_prefix(names: list[str]) -> str:
    """Counts under the first two parts of the names, most first: "bb.layers: 120, decoder.gdt_convs_4: 7"."""
    counts = Counter(".".join(name.split(".")[:2]) for name in names).most_common()
    listed = ", ".join(f"{prefix}: {count}" for prefix, count in counts[:4])
    return listed + (f", and {len(counts) - 4} more prefixes" if len(counts) > 4 else "")


def likely_cause(model: nn.Module, weights: Mapping[str, Tensor], missing: list[str], unexpected: list[str]) -> str:
    """One sentence: which network these weights seem to be of, or what is odd about their names."""
    guess = guess_config(weights)
    name = model_name(model)
    if guess is not None and guess.name != name:
        return f"These look like '{guess.name}' weights (embed {guess.embed_dim}): use load_network('{guess.name}', …)."
    if len(missing) == len(model.state_dict()):
        example = next(iter(weights))[:60]
        return f"None of the names is known, e.g. '{example}': another network, or a prefix not known here."
    if any(".bn" in entry for entry in missing) and not unexpected:
        return "Batch norms are missing: the weights may come from a network with batch norm folded or switched off."
    return (
        f"The network is '{name}' but not of this layout; it may be another release (published lite has 586 entries)."
    )


def guess_config(weights: Mapping[str, Tensor]) -> BiRefNetConfig | None:
    """The preset whose encoder has the width and depth of ``weights``, if any."""
    patch = weights.get("bb.patch_embed.proj.weight")
    if patch is None:
        return None
    blocks = {name.split(".")[4] for name in weights if name.startswith("bb.layers.2.blocks.")}
    fits = [c for c in PRESETS.values() if c.embed_dim == patch.shape[0] and c.depths[2] == len(blocks)]
    return fits[0] if fits else None


def model_name(model: nn.Module) -> str:
    """The preset's name, or the class's."""
    return getattr(getattr(model, "config", None), "name", type(model).__name__)


def describe(source: object) -> str:
    return "the given state dict" if isinstance(source, Mapping) else str(source)


def save_weights(model: nn.Module, path: str | Path, *, made_from: Mapping[str, str], half: bool = False) -> Path:
    """Write ``model``'s state dict as safetensors with a manifest beside it.

    ``made_from`` says what made it (command, seed, data); ``half`` stores float16, half the size, where every number
    fits. Both files are written whole.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"Weights are saved as .safetensors, asked for '{path.name}'; change the ending.")
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if half:
        tensors = {name: halved(value) for name, value in tensors.items()}
    with replacing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary)
    weights_manifest(model, path, made_from, "float16" if half else "float32").save(manifest_path(path))
    return path


def halved(value: Tensor) -> Tensor:
    """float32 as float16 where every number stays finite: the variances of a norm may pass 65,504."""
    half = value.half() if value.dtype == torch.float32 else value
    return half if half.isfinite().all() or not value.isfinite().all() else value


def weights_sha256(model: nn.Module) -> str:
    """A hash of every name and value of the state dict: equal for equal networks, whatever file they came from."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def weights_manifest(model: nn.Module, path: Path, made_from: Mapping[str, str], dtype: str) -> Manifest:
    """The manifest of a weights file."""
    height, width = model.config.image_size if hasattr(model, "config") else (0, 0)
    return Manifest(
        kind="weights",
        made_from={"network": model_name(model), **made_from},
        versions=tool_versions("torch", "torchvision", "timm"),
        inputs=(TensorSpec("image", (1, 3, height, width), "NCHW", "float32"),),
        outputs=(TensorSpec("logits", (1, 1, height, width), "NCHW", "float32"),),
        files={path.name: file_sha256(path)},
        notes=f"stored as {dtype}",
    )
