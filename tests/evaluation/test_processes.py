"""Several processes: the same scores, and whatever is killed, interrupted or cannot be sent ends well and says so."""

import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import active_children, current_process
from pathlib import Path

import onnxruntime
import pytest

from lumen_lab import evaluate
from lumen_lab import evaluation as evaluation_module
from lumen_lab.errors import LumenError
from lumen_lab.evaluation import processes, resuming
from lumen_lab.evaluation.processes import GRACE_S, ONE_THREAD, CannotShareError, refuse_inside_a_worker
from lumen_lab.evaluation.task import prepare
from tests.evaluation.predictors import LENGTH, LOOKS, SIZE, Listed, Logged, LoggedNetwork, calls_by, disc, scenes
from tests.evaluation.test_evaluate import write_onnx

KILLED = """
import sys
from pathlib import Path
from lumen_lab import evaluate
from tests.evaluation.predictors import SIZE, Logged, scenes
evaluate(Logged(Path(sys.argv[1]), stalls_at=5), scenes(), size=SIZE, out=sys.argv[2], workers=1)
"""
UNGUARDED = """
from torch import nn
from lumen_lab import evaluate
from tests.evaluation.predictors import SIZE, scenes
print("script began")
evaluate(nn.Conv2d(3, 1, 1).eval(), scenes(), size=SIZE, workers=1)
"""


def rows_kept(out) -> int:
    path = resuming.partial_path(out)
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, *, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process so")
def test_after_a_kill_the_same_call_goes_on_and_no_process_is_left(log, out, undisturbed, repository):
    command = [sys.executable, "-c", KILLED, str(log), str(out)]
    killed = subprocess.Popen(command, cwd=repository, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: rows_kept(out) == 4 and len(calls_by(log)) == LOOKS + 5, seconds=120)
    finally:
        killed.kill()
        killed.wait()
    assert killed.returncode == -signal.SIGKILL
    assert len(set(calls_by(log))) == 2  # one looked at the predictor, the other scored
    assert wait_until(lambda: not any(is_running(pid) for pid in set(calls_by(log))), seconds=20)
    before = len(calls_by(log))
    assert evaluate(Logged(log), scenes(), size=SIZE, out=out, workers=0) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 4


def test_two_processes_have_the_scores_of_none_and_an_interrupt_ends_them(log, out, monkeypatch):
    shown = []

    class Interrupted(evaluation_module.tqdm):
        def update(self, n=1):
            shown.append(time.monotonic())
            if len(shown) == 6:  # three by each: whoever has a fourth to do stalls
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(evaluation_module, "tqdm", Interrupted)
        evaluate(LoggedNetwork(Logged(log, stalls_at=LOOKS + 1)), scenes(), size=SIZE, out=out, workers=2)
    assert time.monotonic() - shown[-1] < 0.8 * GRACE_S
    assert active_children() == []
    assert caught.value.__notes__[0].startswith("6 images are scored and kept")
    assert rows_kept(out) == 6
    before = len(calls_by(log))
    scores = evaluate(LoggedNetwork(Logged(log)), scenes(), size=SIZE, out=out, workers=2)
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 6
    assert calls_by(log)[before:].count(os.getpid()) == LOOKS  # which looks at the network; other processes score
    assert active_children() == []
    assert scores == evaluate(LoggedNetwork(Logged(log)), scenes(), size=SIZE, workers=0)


def test_a_worker_that_dies_or_fails_is_told_with_its_image(log, out, undisturbed):
    with pytest.raises(LumenError, match="A process ended with exit code 3 while it scored test/5/000003; try fewer"):
        evaluate(Logged(log, dies_at=LOOKS + 1), scenes(), size=SIZE, out=out, workers=1)
    assert rows_kept(out) == 3
    second = log.with_name("second.log")
    with pytest.raises(LumenError, match="test/5/000006: ZeroDivisionError: no more") as caught:
        evaluate(Logged(second, fails_at=LOOKS + 1), scenes(), size=SIZE, out=out, workers=1)
    assert any("predictors.py" in note and "ZeroDivisionError" in note for note in caught.value.__notes__)
    assert rows_kept(out) == 6
    assert active_children() == []
    assert evaluate(Logged(log), scenes(), size=SIZE, out=out, workers=0) == undisturbed


