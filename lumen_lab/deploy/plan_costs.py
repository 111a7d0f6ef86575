"""What rewrites buy: each alone, each left out of a plan, and whole plans, through the real compiler.

Compiling dozens of plans takes hours: every row is kept as it is made, and a run that was stopped goes on with those
that are missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

from lumen_lab.auditing import audit
from lumen_lab.chips import Chip, find_chip
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.onnx_export import code_sha256, export_onnx, shapes_in_words
from lumen_lab.deploy.report import CompileReport
from lumen_lab.deploy.toolchain import npu_versions
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.network.checkpoints import model_name, weights_sha256
from lumen_lab.rewrites.plan import Plan, check_order, inputs_for, rewrite
from lumen_lab.specs import Record, write_whole

ALONE, WITHOUT, WHOLE = "alone", "without", "whole"


@dataclass(frozen=True)
class PlanCase:
    """One plan to be measured: ``kind`` is "alone", "without" or "whole", ``about`` the rewrite or plan it tells of."""

    kind: str
    about: str
    plan: Plan

    @property
    def name(self) -> str:
        """A name that serves as a file's."""
        return f"{self.kind}_{self.about}"


def plan_cases(catalogue: Iterable, full: Mapping[str, Plan], whole: Mapping[str, Plan]) -> tuple[PlanCase, ...]:
    """The published network, every rewrite of ``catalogue`` alone, each left out of the plans ``full``, plans whole.

    A rewrite that cannot be left out, since another of the plan then has no place, is compiled like the others: what
    becomes of it is the answer.
    """
    cases = [PlanCase(WHOLE, "published", ()), *(PlanCase(WHOLE, name, plan) for name, plan in whole.items())]
    cases += [PlanCase(ALONE, rule.name, (rule,)) for rule in catalogue]
    for name, plan in full.items():
        cases += [PlanCase(WITHOUT, f"{rule.name}_from_{name}", without(plan, rule.name)) for rule in plan]
    for case in cases:
        check_order(case.plan)
    return tuple(cases)


def without(plan: Plan, name: str) -> Plan:
    """The plan with the rewrite of that name left out."""
    return tuple(rule for rule in plan if rule.name != name)


@dataclass(frozen=True)
class PlanCost(Record):
    """One plan on one chip, as compiled: bytes are of one inference, ``tiles`` counts the operations HTP runs.

    ``macs`` and ``peak_activation_bytes`` come from the audit of the rewritten network (float32), the rest from the
    compiler; where it gave up, ``error`` holds its sentence and the figures are None.
    """

    kind: str
    about: str
    rewrites: tuple[str, ...]
    chip: str
    htp_arch: int
    macs: int
    peak_activation_bytes: int
    partitions: int | None = None
    cpu_nodes: int | None = None
    qnn_ops: Mapping[str, int] = field(default_factory=dict)
    binary_bytes: int | None = None
    compile_s: float | None = None
    compiler_memory_bytes: int | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    tiles: int | None = None
    error: str = ""

    def rows(self) -> list[dict[str, object]]:
        moved = None if self.dram_read_bytes is None else self.dram_read_bytes + self.dram_write_bytes
        return [
            {
                "case": self.kind,
                "plan or rewrite": self.about,
                "chip": f"{self.chip} (v{self.htp_arch})",
                "partitions": self.partitions,
                "on the CPU": self.cpu_nodes,
                "QNN ops": sum(self.qnn_ops.values()) or None,
                "GMAC": round(self.macs / 1e9, 3),
                "peak activations, MB": round(self.peak_activation_bytes / 1e6, 1),
                "DRAM, MB": None if moved is None else round(moved / 1e6, 1),
                "tiles": self.tiles,
                "binary, MB": None if self.binary_bytes is None else round(self.binary_bytes / 1e6, 1),
                "compile, s": None if self.compile_s is None else round(self.compile_s, 1),
                "error": self.error,
            }
        ]

    def picked_row(self) -> dict[str, object]:
        """The row that a picker of rewrites shows while this plan, or this rewrite alone, is picked."""
        (row,) = self.rows()
        shown = ("chip", "partitions", "on the CPU", "QNN ops", "DRAM, MB", "tiles", "binary, MB")
        return {"plan": self.about, **{name: row[name] for name in shown}}


@dataclass(frozen=True)
class CostTable(Record):
    """Costs of many plans on many chips, with what they were measured on."""

    network: str
    weights_sha256: str
    input_shapes: str
    versions: dict[str, str]
    command: str
    costs: tuple[PlanCost, ...]

    def rows(self) -> list[dict[str, object]]:
        return [row for cost in self.costs for row in cost.rows()]

    def whole_rows(self) -> list[dict[str, object]]:
        """The rows of plans whole."""
        return [row for row in self.rows() if row["case"] == WHOLE]

    def of(self, kind: str, chip: str, about: str | None = None) -> tuple[PlanCost, ...]:
        """The costs of one kind ("alone", "without", "whole") on one chip, of one plan or of all."""
        return tuple(c for c in self.costs if (c.kind, c.chip) == (kind, chip) and about in (None, c.about))


