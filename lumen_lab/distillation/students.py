"""Train micro students of the teacher: ``python -m lumen_lab.distillation.students SOURCES OUT_DIR``.

SOURCES is the folder of ``python -m lumen_lab.datasets.sources``. For each rung of the ladder that is asked for, a
network rewritten by a plan is quantised, recovers in float from what the plan has substituted, is calibrated again and
trained in integers. A rung is kept in OUT_DIR/PLAN/RUNG: ``student.safetensors`` with its manifest, the logs of both
stages, and the states that the same command goes on from when it was stopped or killed. What the teacher says of a
scene is kept in OUT_DIR/teacher and asked once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.datasets.sources import SourceBank, open_sources
from lumen_lab.distillation.distill import Distilled, distill
from lumen_lab.distillation.losses import MaskWeights
from lumen_lab.distillation.recipe import DistillRecipe
from lumen_lab.distillation.teacher import at_least, describe_sources, mask_scores, validation_scenes
from lumen_lab.distillation.transfer import TransferWeights
from lumen_lab.errors import LumenError
from lumen_lab.network import load_network
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.graph_file import save_graph
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.quantize import quantize
from lumen_lab.rewrites.plan import rewrite
from lumen_lab.rewrites.plans import EXACT_PLAN, LEAN_PLAN, LUMEN_PLAN
from lumen_lab.specs import writable_folder

PLANS = {"exact": EXACT_PLAN, "lean": LEAN_PLAN, "lumen": LUMEN_PLAN}
ALONE = TransferWeights(teacher=MaskWeights(0, 0, 0, 0), feature=0.0, gate=0.0, side=0.0)
RUNGS = {
    "distilled": TransferWeights(side=1.0),
    "without_features": TransferWeights(side=1.0, feature=0.0),
    "without_teacher": ALONE,
}
"""Name → what the student is told: the teacher's masks, features and gates; all but features; the mattes alone."""
RECOVERY = DistillRecipe(steps=2000, batch=8, learning_rate=1e-2, integers=False, scenes=2048, on_alarm="heal")
IN_INTEGERS = DistillRecipe(steps=800, batch=8, learning_rate=2e-3, scenes=2048, on_alarm="heal")
PICTURES = 32  # that calibrate
JUDGED = 48  # scenes of the validation split, the same as for the teacher


def student_of(network: nn.Module, plan: str, pictures: Sequence) -> NPUGraph:
    """The network under a plan, as the NPU's graph, calibrated: the first rung (PTQ)."""
    example = torch.zeros(1, 3, *network.config.image_size)
    rewritten = rewrite(network, PLANS[plan], example_inputs=(example,)).model
    return quantize(rewritten, pictures, progress=False)


def train_rung(
    student: NPUGraph,
    teacher: nn.Module,
    bank: SourceBank,
    stages: Sequence[DistillRecipe],
    out_dir: Path,
    *,
    pictures: Sequence,
    cache: Path,
    workers: int = 1,
) -> Distilled:
    """All stages of one rung, one behind the other, and the student that comes out of the last, which is also kept."""
    healthy = {name: weight.detach().clone() for name, weight in student.weights().items()}
    judged = validation_scenes(bank, student.size, length=JUDGED, seed=2)
    for number, recipe in enumerate(stages):
        scenes = ComposedScenes(bank, split="train", size=student.size, length=recipe.scenes, seed=recipe.seed)
        done = distill(
            student,
            teacher,
            scenes,
            recipe,
            out_dir / f"{number}_{'integers' if recipe.integers else 'float'}",
            pictures=pictures,
            healthy=healthy,
            cache=cache,
            validate=partial(mask_scores, scenes=judged, is_mask=True),
            validate_every=200,
            made_from={"sources": describe_sources(bank)},
            workers=workers,
        )
        student = done.graph
        if not recipe.integers:
            student.calibration = calibrate(student, pictures, progress=False)
    save_graph(student, out_dir / "student.safetensors")
    return done


def stages_of(plan: str, rung: str, given: argparse.Namespace) -> tuple[DistillRecipe, ...]:
    """The recipes of one rung: a plan that substitutes nothing has nothing to recover from."""
    stages = () if plan == "exact" else (dataclasses.replace(RECOVERY, steps=given.recovery_steps),)
    stages += (dataclasses.replace(IN_INTEGERS, steps=given.steps),)
    changed = {"weights": RUNGS[rung], "scenes": given.scenes, "batch": given.batch, "seed": given.seed}
    return tuple(dataclasses.replace(stage, **changed) for stage in stages)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lumen_lab.distillation.students",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", help="folder of cut-outs and backgrounds")
    parser.add_argument("out_dir", help="where the runs are kept")
    parser.add_argument("--teacher", help="weights; by default those that are shipped")
    parser.add_argument("--plan", choices=PLANS, default="lumen")
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=["distilled"])
    parser.add_argument("--recovery-steps", type=at_least(1), default=RECOVERY.steps)
    parser.add_argument("--steps", type=at_least(1), default=IN_INTEGERS.steps, help="in integers")
    parser.add_argument("--batch", type=at_least(1), default=IN_INTEGERS.batch)
    parser.add_argument("--scenes", type=at_least(1), default=RECOVERY.scenes)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--threads", type=at_least(1), default=1, help="at this size a second one idles")
    parser.add_argument("--workers", type=at_least(0), default=1, help="processes that compose scenes")
    return parser.parse_args(arguments)


def make_students(given: argparse.Namespace) -> None:
    """Train as ``given`` says; ``LumenError`` for what cannot be."""
    torch.set_num_threads(given.threads)
    out_dir = writable_folder(given.out_dir)
    teacher = load_network("micro", **({"weights": given.teacher} if given.teacher else {})).eval()
    bank = open_sources(given.sources)
    size = teacher.config.image_size
    scenes = ComposedScenes(bank, split="train", size=size, length=PICTURES, seed=given.seed + 1)
    pictures = [scenes[index]["image"] for index in range(PICTURES)]
    student = student_of(teacher, given.plan, pictures)
    save_graph(student, writable_folder(out_dir / given.plan / "quantised") / "student.safetensors")
    for rung in given.rungs:
        train_rung(
            student,
            teacher,
            bank,
            stages_of(given.plan, rung, given),
            out_dir / given.plan / rung,
            pictures=pictures,
            cache=out_dir / "teacher",
            workers=given.workers,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        make_students(parse_arguments(arguments))
    except (LumenError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
