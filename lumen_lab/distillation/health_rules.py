"""From measures to a verdict on a gate: ok, drifting or dead; a table of thresholds, each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lumen_lab.specs import Record

OK, DRIFTING, DEAD = "ok", "drifting", "dead"
ORDER = (OK, DRIFTING, DEAD)


@dataclass(frozen=True)
class HealthRule(Record):
    """A gate is ``verdict`` while ``measure`` lies beyond ``threshold``: above it, or below."""

    measure: str
    side: str
    threshold: float
    verdict: str
    because: str

    def trips(self, found: Mapping[str, float | None]) -> bool:
        """Whether the gate of these measures breaks the rule; one that was not taken breaks none."""
        value = found.get(self.measure)
        return value is not None and (value > self.threshold if self.side == "above" else value < self.threshold)

    def in_words(self, found: Mapping[str, float | None]) -> str:
        """What was found, and what the rule says."""
        return f"{self.measure} {found[self.measure]:.3g} is {self.side} {self.threshold:g}: {self.because}"


RULES = (
    HealthRule("saturated_low", "above", 0.98, DEAD, "next to nothing of the branch comes through"),
    HealthRule("contribution", "below", 0.01, DEAD, "the decoder would be the same without the branch"),
    HealthRule("passed", "below", 0.01, DEAD, "no gradient reaches the gate: it cannot come back by itself"),
    HealthRule("saturated_high", "above", 0.98, DEAD, "the gate lets everything through and no longer chooses"),
    HealthRule("saturated_low", "above", 0.6, DRIFTING, "most of the branch is shut off"),
    HealthRule("saturated_high", "above", 0.6, DRIFTING, "most of the branch is let through as it is"),
    HealthRule("teacher_gap", "above", 0.15, DRIFTING, "its mean has left the teacher's"),
    HealthRule("passed", "below", 0.1, DRIFTING, "little gradient reaches the gate"),
    HealthRule("swing", "below", 0.01, DRIFTING, "the gate is the same for every picture"),
    HealthRule("dead_channels", "above", 0.25, DRIFTING, "a quarter of the branch's channels are constant"),
)
"""Dead rules first. Those of ``teacher_gap`` need a teacher; where the teacher's own gate breaks a rule, that rule does
not count against the student (``judge``)."""


def broken(found: Mapping[str, float | None], rules: Iterable[HealthRule] = RULES) -> tuple[HealthRule, ...]:
    """The rules that a gate of these measures breaks."""
    return tuple(rule for rule in rules if rule.trips(found))


def judge(
    found: Mapping[str, float | None],
    *,
    teacher: Mapping[str, float | None] | None = None,
    rules: Iterable[HealthRule] = RULES,
) -> tuple[str, tuple[HealthRule, ...]]:
    """The verdict on a gate and the rules that decide it; ``teacher``: the same measures of the teacher's gate."""
    excused = set(broken(teacher, rules)) if teacher else set()
    tripped = tuple(rule for rule in broken(found, rules) if rule not in excused)
    return max((rule.verdict for rule in tripped), key=ORDER.index, default=OK), tripped


class Watch:
    """Verdicts over time: a gate is called what it has been at ``patience`` looks in a row, so that one odd batch
    raises no alarm."""

    def __init__(self, *, patience: int = 3, rules: Sequence[HealthRule] = RULES):
        self.patience, self.rules = patience, tuple(rules)
        self.called: dict[str, str] = {}
        self._since: dict[str, Counter] = {}

    def look(
        self, gate: str, found: Mapping[str, float | None], *, teacher: Mapping[str, float | None] | None = None
    ) -> tuple[str, str | None]:
        """The gate's standing verdict, and a sentence if it has just become a worse one."""
        now, tripped = judge(found, teacher=teacher, rules=self.rules)
        since = self._since.setdefault(gate, Counter())
        for verdict in (DRIFTING, DEAD):
            since[verdict] = since[verdict] + 1 if ORDER.index(now) >= ORDER.index(verdict) else 0
        before = self.called.get(gate, OK)
        reached = [verdict for verdict in (DRIFTING, DEAD) if since[verdict] >= self.patience]
        after = reached[-1] if reached else (before if now != OK and before != OK else OK)
        self.called[gate] = after
        if ORDER.index(after) <= ORDER.index(before):
            return after, None
        return after, f"The {gate} gate is {after}: {tripped[0].in_words(found)}."

    def forgive(self, gate: str) -> None:
        """Look at a gate as if for the first time: it was restored."""
        self.called.pop(gate, None)
        self._since.pop(gate, None)

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"called": dict(self.called), "since": {gate: dict(since) for gate, since in self._since.items()}}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on from what ``state`` returned."""
        self.called = dict(state.get("called", {}))
        self._since = {gate: Counter(since) for gate, since in state.get("since", {}).items()}
