"""Composed scenes as a dataset: scene ``i`` is a pure function of (seed, i), rendered when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage

from lumen_lab.datasets import compose, thin
from lumen_lab.datasets.sources import SourceBank, open_sources
from lumen_lab.errors import DatasetError

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)
ATTRIBUTES = ("thin", "soft_edge", "small", "large", "multiple", "low_contrast", "hole", "touching_border")
# How often each kind of scene is drawn; layouts name where the main cut-out stands.
MIXTURE = {"cutout": 0.76, "thin": 0.12, "shape": 0.12}
LAYOUTS = {"small": 0.12, "medium": 0.33, "large": 0.23, "fill": 0.18, "portrait": 0.14}


@dataclass(frozen=True)
class Scene:
    """One scene: ``image`` H×W×3 and ``matte`` H×W (float32, [0, 1]); the exact layers before the camera.

    ``sharp_image`` equals ``matte * foreground + (1 - matte) * background`` and is what the camera saw.
    """

    image: np.ndarray
    matte: np.ndarray
    sharp_image: np.ndarray
    foreground: np.ndarray
    background: np.ndarray
    kind: str
    objects: int


@dataclass
class _Layer:
    rgb: np.ndarray
    alpha: np.ndarray
    count: int = field(default=1)


class ComposedScenes(torch.utils.data.Dataset):
    """Map-style dataset of ``length`` scenes of ``size`` (H, W) from one split of ``sources`` (a bank or its folder).

    Item ``i`` is a dict: ``image`` float32 3×H×W (ImageNet-normalised unless ``normalise=False``, then in [0, 1]),
    ``matte`` float32 1×H×W in [0, 1], ``attributes`` bool of ``len(ATTRIBUTES)`` and ``index``. It depends on
    (seed, i), the split's sources, ``size`` and ``mixture`` alone. Raises ``DatasetError`` for an empty split.
    """

    def __init__(
        self,
        sources: SourceBank | str | Path,
        *,
        split: str = "train",
        size: tuple[int, int] = (192, 192),
        length: int = 10_000,
        seed: int = 0,
        normalise: bool = True,
        mixture: Mapping[str, float] = MIXTURE,
    ):
        bank = sources if isinstance(sources, SourceBank) else open_sources(sources)
        unknown = set(mixture) - set(MIXTURE)
        if unknown or not mixture or min(mixture.values()) < 0 or sum(mixture.values()) <= 0:
            raise DatasetError(f"A mixture of {dict(mixture)} was asked for; give shares >= 0 of {list(MIXTURE)}.")
        if min(size) < 32 or length < 1:
            raise DatasetError(f"Asked for {length} scenes of {size} px; scenes are at least 32 px, and at least one.")
        self.foregrounds = bank.select("foreground", split)
        self.backgrounds = bank.select("background", split)
        self.split, self.size, self.length, self.seed = split, tuple(size), length, seed
        self.normalise, self.mixture = normalise, dict(mixture)

    def __len__(self) -> int:
        return self.length

    def scene(self, index: int) -> Scene:
        """Scene ``index`` as numpy arrays, with its layers."""
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        rng = np.random.default_rng([self.seed, index])
        return compose_scene(self.foregrounds, self.backgrounds, size=self.size, rng=rng, mixture=self.mixture)

    def __getitem__(self, index: int) -> dict[str, object]:
        scene = self.scene(index)
        image = (scene.image - IMAGENET_MEAN) / IMAGENET_STD if self.normalise else scene.image
        flags = matte_attributes(scene.matte, scene.image, objects=scene.objects)
        return {
            "image": torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32)),
            "matte": torch.from_numpy(np.ascontiguousarray(scene.matte[None], dtype=np.float32)),
            "attributes": torch.tensor([flags[name] for name in ATTRIBUTES]),
            "index": index,
        }


def compose_scene(
    foregrounds, backgrounds, *, size: tuple[int, int], rng: np.random.Generator, mixture: Mapping[str, float] = MIXTURE
) -> Scene:
    """Draw one scene: background with its clutter, salient layers, shadow, composite, camera."""
    kind = _pick(mixture, rng)
    background = _background(foregrounds, backgrounds, size, rng)
    for _ in range(8):
        layer = _LAYER_MAKERS[kind](foregrounds, backgrounds, background, size, rng)
        if 0.004 < layer.alpha.mean() < 0.985:
            break
    background = _shadow(background, layer.alpha, rng)
    sharp = compose.composite(layer.rgb, layer.alpha, background)
    image = compose.camera(sharp, layer.alpha, rng=rng)
    return Scene(image, layer.alpha, sharp, layer.rgb, background, kind, layer.count)


def _pick(shares: Mapping[str, float], rng: np.random.Generator) -> str:
    names = list(shares)
    weights = np.array([shares[name] for name in names], float)
    return names[int(rng.choice(len(names), p=weights / weights.sum()))]


def _one(pictures, rng: np.random.Generator) -> np.ndarray:
    return pictures[int(rng.integers(len(pictures)))]


def _background(foregrounds, backgrounds, size, rng) -> np.ndarray:
    draw = rng.random()
    if draw < 0.16:
        ground = compose.backdrop(size, rng=rng)
    else:
        ground = compose.crop_background(_one(backgrounds, rng), size=size, rng=rng)
        if draw < 0.34:
            other = compose.backdrop(size, rng=rng) if draw < 0.25 else None
            if other is None:
                other = compose.crop_background(_one(backgrounds, rng), size=size, rng=rng)
            ground = compose.two_planes(other, ground, rng=rng)
    if rng.random() < 0.25:
        ground = compose.mix_channels(ground, rng=rng)
    ground = compose.shade(ground, rng=rng, gamma=math.exp(rng.normal(0, 0.3)))
    per_192 = min(size) / 192
    sigma_px = rng.exponential(2.2) * per_192 if rng.random() < 0.6 else 0.0
    for _ in range(int(rng.choice([0, 1, 2, 4], p=[0.6, 0.2, 0.12, 0.08]))):
        ground = _add_clutter(ground, foregrounds, size, rng, fade=0.2 if sigma_px > 1.5 * per_192 else 0.55)
    return compose.blur(ground, min(sigma_px, 10 * per_192))


def _add_clutter(ground, foregrounds, size, rng, *, fade: float) -> np.ndarray:
    """Paste a cut-out that is not salient: it takes the ground's colours and fades into it."""
    long_side = min(size) * rng.uniform(0.12, 0.7 if fade < 0.5 else 0.35)
    rgb, alpha = _placed(_one(foregrounds, rng), size, rng, long_side, rng.uniform(0, 1, 2) * size, max_angle_deg=25)
    rgb = compose.harmonise(rgb, alpha, ground, strength=rng.uniform(0.5, 0.95))
    return compose.composite(rgb, alpha * np.float32(1 - fade * rng.uniform(0.6, 1.2)), ground)


