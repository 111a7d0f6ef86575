"""Prove a plan: every rewrite at every site, then the whole network, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lumen_lab.equivalence import (
    Verdict,
    VerdictTable,
    check_equivalence,
    difference,
    judge,
    learned_verdict,
    output_pairs,
    sqnr_db,
)
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.plan import Plan, check_order, rewrite
from lumen_lab.rewrites.record import LogEntry, Rewrite
from lumen_lab.specs import Exact, Learned
from lumen_lab.taps import tap


def check_plan(model: nn.Module, plan: Plan, *, samples: Sequence[Tensor]) -> VerdictTable:
    """Apply ``plan`` one rewrite at a time to a float64 copy and check each where it acted, and the network's output.

    At a site, the module before and the module after are given the inputs that really flow there. The last rows
    compare the network with all rewrites against the original. A rewrite that was refused everywhere has no row.
    """
    check_order(plan)
    samples = [sample.double() for sample in samples]
    if not samples:
        raise RewriteError(
            "A plan cannot be checked without samples; give images, such as random_samples([(96, 160)])."
        )
    original = copy.deepcopy(model).double()
    before, verdicts = original, []
    for rule in plan:
        after, log = apply_for_all(before, rule, samples)
        verdicts += check_sites(before, after, rule, log, samples)
        before = after
    return VerdictTable((*verdicts, whole_verdict(original, before, plan, samples)))


def apply_for_all(model: nn.Module, rule: Rewrite, samples: Sequence[Tensor]) -> tuple[nn.Module, list[LogEntry]]:
    """One rewrite applied with the first sample's size; constants for further sizes are made as they are met."""
    done = rewrite(model, (rule,), example_inputs=(samples[0],))
    return done.model, done.log.applied()


def check_sites(
    before: nn.Module, after: nn.Module, rule: Rewrite, entries: Sequence[LogEntry], samples: Sequence[Tensor]
) -> list[Verdict]:
    """One verdict for each site of ``rule``, on the inputs that flow there.

    Where the rule has edge cases the claim is judged on them, and the verdict's note says what the difference is on the
    real inputs, which may lie outside of the claim's domain.
    """
    if isinstance(rule.claim, Learned):
        return [learned_verdict(rule.claim, None, rule.name, entry.site) for entry in entries]
    sites = list(dict.fromkeys(entry.site for entry in entries))
    with torch.no_grad(), tap(before, sites) as taps:
        for sample in samples:
            before(sample)
    verdicts = []
    for site in sites:
        module, given = before.get_submodule(site), taps[site].inputs
        real = list(output_pairs(module, after.get_submodule(site), given, None))
        if rule.edge_cases is None:
            verdicts.append(judge(real, rule.claim, name=rule.name, site=site))
        else:
            edges = list(edge_pairs(module, rule, given, path=site))
            verdict = judge(edges, rule.claim, name=rule.name, site=site)
            verdicts.append(replace(verdict, note="; ".join(filter(None, [verdict.note, real_inputs_in_words(real)]))))
    return verdicts


def real_inputs_in_words(pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    """The difference on the network's own inputs, whatever the claim says of them."""
    if any(reference.shape != actual.shape for reference, actual in pairs):
        return "on the network's own inputs the shapes differ"
    worst = max((difference(*pair) for pair in pairs), default=0.0)
    ratio_db = sqnr_db(pairs)
    ratio = f", SQNR {ratio_db:.1f} dB" if math.isfinite(ratio_db) else ""
    return f"on the network's own inputs it differs by {worst:.2g}{ratio}"


def edge_pairs(
    module: nn.Module, rule: Rewrite, given: Sequence[tuple], *, path: str = ""
) -> Iterator[tuple[Tensor, Tensor]]:
    """(reference, actual) outputs on cases of ``rule`` that reach the edges of its domain, made from real inputs.

    A case stands at the ``path`` of the module that it is made from, since a rule may look at it. ``RewriteError`` if
    the rule leaves a case as it is: a module compared with itself proves nothing.
    """
    for inputs in given:
        for case, case_inputs in rule.edge_cases(module, inputs):
            alone = Alone(case, case_inputs, path or "part")
            tensors = tuple(value for value in case_inputs if isinstance(value, Tensor))
            done = rewrite(alone, (rule,), example_inputs=tensors)
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


def whole_verdict(original: nn.Module, after: nn.Module, plan: Plan, samples: Sequence[Tensor]) -> Verdict:
    """The network with every rewrite against the original, by the weakest claim of the plan.

    Bounds of single rewrites do not add up to a bound of the network, so a bounded plan stays pending, as a learned one
    does; what the difference is on the samples stands in the verdict all the same.
    """
    claims = [rule.claim for rule in plan]
    if all(isinstance(claim, Exact) for claim in claims):
        claim = Exact(movement=all(claim.movement for claim in claims))
        return check_equivalence(original, after, claim=claim, samples=samples, name="whole network")
    learned = next((claim for claim in claims if isinstance(claim, Learned)), None)
    if learned:
        verdict = learned_verdict(learned, None, "whole network", "")
    else:
        note = "bounds of single rewrites do not add up: judge the masks by a metric"
        verdict = Verdict("whole network", "", "bounded parts", "pending", None, None, None, 0, note)
    return measured(verdict, list(output_pairs(original, after, samples, None)))


def measured(verdict: Verdict, pairs: Sequence[tuple[Tensor, Tensor]]) -> Verdict:
    """A pending verdict with the difference on ``pairs``; failed if the outputs cannot be compared at all."""
    shapes = [(tuple(r.shape), tuple(a.shape)) for r, a in pairs if r.shape != a.shape]
    if shapes:
        return replace(verdict, status="failed", note=f"shapes differ: expected {shapes[0][0]}, found {shapes[0][1]}")
    worst = max((difference(*pair) for pair in pairs), default=0.0)
    if not math.isfinite(worst):
        return replace(verdict, status="failed", note="the difference is not finite")
    ratio_db = sqnr_db(pairs)
    ratio_db = ratio_db if math.isfinite(ratio_db) else None
    return replace(verdict, max_abs=worst, sqnr_db=ratio_db, samples=len(pairs))
