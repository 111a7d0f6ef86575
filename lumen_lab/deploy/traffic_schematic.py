"""Reader of the schematic: the compiler's own list of what each HTP operation moves through DRAM and on-chip memory.

With ``profiling_level=optrace`` the compiler writes, while it finalises and without a run, one text file a partition,
``<graph name>_schematic.bin``, into the working directory. Neither the context binary nor its bytes change. The format
is undocumented; what is said here was found out with onnxruntime-qnn 2.7.0 (QAIRT 2.51), HTP v69 to v81:

- The file is a script of Python literals. Sections start in column 0; ids are hexadecimal.
- ``graph_before_optimization``: the QNN graph. An id such as 0x1a names an operation, 'q::QNN_Conv2d'; the two ends
  are 'q::Input' and 'q::Output' and have no name of their own.
- ``bandwidth_information``: one line an HTP operation that moves data: ``opid``, bytes read from and written to DRAM
  and VTCM, and whether the DMA engine does it. One line is called a *tile* here. Up to eight equal pieces that the
  vector units work through side by side are one line, their bytes together. No operation is listed twice, and a
  section with one twice is refused. Nothing says how many lines there are, nor what they sum up to, so that one which
  is missing as a whole cannot be seen.
- An HTP operation's id holds in its low 32 bits the id of the QNN operation that it was made for. A fused chain is
  booked on its last operation (the weights of a conv with a ReLU on the ReLU), a spill and its fill on the operation
  whose result went out to DRAM and came back. Where a constant of the network stands there (gamma and beta that two
  LayerNorms share), the tile is given here to the first operation that reads it.
- ``qnn_name_translations``: QNN operation id to name; the same names as in the QNN graph that is dumped as JSON.
- ``opdesc_map``: kind of every scheduled operation, '@Spill' and '@Fill' of VTCM included, which come up after
  the graph listings. "Number of OpDesc" says how many there are.
- The last line is ``#####  End of OpInfoRegisry dump``.

The option ``enable_framework_op_trace`` adds a file that maps a QNN operation to the node of the same name after
onnxruntime's own changes of layout, which says less than the names do already; it is not used.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lumen_lab.errors import ArtifactError
from lumen_lab.specs import Record

FIRST_LINE = b"# python_pprint_graph_summary"
LAST_LINE = b"End of OpInfoRegisry dump"
NODE = re.compile(
    rb"^\t(0x[0-9a-f]+): \{\n\t\t'operation':'([^']*)'.*?'inputs' : \[([^\]]*)\]", re.MULTILINE | re.DOTALL
)
SOURCE = re.compile(rb"\((0x[0-9a-f]+),\d+\)")
NAME = re.compile(rb"^(0x[0-9a-f]+): (['\"])(.*)\2,$", re.MULTILINE)
MOVED = re.compile(
    rb'^\{"opid" : (0x[0-9a-f]+) , "dram_read": (\d+) , "dram_write": (\d+) , "vtcm_read": (\d+) , '
    rb'"vtcm_write": (\d+), "is_dma": ([01])\},?$',
    re.MULTILINE,
)
SCHEDULED = re.compile(rb": opdesc\( (0x[0-9a-f]+), \"([^\"]*)\"")
LOW_BITS = 0xFFFFFFFF
MOST_BYTES = 2**60  # of one inference; sums beyond it would not be exact
INPUT, OUTPUT = "Input", "Output"  # kinds of the two ends of the graph
BYTE_COLUMNS = ("dram_read_bytes", "dram_write_bytes", "vtcm_read_bytes", "vtcm_write_bytes")


@dataclass(frozen=True)
class Tile(Record):
    """One HTP operation with the bytes that it moves; ``qnn_op`` is None for the ends of the graph."""

    name: str
    kind: str
    qnn_op: str | None
    qnn_kind: str
    dram_read_bytes: int
    dram_write_bytes: int
    vtcm_read_bytes: int
    vtcm_write_bytes: int
    is_dma: bool


@dataclass(frozen=True)
class Schematic:
    """A schematic as columns, one entry a tile, so that a million tiles take about 60 MB.

    ``ids`` are the HTP operations' ids, ``moved_bytes`` (tiles, 4) follows ``BYTE_COLUMNS``, ``kind_of`` points into
    ``kinds``. ``op_of`` are the ids of the QNN operations behind, and ``qnn_ops`` maps these to (name or None, kind).
    """

    graph_name: str
    qnn_ops: dict[int, tuple[str | None, str]]
    kinds: tuple[str, ...]
    ids: np.ndarray
    op_of: np.ndarray
    moved_bytes: np.ndarray
    is_dma: np.ndarray
    kind_of: np.ndarray

    def qnn_op(self, number: int) -> tuple[str | None, str]:
        """(name, kind) of a QNN operation by its id; (None, "") where the compiler names none."""
        return self.qnn_ops.get(int(number), (None, ""))

    def tiles(self) -> Iterator[Tile]:
        """Every tile as a record, in the order of the schedule."""
        for index, tile_id in enumerate(self.ids):
            qnn_op, qnn_kind = self.qnn_op(self.op_of[index])
            moved = (int(count) for count in self.moved_bytes[index])
            kind = self.kinds[self.kind_of[index]]
            yield Tile(f"{int(tile_id):#x}", kind, qnn_op, qnn_kind, *moved, bool(self.is_dma[index]))


def read_schematic(path: str | Path) -> Schematic:
    """The tiles in a schematic and the QNN operations behind them.

    The file is mapped, and only the sections that are needed are read: 0.6 s and 25 MB beside the mapped pages for
    110 MB with 46,000 tiles. ``ArtifactError`` if the file is missing, cut off, not a schematic, or of a version whose
    lines look different.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _require_whole(path, content)
            return _schematic(path, content)
    except (OSError, ValueError, OverflowError, BufferError) as error:  # an empty file cannot be mapped: ValueError
        raise ArtifactError(f"{path} cannot be read as a schematic of the compiler: {error}; {AGAIN}.") from None


