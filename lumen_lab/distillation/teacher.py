"""Train the micro teacher on composed scenes: ``python -m lumen_lab.distillation.teacher SOURCES OUT_DIR``.

SOURCES is the folder of ``python -m lumen_lab.datasets.sources``. The same command goes on with a run that was stopped
or killed. The weights are left in OUT_DIR/teacher.safetensors with a manifest, beside the learning curve (train.csv,
validation.csv, TensorBoard).

``accelerate launch --multi_gpu --num_processes N -m lumen_lab.distillation.teacher SOURCES OUT_DIR`` shares each batch
among N devices; with ACCELERATE_USE_CPU=true before it, among N processes on the CPU (``--cpu`` starts only one).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.datasets.sources import SourceBank, open_sources
from lumen_lab.distillation.checkpoint import read_checkpoint
from lumen_lab.distillation.loop import CHECKPOINT
from lumen_lab.distillation.losses import LossWeights
from lumen_lab.distillation.processes import best_precision
from lumen_lab.distillation.recipe import Recipe, recipe_record
from lumen_lab.distillation.training import averaged_network, train
from lumen_lab.errors import CheckpointError, LumenError
from lumen_lab.metrics import score_mask, summarise
from lumen_lab.network import load_network
from lumen_lab.network.checkpoints import save_weights
from lumen_lab.network.config import MICRO
from lumen_lab.specs import file_sha256, writable_folder

MOST_SEED = 2**32 - 1  # torch takes 64 bits, and every step and process has a seed of its own
VALIDATED = ("s_measure", "weighted_f", "mae", "thin_recall")
RECIPE = Recipe(
    steps=20_000,
    learning_rate=3e-3,
    encoder_rate=0.3,
    weight_decay=0.05,
    sizes=((0.0, (96, 96)), (0.35, (128, 128)), (0.8, MICRO.image_size)),
    dropout=0.0,
    drop_path=0.0,
    max_attention_logit=30.0,
    weights=LossWeights(gate=20.0),
)


def training_scenes(bank: SourceBank, recipe: Recipe, size: tuple[int, int]) -> ComposedScenes:
    """The endless training split at one size (H, W)."""
    return ComposedScenes(bank, split="train", size=size, length=recipe.steps * recipe.batch, seed=recipe.seed)


def validation_scenes(bank: SourceBank, size: tuple[int, int], *, length: int, seed: int) -> ComposedScenes:
    """Scenes of the validation split at one size (H, W)."""
    return ComposedScenes(bank, split="validation", size=size, length=length, seed=seed)


def check_splits(bank: SourceBank, recipe: Recipe) -> None:
    """``DatasetError`` if a split that will be asked for is empty, before hours of work."""
    training_scenes(bank, recipe, recipe.sizes[0][1])
    validation_scenes(bank, MICRO.image_size, length=1, seed=0)


def describe_start(start: str | None) -> str:
    """The weights to begin with: a file by its hash, others by their name."""
    if not start:
        return "random"
    return f"weights sha256 {file_sha256(start)}" if Path(start).is_file() else f"weights {start}"


def describe_sources(bank: SourceBank) -> str:
    """What the scenes were composed from: counts, and a hash of every picture's name and split."""
    digest = hashlib.sha256(json.dumps(bank.index.to_json(), sort_keys=True).encode()).hexdigest()
    kept = [f"{row['kept']} {row['kind']}s ({row['train']} train)" for row in bank.index.rows() if "kept" in row]
    return f"{', '.join(kept)}; index sha256 {digest}"


def validation_scores(
    model: nn.Module, bank: SourceBank, *, scenes: int = 48, seed: int = 2
) -> dict[str, float | None]:
    """Mean raw scores over composed scenes of the validation split, at the network's own size."""
    return mask_scores(model, validation_scenes(bank, model.config.image_size, length=scenes, seed=seed))


def mask_scores(model: nn.Module, scenes: Dataset, *, is_mask: bool = False) -> dict[str, float | None]:
    """Mean raw scores of a model over ``scenes``, one after the other; None where no scene defines one.

    ``model`` returns logits, or with ``is_mask`` the mask itself.
    """
    rows = []
    for index in range(len(scenes)):
        scene = scenes[index]
        with torch.no_grad():
            output = model(scene["image"][None])
        mask = (output if is_mask else torch.sigmoid(output))[0, 0].numpy()
        rows.append((str(index), {}, score_mask(mask, scene["matte"][0].numpy(), hce=False)))
    scores = summarise(rows)
    return {name: scores.mean(name) for name in VALIDATED}


