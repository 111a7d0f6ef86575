"""Recipes: rates, sizes, what tells two apart, and what is refused before it can cost hours."""

import dataclasses
import json
import math

import pytest

from lumen_lab.distillation.losses import LossWeights
from lumen_lab.distillation.recipe import Recipe, recipe_difference, recipe_record
from lumen_lab.errors import LumenError

RECIPE = Recipe(steps=6, batch=2, sizes=((0.0, (64, 64)), (0.5, (64, 96))))


def test_rate_warms_up_and_ends_at_zero():
    recipe = Recipe(steps=100, learning_rate=1.0, warmup_steps=10)
    assert recipe.rate_at(0) == pytest.approx(0.1)
    assert recipe.rate_at(4) == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 0.04)))
    assert recipe.rate_at(50) == pytest.approx(0.5)
    assert recipe.rate_at(99) < 1e-3
    assert recipe.rate_at(100) == 0
    rates = [recipe.rate_at(step) for step in range(10, 100)]
    assert rates == sorted(rates, reverse=True)
    assert Recipe(steps=10, warmup_steps=0, learning_rate=1.0).rate_at(0) == 1.0


def test_size_grows_at_its_share_of_the_steps():
    recipe = Recipe(steps=10, sizes=((0.0, (64, 96)), (0.5, (96, 96)), (0.8, (128, 160))))
    assert [recipe.size_at(step) for step in (0, 4, 5, 7, 8, 9)] == [
        (64, 96), (64, 96), (96, 96), (96, 96), (128, 160), (128, 160)
    ]  # fmt: skip


def test_a_recipe_is_told_apart_by_everything_in_it():
    recipe = dataclasses.replace(RECIPE, batch=4)
    assert recipe_record(recipe) == recipe_record(dataclasses.replace(recipe))
    others = {"sizes": ((0.0, (64, 64)),), "weights": LossWeights(iou=2), "dropout": 0.0, "drop_path": 0.0}
    others |= {"max_attention_logit": 30.0, "accumulate": 2, "scenes": 100}
    for field in dataclasses.fields(Recipe):
        value = others.get(field.name)
        changed = (
            value if value is not None else getattr(recipe, field.name) + (0.001 if field.name == "ema_decay" else 2)
        )
        other = dataclasses.replace(recipe, **{field.name: changed})
        assert recipe_record(other) != recipe_record(recipe), field.name
        assert recipe_difference(recipe_record(recipe), recipe_record(other)).startswith(f"{field.name} ")


def test_scenes_that_never_end_come_in_order_and_a_few_in_another_order_each_epoch():
    endless = dataclasses.replace(RECIPE, batch=4)
    assert [list(endless.scenes_at_step(step)) for step in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    few = dataclasses.replace(endless, scenes=6)
    shown = [scene for step in range(6) for scene in few.scenes_at_step(step)]
    epochs = [shown[first : first + 6] for first in range(0, 24, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert shown[:4] == list(few.scenes_at_step(0)), "a step's scenes depend on nothing but the recipe and the step"
    assert shown[:4] != list(dataclasses.replace(few, seed=1).scenes_at_step(0))


def test_a_difference_names_what_was_and_what_is():
    other = recipe_record(dataclasses.replace(RECIPE, batch=4, dropout=0.5))
    assert recipe_difference(recipe_record(RECIPE), other) == "batch 2, now 4; dropout None, now 0.5"
    earlier = json.loads(recipe_record(RECIPE))
    del earlier["drop_path"]  # a field that a later version added
    assert recipe_difference(json.dumps(earlier), recipe_record(RECIPE)) == "drop_path unset, now None"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "steps 0; 1 is the least"),
        ({"batch": 1}, "batch 1; 2 is the least (batch statistics need two scenes)"),
        ({"batch": 4, "accumulate": 3}, "a batch of 4 in 3 parts; give parts of one size"),
        ({"batch": 4, "accumulate": 4}, "a batch of 4 in 4 parts; batch statistics need two scenes in each"),
        ({"accumulate": 0}, "accumulate 0; 1 is the least"),
        ({"scenes": 0}, "scenes 0; 1 is the least"),
        ({"warmup_steps": -1}, "warmup_steps -1; 0 is the least"),
        ({"learning_rate": 0.0}, "learning_rate 0.0; it is a number above 0"),
        ({"learning_rate": math.nan}, "learning_rate nan; it is a number above 0"),
        ({"max_gradient_norm": -1.0}, "max_gradient_norm -1.0; it is a number above 0"),
        ({"weight_decay": math.inf}, "weight_decay inf; it is a number, 0 or above"),
        ({"encoder_rate": -0.1}, "encoder_rate -0.1; it is a number, 0 or above"),
        ({"dropout": 1.0}, "dropout 1.0; it is 0 or above, and below 1"),
        ({"ema_decay": 1.5}, "ema_decay 1.5; it is 0 or above, and below 1"),
        ({"sizes": ()}, "sizes from the shares [] of the steps on"),
        ({"sizes": ((0.1, (64, 64)),)}, "sizes from the shares [0.1] of the steps on"),
        ({"sizes": ((0.0, (64, 64)), (0.8, (96, 96)), (0.5, (128, 128)))}, "sizes from the shares [0.0, 0.8, 0.5]"),
        ({"sizes": ((0.0, (64, 64)), (1.0, (96, 96)))}, "sizes from the shares [0.0, 1.0] of the steps on"),
        ({"sizes": ((0.0, (64, 64)), (0.8, (100, 96)))}, "the size (100, 96); the network takes multiples of 32"),
        ({"sizes": ((0.0, (0, 64)),)}, "the size (0, 64); the network takes multiples of 32"),
    ],
)
def test_what_cannot_be_trained_with_is_refused_at_once(change, said):
    with pytest.raises(LumenError) as refusal:
        dataclasses.replace(RECIPE, **change)
    assert str(refusal.value).startswith(f"A recipe cannot have {said}")
