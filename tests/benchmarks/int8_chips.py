"""Micro in INT8 on every architecture: ``python tests/benchmarks/int8_chips.py --json OUT.json [--sources SOURCES]``.

Quantised after training under each plan, compiled for one chip of each HTP architecture, proved to be integers to the
last operation, and emulated beside the same file on the CPU: how many of the mask's integers are equal, one, two and
more steps off, over held-out scenes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import lumen_lab as lab
from lumen_lab.chips import find_chip
from lumen_lab.datasets import ComposedScenes, open_sources
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.deploy.report import require_int8
from lumen_lab.deploy.steps_off import output_steps
from lumen_lab.quantization.quantize import code_sha256
from lumen_lab.specs import tool_versions, write_whole

CHIPS = ("SM7325", "SM8450", "SM8550", "SM8650", "SM8750", "SM8850", "SM8950")  # v68 (soc 35), 69, 73, 75, 79, 81, 85
TOOLS = ("torch", "torchvision", "onnx", "onnxruntime", "onnxruntime-qnn")


def plan_rows(plan: str, asked: argparse.Namespace, bank) -> Iterator[dict[str, object]]:
    """One row a chip, as it comes."""
    network = lab.load_network("micro")
    student = lab.rewrite(network, getattr(lab, plan)).model
    size = network.config.image_size
    calibration = ComposedScenes(bank, split="train", size=size, length=asked.pictures, seed=0)
    held_out = ComposedScenes(bank, split="test", size=size, length=asked.held_out, seed=1)
    graph = lab.quantize(student, calibration, progress=False)
    path = lab.export_qdq(graph, asked.work / f"micro_{plan.lower()}_int8.onnx")
    encoding = graph.quantisers["image"].encoding
    samples = [encoding.quantise(held_out[number]["image"][None].numpy()) for number in range(asked.held_out)]
    for chip in asked.chips:
        report = require_int8(lab.compile_for_chip(path, chip, out_dir=asked.work, progress=False))
        (steps,) = output_steps(path, report.context_path, samples).outputs
        found = find_chip(chip)
        yield {
            "plan": plan,
            "chip": chip,
            "htp_arch": report.htp_arch,
            "soc_model": found.soc_model,
            "partitions": report.partitions,
            "cpu_nodes": len(report.cpu_nodes),
            "qnn_ops": len(report.ops),
            "float_ops": len(report.float_ops),
            "silent_faults": len(report.silent_faults),
            "dram_mb": round(report.traffic.dram_bytes / 1e6, 2),
            "tiles": report.traffic.tiles,
            "steps_off": list(steps.counts),
            "max_steps": steps.max_steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["LUMEN_PLAN", "LEAN_PLAN", "EXACT_PLAN"])
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--sources", type=Path, help="photographs of the bench; without, scenes are drawn")
    parser.add_argument("--work", type=Path, default=Path("build/int8_chips"))
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    bank = open_sources(asked.sources) if asked.sources else drawn_sources()
    header = {
        "command": " ".join(["python", "tests/benchmarks/int8_chips.py", *sys.argv[1:]]),
        "network": f"micro, trained weights of the float network, {asked.pictures} calibration scenes",
        "scenes": "of the bench's photographs" if asked.sources else "drawn",
        "code_sha256": code_sha256(),
        "versions": tool_versions(*TOOLS),
    }
    rows = []
    for row in (row for plan in asked.plans for row in plan_rows(plan, asked, bank)):
        rows.append(row)
        print(row, file=sys.stderr)
        write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