def first_network(start: str | None, seed: int) -> nn.Module:
    """The micro network to begin with: drawn from ``seed``, or with the (averaged) weights of an earlier run."""
    torch.manual_seed(seed)
    if start and Path(start).name == CHECKPOINT:
        return network_of_checkpoint(Path(start))
    return load_network(MICRO, weights=start)


def network_of_checkpoint(path: Path) -> nn.Module:
    """The micro network with the averaged weights of a run; ``LumenError`` if the file is of something else."""
    remedy = "give the checkpoint.pt of a run of the micro network, or weights (.safetensors)"
    saved = read_checkpoint(path, remedy=remedy)
    try:
        return averaged_network(load_network(MICRO, weights=None), RECIPE, saved["average"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, IndexError):
        found = "averages other weights than this network has"
        if not (isinstance(saved, dict) and "average" in saved):
            found = f"is a {type(saved).__name__} without averaged weights"
        raise CheckpointError(f"{path} {found}; {remedy}.") from None


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lumen_lab.distillation.teacher",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", help="folder of cut-outs and backgrounds")
    parser.add_argument("out_dir", help="where the run is kept, and its weights are left")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--rate", type=float, default=RECIPE.learning_rate, help="highest learning rate")
    parser.add_argument(
        "--seed", type=at_least(0, most=MOST_SEED), default=RECIPE.seed, help="of the scenes, and of the first weights"
    )
    parser.add_argument("--start", help="weights (or checkpoint.pt) of an earlier run to go on from, with a new cosine")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size_from,
        default=RECIPE.sizes,
        metavar="SHARE:PX",
        help="square training sizes, each from a share of the steps on: 0:96 0.4:128 0.8:192",
    )
    parser.add_argument(
        "--precision",
        choices=("no", "bf16", "fp16"),
        help="by default bf16 or fp16 where the machine computes in it, else no: float32",
    )
    parser.add_argument(
        "--threads", type=at_least(1), default=1, help="of each process: at this size a second one idles"
    )
    parser.add_argument("--workers", type=at_least(0), default=1, help="processes that compose scenes")
    return parser.parse_args(arguments)


def size_from(text: str) -> tuple[float, tuple[int, int]]:
    """Reads "0.8:192" as a share of the steps and a size (H, W)."""
    share, _, side_px = text.partition(":")
    try:
        return float(share), (int(side_px), int(side_px))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} was given; SHARE:PX, such as 0.8:192, will do") from None


def at_least(least: int, *, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from the command line."""
    range_ = f"{least} or more" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text!r} was given; a whole number, {range_}, will do")
        return int(text)

    return read


def accelerator_in(precision: str) -> Accelerator:
    """What ``accelerate launch`` or the machine offers, in that precision; ``LumenError`` where it has none such."""
    try:
        return Accelerator(mixed_precision=precision)
    except ValueError as error:
        raise LumenError(f"Precision {precision} was asked for, and accelerate refuses it here: {error}") from None


def make_teacher(given: argparse.Namespace) -> None:
    """Train as ``given`` says and leave the weights in its ``out_dir``; ``LumenError`` for what cannot be."""
    torch.set_num_threads(given.threads)
    recipe = dataclasses.replace(
        RECIPE, steps=given.steps, learning_rate=given.rate, sizes=tuple(given.sizes), seed=given.seed
    )
    out_dir = writable_folder(given.out_dir)
    first, start = first_network(given.start, given.seed), describe_start(given.start)
    bank = open_sources(given.sources)
    check_splits(bank, recipe)
    began = {"start": start, "sources": describe_sources(bank)}
    accelerator = accelerator_in(given.precision or best_precision())
    network = train(
        first,
        partial(training_scenes, bank, recipe),
        recipe,
        out_dir,
        accelerator=accelerator,
        made_from=began,
        validate=partial(validation_scores, bank=bank),
        workers=given.workers,
    )
    if accelerator.is_main_process:
        made_from = {
            "command": "python -m lumen_lab.distillation.teacher SOURCES OUT_DIR",
            "recipe": recipe_record(recipe),
            "precision": accelerator.mixed_precision,
            "processes": str(accelerator.num_processes),
            **began,
        }
        save_weights(network, out_dir / "teacher.safetensors", made_from=made_from, half=True)
    accelerator.end_training()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        make_teacher(parse_arguments(arguments))
    except (LumenError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
