"""Score a predictor, or a folder of masks, on a data set: in parallel, resumable, with nothing passed over.

A data set here is what ``Dataset`` says: composed scenes, folders of images and masks, or a user's own.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from numbers import Integral
from pathlib import Path

from tqdm.auto import tqdm

from lumen_lab.errors import DatasetError, LumenError
from lumen_lab.evaluation.origin import TOOLS, origin_of
from lumen_lab.evaluation.processes import CannotShareError, lines_from_processes, refuse_inside_a_worker
from lumen_lab.evaluation.resuming import finished, kept_rows, one_at_a_time, save
from lumen_lab.evaluation.rows import Row, read_row
from lumen_lab.evaluation.task import Dataset, MaskFolder, Task, on_accelerator, prepare
from lumen_lab.metrics import Scores, summarise
from lumen_lab.prediction import Predictor

__all__ = ["TOOLS", "Dataset", "MaskFolder", "evaluate"]

MIN_PARALLEL_S = 12  # less work than that is done before other processes have imported torch
TIMED_IMAGES = 2  # these say how long one takes; the first of them pays for imports


def evaluate(
    predictor: Predictor,
    dataset: Dataset,
    *,
    size: tuple[int, int] | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    hce: bool = True,
) -> Scores:
    """Every metric of ``lumen_lab.metrics.METRICS`` over ``dataset``, both readings, by attribute.

    ``predictor``: what ``predict`` takes (a network, an ``.onnx`` file, a compiled context, a function), working at
    ``size`` (h, w) or at its own; or a folder of masks, paired with the samples by name, where a missing mask or one of
    another size is an error. Masks are scored at the size of their image. ``hce=False`` leaves the human correction
    effort out.

    ``out`` keeps the result as JSON with a manifest. While the work goes on, every finished image is kept beside it, in
    ``<out>.partial``: the same call goes on from there after a kill, and returns what is complete. It is the same if
    predictor, data set, settings, scoring code and tool versions are; predictors are told apart by their weights or
    files, and networks and functions by the masks of the first, middle and last image too: by 8 × 8 means, within 2 of
    255 grey levels, so that rounding tells none apart. Functions closer than that (a float and an int8 one, say) need
    an ``out`` each. Nobody's scores are lost: a complete result of another evaluation at ``out`` is moved to
    ``<stem>.<key>.json``, with a warning; unfinished rows of another, or a file that is no result, are refused
    (``ArtifactError``).

    ``workers``: processes that each predict and score, with one thread; 0 works in this process. None times two images
    here, and takes a process a core if the rest would take more than 12 s; a network on an accelerator stays here, and
    so does what other processes cannot be given (a function of a notebook). The number of workers changes no score
    beyond the rounding of a network's arithmetic. In a script, call it below ``if __name__ == "__main__":``.

    The images of a compiled context come 16 at a time, since so many share a start of the emulation (which is another
    process, with its own threads): they are timed, scored and kept together.

    What goes wrong with an image is raised at once, with the image's name; the images finished before stay kept.
    """
    refuse_inside_a_worker()
    if workers is not None and (not isinstance(workers, Integral) or workers < 0):
        raise LumenError(f"workers={workers!r} was asked for; give a number of processes, 0 for none, or None.")
    task = prepare(predictor, dataset, size=size, hce=hce)
    if out is None:
        return _summary(_collected(task, {}, workers, keep=lambda line: None))
    origin = origin_of(task)
    with one_at_a_time(out):
        scores = finished(out, origin)
        if scores is None:
            with kept_rows(out, origin) as (rows, keep):
                _drop_strangers(task, rows)
                scores = _summary(_collected(task, rows, workers, keep))
                save(scores, out, origin)
    return scores


def _drop_strangers(task: Task, rows: dict[int, Row]) -> None:
    """Leave out kept rows that are of no image of the data set, or have other attributes: they are scored again."""
    if not rows:
        return
    attributes, count = task.sample(0).attributes.keys(), len(task.names)
    for index, row in list(rows.items()):
        named = 0 <= index < count and row.name == task.names[index]
        if not named or row.attributes.keys() != attributes:
            del rows[index]


def _collected(task: Task, rows: dict[int, Row], workers: int | None, keep: Callable[[bytes], None]) -> list[Row]:
    """The rows of every image in the order of the data set: those given, and the missing ones as they are made."""
    bar = tqdm(total=len(task.names), initial=len(rows), desc="evaluating", unit="image", mininterval=1)
    with bar, closing(_lines(task, rows, workers)) as lines:
        for line in lines:
            row = read_row(line)
            _refuse_other_attributes(row, next(iter(rows.values()), row))
            rows[row.index] = row
            keep(line)
            bar.update()
    return [rows[index] for index in range(len(task.names))]


def _lines(task: Task, rows: dict[int, Row], workers: int | None) -> Iterator[bytes]:
    """Rows, as lines, of the images not in ``rows``, as they are finished, in any order; the caller puts them there."""
    if workers:
        yield from lines_from_processes(task, _missing(task, rows), workers)
        return
    here = task.with_session()
    if workers is None:
        batches = task.batches(_missing(task, rows))
        timed = batches[: TIMED_IMAGES if task.batch_size == 1 else 1]
        seconds = 0.0
        for batch in timed:
            started = time.perf_counter()
            yield from here.lines(batch)
            seconds = time.perf_counter() - started
        if seconds * (len(batches) - len(timed)) > MIN_PARALLEL_S and not on_accelerator(task.predictor):
            try:
                yield from lines_from_processes(task, _missing(task, rows), _cores())
            except CannotShareError as error:
                warnings.warn(f"{error} Going on in this process alone.", stacklevel=4)
    yield from here.lines(_missing(task, rows))


def _missing(task: Task, rows: dict[int, Row]) -> list[int]:
    return [index for index in range(len(task.names)) if index not in rows]


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_other_attributes(row: Row, first: Row) -> None:
    if row.attributes.keys() != first.attributes.keys():
        raise DatasetError(
            f"{row.name} has the attributes {', '.join(row.attributes) or 'none'}, and {first.name} has "
            f"{', '.join(first.attributes) or 'none'}; a table by attribute needs the same of every sample."
        )


def _summary(rows: list[Row]) -> Scores:
    return summarise([(row.name, row.attributes, row.scores) for row in rows])
