"""Quantisers put into a captured graph by the NPU's rules, 8 bits wide or 16 where asked.

An operation has one width: what it reads and what it returns. Where the neighbours have another one, what is read goes
through a second quantiser of the operation's width (the NPU's Convert). Operations that move data have the width of
what they move.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import attribute, device_of, live_nodes, site_of, unused_name
from lumen_lab.quantization.encoding import Encoding, unit_encoding
from lumen_lab.quantization.fake_quantize import BiasQuantize, FakeQuantize, WeightQuantize, weight_scale
from lumen_lab.quantization.forms import SCALARS, is_tensor, refuse_what_is_not_written
from lumen_lab.quantization.node_rules import fused_into, op_name, rule_of
from lumen_lab.quantization.rules import INPUT, OWN, TIED, UNIT, OpRule

QUANTISER = "quantiser_"
ONE = f"{QUANTISER}1"  # the second factor of a bias's steps where there is only one
WIDTHS = (8, 16)


def put_quantisers(graph: fx.GraphModule, *, bits: Mapping[str, int] | None = None) -> fx.GraphModule:
    """Put quantisers into a captured graph, in place; encodings of activations are yet to be calibrated.

    ``bits``: the width (8 or 16) of operations and of the input, by the name of the node. ``QuantizationError`` for an
    operation without a rule, and for widths of what has none.
    """
    live, widths = live_nodes(graph), checked_widths(graph, bits or {})
    check_captured(graph, live)
    for node in [node for node in graph.graph.nodes if node in live]:
        if node.op == "placeholder":
            follow(graph, node, FakeQuantize(Encoding(1.0, 0, widths.get(node.name, 8))))
        elif node.op == "call_function":
            put_around(graph, node, live, widths)
    device = device_of(graph)
    for module in graph.children():
        if isinstance(module, FakeQuantize):
            module.to(device)
    graph.graph.lint()
    graph.recompile()
    return graph


def check_captured(graph: fx.GraphModule, live: set[fx.Node]) -> None:
    """``QuantizationError`` for a graph that computes nothing, or with names that quantisers have."""
    (result, *_) = next(node for node in graph.graph.nodes if node.op == "output").all_input_nodes or (None,)
    if result not in live or result.op == "placeholder":
        raise QuantizationError("The network returns nothing that is computed from its image; there are no integers.")
    taken = next((name for name, _ in graph.named_children() if name.startswith(QUANTISER)), None)
    if taken is not None:
        raise QuantizationError(
            f"The network has a module '{taken}'; names that begin with '{QUANTISER}' are those of "
            "quantisers: give it another."
        )


def without_quantisers(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph without its quantisers: as it was captured, operations under their names."""
    bare = copy.deepcopy(graph)
    for node in bare.graph.nodes:
        if node.op == "call_module" and node.target.startswith(QUANTISER):
            node.replace_all_uses_with(node.args[0])
    bare.graph.eliminate_dead_code()
    bare.delete_all_unused_submodules()
    bare.recompile()
    return bare


def put_around(graph: fx.GraphModule, node: fx.Node, live: set[fx.Node], widths: Mapping[str, int]) -> None:
    """All quantisers of one operation: of what it reads, of its weights, and of what it returns."""
    rule = rule_of(node)
    refuse_what_is_not_written(node, rule, live)
    width = width_of(graph, node, rule, widths)
    number_as_tensor(graph, node)
    quantise_operands(graph, node, rule, live, width)
    quantise_output(graph, node, rule, width)
    if rule.weight is not None:
        quantise_weights(graph, node, rule)
    if rule.shared_with_inputs:
        share_with_inputs(graph, node, live)


def checked_widths(graph: fx.GraphModule, bits: Mapping[str, int]) -> Mapping[str, int]:
    """``bits``; refused where it names no operation, one that only moves data, or a width that the NPU lacks."""
    if not isinstance(bits, Mapping):
        raise QuantizationError(f"bits maps names of operations to 8 or 16; {bits!r} was given.")
    nodes = {node.name: node for node in graph.graph.nodes}
    for name, width in bits.items():
        if name not in nodes or nodes[name].op not in ("placeholder", "call_function"):
            near = ", ".join(difflib.get_close_matches(str(name), nodes, 3))
            raise QuantizationError(
                f"bits gives a width to '{name}', but no operation of this graph is called so"
                + (f" (near: {near})" if near else "")
                + "; list(graph.quantisers) has the names, graph.sites() the modules they come from."
            )
        if nodes[name].op == "call_function" and rule_of(nodes[name]).output == INPUT:
            raise QuantizationError(
                f"bits gives a width to '{name}', which moves data and has the width of what it moves; name the "
                "operation that made it, or the one that reads it."
            )
        if width not in WIDTHS:
            raise QuantizationError(f"bits gives '{name}' {width!r} bits; the NPU's activations have 8 or 16.")
    return bits


