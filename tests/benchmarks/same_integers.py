"""Torch's integers beside the QDQ file's: ``python tests/benchmarks/same_integers.py --json OUT [--sources SOURCES]``.

Micro under each plan, calibrated from 32 scenes; over held-out scenes, each operation given the integers that torch
wrote before it (how many of all integers differ), and the mask end to end, scene by scene (the share of equal pixels
and the furthest one). onnxruntime with graph optimisation off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import lumen_lab as lab
from lumen_lab.datasets import ComposedScenes, open_sources
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.deploy.torch_steps import torch_steps
from lumen_lab.quantization.quantize import code_sha256
from lumen_lab.specs import tool_versions, write_whole


def plan_row(plan: str, asked: argparse.Namespace, bank) -> dict[str, object]:
    """What differs under one plan."""
    network = lab.load_network("micro")
    size = network.config.image_size
    calibration = ComposedScenes(bank, split="train", size=size, length=asked.pictures, seed=0)
    held_out = ComposedScenes(bank, split="test", size=size, length=asked.held_out, seed=1)
    graph = lab.quantize(lab.rewrite(network, getattr(lab, plan)).model, calibration, progress=False)
    path = lab.export_qdq(graph, asked.work / f"micro_{plan.lower()}.onnx")
    reports = [torch_steps(graph, path, [held_out[number]["image"][None]]) for number in range(asked.held_out)]
    inside = [row for report in reports for row in report.operations]
    masks = [report.outputs[0] for report in reports]
    return {
        "plan": plan,
        "integers": sum(sum(row.counts) for row in inside),
        "unequal": sum(sum(row.counts[1:]) for row in inside),
        "furthest_steps": max(row.max_steps for row in inside),
        "mask_equal_median": round(statistics.median(row.equal for row in masks), 5),
        "mask_equal_least": round(min(row.equal for row in masks), 5),
        "mask_within_two_least": round(min(row.within_two for row in masks), 5),
        "mask_furthest_steps": max(row.max_steps for row in masks),
        "scenes_with_at_least_99_percent_equal": sum(row.equal >= 0.99 for row in masks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["LUMEN_PLAN", "LEAN_PLAN", "EXACT_PLAN"])
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--sources", type=Path, help="photographs of the bench; without, scenes are drawn")
    parser.add_argument("--work", type=Path, default=Path("build/same_integers"))
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    bank = open_sources(asked.sources) if asked.sources else drawn_sources()
    header = {
        "command": " ".join(["python", "tests/benchmarks/same_integers.py", *sys.argv[1:]]),
        "network": f"micro, {asked.pictures} calibration and {asked.held_out} held-out scenes",
        "code_sha256": code_sha256(),
        "versions": tool_versions("torch", "onnxruntime"),
    }
    rows = []
    for plan in asked.plans:
        rows.append(plan_row(plan, asked, bank))
        print(rows[-1], file=sys.stderr)
        write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
