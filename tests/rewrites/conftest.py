"""Parts of the network on which a rewrite can be checked in a fraction of a second."""

import pytest
import torch
from torch import nn

from lumen_lab.network.decoder import DecoderBlock, TileBlock
from lumen_lab.network.golden import golden_state_dict
from lumen_lab.network.swin import SwinStage


class Tiles(nn.Module):
    """An image cut into 4×4 tiles, as the decoder asks for them."""

    def __init__(self, config):
        super().__init__()
        self.block = TileBlock(16, 4, config)

    def forward(self, image):
        return self.block(image, (image.shape[2] // 4, image.shape[3] // 4))


class Attention(nn.Module):
    """One plain and one shifted block of the encoder, on maps (N, H, W, 8)."""

    def __init__(self):
        super().__init__()
        self.stage = SwinStage(8, 2, 7, [0.0, 0.0], merging=False)

    def forward(self, x):
        return self.stage(x)[0]


@pytest.fixture(scope="session")
def parts(tiny_config):
    """Name -> (module with golden weights in eval mode, samples: batches of two, no side equal to the other)."""
    torch.manual_seed(0)
    made = {
        "deform": (nn.Sequential(DecoderBlock(4, 6, tiny_config)), [(2, 4, 5, 9), (2, 4, 8, 3)]),
        "tiles": (Tiles(tiny_config), [(2, 3, 32, 48), (2, 3, 16, 64)]),
        "attention": (Attention(), [(2, 12, 17, 8), (2, 21, 9, 8)]),
    }
    for module, _ in made.values():
        module.load_state_dict(golden_state_dict(module.state_dict()))
        module.eval()
    return {name: (module, [torch.randn(shape) for shape in shapes]) for name, (module, shapes) in made.items()}
