"""Prove a plan: every rewrite at every site, then the whole network, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lumen_lab.equivalence import Verdict, VerdictTable, claim_text, difference, judge, learned_verdict, sqnr_db
from lumen_lab.equivalence.verdict import Run, finite, judge_runs, output_pairs, own, paired, runs
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.plan import Plan, check_order, named, rewrite, rewrite_after
from lumen_lab.rewrites.record import LogEntry, Rewrite, first_line, inputs_in_words
from lumen_lab.rewrites.unchanged import changed_elsewhere, is_copy
from lumen_lab.specs import Exact, Learned
from lumen_lab.taps import tap

WHOLE = "whole network"
CONSTANT = "its input is constant on these samples, which proves nothing: give varied ones"
IN_PLACE = "it changes its input in place, which what it replaces does not"
COPY = "unchanged: what was built is a copy of what was there"
OUTSIDE = "each site passes by itself, yet the network's output moves: it changes something outside of its sites"


def check_plan(
    model: nn.Module,
    plan: Plan,
    *,
    samples: Sequence[Tensor],
    scores: Mapping[str, float] | None = None,
    progress: bool = True,
) -> VerdictTable:
    """Apply ``plan`` one rewrite at a time to a float64 copy and check each where it acted, and the network's output.

    At a site, the module before and the module after are given the inputs that really flow there. No rewrite may change
    what it does not replace, and an exact one must leave the network's output where it was. The last row compares the
    network with all rewrites against the original. A rewrite that was refused everywhere has no row.

    ``samples``: images (N, 3, H, W) as the network reads them. A mistake shows only where it makes a difference, so let
    them vary, be wide and be high, hold several images, and give maps that no window divides: noise as of
    ``random_samples([(96, 160), (160, 96)])``, and a photograph. What is constant proves nothing: it leaves a verdict
    pending.
    ``scores``: by the names of learned rewrites, what the trained network reached of their metric on held-out data;
    those without one are pending, and so is the network.

    ``RewriteError`` for a plan that ``rewrite`` refuses, samples or scores that are none, a network with a module in
    training mode, and a rewritten one that does not run.
    """
    from tqdm.auto import tqdm

    plan, samples = check_order(plan), checked_samples(samples)
    scores = checked_scores(plan, scores or {})
    check_mode(model)
    before, verdicts, outputs, acted = copy.deepcopy(model).double(), [], [], ""
    for rule in tqdm(plan, desc="Checking", unit="rewrite", leave=False, disable=not progress):
        done = rewrite_after(acted, before, (rule,), tuple(samples[:1]))  # constants of other sizes are made when met
        after, entries = done.model, done.log.applied()
        verdicts += changes_elsewhere(before, after, rule, entries)
        sites = [] if isinstance(rule.claim, Learned) else [entry.site for entry in entries]
        given, found = flowing(before, sites, samples, after=acted)
        verdicts += check_sites(before, after, rule, entries, given, scores)
        outputs.append(found)
        before, acted = after, rule.name if entries else acted
    outputs.append(flowing(before, (), samples, after=acted)[1])
    for rule, *step in zip(plan, outputs, outputs[1:], strict=False):
        if not any(verdict.status == "failed" for verdict in verdicts if verdict.name == rule.name):
            verdicts += moved_network(rule, network_runs(samples, *step))
    return VerdictTable((*verdicts, whole_verdict(plan, network_runs(samples, outputs[0], outputs[-1]), scores)))


# What is asked


def checked_samples(samples: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """The samples in float64 (one may be given alone); ``RewriteError`` if there are none, or one is no image."""
    alone = isinstance(samples, Tensor) or not isinstance(samples, Iterable)
    samples = [samples] if alone else list(samples)
    if not samples:
        raise RewriteError(
            "A plan cannot be checked without samples; give images, such as random_samples([(96, 160)])."
        )
    for sample in samples:
        if not isinstance(sample, Tensor) or not sample.numel():
            found = f"a tensor of shape {tuple(sample.shape)}" if isinstance(sample, Tensor) else repr(sample)
            raise RewriteError(f"Samples are images, such as random_samples([(96, 160)]); found {found:.60}.")
    return [sample.double() for sample in samples]


def checked_scores(plan: Plan, scores: Mapping[str, float]) -> Mapping[str, float]:
    """The scores; ``LumenError`` for one that is no number, or is for what is no learned rewrite of the plan."""
    learned = {rule.name: rule.claim for rule in plan if isinstance(rule.claim, Learned)}
    for name, score in scores.items():
        if name not in learned:
            there = f"those are {', '.join(learned)}" if learned else "it has none"
            raise RewriteError(f"A score is given for {name!r}, which is no learned rewrite of the plan; {there}.")
        learned_verdict(learned[name], score, name, "")
    return scores


def check_mode(model: nn.Module) -> None:
    """``RewriteError`` for a network of which any module is in training mode."""
    training = [path or "the network itself" for path, module in model.named_modules() if module.training]
    if training:
        raise RewriteError(
            f"The network is in training mode ({len(training)} of its modules, first {training[0]}), where no two runs "
            "agree; call .eval() first."
        )


# At the sites


def flowing(
    model: nn.Module, sites: Sequence[str], samples: Sequence[Tensor], *, after: str
) -> tuple[dict[str, list[tuple]], list[object]]:
    """What flows into ``sites`` while the model runs on the samples, by path, and what it returns for each."""
    with torch.no_grad(), tap(model, dict.fromkeys(sites)) as taps:
        try:
            outputs = [model(*own((sample,))) for sample in samples]
        except Exception as error:
            what = f"After {after} the network" if after else type(model).__name__
            raise RewriteError(
                f"{what} does not run on samples of {inputs_in_words(samples)} ({first_line(error)})."
            ) from error
    return {path: record.inputs for path, record in taps.items()}, outputs


def changes_elsewhere(before: nn.Module, after: nn.Module, rule: Rewrite, entries: Sequence[LogEntry]) -> list[Verdict]:
    """A failed verdict if the rewrite has changed what it did not replace; it names what, and stands there."""
    changed = changed_elsewhere(before, after, entries)
    if not changed:
        return []
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    note = f"built changed what it does not replace: {', '.join(changed[:3])}{more}"
    return [Verdict(rule.name, changed[0], claim_text(rule.claim), "failed", None, None, None, 0, note)]


def check_sites(
    before: nn.Module,
    after: nn.Module,
    rule: Rewrite,
    entries: Sequence[LogEntry],
    given: Mapping[str, Sequence[tuple]],
    scores: Mapping[str, float],
) -> list[Verdict]:
    """One verdict for each site of ``rule``, on the inputs that flow there; a learned rewrite has its score."""
    if isinstance(rule.claim, Learned):
        return [learned_verdict(rule.claim, scores.get(rule.name), rule.name, entry.site) for entry in entries]
    replaced: dict[str, list[str]] = {}
    for entry in entries:
        replaced.setdefault(entry.site, []).extend(entry.replaced)
    verdicts = []
    for site, paths in replaced.items():
        verdict = check_site(before.get_submodule(site), after.get_submodule(site), rule, site, given[site])
        same = all(is_copy(before.get_submodule(path), after.get_submodule(path)) for path in paths)
        verdicts.append(noted(verdict, COPY) if same else verdict)
    return verdicts


def check_site(module: nn.Module, new: nn.Module, rule: Rewrite, site: str, given: Sequence[tuple]) -> Verdict:
    """The verdict on one site.

    Where the rule has edge cases the claim is judged on them, and the verdict's note says what the difference is on the
    real inputs, which may lie outside of the claim's domain.
    """
    with named(rule, site):
        real = list(runs(module, new, given, None))
    if rule.edge_cases is None:
        verdict = judge_runs(real, rule.claim, name=rule.name, site=site)
    else:
        verdict = judge(list(edge_pairs(module, rule, given, path=site)), rule.claim, name=rule.name, site=site)
        verdict = with_real_inputs(verdict, [pair for run in real for pair in run.outputs])
    if any(map(spoils_its_input, real)):
        return noted(replace(verdict, status="failed"), IN_PLACE)
    return doubted(verdict, real)


def spoils_its_input(run: Run) -> bool:
    """Whether the new module has left another input than it was given, and than the old one has left."""
    trios = zip(run.inputs, run.inputs_left, strict=True)
    return any(difference(x, found) > 0 and difference(expected, found) > 0 for x, (expected, found) in trios)


def doubted(verdict: Verdict, made: Sequence[Run]) -> Verdict:
    """The verdict; pending in place of passed if all that went in is constant, so that a wrong one passes as well."""
    inputs = [x for run in made for x in run.inputs if x.numel()]
    varied = not inputs or all(x.numel() == 1 for x in inputs) or any(bool((x != x.flatten()[0]).any()) for x in inputs)
    return verdict if varied or not verdict.passed else noted(replace(verdict, status="pending"), CONSTANT)


def noted(verdict: Verdict, note: str) -> Verdict:
    """The verdict with a further note."""
    return replace(verdict, note="; ".join(filter(None, [verdict.note, note])))


def with_real_inputs(verdict: Verdict, pairs: Sequence[tuple[Tensor, Tensor]]) -> Verdict:
    """A verdict on edge cases, with the difference on the network's own inputs, whatever the claim says of them."""
    if any(reference.shape != actual.shape for reference, actual in pairs):
        return noted(verdict, "on the network's own inputs the shapes differ")
    worst, ratio_db = max((difference(*pair) for pair in pairs), default=0.0), sqnr_db(pairs)
    ratio = f", SQNR {ratio_db:.1f} dB" if math.isfinite(ratio_db) else ""
    note = f"on the network's own inputs it differs by {worst:.2g}{ratio}"
    return noted(replace(verdict, real_max_abs=finite(worst)), note)


