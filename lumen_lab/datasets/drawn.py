"""Sources drawn by a program: cut-outs and backgrounds for composed scenes where there are no photographs.

They stand in for pictures in a first try, an offline notebook and a test; a network that must see photographs is
trained on photographs.
"""

from __future__ import annotations

import numpy as np

from lumen_lab.datasets import compose, thin
from lumen_lab.datasets.asked import checked_number
from lumen_lab.datasets.sources import Source, SourceBank, SourceIndex
from lumen_lab.errors import DatasetError

CYCLE = ("train", "train", "validation", "train", "test")
"""Splits of pictures 0, 1, 2 …, over and over: more pictures leave the earlier ones where they are."""

MIN_SIDE_PX = 32


def drawn_sources(*, pictures: int = 40, side_px: int = 256, seed: int = 0) -> SourceBank:
    """A bank of ``pictures`` drawn cut-outs and as many backgrounds, split 3 : 1 : 1.

    Backgrounds are ``side_px`` high and wide; cut-outs are drawn so large and then cropped to what shows. Picture i and
    its split are a function of (seed, i, ``side_px``) alone: the same bits on every machine whose numpy, scipy and
    Pillow round alike. ``DatasetError`` below 5 pictures, where a split would be empty, below 32 px, and where a
    number is not whole or the seed is negative.
    """
    pictures, side_px = checked_number(pictures, "pictures", least=0), checked_number(side_px, "side_px", least=0)
    seed = checked_number(seed, "seed", least=0)
    if pictures < len(CYCLE) or side_px < MIN_SIDE_PX:
        raise DatasetError(
            f"Asked for {pictures} drawn pictures of {side_px} px; it takes {len(CYCLE)} for one in every split, and "
            f"{MIN_SIDE_PX} px to draw on."
        )
    sources, pixels = [], []
    for kind, draw in (("foreground", draw_cutout), ("background", draw_backdrop)):
        for index in range(pictures):
            drawn = draw((side_px, side_px), rng=np.random.default_rng([seed, index, kind == "foreground"]))
            name = f"drawn/{kind}/{seed}/{index:04d}"
            sources.append(Source(name, kind, name, CYCLE[index % len(CYCLE)], drawn.shape[:2]))
            pixels.append(drawn)
    counts = {"foreground": pictures, "background": pictures}
    return SourceBank(SourceIndex(counts, counts, {}, tuple(sources)), tuple(pixels))


def draw_cutout(size: tuple[int, int], *, rng: np.random.Generator) -> np.ndarray:
    """uint8 h×w×4: a smooth random shape, or a thin structure one time in four, textured, lit and cropped to its alpha.

    ``size`` is the frame that it is drawn in.
    """
    if rng.random() < 0.25:
        alpha = thin.draw_thin(str(rng.choice(list(thin.STRUCTURES))), size=size, rng=rng)
    else:
        alpha = thin.draw_shape(size=size, rng=rng)
    rgb = compose.backdrop(size, rng=rng)
    if rng.random() < 0.5:  # a part of another colour: an edge inside the object is not its outline
        part = thin.draw_shape(size=size, rng=rng)[..., None]
        rgb = rgb + part * (compose.backdrop(size, rng=rng) - rgb)
    rgb = compose.shade(rgb, rng=rng, light=compose.relief_light(alpha, rng=rng, depth_px=0.03 * min(size)))
    rgba = np.concatenate([compose.to_uint8(rgb), compose.to_uint8(alpha)[..., None]], axis=2)
    rows, columns = np.nonzero(rgba[..., 3])
    return np.ascontiguousarray(rgba[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1])


def draw_backdrop(size: tuple[int, int], *, rng: np.random.Generator) -> np.ndarray:
    """uint8 H×W×3: one backdrop, or two that meet at a horizon."""
    ground = compose.backdrop(size, rng=rng)
    if rng.random() < 0.5:
        ground = compose.two_planes(compose.backdrop(size, rng=rng), ground, rng=rng)
    return compose.to_uint8(ground)
