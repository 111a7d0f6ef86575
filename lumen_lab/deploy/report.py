"""What the compiler did with a network, as a record: partitions, operations, what stayed on the CPU and why."""

from __future__ import annotations

import html
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lumen_lab.deploy.qnn_graph import MOVING, Partition, QnnOp, site_name
from lumen_lab.deploy.traffic import Traffic
from lumen_lab.errors import CompileError
from lumen_lab.specs import Record, html_table, write_whole

NPU, CPU, FOLDED = "npu", "cpu", "folded"
WIDTHS = (8, 16)  # bits of an activation that the NPU computes in integers
NOT_ASKED = "the network was compiled without asking for it (traffic=True)."


@dataclass(frozen=True)
class NodePlace(Record):
    """Where one ONNX node went.

    ``place``: "npu", "cpu", or "folded" (fused into a neighbour or computed ahead, so that nothing of its own is
    left). ``qnn_ops`` are the kinds of the operations it became; ``code`` and ``reason`` say why it was refused.
    ``site`` is the torch module path ("" for the network itself, None if unknown).
    """

    onnx_node: str
    op_type: str
    site: str | None
    place: str
    qnn_ops: tuple[str, ...] = ()
    code: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class CompileReport(Record):
    """A finished compile: it may still have left nodes on the CPU, see ``require_one_partition``.

    ``nodes`` holds every ONNX node, ``ops`` every operation inside the partitions, ``partition_rows`` the partitions
    with the tensors that cross their border. Bytes and seconds in the names; ``peak_memory_bytes`` is the compiler's
    process. ``options`` is what the compiler was told. ``traffic`` is what one inference moves through memory, by the
    compiler's own plan; None where it was not measured, and ``no_traffic_because`` then says why. ``log_path`` and
    ``context_path`` are kept relative to the report when it is saved.
    """

    model: str
    chip: str
    htp_arch: int
    soc_model: int
    options: dict[str, str]
    onnx_sha256: str
    versions: dict[str, str]
    partition_rows: tuple[Partition, ...]
    nodes: tuple[NodePlace, ...]
    ops: tuple[QnnOp, ...]
    binary_bytes: int
    compile_s: float
    peak_memory_bytes: int | None
    log_path: str
    context_path: str
    traffic: Traffic | None = None
    no_traffic_because: str = NOT_ASKED

    @property
    def partitions(self) -> int:
        """Number of graphs that the NPU would be called with, one after the other."""
        return len(self.partition_rows)

    @property
    def cpu_nodes(self) -> tuple[NodePlace, ...]:
        """The ONNX nodes that stayed on the CPU, in the order of the graph."""
        return tuple(node for node in self.nodes if node.place == CPU)

    @property
    def qnn_ops(self) -> dict[str, int]:
        """Number of operations inside the partitions by kind, most frequent first."""
        return dict(Counter(op.kind for op in self.ops).most_common())

    @property
    def float_ops(self) -> tuple[QnnOp, ...]:
        """Operations in the partitions with a float tensor; only an INT8 network should have none.

        The conversion of a float network input or output is not counted.
        """
        return tuple(op for op in self.ops if op.is_float and not op.at_boundary)

    @property
    def has_quantisers(self) -> bool:
        """Whether anything in the partitions is quantised; where nothing is, nobody asked for integers."""
        types = {one.dtype for op in self.ops for one in (op, *op.operands)}
        return any(quantised_bits(dtype) is not None for dtype in types)

    @property
    def silent_faults(self) -> tuple[QnnOp, ...]:
        """Operations that are computed in integers and otherwise than the ONNX file says: see ``QnnOp.faults``."""
        return tuple(op for op in self.ops if any(fault.silent for fault in op.faults))

    @property
    def ops_by_dtype(self) -> dict[str, int]:
        """Number of operations inside the partitions by the type of what they write, most frequent first."""
        return dict(Counter(op.dtype for op in self.ops).most_common())

    @property
    def ops_by_width(self) -> dict[int, int]:
        """Number of operations inside the partitions by the bits of the quantised numbers that they write."""
        written = Counter(width for op in self.ops if (width := quantised_bits(op.dtype)) is not None)
        return dict(sorted(written.items()))

    @property
    def int8_mac_share(self) -> float | None:
        """The share of multiply-accumulates done in integers; None if nothing multiplies matrices."""
        total = sum(op.macs for op in self.ops)
        return sum(op.macs for op in self.ops if not op.is_float) / total if total else None

    def rows(self) -> list[dict[str, object]]:
        """One dict a node of the ONNX graph, those on the CPU first."""
        return [
            {
                "place": node.place,
                "op type": node.op_type,
                "site": site_name(node.site),
                "ONNX node": node.onnx_node,
                "QNN ops": ", ".join(node.qnn_ops),
                "reason": node.reason,
            }
            for node in sorted(self.nodes, key=lambda node: node.place != CPU)
        ]

    def figures(self) -> dict[str, object]:
        """What is compared from one compile to the next, in one row."""
        counts = Counter(node.place for node in self.nodes)
        return {
            "chip": f"{self.chip} (HTP v{self.htp_arch}, soc_model {self.soc_model})",
            "partitions": self.partitions,
            "ONNX nodes on the NPU / folded / on the CPU": f"{counts[NPU]} / {counts[FOLDED]} / {counts[CPU]}",
            "QNN ops": len(self.ops),
            "of them with a float tensor": len(self.float_ops),
            "of them writing 8 / 16 bits": f"{self.ops_by_width.get(8, 0)} / {self.ops_by_width.get(16, 0)}",
            "of them silently wrong in integers": len(self.silent_faults),
            "share of MACs in integers": self.int8_mac_share,
            "bytes across partition borders": sum(part.bytes_in + part.bytes_out for part in self.partition_rows),
            **self._traffic_figures(),
            "context binary, bytes": self.binary_bytes,
            "compile time, s": round(self.compile_s, 1),
            "peak memory, MiB": None if self.peak_memory_bytes is None else round(self.peak_memory_bytes / 2**20),
        }

    def summary_rows(self) -> list[dict[str, object]]:
        """The same, a row a figure."""
        return [{"figure": name, "value": value} for name, value in self.figures().items()]

    def _traffic_figures(self) -> dict[str, object]:
        """The same figures for every report, None where they were not measured."""
        traffic = self.traffic
        return {
            "DRAM read, MB": traffic and round(traffic.dram_read_bytes / 1e6, 3),
            "DRAM written, MB": traffic and round(traffic.dram_write_bytes / 1e6, 3),
            "tiles": traffic and traffic.tiles,
        }

    def cpu_rows(self) -> list[dict[str, object]]:
        """Nodes left on the CPU by kind: how many, at which torch sites, why."""
        return _kind_rows(self.cpu_nodes)

    def fault_rows(self) -> list[dict[str, object]]:
        """Float operations and silently wrong ones: which, at which site, and the rule of the NPU that it breaks.

        Conversions to float and back, and what moves data beside a float operation, are listed only where nothing else
        is float.
        """
        computing = [op for op in self.float_ops if op.kind not in CONVERSIONS and (op.faults or op.kind not in MOVING)]
        shown = computing or list(self.float_ops)
        shown += [op for op in self.silent_faults if not op.is_float]
        return [_fault_row(op) for op in shown]

    def __str__(self) -> str:
        left = ", ".join(f"{row['nodes']} {row['op type']}" for row in self.cpu_rows()) or "nothing"
        return (
            f"{self.model} for {self.chip}: {self.partitions} partition{'s' * (self.partitions != 1)}, "
            f"{len(self.ops)} QNN ops, {left} on the CPU"
        )

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> CompileReport:
        return super().from_json({"partition_rows": [], "nodes": [], "ops": [], **values})

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON, its two paths relative to its own folder; returns the path."""
        folder = Path(path).resolve().parent
        relative = replace(self, **{name: os.path.relpath(getattr(self, name), folder) for name in PATHS})
        return write_whole(path, json.dumps(relative.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CompileReport:
        """Read a report written by ``save``; ``ArtifactError`` if the file is not one."""
        report = super().load(path)
        folder = Path(path).parent
        return replace(report, **{name: os.path.normpath(folder / getattr(report, name)) for name in PATHS})

    def _repr_html_(self) -> str:
        left = self.cpu_rows()
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.qnn_ops.items())
        return (
            html_table(self.summary_rows(), caption=str(self))
            + (html_table(left, caption="Left on the CPU") if left else "<p>Nothing is left on the CPU.</p>")
            + self._faults_html()
            + f"<details><summary>{len(self.ops)} QNN ops by kind</summary><p>{html.escape(kinds)}</p></details>"
            + self._traffic_html()
        )

    def _faults_html(self) -> str:
        """Nothing for a network that is float throughout: nobody asked for integers."""
        types = ", ".join(f"{count} {dtype}" for dtype, count in self.ops_by_dtype.items())
        faults = self.fault_rows() if self.has_quantisers else []
        table = html_table(faults, caption="Not computed in integers, or silently wrong", limit=40) if faults else ""
        return f"<p>Operations by the type of what they write: {html.escape(types)}</p>{table}"

    def _traffic_html(self) -> str:
        if self.traffic is None:
            return f"<p>Memory traffic was not measured: {html.escape(self.no_traffic_because)}</p>"
        kinds = html_table(self.traffic.by_htp_kind(), limit=12)
        return (
            html_table(self.traffic.by_site(), caption="Where memory traffic is, by torch site", limit=12)
            + f"<details><summary>Traffic by kind of HTP operation</summary>{kinds}</details>"
        )


PATHS = ("log_path", "context_path")
CONVERSIONS = ("Quantize", "Dequantize", "Convert", "Cast")
NO_RULE = "no rule of the table is seen to be broken: compile the operation alone, and add one"


def require_one_partition(report: CompileReport) -> CompileReport:
    """The report itself if the whole network is one partition and nothing is on the CPU.

    Otherwise ``CompileError`` naming what is left on the CPU, by kind and torch site.
    """
    if report.partitions == 1 and not report.cpu_nodes:
        return report
    raise CompileError(
        f"{report.model} for {report.chip} should be one NPU partition with nothing on the CPU; it is "
        f"{report.partitions}, and on the CPU stay {by_kind(report.cpu_nodes) or 'no nodes'}. "
        "Rewrite what was refused, then compile again."
    )


def require_int8(report: CompileReport, *, widths: Collection[int] = WIDTHS) -> CompileReport:
    """The report itself if the whole network is computed in integers on the NPU, as the ONNX file says.

    Activations of 8 and of 16 bits are both integers, on 8-bit weights, and both pass: what the gate keeps out is
    float. ``widths=(8,)`` keeps 16 bits out as well; ``CompileReport.ops_by_width`` counts them. The conversion of a
    float network input or output is allowed. One partition with nothing on the CPU proves none of this.

    Otherwise ``CompileError``: what is on the CPU; that the file has no quantisers at all; each float operation and
    each silently wrong one with its site and the rule of ``htp_rules.json`` that it breaks; or what is too wide.
    """
    if not widths or not set(widths) <= set(WIDTHS):
        raise CompileError(f"widths is of {WIDTHS}, the bits that activations may have; asked for {tuple(widths)}.")
    found = list(filter(None, (_on_the_cpu(report), _not_in_integers(report), _too_wide(report, widths))))
    if not found:
        return report
    raise CompileError(f"{report.model} for {report.chip} should be computed in integers on the NPU. {' '.join(found)}")


def _on_the_cpu(report: CompileReport) -> str:
    if not report.cpu_nodes:
        return ""
    return f"On the CPU stay {by_kind(report.cpu_nodes)}; rewrite what was refused, then compile again."


def _not_in_integers(report: CompileReport) -> str:
    """What is computed in float, or otherwise than the file says; "" if nothing is."""
    if not report.ops:
        return "There is no operation on the NPU."
    if not report.has_quantisers:
        return (
            f"The file has no quantisers, so all {len(report.ops)} QNN ops are float: quantise the network, write it "
            "with export_qdq(graph, path), and compile that."
        )
    rows = report.fault_rows()
    if not rows:
        return ""
    share = "" if report.int8_mac_share is None else f", {report.int8_mac_share:.1%} of the NPU's MACs in integers"
    return (
        f"{len(report.float_ops)} of {len(report.ops)} QNN ops are float and {len(report.silent_faults)} silently "
        f"wrong{share}: {_fault_texts(rows)}. Mend their encodings, then compile again."
    )


def _too_wide(report: CompileReport, widths: Collection[int]) -> str:
    wide = [op for op in report.ops if (bits := quantised_bits(op.dtype)) in WIDTHS and bits not in widths]
    if not wide:
        return ""
    asked, written = (_listed(map(str, sorted(bits))) for bits in (widths, {quantised_bits(op.dtype) for op in wide}))
    return (
        f"{len(wide)} of {len(report.ops)} QNN ops write {written} bits, and activations of {asked} bits were asked "
        f"for: {_listed(f'{op.kind} at {site_name(op.site)} ({op.onnx_node})' for op in wide)}. Quantise these "
        f"tensors in {asked} bits, or ask for widths={WIDTHS}."
    )


def _fault_row(op: QnnOp) -> dict[str, object]:
    faults = [fault for fault in op.faults if op.is_float or fault.silent]
    return {
        "computed": "in float" if op.is_float else "wrongly",
        "QNN op": op.kind,
        "site": site_name(op.site),
        "ONNX node": op.onnx_node,
        "broken": "; ".join(fault.what for fault in faults) or NO_RULE,
        "rule": ", ".join(dict.fromkeys(fault.rule for fault in faults)),
        "because": " ".join(dict.fromkeys(fault.because for fault in faults)),
    }


def _fault_texts(rows: Iterable[Mapping[str, object]]) -> str:
    """The operations and what is wrong with them, those of the same words together."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        rule = f" [{row['rule']}]" if row["rule"] else ""
        groups.setdefault(f"{row['broken']}{rule}", []).append(f"{row['QNN op']} at {row['site']} ({row['ONNX node']})")
    return _listed((f"{_listed(places)}: {broken}" for broken, places in groups.items()), mark="; ")


