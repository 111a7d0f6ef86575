"""Two input paths: the encoder reads a smaller image than the one whose mask is drawn."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from lumen_lab.errors import RewriteError
from lumen_lab.network.birefnet import InputPaths
from lumen_lab.network.decoder import resize
from lumen_lab.rewrites.convolution import unlike
from lumen_lab.rewrites.record import AS_GOOD_AS_THE_TEACHER, Rewrite, Site, by_name

STRIDE = 32  # of the deepest encoder map: the image must be a multiple


def encoder_size(size: tuple[int, int], ratio: float) -> tuple[int, int]:
    """The (H, W) times ``ratio``, each to the nearest multiple of 32 and at least 32."""
    return tuple(max(1, round(side * ratio / STRIDE)) * STRIDE for side in size)


class ReducedInputPaths(nn.Module):
    """Image (N, 3, H, W) -> the image at ``encoder_size``, and the half of that: what the encoder and the tiles read.

    The full-resolution tail still reads the image itself, so that the mask keeps its size.
    """

    def __init__(self, ratio: float):
        super().__init__()
        self.ratio = ratio

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        height, width = encoder_size(image.shape[-2:], self.ratio)
        encoder_image = resize(image, (height, width))
        return encoder_image, resize(encoder_image, (height // 2, width // 2))


def _reduced(ratio: float, site: Site) -> dict[str, nn.Module]:
    return {site.path: ReducedInputPaths(ratio)}


def _as_large(ratio: float, site: Site) -> str | None:
    sizes = {shape[-2:] for shape in site.input_shapes}
    unchanged = next((size for size in sizes if encoder_size(size, ratio) == tuple(size)), None)
    if unchanged:
        return f"{ratio:g} of {tuple(unchanged)} is that size again in multiples of {STRIDE}"
    return unlike(site.module, InputPaths)


def substitute_input_paths(ratio: float = 0.625) -> Rewrite:
    """The encoder and the decoder's tiles read the image at ``ratio`` of its size, in multiples of 32.

    1024 becomes 640, and 192 becomes 128. The mask keeps the image's size. ``RewriteError`` unless 0 < ratio < 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1:
        raise RewriteError(f"ratio is the encoder's share of the image's side, between 0 and 1; asked for {ratio!r}.")
    return Rewrite(
        name="substitute_input_paths",
        replaces=InputPaths,
        built=partial(_reduced, ratio),
        refused=partial(_as_large, ratio),
        claim=AS_GOOD_AS_THE_TEACHER,
        because="the encoder's cost goes with the pixels it reads, 0.39 of them at 640 instead of 1024, while edges "
        "are drawn at full size by the tail",
        source="Lumen Cutout's published recipe: backbone at 640, output mask at 1024",
        code=f"substitute_input_paths(ratio={ratio!r})",
        resizes=True,
    )


SUBSTITUTE_INPUT_PATHS = by_name(substitute_input_paths())