def edge_pairs(
    module: nn.Module, rule: Rewrite, given: Sequence[tuple], *, path: str = ""
) -> Iterator[tuple[Tensor, Tensor]]:
    """(reference, actual) outputs on cases of ``rule`` that reach the edges of its domain, made from real inputs.

    A case stands at the ``path`` of the module that it is made from, since a rule may look at it. ``RewriteError`` if
    the rule leaves a case as it is: a module compared with itself proves nothing.
    """
    everywhere = replace(rule, sites=None)
    for inputs in given:
        for case, case_inputs in rule.edge_cases(module, inputs):
            alone = Alone(case, case_inputs, path or "part")
            tensors = tuple(value for value in case_inputs if isinstance(value, Tensor))
            done = rewrite(alone, (everywhere,), example_inputs=tensors)
            if not done.log.applied():
                reason = next((entry.refused for entry in done.log.entries), "it found no site")
                raise RewriteError(
                    f"{rule.name} left an edge case of its own as it is ({reason}), so that its claim was not checked; "
                    "edge_cases must give modules that the rewrite acts on."
                )
            yield from output_pairs(alone, done.model, [tensors], None)


class Alone(nn.Module):
    """One module at its path in a network of nothing else, with its inputs that are no tensors fixed."""

    def __init__(self, part: nn.Module, inputs: tuple, path: str):
        super().__init__()
        self.path = path
        self.fixed = tuple(None if isinstance(value, Tensor) else (value,) for value in inputs)
        *above, leaf = path.split(".")
        parent = self
        for name in above:
            parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(leaf, part)

    def forward(self, *tensors: Tensor):
        waiting = iter(tensors)
        return self.get_submodule(self.path)(*(next(waiting) if f is None else f[0] for f in self.fixed))


