"""How the image reaches the decoder at other resolutions: tiles cut in four dimensions."""

from __future__ import annotations

from torch import Tensor, nn

from lumen_lab.network.decoder import ImageTiles
from lumen_lab.rewrites.record import Rewrite, Site
from lumen_lab.specs import Exact


class ImageTiles4d(nn.Module):
    """``ImageTiles`` with no tensor above rank four: every (colour, tile row) is one entry of the first axis."""

    def forward(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        n, colours, height, width = image.shape
        h, w = size
        rows = image.reshape(n * colours * (height // h), h, width // w, w)  # N·C·gh, h, gw, w
        return rows.transpose(1, 2).reshape(n, -1, h, w)


def _tiles_4d(site: Site) -> dict[str, nn.Module]:
    return {site.path: ImageTiles4d()}


CONVERT_IMAGE_TILES_TO_4D = Rewrite(
    name="convert_image_tiles_to_4d",
    replaces=ImageTiles,
    built=_tiles_4d,
    claim=Exact(movement=True),
    because="the published rearrangement goes through rank 6, which HTP takes at batch 1 only",
    source="one-operation graphs through onnxruntime-qnn 2.7.0 (QAIRT 2.51): lumen_lab.auditing.rules",
)
