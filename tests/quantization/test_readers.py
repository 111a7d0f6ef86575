"""What a reader cannot tell apart: the integers behind it stay the same, and those of a blind range do not."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.encoding import encoding_for_range, unit_encoding
from lumen_lab.quantization.placing import put_quantisers
from lumen_lab.quantization.readers import ANYTHING, Reader, gelu_tail, readers_of, sigmoid_ends, softmax_depth


def integers_behind(function, x, low, high, encoding):
    """What ``function`` gives in integers for ``x`` in the 8-bit encoding of a range."""
    read = encoding_for_range(low, high)
    return encoding.quantise(function(torch.from_numpy(read.dequantise(read.quantise(x.numpy())))).numpy()).astype(int)


@pytest.fixture(scope="module")
def masked_logits():
    """Attention logits of windows of 49, a third of the keys masked by −100, as shifted windows have them."""
    logits = 2 * torch.randn(64, 49, 49, generator=torch.Generator().manual_seed(0))
    logits[:, :, 33:] -= 100
    return logits


def softmax(x):
    return x.softmax(-1)


class TestSoftmax:
    def test_one_step_is_half_a_step_of_the_output(self):
        """Two values this far apart: the lower one becomes 1/2 of 1/256 of the upper one's share."""
        depth = softmax_depth()
        assert math.exp(-depth) == pytest.approx(1 / 512)
        shares = [float(torch.tensor([0.0, -depth + by]).softmax(0)[1]) for by in (-0.01, 0.01)]
        assert unit_encoding().quantise(shares).tolist() == [0, 1]

    def test_a_range_that_reaches_to_the_mask_is_ten_times_as_wrong(self, masked_logits):
        told = Reader("softmax").told_apart(masked_logits)
        exact = unit_encoding().quantise(softmax(masked_logits).numpy()).astype(int)
        by_reader, blind = (
            abs(integers_behind(softmax, masked_logits, float(seen.min()), float(seen.max()), unit_encoding()) - exact)
            for seen in (told, masked_logits)
        )
        assert float(masked_logits.min()) < -100 and float(told.min()) > -8
        assert blind.max() >= 10 and by_reader.max() <= 4
        assert (blind**2).mean() > 10 * (by_reader**2).mean()

    def test_masked_keys_get_nothing_under_the_narrow_range(self, masked_logits):
        told = Reader("softmax").told_apart(masked_logits)
        shares = integers_behind(softmax, masked_logits, float(told.min()), float(told.max()), unit_encoding())
        assert shares[..., 33:].max() <= 1  # of the row with the lowest maximum: at the end itself, 1/512

    def test_a_shallower_depth_would_show(self, masked_logits):
        shallow = torch.maximum(masked_logits, masked_logits.amax(-1, keepdim=True) - 2.0)
        shares = integers_behind(softmax, masked_logits, float(shallow.min()), float(shallow.max()), unit_encoding())
        assert shares[..., 33:].max() >= 3

    def test_rows_are_those_of_its_axis(self):
        x = torch.tensor([[0.0, -50.0], [-40.0, -20.0]])
        assert Reader("softmax", axis=0).told_apart(x)[1, 0] == pytest.approx(-softmax_depth())
        assert Reader("softmax", axis=0).told_apart(x)[0, 1] == pytest.approx(-20 - softmax_depth())
        assert Reader("softmax", axis=1).told_apart(x)[1, 0] == pytest.approx(-20 - softmax_depth())


