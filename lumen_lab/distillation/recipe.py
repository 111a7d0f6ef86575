"""How a network is trained, as one record: steps, batch, rates, sizes, losses; what a checkpoint is held against."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lumen_lab.distillation.losses import LossWeights
from lumen_lab.distillation.transfer import TransferWeights
from lumen_lab.errors import LumenError


@dataclass(frozen=True)
class Schedule:
    """How long, how fast and on what a run trains; the rate follows a cosine to zero.

    ``batch`` counts the scenes of a step over all processes; it is computed in ``accumulate`` parts, one after the
    other, which takes as much less memory. ``scenes``: how many there are, shown in another order in each epoch; None
    shows new ones for ever. ``LumenError`` for what cannot be trained with.
    """

    steps: int
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    warmup_steps: int = 200
    ema_decay: float = 0.998
    max_gradient_norm: float = 5.0
    accumulate: int = 1
    scenes: int | None = None
    seed: int = 0

    least_batch: ClassVar[int] = 1

    def __post_init__(self) -> None:
        wrong = next(self.refusals(), None)
        if wrong:
            raise LumenError(f"A recipe cannot have {wrong}.")

    def size_at(self, step: int) -> tuple[int, int] | None:
        """Training size (H, W) at ``step``; None where the data has but one."""

    def rate_at(self, step: int) -> float:
        """Learning rate at ``step``: linear warm-up, then half a cosine."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def scenes_at_step(self, step: int) -> Sequence[int]:
        """Which scenes the batch of ``step`` holds."""
        places = range(step * self.batch, (step + 1) * self.batch)
        if self.scenes is None:
            return places
        return [epoch_order(self.seed, place // self.scenes, self.scenes)[place % self.scenes] for place in places]

    def refusals(self) -> Iterator[str]:
        """What was given and what would do, for each thing that cannot be."""
        least = {"steps": 1, "batch": self.least_batch, "warmup_steps": 0, "accumulate": 1, "scenes": 1}
        for name, number in least.items():
            if getattr(self, name) is not None and getattr(self, name) < number:
                why = " (batch statistics need two scenes)" if (name, number) == ("batch", 2) else ""
                yield f"{name} {getattr(self, name)}; {number} is the least{why}"
        if self.accumulate > 0 and self.batch % self.accumulate:
            yield f"a batch of {self.batch} in {self.accumulate} parts; give parts of one size"
        yield from self._not_positive("learning_rate", "max_gradient_norm")
        yield from self._negative("weight_decay")
        yield from self._no_share("ema_decay")

    def _not_positive(self, *names: str) -> Iterator[str]:
        for name in names:
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                yield f"{name} {getattr(self, name)}; it is a number above 0"

    def _negative(self, *names: str) -> Iterator[str]:
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name} {getattr(self, name)}; it is a number, 0 or above"

    def _no_share(self, *names: str) -> Iterator[str]:
        for name in names:
            if not 0 <= (getattr(self, name) or 0) < 1:
                yield f"{name} {getattr(self, name)}; it is 0 or above, and below 1"


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, scenes: int) -> tuple[int, ...]:
    """The order in which an epoch shows its scenes."""
    return tuple(np.random.default_rng((seed, epoch)).permutation(scenes).tolist())