def test_a_script_without_a_guard_is_told_and_does_not_run_again_and_again(tmp_path, repository):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stdout.count("script began") == 2
    assert 'In a script, evaluate stands below if __name__ == "__main__":' in done.stderr
    assert "evaluate was called again by a process that it had started" in done.stderr


def test_a_lambda_works_here_and_is_refused_elsewhere(undisturbed):
    def predictor(image):
        return 3 * image.mean(axis=1, keepdims=True)

    assert evaluate(predictor, scenes(), size=SIZE, workers=0) == undisturbed
    with pytest.raises(CannotShareError, match="cannot be given to other processes .*; pass workers=0, or define"):
        evaluate(predictor, scenes(), size=SIZE, workers=2)


def test_left_to_itself_it_goes_on_here_with_what_cannot_be_shared(undisturbed, monkeypatch):
    monkeypatch.setattr(evaluation_module, "MIN_PARALLEL_S", 0)
    with pytest.warns(UserWarning, match="cannot be given to other processes .* Going on in this process alone"):
        scores = evaluate(lambda image: 3 * image.mean(axis=1, keepdims=True), scenes(), size=SIZE)
    assert scores == undisturbed


@pytest.mark.parametrize(("floor_s", "sent"), [(0, LENGTH - 2), (1e9, None)])
def test_left_to_itself_it_starts_processes_where_the_work_is_worth_it(log, undisturbed, monkeypatch, floor_s, sent):
    asked = []

    def in_processes(task, indices, count):
        asked.append((len(indices), count))
        return task.lines(indices)

    monkeypatch.setattr(evaluation_module, "MIN_PARALLEL_S", floor_s)
    monkeypatch.setattr(evaluation_module, "lines_from_processes", in_processes)
    assert evaluate(Logged(log), scenes(), size=SIZE) == undisturbed
    assert asked == ([] if sent is None else [(sent, evaluation_module._cores())])


def test_images_that_came_before_the_processes_gave_up_are_not_scored_again(log, undisturbed, monkeypatch):
    def in_processes(task, indices, count):
        yield from task.lines(indices[-1:3:-2])
        raise CannotShareError("A process ended before it began.")

    monkeypatch.setattr(evaluation_module, "MIN_PARALLEL_S", 0)
    monkeypatch.setattr(evaluation_module, "lines_from_processes", in_processes)
    with pytest.warns(UserWarning, match="before it began. Going on in this process alone"):
        assert evaluate(Logged(log), scenes(), size=SIZE) == undisturbed
    assert len(calls_by(log)) == LENGTH


def test_opencv_has_one_thread_where_processes_score():
    program = "import cv2; print(cv2.getNumThreads())"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | ONE_THREAD, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_an_onnx_file_has_one_thread_where_processes_score(tmp_path, monkeypatch):
    path, options = write_onnx(tmp_path / "mean.onnx"), []

    def session(*arguments, real=onnxruntime.InferenceSession, **named):
        options.append(arguments[1].intra_op_num_threads)
        return real(*arguments, **named)

    task = prepare(path, scenes(), size=SIZE, hce=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    task.with_session()
    processes._unpickled(pickle.dumps(task))
    assert options == [0, 1]


def test_an_attribute_that_json_has_no_word_for_is_told_with_its_image(log, out):
    data = Listed([disc("a"), disc("b", attributes={"thin": {1, 2}}), disc("c"), disc("d")])
    with pytest.raises(LumenError, match="^b: TypeError: set is not a plain value"):
        evaluate(Logged(log), data, size=SIZE, workers=1)
    with pytest.raises(LumenError, match="^b: TypeError: set is not a plain value"):
        evaluate(lambda image: image[:, :1], Listed(data.samples[:2]), size=SIZE, out=out)


def test_a_process_that_imports_its_script_is_told_by_its_name(monkeypatch):
    refuse_inside_a_worker()
    monkeypatch.setattr(current_process(), "name", "lumen_lab evaluation 3")
    with pytest.raises(LumenError, match='put the call below if __name__ == "__main__":'):
        refuse_inside_a_worker()
