"""Plans: ordered rewrites, and how one is applied."""

from __future__ import annotations

import copy
import difflib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.record import Flow, LogEntry, Rewrite, Site, first_line, watch_flow
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
    ``config.image_size`` is used with a batch of one. New modules have the mode of those that they replace, and are
    frozen (``requires_grad``) where all of those were. ``RewriteError`` for a plan that is none or out of order, inputs
    that the model does not take, and a rewrite that fails or breaks its record's promises, with its name and the site.
    """
    return rewrite_after("", model, check_order(plan), inputs_for(model, example_inputs))


def rewrite_after(done: str, model: nn.Module, plan: Plan, example_inputs: tuple[Tensor, ...]) -> Rewritten:
    """``rewrite`` with everything checked; ``done`` is the rewrite that made ``model`` what it is, if one did."""
    entries: list[LogEntry] = []
    with torch.inference_mode(False):  # so that the new model can be trained
        model = copy.deepcopy(model)
        flow = None
        for rule in plan:
            if flow is None or not flow.still_holds(model, rule.replaces):
                flow = watch_flow(model, example_inputs, done)
            made = apply_one(model, rule, flow)
            if any(entry.refused is None for entry in made):
                done = rule.name
            entries += made
            flow = None if rule.resizes else flow
    return Rewritten(model, RewriteLog(tuple(entries)))


def apply_one(model: nn.Module, rule: Rewrite, flow: Flow) -> list[LogEntry]:
    """Apply one rewrite to every site of ``model``, in place (``rewrite`` has made the copy)."""
    entries = []
    sites = flow.sites(model, rule.replaces)
    if rule.sites is not None:
        check_named_sites(model, rule, [site.path for site in sites])
    for site in sites:
        reason = reason_against(rule, site)
        if reason:
            entries.append(LogEntry(rule.name, site.path, refused=reason))
            continue
        built = modules_built(rule, site)
        freeze_alike(site, built)
        for path, module in built.items():
            place(model, path, module, rule.name)
        entries.append(LogEntry(rule.name, common_parent([*built, site.path]), tuple(built)))
    return entries


@contextmanager
def named(rule: Rewrite, path: str) -> Iterator[None]:
    """Inside the block every error is a ``RewriteError`` that names the rewrite and the site."""
    try:
        yield
    except Exception as error:
        raise RewriteError(f"{rule.name} at {path or 'the network itself'}: {first_line(error)}.") from error


def reason_against(rule: Rewrite, site: Site) -> str | None:
    """Why the site is left as it is: a sentence, or None."""
    if rule.sites is not None and site.path not in rule.sites:
        return "the plan asks for it at other sites only"
    with named(rule, site.path):
        reason = rule.refused(site)
        if reason and not isinstance(reason, str):
            raise RewriteError(f"refused says why not, in a sentence, or gives None; found {reason!r}")
    return reason or None


def modules_built(rule: Rewrite, site: Site) -> dict[str, nn.Module]:
    """The new modules of a site by path; ``RewriteError`` if they cannot take the places that they are built for."""
    with named(rule, site.path):
        with torch.no_grad():
            built = rule.built(site)
        if not isinstance(built, Mapping):
            found = type(built).__name__
            raise RewriteError(f"built gives new modules by path, such as {{site.path: module}}; found a {found}")
        if not built:
            raise RewriteError("built gave no module, so that nothing would change; give one, or refuse the site")
        for path, module in built.items():
            if path not in site.modules:
                near = nearest(str(path), site.modules)
                raise RewriteError(
                    f"built gave a module for {path!r}, where there is none to replace; near it are {near}"
                )
            if not isinstance(module, nn.Module):
                raise RewriteError(f"built gave {module!r:.40} for '{path}', which is no module")
        check_dtypes(site, built)
    return dict(built)


def check_dtypes(site: Site, built: Mapping[str, nn.Module]) -> None:
    """``RewriteError`` if a new module brings a floating type that the network does not have."""
    known = floating_dtypes(site.modules.values())
    new = floating_dtypes(part for module in built.values() for part in module.modules())
    if known and new - known:
        raise RewriteError(f"built gave weights in {sorted(map(str, new))} to a network in {sorted(map(str, known))}")


def floating_dtypes(modules: Iterable[nn.Module]) -> set[torch.dtype]:
    """Floating types of the parameters and buffers that these modules hold themselves."""
    held = (t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
    return {tensor.dtype for tensor in held if tensor.is_floating_point()}


def freeze_alike(site: Site, built: Mapping[str, nn.Module]) -> None:
    """Freeze what is built for a site if every parameter that it replaces is frozen."""
    replaced = [parameter for path in built for parameter in site.modules[path].parameters()]
    if replaced and not any(parameter.requires_grad for parameter in replaced):
        for module in built.values():
            module.requires_grad_(False)


def check_named_sites(model: nn.Module, rule: Rewrite, found: Sequence[str]) -> None:
    """``RewriteError`` if a path that the rewrite is kept to is no site of it, with what is there and what is near."""
    for path in (path for path in rule.sites if path not in found):
        module = dict(model.named_modules()).get(path)
        there = "no module" if module is None else f"a {type(module).__name__}"
        there += ", which no forward pass calls" if isinstance(module, rule.replaces) else ""
        sites = f"the nearest are {nearest(path, found)}" if found else "this network has none"
        raise RewriteError(
            f"{rule.name} is kept to '{path}', where there is {there}; its sites are each a {rule.replaces.__name__}: "
            f"{sites}."
        )


def nearest(path: str, paths: Iterable[str]) -> str:
    """The paths most like this one; where none is, some of them."""
    paths = [other for other in paths if other]
    return ", ".join(difflib.get_close_matches(path, paths, 3) or paths[:5])


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
    """``rule`` for the sites at these paths; the others are refused, and the log says so.

    Applying it raises ``RewriteError`` if one of the paths is no site of the network.
    """
    names = (sites,) if isinstance(sites, str) else tuple(sites)
    if not names:
        raise RewriteError(f"only_at was given no sites for {rule.name}; leave the rewrite out of the plan.")
    lost = [name for name in names if rule.sites is not None and name not in rule.sites]
    if lost:
        raise RewriteError(f"{rule.name} is kept to {', '.join(rule.sites)} already; asked for {lost[0]} too.")
    return replace(rule, sites=names, code=f"only_at({rule.expression}, {names!r})")


def check_order(plan: Iterable[Rewrite]) -> Plan:
    """The plan as a tuple; ``RewriteError`` if it is none, or breaks a constraint that one of its rewrites declares."""
    plan = as_plan(plan)
    names = [rule.name for rule in plan]
    for name, count in Counter(names).items():
        if count > 1:
            check_apart([rule for rule in plan if rule.name == name])
    for position, rule in enumerate(plan):
        for late in (c for c in rule.after if c.other in names[position + 1 :]):
            raise RewriteError(
                f"Plan asks for {rule.name} before {late.other}; it must come after ({late.because}): reorder them."
            )
        for rival in (c for c in rule.excludes if c.other in names):
            raise RewriteError(
                f"Plan has both {rule.name} and {rival.other}, which do not go together: {rival.because}; keep one."
            )
    return plan


def as_plan(given: Iterable[Rewrite]) -> Plan:
    """What was given as a tuple of rewrites; ``RewriteError`` if it is anything else."""
    if isinstance(given, Rewrite):
        raise RewriteError(f"A plan is a tuple of rewrites, found {given.name} alone; write (rewrite,), with a comma.")
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RewriteError(f"A plan is a tuple of rewrites, such as EXACT_PLAN; found {given!r:.60}.")
    plan = tuple(given)
    stranger = next((item for item in plan if not isinstance(item, Rewrite)), None)
    if stranger is not None or None in plan:
        raise RewriteError(
            f"A plan holds rewrites, found {stranger!r:.60} in it; lumen_lab.rewrites.catalogue.find_rewrite gives the "
            "rewrite of a name."
        )
    return plan


def check_apart(rules: Sequence[Rewrite]) -> None:
    """``RewriteError`` unless rewrites of one name are each kept to sites of their own."""
    named_sites = Counter(site for rule in rules for site in rule.sites or ())
    twice = [site for site, count in named_sites.items() if count > 1]
    if twice or any(rule.sites is None for rule in rules):
        forms = ", ".join(dict.fromkeys(rule.expression for rule in rules))
        reason = f"{twice[0]} would be rewritten twice" if twice else "one application reaches every site"
        raise RewriteError(
            f"Plan has {rules[0].name} {len(rules)} times ({forms}); {reason}: keep one, or keep each to sites of its "
            "own with only_at."
        )


def inputs_for(model: nn.Module, example_inputs: tuple[Tensor, ...] | Tensor | None) -> tuple[Tensor, ...]:
    """The example inputs as a tuple (one tensor may be given alone), or the model's own; else ``RewriteError``.

    They give sizes, so that those of another floating type are taken in the model's.
    """
    if example_inputs is None:
        return default_inputs(model)
    alone = isinstance(example_inputs, Tensor) or not isinstance(example_inputs, Iterable)
    inputs = (example_inputs,) if alone else tuple(example_inputs)
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        kinds = [type(value).__name__ for value in inputs]
        raise RewriteError(f"example_inputs must be tensors, such as (torch.zeros(1, 3, 192, 192),); found {kinds}.")
    empty = next((tuple(value.shape) for value in inputs if not value.numel()), None)
    if empty is not None:
        raise RewriteError(f"example_inputs are images as the model reads them; one of shape {empty} holds none.")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return tuple(value.to(dtype) if dtype and value.is_floating_point() else value for value in inputs)


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
