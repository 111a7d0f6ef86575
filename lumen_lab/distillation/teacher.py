"""Train the micro teacher on composed scenes: ``python -m lumen_lab.distillation.teacher SOURCES OUT_DIR``.

SOURCES is the folder of ``python -m lumen_lab.datasets.sources``. A killed run goes on where it was. The weights are
left in OUT_DIR/teacher.safetensors with a manifest, beside the learning curve (log.csv).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.datasets.sources import open_sources
from lumen_lab.distillation.training import Recipe, recipe_record, train
from lumen_lab.network.birefnet import BiRefNet
from lumen_lab.network.checkpoints import save_weights
from lumen_lab.network.config import MICRO

RECIPE = Recipe(steps=2000, batch=8, sizes=((0.0, (128, 128)), (0.8, MICRO.image_size)))


def training_scenes(sources: str, recipe: Recipe, size: tuple[int, int]) -> ComposedScenes:
    """The endless training split at one size (H, W)."""
    return ComposedScenes(sources, split="train", size=size, length=recipe.steps * recipe.batch, seed=recipe.seed)


def describe_sources(sources: str) -> str:
    """What the scenes were composed from: counts, and a hash of every picture's name and split."""
    index = open_sources(sources).index
    digest = hashlib.sha256(json.dumps(index.to_json(), sort_keys=True).encode()).hexdigest()
    kept = [f"{row['kept']} {row['kind']}s ({row['train']} train)" for row in index.rows() if "kept" in row]
    return f"{', '.join(kept)}; index sha256 {digest}"


def held_out_scores(model: nn.Module, sources: str, *, scenes: int = 200, seed: int = 1) -> dict[str, float]:
    """Mean absolute error, and IoU (both masks binarised at 0.5), over composed scenes of the test split."""
    data = ComposedScenes(sources, split="test", size=MICRO.image_size, length=scenes, seed=seed)
    error, overlap = 0.0, 0.0
    for index in tqdm(range(scenes), desc="held-out scenes", leave=False, mininterval=2):
        scene = data[index]
        with torch.no_grad():
            mask = torch.sigmoid(model(scene["image"][None]))[0]
        found, wanted = mask > 0.5, scene["matte"] > 0.5
        union = (found | wanted).sum()
        error += float((mask - scene["matte"]).abs().mean()) / scenes
        overlap += (float((found & wanted).sum() / union) if union else 1.0) / scenes
    return {"mae": error, "iou": overlap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources")
    parser.add_argument("out_dir")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(RECIPE.seed)
    model = train(BiRefNet(MICRO), partial(training_scenes, arguments.sources, RECIPE), RECIPE, arguments.out_dir)
    scores = held_out_scores(model, arguments.sources)
    made_from = {
        "command": "python -m lumen_lab.distillation.teacher SOURCES OUT_DIR",
        "recipe": recipe_record(RECIPE),
        "sources": describe_sources(arguments.sources),
        "held-out scores (200 composed scenes, test split, seed 1)": ", ".join(
            f"{k} {v:.4f}" for k, v in scores.items()
        ),
    }
    save_weights(model, Path(arguments.out_dir) / "teacher.safetensors", made_from=made_from, half=True)
    print(made_from)


if __name__ == "__main__":
    main()
