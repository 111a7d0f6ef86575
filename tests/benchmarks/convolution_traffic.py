"""What convs, tiles and tails cost the NPU: ``python tests/benchmarks/convolution_traffic.py [CASE …] [--int8]``.

One row a case: what one inference moves through memory by the compiler's own plan for one chip. The tails stand behind
a stand-in for the network (the image at 640, a conv of stride 4, four convs of 96 channels), so that their features
arrive late, as they do there, and in the NPU's own layout; "stand-in alone" is what to subtract. ``--int8`` quantises
with onnxruntime on one image of noise: the figures of a graph do not depend on its weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.network.config import LITE
from lumen_lab.network.decoder import FullResolutionTail, TileBlock, resize
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.channels import split_conv_over_inputs, split_conv_over_outputs
from lumen_lab.rewrites.input_paths import encoder_size
from lumen_lab.rewrites.plan import Plan
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.rewrites.tail import fold_full_resolution_tail, substitute_slim_tail
from lumen_lab.specs import write_whole

FEATURES, IMAGE_BRANCH = 96, 24
LEVELS = {5: 32, 4: 16, 3: 8, 2: 4}  # tile blocks of the decoder, and tiles on a side


class StandIn(nn.Module):
    """Image (1, 3, H, W) -> features at a quarter of the encoder's size, through what takes a while."""

    def __init__(self):
        super().__init__()
        convs = [(nn.Conv2d(FEATURES, FEATURES, 3, padding=1), nn.ReLU()) for _ in range(4)]
        self.body = nn.Sequential(nn.Conv2d(3, FEATURES, 4, 4), *(layer for pair in convs for layer in pair))

    def forward(self, image: Tensor) -> Tensor:
        return self.body(resize(image, encoder_size(image.shape[-2:], 0.625)))


