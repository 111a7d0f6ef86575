"""Plans as code: what is executed gives the plan back, and what would not is refused or left out."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from lumen_lab.errors import RewriteError
from lumen_lab.rewrites import EXACT_PLAN, LEAN_PLAN, LUMEN_PLAN
from lumen_lab.rewrites.catalogue import CATALOGUE
from lumen_lab.rewrites.channels import split_conv_over_inputs
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV, RECOMPOSE_DEFORM_CONV, decompose_deform_conv
from lumen_lab.rewrites.deform_data import FittedConv, save_fits
from lumen_lab.rewrites.deform_substitutes import substitute_plain_conv
from lumen_lab.rewrites.plan import only_at
from lumen_lab.rewrites.plan_code import family_of, plan_code, same
from lumen_lab.rewrites.windows import substitute_window

MINE = """
import importlib
from dataclasses import replace
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV

def built(site):
    return DECOMPOSE_DEFORM_CONV.built(site)

def decompose(times=1):
    made = lambda site: times and built(site)
    return replace(DECOMPOSE_DEFORM_CONV, name="decompose", built=made, code=f"decompose({times=})")

FOLD_X = replace(FOLD_BATCH_NORM, name="fold_x", code="mine.FOLD_X")
DECOMPOSE_X = replace(DECOMPOSE_DEFORM_CONV, name="decompose_x", built=built)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of somebody else's with rewrites in it."""
    import sys

    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    mine = importlib.import_module((tmp_path / "mine.py").stem)

    yield mine
    del sys.modules["mine"]


def executed(code, **given):
    exec(compile(code, "plan", "exec"), given)
    return given["plan"]


PLANS = {
    "exact": EXACT_PLAN,
    "lumen": LUMEN_PLAN,
    "lean": LEAN_PLAN,
    "catalogue": CATALOGUE,
    "empty": (),
    "one": CATALOGUE[-1:],
    "inverse": (RECOMPOSE_DEFORM_CONV,),
}


@pytest.mark.parametrize("name", PLANS)
def test_executed_code_gives_equal_records_in_order(name):
    assert executed(plan_code(PLANS[name])) == PLANS[name]


@pytest.mark.parametrize(
    "rule",
    [
        substitute_window(window=(8, 8, 16, 16)),
        split_conv_over_inputs(512, wider_than=600),
        decompose_deform_conv(taps_at_once=9),  # written as the constant that it equals
        only_at(decompose_deform_conv(taps_at_once=3), ["a.b", "c"]),
    ],
    ids=lambda rule: rule.expression,
)
def test_a_rewrite_with_parameters_is_made_again_with_them(rule):
    (again,) = executed(plan_code((rule,)))
    assert again.expression == rule.expression and again.sites == rule.sites
    assert (again.built.func, again.built.args) == (rule.built.func, rule.built.args)


def test_code_tells_a_plan_from_its_reverse():
    assert executed(plan_code(CATALOGUE[::-1])) == CATALOGUE[::-1] != CATALOGUE


def test_code_is_as_a_formatter_would_write_it():
    code = plan_code((DECOMPOSE_DEFORM_CONV, FOLD_BATCH_NORM))
    assert code == (
        "from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM\n"
        "from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV\n"
        "\n"
        "plan = (\n    DECOMPOSE_DEFORM_CONV,\n    FOLD_BATCH_NORM,\n)\n"
    )
    assert max(map(len, plan_code(CATALOGUE).splitlines())) <= 120
    assert plan_code(()) == "plan = ()\n"


def test_names_are_imported_from_the_file_that_defines_them_and_from_no_other():
    code = plan_code(
        (replace(FOLD_BATCH_NORM, code="Rewrite and max(FOLD_BATCH_NORM, key=None) if False else FOLD_BATCH_NORM"),)
    )
    assert "from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM\n" in code
    assert "from lumen_lab.rewrites.record import Rewrite\n" in code and "import max" not in code


CHANGED = "which makes another rewrite \\(they differ in {}\\); give the changed copy a `code`"


