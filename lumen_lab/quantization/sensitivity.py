"""What each part of a network loses to its integers: quantised alone, and left alone in float.

The two questions have two answers. *Quantised alone* is the noise that one part makes by itself, carried to the output
by a network that is otherwise exact: noises of independent sources add in energy, so these rows can be summed, and they
say where bits are missing. *Left alone in float* is what curing this one part would change while all others stay
quantised: it says what a cure buys now. They disagree where parts are not independent:

- error masking: what is made more exact is rounded again by the next quantiser, so a bad part followed by a coarser one
  gains nothing in float. A whole block in float (``groups``) shows it, its parts one by one do not;
- interaction: a shared cause (two tensors of one residual stream) is only cured by curing both, and errors of opposite
  sign cancel, so that leaving one part in float can even make the output worse;
- a total close to one dominant source hides all others: without it their order is another one.

Spend bits by the first, and check what was bought by the second (or better by the whole network).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx

from lumen_lab.equivalence import sqnr_db
from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import is_weight, live_nodes
from lumen_lab.quantization.fake_quantize import BiasQuantize
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun
from lumen_lab.quantization.placing import QUANTISER
from lumen_lab.specs import Record, writable_folder, write_whole

ALONE, LEFT_OUT = "alone", "left_out"
EXACT_DB = 200.0  # what an error of nothing counts as where ratios in dB are ordered or summed


@dataclass(frozen=True)
class SensitivityRow(Record):
    """One part of the network. ``kind``: "site", "group", or of one tensor "activation", "weight", "constant".

    SQNR in dB of the network's output against float (None: no difference), and the mean absolute difference of the
    mask, with this part ``alone`` quantised and with it alone ``left_out`` of quantising. ``position``: where in the
    order of execution it begins, from 0 to 1; ``elements``: activations that it writes for one picture.
    """

    name: str
    kind: str
    quantisers: tuple[str, ...]
    position: float
    elements: int
    alone_db: float | None = None
    alone_mask: float = 0.0
    left_out_db: float | None = None
    left_out_mask: float = 0.0

    @property
    def noise(self) -> float:
        """Energy of the error that this part makes alone, as a share of the output's."""
        return 0.0 if self.alone_db is None else 10 ** (-self.alone_db / 10)


@dataclass(frozen=True)
class Sensitivity(Record):
    """All parts in order of execution. ``all_db`` and ``all_mask``: the network with everything quantised."""

    entries: tuple[SensitivityRow, ...]
    all_db: float | None
    all_mask: float
    pictures: int
    made_from: str

    def rows(self) -> list[dict[str, object]]:
        """One dict a part: SQNR alone and left out, and what leaving it out gains."""
        return [
            {
                "part": row.name or "(network)",
                "kind": row.kind,
                "position": round(row.position, 3),
                "elements": row.elements,
                "alone, dB": in_db(row.alone_db),
                "alone, mask": row.alone_mask,
                "left out, dB": in_db(row.left_out_db),
                "gain, dB": round(self.gain_db(row), 2),
                "left out, mask": row.left_out_mask,
            }
            for row in self.entries
        ]

    def gain_db(self, row: SensitivityRow) -> float:
        """What the output's SQNR gains when this part is left in float."""
        return ordered_db(row.left_out_db) - ordered_db(self.all_db)

    def worst(self, count: int | None = 10, *, by: str = ALONE) -> tuple[SensitivityRow, ...]:
        """The ``count`` worst: the least SQNR "alone", or the greatest gain when "left_out"."""
        key = {ALONE: lambda row: ordered_db(row.alone_db), LEFT_OUT: lambda row: -self.gain_db(row)}
        if by not in key:
            raise QuantizationError(f"Parts are ordered by {ALONE!r} or {LEFT_OUT!r}, found {by!r}.")
        return tuple(sorted(self.entries, key=key[by])[:count])

    @property
    def sum_db(self) -> float:
        """What ``all_db`` would be if the errors of all parts were independent: their energies added."""
        return -10 * math.log10(max(sum(row.noise for row in self.entries), 10 ** (-EXACT_DB / 10)))

    def rank_correlation(self) -> float:
        """Spearman's between the noise a part makes alone and what leaving it out gains: 1 if both order alike."""
        alone = [-ordered_db(row.alone_db) for row in self.entries]
        return spearman(alone, [self.gain_db(row) for row in self.entries])


