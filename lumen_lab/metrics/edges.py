"""What the field's measures lack: the boundary, the thin part and the softness of an edge."""

from __future__ import annotations

import math

import numpy as np
from scipy import ndimage

BAND_SHARE = 0.02
"""Width of the boundary band as a share of the image's diagonal: the value of Cheng et al."""

THIN_SHARE = 0.032
"""Side of the square that opens a mask to find its thin part, as a share of the short side."""

EDGE_SHARE = 0.05
"""How far from the 0.5 contour a soft edge is looked for, as a share of the short side."""

SOLID = 0.25
"""A prediction nearer to 0 or 1 than this counts as settled, not as soft: a dull object or a haze is not an edge."""

_NEIGHBOURS = np.ones((3, 3), dtype=bool)


def boundary_band(mask: np.ndarray) -> np.ndarray:
    """Pixels of the mask, bool (H, W), within d king's moves of its outside: bool (H, W).

    d is 2 % of the diagonal, rounded, at least 1. The frame counts as outside, as in the authors' code.
    """
    width_px = max(1, round(BAND_SHARE * math.hypot(*mask.shape)))
    return mask & ~_eroded(mask, 2 * width_px + 1, mode="constant")


def boundary_iou(found: np.ndarray, mask: np.ndarray) -> float:
    """IoU of the boundary bands of two bool masks (H, W); 1 where both masks are empty."""
    return _iou(boundary_band(found), boundary_band(mask))


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    union = np.count_nonzero(a | b)
    return float(np.count_nonzero(a & b) / union) if union else 1.0


def thin_width_px(shape: tuple[int, int]) -> int:
    """The width, in pixels, from which an upright part counts as thick: 3.2 % of the short side, made odd, at least 3.

    It is the side of a square, which needs more room in a part that leans: parts count as thin up to about √2 wider on
    a diagonal. At 192 px, where the square has 7, bars are thin up to 6 px upright, 7 at 15°, 8 at 30° and 45°.
    """
    return max(3, round(THIN_SHARE * min(shape)) | 1)


def thin_part(mask: np.ndarray) -> np.ndarray:
    """The thin part of a mask, bool (H, W): bool (H, W).

    The mask's opening by a square of ``thin_width_px`` = w pixels a side is its thick part, as for the attribute
    ``thin`` of a scene; what that opening removes is rods, hair and nets, but also corners, specks and roughness. A
    connected piece of it (diagonals connect) counts only if it

    - leads more than w steps (king's moves inside the mask) away from the thick part, or does not touch it. A right
      angle turned by 45° loses a tip of w/2, so the corners of thick shapes drop out; a tip stays if it is sharper
      than 53° where it points along the frame, and than 37° on a diagonal. A bridge between two thick parts has to be
      longer than 2 w;
    - has a bounding box of at least w pixels in one direction. Specks drop out.

    The smallest thin part is thus a line of w pixels, 3.2 % of the short side.
    """
    width_px = thin_width_px(mask.shape)
    thick = _dilated(_eroded(mask, width_px), width_px)
    removed = mask & ~thick
    near = ndimage.binary_dilation(thick, _NEIGHBOURS, iterations=width_px, mask=mask)
    labels, count = ndimage.label(removed, _NEIGHBOURS)
    reaches_out = np.bincount(labels[removed & ~near], minlength=count + 1) > 0
    sides = [max(s.stop - s.start for s in box) for box in ndimage.find_objects(labels)]
    is_long = np.array([0, *sides]) >= width_px
    return (reaches_out & is_long)[labels]


def recall(found: np.ndarray, part: np.ndarray) -> float | None:
    """Share of ``part`` that ``found`` holds (bool, H×W); None where there is no such part."""
    total = np.count_nonzero(part)
    return float(np.count_nonzero(found & part) / total) if total else None


def soft_edge_px(values: np.ndarray) -> float | None:
    """Width in pixels of the soft edge of a prediction or matte, float (H, W) in [0, 1]; None without a 0.5 contour.

    With q = clip((p − 0.25) / 0.5, 0, 1), summed over the pixels within R of the contour (king's moves; R is 5 % of
    the short side):

        width = (6 / 0.5) · Σ q (1 − q) / length

    where ``length`` is the mean length of the level sets of p from 0.25 to 0.75, by the coarea formula the sum of the
    gradient of q. Along a straight linear ramp over w pixels Σ q (1 − q) is 0.5 w / 6 per pixel of length, so that the
    width is w; a step blurred by a Gaussian of σ has about 2.6 σ. A hard edge has 0. An anti-aliased one has about 1
    around a shape, but 0 or 3 where all of a side lies alike between its pixels.

    An object may be as dull as 0.75 and a background as bright as 0.25: only the slope between them counts, and a ramp
    that spans a share c of [0, 1] has the width w / c, that of the same slope from 0 to 1. Grey between 0.25 and 0.75
    beside the contour does count as soft. Nothing wider than 2 R can be seen; that is also the value where the contour
    is too faint.
    """
    inside = values > 0.5
    if inside.all() or not inside.any():
        return None
    reach_px = max(1, round(EDGE_SHARE * min(values.shape)))
    near = _dilated(inside, 2 * reach_px + 1) & ~_eroded(inside, 2 * reach_px + 1)
    settled = np.clip((values - SOLID) / (1 - 2 * SOLID), 0, 1)
    softness = 6 / (1 - 2 * SOLID) * float((settled * (1 - settled))[near].sum())
    return min(softness / _contour_length_px(settled, near), 2.0 * reach_px)


def _contour_length_px(settled: np.ndarray, near: np.ndarray) -> float:
    right = np.diff(settled, axis=1, append=settled[:, -1:])
    down = np.diff(settled, axis=0, append=settled[-1:])
    return float(np.hypot(right, down)[near].sum())


def _eroded(mask: np.ndarray, side_px: int, mode: str = "nearest") -> np.ndarray:
    return ndimage.minimum_filter(mask, side_px, mode=mode)


def _dilated(mask: np.ndarray, side_px: int) -> np.ndarray:
    return ndimage.maximum_filter(mask, side_px, mode="nearest")