def measure_costs(
    network: nn.Module,
    cases: Sequence[PlanCase],
    chips: Sequence[str | Chip],
    *,
    out_dir: str | Path,
    example_inputs: tuple[Tensor, ...] | None = None,
    command: str = "",
    time_limit_s: float = 3600,
    progress: bool = True,
) -> CostTable:
    """Compile every case for every chip and return the table.

    ``out_dir`` keeps one JSON file a row, so that a run that was stopped goes on; a row made from another network,
    plan or version is measured again. Artefacts are not kept. A plan that the compiler refuses is a row with its
    error; a plan out of order raises ``RewriteError`` before anything is compiled.
    """
    from tqdm.auto import tqdm

    inputs = inputs_for(network, example_inputs)
    weights, out_dir = weights_sha256(network), Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    costs = []
    chips = [find_chip(chip) for chip in chips]
    with tqdm(total=len(cases) * len(chips), desc="Compiling plans", unit="plan", disable=not progress) as bar:
        for case in cases:
            costs += _case_costs(network, case, chips, inputs, weights, out_dir, time_limit_s, bar)
    return CostTable(model_name(network), weights, shapes_in_words(inputs), npu_versions(), command, tuple(costs))


def _case_costs(network, case, chips, inputs, weights, out_dir, time_limit_s, bar) -> list[PlanCost]:
    """One case on every chip; the rewritten network is exported only if a row is missing."""
    key = _key(case, weights, inputs)
    paths = {chip: out_dir / f"{case.name}_{chip.name}.json" for chip in chips}
    found = {chip: _earlier(path, key) for chip, path in paths.items()}
    if any(cost is None for cost in found.values()):
        rewritten = rewrite(network, case.plan, example_inputs=inputs).model
        with tempfile.TemporaryDirectory(dir=out_dir, prefix=".plan_") as folder:
            blank = _blank(case, rewritten, inputs)
            onnx_path = export_onnx(rewritten, Path(folder) / "plan.onnx", example_inputs=inputs)
            for chip in [chip for chip, cost in found.items() if cost is None]:
                bar.set_postfix_str(f"{case.about} for {chip.name}")
                cost = _compiled(replace(blank, chip=chip.name, htp_arch=chip.htp_arch), onnx_path, chip, time_limit_s)
                write_whole(paths[chip], json.dumps({"made_from": key, "cost": cost.to_json()}, indent=1) + "\n")
                found[chip] = cost
    bar.update(len(chips))
    return list(found.values())


def _key(case: PlanCase, weights: str, inputs: tuple[Tensor, ...]) -> str:
    """A hash of all that a row depends on."""
    parts = [[rule.expression for rule in case.plan], weights, shapes_in_words(inputs), code_sha256(), npu_versions()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _earlier(path: Path, key: str) -> PlanCost | None:
    """A row measured before from the same things."""
    try:
        held = json.loads(path.read_text())
        return PlanCost.from_json(held["cost"]) if held["made_from"] == key else None
    except (OSError, ValueError, KeyError, TypeError, ArtifactError):
        return None


def _blank(case: PlanCase, rewritten: nn.Module, inputs: tuple[Tensor, ...]) -> PlanCost:
    """What is known before compiling."""
    report = audit(rewritten, inputs, chip="SM8850")
    names = tuple(rule.expression for rule in case.plan)
    return PlanCost(case.kind, case.about, names, "", 0, report.macs, report.peak_activation_bytes)


def _compiled(blank: PlanCost, onnx_path: Path, chip: Chip, time_limit_s: float) -> PlanCost:
    """The row with the compiler's figures, or with its error."""
    out_dir = onnx_path.parent / chip.name
    try:
        report = compile_for_chip(onnx_path, chip, out_dir=out_dir, time_limit_s=time_limit_s, progress=False)
    except LumenError as error:
        return replace(blank, error=str(error).splitlines()[0])
    finally:
        shutil.rmtree(out_dir, ignore_errors=True)
    return with_figures(blank, report)


def with_figures(blank: PlanCost, report: CompileReport) -> PlanCost:
    """The row with what a compile report says."""
    traffic = report.traffic
    return replace(
        blank,
        partitions=report.partitions,
        cpu_nodes=len(report.cpu_nodes),
        qnn_ops=report.qnn_ops,
        binary_bytes=report.binary_bytes,
        compile_s=round(report.compile_s, 1),
        compiler_memory_bytes=report.peak_memory_bytes,
        dram_read_bytes=traffic and traffic.dram_read_bytes,
        dram_write_bytes=traffic and traffic.dram_write_bytes,
        tiles=traffic and traffic.tiles,
    )