AGAIN = "compile again, with traffic=True"


def _require_whole(path: Path, content: mmap.mmap) -> None:
    if content[: len(FIRST_LINE)] != FIRST_LINE:
        raise ArtifactError(
            f"{path} is not a schematic of the compiler: it starts with {bytes(content[:24])!r}, and not with "
            f"{FIRST_LINE.decode()!r}; {AGAIN}."
        )
    if content.rfind(LAST_LINE, max(0, len(content) - 200)) < 0:
        raise ArtifactError(
            f"{path} is cut off: its last line should be {LAST_LINE.decode()!r}; free disk space, and {AGAIN}."
        )


def _schematic(path: Path, content: mmap.mmap) -> Schematic:
    graph = _section(path, content, "graph_before_optimization = {", "# :::END:graph_before_optimization")
    moved = _section(path, content, "bandwidth_information = [", "\n]")
    names = _section(path, content, "qnn_name_translations = {", "\n}")
    graph_name = _section(path, content, 'qnn_graph_name = "', '"').decode()
    ids, moved_bytes, is_dma = _columns(path, moved)
    scheduled, kind_of, kinds = _scheduled(path, content)
    qnn_ops, reader = _qnn_graph(path, graph, names)
    return Schematic(
        graph_name=graph_name,
        qnn_ops=qnn_ops,
        kinds=kinds,
        ids=ids,
        op_of=_given_to_readers(ids & LOW_BITS, reader),
        moved_bytes=moved_bytes,
        is_dma=is_dma,
        kind_of=kind_of[_places(path, ids, scheduled)],
    )


def _section(path: Path, content: mmap.mmap, head: str, end: str) -> bytes:
    """What stands between the line that starts with ``head`` and the next ``end``."""
    start = content.find(b"\n" + head.encode())
    stop = content.find(end.encode(), start + len(head) + 1)
    if start < 0 or stop < 0:
        raise ArtifactError(f"{path} has no whole section {head.split(' ')[0]!r}: {OTHER_VERSION}.")
    return content[start + len(head) + 1 : stop]


OTHER_VERSION = "another version of the compiler seems to have written it; this reader knows onnxruntime-qnn 2.7"


