"""One row an operation: torch site, ONNX nodes and QNN operations, with the encodings that the NPU computes in."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lumen_lab.auditing.onnx_join import ExportedOp, onnx_nodes_by_operation
from lumen_lab.deploy.model_file import QUANTISERS, node_key, read_onnx
from lumen_lab.deploy.qnn_graph import CONSTANT, IN, MOVING, MULTIPLYING, OUT, Operand, QnnOp, site_name
from lumen_lab.deploy.report import CPU, FOLDED, NPU, CompileReport
from lumen_lab.errors import ArtifactError
from lumen_lab.specs import Record, file_sha256, html_table, write_whole

if TYPE_CHECKING:
    import onnx

NEAR_SOFTMAX = ("Add", "Mul", "Div", "Transpose", "Reshape")  # between the two products of an attention head
PRODUCT = "MatMul"
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", PRODUCT)


@dataclass(frozen=True)
class OpTableRow(Record):
    """One operation of the exported graph.

    ``torch_op`` is its kind and ``torch_name`` its name there, None where the exporter or the runtime made it.
    ``group``: the composite that it is a part of, such as "attention head 3", else "". ``runs_on``: "npu", "cpu" or
    "folded" (nothing of its own is left). ``fused_into``: the operation whose QNN operation computes this one as well,
    as a ReLU's range is the conv's; else "". ``reads``, ``weights`` and ``writes`` are the tensors of the main one of
    ``qnn_ops``, in the NPU's order of axes; ``weight_scales`` has for each of ``weights`` its scale, or all of them in
    the order of the channels (nothing for a float one). ``faults``: the rules of the NPU that it breaks.
    """

    index: int
    site: str | None
    torch_op: str | None
    torch_name: str | None
    group: str
    onnx_nodes: tuple[str, ...]
    onnx_ops: tuple[str, ...]
    qnn_ops: tuple[str, ...]
    runs_on: str
    reads: tuple[Operand, ...] = ()
    weights: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    macs: int = 0
    is_float: bool = False
    faults: tuple[str, ...] = ()
    fused_into: str = ""
    weight_scales: tuple[tuple[float, ...], ...] = ()

    def flat(self) -> dict[str, object]:
        """The row as plain texts and numbers, for a table or a CSV file; of the scales of a weight the ends."""
        written = self.writes[0] if self.writes else None
        scales = self.weight_scales[0] if self.weight_scales else ()
        return {
            "#": self.index,
            "group": self.group,
            "site": site_name(self.site),
            "torch op": self.torch_op or "",
            "torch name": self.torch_name or "",
            "ONNX nodes": " ".join(self.onnx_nodes),
            "ONNX ops": " + ".join(self.onnx_ops),
            "QNN ops": " + ".join(self.qnn_ops),
            "runs on": self.runs_on,
            "fused into": self.fused_into,
            "reads": "; ".join(map(str, self.reads)),
            "weights": "; ".join(map(str, self.weights)),
            "least weight scale": min(scales, default=None),
            "greatest weight scale": max(scales, default=None),
            "writes": "; ".join(map(str, self.writes)),
            "dtype": written.dtype if written else "",
            "scale": written.scale if written else None,
            "zero point": written.zero_point if written else None,
            "MACs": self.macs,
            "float": self.is_float,
            "faults": "; ".join(self.faults),
        }


@dataclass(frozen=True)
class OpTable(Record):
    """Every operation of a compiled network, in the order of the graph."""

    model: str
    chip: str
    operations: tuple[OpTableRow, ...]

    def rows(self) -> list[dict[str, object]]:
        """One dict an operation."""
        return [row.flat() for row in self.operations]

    def groups(self) -> dict[str, tuple[OpTableRow, ...]]:
        """The composite operations and their parts."""
        found: dict[str, list[OpTableRow]] = {}
        for row in self.operations:
            if row.group:
                found.setdefault(row.group, []).append(row)
        return {name: tuple(rows) for name, rows in found.items()}

    def at(self, site: str) -> tuple[OpTableRow, ...]:
        """The operations of the module at ``site`` and of those inside it."""
        return tuple(
            row for row in self.operations if (row.site or "") == site or (row.site or "").startswith(f"{site}.")
        )

    def save_csv(self, path: str | Path) -> Path:
        """Write the rows as CSV, one header line; returns the path.

        ``save`` writes the whole record as JSON, with every scale of every weight.
        """
        text = io.StringIO()
        rows = self.rows()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["#"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return write_whole(path, text.getvalue())

    def _repr_html_(self) -> str:
        return html_table(self.rows(), caption=f"{self.model} for {self.chip}, operation by operation", limit=60)


def op_table(report: CompileReport, onnx_path: str | Path) -> OpTable:
    """The operations of ``onnx_path`` and what the compiler made of each, as ``report`` of that file says.

    ``CompileError`` if the file cannot be read, ``ArtifactError`` if it is another one than the report is of.
    Quantisers belong to the operation whose value they convert; nodes that do not say where they come from are rows of
    their own.
    """
    check_fitting(report, onnx_path)
    model = read_onnx(onnx_path)
    exported = [op for op in onnx_nodes_by_operation(onnx_path) if not only_quantisers(op)]
    places = {node.onnx_node: node.place for node in report.nodes}
    became: dict[str, list[QnnOp]] = {}
    for op in report.ops:
        if op.onnx_node is not None and op.joined_by != "neighbour":
            became.setdefault(op.onnx_node, []).append(op)
    reads, scales = readings(exported, model), weight_scales(model, Path(onnx_path).parent)
    groups = composites(exported, reads)
    made = [[qnn for name, _ in computing(op) for qnn in became.get(name, ())] for op in exported]
    hosts = fused_operations(exported, reads, made)
    for part, host in hosts.items():
        made[host] += made[part]
    rows = [_row(*place, groups, places, scales) for place in enumerate(zip(exported, made, strict=True))]
    for part, host in hosts.items():
        rows[part] = _fused(rows[part], rows[host])
    return OpTable(report.model, report.chip, tuple(rows))


def check_fitting(report: CompileReport, onnx_path: str | Path) -> None:
    """``ArtifactError`` unless these are a report and the file that it is of."""
    if not isinstance(report, CompileReport) or not isinstance(onnx_path, str | os.PathLike):
        found = f"{type(report).__name__} and {type(onnx_path).__name__}"
        raise ArtifactError(
            f"op_table takes a CompileReport and the path of the ONNX file that it is of, found {found}; write "
            "op_table(report, onnx_path), the report from compile_for_chip or CompileReport.load."
        )
    found = file_sha256(onnx_path) if Path(onnx_path).is_file() else report.onnx_sha256
    if found != report.onnx_sha256:
        raise ArtifactError(
            f"{onnx_path} is not the file that the report of {report.model} for {report.chip} is of: SHA-256 "
            f"{found[:12]}… found, {report.onnx_sha256[:12]}… compiled; give that file, or compile this one."
        )


def weight_scales(model: onnx.ModelProto, folder: Path) -> dict[str, tuple[float, ...]]:
    """The scales of each constant that a DequantizeLinear reads, by the name of its integers."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and {*node.input[:2]} <= constants.keys():
            scale = numpy_helper.to_array(constants[node.input[1]], base_dir=str(folder))
            found[node.input[0]] = tuple(scale.reshape(-1).tolist())
    return found


