"""Every head of the decoder read off one picture, of the teacher in float and of a student in float or in integers.

Each reading is what the network really computed, and is checked where that can be done: of a float network, that the
gated features are what reaches the next stage; of an NPU graph, every value is taken from its own operation, on its
integer grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, fx, nn

from lumen_lab.distillation.head_readings import CODES, LEVELS, HeadReadings, NetworkReading, StageReading
from lumen_lab.distillation.transfer import TINY, at_size_of
from lumen_lab.errors import LumenError
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD, check_image, resize_image, to_network_input
from lumen_lab.network.decoder import resize
from lumen_lab.quantization.fake_quantize import FakeQuantize
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun
from lumen_lab.quantization.values import output_of
from lumen_lab.taps import Tap, tap

GATED = LEVELS[:-1]
BLOCK, GATE_FEATURES, GATE = "decoder.decoder_block{}", "decoder.gdt_convs_{}", "decoder.gdt_convs_attn_{}"
LATERAL, SIDE_HEAD, GRADIENT_HEAD = "decoder.lateral_block{}", "conv_ms_spvn_{}", "gdt_convs_pred_{}"
PASSED_ON_WITHIN = 1e-4  # of the largest value: float32 sums in another order


@dataclass
class Seen:
    """What was seen of one network: by stage, tensors (1, C, h, w); masks (1, 1, H, W)."""

    mask: Tensor
    features: dict[int, Tensor]
    gate_features: dict[int, Tensor]
    gate: dict[int, Tensor]
    gated: dict[int, Tensor]
    without: dict[int, Tensor]
    codes: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def read_heads(
    network: nn.Module,
    image: np.ndarray | Tensor,
    *,
    student: nn.Module | None = None,
    size: tuple[int, int] | None = None,
) -> HeadReadings:
    """Features, gates, side heads and contributions of every decoder stage on a picture, of one network or two.

    ``network``: a BiRefNet in eval mode, the teacher. ``student``: an NPU graph of one, or a float network, rewritten
    or not. ``image``: uint8 (H, W, 3), resized to ``size`` (by default the student graph's, else the network's own), or
    a normalised tensor (1, 3, H, W), taken as it is. ``LumenError`` for networks without such a decoder or in training
    mode, and for an image of a size that the student graph does not take.
    """
    given = network_input(network, image, student=student, size=size)
    seen = see_network(network, given)
    teacher = reading("teacher", seen, network.decoder)
    shown = shown_image(image, given)
    if student is None:
        return HeadReadings(shown, teacher)
    other = see_graph(student, given) if isinstance(student, NPUGraph) else see_network(student, given)
    read = reading("student", other, network.decoder)
    stages = tuple(replace(stage, error=error_map(other, seen, stage.level)) for stage in read.stages)
    return HeadReadings(shown, teacher, replace(read, stages=stages))


# The picture


def network_input(
    network: nn.Module,
    image: np.ndarray | Tensor,
    *,
    student: nn.Module | None = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """The picture as a normalised tensor (1, 3, H, W) where ``network`` is."""
    if not isinstance(image, Tensor):
        image = torch.from_numpy(to_network_input(check_image(image), size=size or own_size(network, student)))
    if image.ndim != 4 or image.shape[:2] != (1, 3) or not image.isfinite().all():
        raise LumenError(f"Heads are read on one finite picture (1, 3, H, W); found {tuple(image.shape)}.")
    if isinstance(student, NPUGraph) and tuple(image.shape[-2:]) != tuple(student.size):
        raise LumenError(
            f"The student takes pictures of {tuple(student.size)}, this one has {tuple(image.shape[-2:])}; "
            "give an image (uint8), or resize it."
        )
    return image.to(next(network.parameters()))


def own_size(network: nn.Module, student: nn.Module | None) -> tuple[int, int]:
    """(H, W) that a student's graph was made for, or the network is meant for; ``LumenError`` if neither says."""
    if isinstance(student, NPUGraph):
        return student.size
    config = getattr(network, "config", None)
    if config is None:
        raise LumenError(f"{type(network).__name__} does not say its image size; pass size=(H, W).")
    return config.image_size


def shown_image(image: np.ndarray | Tensor, given: Tensor) -> np.ndarray:
    """The picture to be looked at: uint8 (H, W, 3) at the network's size."""
    if not isinstance(image, Tensor):
        return resize_image(image, size=tuple(given.shape[-2:]))
    unit = given[0].cpu().float().numpy().transpose(1, 2, 0) * np.float32(IMAGENET_STD) + np.float32(IMAGENET_MEAN)
    return np.rint(255 * np.clip(unit, 0, 1)).astype(np.uint8)