def quantised_bits(dtype: str) -> int | None:
    """The width of a fixed-point type ("u8", "s16"); None for one that stands for no real number, and for float."""
    return int(dtype[1:]) if dtype[:1] in "su" and dtype[1:].isdigit() else None


def by_kind(nodes: Iterable[NodePlace]) -> str:
    """Nodes by kind in one line, the most frequent kind first: how many, at which torch sites, why."""
    rows = _kind_rows(nodes)
    return "; ".join(f"{row['nodes']} {row['op type']} at {row['sites']} ({row['reason']})" for row in rows)


def _kind_rows(nodes: Iterable[NodePlace]) -> list[dict[str, object]]:
    groups: dict[str, list[NodePlace]] = {}
    for node in nodes:
        groups.setdefault(node.op_type, []).append(node)
    return [
        {
            "op type": kind,
            "nodes": len(group),
            "sites": _listed(site_name(node.site) for node in group),
            "reason": _listed(node.reason for node in group if node.reason),
        }
        for kind, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _listed(texts: Iterable[str], limit: int = 8, *, mark: str = ", ") -> str:
    """The distinct texts in their order, the first ``limit`` of them spelled out."""
    distinct = list(dict.fromkeys(texts))
    more = [f"and {len(distinct) - limit} more"] if len(distinct) > limit else []
    return mark.join(distinct[:limit] + more)
