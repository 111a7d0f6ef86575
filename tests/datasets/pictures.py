"""Small cut-outs and backgrounds that the tests draw themselves: photographs by their statistics, of nothing."""

import numpy as np
from PIL import Image

FOREGROUNDS, BACKGROUNDS = 40, 40


def grainy(shape, seed, low=30, high=220):
    """uint8 H×W×3 of smooth colour with grain: many colours, no flat area."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(low, high, (5, 5, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-12, 13, (*shape, 3)), 0, 255).astype(np.uint8)


def disc_alpha(shape, radius_px):
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    distance = np.hypot(rows - (shape[0] - 1) / 2, columns - (shape[1] - 1) / 2)
    return (np.clip(radius_px - distance + 0.5, 0, 1) * 255).astype(np.uint8)


def cut_out(seed, shape=(64, 72), radius_px=30):
    return np.dstack([grainy(shape, seed), disc_alpha(shape, radius_px)])


def write_folder(root, *, foregrounds=FOREGROUNDS, backgrounds=BACKGROUNDS):
    """A folder of sources: ``foregrounds/`` and ``backgrounds/``, each picture from its own seed."""
    (root / "foregrounds").mkdir(parents=True)
    (root / "backgrounds").mkdir()
    for k in range(foregrounds):
        Image.fromarray(cut_out(k)).save(root / "foregrounds" / f"thing{k:02d}.png")
    for k in range(backgrounds):
        Image.fromarray(grainy((240, 260), 1000 + k)).save(root / "backgrounds" / f"place{k:02d}.png")
    return root
