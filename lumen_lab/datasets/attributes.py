"""Attributes of a scene, measured on its matte and image, so that scores can be told apart by what is hard."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

ATTRIBUTES = ("thin", "soft_edge", "small", "large", "multiple", "low_contrast", "hole", "touching_border")


def matte_attributes(matte: np.ndarray, image: np.ndarray, *, objects: int = 1) -> dict[str, bool]:
    """The attributes of a scene, from its matte (H×W), image (H×W×3) and number of salient objects.

    With the mask ``matte > 0.5`` and lengths as shares of the short side S: ``thin``: an opening by a square of
    3.2 % S removes over 30 % of the mask; ``soft_edge``: over 2.5 pixels of 0.05 < matte < 0.95 per pixel of
    outline; ``small`` / ``large``: under 5 % / over 50 % of the frame; ``multiple``: two objects or more;
    ``low_contrast``: mean colours just inside and outside differ by less than 0.07 (root of summed squares);
    ``hole``: the mask encloses background of at least 0.1 % of the frame; ``touching_border``: on at least 2 % of
    the frame's border.
    """
    mask = matte > 0.5
    area = float(mask.mean())
    inner = ndimage.minimum_filter(mask, 3, mode="nearest")
    outer = ndimage.maximum_filter(mask, 3, mode="nearest")
    outline = max(int((mask & ~inner).sum()), 1)
    width = max(3, round(0.032 * min(mask.shape)) | 1)
    opened = ndimage.maximum_filter(ndimage.minimum_filter(mask, width, mode="nearest"), width, mode="nearest")
    border = np.concatenate([mask[0], mask[-1], mask[1:-1, 0], mask[1:-1, -1]])
    return {
        "thin": bool(mask.any() and (mask & ~opened).sum() > 0.3 * mask.sum()),
        "soft_edge": bool(((matte > 0.05) & (matte < 0.95)).sum() > 2.5 * outline),
        "small": area < 0.05,
        "large": area > 0.5,
        "multiple": objects >= 2,
        "low_contrast": _contrast(image, mask, inner, outer) < 0.07,
        "hole": _hole_area(mask) >= max(6.0, 0.001 * mask.size),
        "touching_border": bool(border.mean() >= 0.02),
    }


def _contrast(image, mask, inner, outer) -> float:
    inside, outside = mask & ~inner, outer & ~mask
    if not inside.any() or not outside.any():
        return 1.0
    return float(np.sqrt(((image[inside].mean(0) - image[outside].mean(0)) ** 2).sum()))


def _hole_area(mask: np.ndarray) -> int:
    labels, count = ndimage.label(~mask)
    if count < 2:
        return 0
    open_labels = np.unique(np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]]))
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    sizes[0] = 0
    sizes[open_labels] = 0
    return int(sizes.sum())
