"""A bad block made good before bits are spent: its weights rounded so that its output is nearest to the float block's.

Rounding each weight to the nearest step is not the best for the sum that they are part of. AdaRound (Nagel et al.,
2020) learns for each weight whether it goes up or down; BRECQ (Li et al., 2021) does so for a whole block at once,
against the block's float output. Only the block is run, on its inputs as the quantised network gives them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from lumen_lab.equivalence import sqnr_db
from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import attribute, is_weight, module_stack, sizes_only
from lumen_lab.quantization.encoding import Encoding
from lumen_lab.quantization.fake_quantize import WEIGHT_STEPS, FakeQuantize, WeightQuantize
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun, freeze_scale
from lumen_lab.quantization.placing import QUANTISER
from lumen_lab.specs import Record

STRETCH = 1.1, -0.1  # the sigmoid is stretched past 0 and 1 and clipped, so that both are reached (AdaRound, eq. 23)
WARM_UP = 0.2  # the share of steps in which no weight is urged to decide
SHARPNESS = 20.0, 2.0  # powers of the term that urges them, first and last (AdaRound, section 4)
SCALE_STEP = 1e-3  # how far a scale may go in one step, as a share of it
LARGEST_BYTES = 2**31


@dataclass(frozen=True)
class Reconstruction(Record):
    """What became of a block: SQNR in dB of its output on held-out pictures before and after; ``kept`` if it was left
    changed. ``weights_moved``: the share of its weights that are rounded another way than to the nearest."""

    block: str
    before_db: float
    after_db: float
    kept: bool
    weights_moved: float
    steps: int
    seed: int
    learnt_scales: bool
    seconds: float

    @property
    def reason(self) -> str:
        gain = self.after_db - self.before_db
        words = "it is kept" if self.kept else "the block is left as it was"
        return (
            f"{self.block}: {self.before_db:.2f} → {self.after_db:.2f} dB on held-out pictures ({gain:+.2f}); {words}"
        )

    def rows(self) -> list[dict[str, object]]:
        return [{**super().rows()[0], "gain_db": self.after_db - self.before_db, "reason": self.reason}]


class SoftRounding(nn.Module):
    """A weight between two neighbouring steps: scale · clip(floor(w / scale) + h), h in [0, 1] learnt.

    ``h`` begins where the weight is, so that the first forward is the float weight; the largest of each channel stays
    at its step, since the scale is counted from it.
    """

    def __init__(self, weight: Tensor, scale: Tensor):
        super().__init__()
        steps = weight.detach() / scale
        self.register_buffer("below", steps.floor())
        self.register_buffer("pinned", steps.abs() > WEIGHT_STEPS - 0.5)
        self.register_buffer("nearest", steps.round().clamp(-WEIGHT_STEPS, WEIGHT_STEPS))
        share = ((steps - self.below) - STRETCH[1]) / (STRETCH[0] - STRETCH[1])
        self.offset = nn.Parameter(torch.logit(share.clamp(0.01, 0.99)))

    def up(self) -> Tensor:
        """h: how far each weight is on its way to the step above."""
        high, low = STRETCH
        return (torch.sigmoid(self.offset) * (high - low) + low).clamp(0, 1)

    def steps(self, up: Tensor) -> Tensor:
        moved = (self.below + up).clamp(-WEIGHT_STEPS, WEIGHT_STEPS)
        return torch.where(self.pinned, self.nearest, moved)

    def forward(self, weight: Tensor, scale: Tensor) -> Tensor:
        return self.steps(self.up()) * scale

    def rounded(self) -> Tensor:
        """The steps decided on."""
        return self.steps((self.up() >= 0.5).float())

    def undecided(self, power: float) -> Tensor:
        """Σ 1 − |2h − 1|^power (AdaRound, eq. 24): nothing once each weight is at a step."""
        return ((1 - (2 * self.up() - 1).abs().pow(power)) * ~self.pinned).sum()


def reconstruct_block(
    graph: NPUGraph,
    block: str,
    pictures: Iterable[Tensor],
    held_out: Iterable[Tensor],
    *,
    reference: NPUGraph | None = None,
    steps: int = 400,
    batch: int = 2,
    learning_rate: float = 0.03,
    learn_scales: bool = False,
    decision: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Reconstruction:
    """Learn how to round the weights under the module path ``block``; ``graph`` is changed only if that helps.

    The target is the block's output in the float network (``reference``, by default this graph with its quantisers
    off); its inputs are captured from the quantised one for ``pictures`` (tensors (B, C, H, W)) and kept, at most
    ``LARGEST_BYTES``. ``learn_scales``: the scales of its activations too (LSQ). ``decision``: how strongly weights
    are urged to one of their two steps, beside an error that is 1 when all are rounded to the nearest. What is learnt
    is judged on ``held_out`` and put back if the block's SQNR did not rise. A changed graph has its float weights on
    their grid: compare it with the network from then on, not with ``graph.in_float()``. ``QuantizationError`` if no
    weight with scales lies under the path, or the inputs are too large.
    """
    started = time.perf_counter()
    part, how = Block(graph, block), Learning(steps, batch, learning_rate, decision, learn_scales, seed)
    train, test = (part.captured(reference or graph, some) for some in (pictures, held_out))
    before, before_db = part.snapshot(), part.sqnr_db(test)
    moved = part.write(learn(part, train, how, progress=progress))
    after_db = part.sqnr_db(test)
    if not after_db > before_db:
        part.restore(before)
    seconds = time.perf_counter() - started
    return Reconstruction(block, before_db, after_db, after_db > before_db, moved, steps, seed, learn_scales, seconds)


@dataclass(frozen=True)
class Learning:
    """How roundings are learnt."""

    steps: int
    batch: int
    learning_rate: float
    decision: float
    scales: bool
    seed: int


@dataclass(frozen=True)
class Example:
    """What goes into a block in the quantised network, and what comes out of it in the float one, for one picture."""

    inputs: Mapping[fx.Node, object]
    targets: Mapping[fx.Node, Tensor]


class Block:
    """The nodes of a graph that come from one module, with what they read and what others read of them."""

    def __init__(self, graph: NPUGraph, path: str):
        self.graph, self.path, self.run = graph, path, PartialRun(graph)
        run, inside = self.run, [node for node in self.run.nodes if self.comes_from(node)]
        self.nodes = [node for node in inside if node in run.open]
        within = set(self.nodes)
        reads = dict.fromkeys(other for node in self.nodes for other in node.all_input_nodes)
        self.inputs = [node for node in reads if node in run.open and node not in within]
        numbers = sizes_only(graph.graph_module)  # of the batch
        read_outside = [node for node in self.nodes if any(user not in within for user in node.users)]
        self.outputs = [node for node in read_outside if node not in numbers]
        self.weights = {node.target.removeprefix(QUANTISER): node for node in reads if self.is_rounded(node)}
        if not self.weights:
            raise QuantizationError(f"No weight with scales of its own lies under '{path}'; give a module's path.")

    def comes_from(self, node: fx.Node) -> bool:
        return any(path == self.path for path, _ in module_stack(node))

    def is_rounded(self, node: fx.Node) -> bool:
        """Whether a node is a weight on its grid (those that are computed from others are left alone)."""
        module = getattr(self.graph.graph_module, node.target) if node.op == "call_module" else None
        return isinstance(module, WeightQuantize) and is_weight(self.graph.graph_module, node.args[0])

    def weight(self, name: str) -> Tensor:
        return attribute(self.graph.graph_module, self.weights[name].args[0].target)

    @property
    def activations(self) -> list[FakeQuantize]:
        """The quantisers inside whose scales may be learnt."""
        targets = dict.fromkeys(node.target for node in self.nodes if node.op == "call_module")
        modules = [getattr(self.graph.graph_module, target) for target in targets]
        return [module for module in modules if isinstance(module, FakeQuantize) and not module.fixed]

    # Examples

    @torch.no_grad()
    def captured(self, reference: NPUGraph, pictures: Iterable[Tensor]) -> list[Example]:
        """An example for each picture."""
        examples, size = [], 0
        floats = Block(reference, self.path)
        for picture in (one for batch in pictures for one in batch.split(1)):
            inputs = self.values_at(self.inputs, picture, off=())
            targets = floats.values_at(floats.outputs, picture, off=floats.run.quantiser_targets)
            examples.append(Example(inputs, dict(zip(self.outputs, targets.values()))))
            size += sum(v.nbytes for v in (*inputs.values(), *targets.values()) if isinstance(v, Tensor))
            if size > LARGEST_BYTES:
                raise QuantizationError(
                    f"What '{self.path}' reads and writes takes more than {LARGEST_BYTES / 1e9:.0f} GB after "
                    f"{len(examples)} pictures; give fewer, or a smaller block."
                )
        if not examples:
            raise QuantizationError("Reconstruction was given no picture; it needs some to learn on and some held out.")
        return examples

    def values_at(self, nodes: Sequence[fx.Node], picture: Tensor, *, off: Container[str]) -> dict[fx.Node, object]:
        """The values of some nodes for one picture."""
        values = self.run.start(off, picture)
        last = self.run.nodes.index(self.nodes[-1])
        self.run.advance(values, self.run.nodes[: last + 1], off=off, keep=set(nodes))
        return {node: values[node] for node in nodes}

    def output(self, example: Example) -> list[Tensor]:
        """What the block makes of an example's inputs."""
        values = {node: value for node, value in self.run.fixed.items() if node not in self.rounded_nodes}
        values |= example.inputs
        self.run.advance(values, [*self.weights.values(), *self.nodes], keep=set(self.outputs))
        return [values[node] for node in self.outputs]

    @property
    def rounded_nodes(self) -> set[fx.Node]:
        return set(self.weights.values())

    @torch.no_grad()
    def sqnr_db(self, examples: Sequence[Example]) -> float:
        """SQNR of the block's outputs over all examples, in dB."""
        self.run = PartialRun(self.graph)
        return sqnr_db(
            [pair for example in examples for pair in zip(example.targets.values(), self.output(example), strict=True)]
        )

    # Learning

    def snapshot(self) -> tuple[dict[str, Tensor], list[Encoding]]:
        """Weights and encodings, to be put back."""
        weights = {name: self.weight(name).detach().clone() for name in self.weights}
        return weights, [quantiser.encoding for quantiser in self.activations]

    @torch.no_grad()
    def restore(self, held: tuple[dict[str, Tensor], list[Encoding]]) -> None:
        for name, weight in held[0].items():
            self.weight(name).copy_(weight)
        for quantiser, encoding in zip(self.activations, held[1]):
            quantiser.encoding = encoding

    def soft_roundings(self) -> dict[str, SoftRounding]:
        """One for each weight, where rounding to the nearest begins."""
        scales = {name: self.run.fixed[node.args[1]] for name, node in self.weights.items()}
        return {name: SoftRounding(self.weight(name), scale) for name, scale in scales.items()}

    @torch.no_grad()
    def write(self, roundings: Mapping[str, SoftRounding]) -> float:
        """Put the rounded weights into the graph; returns the share that is not the nearest."""
        moved = total = 0
        for name, rounding in roundings.items():
            steps, scale = rounding.rounded(), self.run.fixed[self.weights[name].args[1]]
            self.weight(name).copy_(steps * scale)
            moved += int((steps != rounding.nearest).sum())
            total += steps.numel()
        return moved / total


