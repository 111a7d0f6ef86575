"""One image's scores as a line of text: what processes send, what is kept, and what every mean is made from.

A line is the only form in which scores travel, so that a resumed evaluation cannot differ from an undisturbed one.
Numbers are written so that the same bits are read; the curves (256 values each) are packed, which saves three quarters.
A line begins with the CRC-32 of the rest: one changed digit would be another score, and still be JSON.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, replace

import numpy as np

from lumen_lab.datasets.sample import Sample
from lumen_lab.errors import LumenError
from lumen_lab.metrics import READINGS, MaskScores
from lumen_lab.specs import plain

CURVES = ("e", "f")


@dataclass(frozen=True)
class Row:
    """One image: its place in the data set, name, attributes and scores."""

    index: int
    name: str
    attributes: dict[str, bool]
    scores: MaskScores


def write_row(index: int, sample: Sample, scores: MaskScores) -> bytes:
    """The row as one line, newline included: eight hexadecimal digits of the CRC-32, a space, JSON."""
    values = scores.to_json() | {"curves": _packed(scores)}
    row = {"index": index, "name": sample.name, "attributes": sample.attributes, "scores": values}
    text = json.dumps(row, default=plain, allow_nan=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_row(line: bytes) -> Row:
    """The row of a line; its curves are arrays, which take a quarter of the memory. ``ValueError`` if it is damaged."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("the line does not have its checksum")
    row = json.loads(text)
    if type(row["index"]) is not int or not isinstance(row["attributes"], dict):
        raise ValueError("the line is no row")
    curves = _unpacked(row["scores"].pop("curves"))
    scores = MaskScores.from_json(row["scores"] | {"curves": {}})
    return Row(row["index"], row["name"], row["attributes"], replace(scores, curves=curves))


def read_or_none(line: bytes) -> Row | None:
    """The row of a line from a file, None if it is damaged."""
    try:
        return read_row(line)
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, LumenError):
        return None


def _packed(scores: MaskScores) -> str:
    values = np.array([[scores.curves[reading][curve] for curve in CURVES] for reading in READINGS], "<f8")
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def _unpacked(text: str) -> dict[str, dict[str, np.ndarray]]:
    values = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")
    both = values.reshape(len(READINGS), len(CURVES), -1)
    return {reading: dict(zip(CURVES, pair)) for reading, pair in zip(READINGS, both)}
