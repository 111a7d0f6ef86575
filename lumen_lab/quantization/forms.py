"""Forms of an operation that its rule does not cover: refused before anything is calibrated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import site_of
from lumen_lab.quantization.node_rules import op_name
from lumen_lab.quantization.rules import OpRule

SCALARS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor")  # whose second operand may be a number
BILINEAR, ZEROS = 0, 0  # as torch counts modes and paddings of grid_sampler


def given(node: fx.Node, place: int, keyword: str, default: object = None) -> object:
    """An argument by place or by keyword."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(keyword, default)


def refuse_what_is_not_written(node: fx.Node, rule: OpRule, live: set[fx.Node]) -> None:
    """``QuantizationError`` for forms of an operation that its rule does not cover."""
    where = f"{op_name(node)} at '{site_of(node) or '(network)'}'"
    wrong = of_operands(node) or (FORMS[op_name(node)](node) if op_name(node) in FORMS else None)
    wrong = wrong or (of_weights(node, rule, live) if rule.weight is not None else None)
    if wrong is not None:
        raise QuantizationError(f"{where} {wrong}.")


def of_operands(node: fx.Node) -> str | None:
    """What is wrong with the operands of a sum or product."""
    if str(node.target) in SCALARS and not all(isinstance(one, int | float) or is_tensor(one) for one in node.args):
        return "computes with the size of the batch, which is open; write it as a number"
    if node.kwargs.get("alpha", 1) != 1:
        return "multiplies its second operand by alpha; write the product as an operation"
    return None


def of_weights(node: fx.Node, rule: OpRule, live: set[fx.Node]) -> str | None:
    """What is wrong with the weight and bias."""
    weight = node.args[rule.weight] if len(node.args) > rule.weight else None
    if weight is None:
        return "has no weight, which its rule wants; give it one of ones"
    if weight in live or any(bias in live for bias in node.args[rule.bias : rule.bias + 1]):
        return "has a weight or bias computed from the input; only constant ones have a rule"
    return None


def is_tensor(node: object) -> bool:
    """Whether an argument is a node that stands for a tensor, and for no size."""
    return isinstance(node, fx.Node) and not isinstance(node.meta.get("val"), torch.SymInt | int)


def of_gelu(node: fx.Node) -> str | None:
    kind = given(node, 1, "approximate", "none")
    return None if kind == "none" else f"is approximated by {kind}, and the NPU's is exact; use nn.GELU()"


def of_layer_norm(node: fx.Node) -> str | None:
    axes = len(node.args[1])
    return None if axes == 1 else f"goes over {axes} axes, and the NPU's over the last; flatten them before it"


def of_padding(node: fx.Node) -> str | None:
    mode, value = given(node, 2, "mode", "constant"), given(node, 3, "value")
    if mode != "constant" or value not in (None, 0, 0.0):
        return f"pads with {mode if mode != 'constant' else value}; zeros alone are exact in every encoding"
    return None


def of_roll(node: fx.Node) -> str | None:
    return None if len(node.args) > 2 else "takes all axes as one; say which with dims="


def of_max_pool(node: fx.Node) -> str | None:
    dilation = given(node, 4, "dilation", 1)
    if dilation not in (1, [1, 1], (1, 1)) or given(node, 5, "ceil_mode", False):
        return "is dilated or rounds its size up; none such is written"
    return None


def of_grid_sample(node: fx.Node) -> str | None:
    mode, padding = node.args[2:4]
    if (mode, padding) != (BILINEAR, ZEROS):
        return (
            f"is of mode {mode} with padding {padding}; only bilinear ({BILINEAR}) with zeros outside ({ZEROS}) was "
            "measured on the NPU"
        )
    return None


def of_resize(node: fx.Node) -> str | None:
    """torch maps coordinates by the factor that was given, the file by the sizes."""
    factors, aligned = given(node, 3, "scale_factors"), given(node, 2, "align_corners")
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if aligned or not factors or before is None or after is None:
        return None
    pairs = zip(before.shape[-2:], after.shape[-2:], factors)
    if all(float(old * factor) == float(new) for old, new, factor in pairs):
        return None
    return f"resizes by {tuple(factors)}, which gives no whole sizes; give size="


def of_convolution(node: fx.Node) -> str | None:
    padding = given(node, 4, "padding", 0)
    return f"has padding='{padding}'; give it as a number" if isinstance(padding, str) else None


FORMS: dict[str, Callable[[fx.Node], str | None]] = {
    "aten.conv2d.default": of_convolution,
    "aten.gelu.default": of_gelu,
    "aten.grid_sampler.default": of_grid_sample,
    "aten.layer_norm.default": of_layer_norm,
    "aten.max_pool2d.default": of_max_pool,
    "aten.pad.default": of_padding,
    "aten.roll.default": of_roll,
    "aten.upsample_bilinear2d.vec": of_resize,
}
"""Operation → what is wrong with the form of one, in words that follow its name, or None."""
