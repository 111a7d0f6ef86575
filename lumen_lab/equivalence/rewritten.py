"""A network and what rewrites made of it, compared layer by layer in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from lumen_lab.equivalence.layer_report import LayerReport
from lumen_lab.equivalence.layers import trace_torch
from lumen_lab.equivalence.matching import compare_layers
from lumen_lab.equivalence.tolerance import Tolerance


class AppliedEntry(Protocol):
    """What one rewrite replaced together."""

    replaced: tuple[str, ...]


class Log(Protocol):
    """What a plan did."""

    def applied(self) -> Sequence[AppliedEntry]: ...


class HasLog(Protocol):
    """What ``lumen_lab.rewrite`` returns."""

    model: nn.Module
    log: Log


def compare_rewritten(
    network: nn.Module,
    rewritten: HasLog,
    inputs: Tensor | Sequence[Tensor],
    *,
    tolerance: Tolerance | Mapping[str, Tolerance] | None = None,
    sites: Iterable[str] | None = None,
) -> LayerReport:
    """Run a network and what ``lumen_lab.rewrite`` made of it on the same inputs, and compare them layer by layer.

    The log says what was replaced together, so that no layer is compared inside such a group. ``sites`` must be in
    both networks. Raises what ``trace_torch`` and ``compare_layers`` raise.
    """
    sites = None if sites is None else (sites if isinstance(sites, str) else tuple(sites))
    traces = (trace_torch(model, inputs, sites=sites) for model in (network, rewritten.model))
    return compare_layers(*traces, tolerance=tolerance, replaced=[x.replaced for x in rewritten.log.applied()])
