"""What the compiler did with a network, as a record: partitions, operations, what stayed on the CPU and why."""

from __future__ import annotations

import html
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lumen_lab.deploy.qnn_graph import Partition, QnnOp, site_name
from lumen_lab.deploy.traffic import Traffic
from lumen_lab.errors import CompileError
from lumen_lab.specs import Record, html_table, write_whole

NPU, CPU, FOLDED = "npu", "cpu", "folded"
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

    def summary_rows(self) -> list[dict[str, object]]:
        """The figures that are compared from one compile to the next."""
        counts = Counter(node.place for node in self.nodes)
        figures = {
            "chip": f"{self.chip} (HTP v{self.htp_arch}, soc_model {self.soc_model})",
            "partitions": self.partitions,
            "ONNX nodes on the NPU / folded / on the CPU": f"{counts[NPU]} / {counts[FOLDED]} / {counts[CPU]}",
            "QNN ops": len(self.ops),
            "of them with a float tensor": len(self.float_ops),
            "bytes across partition borders": sum(part.bytes_in + part.bytes_out for part in self.partition_rows),
            **self._traffic_figures(),
            "context binary, bytes": self.binary_bytes,
            "compile time, s": round(self.compile_s, 1),
            "peak memory, MiB": None if self.peak_memory_bytes is None else round(self.peak_memory_bytes / 2**20),
        }
        return [{"figure": name, "value": value} for name, value in figures.items()]

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
            + f"<details><summary>{len(self.ops)} QNN ops by kind</summary><p>{html.escape(kinds)}</p></details>"
            + self._traffic_html()
        )

    def _traffic_html(self) -> str:
        if self.traffic is None:
            return f"<p>Memory traffic was not measured: {html.escape(self.no_traffic_because)}</p>"
        kinds = html_table(self.traffic.by_htp_kind(), limit=12)
        return (
            html_table(self.traffic.by_site(), caption="Where memory traffic is, by torch site", limit=12)
            + f"<details><summary>Traffic by kind of HTP operation</summary>{kinds}</details>"
        )


PATHS = ("log_path", "context_path")


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


def _listed(texts: Iterable[str], limit: int = 8) -> str:
    """The distinct texts in their order, the first ``limit`` of them spelled out."""
    distinct = list(dict.fromkeys(texts))
    more = [f"and {len(distinct) - limit} more"] if len(distinct) > limit else []
    return ", ".join(distinct[:limit] + more)
