"""Pairing the images and masks of a data set: where its two folders are, and which files belong together.

An image and its mask have one path below their two folders, but for the suffix: letter case and Unicode form do not
matter, and stems may hold dots, spaces or ``#``. Nothing is passed over in silence: a listing names every file that
was found, paired, left without a partner or ignored, and a score on a part of a set must be asked for.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lumen_lab.datasets.walking import files_below, is_folder, names_if_open, names_in
from lumen_lab.errors import DatasetError
from lumen_lab.specs import Record

PICTURE_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .tif .tiff .bmp .gif .ppm .pgm .pbm .jp2 .tga .avif".split()
)
JPEG_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif"})
# Names of folders, in lower case and with "_" between words; also as a first or last word: DUTS-TE-Image, masks_test.
IMAGE_FOLDERS = frozenset("im image images img imgs".split())
MASK_FOLDERS = frozenset("gt gts mask masks matte mattes alpha ground_truth ground_truth_mask groundtruth".split())
PUBLISHED_MASK_FOLDERS = {"pixelwisegt_new_png": "dut_omron"}  # beside DUT-OMRON-image
SEARCH_DEPTH = 3
_LAYOUTS = "im/ and gt/, images/ and masks/, NAME-Image/ and NAME-Mask/, NAME/ and NAME_mask/, or JPEG and PNG in Imgs/"
_NAMED = 5  # how many names an error lists


@dataclass(frozen=True)
class Pair(Record):
    """An image file and its mask, relative to the listing's root; ``name`` is their common path without a suffix."""

    name: str
    image: str
    mask: str


