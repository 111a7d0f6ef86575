"""How a network is trained, as one record: steps, batch, rates, sizes, losses; what a checkpoint is held against."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from lumen_lab.distillation.losses import LossWeights
from lumen_lab.errors import LumenError


@dataclass(frozen=True)
class Recipe:
    """How to train. ``sizes`` lists (from this share of the steps on, (H, W)); the rate follows a cosine to zero.

    ``encoder_rate`` scales the rate of the transformer (parameters under ``bb.``). ``max_attention_logit`` holds its
    attention logits where the shifted-window mask of −100 stays a mask (``lumen_lab.distillation.attention_limit``);
    None lets them grow, which at the rate that suits the convolutions they do, into the hundreds.
    ``dropout`` and ``drop_path`` (stochastic depth) replace the network's own while it trains; None leaves them.
    ``batch`` counts the scenes of a step over all processes. ``LumenError`` for what cannot be trained with: it is
    said here, since a size that comes late would be met after hours.
    """

    steps: int
    batch: int = 8
    learning_rate: float = 1e-3
    encoder_rate: float = 0.3
    weight_decay: float = 1e-2
    warmup_steps: int = 200
    sizes: tuple[tuple[float, tuple[int, int]], ...] = ((0.0, (128, 128)),)
    dropout: float | None = None
    drop_path: float | None = None
    max_attention_logit: float | None = None
    ema_decay: float = 0.998
    max_gradient_norm: float = 5.0
    weights: LossWeights = LossWeights()
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = next(_refusals(self), None)
        if wrong:
            raise LumenError(f"A recipe cannot have {wrong}.")

    def size_at(self, step: int) -> tuple[int, int]:
        """Training size (H, W) at ``step``."""
        return [size for start, size in self.sizes if step >= start * self.steps][-1]

    def rate_at(self, step: int) -> float:
        """Learning rate at ``step``: linear warm-up, then half a cosine."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def _refusals(recipe: Recipe) -> Iterator[str]:
    """What was given and what would do, for each thing that cannot be."""
    for name, least in (("steps", 1), ("batch", 2), ("warmup_steps", 0)):
        if getattr(recipe, name) < least:
            why = " (batch statistics need two scenes)" if name == "batch" else ""
            yield f"{name} {getattr(recipe, name)}; {least} is the least{why}"
    for name in ("learning_rate", "max_gradient_norm", "max_attention_logit"):
        if getattr(recipe, name) is not None and not 0 < getattr(recipe, name) < math.inf:
            yield f"{name} {getattr(recipe, name)}; it is a number above 0"
    for name in ("encoder_rate", "weight_decay"):
        if not 0 <= getattr(recipe, name) < math.inf:
            yield f"{name} {getattr(recipe, name)}; it is a number, 0 or above"
    for name in ("dropout", "drop_path", "ema_decay"):
        if not 0 <= (getattr(recipe, name) or 0) < 1:
            yield f"{name} {getattr(recipe, name)}; it is 0 or above, and below 1"
    shares = [share for share, _ in recipe.sizes]
    rising = shares == sorted(set(shares)) and all(0 <= share < 1 for share in shares)  # which nan is not
    if not shares or shares[0] != 0 or not rising:
        yield f"sizes from the shares {shares} of the steps on; shares begin at 0, rise and stay below 1"
    odd = [size for _, size in recipe.sizes if min(size) < 32 or size[0] % 32 or size[1] % 32]
    if odd:
        yield f"the size {odd[0]}; the network takes multiples of 32"


def recipe_record(recipe: Recipe) -> str:
    """The recipe as JSON text, to tell whether a checkpoint belongs to it."""
    return json.dumps(dataclasses.asdict(recipe), sort_keys=True)


def recipe_difference(record: str, other: str) -> str:
    """What differs between two recipes as ``recipe_record`` writes them: "batch 8, now 4"."""
    old, new = json.loads(record), json.loads(other)
    pairs = {name: (old.get(name, "unset"), new.get(name, "unset")) for name in {**old, **new}}
    return "; ".join(f"{name} {then}, now {now}" for name, (then, now) in pairs.items() if then != now)