class Alone(nn.Module):
    """The stand-in and one channel of its features."""

    def __init__(self):
        super().__init__()
        self.stand_in, self.project = StandIn(), nn.Conv2d(FEATURES, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.project(self.stand_in(image))


class Tail(nn.Module):
    """The stand-in and the full-resolution tail of BiRefNet-lite."""

    def __init__(self):
        super().__init__()
        self.stand_in, self.tail = StandIn(), FullResolutionTail()
        self.ipt_blk1 = TileBlock(1, IMAGE_BRANCH, LITE)
        self.conv_out1 = nn.Sequential(nn.Conv2d(FEATURES + IMAGE_BRANCH, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return self.tail(self.stand_in(image), image, self.ipt_blk1, self.conv_out1)


class Tiles(nn.Module):
    """Tile blocks of BiRefNet-lite, the mean of each output: their maps themselves are not what is measured."""

    def __init__(self, *levels: int):
        super().__init__()
        self.sides = [LEVELS[level] for level in levels]
        self.blocks = nn.ModuleList(TileBlock(side**2, 8 * LITE.decoder_width // side, LITE) for side in self.sides)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        maps = [block(image, (height // n, width // n)) for block, n in zip(self.blocks, self.sides, strict=True)]
        return torch.cat([x.mean((2, 3), keepdim=True) for x in maps], 1)


def pair(channels: tuple[int, int, int], kernel: int = 3) -> nn.Module:
    """conv 3×3, ReLU, conv, with so many channels before, between and behind."""
    before, between, behind = channels
    second = nn.Conv2d(between, behind, kernel, padding=kernel // 2)
    return nn.Sequential(nn.Conv2d(before, between, 3, padding=1), nn.ReLU(), second)


def wide_output() -> nn.Module:
    """The context block's last conv, as BiRefNet-lite has it."""
    return nn.Sequential(nn.Conv2d(64, 1536, 3, padding=1))


class Aspp(nn.Module):
    """Five maps of 256 channels side by side, and the 1×1 conv that reads them."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(64, 256, 1) for _ in range(5))
        self.conv = nn.Conv2d(1280, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.cat([branch(x).relu() for branch in self.branches], 1))


def tile_conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3 * 32**2, LITE.tile_width, 3, padding=1))


Case = tuple[Callable[[], nn.Module], Plan, tuple[int, int, int]]
TILES_4D = (CONVERT_IMAGE_TILES_TO_4D,)
IMAGE = (3, 1024, 1024)
CASES: dict[str, Case] = {
    "tail: stand-in alone": (Alone, (), IMAGE),
    "tail: as published": (Tail, (), IMAGE),
    "tail: as published, image not cut": (Tail, TILES_4D, IMAGE),
    "tail: folded at full size": (Tail, (fold_full_resolution_tail(1),), IMAGE),
    "tail: folded on blocks of 2": (Tail, (fold_full_resolution_tail(2),), IMAGE),
    "tail: folded on blocks of 4": (Tail, (fold_full_resolution_tail(),), IMAGE),
    **{f"tail: slim, {n} channels": (Tail, (substitute_slim_tail(n),), IMAGE) for n in (8, 16, 32)},
    "tail: slim, 16 channels, blocks of 4": (Tail, (substitute_slim_tail(16, block=4),), IMAGE),
    "tile conv: whole": (tile_conv, (), (3072, 32, 32)),
    **{f"tile conv: in {n}": (tile_conv, (split_conv_over_inputs(3072 // n),), (3072, 32, 32)) for n in (2, 3, 6)},
    "wide output: whole": (wide_output, (), (64, 32, 32)),
    "wide output: in 2": (wide_output, (split_conv_over_outputs(),), (64, 32, 32)),
    "ASPP: whole": (Aspp, (), (64, 160, 160)),
    "ASPP: in 2": (Aspp, (split_conv_over_inputs(),), (64, 160, 160)),
    "tiles at 640: as published": (lambda: Tiles(5, 4, 3, 2), (), (3, 640, 640)),
    "tiles at 640: rows": (lambda: Tiles(5, 4, 3, 2), TILES_4D, (3, 640, 640)),
    "tiles at 640: rows, conv in 3": (lambda: Tiles(5, 4, 3, 2), (*TILES_4D, split_conv_over_inputs()), (3, 640, 640)),
    **{f"pair: 96, {n}, 96 channels": (lambda n=n: pair((96, n, 96)), (), (96, 128, 128)) for n in (24, 32, 48, 64)},
    **{f"gate: 192, {n}, 1 channels": (lambda n=n: pair((192, n, 1), 1), (), (192, 128, 128)) for n in (16, 32)},
}


def quantised(path: Path, shape: tuple[int, ...]) -> Path:
    """The network at ``path`` as uint8 activations and int8 weights, its input uint8 as well, beside it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Noise(CalibrationDataReader):
        samples = iter([{"image": np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}])

        def get_next(self):
            return next(self.samples, None)

    out = path.with_name(f"{path.stem}_int8.onnx")
    quantize_static(
        path,
        out,
        Noise(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"ForceQuantizeNoInputCheck": True},
    )
    return integer_input(out)


def integer_input(path: Path) -> Path:
    """Let the network take uint8 itself: a float image is read at four times the bytes."""
    model = onnx.load(path)
    image = model.graph.input[0]
    for node in [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == image.name]:
        for reader in model.graph.node:
            reader.input[:] = ["image_u8" if name == node.output[0] else name for name in reader.input]
        model.graph.node.remove(node)
    image.name, image.type.tensor_type.elem_type = "image_u8", onnx.TensorProto.UINT8
    onnx.save(model, path)
    return path


def measured(name: str, *, chip: str, int8: bool, folder: Path) -> dict[str, object]:
    """One row: bytes, tiles, operations and seconds of a case."""
    make, plan, shape = CASES[name]
    torch.manual_seed(0)
    image = torch.randn(1, *shape)
    model = rewrite(make().eval(), plan, example_inputs=(image,)).model
    path = folder / ("".join(letter if letter.isalnum() else "_" for letter in name) + ".onnx")
    export_onnx(model, path, example_inputs=(image,))
    path = quantised(path, tuple(image.shape)) if int8 else path
    report = compile_for_chip(path, chip, out_dir=folder, progress=False)
    traffic = report.traffic
    return {
        "case": name,
        "dtype": "int8" if int8 else "float16",
        "DRAM read, MB": round(traffic.dram_read_bytes / 1e6, 2),
        "DRAM written, MB": round(traffic.dram_write_bytes / 1e6, 2),
        "VTCM read, MB": round(traffic.vtcm_read_bytes / 1e6, 1),
        "VTCM written, MB": round(traffic.vtcm_write_bytes / 1e6, 1),
        "tiles": traffic.tiles,
        "QNN ops": len(report.ops),
        "partitions": report.partitions,
        "compile_s": round(report.compile_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"beginnings of names, of: {'; '.join(CASES)}")
    parser.add_argument("--chip", default="SM8850")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in CASES if not asked.cases or name.startswith(tuple(asked.cases))):
            rows.append(measured(name, chip=asked.chip, int8=asked.int8, folder=Path(folder)))
            print(" | ".join(map(str, rows[-1].values())), flush=True)
    if asked.json:
        write_whole(asked.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