def widths_in_words(bits: Mapping[str, int]) -> str:
    """Widths as a manifest keeps them."""
    return ", ".join(f"{name}: {width}" for name, width in sorted(bits.items())) or "8"


def width_of(graph: fx.GraphModule, node: fx.Node, rule: OpRule, widths: Mapping[str, int]) -> int:
    """Bits of what an operation reads and returns; a ReLU and what it is fused into are one operation."""
    if rule.output == INPUT or (rule.output == TIED and node.name not in widths):
        return encoding_bits(graph, node.all_input_nodes[0])
    return max(widths.get(one.name, 8) for one in (node, relu_behind(node), fused_from(node)) if one is not None)


def relu_behind(node: fx.Node) -> fx.Node | None:
    """The ReLU with which the operation is one on the NPU, if there is one."""
    return fused_into(node) if all(user.op == "call_function" for user in node.users) else None


def fused_from(node: fx.Node) -> fx.Node | None:
    """The operation whose ReLU the node is, with no quantiser between, if there is one."""
    before = node.args[0] if op_name(node) == "aten.relu.default" else None
    return before if before is not None and before.op == "call_function" and relu_behind(before) is node else None


# What an operation reads


def number_as_tensor(graph: fx.GraphModule, node: fx.Node) -> None:
    """A number as second operand becomes a buffer, which can be quantised."""
    if str(node.target) in SCALARS and isinstance(node.args[1], int | float):
        name = unused_name(graph, f"constant_{node.name}")
        graph.register_buffer(name, torch.tensor(float(node.args[1]), device=device_of(graph)))
        with graph.graph.inserting_before(node):
            node.update_arg(1, graph.graph.get_attr(name))


def quantise_operands(graph: fx.GraphModule, node: fx.Node, rule: OpRule, live: set[fx.Node], width: int) -> None:
    """Every operand but weights in the operation's width: constants quantised, activations converted if need be."""
    for place, argument in enumerate(node.args):
        if place in (rule.weight, rule.bias):
            continue
        wanted = 8 if place in rule.eight_bits else width
        put = {other: operand(graph, node, other, wanted, live) for other in tensors(argument)}
        node.update_arg(place, replaced(argument, put))


def replaced(argument: object, put: Mapping[fx.Node, fx.Node]) -> object:
    """An argument with other nodes in place of those that ``put`` has."""
    return fx.map_arg(argument, lambda node: put.get(node, node))


def operand(graph: fx.GraphModule, reader: fx.Node, other: fx.Node, width: int, live: set[fx.Node]) -> fx.Node:
    """``other`` as ``reader`` reads it, on a grid of ``width`` bits; what is put in is shared by all who read it so."""
    is_constant = other.op != "call_module" and other not in live
    if is_constant and other.op == "get_attr" and not attribute(graph, other.target).isfinite().all():
        raise QuantizationError(
            f"The constant '{other.target}', read at '{site_of(reader) or '(network)'}', holds infinity or NaN, "
            "for which there are no integers; a mask is written with finite numbers, such as -100."
        )
    if not is_constant and (fused_from(reader) is other or encoding_bits(graph, other) == width):
        return other
    name = other.args[0].name if other.op == "call_module" else other.name
    place = QUANTISER + (name if is_constant and width == 8 else f"{name}_{width}bit")
    made = next((user for user in other.users if user.target == place), None)
    if made is None:
        graph.add_submodule(place, FakeQuantize(Encoding(1.0, 0, width)))
        with graph.graph.inserting_after(other):
            made = graph.graph.call_module(place, (other,))
        made.meta = dict((other if other.meta.get("nn_module_stack") else reader).meta)
    return made


def tensors(argument: object) -> Iterator[fx.Node]:
    """The nodes of one argument that stand for tensors."""
    found: list[fx.Node] = []
    fx.map_arg(argument, found.append)
    return (node for node in found if is_tensor(node))


def encoding_source(node: fx.Node) -> fx.Node:
    """The quantiser whose encoding ``node`` has: itself, or that of what it was moved from."""
    while node.op != "call_module":
        if node.op != "call_function" or rule_of(node).output != INPUT:
            raise QuantizationError(f"{node.name} at '{site_of(node)}' is read in integers but has no encoding.")
        node = node.all_input_nodes[0]
    return node


