"""How far a layer may be from the reference before it has left: by what the two executions compute in."""

from __future__ import annotations

from dataclasses import dataclass

from lumen_lab.errors import LumenError
from lumen_lab.specs import Record


@dataclass(frozen=True)
class Tolerance(Record):
    """Bounds on one layer; it has left its tolerance as soon as one of those given is broken.

    ``max_of_scale``: largest difference, as a part of the reference layer's largest value; ``min_sqnr_db``: least
    signal-to-difference ratio, dB; ``max_steps``: largest difference of integers, and ``min_within_one``: the least
    share of them that agree to one step. ``because``: where the figures come from.
    """

    name: str
    max_of_scale: float | None = None
    min_sqnr_db: float | None = None
    max_steps: int | None = None
    min_within_one: float | None = None
    because: str = ""

    def __post_init__(self) -> None:
        bounds = (self.max_of_scale, self.min_sqnr_db, self.max_steps, self.min_within_one)
        if all(bound is None for bound in bounds):
            raise LumenError(f"The tolerance '{self.name}' bounds nothing; give at least one bound.")

    @property
    def text(self) -> str:
        """The bounds in words."""
        bounds = {
            "max |difference| ≤ {:g} of the layer's largest value": self.max_of_scale,
            "SQNR ≥ {:g} dB": self.min_sqnr_db,
            "integers at most {} steps off": self.max_steps,
            "{:.0%} of the integers within one step": self.min_within_one,
        }
        return ", ".join(words.format(bound) for words, bound in bounds.items() if bound is not None)


DEFAULT_TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(
        "float64",
        max_of_scale=1e-9,
        because="What an Exact claim allows; an identity stays near 1e-14 of the scale through the whole network.",
    ),
    "float32": Tolerance(
        "float32",
        max_of_scale=2e-4,
        because="Sums in another order, and resize coordinates rounded by onnxruntime, come to 5e-5 of the largest "
        "value at worst over the layers of a trained network (torch against ONNX, 192×192).",
    ),
    "float16": Tolerance(
        "float16",
        max_of_scale=2e-2,
        min_sqnr_db=40.0,
        because="One rounding to float16 leaves about 70 dB; over the 365 tensors of a small network with every part, "
        "emulated, it came to 46.6 dB and 1 % of the largest value at worst.",
    ),
    "int8 against float": Tolerance(
        "int8 against float",
        min_sqnr_db=20.0,
        because="256 steps over a layer's range leave about 40 dB of one rounding; below 20 dB the noise is a tenth "
        "of the signal, more than the rounding of the layers before it explains.",
    ),
    "int8 against int8": Tolerance(
        "int8 against int8",
        min_sqnr_db=20.0,
        max_steps=24,
        min_within_one=0.9,
        because="The same integer graph on two engines, which round halves differently: 19 to 24 steps at most and "
        "97 % within one were measured at the end of a network that is computed correctly.",
    ),
}


def default_tolerance(precision: str, other: str) -> Tolerance:
    """The tolerance for two executions of these precisions."""
    pair = {precision, other}
    if pair == {"int8"}:
        return DEFAULT_TOLERANCES["int8 against int8"]
    if "int8" in pair:
        return DEFAULT_TOLERANCES["int8 against float"]
    return DEFAULT_TOLERANCES[next(name for name in ("float16", "float32", "float64") if name in pair)]
