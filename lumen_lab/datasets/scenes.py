"""Composed scenes as a dataset: scene ``i`` is a pure function of (seed, i), rendered when it is asked for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lumen_lab.datasets import compose, thin
from lumen_lab.datasets.asked import checked_mixture, checked_number, checked_size
from lumen_lab.datasets.attributes import ATTRIBUTES, matte_attributes
from lumen_lab.datasets.sample import Sample
from lumen_lab.datasets.sources import SourceBank, open_sources
from lumen_lab.images import IMAGENET_MEAN, IMAGENET_STD
from lumen_lab.specs import files_sha256

SCENE_CODE = tuple(
    Path(__file__).with_name(f"{name}.py") for name in ("attributes", "compose", "drawn", "scenes", "thin")
)
"""The code that draws a scene and tells its attributes."""

# How often each kind of scene is drawn; layouts name where the main cut-out stands.
MIXTURE = {"cutout": 0.78, "thin": 0.12, "shape": 0.10}
MOST_ENLARGED = 2.2  # beyond that a cut-out's edge shows its pixels
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
    count: int


class ComposedScenes(torch.utils.data.Dataset):
    """Map-style dataset of ``length`` scenes of ``size`` (H, W) from one split of ``sources`` (a bank or its folder).

    Item ``i`` is a dict: ``image`` float32 3×H×W (ImageNet-normalised unless ``normalise=False``, then in [0, 1]),
    ``matte`` float32 1×H×W in [0, 1], ``attributes`` bool of ``len(ATTRIBUTES)`` and ``index``. It depends on
    (seed, i), the split's sources, ``size`` and ``mixture`` alone: the same bits in every process, and across machines
    what the same versions of numpy, scipy and Pillow round alike. ``DatasetError`` for an empty split, and for a size
    below 32 px, a length, a seed or a mixture that is none.
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
        self.mixture = checked_mixture(mixture, MIXTURE)
        self.size, self.length = checked_size(size, least_px=32), checked_number(length, "length", least=1)
        self.split, self.seed, self.normalise = split, checked_number(seed, "seed", least=0), normalise
        self.foregrounds = bank.select("foreground", split)
        self.backgrounds = bank.select("background", split)

    def __len__(self) -> int:
        return self.length

    def scene(self, index: int) -> Scene:
        """Scene ``index`` as numpy arrays, with its layers."""
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        rng = np.random.default_rng([self.seed, index])
        return compose_scene(self.foregrounds, self.backgrounds, size=self.size, rng=rng, mixture=self.mixture)

    def sample(self, index: int) -> Sample:
        """Scene ``index`` as a score reads it: its image in eight bits, as a file would hold it."""
        scene = self.scene(index)
        flags = matte_attributes(scene.matte, scene.image, objects=scene.objects)
        matte = np.ascontiguousarray(scene.matte, dtype=np.float32)
        return Sample(self.name(index), compose.to_uint8(scene.image), matte, flags)

    def name(self, index: int) -> str:
        """The name of sample ``index``: its split, seed and number.

        It does not tell mixtures, sizes or sources apart: a folder of masks is of one data set.
        """
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        return f"{self.split}/{self.seed}/{index:06d}"

    def identity(self) -> dict[str, str]:
        """What decides every scene, in words; the pictures and the code by hashes.

        The order of the mixture counts (a draw picks by place), the number of scenes does not: scene i is the same.
        """
        return {
            "kind": "composed scenes",
            "split": self.split,
            "size": f"{self.size[0]}x{self.size[1]}",
            "seed": str(self.seed),
            "mixture": json.dumps(self.mixture),
            "sources": self.sources_sha256(),
            "scene code": files_sha256(SCENE_CODE),
        }

    def sources_sha256(self) -> str:
        """A hash of the split's pictures: their order, groups, sizes and pixels."""
        digest = hashlib.sha256()
        for kind in (self.foregrounds, self.backgrounds):
            for group in kind:
                digest.update(f"group of {len(group)}".encode())
                for pixels in group:
                    digest.update(f"{pixels.shape}".encode())
                    digest.update(np.ascontiguousarray(pixels).tobytes())
        return digest.hexdigest()

    def __getitem__(self, index: int) -> dict[str, object]:
        scene = self.scene(index)
        planes = np.ascontiguousarray(scene.image.transpose(2, 0, 1), dtype=np.float32)
        if self.normalise:
            planes -= np.float32(IMAGENET_MEAN)[:, None, None]
            planes /= np.float32(IMAGENET_STD)[:, None, None]
        flags = matte_attributes(scene.matte, scene.image, objects=scene.objects)
        return {
            "image": torch.from_numpy(planes),
            "matte": torch.from_numpy(np.ascontiguousarray(scene.matte[None], dtype=np.float32)),
            "attributes": torch.tensor([flags[name] for name in ATTRIBUTES]),
            "index": index,
        }


