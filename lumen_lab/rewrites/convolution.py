"""Convolutions: which are no more than their weights, and batch normalisation folded into the conv before it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lumen_lab.rewrites.record import Constraint, Rewrite, Site, with_weights
from lumen_lab.specs import Exact

# What a rewrite may take the weights of


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs when the module is called: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def unlike(module: nn.Module, kind: type[nn.Module], *, called: str = "it") -> str | None:
    """Why ``module`` may compute something else than its weights in a ``kind`` do, or None.

    A subclass may have another forward (timm's ``BatchNormAct2d`` holds an activation), so only the class itself will
    do. What is ``called`` so begins the sentence.
    """
    if type(module) is not kind:
        found = "missing" if module is None else f"a {type(module).__name__}"
        return f"{called} is {found}, which may compute something else than a {kind.__name__}"
    if has_hooks(module):
        return f"{called} has hooks or a forward of its own, which would be lost; remove them first"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"{called} pads with '{module.padding_mode}', and what replaces it would pad with zeros"
    return None


def parts_unlike(module: nn.Module, kinds: Mapping[str, type[nn.Module]]) -> str | None:
    """The first of the named parts of ``module`` that is no longer plain, as ``unlike`` says it, or None."""
    reasons = (unlike(getattr(module, name, None), kind, called=f"its {name}") for name, kind in kinds.items())
    return next(filter(None, reasons), None)


class SumOfConvs(nn.Module):
    """A conv that is computed as a sum of convs: those in the list that ``summed`` names."""

    summed: str


# Batch normalisation


def summed_convs(site: Site) -> dict[str, nn.Module]:
    """The convs whose sum the site reads, by path: one, or those of a conv that is computed in parts."""
    producer = site.producer_module
    if isinstance(producer, SumOfConvs):
        convs = getattr(producer, producer.summed)
        return {f"{site.producer}.{producer.summed}.{index}": conv for index, conv in enumerate(convs)}
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
    if len(site.input_shapes) > 1:
        return "it is called at several sizes, so the conv before it may feed other readers"
    return _not_plain(site, convs)


def _not_plain(site: Site, convs: Mapping[str, nn.Module]) -> str | None:
    """Why the norm or a conv before it is more than its weights, or is known by a second name as well."""
    called = "the conv before it"
    reasons = [
        unlike(site.module, nn.BatchNorm2d),
        *(unlike(conv, nn.Conv2d, called=called) for conv in convs.values()),
    ]
    if has_hooks(site.producer_module):
        reasons.append(f"{called} has hooks or a forward of its own, which would be lost; remove them first")
    if any(slots(site, module) > 1 for module in (site.module, site.producer_module, *convs.values())):
        reasons.append("it or the conv before it has two names in the network, and a fold would change one of them")
    return next(filter(None, reasons), None)


def slots(site: Site, module: nn.Module) -> int:
    """How many names the module has in the network that the site is in."""
    return sum(child is module for parent in site.modules.values() for child in parent._modules.values())


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
    because="nothing in the compiled network: the ONNX exporter folds a norm behind a conv itself, and the recorded "
    "figures agree with and without. In the exported torch graph it is one operator and, in INT8, one encoding less",
    after=tuple(Constraint(name, NO_CONV2D) for name in DEFORM_REWRITES),
    source="y = γ(Wx + b − μ)/√(σ² + ε) + β is itself a conv; data/recorded/plan_costs_micro.json",
)
