"""Speed of composed scenes: ``python tests/benchmarks/scenes_per_second.py [SOURCES] [--json PATH] [--profile]``.

Scenes per second of one core are scenes by the CPU time that drawing them took, so that other work on the machine
counts little. The peer is measured in the same run, in turns with the scenes, on the same pictures: what one would
write with torchvision.transforms.v2, a random crop of a background under a randomly turned and scaled cut-out, then
colour jitter, blur and JPEG. It runs on Pillow images and on tensors; the ratio is to the faster. It has no shadows,
relighting, clutter, second objects, thin structures or attributes, so a ratio below 1 is the price of those.

A second measurement asks whether one worker process feeds training that takes ``--batch`` scenes in ``--step-s``
seconds. ``--profile`` says where the time of drawing goes.

SOURCES is a folder as ``open_sources`` takes it; without one, small pictures are drawn for the run.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lumen_lab.datasets import ComposedScenes, SourceBank, open_sources
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD
from lumen_lab.specs import tool_versions, write_whole

TOOLS = ("torch", "torchvision", "numpy", "scipy", "pillow")
SIDES_PX = (128, 192)


class PastedScenes(torch.utils.data.Dataset):
    """The peer: a cut-out pasted over a crop, both augmented by torchvision, as float32 image and matte."""

    def __init__(self, scenes: ComposedScenes, *, form: str):
        take = Image.fromarray if form == "pillow" else lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1)
        self.foregrounds = [take(pixels) for group in scenes.foregrounds for pixels in group]
        self.backgrounds = [take(pixels) for group in scenes.backgrounds for pixels in group]
        self.length, self.size = len(scenes), scenes.size
        self.crop = v2.Compose([v2.RandomResizedCrop(scenes.size, antialias=True), v2.RandomHorizontalFlip()])
        self.turn = v2.RandomAffine(
            20, translate=(0.25, 0.25), scale=(0.3, 1.3), shear=8, interpolation=v2.InterpolationMode.BILINEAR
        )
        self.camera = v2.Compose(
            [
                v2.ColorJitter(0.3, 0.3, 0.3, 0.1),
                v2.RandomApply([v2.GaussianBlur(5, (0.3, 1.5))], 0.5),
                v2.RandomApply([v2.JPEG((35, 95))], 0.6),
            ]
        )
        self.normalise = v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(index)
        front = self.turn(self.fitted(self.foregrounds[int(torch.randint(len(self.foregrounds), ()))]))
        back = self.crop(self.backgrounds[int(torch.randint(len(self.backgrounds), ()))])
        front, back = F.pil_to_tensor(front) if isinstance(front, Image.Image) else front, F.to_image(back)
        matte = front[3:].float() / 255
        image = (matte * front[:3] + (1 - matte) * back).round().to(torch.uint8)
        image = self.camera(image if isinstance(self.foregrounds[0], torch.Tensor) else F.to_pil_image(image))
        return {"image": self.normalise(F.to_dtype(F.to_image(image), torch.float32, scale=True)), "matte": matte}

    def fitted(self, cutout):
        """The cut-out in the middle of a transparent frame, as large as the frame lets it be."""
        height, width = F.get_size(cutout)
        scale = min(self.size[0] / height, self.size[1] / width)
        small = F.resize(cutout, [max(1, int(height * scale)), max(1, int(width * scale))])
        return F.center_crop(small, list(self.size))


def scenes_per_cpu_s(data: torch.utils.data.Dataset, indices: range) -> float:
    started = time.process_time()
    for index in indices:
        data[index]
    return len(indices) / (time.process_time() - started)


def loaded_per_s(data: torch.utils.data.Dataset, *, batch: int, scenes: int) -> float:
    """Scenes per second of the clock that one worker process delivers, the first batch (its start) left out."""
    loader = iter(torch.utils.data.DataLoader(data, batch_size=batch, num_workers=1))
    next(loader)
    started, count = time.perf_counter(), 0
    while count < scenes:
        count += len(next(loader)["index"])
    return count / (time.perf_counter() - started)


def measured(bank: SourceBank, side_px: int, *, scenes: int, rounds: int, batch: int, step_s: float) -> dict:
    """One row: rates of the scenes and of the peer, best of ``rounds`` taken in turns, and the worker's rate."""
    own = ComposedScenes(bank, size=(side_px, side_px), length=100_000)
    contenders = {"composed": own} | {form: PastedScenes(own, form=form) for form in ("pillow", "tensor")}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for data in contenders.values():
        scenes_per_cpu_s(data, range(5))
    for turn in range(rounds):
        for name, data in contenders.items():
            rates[name].append(scenes_per_cpu_s(data, range(turn * scenes, (turn + 1) * scenes)))
    best = {name: max(values) for name, values in rates.items()}
    loaded, needed = loaded_per_s(own, batch=batch, scenes=scenes), batch / step_s
    return {
        "scenes per s per core": round(best["composed"], 1),
        "torchvision on Pillow": round(best["pillow"], 1),
        "torchvision on tensors": round(best["tensor"], 1),
        "ratio to the faster peer": round(best["composed"] / max(best["pillow"], best["tensor"]), 2),
        "one worker, scenes per s": round(loaded, 1),
        "needed, scenes per s": round(needed, 1),
        "one worker keeps up": loaded >= needed,
    }


def print_profile(bank: SourceBank, side_px: int, *, scenes: int) -> None:
    """Where the time of drawing ``scenes`` scenes goes, by the function's own time, on the error stream."""
    data, profile = ComposedScenes(bank, size=(side_px, side_px), length=scenes), cProfile.Profile()
    for index in range(scenes):
        profile.runcall(data.__getitem__, index)
    pstats.Stats(profile, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(25)


def sources(folder: Path | None) -> SourceBank:
    if folder is not None:
        return open_sources(folder)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.datasets.pictures import write_folder

    with tempfile.TemporaryDirectory() as made:
        return open_sources(write_folder(Path(made) / "pictures"), cache=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="?", type=Path)
    parser.add_argument("--scenes", type=int, default=150, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.75)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bank, rows = sources(arguments.sources), {}
    options = {name: getattr(arguments, name) for name in ("scenes", "rounds", "batch", "step_s")}
    for side_px in SIDES_PX:
        rows[f"{side_px} x {side_px}"] = measured(bank, side_px, **options)
        if arguments.profile:
            print_profile(bank, side_px, scenes=arguments.scenes)
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count())}
    kept = bank.index.kept | {"longest_px": int(np.max([pixels.shape[:2] for pixels in bank.pixels]))}
    header = {"command": "python tests/benchmarks/scenes_per_second.py", "sources": kept, "options": options}
    text = json.dumps(header | {"versions": tool_versions(*TOOLS) | machine, "rows": rows}, indent=1)
    print(text)
    if arguments.json:
        write_whole(arguments.json, text + "\n")


if __name__ == "__main__":
    main()
