"""Each ATen operation as the ONNX operations that the NPU compiler takes whole in integers.

An emitter gets the builder and the torch node, and returns the name of the float value that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from lumen_lab.deploy.qdq_builder import QdqBuilder
from lumen_lab.errors import ExportError
from lumen_lab.quantization.capture import site_of
from lumen_lab.quantization.fake_quantize import bias_scale
from lumen_lab.quantization.forms import given
from lumen_lab.quantization.node_rules import fused_into, op_name, rule_of

Emitter = Callable[[QdqBuilder, fx.Node], str]
EMITTERS: dict[str, Emitter] = {}


def emits(*names: str) -> Callable[[Emitter], Emitter]:
    """Register the emitter of operations."""

    def register(function: Emitter) -> Emitter:
        EMITTERS.update(dict.fromkeys(names, function))
        return function

    return register


def emit(build: QdqBuilder, node: fx.Node) -> str:
    """Write one operation; ``ExportError`` with its site if nobody said how."""
    if op_name(node) not in EMITTERS:
        raise ExportError(f"{op_name(node)} at {where(node)} has no ONNX form in integers; add an emitter.")
    return EMITTERS[op_name(node)](build, node)


def where(node: fx.Node) -> str:
    """A node's site, for a sentence."""
    return f"'{site_of(node) or '(network)'}'"


def axis_of(build: QdqBuilder, node: fx.Node, axis: int) -> int:
    """A non-negative axis of a node's value."""
    return axis % len(build.shape(node))


def one_operation(op_type: str) -> Emitter:
    """An emitter for an operation that is one ONNX operation on the same operands."""

    def emit_it(build: QdqBuilder, node: fx.Node) -> str:
        return build.add(op_type, [build.value(operand) for operand in node.args if isinstance(operand, fx.Node)], node)

    return emit_it


for _name, _op_type in {
    "aten.gelu.default": "Gelu",
    "aten.sigmoid.default": "Sigmoid",
    "aten.matmul.default": "MatMul",
    "aten.add.Tensor": "Add",
    "aten.sub.Tensor": "Sub",
    "aten.mul.Tensor": "Mul",
}.items():
    EMITTERS[_name] = one_operation(_op_type)


@emits("aten.relu.default")
def relu(build: QdqBuilder, node: fx.Node) -> str:
    """Behind what fuses it with nothing between; behind another operation that has no grid of its own, with its own
    quantisers between as well, since the compiler wants each operation between quantisers."""
    (before,) = node.args
    value = build.value(before)
    if fused_into(before) is node and not rule_of(before).fuses_relu:
        value = build.quantised(value, before.name, build.encoding(next(iter(node.users))))
    return build.add("Relu", [value], node)


def two(value) -> list[int]:
    """A number or a pair as a pair."""
    return [value, value] if isinstance(value, int) else list(value)


def bias_of(build: QdqBuilder, node: fx.Node, place: int) -> list[str]:
    """The bias of a conv or linear, if it has one."""
    bias = given(node, place, "bias")
    if bias is None:
        return []
    scales = (build.run.constants[scale] for scale in bias.args[1:])
    return [build.bias(bias, bias_scale(*scales))]


@emits("aten.conv2d.default")
def conv2d(build: QdqBuilder, node: fx.Node) -> str:
    """(N, C, H, W); padding by numbers, not by name."""
    strides, padding = two(given(node, 3, "stride", 1)), two(given(node, 4, "padding", 0))
    return build.add(
        "Conv",
        [build.value(node.args[0]), build.weight(node.args[1]), *bias_of(build, node, 2)],
        node,
        strides=strides,
        pads=padding * 2,
        dilations=two(given(node, 5, "dilation", 1)),
        group=given(node, 6, "groups", 1),
        kernel_shape=list(build.shape(node.args[1])[2:]),
    )


