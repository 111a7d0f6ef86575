"""How ranges are chosen: ``python tests/benchmarks/calibration_methods.py --json OUT.json [--sources SOURCES]``.

The micro network under each plan, all 8 bits, is calibrated from the same scenes by every method, with and without
regard to what reads a tensor; what is left of logits and mask is measured on held-out scenes against float.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import lumen_lab as lab
from lumen_lab.datasets import ComposedScenes, open_sources
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.ranges import LEAST_ERROR, METHODS
from lumen_lab.quantization.sensitivity import compared
from lumen_lab.specs import tool_versions, write_whole


@torch.no_grad()
def against_float(graph: NPUGraph, pictures: list[Tensor], *, reference: NPUGraph | None = None) -> dict[str, float]:
    """SQNR of the logits and mean difference of the mask over all pictures, against a graph (this one) in float."""
    reference = graph if reference is None else reference
    with reference.in_float():
        expected = torch.cat([reference(picture) for picture in pictures])
    sqnr_db, mask = compared(expected, torch.cat([graph(picture) for picture in pictures]))
    return {"logits_sqnr_db": round(sqnr_db, 2), "mask_difference": round(mask, 5)}


def plan_rows(plan: str, shown: ComposedScenes, held_out: list[Tensor]) -> list[dict[str, object]]:
    """A row a method, with and without readers."""
    network = lab.load_network("micro")
    student = lab.rewrite(network, getattr(lab, plan)).model
    graph = lab.quantize(student, shown, output="logits", progress=False)
    rows = []
    for method in (*METHODS, LEAST_ERROR):
        for by_reader in (True, False):
            one = copy.deepcopy(graph)
            calibrate(one, shown, method=method, by_reader=by_reader, progress=False)
            rows.append({"plan": plan, "method": method, "by_reader": by_reader, **against_float(one, held_out)})
            print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["EXACT_PLAN", "LUMEN_PLAN", "LEAN_PLAN"])
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--sources", type=Path, help="photographs of the bench; without, scenes are drawn")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    bank = open_sources(asked.sources) if asked.sources else drawn_sources()
    size = lab.load_network("micro").config.image_size
    shown = ComposedScenes(bank, split="train", size=size, length=asked.pictures, seed=0)
    test = ComposedScenes(bank, split="test", size=size, length=asked.held_out, seed=1)
    held_out = [test[number]["image"][None] for number in range(asked.held_out)]
    rows = [row for plan in asked.plans for row in plan_rows(plan, shown, held_out)]
    header = {
        "command": " ".join(["python", "tests/benchmarks/calibration_methods.py", *sys.argv[1:]]),
        "network": "micro, trained weights, 8 bits, output in logits",
        "scenes": "composed of photographs" if asked.sources else "drawn",
        "versions": tool_versions("torch", "torchvision"),
    }
    write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
