"""Which ONNX nodes came from which operation of the audit.

``torch.onnx.export(dynamo=True)`` writes into each node the module path and the name of the graph operation that it
was translated from. That graph has been decomposed a little further than the audited one, so its names do not match
throughout; within one module, though, both lists keep the order of execution and most kinds, and are aligned by that.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lumen_lab.auditing.kinds import plain_name
from lumen_lab.auditing.operations import OpRow
from lumen_lab.errors import AuditError

if TYPE_CHECKING:
    import onnx

SCOPES = "pkg.torch.onnx.name_scopes"
CLASSES = "pkg.torch.onnx.class_hierarchy"
FAMILIES = {
    **dict.fromkeys("view reshape flatten unflatten squeeze unsqueeze".split(), "reshape"),
    **dict.fromkeys("permute transpose t numpy_T movedim".split(), "permute"),
    **dict.fromkeys("copy contiguous".split(), "copy"),
    **dict.fromkeys("pad constant_pad_nd".split(), "pad"),
    **dict.fromkeys("chunk split split_with_sizes".split(), "split"),
}
"""Kinds that one graph writes this way and the other that way."""

OPERATORS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), frozenset({"Conv"})),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), frozenset({"ConvTranspose"})),
}
"""The ONNX operators by which an operation is known again inside another one that was fused with it."""


@dataclass(frozen=True)
class ExportedOp:
    """One operation of the exported graph and the ONNX nodes that it became.

    ``name`` and ``kind`` are the graph's, ``site`` the module path; ``nodes`` are pairs of (node name, ONNX operator),
    ``shape`` that of the last node's output, where it is recorded. A node that does not say where it comes from has no
    ``name``, its operator for a ``kind``, and the site of the operation that reads it (None if unknown).
    """

    name: str
    kind: str
    site: str | None
    nodes: tuple[tuple[str, str], ...]
    shape: tuple[int, ...] | None

    @property
    def op_types(self) -> tuple[str, ...]:
        """The ONNX operators of its nodes, in order."""
        return tuple(op_type for _, op_type in self.nodes)


def onnx_nodes_by_operation(onnx_path: str | Path) -> tuple[ExportedOp, ...]:
    """The operations behind the nodes of an ONNX file, in the order of the graph.

    A node that does not say where it comes from is an operation of its own. ``AuditError`` if the file cannot be read.
    """
    import onnx

    try:
        graph = onnx.load(onnx_path, load_external_data=False).graph
    except Exception as error:
        raise AuditError(f"{onnx_path} cannot be read as an ONNX model: {type(error).__name__}: {error}.") from None
    shapes = {value.name: _shape(value) for value in (*graph.value_info, *graph.output)}
    groups: dict[tuple, list[onnx.NodeProto]] = {}
    for number, node in enumerate(graph.node):
        origin = _origin(node) or (_nearest_site(node, graph), node.op_type.lower(), "", number)
        groups.setdefault(origin, []).append(node)
    return tuple(_exported_op(origin, nodes, shapes) for origin, nodes in groups.items())


def _exported_op(origin: tuple, nodes: list[onnx.NodeProto], shapes: dict[str, tuple[int, ...]]) -> ExportedOp:
    site, kind, name = origin[:3]
    named = tuple((node.name or node.output[0], node.op_type) for node in nodes)
    return ExportedOp(name, kind, site, named, shapes.get(nodes[-1].output[0]))


def _nearest_site(node: onnx.NodeProto, graph: onnx.GraphProto) -> str | None:
    """Module path of a node that reads ``node`` or, failing that, of one that it reads."""
    readers = [other for other in graph.node if set(other.input) & set(node.output)]
    producers = [other for other in graph.node if set(other.output) & set(node.input)]
    origins = [origin for other in readers + producers if (origin := _origin(other))]
    return origins[0][0] if origins else None


def _origin(node: onnx.NodeProto) -> tuple[str, str, str] | None:
    """Module path, kind and name of the operation behind a node, if it says so."""
    found = {entry.key: entry.value for entry in node.metadata_props if entry.key in (SCOPES, CLASSES)}
    try:
        scopes, classes = ast.literal_eval(found[SCOPES]), ast.literal_eval(found[CLASSES])
        return str(scopes[-2]) if len(scopes) > 1 else "", plain_name(classes[-1]), str(scopes[-1])
    except (KeyError, ValueError, SyntaxError, IndexError):
        return None


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


@dataclass(frozen=True)
class Join:
    """``nodes``: exported operations by index of the audited one; ``unclaimed``: those that fit none."""

    nodes: dict[int, tuple[ExportedOp, ...]]
    unclaimed: tuple[ExportedOp, ...]


def join_operations(operations: Sequence[OpRow], exported: Sequence[ExportedOp]) -> Join:
    """Give each audited operation the exported ones that it became, module by module and in order.

    An exported operation without a namesake (a kind that was decomposed) goes to the audited one in whose place it
    stands. An audited operation may get none: folded ahead, or merged into a neighbour.
    """
    nodes: dict[int, tuple[ExportedOp, ...]] = {}
    unclaimed: list[ExportedOp] = []
    by_site: dict[str | None, list[ExportedOp]] = {}
    for op in exported:
        by_site.setdefault(op.site, []).append(op)
    rows_by_site: dict[str | None, list[OpRow]] = {}
    for row in operations:
        rows_by_site.setdefault(row.site, []).append(row)
    for site, ops in by_site.items():
        pairs = _aligned(rows_by_site.get(site, []), ops)
        claimed, left = _with_gaps(rows_by_site.get(site, []), ops, pairs)
        nodes |= claimed
        unclaimed += left
    order = {id(op): number for number, op in enumerate(exported)}
    return Join(nodes, tuple(sorted(unclaimed, key=lambda op: order[id(op)])))


def _aligned(rows: Sequence[OpRow], ops: Sequence[ExportedOp]) -> list[tuple[int, int]]:
    """Positions (row, op) of the best order-preserving pairing: the longest common subsequence, weighted."""
    best = [[0] * (len(ops) + 1) for _ in range(len(rows) + 1)]
    for i in reversed(range(len(rows))):
        for j in reversed(range(len(ops))):
            weight = _likeness(rows[i], ops[j])
            paired = weight + best[i + 1][j + 1] if weight else 0
            best[i][j] = max(paired, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(rows) and j < len(ops):
        weight = _likeness(rows[i], ops[j])
        if weight and best[i][j] == weight + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _likeness(row: OpRow, op: ExportedOp) -> int:
    """0 for different kinds; more for the same shape, name and for an operation that runs."""
    if FAMILIES.get(row.kind, row.kind) != FAMILIES.get(op.kind, op.kind):
        return 0
    return 4 + 2 * (op.shape in row.output_shapes) + row.runs + (row.name == op.name)


def _with_gaps(
    rows: Sequence[OpRow], ops: Sequence[ExportedOp], pairs: list[tuple[int, int]]
) -> tuple[dict[int, tuple[ExportedOp, ...]], list[ExportedOp]]:
    """The pairs, and what stands between them: a row without a pair takes the operations in its place."""
    claimed = {rows[i].index: [ops[j]] for i, j in pairs}
    unclaimed = []
    borders = [(-1, -1), *pairs, (len(rows), len(ops))]
    for (i, j), (next_i, next_j) in pairwise(borders):
        waiting = [row for row in rows[i + 1 : next_i] if row.runs]
        for op in ops[j + 1 : next_j]:
            if waiting:
                claimed.setdefault(waiting[-1].index, []).append(op)
            else:
                unclaimed.append(op)
    return {index: tuple(found) for index, found in claimed.items()}, unclaimed


def merged_operations(operations: Sequence[OpRow], join: Join) -> dict[int, int]:
    """For each operation that runs but has no nodes of its own: the operation with nodes that it was merged into.

    The exporter keeps one of several equal operations on the same inputs (weights of equal values included), fuses a
    conv into the normalisation that follows it, and joins neighbours that only move data.
    """
    hosts: dict[int, int | None] = {}
    twins: dict[int, int] = {}
    first_of: dict[tuple, int] = {}
    for row in operations:
        reads = tuple(_read_key(operations, producer, output, twins) for producer, output in row.reads)
        key = (row.kind, row.settings, row.output_shapes, reads)
        if row.index in join.nodes:
            first_of.setdefault(key, row.index)
        elif row.runs:
            host = _fused_with(row, operations, join)
            if host is None and key in first_of:
                host = twins[row.index] = first_of[key]
            if host is None and not row.macs:
                host = _neighbour(row, operations, join)
            hosts[row.index] = host
    return {index: host for index, host in hosts.items() if host is not None}


def _read_key(operations: Sequence[OpRow], producer: int, output: int, twins: Mapping[int, int]) -> tuple:
    """What an operation reads, such that equal operations have equal keys; constants go by their shape."""
    while producer >= 0 and operations[producer].no_effect:
        producer, output = operations[producer].reads[0]
    if producer >= 0 and operations[producer].folded:
        return "constant", operations[producer].output_shapes
    return twins.get(producer, producer), output


def _readers(row: OpRow, operations: Sequence[OpRow]) -> list[OpRow]:
    return [other for other in operations if any(producer == row.index for producer, _ in other.reads)]


def _fused_with(row: OpRow, operations: Sequence[OpRow], join: Join) -> int | None:
    """The reader in whose nodes stands the operator by which ``row`` is known."""
    for other in _readers(row, operations):
        foreign = OPERATORS.get(row.kind, frozenset()) - OPERATORS.get(other.kind, frozenset())
        if foreign & {op_type for op in join.nodes.get(other.index, ()) for op_type in op.op_types}:
            return other.index
    return None


def _neighbour(row: OpRow, operations: Sequence[OpRow], join: Join) -> int | None:
    """The operation before or after ``row`` that has nodes, one that does the same sort of work if there is one."""
    around = [operations[producer] for producer, _ in row.reads if producer >= 0] + _readers(row, operations)
    around.sort(key=lambda other: other.category != row.category)
    return next((other.index for other in around if other.index in join.nodes), None)
