"""Run a program so that its crash, hang, noise or hunger for memory stays its own.

The child gets a process group of its own (killed whole when time is up or the caller is interrupted), everything it
prints goes to a file, and it is the first that the kernel ends when memory runs out.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


@dataclass(frozen=True)
class ChildOutcome:
    """How a child ended: ``returncode`` (negative: the signal that ended it), wall time, peak resident memory."""

    returncode: int
    timed_out: bool
    wall_s: float
    peak_memory_bytes: int | None

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.timed_out

    def in_words(self, time_limit_s: float) -> str:
        """One sentence on how the child ended."""
        if self.timed_out:
            return f"it was stopped at the time limit of {time_limit_s:g} s; allow more with time_limit_s."
        if self.returncode == -signal.SIGKILL:
            held = "" if self.peak_memory_bytes is None else f", holding {self.peak_memory_bytes / 2**20:,.0f} MiB"
            return f"it was killed from outside{held}, most likely because memory ran out; use a smaller input."
        if self.returncode < 0:
            return f"it crashed with {signal.Signals(-self.returncode).name}."
        return f"it gave up (exit code {self.returncode})."


def run_child(
    command: Sequence[str],
    *,
    log_path: str | Path,
    time_limit_s: float,
    on_poll: Callable[[float], None] | None = None,
) -> ChildOutcome:
    """Run ``command`` to its end or to ``time_limit_s``; its stdout and stderr go to ``log_path``.

    ``on_poll`` is called with the seconds passed, about 20 times a second. On any exception in the caller, the
    interrupt of a notebook included, the child and all that it started are killed before the exception goes on.
    """
    started = time.monotonic()
    peak = None
    with open(log_path, "wb") as log:
        child = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _end_first_when_memory_runs_out(child.pid)
        while (seconds := time.monotonic() - started) < time_limit_s and child.poll() is None:
            peak = _peak_memory_bytes(child.pid) or peak
            if on_poll is not None:
                on_poll(seconds)
            time.sleep(POLL_S)
        timed_out = child.poll() is None
    finally:
        _kill_group(child)
    return ChildOutcome(child.returncode, timed_out, time.monotonic() - started, peak)


def _kill_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _end_first_when_memory_runs_out(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _peak_memory_bytes(pid: int) -> int | None:
    """High-water mark of resident memory; getrusage would count what the parent held when it forked."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
