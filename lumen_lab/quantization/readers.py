"""What an operation can tell apart in the tensor it reads, once its own output is in integers.

Steps of an encoding are spent for nothing on values whose difference never shows: behind a softmax in steps of 1/256
everything far enough below a row's maximum is 0, whether it is 7 below or 100, as a mask has it. So a tensor is
observed as those see it that read it, and errors are weighed by what comes of them there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from lumen_lab.quantization.node_rules import op_name, rule_of
from lumen_lab.quantization.rules import INPUT
from lumen_lab.specs import Record

KINDS = {
    "aten.softmax.int": "softmax",
    "aten.sigmoid.default": "sigmoid",
    "aten.relu.default": "relu",
    "aten.gelu.default": "gelu",
}
CURVES = {"sigmoid": torch.sigmoid, "relu": torch.relu, "gelu": F.gelu}


@dataclass(frozen=True)
class Reader(Record):
    """What reads a tensor: ``kind`` "softmax", "sigmoid", "relu", "gelu", or "anything" else, which sees all of it.

    ``axis``: that of softmax's rows; ``bits``: those of the output.
    """

    kind: str = "anything"
    axis: int = -1
    bits: int = 8

    def told_apart(self, x: Tensor) -> Tensor:
        """``x`` with what the reader cannot tell apart made equal.

        Softmax: what lies ``softmax_depth`` below its row's maximum. Sigmoid: what is beyond ``sigmoid_ends``. ReLU:
        what is below 0.
        """
        if self.kind == "softmax":
            return torch.maximum(x, x.amax(self.axis, keepdim=True) - softmax_depth(self.bits))
        if self.kind == "sigmoid":
            return x.clamp(*sigmoid_ends(self.bits))
        return x.clamp_min(0) if self.kind == "relu" else x

    def least_told(self, low: float, high: float) -> float:
        """The low end that is enough for values from ``low`` to ``high``: of GELU, it depends on the high end.

        Its output reaches to about ``high``, in steps s of at least gelu(high) / (2^bits − 1). Left of its minimum it
        rises to 0 from below, so that all that lies left of the point where it is −s / 2 rounds to 0, as that point.
        """
        if self.kind != "gelu" or high <= 0:
            return low
        half_step = float(F.gelu(torch.tensor(high, dtype=torch.float64))) / (2**self.bits - 1) / 2
        return max(low, gelu_tail(half_step))

    def curve(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of ``x`` (float64) element by element, and the square of the slope there."""
        if self.kind not in CURVES:
            return x, torch.ones_like(x)
        with torch.enable_grad():
            at = x.detach().clone().requires_grad_()
            result = CURVES[self.kind](at)
            (slope,) = torch.autograd.grad(result.sum(), at)
        return result.detach(), slope.square()


ANYTHING = Reader()


def softmax_depth(bits: int = 8) -> float:
    """How far below its row's maximum a value becomes 0 in steps of 2^-bits: ln(2 · 2^bits)."""
    return math.log(2 * 2**bits)


def sigmoid_ends(bits: int = 8) -> tuple[float, float]:
    """Beyond these a sigmoid in steps of 2^-bits is constant, by one step of the range between them.

    At 2^-bits / 2, x = −ln(2 · 2^bits − 1), it rounds to 0. The largest integer is 2^bits − 1, since 1 itself cannot be
    written, and half a step before it is x = ln((2 · 2^bits − 3) / 3). The step more is for the ends of the encoding,
    which lie on its grid, up to half a step further in than asked: a mask would never be full.
    """
    steps = 2**bits
    low, high = -math.log(2 * steps - 1), math.log((2 * steps - 3) / 3)
    step = (high - low) / (steps - 3)
    return low - step, high + step


def gelu_tail(depth: float) -> float:
    """The point left of the minimum where GELU is −``depth``; that of the minimum (−0.75) where it is not so deep."""
    left, right = -12.0, -0.7517915
    value = torch.tensor([right], dtype=torch.float64)
    if float(-F.gelu(value)) <= depth:
        return right
    for _ in range(60):
        middle = (left + right) / 2
        shallow = float(-F.gelu(torch.tensor(middle, dtype=torch.float64))) < depth
        left, right = (middle, right) if shallow else (left, middle)
    return left


def readers_of(graph: fx.GraphModule) -> dict[str, Reader]:
    """The reader of every module that is called in ``graph``, by its path; those that move data are passed through.

    A tensor with readers of two kinds, or that leaves the graph, is read by anything.
    """
    found: dict[str, set[Reader]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            found.setdefault(node.target, set()).update(readers_behind(graph, node))
    return {path: next(iter(kinds)) if len(kinds) == 1 else ANYTHING for path, kinds in found.items()}


def readers_behind(graph: fx.GraphModule, node: fx.Node, *, moved: bool = False) -> set[Reader]:
    """The readers of one tensor. Rows do not survive a movement, so softmax behind one is anything."""
    found: set[Reader] = set()
    for user in node.users:
        kind = KINDS.get(op_name(user)) if user.op == "call_function" else None
        if kind is not None and not (kind == "softmax" and moved):
            axis = user.args[1] if kind == "softmax" else -1
            found.add(Reader(kind, axis, output_bits(graph, user)))
        elif user.op == "call_function" and op_name(user) != "aten.sym_size.int" and rule_of(user).output == INPUT:
            found |= readers_behind(graph, user, moved=True)
        elif user.op != "call_function" or op_name(user) != "aten.sym_size.int":
            found.add(ANYTHING)
    return found


def output_bits(graph: fx.GraphModule, node: fx.Node) -> int:
    """The width of a node's output."""
    quantiser = next((user for user in node.users if user.op == "call_module"), None)
    return getattr(graph.get_submodule(quantiser.target), "bits", 8) if quantiser is not None else 8
