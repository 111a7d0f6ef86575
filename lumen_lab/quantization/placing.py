"""Quantisers put into a captured graph by the NPU's rules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import live_nodes, site_of
from lumen_lab.quantization.encoding import Encoding, unit_encoding
from lumen_lab.quantization.fake_quantize import BiasQuantize, FakeQuantize, WeightQuantize, weight_scale
from lumen_lab.quantization.rules import INPUT, TIED, UNIT, OpRule, fused_into, rule_of

QUANTISER = "quantiser_"
SCALARS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor")  # whose second operand may be a number


def put_quantisers(graph: fx.GraphModule, *, bits: Mapping[str, int] | None = None) -> fx.GraphModule:
    """Put quantisers into a captured graph, in place; encodings of activations are yet to be calibrated.

    ``bits``: operations whose output takes another width than 8. ``QuantizationError`` for an operation without a rule.
    """
    live, bits = live_nodes(graph), bits or {}
    for node in [node for node in graph.graph.nodes if node in live]:
        if node.op == "placeholder":
            follow(graph, node, FakeQuantize(Encoding(1.0, 0, bits.get(node.name, 8))))
        elif node.op == "call_function":
            rule = rule_of(node)
            if rule.weight is not None:
                quantise_weights(graph, node, rule)
            quantise_constants(graph, node, rule, live)
            quantise_output(graph, node, rule, bits.get(node.name, 8))
    graph.graph.lint()
    graph.recompile()
    return graph


def quantise_output(graph: fx.GraphModule, node: fx.Node, rule: OpRule, width: int) -> None:
    """A quantiser behind an operation that has an encoding of its own."""
    if rule.output == UNIT:
        follow(graph, node, FakeQuantize(unit_encoding(bits=width), fixed=True))
    elif rule.output == TIED:
        call_behind(graph, node, encoding_source(node.args[0]).target)
    elif rule.output != INPUT and fused_into(node) is None:
        follow(graph, node, FakeQuantize(Encoding(1.0, 0, width)))


def follow(graph: fx.GraphModule, node: fx.Node, module: nn.Module) -> fx.Node:
    """``module`` behind ``node``, under the node's name."""
    graph.add_submodule(QUANTISER + node.name, module)
    return call_behind(graph, node, QUANTISER + node.name)


def call_behind(graph: fx.GraphModule, node: fx.Node, target: str) -> fx.Node:
    """A call of the module ``target`` behind ``node``: all that read the node read what it returns."""
    with graph.graph.inserting_after(node):
        inserted = graph.graph.call_module(target, (node,))
    inserted.meta = dict(node.meta)
    node.replace_all_uses_with(inserted, delete_user_cb=lambda user: user is not inserted)
    return inserted


def quantise_weights(graph: fx.GraphModule, node: fx.Node, rule: OpRule) -> None:
    """The weight of an operation on its grid, and its bias in steps of input scale × weight scale."""
    weight, place = node.args[rule.weight], QUANTISER + node.args[rule.weight].name
    with graph.graph.inserting_before(node):
        quantised = next((user for user in weight.users if user.target == place), None)
        if quantised is None and rule.axis is None:
            graph.add_submodule(place, FakeQuantize(Encoding(1.0, 0)))
            quantised = graph.graph.call_module(place, (weight,))
        elif quantised is None:
            graph.add_submodule(place, WeightQuantize())
            scale = graph.graph.call_function(weight_scale, (weight, rule.axis))
            quantised = graph.graph.call_module(place, (weight, scale))
        quantised.meta = dict(node.meta)
        node.update_arg(rule.weight, quantised)
        if len(node.args) > rule.bias and node.args[rule.bias] is not None:
            quantise_bias(graph, node, rule, quantised)


def quantise_bias(graph: fx.GraphModule, node: fx.Node, rule: OpRule, weight: fx.Node) -> None:
    """The bias of one call: a module that is called twice has inputs of two scales."""
    place = f"{QUANTISER}{node.name}_bias"
    graph.add_submodule(place, BiasQuantize())
    input_scale = graph.graph.get_attr(f"{encoding_source(node.args[0]).target}.scale")
    scale = weight.args[1] if len(weight.args) > 1 else graph.graph.get_attr(f"{weight.target}.scale")
    bias = graph.graph.call_module(place, (node.args[rule.bias], input_scale, scale))
    bias.meta = dict(node.meta)
    node.update_arg(rule.bias, bias)


def encoding_source(node: fx.Node) -> fx.Node:
    """The quantiser whose encoding ``node`` has: itself, or that of what it was moved from."""
    while node.op != "call_module":
        if node.op != "call_function" or rule_of(node).output != INPUT:
            raise QuantizationError(f"{node.name} at '{site_of(node)}' is read in integers but has no encoding.")
        node = node.all_input_nodes[0]
    return node


def quantise_constants(graph: fx.GraphModule, node: fx.Node, rule: OpRule, live: set[fx.Node]) -> None:
    """A quantiser behind every operand that is no activation and no weight: masks, tables of positions, numbers."""
    if str(node.target) in SCALARS and isinstance(node.args[1], int | float):
        name = f"constant_{node.name}"
        graph.register_buffer(name, torch.tensor(float(node.args[1])))
        with graph.graph.inserting_before(node):
            node.update_arg(1, graph.graph.get_attr(name))
    weights = {rule.weight, rule.bias} - {None}
    operands = [
        other for place, argument in enumerate(node.args) if place not in weights for other in tensors(argument)
    ]
    for other in operands:
        if other.op != "call_module" and other not in live and not quantised_already(other):
            follow(graph, other, FakeQuantize(Encoding(1.0, 0)))


def tensors(argument: object) -> list[fx.Node]:
    """The nodes of one argument that stand for tensors."""
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return [node for node in found if not is_size(node)]


def is_size(node: fx.Node) -> bool:
    """Whether a node stands for a number of the batch's size."""
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def quantised_already(node: fx.Node) -> bool:
    return any(user.target == QUANTISER + node.name for user in node.users)
