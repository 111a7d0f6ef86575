"""What a plan does to a network, as one record: sites, operations, predicted pieces, cost, verdicts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from lumen_lab.auditing import AuditReport, audit
from lumen_lab.chips import Chip, find_chip
from lumen_lab.equivalence import Verdict, VerdictTable, claim_text
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.catalogue import find_rewrite
from lumen_lab.rewrites.check import check_plan
from lumen_lab.rewrites.plan import Plan, check_order, inputs_for, rewrite
from lumen_lab.rewrites.plan_code import family_of, plan_code
from lumen_lab.rewrites.record import Constraint, Rewrite
from lumen_lab.specs import Record, cell_text


@dataclass(frozen=True)
class PlanEffect(Record):
    """One network under one plan, predicted for ``chip``; nothing of it was compiled.

    ``plan`` are the rewrites' names in order, ``code`` the Python that makes the plan; a rewrite that cannot be written
    stands there as a comment with the reason.
    ``operations`` counts by kind what a device has to run; ``partition_rows`` are those operations in order, as
    ``figures.partition_strip`` takes them; ``blocking`` groups what would stay on the CPU by kind and reason.
    ``macs`` are the multiply-accumulates of matrix products and convs, ``interpolation_macs`` those of samplings.
    ``parameters`` counts weights, ``parameter_bytes`` weights, buffers and constants.
    ``log`` and ``verdicts`` have a row a rewrite; no verdicts: not checked.
    ``seconds`` says how long the steps took: "rewrite", "audit" and "check".
    ``refused`` is the reason why the plan was not applied at all; every figure is zero then.
    """

    plan: tuple[str, ...]
    code: str
    chip: str
    operations: dict[str, int] = field(default_factory=dict)
    partition_rows: tuple[dict[str, object], ...] = field(default=(), repr=False)
    blocking: tuple[dict[str, object], ...] = ()
    macs: int = 0
    interpolation_macs: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    peak_activation_bytes: int = 0
    largest_rank: int = 0
    log: tuple[dict[str, object], ...] = ()
    verdicts: tuple[dict[str, object], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    refused: str | None = None

    @property
    def partitions(self) -> int:
        """Predicted number of graphs that the NPU is called with."""
        return len({row["partition"] for row in self.partition_rows if row["runs_on"] == "NPU"})

    @property
    def npu_operations(self) -> int:
        """How many operations are predicted to run on the NPU."""
        return sum(row["runs_on"] == "NPU" for row in self.partition_rows)

    @property
    def cpu_operations(self) -> int:
        """How many operations would stay on the CPU."""
        return len(self.partition_rows) - self.npu_operations

    def figures(self) -> dict[str, int]:
        """The numbers that are compared from one plan to the next."""
        return {
            "operations": sum(self.operations.values()),
            "operations on the NPU, predicted": self.npu_operations,
            "operations on the CPU, predicted": self.cpu_operations,
            "partitions predicted": self.partitions,
            "MACs": self.macs,
            "MACs of interpolation": self.interpolation_macs,
            "parameters": self.parameters,
            "parameter bytes": self.parameter_bytes,
            "peak activation bytes": self.peak_activation_bytes,
            "largest rank": self.largest_rank,
        }

    def rows(self) -> list[dict[str, object]]:
        """One dict a figure; a refused plan has the reason alone."""
        if self.refused:
            return [{"figure": "refused", "value": self.refused}]
        texts = {"plan": ", ".join(self.plan) or "as published", "chip": self.chip, "checks": self._checks()}
        return [{"figure": name, "value": value} for name, value in (texts | self.figures()).items()]

    def _checks(self) -> str:
        counts = {status: sum(row[status] for row in self.verdicts) for status in ("passed", "failed", "pending")}
        return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "not made"

    def __str__(self) -> str:
        return "\n".join(f"{row['figure']}: {cell_text(row['value'])}" for row in self.rows())


def plan_effect(
    model: nn.Module,
    plan: Plan,
    *,
    chip: str | Chip = "SM8850",
    example_inputs: tuple[Tensor, ...] | None = None,
    samples: Sequence[Tensor] | None = None,
) -> PlanEffect:
    """Apply ``plan`` to a copy of ``model``, audit it for ``chip`` and, on ``samples``, check every rewrite of it.

    ``example_inputs`` are as for ``rewrite``; of them only shapes and types count. Without ``samples`` nothing is
    checked, and an empty plan has nothing to check. Raises ``RewriteError`` for a plan out of order, ``AuditError`` for
    a model in training mode or one that cannot be read, and ``ChipError`` for an unknown chip.
    """
    plan = check_order(plan)
    chip = find_chip(chip)
    inputs = inputs_for(model, example_inputs)
    seconds: dict[str, float] = {}
    done = _timed(seconds, "rewrite", lambda: rewrite(model, plan, example_inputs=inputs))
    report = _timed(seconds, "audit", lambda: audit(done.model, inputs, chip=chip))
    verdicts = ()
    if samples is not None and plan:
        verdicts = _timed(seconds, "check", lambda: check_plan(model, plan, samples=samples, progress=False)).verdicts
    return PlanEffect(
        plan=tuple(rule.name for rule in plan),
        code=plan_code(plan, leave_out=True),
        chip=chip.name,
        **_audited(report),
        parameters=sum(parameter.numel() for parameter in done.model.parameters()),
        log=tuple(done.log.rows()),
        verdicts=tuple(verdict_rows(verdicts)),
        seconds=seconds,
    )


def difference_rows(before: PlanEffect, after: PlanEffect) -> list[dict[str, object]]:
    """What moved from one effect to the other: one dict a figure, then one a kind of operation, largest change first.

    What stayed the same has no row. ``RewriteError`` if one of them was refused, or they are for different chips.
    """
    for effect in (before, after):
        if effect.refused:
            raise RewriteError(f"A refused plan has no figures to compare: {effect.refused}")
    if before.chip != after.chip:
        raise RewriteError(f"Effects for {before.chip} and for {after.chip} do not compare; measure both for one chip.")
    kinds = sorted(
        _moved(before.operations, after.operations, what="operations: {}"), key=lambda row: -abs(row["change"])
    )
    return [*_moved(before.figures(), after.figures(), what="{}"), *kinds]


def verdict_rows(verdicts: Iterable[Verdict]) -> list[dict[str, object]]:
    """One dict a rewrite: at how many sites its claim passed, failed or is pending, and the worst difference."""
    rows = VerdictTable(tuple(verdicts)).summary()
    return [{"rewrite": row["check"], **{key: row[key] for key in row if key != "check"}} for row in rows]


def choice_rows(catalogue: Sequence[Rewrite]) -> list[dict[str, object]]:
    """Rewrites as plain rows for ``widgets.RewritePicker``: name, family, claim, because, after and excludes.

    ``after`` and ``excludes`` are lists of (other rewrite, reason).
    """
    return [
        {
            "name": rule.name,
            "family": family_of(rule),
            "claim": claim_text(rule.claim),
            "because": rule.because,
            "after": _pairs(rule.after),
            "excludes": _pairs(rule.excludes),
        }
        for rule in catalogue
    ]


def effect_of_names(
    model: nn.Module,
    catalogue: Sequence[Rewrite],
    *,
    chip: str | Chip = "SM8850",
    example_inputs: tuple[Tensor, ...] | None = None,
    samples: Sequence[Tensor] | None = None,
) -> Callable[[Sequence[str]], PlanEffect]:
    """A function from names in ``catalogue`` to ``plan_effect`` of that plan; each plan is measured once.

    A plan out of order is not raised but answered: an effect whose ``refused`` says why. The model must not change
    while the function is in use.
    """
    known: dict[tuple[str, ...], PlanEffect] = {}

    def effect(names: Sequence[str]) -> PlanEffect:
        names = tuple(names)
        plan = tuple(find_rewrite(name, catalogue) for name in names)
        if names not in known:
            try:
                check_order(plan)
            except RewriteError as error:
                return PlanEffect(names, plan_code(plan, leave_out=True), find_chip(chip).name, refused=str(error))
            known[names] = plan_effect(model, plan, chip=chip, example_inputs=example_inputs, samples=samples)
        return known[names]

    return effect


def _timed(seconds: dict[str, float], name: str, step: Callable):
    start = time.perf_counter()
    result = step()
    seconds[name] = round(time.perf_counter() - start, 2)
    return result


def _audited(report: AuditReport) -> dict[str, object]:
    running = [row for row in report.operations if row.partition is not None]
    return {
        "operations": dict(Counter(row.kind for row in running).most_common()),
        "partition_rows": tuple(report.partition_rows()),
        "blocking": tuple(_blocking_rows(report)),
        "macs": report.macs,
        "interpolation_macs": report.interpolation_macs,
        "parameter_bytes": report.parameter_bytes,
        "peak_activation_bytes": report.peak_activation_bytes,
        "largest_rank": max((row.rank for row in running), default=0),
    }


def _blocking_rows(report: AuditReport) -> list[dict[str, object]]:
    groups: dict[tuple[str, str], list] = {}
    for row in report.blocking():
        groups.setdefault((row.kind, row.reason), []).append(row)
    return [
        {"kind": kind, "operations": len(rows), "first": rows[0].place, "reason": reason}
        for (kind, reason), rows in groups.items()
    ]


def _moved(before: Mapping[str, int], after: Mapping[str, int], *, what: str) -> list[dict[str, object]]:
    names = dict.fromkeys([*before, *after])
    pairs = [(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return [
        {"what": what.format(name), "before": was, "after": now, "change": now - was}
        for name, was, now in pairs
        if was != now
    ]


def _pairs(constraints: Sequence[Constraint]) -> list[list[str]]:
    return [[constraint.other, constraint.because] for constraint in constraints]
