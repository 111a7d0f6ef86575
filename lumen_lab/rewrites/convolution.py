"""Convolutions: batch normalisation folded into the conv before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lumen_lab.rewrites.deform import GridSampleConv
from lumen_lab.rewrites.record import Constraint, Rewrite, Site, with_weights
from lumen_lab.specs import Exact


def summed_convs(site: Site) -> dict[str, nn.Conv2d]:
    """The convs whose sum the site reads, by path: one, or those of a conv that is computed in parts."""
    producer = site.producer_module
    if isinstance(producer, GridSampleConv):
        return {f"{site.producer}.tap_convs.{index}": conv for index, conv in enumerate(producer.tap_convs)}
    return {site.producer: producer} if isinstance(producer, nn.Conv2d) else {}


def scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """A norm with fixed statistics as y = scale · x + shift, a value a channel."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def _folded(site: Site) -> dict[str, nn.Module]:
    scale, shift = scale_and_shift(site.module)
    built: dict[str, nn.Module] = {}
    for path, conv in summed_convs(site).items():
        bias = None if conv.bias is None else conv.bias * scale
        if shift is not None:  # once, in the first of the sum
            bias, shift = (shift if bias is None else bias + shift), None
        built[path] = with_weights(conv, conv.weight * scale[:, None, None, None], bias)
    return built | {site.path: nn.Identity()}


def _no_conv_before(site: Site) -> str | None:
    if site.module.training:
        return "the network is in training mode, where the statistics are those of the batch; call .eval() first"
    convs = summed_convs(site)
    if not convs:
        found = type(site.producer_module).__name__ if site.producer else "what no single module makes for it alone"
        return f"it reads {found}, not the output of a Conv2d; decompose the deformable convs first"
    if site.module.running_mean is None:
        return "it keeps no running statistics, so it depends on the batch and cannot be folded"
    if any(has_hooks(module) for module in (site.module, site.producer_module, *convs.values())):
        return "it or the conv before it has hooks, which a fold would lose; remove them first"
    if any(conv.padding_mode != "zeros" for conv in convs.values()):
        return "the conv before it does not pad with zeros"
    if len(site.input_shapes) > 1:
        return "it is called at several sizes, so the conv before it may feed other readers"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


NO_CONV2D = "a deformable conv is no Conv2d that a norm could be folded into; what it is rewritten to ends in one"
DEFORM_REWRITES = (
    "decompose_deform_conv",
    "approximate_deform_conv_by_shifts",
    "substitute_modulated_conv",
    "substitute_plain_conv",
    "substitute_separable_conv",
)

FOLD_BATCH_NORM = Rewrite(
    name="fold_batch_norm",
    replaces=nn.BatchNorm2d,
    built=_folded,
    refused=_no_conv_before,
    claim=Exact(),
    because="one operator less a conv, and one set of weights for the quantiser to look at",
    after=tuple(Constraint(name, NO_CONV2D) for name in DEFORM_REWRITES),
    source="y = γ(Wx + b − μ)/√(σ² + ε) + β is itself a conv",
)
