"""Score in several processes: each gets the task once, asks for images, and sends back lines.

A pool of the standard library hangs or leaves its workers behind when a process is killed; here every worker has a pipe
of its own, so that its end is seen at once, and ends itself when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from lumen_lab.errors import LumenError
from lumen_lab.evaluation.task import Task

NAME = "lumen_lab evaluation"
READY, MORE = "ready", "more"
GRACE_S = 10
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1"
)


class CannotShareError(LumenError):
    """A predictor or data set that other processes cannot be given."""


def refuse_inside_a_worker() -> None:
    """``LumenError`` if this is a worker that imports the script which started it."""
    if current_process().name.startswith(NAME):
        raise LumenError(
            "evaluate was called again by a process that it had started, since that imports the script; put the call "
            'below if __name__ == "__main__":'
        )


def lines_from_processes(task: Task, indices: list[int], count: int) -> Iterator[bytes]:
    """Rows of the images, as lines, as they are finished; ``count`` processes at most.

    ``CannotShareError`` if the task cannot be sent, or a process ends before it takes its first images, which may be
    after lines of the others; whatever a process raises on an image is raised here. When the caller leaves early the
    processes are ended at once.
    """
    batches = task.batches(indices)
    pickled = _pickled(task)
    with _workers(min(count, len(batches))) as workers:
        for connection in workers:
            _send(connection, pickled)
        del pickled
        waiting, held = iter(batches), dict.fromkeys(workers)
        while held:
            for connection in wait(list(held)):
                answer = _answer(connection, workers[connection], held[connection], task)
                if answer not in (READY, MORE):
                    yield answer
                    continue
                held[connection] = next(waiting, None)
                _send(connection, pickle.dumps(held[connection]))
                if held[connection] is None:
                    del held[connection]


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except Exception as error:
        raise CannotShareError(_cannot_share(error)) from error


def _cannot_share(error: Exception) -> str:
    return (
        f"The predictor or data set cannot be given to other processes ({type(error).__name__}: {error}); pass "
        "workers=0, or define what it needs in a module."
    )


@contextmanager
def _workers(count: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Processes by the connection to each; none is left when the block ends, however it does."""
    context = get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        with _environment(ONE_THREAD):
            for number in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), name=f"{NAME} {number}", daemon=True)
                _start(process)
                theirs.close()
                workers[ours] = process
        yield workers
    except BaseException:
        for process in workers.values():
            process.terminate()
        raise
    finally:
        for connection, process in workers.items():
            connection.close()
            process.join(GRACE_S)
            process.kill()
            process.join()


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (AssertionError, OSError, RuntimeError) as error:
        raise CannotShareError(f"No further process can be started here ({error}); pass workers=0.") from error


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What a process inherits: libraries read their number of threads from it when they are imported."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _send(connection: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):  # of a worker that has ended, which its answer will say
        connection.send_bytes(message)


def _answer(connection: Connection, process: BaseProcess, held: list[int] | None, task: Task) -> bytes | str:
    """The next message of a worker; raises what it raised, or says how it ended."""
    try:
        answer = connection.recv()
    except (EOFError, OSError):
        process.join(GRACE_S)
        raise _error_of_exit(process.exitcode, held, task) from None
    if isinstance(answer, LumenError):
        raise answer
    return answer


def _error_of_exit(exitcode: int | None, held: list[int] | None, task: Task) -> LumenError:
    how = f"with exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        how = f"by signal {-exitcode}" + (", most likely because memory ran out" if exitcode == -9 else "")
    if held is None:
        return CannotShareError(
            f"A process that was to score images ended {how} before it began; what it printed says more. In a script, "
            'evaluate stands below if __name__ == "__main__":, and workers=0 needs no process.'
        )
    names = " … ".join(dict.fromkeys((task.names[held[0]], task.names[held[-1]])))
    return LumenError(f"A process ended {how} while it scored {names}; try fewer workers, or 0 to see what happens.")


def _work(connection: Connection) -> None:
    """The life of a worker; it ends without unloading torch, which takes seconds and saves nothing."""
    _end_with_parent()
    try:
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
            _serve(connection)
        code = 0
    except SystemExit:  # the parent asked for it
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _serve(connection: Connection) -> None:
    """Take the task, then score one batch after another until there is none; what goes wrong is sent."""
    pickled = connection.recv_bytes()
    try:
        task = _unpickled(pickled)
        connection.send(READY)
        while (batch := pickle.loads(connection.recv_bytes())) is not None:
            for line in task.lines(batch):
                connection.send(line)
            connection.send(MORE)
    except LumenError as error:
        connection.send(_sendable(error))


def _end_with_parent() -> None:
    """Leave an interrupt to the parent; end, cleaning up, when it asks for it or is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def watch() -> None:
        parent_process().join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _unpickled(pickled: bytes) -> Task:
    torch.set_num_threads(1)
    try:
        task = pickle.loads(pickled)
    except Exception as error:
        raise CannotShareError(_cannot_share(error)) from error
    return task.with_session(threads=1)


def _sendable(error: LumenError) -> LumenError:
    """The error with its cause in words: a traceback cannot be sent."""
    if error.__cause__ is not None and not isinstance(error.__cause__, LumenError):
        error.add_note("".join(traceback.format_exception(error.__cause__)))
    return error
