"""The records that every room speaks: claims, tables that can be read, shown and kept, and manifests.

A record holds plain values (no tensors), so that it can be printed, shown in a notebook and written as JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from lumen_lab.errors import ArtifactError


@dataclass(frozen=True)
class Exact:
    """The rewritten network computes the same function.

    Checked in float64, where an algebraic identity shrinks to rounding and an approximation does not.
    ``movement`` marks a rewrite that only moves data: it must agree bit for bit.
    """

    movement: bool = False
    max_abs_float64: float = 1e-9


@dataclass(frozen=True)
class Bounded:
    """The output differs by at most ``max_abs`` while the inputs stay inside ``domain`` (a sentence)."""

    max_abs: float
    domain: str


@dataclass(frozen=True)
class Learned:
    """A substitution that training must make good: ``metric`` on held-out data reaches ``at_least``."""

    metric: str
    at_least: float


Claim = Exact | Bounded | Learned


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write under; renamed to ``path`` when the block ends well, else removed.

    No reader ever sees half a file, and an earlier file stays until the new one is whole.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write ``content`` to ``path`` as a whole or not at all; returns the path."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


def writable_folder(path: str | Path) -> Path:
    """The folder, made if it is not there; ``ArtifactError`` if no file can be written in it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"Asked to write in {folder}, which cannot be ({reason}); give another folder.") from None


def file_sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Iterable[str | Path]) -> str:
    """Hexadecimal SHA-256 of the bytes of several files, one after the other."""
    return hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()


def html_table(rows: Iterable[Mapping[str, object]], *, caption: str = "", limit: int | None = None) -> str:
    """An HTML table of ``rows`` (dicts with the same keys); every cell is escaped, long tables end with a count.

    Numbers are written as ``cell_text`` does, and no line breaks within one.
    """
    rows = list(rows)
    if not rows:
        return f"<p>{html.escape(caption)} (no rows)</p>"
    shown = rows if limit is None else rows[:limit]
    head = "".join(f"<th style='text-align:left'>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escaped(cell_text(v))}</td>" for v in row.values()) + "</tr>"
        for row in shown
    )
    more = f"<p>… and {len(rows) - len(shown)} more rows</p>" if len(shown) < len(rows) else ""
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


@dataclass(frozen=True)
class Table:
    """Rows (dicts with the same keys) that a notebook shows as a table."""

    lines: Iterable[Mapping[str, object]]
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(self.lines))  # a generator would be empty when shown again

    def _repr_html_(self) -> str:
        return html_table(self.lines, caption=self.caption)


def cell_text(value: object) -> str:
    """A value for reading: thousands set apart in every number, four digits of those that are not whole."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def escaped(text: object) -> str:
    """HTML of a text, in which no line breaks after the minus of a number such as 1e-09."""
    return POWER_OF_TEN.sub(r"<span style='white-space:nowrap'>\g<0></span>", html.escape(str(text)))


POWER_OF_TEN = re.compile(r"\d[\d.]*e[-+]\d+")


class Record:
    """Base of the frozen dataclass records: ``rows()`` for a table, HTML in a notebook, JSON on disk.

    A subclass overrides ``rows()`` where its content is a list. Fields that are records, records or None, or tuples of
    records, by their annotation, are read back as such; what is read must be what the annotations say.
    """

    def rows(self) -> list[dict[str, object]]:
        """One dict a line, plain values only."""
        return [dataclasses.asdict(self)]

    def to_json(self) -> dict[str, object]:
        """The record as JSON-ready values, with its class name under ``record``."""
        return {"record": type(self).__name__, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, object]):
        """The record from ``to_json()``'s values; fields that are unknown, missing or of another type raise
        ``ArtifactError``."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = {key: value for key, value in values.items() if key != "record"}
        if values.get("record", cls.__name__) != cls.__name__ or set(given) - names:
            found = f"{values.get('record')} with {sorted(set(given) - names) or 'the expected fields'}"
            raise ArtifactError(f"Expected a saved {cls.__name__}, found {found}; make it again with this version.")
        try:
            given |= {key: _with_records(given[key], *how) for key, how in nested_records(cls).items() if key in given}
        except ArtifactError as error:
            raise ArtifactError(f"The saved {cls.__name__} is damaged: {error}") from None
        given = {key: _tuples(value) for key, value in given.items()}
        for key, (holds, words) in _field_checks(cls).items():
            if key in given and not holds(given[key]):
                raise ArtifactError(
                    f"The saved {cls.__name__} is damaged: {key} is {words}, found {given[key]!r:.60}; make it again."
                )
        try:
            return cls(**given)
        except TypeError as error:
            raise ArtifactError(f"The saved {cls.__name__} is incomplete ({error}); make it again.") from None

    def save(self, path: str | Path) -> Path:
        """Write the record as JSON; returns the path. ``ArtifactError`` if it holds what JSON has no word for."""
        try:
            text = json.dumps(self.to_json(), indent=1, default=plain, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"A {type(self).__name__} cannot be written as JSON: {error}.") from None
        return write_whole(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path):
        """Read a record written by ``save``; ``ArtifactError`` if the file is not one."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ArtifactError(f"Cannot read {path} as a saved {cls.__name__}: {error}.") from None
        except RecursionError:
            raise ArtifactError(f"Cannot read {path} as a saved {cls.__name__}: it is nested too deep.") from None
        if not isinstance(values, dict) or values.get("record", cls.__name__) != cls.__name__:
            found = values["record"] if isinstance(values, dict) else f"a {type(values).__name__}"
            raise ArtifactError(f"{path} should hold a saved {cls.__name__}, found {found}; make it again.")
        try:
            return cls.from_json(values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArtifactError(f"The saved {cls.__name__} in {path} is damaged ({error!r}); make it again.") from None

    def _repr_html_(self) -> str:
        return html_table(self.rows(), caption=type(self).__name__, limit=60)


def plain(value: object) -> object:
    """A numpy scalar as the Python number it is, a path as text; anything else is refused by ``json``."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")


