"""Checking a plan: bounded claims at their edges, pending ones with their difference, and checks that prove nothing."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lumen_lab.errors import LumenError, RewriteError
from lumen_lab.rewrites import Rewrite, check_plan
from lumen_lab.rewrites.check import edge_pairs
from lumen_lab.specs import Bounded, Exact, Learned


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
    assert site.real_max_abs == 2
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
    nested = nn.Sequential(nn.Sequential(Clip()), nn.Identity()).eval()
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


# Damage that the site itself does not show


class Chain(nn.Module):
    """Two convs with a ReLU, the input read once more at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1)
        self.clip = Clip()

    def forward(self, x):
        y = self.first(x)
        return self.clip(self.second(self.act(y)) + y + x)


def chain():
    torch.manual_seed(0)
    return Chain().eval()


def clone_and(harm):
    """A copy of the module, and harm done to what the site knows of the network."""

    def built(site):
        new = copy.deepcopy(site.module)
        harm(site, new)
        return {site.path: new}

    return built


EXACT = Rewrite(
    "clone_act", nn.ReLU, clone_and(lambda site, new: None), Exact(), "an example", "this test", code="EXACT"
)
LEARNED = Rewrite(
    "substitute_clip", Clip, lambda site: {site.path: Soft()}, Learned("S-measure", 0.9), "an example", "this test"
)
IMAGES = [torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))]


def weight_of_another_module(site, new):
    site.modules["second"].weight.data.mul_(1.01)


def setting_of_another_module(site, new):
    site.modules["clip"].limit = 2.0


def another_class(site, new):
    site.modules["clip"].__class__ = Soft


def another_module(site, new):
    site.modules[""].second = nn.Identity()


HARM = {
    weight_of_another_module: "second.weight",
    setting_of_another_module: "clip.limit",
    another_class: "clip.__class__",
    another_module: "second.__class__",
}


@pytest.mark.parametrize("harm", HARM)
def test_what_built_changes_beside_its_own_modules_is_named(harm):
    """In a plan with a learned rewrite no comparison of outputs would tell."""
    table = check_plan(chain(), (dataclasses.replace(EXACT, built=clone_and(harm)), LEARNED), samples=IMAGES)
    assert not table.passed
    told = {verdict.site: verdict.note for verdict in table.failed}
    assert told[HARM[harm]].startswith(f"built changed what it does not replace: {HARM[harm]}")


def test_a_module_that_spoils_its_input_fails_at_its_site():
    rule = dataclasses.replace(EXACT, built=clone_and(lambda site, new: setattr(new, "inplace", True)))
    table = check_plan(chain(), (rule, LEARNED), samples=IMAGES)
    (failed,) = table.failed
    assert (failed.site, failed.max_abs) == ("act", 0.0)
    assert "it changes its input in place, which what it replaces does not" in failed.note


def test_an_operation_in_place_that_was_there_before_is_no_fault():
    model = chain()
    model.act.inplace = True
    assert check_plan(model, (EXACT,), samples=IMAGES).passed


def test_an_exact_rewrite_that_moves_the_output_fails_also_in_a_learned_plan():
    """Through a hook on a module that is not its own: neither its site nor any weight shows it."""
    rule = dataclasses.replace(EXACT, built=clone_and(lambda site, new: nudging(site.modules["second"])))
    table = check_plan(chain(), (rule, LEARNED), samples=IMAGES)
    assert "the network's output moves" in table.failed[-1].note
    assert {verdict.name for verdict in table.failed} == {"clone_act"}


def nudging(module):
    forward = type(module).forward
    module.forward = lambda x: forward(module, x) + 1e-6


def test_a_copy_of_what_was_there_is_called_one():
    sites = check_plan(chain(), (EXACT,), samples=IMAGES).verdicts
    assert sites[0].passed and sites[0].note == "bit for bit; unchanged: what was built is a copy of what was there"

    class Same(nn.ReLU):
        """Of another class: not known to be unchanged."""

    rule = dataclasses.replace(EXACT, built=lambda site: {site.path: Same()})
    assert check_plan(chain(), (rule,), samples=IMAGES).verdicts[0].note == "bit for bit"


