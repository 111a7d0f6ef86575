"""What rewrites buy: each alone, each left out of a plan, and whole plans, through the real compiler.

Compiling dozens of plans takes hours: every row is kept as it is made, and a run that was stopped goes on with those
that are missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor, nn

from lumen_lab.auditing import audit
from lumen_lab.chips import Chip, find_chip
from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.deploy.onnx_export import code_sha256, export_onnx, shapes_in_words
from lumen_lab.deploy.report import CompileReport
from lumen_lab.deploy.toolchain import npu_versions
from lumen_lab.errors import ArtifactError, LumenError, RewriteError
from lumen_lab.network.checkpoints import model_name, weights_sha256
from lumen_lab.rewrites.plan import Plan, check_order, inputs_for, rewrite
from lumen_lab.specs import Record, file_sha256, writable_folder, write_whole

ALONE, WITHOUT, WHOLE = KINDS = "alone", "without", "whole"
FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,119}")


@dataclass(frozen=True)
class PlanCase:
    """One plan to be measured: ``kind`` is "alone", "without" or "whole", ``about`` the rewrite or plan it tells of.

    ``RewriteError`` for another kind, and for an ``about`` that cannot be part of a file's name.
    """

    kind: str
    about: str
    plan: Plan

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RewriteError(f"A case is of kind {', '.join(KINDS)}, found {self.kind!r}; choose one.")
        if not (isinstance(self.about, str) and FILE_NAME.fullmatch(self.about)):
            raise RewriteError(
                f"A case is kept in a file of its name, found {self.about!r:.140}; use up to 120 letters, digits, _ - ."
            )

    @property
    def name(self) -> str:
        """A name that serves as a file's."""
        return f"{self.kind}_{self.about}"

    @property
    def expressions(self) -> tuple[str, ...]:
        """Python that makes each rewrite of the plan."""
        return tuple(rule.expression for rule in self.plan)


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
    """Costs of many plans on many chips, with what they were measured on.

    ``code_sha256``: the code of the networks and rewrites (``onnx_export.code_sha256``); "" where it was not kept.
    """

    network: str
    weights_sha256: str
    input_shapes: str
    versions: dict[str, str]
    command: str
    costs: tuple[PlanCost, ...]
    code_sha256: str = ""

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

    ``out_dir`` keeps one JSON file a row, so that a run that was stopped goes on: each plan is applied and exported
    anew, which takes seconds, and a row is taken as it is if it was made of that very graph with these versions of the
    compiler. Artefacts are not kept. A plan that the compiler refuses is a row with its error; one that ran out of
    time or memory is too, and is tried again in the next run. Plans out of order and cases of one name raise
    ``RewriteError`` before anything is compiled, a folder that cannot be written in ``ArtifactError``.
    """
    from tqdm.auto import tqdm

    for case in cases:
        check_order(case.plan)
    if twice := [name for name, count in Counter(case.name for case in cases).items() if count > 1]:
        raise RewriteError(f"Two cases are called {twice[0]}; rows are kept by that name: call one otherwise.")
    inputs = inputs_for(network, example_inputs)
    run = _Run(network, inputs, tuple(find_chip(chip) for chip in chips), writable_folder(out_dir), time_limit_s)
    remove_left_folders(run.out_dir)
    costs = []
    with tqdm(total=len(cases) * len(chips), desc="Compiling plans", unit="plan", disable=not progress) as bar:
        for case in cases:
            bar.set_postfix_str(case.about)
            for cost in run.costs(case):
                bar.update()
                costs.append(cost)
    return CostTable(
        network=model_name(network),
        weights_sha256=weights_sha256(network),
        input_shapes=shapes_in_words(inputs),
        versions=npu_versions(),
        command=command,
        costs=tuple(costs),
        code_sha256=code_sha256(),
    )


@dataclass(frozen=True)
class _Run:
    """What every case is compiled with."""

    network: nn.Module
    inputs: tuple[Tensor, ...]
    chips: tuple[Chip, ...]
    out_dir: Path
    time_limit_s: float

    def costs(self, case: PlanCase) -> Iterator[PlanCost]:
        """The row of one case on every chip; those that are missing are made and kept."""
        rewritten = rewrite(self.network, case.plan, example_inputs=self.inputs).model
        with scratch_folder(self.out_dir) as folder:
            onnx_path = export_onnx(rewritten, folder / "plan.onnx", example_inputs=self.inputs)
            made_from = row_key(onnx_path)
            blank = None
            for chip in self.chips:
                path = self.out_dir / f"{case.name}_{chip.name}.json"
                cost = earlier_row(path, made_from, case, chip)
                if cost is None:
                    blank = blank or _blank(case, rewritten, self.inputs)
                    cost = _compiled(blank, onnx_path, chip, self.time_limit_s)
                    write_whole(path, json.dumps({"made_from": made_from, "cost": cost.to_json()}, indent=1) + "\n")
                yield cost


def row_key(onnx_path: Path) -> str:
    """A hash of all that a row depends on: the exported graph with its weights, and the compiler."""
    return hashlib.sha256(json.dumps([file_sha256(onnx_path), npu_versions()]).encode()).hexdigest()


def earlier_row(path: Path, made_from: str, case: PlanCase, chip: Chip) -> PlanCost | None:
    """A row measured before from the same things; None if there is none that is whole, of this case, and final."""
    try:
        held = json.loads(path.read_text())
        cost = PlanCost.from_json(held["cost"]) if held["made_from"] == made_from else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArtifactError):
        return None
    of = cost and (cost.kind, cost.about, cost.rewrites, cost.chip, cost.htp_arch)
    wanted = case.kind, case.about, case.expressions, chip.name, chip.htp_arch
    return cost if of == wanted and is_final(cost.error) else None


def is_final(error: str) -> bool:
    """Whether a row would come out the same again: no error, or the compiler's own answer.

    Time limits, a kill from outside, and a lack of memory or disk are of the machine and the moment.
    """
    return not error or (bool(ANSWERED.search(error)) and not LACKING.search(error))


ANSWERED = re.compile(r"left nothing: (it gave up|it crashed|the NPU took none)")
LACKING = re.compile(r"ran out of this machine's memory|free disk space|The disk of")


@contextmanager
def scratch_folder(out_dir: Path) -> Iterator[Path]:
    """A folder in ``out_dir`` that is gone afterwards; it holds a lock that the system gives up if the process dies."""
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=SCRATCH) as name, FileLock(Path(name) / LOCK):
        yield Path(name)


def remove_left_folders(out_dir: Path) -> None:
    """Remove the scratch folders of runs that were killed; those of a run at work are locked.

    One without a lock, or younger than a minute, may be just being made.
    """
    for folder in out_dir.glob(f"{SCRATCH}*"):
        lock = folder / LOCK
        if lock.is_file() and time.time() - lock.stat().st_mtime > 60:
            with suppress(Timeout, OSError), FileLock(lock, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)


SCRATCH, LOCK = ".plan_", "lock"


def _blank(case: PlanCase, rewritten: nn.Module, inputs: tuple[Tensor, ...]) -> PlanCost:
    """What is known before compiling."""
    report = audit(rewritten, inputs, chip="SM8850")
    return PlanCost(case.kind, case.about, case.expressions, "", 0, report.macs, report.peak_activation_bytes)


def _compiled(blank: PlanCost, onnx_path: Path, chip: Chip, time_limit_s: float) -> PlanCost:
    """The row with the compiler's figures, or with its error."""
    out_dir = onnx_path.parent / chip.name
    blank = replace(blank, chip=chip.name, htp_arch=chip.htp_arch)
    try:
        report = compile_for_chip(onnx_path, chip, out_dir=out_dir, time_limit_s=time_limit_s, progress=False)
    except LumenError as error:
        sentence = str(error).splitlines()[0].partition(" Log: ")[0]  # the log goes with the folder
        return replace(blank, error=sentence)
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
