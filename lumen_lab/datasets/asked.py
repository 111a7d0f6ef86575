"""What a data set is asked for, checked when it is made: a number that is wrong there would fail at some later item."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from lumen_lab.errors import DatasetError


def whole_number(value: object) -> int | None:
    """``value`` as the whole number that it is (4, 4.0, a numpy 4), or None if it is none."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        number = int(value)
        return number if number == value else None
    except (TypeError, ValueError, OverflowError):
        return None


def checked_size(size: object, *, least_px: int = 1) -> tuple[int, int]:
    """(H, W) of two whole numbers from ``least_px`` up; ``DatasetError`` for anything else."""
    try:
        height, width = map(whole_number, size)
        if min(height, width) >= least_px:
            return height, width
    except (TypeError, ValueError):
        pass
    raise DatasetError(
        f"size={size!r} was asked for; give (H, W), two whole numbers, and each side at least {least_px} px."
    )


def checked_number(value: object, name: str, *, least: int) -> int:
    """A whole number from ``least`` up, as an int; ``DatasetError`` with its ``name`` for anything else."""
    number = whole_number(value)
    if number is None or number < least:
        raise DatasetError(f"{name}={value!r} was asked for; give a whole number from {least} up.")
    return number


def checked_mixture(mixture: object, kinds: Collection[str]) -> dict[str, float]:
    """Shares by kind, finite, none below 0 and one above; ``DatasetError`` for anything else."""
    if isinstance(mixture, Mapping) and set(mixture) <= set(kinds) and all(map(_is_share, mixture.values())):
        shares = {kind: share if isinstance(share, int) else float(share) for kind, share in mixture.items()}
        if 0 < sum(shares.values()) < math.inf:
            return shares
    raise DatasetError(f"A mixture of {mixture!r} was asked for; give finite shares >= 0 of {list(kinds)}, one above.")


def _is_share(value: object) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf
