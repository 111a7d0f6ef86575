"""Predicted against actual, operation by operation, disagreements first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lumen_lab.auditing.onnx_join import (
    ExportedOp,
    Join,
    join_operations,
    merged_operations,
    onnx_nodes_by_operation,
)
from lumen_lab.auditing.operations import CPU, FOLDED, NPU, OpRow
from lumen_lab.auditing.partitions import partition_numbers
from lumen_lab.auditing.report import AuditReport
from lumen_lab.errors import AuditError
from lumen_lab.specs import Record, html_table

UNKNOWN = "unknown"
QUANTISERS = {"QuantizeLinear", "DequantizeLinear"}


@dataclass(frozen=True)
class ComparedOp(Record):
    """One operation: what was predicted and what the compiler did.

    ``actual`` is "NPU", "CPU", "folded" (nothing of its own is left) or "unknown"; ``onnx_nodes`` are the nodes that
    it became, ``became`` their operators or, where there are none, what happened to it: "folded away", "part of"
    another operation, or "no counterpart found", which is a disagreement.
    """

    index: int
    site: str
    call: int
    kind: str
    predicted: str
    actual: str
    agrees: bool
    became: str
    onnx_nodes: tuple[str, ...]
    predicted_because: str
    actual_because: str


@dataclass(frozen=True)
class UnclaimedNode(Record):
    """An ONNX node that belongs to no operation of the audit (the exporter or the runtime made it)."""

    onnx_node: str
    op_type: str
    site: str | None
    actual: str


@dataclass(frozen=True)
class Comparison(Record):
    """Every operation of an audit beside what became of it, and the ONNX nodes that no operation stands behind."""

    model: str
    chip: str
    operations: tuple[ComparedOp, ...]
    unclaimed: tuple[UnclaimedNode, ...]

    def disagreements(self) -> tuple[ComparedOp, ...]:
        """The operations that went elsewhere than predicted."""
        return tuple(op for op in self.operations if not op.agrees)

    @property
    def agrees(self) -> bool:
        """Whether every operation went where it was predicted, and no other node is on the CPU."""
        return not self.disagreements() and not any(node.actual == CPU for node in self.unclaimed)

    def rows(self) -> list[dict[str, object]]:
        """One dict an operation, disagreements on top, then the nodes that no operation stands behind."""
        ordered = sorted(self.operations, key=lambda op: op.agrees)
        surprising = [node for node in self.unclaimed if node.actual == CPU]
        others = [node for node in self.unclaimed if node.actual != CPU]
        return [*map(_unclaimed_row, surprising), *map(_compared_row, ordered), *map(_unclaimed_row, others)]

    def summary_rows(self) -> list[dict[str, object]]:
        """How many operations were predicted so and went so."""
        counts = Counter((op.predicted, op.actual, op.agrees) for op in self.operations)
        rows = [
            {"predicted": predicted, "actual": actual, "operations": count, "agrees": "yes" if agrees else "NO"}
            for (predicted, actual, agrees), count in sorted(counts.items(), key=lambda item: (item[0][2], -item[1]))
        ]
        for actual, count in Counter(node.actual for node in self.unclaimed).items():
            agrees = "NO" if actual == CPU else "yes"
            rows.append({"predicted": "(no operation)", "actual": actual, "operations": count, "agrees": agrees})
        return rows

    def __str__(self) -> str:
        wrong = len(self.disagreements())
        return (
            f"{self.model} for {self.chip}: {len(self.operations) - wrong} of {len(self.operations)} operations went "
            "where predicted"
        )

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Comparison:
        return super().from_json({"operations": [], "unclaimed": [], **values})

    def _repr_html_(self) -> str:
        wrong = [row for row in self.rows() if row["agrees"] == "NO"]
        table = html_table(wrong, caption="Disagreements", limit=60) if wrong else "<p>No disagreement.</p>"
        return html_table(self.summary_rows(), caption=str(self)) + table


@dataclass(frozen=True)
class _Placed:
    """Where an ONNX node went, and why."""

    runs_on: str
    reason: str


def compare_with_actual(report: AuditReport, actual: object, *, onnx_path: str | Path) -> Comparison:
    """Set what ``report`` predicted beside what the compiler did with ``onnx_path``, exported from the same network.

    ``actual`` is a compile report, or its nodes: dicts or records with the name of the ONNX node (``onnx_node``), where
    it went (``runs_on`` or ``place``: npu, cpu or folded) and, if known, ``reason``. ``AuditError`` if they do not
    belong to that file.
    """
    exported = onnx_nodes_by_operation(onnx_path)
    places = _places(getattr(actual, "nodes", actual))
    _check_same_graph(exported, places, onnx_path)
    join = join_operations(report.operations, exported)
    hosts = {index: report.operations[host] for index, host in merged_operations(report.operations, join).items()}
    compared = tuple(_compared(row, hosts.get(row.index), join, places) for row in report.operations)
    unclaimed = tuple(
        UnclaimedNode(name, op_type, op.site, _where(places, name))
        for op in join.unclaimed
        for name, op_type in op.nodes
    )
    return Comparison(report.model, report.chip, compared, unclaimed)


def actual_partition_rows(report: AuditReport, comparison: Comparison) -> list[dict[str, object]]:
    """As ``AuditReport.partition_rows``, with the place that the compiler gave each operation."""
    runs_on = {op.index: op.actual for op in comparison.operations if op.actual in (NPU, CPU)}
    numbers = partition_numbers(report.operations, runs_on)
    return [
        {
            "index": row.index,
            "site": row.site,
            "kind": row.kind,
            "partition": numbers[row.index] if runs_on[row.index] == NPU else None,
            "runs_on": runs_on[row.index],
        }
        for row in report.operations
        if row.index in runs_on
    ]


def _places(nodes: Iterable[object]) -> dict[str, _Placed]:
    places = {}
    for node in nodes:
        values = node if isinstance(node, Mapping) else vars(node)
        where = values.get("runs_on", values.get("place"))
        if "onnx_node" not in values or where is None:
            raise AuditError(
                f"A row of what the compiler did needs onnx_node and runs_on, found only {', '.join(map(str, values))}."
            )
        where = {"npu": NPU, "cpu": CPU}.get(str(where).lower(), str(where).lower())
        places[values["onnx_node"]] = _Placed(where, str(values.get("reason") or ""))
    return places


def _check_same_graph(exported: Sequence[ExportedOp], places: Mapping[str, _Placed], onnx_path: str | Path) -> None:
    silent = [op for op in exported if not op.name and not QUANTISERS & set(op.op_types)]
    if len(silent) > len(exported) / 2:
        raise AuditError(
            f"{len(silent)} operations of {onnx_path} do not say which torch operation they come from; "
            "export it with lumen_lab.export_onnx, or with torch.onnx.export(dynamo=True)."
        )
    names = {name for op in exported for name, _ in op.nodes}
    known = names & places.keys()
    if names and len(known) < len(names) / 2:
        raise AuditError(
            f"What the compiler did knows {len(known)} of the {len(names)} nodes of {onnx_path}; "
            "give the ONNX file that was compiled."
        )


def _where(places: Mapping[str, _Placed], name: str) -> str:
    return places[name].runs_on if name in places else UNKNOWN


def _compared(row: OpRow, host: OpRow | None, join: Join, places: Mapping[str, _Placed]) -> ComparedOp:
    found = join.nodes.get(row.index, ())
    names = tuple(name for op in found for name, _ in op.nodes)
    became = " + ".join(op_type for op in found for op_type in op.op_types)
    if host is not None:
        became = f"part of #{host.index} {host.kind}"
        actual = _together([_where(places, name) for op in join.nodes[host.index] for name, _ in op.nodes])
    elif names:
        actual = _together([_where(places, name) for name in names])
    else:
        became, actual = ("no counterpart found", UNKNOWN) if row.runs else ("folded away", FOLDED)
    reasons = dict.fromkeys(places[name].reason for name in names if name in places and places[name].reason)
    return ComparedOp(
        index=row.index,
        site=row.site,
        call=row.call,
        kind=row.kind,
        predicted=row.predicted,
        actual=actual,
        agrees=_agree(row.predicted, actual),
        became=became,
        onnx_nodes=names,
        predicted_because=row.reason,
        actual_because="; ".join(reasons),
    )


def _together(where: Sequence[str]) -> str:
    """One word for all nodes of an operation: a single one on the CPU puts it there."""
    return next((place for place in (CPU, NPU, UNKNOWN) if place in where), FOLDED)


def _agree(predicted: str, actual: str) -> bool:
    """What was predicted for the NPU may have been fused or folded there; nothing may go to the CPU unforeseen."""
    if predicted == CPU or actual == CPU:
        return predicted == actual
    return actual in (NPU, FOLDED)


def _compared_row(op: ComparedOp) -> dict[str, object]:
    return {
        "agrees": "yes" if op.agrees else "NO",
        "predicted": op.predicted,
        "actual": op.actual,
        "#": op.index,
        "site": f"{op.site or '(network)'}{f' (call {op.call + 1})' if op.call else ''}",
        "kind": op.kind,
        "became": op.became,
        "ONNX nodes": ", ".join(op.onnx_nodes),
        "predicted because": op.predicted_because,
        "actual because": op.actual_because,
    }


def _unclaimed_row(node: UnclaimedNode) -> dict[str, object]:
    return {
        "agrees": "NO" if node.actual == CPU else "yes",
        "predicted": "(no operation)",
        "actual": node.actual,
        "#": None,
        "site": "(unknown)" if node.site is None else node.site or "(network)",
        "kind": None,
        "became": node.op_type,
        "ONNX nodes": node.onnx_node,
        "predicted because": "",
        "actual because": "",
    }
