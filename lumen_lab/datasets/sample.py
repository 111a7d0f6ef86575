"""What a score is taken on: one picture and its matte, whatever data set they come from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """One picture with its matte, both upright and of one size.

    ``name`` is unique in its data set and serves as a relative path without a suffix; ``image`` is uint8 H×W×3, RGB;
    ``matte`` is float32 H×W in [0, 1], 1 where the foreground is; ``attributes`` maps each of ``ATTRIBUTES`` to
    whether this picture has it. Two samples are equal only if they are one object: their arrays have no one answer.
    """

    name: str
    image: np.ndarray
    matte: np.ndarray
    attributes: dict[str, bool]
