"""What an evaluation leaves on disk: rows while it goes on, then scores and their manifest; nothing half written."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from lumen_lab.errors import ArtifactError
from lumen_lab.evaluation.origin import differences
from lumen_lab.evaluation.rows import Row, read_or_none
from lumen_lab.metrics import Scores
from lumen_lab.specs import Manifest, file_sha256, manifest_path, replacing

Keep = Callable[[bytes], None]

HEAD = b'{"record": "Manifest", "kind": "scores", '  # how a file of rows begins


def partial_path(out: str | Path) -> Path:
    """Where the rows of an unfinished evaluation lie: the whole name of ``out`` and ``.partial``."""
    return Path(f"{out}.partial")


@contextmanager
def one_at_a_time(out: str | Path) -> Iterator[None]:
    """Of two processes of this machine with one ``out``, the second waits, says so, and takes what the first made."""
    key = hashlib.sha256(os.fsencode(Path(out).resolve())).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    lock = FileLock(Path(tempfile.gettempdir()) / f"lumen_lab_{user}_{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        warnings.warn(f"Another process is evaluating to {out}; waiting for what it makes.", stacklevel=4)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def finished(out: str | Path, origin: Manifest) -> Scores | None:
    """The scores at ``out`` if they are of just this evaluation; those of another are moved aside, with a warning.

    ``ArtifactError`` if ``out`` is there and no result of an evaluation, or one that was changed since.
    """
    out = Path(out)
    if not out.exists():
        return None
    there, different = _compared(out, origin)
    if different:
        aside = _set_aside(out, there)
        warnings.warn(f"{out} held the scores of another evaluation ({different}); they are now {aside}.", stacklevel=3)
        return None
    scores = Scores.load(out)
    with suppress(ArtifactError):  # rows of another evaluation are left to it
        _read_rows(partial_path(out), origin)
        partial_path(out).unlink(missing_ok=True)
    return scores


@contextmanager
def kept_rows(out: str | Path, origin: Manifest) -> Iterator[tuple[dict[int, Row], Keep]]:
    """The rows that an interrupted evaluation left beside ``out``, and a function that keeps one more line.

    The file of rows is removed when the block ends well, and stays where anything is raised. ``ArtifactError`` if it
    holds rows of another evaluation, or cannot be written.
    """
    path = partial_path(out)
    rows, whole_bytes = _read_rows(path, origin)
    with _opened(path, whole_bytes) as file:
        if not whole_bytes:
            _write(file, _head(origin))
        try:
            yield rows, lambda line: _write(file, line)
        except BaseException as error:
            error.add_note(f"{len(rows)} images are scored and kept in {path}; the same call goes on from there.")
            raise
    path.unlink()


def save(scores: Scores, out: str | Path, origin: Manifest) -> None:
    """Write scores and manifest; the manifest is there before the scores are, so that a kill leaves none without."""
    try:
        with replacing(out) as temporary:
            scores.save(temporary)
            _manifest(origin, Path(out), temporary).save(manifest_path(out))
    except OSError as error:
        raise ArtifactError(f"Cannot write {out} ({error.strerror or error}); make room and call again.") from None


def _manifest(origin: Manifest, named: Path, file: Path) -> Manifest:
    return replace(origin, files={named.name: file_sha256(file)})


def _compared(out: Path, origin: Manifest) -> tuple[Manifest, str]:
    """The manifest of the scores at ``out``, and what it differs in."""
    try:
        manifest = Manifest.beside(out)
        if manifest.kind == "scores":
            return manifest, differences(manifest, origin)
        reason = f"its manifest is of {manifest.kind}"
    except ArtifactError as error:
        reason = str(error)
    raise ArtifactError(f"{out} is there and cannot be told to be scores ({reason}); move it, or give another out.")


def _set_aside(out: Path, manifest: Manifest) -> Path:
    """Rename scores, with a manifest of their own, to a name that the same evaluation always gets."""
    key = hashlib.sha256(_head(replace(manifest, files={}))).hexdigest()[:8]
    aside = out.with_name(f"{out.stem}.{key}{out.suffix}")
    try:
        _manifest(manifest, aside, out).save(manifest_path(aside))
        out.replace(aside)
    except OSError as error:
        raise ArtifactError(
            f"{out} holds the scores of another evaluation, and {aside.name} cannot be written ({error.strerror}); "
            "move them, or give another out."
        ) from None
    return aside


def _opened(path: Path, whole_bytes: int):
    """The file of rows, after its last whole line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("r+b" if whole_bytes else "wb", buffering=0)
        if whole_bytes:
            file.truncate(whole_bytes)
            file.seek(whole_bytes)
        return file
    except OSError as error:
        raise ArtifactError(f"Cannot write {path} ({error.strerror or error}); give another out.") from None


def _write(file, line: bytes) -> None:
    try:
        reason = "" if file.write(line) == len(line) else "the disk is full"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ArtifactError(f"Cannot write {file.name} ({reason}); make room and call again.")


def _head(origin: Manifest) -> bytes:
    return json.dumps(origin.to_json()).encode() + b"\n"


def _read_rows(path: Path, origin: Manifest) -> tuple[dict[int, Row], int]:
    """Whole rows of an earlier run of the same evaluation, and the bytes of its whole lines.

    The line that a kill cut is left out, and a damaged one: those images are scored again. ``ArtifactError`` for rows
    of another evaluation, or for anything else.
    """
    if not path.is_file():
        return {}, 0
    *whole, cut = path.read_bytes().split(b"\n")
    head, *lines = whole or [cut]
    if not lines and HEAD.startswith(head[: len(HEAD)]):
        return {}, 0  # not one row in it: nobody's loss
    different = _differences_of_head(head, origin)
    if different:
        raise ArtifactError(
            f"{path} holds {len(lines)} images of another evaluation, which did not end ({different}); end that one, "
            "give another out, or remove the file."
        )
    rows = (read_or_none(line) for line in lines)
    return {row.index: row for row in rows if row is not None}, sum(len(line) + 1 for line in whole)


def _differences_of_head(head: bytes, origin: Manifest) -> str:
    try:
        return differences(Manifest.from_json(json.loads(head)), origin)
    except (ValueError, TypeError, AttributeError, ArtifactError):
        return "its first line does not say which"
