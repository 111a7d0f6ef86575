"""Quantisers on one graph: ``python tests/benchmarks/quantizers.py --json OUT.json [--sources SOURCES]``.

The float network (micro under ``EXACT_PLAN``, which is the same function, so that masks can be judged) goes to every
quantiser with the same calibration scenes, each in a process of its own. What comes out is compiled for the chip,
emulated on photographs beside the same file on the CPU, and scored on held-out scenes. Rows in ``--work`` are not made
again. A quantiser that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import torch

import lumen_lab as lab
from lumen_lab.datasets import ComposedScenes, open_sources
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.errors import LumenError
from lumen_lab.prediction import QUANTISED, predict_all
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path, tool_versions, write_whole

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the peers are run as a module of the tests
from tests.benchmarks.peers.quantisers import QUANTISERS  # noqa: E402

METRICS = ("s_measure", "weighted_f", "mae", "thin_recall")
TOOLS = ("torch", "onnx", "onnxruntime", "onnxruntime-qnn", "torchao", "aimet-onnx")
MISSING = {"torchao PT2E": "pip install torchao", "AIMET": "pip install aimet-onnx"}


def quantised(name: str, task: dict[str, str], folder: Path) -> dict[str, object]:
    """Run one quantiser in its own process: seconds and peak memory, or the error in a line."""
    path = write_whole(folder / f"{task['out']}.json", json.dumps(task))
    command = [sys.executable, "-m", "tests.benchmarks.peers.quantisers", name, str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if "ModuleNotFoundError" in lines[-1] and name in MISSING:
        return {"error": f"not installed; {MISSING[name]}"}
    return {"error": lines[-1][:300]}


def with_manifest(path: Path, size: tuple[int, int]) -> Path:
    """The contract beside a file from elsewhere (float ends, logits), so that its graph is run as it stands."""
    if not manifest_path(path).is_file():
        given = TensorSpec("image", (1, 3, *size), "NCHW", "float32")
        returned = TensorSpec("logits", (1, 1, *size), "NCHW", "float32")
        Manifest(QUANTISED, {}, {}, (given,), (returned,), {path.name: file_sha256(path)}).save(manifest_path(path))
    return path


def compiled(path: Path, chip: str, folder: Path) -> dict[str, object]:
    """What the compiler makes of a file, and how far its emulation is from the CPU on photographs, in 255ths."""
    report = lab.compile_for_chip(path, chip, out_dir=folder, progress=False)
    images = [lab.load_image(one) for one in sorted((ROOT / "data/photographs").glob("*.jpg"))[:3]]
    pairs = zip(predict_all(path, images), predict_all(report.context_path, images), strict=True)
    steps = np.concatenate([np.rint(np.abs(a - b) * 255).reshape(-1) for a, b in pairs])
    return {
        "partitions": report.partitions,
        "cpu_nodes": len(report.cpu_nodes),
        "qnn_ops": len(report.ops),
        "float_ops": len(report.float_ops),
        "float_kinds": dict(Counter(op.kind for op in report.float_ops).most_common(6)),
        "cpu_kinds": dict(Counter(node.op_type for node in report.cpu_nodes).most_common(6)),
        "silent_faults": len(report.silent_faults),
        "int8_mac_share": report.int8_mac_share and round(report.int8_mac_share, 4),
        "dram_mb": round((report.traffic.dram_read_bytes + report.traffic.dram_write_bytes) / 1e6, 2),
        "emulated_equal": round(float((steps == 0).mean()), 4),
        "emulated_within_1": round(float((steps <= 1).mean()), 4),
        "emulated_max": int(steps.max()),
    }


def scored(predictor, scenes: ComposedScenes) -> dict[str, float]:
    """Mean metrics of the masks on the CPU, those that the scenes define: thin recall needs something thin."""
    scores = lab.evaluate(predictor, scenes, hce=False)
    means = {name: scores.mean(name) for name in METRICS}
    return {name: round(mean, 4) for name, mean in means.items() if mean is not None}


def quantiser_row(name: str, task: dict[str, str], asked: argparse.Namespace, scenes: ComposedScenes) -> dict:
    """All figures of one quantiser; as far as it came, with the reason."""
    out, row = Path(task["out"]), {"quantiser": name}
    row |= quantised(name, task, asked.work)
    if "error" in row:
        return row
    row["file_mb"] = round(out.stat().st_size / 1e6, 1)
    try:
        path = with_manifest(out, scenes.size)
        row |= scored(path, scenes)
        row |= compiled(path, asked.chip, asked.work / "compiled")
    except LumenError as error:
        row["error"] = str(error)[:400]
    return row


def prepared(asked: argparse.Namespace) -> tuple[dict[str, str], ComposedScenes, torch.nn.Module]:
    """The float file and the calibration pictures in ``--work``, what is held out, and the float network."""
    network = lab.load_network("micro")
    student = lab.rewrite(network, getattr(lab, asked.plan)).model
    bank = open_sources(asked.sources) if asked.sources else drawn_sources()
    size = network.config.image_size
    shown = ComposedScenes(bank, split="train", size=size, length=asked.pictures, seed=0)
    held_out = ComposedScenes(bank, split="test", size=size, length=asked.held_out, seed=1)
    model = lab.export_onnx(student, asked.work / "float.onnx", reuse=True)
    stack = np.stack([shown[number]["image"].numpy() for number in range(asked.pictures)])
    np.save(asked.work / "pictures.npy", stack)
    task = {"model": str(model), "pictures": str(asked.work / "pictures.npy")}
    return task | {"preset": "micro", "weights": "published", "plan": asked.plan}, held_out, student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUANTISERS, default=list(QUANTISERS))
    parser.add_argument("--plan", default="EXACT_PLAN")
    parser.add_argument("--chip", default="SM8850")
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--sources", type=Path, help="photographs of the bench; without, scenes are drawn")
    parser.add_argument("--work", type=Path, default=Path("build/quantizers"))
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    asked.work = asked.work.absolute()
    asked.work.mkdir(parents=True, exist_ok=True)
    task, held_out, student = prepared(asked)
    kept = asked.work / "rows.json"
    rows = json.loads(kept.read_text()) if kept.is_file() else {}
    if "float" not in rows:
        rows["float"] = {"quantiser": "none (float32)"} | scored(student, held_out)
    for name in asked.only:
        if name not in rows or "error" in rows[name]:
            out = asked.work / f"{name.replace(',', '').replace(' ', '_')}.onnx"
            for old in (out, manifest_path(out)):
                old.unlink(missing_ok=True)
            rows[name] = quantiser_row(name, task | {"out": str(out)}, asked, held_out)
            print(rows[name], file=sys.stderr)
            write_whole(kept, json.dumps(rows))
    drawn = "composed of photographs" if asked.sources else "drawn"
    header = {
        "command": " ".join(["python", "tests/benchmarks/quantizers.py", *sys.argv[1:]]),
        "network": f"micro under {asked.plan}, float32 opset {onnx.load(task['model']).opset_import[0].version}",
        "calibration": f"{asked.pictures} scenes {drawn}, {asked.held_out} held out",
        "chip": asked.chip,
        "versions": tool_versions(*TOOLS),
    }
    in_order = [rows[name] for name in ("float", *QUANTISERS) if name in rows]
    write_whole(asked.json, json.dumps(header | {"rows": in_order}, indent=1) + "\n")


if __name__ == "__main__":
    main()
