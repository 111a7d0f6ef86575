"""What the parameters of a rewrite may be."""

from __future__ import annotations

from lumen_lab.errors import RewriteError


def is_whole(value: object, *, least: int = 1, most: int | None = None) -> bool:
    """Whether the value is a whole number from ``least`` (to ``most``); True and 1.0 are none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= least and (most is None or value <= most)


def whole_number(name: str, value: object, *, of: str, most: int | None = None, instead: str) -> int:
    """The value itself; ``RewriteError`` unless it is a whole number of ``of`` from 1 on, or to ``most``.

    ``instead`` says what would do.
    """
    if not is_whole(value, most=most):
        reach = "from 1 on" if most is None else f"from 1 to {most}"
        raise RewriteError(f"{name} is a whole number of {of} {reach}, asked for {value!r}; {instead}.")
    return value