@dataclass(frozen=True)
class PairListing(Record):
    """What ``find_pairs`` found: the two folders, the pairs in the order of their names, and every file left over.

    File names are relative to ``root``. ``ignored`` holds hidden files (AppleDouble's ``._x`` among them) and those
    whose suffix is of no picture.
    """

    root: str
    images: str
    masks: str
    found_images: int
    found_masks: int
    pairs: tuple[Pair, ...]
    orphan_images: tuple[str, ...]
    orphan_masks: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def paired(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    def rows(self) -> list[dict[str, object]]:
        sides = (
            ("images", self.images, self.found_images, self.orphan_images),
            ("masks", self.masks, self.found_masks, self.orphan_masks),
        )
        rows = [
            {"files": what, "folder": folder, "found": found, "paired": self.paired}
            | {"orphans": len(orphans), "names": _first(orphans)}
            for what, folder, found, orphans in sides
        ]
        ignored = {"files": "ignored", "folder": "", "found": len(self.ignored), "paired": None, "orphans": None}
        return [*rows, ignored | {"names": _first(self.ignored)}]

    def sentence(self) -> str:
        """The counts and the first orphans of each side, in words."""
        images, masks = _count(self.found_images, "image"), _count(self.found_masks, "mask")
        said = f"{self.root}: {images} ({self.images}) and {masks} ({self.masks}) found, {self.paired} paired"
        if self.orphan_images:
            said += f"; {_count(len(self.orphan_images), 'image')} without a mask: {_first(self.orphan_images)}"
        if self.orphan_masks:
            said += f"; {_count(len(self.orphan_masks), 'mask')} without an image: {_first(self.orphan_masks)}"
        return f"{said}; {_count(len(self.ignored), 'other file')} ignored."

    @classmethod
    def from_json(cls, values):
        return super().from_json({"pairs": [], **values})


def find_pairs(
    root: str | Path,
    *,
    images: str | Path | None = None,
    masks: str | Path | None = None,
    on_orphans: str = "error",
) -> PairListing:
    """Find the image and the mask folder of a data set at or below ``root`` and pair their files.

    Known layouts, in any letter case: ``im``/``gt`` (DIS5K), ``images``/``masks`` and their like, ``images`` with
    ``ground_truth_mask`` (ECSSD), ``DUTS-TE-Image``/``DUTS-TE-Mask``, ``DUT-OMRON-image``/``pixelwiseGT-new-PNG``,
    ``HRSOD_test``/``HRSOD_test_mask``, photographs beside a ``masks`` folder, and one folder (``Imgs``) whose JPEG
    files are the images and whose other pictures are the masks. ``images`` and ``masks`` (below ``root``, or absolute)
    name them otherwise; PASCAL-S as its authors pack it needs ``images="imgs/pascal", masks="masks/pascal"``, and its
    masks are shares of observers, to be read as mattes.

    Subfolders are mirrored: ``images/a/1.jpg`` belongs to ``masks/a/1.png``. An orphan is an error, because a mean
    over the masks that happen to be there flatters; ``on_orphans="report"`` lists them and goes on. ``DatasetError``
    also where the folders are not found, or are several, and where two files of one side have one name.
    """
    root = Path(root)
    if on_orphans not in ("error", "report"):
        raise DatasetError(f'on_orphans={on_orphans!r} was asked for; give "error" or "report".')
    if not is_folder(root):
        found = "a file" if os.path.exists(root) else "nothing"
        raise DatasetError(f"{root} was asked for images and masks, but {found} is there; give the data set's folder.")
    listing = _paired(root, *_locate(root, images, masks))
    if on_orphans == "error" and (listing.orphan_images or listing.orphan_masks or not listing.pairs):
        raise DatasetError(
            f'{listing.sentence()} Complete the set, or pass on_orphans="report" to go on with the pairs alone.'
        )
    return listing


def pairing_key(name: str) -> str:
    """What an image, its mask and its prediction share: ``name`` (a path without a suffix) in NFC and lower case."""
    return unicodedata.normalize("NFC", name).lower()


def list_pictures(folder: str | Path, *, leave_out: str | Path | None = None) -> tuple[dict[str, str], tuple[str, ...]]:
    """The pictures at and below ``folder`` by ``pairing_key``, and the files ignored; names relative to ``folder``.

    ``leave_out`` is a folder below it that is not entered. ``DatasetError`` where two pictures have one key.
    """
    return _by_key(folder, files_below(Path(folder), leave_out))


def _paired(root: Path, images: Path, masks: Path) -> PairListing:
    image_files, mask_files, ignored = _both_sides(images, masks)
    if not image_files.keys() & mask_files.keys():
        unwrapped = _unwrapped(images), _unwrapped(masks)
        if unwrapped != (images, masks):
            return _paired(root, *unwrapped)
    common = sorted(image_files.keys() & mask_files.keys())
    below = {images: _shown(images, root), masks: _shown(masks, root)}

    def named(folder: Path, name: str) -> str:
        return (Path(below[folder]) / name).as_posix()

    return PairListing(
        root=str(root),
        images=below[images],
        masks=below[masks],
        found_images=len(image_files),
        found_masks=len(mask_files),
        pairs=tuple(
            Pair(os.path.splitext(image_files[k])[0], named(images, image_files[k]), named(masks, mask_files[k]))
            for k in common
        ),
        orphan_images=tuple(named(images, image_files[k]) for k in sorted(image_files.keys() - mask_files.keys())),
        orphan_masks=tuple(named(masks, mask_files[k]) for k in sorted(mask_files.keys() - image_files.keys())),
        ignored=tuple(sorted(named(folder, name) for folder, name in ignored)),
    )


def _both_sides(images: Path, masks: Path) -> tuple[dict[str, str], dict[str, str], list[tuple[Path, str]]]:
    """Image files and mask files by key, and (folder, name) of what was ignored."""
    if os.path.samefile(images, masks):
        files = list(files_below(images))
        jpeg = [name for name in files if _suffix(name) in JPEG_SUFFIXES]
        image_files, ignored_images = _by_key(images, jpeg)
        mask_files, ignored_masks = _by_key(masks, sorted(set(files) - set(jpeg)))
    else:
        image_files, ignored_images = list_pictures(images, leave_out=masks)
        mask_files, ignored_masks = list_pictures(masks, leave_out=images)
    return image_files, mask_files, [(images, n) for n in ignored_images] + [(masks, n) for n in ignored_masks]


def _by_key(folder: str | Path, files: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    found: dict[str, str] = {}
    ignored = []
    for name in files:
        if not _is_picture(name):
            ignored.append(name)
        elif found.setdefault(_key(name), name) != name:
            twins = f"{found[_key(name)]} and {name}"
            raise DatasetError(f"{folder} holds two pictures of one name, {twins}; keep one, since only one is meant.")
    return found, tuple(ignored)


def _key(name: str) -> str:
    return pairing_key(os.path.splitext(name)[0])


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_picture(name: str) -> bool:
    return _suffix(name) in PICTURE_SUFFIXES and not _hidden(name)


def _hidden(name: str) -> bool:
    """A dot file, or one in a hidden folder or in ``__MACOSX``, which holds no pictures of its own."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _unwrapped(folder: Path) -> Path:
    """The folder that holds the files, where archives wrap it in others (``DUT-OMRON-image/DUT-OMRON-image``)."""
    while True:
        inside = [name for name in names_in(folder) if not _hidden(name)]
        if len(inside) != 1 or not is_folder(folder / inside[0]):
            return folder
        folder = folder / inside[0]


def _locate(root: Path, images: str | Path | None, masks: str | Path | None) -> tuple[Path, Path]:
    """The image folder and the mask folder, as asked for or as found."""
    asked = [None if given is None else _existing(root, given) for given in (images, masks)]
    if all(asked):
        return asked[0], asked[1]
    candidates = _candidates(root)
    if any(asked):
        return _completed(root, asked, candidates)
    found = _matches(*candidates) or _mixed_folders(root, candidates[0])
    if len(found) == 1:
        return found[0]
    if not found:
        raise DatasetError(
            f"{root} was asked for images and masks; found {_folders_seen(root)}, and known are {_LAYOUTS}. "
            "Give images= and masks=."
        )
    several = "; ".join(f"{_shown(image, root)} with {_shown(mask, root)}" for image, mask in found)
    raise DatasetError(f"{root} holds {len(found)} sets ({several}); give the folder of one, or images= and masks=.")


def _folders_seen(root: Path) -> str:
    """The folders in ``root`` in words, with those that may not be listed: one of them may be what is missed."""
    seen = [name for name in names_in(root) if os.path.isdir(root / name)]
    closed = []
    for name in seen:
        try:
            names_in(root / name)
        except DatasetError:
            closed.append(name)
    return str(seen or "no folders") + (f" (no permission to list {', '.join(closed)})" if closed else "")


def _existing(root: Path, given: str | Path) -> Path:
    folder = root / given
    if not is_folder(folder):
        raise DatasetError(f"There is no folder {folder}, which was asked for; names are relative to {root}.")
    return folder


def _completed(root: Path, asked: list[Path | None], candidates) -> tuple[Path, Path]:
    """The asked folder with the one folder that can be its other side: itself, if it holds both."""
    lacking = asked.index(None)
    others = [folder for folder, _ in candidates[lacking] if folder != asked[1 - lacking]]
    if not others and _is_mixed(asked[1 - lacking]):
        others = [asked[1 - lacking]]
    if len(others) != 1:
        what, given = (("images", "masks"), ("masks", "images"))[lacking]
        names = [_shown(folder, root) for folder in others] or "none"
        raise DatasetError(f"{given}= was given; {names} could be the {what} in {root}. Give {what}= too.")
    both = [folder or others[0] for folder in asked]
    return both[0], both[1]


Candidates = list[tuple[Path, str]]


def _candidates(root: Path) -> tuple[Candidates, Candidates]:
    """Folders named like images and those named like masks, each with the key that ties the two."""
    sides: dict[str, Candidates] = {"image": [], "mask": []}
    others: dict[tuple[Path, str], Path] = {}
    names_in(root)  # refused if closed; a closed folder in it may be no part of the set
    for path, folders, _ in os.walk(root, followlinks=True):
        deep = len(Path(path).relative_to(root).parts) + 1
        entered = []
        for name in sorted(name for name in folders if not _hidden(name)):
            folder, (side, key) = Path(path) / name, _role(name)
            if side and (not key or _has_pictures(folder)):
                sides[side].append((folder, key))
            else:  # or an archive's wrapper, as in DUT-OMRON-image/DUT-OMRON-image
                entered.append(name)
                others[Path(path), key] = folder
        folders[:] = entered if deep < SEARCH_DEPTH else []
    beside = ((others.get((mask.parent, key)), key) for mask, key in sides["mask"])
    sides["image"] += [(folder, key) for folder, key in beside if folder]
    return sides["image"], sides["mask"]


def _role(name: str) -> tuple[str, str]:
    """ "image", "mask" or "" by a folder's name, and what is left of the name."""
    words = re.sub(r"[-\s]+", "_", name.lower())
    if words in PUBLISHED_MASK_FOLDERS:
        return "mask", PUBLISHED_MASK_FOLDERS[words]
    for side, names in (("mask", MASK_FOLDERS), ("image", IMAGE_FOLDERS)):
        if words in names:
            return side, ""
        any_name = "|".join(sorted(names, key=len, reverse=True))
        parts = re.fullmatch(rf"(.+)_(?:{any_name})|(?:{any_name})_(.+)", words)
        if parts:
            return side, parts[1] or parts[2]
    return "", words


def _matches(images: Candidates, masks: Candidates) -> list[tuple[Path, Path]]:
    """Image and mask folders that stand side by side under one key; else the only two there are."""
    found = [(i, m) for i, key in images for m, other in masks if (i.parent, key) == (m.parent, other)]
    if not found and len(images) == len(masks) == 1:
        found = [(images[0][0], masks[0][0])]
    if not found and not images and len(masks) == 1 and _has_pictures(masks[0][0].parent):
        found = [(masks[0][0].parent, masks[0][0])]
    return found


def _mixed_folders(root: Path, images: Candidates) -> list[tuple[Path, Path]]:
    """Folders in which JPEG images stand beside masks of the same stem in another format."""
    return [(folder, folder) for folder in (root, *(folder for folder, _ in images)) if _is_mixed(folder)]


def _is_mixed(folder: Path) -> bool:
    names = [name for name in names_if_open(folder) if _is_picture(name)]
    jpeg = {_key(name) for name in names if _suffix(name) in JPEG_SUFFIXES}
    return any(_key(name) in jpeg for name in names if _suffix(name) not in JPEG_SUFFIXES)


def _has_pictures(folder: Path) -> bool:
    return any(_is_picture(name) for name in names_if_open(folder))


def _shown(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _first(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
