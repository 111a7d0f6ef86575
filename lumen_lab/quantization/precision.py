"""Which activations get 16 bits: the most error removed for each byte that it costs, under a budget.

A tensor is only as exact as those who read it allow: an operation has one width, so that 16 bits for a tensor mean 16
bits for the operation that makes it and for all that read it, and conversions where these meet 8 bits. Energies of
error are taken from the sensitivity of each tensor quantised alone, which add up as long as they are independent.

Bytes are counted from shapes: every operation reads its operands and writes its result once. What the NPU keeps in its
own memory costs less; the compiler's traffic is the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import live_nodes
from lumen_lab.quantization.node_rules import rule_of
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun
from lumen_lab.quantization.placing import (
    QUANTISER,
    put_quantisers,
    widths_in_words,
    without_quantisers,
)
from lumen_lab.quantization.rules import INPUT, TIED
from lumen_lab.quantization.sensitivity import Sensitivity, SensitivityRow, compared, in_db
from lumen_lab.specs import Record

POSITIONS_DB = ((0.1, 55.0), (0.9, 45.0), (1.0, 55.0))
"""Up to which position in the order of execution which SQNR a tensor alone must reach: errors near the input are
carried through everything, those near the output are seen as they are."""


@dataclass(frozen=True)
class PrecisionPick(Record):
    """One tensor that gets 16 bits. ``operations``: those that were not 16 bits wide yet and must be for its sake.

    ``error_removed``: the share of the whole error, summed over tensors, that goes with it; ``extra_bytes`` for one
    picture.
    """

    tensor: str
    site: str
    position: float
    alone_db: float | None
    threshold_db: float
    operations: tuple[str, ...]
    error_removed: float
    extra_bytes: int

    @property
    def reason(self) -> str:
        return (
            f"alone it leaves {in_db(self.alone_db)} dB where {self.threshold_db:g} are asked; 16 bits remove "
            f"{self.error_removed:.1%} of the error for {self.extra_bytes:,} bytes"
        )

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "tensor": self.tensor,
                "site": self.site or "(network)",
                "alone, dB": in_db(self.alone_db),
                "error removed": round(self.error_removed, 4),
                "extra bytes": self.extra_bytes,
                "operations": ", ".join(self.operations),
                "reason": self.reason,
            }
        ]


@dataclass(frozen=True)
class PrecisionChoice(Record):
    """``bits`` for ``put_quantisers``, the picks in order, and which tensors were passed over and why."""

    bits: Mapping[str, int]
    picks: tuple[PrecisionPick, ...]
    passed_over: Mapping[str, str]
    bytes_at_8_bits: int
    extra_bytes: int
    budget_bytes: int

    def rows(self) -> list[dict[str, object]]:
        return [row for pick in self.picks for row in pick.rows()]


def choose_precision(
    graph: NPUGraph,
    sensitivity: Sensitivity,
    *,
    budget_bytes: int,
    positions_db: Sequence[tuple[float, float]] = POSITIONS_DB,
    keep_at_8_bits: Iterable[str] = (),
) -> PrecisionChoice:
    """16 bits for tensors below their threshold, greedily by error removed per byte, within ``budget_bytes``.

    ``graph`` is the one at 8 bits, ``sensitivity`` that of its tensors. ``positions_db``: (up to which position, least
    SQNR alone in dB), in order. ``keep_at_8_bits``: names of operations, such as the input. Chips without 16-bit
    activations take none of this: all 8 bits is the only form that every chip runs.
    """
    noise = tensor_noise(sensitivity)
    moves = Moves(graph)
    found = Search(moves, noise, frozenset(keep_at_8_bits))
    asked = [row for row in sensitivity.entries if row.kind == "activation" and below(row, positions_db)]
    picks = found.within(asked, budget_bytes, positions_db)
    base = moves.total_bytes(frozenset())
    return PrecisionChoice(
        bits={name: 16 for name in moves.order if name in found.chosen},
        picks=tuple(picks),
        passed_over=found.passed_over,
        bytes_at_8_bits=base,
        extra_bytes=moves.total_bytes(found.chosen) - base,
        budget_bytes=budget_bytes,
    )


def tensor_noise(sensitivity: Sensitivity) -> dict[str, float]:
    """The energy of each activation's error alone."""
    noise = {row.name: row.noise for row in sensitivity.entries if row.kind == "activation"}
    if not noise:
        raise QuantizationError('The sensitivity has no tensors; measure it with by="tensor".')
    return noise


def threshold_db(position: float, positions_db: Sequence[tuple[float, float]]) -> float:
    """The least SQNR at a position."""
    for up_to, least_db in positions_db:
        if position <= up_to:
            return least_db
    raise QuantizationError(f"The thresholds end before position {position:.2f}; let the last reach 1.")


