"""How many steps the emulated NPU is from the same QDQ file on the CPU: at the outputs, and operation by operation.

``torch_steps.py`` makes the same report of the graph in torch beside its file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lumen_lab.chips import Chip
from lumen_lab.deploy.emulation import emulate
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.layer_trace import fitting_inputs, with_outputs
from lumen_lab.deploy.model_file import node_key, node_sites, producers, read_onnx
from lumen_lab.deploy.qnn_graph import site_name
from lumen_lab.errors import ArtifactError, CompileError
from lumen_lab.specs import Record, html_table

if TYPE_CHECKING:
    import onnx

GIVEN = "_given"  # behind the name of a value that the NPU computed
MOST_COUNTED = 256  # steps: all that eight bits can be off
Inputs = np.ndarray | Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StepsOff(Record):
    """The differences in one tensor of integers, the NPU's minus the CPU's (or the CPU's minus torch's).

    ``counts``: how many values are off by 0, 1, 2 … steps; the last of ``MOST_COUNTED`` + 1 holds all that are further
    off. ``mean_steps`` keeps the sign: a bias towards one side.
    ``onnx_node`` and ``op_type`` are those of the operation that wrote it, ``site`` its torch module.
    """

    tensor: str
    counts: tuple[int, ...]
    max_steps: int
    mean_steps: float
    onnx_node: str = ""
    op_type: str = ""
    site: str | None = None

    @property
    def equal(self) -> float:
        """The share of values that are the same."""
        return self.counts[0] / sum(self.counts)

    @property
    def within_one(self) -> float:
        """The share of values that are at most one step off."""
        return sum(self.counts[:2]) / sum(self.counts)

    @property
    def within_two(self) -> float:
        """The share of values that are at most two steps off."""
        return sum(self.counts[:3]) / sum(self.counts)

    @property
    def grouped(self) -> tuple[int, int, int, int]:
        """How many are off by 0, 1, 2 and more steps."""
        first = (*self.counts[:3], 0, 0, 0)[:3]
        return (*first, sum(self.counts[3:]))

    def figures(self) -> dict[str, object]:
        """The shares for a table."""
        return {
            "equal": f"{self.equal:.2%}",
            "at most 1": f"{self.within_one:.2%}",
            "at most 2": f"{self.within_two:.2%}",
            "max": self.max_steps,
            "mean": round(self.mean_steps, 4),
        }


@dataclass(frozen=True)
class StepsReport(Record):
    """Emulation against CPU for one QDQ file; without a ``chip``, the CPU against torch.

    ``outputs``: what the network returns, over all samples. ``operations``: every tensor of integers inside, each
    operation given what the *NPU* (or torch) wrote before it, so that its difference is its own and no heritage; empty
    where only the outputs were compared.
    """

    model: str
    chip: str
    samples: int
    outputs: tuple[StepsOff, ...]
    operations: tuple[StepsOff, ...] = ()

    @property
    def compared(self) -> str:
        """Which two executions, in words."""
        return f"emulated for {self.chip} against the CPU" if self.chip else "on the CPU against torch"

    @property
    def first(self) -> StepsOff | None:
        """The first operation, in the order of the graph, that is off by itself."""
        return next((row for row in self.operations if row.max_steps), None)

    def worst(self, count: int = 10) -> list[StepsOff]:
        """The operations that are furthest off by themselves, then most often."""
        return sorted(self.operations, key=lambda row: (-row.max_steps, row.equal))[:count]

    def by_op_type(self) -> list[dict[str, object]]:
        """The operations by kind: how many, which share of their values is off, and towards which side."""
        groups: dict[str, list[StepsOff]] = {}
        for row in self.operations:
            groups.setdefault(row.op_type, []).append(row)
        return [
            {
                "op type": kind,
                "operations": len(rows),
                "off": f"{1 - np.mean([row.equal for row in rows]):.2%}",
                "off, worst": f"{1 - min(row.equal for row in rows):.2%}",
                "max": max(row.max_steps for row in rows),
                "mean": round(float(np.mean([row.mean_steps for row in rows])), 4),
            }
            for kind, rows in sorted(groups.items(), key=lambda item: np.mean([row.equal for row in item[1]]))
        ]

    def rows(self) -> list[dict[str, object]]:
        """One dict a tensor, the outputs first."""
        return [_row(row, "output") for row in self.outputs] + [_row(row, "operation") for row in self.operations]

    def __str__(self) -> str:
        shares = "; ".join(
            f"{row.tensor} {row.equal:.1%} equal, {row.within_one:.1%} within 1, max {row.max_steps}"
            for row in self.outputs
        )
        first = f"; off by itself first: {self.first.op_type} at {site_name(self.first.site)}" if self.first else ""
        return f"{self.model} {self.compared}, {self.samples} samples: {shares}{first}"

    def _repr_html_(self) -> str:
        head = html_table([_row(row, "output") for row in self.outputs], caption=str(self))
        if not self.operations:
            return head
        worst = html_table([_row(row, "operation") for row in self.worst()], caption="Furthest off by themselves")
        given = f"Each operation given what {'the NPU' if self.chip else 'torch'} wrote before it"
        return head + html_table(self.by_op_type(), caption=given) + worst


def _row(row: StepsOff, what: str) -> dict[str, object]:
    place = {"what": what, "tensor": row.tensor, "op type": row.op_type, "site": site_name(row.site)}
    return place | row.figures()


def output_steps(
    onnx_path: str | Path, context_path: str | Path, samples: Inputs | Sequence[Inputs], *, progress: bool = False
) -> StepsReport:
    """The outputs of a compiled QDQ file in the emulation beside those of the file on the CPU, for each sample.

    ``context_path`` is that of its compile report. Graph optimisation is off on the CPU, whose fused kernels saturate
    on some machines. ``ArtifactError`` if the outputs are no integers, or if context and file do not fit.
    """
    from lumen_lab.specs import Manifest

    model = read_onnx(onnx_path)
    several = samples if isinstance(samples, Sequence) else [samples]
    arrays = [fitting_inputs(model, sample) for sample in several]
    manifest = Manifest.beside(context_path)
    expected, found = on_cpu(with_outputs(onnx_path, []), arrays), emulate(context_path, arrays, progress=progress)
    outputs = [value.name for value in model.graph.output]
    writers = writing_operations(model)
    return StepsReport(
        model=Path(onnx_path).name,
        chip=manifest.chip or "",
        samples=len(arrays),
        outputs=tuple(steps_of(writers, name, expected, found) for name in outputs),
    )


def operation_steps(
    onnx_path: str | Path,
    chip: str | Chip,
    inputs: Inputs,
    *,
    out_dir: str | Path | None = None,
    time_limit_s: float = 1800,
    progress: bool = False,
) -> StepsReport:
    """As ``output_steps`` for one sample, and what each operation inside is off by itself.

    All tensors of integers become outputs of a copy, which is compiled for ``chip`` and emulated; the CPU then computes
    every operation from what the NPU gave to it. An output must exist, so that the compiler cannot fuse across it: the
    network itself may differ a little. All tensors are held at once. ``CompileError`` if a part stays on the CPU.
    """
    model = read_onnx(onnx_path)
    arrays = fitting_inputs(model, inputs)
    writers = writing_operations(model)
    tensors = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    probed = with_outputs(onnx_path, [value_called(name) for name in tensors])
    with tempfile.TemporaryDirectory(prefix="lumen_steps_") as temporary:
        folder = Path(out_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{Path(onnx_path).stem}_operations.onnx"
        path.write_bytes(probed.SerializeToString())
        limits = {"time_limit_s": time_limit_s, "progress": progress}
        report = compile_for_chip(path, chip, out_dir=folder, traffic=False, **limits)
        if report.cpu_nodes:
            raise CompileError(f"{report}; operations on the CPU are not the NPU's: compile it whole first.")
        found = [emulate(report.context_path, arrays, **limits)]
    given = {f"{name}{GIVEN}": found[0][name] for name in tensors}
    own = on_cpu(on_given_values(probed, tensors), [arrays | given])
    whole = on_cpu(probed, [arrays])
    return StepsReport(
        model=Path(onnx_path).name,
        chip=report.chip,
        samples=1,
        outputs=tuple(steps_of(writers, value.name, whole, found) for value in model.graph.output),
        operations=tuple(steps_of(writers, name, own, found) for name in tensors),
    )


def value_called(name: str) -> onnx.ValueInfoProto:
    """A value by its name."""
    import onnx

    return onnx.ValueInfoProto(name=name)


def on_given_values(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """A copy in which every reader of ``tensors`` (outputs of the model, typed) reads a further input instead."""
    import onnx

    copy = onnx.ModelProto.FromString(model.SerializeToString())
    kinds = {value.name: value for value in copy.graph.output}
    for node in copy.graph.node:
        for place, name in enumerate(node.input):
            if name in kinds and name in tensors:
                node.input[place] = f"{name}{GIVEN}"
    for name in tensors:
        value = onnx.ValueInfoProto.FromString(kinds[name].SerializeToString())
        value.name = f"{name}{GIVEN}"
        copy.graph.input.append(value)
    return copy


def on_cpu(model: onnx.ModelProto, samples: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """All outputs by name for each sample, computed by onnxruntime as the graph stands."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    asked = {value.name for value in session.get_inputs()}
    return [
        dict(zip(names, session.run(names, {key: value for key, value in sample.items() if key in asked}), strict=True))
        for sample in samples
    ]