def test_a_module_that_does_not_run_is_told_with_its_rewrite():
    rule = dataclasses.replace(EXACT, built=lambda site: {site.path: nn.Conv2d(7, 3, 1).double()})
    with pytest.raises(RewriteError, match="^clone_act at act: RuntimeError: .*7 channels"):
        check_plan(chain(), (rule,), samples=IMAGES)
    learned = dataclasses.replace(rule, claim=Learned("S-measure", 0.9))
    for plan, what in (((learned,), "samples"), ((learned, LEARNED), "example inputs")):
        with pytest.raises(
            RewriteError, match=rf"^After clone_act the network does not run on {what} of \(2, 3, 4, 5\)"
        ):
            check_plan(chain(), plan, samples=IMAGES)


# Samples, scores and modes


class Mirrored(nn.Module):
    def forward(self, x):
        return x.clamp(min=0).flip(-1)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_constant_samples_prove_nothing(value):
    model = nn.Sequential(nn.ReLU(), nn.Identity()).eval()
    mirrored = dataclasses.replace(EXACT, built=lambda site: {site.path: Mirrored()}, claim=Exact(movement=True))
    table = check_plan(model, (mirrored,), samples=[torch.full((1, 3, 4, 5), value)])
    assert {verdict.status for verdict in table.verdicts} == {"pending"} and not table.passed
    assert (
        all("constant on these samples, which proves nothing" in verdict.note for verdict in table.verdicts)
        or not value
    )
    assert len(check_plan(model, (mirrored,), samples=IMAGES).failed) == 2


@pytest.mark.parametrize(("score", "status"), [(0.93, "passed"), (0.85, "failed"), (None, "pending")])
def test_a_score_brings_a_learned_rewrite_from_pending_to_passed(score, status):
    scores = {} if score is None else {"substitute_clip": score}
    *sites, whole = check_plan(chain(), (EXACT, LEARNED), samples=IMAGES, scores=scores).verdicts
    assert [verdict.status for verdict in sites] == ["passed", status]
    assert whole.status == status and whole.max_abs is not None


def test_a_network_is_as_good_as_the_learned_rewrite_that_is_nearest_to_failing():
    other = dataclasses.replace(LEARNED, name="substitute_act", replaces=nn.ReLU, claim=Learned("F", 0.5))

    def whole(**scores):
        verdict = check_plan(chain(), (other, LEARNED), samples=IMAGES, scores=scores).verdicts[-1]
        return verdict.status, verdict.claim

    assert whole(substitute_act=0.95, substitute_clip=0.91) == ("passed", "learned: S-measure ≥ 0.9")
    assert whole(substitute_act=0.4, substitute_clip=0.99) == ("failed", "learned: F ≥ 0.5")
    assert whole(substitute_act=0.95) == ("pending", "learned: S-measure ≥ 0.9")


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ({"substitute_klip": 0.9}, "given for 'substitute_klip', .*; those are substitute_clip"),
        ({"clone_act": 0.9}, "which is no learned rewrite"),
        ({"substitute_clip": "0.9"}, "a number; found '0.9'"),
    ],
)
def test_scores_for_nothing_or_of_no_number_are_refused(scores, told):
    with pytest.raises(LumenError, match=told):
        check_plan(chain(), (EXACT, LEARNED), samples=IMAGES, scores=scores)


@pytest.mark.parametrize("samples", [[1], [torch.zeros(0, 3, 4, 4)], 5, [(IMAGES[0],)]])
def test_samples_that_are_no_images_are_refused(samples):
    with pytest.raises(RewriteError, match="Samples are images, such as"):
        check_plan(chain(), (EXACT,), samples=samples)


def test_a_network_in_training_mode_is_not_checked():
    model = chain()
    model.act.train()
    with pytest.raises(RewriteError, match=r"in training mode \(1 of its modules, first act\), .* call .eval\(\)"):
        check_plan(model, (EXACT,), samples=IMAGES)


def test_progress_is_told_by_rewrite_and_can_be_left_out(capsys):
    check_plan(chain(), (EXACT, LEARNED), samples=IMAGES)
    assert "Checking" in capsys.readouterr().err
    check_plan(chain(), (EXACT, LEARNED), samples=IMAGES, progress=False)
    assert capsys.readouterr().err == ""
