"""A network as a graph of operations, through ``torch.export``: what is trained, quantised and emitted.

The graph takes any batch. What depends neither on the input nor on weights is computed once; what only serves
``torch.export`` is dropped.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, fx, nn

from lumen_lab.errors import QuantizationError
from lumen_lab.network.checkpoints import model_name

aten = torch.ops.aten
LARGEST_BATCH = 1024
PASSED_ON = (aten.alias.default, aten.contiguous.default, aten.dropout.default, aten.clone.default, aten.detach.default)
ASSERTIONS = (aten._assert_tensor_metadata.default,)
OUT_OF_PLACE = {
    aten.relu_.default: aten.relu.default,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.gelu_.default: aten.gelu.default,
}
VIEWS = ("view", "slice", "select", "permute", "transpose", "expand", "unsqueeze", "squeeze", "split", "getitem")


def capture(model: nn.Module, example: Tensor) -> fx.GraphModule:
    """``model`` in eval mode as a graph of ATen operations with shapes for any batch.

    ``example`` (1, C, H, W) gives the size. Weights keep their names and are shared with nothing; every node keeps the
    stack of modules it comes from. ``QuantizationError`` if the network is in training mode or cannot be exported.
    """
    if any(module.training for module in model.modules()):
        raise QuantizationError(
            "The network is in training mode, where dropout and batch statistics are live; call .eval()."
        )
    program = exported(model, example)
    check_one_output(program, model_name(model))
    module = program.module()
    graph = fx.GraphModule(module, module.graph)  # a plain one, which can be copied and pickled
    for node in list(graph.graph.nodes):
        simplify(graph, node)
    graph.graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
    fold_constants(graph)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph


def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The exported program of a copy (it shares its weights with what it was made from), its batch left open."""
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    pair = torch.cat([example, example]).to(device_of(model))  # a batch of one would be taken for a constant
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(copy.deepcopy(model), (pair,), dynamic_shapes=({0: batch},))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise QuantizationError(
            f"{model_name(model)} cannot be exported with an open batch: {reason[0][:300] if reason else error!r}."
        ) from error


def check_one_output(program: torch.export.ExportedProgram, name: str) -> None:
    """``QuantizationError`` for a network that returns several tensors, or one in a tuple, list or dict."""
    outputs = program.call_spec.out_spec
    if not outputs.is_leaf():
        raise QuantizationError(
            f"{name} is asked for one output, a tensor; this one has {outputs.num_leaves} in a "
            f"{outputs.type.__name__}: wrap it to return its logits."
        )


def simplify(graph: fx.GraphModule, node: fx.Node) -> None:
    """Drop a node that computes nothing in eval mode, or put the operation without side effects in its place."""
    if node.op == "call_module" or node.target in ASSERTIONS:  # guards on shapes
        graph.graph.erase_node(node)
    elif node.target in PASSED_ON:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    elif node.target in OUT_OF_PLACE:
        write_elsewhere(node)


def write_elsewhere(node: fx.Node) -> None:
    """An operation in place becomes the one that returns its result; whatever reads the changed tensor later reads
    that. ``QuantizationError`` where the tensor has views, which would change with it."""
    changed = node.args[0]
    views = [one for one in (changed, *changed.users) if one is not node and is_view(one)]
    if views:
        raise QuantizationError(
            f"{node.target} at '{site_of(node) or '(network)'}' changes a tensor of which '{views[0].name}' is a view; "
            "write it out of place."
        )
    later = set()
    following = node
    while following.op != "output":
        following = following.next
        later.add(following)
    node.target = OUT_OF_PLACE[node.target]
    changed.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value may share memory with what it reads."""
    name = node.target.__name__ if callable(node.target) else ""
    return node.op == "call_function" and name.partition(".")[0] in VIEWS


def depends_on(graph: fx.GraphModule, is_source: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes that ``is_source`` names and all that is computed from them."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if is_source(node) or any(other in found for other in node.all_input_nodes):
            found.add(node)
    return found


def is_weight(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node reads a parameter."""
    return node.op == "get_attr" and isinstance(attribute(graph, node.target), nn.Parameter)


def live_nodes(graph: fx.GraphModule) -> set[fx.Node]:
    """What depends on the input's values; its batch size does not count."""
    return depends_on(graph, lambda node: node.op == "placeholder") - sizes_only(graph)


def sizes_only(graph: fx.GraphModule) -> set[fx.Node]:
    """What depends on the batch size alone, and on no value."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        tensors = [other for other in node.all_input_nodes if other not in found and other.op != "get_attr"]
        if node.target is aten.sym_size.int or (
            node.op in ("call_function", "call_module") and node.all_input_nodes and not tensors
        ):
            found.add(node)
    return found


def fold_constants(graph: fx.GraphModule) -> None:
    """Compute what depends on neither input, batch nor weights, and keep it as buffers."""
    open_nodes = depends_on(graph, lambda node: node.op == "placeholder" or is_weight(graph, node))
    values: dict[fx.Node, object] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and node not in open_nodes:
            values[node] = attribute(graph, node.target)
        elif node.op == "call_function" and node not in open_nodes:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **keywords)
    for node in [node for node in values if node.op == "call_function" and set(node.users) & open_nodes]:
        if isinstance(values[node], Tensor):
            replace_by_buffer(graph, node, values[node])
    graph.graph.eliminate_dead_code()


def replace_by_buffer(graph: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    """A buffer of the graph in place of ``node``."""
    name = unused_name(graph, f"constant_{node.name}")
    graph.register_buffer(name, value.detach().clone())
    with graph.graph.inserting_before(node):
        read = graph.graph.get_attr(name)
    read.meta = dict(node.meta)
    node.replace_all_uses_with(read)
    graph.graph.erase_node(node)


def unused_name(graph: fx.GraphModule, name: str) -> str:
    """``name``, lengthened until nothing in the network is called so."""
    while hasattr(graph, name):
        name += "_"
    return name


def device_of(module: nn.Module) -> torch.device:
    """Where its weights are, or else its buffers."""
    return next((one.device for one in chain(module.parameters(), module.buffers())), torch.device("cpu"))


def attribute(graph: fx.GraphModule, target: str) -> Tensor:
    """The weight or buffer of a ``get_attr`` node."""
    return operator.attrgetter(target)(graph)


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """(path, class) of the modules around a node, outermost first; the network's own path is ""."""
    return [(path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values() if "hook" not in path]


def site_of(node: fx.Node) -> str:
    """Path of the innermost module that a node comes from ("" for the network itself)."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""