def _placed(rgba, size, rng, long_side_px, centre_px, *, max_angle_deg):
    if rng.random() < 0.5:
        rgba = rgba[:, ::-1]
    angle_deg = rng.uniform(-180, 180) if rng.random() < 0.08 else rng.normal(0, max_angle_deg / 2)
    return compose.place_cutout(
        np.ascontiguousarray(rgba),
        size=size,
        centre_px=tuple(centre_px),
        scale=long_side_px / max(rgba.shape[:2]),
        angle_deg=angle_deg,
        shear=rng.normal(0, 0.08),
        stretch=math.exp(rng.normal(0, 0.1)),
    )


def _layout(rgba, size, rng) -> tuple[float, np.ndarray]:
    """Long side in px and centre (row, column) of the main object."""
    side, sizes = min(size), np.array(size, float)
    name = _pick(LAYOUTS, rng)
    if name == "small":
        return side * rng.uniform(0.14, 0.32), rng.uniform(0.12, 0.88, 2) * sizes
    if name == "medium":
        return side * rng.uniform(0.32, 0.75), rng.uniform(0.28, 0.72, 2) * sizes
    if name == "large":
        return side * rng.uniform(0.75, 1.1), rng.uniform(0.42, 0.58, 2) * sizes
    if name == "fill":
        return side * rng.uniform(1.1, 2.0), rng.uniform(0.3, 0.7, 2) * sizes
    height, width = rgba.shape[:2]
    across = side * rng.uniform(0.5, 1.05)  # a portrait: as wide as most of the frame, cut off below
    tall = across * height / width
    top = size[0] * rng.uniform(0.03, 0.3)
    tall = min(max(tall, size[0] - top), 2.5 * side)
    return max(tall, tall * width / height), np.array([top + tall / 2, size[1] * rng.uniform(0.35, 0.65)])


def _cutout_layer(foregrounds, backgrounds, ground, size, rng) -> _Layer:
    rgb = np.zeros((*size, 3), np.float32)
    alpha = np.zeros(size, np.float32)
    count = 0
    for k in range(int(rng.choice([1, 2, 3], p=[0.76, 0.17, 0.07]))):
        rgba = _one(foregrounds, rng)
        if k == 0:
            long_side_px, centre = _layout(rgba, size, rng)
        else:
            long_side_px, centre = min(size) * rng.uniform(0.25, 0.6), rng.uniform(0.1, 0.9, 2) * size
        front, matte = _dressed(rgba, ground, size, rng, long_side_px, centre)
        if matte.sum() < 30:
            continue
        union = compose.over(matte, alpha)
        share = (matte / np.maximum(union, 1e-6))[..., None]
        rgb, alpha, count = front * share + rgb * (1 - share), union, count + 1
    return _Layer(rgb, alpha, count)


