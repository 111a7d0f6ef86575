"""What surrounds a step of distillation: ``python tests/benchmarks/distilling.py [--json OUT.json]``.

Micro under ``LUMEN_PLAN`` in integers, drawn scenes that one worker composes. In turns within one run: what the teacher
says of a picture, computed (the peer) and from the cache; and steps of ``distill`` without and with it, with the share
of wall time that the loop waits for its next batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import lumen_lab as lab
from lumen_lab.distillation import loop
from lumen_lab.distillation.distill import distill
from lumen_lab.distillation.gates import GATES
from lumen_lab.distillation.silent_failure import drawn_scenes
from lumen_lab.distillation.student import paths_of
from lumen_lab.distillation.students import IN_INTEGERS, RUNGS, student_of
from lumen_lab.distillation.teacher_cache import TeacherOutputs
from lumen_lab.specs import tool_versions, write_whole

WARM_UP = 2  # steps that are not counted


@contextmanager
def clocked(steps: list[float], waits: list[float]) -> Iterator[None]:
    """Note how long the loop takes for each step, and waits for each batch."""
    batches = loop.batches

    def clocked_batches(*given):
        loaded = batches(*given)
        while True:
            asked = time.perf_counter()
            batch = next(loaded, None)
            got = time.perf_counter()
            if batch is None:
                return
            waits.append(got - asked)
            yield batch
            steps.append(time.perf_counter() - got)

    with mock.patch.object(loop, "batches", clocked_batches):
        yield


def answers(teacher, images: torch.Tensor, folder: Path) -> list[dict[str, object]]:
    """Milliseconds a picture, computed and from the cache."""
    paths = paths_of(IN_INTEGERS.taps, GATES, ())
    computed, kept = (TeacherOutputs(teacher, paths, folder=where) for where in (None, folder))
    kept(images)
    found: dict[str, list[float]] = {"computed": [], "from the cache": []}
    for _ in range(3):
        for name, outputs in (("computed", computed), ("from the cache", kept)):
            started = time.perf_counter()
            outputs(images)
            found[name].append((time.perf_counter() - started) / len(images) * 1e3)
    size_kb = statistics.mean(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e3
    rows = [{"teacher": name, "ms_a_picture": round(min(values), 2)} for name, values in found.items()]
    return [*rows[:1], rows[1] | {"kb_a_picture": round(size_kb)}]


def steps(teacher, student, scenes, asked: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Seconds of a step, and the share of waiting, without the cache and with a full one."""
    recipe = dataclasses.replace(
        IN_INTEGERS, steps=asked.steps + WARM_UP, batch=asked.batch, scenes=len(scenes), weights=RUNGS["distilled"]
    )
    recipe = dataclasses.replace(recipe, on_alarm="warn")
    rows = []
    for name, cache in (("computed", None), ("filling the cache", folder), ("from the cache", folder)):
        made, waits = [], []
        with tempfile.TemporaryDirectory() as out_dir, clocked(made, waits):
            distill(student, teacher, scenes, recipe, out_dir, cache=cache, workers=1, checkpoint_every=10_000)
        made, waits = made[WARM_UP:-1], waits[WARM_UP:-1]
        share = sum(waits) / (sum(waits) + sum(made))
        rows.append({"teacher": name, "s_a_step": round(statistics.median(made), 3), "waits": round(share, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    teacher = lab.load_network("micro").eval()
    scenes = drawn_scenes(teacher.config.image_size, length=asked.batch * (asked.steps + WARM_UP))
    images = torch.stack([scenes[index]["image"] for index in range(asked.batch)])
    student = student_of(teacher, "lumen", list(images))
    with tempfile.TemporaryDirectory() as folder:
        rows = answers(teacher, images, Path(folder) / "answers")
        rows += steps(teacher, student, scenes, asked, Path(folder) / "steps")
    print(*rows, sep="\n")
    if asked.json:
        command = " ".join(["python", "tests/benchmarks/distilling.py", *sys.argv[1:]])
        header = {"command": command, "batch": asked.batch, "threads": asked.threads}
        header["versions"] = tool_versions("torch", "accelerate", "safetensors")
        write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
