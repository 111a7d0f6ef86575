"""The deformable convs of a network and what really flows into them, picture by picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.taps import tap

Sites = Iterable[str] | str | None
"""Paths of deformable convs, the path of one, or None for all."""


def deform_sites(model: nn.Module, sites: Sites = None) -> dict[str, DeformableConv2d]:
    """The deformable convs by path, in the network's order.

    ``RewriteError`` if there are none, a name is unknown, or weights are not finite.
    """
    found = {path: part for path, part in model.named_modules() if isinstance(part, DeformableConv2d)}
    if not found:
        raise RewriteError(
            f"{type(model).__name__} has no deformable conv; give the original network, before any rewrite of them."
        )
    if sites is None:
        return finite(found)
    asked = (sites,) if isinstance(sites, str) else tuple(sites)
    strangers = [path for path in asked if path not in found]
    if strangers or not asked:
        names = ", ".join(map(str, strangers)) or "no path at all"
        raise RewriteError(f"No deformable conv at {names}; they are at {', '.join(found)}.")
    return finite({path: found[path] for path in asked})


def finite(convs: dict[str, DeformableConv2d]) -> dict[str, DeformableConv2d]:
    """The convs themselves; ``RewriteError`` if a weight of one is NaN or infinite, which no figure would survive."""
    for path, conv in convs.items():
        if not all(value.isfinite().all() for value in conv.parameters()):
            raise RewriteError(f"The deformable conv at {path} has weights that are not finite; load others.")
    return convs


def site_inputs(
    model: nn.Module, images: Iterable[Tensor], convs: Mapping[str, nn.Module]
) -> Iterator[tuple[int, Iterator[tuple[str, Tensor]]]]:
    """For each batch, its pictures and the (path, input) pairs of ``convs``: of one batch alone are the inputs held.

    ``images``: normalised batches (N, 3, H, W), brought to the model's dtype and device. ``RewriteError`` for anything
    else, for no picture at all, for what is not finite, and for a network in training mode, whose dropout would be
    measured too.
    """
    if model.training:
        raise RewriteError("The network is in training mode, where dropout changes what flows; call .eval() first.")
    parameter, pictures = next(model.parameters()), 0
    for image in images:
        if not isinstance(image, Tensor) or image.dim() != 4:
            found = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise RewriteError(f"Pictures are normalised tensors (N, 3, H, W); found {found}.")
        if not len(image):
            continue
        with torch.no_grad(), tap(model, convs) as taps:
            model(image.to(parameter))
        pictures += len(image)
        given = [(path, inputs[0]) for path, record in taps.items() for inputs in record.inputs]
        lost = next((path for path, x in given if not x.isfinite().all()), None)
        if lost is not None:
            raise RewriteError(f"What flows into {lost} is not finite; look for NaN in the pictures and the weights.")
        yield len(image), iter(given)
    if not pictures:
        raise RewriteError(
            "This needs pictures: give normalised images (N, 3, H, W), at least one; a generator gives them once only."
        )
