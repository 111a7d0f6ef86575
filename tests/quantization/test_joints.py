"""What a concatenation reads is written in its encoding: through which movements, and what goes along."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.fake_quantize import FakeQuantize
from lumen_lab.quantization.placing import QUANTISER, put_quantisers

SIZE = (8, 8)


def joint_of(*parts):
    """Quantisers of a concatenation of functions of an image and a conv."""

    class Joint(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.LayerNorm(8)
            self.table = nn.Parameter(torch.ones(1, 8, 8, 8))

        def forward(self, image):
            return torch.cat([part(self, image) for part in parts], 1)

    graph = put_quantisers(capture(Joint().eval(), torch.zeros(1, 3, *SIZE)))
    graph(torch.zeros(2, 3, *SIZE))
    return {name.removeprefix(QUANTISER) for name, module in graph.named_children() if isinstance(module, FakeQuantize)}


@pytest.mark.parametrize(
    ("moved", "shared"),
    [
        (lambda x: x.permute(0, 1, 3, 2), True),
        (lambda x: x.reshape(-1, 4, 2, 8, 8).transpose(1, 2).reshape(-1, 8, 8, 8), True),
        (lambda x: x.repeat(1, 2, 1, 1), True),
        (lambda x: x[:, :4], False),
        (lambda x: F.pad(x[..., 1:-1], (1, 1)), False),
        (lambda x: F.max_pool2d(x, 3, 1, 1), False),
        (lambda x: torch.cat([y := x.permute(0, 1, 3, 2), y + 1], 1), False),
    ],
    ids=["permute", "two reshapes", "repeat", "slice", "padding", "pooling", "read twice"],
)
def test_a_concatenation_sees_through_some_movements(moved, shared):
    names = joint_of(lambda self, image: moved(self.conv(image)))
    assert ("conv2d" in names) != shared and any(name.startswith("cat") for name in names)


def test_a_concatenation_of_a_concatenation_is_one():
    names = joint_of(
        lambda self, image: torch.cat([self.conv(image), self.conv(image * image)], 1),
        lambda self, image: self.conv(image),
    )
    assert names == {"image", "mul", "cat_1"}


def test_a_concatenation_reads_what_is_computed_from_weights():
    names = joint_of(
        lambda self, image: self.conv(image),
        lambda self, image: self.table.exp().repeat(image.shape[0], 1, 1, 1) * 0.5,
    )
    assert names == {"image", "mul", "cat"}


def test_the_shift_of_a_layer_norm_goes_with_it():
    def normed(self, image):
        return self.norm(self.conv(image).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Joint(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.LayerNorm(8)

        def forward(self, image):
            return torch.cat([torch.cat([normed(self, image), image], 1), image], 1)

    graph = put_quantisers(capture(Joint().eval(), torch.zeros(1, 3, *SIZE)))
    (bias,) = [node for node in graph.graph.nodes if node.target == f"{QUANTISER}layer_norm_bias"]
    assert bias.args[1].target == f"{QUANTISER}cat_1.scale"
