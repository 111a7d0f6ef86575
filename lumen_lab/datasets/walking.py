"""Walking the folders of a data set: links followed, each folder once, and a sentence where one may not be listed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from lumen_lab.errors import DatasetError


def files_below(folder: Path, leave_out: str | Path | None = None) -> Iterator[str]:
    """Relative names of all files at and below ``folder``, each folder once however many links lead to it.

    A folder below ``folder`` goes by its own name, one elsewhere by the first link to it; none above is entered.
    """
    top = os.path.realpath(folder)
    entered = {top} if leave_out is None else {top, os.path.realpath(leave_out)}
    for path, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        here = os.path.realpath(path)
        folders[:] = [name for name in sorted(folders) if _enters(os.path.join(path, name), here, top, entered)]
        for name in sorted(files):
            yield (Path(path) / name).relative_to(folder).as_posix()


def _enters(path: str, here: str, top: str, entered: set[str]) -> bool:
    """Whether the walk from ``top``, now in ``here``, goes into ``path``; if so it is ``entered``."""
    real = os.path.realpath(path)
    leads_up = (here + os.sep).startswith(real.rstrip(os.sep) + os.sep)
    another_name = os.path.islink(path) and real.startswith(top + os.sep)
    if real in entered or leads_up or another_name:
        return False
    entered.add(real)
    return True


def _refuse(error: OSError) -> NoReturn:
    raise DatasetError(
        f"{error.filename} cannot be listed ({error.strerror}); ask for permission to read it."
    ) from None


def is_folder(path: Path) -> bool:
    """Whether a folder is there; ``DatasetError`` where that may not be seen."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        _refuse(error)
    except (OSError, ValueError):
        return False


def names_in(folder: Path) -> list[str]:
    """The names in ``folder``; ``DatasetError`` where it may not be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        _refuse(error)


def names_if_open(folder: Path) -> list[str]:
    """The names in a folder that may be no part of the data set: none where it may not be listed."""
    try:
        return names_in(folder)
    except DatasetError:
        return []