class TestElementByElement:
    @pytest.mark.parametrize("bits", [8, 16])
    def test_beyond_its_ends_a_sigmoid_is_constant(self, bits):
        low, high = sigmoid_ends(bits)
        unit = unit_encoding(bits=bits)
        rounding = 0.01 if bits == 16 else 0  # float32 has 24 bits, and 1 − 2^-17 most of them
        x = torch.cat([torch.linspace(low - 30, low, 99), torch.linspace(high + rounding, high + 30, 99)]).double()
        integers = unit.quantise(torch.sigmoid(x).numpy())
        assert set(integers[:99].tolist()) == {0} and set(integers[99:].tolist()) == {2**bits - 1}

    def test_inside_its_ends_a_sigmoid_is_not(self):
        low, high = sigmoid_ends()
        inside = unit_encoding().quantise(torch.sigmoid(torch.tensor([low + 0.2, high - 0.2])).numpy())
        assert inside.tolist() == [1, 254]

    def test_the_mask_keeps_its_ends_and_gains_steps(self):
        logits = torch.linspace(-30, 25, 20_001)
        exact = unit_encoding().quantise(torch.sigmoid(logits).numpy()).astype(int)
        by_reader = integers_behind(torch.sigmoid, logits, *sigmoid_ends(), unit_encoding())
        blind = integers_behind(torch.sigmoid, logits, -30, 25, unit_encoding())
        assert (by_reader.min(), by_reader.max()) == (0, 255)
        assert abs(by_reader - exact).max() <= 2 and abs(blind - exact).max() >= 6

    def test_left_of_its_tail_gelu_rounds_to_zero(self):
        low, high = -9.0, 5.0
        output = encoding_for_range(-0.17, high)
        told = Reader("gelu").least_told(low, high)
        assert -3.2 < told < -2.2
        tail = torch.linspace(low, told, 500)
        assert set(output.quantise(F.gelu(tail).numpy()).tolist()) == {output.zero_point}
        assert output.quantise(F.gelu(torch.tensor([told + 0.3])).numpy())[0] == output.zero_point - 1

    def test_gelu_of_a_narrower_range_keeps_its_low_end(self):
        assert Reader("gelu").least_told(-1.0, 5.0) == -1.0
        assert Reader("gelu").least_told(-9.0, -2.0) == -9.0
        assert ANYTHING.least_told(-9.0, 5.0) == -9.0

    @pytest.mark.parametrize("depth", [1e-4, 0.01, 0.1])
    def test_the_tail_is_where_gelu_is_that_deep(self, depth):
        at = torch.tensor(gelu_tail(depth), dtype=torch.float64)
        assert float(F.gelu(at)) == pytest.approx(-depth, rel=1e-6) and at < -0.7517

    def test_relu_sees_nothing_below_zero(self):
        assert Reader("relu").told_apart(torch.tensor([-3.0, 2.0])).tolist() == [0.0, 2.0]

    @pytest.mark.parametrize("kind", ["sigmoid", "relu", "gelu", "anything"])
    def test_the_slope_is_that_of_the_curve(self, kind):
        x = torch.tensor([-2.5, -0.3, 0.4, 3.0], dtype=torch.float64)
        value, slope2 = Reader(kind).curve(x)
        ahead, _ = Reader(kind).curve(x + 1e-6)
        torch.testing.assert_close(((ahead - value) / 1e-6).square(), slope2, atol=1e-5, rtol=1e-4)


class Readings(nn.Module):
    """Tensors that are read in every way; ``forward`` is traced with a conv before each."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(6))

    def forward(self, image):
        softmaxed, gated, moved, twice, turned, left = (conv(image) for conv in self.convs)
        parts = [
            softmaxed.softmax(1),
            gated.sigmoid(),
            F.gelu(moved.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(left.shape),
            twice.sigmoid() + twice,
            turned.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2),
            left,
        ]
        return torch.cat(parts, 1)


def test_readers_are_found_through_what_moves_data():
    torch.manual_seed(0)
    graph = put_quantisers(capture(Readings().eval(), torch.zeros(1, 3, 4, 6)))
    readers = readers_of(graph)
    convs = [readers[f"quantiser_conv2d{suffix}"] for suffix in ("", "_1", "_2", "_3", "_4")]
    assert convs[0] == Reader("softmax", 1) and convs[1] == Reader("sigmoid") and convs[2] == Reader("gelu")
    assert convs[3] == ANYTHING  # the sigmoid alone would clip what is added to it
    assert convs[4] == ANYTHING  # rows are along another axis once they are moved