# A network in float


def check_network(network: nn.Module) -> None:
    """``LumenError`` unless it is in eval mode and has the modules that are read."""
    modules = dict(network.named_modules())
    wanted = [BLOCK.format(level) for level in LEVELS]
    wanted += [path.format(level) for path in (GATE_FEATURES, GATE, LATERAL) for level in GATED]
    missing = [path for path in wanted if path not in modules]
    if missing:
        raise LumenError(f"Heads are read off a BiRefNet's decoder; {type(network).__name__} has no '{missing[0]}'.")
    if network.training:
        raise LumenError("Heads are read in eval mode, found a network in training mode; call .eval().")


@torch.no_grad()
def see_network(network: nn.Module, image: Tensor) -> Seen:
    """Every stage of a float network; the encoder runs once, the decoder once more for each stage left out."""
    check_network(network)
    paths = [BLOCK.format(level) for level in LEVELS]
    paths += [path.format(level) for path in (GATE_FEATURES, GATE, LATERAL) for level in GATED]
    with tap(network, ["decoder", *paths]) as taps:
        logits = network(image.to(next(network.parameters())))
    features = {level: taps[BLOCK.format(level)].outputs[0] for level in LEVELS}
    gate = {level: torch.sigmoid(taps[GATE.format(level)].outputs[0]) for level in GATED}
    gated = {level: features[level] * gate[level] for level in GATED}
    for level in GATED:
        check_passed_on(gated[level], taps, level)
    given = taps["decoder"].inputs[0]
    return Seen(
        mask=torch.sigmoid(logits),
        features=features,
        gate_features={level: taps[GATE_FEATURES.format(level)].outputs[0] for level in GATED},
        gate=gate,
        gated=gated,
        without={level: torch.sigmoid(without_stage(network.decoder, given, level)) for level in LEVELS},
    )


def check_passed_on(gated: Tensor, taps: Mapping[str, Tap], level: int) -> None:
    """``LumenError`` unless what the next block got is the gated features, resized, plus the lateral map."""
    lateral = taps[LATERAL.format(level)].outputs[0]
    expected = resize(gated, lateral.shape[-2:]) + lateral
    found = taps[BLOCK.format(level - 1)].inputs[0][0][:, : expected.shape[1]]
    apart = float((found - expected).abs().max())
    if not apart <= PASSED_ON_WITHIN * max(1.0, float(expected.abs().max())):
        raise LumenError(
            f"Stage {level} was expected to pass on its features times its gate; what the next stage got differs by up "
            f"to {apart:.2g}. This decoder works in another way, and its heads cannot be read here."
        )


def without_stage(decoder: nn.Module, given: tuple, level: int) -> Tensor:
    """Logits of the decoder on ``given`` with the features of one block set to zero, and so what it passes on."""
    block = decoder.get_submodule(f"decoder_block{level}")
    handle = block.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    try:
        return decoder(*given)
    finally:
        handle.remove()


# An NPU graph


@torch.no_grad()
def see_graph(graph: NPUGraph, image: Tensor) -> Seen:
    """Every stage of an NPU graph, on the grids of its integers."""
    nodes = graph_nodes(graph)
    run = PartialRun(graph)
    shown = {node for by_level in nodes.values() for node in by_level.values()}
    values = run.start(image=image.to(next(graph.parameters())))
    done, without = 0, {}
    for level in LEVELS:  # in order of execution, so that all before a stage is computed once
        node = nodes["gated"].get(level, nodes["features"][level])
        until = run.nodes.index(node) + 1
        run.advance(values, run.nodes[done:until], keep=shown)
        rest = values | {node: torch.zeros_like(values[node])}
        run.advance(rest, run.nodes[until:-1], keep={run.result})
        done, without[level] = until, as_mask(graph, rest[run.result])
    run.advance(values, run.nodes[done:-1], keep={*shown, run.result})
    found = {name: {level: values[node] for level, node in by_level.items()} for name, by_level in nodes.items()}
    return Seen(
        mask=as_mask(graph, values[run.result]), without=without, codes=all_codes(graph, nodes, values), **found
    )


def as_mask(graph: NPUGraph, output: Tensor) -> Tensor:
    return output if graph.ends_in_mask else torch.sigmoid(output)


