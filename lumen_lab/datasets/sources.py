"""Sources of composed scenes: folders of cut-outs and backgrounds, filtered, split and decoded once.

A cut-out is an image with an alpha channel that is neither nearly full nor nearly empty; a background is a
photograph without one. Both are kept only if their statistics are those of a photograph: clip-art has few colours
and large flat areas. Foregrounds and backgrounds are split by group (near-duplicates share a group) before any
scene is composed, so that no picture is seen in two splits.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from lumen_lab.datasets.debian import (
    BACKGROUND_PACKAGES,
    DEBIAN_PACKAGES,
    DRAWN_BACKGROUNDS,
    FOREGROUND_PACKAGES,
    SALIENT_BACKGROUNDS,
    SKIPPED_FOLDERS,
    fetch_debian_sources,
)
from lumen_lab.errors import ArtifactError, DatasetError, ImageError
from lumen_lab.images import load_pixels
from lumen_lab.specs import Record, write_whole

SPLITS = ("train", "validation", "test")
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
FOREGROUND_SIDE_PX = 384
BACKGROUND_SIDE_PX = 512
VARIANT_SUFFIX = r"([-_ .]*(mirror(ed)?|flip(ped)?|copy|dark|light|small|large|\d+x\d+|\(\d+\)))+$"
MIN_FOREGROUND_SIDE_PX = 48
MIN_BACKGROUND_SIDE_PX = 240
CACHE_FORMAT = 6
# What a zip of arrays raises when its bytes have changed: an unknown method, say, or a flag that asks for a password.
_DAMAGED = (OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError, AttributeError, MemoryError)
_DAMAGED += (zipfile.BadZipFile, zlib.error, struct.error, ArtifactError)
# Shares of groups that go to validation and to test; the rest is for training.
HELD_OUT = {"foreground": (0.10, 0.12), "background": (0.13, 0.17)}


@dataclass(frozen=True)
class Source(Record):
    """One picture kept: ``name`` is relative to its folder, ``group`` ties near-duplicates, ``size`` is (H, W)."""

    name: str
    kind: str
    group: str
    split: str
    size: tuple[int, int]


@dataclass(frozen=True)
class SourceIndex(Record):
    """What a scan found: the pictures kept with their split, and how many were dropped for which reason."""

    found: dict[str, int]
    kept: dict[str, int]
    dropped: dict[str, int]
    sources: tuple[Source, ...]

    def rows(self) -> list[dict[str, object]]:
        counts = Counter((s.kind, s.split) for s in self.sources)
        rows = [
            {"kind": kind, "found": self.found[kind], "kept": self.kept[kind]}
            | {split: counts[kind, split] for split in SPLITS}
            for kind in ("foreground", "background")
        ]
        return rows + [{"kind": f"dropped: {reason}", "found": n} for reason, n in self.dropped.items()]

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"sources": [source.to_json() for source in self.sources]}

    @classmethod
    def from_json(cls, values):
        return super().from_json({"sources": [], **values})


@dataclass(frozen=True)
class SourceBank:
    """Decoded sources: ``pixels`` holds, in the index's order, uint8 H×W×4 cut-outs and H×W×3 backgrounds."""

    index: SourceIndex
    pixels: tuple[np.ndarray, ...]

    def select(self, kind: str, split: str) -> tuple[tuple[np.ndarray, ...], ...]:
        """The pictures of one kind ("foreground", "background") in one split, as groups of near-duplicates.

        ``DatasetError`` if the split has none.
        """
        if split not in SPLITS:
            raise DatasetError(f"Split {split!r} was asked for; the splits are {', '.join(SPLITS)}.")
        groups: dict[str, list[np.ndarray]] = {}
        for source, pixels in zip(self.index.sources, self.pixels):
            if source.kind == kind and source.split == split:
                groups.setdefault(source.group, []).append(pixels)
        if not groups:
            kept = self.index.kept[kind]
            raise DatasetError(
                f"The {split} split has no {kind}: {kept} were kept of {self.index.found[kind]} found "
                f"(dropped: {self.index.dropped}); add pictures until every split holds some."
            )
        return tuple(tuple(group) for group in groups.values())