def compose_scene(
    foregrounds, backgrounds, *, size: tuple[int, int], rng: np.random.Generator, mixture: Mapping[str, float] = MIXTURE
) -> Scene:
    """Draw one scene: background with its clutter, salient layers, shadow, composite, camera.

    ``foregrounds`` and ``backgrounds`` are groups of pictures as ``SourceBank.select`` gives them.
    """
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


def _one(groups, rng: np.random.Generator) -> np.ndarray:
    """A picture of a group: all groups are as likely, so that ten views of one thing do not weigh ten times."""
    group = groups[int(rng.integers(len(groups)))]
    return group[int(rng.integers(len(group)))]


def _background(foregrounds, backgrounds, size, rng) -> np.ndarray:
    """A photograph, a backdrop or two planes; with clutter that is not salient; sometimes out of focus."""
    draw = rng.random()
    if draw < 0.12:
        ground = compose.backdrop(size, rng=rng)
    else:
        ground = compose.crop_background(_one(backgrounds, rng), size=size, rng=rng)
        if draw < 0.2:
            ground = compose.two_planes(compose.backdrop(size, rng=rng), ground, rng=rng)
        elif draw < 0.34:
            other = compose.crop_background(_one(backgrounds, rng), size=size, rng=rng)
            ground = compose.two_planes(other, ground, rng=rng)
    if rng.random() < 0.1:
        ground = compose.mix_channels(ground, rng=rng)
    if rng.random() < 0.5:
        light = compose.light_gradient(size, rng=rng, strength=rng.uniform(0.1, 0.8))
        ground = compose.shade(ground, rng=rng, light=light, gamma=math.exp(rng.normal(0, 0.3)))
    per_192 = min(size) / 192
    sigma_px = rng.exponential(2.2) * per_192 if rng.random() < 0.6 else 0.0
    for _ in range(int(rng.choice([0, 1, 2, 4], p=[0.55, 0.2, 0.15, 0.1]))):
        _add_clutter(ground, foregrounds, size, rng, fade=0.2 if sigma_px > 1.5 * per_192 else 0.55)
    return compose.blur(ground, min(sigma_px, 10 * per_192))


def _add_clutter(ground, foregrounds, size, rng, *, fade: float) -> None:
    """Paste into ``ground`` a cut-out that is not salient: it takes the ground's colours and fades into it."""
    long_side = min(size) * rng.uniform(0.12, 0.7 if fade < 0.5 else 0.35)
    placed = _placed(_one(foregrounds, rng), size, rng, long_side, rng.uniform(0, 1, 2) * size, max_angle_deg=25)
    if placed is None:
        return
    window, rgb, alpha = placed
    rgb = compose.harmonise(rgb, alpha, ground[window], strength=rng.uniform(0.5, 0.95))
    alpha = alpha * np.float32(1 - fade * rng.uniform(0.6, 1.2))
    ground[window] = compose.composite(rgb, alpha, ground[window])


def _placed(rgba, size, rng, long_side_px, centre_px, *, max_angle_deg):
    """Window of the frame, RGB and alpha of a cut-out with a random flip, turn and shear; None outside the frame."""
    scale = long_side_px / max(rgba.shape[:2])
    window = compose.cutout_window(rgba, size=size, centre_px=centre_px, scale=scale, margin_px=0.03 * min(size))
    if rng.random() < 0.5:
        rgba = np.ascontiguousarray(rgba[:, ::-1])
    angle_deg = rng.uniform(-180, 180) if rng.random() < 0.08 else rng.normal(0, max_angle_deg / 2)
    shear, stretch = rng.normal(0, 0.08), math.exp(rng.normal(0, 0.1))
    if window is None:
        return None
    rows, columns = window
    rgb, alpha = compose.place_cutout(
        rgba,
        size=(rows.stop - rows.start, columns.stop - columns.start),
        centre_px=(centre_px[0] - rows.start, centre_px[1] - columns.start),
        scale=scale,
        angle_deg=angle_deg,
        shear=shear,
        stretch=stretch,
    )
    return window, rgb, alpha


