"""Forms of operations that no rule covers are refused before anything is calibrated, in one sentence with the site."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.errors import QuantizationError
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.placing import put_quantisers

SIZE = (8, 8)


class Of(nn.Module):
    """A conv to four channels, and what is done to it."""

    def __init__(self, done, padding=0):
        super().__init__()
        self.conv, self.done = nn.Conv2d(3, 4, 1, padding=padding), done

    def forward(self, image):
        return self.done(self.conv(image))


def place(module):
    return put_quantisers(capture(module.eval(), torch.zeros(1, 3, *SIZE)))


def sampled(mode, padding):
    grid = torch.zeros(1, 4, 4, 2)
    return lambda x: F.grid_sample(x, grid.expand(x.shape[0], -1, -1, -1), mode, padding, align_corners=True)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Of(nn.GELU(approximate="tanh")), "aten.gelu.default at 'done' is approximated by tanh"),
        (Of(nn.LayerNorm([8, 8])), "aten.layer_norm.default at 'done' goes over 2 axes"),
        (Of(lambda x: F.pad(x, (1, 1), value=1.0)), "aten.pad.default at '(network)' pads with 1.0; zeros alone"),
        (Of(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")), "aten.pad.default at '(network)' pads with reflect"),
        (Of(lambda x: x.roll(3)), "aten.roll.default at '(network)' takes all axes as one; say which with dims="),
        (Of(nn.MaxPool2d(2, dilation=2)), "aten.max_pool2d.default at 'done' is dilated or rounds its size up"),
        (Of(nn.MaxPool2d(3, ceil_mode=True)), "aten.max_pool2d.default at 'done' is dilated or rounds its size up"),
        (Of(sampled("nearest", "zeros")), "aten.grid_sampler.default at '(network)' is of mode 1 with padding 0"),
        (Of(sampled("bilinear", "border")), "aten.grid_sampler.default at '(network)' is of mode 0 with padding 1"),
        (Of(lambda x: torch.add(x, x, alpha=2)), "aten.add.Tensor at '(network)' multiplies its second operand"),
    ],
    ids=lambda value: value.split(" at ")[0] if isinstance(value, str) else "",
)
def test_a_form_without_a_rule_is_refused(module, said):
    with pytest.raises(QuantizationError) as refusal:
        place(module)
    assert str(refusal.value).startswith(said) and str(refusal.value).count("\n") == 0


@pytest.mark.parametrize(
    "module",
    [
        Of(nn.GELU()),
        Of(nn.LayerNorm(8)),
        Of(lambda x: F.pad(x, (1, 1))),
        Of(lambda x: x.roll(3, dims=-1)),
        Of(nn.MaxPool2d(2)),
        Of(sampled("bilinear", "zeros")),
        Of(lambda x: x + 2),
    ],
    ids=["gelu", "layer norm", "zeros", "roll", "max pool", "grid sample", "number"],
)
def test_the_forms_beside_them_are_taken(module):
    place(module)


def test_a_batch_norm_is_told_how_to_go():
    with pytest.raises(QuantizationError, match=r"aten.batch_norm.default at 'done' has no rule .*FOLD_BATCH_NORM,\)"):
        place(Of(nn.BatchNorm2d(4)))
    with pytest.raises(QuantizationError, match=r"aten.elu.default at 'done' has no rule .*docs/quantization.md lists"):
        place(Of(nn.ELU()))


@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_a_resize_to_no_whole_size_is_refused(factor):
    """torch maps coordinates by 1.3, the file by 10 ÷ 8."""
    resize = nn.Upsample(scale_factor=factor, mode="bilinear")
    with pytest.raises(QuantizationError, match=r"resizes by \(.*\), which gives no whole sizes; give size="):
        place(Of(resize))
    place(Of(nn.Upsample(scale_factor=1.5, mode="bilinear")))
    place(Of(nn.Upsample(scale_factor=factor, mode="bilinear", align_corners=True)))
    place(Of(nn.Upsample(size=(11, 11), mode="bilinear")))
