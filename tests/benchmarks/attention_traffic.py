"""What a Swin block costs on the NPU in each form: ``python tests/benchmarks/attention_traffic.py [--stages 2] …``.

Compiles one block of the BiRefNet-lite encoder at 640 px in float16 and prints, for each form and window, what the
compiler's schematic says it moves. ``--emulate`` also runs it through the emulated NPU against float32: a form that
compiles can be wrong. A row takes 5 to 60 s a core, the published attention minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lumen_lab.deploy.htp import compile_for_chip, emulate
from lumen_lab.deploy.onnx_export import export_onnx
from lumen_lab.network.swin import MASKED, SwinBlock, WindowPartition
from lumen_lab.rewrites import rewrite
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
    PaddedShift,
    WindowPartition4d,
)
from lumen_lab.rewrites.heads import REDUCE_ATTENTION_RANK, SPLIT_ATTENTION_BY_HEADS, HeadsInWindows, attend
from lumen_lab.rewrites.linear import CONVERT_LINEAR_TO_CONV, PointwiseConv
from lumen_lab.rewrites.record import FixedTensors
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW
from lumen_lab.specs import Table

CHIP = "SM8850"
BYTES = ("dram read", "dram write", "vtcm read", "vtcm write")
STAGES = {1: (160, 96, 3), 2: (80, 192, 6), 3: (40, 384, 12), 4: (20, 768, 24)}  # side of the map, channels, heads
WINDOWS = (CONVERT_CYCLIC_SHIFT_TO_PADDING, CONVERT_WINDOW_PARTITION_TO_4D, CONVERT_WINDOW_MERGE_TO_4D)
SPLIT = (*WINDOWS, SPLIT_ATTENTION_BY_HEADS)


class WithoutPad(WindowPartition4d):
    """The windows straight from the reshape."""

    def forward(self, x: Tensor) -> Tensor:
        pad, F.pad = F.pad, lambda x, sides: x
        try:
            return super().forward(x)
        finally:
            F.pad = pad


class OneConstant(HeadsInWindows):
    """Bias and mask added up first: one constant a head."""

    def over(self, x: Tensor, size: tuple[int, int], mask: Tensor | None) -> Tensor:
        biases = self.positions(self.relative_position_bias_table, size)
        biases = [bias if mask is None else bias + mask for bias in biases]
        mixed = [attend(*head, bias, None) for head, bias in zip(self.projection(x), biases)]
        return self.proj(torch.cat(mixed, -1))


class SummedHeads(HeadsInWindows):
    """A projection a head, and their sum in place of one projection of all heads side by side."""

    def over(self, x: Tensor, size: tuple[int, int], mask: Tensor | None) -> Tensor:
        biases = self.positions(self.relative_position_bias_table, size)
        weights = self.proj.weight.chunk(len(biases), 1)
        total = self.proj.bias
        for head, bias, weight in zip(self.projection(x), biases, weights):
            total = F.linear(attend(*head, bias, mask), weight) + total
        return total


class WindowsAsMaps(PointwiseConv):
    """The tokens of a window as a map of their own; for some numbers of windows the compiler gets it wrong."""

    def forward(self, x: Tensor) -> Tensor:
        side = round(x.shape[1] ** 0.5)
        return super().forward(x.unflatten(1, (side, side))).flatten(1, 2) if x.ndim == 3 else super().forward(x)


def as_class(old: type[nn.Module], new: type[nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for module in model.modules():
            if type(module) is old:
                module.__class__ = new

    return change


def all_of(*changes: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for one in changes:
            one(model)

    return change


def mask_of_pairs(model: nn.Module) -> None:
    """The mask for each pair of tokens, as a roll needs it, in place of one for each key."""

    def make(window: int, shift: int, size: tuple[int, int]) -> Tensor:
        real = F.pad(torch.ones(1, *size, 1, dtype=torch.float64), (0, 0, *2 * (window - shift, shift)))
        real = WindowPartition(window)(real).squeeze(-1)
        return (real[:, None] != real[:, :, None]) * MASKED

    for module in model.modules():
        if isinstance(module, PaddedShift):
            module.mask = FixedTensors(partial(make, module.window, module.shift)).eval()


CONVS = (*SPLIT, CONVERT_LINEAR_TO_CONV)
WITHOUT_PAD = as_class(WindowPartition4d, WithoutPad)
WINDOWS_AS_MAPS = as_class(PointwiseConv, WindowsAsMaps)
FORMS: dict[str, tuple[tuple, Callable | None]] = {
    "as published": ((), None),
    "windows rewritten, published attention": (WINDOWS, None),
    "reduce_attention_rank": ((*WINDOWS, REDUCE_ATTENTION_RANK), None),
    "split_attention_by_heads": (SPLIT, None),
    "split, roll and rank 6 as published": ((SPLIT_ATTENTION_BY_HEADS,), None),
    "split, roll as published": ((*WINDOWS[1:], SPLIT_ATTENTION_BY_HEADS), None),
    "split, convert_linear_to_conv": (CONVS, None),
    "split, conv over windows as maps": (CONVS, WINDOWS_AS_MAPS),
    "split, no pad behind the windows": (SPLIT, WITHOUT_PAD),
    "split, conv over windows as maps, no pad": (CONVS, all_of(WITHOUT_PAD, WINDOWS_AS_MAPS)),
    "split, mask of pairs": (SPLIT, mask_of_pairs),
    "split, bias and mask in one constant": (SPLIT, as_class(HeadsInWindows, OneConstant)),
    "split, a projection a head, summed": (SPLIT, as_class(HeadsInWindows, SummedHeads)),
    "split, one window over the map": ((SUBSTITUTE_GLOBAL_WINDOW, SPLIT_ATTENTION_BY_HEADS), None),
}


def block_of(stage: int, window: int, *, shifted: bool) -> tuple[nn.Module, Tensor]:
    """A block with weights under which its attention matters, and an input for it."""
    side, channels, heads = STAGES[stage]
    torch.manual_seed(0)
    block = SwinBlock(channels, heads, window, window // 2 if shifted else 0, 0.0)
    for linear in (block.attn.qkv, block.attn.proj):
        nn.init.normal_(linear.weight, std=channels**-0.5)
    nn.init.normal_(block.attn.relative_position_bias_table)
    return nn.Sequential(block).eval(), torch.randn(1, side, side, channels)


def measured(form: str, stage: int, window: int, *, shifted: bool, run: bool, folder: Path) -> dict[str, object]:
    """One row: what the compiler makes of a form, and with ``run`` how far the emulated NPU is from float32."""
    plan, change = FORMS[form]
    block, x = block_of(stage, window, shifted=shifted)
    model = rewrite(block, plan, example_inputs=x).model
    if change:
        change(model)
    names = {"input_names": ("x",), "output_names": ("y",)}
    path = export_onnx(model, folder / "block.onnx", example_inputs=x, **names)
    report = compile_for_chip(path, CHIP, out_dir=folder, progress=False)
    traffic = report.traffic
    row = {"form": form, "stage": stage, "window": window, "shifted": shifted, "partitions": report.partitions}
    row |= {"QNN ops": len(report.ops), "tiles": traffic.tiles, "compile, s": round(report.compile_s, 1)}
    megabytes = {name: getattr(traffic, f"{name.replace(' ', '_')}_bytes") / 1e6 for name in BYTES}
    row |= {f"{name}, MB": round(value, 1) for name, value in megabytes.items()}
    if run:
        (actual,) = emulate(report.context_path, {"x": x.numpy()}, progress=False).values()
        with torch.no_grad():
            row["off by at most"] = round(float((torch.from_numpy(actual) - model(x)).abs().max()), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=[2])
    parser.add_argument("--windows", nargs="+", type=int, default=[7])
    parser.add_argument("--shifted", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--emulate", action="store_true")
    asked = parser.parse_args()
    cases = [
        (form, stage, window, shift == "yes")
        for stage in asked.stages
        for window in asked.windows
        for form in asked.forms
        for shift in asked.shifted
    ]
    rows = []
    for form, stage, window, shifted in cases:
        with tempfile.TemporaryDirectory() as folder:
            row = measured(form, stage, window, shifted=shifted, run=asked.emulate, folder=Path(folder))
        print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    print(Table(rows)._repr_html_())


if __name__ == "__main__":
    main()