def _layout(rgba, name: str, size, rng) -> tuple[float, np.ndarray]:
    """Long side in px and centre (row, column) of the main object for one of ``LAYOUTS``."""
    side, sizes = min(size), np.array(size, float)
    if name == "small":
        return side * rng.uniform(0.16, 0.32), rng.uniform(0.12, 0.88, 2) * sizes
    if name == "medium":
        return side * rng.uniform(0.32, 0.75), rng.uniform(0.28, 0.72, 2) * sizes
    if name == "large":
        return side * rng.uniform(0.75, 1.1), rng.uniform(0.42, 0.58, 2) * sizes
    if name == "fill":
        return side * rng.uniform(1.1, 2.2), rng.uniform(0.3, 0.7, 2) * sizes
    height, width = rgba.shape[:2]
    across = side * rng.uniform(0.5, 1.05)  # a portrait: as wide as most of the frame, cut off below
    tall = across * height / width
    top = size[0] * rng.uniform(0.03, 0.3)
    tall = min(max(tall, size[0] - top), 2.5 * side)
    return max(tall, tall * width / height), np.array([top + tall / 2, size[1] * rng.uniform(0.35, 0.65)])


def _detailed(foregrounds, rng, least_px: float) -> np.ndarray:
    """A cut-out whose own long side reaches ``least_px``, if a few draws find one: enlarged stamps look blurred."""
    for _ in range(6):
        rgba = _one(foregrounds, rng)
        if max(rgba.shape[:2]) >= least_px:
            break
    return rgba


def _cutout_layer(foregrounds, backgrounds, ground, size, rng) -> _Layer:
    layer = _Layer(np.zeros((*size, 3), np.float32), np.zeros(size, np.float32), 0)
    for k in range(int(rng.choice([1, 2, 3], p=[0.76, 0.17, 0.07]))):
        name = _pick(LAYOUTS, rng) if k == 0 else ""
        least_px = {"large": 0.7, "portrait": 0.9, "fill": 1.1}.get(name, 0) * min(size)
        rgba = _detailed(foregrounds, rng, least_px)
        if k == 0:
            long_side_px, centre = _layout(rgba, name, size, rng)
        elif rng.random() < 0.5:
            long_side_px, centre = min(size) * rng.uniform(0.25, 0.6), rng.uniform(0.1, 0.9, 2) * size
        else:  # beside or before the main object, as things stand on a table
            long_side_px = long_side_px * rng.uniform(0.4, 0.9)
            centre = centre + rng.normal(0, 0.35, 2) * long_side_px
        long_side_px = min(long_side_px, MOST_ENLARGED * max(rgba.shape[:2]))
        _stack(layer, _dressed(rgba, ground, size, rng, long_side_px, centre))
    return layer


def _stack(layer: _Layer, placed) -> None:
    """Lay a placed cut-out over the layer, unless it hardly shows or hides what is there."""
    if placed is None:
        return
    window, front, matte = placed
    if matte.sum() < 0.001 * layer.alpha.size:
        return
    behind = layer.alpha[window]
    union = compose.over(matte, behind)
    share = (matte / np.maximum(union, 1e-6))[..., None]
    layer.rgb[window] = front * share + layer.rgb[window] * (1 - share)
    layer.alpha[window] = union
    layer.count += 1


