"""The numbers of each network: one record, one builder, three presets.

Sizes follow the published BiRefNet (https://github.com/ZhengPeng7/BiRefNet) and Swin (Liu et al., 2021, table 7).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BiRefNetConfig:
    """What distinguishes one BiRefNet from another.

    ``image_size`` is the (H, W) the preset is meant for; the network takes any multiple of 32.
    ``decoder_width`` is the channel count inside a decoder block, ``aspp_width`` that of one ASPP branch and
    ``tile_width`` the inner width of the convs that feed the image tiles to the decoder.
    """

    name: str
    image_size: tuple[int, int]
    embed_dim: int
    depths: tuple[int, int, int, int]
    heads: tuple[int, int, int, int]
    window: int
    decoder_width: int = 64
    aspp_width: int = 256
    tile_width: int = 64
    drop_path_rate: float = 0.2

    @property
    def stage_channels(self) -> tuple[int, int, int, int]:
        """Channels of the four encoder stages, shallow to deep, of one pass."""
        return tuple(self.embed_dim * 2**stage for stage in range(4))

    @property
    def lateral_channels(self) -> tuple[int, int, int, int]:
        """Channels after the full-size and the half-size pass are concatenated, shallow to deep."""
        return tuple(2 * channels for channels in self.stage_channels)


LITE = BiRefNetConfig("lite", (1024, 1024), 96, (2, 2, 6, 2), (3, 6, 12, 24), 7)
LARGE = BiRefNetConfig("large", (1024, 1024), 192, (2, 2, 18, 2), (6, 12, 24, 48), 12)
MICRO = BiRefNetConfig(
    "micro",
    (192, 192),
    32,
    (2, 2, 2, 2),
    (1, 2, 4, 8),
    7,
    decoder_width=32,
    aspp_width=32,
    tile_width=32,
    drop_path_rate=0.1,
)
PRESETS = {config.name: config for config in (MICRO, LITE, LARGE)}
