"""Train the micro teacher on composed scenes: ``python -m lumen_lab.distillation.teacher SOURCES OUT_DIR``.

SOURCES is the folder of ``python -m lumen_lab.datasets.sources``. A killed run goes on where it was.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.distillation.training import Recipe, train
from lumen_lab.network.birefnet import BiRefNet
from lumen_lab.network.config import MICRO

RECIPE = Recipe(steps=3000, batch=8, sizes=((0.0, (128, 128)), (0.8, MICRO.image_size)))


def training_scenes(sources: str, recipe: Recipe, size: tuple[int, int]) -> ComposedScenes:
    """The endless training split at one size (H, W)."""
    return ComposedScenes(sources, split="train", size=size, length=recipe.steps * recipe.batch, seed=recipe.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources")
    parser.add_argument("out_dir")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(RECIPE.seed)
    train(BiRefNet(MICRO), partial(training_scenes, arguments.sources, RECIPE), RECIPE, arguments.out_dir)


if __name__ == "__main__":
    main()
