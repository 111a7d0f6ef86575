"""The deformable convs of a network and what really flows into them, picture by picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.taps import tap


def deform_sites(model: nn.Module, sites: Sequence[str] | None = None) -> dict[str, DeformableConv2d]:
    """The deformable convs by path, in the network's order; ``RewriteError`` if there are none or a name is unknown."""
    found = {path: part for path, part in model.named_modules() if isinstance(part, DeformableConv2d)}
    if not found:
        raise RewriteError(
            f"{type(model).__name__} has no deformable conv; give the original network, before any rewrite of them."
        )
    if sites is None:
        return found
    strangers = [path for path in sites if path not in found]
    if strangers:
        raise RewriteError(f"No deformable conv at {', '.join(strangers)}; they are at {', '.join(found)}.")
    return {path: found[path] for path in sites}


def site_inputs(
    model: nn.Module, images: Iterable[Tensor], convs: Mapping[str, nn.Module]
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """For each picture, the (path, input) pairs of ``convs``: of one picture alone are the inputs held.

    ``images``: normalised batches (N, 3, H, W), brought to the model's dtype and device. ``RewriteError`` for anything
    else, and for a network in training mode, whose dropout would be measured too.
    """
    if model.training:
        raise RewriteError("The network is in training mode, where dropout changes what flows; call .eval() first.")
    parameter = next(model.parameters())
    for image in images:
        if not isinstance(image, Tensor) or image.dim() != 4:
            found = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise RewriteError(f"Pictures are normalised tensors (N, 3, H, W); found {found}.")
        with torch.no_grad(), tap(model, convs) as taps:
            model(image.to(parameter))
        yield ((path, inputs[0]) for path, record in taps.items() for inputs in record.inputs)
