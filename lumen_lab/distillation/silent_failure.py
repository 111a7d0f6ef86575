"""The silent failure, reproduced: ``python -m lumen_lab.distillation.silent_failure OUT_DIR``.

A student whose deepest gate is shut trains on under a mask loss alone, which falls as that of another does: the rest of
the decoder makes up for the branch. The watch over the gates raises its alarm at its third look; told to, it restores
the branch. The published work met this in a real run, at a gate of 1e-11 where the teacher has 0.46.

The gate is shut by its bias: −25, as a port that misplaces a bias leaves it, and a sigmoid of 1.4e-11 lets no gradient
back. Three runs are kept in OUT_DIR, and resumed: "alive", begun as it was quantised, "shut", and "healed", begun shut
and restored at the alarm. What scores and gates do in each is left in OUT_DIR/silent_failure.json.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.distillation.distill import distill
from lumen_lab.distillation.gates import GATES, Gate
from lumen_lab.distillation.history import History
from lumen_lab.distillation.losses import MaskWeights
from lumen_lab.distillation.recipe import DistillRecipe
from lumen_lab.distillation.students import PLANS, student_of
from lumen_lab.distillation.teacher import at_least, mask_scores
from lumen_lab.distillation.transfer import TransferWeights
from lumen_lab.errors import LumenError
from lumen_lab.network import load_network
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.specs import writable_folder, write_whole

SHUT = -25.0
MASK_ALONE = TransferWeights(teacher=MaskWeights(0, 0, 0, 0), feature=0.0, gate=0.0, boundary=0.0)
RECIPE = DistillRecipe(
    steps=200, batch=4, scenes=256, learning_rate=5e-3, warmup_steps=10, ema_decay=0.9, weights=MASK_ALONE
)
PICTURES = 16


def with_shut_gate(student: NPUGraph, gate: Gate, pictures: Sequence, *, bias: float = SHUT) -> NPUGraph:
    """A copy whose gate has that bias and no weight, sigmoid(bias) everywhere, with ranges that hold it."""
    shut = copy.deepcopy(student)
    with torch.no_grad():
        for name, weight in shut.weights().items():
            if name.startswith(f"{gate.path}."):
                weight.fill_(bias if name.endswith("bias") else 0.0)
    shut.calibration = calibrate(shut, pictures, progress=False)
    return shut


def silent_failure(
    student: NPUGraph,
    teacher: nn.Module,
    scenes: Dataset,
    out_dir: str | Path,
    *,
    recipe: DistillRecipe = RECIPE,
    gate: str = "deep",
    pictures: Sequence = (),
    validate: Callable[[nn.Module], Mapping[str, float | None]] | None = None,
    validate_every: int = 50,
    **options,
) -> dict[str, History]:
    """The histories of three runs under one recipe: of the student as it is ("alive"), with its ``gate`` shut and
    warned of ("shut"), and with it shut and restored at the alarm ("healed"). ``options`` go to ``distill``."""
    healthy: Mapping[str, Tensor] = {name: weight.detach() for name, weight in student.weights().items()}
    shut = with_shut_gate(student, GATES[gate], pictures)
    runs = {"alive": (student, "warn"), "shut": (shut, "warn"), "healed": (shut, "heal")}
    return {
        name: distill(
            start,
            teacher,
            scenes,
            dataclasses.replace(recipe, on_alarm=on_alarm),
            Path(out_dir) / name,
            pictures=pictures,
            healthy=healthy,
            validate=validate,
            validate_every=validate_every,
            **options,
        ).history
        for name, (start, on_alarm) in runs.items()
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lumen_lab.distillation.silent_failure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out_dir", help="where the runs are kept")
    parser.add_argument("--steps", type=at_least(1), default=RECIPE.steps)
    parser.add_argument("--plan", choices=PLANS, default="lumen")
    parser.add_argument("--gate", choices=GATES, default="deep")
    parser.add_argument("--threads", type=at_least(1), default=1)
    return parser.parse_args(arguments)


def drawn_scenes(size: tuple[int, int], *, length: int, split: str = "train", seed: int = 0) -> ComposedScenes:
    """Scenes over drawn pictures, which need nothing but this package."""
    return ComposedScenes(drawn_sources(pictures=60), split=split, size=size, length=length, seed=seed)


def reproduce(given: argparse.Namespace) -> dict[str, History]:
    """The three runs on micro and drawn scenes; ``LumenError`` for what cannot be."""
    torch.set_num_threads(given.threads)
    teacher = load_network("micro").eval()
    size = teacher.config.image_size
    scenes = drawn_scenes(size, length=RECIPE.scenes)
    pictures = [scenes[index]["image"] for index in range(PICTURES)]
    return silent_failure(
        student_of(teacher, given.plan, pictures),
        teacher,
        scenes,
        writable_folder(given.out_dir),
        recipe=dataclasses.replace(RECIPE, steps=given.steps),
        gate=given.gate,
        pictures=pictures,
        validate=partial(mask_scores, scenes=drawn_scenes(size, length=32, split="validation"), is_mask=True),
        cache=Path(given.out_dir) / "teacher",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = parse_arguments(arguments)
    try:
        found = {name: history.to_json() for name, history in reproduce(given).items()}
        write_whole(Path(given.out_dir) / "silent_failure.json", json.dumps(found) + "\n")
    except (LumenError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
