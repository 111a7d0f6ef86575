"""Values inside an NPU graph, by the module that they leave: for losses, for gate health, for the eye."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import module_stack
from lumen_lab.quantization.npu_graph import NPUGraph


def output_of(graph: NPUGraph, path: str) -> fx.Node:
    """The node whose value the module at ``path`` returns, on its integer grid where it has one of its own.

    ``QuantizationError`` for a module that the graph does not hold, or that is called more than once or returns
    several values.
    """
    nodes = [node for node in graph.graph_module.graph.nodes if is_within(node, path)]
    left = [node for node in nodes if any(not is_within(user, path) for user in node.users)]
    if len(left) != 1:
        found = f"{len(left)} values leave it" if left else "no operation of it is left in the graph"
        raise QuantizationError(
            f"The value of '{path}' was asked for, and {found}; name a module that is called once and returns one "
            "tensor (sites() lists them)."
        )
    return left[0]


def is_within(node: fx.Node, path: str) -> bool:
    """Whether a node comes from the module at ``path``."""
    return any(outer == path for outer, _ in module_stack(node))


def logits_of(graph: NPUGraph) -> fx.Node:
    """The node of the logits: what a graph that ends in a mask has before its last sigmoid."""
    value = next(node for node in graph.graph_module.graph.nodes if node.op == "output").all_input_nodes[0]
    if not graph.ends_in_mask:
        return value
    sigmoid = value.args[0] if value.op == "call_module" else value
    return sigmoid.args[0]


def before_quantiser(node: fx.Node) -> fx.Node | None:
    """What ``node``, a quantiser's call, rounds; None for another node."""
    return node.args[0] if node.op == "call_module" else None


def returning(graph: NPUGraph, nodes: Mapping[str, fx.Node]) -> fx.GraphModule:
    """The same network with the values of ``nodes`` for its output: image -> {name: value}.

    Weights and quantisers are those of ``graph``, not copies; modules put in place of quantisers later are not seen.
    """
    shown, copies = fx.Graph(), {}
    shown.graph_copy(graph.graph_module.graph, copies)
    shown.output({name: copies[node] for name, node in nodes.items()})
    module = fx.GraphModule(graph.graph_module, shown)
    shown.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))  # the last sigmoid of a mask
    module.recompile()
    return module


def outputs_of(graph: NPUGraph, paths: Iterable[str]) -> dict[str, fx.Node]:
    """Path → node of what the module there returns."""
    return {path: output_of(graph, path) for path in paths}
