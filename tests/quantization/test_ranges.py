"""The methods on histograms whose answer is known, and the error that they are chosen by."""

import numpy as np
import pytest
import torch

from lumen_lab.quantization.encoding import encoding_for_range
from lumen_lab.quantization.observers import Observer
from lumen_lab.quantization.ranges import (
    LEAST_ERROR,
    METHODS,
    Seen,
    chosen_range,
    divergence,
    left_error,
)
from lumen_lab.quantization.readers import ANYTHING, Reader


def seen_of(values, reader=ANYTHING, pictures=1):
    observer = Observer(reader)
    for part in torch.as_tensor(values).chunk(pictures):
        observer(part)
        observer.end_picture()
    return Seen(observer)


@pytest.fixture(scope="module")
def normal():
    """A bell, and ten values far outside of it."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    values[:10] = torch.linspace(30, 40, 10)
    return values


def rounded_error(values, ends, curve=lambda x: x):
    """What an encoding really does to the values."""
    encoding = encoding_for_range(*ends)
    back = torch.from_numpy(encoding.dequantise(encoding.quantise(values.numpy())))
    return float((curve(back.double()) - curve(values.double())).square().sum())


class TestError:
    @pytest.mark.parametrize("ends", [(-4.5, 40.0), (-3.0, 3.0), (-1.0, 2.0), (-4.5, 0.5)])
    def test_it_is_that_of_the_values(self, normal, ends):
        assert left_error(seen_of(normal), ends) == pytest.approx(rounded_error(normal, ends), rel=0.03)

    @pytest.mark.parametrize("kind", ["gelu", "sigmoid"])
    @pytest.mark.parametrize("ends", [(-3.0, 4.0), (-1.0, 1.0)])
    def test_of_a_curve_it_is_that_behind_it(self, kind, ends):
        values = 2 * torch.randn(100_000, generator=torch.Generator().manual_seed(1))
        told = Reader(kind).told_apart(values)
        expected = rounded_error(told, ends, lambda x: Reader(kind).curve(x)[0])
        assert left_error(seen_of(values, Reader(kind)), ends) == pytest.approx(expected, rel=0.05)

    def test_zeros_have_none(self):
        values = torch.rand(50_000, generator=torch.Generator().manual_seed(2))
        with_zeros = torch.cat([values, torch.zeros(450_000)])
        alone, among = (left_error(seen_of(v), (0.0, 1.0)) for v in (values, with_zeros))
        assert among == pytest.approx(alone * len(with_zeros) / 500_000, rel=0.02)

    def test_sixteen_bits_leave_a_65536th(self, normal):
        errors = [left_error(seen_of(normal), (-5, 40), bits=bits) for bits in (8, 16)]
        assert errors[0] / errors[1] == pytest.approx((65535 / 255) ** 2, rel=0.01)


class TestMethods:
    def test_min_max_is_what_occurred(self, normal):
        assert METHODS["min_max"](seen_of(normal), 8) == (float(normal.min()), 40.0)

    def test_the_moving_average_forgets_a_picture(self):
        pictures = [torch.tensor([-1.0, 2.0])] * 30 + [torch.tensor([-1.0, 20.0])]
        low, high = METHODS["moving_average"](seen_of(torch.cat(pictures), pictures=31), 8)
        assert low == pytest.approx(-1) and high == pytest.approx(0.9 * 2 + 0.1 * 20)

    def test_the_percentile_leaves_one_in_ten_thousand(self, normal):
        low, high = METHODS["percentile"](seen_of(normal), 8)
        outside = [float((normal < low).float().mean()), float((normal > high).float().mean())]
        assert outside == pytest.approx([0.5e-4, 0.5e-4], abs=0.3e-4) and high < 10

    def test_the_percentile_of_relu_begins_at_zero(self):
        values = torch.randn(100_000, generator=torch.Generator().manual_seed(3)).relu()
        low, high = METHODS["percentile"](seen_of(values), 8)
        assert low == 0 and 3 < high < values.max()

    def test_least_squares_beat_every_other_range(self, normal):
        seen = seen_of(normal)
        best = left_error(seen, METHODS["mse"](seen, 8))
        others = [(-low, high) for low in np.linspace(1, 5, 9) for high in np.linspace(1, 40, 14)]
        assert best <= 1.02 * min(left_error(seen, ends) for ends in others)
        assert best < 0.9 * left_error(seen, (seen.low, seen.high))

    def test_least_squares_see_the_reader(self):
        """What is left of GELU's tail costs nothing, so that more of it is clipped than where it counts."""
        values = 3 * torch.randn(100_000, generator=torch.Generator().manual_seed(4))
        blind, by_reader = (METHODS["mse"](seen_of(values, Reader(kind)), 8)[0] for kind in ("anything", "gelu"))
        assert by_reader > 0.5 * blind and blind < -6

    def test_entropy_clips_outliers_and_keeps_the_bell(self, normal):
        low, high = METHODS["entropy"](seen_of(normal), 8)
        assert -6 < low < -2 and 2 < high < 20

    def test_a_spike_at_zero_does_not_decide_the_entropy(self):
        values = torch.rand(100_000, generator=torch.Generator().manual_seed(5))
        high = METHODS["entropy"](seen_of(torch.cat([values, torch.zeros(400_000)])), 8)[1]
        assert high == pytest.approx(METHODS["entropy"](seen_of(values), 8)[1], rel=0.15)

    @pytest.mark.parametrize("method", [*METHODS, LEAST_ERROR])
    @pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-2.0, 5.0], [-1e-20, 1e-20]], ids=str)
    def test_few_values_have_a_range_too(self, method, values):
        _, (low, high) = chosen_range(seen_of(torch.tensor(values)), method)
        assert min(*values, 0) - 1e-6 <= low <= high <= max(*values, 0) + 1e-6


class TestDivergence:
    def test_of_what_the_levels_hold_exactly_it_is_nothing(self):
        assert divergence(np.full(512, 7.0), 0, 512, levels=256) == pytest.approx(0, abs=1e-12)

    def test_it_is_that_of_the_definition(self):
        counts = np.array([1.0, 3.0, 2.0, 2.0, 4.0])
        clipped, coarse = np.array([1, 3, 2, 6]) / 12, np.array([2, 2, 2, 2]) / 8
        expected = float((clipped * np.log(clipped / coarse)).sum())
        assert divergence(counts, 0, 4, levels=2) == pytest.approx(expected)


class TestChoice:
    def test_the_chosen_leaves_the_least(self, normal):
        seen = seen_of(normal, pictures=4)
        name, ends = chosen_range(seen, LEAST_ERROR)
        assert left_error(seen, ends) == min(left_error(seen, chosen_range(seen, m)[1]) for m in METHODS)
        assert chosen_range(seen, name)[1] == ends

    def test_what_gelu_cannot_tell_apart_is_left_out(self):
        values = torch.linspace(-12, 5, 10_000)
        assert chosen_range(seen_of(values, Reader("gelu")), "min_max")[1][0] > -3.2
        assert chosen_range(seen_of(values), "min_max")[1][0] == -12
