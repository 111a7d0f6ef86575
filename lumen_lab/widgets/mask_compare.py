"""Two masks of one photograph, before and after a line that can be moved."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import anywidget
import matplotlib
import numpy as np
import traitlets
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from lumen_lab import images
from lumen_lab.errors import ImageError

MODES = ("overlay", "masks", "cut-out", "difference")
CAPTION_PX = 24
CAPTION_WIDTH_PX = 240
SQUARE_PX = 8

# The browser paints with the same numbers as the static picture.
_PAINT = {
    "overlay": list(images.OVERLAY_COLOR),
    "opacity": images.OVERLAY_OPACITY,
    "checker": list(images.CHECKER_COLORS),
    "square_px": SQUARE_PX,
    "lower": list(images.LOWER_COLOR),
    "higher": list(images.HIGHER_COLOR),
}


class MaskCompare(anywidget.AnyWidget):
    """A before/after slider over a photograph: ``left`` of the line one named mask, ``right`` of it another.

    ``image`` is uint8 (H, W, 3) and ``masks`` maps two or more names to masks (H, W) in [0, 1]; ``ImageError`` if they
    do not fit. ``mode`` is one of ``MODES``: tint, grey masks, cut-outs on a checkerboard, or the photograph against
    the signed difference ``right`` − ``left``, red where ``right`` is higher. ``position`` is the place of the line,
    0 to 1. All four can be set from Python and follow the browser.

    What is shown has 8 bits and at most ``max_side_px`` a side (larger photographs are made smaller for display), so
    measure on the masks, not here. Where no widget can run, the notebook shows ``static_png()`` of the state in which
    the widget was displayed.
    """

    _esm = Path(__file__).with_suffix(".js")
    _css = Path(__file__).with_suffix(".css")

    photograph = traitlets.Bytes(read_only=True, help="PNG of the photograph").tag(sync=True)
    masks = traitlets.Dict(read_only=True, help="grey PNG of each mask, by name").tag(sync=True)
    paint = traitlets.Dict(_PAINT, read_only=True, help="colours and sizes shared with the static picture").tag(
        sync=True
    )
    left = traitlets.Unicode().tag(sync=True)
    right = traitlets.Unicode().tag(sync=True)
    mode = traitlets.Enum(MODES, "overlay").tag(sync=True)
    position = traitlets.Float(0.5, min=0.0, max=1.0).tag(sync=True)

    def __init__(
        self,
        image: np.ndarray,
        masks: Mapping[str, np.ndarray],
        *,
        left: str | None = None,
        right: str | None = None,
        mode: str = "overlay",
        position: float = 0.5,
        max_side_px: int = 1024,
    ):
        if len(masks) < 2:
            raise ImageError(
                f"MaskCompare needs two masks or more, found {len(masks)}; mask_overlay shows a single one."
            )
        names = list(masks)
        self._image, self._masks = _at_display_size(image, masks, max_side_px)
        self.set_trait("photograph", images.encode_png(self._image))
        self.set_trait("masks", {name: images.encode_png(mask) for name, mask in self._masks.items()})
        super().__init__(
            left=names[0] if left is None else left,
            right=names[1] if right is None else right,
            mode=mode,
            position=position,
        )

    @traitlets.validate("left", "right")
    def _is_a_name(self, proposal: dict) -> str:
        if proposal["value"] not in self._masks:
            raise traitlets.TraitError(
                f"{proposal['trait'].name} is the name of a mask, one of {list(self._masks)}; "
                f"found {proposal['value']!r}."
            )
        return proposal["value"]

    def static_png(self) -> bytes:
        """The present state as the bytes of a PNG: the picture at display size with its line, and names below it."""
        left, right = (self._masks[name].astype(np.float32) / 255 for name in (self.left, self.right))
        picture = compare_picture(self._image, left, right, mode=self.mode, position=self.position)
        return images.encode_png(_with_caption(_with_line(picture, self.position), *self._caption(left, right)))

    def _caption(self, left: np.ndarray, right: np.ndarray) -> tuple[str, str]:
        if self.mode != "difference":
            return self.left, self.right
        return "photograph", f"{self.right} − {self.left}, full colour ±{_limit(left, right):.3f}"

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        text = f"MaskCompare: {self.left} | {self.right}, {self.mode}, line at {self.position:.0%}"
        picture = base64.b64encode(self.static_png()).decode()
        return {**data, "text/plain": text, "image/png": picture}, metadata


def compare_picture(
    image: np.ndarray, left: np.ndarray, right: np.ndarray, *, mode: str, position: float
) -> np.ndarray:
    """What the widget shows, without its handle: uint8 (H, W, 3).

    Columns before ``position * W``, rounded, show ``left``, the others ``right``; in mode "difference" they show the
    photograph and the signed difference.
    """
    if mode == "difference":
        before = image
        after = images.paint_difference(right.astype(np.float64) - left, limit=_limit(left, right))
    else:
        before, after = (_paint(image, mask, mode) for mask in (left, right))
    edge = _edge(position, image.shape[1])
    return np.concatenate([before[:, :edge], after[:, edge:]], axis=1)


def _paint(image: np.ndarray, mask: np.ndarray, mode: str) -> np.ndarray:
    if mode == "masks":
        return np.repeat(np.rint(mask * 255).astype(np.uint8)[..., None], 3, axis=2)
    if mode == "cut-out":
        return images.paint_cutout(image, mask, square_px=SQUARE_PX)
    return images.paint_overlay(image, mask)


def _limit(left: np.ndarray, right: np.ndarray) -> float:
    """The difference that gets full colour: the largest one, and at least a step of 8 bits."""
    return max(float(np.abs(right.astype(np.float64) - left).max()), 1 / 255)


def _at_display_size(
    image: np.ndarray, masks: Mapping[str, np.ndarray], max_side_px: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The image and its masks, as 8 bits, no side above ``max_side_px``."""
    size = images.check_image(image).shape[:2]
    masks = {str(name): images.check_mask(mask, size=size) for name, mask in masks.items()}
    shrink = min(1.0, max_side_px / max(size))
    shown = tuple(max(1, round(side * shrink)) for side in size)
    small = {name: images.resize_mask(mask, size=shown) for name, mask in masks.items()}
    return images.resize_image(image, size=shown), {
        name: np.rint(mask * 255).astype(np.uint8) for name, mask in small.items()
    }


