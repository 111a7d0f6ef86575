"""Convolutions: batch normalisation folded into the conv before it."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from lumen_lab.rewrites.record import Constraint, Rewrite, Site, with_weights
from lumen_lab.specs import Exact


def _folded(site: Site) -> dict[str, nn.Module]:
    conv, norm = site.producer_module, site.module
    weight, bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    return {site.producer: with_weights(conv, weight, bias), site.path: nn.Identity()}


def _no_conv_before(site: Site) -> str | None:
    if site.module.training:
        return "the network is in training mode, where the statistics are those of the batch; call .eval() first"
    if not isinstance(site.producer_module, nn.Conv2d):
        found = type(site.producer_module).__name__ if site.producer else "what no single module makes for it alone"
        return f"it reads {found}, not the output of a Conv2d; decompose the deformable convs first"
    if site.module.running_mean is None:
        return "it keeps no running statistics, so it depends on the batch and cannot be folded"
    if any(has_hooks(module) for module in (site.module, site.producer_module)):
        return "it or the conv before it has hooks, which a fold would lose; remove them first"
    if len(site.input_shapes) > 1:
        return "it is called at several sizes, so the conv before it may feed other readers"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


FOLD_BATCH_NORM = Rewrite(
    name="fold_batch_norm",
    replaces=nn.BatchNorm2d,
    built=_folded,
    refused=_no_conv_before,
    claim=Exact(),
    because="one operator less a conv, and one set of weights for the quantiser to look at",
    after=(Constraint("decompose_deform_conv", "a deformable conv is no Conv2d that a norm could be folded into"),),
    source="torch.nn.utils.fusion; y = γ(Wx + b − μ)/√(σ² + ε) + β is itself a conv",
)
