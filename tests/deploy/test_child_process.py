"""A child's crash, hang, noise and grandchildren stay with the child."""

import signal
import sys
import time
from pathlib import Path

import pytest

from lumen_lab.deploy.child_process import run_child

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")


def run(program, tmp_path, *, time_limit_s=20, on_poll=None):
    return run_child(
        [sys.executable, "-c", program], log_path=tmp_path / "log", time_limit_s=time_limit_s, on_poll=on_poll
    )


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_good_end_and_everything_printed_is_in_the_log(tmp_path):
    program = "import os, sys; print('out', flush=True); print('err', file=sys.stderr); os.write(1, b'raw')"
    outcome = run(program, tmp_path)
    assert outcome.ok and outcome.returncode == 0 and not outcome.timed_out
    log = (tmp_path / "log").read_text()
    assert all(word in log for word in ("out", "err", "raw"))


def test_a_crash_is_told_by_the_name_of_its_signal(tmp_path):
    outcome = run("import os; os.abort()", tmp_path)
    assert not outcome.ok and outcome.returncode == -signal.SIGABRT
    assert "crashed with SIGABRT" in outcome.in_words(20)


def test_a_kill_from_outside_is_told_as_lack_of_memory(tmp_path):
    outcome = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert "most likely because memory ran out" in outcome.in_words(20)


def test_a_failing_exit_code_is_no_success(tmp_path):
    outcome = run("raise SystemExit(3)", tmp_path)
    assert not outcome.ok and "exit code 3" in outcome.in_words(20)


def test_the_time_limit_ends_the_child_and_all_that_it_started(tmp_path):
    program = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid))\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    outcome = run(program, tmp_path, time_limit_s=2)
    assert time.monotonic() - started < 10
    assert outcome.timed_out and not outcome.ok and "time limit of 2 s" in outcome.in_words(2)
    grandchild = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(grandchild)


def test_an_interrupt_of_the_caller_ends_the_child(tmp_path):
    def interrupt(seconds):
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    program = (
        "import os, time\n"
        f"open({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt):
        run(program, tmp_path, on_poll=interrupt)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_peak_memory_is_the_childs_own_not_what_the_parent_held(tmp_path):
    held = bytearray(300 * 2**20)  # a fork's high-water mark would include this
    held[::4096] = b"x" * len(held[::4096])
    program = "import time; a = bytearray(60 * 2**20); a[::4096] = b'x' * len(a[::4096]); time.sleep(0.5)"
    outcome = run(program, tmp_path)
    assert 60 * 2**20 < outcome.peak_memory_bytes < len(held) * 2 / 3


def test_the_child_is_the_first_to_go_when_memory_runs_out(tmp_path):
    program = "import time; time.sleep(0.3); print(open('/proc/self/oom_score_adj').read())"
    assert run(program, tmp_path).ok
    assert (tmp_path / "log").read_text().strip() == "1000"