@dataclass(frozen=True)
class Recipe(Schedule):
    """How to train a BiRefNet on mattes. ``sizes`` lists (from this share of the steps on, (H, W)).

    ``encoder_rate`` scales the rate of the transformer (parameters under ``bb.``). ``max_attention_logit`` holds its
    attention logits where the shifted-window mask of −100 stays a mask (``lumen_lab.distillation.attention_limit``);
    None lets them grow, which at the rate that suits the convolutions they do, into the hundreds.
    ``dropout`` and ``drop_path`` (stochastic depth) replace the network's own while it trains; None leaves them.
    ``LumenError`` for what cannot be trained with: it is said here, since a size that comes late would be met after
    hours.
    """

    encoder_rate: float = 0.3
    sizes: tuple[tuple[float, tuple[int, int]], ...] = ((0.0, (128, 128)),)
    dropout: float | None = None
    drop_path: float | None = None
    max_attention_logit: float | None = None
    weights: LossWeights = LossWeights()

    least_batch: ClassVar[int] = 2

    def size_at(self, step: int) -> tuple[int, int]:
        """Training size (H, W) at ``step``."""
        return [size for start, size in self.sizes if step >= start * self.steps][-1]

    def refusals(self) -> Iterator[str]:
        """What was given and what would do, for each thing that cannot be."""
        yield from super().refusals()
        yield from self._not_positive("max_attention_logit")
        yield from self._negative("encoder_rate")
        yield from self._no_share("dropout", "drop_path")
        if self.batch > 1 and self.accumulate > 0 and self.batch // self.accumulate < 2:
            yield f"a batch of {self.batch} in {self.accumulate} parts; batch statistics need two scenes in each"
        shares = [share for share, _ in self.sizes]
        rising = shares == sorted(set(shares)) and all(0 <= share < 1 for share in shares)  # which nan is not
        if not shares or shares[0] != 0 or not rising:
            yield f"sizes from the shares {shares} of the steps on; shares begin at 0, rise and stay below 1"
        odd = [size for _, size in self.sizes if min(size) < 32 or size[0] % 32 or size[1] % 32]
        if odd:
            yield f"the size {odd[0]}; the network takes multiples of 32"


BIREFNET_TAPS = (
    "squeeze_module",
    *(f"decoder.lateral_block{level}" for level in (4, 3, 2)),
    *(f"decoder.decoder_block{level}" for level in (4, 3, 2, 1)),
)
"""Where a BiRefNet's features are held against its teacher's: the encoder's context and maps, and each block."""
RANGES = ("fixed", "learnt", "observed")
ALARMS = ("warn", "stop", "heal")


@dataclass(frozen=True)
class DistillRecipe(Schedule):
    """How to train a student's NPU graph against its teacher.

    ``learning_rate`` is relative: the share of its own root mean square by which a weight may move in a step.
    ``integers``: on the grid of its integers (QAT), or in float, to recover from learnt rewrites. ``taps``: modules
    whose outputs are held against the teacher's, in student and teacher by one path. ``ranges`` of activations stay as
    they were calibrated ("fixed"), are learnt by LSQ gradients at ``range_rate`` of the rate, each in proportion to its
    own size ("learnt"), or are calibrated anew every ``observe_every`` steps ("observed"); the last two stop at the
    share ``freeze_ranges_at`` of the steps. ``recompute``: parts of the graph of which only the ends are kept for the
    backward pass. Gate health is looked at every ``health_every`` steps, and ``on_alarm`` says what a gate that is dead
    leads to: a line ("warn"), the end of the run ("stop"), or its restoration ("heal").
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 50
    max_gradient_norm: float = 1.0
    integers: bool = True
    weights: TransferWeights = TransferWeights()
    taps: tuple[str, ...] = BIREFNET_TAPS
    ranges: str = "fixed"
    range_rate: float = 0.1
    observe_every: int = 100
    freeze_ranges_at: float = 0.7
    recompute: int = 1
    health_every: int = 10
    patience: int = 3
    on_alarm: str = "warn"

    def refusals(self) -> Iterator[str]:
        """What was given and what would do, for each thing that cannot be."""
        yield from super().refusals()
        yield from self._not_positive("range_rate", "observe_every", "recompute", "health_every", "patience")
        if not 0 <= self.freeze_ranges_at <= 1:
            yield f"freeze_ranges_at {self.freeze_ranges_at}; it is a share of the steps, 0 to 1"
        for name, choices in (("ranges", RANGES), ("on_alarm", ALARMS)):
            if getattr(self, name) not in choices:
                yield f"{name} '{getattr(self, name)}'; there are {', '.join(choices)}"

    @property
    def frozen_from(self) -> int:
        """The step from which ranges no longer move."""
        return math.ceil(self.freeze_ranges_at * self.steps)


def recipe_record(recipe: Schedule) -> str:
    """The recipe as JSON text, to tell whether a checkpoint belongs to it."""
    return json.dumps(dataclasses.asdict(recipe), sort_keys=True)


def recipe_difference(record: str, other: str) -> str:
    """What differs between two recipes as ``recipe_record`` writes them: "batch 8, now 4"."""
    old, new = json.loads(record), json.loads(other)
    pairs = {name: (old.get(name, "unset"), new.get(name, "unset")) for name in {**old, **new}}
    return "; ".join(f"{name} {then}, now {now}" for name, (then, now) in pairs.items() if then != now)
