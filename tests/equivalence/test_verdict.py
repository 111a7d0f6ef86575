"""What passes, what fails and what is only pending."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lumen_lab.equivalence import (
    Verdict,
    VerdictTable,
    check_equivalence,
    claim_text,
    difference,
    judge,
    random_samples,
    sqnr_db,
)
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.specs import Bounded, Exact, Learned

X = torch.linspace(-3, 3, 24, dtype=torch.float64).view(2, 3, 4)


def add(amount):
    return lambda x: x + amount


def same(x):
    return x


def check(actual, claim, samples=(X,), reference=same, score=None):
    return check_equivalence(reference, actual, claim=claim, samples=samples, score=score)


@pytest.mark.parametrize(
    ("claim", "actual", "status"),
    [
        (Exact(), same, "passed"),
        (Exact(), add(1e-10), "passed"),
        (Exact(), add(4e-9), "failed"),  # the scale of X is 3
        (Exact(max_abs_float64=1e-8), add(4e-9), "passed"),
        (Exact(movement=True), same, "passed"),
        (Exact(movement=True), add(1e-15), "failed"),
        (Bounded(0.1, "any"), add(0.09), "passed"),
        (Bounded(0.1, "any"), add(0.11), "failed"),
        (Bounded(0.0, "any"), add(1e-15), "failed"),
        (Bounded(0.0, "any"), same, "passed"),
    ],
)
def test_the_claim_owns_the_tolerance(claim, actual, status):
    verdict = check(actual, claim)
    assert verdict.status == status
    assert verdict.passed == (status == "passed")
    assert verdict.samples == 1


def test_figures_of_a_verdict():
    verdict = check(add(0.5), Bounded(1.0, "any image"))
    assert verdict.max_abs == pytest.approx(0.5)
    assert verdict.tolerance == 1.0
    assert verdict.sqnr_db == pytest.approx(10 * math.log10(float(X.square().mean()) / 0.25))
    assert verdict.claim == "within 1 for any image"
    alike = check(same, Exact())
    assert (alike.max_abs, alike.sqnr_db, alike.note) == (0.0, None, "bit for bit")


def test_tolerance_of_an_exact_claim_grows_with_the_output():
    big = 1e6 * X
    assert check(add(1e-3), Exact(), samples=[big]).passed
    assert not check(add(1e-1), Exact(), samples=[big]).passed


@pytest.mark.parametrize(
    ("size", "error", "status"), [(1e-7, 5e-3, "failed"), (1e-7, 1e-7, "passed"), (1, 2e-9, "failed")]
)
def test_a_small_output_has_a_small_tolerance(size, error, status):
    assert check(lambda x: size * x * (1 + error), Exact(), reference=lambda x: size * x).status == status


def test_an_output_is_judged_by_its_own_scale_and_not_by_that_of_another():
    def outputs(error):
        return lambda x: (1e6 * x, x * (1 + error))

    verdict = check(outputs(1e-6), Exact(), reference=outputs(0))
    assert (verdict.status, verdict.tolerance) == ("failed", pytest.approx(3e-7))  # of the output that fails
    assert verdict.max_abs == pytest.approx(3e-6)
    assert check(outputs(1e-10), Exact(), reference=outputs(0)).passed
    late = check(lambda x: x * (1 + 1e-6 * (x.abs().max() < 1)), Exact(), samples=[1e6 * X, 1e-3 * X])
    assert late.status == "failed"
    assert check(lambda x: x + 1e-12 * (x == 0).all(), Exact(), samples=[X, 0 * X]).status == "failed"


def test_what_is_zero_but_for_rounding_is_judged_by_what_was_cancelled():
    """Terms of 3 leave 1e-16 of each other; a difference of 1e-12 is none of rounding."""

    def cancelled(rest):
        return lambda x: (x + 0.1) - x - 0.1 + rest

    reference = cancelled(0.0)
    assert 0 < float(reference(X).abs().max()) < 1e-15
    assert check(lambda x: (x - 0.1) - x + 0.1, Exact(), reference=reference).passed
    assert check(cancelled(1e-12), Exact(), reference=reference).status == "failed"


@pytest.mark.parametrize("claim", [Exact(), Exact(movement=True), Bounded(0.1, "any")])
def test_outputs_of_zero_prove_nothing(claim):
    verdict = check(lambda x: 0 * x.flip(-1), claim, reference=lambda x: 0 * x)
    assert verdict.status == "pending" and "every output is zero on these samples" in verdict.note
    assert check(lambda x: 0 * x + 1, claim, reference=lambda x: 0 * x).status == "failed"
    assert check(lambda x: (0 * x, x), claim, reference=lambda x: (0 * x, x)).passed


def test_a_score_is_a_number():
    for score in ("0.9", True):
        with pytest.raises(LumenError, match="is its S-measure, a number; found"):
            check(same, Learned("S-measure", 0.9), score=score)


def test_an_exact_claim_is_checked_in_float64_on_copies():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3)
    approximate = copy.deepcopy(conv)
    with torch.no_grad():
        approximate.weight += 1e-7  # invisible in float32 sums, not in float64
    image = torch.randn(1, 3, 8, 8)
    assert check_equivalence(conv, copy.deepcopy(conv), claim=Exact(), samples=[image]).passed
    assert not check_equivalence(conv, approximate, claim=Exact(), samples=[image]).passed
    assert conv.weight.dtype == torch.float32


@pytest.mark.parametrize("claim", [Exact(), Exact(movement=True), Bounded(1e9, "any")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails(claim, bad):
    spoiled = X.clone()
    spoiled[0, 1, 2] = bad
    verdict = check(lambda x: spoiled, claim)
    assert verdict.status == "failed"
    assert (verdict.max_abs, verdict.sqnr_db, verdict.note) == (None, None, "the difference is not finite")


def test_nan_in_a_later_output_is_not_lost_behind_a_good_one():
    claim = Bounded(1e9, "any")

    def outputs(last):
        return lambda x: (x, x * last)

    assert check(outputs(math.nan), claim, reference=outputs(1)).status == "failed"
    assert check(outputs(1), claim, reference=outputs(1)).passed


@pytest.mark.parametrize("claim", [Exact(), Exact(movement=True), Bounded(1e9, "any")])
def test_nan_on_both_sides_proves_nothing_and_fails(claim):
    assert check(add(math.nan), claim, reference=add(math.nan)).status == "failed"


def test_the_same_infinity_on_both_sides_is_no_difference_and_stretches_no_tolerance():
    masked = X.clone()
    masked[0, 0, 0] = -math.inf
    assert check(same, Exact(), samples=[masked]).passed
    assert check(add(0.0), Bounded(0.1, "any"), samples=[masked]).max_abs == 0.0
    assert not check(add(1.0), Exact(), samples=[masked]).passed


def test_another_shape_fails_with_a_note():
    verdict = check(lambda x: x[:1], Exact())
    assert (verdict.status, verdict.max_abs) == ("failed", None)
    assert verdict.note == "shapes differ: expected (2, 3, 4), found (1, 3, 4)"


def test_outputs_without_a_single_number_prove_nothing():
    verdict = check(same, Exact(), samples=[torch.zeros(0, 3)])
    assert (verdict.status, verdict.note) == ("failed", "nothing to compare")


def test_a_broadcastable_shape_is_not_the_same_shape():
    assert not check(lambda x: x[None], Exact()).passed


def test_another_number_of_outputs_is_an_error():
    with pytest.raises(LumenError, match="returns 1 tensors, the other 2"):
        check(lambda x: (x, x), Exact())


def test_every_output_and_every_sample_counts():
    def outputs(third):
        return lambda x: {"mask": x, "sides": [(x,), x + third], "none": None}

    samples = random_samples([(4, 4), (5, 7)])
    assert check(outputs(0), Exact(), samples, outputs(0)).samples == 6
    assert not check(outputs(1e-3), Exact(), samples, outputs(0)).passed
    late = check(lambda x: x + (x.shape[-1] == 7), Exact(), samples)
    assert (late.status, late.max_abs) == ("failed", 1.0)


@pytest.mark.parametrize("claim", [Exact(), Bounded(1.0, "any")])
def test_no_samples_is_an_error(claim):
    with pytest.raises(LumenError, match="given no samples; a check without samples proves nothing"):
        check(same, claim, samples=[])


def test_samples_may_be_tuples_of_inputs_and_integers_stay_integers():
    def choose(x, index):
        return x[index]

    pair = (X.float(), torch.tensor([1, 0]))
    assert check_equivalence(choose, lambda x, i: x.flip(0), claim=Exact(), samples=[pair]).passed


def test_an_operation_in_place_on_one_side_does_not_reach_the_other():
    assert not check(same, Exact(), reference=nn.ReLU(inplace=True)).passed
    assert not check(nn.ReLU(inplace=True), Exact()).passed
    assert float(X.min()) == -3


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8])
def test_outputs_that_are_not_floating_point_are_compared_too(kind):
    def positive(x):
        return (x > 0).to(kind)

    assert check(positive, Exact(movement=True), reference=positive).passed
    flipped = check(lambda x: (x <= 0).to(kind), Exact(), reference=positive)
    assert (flipped.status, flipped.max_abs) == ("failed", 1.0)


@pytest.mark.parametrize(
    ("score", "status"), [(None, "pending"), (0.89, "failed"), (0.9, "passed"), (1.0, "passed"), (math.nan, "failed")]
)
def test_a_learned_claim_is_judged_by_its_score_alone(score, status):
    claim = Learned("S-measure", 0.9)
    verdict = check_equivalence(same, add(9.0), claim=claim, samples=[], score=score)
    assert verdict.status == status
    assert verdict.passed == (status == "passed")
    assert verdict.claim == "learned: S-measure ≥ 0.9"


def test_claims_in_words():
    assert claim_text(Exact(movement=True)) == "exact, bit for bit"
    assert claim_text(Exact()) == "exact (float64, ≤ 1e-09 of the scale)"


# Tables


def verdict(name, status, max_abs=None):
    return Verdict(name, "site", "claim", status, max_abs, 1.0, None, 1)


def test_a_table_shows_failures_first_and_passes_only_if_all_did():
    table = VerdictTable(
        (verdict("a", "passed"), verdict("b", "pending"), verdict("c", "failed"), verdict("d", "passed"))
    )
    assert [row["name"] for row in table.rows()] == ["c", "b", "a", "d"]
    assert [entry.name for entry in table.failed] == ["c"]
    assert not table.passed
    assert VerdictTable((verdict("a", "passed"),)).passed
    assert not VerdictTable((verdict("a", "passed"), verdict("b", "pending"))).passed
    assert not VerdictTable(()).passed


def test_a_summary_has_a_row_a_name_with_the_worst_difference():
    verdicts = verdict("a", "passed", 0.1), verdict("a", "failed", 0.7), verdict("b", "pending")
    assert VerdictTable(verdicts).summary() == [
        {"check": "a", "claim": "claim", "sites": 2, "passed": 1, "pending": 0, "failed": 1, "worst": 0.7},
        {"check": "b", "claim": "claim", "sites": 1, "passed": 0, "pending": 1, "failed": 0, "worst": None},
    ]
    bounded = tuple(replace(verdict("a", "passed", 1e-12), real_max_abs=real) for real in (0.3, 0.5, None))
    rows = VerdictTable((*bounded, verdict("b", "passed", 0.1))).summary()
    assert [row["worst on real inputs"] for row in rows] == [0.5, None]


def test_a_table_is_saved_and_read_again_figures_without_end_included(tmp_path):
    bad = check(lambda x: x * math.nan, Exact())
    table = VerdictTable((check(same, Exact()), bad, check(same, Learned("S-measure", 0.9))))
    assert VerdictTable.load(table.save(tmp_path / "table.json")) == table
    assert "failed" in table._repr_html_()


def test_the_page_of_a_table_sums_up_and_names_what_has_not_passed():
    table = VerdictTable((verdict("a", "passed", 0.1), verdict("<b>", "failed", 0.7), verdict("c", "pending")))
    assert str(table) == "3 checks: 1 failed, 1 pending, 1 passed"
    page = table._repr_html_()
    summed, rest = page.split("Not passed")
    assert str(table) in summed and "&lt;b&gt;" in summed and "<b>" not in page
    assert rest.index("failed") < rest.index("pending") < rest.index("Every check")
    assert "Not passed" not in VerdictTable((verdict("a", "passed"),))._repr_html_()
    assert str(VerdictTable(())) == "0 checks: nothing was checked"


@pytest.mark.parametrize("content", ["[]", "{}", '{"record": "RewriteLog", "entries": []}', '{"verdicts": [1]}', "{"])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ArtifactError, match="VerdictTable"):
        VerdictTable.load(tmp_path / "other.json")


# Parts


def test_difference_of_empty_tensors_is_zero():
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_judging_needs_pairs():
    with pytest.raises(LumenError, match="no samples"):
        judge([], Exact(), name="a", site="b")


def test_signal_to_difference_ratio_by_hand():
    ones, near = torch.ones(10), torch.full((10,), 0.9)
    assert sqnr_db([(ones, near)]) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db([(ones, ones)]) == math.inf
    assert sqnr_db([(torch.zeros(2), ones[:2])]) == -math.inf


def test_random_samples_depend_on_the_seed_alone():
    first, again = random_samples([(3, 5), (4, 2)]), random_samples([(3, 5), (4, 2)])
    torch.randn(7)
    assert [tuple(sample.shape) for sample in first] == [(2, 3, 3, 5), (2, 3, 4, 2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], random_samples([(3, 5)], seed=1)[0])
