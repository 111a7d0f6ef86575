"""Folders of images and masks as a data set: DIS5K, ECSSD, DUT-OMRON, DUTS, HRSOD, PASCAL-S, or a user's own."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage

from lumen_lab.datasets.asked import checked_size
from lumen_lab.datasets.attributes import ATTRIBUTES, matte_attributes
from lumen_lab.datasets.pairing import Pair, find_pairs
from lumen_lab.datasets.sample import Sample
from lumen_lab.errors import DatasetError
from lumen_lab.images import load_image, load_mask, resize_image, resize_mask, to_network_input
from lumen_lab.specs import file_sha256, files_sha256

SAMPLE_CODE = (Path(__file__), Path(__file__).with_name("attributes.py"))

LEAST_OBJECT_SHARE = 0.005


class PairedFolder(torch.utils.data.Dataset):
    """Map-style data set of the pairs that ``find_pairs`` finds at ``root``, in the order of their names.

    Item ``i`` is a dict like that of ``ComposedScenes``: ``image`` float32 3×H×W (ImageNet-normalised unless
    ``normalise=False``, then in [0, 1]), ``matte`` float32 1×H×W in [0, 1], ``attributes`` bool of
    ``len(ATTRIBUTES)``, ``index`` and ``name``. Both planes are resized to ``size`` (H, W), whatever their aspect;
    with ``size=None`` they keep the file's own, so a batch holds one item. ``sample(i)`` is always at the file's own
    size: scores are taken there. Attributes are measured at the size that is given out.

    ``from_alpha`` takes each mask from its file's alpha. With ``on_orphans="report"`` the pairs alone are used, and
    orphans are warned of. ``DatasetError`` as for ``find_pairs``, without a single pair, and where a mask is not of
    its image's size: bringing it there in silence would move every score.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path | None = None,
        masks: str | Path | None = None,
        on_orphans: str = "error",
        size: tuple[int, int] | None = None,
        normalise: bool = True,
        from_alpha: bool = False,
    ):
        self.size = None if size is None else checked_size(size)
        self.normalise, self.from_alpha = normalise, from_alpha
        self.listing = find_pairs(root, images=images, masks=masks, on_orphans=on_orphans)
        if not self.listing.pairs:
            raise DatasetError(f"{self.listing.sentence()} A data set needs a pair; give images= and masks=.")
        if self.listing.orphan_images or self.listing.orphan_masks:
            warnings.warn(self.listing.sentence(), stacklevel=2)

    def __len__(self) -> int:
        return self.listing.paired

    def sample(self, index: int) -> Sample:
        """Pair ``index`` at its files' own size."""
        pair, image, matte = self._read(index)
        return Sample(pair.name, image, matte, _attributes(image, matte))

    def name(self, index: int) -> str:
        """The name of pair ``index``: its path below its folder, without a suffix."""
        return self.listing.pairs[index].name

    def identity(self) -> dict[str, str]:
        """What decides every sample, in words: the pairs by a hash of their names and of the bytes of their files.

        The code that reads a pair and tells its attributes counts too. ``DatasetError`` for a file that cannot be read.
        """
        digest, root = hashlib.sha256(), Path(self.listing.root)
        for pair in self.listing.pairs:
            sides = [_hashed(root / file) for file in (pair.image, pair.mask)]
            digest.update("\0".join([pair.name, *sides, ""]).encode("utf-8", "surrogateescape"))
        return {
            "kind": "paired folder",
            "pairs": digest.hexdigest(),
            "orphans": str(len(self.listing.orphan_images) + len(self.listing.orphan_masks)),
            "from_alpha": str(self.from_alpha),
            "sample code": files_sha256(SAMPLE_CODE),
        }

    def __getitem__(self, index: int) -> dict[str, object]:
        pair, image, matte = self._read(index)
        if self.size is not None:
            image, matte = resize_image(image, size=self.size), resize_mask(matte, size=self.size)
        flags = _attributes(image, matte)
        return {
            "image": torch.from_numpy(_planes(image, normalise=self.normalise)),
            "matte": torch.from_numpy(matte[None]),
            "attributes": torch.tensor([flags[name] for name in ATTRIBUTES]),
            "index": index,
            "name": pair.name,
        }

    def _read(self, index: int) -> tuple[Pair, np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        pair, root = self.listing.pairs[index], Path(self.listing.root)
        image, matte = load_image(root / pair.image), load_mask(root / pair.mask, from_alpha=self.from_alpha)
        if image.shape[:2] != matte.shape:
            raise DatasetError(_sizes_apart(root / pair.image, image, root / pair.mask, matte))
        return pair, image, matte


def count_objects(matte: np.ndarray, *, least_share: float = LEAST_OBJECT_SHARE) -> int:
    """The number of salient objects in a matte (H×W): its parts of more than ``least_share`` of the frame.

    Parts are those of ``matte > 0.5``, joined at sides and corners. A mask cannot tell two things that touch from one,
    nor one thing behind a post from two.
    """
    labels, _ = ndimage.label(matte > 0.5, structure=np.ones((3, 3)))
    return int((np.bincount(labels.ravel())[1:] > least_share * matte.size).sum())


def _attributes(image: np.ndarray, matte: np.ndarray) -> dict[str, bool]:
    return matte_attributes(matte, image.astype(np.float32) / np.float32(255), objects=count_objects(matte))


def _sizes_apart(image_path: Path, image: np.ndarray, mask_path: Path, matte: np.ndarray) -> str:
    turned = image.shape[:2] == matte.shape[::-1]
    hint = ", EXIF orientation applied: was the mask drawn on the unturned picture?" if turned else ""
    return (
        f"{image_path} is {image.shape[0]} × {image.shape[1]} px, but its mask {mask_path} is {matte.shape[0]} × "
        f"{matte.shape[1]} (height × width{hint}); export the mask at its image's size."
    )


def _hashed(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        link = f", a link to {os.readlink(path)}" if os.path.islink(path) else ""
        raise DatasetError(
            f"{path}{link}, cannot be read ({error.strerror}); fetch it, or ask for permission to read it."
        ) from None


def _planes(image: np.ndarray, *, normalise: bool) -> np.ndarray:
    """The image (uint8 H×W×3) as float32 3×H×W."""
    if normalise:
        return to_network_input(image, size=image.shape[:2])[0]
    return np.ascontiguousarray(image.transpose(2, 0, 1)).astype(np.float32) / np.float32(255)
