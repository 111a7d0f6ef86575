"""Checking a plan: bounded claims at their edges, pending ones with their difference, and checks that prove nothing."""

import dataclasses

import pytest
import torch
from torch import nn

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import Rewrite, check_plan
from lumen_lab.rewrites.check import edge_pairs
from lumen_lab.specs import Bounded, Learned


class Clip(nn.Module):
    """x up to a limit."""

    def __init__(self, limit=1.0):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return x.clamp(max=self.limit)


class Doubled(nn.Module):
    """Twice x, but only up to a factor that may be given beside it."""

    def forward(self, x, factor=2):
        return x * factor


class Soft(nn.Module):
    """Right while x ≤ 1: what an approximation with a domain looks like."""

    def forward(self, x):
        return torch.where(x <= 1, x.clamp(max=1.0), x)


def at_the_edge(module, inputs):
    (x,) = inputs
    yield module, (x / x.max(),)


BOUNDED = Rewrite(
    name="approximate_clip",
    replaces=Clip,
    built=lambda site: {site.path: Soft()},
    claim=Bounded(1e-9, "values up to 1"),
    because="an example",
    source="this test",
    edge_cases=at_the_edge,
)
BEYOND = torch.linspace(-1, 3, 48).view(1, 3, 4, 4)


def network():
    return nn.Sequential(Clip(), nn.Identity()).eval()


def test_a_bounded_claim_is_judged_at_its_edge_and_the_note_tells_of_the_real_inputs():
    site, whole = check_plan(network(), (BOUNDED,), samples=[BEYOND]).verdicts
    assert site.passed and site.max_abs == 0
    kept = BEYOND.clamp(max=1)
    ratio_db = 10 * float(torch.log10(kept.square().sum() / (BEYOND - kept).square().sum()))
    assert site.note == f"bit for bit; on the network's own inputs it differs by 2, SQNR {ratio_db:.1f} dB"
    assert (whole.status, whole.samples) == ("pending", 1)
    assert whole.max_abs == pytest.approx(2.0, rel=1e-6) and whole.sqnr_db == pytest.approx(ratio_db, abs=1e-3)


def test_a_wrong_version_fails_at_the_edge_although_real_inputs_would_not_show_it():
    """Within 0.9 of the domain it is right."""

    class Short(Soft):
        def forward(self, x):
            return x.clamp(max=0.9)

    spoiled = dataclasses.replace(BOUNDED, built=lambda site: {site.path: Short()})
    site, _ = check_plan(network(), (spoiled,), samples=[BEYOND.clamp(max=0.8)]).verdicts
    assert site.status == "failed" and site.max_abs == pytest.approx(0.1)
    assert site.note == "on the network's own inputs it differs by 0"


def test_edge_cases_that_the_rule_refuses_prove_nothing():
    """Such a case is compared with itself; it must not count as passed."""
    refusing = dataclasses.replace(BOUNDED, refused=lambda site: "too far" if site.input_shapes[0][0] > 1 else None)
    refusing = dataclasses.replace(refusing, edge_cases=lambda module, inputs: [(module, (torch.cat(inputs * 2),))])
    with pytest.raises(RewriteError, match=r"left an edge case of its own as it is \(too far\)"):
        check_plan(network(), (refusing,), samples=[BEYOND])
    elsewhere = dataclasses.replace(BOUNDED, edge_cases=lambda module, inputs: [(nn.Identity(), inputs)])
    with pytest.raises(RewriteError, match="it found no site"):
        check_plan(network(), (elsewhere,), samples=[BEYOND])


def test_an_edge_case_stands_at_the_path_of_its_module():
    """A rule that is kept to some sites acts on the cases of these sites."""
    seen = []
    rule = dataclasses.replace(BOUNDED, refused=lambda site: seen.append(site.path))
    nested = nn.Sequential(nn.Sequential(Clip()), nn.Identity())
    assert check_plan(nested, (rule,), samples=[BEYOND]).verdicts[0].passed
    assert seen == ["0.0", "0.0"]


def test_edge_cases_of_a_module_with_an_input_that_is_no_tensor():
    class Tripled(Doubled):
        def forward(self, x, factor=2):
            return x * (factor + 1)

    rule = dataclasses.replace(
        BOUNDED,
        replaces=Doubled,
        built=lambda site: {site.path: Tripled()},
        edge_cases=lambda module, inputs: [(module, inputs)],
    )
    ((reference, actual),) = edge_pairs(Doubled(), rule, [(torch.ones(2, 2), 5)])
    assert float(reference.max()) == 5 and float(actual.max()) == 6


def test_a_learned_plan_is_pending_with_its_difference():
    learned = dataclasses.replace(BOUNDED, claim=Learned("S-measure", 0.9), edge_cases=None)
    site, whole = check_plan(network(), (learned,), samples=[BEYOND, BEYOND.clamp(max=1)]).verdicts
    assert site.status == whole.status == "pending"
    assert (whole.samples, whole.note) == (2, "no held-out score yet")
    assert whole.max_abs == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("harm", ["shape", "not finite"])
def test_a_pending_plan_whose_output_cannot_be_used_has_failed(harm):
    class Harmed(nn.Module):
        def forward(self, x):
            return x[..., 1:] if harm == "shape" else x / 0

    learned = dataclasses.replace(BOUNDED, claim=Learned("S-measure", 0.9), edge_cases=None)
    learned = dataclasses.replace(learned, built=lambda site: {site.path: Harmed()})
    table = check_plan(network(), (learned,), samples=[BEYOND])
    (failed,) = table.failed
    assert failed.name == "whole network"
    assert ("shapes differ: expected (1, 3, 4, 4), found (1, 3, 4, 3)" if harm == "shape" else "finite") in failed.note
