"""Mattes whose parts are known, predictions of them, and ways to spoil one."""

import numpy as np
from scipy import ndimage

FINE = 4
SIZE = (128, 144)


def averaged(fine):
    """The canvas, FINE times finer, brought down: the share of each pixel that is covered."""
    height, width = fine.shape[0] // FINE, fine.shape[1] // FINE
    return fine.reshape(height, FINE, width, FINE).mean((1, 3))


def axes(size=SIZE):
    """Row and column of each point of the fine canvas, in pixels of the picture."""
    y, x = np.mgrid[: size[0] * FINE, : size[1] * FINE]
    return (y + 0.5) / FINE, (x + 0.5) / FINE


def disc(row, column, radius, size=SIZE):
    y, x = axes(size)
    return averaged(np.hypot(y - row, x - column) < radius)


def body_and_rod(size=SIZE):
    """(body, rod): a disc, and a rod three pixels wide that sticks out of it to the right; disjoint up to one pixel."""
    y, x = axes(size)
    body = np.hypot(y - 48, x - 40) < 26
    rod = (abs(y - 48 - 0.2 * (x - 66)) < 1.5) & (x > 60) & (x < 108) & ~body
    return averaged(body), averaged(rod)


def mattes():
    """Name → matte, float (H, W): what the golden values are taken on."""
    body, rod = body_and_rod()
    ring = disc(50, 50, 34) - disc(50, 50, 18)
    border = np.zeros(SIZE)
    border[90:, 20:110] = 1
    return {
        "disc": disc(40, 60, 25),
        "disc with a rod": np.clip(body + rod, 0, 1),
        "two apart": np.clip(disc(25, 28, 14) + disc(70, 84, 14), 0, 1),
        "ring": ring,
        "cut by the border": border,
        "soft": ndimage.gaussian_filter(disc(48, 50, 24), 5),
        "small": disc(20.5, 80.5, 3),
    }


def predicted(matte, *, seed=0):
    """A prediction of the matte as a network might give it, at 8 bits: shifted by a pixel, softer, uneven."""
    uneven = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=matte.shape), 6)
    soft = ndimage.gaussian_filter(ndimage.shift(matte, (1, 0), order=1, mode="nearest"), 1.2)
    return np.rint(np.clip(0.03 + 0.9 * soft + 0.4 * uneven * (soft > 0.1), 0, 1) * 255) / 255


def eight_bit(values):
    return np.rint(values * 255).astype(np.uint8)
