"""One definition of an image, and the doors between files, arrays and the network.

An **image** is a uint8 array (H, W, 3), RGB, upright. A **mask** is a float32 array (H, W) in [0, 1], 1 where the
foreground is, in the frame of its image. Orientation is applied once, on loading, so that an image, its mask and
every picture made from them share one frame; what is saved carries no orientation tag.

Every resize is Pillow's bilinear filter, whose triangle widens when it shrinks (antialiasing): it is what the published
BiRefNet trains and predicts with. A resize by another library moves S-measure by about a point, so there is only one.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
from PIL import Image as PILImage
from PIL import ImageOps, UnidentifiedImageError

from lumen_lab.errors import ImageError
from lumen_lab.specs import write_whole

MAX_PIXELS = 120_000_000
"""Largest photograph that is decoded: a 108-megapixel phone picture fits; as RGB it takes 360 MB."""

RESAMPLER = "pillow-bilinear-antialiased"
"""Name of the one resampler, to be recorded beside every score and artefact."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

WHITE = (255, 255, 255)
OVERLAY_COLOR, OVERLAY_OPACITY = (230, 0, 126), 0.45
CHECKER_COLORS = (236, 192)
LOWER_COLOR, HIGHER_COLOR = (33, 102, 172), (178, 24, 43)

# Only formats that hold one photograph and that Pillow decodes itself: EPS, for one, would start Ghostscript.
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "TIFF", "BMP", "GIF", "JPEG2000", "AVIF", "PPM", "TGA")
_BROKEN_FILE = (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, struct.error, zlib.error)
_FEW_LEVELS, _DARK_BELOW = 4, {255: 32, 65535: 256}  # at each full scale: a mask of so few levels is of class indices
_FLAT_STEPS = 2  # JPEG stores a grey picture through YCbCr, which may part its channels by a step


def load_image(path: str | Path, *, max_pixels: int = MAX_PIXELS, background: tuple = WHITE) -> np.ndarray:
    """Read a photograph as an image: uint8 (H, W, 3), RGB, upright.

    - Orientation: all eight EXIF values are applied.
    - Transparency (RGBA, LA, palette): composited on ``background`` (R, G, B), white unless said.
    - 16-bit grey is scaled by 1/257, never clipped. Pillow keeps the high byte of 16-bit colour, at most a step off.
    - CMYK and YCCK (Adobe's inverted ones too) are converted without a colour profile, with a warning.
    - Other colour profiles are not applied. Of an animation, the first frame is read.

    ``ImageError`` if there is no such file, if it is no image or a damaged one, or if its header announces more
    than ``max_pixels`` pixels (it is then not decoded).
    """
    picture = _eight_bit(_decode(Path(path), max_pixels), path)
    if picture.mode == "RGBA":
        picture = PILImage.alpha_composite(_filled(picture.size, background), picture).convert("RGB")
    return np.array(picture)


def load_pixels(path: str | Path, *, max_pixels: int = MAX_PIXELS, least_side_px: int | None = None) -> np.ndarray:
    """Read a file as ``load_image`` does, but keep its transparency: uint8 (H, W, 3), or (H, W, 4) with straight alpha.

    There are four channels where the file can hold transparency, even if all of it is opaque. ``least_side_px`` allows
    a JPEG to be decoded at 1/2, 1/4 or 1/8 of its size, faster, as long as no side gets shorter than that.
    ``ImageError`` as for ``load_image``; the limit is on the pixels that the header announces.
    """
    return np.array(_eight_bit(_decode(Path(path), max_pixels, least_side_px), path))


def load_mask(
    path: str | Path, *, max_pixels: int = MAX_PIXELS, from_alpha: bool = False, any_levels: bool = False
) -> np.ndarray:
    """Read a mask as float32 (H, W) in [0, 1], upright: 1-bit, grey (8 or 16 bits), RGB, RGBA or palette.

    The colour channels must agree. An opaque alpha is ignored; an alpha that varies over one flat colour is the mask.
    ``from_alpha`` takes the alpha of a cut-out. ``ImageError`` as for ``load_image``, and where the file holds no one
    mask. So it is where there are at most four levels and all but full scale are dark (below 32 of 255, or 256 of
    65535): class indices, which would read as a picture without foreground. A dim soft mask has more levels and is
    taken; ``any_levels`` takes every file as it is, with a warning (a prediction that found next to nothing).
    """
    picture = _decode(Path(path), max_pixels)
    if from_alpha and not picture.has_transparency_data:
        raise ImageError(f"{path} was asked for its alpha, but holds none ({picture.mode}); leave from_alpha out.")
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        return _scaled(_grey_16_bit(picture, path), 65535, path, any_levels=any_levels)
    rgba = np.asarray(_convert(picture, "RGBA", path))
    mask = rgba[..., 3] if from_alpha else _single_channel(rgba, path)
    return _scaled(mask, 255, path, any_levels=any_levels)