@emits("aten.linear.default")
def linear(build: QdqBuilder, node: fx.Node) -> str:
    """A product with weights (in, out), its bias added without a quantiser between: one FullyConnected."""
    product = [build.value(node.args[0]), build.weight(node.args[1], transposed=True)]
    bias = bias_of(build, node, 2)
    if not bias:
        return build.add("MatMul", product, node)
    return build.add("Add", [build.add("MatMul", product, node, name=f"{node.name}_product"), *bias], node)


@emits("aten.layer_norm.default")
def layer_norm(build: QdqBuilder, node: fx.Node) -> str:
    operands = [build.value(node.args[0]), build.value(node.args[2]), *bias_of(build, node, 3)]
    return build.add(
        "LayerNormalization", operands, node, axis=-len(node.args[1]), epsilon=float(given(node, 4, "eps", 1e-5))
    )


@emits("aten.mean.dim")
def mean(build: QdqBuilder, node: fx.Node) -> str:
    axes = build.integers(f"{node.name}_axes", [axis_of(build, node.args[0], axis) for axis in node.args[1]])
    return build.add(
        "ReduceMean", [build.value(node.args[0]), axes], node, keepdims=int(given(node, 2, "keepdim", False))
    )


@emits("aten.cat.default")
def cat(build: QdqBuilder, node: fx.Node) -> str:
    axis = axis_of(build, node, given(node, 1, "dim", 0))
    return build.add("Concat", [build.value(part) for part in node.args[0]], node, axis=axis)


@emits("aten.softmax.int")
def softmax(build: QdqBuilder, node: fx.Node) -> str:
    return build.add("Softmax", [build.value(node.args[0])], node, axis=axis_of(build, node, node.args[1]))


@emits("aten.upsample_bilinear2d.vec")
def resize(build: QdqBuilder, node: fx.Node) -> str:
    """Bilinear, to the size that the torch graph has at this batch."""
    sizes = build.integers(f"{node.name}_sizes", build.shape(node))
    mode = "align_corners" if given(node, 2, "align_corners") else "half_pixel"
    inputs = [build.value(node.args[0]), "", "", sizes]
    return build.add("Resize", inputs, node, mode="linear", coordinate_transformation_mode=mode)


@emits(
    "aten.reshape.default",
    "aten.view.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
)
def reshape(build: QdqBuilder, node: fx.Node) -> str:
    shape = build.integers(f"{node.name}_shape", build.shape(node))
    return build.add("Reshape", [build.value(node.args[0]), shape], node)


@emits("aten.permute.default")
def permute(build: QdqBuilder, node: fx.Node) -> str:
    return build.add(
        "Transpose", [build.value(node.args[0])], node, perm=[axis_of(build, node, a) for a in node.args[1]]
    )


@emits("aten.transpose.int")
def transpose(build: QdqBuilder, node: fx.Node) -> str:
    order = list(range(len(build.shape(node))))
    one, other = (axis_of(build, node, axis) for axis in node.args[1:3])
    order[one], order[other] = order[other], order[one]
    return build.add("Transpose", [build.value(node.args[0])], node, perm=order)


def cut(
    build: QdqBuilder, node: fx.Node, value: str, axis: int, start: int, end: int, *, step: int = 1, name: str = ""
) -> str:
    """Part of a value along one axis."""
    name = name or node.name
    bounds = {"starts": [start], "ends": [end], "axes": [axis], "steps": [step]}
    return build.add(
        "Slice", [value, *(build.integers(f"{name}_{key}", v) for key, v in bounds.items())], node, name=name
    )


@emits("aten.slice.Tensor")
def slice_tensor(build: QdqBuilder, node: fx.Node) -> str:
    axis = axis_of(build, node, given(node, 1, "dim", 0))
    length = build.shape(node.args[0])[axis]
    start, end, step = (build.number(given(node, *which)) for which in ((2, "start"), (3, "end"), (4, "step")))
    start, end, step = start or 0, length if end is None else min(end, length), step or 1
    return cut(build, node, build.value(node.args[0]), axis, start, end, step=step)


