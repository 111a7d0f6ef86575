"""How many steps a quantised graph in torch is from its QDQ file: at the output and every tensor inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx

from lumen_lab.deploy.layer_trace import with_outputs
from lumen_lab.deploy.model_file import read_onnx
from lumen_lab.deploy.qdq_builder import integers_of
from lumen_lab.deploy.steps_off import (
    GIVEN,
    StepsReport,
    on_cpu,
    on_given_values,
    steps_of,
    value_called,
    writing_operations,
)
from lumen_lab.errors import ArtifactError
from lumen_lab.quantization.encoding import Encoding
from lumen_lab.quantization.npu_graph import NPUGraph, PartialRun
from lumen_lab.quantization.placing import encoding_source


class QuantisedValues(fx.Interpreter):
    """Runs a graph and keeps what each quantiser makes of the operation that it follows, by that operation's name, and
    the value of ``result`` by its own."""

    def __init__(self, graph: fx.GraphModule, result: fx.Node):
        super().__init__(graph)
        self.result = result
        self.found: dict[str, Tensor] = {}

    def run_node(self, node: fx.Node) -> object:
        value = super().run_node(node)
        if node.op == "call_module":
            self.found.setdefault(node.args[0].name, value)
        if node is self.result:
            self.found[node.name] = value
        return value


@torch.no_grad()
def torch_steps(graph: NPUGraph, onnx_path: str | Path, pictures: Iterable[Tensor]) -> StepsReport:
    """The integers of ``graph``'s forward beside those of its QDQ file on the CPU, over all pictures together.

    ``pictures``: normalised (B, 3, H, W); both get them in the input's encoding. ``operations`` holds every tensor with
    an encoding of its own, each operation given the integers that *torch* wrote before it, so that its difference is
    its own: sums in another order, which end on the other side of a half. Graph optimisation is off. ``ArtifactError``
    for a file of another graph, or one with float ends.
    """
    model = read_onnx(onnx_path)
    (source,), (output,) = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    writers = writing_operations(model)
    result = PartialRun(graph).result
    ending = graph.graph_module.get_submodule(encoding_source(result).target).encoding
    inside = {name: integers_of(name) for name in graph.quantisers if integers_of(name) in writers}
    if source not in graph.quantisers or output not in writers:
        raise ArtifactError(f"{Path(onnx_path).name} is not this graph in integers, input to output; export it again.")
    encoding = graph.quantisers[source].encoding
    inputs = [encoding.quantise(picture.numpy()) for batch in pictures for picture in batch.split(1)]
    encodings = {name: graph.quantisers[own].encoding for own, name in inside.items()} | {output: ending}
    named = inside | {result.name: output}
    expected = [torch_integers(graph, named, encodings, encoding.dequantise(one)) for one in inputs]
    probed = with_outputs(onnx_path, [value_called(name) for name in inside.values()])
    given = [
        {source: one} | {f"{name}{GIVEN}": values[name] for name in inside.values()}
        for one, values in zip(inputs, expected, strict=True)
    ]
    own = on_cpu(on_given_values(probed, list(inside.values())), given)
    whole = on_cpu(model, [{source: one} for one in inputs])
    operations = tuple(steps_of(writers, name, expected, own) for name in (*inside.values(), output))
    outputs = (steps_of(writers, output, expected, whole),)
    return StepsReport(Path(onnx_path).name, "", len(inputs), outputs=outputs, operations=operations)


def torch_integers(
    graph: NPUGraph, tensors: Mapping[str, str], encodings: Mapping[str, Encoding], picture: np.ndarray
) -> dict[str, np.ndarray]:
    """What torch computes for one picture, by the names that the QDQ file gives the tensors."""
    run = QuantisedValues(graph.graph_module, PartialRun(graph).result)
    device = next((weight.device for weight in graph.parameters()), torch.device("cpu"))
    run.run(torch.from_numpy(picture).to(device))
    return {name: encodings[name].quantise(run.found[own].cpu().numpy()) for own, name in tensors.items()}