@cache
def nested_records(cls: type[Record]) -> dict[str, tuple[type[Record], bool, bool]]:
    """The fields that hold records: name → (their class, whether it is a tuple of them, whether None will do)."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        if get_origin(hint) not in (None, tuple, UnionType, Union):
            continue
        kinds = [kind for kind in get_args(hint) or (hint,) if isinstance(kind, type) and issubclass(kind, Record)]
        if len(kinds) == 1:
            found[name] = kinds[0], get_origin(hint) is tuple, NoneType in get_args(hint)
    return found


Check = Callable[[object], bool]


@cache
def _field_checks(cls: type[Record]) -> dict[str, tuple[Check, str]]:
    """The fields of a record: name → (whether a value is what the annotation says, the annotation in words)."""
    return {name: (_check(hint), _hint_words(hint)) for name, hint in get_type_hints(cls).items()}


def _hint_words(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _check(hint: object) -> Check:
    """Whether a value read from JSON is of this annotation; one of another kind than those here is not checked."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (UnionType, Union):
        choices = [_check(part) for part in parts]
        return lambda value: any(holds(value) for holds in choices)
    if kind is Literal:
        return lambda value: isinstance(value, str | int) and value in parts
    if kind is tuple and parts:
        return _tuple_check(parts)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        of_key, of_value = map(_check, parts)
        return lambda value: isinstance(value, Mapping) and all(of_key(k) and of_value(v) for k, v in value.items())
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return lambda value: isinstance(value, kinds) and not isinstance(value, bool)
    known = hint in (str, bool, NoneType) or (isinstance(hint, type) and issubclass(hint, Record))
    return (lambda value: isinstance(value, hint)) if known else (lambda value: True)


def _tuple_check(parts: tuple) -> Check:
    """For tuples; inside a mapping they are the lists that JSON has."""
    checks = [_check(part) for part in parts if part is not Ellipsis]
    if Ellipsis in parts:
        return lambda value: isinstance(value, tuple | list) and all(map(checks[0], value))
    return lambda value: (
        isinstance(value, tuple | list)
        and len(value) == len(checks)
        and all(holds(item) for holds, item in zip(checks, value, strict=True))
    )


def _with_records(value: object, kind: type[Record], several: bool, optional: bool) -> object:
    """The value of a field of records; those that a subclass has read already are taken as they are."""
    if several:
        return tuple(_with_records(item, kind, False, False) for item in value)
    return value if isinstance(value, Record) or (optional and value is None) else kind.from_json(value)


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class TensorSpec(Record):
    """One input or output of an artefact: ``shape`` in ``layout`` order; ``scale``/``zero_point`` for integers."""

    name: str
    shape: tuple[int, ...]
    layout: str
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True)
class Manifest(Record):
    """Stands beside an artefact: what made it, with which tools, for which chip, and what goes in and out.

    ``made_from`` maps what went in (a file, plan, preset, seed) to its hash or value; ``files`` maps each file
    of the artefact to its SHA-256.
    """

    kind: str
    made_from: dict[str, str]
    versions: dict[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: dict[str, str]
    chip: str | None = None
    notes: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, object]):
        files = values.get("files", {})
        if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise ArtifactError("The saved Manifest is damaged (files maps names to hashes); make the artefact again.")
        return super().from_json(values)

    @classmethod
    def beside(cls, path: str | Path) -> Manifest:
        """The manifest of the artefact at ``path``, its files checked; ``ArtifactError`` with what does not fit."""
        path = Path(path)
        if not path.is_file():
            raise ArtifactError(f"There is no artefact {path}; make it first.")
        if not manifest_path(path).is_file():
            raise ArtifactError(
                f"There is no manifest {manifest_path(path).name} beside {path}; make the artefact again."
            )
        manifest = cls.load(manifest_path(path))
        if path.name not in manifest.files:
            raise ArtifactError(f"{manifest_path(path)} is the manifest of {', '.join(manifest.files)}, not of {path}.")
        manifest.check_files(path.parent)
        return manifest

    def check_files(self, folder: str | Path) -> None:
        """Raise ``ArtifactError`` with the difference if a listed file is missing or has changed."""
        for name, expected in self.files.items():
            path = Path(folder) / name
            if not path.is_file():
                raise ArtifactError(f"{path} is listed in its manifest but is not there; make the artefact again.")
            found = file_sha256(path)
            if found != expected:
                raise ArtifactError(
                    f"{path} does not fit its manifest: SHA-256 {found[:12]}… found, {expected[:12]}… recorded."
                )


def manifest_path(path: str | Path) -> Path:
    """Where the manifest of an artefact lies: the file's whole name and ``.manifest.json``."""
    return Path(f"{path}.manifest.json")


def tool_versions(*names: str) -> dict[str, str]:
    """Installed version of each named distribution ("absent" where there is none)."""
    from importlib import metadata

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
