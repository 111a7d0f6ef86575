"""Calibrate and emit BiRefNet-lite: ``python tests/benchmarks/quantizing_speed.py --json OUT.json``.

The network of ``LUMEN_PLAN`` (golden weights, encoder at 640, mask at 1024), one picture, one thread: this library from
the torch network to the QDQ file, and onnxruntime's quantiser from the float ONNX file to its own. Each runs in a
process of its own; seconds, seconds of processor time and peak memory, and ours beside the peer's: from the network
on, and from the captured graph on (calibrate and emit), since the peer begins with an exported file
(``float_export_s`` is what that took). Ratios are also given of processor time, which a busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import lumen_lab as lab
from lumen_lab.specs import tool_versions, write_whole

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.benchmarks.quantizers import quantised

PEERS = ("lumen_lab", "onnxruntime")


def task_in(folder: Path, preset: str, weights: str, size: tuple[int, int], plan: str) -> tuple[dict[str, str], float]:
    """The float file and one picture, and how long the file took."""
    picture = np.random.default_rng(0).uniform(-2, 2, (1, 3, *size)).astype(np.float32)
    np.save(folder / "pictures.npy", picture)
    network = lab.load_network(preset, weights=weights)
    student = lab.rewrite(network, getattr(lab, plan), example_inputs=(torch.from_numpy(picture),)).model
    started = time.perf_counter()
    model = lab.export_onnx(student, folder / "float.onnx", example_inputs=(torch.from_numpy(picture),))
    export_s = round(time.perf_counter() - started, 1)
    shared = {"model": str(model), "pictures": str(folder / "pictures.npy"), "plan": plan}
    return shared | {"preset": preset, "weights": weights}, export_s


def beside_peer(ours: dict, peer: dict) -> dict[str, float]:
    """How many times faster, and what part of the memory."""
    found = {"of_peer_memory": round(ours["peak_memory_mb"] / peer["peak_memory_mb"], 3)}
    for kind, suffix in (("s", ""), ("cpu_s", "_by_processor_time")):
        from_graph = ours[kind] - ours[f"parts_{kind}"]["capture"]
        found[f"times_faster{suffix}"] = round(peer[kind] / ours[kind], 1)
        found[f"times_faster_from_the_captured_graph{suffix}"] = round(peer[kind] / from_graph, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="lite")
    parser.add_argument("--weights", default="golden")
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), default=(1024, 1024))
    parser.add_argument("--plan", default="LUMEN_PLAN")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task, export_s = task_in(folder, asked.preset, asked.weights, tuple(asked.size), asked.plan)
        rows = [
            {"quantiser": name, **quantised(name, task | {"out": str(folder / f"{name}.onnx")}, folder)}
            for name in PEERS
        ]
    ratios = beside_peer(*rows) | {"float_export_s": export_s}
    print(rows, ratios)
    if asked.json:
        header = {
            "command": " ".join(["python", "tests/benchmarks/quantizing_speed.py", *sys.argv[1:]]),
            "network": f"{asked.preset} ({asked.weights}) under {asked.plan} at {asked.size[0]} × {asked.size[1]}",
            "versions": tool_versions("torch", "onnx", "onnxruntime"),
        }
        write_whole(asked.json, json.dumps(header | ratios | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