def other(site):
    return {}


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (replace(FOLD_BATCH_NORM, code="fold("), r"fold_batch_norm is no Python expression: 'fold\('"),
        (replace(FOLD_BATCH_NORM, name="mine"), "is written MINE, but no module of lumen_lab.rewrites defines MINE"),
        (replace(FOLD_BATCH_NORM, code="replace(FOLD_BATCH_NORM)"), "no module of lumen_lab.rewrites defines replace"),
        (replace(FOLD_BATCH_NORM, code="nowhere.FOLD_X"), "defines nowhere"),
        (replace(FOLD_BATCH_NORM, code="math.pi"), "math.pi, which is a float, no rewrite"),
        (replace(FOLD_BATCH_NORM, code="math.FOLD"), "cannot be evaluated: AttributeError"),
        (replace(FOLD_BATCH_NORM, built=other), CHANGED.format("built")),
        (only_at(replace(FOLD_BATCH_NORM, built=other), "a"), CHANGED.format("built")),
        (replace(FOLD_BATCH_NORM, after=(), resizes=True), CHANGED.format("after, resizes")),
        (replace(split_conv_over_inputs(512), built=split_conv_over_inputs(256).built), CHANGED.format("built")),
    ],
)
def test_code_that_would_not_make_the_rewrite_is_refused_with_the_reason(rule, told):
    with pytest.raises(RewriteError, match=told):
        plan_code((DECOMPOSE_DEFORM_CONV, rule))


def test_a_rewrite_that_cannot_be_written_is_left_out_alone():
    code = plan_code((DECOMPOSE_DEFORM_CONV, replace(FOLD_BATCH_NORM, built=other)), leave_out=True)
    assert executed(code) == (DECOMPOSE_DEFORM_CONV,)
    assert "\n    # left out: fold_batch_norm is written FOLD_BATCH_NORM, which makes another rewrite" in code
    assert "convolution" not in code.partition("plan =")[0]


# Rewrites of one's own, and rewrites made from data


def test_a_rewrite_of_another_module_is_imported_from_there(mine):
    plan = (DECOMPOSE_DEFORM_CONV, mine.FOLD_X, mine.DECOMPOSE_X, mine.decompose(3), only_at(mine.FOLD_X, "a"))
    code = plan_code(plan)
    assert code.startswith("import mine\nfrom lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV\n")
    assert "from mine import DECOMPOSE_X, decompose\n" in code
    made = executed(code)
    assert made[:3] == plan[:3] and made[4] == plan[4] and made[3].code == "decompose(times=3)"


def test_a_changed_copy_of_a_rewrite_of_ones_own_is_refused_too(mine):
    with pytest.raises(RewriteError, match=CHANGED.format("built")):
        plan_code((replace(mine.decompose(3), code="decompose(4)"),))


def test_data_in_memory_are_named_in_a_comment_and_asked_for_by_the_code():
    fitted = {"a": None}
    plan = (only_at(substitute_plain_conv(fitted=fitted), "a"), DECOMPOSE_DEFORM_CONV)
    code = plan_code(plan)
    assert "\n# Load first what the plan was chosen from: fitted.\n\nplan = (\n" in code
    (substitute, _) = executed(code, fitted=fitted)
    assert same(substitute, plan[0])
    with pytest.raises(NameError, match="fitted"):
        executed(code)


def test_data_in_a_file_are_written_as_its_path(tmp_path):
    name = "substitute_plain_conv"
    conv = FittedConv(torch.ones(2, 1, 3, 3), torch.zeros(2), 0.1, None, name)
    rule = substitute_plain_conv(fitted=save_fits({name: {"a": conv}}, tmp_path / "fits.safetensors"))
    assert same(executed(plan_code((rule,)))[0], rule)
    save_fits({name: {"a": replace(conv, bias=torch.ones(2))}}, tmp_path / "fits.safetensors")
    with pytest.raises(RewriteError, match=CHANGED.format("built, refused")):
        plan_code((rule,))


def test_a_family_is_the_file_that_builds_the_rewrite():
    assert family_of(DECOMPOSE_DEFORM_CONV) == "deform" and family_of(FOLD_BATCH_NORM) == "convolution"
    assert family_of(replace(FOLD_BATCH_NORM, built=partial(partial(FOLD_BATCH_NORM.built)))) == "convolution"


def adding(number):
    return lambda x: x + number


@pytest.mark.parametrize(
    ("one", "two", "alike"),
    [
        (adding(1), adding(1), True),
        (adding(1), adding(2), False),
        (partial(max, 1, key=abs), partial(max, 1, key=abs), True),
        (partial(max, 1), partial(max, 2), False),
        (partial(max, 1), partial(min, 1), False),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}, False),
        ((1, [2]), (1, [2]), True),
        ((1, [2]), (1, [3]), False),
        (1, True, False),
    ],
)
def test_functions_made_anew_are_the_same_with_the_same_values_bound(one, two, alike):
    assert same(one, two) is alike
