"""Pure steps of composing a scene: place, harmonise, shade, composite, then a camera.

Arrays are numpy: RGB float32 H×W×3 in [0, 1], alpha float32 H×W in [0, 1]; cut-outs come in as uint8 H×W×4. Each
random step takes the generator to draw from. Up to ``composite`` the matte is exact: the image is
``alpha * foreground + (1 - alpha) * background``; the camera effects after it leave the matte as it is.
"""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image
from scipy import ndimage

LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def place_cutout(
    rgba: np.ndarray,
    *,
    size: tuple[int, int],
    centre_px: tuple[float, float],
    scale: float,
    angle_deg: float = 0.0,
    shear: float = 0.0,
    stretch: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Scale, shear and turn a uint8 h×w×4 cut-out about its centre, which lands on ``centre_px`` (row, column).

    Returns RGB (H×W×3) and alpha (H×W) in a frame of ``size``; what falls outside is cut off. Interpolation is on
    premultiplied colours, so the colour hidden under alpha 0 never bleeds in.
    """
    height, width = rgba.shape[:2]
    scaled = (max(1, round(height * scale)), max(1, round(width * scale * stretch)))
    layer = Image.fromarray(rgba).convert("RGBa")
    layer = layer.resize(scaled[::-1], Image.Resampling.BILINEAR if scale <= 1 else Image.Resampling.BICUBIC)
    turn = math.radians(angle_deg)
    forward = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]) @ [[1, shear], [0, 1]]
    inverse = np.linalg.inv(forward)
    offset = np.array(scaled[::-1]) / 2 - inverse @ np.array(centre_px[::-1])
    matrix = (*inverse[0], offset[0], *inverse[1], offset[1])
    layer = layer.transform(size[::-1], Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return unpremultiply(np.asarray(layer))


def cutout_window(
    rgba: np.ndarray, *, size: tuple[int, int], centre_px: tuple[float, float], scale: float, margin_px: float = 0.0
) -> tuple[slice, slice] | None:
    """Rows and columns of the frame that a placed cut-out can reach, at any angle; None if it misses the frame."""
    reach = 0.65 * math.hypot(*rgba.shape[:2]) * scale + margin_px + 2
    spans = []
    for centre, length in zip(centre_px, size):
        start, stop = max(0, math.floor(centre - reach)), min(length, math.ceil(centre + reach))
        if stop - start < 2:
            return None
        spans.append(slice(start, stop))
    return spans[0], spans[1]


def unpremultiply(layer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """RGB and alpha as float32 from a uint8 premultiplied H×W×4 layer."""
    values = layer.astype(np.float32)
    alpha = values[..., 3]
    rgb = values[..., :3] / np.maximum(alpha, 1)[..., None]
    return np.minimum(rgb, 1, out=rgb), alpha / 255


def crop_background(pixels: np.ndarray, *, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A random crop of a uint8 h×w×3 photograph, flipped at random and resized to ``size`` as float32 H×W×3."""
    height, width = pixels.shape[:2]
    aspect = size[1] / size[0] * math.exp(rng.uniform(-0.25, 0.25))
    largest = min(height, width / aspect)
    rows = largest * rng.uniform(0.3, 1.0) ** 0.7
    top, left = rng.uniform(0, height - rows), rng.uniform(0, max(0.0, width - rows * aspect))
    box = (left, top, min(width, left + rows * aspect), top + rows)
    image = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.08:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return np.asarray(image).astype(np.float32) / np.float32(255)


def fractal_noise(size: tuple[int, int], *, rng: np.random.Generator, roughness: float = 0.5) -> np.ndarray:
    """float32 H×W noise in [0, 1]: octaves of smooth random fields, each ``roughness`` as strong as the one below."""
    total = np.zeros(size, np.float32)
    strength, cells = 1.0, int(rng.integers(2, 5))
    while cells < max(size) and strength > 0.02:
        grid = rng.random((cells + 1, cells + 1), dtype=np.float32)
        field = Image.fromarray(grid).resize(size[::-1], Image.Resampling.BICUBIC)
        total += np.float32(strength) * np.asarray(field)
        strength, cells = strength * roughness, cells * 2
    low, high = total.min(), total.max()
    return (total - low) / max(high - low, np.float32(1e-6))


def backdrop(size: tuple[int, int], *, rng: np.random.Generator) -> np.ndarray:
    """A studio backdrop or table: two colours over a light gradient and fractal noise, sometimes with a horizon."""
    base = rng.random(3, dtype=np.float32) * 0.9
    base = base + (base @ LUMA - base) * np.float32(rng.uniform(0.2, 1.0))
    other = np.clip(base + rng.normal(0, 0.18, 3).astype(np.float32), 0, 1)
    blend = fractal_noise(size, rng=rng, roughness=rng.uniform(0.3, 0.9))[..., None]
    rgb = base + (other - base) * blend * np.float32(rng.uniform(0.1, 1.0))
    if rng.random() < 0.35:
        rgb = rgb + horizon_mask(size, rng=rng)[..., None] * rng.normal(0, 0.25, 3).astype(np.float32)
    light = light_gradient(size, rng=rng, strength=rng.uniform(0.1, 0.8))
    return np.clip(rgb * light[..., None], 0, 1)


def horizon_mask(size: tuple[int, int], *, rng: np.random.Generator) -> np.ndarray:
    """float32 H×W: 1 below a slightly tilted, more or less blurred line, 0 above it."""
    rows, columns = np.mgrid[: size[0], : size[1]].astype(np.float32)
    line = size[0] * rng.uniform(0.25, 0.85) + (columns - size[1] / 2) * rng.normal(0, 0.05)
    return np.clip((rows - line) / rng.uniform(0.7, 0.1 * size[0]) + 0.5, 0, 1)


def light_gradient(size: tuple[int, int], *, rng: np.random.Generator, strength: float) -> np.ndarray:
    """float32 H×W gain around 1: light that falls off in one direction or from one point."""
    rows = np.linspace(-1, 1, size[0], dtype=np.float32)[:, None]
    columns = np.linspace(-1, 1, size[1], dtype=np.float32)[None]
    if rng.random() < 0.5:
        turn = rng.uniform(0, 2 * math.pi)
        ramp = rows * np.float32(math.sin(turn)) + columns * np.float32(math.cos(turn))
    else:
        ramp = 1 - (rows - rng.uniform(-1, 1)) ** 2 - (columns - rng.uniform(-1, 1)) ** 2
        ramp = np.clip(ramp, -1.5, 1)
    return (1 + np.float32(0.5 * strength) * ramp).astype(np.float32)


def two_planes(upper: np.ndarray, lower: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """Two backgrounds joined at a horizon, as a wall meets a floor."""
    mask = horizon_mask(upper.shape[:2], rng=rng)[..., None]
    return upper + (lower - upper) * mask


def blur(rgb: np.ndarray, sigma_px: float) -> np.ndarray:
    """Gaussian blur of an H×W or H×W×3 array along its first two axes."""
    if sigma_px < 0.3:
        return rgb
    sigmas = (sigma_px, sigma_px, 0)[: rgb.ndim]
    if sigma_px < 2.5:
        return ndimage.gaussian_filter(rgb, sigmas, truncate=2.5, mode="nearest")
    # Two running means cost the same at every width and come close to a Gaussian.
    width = max(3, round(sigma_px * math.sqrt(6)) | 1)
    for _ in range(2):
        rgb = ndimage.uniform_filter(rgb, (width, width, 1)[: rgb.ndim], mode="nearest")
    return rgb


def blur_layer(rgb: np.ndarray, alpha: np.ndarray, sigma_px: float) -> tuple[np.ndarray, np.ndarray]:
    """Defocus a layer: premultiplied colour and alpha spread together, so the matte stays exact."""
    if sigma_px < 0.3:
        return rgb, alpha
    spread = blur(np.concatenate([rgb * alpha[..., None], alpha[..., None]], axis=2), sigma_px)
    return _divide(spread)


def motion_blur(
    rgb: np.ndarray, alpha: np.ndarray, *, length_px: float, angle_deg: float
) -> tuple[np.ndarray, np.ndarray]:
    """Smear a layer along a line of ``length_px``: the mean of shifted copies, premultiplied."""
    steps = max(2, min(9, math.ceil(length_px) + 1))
    layer = np.concatenate([rgb * alpha[..., None], alpha[..., None]], axis=2)
    turn = math.radians(angle_deg)
    total = np.zeros_like(layer)
    for t in np.linspace(-0.5, 0.5, steps):
        shift = (round(t * length_px * math.sin(turn)), round(t * length_px * math.cos(turn)))
        total += _shifted(layer, *shift)
    return _divide(total / np.float32(steps))


def _shifted(layer: np.ndarray, rows: int, columns: int) -> np.ndarray:
    height, width = layer.shape[:2]
    source_rows = np.clip(np.arange(height) - rows, 0, height - 1)
    source_columns = np.clip(np.arange(width) - columns, 0, width - 1)
    return layer[source_rows][:, source_columns]


def _divide(layer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    alpha = np.clip(layer[..., 3], 0, 1)
    alpha[alpha < 1 / 512] = 0
    return np.clip(layer[..., :3] / np.maximum(alpha, 1 / 512)[..., None], 0, 1), alpha


def harmonise(rgb: np.ndarray, alpha: np.ndarray, background: np.ndarray, *, strength: float) -> np.ndarray:
    """Shift the cut-out's colour mean and spread part of the way (``strength`` 0…1) to the background's.

    Means and spreads are taken on every second row and column, the cut-out's weighted by its alpha.
    """
    weight = alpha[::2, ::2].ravel()
    total = max(float(weight.sum()), 1e-6)
    colours = rgb[::2, ::2].reshape(-1, 3)
    mean = weight @ colours / total
    spread = np.sqrt(np.maximum(weight @ colours**2 / total - mean**2, 0)) + 0.02
    behind = background[::2, ::2].reshape(-1, 3)
    target_mean = behind.mean(0)
    target_spread = np.sqrt(np.maximum((behind**2).mean(0) - target_mean**2, 0)) + 0.02
    gain = 1 + strength * (np.clip(target_spread / spread, 0.6, 1.6) - 1)
    shifted = mean + strength * (target_mean - mean) - gain * mean
    return np.clip(rgb * gain.astype(np.float32) + shifted.astype(np.float32), 0, 1)


def shade(
    rgb: np.ndarray, *, rng: np.random.Generator, light: np.ndarray | None = None, gamma: float = 1.0
) -> np.ndarray:
    """Relight a layer: gamma, a small change of saturation and tint, and a gain map (H×W)."""
    out = rgb if abs(gamma - 1) < 0.05 else np.power(rgb, np.float32(gamma))
    tint = np.exp(rng.normal(0, 0.06, 3))
    out = map_colours(out, saturation_matrix(rng.uniform(0.7, 1.4)) * tint)
    if light is not None:
        out *= light[..., None]
    return np.clip(out, 0, 1, out=out)


def saturation_matrix(saturation: float) -> np.ndarray:
    """3×3 matrix M such that ``rgb @ M`` scales the distance from grey."""
    return np.eye(3) * saturation + (1 - saturation) * LUMA[:, None]


def map_colours(rgb: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``rgb @ matrix`` for every pixel, as a new array."""
    return (rgb.reshape(-1, 3) @ matrix.astype(np.float32)).reshape(rgb.shape)


def relief_light(alpha: np.ndarray, *, rng: np.random.Generator, depth_px: float) -> np.ndarray:
    """float32 H×W gain that rounds a flat layer: its blurred alpha read as height and lit from a random side."""
    height = blur(alpha, depth_px)
    down, right = np.gradient(height)
    turn = rng.uniform(0, 2 * math.pi)
    slope = (down * math.sin(turn) + right * math.cos(turn)) * depth_px
    return (1 + rng.uniform(0.5, 2.0) * slope).astype(np.float32)


def mix_channels(rgb: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """Turn the hue: a rotation of the colour cube about its grey axis."""
    turn = rng.uniform(0, 2 * math.pi)
    along, across = math.cos(turn), math.sin(turn)
    third, root = (1 - along) / 3, across / math.sqrt(3)
    a, b, c = along + third, third - root, third + root
    return np.clip(map_colours(rgb, np.array([[a, c, b], [b, a, c], [c, b, a]])), 0, 1)


def cast_shadow(
    background: np.ndarray,
    alpha: np.ndarray,
    *,
    offset_px: tuple[float, float],
    sigma_px: float,
    strength: float,
) -> np.ndarray:
    """Darken the background by the blurred, shifted alpha of the object that stands before it."""
    small = blur(_shifted(alpha, round(offset_px[0]), round(offset_px[1])), sigma_px)
    return background * (1 - np.float32(strength) * small)[..., None]


def composite(foreground: np.ndarray, alpha: np.ndarray, background: np.ndarray) -> np.ndarray:
    """``alpha * foreground + (1 - alpha) * background``: the image whose matte is ``alpha``."""
    weight = alpha[..., None]
    return weight * foreground + (1 - weight) * background


def over(front: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Alpha of two layers stacked: what either covers."""
    return front + back * (1 - front)


def blur_seam(image: np.ndarray, alpha: np.ndarray, *, sigma_px: float) -> np.ndarray:
    """Soften the image where the matte is between: a cut-out's edge is sharper than a lens would leave it."""
    band = blur(4 * alpha * (1 - alpha), 1.0)
    weight = np.minimum(band * 1.5, 1)[..., None]
    return image + (blur(image, sigma_px) - image) * weight


def grade(image: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """Exposure, white balance, contrast about the mean, saturation, gamma, haze and vignette, all mild."""
    mean = image[::2, ::2].mean(dtype=np.float32)
    # Mid-grey is where a light meter puts a scene: pull very dark and very bright ones part of the way there.
    exposure = math.exp(rng.normal(0, 0.15)) * (0.4 / max(float(mean), 0.05)) ** rng.uniform(0, 0.6)
    contrast = rng.uniform(0.85, 1.35)
    saturation = 0.0 if rng.random() < 0.04 else rng.uniform(0.75, 1.4)
    matrix = saturation_matrix(saturation) * (exposure * contrast * np.exp(rng.normal(0, 0.04, 3)))
    out = np.clip(map_colours(image, matrix) + mean * np.float32(exposure * (1 - contrast)), 0, 1)
    if rng.random() < 0.5:
        out = np.power(out, np.float32(math.exp(rng.normal(0, 0.2))))
    if rng.random() < 0.1:
        haze = np.float32(rng.uniform(0.05, 0.25))
        out = out * (1 - haze) + haze * rng.uniform(0.6, 0.95, 3).astype(np.float32)
    if rng.random() < 0.3:
        rows = np.linspace(-1, 1, out.shape[0], dtype=np.float32)[:, None]
        columns = np.linspace(-1, 1, out.shape[1], dtype=np.float32)[None]
        out = out * (1 - np.float32(rng.uniform(0.05, 0.3)) * (rows**2 + columns**2))[..., None]
    return out


def sensor_noise(image: np.ndarray, *, rng: np.random.Generator, shot: float, read: float) -> np.ndarray:
    """Add Gaussian noise whose variance is ``shot² * value + read²``, as photon and read noise."""
    sigma = np.sqrt(np.float32(shot**2) * image + np.float32(read**2))
    return np.clip(image + sigma * rng.standard_normal(image.shape, dtype=np.float32), 0, 1)


def jpeg_round_trip(image: np.ndarray, *, quality: int) -> np.ndarray:
    """The image after JPEG at ``quality`` (1…95)."""
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer)).astype(np.float32) / np.float32(255)


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Round [0, 1] to 0…255."""
    return (np.clip(image, 0, 1) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def camera(image: np.ndarray, alpha: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """What a camera adds after the light: soft seam, mild blur, grading, noise, JPEG; each only sometimes."""
    per_192 = min(image.shape[:2]) / 192
    if rng.random() < 0.6:
        image = blur_seam(image, alpha, sigma_px=rng.uniform(0.4, 1.0) * per_192)
    if rng.random() < 0.3:
        image = blur(image, rng.uniform(0.3, 0.8) * per_192)
    image = grade(image, rng=rng)
    if rng.random() < 0.6:
        image = sensor_noise(image, rng=rng, shot=rng.uniform(0, 0.05), read=rng.uniform(0, 0.018))
    if rng.random() < 0.6:
        image = jpeg_round_trip(image, quality=int(rng.integers(35, 96)))
    return np.clip(image, 0, 1)
