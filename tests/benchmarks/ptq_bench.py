"""Float and INT8 on the bench lists: ``python tests/benchmarks/ptq_bench.py SOURCES --json OUT.json``.

The micro network under ``EXACT_PLAN``, which is the teacher's function, quantised after training (PTQ) from scenes of
the training split; the QDQ file is scored on the CPU, its graph as it stands. Means over each list, raw reading.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import lumen_lab as lab
from lumen_lab.bench.lists import read_lists, scenes_of
from lumen_lab.bench.table import run_bench
from lumen_lab.datasets import ComposedScenes, open_sources
from lumen_lab.specs import tool_versions, write_whole

METRICS = ("s_measure", "weighted_f", "mae", "iou", "boundary_iou", "thin_recall", "soft_edge_gap_px")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="photographs of the bench")
    parser.add_argument("--plan", default="EXACT_PLAN")
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("build/ptq_bench"))
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    network, bank = lab.load_network("micro"), open_sources(asked.sources)
    student = lab.rewrite(network, getattr(lab, asked.plan)).model
    size = network.config.image_size
    calibration = ComposedScenes(bank, split="train", size=size, length=asked.pictures, seed=0)
    path = lab.export_qdq(lab.quantize(student, calibration, progress=False), asked.work / "micro_int8.onnx")
    scenes = {name: scenes_of(entry, bank) for name, entry in read_lists().items()}
    predictors = {"float32": student, "INT8": path}
    rows = []
    for form, predictor in predictors.items():
        scores = run_bench(predictor, scenes, out_dir=asked.work / form.lower(), workers=2)
        for name, found in scores.items():
            means = {metric: round(found.mean(metric), 4) for metric in METRICS}
            rows.append({"list": name, "scenes": len(scenes[name]), "form": form, **means})
            print(rows[-1], file=sys.stderr)
    header = {
        "command": " ".join(["python", "tests/benchmarks/ptq_bench.py", *sys.argv[1:]]),
        "network": f"micro under {asked.plan}, min-max by reader from {asked.pictures} scenes",
        "versions": tool_versions("torch", "onnxruntime", "pysodmetrics"),
    }
    write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