def _dressed(rgba, ground, size, rng, long_side_px, centre) -> tuple[np.ndarray, np.ndarray]:
    """Place one salient cut-out and give it the scene's colours, light and focus."""
    rgb, alpha = _placed(rgba, size, rng, long_side_px, centre, max_angle_deg=20)
    if rng.random() < 0.2:
        rgb = compose.mix_channels(rgb, rng=rng)
    strength = rng.uniform(0.6, 0.9) if rng.random() < 0.15 else rng.uniform(0, 0.45)
    rgb = compose.harmonise(rgb, alpha, ground, strength=strength)
    light = compose.light_gradient(size, rng=rng, strength=rng.uniform(0.1, 0.9)) if rng.random() < 0.6 else None
    rgb = compose.shade(rgb, rng=rng, light=light, gamma=math.exp(rng.normal(0, 0.25)))
    draw, per_192 = rng.random(), min(size) / 192
    if draw < 0.12:
        return compose.blur_layer(rgb, alpha, rng.uniform(0.5, 2.2) * per_192)
    if draw < 0.17:
        return compose.motion_blur(
            rgb, alpha, length_px=rng.uniform(3, 10) * per_192, angle_deg=rng.choice([0, 90, rng.uniform(0, 180)])
        )
    return rgb, alpha


def _textured(alpha, backgrounds, ground, size, rng) -> np.ndarray:
    """Colours for a drawn alpha: a crop of another photograph, or noise, moved away from the ground's mean."""
    if rng.random() < 0.5:
        rgb = compose.crop_background(_one(backgrounds, rng), size=size, rng=rng)
        rgb = compose.mix_channels(rgb, rng=rng) if rng.random() < 0.6 else rgb
    else:
        rgb = compose.backdrop(size, rng=rng)
    weight = alpha / max(float(alpha.sum()), 1e-6)
    gap = np.einsum("hwc,hw->c", rgb - ground, weight) @ compose.LUMA
    least = rng.uniform(0.1, 0.4)
    if abs(gap) < least:
        away = least if gap >= 0 else -least
        behind = float(np.einsum("hwc,hw->c", ground, weight) @ compose.LUMA)
        away = -abs(away) if behind + away > 0.95 else abs(away) if behind + away < 0.05 else away
        rgb = np.clip(rgb + np.float32(away - gap), 0, 1)
    return compose.shade(rgb, rng=rng, light=compose.light_gradient(size, rng=rng, strength=rng.uniform(0.2, 0.8)))


def _thin_layer(foregrounds, backgrounds, ground, size, rng) -> _Layer:
    alpha = thin.draw_thin(list(thin.STRUCTURES)[int(rng.integers(len(thin.STRUCTURES)))], size=size, rng=rng)
    return _Layer(_textured(alpha, backgrounds, ground, size, rng), alpha)


def _shape_layer(foregrounds, backgrounds, ground, size, rng) -> _Layer:
    alpha = thin.draw_shape(size=size, rng=rng)
    rgb = _textured(alpha, backgrounds, ground, size, rng)
    if rng.random() < 0.15:
        rgb, alpha = compose.blur_layer(rgb, alpha, rng.uniform(0.5, 2.0) * min(size) / 192)
    return _Layer(rgb, alpha)


_LAYER_MAKERS = {"cutout": _cutout_layer, "thin": _thin_layer, "shape": _shape_layer}


def _shadow(background, alpha, rng) -> np.ndarray:
    if rng.random() >= 0.55:
        return background
    per_192 = min(alpha.shape) / 192
    return compose.cast_shadow(
        background,
        alpha,
        offset_px=(rng.uniform(0, 12) * per_192, rng.normal(0, 6) * per_192),
        sigma_px=rng.uniform(1.5, 9) * per_192,
        strength=rng.uniform(0.2, 0.7),
    )


def matte_attributes(matte: np.ndarray, image: np.ndarray, *, objects: int = 1) -> dict[str, bool]:
    """The attributes of a scene, from its matte (H×W), image (H×W×3) and number of salient objects.

    With the mask ``matte > 0.5`` and lengths as shares of the short side S: ``thin``: an opening by a square of
    3.2 % S removes over 30 % of the mask; ``soft_edge``: over 2.5 pixels of 0.05 < matte < 0.95 per pixel of
    outline; ``small`` / ``large``: under 5 % / over 50 % of the frame; ``multiple``: two objects or more;
    ``low_contrast``: mean colours just inside and outside differ by less than 0.1 (root of summed squares);
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
        "low_contrast": _contrast(image, mask, inner, outer) < 0.1,
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