def fused_operations(
    exported: Sequence[ExportedOp], reads: Sequence[Sequence[int]], made: Sequence[Sequence[QnnOp]]
) -> dict[int, int]:
    """For each operation that was fused into the product that it reads: that product.

    The compiler names what it makes of both after the second, whose output it writes; nothing is left of the first.
    """
    products = [any(kind in PRODUCTS for _, kind in computing(op)) for op in exported]
    found = {}
    for index, qnn in enumerate(made):
        host = reads[index][0] if reads[index] else None
        alone = host is not None and products[host] and not made[host] and not products[index]
        if alone and any(op.kind in MULTIPLYING for op in qnn):
            found[index] = host
    return found


def _fused(row: OpTableRow, host: OpTableRow) -> OpTableRow:
    """The row of an operation that another one computes: what that one writes is its own output."""
    name = host.torch_name or host.onnx_nodes[0]
    return replace(row, runs_on=NPU, fused_into=name, qnn_ops=(), reads=(), weights=(), weight_scales=(), macs=0)


def only_quantisers(op: ExportedOp) -> bool:
    """Whether nothing is computed but a conversion: that of a network input."""
    return set(op.op_types) <= set(QUANTISERS)


def computing(op: ExportedOp) -> list[tuple[str, str]]:
    """(name, operator) of the nodes that are no quantisers."""
    return [(name, kind) for name, kind in op.nodes if kind not in QUANTISERS]


