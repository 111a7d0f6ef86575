"""Choosing from statistics: what is predicted, what is measured beside it, and the plan that follows."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import RewriteError
from lumen_lab.network.deform import DeformableConv2d
from lumen_lab.rewrites import check_plan, rewrite
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_choice import (
    DECOMPOSE,
    SHIFTS,
    SUBSTITUTES,
    Choice,
    ChoiceRow,
    ChoiceTable,
    SuggestionTable,
    all_choices,
    decibels,
    fit_substitutes,
    measure_choices,
    only_at,
    plan_for,
    predicted_error,
    rewrite_for,
    suggest,
)
from lumen_lab.rewrites.deform_data import save_fits
from lumen_lab.rewrites.deform_shifts import ShiftedTaps
from lumen_lab.rewrites.deform_statistics import deform_statistics
from lumen_lab.rewrites.deform_substitutes import ModulatedConv
from lumen_lab.rewrites.plan_code import plan_code

PLAIN, SEPARABLE, MODULATED = map(Choice, SUBSTITUTES)


class Branches(nn.Module):
    """Deformable convs side by side on one image, from near-sighted to far-sighted."""

    def __init__(self, reaches_px=(0.0, 0.3, 1.5, 6.0), kernels=(3, 1, 1, 3)):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(DeformableConv2d(3, 4, kernel) for kernel in kernels)
        for conv, reach in zip(self.convs, reaches_px, strict=True):
            conv.offset_conv.weight.data.normal_(std=0.1 * reach)
            conv.offset_conv.bias.data.uniform_(-reach, reach)
        for conv in self.convs[1:]:
            conv.modulator_conv.weight.data.normal_(std=0.2)

    def forward(self, image):
        return torch.cat([conv(image) for conv in self.convs], 1)


def pictures(count=6, seed=0):
    torch.manual_seed(seed)
    return [F.avg_pool2d(torch.randn(1, 3, 20, 24), 3, 1, 1) for _ in range(count)]


@pytest.fixture(scope="module")
def model():
    return Branches().eval()


@pytest.fixture(scope="module")
def statistics(model):
    return deform_statistics(model, pictures())


@pytest.fixture(scope="module")
def measured(model, statistics):
    return measure_choices(model, pictures(3, seed=1), statistics=statistics)


# Predicted


def test_exact_choices_cost_nothing_and_no_choice_of_a_conv_that_looks_nowhere(statistics):
    nowhere, near, *_, far = statistics.sites
    assert all(predicted_error(site, Choice(DECOMPOSE)) == 0 for site in statistics.sites)
    assert predicted_error(nowhere, MODULATED) == pytest.approx(0, abs=1e-12)
    assert predicted_error(nowhere, PLAIN) == pytest.approx(0, abs=1e-12)
    assert predicted_error(near, Choice(SHIFTS, 1)) == 0
    assert 0 < predicted_error(near, MODULATED) < predicted_error(far, MODULATED) <= 1
    assert predicted_error(near, PLAIN) > predicted_error(near, MODULATED)
    errors = [predicted_error(far, Choice(SHIFTS, radius)) for radius in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0


def test_the_formulas_are_those_of_the_docstring(statistics):
    far = statistics.sites[3]
    correlation = sum(far.correlation_at(max(q - 2, 0.0)) for q in far.offset_quantiles_px) / 101
    shifts = 1 + far.inside_share_within[2] / far.inside_share - 2 * correlation
    assert predicted_error(far, Choice(SHIFTS, 2)) == pytest.approx(shifts)
    correlation = sum(far.correlation_at(q) for q in far.offset_quantiles_px) / 101
    kept = correlation**2 * min(1, far.inside_share / far.inside_share_within[0])
    assert predicted_error(far, MODULATED) == pytest.approx(1 - kept)
    assert predicted_error(far, PLAIN) == pytest.approx(1 - kept * far.constant_share)
    separable = kept * far.attention_share * far.rank_one_share
    assert predicted_error(far, SEPARABLE) == pytest.approx(1 - separable)


def test_choices_come_in_the_order_of_their_tiles():
    assert [str(choice) for choice in all_choices(1, (2, 1))] == [
        "substitute_plain_conv",
        "substitute_modulated_conv",
        "substitute_separable_conv",
        "decompose_deform_conv",
        "approximate_deform_conv_by_shifts(radius=1)",
        "approximate_deform_conv_by_shifts(radius=2)",
    ]
    for kernel in (3, 5, 7):
        names = [choice.replacement for choice in all_choices(kernel, (1,))]
        assert names == [PLAIN.replacement, SEPARABLE.replacement, DECOMPOSE, MODULATED.replacement, SHIFTS]


def test_a_radius_that_was_not_measured_is_refused(statistics):
    with pytest.raises(RewriteError, match=r"Radius 5 is not among .* \(1, 2, 3\); measure it too"):
        predicted_error(statistics.sites[3], Choice(SHIFTS, 5))


# Suggested


def test_the_cheapest_that_is_good_enough_is_suggested(statistics):
    nowhere, *_, far = suggest(statistics, at_least_db=20).suggestions
    assert nowhere.choice == PLAIN and nowhere.predicted_error < 1e-9
    assert far.choice == Choice(DECOMPOSE) and far.predicted_db is None
    assert "nothing cheaper should reach 20 dB" in far.reason and "px" in far.reason
    assert suggest(statistics, at_least_db=-1).suggestions[3].choice == PLAIN
    assert suggest(statistics, at_least_db=200).suggestions[1].choice == Choice(DECOMPOSE)


def test_without_a_look_up_shifts_serve_near_sites_and_training_far_ones(statistics):
    nowhere, near, middle, far = suggest(statistics, at_least_db=60, look_up=False).suggestions
    assert nowhere.choice == PLAIN
    assert near.choice == Choice(SHIFTS, 1) and "no offset is beyond 1 px" in near.reason
    assert middle.choice == Choice(SHIFTS, 2)
    assert far.replacement.startswith("substitute_") and "training can make good" in far.reason


def test_suggestions_and_choices_are_kept_as_json(statistics, measured, tmp_path):
    table = suggest(statistics)
    assert table.rows()[3]["predicted_db"] == "exact"
    assert SuggestionTable.load(table.save(tmp_path / "suggested.json")) == table
    assert [row["site"] for row in table.rows()] == list(statistics.by_site)
    assert ChoiceTable.load(measured.save(tmp_path / "measured.json")) == measured


# Measured


def test_every_choice_is_measured_at_every_site_beside_its_prediction(model, statistics, measured):
    assert measured.pictures == 3
    choices = all_choices(3, (1, 2, 3))
    assert len(measured.rows()) == len(choices) * len(model.convs)
    by_site = measured.by_site()
    assert [row["site"] for row in by_site] == list(statistics.by_site)
    assert all(row["decompose_deform_conv"] > 100 for row in by_site)  # rounding of float32
    assert by_site[1]["approximate_deform_conv_by_shifts(radius=1)"] > 100
    entry = next(e for e in measured.choices if e.site == "convs.3" and e.replacement == MODULATED.replacement)
    assert 10 ** (-entry.predicted_db / 10) == pytest.approx(predicted_error(statistics.sites[3], MODULATED))


def test_pictures_are_counted_and_needed(model, statistics):
    table = measure_choices(model, [torch.cat(pictures(3, seed=1))], statistics=statistics, sites="convs.1")
    assert table.pictures == 3 and {entry.site for entry in table.choices} == {"convs.1"}
    used_up = iter(pictures(1))
    deform_statistics(model, used_up)
    for images in ([], used_up, [torch.zeros(0, 3, 8, 8)]):
        with pytest.raises(RewriteError, match="needs pictures"):
            measure_choices(model, images, statistics=statistics)


def test_no_difference_is_called_exact_in_a_table_and_kept_as_none(tmp_path):
    table = ChoiceTable((ChoiceRow("a", 3, DECOMPOSE, 0, None, None), ChoiceRow("a", 3, "b", 0, 1.0, 2.0)), 1)
    assert [row["measured_db"] for row in table.rows()] == ["exact", 2.0]
    assert table.by_site() == [{"site": "a", "kernel": 3, DECOMPOSE: "exact", "b": 2.0}]
    assert ChoiceTable.load(table.save(tmp_path / "table.json")).choices[0].measured_db is None
    assert decibels(0.0) is None and decibels(0.01) == pytest.approx(20)


def test_what_is_not_finite_is_not_measured(model, statistics):
    broken = copy.deepcopy(model)
    broken.convs[2].regular_conv.weight.data[0, 0] = float("nan")
    with pytest.raises(RewriteError, match=r"at convs\.2 has weights that are not finite"):
        measure_choices(broken, pictures(1), statistics=statistics)
    image = pictures(1)[0]
    image[0, 0, 0, 0] = float("nan")
    for ask in (
        lambda: measure_choices(model, [image], statistics=statistics),
        lambda: fit_substitutes(model, [image]),
    ):
        with pytest.raises(RewriteError, match=r"What flows into convs\.0 is not finite"):
            ask()


def test_a_site_without_statistics_is_named(model, statistics):
    known = dataclasses.replace(statistics, sites=statistics.sites[:1])
    with pytest.raises(RewriteError, match=r"no entry for convs\.2, only for convs\.0; measure it as well"):
        measure_choices(model, pictures(1), statistics=known, sites=["convs.2"])
    with pytest.raises(RewriteError, match=r"No deformable conv at a\.b; they are at convs\.0"):
        measure_choices(model, pictures(1), statistics=statistics, sites="a.b")


def test_the_measured_figure_is_the_sqnr_of_the_sites_output(model, statistics, measured):
    conv = model.convs[3]
    table = measure_choices(model, pictures(3, seed=1), statistics=statistics, sites=["convs.3"])
    assert [row["site"] for row in table.by_site()] == ["convs.3"]
    rule = rewrite_for(PLAIN, statistics=dataclasses.replace(statistics, sites=(renamed(statistics.sites[3], "0"),)))
    new = rewrite(nn.Sequential(conv), (rule,), example_inputs=tuple(pictures(1))).model
    with torch.no_grad():
        pairs = [(conv(x), new(x)) for x in pictures(3, seed=1)]
    noise = sum(float((y - z).square().sum()) for y, z in pairs)
    expected = 10 * torch.log10(sum((y * y).sum() for y, _ in pairs) / noise)
    assert table.by_site()[0][PLAIN.replacement] == pytest.approx(float(expected), abs=1e-3)


def renamed(site, path):
    return dataclasses.replace(site, site=path)


def test_prediction_puts_the_choices_in_nearly_the_measured_order(measured):
    assert measured.rank_correlation() > 0.8


def test_rank_correlation_is_spearmans():
    rows = [(None, 130.0), (20.0, 25.0), (10.0, 12.0), (3.0, 1.0)]
    table = ChoiceTable(tuple(ChoiceRow("a", 3, "x", 0, *pair) for pair in rows), 1)
    assert table.rank_correlation() == pytest.approx(1.0)
    backwards = ChoiceTable(tuple(ChoiceRow("a", 3, "x", 0, p, m) for (p, _), (_, m) in zip(rows, rows[::-1])), 1)
    assert backwards.rank_correlation() == pytest.approx(-1.0)


def test_a_fitted_start_is_nearer_than_one_from_statistics():
    """On pictures that neither has seen; the taps look up to a pixel aside, each into its own direction."""
    model = Branches((1.0,), (3,)).eval()
    statistics, fitted = deform_statistics(model, pictures(12)), fit_substitutes(model, pictures(12))
    assert list(fitted) == list(SUBSTITUTES)
    tables = [
        measure_choices(model, pictures(3, seed=1), statistics=statistics, fitted=kernels) for kernels in (None, fitted)
    ]
    before, after = (table.by_site()[0] for table in tables)
    gained_db = {name: after[name] - before[name] for name in SUBSTITUTES}
    assert min(gained_db.values()) > 0.5, gained_db


def test_a_site_without_a_fit_is_refused(model, statistics):
    fitted = {PLAIN.replacement: {"elsewhere": None}}
    with pytest.raises(RewriteError, match=r"substitute_plain_conv is refused at convs\.0"):
        measure_choices(model, pictures(1), statistics=statistics, fitted=fitted)


# Plans with different replacements


def test_a_rewrite_can_be_kept_to_named_sites(model):
    rule = only_at(DECOMPOSE_DEFORM_CONV, ["convs.1", "convs.3"])
    log = rewrite(model, (rule,), example_inputs=tuple(pictures(1))).log
    assert [entry.site for entry in log.applied()] == ["convs.1", "convs.3"]
    assert {entry.refused for entry in log.entries if entry.refused} == {"the plan asks for it at other sites only"}
    assert rule.expression == "only_at(DECOMPOSE_DEFORM_CONV, ('convs.1', 'convs.3'))"
    assert eval(rule.expression).expression == rule.expression
    assert only_at(rule, "convs.1").expression.startswith("only_at(only_at(")
    with pytest.raises(RewriteError, match="given no sites"):
        only_at(DECOMPOSE_DEFORM_CONV, [])


def test_what_a_rewrite_refuses_stays_refused_at_a_named_site():
    net = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)).eval()
    log = rewrite(net, (only_at(FOLD_BATCH_NORM, ["1"]),), example_inputs=torch.zeros(1, 3, 4, 4)).log
    assert "ReLU" in log.entries[0].refused


def test_the_plan_of_the_suggestions_puts_each_at_its_site(model, statistics):
    suggestions = suggest(statistics, at_least_db=60, look_up=False)
    plan = plan_for(suggestions, statistics=statistics)
    new = rewrite(model, plan, example_inputs=tuple(pictures(1)))
    kinds = [type(conv) for conv in new.model.convs]
    assert kinds[0] is nn.Conv2d and kinds[1:3] == [ShiftedTaps, ShiftedTaps]
    assert not any(isinstance(conv, DeformableConv2d) for conv in new.model.convs)
    assert {conv.radius for conv in new.model.convs[1:3]} == {2}, "shifts of one plan share the largest radius"
    table = check_plan(model, plan, samples=pictures(2))
    assert table.failed == [] and {v.status for v in table.verdicts} == {"passed", "pending"}


def test_a_plan_from_files_is_written_as_code_and_made_again(model, statistics, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted = fit_substitutes(model, pictures())
    save_fits(fitted, "fits.safetensors")
    statistics.save("statistics.json")
    suggestions = suggest(statistics, at_least_db=5, look_up=False)
    plan = plan_for(suggestions, statistics="statistics.json", fitted="fits.safetensors")
    learned = [rule for rule in plan if rule.name in SUBSTITUTES]
    assert learned and all(f"{rule.name}(fitted='fits.safetensors')" in rule.expression for rule in learned)
    names = {}
    exec(plan_code(plan), names)
    images = pictures(1)
    first, again = (rewrite(model, made, example_inputs=tuple(images)).model for made in (plan, names["plan"]))
    from_memory = rewrite(model, plan_for(suggestions, fitted=fitted), example_inputs=tuple(images)).model
    with torch.no_grad():
        assert torch.equal(first(images[0]), again(images[0]))
        assert torch.equal(first(images[0]), from_memory(images[0]))
    code = rewrite_for(PLAIN, statistics="statistics.json").expression
    assert code == "substitute_plain_conv(statistics='statistics.json')"


def test_an_exact_suggestion_is_an_exact_plan(tiny):
    torch.manual_seed(0)
    image = torch.randn(1, 3, 64, 96)
    statistics = deform_statistics(tiny, [image])
    plan = plan_for(suggest(statistics, at_least_db=300))
    assert [rule.name for rule in plan] == [DECOMPOSE]
    before = copy.deepcopy(tiny.state_dict())
    new = rewrite(tiny, plan)
    assert len(new.log.applied(DECOMPOSE)) == 20
    assert all(torch.equal(tiny.state_dict()[name], value) for name, value in before.items())


def test_modulated_convs_take_the_place_of_far_sighted_ones(tiny):
    """A plan by sites on the whole network: k = 1 keeps its look-up, the others lose it."""
    statistics = deform_statistics(tiny, [torch.randn(1, 3, 64, 96)])
    sites = [site.site for site in statistics.sites if site.kernel > 1]
    others = [site.site for site in statistics.sites if site.kernel == 1]
    plan = (only_at(rewrite_for(MODULATED), sites), only_at(DECOMPOSE_DEFORM_CONV, others))
    new = rewrite(tiny, plan).model
    assert sum(isinstance(part, ModulatedConv) for part in new.modules()) == len(sites) == 10
    with torch.no_grad():
        assert new(torch.randn(1, 3, 64, 96)).shape == (1, 1, 64, 96)