def _columns(path: Path, section: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, moved bytes, is DMA) of the tiles; ``ArtifactError`` if a line is not read, stands twice, or is absurd."""
    numbers = (number for line in MOVED.finditer(section) for number in _numbers(line))
    rows = np.fromiter(numbers, dtype=np.int64).reshape(-1, 6)
    if len(rows) != sum(bool(line.strip()) for line in section.splitlines()):
        missed = re.search(rb"\S.*", MOVED.sub(b"", section))
        raise ArtifactError(
            f"{path} has a line of traffic that cannot be read, {missed[0][:120].decode(errors='replace')!r}: "
            f"{OTHER_VERSION}."
        )
    if len(np.unique(rows[:, 0])) != len(rows):
        raise ArtifactError(f"{path} lists the traffic of an operation twice; {AGAIN}.")
    if rows[:, 1:5].astype(np.float64).sum() > MOST_BYTES:
        raise ArtifactError(f"{path} lists more traffic than {MOST_BYTES:,} bytes; {AGAIN}.")
    return rows[:, 0], rows[:, 1:5], rows[:, 5].astype(bool)


def _numbers(line: re.Match[bytes]) -> tuple[int, ...]:
    tile_id, *counts = line.groups()
    return (int(tile_id, 16), *map(int, counts))


def _qnn_graph(path: Path, graph: bytes, names: bytes) -> tuple[dict[int, tuple[str | None, str]], dict[int, int]]:
    """(operation id: (name or None, kind), constant id: id of the first operation that reads it).

    The ends of the graph may carry more bits than 32 in their own id, which their tiles do not have.
    """
    named = {int(found[1], 16): found[3].decode() for found in NAME.finditer(names)}
    if len(named) != names.count(b"\n0x"):
        raise ArtifactError(f"{path} has names of QNN operations that cannot be read: {OTHER_VERSION}.")
    ops: dict[int, tuple[str | None, str]] = {number: (name, "") for number, name in named.items()}
    constants, reader = set(), {}
    for node in NODE.finditer(graph):
        number, kind = int(node[1], 16) & LOW_BITS, _kind(node[2].decode())
        if kind.startswith("$"):
            constants.add(number)
            continue
        ops[number] = (named.get(number), kind)
        for source in SOURCE.finditer(node[3]):
            reader.setdefault(int(source[1], 16), number)
    return ops, {number: reader[number] for number in constants & reader.keys()}


def _given_to_readers(op_of: np.ndarray, reader: dict[int, int]) -> np.ndarray:
    """The same QNN ids with each constant's replaced by its reader's."""
    numbers, place = np.unique(op_of, return_inverse=True)
    return np.array([reader.get(number, number) for number in numbers.tolist()], dtype=np.int64)[place]


def _kind(kind: str) -> str:
    return kind.removeprefix("q::").removeprefix("QNN_")


def _scheduled(path: Path, content: mmap.mmap) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(ids, index of the kind, kinds) of all scheduled operations."""
    start = content.find(b"\nopdesc_map")
    expected = re.search(rb"#Number of OpDesc = (\d+)", content[max(0, start - 400) : max(0, start)])
    numbers: dict[bytes, int] = {}
    found = (
        number
        for op in SCHEDULED.finditer(content, max(0, start))
        for number in (int(op[1], 16), numbers.setdefault(op[2], len(numbers)))
    )
    rows = np.fromiter(found, dtype=np.int64).reshape(-1, 2)
    if start < 0 or expected is None or len(rows) != int(expected[1]):
        raise ArtifactError(
            f"{path} lists {len(rows)} scheduled operations and announces "
            f"{int(expected[1]) if expected else 'no number'}: {OTHER_VERSION}."
        )
    return rows[:, 0], rows[:, 1], tuple(_kind(kind.decode()) for kind in numbers)


def _places(path: Path, ids: np.ndarray, scheduled: np.ndarray) -> np.ndarray:
    """Where in the schedule each tile is."""
    order = np.argsort(scheduled, kind="stable")
    places = np.searchsorted(scheduled, ids, sorter=order)
    if len(ids) and (len(scheduled) == 0 or places.max() == len(scheduled) or (scheduled[order[places]] != ids).any()):
        raise ArtifactError(f"{path} has traffic of operations that it does not schedule: {OTHER_VERSION}.")
    return order[places] if len(ids) else places.astype(np.int64)
