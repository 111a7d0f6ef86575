"""What an ONNX network computes at each torch site: on the CPU, and in the emulation of the NPU.

The tensors that leave each site become further outputs of a copy of the graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lumen_lab.chips import Chip
from lumen_lab.deploy.emulation import emulate
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.model_file import QUANTISERS, graph_inputs, read_onnx, tensor_specs
from lumen_lab.deploy.module_calls import ModuleCall, module_calls
from lumen_lab.equivalence import LayerTensor, LayerTrace
from lumen_lab.equivalence.layers import chosen_sites, finest_precision, given_inputs, require_sites
from lumen_lab.errors import ArtifactError
from lumen_lab.specs import writable_folder, write_whole

if TYPE_CHECKING:
    import onnx

NO_NODE = "no node carries this site (an identity, a constant, or fused with a neighbour)"
NOTHING_LEAVES = "nothing that depends on the input leaves this site"

Inputs = np.ndarray | Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SiteValue:
    """A value of the graph that leaves a call of a module, as the tensor ``name`` that holds it.

    ``name`` is the integers behind the value where it is quantised on its way, with their encoding; ``read_by`` the
    one kind of operator that reads it, "" where there are several.
    """

    call: ModuleCall
    output: int
    name: str
    scale: float | None = None
    zero_point: int | None = None
    read_by: str = ""


def trace_onnx(
    onnx_path: str | Path, inputs: Inputs, *, sites: Iterable[str] | None = None, name: str = "ONNX on CPU"
) -> LayerTrace:
    """Run an ONNX file on the CPU, its graph as it stands, and keep what leaves each torch module in it.

    Graph optimisation is off: fused kernels would compute another graph, and saturate in INT8 on some machines.
    Where a value is quantised as it leaves, its integers are kept with their encoding. ``inputs``: an array by input
    name, or the array itself where there is one. All tensors are held at once; ``sites`` limits them.
    ``ArtifactError`` for a file without torch sites, one over 2 GB, and inputs that do not fit.
    """
    sites = chosen_sites(sites)
    model = read_onnx(onnx_path)
    calls = asked_calls(model, sites, Path(onnx_path).name)
    values = list(site_values(model, calls))
    arrays = fitting_inputs(model, inputs)
    found = run_on_cpu(with_outputs(onnx_path, values), arrays, values)
    return as_trace(name, model, calls, values, found, sites, arrays)


def trace_emulation(
    onnx_path: str | Path,
    chip: str | Chip,
    inputs: Inputs,
    *,
    sites: Iterable[str] | None = None,
    out_dir: str | Path | None = None,
    name: str | None = None,
    time_limit_s: float = 1800,
    progress: bool = False,
) -> LayerTrace:
    """Compile an ONNX file for ``chip`` with further outputs at ``sites``, run it in the emulation, keep what leaves.

    What is measured is not quite what ships: an output is a tensor that must exist, so the compiler cannot fuse across
    it, and many of them make the compile slower and larger. Choose few sites, and compare the network's own output
    with and without them. A float network computes in float16. The artefact goes to ``out_dir`` (kept, and taken again
    if it fits) or to a temporary folder. Raises what ``compile_for_chip`` and ``emulate`` raise.
    """
    sites = chosen_sites(sites)
    model = read_onnx(onnx_path)
    calls = asked_calls(model, sites, Path(onnx_path).name)
    values = list(site_values(model, calls))
    arrays = fitting_inputs(model, inputs)
    limits = {"time_limit_s": time_limit_s, "progress": progress}
    with _folder(out_dir) as folder:
        probed = write_whole(
            folder / f"{Path(onnx_path).stem}_layers.onnx", with_outputs(onnx_path, values).SerializeToString()
        )
        report = compile_for_chip(probed, chip, out_dir=folder, reuse=out_dir is not None, **limits)
        found = emulate(report.context_path, arrays, **limits)
    left = f" ({len(report.cpu_nodes)} nodes on the CPU)" if report.cpu_nodes else ""
    trace = as_trace(name or f"emulated {report.chip}{left}", model, calls, values, found, sites, arrays)
    return replace(trace, precision="float16") if trace.precision == "float32" else trace


@contextmanager
def _folder(out_dir: str | Path | None) -> Iterator[Path]:
    if out_dir is not None:
        yield writable_folder(out_dir)
        return
    with tempfile.TemporaryDirectory(prefix="lumen_layers_") as temporary:
        yield Path(temporary)


def asked_calls(model: onnx.ModelProto, sites: Collection[str] | None, name: str) -> list[ModuleCall]:
    """The module calls at ``sites`` (None: all); ``LumenError`` for a site that no node carries."""
    calls = module_calls(model)
    require_sites(sites or (), dict.fromkeys(call.site for call in calls), name)
    return [call for call in calls if sites is None or call.site in sites]


def site_values(model: onnx.ModelProto, calls: Iterable[ModuleCall]) -> Iterator[SiteValue]:
    """The tensors to look at: for each value that leaves a call, its integers if that is all that is read of it."""
    encodings = activation_encodings(model)
    outputs = {value.name for value in model.graph.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    for call in calls:
        for number, value in enumerate(call.values):
            reading = readers.get(value, [])
            quantised = bool(reading) and value not in outputs and all(n.output[0] in encodings for n in reading)
            name = reading[0].output[0] if quantised else value
            kinds = operators_behind(value, readers) if value not in outputs else set()
            yield SiteValue(
                call, number, name, *encodings.get(name, (None, None)), "".join(kinds) if len(kinds) == 1 else ""
            )


def operators_behind(value: str, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> set[str]:
    """The kinds of operators that read a value, directly or through quantisers."""
    kinds: set[str] = set()
    for node in readers.get(value, ()):
        through = node.op_type in QUANTISERS
        kinds |= operators_behind(node.output[0], readers) if through else {node.op_type}
    return kinds


def activation_encodings(model: onnx.ModelProto) -> dict[str, tuple[float, int]]:
    """(scale, zero point) of the output of each QuantizeLinear whose encoding is one constant for the whole tensor."""
    return {node.output[0]: encoding for node, encoding in constant_encodings(model, "QuantizeLinear")}


def input_encodings(model: onnx.ModelProto) -> dict[str, tuple[float, int]]:
    """(scale, zero point) of each input that a DequantizeLinear of one constant encoding reads."""
    return {node.input[0]: encoding for node, encoding in constant_encodings(model, "DequantizeLinear")}


def constant_encodings(model: onnx.ModelProto, op_type: str) -> Iterator[tuple[onnx.NodeProto, tuple[float, int]]]:
    """Each node of this kind whose encoding is one constant for the whole tensor, with it."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != op_type or len(node.input) < 3 or not {*node.input[1:]} <= constants.keys():
            continue
        scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
        if scale.size == 1:
            yield node, (float(scale.reshape(())), int(zero_point.reshape(())))