def save_mask(mask: np.ndarray, path: str | Path) -> Path:
    """Write a mask (H, W) in [0, 1] as an 8-bit grey PNG without metadata, whole or not at all; returns the path."""
    return _save_png(_to_uint8(check_mask(mask)), path, what="mask")


def save_cutout(image: np.ndarray, mask: np.ndarray, path: str | Path) -> Path:
    """Write the image with its mask as straight alpha: an RGBA PNG, whole or not at all; returns the path."""
    mask = check_mask(mask, size=check_image(image).shape[:2])
    return _save_png(np.dstack([image, _to_uint8(mask)]), path, what="cut-out")


def to_network_input(image: np.ndarray, *, size: tuple[int, int]) -> np.ndarray:
    """The image resized to ``size`` (H, W), whatever its aspect, and normalised: float32 (1, 3, H, W).

    (x / 255 - mean) / std with ImageNet's mean and standard deviation, per channel.
    """
    unit = resize_image(image, size=size).astype(np.float32) / np.float32(255)
    normalised = (unit - np.float32(IMAGENET_MEAN)) / np.float32(IMAGENET_STD)
    return np.ascontiguousarray(normalised.transpose(2, 0, 1)[None])


def resize_mask(mask: np.ndarray, *, size: tuple[int, int]) -> np.ndarray:
    """The mask (h, w) in [0, 1] at ``size`` (H, W), by the one resampler: float32 in [0, 1].

    It is also the way back from the network: probabilities at its working size, brought to the photograph's own.
    """
    mask, (height, width) = check_mask(mask), _check_size(size)
    if mask.shape == (height, width):
        return mask
    resized = PILImage.fromarray(mask).resize((width, height), PILImage.Resampling.BILINEAR)
    return np.clip(np.array(resized), 0, 1)


