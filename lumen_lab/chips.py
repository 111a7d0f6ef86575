"""The chips that Qualcomm's NPU compiler serves: names, architecture and the numbers it wants.

One table (``chips.csv``, described in ``data/chips.md``) of chips with HTP v68 or later. The compiler answers
"success" for numbers it does not know and for older chips too, so a name is looked up here before anything is built.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lumen_lab.errors import ChipError
from lumen_lab.specs import Record

TABLE = Path(__file__).with_name("chips.csv")
OLDEST_HTP_ARCH = 68
OLDER = {
    66: "SDM865 SM8250 SM8150 SM7250 SM7225 SM7125 SM6375 SM6350 SM6225 SM6150 SM6125 SM4350 QRB5165U QRB5165LE "
    "QCS7230LA QCS7230LE",
    65: "SM7150 SDM845",
}
"""Chips that LiteRT's ``supported_soc.csv`` has and the NPU compiler does not serve, by the architecture of the DSP."""

COLUMNS = ("chip", "marketing_name", "htp_arch", "soc_model", "vtcm_mb", "supports_fp16", "sources", "note")


@dataclass(frozen=True)
class Chip(Record):
    """One system-on-chip.

    ``htp_arch`` is the NPU's architecture (81 for v81), ``soc_model`` the compiler's number for the chip (None where
    no public list has it), ``vtcm_mb`` the NPU's on-chip memory in MB (None: unknown), ``supports_fp16`` True, False
    or None where nothing is known; it goes by ``soc_model``, and ``note`` says where it is not from a list.
    """

    name: str
    marketing_name: str
    htp_arch: int
    soc_model: int | None
    vtcm_mb: int | None
    supports_fp16: bool | None
    sources: str
    note: str

    def __str__(self) -> str:
        return f"{self.name} ({self.marketing_name})" if self.marketing_name else self.name


def load_chips(path: str | Path | None = None) -> tuple[Chip, ...]:
    """Every chip of the table (default: the one that ships with the library), in its order.

    Raises ``ChipError`` if the file is missing, lacks a column or holds a value that cannot be read.
    """
    return _read_table(Path(path) if path is not None else TABLE)


def find_chip(name: str | Chip) -> Chip:
    """The chip called ``name``: its part number ("SM8850") or marketing name ("Snapdragon 8 Elite Gen 5").

    Case, spaces, dashes and a leading "Qualcomm", "Snapdragon" or "Dragonwing" do not matter. ``ChipError`` with the
    nearest names if there is none, and with the candidates if a marketing name belongs to several chips.
    """
    if isinstance(name, Chip):
        return _served(name)
    found = _index().get(_key(name), ())
    if len(found) == 1:
        return _served(found[0])
    if found:
        raise ChipError(f"{name!r} is the name of several chips: {_listed(found)}; ask by part number.")
    if (arch := _older().get(_key(name))) is not None:
        raise ChipError(_not_served(str(name), arch))
    raise ChipError(f"No chip called {name!r} among the {len(load_chips())} with HTP v68 or later. {_nearest(name)}")


def _served(chip: Chip) -> Chip:
    if chip.htp_arch < OLDEST_HTP_ARCH:
        raise ChipError(_not_served(str(chip), chip.htp_arch))
    return chip


def _not_served(name: str, htp_arch: int) -> str:
    return (
        f"{name} has HTP v{htp_arch}; the NPU compiler serves v{OLDEST_HTP_ARCH} and later, and what it builds for "
        "older chips does not run. Choose a newer chip; load_chips() lists them."
    )


@cache
def _older() -> dict[str, int]:
    """Architecture by part number, and by the number on the box where the part number ends in it (SDM865)."""
    names = [(_key(name), arch) for arch, listed in OLDER.items() for name in listed.split()]
    return dict(names) | {name.removeprefix("sdm"): arch for name, arch in names}


@cache
def _read_table(path: Path) -> tuple[Chip, ...]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ChipError(f"The table of chips cannot be read ({error}); install the library again.") from None
    missing = set(COLUMNS) - set(rows[0] if rows else ())
    if missing:
        raise ChipError(f"{path} is no table of chips: without rows or the columns {', '.join(sorted(missing))}.")
    return tuple(_chip(row, path) for row in rows)


def _chip(row: dict[str, str], path: Path) -> Chip:
    try:
        return Chip(
            name=row["chip"],
            marketing_name=row["marketing_name"],
            htp_arch=int(row["htp_arch"].removeprefix("v")),
            soc_model=_number(row["soc_model"]),
            vtcm_mb=_number(row["vtcm_mb"]),
            supports_fp16={"yes": True, "no": False, "": None}[row["supports_fp16"]],
            sources=row["sources"],
            note=row["note"],
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise ChipError(f"{path}: the row of {row.get('chip') or '?'} cannot be read ({error!r}).") from None


def _number(text: str) -> int | None:
    return int(text) if text else None


def _key(name: str) -> str:
    text = re.sub(r"^\s*((qualcomm|snapdragon|dragonwing)\W*)*", "", str(name).lower()).replace("+", "plus")
    return re.sub(r"[^a-z0-9]", "", text)


def _names(chip: Chip) -> list[str]:
    return [chip.name, *(part for part in (chip.marketing_name, *chip.marketing_name.split("/")) if part)]


@cache
def _index() -> dict[str, tuple[Chip, ...]]:
    """Chips by spelling; a part number wins over the same word as another chip's marketing name."""
    numbers = {_key(chip.name): (chip,) for chip in load_chips()}
    names: dict[str, tuple[Chip, ...]] = {}
    for chip in load_chips():
        for key in {_key(name) for name in _names(chip)}:
            names[key] = (*names.get(key, ()), chip)
    return names | numbers


def _nearest(name: str) -> str:
    keys = difflib.get_close_matches(_key(name), _index(), n=3, cutoff=0.6)
    chips = dict.fromkeys(chip for key in keys for chip in _index()[key])
    return f"Did you mean {_listed(chips)}?" if chips else "load_chips() lists them; older ones are refused."


def _listed(chips: Iterable[Chip]) -> str:
    return ", ".join(str(chip) for chip in chips)