def open_sources(root: str | Path, *, cache: bool = True) -> SourceBank:
    """Scan, filter, split and decode the pictures below ``root``; decoded pixels are kept in ``root/.scene_cache``.

    ``root`` holds either ``foregrounds/`` and ``backgrounds/``, or unpacked Debian packages (``DEBIAN_PACKAGES``)
    by name. A link to a file in the first two counts as a picture of the link's own name, also for its split; links to
    folders, and those inside packages (second names of a picture), are passed over. Raises ``DatasetError`` if neither
    is there or nothing usable is found.
    """
    root = Path(root)
    listed = list_candidates(root)
    cache_path = root / ".scene_cache" / f"{_listing_key(root, listed)}.npz"
    bank = _load_bank(cache_path) if cache and cache_path.is_file() else None
    if bank is not None:
        return bank
    bank = scan_sources(listed, root=root)
    if cache:
        _save_bank(bank, cache_path)
    return bank


def list_candidates(root: str | Path) -> list[tuple[str, str]]:
    """(kind, path relative to ``root``) of every image file that may be a source, in sorted order."""
    root = Path(root)
    folders = [("foreground", "foregrounds"), ("background", "backgrounds")]
    folders += [("foreground", f"{package}/{inner}") for package, inner in FOREGROUND_PACKAGES.items()]
    folders += [("background", f"{package}/{inner}") for package, inner in BACKGROUND_PACKAGES.items()]
    present = [(kind, root / folder) for kind, folder in folders if (root / folder).is_dir()]
    if {kind for kind, _ in present} != {"foreground", "background"}:
        found = sorted(p.name for p in root.iterdir()) if root.is_dir() else "no such folder"
        raise DatasetError(
            f"{root} was asked for cut-outs and backgrounds; found {found}. Give a folder with foregrounds/ and "
            f"backgrounds/, or fetch the Debian packages with: python -m lumen_lab.datasets.sources {root}"
        )
    return sorted((kind, path.relative_to(root).as_posix()) for kind, folder in present for path in _images(folder))


def _images(folder: Path) -> Iterator[Path]:
    follows_links = folder.name in ("foregrounds", "backgrounds")
    for path in folder.rglob("*"):
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir() and (follows_links or not path.is_symlink()):
            yield path


def scan_sources(listed: Sequence[tuple[str, str]], *, root: str | Path) -> SourceBank:
    """Decode and filter the listed (kind, relative path) files; returns the bank with its index."""
    dropped: Counter[str] = Counter()
    kept: list[tuple[Source, np.ndarray]] = []
    for kind, name in listed:
        pixels, reason = _read_source(Path(root) / name, kind, name)
        if pixels is None:
            dropped[f"{kind}: {reason}"] += 1
        else:
            kept.append((Source(name, kind, group_key(name), "", pixels.shape[:2]), pixels))
    kept, twins = _drop_twins(kept)
    dropped.update(twins)
    sources = tuple(replace(source, split=assign_split(source.group, kind=source.kind)) for source, _ in kept)
    found, counts = (Counter(k for k, _ in listed), Counter(s.kind for s in sources))
    kinds = ("foreground", "background")
    index = SourceIndex(
        {k: found[k] for k in kinds}, {k: counts[k] for k in kinds}, dict(sorted(dropped.items())), sources
    )
    if not all(index.kept.values()):
        hint = "" if all(index.found.values()) else " Links to folders are not followed: link their files."
        raise DatasetError(
            f"{root}: no usable pictures: {index.found} found, {index.kept} kept, {index.dropped}.{hint}"
        )
    return SourceBank(index, tuple(pixels for _, pixels in kept))


def _read_source(path: Path, kind: str, name: str) -> tuple[np.ndarray | None, str]:
    reason = _listed_reason(kind, name)
    if reason:
        return None, reason
    keep, side_px = (_foreground, FOREGROUND_SIDE_PX) if kind == "foreground" else (_background, BACKGROUND_SIDE_PX)
    try:
        pixels = load_pixels(path, least_side_px=2 * side_px)
    except ImageError:
        return None, "unreadable, or above the pixel limit"
    return keep(pixels)


def _listed_reason(kind: str, name: str) -> str:
    parts = {part.lower() for part in Path(name).with_suffix("").parts}
    if parts & SKIPPED_FOLDERS:
        return "folder of symbols or drawings"
    if kind == "background" and parts & SALIENT_BACKGROUNDS:
        return "shows a salient object itself (listed)"
    if kind == "background" and parts & DRAWN_BACKGROUNDS:
        return "rendered (listed)"
    return ""


