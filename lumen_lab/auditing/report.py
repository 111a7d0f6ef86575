"""What an audit found, as one record: operations, what blocks, what it costs, where a runtime would cut."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lumen_lab.auditing.operations import CPU, NPU, OpRow
from lumen_lab.auditing.partitions import Cut
from lumen_lab.specs import Record, html_table


@dataclass(frozen=True)
class AuditReport(Record):
    """One network, read operation by operation for one chip, without running it.

    ``operations`` are in order of execution; ``cuts`` is what crosses between the predicted pieces.
    ``parameter_bytes`` counts each weight, buffer and constant once; ``input_shapes`` are those of the example inputs.
    """

    model: str
    chip: str
    htp_arch: int
    input_shapes: tuple[tuple[int, ...], ...]
    operations: tuple[OpRow, ...]
    cuts: tuple[Cut, ...]
    parameter_bytes: int
    versions: dict[str, str]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of matrix products and convolutions, constants left out."""
        return sum(row.macs for row in self.operations if row.runs)

    @property
    def interpolation_macs(self) -> int:
        """Multiply-accumulates of interpolation (grid samples, resizes, look-ups of deformable convs)."""
        return sum(row.interpolation_macs for row in self.operations if row.runs)

    @property
    def partitions(self) -> int:
        """Predicted number of graphs that the NPU is called with, one after the other."""
        return len({row.partition for row in self.operations if row.predicted == NPU})

    @property
    def cut_bytes(self) -> int:
        """Bytes that cross from one piece into another, all cuts together."""
        return sum(cut.bytes for cut in self.cuts)

    @property
    def peak_activation_bytes(self) -> int:
        """The most activation bytes alive at once (``auditing.cost.live_bytes`` says what counts)."""
        return max((row.live_bytes for row in self.operations), default=0)

    @property
    def peak(self) -> OpRow | None:
        """The operation during which most activation bytes are alive."""
        return max(self.operations, key=lambda row: row.live_bytes, default=None)

    def blocking(self) -> tuple[OpRow, ...]:
        """The operations that would stay on the CPU."""
        return tuple(row for row in self.operations if row.predicted == CPU)

    def macs_by_site(self, *, depth: int = 1, by_call: bool = False) -> dict[str, int]:
        """MACs by the first ``depth`` parts of the module path, in order of execution.

        ``by_call`` keeps the calls of a module apart: "bb", then "bb (call 2)".
        """
        totals: dict[str, int] = {}
        for row in self.operations:
            if row.runs and row.macs:
                site = ".".join(row.site.split(".")[:depth]) or "(network)"
                key = f"{site} (call {row.call + 1})" if by_call and row.call else site
                totals[key] = totals.get(key, 0) + row.macs
        return totals

    def rows(self) -> list[dict[str, object]]:
        """One dict an operation, for a table."""
        return [_table_row(row) for row in self.operations]

    def blocking_rows(self) -> list[dict[str, object]]:
        """One dict an operation that would stay on the CPU: where, what, why, and who says so."""
        return [
            {
                "#": row.index,
                "site": row.place,
                "kind": row.kind,
                "output": _shape_text(row.output_shapes),
                "GMAC": row.macs / 1e9,
                "reason": row.reason,
                "source": row.source,
            }
            for row in self.blocking()
        ]

    def kind_rows(self) -> list[dict[str, object]]:
        """One dict a kind of operation, dearest first: how many, their cost, where they are predicted to run."""
        groups: dict[str, list[OpRow]] = {}
        for row in self.operations:
            groups.setdefault(row.kind, []).append(row)
        ordered = sorted(groups.items(), key=lambda item: (-sum(row.macs for row in item[1]), -len(item[1])))
        return [_kind_row(kind, rows) for kind, rows in ordered]

    def note_rows(self) -> list[dict[str, object]]:
        """One dict a warning: how many operations it concerns, and the first of them."""
        groups: dict[str, list[OpRow]] = {}
        for row in self.operations:
            for note in row.notes:
                groups.setdefault(note, []).append(row)
        return [
            {"operations": len(rows), "note": note, "first": f"{rows[0].kind} at {rows[0].place}"}
            for note, rows in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]

    def cut_rows(self) -> list[dict[str, object]]:
        """One dict a cut: from which piece into which, how many tensors, how many bytes."""
        return [{"from": cut.source, "to": cut.target, "tensors": cut.tensors, "bytes": cut.bytes} for cut in self.cuts]

    def partition_rows(self) -> list[dict[str, object]]:
        """One dict an operation that a device has to run: index, site, kind, partition, runs_on."""
        return [
            {
                "index": row.index,
                "site": row.site,
                "kind": row.kind,
                "partition": row.partition,
                "runs_on": row.predicted,
            }
            for row in self.operations
            if row.partition is not None
        ]

    def summary_rows(self) -> list[dict[str, object]]:
        """The figures that are compared from one audit to the next."""
        counts = Counter(row.predicted for row in self.operations)
        peak = self.peak
        figures = {
            "network": f"{self.model}, inputs {_shape_text(self.input_shapes)}",
            "chip": f"{self.chip} (HTP v{self.htp_arch})",
            "operations": len(self.operations),
            "predicted on the NPU / on the CPU / nothing to run": " / ".join(
                str(counts[verdict]) for verdict in (NPU, CPU, "folded")
            ),
            "partitions predicted": self.partitions,
            "bytes across cuts": self.cut_bytes,
            "GMAC": round(self.macs / 1e9, 3),
            "GMAC of interpolation": round(self.interpolation_macs / 1e9, 3),
            "parameter bytes": self.parameter_bytes,
            "peak activation bytes": self.peak_activation_bytes,
            "peak at": f"#{peak.index} {peak.kind} at {peak.place}" if peak else None,
        }
        return [{"figure": name, "value": value} for name, value in figures.items()]

    def __str__(self) -> str:
        left = Counter(row.kind for row in self.blocking())
        blocks = ", ".join(f"{count} {kind}" for kind, count in left.most_common()) or "nothing"
        return (
            f"{self.model} for {self.chip}: {len(self.operations)} operations, {self.macs / 1e9:.1f} GMAC, "
            f"{self.partitions} partition{'s' * (self.partitions != 1)} predicted, {blocks} on the CPU"
        )

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> AuditReport:
        return super().from_json({"operations": [], "cuts": [], **values})

    def _repr_html_(self) -> str:
        blocking = self.blocking_rows()
        return (
            html_table(self.summary_rows(), caption=str(self))
            + (html_table(blocking, caption="Would stay on the CPU") if blocking else "<p>Nothing blocks.</p>")
            + (html_table(self.cut_rows(), caption="What crosses between the pieces") if self.cuts else "")
            + _folded_away(f"{len(self.note_rows())} warnings", self.note_rows())
            + _folded_away("Operations by kind", self.kind_rows())
        )