def _edge(position: float, width: int) -> int:
    return int(position * width + 0.5)


def _with_line(picture: np.ndarray, position: float) -> np.ndarray:
    """The picture with a white column between two black ones where its halves meet."""
    edge = _edge(position, picture.shape[1])
    lined = picture.copy()
    lined[:, max(0, edge - 1) : edge + 2] = 0
    lined[:, edge : edge + 1] = 255
    return lined


def _with_caption(picture: np.ndarray, before: str, after: str) -> np.ndarray:
    """The picture over white lines of text: what is left of the line, and what is right of it."""
    height, width = picture.shape[:2]
    before, after = f"◂ {before}", f"{after} ▸"
    # The font that comes with matplotlib has the arrows, the minus and most alphabets; Pillow's own has not.
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", 12)
    sheet_width = max(width, CAPTION_WIDTH_PX)
    lines = 1 if font.getlength(before + after) + 24 < sheet_width else 2
    sheet = PILImage.new("RGB", (sheet_width, height + lines * CAPTION_PX), "white")
    sheet.paste(PILImage.fromarray(picture))
    draw, middle = ImageDraw.Draw(sheet), height + CAPTION_PX // 2
    draw.text((4, middle), before, fill="black", font=font, anchor="lm")
    draw.text((sheet_width - 4, middle + (lines - 1) * CAPTION_PX), after, fill="black", font=font, anchor="rm")
    return np.array(sheet)
