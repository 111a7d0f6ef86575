"""Where each ONNX node went: onto the NPU, folded into a neighbour, or left on the CPU, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lumen_lab.deploy.errors_in_words import Refusal
from lumen_lab.deploy.model_file import node_key, node_sites, producers
from lumen_lab.deploy.qnn_graph import QnnOp, base_name
from lumen_lab.deploy.report import CPU, FOLDED, NPU, NodePlace, by_kind

if TYPE_CHECKING:
    import onnx


def node_places(
    model: onnx.ModelProto,
    context: onnx.ModelProto,
    ops: tuple[QnnOp, ...],
    refusals: Mapping[str, Refusal],
) -> tuple[NodePlace, ...]:
    """Where each node of ``model`` went; nodes that onnxruntime made itself and left on the CPU come last."""
    on_cpu = _cpu_nodes(model, context)
    sites = node_sites(model)
    kinds: dict[str, list[str]] = {}
    for op in ops:
        if op.onnx_node is not None and op.joined_by != "neighbour":
            kinds.setdefault(op.onnx_node, []).append(op.kind)
    op_types = {node_key(node): node.op_type for node in model.graph.node}
    op_types |= {key: node.op_type for key, node in on_cpu.items() if key not in op_types}
    rows = []
    for key, op_type in op_types.items():
        row = NodePlace(key, op_type, sites.get(key), NPU if key in kinds else FOLDED, tuple(kinds.get(key, ())))
        if key in on_cpu:
            refusal = refusals.get(node_key(on_cpu[key])) or refusals.get(key)
            reason = refusal.reason if refusal else "taken by itself, but left on the CPU with its neighbours"
            row = replace(row, place=CPU, code=refusal.code if refusal else None, reason=reason)
        rows.append(row)
    return tuple(rows)


def _cpu_nodes(model: onnx.ModelProto, context: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The context model's CPU nodes by the ONNX node that each stands for (by its own name where there is none)."""
    names = {node_key(node) for node in model.graph.node}
    producer = producers(model)
    return {_origin(node, names, producer): node for node in context.graph.node if node.op_type != "EPContext"}


def _origin(node: onnx.NodeProto, names: set[str], producer: Mapping[str, onnx.NodeProto]) -> str:
    """Name of the ONNX node behind a CPU node: the same name, the same output, or the name before a fusion."""
    writers = [producer[value] for value in node.output if value in producer]
    same_output = [node_key(writer) for writer in writers if writer.op_type == node.op_type]
    candidates = [node_key(node), *same_output, base_name(node_key(node))]
    return next((name for name in candidates if name in names), node_key(node))


def refused_in_words(refusals: Mapping[str, Refusal], model: onnx.ModelProto) -> str:
    """The refused nodes of a compile that failed, by kind, with their torch sites and reasons; "" if there is none."""
    sites = node_sites(model)
    places = [
        NodePlace(base_name(node), refusal.op_type, sites.get(base_name(node)), CPU, (), refusal.code, refusal.reason)
        for node, refusal in refusals.items()
    ]
    return by_kind(places)
