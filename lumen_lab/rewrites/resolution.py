"""How the image reaches the decoder at other resolutions: tiles cut in four dimensions."""

from __future__ import annotations

from torch import Tensor, nn

from lumen_lab.network.decoder import ImageTiles
from lumen_lab.rewrites.convolution import unlike
from lumen_lab.rewrites.record import Constraint, Rewrite, Site
from lumen_lab.specs import Exact


class ImageTiles4d(nn.Module):
    """``ImageTiles`` with no tensor above rank four: whole rows of the image are sorted first, then cut.

    The rows are moved as they lie in memory; cutting them is then one exchange of axes for each row of a tile, which
    is what the compiler makes of a change from channels first to channels last as well.
    """

    def forward(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        n, colours, height, width = image.shape
        h, w = size
        rows = image.reshape(n, colours * (height // h), h, width).transpose(1, 2)  # N, h, C·gh, gw·w
        return rows.reshape(n, h, -1, w).transpose(1, 2)  # N, C·gh·gw, h, w


def _tiles_4d(site: Site) -> dict[str, nn.Module]:
    return {site.path: ImageTiles4d()}


def _no_tiles_cut(site: Site) -> str | None:
    return unlike(site.module, ImageTiles)


NO_TILES = "the image branch of the tail cuts no tiles, and the tail takes only its convs"

CONVERT_IMAGE_TILES_TO_4D = Rewrite(
    name="convert_image_tiles_to_4d",
    replaces=ImageTiles,
    built=_tiles_4d,
    refused=_no_tiles_cut,
    claim=Exact(movement=True),
    because="the published rearrangement goes through rank 6, which HTP takes at batch 1 only; the tiles of the four "
    "levels from 640² with their convs move 7.5 MB of DRAM as rows and 23.4 MB as published (INT8; float16: 30 and 72)",
    source="one-operation graphs through onnxruntime-qnn 2.7.0 (QAIRT 2.51): lumen_lab.auditing.rules; "
    "tests/benchmarks/convolution_traffic.py",
    after=(Constraint("fold_full_resolution_tail", NO_TILES), Constraint("substitute_slim_tail", NO_TILES)),
)