def with_outputs(onnx_path: str | Path, values: Iterable[SiteValue]) -> onnx.ModelProto:
    """The whole model with ``values`` as further outputs, typed; weights beside the file are taken in.

    ``ArtifactError`` if it is too large for one file, or if a value's shape is not known.
    """
    import onnx

    model = onnx.load(onnx_path)
    known = {value.name for value in model.graph.output}
    wanted = [name for name in dict.fromkeys(value.name for value in values) if name not in known]
    typed = _typed(model.graph)
    if not set(wanted) <= typed.keys():
        typed = _typed(onnx.shape_inference.infer_shapes(model).graph)
    for name in wanted:
        if name not in typed:
            raise ArtifactError(f"The shape of {name} in {onnx_path} is not known, so it cannot be an output.")
        model.graph.output.append(typed[name])
    if model.ByteSize() >= 2**31:
        raise ArtifactError(f"{onnx_path} is over 2 GB with its weights, too large for one file; trace a smaller one.")
    return model


def _typed(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    return {value.name: value for value in graph.value_info if value.type.tensor_type.HasField("shape")}


def fitting_inputs(model: onnx.ModelProto, inputs: Inputs) -> dict[str, np.ndarray]:
    """The inputs by name in the graph's types; ``ArtifactError`` if names or shapes do not fit."""
    specs = tensor_specs(graph_inputs(model))
    given = inputs if isinstance(inputs, Mapping) else {specs[0].name: inputs}
    if set(given) != {spec.name for spec in specs}:
        expected = ", ".join(spec.name for spec in specs)
        raise ArtifactError(f"The graph takes {expected}, and {', '.join(given)} were given; give an array for each.")
    for spec in specs:
        if np.shape(given[spec.name]) != spec.shape:
            raise ArtifactError(f"Input {spec.name} has shape {spec.shape}, given {np.shape(given[spec.name])}.")
    return {spec.name: np.asarray(given[spec.name]).astype(spec.dtype, copy=False) for spec in specs}


def run_on_cpu(
    model: onnx.ModelProto, arrays: Mapping[str, np.ndarray], values: Iterable[SiteValue]
) -> dict[str, np.ndarray]:
    """The values by name, computed by onnxruntime with graph optimisation off."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = list(dict.fromkeys(value.name for value in values))
    return dict(zip(names, session.run(names, dict(arrays)), strict=True))


def as_trace(
    name: str,
    model: onnx.ModelProto,
    calls: Sequence[ModuleCall],
    values: Iterable[SiteValue],
    found: Mapping[str, np.ndarray],
    sites: Collection[str] | None,
    arrays: Mapping[str, np.ndarray],
) -> LayerTrace:
    """The arrays found, as the layers that they are; ``arrays`` went in."""
    layers = tuple(
        LayerTensor(
            site=value.call.site,
            call=value.call.call,
            output=value.output,
            values=found[value.name],
            kind=_kind(value.call),
            scale=value.scale,
            zero_point=value.zero_point,
            read_by=value.read_by,
        )
        for value in values
    )
    quantised = any(node.op_type in QUANTISERS for node in model.graph.node)
    encodings = input_encodings(model)
    return LayerTrace(
        name=name,
        precision="int8" if quantised else finest_precision(layers),
        layers=layers,
        absent={call.site: NOTHING_LEAVES for call in calls if not call.values},
        otherwise=NO_NODE,
        chosen=sites,
        inputs=given_inputs(arrays.values(), [encodings.get(name, (None, None)) for name in arrays]),
    )


def _kind(call: ModuleCall, limit: int = 3) -> str:
    more = " …" if len(call.op_types) > limit else ""
    return ", ".join(call.op_types[:limit]) + more
