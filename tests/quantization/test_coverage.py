"""Coverage on sets whose gaps are known."""

import numpy as np
import pytest
import torch
from torch import nn

from lumen_lab.datasets.attributes import ATTRIBUTES
from lumen_lab.errors import QuantizationError
from lumen_lab.images import to_network_input
from lumen_lab.quantization.calibration import calibrate
from lumen_lab.quantization.capture import capture
from lumen_lab.quantization.coverage import MEASURES, CoverageReport, coverage_report, parts_of, picture_measures
from lumen_lab.quantization.npu_graph import NPUGraph
from lumen_lab.quantization.placing import put_quantisers

SIZE = (16, 16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 1, 1)

    def forward(self, image):
        return self.second(self.first(image).relu())


def batch(levels, *, matte=0.25, multiple=False):
    """Grey pictures of these levels with a little noise, as a data set gives them."""
    rng = np.random.default_rng(0)
    pictures = [np.clip(rng.normal(255 * level, 9, (*SIZE, 3)), 0, 255).astype(np.uint8) for level in levels]
    flags = torch.tensor([name == "multiple" and multiple for name in ATTRIBUTES]).expand(len(levels), -1)
    return {
        "image": torch.from_numpy(np.concatenate([to_network_input(p, size=SIZE) for p in pictures])),
        "matte": torch.full((len(levels), 1, *SIZE), matte),
        "attributes": flags,
    }


DARK = np.linspace(0.1, 0.4, 8)
ALL = np.linspace(0.1, 0.9, 30)


@pytest.fixture(scope="module")
def graph():
    found = NPUGraph(put_quantisers(capture(Net().eval(), torch.zeros(1, 3, *SIZE))), SIZE)
    calibrate(found, [batch(DARK)], method="min_max", progress=False)
    return found


@pytest.fixture(scope="module")
def report(graph):
    larger = [batch(ALL[:20]), batch(ALL[20:], matte=0.8, multiple=True)]
    return coverage_report(graph, [batch(DARK[:3]), batch(DARK[3:])], larger, progress=False)


def test_measures_are_those_of_the_picture():
    image = np.zeros((*SIZE, 3), np.uint8)
    image[:, 8:] = (255, 0, 0)
    measures = picture_measures(torch.from_numpy(to_network_input(image, size=SIZE))[0])
    expected = {"brightness": 0.1495, "contrast": 0.1495, "saturation": 0.5, "warmth": 0.5, "detail": 0.299 / 30}
    assert measures == pytest.approx(expected, abs=1e-5)
    assert set(measures) == set(MEASURES) - {"subject size"}


def test_the_missing_kind_is_named(report):
    missing = {kind.words for kind in report.kinds if kind.missing}
    assert {"bright pictures", "very bright pictures"} <= missing
    assert "pictures with the attribute 'multiple'" in missing
    assert "very dark pictures" not in missing
    assert any("very bright pictures, 20% of the larger set" in sentence for sentence in report.sentences())


def test_shares_are_of_each_set(report):
    bright = [kind for kind in report.kinds if kind.measure == "brightness"]
    assert [sum(kind.calibration for kind in bright), sum(kind.larger for kind in bright)] == pytest.approx([1, 1])
    assert all(kind.larger == pytest.approx(0.2) for kind in bright)
    assert report.measures["subject size"][0] == pytest.approx([0.25] * 8)


def test_clipping_is_that_of_the_tensors(graph, report):
    """Counted again on the values themselves."""
    worst = report.clipped()[0]
    quantiser = graph.quantisers[worst.name].encoding
    target = graph.calls()[worst.name].args[0].name
    run = torch.fx.Interpreter(graph.graph_module, garbage_collect_values=False)
    with torch.no_grad(), graph.in_float():
        run.run(torch.cat([batch(ALL[:20])["image"], batch(ALL[20:])["image"]]))
    values = next(value for node, value in run.env.items() if node.name == target)
    low, high = quantiser.range
    step = quantiser.scale
    outside = float(((values < low - step / 2) | (values > high + step / 2)).float().mean())
    assert worst.outside == pytest.approx(outside, rel=0.1) and outside > 0
    beyond = max(low - float(values.min()), float(values.max()) - high) / (high - low)
    assert worst.beyond == pytest.approx(beyond, abs=0.02)
    assert worst.outside_before == 0 and worst.reached < 0.97


def test_against_itself_nothing_is_missing(graph):
    same = coverage_report(graph, [batch(DARK)], [batch(DARK)], progress=False)
    assert not same.clipped() and not [kind for kind in same.kinds if kind.missing]
    assert all(tensor.reached == pytest.approx(1) for tensor in same.tensors)


def test_the_curve_says_what_each_picture_added(graph):
    levels = [0.2, 0.2, 0.2, 0.9]
    found = coverage_report(graph, [batch(levels)], [batch(ALL)], progress=False)
    assert found.curve[-1] == 1 and list(found.curve) == sorted(found.curve)
    assert found.added()[3] > 3 * max(found.added()[1:3])
    assert "more would still add" in " ".join(found.sentences())
    turned = coverage_report(graph, [batch(levels[::-1])], [batch(ALL)], progress=False)
    assert "would add little" in " ".join(turned.sentences())


def test_pictures_without_mattes_are_compared_by_what_they_show(graph):
    found = coverage_report(graph, [batch(DARK)["image"]], [batch(ALL)["image"]], progress=False)
    assert set(found.measures) == set(MEASURES) - {"subject size"}
    assert not [kind for kind in found.kinds if kind.measure == "attribute"]


def test_the_outer_parts_are_open():
    kinds = parts_of("brightness", [-1.0, 9.0], list(np.arange(10.0)))
    assert [kind.calibration for kind in kinds] == [0.5, 0, 0, 0, 0.5]
    assert kinds[0].low == -1 and kinds[-1].high == 9


def test_it_is_a_record(report, tmp_path):
    assert CoverageReport.load(report.save(tmp_path / "coverage.json")) == report
    html = report._repr_html_()
    assert "Missing: very bright pictures" in html and "Tensors that clip" in html
    assert len(report.rows()) == 6 * 5 + len(ATTRIBUTES)


def test_the_graph_stays_as_it_was(graph, report):
    before = {name: quantiser.encoding for name, quantiser in graph.quantisers.items()}
    with pytest.raises(QuantizationError, match="no pictures"):
        coverage_report(graph, [batch(DARK)], [], progress=False)
    assert {name: quantiser.encoding for name, quantiser in graph.quantisers.items()} == before
