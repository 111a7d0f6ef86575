"""Sources drawn by a program: cut-outs and backgrounds for composed scenes where there are no photographs.

They stand in for pictures in a first try, an offline notebook and a test; a network that must see photographs is
trained on photographs.
"""

from __future__ import annotations

import numpy as np

from lumen_lab.datasets import compose, thin
from lumen_lab.datasets.sources import SPLITS, Source, SourceBank, SourceIndex

SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}


def drawn_sources(*, pictures: int = 40, side_px: int = 256, seed: int = 0) -> SourceBank:
    """A bank of ``pictures`` drawn cut-outs and as many backgrounds, ``side_px`` high and wide, split 3 : 1 : 1.

    Picture i is a pure function of (seed, i): the same bits on every machine with the same numpy, scipy and Pillow.
    """
    sources, pixels = [], []
    for kind, draw in (("foreground", draw_cutout), ("background", draw_backdrop)):
        for index in range(pictures):
            rng = np.random.default_rng([seed, index, kind == "foreground"])
            drawn = draw((side_px, side_px), rng=rng)
            name = f"drawn/{kind}/{seed}/{index:04d}"
            sources.append(Source(name, kind, name, _split(index, pictures), drawn.shape[:2]))
            pixels.append(drawn)
    counts = {"foreground": pictures, "background": pictures}
    return SourceBank(SourceIndex(counts, counts, {}, tuple(sources)), tuple(pixels))


def draw_cutout(size: tuple[int, int], *, rng: np.random.Generator) -> np.ndarray:
    """uint8 H×W×4: a smooth random shape, or a thin structure one time in four, textured and lit."""
    if rng.random() < 0.25:
        alpha = thin.draw_thin(str(rng.choice(list(thin.STRUCTURES))), size=size, rng=rng)
    else:
        alpha = thin.draw_shape(size=size, rng=rng)
    rgb = compose.backdrop(size, rng=rng)
    if rng.random() < 0.5:  # a part of another colour: an edge inside the object is not its outline
        part = thin.draw_shape(size=size, rng=rng)[..., None]
        rgb = rgb + part * (compose.backdrop(size, rng=rng) - rgb)
    rgb = compose.shade(rgb, rng=rng, light=compose.relief_light(alpha, rng=rng, depth_px=0.03 * min(size)))
    return np.concatenate([compose.to_uint8(rgb), compose.to_uint8(alpha)[..., None]], axis=2)


def draw_backdrop(size: tuple[int, int], *, rng: np.random.Generator) -> np.ndarray:
    """uint8 H×W×3: one backdrop, or two that meet at a horizon."""
    ground = compose.backdrop(size, rng=rng)
    if rng.random() < 0.5:
        ground = compose.two_planes(compose.backdrop(size, rng=rng), ground, rng=rng)
    return compose.to_uint8(ground)


def _split(index: int, pictures: int) -> str:
    place, end = (index + 0.5) / pictures, 0.0
    for split in SPLITS:
        end += SHARES[split]
        if place < end:
            break
    return split
