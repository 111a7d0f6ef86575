"""BiRefNet-lite in integers at full size: ``python tests/benchmarks/lite_int8.py --json OUT.json``.

``LUMEN_PLAN`` (golden weights, which prove graphs and not masks), encoder at 640, mask at 1024: calibrated from one
picture, written as QDQ, compiled to the end for the chip. The row says how long each step took, what the compiled graph
is made of, and what it moves. Ten minutes and more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import lumen_lab as lab
from lumen_lab.deploy.report import require_int8
from lumen_lab.specs import tool_versions, write_whole

SIZE = (1024, 1024)
TOOLS = ("torch", "torchvision", "onnx", "onnxruntime", "onnxruntime-qnn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="LUMEN_PLAN")
    parser.add_argument("--chip", default="SM8850")
    parser.add_argument("--work", type=Path, default=Path("build/lite_int8"))
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    picture = torch.rand(1, 3, *SIZE, generator=torch.Generator().manual_seed(0)) * 4 - 2
    network = lab.load_network("lite", weights="golden")
    student = lab.rewrite(network, getattr(lab, asked.plan), example_inputs=(picture,)).model
    seconds, started = {}, time.perf_counter()

    def took(step: str) -> None:
        nonlocal started
        seconds[step], started = round(time.perf_counter() - started, 1), time.perf_counter()

    graph = lab.quantize(student, [picture], example=picture, progress=False)
    took("capture and calibrate")
    path = lab.export_qdq(graph, asked.work / f"lite_{asked.plan.lower()}_int8.onnx")
    took("emit")
    report = lab.compile_for_chip(path, asked.chip, out_dir=asked.work, time_limit_s=5400)
    took("compile")
    require_int8(report)
    header = {
        "command": " ".join(["python", "tests/benchmarks/lite_int8.py", *sys.argv[1:]]),
        "network": f"BiRefNet-lite under {asked.plan}, golden weights, uint8 in and out",
        "size": SIZE,
        "versions": tool_versions(*TOOLS),
    }
    figures = report.figures() | {"QNN ops by type": report.ops_by_dtype, "on the CPU": len(report.cpu_nodes)}
    write_whole(asked.json, json.dumps(header | {"seconds": seconds, "figures": figures}, indent=1) + "\n")
    print(report, seconds)


if __name__ == "__main__":
    main()