def _row(
    index: int,
    made: tuple[ExportedOp, Sequence[QnnOp]],
    groups: Mapping[int, str],
    places: Mapping[str, str],
    scales: Mapping[str, tuple[float, ...]],
) -> OpTableRow:
    op, qnn = made
    nodes, main = computing(op), main_op(qnn)
    weights = of_role(main, CONSTANT)
    return OpTableRow(
        index=index,
        site=op.site,
        torch_op=op.kind if op.name else None,
        torch_name=op.name or None,
        group=groups.get(index, ""),
        onnx_nodes=tuple(name for name, _ in nodes),
        onnx_ops=tuple(kind for _, kind in nodes),
        qnn_ops=tuple(one.kind for one in qnn),
        runs_on=NPU if qnn else together(places.get(name, FOLDED) for name, _ in nodes),
        reads=of_role(main, IN),
        weights=weights,
        writes=of_role(main, OUT),
        macs=sum(one.macs for one in qnn),
        is_float=any(one.is_float and not one.at_boundary for one in qnn),
        faults=tuple(dict.fromkeys(fault.what for one in qnn for fault in one.faults)),
        weight_scales=tuple(scales.get(weight.name, _own_scale(weight)) for weight in weights),
    )


def _own_scale(weight: Operand) -> tuple[float, ...]:
    """What the compiled graph itself says of a weight whose integers it has under another name."""
    return () if weight.scale is None else (weight.scale,)


def together(where: Iterable[str]) -> str:
    """One word for all nodes of an operation: a single one on the CPU puts it there."""
    found = set(where)
    return next((place for place in (CPU, NPU) if place in found), FOLDED)


def main_op(made: Sequence[QnnOp]) -> QnnOp | None:
    """The one that multiplies or, failing that, does more than move data."""
    return max(made, key=lambda op: (op.macs, op.kind not in MOVING), default=None)


def of_role(op: QnnOp | None, role: str) -> tuple[Operand, ...]:
    """An operation's operands of one role."""
    return tuple(operand for operand in (op.operands if op else ()) if operand.role == role)


def readings(exported: Sequence[ExportedOp], model) -> list[list[int]]:
    """For each operation the ones whose values it reads, quantisers seen through."""
    owner = {name: index for index, op in enumerate(exported) for name, _ in op.nodes}
    maker: dict[str, int] = {}
    reads: list[list[int]] = [[] for _ in exported]
    for node in model.graph.node:
        index = owner.get(node_key(node))
        given = [maker[value] for value in node.input if value in maker]
        if node.op_type in QUANTISERS:
            maker |= dict.fromkeys(node.output, given[0]) if given else {}
            continue
        if index is not None:
            reads[index] += [other for other in given if other != index]
            maker |= dict.fromkeys(node.output, index)
    return reads


def composites(exported: Sequence[ExportedOp], reads: Sequence[Sequence[int]]) -> dict[int, str]:
    """The group of each operation that is a part of one: an attention head, a conv or linear with its ReLU or bias."""
    readers: list[list[int]] = [[] for _ in exported]
    for index, given in enumerate(reads):
        for other in given:
            readers[other].append(index)
    kinds = [[kind for _, kind in computing(op)] for op in exported]
    found: dict[int, str] = {}
    heads = 0
    for index, kind in enumerate(kinds):
        if kind == ["Softmax"] and (parts := head_around(index, kinds, reads, readers)):
            heads += 1
            found |= dict.fromkeys(parts, f"attention head {heads}")
        elif kind == ["Relu"] and reads[index] and "Conv" in kinds[reads[index][0]]:
            found |= dict.fromkeys((reads[index][0], index), f"conv + relu {exported[reads[index][0]].name}")
        elif kind == [PRODUCT, "Add"]:
            found[index] = f"linear + bias {exported[index].name}"
    return found


def head_around(
    softmax: int, kinds: Sequence[list[str]], reads: Sequence[Sequence[int]], readers: Sequence[Sequence[int]]
) -> list[int]:
    """The operations of one head: from the product that the softmax is of to the one that it weighs; [] if none."""
    before = list(chain_to_product(softmax, kinds, reads))
    after = next((reader for reader in readers[softmax] if kinds[reader] == [PRODUCT]), None)
    return [*before[::-1], softmax, after] if before and after is not None else []


def chain_to_product(start: int, kinds: Sequence[list[str]], reads: Sequence[Sequence[int]]) -> Iterator[int]:
    """The operations back to the nearest product of two activations; nothing if there is none."""
    chain, place = [], start
    while reads[place]:
        place = next((other for other in reads[place] if kinds[other] == [PRODUCT]), reads[place][0])
        chain.append(place)
        if kinds[place] == [PRODUCT]:
            yield from chain
            return
        if len(kinds[place]) != 1 or kinds[place][0] not in NEAR_SOFTMAX:
            return