def writing_operations(model: onnx.ModelProto) -> dict[str, dict[str, str | None]]:
    """What stands behind each tensor of integers, as the fields of ``StepsOff``."""
    writers, sites, found = producers(model), node_sites(model), {}
    for quantiser in (node for node in model.graph.node if node.op_type == "QuantizeLinear"):
        node = writers.get(quantiser.input[0])
        if node is not None:
            key = node_key(node)
            found[quantiser.output[0]] = {"onnx_node": key, "op_type": node.op_type, "site": sites.get(key)}
    return found


def steps_of(
    writers: Mapping[str, dict[str, str | None]],
    name: str,
    expected: Sequence[Mapping[str, np.ndarray]],
    found: Sequence[Mapping[str, np.ndarray]],
) -> StepsOff:
    """The differences in the tensor ``name`` over all samples."""
    if expected[0][name].dtype.kind not in "iu":
        raise ArtifactError(f"{name} holds {expected[0][name].dtype}, which has no steps; export it with integer ends.")
    pairs = zip(found, expected, strict=True)
    off = np.concatenate([(one[name].astype(np.int64) - other[name]).reshape(-1) for one, other in pairs])
    far = np.bincount(np.minimum(np.abs(off), MOST_COUNTED), minlength=3)
    return StepsOff(
        tensor=name,
        counts=tuple(int(count) for count in far),
        max_steps=int(np.abs(off).max(initial=0)),
        mean_steps=float(off.mean()) if off.size else 0.0,
        **writers.get(name, {}),
    )