# The whole network


def network_runs(samples: Sequence[Tensor], expected: Sequence[object], found: Sequence[object]) -> list[Run]:
    """What two networks have returned for the samples, side by side."""
    return [Run([x], paired(*outputs), []) for x, *outputs in zip(samples, expected, found, strict=True)]


def moved_network(rule: Rewrite, made: Sequence[Run]) -> list[Verdict]:
    """A failed verdict if an exact rewrite, which passed at its sites, has moved the network's output."""
    if not isinstance(rule.claim, Exact):
        return []
    claim = replace(rule.claim, movement=False)
    verdict = judge_runs(made, claim, name=rule.name, site="")
    return [replace(verdict, note=OUTSIDE)] if verdict.status == "failed" else []


def whole_verdict(plan: Plan, made: Sequence[Run], scores: Mapping[str, float] | None = None) -> Verdict:
    """The network with every rewrite against the original, by the weakest claim of the plan.

    Bounds of single rewrites do not add up to a bound of the network, so a bounded plan stays pending, as a learned one
    does until each learned rewrite has a score: then the one nearest to failing decides. What the difference is on the
    samples stands in the verdict all the same.
    """
    claims = [rule.claim for rule in plan]
    if all(isinstance(claim, Exact) for claim in claims):
        widest = max((claim.max_abs_float64 for claim in claims), default=Exact().max_abs_float64)
        claim = Exact(movement=all(claim.movement for claim in claims), max_abs_float64=widest)
        return doubted(judge_runs(made, claim, name=WHOLE, site=""), made)
    learned = [(rule.claim, (scores or {}).get(rule.name)) for rule in plan if isinstance(rule.claim, Learned)]
    if learned:
        verdict = learned_verdict(*min(learned, key=margin), WHOLE, "")
    else:
        note = "bounds of single rewrites do not add up: judge the masks by a metric"
        verdict = Verdict(WHOLE, "", "bounded parts", "pending", None, None, None, 0, note)
    return measured(verdict, [pair for run in made for pair in run.outputs])


def margin(scored: tuple[Learned, float | None]) -> float:
    """How far a score is above what its claim asks; one that is missing or no number is below everything."""
    claim, score = scored
    return -math.inf if score is None or math.isnan(score) else score - claim.at_least


def measured(verdict: Verdict, pairs: Sequence[tuple[Tensor, Tensor]]) -> Verdict:
    """A verdict that differences do not decide, with the difference on ``pairs``; failed if they cannot be compared."""
    shapes = [(tuple(r.shape), tuple(a.shape)) for r, a in pairs if r.shape != a.shape]
    if shapes:
        return replace(verdict, status="failed", note=f"shapes differ: expected {shapes[0][0]}, found {shapes[0][1]}")
    worst = max((difference(*pair) for pair in pairs), default=0.0)
    if not math.isfinite(worst):
        return replace(verdict, status="failed", note="the difference is not finite")
    return replace(verdict, max_abs=worst, sqnr_db=finite(sqnr_db(pairs)), samples=len(pairs))