def measure_sensitivity(
    graph: NPUGraph,
    pictures: Iterable[Tensor],
    *,
    by: str = "site",
    groups: Sequence[str] = (),
    within: Sequence[str] = (),
    out_dir: str | Path | None = None,
    progress: bool = True,
) -> Sensitivity:
    """The sensitivity of every site (module), or by="tensor" of every tensor, of a calibrated graph.

    ``groups``: paths of modules whose sites become one row; ``within``: only parts of the modules at these paths.
    ``pictures``: tensors (B, C, H, W), run as one batch; what
    lies before a part is computed once for all, so that a part costs about half a run in each direction. Memory: the
    values that are still to be read at one place, for all pictures. ``out_dir`` keeps each figure as it is made; a run
    that was stopped goes on from there, if graph, encodings and pictures are the same. Biases (int32) are only part of
    sites.
    """
    from tqdm.auto import tqdm

    images = torch.cat(list(pictures))
    run = PartialRun(graph)
    parts = inside(within, parts_of(graph, run, by=by, groups=groups), graph.sites())
    made_from = sensitivity_key(graph, images, by, groups)
    kept = KeptFigures(None if out_dir is None else writable_folder(out_dir), made_from)
    with torch.no_grad(), tqdm(total=2 * len(parts), desc="Sensitivity", unit="run", disable=not progress) as bar:
        sweep = Sweep(run, images, parts, masks=graph.ends_in_mask)
        reference = sweep.output(off=sweep.everything)
        alone = sweep.figures(ALONE, reference, kept, bar)
        left_out = sweep.figures(LEFT_OUT, reference, kept, bar)
        everything = compared(reference, sweep.output(off=()), masks=graph.ends_in_mask)
    entries = tuple(
        replace(part, alone_db=a[0], alone_mask=a[1], left_out_db=b[0], left_out_mask=b[1])
        for part, a, b in ((part, alone[part.name], left_out[part.name]) for part in parts)
    )
    return Sensitivity(entries, *everything, len(images), made_from)


def compared(reference: Tensor, actual: Tensor, *, masks: bool = False) -> tuple[float | None, float]:
    """SQNR of two outputs in dB (None: no difference), and the mean absolute difference of the masks they stand for.

    Outputs are logits, or with ``masks`` the masks themselves.
    """
    ratio = sqnr_db([(reference, actual)])
    ends = (reference, actual) if masks else (reference.sigmoid(), actual.sigmoid())
    return None if ratio == math.inf else ratio, float((ends[0] - ends[1]).abs().mean())


# The parts


def parts_of(graph: NPUGraph, run: PartialRun, *, by: str, groups: Sequence[str] = ()) -> list[SensitivityRow]:
    """The parts to be measured, in order of execution, without figures."""
    calls, sites = graph.calls(), graph.sites()
    if by == "tensor":
        named = {name: (name,) for name, node in calls.items() if not is_bias(run, node)}
        live = live_nodes(run.module)  # a mask repeated for the batch is a constant
        kinds = {name: tensor_kind(run, calls[name], live) for name in named}
    elif by == "site":
        named, kinds = joined_sites(sites, groups)
    else:
        raise QuantizationError(f"Sensitivity is measured by 'site' or by 'tensor', found {by!r}.")
    counts, order = run.element_counts(graph.size), {node: place for place, node in enumerate(run.nodes)}
    written = Counter()
    for node in run.nodes:
        if node.op == "call_module" and node in run.open:
            written[node.target] += counts[node]
    rows = []
    for name, quantisers in named.items():
        place = min(first_use(run, order, calls[quantiser]) for quantiser in quantisers)
        elements = sum(written[calls[quantiser].target] for quantiser in quantisers)
        rows.append(SensitivityRow(name, kinds[name], quantisers, place / len(order), elements))
    return sorted(rows, key=lambda row: row.position)


def inside(paths: Sequence[str], parts: list[SensitivityRow], sites: Mapping[str, str]) -> list[SensitivityRow]:
    """The parts that belong to modules at ``paths``; all if there are none."""
    if not paths:
        return parts
    of = {part.name: {sites[quantiser] for quantiser in part.quantisers} for part in parts}
    for path in paths:
        if not any(lies_in(path, site) for found in of.values() for site in found):
            raise QuantizationError(f"No site lies in '{path}', which within gives; it takes paths of modules.")
    return [part for part in parts if all(any(lies_in(path, site) for path in paths) for site in of[part.name])]


def lies_in(path: str, site: str) -> bool:
    return site == path or site.startswith(f"{path}.")