def resize_image(image: np.ndarray, *, size: tuple[int, int]) -> np.ndarray:
    """The image at ``size`` (H, W), by the one resampler; uint8 (H, W, 3)."""
    height, width = _check_size(size)
    picture = PILImage.fromarray(check_image(image))
    return np.array(picture.resize((width, height), PILImage.Resampling.BILINEAR))


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8 pixels (H, W), (H, W, 3) or (H, W, 4) as the bytes of a PNG without metadata."""
    buffer = io.BytesIO()
    PILImage.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def check_image(image: np.ndarray) -> np.ndarray:
    """The image as a contiguous array; ``ImageError`` unless it is uint8 (H, W, 3) with at least one pixel."""
    pixels = _as_array(image, "image")
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ImageError(f"An image is uint8 (H, W, 3); found {pixels.dtype} {pixels.shape}. load_image gives one.")
    return np.ascontiguousarray(pixels)


def check_mask(mask: np.ndarray, *, size: tuple[int, int] | None = None) -> np.ndarray:
    """The mask as a contiguous float32 array; ``ImageError`` unless it is (H, W), in [0, 1] and of ``size`` if given.

    Booleans are taken as 0 and 1; rounding up to 1e-6 outside of [0, 1] is clipped.
    """
    values = _as_array(mask, "mask")
    if values.ndim != 2 or 0 in values.shape:
        raise ImageError(f"A mask is one map (H, W); found shape {values.shape}: take one image and one channel.")
    if values.dtype.kind not in "bf":
        raise ImageError(f"A mask is float in [0, 1]; found {values.dtype}: divide by its full value, 255 at 8 bits.")
    low, high = float(values.min()), float(values.max())
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        raise ImageError(f"A mask is in [0, 1]; found {low:.4g} to {high:.4g}: if these are logits, take the sigmoid.")
    if size is not None and values.shape != tuple(size):
        raise ImageError(f"The mask is {_by(values.shape)} but its image is {_by(size)}; bring it to the image's size.")
    return np.ascontiguousarray(np.clip(values.astype(np.float32), 0, 1))


def paint_overlay(
    image: np.ndarray, mask: np.ndarray, *, color: tuple = OVERLAY_COLOR, opacity: float = OVERLAY_OPACITY
) -> np.ndarray:
    """The image tinted with ``color`` (R, G, B) where the mask is: uint8 (H, W, 3)."""
    weight = opacity * check_mask(mask, size=check_image(image).shape[:2])[..., None]
    return np.rint(image * (1 - weight) + np.float32(color) * weight).astype(np.uint8)


def paint_cutout(image: np.ndarray, mask: np.ndarray, *, square_px: int = 8) -> np.ndarray:
    """The foreground over a grey checkerboard, as its alpha would show it: uint8 (H, W, 3)."""
    weight = check_mask(mask, size=check_image(image).shape[:2])[..., None]
    rows, columns = np.indices(image.shape[:2]) // square_px
    board = np.where((rows + columns) % 2, *CHECKER_COLORS[::-1])[..., None]
    return np.rint(image * weight + board * (1 - weight)).astype(np.uint8)


def paint_difference(difference: np.ndarray, *, limit: float) -> np.ndarray:
    """A signed map (H, W) in colour: white at 0, red towards +``limit``, blue towards -``limit``; uint8 (H, W, 3)."""
    share = np.clip(difference / limit, -1, 1)[..., None]
    towards = np.where(share > 0, np.float64(HIGHER_COLOR), np.float64(LOWER_COLOR))
    return np.rint(255 + (towards - 255) * np.abs(share)).astype(np.uint8)


def _decode(path: Path, max_pixels: int, least_side_px: int | None = None) -> PILImage.Image:
    """The file's first frame, decoded and upright, in its own Pillow mode."""
    try:
        _check_is_file(path)
        with warnings.catch_warnings():
            # This limit is stated by the caller, in place of Pillow's warning at three quarters of ours.
            warnings.simplefilter("ignore", PILImage.DecompressionBombWarning)
            with PILImage.open(path, formats=_available_formats()) as file:
                _check_pixels(path, file.size, max_pixels)
                if least_side_px is not None:
                    file.draft(None, (least_side_px, least_side_px))
                file.load()
                return _upright(file, path)
    except UnidentifiedImageError:
        raise ImageError(f"{path} is not an image that can be read: {_what_it_looks_like(path)}.") from None
    except PILImage.DecompressionBombError:
        raise ImageError(
            f"{path} is larger than Pillow opens (PIL.Image.MAX_IMAGE_PIXELS, here "
            f"{PILImage.MAX_IMAGE_PIXELS:,} pixels, times two); make it smaller first."
        ) from None
    except PermissionError as error:
        raise ImageError(
            f"{path} may not be read ({error.strerror}); ask for read permission on it and its folder."
        ) from None
    except _BROKEN_FILE as error:
        raise ImageError(f"{path} is damaged or cut short ({error}); fetch or export it again.") from None


def _upright(file: PILImage.Image, path: Path) -> PILImage.Image:
    try:
        return ImageOps.exif_transpose(file)
    except _BROKEN_FILE as error:
        warnings.warn(f"{path} has unreadable EXIF data ({error}); taken as upright.", stacklevel=4)
        return file.copy()


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise ImageError(f"{path} is a folder; give the path of one image file in it.")
    if not path.exists():
        raise ImageError(f"There is no file {path}; check its name and the working folder ({os.getcwd()}).")
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is empty (0 bytes); fetch or export it again.")