def learn(block: Block, examples: Sequence[Example], how: Learning, *, progress: bool) -> dict[str, SoftRounding]:
    """Roundings of the block's weights, and if asked its scales in place, by Adam on the block's error."""
    from tqdm.auto import trange

    generator = torch.Generator().manual_seed(how.seed)
    roundings = block.soft_roundings()
    scale_of_error = max(mean_error(block, examples), 1e-12)  # of rounding to the nearest: errors are read beside it
    scales = block.activations if how.scales else []
    learnt = [quantiser for quantiser in scales if not isinstance(quantiser.scale, nn.Parameter)]
    for quantiser in scales:
        quantiser.learn_scale()
    optimiser = torch.optim.Adam(
        [
            {"params": [rounding.offset for rounding in roundings.values()], "lr": how.learning_rate},
            *({"params": [q.scale], "lr": SCALE_STEP * float(q.scale.detach())} for q in scales),
        ]
    )
    bar = trange(how.steps, desc=block.path, unit="step", disable=not progress)
    with block.graph.put_in_place(roundings), torch.enable_grad(), bar:
        for step in bar:
            chosen = torch.randint(len(examples), (how.batch,), generator=generator).tolist()
            optimiser.zero_grad()
            for place in chosen:
                (error(block, examples[place]) / (scale_of_error * how.batch)).backward()
            if step >= WARM_UP * how.steps:
                (how.decision * undecided(roundings, step / how.steps)).backward()
            optimiser.step()
    for quantiser in learnt:
        freeze_scale(quantiser)
    return roundings


def error(block: Block, example: Example) -> Tensor:
    """Σ over outputs of the squared error as a share of the target's energy."""
    pairs = zip(example.targets.values(), block.output(example), strict=True)
    return sum((target - made).square().sum() / target.square().sum().clamp_min(1e-12) for target, made in pairs)


@torch.no_grad()
def mean_error(block: Block, examples: Sequence[Example]) -> float:
    return float(sum(error(block, example) for example in examples)) / len(examples)


def undecided(roundings: Mapping[str, SoftRounding], progress: float) -> Tensor:
    """The share of weights between two steps, ever sharper as the learning goes on."""
    share = (progress - WARM_UP) / (1 - WARM_UP)
    power = SHARPNESS[1] + (SHARPNESS[0] - SHARPNESS[1]) * (1 + math.cos(math.pi * share)) / 2
    total = sum(rounding.offset.numel() for rounding in roundings.values())
    return sum(rounding.undecided(power) for rounding in roundings.values()) / total
