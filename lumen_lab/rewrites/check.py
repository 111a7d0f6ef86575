"""Prove a plan: every rewrite at every site, then the whole network, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lumen_lab.equivalence import Verdict, VerdictTable, check_equivalence, judge, learned_verdict, output_pairs
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.plan import Plan, check_order, rewrite
from lumen_lab.rewrites.record import LogEntry, Rewrite
from lumen_lab.specs import Bounded, Exact, Learned
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
    """One verdict for each site of ``rule``, on the inputs that flow there."""
    if isinstance(rule.claim, Learned):
        return [learned_verdict(rule.claim, None, rule.name, entry.site) for entry in entries]
    sites = list(dict.fromkeys(entry.site for entry in entries))
    with torch.no_grad(), tap(before, sites) as taps:
        for sample in samples:
            before(sample)
    verdicts = []
    for site in sites:
        given = taps[site].inputs
        if rule.edge_cases is None:
            pairs = list(output_pairs(before.get_submodule(site), after.get_submodule(site), given, None))
        else:
            pairs = list(edge_pairs(before.get_submodule(site), rule, given))
        verdicts.append(judge(pairs, rule.claim, name=rule.name, site=site))
    return verdicts


def edge_pairs(module: nn.Module, rule: Rewrite, given: Sequence[tuple]) -> Iterator[tuple[Tensor, Tensor]]:
    """(reference, actual) outputs on cases of ``rule`` that reach the edges of its domain, made from real inputs."""
    for inputs in given:
        for case, case_inputs in rule.edge_cases(module, inputs):
            done = rewrite(nn.Sequential(case), (rule,), example_inputs=case_inputs)
            yield from output_pairs(case, done.model, [case_inputs], None)


def whole_verdict(original: nn.Module, after: nn.Module, plan: Plan, samples: Sequence[Tensor]) -> Verdict:
    """The network with every rewrite against the original, by the weakest claim of the plan.

    Bounds of single rewrites do not add up to a bound of the network, so a bounded plan stays pending.
    """
    claims = [rule.claim for rule in plan]
    learned = next((claim for claim in claims if isinstance(claim, Learned)), None)
    if learned:
        return learned_verdict(learned, None, "whole network", "")
    if any(isinstance(claim, Bounded) for claim in claims):
        note = "bounds of single rewrites do not add up: judge the masks by a metric"
        return Verdict("whole network", "", "bounded parts", "pending", None, None, None, 0, note)
    claim = Exact(movement=all(claim.movement for claim in claims))
    return check_equivalence(original, after, claim=claim, samples=samples, name="whole network")
