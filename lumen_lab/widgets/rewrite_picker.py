"""Rewrites to tick: the plan, and what it does to the network, follow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anywidget
import traitlets

from lumen_lab.errors import LumenError, RewriteError
from lumen_lab.specs import Record
from lumen_lab.widgets import plan_page

DEBOUNCE_S = 0.3
ORIGINAL = "original"
_CHOICE_KEYS = {"name", "family", "claim", "because"}
_EFFECT_KEYS = set("plan chip operations partition_rows macs parameters peak_activation_bytes largest_rank".split())


@dataclass(eq=False)
class _Asked:
    """One choice of rewrites, and what was found for it; a newer choice is another object."""

    names: tuple[str, ...]
    answered: bool = False
    effect: object = None
    failure: Exception | None = None
    shown: Mapping[str, str] = field(default_factory=dict)


class RewritePicker(anywidget.AnyWidget):
    """Rewrites by family, each with a checkbox; beside them what the plan that they make does to the network.

    ``choices`` are rows with ``name``, ``family``, ``claim``, ``because`` and, optionally, ``after`` and ``excludes``:
    lists of (other name, reason); their order is the order of every plan. ``measure`` takes the names picked and
    returns what that plan does, a record or a dict with the fields of ``rewrites.effect.PlanEffect``;
    ``rewrites.effect.choice_rows`` and ``effect_of_names`` make both. It is called twice at once: for the network as it
    is, which every other plan is held against, and for ``picked``.
    ``presets`` maps names to lists of rewrites and becomes buttons. ``recorded_rows`` are dicts with ``plan`` (names of
    rewrites, or the name of a preset) and further columns of plain values, such as a compiler's figures; those of the
    plan picked are shown.

    ``pick`` measures before it returns. What is ticked in the browser, or set as ``picked``, is measured when the
    kernel is next idle, so that no measurement runs beside a cell; ``effect`` and ``code`` measure at once if need be.
    An answer to a choice that has since changed is dropped. Rewrites that exclude each other, or unknown ones, are
    refused with ``RewriteError`` (``TraitError`` where ``picked`` is set). Where no widget can run, the notebook shows
    ``static_html()`` of the state in which the widget was displayed.
    """

    _esm = Path(__file__).with_suffix(".js")
    _css = Path(__file__).with_suffix(".css")

    choices = traitlets.List(read_only=True, help="the rewrites, in the order of every plan").tag(sync=True)
    presets = traitlets.Dict(read_only=True, help="names of rewrites, by the name of the plan").tag(sync=True)
    choices_html = traitlets.Unicode(read_only=True, help="the rewrites with their checkboxes").tag(sync=True)
    picked = traitlets.Tuple(help="names of the rewrites picked, in order").tag(sync=True)
    measured = traitlets.Tuple(read_only=True, help="the choice that summary, error and panel are about").tag(sync=True)
    summary = traitlets.Unicode(read_only=True, help="the plan in one line").tag(sync=True)
    error = traitlets.Unicode(read_only=True, help="why the plan has no figures; empty if it has").tag(sync=True)
    panel = traitlets.Unicode(read_only=True, help="HTML of what the plan does").tag(sync=True)

    def __init__(
        self,
        choices: Sequence[Mapping[str, object]],
        measure: Callable[[tuple[str, ...]], Record | Mapping[str, object]],
        *,
        presets: Mapping[str, Sequence[str]] | None = None,
        picked: Sequence[str] = (),
        recorded_rows: Sequence[Mapping[str, object]] = (),
    ):
        rows = _checked_choices(choices)
        self._order = [row["name"] for row in rows]
        self._rivals = _rivals(rows)
        if ORIGINAL in (presets or {}):
            raise RewriteError(f"The preset {ORIGINAL!r} is the network as it is; call yours otherwise.")
        plans = {ORIGINAL: (), **(presets or {})}
        self._measure, self._measuring, self._loop = measure, threading.RLock(), _running_loop()
        self.set_trait("choices", rows)
        self.set_trait("presets", {name: self._in_order(plan) for name, plan in plans.items()})
        self.set_trait("choices_html", plan_page.choices_html(rows, (), blocked={}, live=True))
        self._recorded = [(self._recorded_plan(row), row) for row in recorded_rows]
        self._original = _plain(measure(()))
        self._asked = _Asked(tuple(self._in_order(picked)))
        self._answer(self._asked)
        super().__init__(picked=self._asked.names)
        self.observe(self._on_picked, "picked")

    @property
    def busy(self) -> bool:
        """Whether what is picked has not been measured yet."""
        return not self._asked.answered

    @property
    def effect(self) -> Record | Mapping[str, object] | None:
        """What ``measure`` returned for the plan picked now; None if it failed (``error`` says why)."""
        return self._answered().effect

    @property
    def code(self) -> str:
        """Python that makes the plan picked now; empty if measuring failed."""
        effect = self.effect
        return "" if effect is None else str(_plain(effect).get("code", ""))

    def pick(self, names: Sequence[str]) -> Record | Mapping[str, object]:
        """Pick these rewrites, in any order, and return what they do; an error of ``measure`` is shown and raised."""
        names = tuple(self._in_order(names))
        if names == self.picked and self._asked.failure is not None:
            self._asked = _Asked(names)  # another try
        self.picked = names
        asked = self._answered()
        self._show(asked)  # in place of a refusal that came after the answer
        if asked.failure is not None:
            raise asked.failure
        return asked.effect

    def static_html(self) -> str:
        """The present state as HTML that needs neither a script nor a kernel: choices, figures, code."""
        names = self._answered().names
        blocked = {name: self._reason(name, names) for name in self._order if name not in names}
        choices = plan_page.choices_html(self.choices, names, blocked=blocked, live=False)
        style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
        return plan_page.page_html(choices, self.summary, self.error, self.panel, style=style)

    def set_state(self, sync_data: dict) -> None:
        """Take the browser's choice; one that is refused is answered with the reason and the choice that holds."""
        try:
            super().set_state(sync_data)
        except traitlets.TraitError as refusal:
            self.set_trait("error", str(refusal))
            self.send_state("picked")

    @traitlets.validate("picked")
    def _is_a_plan(self, proposal: dict) -> tuple[str, ...]:
        try:
            return tuple(self._in_order(proposal["value"]))
        except RewriteError as error:
            raise traitlets.TraitError(str(error)) from None

    def _in_order(self, names: Sequence[str]) -> list[str]:
        """The names in the order of the choices; ``RewriteError`` if one is unknown or excluded by another."""
        if isinstance(names, str):
            raise RewriteError(f"A choice is a list of names, found the text {names!r}; write [{names!r}].")
        if not isinstance(names, Iterable):
            raise RewriteError(f"A choice is a list of names, found {names!r}; write [] for the network as it is.")
        names = tuple(names)
        for unknown in (name for name in names if name not in self._order):
            raise RewriteError(f"There is no rewrite {unknown!r:.80} to pick; there are {', '.join(self._order)}.")
        for name in names:
            if reason := self._reason(name, names):
                raise RewriteError(f"{name} cannot be picked: {reason}")
        return [name for name in self._order if name in set(names)]

    def _reason(self, name: str, picked: Sequence[str]) -> str:
        """Why ``name`` cannot stand beside what is picked; empty if it can."""
        rivals = (other for other in self._order if other in picked and other in self._rivals[name])
        return next((f"not beside {other}: {self._rivals[name][other]}" for other in rivals), "")

    def _recorded_plan(self, row: Mapping[str, object]) -> tuple[str, ...]:
        if "plan" not in row:
            raise RewriteError(f"A recorded row says its plan, found only {', '.join(map(str, row))}.")
        plan = row["plan"]
        if isinstance(plan, str):
            return tuple(self.presets[plan] if plan in self.presets else self._in_order([plan]))
        return tuple(self._in_order(plan))

    def _on_picked(self, change: dict) -> None:
        """A new choice: measured at once where no kernel runs, else when it is idle and no newer choice has come."""
        asked = self._asked = _Asked(tuple(change["new"]))
        if self._loop is None or not self._loop.is_running():
            self._answer(asked)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, DEBOUNCE_S, self._answer, asked)

    def _answered(self) -> _Asked:
        """The present choice, measured."""
        asked = self._asked
        while not asked.answered or asked is not self._asked:
            asked = self._asked
            self._answer(asked)
        return asked

    def _answer(self, asked: _Asked) -> None:
        """Measure a choice, once, and show it if it is still the present one."""
        with self._measuring:
            if asked.answered or asked is not self._asked:
                return
            try:
                asked.effect = self._measure(asked.names)
                asked.shown = self._shown(asked)
            except Exception as failure:
                asked.effect, asked.failure = None, failure
                asked.shown = {"summary": "", "panel": "", "error": _sentence(failure)}
            asked.answered = True
            if asked is self._asked:
                self._show(asked)

    def _shown(self, asked: _Asked) -> dict[str, str]:
        effect = _plain(asked.effect)
        if effect.get("refused"):
            return {"summary": "", "panel": "", "error": str(effect["refused"])}
        recorded = [row for names, row in self._recorded if names == asked.names]
        columns = [{key: value for key, value in row.items() if key != "plan"} for row in recorded]
        panel = plan_page.panel_html(self._original, effect, columns)
        return {"summary": plan_page.summary_text(effect), "panel": panel, "error": ""}

    def _show(self, asked: _Asked) -> None:
        with self.hold_sync():
            self.set_trait("measured", asked.names)
            for trait, text in asked.shown.items():
                self.set_trait(trait, text)

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        text = f"RewritePicker: {self.error or self.summary} [{', '.join(self.picked)}]"
        return {**data, "text/plain": text, "text/html": self.static_html()}, metadata


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop of the kernel whose cell makes the widget; None outside a kernel."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _checked_choices(choices: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The rows with ``after`` and ``excludes`` filled in; ``RewriteError`` if they make no list to pick from."""
    for choice in choices:
        if not isinstance(choice, Mapping):
            raise RewriteError(
                f"A choice is a row with name, family, claim and because, found a {type(choice).__name__}; "
                "rewrites.effect.choice_rows makes rows of rewrites."
            )
    rows = [{"after": [], "excludes": [], **choice} for choice in choices]
    for row in rows:
        if missing := _CHOICE_KEYS - set(row):
            raise RewriteError(
                f"A choice has name, family, claim and because; {row} has no {', '.join(sorted(missing))}."
            )
    names = [row["name"] for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RewriteError(f"{', '.join(sorted(twice))} stands twice among the choices; names tell rewrites apart.")
    for place, row in enumerate(rows):
        if late := [other for other, _ in row["after"] if other in names[place + 1 :]]:
            raise RewriteError(
                f"The choices list {row['name']} before {late[0]}, after which it must come; reorder them."
            )
    return rows


def _rivals(rows: Sequence[Mapping]) -> dict[str, dict[str, str]]:
    """name -> {other: why not both}, whichever of the two declares it."""
    rivals: dict[str, dict[str, str]] = {row["name"]: {} for row in rows}
    for row in rows:
        for other, because in row["excludes"]:
            if other in rivals:
                rivals[row["name"]].setdefault(other, because)
                rivals[other].setdefault(row["name"], because)
    return rivals


def _plain(effect: Record | Mapping[str, object]) -> Mapping[str, object]:
    """The effect as plain values; ``RewriteError`` if it lacks what the picker shows."""
    values = effect.to_json() if isinstance(effect, Record) else effect
    if missing := _EFFECT_KEYS - set(values):
        raise RewriteError(
            f"measure returns what rewrites.effect.PlanEffect holds; found no {', '.join(sorted(missing))}."
        )
    return values


def _sentence(failure: Exception) -> str:
    """An exception as one line; those that are not ours bear their kind."""
    first = next((line.strip() for line in str(failure).splitlines() if line.strip()), "")
    if isinstance(failure, LumenError):
        return first
    return f"Measuring failed with {type(failure).__name__}{': ' if first else ''}{first}"