def below(row: SensitivityRow, positions_db: Sequence[tuple[float, float]]) -> bool:
    """Whether a tensor alone leaves less than its threshold."""
    return row.alone_db is not None and row.alone_db < threshold_db(row.position, positions_db)


# What is read and written


@dataclass
class Written:
    """A tensor: the operation that makes it, and what reads it: (operation, elements read, whether it is read in
    8 bits whatever the operation's width). ``sharing``: operations that write parts of it in its encoding."""

    maker: str
    elements: int
    sharing: list[str] = field(default_factory=list)
    readers: list[tuple[str, int, bool]] = field(default_factory=list)

    def operations(self) -> frozenset[str]:
        """All that must be 16 bits wide for the tensor to be."""
        return frozenset({self.maker, *self.sharing, *(name for name, _, _ in self.readers)})

    def in_8_bits(self) -> bool:
        """Whether someone reads it in 8 bits whatever is chosen."""
        return any(always for _, _, always in self.readers)

    def moved_bytes(self, wide: AbstractSet[str]) -> int:
        """Bytes written and read, with the conversion to the other width where some readers want it."""
        own = 2 if self.maker in wide else 1
        total, other = own * self.elements, 3 - own
        widths = [(2 if name in wide and not always else 1, elements) for name, elements, always in self.readers]
        converted = max((elements for width, elements in widths if width == other), default=0)
        return total + sum(width * elements for width, elements in widths) + (own + other) * converted


class Moves:
    """Who writes and reads which tensor, how many elements for one picture: operations fused with a ReLU are one.

    Resizes and moves of data are of their input's width; they count as part of the way to the reader.
    """

    def __init__(self, graph: NPUGraph):
        run = PartialRun(graph)
        live = live_nodes(graph.graph_module)  # a mask repeated for the batch is a constant
        self.counts = {node: count for node, count in run.element_counts(graph.size).items() if node in live}
        self.tensors: dict[str, Written] = {}
        self.order: list[str] = []
        self.sites = graph.sites()
        for node in run.nodes:
            if node in self.counts and node.op in ("placeholder", "call_function"):
                self.add(node)
        for node in self.counts:
            if node.op == "call_module" and (writer := node.args[0].name) in self.tensors:
                owner = node.target.removeprefix(QUANTISER)
                self.tensors[owner].sharing += [writer] if owner != writer else []
        self.reading: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            for operation in tensor.operations():
                self.reading.setdefault(operation, []).append(name)

    def add(self, node: fx.Node) -> None:
        """One operation: what it reads, and the tensor that it makes."""
        if node.op == "call_function" and rule_of(node).output not in (INPUT, TIED):
            self.add_reads(node)
        (user, *_) = node.users
        if user.op == "call_module" and (node.op == "placeholder" or rule_of(node).output != TIED):
            self.tensors[node.name] = Written(node.name, self.counts[node])
            self.order.append(node.name)

    def add_reads(self, node: fx.Node) -> None:
        (user, *_) = node.users
        operation = user.name if user.op == "call_function" else node.name  # a ReLU with no quantiser between
        for place, argument in enumerate(node.args):
            read: list[fx.Node] = []
            fx.map_arg(argument, read.append)
            for other in read:
                if other in self.counts and (source := self.source(other)) is not None:
                    always = place in rule_of(node).eight_bits
                    self.tensors[source].readers.append((operation, self.counts[other], always))

    def source(self, node: fx.Node) -> str | None:
        """The tensor that a node's value was moved or resized from; None inside a fused pair."""
        while node.name not in self.tensors:
            if node.op == "call_function" and rule_of(node).output not in (INPUT, TIED):
                return None
            node = node.all_input_nodes[0]
        return node.name

    def total_bytes(self, wide: AbstractSet[str]) -> int:
        """Bytes of activations moved for one picture with the operations ``wide`` in 16 bits."""
        return sum(tensor.moved_bytes(wide) for tensor in self.tensors.values())

    def extra_bytes(self, wide: AbstractSet[str], more: AbstractSet[str]) -> int:
        """What ``more`` operations in 16 bits cost beyond ``wide``."""
        touched = {name for operation in more for name in self.reading.get(operation, ())}
        return sum(
            self.tensors[name].moved_bytes(wide | more) - self.tensors[name].moved_bytes(wide) for name in touched
        )


# The search