def encoding_bits(graph: fx.GraphModule, node: fx.Node) -> int:
    """The width of a node's integers."""
    return getattr(graph, encoding_source(node).target).bits


# Its weights


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
        quantised.meta = quantised.meta or dict(node.meta)
        node.update_arg(rule.weight, quantised)
        if len(node.args) > rule.bias and node.args[rule.bias] is not None:
            quantise_bias(graph, node, rule, quantised)


def quantise_bias(graph: fx.GraphModule, node: fx.Node, rule: OpRule, weight: fx.Node) -> None:
    """The bias of one call: a module that is called twice has inputs of two scales."""
    place = f"{QUANTISER}{node.name}_bias"
    graph.add_submodule(place, BiasQuantize())
    if rule.bias_in_output_steps:
        graph.register_buffer(ONE, torch.ones((), device=device_of(graph)))
        scales = f"{QUANTISER}{node.name}.scale", ONE
    else:
        scales = f"{encoding_source(node.args[0]).target}.scale", f"{weight.target}.scale"
        leave_room(graph, weight, node.args[rule.bias], scales[0])
    factors = [graph.graph.get_attr(scales[0])]
    factors.append(weight.args[1] if rule.axis is not None else graph.graph.get_attr(scales[1]))
    bias = graph.graph.call_module(place, (node.args[rule.bias], *factors))
    bias.meta = dict(node.meta)
    node.update_arg(rule.bias, bias)


def leave_room(graph: fx.GraphModule, weight: fx.Node, bias: fx.Node, input_scale: str) -> None:
    """The weight's scale depends on a bias and on what it is multiplied by: ``weight_scale``."""
    scale = weight.args[1]
    with graph.graph.inserting_before(scale):
        given = bias if bias.op != "get_attr" else graph.graph.get_attr(bias.target)
        scale.args = (*scale.args, given, graph.graph.get_attr(input_scale))


# What it returns


def quantise_output(graph: fx.GraphModule, node: fx.Node, rule: OpRule, width: int) -> None:
    """A quantiser behind an operation that has an encoding of its own."""
    if rule.output == TIED or (rule.output == OWN and rounds_nothing_anew(node)):
        call_behind(graph, node, encoding_source(node.args[0]).target)
    elif rule.output == UNIT:
        follow(graph, node, FakeQuantize(unit_encoding(bits=width), fixed=True))
    elif rule.output != INPUT and relu_behind(node) is None:
        follow(graph, node, FakeQuantize(Encoding(1.0, 0, width)))


def rounds_nothing_anew(node: fx.Node) -> bool:
    """Whether the node is a ReLU of what something else reads too: the compiler makes one operation of it and of the
    conv before, which then never was on the conv's own grid, unless both grids are one."""
    before = node.args[0] if op_name(node) == "aten.relu.default" else None
    return before is not None and before.op == "call_module" and len(before.users) > 1


def share_with_inputs(graph: fx.GraphModule, node: fx.Node, live: set[fx.Node]) -> None:
    """What an operation wrote for ``node`` alone, moved on the way or not, gets the encoding of ``node``'s output, and
    none of its own."""
    shared = getattr(graph, QUANTISER + node.name)
    for operand_node in tensors(node.args):
        quantiser = written_for_one(operand_node)
        writer = quantiser.args[0] if quantiser is not None else None
        if writer not in live or writer.op != "call_function" or quantiser.target != QUANTISER + writer.name:
            continue
        if rule_of(writer).output == OWN and getattr(graph, quantiser.target).bits == shared.bits:
            replace_quantiser(graph, quantiser.target, QUANTISER + node.name)


def replace_quantiser(graph: fx.GraphModule, before: str, after: str) -> None:
    """Another quantiser wherever ``before`` is called, and where a bias is counted in its steps."""
    graph.delete_submodule(before)
    for node in graph.graph.nodes:
        if node.target in (before, f"{before}.scale"):
            node.target = node.target.replace(before, after, 1)


def written_for_one(node: fx.Node) -> fx.Node | None:
    """The quantiser whose value is read as ``node`` and by nothing else, behind movements that are seen through."""
    while node.op == "call_function" and rule_of(node).seen_through and len(node.users) == 1:
        node = node.args[0]
    return node if node.op == "call_module" and len(node.users) == 1 else None


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
