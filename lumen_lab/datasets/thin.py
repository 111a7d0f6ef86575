"""Procedural thin structures and plain shapes, drawn with an exact anti-aliased matte.

Each structure is drawn as a binary mask on a canvas ``OVERSAMPLING`` times finer and averaged down, so the alpha of
a pixel is the share of it that the structure covers (in steps of 1/16). Thin structure is where eight bits lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

OVERSAMPLING = 4
Canvas = tuple[ImageDraw.ImageDraw, tuple[int, int], np.random.Generator]


def draw_thin(kind: str, *, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """float32 H×W alpha of one structure of ``kind`` (a key of ``STRUCTURES``) in a frame of ``size``."""
    fine = (size[0] * OVERSAMPLING, size[1] * OVERSAMPLING)
    image = Image.new("L", fine[::-1], 0)
    STRUCTURES[kind](ImageDraw.Draw(image), fine, rng)
    return np.asarray(image.reduce(OVERSAMPLING)).astype(np.float32) / np.float32(255)


def _width(fine: tuple[int, int], rng: np.random.Generator, low: float = 0.005, high: float = 0.016) -> int:
    """Line width on the fine canvas: a share of the short side, and at least one pixel of the frame."""
    return max(OVERSAMPLING, round(min(fine) * rng.uniform(low, high)))


def _curve(start, end, bend, steps: int = 24) -> list[tuple[float, float]]:
    """Points of a quadratic curve from start to end whose middle is pulled by ``bend`` (all x, y)."""
    t = np.linspace(0, 1, steps)[:, None]
    middle = (np.asarray(start) + np.asarray(end)) / 2 + np.asarray(bend)
    points = (1 - t) ** 2 * np.asarray(start) + 2 * t * (1 - t) * middle + t**2 * np.asarray(end)
    return [tuple(point) for point in points]


def _fence(draw, fine, rng) -> None:
    height, width = fine
    top, bottom = height * rng.uniform(0.1, 0.4), height * rng.uniform(0.75, 1.1)
    left, right = width * rng.uniform(-0.1, 0.2), width * rng.uniform(0.8, 1.1)
    slope = rng.normal(0, 0.04)
    thick = _width(fine, rng, 0.008, 0.02)
    for x in np.linspace(left, right, int(rng.integers(6, 16))):
        lift = (x - left) * slope
        draw.line([(x, top + lift), (x, bottom + lift)], fill=255, width=thick)
    for share in rng.uniform(0.05, 0.95, int(rng.integers(2, 4))):
        y = top + (bottom - top) * share
        draw.line([(left, y), (right, y + (right - left) * slope)], fill=255, width=thick)


def _wires(draw, fine, rng) -> None:
    height, width = fine
    for _ in range(int(rng.integers(2, 6))):
        ends = rng.uniform(0.05, 0.8, 2) * height
        sag = (0, height * rng.uniform(-0.05, 0.35))
        points = _curve((-5, ends[0]), (width + 5, ends[1]), sag)
        draw.line(points, fill=255, width=_width(fine, rng), joint="curve")
    if rng.random() < 0.7:
        x, thick = width * rng.uniform(0.15, 0.85), _width(fine, rng, 0.02, 0.04)
        draw.line([(x, height * rng.uniform(0, 0.2)), (x + width * rng.normal(0, 0.02), height + 5)], 255, thick)
        y = height * rng.uniform(0.15, 0.3)
        draw.line([(x - width * 0.13, y), (x + width * 0.13, y)], fill=255, width=thick // 2 + 1)


def _foliage(draw, fine, rng) -> None:
    height, width = fine
    root = np.array([width * rng.uniform(0.2, 0.8), height * 1.02])
    stack = [(root, -math.pi / 2 + rng.normal(0, 0.2), height * rng.uniform(0.22, 0.34), _width(fine, rng, 0.02, 0.04))]
    leaves = rng.random() < 0.6
    count = 0
    while stack and count < 130:
        start, turn, length, thick = stack.pop(0)
        end = start + length * np.array([math.cos(turn), math.sin(turn)])
        bend = rng.normal(0, 0.08, 2) * length
        draw.line(_curve(start, end, bend, 8), fill=255, width=max(OVERSAMPLING, int(thick)), joint="curve")
        count += 1
        if length > height * 0.04:
            for side in rng.normal(0, 0.55, int(rng.integers(2, 4))):
                stack.append((end, turn + side, length * rng.uniform(0.6, 0.85), thick * 0.65))
        elif leaves:
            r = height * rng.uniform(0.008, 0.02)
            draw.ellipse([end[0] - r, end[1] - r * 0.6, end[0] + r, end[1] + r * 0.6], fill=255)


def _wheel(draw, fine, rng) -> None:
    height, width = fine
    radius = min(fine) * rng.uniform(0.25, 0.55)
    cx, cy = width * rng.uniform(0.35, 0.65), height * rng.uniform(0.4, 0.6)
    squash = rng.uniform(0.55, 1.0)
    tyre, spoke = _width(fine, rng, 0.02, 0.04), _width(fine, rng, 0.004, 0.009)
    box = [cx - radius * squash, cy - radius, cx + radius * squash, cy + radius]
    draw.ellipse(box, outline=255, width=tyre)
    hub = radius * rng.uniform(0.06, 0.12)
    draw.ellipse([cx - hub, cy - hub, cx + hub, cy + hub], fill=255)
    first, skew = rng.uniform(0, math.pi), rng.choice([0.0, 0.25])
    count = int(rng.integers(8, 26))
    for k, turn in enumerate(first + np.linspace(0, 2 * math.pi, count, endpoint=False)):
        inner = turn + (skew if k % 2 else -skew) * 4
        start = (cx + hub * squash * math.cos(inner), cy + hub * math.sin(inner))
        draw.line([start, (cx + radius * squash * math.cos(turn), cy + radius * math.sin(turn))], 255, spoke)


def _hair(draw, fine, rng) -> None:
    height, width = fine
    cx, cy = width * rng.uniform(0.35, 0.65), height * rng.uniform(0.45, 0.7)
    radius = min(fine) * rng.uniform(0.15, 0.28)
    tall = radius * rng.uniform(1.0, 1.4)
    draw.ellipse([cx - radius, cy - tall, cx + radius, cy + tall], fill=255)
    comb = rng.normal(0, 0.6)
    for turn in rng.uniform(-math.pi * 1.1, 0.1 * math.pi, int(rng.integers(60, 140))):
        start = np.array([cx + 0.95 * radius * math.cos(turn), cy + 0.95 * tall * math.sin(turn)])
        out = np.array([math.cos(turn + comb), math.sin(turn + comb)]) * radius * rng.uniform(0.3, 1.3)
        end = start + out + (0, radius * rng.uniform(-0.1, 0.6))
        draw.line(_curve(start, end, rng.normal(0, 0.15, 2) * radius, 12), 255, _width(fine, rng, 0.003, 0.007))


def _net(draw, fine, rng) -> None:
    height, width = fine
    step = min(fine) * rng.uniform(0.07, 0.16)
    thick = _width(fine, rng, 0.004, 0.01)
    x0, x1 = width * rng.uniform(-0.1, 0.25), width * rng.uniform(0.75, 1.1)
    y0, y1 = height * rng.uniform(-0.1, 0.25), height * rng.uniform(0.75, 1.1)
    phase, sway = rng.uniform(0, 6), step * rng.uniform(0, 0.5)
    tilt = rng.choice([0.0, 1.0])

    def warp(u: np.ndarray, v: np.ndarray) -> list[tuple[float, float]]:
        return list(zip(u + sway * np.sin(v / step * 0.7 + phase), v + sway * np.sin(u / step * 0.6 + phase)))

    t = np.linspace(0, 1, 40)
    for x in np.arange(x0, x1 + step / 2, step):
        draw.line(warp(x + tilt * step * 2 * (t - 0.5), y0 + t * (y1 - y0)), fill=255, width=thick, joint="curve")
    for y in np.arange(y0, y1 + step / 2, step):
        draw.line(warp(x0 + t * (x1 - x0), y + tilt * step * 2 * (t - 0.5)), fill=255, width=thick, joint="curve")


def _lattice(draw, fine, rng) -> None:
    height, width = fine
    half = width * rng.uniform(0.08, 0.2)
    cx, top, bottom = width * rng.uniform(0.3, 0.7), height * rng.uniform(0.02, 0.2), height * rng.uniform(0.8, 1.05)
    taper, thick = rng.uniform(0.2, 1.0), _width(fine, rng, 0.008, 0.016)
    levels = np.linspace(top, bottom, int(rng.integers(5, 12)))
    spread = half * (taper + (1 - taper) * np.linspace(0, 1, levels.size))
    for y0, y1, s0, s1 in zip(levels, levels[1:], spread, spread[1:]):
        corners = [(cx - s0, y0), (cx + s0, y0), (cx + s1, y1), (cx - s1, y1)]
        draw.line([corners[3], corners[0], corners[1], corners[2]], fill=255, width=thick)
        draw.line([corners[0], corners[2]], fill=255, width=max(OVERSAMPLING, thick * 2 // 3))
        draw.line([corners[1], corners[3]], fill=255, width=max(OVERSAMPLING, thick * 2 // 3))
    draw.line([(cx - spread[-1], bottom), (cx + spread[-1], bottom)], fill=255, width=thick)


STRUCTURES: dict[str, Callable] = {
    "fence": _fence,
    "wires": _wires,
    "foliage": _foliage,
    "bicycle wheel": _wheel,
    "hair": _hair,
    "net": _net,
    "lattice": _lattice,
}


def draw_shape(*, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """float32 H×W alpha of a smooth random closed shape, with a hole in one of four: a salient thing of no class."""
    fine = (size[0] * OVERSAMPLING, size[1] * OVERSAMPLING)
    image = Image.new("L", fine[::-1], 0)
    draw = ImageDraw.Draw(image)
    turn = np.linspace(0, 2 * math.pi, 120, endpoint=False)
    radius = np.ones_like(turn)
    for wave in range(2, int(rng.integers(4, 9))):
        radius += rng.normal(0, 0.35 / wave) * np.cos(wave * turn + rng.uniform(0, 2 * math.pi))
    power = rng.uniform(0.5, 1.3)  # below 1 squares the outline, above 1 points it
    x = np.sign(np.cos(turn)) * np.abs(np.cos(turn)) ** power * np.clip(radius, 0.25, 2)
    y = np.sign(np.sin(turn)) * np.abs(np.sin(turn)) ** power * np.clip(radius, 0.25, 2)
    tilt, reach = rng.uniform(0, math.pi), min(fine) * rng.uniform(0.15, 0.65)
    narrow = rng.uniform(0.35, 1.0)
    u = x * math.cos(tilt) - y * narrow * math.sin(tilt)
    v = x * math.sin(tilt) + y * narrow * math.cos(tilt)
    cx, cy = fine[1] * rng.uniform(0.25, 0.75), fine[0] * rng.uniform(0.25, 0.75)
    draw.polygon(list(zip(cx + reach * u, cy + reach * v)), fill=255)
    if rng.random() < 0.25:
        inner = reach * rng.uniform(0.3, 0.75)
        draw.polygon(list(zip(cx + inner * u, cy + inner * v)), fill=0)
    return np.asarray(image.reduce(OVERSAMPLING)).astype(np.float32) / np.float32(255)
