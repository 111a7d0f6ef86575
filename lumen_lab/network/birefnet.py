"""BiRefNet: the encoder runs on the image and on its half, a context block mixes all scales, the decoder draws.

Zheng et al., 2024 (arXiv:2401.03407). Module names follow the published state dict, so that public weights load
strictly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lumen_lab.errors import ImageError
from lumen_lab.network.config import BiRefNetConfig
from lumen_lab.network.decoder import Decoder, DecoderBlock, SideOutputs, resize
from lumen_lab.network.swin import SwinTransformer


class InputPaths(nn.Module):
    """What the encoder reads: (N, 3, H, W) -> the image, and its half (N, 3, H/2, W/2).

    A module without parameters, so that a rewrite can give the encoder another size than the mask has.
    """

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        height, width = image.shape[-2:]
        return image, resize(image, (height // 2, width // 2))


class BiRefNet(nn.Module):
    """Normalised image (N, 3, H, W), H and W multiples of 32 -> mask logits (N, 1, H, W).

    In training mode it returns ``SideOutputs``, whose last mask is that logit map.
    """

    def __init__(self, config: BiRefNetConfig):
        super().__init__()
        self.config = config
        channels = config.lateral_channels
        self.input_paths = InputPaths()
        self.bb = SwinTransformer(config)
        self.squeeze_module = nn.Sequential(DecoderBlock(sum(channels), channels[3], config))
        self.decoder = Decoder(config)

    def encode(self, image: Tensor, half: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Maps at 1/4, 1/8, 1/16 and 1/32; the last carries the three others in front of it, resized."""
        x1, x2, x3, x4 = (
            torch.cat([large, resize(small, large.shape[-2:])], 1)
            for large, small in zip(self.bb(image), self.bb(half), strict=True)
        )
        context = [resize(x, x4.shape[-2:]) for x in (x1, x2, x3)]
        return x1, x2, x3, torch.cat([*context, x4], 1)

    def forward(self, image: Tensor) -> Tensor | SideOutputs:
        check_size(image)
        encoder_image, half = self.input_paths(image)
        x1, x2, x3, x4 = self.encode(encoder_image, half)
        return self.decoder(image, encoder_image, x1, x2, x3, self.squeeze_module(x4))


def check_size(image: Tensor) -> None:
    """Refuse what the tiles cannot cut: the deepest map is the image divided by 32."""
    if image.ndim != 4 or image.shape[1] != 3 or image.shape[2] % 32 or image.shape[3] % 32:
        raise ImageError(
            f"BiRefNet takes images (N, 3, H, W) with H and W multiples of 32, found {tuple(image.shape)}; "
            "resize first (lumen_lab.images.to_network_input)."
        )
