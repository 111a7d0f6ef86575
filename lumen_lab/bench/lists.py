"""Test lists that hold seeds instead of images: which scenes, of which split, composed from which pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lumen_lab.datasets.drawn import drawn_sources
from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.datasets.sources import SourceBank
from lumen_lab.errors import ArtifactError, DatasetError
from lumen_lab.specs import Record

BENCH_DIR = Path(__file__).parents[2] / "data" / "bench"
DRAWN, PHOTOGRAPHS = "drawn", "photographs"
MATTE_TOLERANCE = 1e-3  # a few pixels of a soft edge; other random numbers move a mean by far more


@dataclass(frozen=True)
class BenchList(Record):
    """``images`` composed scenes of ``size`` (H, W) from one split of ``sources``, with ``seed`` and ``mixture``.

    ``sources``: "photographs" (the Debian packages of ``lumen_lab.datasets.debian``) or "drawn" (no pictures needed).
    ``sources_sha256`` is of the split's photographs, so that other ones are noticed before they are scored; drawn
    pictures come from this code, and from processors that round alike. ``matte_means`` are those of the first scenes,
    by which another version's random numbers are noticed. ``asks`` says in a few words what the list is for, and
    ``aims`` what a teacher should reach on it (metric → raw mean).
    """

    name: str
    asks: str
    sources: str
    sources_sha256: str
    split: str
    seed: int
    images: int
    size: tuple[int, int]
    mixture: dict[str, float]
    matte_means: tuple[float, ...] = ()
    aims: dict[str, float] = field(default_factory=dict)


def read_lists(path: str | Path = BENCH_DIR / "lists.json") -> dict[str, BenchList]:
    """The lists by name; ``ArtifactError`` if the file is not of lists."""
    try:
        lists = [BenchList.from_json(values) for values in json.loads(Path(path).read_text())]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(f"Cannot read {path} as bench lists: {error}.") from None
    return {entry.name: entry for entry in lists}


def scenes_of(entry: BenchList, bank: SourceBank | None = None) -> ComposedScenes:
    """The scenes of a list. ``bank`` holds the photographs; a drawn list needs none.

    ``DatasetError`` if the photographs are not given or are not those the list was made with, or if these versions
    compose other scenes from them.
    """
    if entry.sources == DRAWN:
        bank = drawn_sources()
    if bank is None:
        raise DatasetError(
            f"The list {entry.name} is composed from photographs; fetch them with "
            "python -m lumen_lab.datasets.sources SOURCES, and give that folder."
        )
    scenes = ComposedScenes(
        bank, split=entry.split, size=entry.size, length=entry.images, seed=entry.seed, mixture=entry.mixture
    )
    found = scenes.sources_sha256()
    if entry.sources_sha256 and found != entry.sources_sha256:
        raise DatasetError(
            f"The list {entry.name} was made with other {entry.sources} (SHA-256 {entry.sources_sha256[:12]}…, found "
            f"{found[:12]}…): another version of a package, of Pillow or of a filter; scores would not be comparable."
        )
    means = [float(scenes.scene(index).matte.mean()) for index in range(len(entry.matte_means))]
    if not np.allclose(means, entry.matte_means, rtol=0, atol=MATTE_TOLERANCE):
        raise DatasetError(
            f"The list {entry.name} is composed otherwise here (its first mattes cover {_shares(means)} of the frame, "
            f"recorded {_shares(entry.matte_means)}): the scene code or numpy's random numbers have changed."
        )
    return scenes


def _shares(means: Iterable[float]) -> str:
    return ", ".join(f"{mean:.3f}" for mean in means)
