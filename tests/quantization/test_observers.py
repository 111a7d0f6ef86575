"""Histograms that widen: a function of the values alone, in bounded memory."""

import math

import pytest
import torch

from lumen_lab.quantization.observers import BINS, MOMENTUM, MOST_COUNTED, Histogram, Observer
from lumen_lab.quantization.readers import Reader


def histogram_of(batches, bins=BINS):
    found = Histogram(bins)
    for batch in batches:
        found.add(batch)
    return found


@pytest.fixture(scope="module")
def batches():
    """Batches of ever wider values, one of them of a single value and one shifted off zero."""
    rng = torch.Generator().manual_seed(1)
    spread = [0.01, 1.0, 0.3, 40.0, 3000.0]
    return [scale * torch.randn(5, 7, 31, generator=rng) for scale in spread] + [
        torch.full((3,), 2.5),
        torch.rand(100, generator=rng) + 900,
    ]


def same(first: Histogram, second: Histogram) -> bool:
    ends = (first.width, first.first, first.low, first.high, first.zeros) == (
        second.width,
        second.first,
        second.low,
        second.high,
        second.zeros,
    )
    return ends and torch.equal(first.counts, second.counts)


def test_neither_order_nor_batches_change_it(batches):
    reference = histogram_of(batches)
    assert same(reference, histogram_of(batches[::-1]))
    assert same(reference, histogram_of([torch.cat([batch.flatten() for batch in batches])]))
    assert same(reference, histogram_of([value for batch in batches for value in batch.flatten().split(97)]))


def test_counts_are_those_of_the_bins(batches):
    values = torch.cat([batch.flatten() for batch in batches]).double()
    found = histogram_of(batches)
    index = torch.floor(values / found.width).long() - found.first
    assert torch.equal(found.counts, torch.bincount(index, minlength=BINS).double())
    assert math.log2(found.width) % 1 == 0
    assert (found.low, found.high) == (float(values.min()), float(values.max()))


def test_the_range_takes_at_least_half_of_the_bins():
    found = histogram_of([torch.linspace(-3, 5, 10_000)])
    used = int((found.counts > 0).sum())
    assert BINS / 2 <= used <= BINS


def test_memory_does_not_grow_with_what_is_counted():
    found = Histogram(64)
    for scale in 10.0 ** torch.arange(-6, 9):
        found.add(scale * torch.ones(1000))
    assert found.counts.shape == (64,) and found.counts.sum() == 15_000


def test_centres_stay_between_the_values():
    found = histogram_of([torch.tensor([1.0, 2.0, 4.0])])
    filled = found.centres()[found.counts > 0]
    assert filled.min() >= 1.0 and filled.max() <= 4.0
    torch.testing.assert_close(filled, torch.tensor([1.0, 2.0, 4.0]).double(), atol=found.width, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1e-30, -7.5, 3e8])
def test_a_constant_has_one_bin(value):
    found = histogram_of([torch.full((10,), value), torch.full((5,), value)])
    assert found.low == found.high == pytest.approx(value) and int((found.counts > 0).sum()) == 1
    assert found.counts.sum() == 15 and found.zeros == (15 if value == 0 else 0)


def test_of_a_large_tensor_a_part_counts_for_the_whole():
    values = torch.randn(3 * MOST_COUNTED, generator=torch.Generator().manual_seed(0))
    values[12345] = 70.0  # not among every third
    found = histogram_of([values])
    assert found.high == 70.0
    assert found.counts.sum() == pytest.approx(values.numel(), rel=1e-4)
    shares = (found.counts * (found.centres() < 1)).sum() / found.counts.sum()
    assert float(shares) == pytest.approx(float((values < 1).float().mean()), abs=0.003)


def test_an_observer_hands_on_what_it_sees_and_keeps_ends_by_picture():
    observer = Observer(Reader("relu"))
    x = torch.tensor([-4.0, 2.0])
    assert observer(x) is x
    assert observer.end_picture() == (0.0, 2.0)
    observer(torch.tensor([1.0, 10.0])), observer(torch.tensor([0.5]))
    assert observer.end_picture() == (0.5, 10.0)
    assert observer.average == pytest.approx(((1 - MOMENTUM) * 0.5, MOMENTUM * 2 + (1 - MOMENTUM) * 10))
    assert (observer.lowest, observer.highest) == (-4.0, 10.0)
    assert (observer.seen.low, observer.seen.high) == (0.0, 10.0)


def test_without_shape_only_ends_are_kept():
    observer = Observer(shape=False)
    observer(torch.tensor([-4.0, 2.0]))
    assert (observer.seen.low, observer.seen.high) == (-4.0, 2.0) and observer.seen.counts.sum() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told_and_spoils_no_histogram(bad):
    observer = Observer()
    observer(torch.tensor([1.0, bad]))
    assert math.isnan(observer.end_picture()[0])
    observer(torch.tensor([1.0, 2.0]))
    assert observer.end_picture() == (1.0, 2.0) and observer.seen.counts.sum() == 2