def graph_nodes(graph: NPUGraph) -> dict[str, dict[int, fx.Node]]:
    """What of ``Seen`` → stage → the node that has it, behind its quantiser."""
    gates = {level: sigmoid_of(output_of(graph, GATE.format(level)), level) for level in GATED}
    return {
        "features": {level: output_of(graph, BLOCK.format(level)) for level in LEVELS},
        "gate_features": {level: output_of(graph, GATE_FEATURES.format(level)) for level in GATED},
        "gate": gates,
        "gated": {level: reader_of(gate, torch.ops.aten.mul.Tensor, level) for level, gate in gates.items()},
    }


def sigmoid_of(logits: fx.Node, level: int) -> fx.Node:
    return reader_of(logits, torch.ops.aten.sigmoid.default, level)


def reader_of(node: fx.Node, target: object, level: int) -> fx.Node:
    """The quantised result of the operation ``target`` that reads a value; ``LumenError`` if none does."""
    waiting = [node]
    for value in waiting:
        waiting += [user for user in value.users if user.op == "call_module"]  # quantisers behind it
        for user in value.users:
            if user.target is target:
                return next((one for one in user.users if one.op == "call_module"), user)
    raise LumenError(f"The gate of stage {level} was looked for in the graph, but no {target} reads '{node.name}'.")


def all_codes(
    graph: NPUGraph, nodes: Mapping[str, Mapping[int, fx.Node]], values: Mapping[fx.Node, Tensor]
) -> dict[int, dict[str, np.ndarray]]:
    """Stage → tensor → ``code_counts``, of what has an encoding."""
    found: dict[int, dict[str, np.ndarray]] = {level: {} for level in LEVELS}
    for name in ("features", "gate", "gated"):
        for level, node in nodes[name].items():
            quantiser = getattr(graph.graph_module, node.target) if node.op == "call_module" else None
            if isinstance(quantiser, FakeQuantize):
                found[level][name] = code_counts(quantiser, values[node])
    return found


def code_counts(quantiser: FakeQuantize, value: Tensor) -> np.ndarray:
    """How often each of 256 codes occurs in a tensor on the quantiser's grid, int64; 16 bits by their upper eight."""
    codes = quantiser.encoding.quantise(value.float().cpu().numpy()).astype(np.int64) >> (quantiser.bits - 8)
    return np.bincount(codes.ravel(), minlength=CODES)


# Both


@torch.no_grad()
def reading(name: str, seen: Seen, decoder: nn.Module) -> NetworkReading:
    """The record of what was seen; side and gradient masks are read by the heads of ``decoder``, the teacher's."""
    stages = []
    for level in LEVELS:
        gate, gated = seen.gate.get(level), seen.gated.get(level)
        stages.append(
            StageReading(
                level,
                features=array_of(seen.features[level]),
                without=map_of(seen.without[level]),
                gate=None if gate is None else map_of(gate),
                gated=None if gated is None else array_of(gated),
                side=probability(decoder, SIDE_HEAD.format(level), seen.features[level]),
                gradient=probability(decoder, GRADIENT_HEAD.format(level), seen.gate_features.get(level)),
                codes=seen.codes.get(level, {}),
            )
        )
    return NetworkReading(name, map_of(seen.mask), tuple(stages))


def probability(decoder: nn.Module, head: str, features: Tensor | None) -> np.ndarray | None:
    """What a head reads, as (h, w) in [0, 1]; None without the head, or for features of another width than its own."""
    module = getattr(decoder, head, None)
    if module is None or features is None:
        return None
    weight = next(module.parameters())
    return map_of(torch.sigmoid(module(features.to(weight)))) if weight.shape[1] == features.shape[1] else None


def error_map(student: Seen, teacher: Seen, level: int) -> np.ndarray | None:
    """(h, w) whose mean is ``transfer.feature_distance`` of what the stage passes on; None where widths differ."""
    actual, reference = (seen.gated.get(level, seen.features[level]).float().cpu() for seen in (student, teacher))
    if actual.shape[1] != reference.shape[1]:
        return None
    reference = at_size_of(actual, reference)
    spread = (reference - reference.mean((2, 3), keepdim=True)).square().sum(1)
    return map_of((actual - reference).square().sum(1, keepdim=True) / (spread.mean() + TINY / spread.numel()))


def array_of(value: Tensor) -> np.ndarray:
    """(1, C, h, w) as a float32 array (C, h, w) that cannot be written to."""
    array = value.detach()[0].float().cpu().numpy().copy()
    array.setflags(write=False)
    return array


def map_of(value: Tensor) -> np.ndarray:
    """(1, 1, h, w) as a float32 array (h, w) that cannot be written to."""
    return array_of(value)[0]