def _check_pixels(path: Path, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageError(
            f"{path} announces {height} × {width} = {width * height:,} pixels, above the limit of {max_pixels:,}; "
            "make it smaller, or raise max_pixels if you trust it."
        )


def _what_it_looks_like(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(16)
    if head[4:8] == b"ftyp" and head[8:11] in (b"hei", b"hev", b"mif"):
        return "it is HEIC, which Pillow has no decoder for; export it as JPEG"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return f"it starts like text ({head[:12]!r}), whatever its name says"
    return f"its first bytes ({head[:8]!r}) are of no known image format"


def _available_formats() -> list[str]:
    PILImage.init()
    return [name for name in _FORMATS if name in PILImage.OPEN]


def _grey_16_bit(picture: PILImage.Image, path: str | Path) -> np.ndarray:
    """Pillow's integer grey as integers (H, W) from 0 to 65535."""
    values = np.asarray(picture)
    if values.min() < 0 or values.max() > 65535:
        raise ImageError(
            f"{path} holds integers from {values.min()} to {values.max()}, beyond 16 bits; save it as 8 or 16 bits."
        )
    return values


def _scaled(levels: np.ndarray, full: int, path: str | Path, *, any_levels: bool) -> np.ndarray:
    """The stored levels as float32 of full scale, if they are those of a mask."""
    trouble = _trouble_with_levels(levels, full)
    if trouble and not any_levels:
        raise ImageError(f"{path} {trouble}.")
    if trouble:
        warnings.warn(f"{path} {trouble}.", stacklevel=3)
    return levels.astype(np.float32) / np.float32(full)


def _trouble_with_levels(levels: np.ndarray, full: int) -> str:
    """Why these are no mask's levels, or "": a mask that reads as empty would reward a prediction of nothing."""
    dark = _DARK_BELOW[full]
    if ((levels >= dark) & (levels < full)).any():
        return ""
    found = np.unique(levels)
    if not ((found > 0) & (found < full)).any():
        return ""
    if full == 65535 and found[-1] == 255:
        return "holds nothing above 255 of 65535, as an 8-bit mask does that was stored in 16 bits; save it as 8 bits"
    if found.size > _FEW_LEVELS:
        return ""
    held = f"holds only the levels {', '.join(map(str, found))} of {full}"
    if found[-1] == full:
        return f"{held}, as class indices do with {full} for a border to ignore; save it as 0 and {full} alone"
    return f"{held}, as class indices or a trimap do; save a mask whose foreground is {full}"


def _eight_bit(picture: PILImage.Image, path: str | Path) -> PILImage.Image:
    """The picture as RGB, or as RGBA where it can hold transparency."""
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        grey = _grey_16_bit(picture, path)
        return PILImage.fromarray(((grey.astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if picture.mode == "CMYK":
        warnings.warn(f"{path} is CMYK: read as RGB without a colour profile, so colours are near.", stacklevel=3)
    return _convert(picture, "RGBA" if picture.has_transparency_data else "RGB", path)


def _convert(picture: PILImage.Image, mode: str, path: str | Path) -> PILImage.Image:
    if picture.mode == "F":
        raise ImageError(f"{path} holds floating-point pixels, whose range is unknown; save it as 8 or 16 bits.")
    try:
        return picture.convert(mode)
    except ValueError as error:
        raise ImageError(f"{path} has pixels of mode {picture.mode} ({error}); save it as RGB.") from None


def _filled(size: tuple[int, int], color: tuple) -> PILImage.Image:
    if len(color) != 3:
        raise ImageError(f"background is a colour (R, G, B) of 0 to 255; found {color!r}.")
    return PILImage.new("RGBA", size, (*color, 255))


def _single_channel(rgba: np.ndarray, path: str | Path) -> np.ndarray:
    """The one channel, uint8 (H, W), that a mask file means."""
    color, alpha = rgba[..., :3], rgba[..., 3]
    apart = int((color.max(axis=2).astype(int) - color.min(axis=2)).max())
    opaque = bool((alpha == 255).all())
    if not opaque and (color == color[0, 0]).all():
        return alpha
    if not opaque:
        raise ImageError(
            f"{path} has both a picture and a varying alpha, so its mask could be either; "
            "use from_alpha=True if it is a cut-out, or save the mask alone."
        )
    if apart > _FLAT_STEPS:
        raise ImageError(f"{path} is in colour (channels differ by up to {apart} of 255), so it is no mask; save grey.")
    return color[..., 1]


def _as_array(values: object, what: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ImageError(f"The {what} cannot be read as an array ({error}); pass a NumPy array.") from None


def _check_size(size: tuple[int, int]) -> tuple[int, int]:
    if len(size) != 2 or any(int(side) != side or side < 1 for side in size):
        raise ImageError(f"A size is (H, W), two whole numbers from 1 up; found {size!r}.")
    return int(size[0]), int(size[1])


def _to_uint8(mask: np.ndarray) -> np.ndarray:
    return np.rint(mask * 255).astype(np.uint8)


def _save_png(pixels: np.ndarray, path: str | Path, *, what: str) -> Path:
    if Path(path).suffix.lower() != ".png":
        raise ImageError(f"A {what} is saved as a lossless PNG; {path} asks for another format: end it in .png.")
    try:
        return write_whole(path, encode_png(pixels))
    except OSError as error:
        reason = error.strerror or error
        raise ImageError(f"Cannot write the {what} {path} ({reason}); nothing new was left there.") from None


def _by(size: tuple[int, ...]) -> str:
    return " × ".join(str(side) for side in size)