def joined_sites(sites: Mapping[str, str], groups: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The quantisers of each site, those of sites inside a group put together, and the kind of each."""
    named: dict[str, tuple[str, ...]] = {}
    for quantiser, site in sites.items():
        part = max((path for path in groups if lies_in(path, site)), key=len, default=site)
        named[part] = (*named.get(part, ()), quantiser)
    if unknown := [path for path in groups if path not in named]:
        raise QuantizationError(f"No site lies in the group '{unknown[0]}'; groups are paths of modules.")
    return named, {part: "group" if part in groups else "site" for part in named}


def is_bias(run: PartialRun, node: fx.Node) -> bool:
    return isinstance(getattr(run.module, node.target), BiasQuantize)


def tensor_kind(run: PartialRun, node: fx.Node, live: Set[fx.Node]) -> str:
    """What a quantiser rounds."""
    if node in live:
        return "activation"
    return "weight" if is_weight(run.module, node.args[0]) else "constant"


def first_use(run: PartialRun, order: Mapping[fx.Node, int], node: fx.Node) -> int:
    """Where the value of a quantiser is first made or, if it is fixed, first read."""
    if node in run.open:  # one that several share is called for each
        return min(place for other, place in order.items() if other.target == node.target)
    return min((order[user] for user in node.users), default=order[node])


# Running them


class Sweep:
    """One walk through the graph for all parts: what lies before a part is computed once."""

    def __init__(self, run: PartialRun, images: Tensor, parts: Sequence[SensitivityRow], *, masks: bool):
        self.run, self.images, self.parts, self.masks = run, images, parts, masks
        self.everything = run.quantiser_targets

    def output(self, *, off: Set[str]) -> Tensor:
        """The network's output with the quantisers ``off`` doing nothing."""
        values = self.run.start(off, self.images)
        self.run.advance(values, self.run.nodes[:-1], off=off)
        return values[self.run.result]

    def figures(self, kind: str, reference: Tensor, kept: KeptFigures, bar) -> dict[str, tuple[float | None, float]]:
        """What each part alone quantised, or left out, does to the output; those ``kept`` are taken as they are."""
        base = self.everything if kind == ALONE else frozenset()
        values, done, found = self.run.start(base, self.images), 0, {}
        for part in self.parts:
            figures = kept.read(kind, part.name)
            if figures is None:
                place = round(part.position * len(self.run.nodes))
                self.run.advance(values, self.run.nodes[done:place], off=base)
                done = place
                output = self.branch(values, place, base ^ targets(part))
                figures = compared(reference, output, masks=self.masks)
                kept.write(kind, part.name, figures)
            found[part.name] = figures
            bar.update()
        return found

    def branch(self, values: Mapping[fx.Node, object], place: int, off: Set[str]) -> Tensor:
        """The output from ``place`` on, with other quantisers off than before it."""
        known = self.run.start(off) | {node: value for node, value in values.items() if node in self.run.open}
        self.run.advance(known, self.run.nodes[place:-1], off=off)
        return known[self.run.result]


def targets(part: SensitivityRow) -> frozenset[str]:
    """The modules of a part's quantisers."""
    return frozenset(QUANTISER + name for name in part.quantisers)


@dataclass(frozen=True)
class KeptFigures:
    """Figures as they are made, a file each, in ``folder`` (None: none is kept)."""

    folder: Path | None
    made_from: str

    def path(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind}_{hashlib.sha256(name.encode()).hexdigest()[:20]}.json"

    def read(self, kind: str, name: str) -> tuple[float | None, float] | None:
        """The figures of one part; None if there are none, or they were made of something else."""
        try:
            held = json.loads(self.path(kind, name).read_text()) if self.folder else {}
            return tuple(held["figures"]) if held["made_from"] == self.made_from and held["name"] == name else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, kind: str, name: str, figures: tuple[float | None, float]) -> None:
        if self.folder is not None:
            held = {"made_from": self.made_from, "name": name, "figures": figures}
            write_whole(self.path(kind, name), json.dumps(held) + "\n")


def sensitivity_key(graph: NPUGraph, images: Tensor, by: str, groups: Sequence[str]) -> str:
    """A hash of all that a figure depends on: operations, weights, encodings, pictures and parts."""
    digest = hashlib.sha256(json.dumps([graph.graph_module.code, by, sorted(groups)]).encode())
    for name, value in (*sorted(graph.state_dict().items()), ("images", images)):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


# Orders


def ordered_db(ratio: float | None) -> float:
    """A SQNR that can be ordered: no difference counts as ``EXACT_DB``."""
    return EXACT_DB if ratio is None else min(ratio, EXACT_DB)


def in_db(ratio: float | None) -> float | str:
    return "exact" if ratio is None else round(ratio, 2)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank (0 where one of them is constant)."""
    ranks = [mean_ranks(np.asarray(values, float)) for values in (one, other)]
    spread = ranks[0].std() * ranks[1].std()
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean() / spread) if spread else 0.0


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value from 0 on, equal ones at the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[group]
