"""Equalised weights, corrected biases: ``python tests/benchmarks/corrections.py --json OUT.json [--sources SOURCES]``.

Neither is in the library: this measures what they would gain on micro, all 8 bits, min-max ranges by reader.

- Equalisation (Nagel et al., 2019, equation 11): a channel between two convs is scaled so that its weights have the
  same range before and behind it; a ReLU between them lets any positive factor through.
- Bias correction (the same, section 4.2, from data): what rounding the weights adds to each channel on average, taken
  off its bias. ``inputs rounded`` rounds what the layer reads as well.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from calibration_methods import against_float
from torch import Tensor, fx

import lumen_lab as lab
from lumen_lab.datasets import ComposedScenes, open_sources
from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import attribute
from lumen_lab.quantization.node_rules import op_name
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import encoding_source
from lumen_lab.specs import tool_versions, write_whole

CONV, RELU = "aten.conv2d.default", "aten.relu.default"
LAYERS = (CONV, "aten.linear.default")


def weight_of(graph: fx.GraphModule, node: fx.Node, place: int = 1) -> Tensor | None:
    """The float weight (or bias: 2) of a layer."""
    argument = node.args[place] if len(node.args) > place else None
    return None if argument is None else attribute(graph, argument.args[0].target)


def equalisable(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Convs, called once, whose output is read by ungrouped convs alone, through a ReLU or not."""
    convs = [node for node in graph.graph.nodes if node.op == "call_function" and op_name(node) == CONV]
    calls = [node.args[1].args[0].target for node in convs]
    for conv in convs:
        behind = next(iter(conv.users))
        if behind.op == "call_function" and op_name(behind) == RELU:
            behind = next(iter(behind.users))
        readers = list(behind.users)
        plain = all(r.op == "call_function" and op_name(r) == CONV and (*r.args, 1)[6:7] in ((), (1,)) for r in readers)
        once = all(calls.count(node.args[1].args[0].target) == 1 for node in (conv, *readers) if node in convs)
        if behind.op == "call_module" and readers and plain and once:
            yield conv, readers


@torch.no_grad()
def equalise(graph: NPUGraph) -> int:
    """Scale the channels between convs, in place; how many pairs."""
    module, count = graph.graph_module, 0
    for conv, readers in equalisable(module):
        first, bias = weight_of(module, conv), weight_of(module, conv, 2)
        behind = [weight_of(module, reader) for reader in readers]
        before = first.abs().flatten(1).amax(1)
        after = torch.stack([w.abs().transpose(0, 1).flatten(1).amax(1) for w in behind]).amax(0)
        factor = (before / after.clamp_min(1e-8)).sqrt().clamp(1 / 16, 16)
        first /= factor.view(-1, 1, 1, 1)
        if bias is not None:
            bias /= factor
        for weight in behind:
            weight *= factor.view(1, -1, 1, 1)
        count += 1
    return count


class LayerErrors(fx.Interpreter):
    """Runs the graph in float; for every layer, what rounding its weights (and inputs) adds to a channel on average."""

    def __init__(self, graph: fx.GraphModule, *, inputs: bool):
        super().__init__(graph, garbage_collect_values=False)
        self.inputs, self.sums = inputs, {}

    def run_node(self, node: fx.Node) -> object:
        if node.op == "call_module":  # no quantiser acts but those asked for below
            return self.env[node.args[0]]
        value = super().run_node(node)
        if node.op == "call_function" and op_name(node) in LAYERS:
            data, weight, *rest = self.fetch_args_kwargs_from_env(node)[0]
            weight = self.module.get_submodule(node.args[1].target)(weight, self.env[node.args[1].args[1]])
            if self.inputs:
                data = self.module.get_submodule(encoding_source(node.args[0]).target)(data)
            error = node.target(data, weight, *rest) - value
            channel = 1 if op_name(node) == CONV else error.ndim - 1
            mean = error.mean([axis for axis in range(error.ndim) if axis != channel])
            self.sums[node] = self.sums.get(node, 0) + mean
        return value


@torch.no_grad()
def correct_biases(graph: NPUGraph, pictures: list[Tensor], *, inputs: bool) -> int:
    """Take each layer's mean error off its bias, in place (of one called twice, that of its calls on average)."""
    errors = LayerErrors(graph.graph_module, inputs=inputs)
    for picture in pictures:
        errors.run(picture)
    calls: dict[str, list[fx.Node]] = {}
    for node in errors.sums:
        if weight_of(graph.graph_module, node, 2) is not None:
            calls.setdefault(node.args[2].args[0].target, []).append(node)
    for nodes in calls.values():
        mean = sum(errors.sums[node] for node in nodes) / (len(nodes) * len(pictures))
        weight_of(graph.graph_module, nodes[0], 2).sub_(mean)
    return len(calls)


def plan_rows(plan: str, pictures: list[Tensor], held_out: list[Tensor]) -> Iterator[dict[str, object]]:
    """A row for the graph as it is, and one for each way to change its weights."""
    student = lab.rewrite(lab.load_network("micro"), getattr(lab, plan)).model
    graph = lab.quantize(student, pictures, output="logits", progress=False)
    changes = {
        "neither": lambda changed: 0,
        "weights equalised": equalise,
        "biases corrected, weights rounded": partial(correct_biases, pictures=pictures, inputs=False),
        "biases corrected, weights and inputs rounded": partial(correct_biases, pictures=pictures, inputs=True),
    }
    for what, change in changes.items():
        changed = copy.deepcopy(graph)
        layers = change(changed)
        calibrate(changed, pictures, progress=False)
        yield {"plan": plan, "what": what, "layers": layers, **against_float(changed, held_out, reference=graph)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["EXACT_PLAN", "LUMEN_PLAN", "LEAN_PLAN"])
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--sources", type=Path, help="photographs of the bench; without, scenes are drawn")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    bank = open_sources(asked.sources) if asked.sources else drawn_sources()
    size = lab.load_network("micro").config.image_size
    pictures, held_out = (
        [scenes[number]["image"][None] for number in range(len(scenes))]
        for scenes in (
            ComposedScenes(bank, split="train", size=size, length=asked.pictures, seed=0),
            ComposedScenes(bank, split="test", size=size, length=asked.held_out, seed=1),
        )
    )
    rows = []
    for plan in asked.plans:
        for row in plan_rows(plan, pictures, held_out):
            rows.append(row)
            print(row, file=sys.stderr)
    header = {
        "command": " ".join(["python", "tests/benchmarks/corrections.py", *sys.argv[1:]]),
        "network": "micro, trained weights of the float network, 8 bits, min-max by reader, output in logits",
        "scenes": "composed of photographs" if asked.sources else "drawn",
        "versions": tool_versions("torch"),
    }
    write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
