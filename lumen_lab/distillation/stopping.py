"""A run that is asked to stop: the signal waits until the step is made and kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back(*numbers: int) -> Iterator[list[int]]:
    """Hold the given signals back: the yielded list is empty until one comes, and it is delivered after the block.

    The same one a second time is not held back, so that a block which does not end can be left; another is, since
    launchers send SIGTERM behind a SIGINT. Elsewhere than in the main thread, which alone gets signals, and for a
    signal that is ignored nothing is changed.
    """
    caught: list[int] = []
    before: dict[int, object] = {}

    def note(number: int, frame: object) -> None:
        caught.append(number)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0])


def deaf_to_interrupts(worker: int = 0) -> None:
    """In a loader's process: Ctrl-C reaches it as well, and its scenes are needed until the step is made."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
