"""What a compiled network moves through memory: per HTP operation kind, QNN operation, ONNX node and torch site.

Bytes of DRAM are what a phone's memory bus carries for one inference, as the compiler plans it; a tile is one HTP
operation that moves data. Every byte is in exactly one row of every grouping: what nothing stands behind is a row of
its own, so that the sums of all groupings are the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lumen_lab.deploy.qnn_graph import QnnOp, partition_nodes, site_name
from lumen_lab.deploy.traffic_schematic import BYTE_COLUMNS, INPUT, OUTPUT, Schematic, read_schematic
from lumen_lab.errors import ArtifactError
from lumen_lab.specs import Record, html_table

if TYPE_CHECKING:
    import onnx

SPILL, FILL = "@Spill", "@Fill"
FIGURES = (*BYTE_COLUMNS, "tiles")
ENDS = {INPUT: "(network input)", OUTPUT: "(network output)"}
UNNAMED = "(made by the compiler)"


@dataclass(frozen=True)
class OpTraffic(Record):
    """Traffic of one QNN operation: the bytes of all its tiles.

    ``qnn_op`` is None for the ends of the graph (``qnn_kind`` "Input", "Output") and for what the compiler made
    without naming an operation. ``spilled_bytes`` and ``filled_bytes`` are the part of ``dram_write_bytes`` and
    ``dram_read_bytes`` that on-chip memory had no room for. ``onnx_node`` and ``site`` are None where unknown.
    """

    partition: int
    qnn_op: str | None
    qnn_kind: str
    tiles: int
    dram_read_bytes: int
    dram_write_bytes: int
    vtcm_read_bytes: int
    vtcm_write_bytes: int
    spilled_bytes: int = 0
    filled_bytes: int = 0
    onnx_node: str | None = None
    site: str | None = None


@dataclass(frozen=True)
class HtpKindTraffic(Record):
    """Traffic of all HTP operations of one kind, over all partitions: "ConvLayer.opt.weights_to_vtcm", "@Spill" …

    ``dma_tiles`` of the ``tiles`` are done by the DMA engine.
    """

    kind: str
    tiles: int
    dma_tiles: int
    dram_read_bytes: int
    dram_write_bytes: int
    vtcm_read_bytes: int
    vtcm_write_bytes: int


@dataclass(frozen=True)
class Traffic(Record):
    """Traffic of a whole network, all its partitions together."""

    ops: tuple[OpTraffic, ...]
    htp_kinds: tuple[HtpKindTraffic, ...]

    @property
    def tiles(self) -> int:
        """Number of HTP operations that move data."""
        return sum(op.tiles for op in self.ops)

    @property
    def dram_read_bytes(self) -> int:
        return sum(op.dram_read_bytes for op in self.ops)

    @property
    def dram_write_bytes(self) -> int:
        return sum(op.dram_write_bytes for op in self.ops)

    @property
    def dram_bytes(self) -> int:
        """Bytes read from and written to DRAM: the figure to bring down."""
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def vtcm_read_bytes(self) -> int:
        return sum(op.vtcm_read_bytes for op in self.ops)

    @property
    def vtcm_write_bytes(self) -> int:
        return sum(op.vtcm_write_bytes for op in self.ops)

    def __str__(self) -> str:
        read, written = self.dram_read_bytes / 1e6, self.dram_write_bytes / 1e6
        return f"DRAM: {read:.1f} MB read, {written:.1f} MB written; {self.tiles:,} tiles"

    def rows(self) -> list[dict[str, object]]:
        """The totals, one dict a figure."""
        return [
            {"figure": "DRAM read, bytes", "value": self.dram_read_bytes},
            {"figure": "of them filled back after a spill", "value": sum(op.filled_bytes for op in self.ops)},
            {"figure": "DRAM written, bytes", "value": self.dram_write_bytes},
            {"figure": "of them spilled", "value": sum(op.spilled_bytes for op in self.ops)},
            {"figure": "VTCM read, bytes", "value": self.vtcm_read_bytes},
            {"figure": "VTCM written, bytes", "value": self.vtcm_write_bytes},
            {"figure": "tiles", "value": self.tiles},
        ]

    def by_htp_kind(self) -> list[dict[str, object]]:
        """One dict a kind of HTP operation, most DRAM bytes first (as in every grouping here)."""
        return _grouped(self.htp_kinds, "HTP kind", lambda kind: kind.kind)

    def by_qnn_kind(self) -> list[dict[str, object]]:
        """One dict a kind of QNN operation."""
        return _grouped(self.ops, "QNN kind", lambda op: ENDS.get(op.qnn_kind) or op.qnn_kind or UNNAMED)

    def by_qnn_op(self) -> list[dict[str, object]]:
        """One dict a QNN operation; the ends of each partition are two of them."""
        return _grouped(self.ops, "QNN op", _op_name)

    def by_onnx_node(self) -> list[dict[str, object]]:
        """One dict an ONNX node; a fused chain is booked on its last node."""
        return _grouped(self.ops, "ONNX node", lambda op: _end(op) or op.onnx_node or _unjoined(op))

    def by_site(self, depth: int | None = None) -> list[dict[str, object]]:
        """One dict a torch module path, cut after ``depth`` names ("bb.layers.0" is depth 3); None: whole paths."""
        return _grouped(self.ops, "site", lambda op: _end(op) or _site(op, depth))

    def _repr_html_(self) -> str:
        return (
            html_table(self.rows(), caption="Traffic of one inference")
            + html_table(self.by_site(), caption="By torch site", limit=12)
            + html_table(self.by_htp_kind(), caption="By kind of HTP operation", limit=12)
        )


def read_traffic(folder: str | Path, context: onnx.ModelProto, ops: Iterable[QnnOp]) -> Traffic:
    """Traffic of the partitions of ``context``, from their schematics in ``folder``, joined to ``ops``.

    ``ArtifactError`` if a partition has no schematic or one that cannot be read.
    """
    known = {(op.partition, op.name): op for op in ops}
    schematics = [_schematic_of(Path(folder), node.name) for node in partition_nodes(context)]
    return Traffic(
        ops=tuple(row for index, each in enumerate(schematics) for row in _op_rows(index, each, known)),
        htp_kinds=_kind_rows(schematics),
    )


def _schematic_of(folder: Path, graph_name: str) -> Schematic:
    path = folder / f"{graph_name}_schematic.bin"
    if not path.is_file():
        raise ArtifactError(f"The compiler wrote no schematic of the partition {graph_name} (profiling_level=optrace).")
    schematic = read_schematic(path)
    if schematic.graph_name != graph_name:
        raise ArtifactError(f"{path} is the schematic of {schematic.graph_name}, not of {graph_name}; compile again.")
    return schematic


def _op_rows(partition: int, schematic: Schematic, known: Mapping[tuple[int, str], QnnOp]) -> list[OpTraffic]:
    """One row a QNN operation, in the order in which the operations are first scheduled."""
    numbers, first, place = np.unique(schematic.op_of, return_index=True, return_inverse=True)
    sums = _sums(schematic.moved_bytes, place, len(numbers))
    tiles = np.bincount(place, minlength=len(numbers))
    spilled, filled = (_bytes_of_kind(schematic, kind, place, len(numbers)) for kind in (SPILL, FILL))
    rows = []
    for index in np.argsort(first):
        name, kind = schematic.qnn_op(numbers[index])
        op = known.get((partition, name))
        rows.append(
            OpTraffic(
                partition,
                name,
                kind,
                int(tiles[index]),
                *sums[index].tolist(),
                spilled_bytes=int(spilled[index, 1]),
                filled_bytes=int(filled[index, 0]),
                onnx_node=op and op.onnx_node,
                site=op and op.site,
            )
        )
    return rows


def _sums(moved_bytes: np.ndarray, place: np.ndarray, groups: int) -> np.ndarray:
    """Bytes (groups, 4) of the tiles in each group, exact at any size."""
    sums = np.zeros((groups, 4), np.int64)
    np.add.at(sums, place, moved_bytes)
    return sums


def _bytes_of_kind(schematic: Schematic, kind: str, place: np.ndarray, groups: int) -> np.ndarray:
    if kind not in schematic.kinds:
        return np.zeros((groups, 4), np.int64)
    wanted = schematic.kind_of == schematic.kinds.index(kind)
    return _sums(schematic.moved_bytes[wanted], place[wanted], groups)


def _kind_rows(schematics: Iterable[Schematic]) -> tuple[HtpKindTraffic, ...]:
    """One row a kind of HTP operation, over all partitions, most DRAM bytes first."""
    totals: dict[str, np.ndarray] = {}
    for each in schematics:
        columns = np.concatenate([np.ones_like(each.ids)[:, None], each.is_dma[:, None], each.moved_bytes], axis=1)
        for index, kind in enumerate(each.kinds):
            wanted = each.kind_of == index
            if wanted.any():
                totals[kind] = totals.get(kind, 0) + columns[wanted].sum(0)
    rows = [HtpKindTraffic(kind, *figures.tolist()) for kind, figures in totals.items()]
    return tuple(sorted(rows, key=lambda row: -(row.dram_read_bytes + row.dram_write_bytes)))


def _end(op: OpTraffic) -> str | None:
    """What to call the traffic of a graph's end, which no operation of the network stands behind."""
    return ENDS.get(op.qnn_kind) if op.qnn_op is None else None


def _op_name(op: OpTraffic) -> str:
    return f"{op.qnn_op or _end(op) or UNNAMED}{f' (partition {op.partition})' if op.partition else ''}"


def _unjoined(op: OpTraffic) -> str:
    return UNNAMED if op.qnn_op is None else "(no ONNX node)"


def _site(op: OpTraffic, depth: int | None) -> str:
    if op.site is None:
        return UNNAMED if op.qnn_op is None else site_name(None)
    return site_name(".".join(op.site.split(".")[:depth]))


def _grouped(rows: Iterable[Record], column: str, key: Callable[[Record], str]) -> list[dict[str, object]]:
    """The figures of ``rows`` summed by ``key``, most DRAM bytes first, then most tiles."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        sums = groups.setdefault(key(row), [0] * len(FIGURES))
        for index, figure in enumerate(FIGURES):
            sums[index] += getattr(row, figure)
    ordered = sorted(groups.items(), key=lambda item: (-item[1][0] - item[1][1], -item[1][-1]))
    return [{column: name, **dict(zip(COLUMNS, sums, strict=True))} for name, sums in ordered]


COLUMNS = ("DRAM read, bytes", "DRAM written, bytes", "VTCM read, bytes", "VTCM written, bytes", "tiles")