def _foreground(pixels: np.ndarray) -> tuple[np.ndarray | None, str]:
    """The cut-out, cropped and cleaned, or None and why the file's pixels (uint8 H×W×3 or H×W×4) are none."""
    if pixels.shape[2] == 3:
        return None, "no alpha channel"
    pixels = _thumbnail(pixels, FOREGROUND_SIDE_PX)
    rows, columns = np.nonzero(pixels[..., 3] > 8)
    if rows.size < 100:
        return None, "blank"
    pixels = pixels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    if max(pixels.shape[:2]) < MIN_FOREGROUND_SIDE_PX or min(pixels.shape[:2]) < 12:
        return None, "tiny"
    if (pixels[..., 3] > 243).mean() > 0.97:
        return None, "alpha nearly all opaque"
    reason = drawing_reason(pixels[..., :3], pixels[..., 3] > 200)
    return (None, reason) if reason else (clean_edge_colours(pixels), "")


def _background(pixels: np.ndarray) -> tuple[np.ndarray | None, str]:
    """The background, or None and why the file's pixels (uint8 H×W×3 or H×W×4) are none."""
    if min(pixels.shape[:2]) < MIN_BACKGROUND_SIDE_PX:
        return None, "tiny"
    if pixels.shape[2] == 4 and np.asarray(Image.fromarray(pixels[..., 3]).reduce(8)).min() < 250:
        return None, "background with transparency"
    pixels = _thumbnail(np.ascontiguousarray(pixels[..., :3]), BACKGROUND_SIDE_PX)
    if pixels.std() < 6:
        return None, "blank"
    # Sky and water are smooth and snow has one hue, so the limits are wider than for a cut-out.
    reason = drawing_reason(
        pixels, np.ones(pixels.shape[:2], bool), most_flat=0.83, most_equal=0.5, least_richness=0.05
    )
    return (None, reason) if reason else (pixels, "")


def _thumbnail(pixels: np.ndarray, side_px: int) -> np.ndarray:
    """The pixels made smaller until no side is longer than ``side_px``; never larger."""
    image = Image.fromarray(pixels)
    image.thumbnail((side_px, side_px), Image.Resampling.BOX)
    return np.array(image)


def drawing_reason(
    rgb: np.ndarray,
    inside: np.ndarray,
    *,
    most_flat: float = 0.38,
    most_equal: float = 0.38,
    least_richness: float = 1.0,
) -> str:
    """Why the uint8 H×W×3 picture looks drawn, or "" for a photograph; only pixels ``inside`` (H×W bool) count.

    Flat share: horizontal neighbours that differ by at most one level; equal share: by none. Richness: distinct
    15-bit colours over the root of the number of pixels, which hardly changes when a photograph is scaled.
    """
    if inside.sum() < 100:
        return "too translucent to judge"
    step = np.abs(np.diff(rgb.astype(np.int16), axis=1)).max(-1)
    steps = step[inside[:, 1:] & inside[:, :-1]]
    if steps.size and ((steps <= 1).mean() > most_flat or (steps == 0).mean() > most_equal):
        return "flat areas (drawing)"
    codes = (rgb[inside].astype(np.int32) >> 3) @ np.array([1024, 32, 1])
    if np.unique(codes).size < least_richness * np.sqrt(inside.sum()):
        return "few colours (drawing)"
    return ""


def clean_edge_colours(rgba: np.ndarray, *, reach_px: float = 3.0) -> np.ndarray:
    """uint8 H×W×4 whose translucent edge takes its colour from the nearest opaque pixel: no halo of the old ground."""
    opaque = rgba[..., 3] >= 245
    if not opaque.any():
        return rgba
    distance, nearest = ndimage.distance_transform_edt(~opaque, return_indices=True)
    edge = (distance > 0) & ((distance <= reach_px) | (rgba[..., 3] == 0))
    out = rgba.copy()
    out[..., :3][edge] = rgba[..., :3][tuple(axis[edge] for axis in nearest)]
    return out


