"""The decoder's gates: one-channel sigmoid maps that multiply its features, and may die without a word.

A gate near 0 cuts its branch off, one near 1 no longer gates; a mask loss sees neither, since the rest of the decoder
makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lumen_lab.errors import LumenError
from lumen_lab.taps import tap


@dataclass(frozen=True)
class Gate:
    """Where a gate is: the module at ``path`` returns its logits (N, 1, h, w), that at ``branch`` the features (N, C,
    h, w) it multiplies, and that at ``joins`` (None: nothing) the features (N, C, H, W) to which they are then added,
    resized. ``own`` are the modules that only serve this gate and its branch."""

    path: str
    branch: str
    joins: str | None = None
    own: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Every module whose output tells of the gate."""
        return tuple(path for path in (self.path, self.branch, self.joins) if path)


def birefnet_gate(level: int) -> Gate:
    """The gate of one decoder block of a BiRefNet, 4 (deepest) to 2."""
    path, branch = f"decoder.gdt_convs_attn_{level}", f"decoder.decoder_block{level}"
    return Gate(path, branch, f"decoder.lateral_block{level}", (path, f"decoder.gdt_convs_{level}", branch))


GATES = {"deep": birefnet_gate(4), "middle": birefnet_gate(3), "shallow": birefnet_gate(2)}
ALIVE = (0.1, 0.9)
"""A gate is alive while its mean over pictures and pixels is within these."""
KEPT_WITHIN = (0.2, 0.8)
"""Where ``gate_loss`` keeps the mean of a batch: well inside, since pictures differ from batches."""


@contextmanager
def gate_maps(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While the block runs: gate → its map (N, 1, h, w) of the last forward pass, in float32 and with its gradient."""
    maps: dict[str, Tensor] = {}
    handles = []
    try:
        for name, place in GATES.items():
            gate = network.get_submodule(place.path)
            handles.append(gate.register_forward_hook(_recorder(name, maps)))
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def _recorder(name: str, maps: dict[str, Tensor]):
    def record(module: nn.Module, inputs: tuple, logits: Tensor) -> None:
        maps[name] = torch.sigmoid(logits.float())

    return record


def gate_loss(maps: Mapping[str, Tensor]) -> Tensor:
    """How far the gates' means over a batch lie outside ``KEPT_WITHIN``: Σ over gates of the squared distance."""
    low, high = KEPT_WITHIN
    means = torch.stack([gate.mean() for gate in maps.values()])
    return (torch.relu(low - means).square() + torch.relu(means - high).square()).sum()


def gate_rows(network: nn.Module, images: Iterable[Tensor]) -> list[dict[str, object]]:
    """For each gate of a BiRefNet, over normalised ``images`` (each 3×H×W): its mean, the lowest and highest mean of a
    picture, the share of pixels under 0.05 and over 0.95, and whether it is alive.

    ``LumenError`` for a network in training mode, whose statistics the pictures would move, or without an image.
    """
    images = list(images)
    if network.training or not images:
        raise LumenError(
            f"Gates are read in eval mode on an image or more; found training={network.training}, {len(images)} images."
        )
    maps: dict[str, list[Tensor]] = {name: [] for name in GATES}
    for image in images:
        with tap(network, [gate.path for gate in GATES.values()]) as taps, torch.no_grad():
            network(image[None])
        for name, gate in GATES.items():
            maps[name].append(torch.sigmoid(taps[gate.path].outputs[0]))
    return [_row(name, GATES[name].path, found) for name, found in maps.items()]


def _row(name: str, path: str, maps: list[Tensor]) -> dict[str, object]:
    means = torch.stack([gate.mean() for gate in maps])
    pixels = torch.cat([gate.flatten() for gate in maps])
    mean = float(means.mean())
    return {
        "gate": name,
        "site": path,
        "mean": mean,
        "lowest_mean": float(means.min()),
        "highest_mean": float(means.max()),
        "under_5_percent": float((pixels < 0.05).float().mean()),
        "over_95_percent": float((pixels > 0.95).float().mean()),
        "alive": ALIVE[0] <= mean <= ALIVE[1],
    }