@dataclass
class Search:
    """Greedy choice: what is 16 bits wide so far, and why tensors were passed over."""

    moves: Moves
    noise: Mapping[str, float]
    kept: frozenset[str]
    chosen: frozenset[str] = frozenset()
    passed_over: dict[str, str] = field(default_factory=dict)

    def within(
        self, asked: Sequence[SensitivityRow], budget_bytes: int, positions_db: Sequence[tuple[float, float]]
    ) -> list[PrecisionPick]:
        """Picks until nothing asked for is left that fits."""
        waiting = {row.name: row for row in asked if self.possible(row)}
        picks, left = [], budget_bytes
        while waiting:
            costs = {name: max(self.cost(name), 1) for name in waiting}
            fitting = [name for name in waiting if costs[name] <= left]
            if not fitting:
                break
            best = max(fitting, key=lambda name: self.removed(name) / costs[name])
            picks.append(self.pick(waiting.pop(best), positions_db))
            left -= picks[-1].extra_bytes
        for name in waiting:
            self.passed_over[name] = f"its {self.cost(name):,} bytes are more than the {left:,} left of the budget"
        return picks

    def possible(self, row: SensitivityRow) -> bool:
        """Whether a tensor can be 16 bits wide for all its readers; if not, the reason is kept."""
        tensor = self.moves.tensors[row.name]
        if tensor.in_8_bits():
            self.passed_over[row.name] = "it is the second factor of a product, which the NPU reads in 8 bits"
        elif kept := sorted(tensor.operations() & self.kept):
            self.passed_over[row.name] = f"{kept[0]} is to stay at 8 bits"
        return row.name not in self.passed_over

    def cost(self, name: str) -> int:
        return self.moves.extra_bytes(self.chosen, self.moves.tensors[name].operations())

    def removed(self, name: str) -> float:
        """The energy that goes: of the tensor, and of others for which nothing else was missing."""
        more = self.moves.tensors[name].operations() - self.chosen
        wide = self.chosen | more
        touched = {name, *(other for operation in more for other in self.moves.reading.get(operation, ()))}
        return sum(self.noise.get(other, 0.0) for other in touched if self.is_wide(other, wide)) - sum(
            self.noise.get(other, 0.0) for other in touched if self.is_wide(other, self.chosen)
        )

    def is_wide(self, name: str, wide: AbstractSet[str]) -> bool:
        tensor = self.moves.tensors[name]
        return tensor.operations() <= wide and not tensor.in_8_bits()

    def pick(self, row: SensitivityRow, positions_db: Sequence[tuple[float, float]]) -> PrecisionPick:
        more = self.moves.tensors[row.name].operations() - self.chosen
        removed, cost = self.removed(row.name) / sum(self.noise.values()), self.cost(row.name)
        self.chosen |= more
        least_db = threshold_db(row.position, positions_db)
        site = self.moves.sites[row.name]
        operations = tuple(name for name in self.moves.order if name in more)
        return PrecisionPick(row.name, site, row.position, row.alone_db, least_db, operations, removed, cost)


# Quality against bytes


@dataclass(frozen=True)
class ParetoPoint(Record):
    """One choice measured: bytes of activations moved for one picture, and the output against float."""

    budget_bytes: int
    moved_bytes: int
    wide_operations: int
    sqnr_db: float | None
    mask_error: float


@dataclass(frozen=True)
class ParetoCurve(Record):
    """Points by rising budget; the first is all 8 bits."""

    points: tuple[ParetoPoint, ...]
    pictures: int

    def rows(self) -> list[dict[str, object]]:
        return [row for point in self.points for row in point.rows()]


@torch.no_grad()
def measure_pareto(
    graph: NPUGraph,
    sensitivity: Sensitivity,
    pictures: Iterable[Tensor],
    *,
    budgets_bytes: Sequence[int],
    choose: Callable[..., PrecisionChoice] = choose_precision,
    progress: bool = True,
    **options,
) -> ParetoCurve:
    """The choice for every budget, put in place of ``graph``'s 8 bits and run on ``pictures``, with the ranges that the
    graph has.

    ``options`` go to ``choose_precision``.
    """
    from tqdm.auto import tqdm

    images = list(pictures)
    with graph.in_float():
        reference = torch.cat([graph(image) for image in images])
    points = []
    for budget in tqdm([0, *sorted(budgets_bytes)], desc="Precisions", unit="choice", disable=not progress):
        choice = choose(graph, sensitivity, budget_bytes=budget, **options)
        mixed = in_widths(graph, choice.bits) if choice.bits else graph
        outputs = torch.cat([mixed(image) for image in images])
        figures = compared(reference, outputs, masks=graph.ends_in_mask)
        moved = choice.bytes_at_8_bits + choice.extra_bytes
        points.append(ParetoPoint(budget, moved, len(choice.bits), *figures))
    return ParetoCurve(tuple(points), sum(len(image) for image in images))


def in_widths(graph: NPUGraph, bits: Mapping[str, int]) -> NPUGraph:
    """A copy of a calibrated ``graph`` with other widths, its weights and ranges."""
    placed = put_quantisers(without_quantisers(graph.graph_module), bits=bits)
    mixed = NPUGraph(placed, graph.size, graph.made_from, ends_in_mask=graph.ends_in_mask)
    mixed.carry_encodings(graph)
    mixed.made_from["bits"] = widths_in_words(bits)
    return mixed.train(graph.training)