def group_key(name: str) -> str:
    """What near-duplicates share: the folder and the stem without its variant (mirrored, flipped, copy, resolution).

    In the Debian packages it is the stem's first word, since there ``grave-a`` and ``grave-b``, ``astronaut_1`` and
    ``astronaut_2`` are views of one thing; a user's ``IMG_0001`` and ``IMG_0002`` are not.
    """
    path = Path(name)
    parents = [part for part in path.parts[:-1] if part not in ("contents", "images", "images_dark")]
    stem = path.stem.lower()
    if path.parts[0] in DEBIAN_PACKAGES:
        words = [word for word in re.split(r"[^a-z]+", stem) if len(word) > 2][:1]
    else:
        words = [re.sub(VARIANT_SUFFIX, "", stem) or stem]
    return "/".join(parents + words)


def assign_split(group: str, *, kind: str) -> str:
    """The split of a group, from the hash of its name alone: other files never move it."""
    value = int.from_bytes(hashlib.sha256(f"{kind}:{group}".encode()).digest()[:8], "big") / 2**64
    validation, test = HELD_OUT[kind]
    return "test" if value < test else "validation" if value < test + validation else "train"


def _drop_twins(kept: list[tuple[Source, np.ndarray]]) -> tuple[list[tuple[Source, np.ndarray]], Counter[str]]:
    """Drop pictures that equal an earlier one, mirrored or not, by the 128 bits of their difference hash."""
    seen: dict[str, list[np.ndarray]] = {"foreground": [], "background": []}
    unique, twins = [], Counter()
    for source, pixels in sorted(kept, key=lambda item: (-item[1].size, item[0].name)):
        hashes = [difference_hash(pixels), difference_hash(pixels[:, ::-1])]
        earlier = seen[source.kind]
        if earlier and (np.stack(earlier)[None] != np.stack(hashes)[:, None]).sum(-1).min() <= 3:
            twins[f"{source.kind}: twin of another"] += 1
            continue
        earlier.append(hashes[0])
        unique.append((source, pixels))
    return sorted(unique, key=lambda item: item[0].name), twins


def difference_hash(pixels: np.ndarray) -> np.ndarray:
    """128 bits: is each cell of a 9×9 grey thumbnail (translucent over grey) darker than its right, lower one."""
    rgb = pixels[..., :3].astype(np.float32).mean(-1)
    if pixels.shape[-1] == 4:
        alpha = pixels[..., 3] / np.float32(255)
        rgb = rgb * alpha + 128 * (1 - alpha)
    small = np.asarray(Image.fromarray(rgb.astype(np.uint8)).resize((9, 9), Image.Resampling.BOX)).astype(int)
    return np.concatenate([(np.diff(small, axis=1)[:8] > 0).ravel(), (np.diff(small, axis=0)[:, :8] > 0).ravel()])


def _listing_key(root: Path, listed: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.sha256(f"{CACHE_FORMAT}".encode())
    for kind, name in listed:
        path = root / name
        status = path.stat() if path.exists() else path.lstat()  # a link to nothing is listed, and dropped later
        digest.update(f"{kind}\0{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _save_bank(bank: SourceBank, path: Path) -> None:
    buffer = io.BytesIO()
    shapes = np.array([p.shape for p in bank.pixels])
    flat = np.concatenate([p.ravel() for p in bank.pixels])
    index = np.frombuffer(json.dumps(bank.index.to_json()).encode(), np.uint8)
    np.savez(buffer, shapes=shapes, flat=flat, index=index)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:  # a read-only folder costs a scan each time, no more
        print(f"Cannot keep decoded sources at {path}: {error}", file=sys.stderr)


def _load_bank(path: Path) -> SourceBank | None:
    """The bank kept at ``path``, or None where the file is damaged or of another version."""
    try:
        with np.load(path) as stored:
            shapes, flat = stored["shapes"], stored["flat"]
            index = SourceIndex.from_json(json.loads(stored["index"].tobytes()))
        ends = np.cumsum(shapes.prod(1))
        pieces = (flat[end - shape.prod() : end].reshape(shape) for shape, end in zip(shapes, ends))
        return SourceBank(index, tuple(pieces))
    except _DAMAGED:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m lumen_lab.datasets.sources OUT_DIR``: fetch, scan, print the counts and write ``index.json``."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if len(arguments) != 1:
        print("usage: python -m lumen_lab.datasets.sources OUT_DIR", file=sys.stderr)
        return 2
    try:
        bank = open_sources(fetch_debian_sources(arguments[0]))
    except DatasetError as error:
        print(error, file=sys.stderr)
        return 1
    for row in bank.index.rows():
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(bank.index.save(Path(arguments[0]) / "index.json"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