def _table_row(row: OpRow) -> dict[str, object]:
    return {
        "#": row.index,
        "site": row.place,
        "kind": row.kind,
        "category": row.category,
        "inputs": _shape_text(row.input_shapes),
        "outputs": _shape_text(row.output_shapes),
        "rank": row.rank,
        "dtype": row.dtype,
        "MACs": row.macs,
        "interpolation MACs": row.interpolation_macs,
        "parameter bytes": row.parameter_bytes,
        "activation bytes": row.activation_bytes,
        "live bytes": row.live_bytes,
        "channels mod 32": row.channels_mod_32,
        "folded": row.folded,
        "predicted": row.predicted,
        "partition": row.partition,
        "reason": row.reason,
        "source": row.source,
        "notes": "; ".join(row.notes),
    }


def _kind_row(kind: str, rows: list[OpRow]) -> dict[str, object]:
    verdicts = Counter(row.predicted for row in rows)
    return {
        "kind": kind,
        "category": rows[0].category,
        "operations": len(rows),
        "GMAC": sum(row.macs for row in rows) / 1e9,
        "activation bytes": sum(row.activation_bytes for row in rows if row.runs and not row.view),
        "largest rank": max(row.rank for row in rows),
        "predicted": ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()),
    }


def _shape_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join("×".join(map(str, shape)) or "scalar" for shape in shapes)


def _folded_away(title: str, rows: list[dict[str, object]]) -> str:
    if not rows:
        return ""
    return f"<details><summary>{html.escape(title)}</summary>{html_table(rows, limit=60)}</details>"
