"""Plans: ordered rewrites, and how one is applied."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.record import Flow, LogEntry, Rewrite, Site, watch_flow
from lumen_lab.specs import Record

Plan = tuple[Rewrite, ...]


@dataclass(frozen=True)
class RewriteLog(Record):
    """What a plan did, in order: one entry a site."""

    entries: tuple[LogEntry, ...]

    def rows(self) -> list[dict[str, object]]:
        """One row a rewrite: sites rewritten, sites refused and the reasons."""
        rows = []
        for name in dict.fromkeys(entry.rewrite for entry in self.entries):
            mine = [entry for entry in self.entries if entry.rewrite == name]
            reasons = sorted({entry.refused for entry in mine if entry.refused})
            applied = sum(entry.refused is None for entry in mine)
            rows.append(
                {"rewrite": name, "sites": applied, "refused": len(mine) - applied, "why refused": "; ".join(reasons)}
            )
        return rows

    def applied(self, name: str | None = None) -> list[LogEntry]:
        """Entries that were not refused, of one rewrite or of all."""
        return [e for e in self.entries if e.refused is None and name in (None, e.rewrite)]


@dataclass(frozen=True)
class Rewritten:
    """A new model and what was done to it; the model it came from is untouched."""

    model: nn.Module
    log: RewriteLog


def rewrite(model: nn.Module, plan: Plan, *, example_inputs: tuple[Tensor, ...] | None = None) -> Rewritten:
    """Apply ``plan`` to a copy of ``model`` and return it with a log.

    ``example_inputs`` give the sizes that fixed constants are made for; without them the model's
    ``config.image_size`` is used with a batch of one. A plan that is out of order raises ``RewriteError``.
    """
    check_order(plan)
    example_inputs = inputs_for(model, example_inputs)
    entries: list[LogEntry] = []
    with torch.inference_mode(False):  # so that the new model can be trained
        model = copy.deepcopy(model)
        flow = None
        for rule in plan:
            if flow is None or not flow.still_holds(model, rule.replaces):
                flow = watch_flow(model, example_inputs)
            entries += apply_one(model, rule, flow)
            flow = None if rule.resizes else flow
    return Rewritten(model, RewriteLog(tuple(entries)))


def apply_one(model: nn.Module, rule: Rewrite, flow: Flow) -> list[LogEntry]:
    """Apply one rewrite to every site of ``model``, in place (``rewrite`` has made the copy)."""
    entries = []
    for site in flow.sites(model, rule.replaces):
        reason = rule.refused(site)
        if reason:
            entries.append(LogEntry(rule.name, site.path, refused=reason))
            continue
        with torch.no_grad():
            built = rule.built(site)
        for path, module in built.items():
            place(model, path, module, rule.name)
        entries.append(LogEntry(rule.name, common_parent([*built, site.path]), tuple(built)))
    return entries


def place(model: nn.Module, path: str, module: nn.Module, name: str) -> None:
    """Put ``module`` at ``path``, in the mode of the one it replaces, marked with the rewrite that made it."""
    module.train(model.get_submodule(path).training)
    module.rewritten_by = name
    parent, _, leaf = path.rpartition(".")
    if not leaf:
        raise RewriteError(
            f"{name} would replace the network itself; put it in a module, such as nn.Sequential(network)."
        )
    model.get_submodule(parent).register_module(leaf, module)


def common_parent(paths: list[str]) -> str:
    """The deepest path that holds all ``paths``."""
    split = [path.split(".") for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def only_at(rule: Rewrite, sites: Iterable[str]) -> Rewrite:
    """``rule`` for the sites at these paths; the others are refused, and the log says so."""
    names = (sites,) if isinstance(sites, str) else tuple(sites)
    if not names:
        raise RewriteError(f"only_at was given no sites for {rule.name}; leave the rewrite out of the plan.")

    def refused(site: Site) -> str | None:
        return rule.refused(site) if site.path in names else "the plan asks for it at other sites only"

    return replace(rule, refused=refused, code=f"only_at({rule.expression}, {names!r})")


def check_order(plan: Plan) -> None:
    """Raise ``RewriteError`` if a plan breaks a constraint that one of its rewrites declares, with the reason."""
    names = [rule.name for rule in plan]
    for expression, count in Counter(rule.expression for rule in plan).items():
        if count > 1:
            raise RewriteError(f"Plan has {expression} {count} times; one application reaches every site: keep one.")
    for position, rule in enumerate(plan):
        for late in (c for c in rule.after if c.other in names[position + 1 :]):
            raise RewriteError(
                f"Plan asks for {rule.name} before {late.other}; it must come after ({late.because}): reorder them."
            )
        for rival in (c for c in rule.excludes if c.other in names):
            raise RewriteError(
                f"Plan has both {rule.name} and {rival.other}, which do not go together: {rival.because}; keep one."
            )


def inputs_for(model: nn.Module, example_inputs: tuple[Tensor, ...] | Tensor | None) -> tuple[Tensor, ...]:
    """The example inputs as a tuple (one tensor may be given alone), or the model's own; else ``RewriteError``."""
    if example_inputs is None:
        return default_inputs(model)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        kinds = [type(value).__name__ for value in inputs]
        raise RewriteError(f"example_inputs must be tensors, such as (torch.zeros(1, 3, 192, 192),); found {kinds}.")
    return inputs


def default_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    """One image of the model's own size; ``RewriteError`` if the model does not say its size."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "image_size"):
        raise RewriteError(
            f"{type(model).__name__} has no config.image_size, so its input size is unknown; pass example_inputs=(…,)."
        )
    parameter = next(model.parameters())
    height, width = config.image_size
    ramp = torch.linspace(-1, 1, 3 * height * width, dtype=torch.float64)
    return (torch.sin(97 * math.pi * ramp).view(1, 3, height, width).to(parameter),)
