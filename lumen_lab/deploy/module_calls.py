"""Which tensors of an ONNX graph are what a torch module returned, call by call.

``torch.onnx.export`` writes into each node the modules around it, outermost first, but not which of their calls it
belongs to, nor what they returned. Both follow from the graph: a module that is left and entered again is called
again, and one whose inside is the same sequence several times over was called so often in a row; what it returned is
what is read outside it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from lumen_lab.deploy.model_file import QUANTISERS, SCOPES, graph_inputs
from lumen_lab.errors import ArtifactError

if TYPE_CHECKING:
    import onnx

FX_NODE = "pkg.torch.onnx.fx_node"


@dataclass(frozen=True)
class ModuleCall:
    """One call of the module at ``site``, with the names of the values that leave it, in the order of the graph.

    Only values that depend on the network's inputs count. ``op_types``: its ONNX operators, quantisers left out.
    """

    site: str
    call: int
    values: tuple[str, ...]
    op_types: tuple[str, ...]


@dataclass
class _Run:
    """A stretch of the graph inside one module: places of nodes, and stretches of the modules inside, in order."""

    site: str
    parts: list[int | _Run] = field(default_factory=list)

    def nodes(self) -> Iterator[int]:
        for part in self.parts:
            yield from part.nodes() if isinstance(part, _Run) else (part,)


def module_calls(model: onnx.ModelProto) -> list[ModuleCall]:
    """Every module call in the graph, in the order in which they end; ``ArtifactError`` if no node says where it is.

    Quantise and dequantise nodes belong to no call: a value that leaves through one leaves all the same. A node that
    the exporter left without its modules (a Split) belongs to those around what it reads and what reads it.
    """
    nodes = list(model.graph.node)
    scopes = [None if node.op_type in QUANTISERS else _scopes(node) for node in nodes]
    if not any(scopes):
        raise ArtifactError(
            "No node of this ONNX graph says which torch module it comes from; export it with export_onnx."
        )
    readers = _readers(model)
    live = _live_values(model)
    scopes = _with_neighbours(scopes, nodes, readers, live)
    seen: Counter[str] = Counter()
    calls = []
    for run in _in_order_of_ending(_read_runs(scopes, nodes)):
        inside = sorted(run.nodes())
        members = set(inside)
        made = [value for place in inside for value in nodes[place].output if value in live]
        leaving = tuple(value for value in made if readers.get(value, set()) - members)
        ops = tuple(dict.fromkeys(nodes[place].op_type for place in inside))
        calls.append(ModuleCall(run.site, seen[run.site], leaving, ops))
        seen[run.site] += 1
    return calls


def _scopes(node: onnx.NodeProto) -> tuple[str, ...] | None:
    """Paths of the modules around a node, outermost first; None if it does not say."""
    text = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), None)
    try:
        scopes = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError):
        return None
    return tuple(map(str, scopes[:-1])) or None


def _with_neighbours(
    scopes: Sequence[tuple[str, ...] | None],
    nodes: Sequence[onnx.NodeProto],
    readers: Mapping[str, set[int]],
    live: Collection[str],
) -> list[tuple[str, ...] | None]:
    """The paths of modules around each node, where a node says none those that its neighbours have in common."""
    makers: dict[str, tuple[str, ...] | None] = {}
    found = []
    for scope, node in zip(scopes, nodes, strict=True):
        given = [makers.get(name) for name in node.input if name in live]
        if node.op_type in QUANTISERS:
            found.append(None)
            makers |= dict.fromkeys(node.output, given[0] if given else None)
            continue
        if scope is None:
            read_by = [scopes[place] for name in node.output for place in readers.get(name, ()) if place >= 0]
            around = [path for path in (*given, *read_by) if path]
            scope = tuple(parts[0] for parts in takewhile(_all_the_same, zip(*around, strict=False))) or None
        found.append(scope)
        makers |= dict.fromkeys(node.output, scope)
    return found


def _all_the_same(parts: Sequence[str]) -> bool:
    return len(set(parts)) == 1


def _read_runs(scopes: Sequence[tuple[str, ...] | None], nodes: Sequence[onnx.NodeProto]) -> list[_Run]:
    """The stretches of the network itself (one, unless it ran several times over)."""
    root = _Run("")
    stack = [root]
    for place, path in enumerate(scopes):
        if path is None:
            continue
        inner = path[1:] if path[0] == "" else path
        depth = next((d for d, (run, site) in enumerate(zip(stack[1:], inner)) if run.site != site), None)
        del stack[1 + (min(len(inner), len(stack) - 1) if depth is None else depth) :]
        for site in inner[len(stack) - 1 :]:
            stack[-1].parts.append(run := _Run(site))
            stack.append(run)
        stack[-1].parts.append(place)
    _split_inside(root, nodes)
    return [root]


def _split_inside(run: _Run, nodes: Sequence[onnx.NodeProto]) -> None:
    """Split every stretch within ``run`` that is several calls in a row, the innermost first."""
    parts: list[int | _Run] = []
    for part in run.parts:
        if isinstance(part, _Run):
            _split_inside(part, nodes)
            parts += _split(part, nodes)
        else:
            parts.append(part)
    run.parts = parts


def _split(run: _Run, nodes: Sequence[onnx.NodeProto]) -> list[_Run]:
    """The calls that a stretch is made of: as many as its sequence of modules and operations repeats.

    Operations alone prove nothing, unless they read the same weights again.
    """
    tokens = [part.site if isinstance(part, _Run) else _token(nodes[part]) for part in run.parts]
    length = next(
        n for n in range(1, len(tokens) + 1) if not len(tokens) % n and tokens == tokens[:n] * (len(tokens) // n)
    )
    telling = any(isinstance(token, str) or token[1] for token in tokens)
    if length == len(tokens) or not telling:
        return [run]
    return [_Run(run.site, run.parts[start : start + length]) for start in range(0, len(tokens), length)]


def _token(node: onnx.NodeProto) -> tuple[str, tuple[str, ...]]:
    """Operator and the weights it was exported with."""
    text = next((entry.value for entry in node.metadata_props if entry.key == FX_NODE), "")
    return node.op_type, tuple(re.findall(r"%p_\w+", text))


def _in_order_of_ending(runs: Sequence[_Run]) -> Iterator[_Run]:
    for run in runs:
        yield from _in_order_of_ending([part for part in run.parts if isinstance(part, _Run)])
        yield run


def _readers(model: onnx.ModelProto) -> dict[str, set[int]]:
    """Places of the nodes that read each value, directly or through a quantiser; -1 stands for the graph's outputs."""
    readers: dict[str, set[int]] = {value.name: {-1} for value in model.graph.output}
    for place, node in reversed(list(enumerate(model.graph.node))):
        through = node.op_type in QUANTISERS
        found = set().union(*(readers.get(name, set()) for name in node.output)) if through else {place}
        for name in node.input:
            readers.setdefault(name, set()).update(found)
    return readers


def _live_values(model: onnx.ModelProto) -> set[str]:
    """Values that depend on an input of the graph."""
    live = {value.name for value in graph_inputs(model)}
    for node in model.graph.node:
        if live.intersection(node.input):
            live.update(node.output)
    return live
