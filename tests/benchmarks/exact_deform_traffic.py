"""Traffic of exact deformable convs: ``python tests/benchmarks/exact_deform_traffic.py 256 512 --json OUT.json``.

Each decoder block of BiRefNet-lite (four deformable convs each, golden weights, float16) is compiled alone at the size
that it has for a square network input of the sides given. Nothing is run: traffic is what the compiler plans
(``CompileReport.traffic``). ``inside_mb`` leaves out the part's input and output, which a network may keep on the chip;
``inside_ms`` is how long a phone's memory takes for it, at 85 and at 70 GB/s. A part that cannot be compiled is a row
with the error. ``--parts decoder network`` compiles more than blocks, ``--taps-at-once`` compares forms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from lumen_lab import EXACT_PLAN, compile_for_chip, export_onnx, load_network, rewrite
from lumen_lab.errors import CompileError
from lumen_lab.rewrites.deform import TAPS_AT_ONCE, decompose_deform_conv
from lumen_lab.specs import tool_versions, write_whole

BLOCKS = {"squeeze_module": 32, "block 4": 32, "block 3": 16, "block 2": 8, "block 1": 4}  # part: its stride
PARTS = (*BLOCKS, "decoder", "network")
STRIDES = (4, 8, 16, 32)  # of the encoder's maps
DRAM_BYTES_PER_S = (85e9, 70e9)  # what a phone's memory gives
TOOLS = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "onnxruntime-qnn")


class DecoderAlone(nn.Module):
    """The decoder as a network of its own: image (N, 3, H, W) and the four encoder maps -> logits."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder = decoder

    def forward(self, image: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor) -> Tensor:
        return self.decoder(image, image, x1, x2, x3, x4)


def part_of(network: nn.Module, name: str, side_px: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The part of the network called ``name`` and inputs as they are for an image of ``side_px``²."""
    image = torch.zeros(1, 3, side_px, side_px)
    if name == "network":
        return network, (image,)
    if name == "decoder":
        channels = zip(network.config.lateral_channels, STRIDES, strict=True)
        maps = (torch.zeros(1, width, side_px // stride, side_px // stride) for width, stride in channels)
        return DecoderAlone(network.decoder), (image, *maps)
    squeeze = name == "squeeze_module"
    block = network.squeeze_module[0] if squeeze else network.decoder.part("decoder_block", int(name[-1]))
    size = side_px // BLOCKS[name]
    return nn.Sequential(block), (torch.zeros(1, block.conv_in.in_channels, size, size),)


def exact_form(part: nn.Module, inputs: tuple[Tensor, ...], taps_at_once: int) -> nn.Module:
    """``part`` under ``EXACT_PLAN``, with ``taps_at_once`` in its deformable convs."""
    decompose = decompose_deform_conv(taps_at_once=taps_at_once)
    plan = tuple(decompose if rule.name == decompose.name else rule for rule in EXACT_PLAN)
    return rewrite(part.eval(), plan, example_inputs=inputs).model


def measured(model: nn.Module, inputs: tuple[Tensor, ...], chip: str, time_limit_s: float) -> dict[str, object]:
    """Figures of one compile, or the error it ended in."""
    names = ("image", "x1", "x2", "x3", "x4")[: len(inputs)]
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(model, Path(folder) / "part.onnx", example_inputs=inputs, input_names=names)
        try:
            report = compile_for_chip(path, chip, out_dir=folder, time_limit_s=time_limit_s, progress=False)
        except CompileError as error:
            return {"error": str(error).splitlines()[0].replace(folder, "")}
    return figures(report) if report.traffic is not None else {"error": report.no_traffic_because}


def figures(report) -> dict[str, object]:
    """What is compared from one compile to the next; megabytes are 10⁶ bytes."""
    traffic = report.traffic
    ends = sum(op.dram_read_bytes + op.dram_write_bytes for op in traffic.ops if op.qnn_kind in ("Input", "Output"))
    inside = traffic.dram_bytes - ends
    return {
        "partitions": report.partitions,
        "on_the_cpu": len(report.cpu_nodes),
        "qnn_ops": len(report.ops),
        "tiles": traffic.tiles,
        "read_mb": round(traffic.dram_read_bytes / 1e6, 2),
        "written_mb": round(traffic.dram_write_bytes / 1e6, 2),
        "spilled_mb": round(sum(op.spilled_bytes for op in traffic.ops) / 1e6, 2),
        "inside_mb": round(inside / 1e6, 2),
        "inside_ms": [round(1e3 * inside / rate, 2) for rate in DRAM_BYTES_PER_S],
        "binary_mb": round(report.binary_bytes / 1e6, 2),
        "compile_s": round(report.compile_s, 1),
        "peak_memory_mib": report.peak_memory_bytes and round(report.peak_memory_bytes / 2**20),
    }


def saved(path: Path, chip: str, rows: list[dict[str, object]]) -> Path:
    """Write the rows made so far, with what made them."""
    header = {
        "command": " ".join(["python", "tests/benchmarks/exact_deform_traffic.py", *sys.argv[1:]]),
        "network": f"BiRefNet-lite under EXACT_PLAN, golden weights, float16, for {chip}",
        "versions": tool_versions(*TOOLS),
        "dram_bytes_per_s": DRAM_BYTES_PER_S,
    }
    return write_whole(path, json.dumps(header | {"rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sides", type=int, nargs="+", help="sides of the network's input in pixels, multiples of 32")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(BLOCKS))
    parser.add_argument("--taps-at-once", type=int, nargs="+", default=[TAPS_AT_ONCE])
    parser.add_argument("--chip", default="SM8850")
    parser.add_argument("--time-limit-s", type=float, default=3600)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    network = load_network("lite", weights="golden")
    rows: list[dict[str, object]] = []
    for side_px, name, taps in ((s, n, t) for s in asked.sides for n in asked.parts for t in asked.taps_at_once):
        part, inputs = part_of(network, name, side_px)
        row = {"side_px": side_px, "part": name, "input": list(inputs[-1].shape), "taps_at_once": taps}
        model = exact_form(part, inputs, taps)
        rows.append(row | measured(model, inputs, asked.chip, asked.time_limit_s))
        saved(asked.json, asked.chip, rows)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
