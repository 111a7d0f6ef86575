"""Predicted against actual on BiRefNet-lite: ``python tests/benchmarks/lite_predicted_against_actual.py OUT_DIR``.

Golden weights (they prove graphs, not masks). The published network is compiled at 256² and the rewritten one at 128²,
float16, for SM8850; a few minutes and 2 GB. Writes ``lite_<form>_<side>_SM8850.json`` with what was compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from lumen_lab import EXACT_PLAN, audit, compile_for_chip, export_onnx, load_network, rewrite
from lumen_lab.auditing import compare_with_actual
from lumen_lab.specs import tool_versions, write_whole

CHIP = "SM8850"
FORMS = {"published": 256, "rewritten": 128}
TOOLS = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "onnxruntime-qnn")


def compared(form: str, side_px: int, folder: str) -> dict[str, object]:
    """Audit, export, compile and compare one form of BiRefNet-lite at one size."""
    model = load_network("lite", weights="golden")
    inputs = (torch.zeros(1, 3, side_px, side_px),)
    if form == "rewritten":
        model = rewrite(model, EXACT_PLAN, example_inputs=inputs).model
    predicted = audit(model, inputs, chip=CHIP)
    path = export_onnx(model, Path(folder) / f"lite_{form}_{side_px}.onnx", example_inputs=inputs)
    actual = compile_for_chip(path, CHIP, out_dir=folder)
    comparison = compare_with_actual(predicted, actual, onnx_path=path)
    return {
        "operations": len(comparison.operations),
        "disagreements": [row for row in comparison.rows() if row["agrees"] == "NO"],
        "by outcome": comparison.summary_rows(),
        "partitions predicted": predicted.partitions,
        "partitions compiled": actual.partitions,
        "on the CPU": actual.cpu_rows(),
        "QNN ops": len(actual.ops),
        "binary_bytes": actual.binary_bytes,
        "compile_s": round(actual.compile_s, 1),
        "peak_memory_bytes": actual.peak_memory_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args().out_dir
    for form, side_px in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = compared(form, side_px, folder)
        header = {
            "command": "python tests/benchmarks/lite_predicted_against_actual.py data/recorded",
            "network": f"BiRefNet-lite, {form}, golden weights, {side_px} x {side_px}, for {CHIP}",
            "versions": tool_versions(*TOOLS),
        }
        path = write_whole(out_dir / f"lite_{form}_{side_px}_{CHIP}.json", json.dumps(header | found, indent=1) + "\n")
        print(f"{path}: {found['operations']} operations, {len(found['disagreements'])} disagreements")


if __name__ == "__main__":
    main()
