"""Speed of ``evaluate`` on a folder of masks: ``python tests/benchmarks/evaluation.py [--images N] [--json PATH]``.

The peer is PySODMetrics called in a plain loop on the same files: S, E, F, weighted F, MAE, IoU, Dice and HCE.
``evaluate`` does more for an image: it reads the photograph and tells attributes by it, scores two readings (raw and
stretched) and adds boundary IoU, thin recall, soft edges, reliability and the error to the matte. So there are two:

- *once*: every measure of the stretched reading, as an evaluation script is mostly written;
- *twice*: of both readings. This is the equal work, apart from what PySODMetrics does not have.

Rates are per second of the clock; ``cpu_s`` is processor time, of all processes, which other work on the machine moves
less. "many processes" includes their start (each imports torch), "once started" counts from the first row on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import py_sod_metrics as peer
from PIL import Image
from scipy import ndimage

from lumen_lab import evaluate, save_mask
from lumen_lab.datasets import ComposedScenes, PairedFolder
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.evaluation.processes import lines_from_processes
from lumen_lab.evaluation.task import prepare
from lumen_lab.images import encode_png
from lumen_lab.metrics import Scores
from lumen_lab.specs import tool_versions, write_whole

TOOLS = ("pysodmetrics", "opencv-python-headless", "scikit-image", "numpy", "scipy", "pillow", "torch")
RATIOS = (
    ("one process", "peer once"),
    ("one process", "peer twice"),
    ("many processes", "one process"),
    ("many processes, once started", "one process"),
    ("many processes", "peer once"),
    ("many processes", "peer twice"),
)


def write_files(root: Path, *, images: int, side_px: int) -> None:
    """Photographs in ``im``, mattes in ``gt`` and masks with soft, shifted edges in ``predicted``."""
    data = ComposedScenes(drawn_sources(), split="test", size=(side_px, side_px), length=images, seed=11)
    for index in range(images):
        sample, name = data.sample(index), f"{index:05d}.png"
        write_whole(root / "im" / name, encode_png(sample.image))
        save_mask(sample.matte, root / "gt" / name)
        soft = ndimage.gaussian_filter(np.roll(sample.matte, 2, axis=1), 1.5)
        noise = np.random.default_rng(index).normal(0, 0.02, soft.shape)
        save_mask(np.clip(0.9 * soft + 0.03 + noise, 0, 1), root / "predicted" / name)


def peer_means(root: Path, readings: tuple[str, ...]) -> dict[str, float]:
    """PySODMetrics in a plain loop; the mean S of each reading, to compare."""
    means = {}
    for reading in readings:
        handlers = {
            "f": peer.FmeasureHandler(with_dynamic=True, with_adaptive=True),
            "iou": peer.IOUHandler(False, False, with_binary=True),
            "dice": peer.DICEHandler(False, False, with_binary=True),
        }
        s, e, weighted_f, mae = peer.Smeasure(), peer.Emeasure(), peer.WeightedFmeasure(), peer.MAE()
        measures = (s, e, weighted_f, mae, peer.HumanCorrectionEffortMeasure(), peer.FmeasureV2(handlers))
        for path in sorted((root / "predicted").iterdir()):
            mask = np.asarray(Image.open(path))
            truth = np.asarray(Image.open(root / "gt" / path.name))
            stretched = reading == "stretched"
            for measure in measures:
                if stretched:
                    measure.step(mask, truth)
                else:
                    measure.step(mask / 255, truth > 128, normalize=False)
        means[reading] = float(s.get_results()["sm"])
    return means


def processor_s() -> float:
    """Seconds of processor time of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def measured(work: Callable[[], object], images: int) -> tuple[dict[str, float], object]:
    """Rate, wall and processor seconds of ``work`` on so many images, and what it returns."""
    wall, processor = time.perf_counter(), processor_s()
    result = work()
    wall, processor = time.perf_counter() - wall, processor_s() - processor
    return {"images_per_s": round(images / wall, 2), "wall_s": round(wall, 2), "cpu_s": round(processor, 2)}, result


def once_started(root: Path, count: int) -> dict[str, float]:
    """The rate of ``count`` processes from their first row to their last."""
    task, times = prepare(root / "predicted", PairedFolder(root), size=None, hce=True), []
    for _ in lines_from_processes(task, list(range(len(task.names))), count):
        times.append(time.perf_counter())
    wall = times[-1] - times[0]
    return {"images_per_s": round((len(times) - 1) / wall, 2), "wall_s": round(wall, 2)}


def check_equal(scores: Scores, means: Mapping[str, float]) -> None:
    """The benchmark is worth nothing if the two do not measure the same."""
    for reading, mean in means.items():
        found = scores.mean("s_measure", reading=reading)
        if abs(found - mean) > 2e-3:  # the peer takes a matte of 128 of 255 as background
            raise SystemExit(f"S-measure ({reading}) is {found:.5f} here and {mean:.5f} by the peer")


def table(root: Path, *, images: int, processes: int) -> dict[str, dict[str, float]]:
    """All rows, by name."""
    masks, data, rows = root / "predicted", PairedFolder(root), {}
    evaluate(masks, PairedFolder(root), workers=0)  # imports, and files into the system's cache
    rows["peer once"], _ = measured(lambda: peer_means(root, ("stretched",)), images)
    rows["peer twice"], means = measured(lambda: peer_means(root, ("raw", "stretched")), images)
    rows["one process"], scores = measured(lambda: evaluate(masks, data, workers=0), images)
    check_equal(scores, means)
    rows["many processes"], again = measured(lambda: evaluate(masks, data, workers=processes), images)
    if again != scores:
        raise SystemExit("the scores of several processes are not those of one")
    rows["many processes, once started"] = once_started(root, processes)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--side-px", type=int, default=320)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--note", default="", help="kept in the JSON: what else the machine was doing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), images=arguments.images, side_px=arguments.side_px)
        rows = table(Path(folder), images=arguments.images, processes=arguments.processes)
    ratios = {f"{a} / {b}": round(rows[a]["images_per_s"] / rows[b]["images_per_s"], 2) for a, b in RATIOS}
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count())}
    settings = {"images": arguments.images, "side_px": arguments.side_px, "processes": arguments.processes}
    header = {"command": "python tests/benchmarks/evaluation.py", "note": arguments.note, "settings": settings}
    text = json.dumps(header | {"versions": tool_versions(*TOOLS) | machine, "rows": rows, "ratios": ratios}, indent=1)
    print(text)
    if arguments.json:
        write_whole(arguments.json, text + "\n")


if __name__ == "__main__":
    main()