def _dressed(rgba, ground, size, rng, long_side_px, centre):
    """Place one salient cut-out and give it the scene's colours, light and focus: window, RGB, alpha or None."""
    placed = _placed(rgba, size, rng, long_side_px, centre, max_angle_deg=20)
    if placed is None:
        return None
    window, rgb, alpha = placed
    per_192 = min(size) / 192
    if rng.random() < 0.08:
        rgb = compose.mix_channels(rgb, rng=rng)
    camouflaged = rng.random() < 0.08 and long_side_px > 0.4 * min(size)  # a small one would vanish
    strength = rng.uniform(0.6, 0.85) if camouflaged else rng.uniform(0, 0.4)
    rgb = compose.harmonise(rgb, alpha, ground, strength=strength)
    light = compose.light_gradient(alpha.shape, rng=rng, strength=rng.uniform(0.1, 0.9))
    if rng.random() < 0.4:
        light *= compose.relief_light(alpha, rng=rng, depth_px=rng.uniform(2, 8) * per_192)
    enlarged = long_side_px / max(rgba.shape[:2])
    if enlarged > 1.2:
        light *= _grain(alpha.shape, rng, strength=rng.uniform(0, min(0.3, 0.1 * enlarged)))
    rgb = compose.shade(rgb, rng=rng, light=light, gamma=math.exp(rng.normal(0, 0.25)))
    return (window, *_out_of_focus(rgb, alpha, rng, per_192))


def _grain(shape, rng, *, strength: float) -> np.ndarray:
    """Gain of fine texture: what an enlarged cut-out lacks."""
    fine = rng.standard_normal(shape, dtype=np.float32)
    return 1 + np.float32(strength) * compose.blur(fine, rng.uniform(0.6, 1.6))


def _out_of_focus(rgb, alpha, rng, per_192) -> tuple[np.ndarray, np.ndarray]:
    draw = rng.random()
    if draw < 0.12:
        return compose.blur_layer(rgb, alpha, rng.uniform(0.5, 2.2) * per_192)
    if draw < 0.17:
        angle_deg = rng.choice([0, 90, rng.uniform(0, 180)])
        return compose.motion_blur(rgb, alpha, length_px=rng.uniform(3, 10) * per_192, angle_deg=angle_deg)
    return rgb, alpha


def _textured(alpha, backgrounds, ground, size, rng, *, depth_px: float) -> np.ndarray:
    """Colours for a drawn alpha: a crop of another photograph, or noise, moved away from the ground's mean."""
    if rng.random() < 0.5:
        rgb = compose.crop_background(_one(backgrounds, rng), size=size, rng=rng)
        rgb = compose.mix_channels(rgb, rng=rng) if rng.random() < 0.5 else rgb
    else:
        rgb = compose.backdrop(size, rng=rng)
    weight = (alpha / max(float(alpha.sum()), 1e-6)).ravel()
    behind = float(weight @ ground.reshape(-1, 3) @ compose.LUMA)
    gap = float(weight @ rgb.reshape(-1, 3) @ compose.LUMA) - behind
    least = rng.uniform(0.1, 0.4)
    if abs(gap) < least:
        away = math.copysign(least, gap)
        away = -least if behind + away > 0.95 else least if behind + away < 0.05 else away
        rgb = np.clip(rgb + np.float32(away - gap), 0, 1)
    light = compose.light_gradient(size, rng=rng, strength=rng.uniform(0.2, 0.8))
    light *= compose.relief_light(alpha, rng=rng, depth_px=depth_px)
    return compose.shade(rgb, rng=rng, light=light)


def _thin_layer(foregrounds, backgrounds, ground, size, rng) -> _Layer:
    alpha = thin.draw_thin(list(thin.STRUCTURES)[int(rng.integers(len(thin.STRUCTURES)))], size=size, rng=rng)
    rgb = _textured(alpha, backgrounds, ground, size, rng, depth_px=1.0)
    return _Layer(rgb, alpha, 1)


def _shape_layer(foregrounds, backgrounds, ground, size, rng) -> _Layer:
    alpha = thin.draw_shape(size=size, rng=rng)
    rgb = _textured(alpha, backgrounds, ground, size, rng, depth_px=rng.uniform(2, 10) * min(size) / 192)
    if rng.random() < 0.4:  # a part of another colour: an edge inside the object is not its outline
        part = thin.draw_shape(size=size, rng=rng)[..., None]
        rgb = rgb + part * (_textured(alpha, backgrounds, ground, size, rng, depth_px=4.0) - rgb)
    if rng.random() < 0.15:
        rgb, alpha = compose.blur_layer(rgb, alpha, rng.uniform(0.5, 2.0) * min(size) / 192)
    return _Layer(rgb, alpha, 1)


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