@emits("getitem")
def part(build: QdqBuilder, node: fx.Node) -> str:
    """One part of a split: a slice, since Split itself is computed in float."""
    split, index = node.args
    source = split.args[0]
    axis = axis_of(build, source, given(split, 1 if op_name(split) == "aten.unbind.int" else 2, "dim", 0))
    length = build.shape(source)[axis]
    if op_name(split) == "aten.unbind.int":
        piece = cut(build, node, build.value(source), axis, index, index + 1, name=f"{node.name}_kept")
        piece = build.quantised(piece, f"{node.name}_kept", build.encoding(node))
        return build.add("Reshape", [piece, build.integers(f"{node.name}_shape", build.shape(node))], node)
    sizes = build.number(split.args[1])
    sizes = [min(sizes, length - start) for start in range(0, length, sizes)] if isinstance(sizes, int) else sizes
    start = sum(sizes[:index])
    return cut(build, node, build.value(source), axis, start, start + sizes[index])


@emits("aten.repeat.default")
def repeat(build: QdqBuilder, node: fx.Node) -> str:
    times = build.integers(f"{node.name}_times", build.number(node.args[1]))
    return build.add("Tile", [build.value(node.args[0]), times], node)


@emits("aten.expand.default")
def expand(build: QdqBuilder, node: fx.Node) -> str:
    return build.add(
        "Expand", [build.value(node.args[0]), build.integers(f"{node.name}_shape", build.shape(node))], node
    )


@emits("aten.pad.default")
def pad(build: QdqBuilder, node: fx.Node) -> str:
    """Zeros; torch lists (before, after) from the last axis on, ONNX all befores and then all afters."""
    amounts, rank = list(node.args[1]), len(build.shape(node))
    before, after = amounts[0::2][::-1], amounts[1::2][::-1]
    rest = [0] * (rank - len(before))
    pads = build.integers(f"{node.name}_pads", [*rest, *before, *rest, *after])
    return build.add("Pad", [build.value(node.args[0]), pads], node)


@emits("aten.roll.default")
def roll(build: QdqBuilder, node: fx.Node) -> str:
    """One axis after the other: the end is put in front."""
    value, encoding, stages = build.value(node.args[0]), build.encoding(node), list(zip(node.args[1], node.args[2]))
    for stage, (shift, axis) in enumerate(stages):
        axis = axis_of(build, node, axis)
        length = build.shape(node)[axis]
        place, name = -shift % length, f"{node.name}_{stage}"
        bounds = {"front": (place, length), "back": (0, place)}
        pieces = [
            build.quantised(cut(build, node, value, axis, *ends, name=f"{name}_{key}"), f"{name}_{key}", encoding)
            for key, ends in bounds.items()
        ]
        last = stage == len(stages) - 1
        value = build.add("Concat", pieces, node, name=node.name if last else name, axis=axis)
        value = value if last else build.quantised(value, name, encoding)
    return value


@emits("aten.pixel_shuffle.default")
def pixel_shuffle(build: QdqBuilder, node: fx.Node) -> str:
    return build.add("DepthToSpace", [build.value(node.args[0])], node, blocksize=node.args[1], mode="CRD")


@emits("aten.max_pool2d.default")
def max_pool(build: QdqBuilder, node: fx.Node) -> str:
    """(N, C, H, W)."""
    kernel = two(node.args[1])
    strides, padding = two(given(node, 2, "stride") or kernel), two(given(node, 3, "padding", 0))
    return build.add(
        "MaxPool", [build.value(node.args[0])], node, kernel_shape=kernel, strides=strides, pads=padding * 2
    )


@emits("aten.grid_sampler.default")
def grid_sample(build: QdqBuilder, node: fx.Node) -> str:
    """(N, C, H, W) read at a grid (N, h, w, 2) of x and y in -1 … 1, bilinearly and with zeros outside."""
    return build.add(
        "GridSample",
        [build.value(operand) for operand in node.args[:2]],
        node,
        mode="linear",
        padding_mode="zeros",
        align_corners=int(node.args[4]),
    )


PARTS_ONLY = {"aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int"}
"""Operations of which only the parts are written."""
