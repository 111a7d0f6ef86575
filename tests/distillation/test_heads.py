"""Each reading of the decoder's heads against a computation of its own, and against spoiled networks."""

import copy

import numpy as np
import pytest
import torch

from lumen_lab.distillation import head_readings, heads
from lumen_lab.distillation.head_readings import LEVELS, HeadReadings, PrincipalAxes, cell_of
from lumen_lab.distillation.heads import code_counts, read_heads
from lumen_lab.distillation.transfer import feature_distance
from lumen_lab.errors import ImageError, LumenError
from lumen_lab.images import to_network_input
from lumen_lab.network import load_network
from lumen_lab.network.decoder import Decoder
from lumen_lab.quantization import quantize as quantizer
from lumen_lab.quantization.encoding import Encoding
from lumen_lab.quantization.fake_quantize import FakeQuantize
from lumen_lab.quantization.values import output_of

SIZE = (64, 96)
GATED = (4, 3, 2)


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def given(image):
    return torch.from_numpy(to_network_input(image, size=SIZE))


@pytest.fixture(scope="module")
def graph(tiny_student, given):
    noise = torch.rand(given.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return quantizer.quantize(tiny_student, [given, given * 0.5, noise], progress=False)


@pytest.fixture(scope="module")
def readings(tiny, graph, image):
    return read_heads(tiny, image, student=graph)


@pytest.fixture
def spoilt(tiny):
    """A copy of the tiny network to be changed."""
    return copy.deepcopy(tiny)


def logits_without(network, given, level):
    """The mask of a network whose block returns nothing, the whole of it run again."""
    changed = copy.deepcopy(network)
    conv = changed.get_submodule(f"decoder.decoder_block{level}.bn_out")
    torch.nn.init.zeros_(conv.weight)
    torch.nn.init.zeros_(conv.bias)
    with torch.no_grad():
        return torch.sigmoid(changed(given))[0, 0].numpy()


# A network in float


def test_the_mask_is_the_network_s(tiny, readings, given):
    with torch.no_grad():
        wanted = torch.sigmoid(tiny(given))[0, 0].numpy()
    np.testing.assert_array_equal(readings.teacher.mask, wanted)
    assert readings.size == SIZE and readings.image.shape == (*SIZE, 3)


@pytest.mark.parametrize("level", GATED)
def test_gated_features_are_features_times_gate(readings, level):
    stage = readings.teacher.stage(level)
    np.testing.assert_array_equal(stage.gated, stage.features * stage.gate)
    assert stage.gate.min() > 0 and stage.gate.max() < 1 and stage.gate.std() > 0


def test_a_decoder_that_does_not_gate_is_refused(spoilt, given, monkeypatch):
    """What the next stage got is looked at, and not only what should have reached it."""
    monkeypatch.setattr(Decoder, "gated", lambda self, features, level, side: features)
    for level in GATED:  # the gate is still called, and thrown away
        block = spoilt.get_submodule(f"decoder.decoder_block{level}")
        gate = (
            spoilt.get_submodule(f"decoder.gdt_convs_{level}"),
            spoilt.get_submodule(f"decoder.gdt_convs_attn_{level}"),
        )
        block.register_forward_hook(lambda module, inputs, output, gate=gate: (gate[1](gate[0](output)), output)[1])
    with pytest.raises(LumenError, match="Stage 4 was expected to pass on its features times its gate"):
        read_heads(spoilt, given)


@pytest.mark.parametrize("level", LEVELS)
def test_a_stage_is_left_out_by_zeroing_what_it_passes_on(tiny, readings, given, level):
    wanted = logits_without(tiny, given, level)
    np.testing.assert_allclose(readings.teacher.stage(level).without, wanted, atol=1e-6)
    added = readings.teacher.mask - wanted
    np.testing.assert_allclose(readings.maps[level, "adds"]["teacher"], added, atol=1e-6)
    assert (
        readings.adds(level)["teacher"] == pytest.approx(np.abs(added).mean(), abs=1e-6) and np.abs(added).max() > 1e-4
    )


def test_a_stage_of_zeros_adds_nothing_nor_does_what_passes_through_it(spoilt, given):
    torch.nn.init.zeros_(spoilt.decoder.decoder_block3.bn_out.weight)
    torch.nn.init.zeros_(spoilt.decoder.decoder_block3.bn_out.bias)
    found = read_heads(spoilt, given)
    assert found.adds(3)["teacher"] == 0 and (found.maps[3, "adds"]["teacher"] == 0).all()
    assert found.adds(4)["teacher"] == 0  # it reaches the mask through stage 3 alone
    assert min(found.adds(level)["teacher"] for level in (2, 1)) > 1e-3


def test_a_dead_gate_adds_nothing_though_its_features_live(spoilt, given):
    conv = spoilt.decoder.gdt_convs_attn_2[0]
    torch.nn.init.zeros_(conv.weight)
    torch.nn.init.constant_(conv.bias, -40.0)
    found = read_heads(spoilt, given)
    assert found.adds(2)["teacher"] < 1e-6 and np.abs(found.teacher.stage(2).features).max() > 0.1


@pytest.mark.parametrize("level", GATED)
def test_side_and_gradient_heads_are_those_of_training(tiny, readings, given, level):
    """In training mode, batch statistics frozen, the network returns what its heads read."""
    trained = copy.deepcopy(tiny)
    trained.training = trained.decoder.training = True  # the two alone: dropout and norms stay as they are
    with torch.no_grad():
        side = trained(given)
    place = GATED.index(level)
    stage = readings.teacher.stage(level)
    np.testing.assert_allclose(stage.side, torch.sigmoid(side.masks[place])[0, 0], atol=1e-6)
    np.testing.assert_allclose(stage.gradient, torch.sigmoid(side.gradients[place])[0, 0], atol=1e-6)


def test_the_last_stage_has_neither_gate_nor_side_heads(readings):
    last = readings.teacher.stage(1)
    assert last.gate is last.gated is last.side is last.gradient is None
    assert last.passed_on is last.features
    assert {view for level, view in readings.maps if level == 1} == {"features", "components", "adds", "error"}


def test_nothing_is_left_hooked_and_nothing_can_be_written_to(tiny, readings):
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny.modules())
    for array in (readings.teacher.mask, readings.student.stage(3).features, readings.teacher.stage(4).gate):
        assert not array.flags.writeable


# An NPU graph


def test_a_student_s_mask_and_features_are_on_the_graph_s_grid(graph, readings, given):
    with torch.no_grad():
        np.testing.assert_array_equal(readings.student.mask, graph(given)[0, 0].numpy())
    for level in LEVELS:
        node = output_of(graph, f"decoder.decoder_block{level}")
        encoding = getattr(graph.graph_module, node.target).encoding
        features = readings.student.stage(level).features
        np.testing.assert_array_equal(encoding.dequantise(encoding.quantise(features)), features)


@pytest.mark.parametrize("level", GATED)
def test_a_student_s_gated_features_are_the_product_rounded_once(graph, readings, level):
    stage = readings.student.stage(level)
    (mul,) = (user for user in output_of(graph, f"decoder.decoder_block{level}").users if "mul" in user.name)
    (quantiser,) = mul.users
    scale = float(getattr(graph.graph_module, quantiser.target).scale)
    low, high = getattr(graph.graph_module, quantiser.target).encoding.range
    product = np.clip(stage.features * stage.gate, low, high)
    assert np.abs(stage.gated - product).max() <= scale / 2 * 1.001
    assert np.abs(stage.gated - stage.features).max() > scale  # the gate did something
    np.testing.assert_array_equal(stage.gate * 256, np.rint(stage.gate * 256))


@pytest.mark.parametrize("level", LEVELS)
def test_a_student_s_stage_is_left_out_as_in_float(tiny_student, graph, given, level):
    """With the quantisers switched off, the graph is the rewritten network."""
    with graph.in_float():
        found = heads.see_graph(graph, given)
    wanted = heads.see_network(tiny_student, given)
    np.testing.assert_allclose(found.without[level], wanted.without[level], atol=1e-5)
    np.testing.assert_allclose(found.features[level], wanted.features[level], atol=1e-4)
    assert found.codes[level] == {}


def test_removing_is_not_seen_by_what_is_read_afterwards(graph, readings, given):
    """Features of stage 1 are those of the whole graph, although three stages were left out before it was reached."""
    node = output_of(graph, "decoder.decoder_block1")
    shown = {}

    class Keeping(torch.fx.Interpreter):
        def run_node(self, n):
            shown[n] = super().run_node(n)
            return shown[n]

    with torch.no_grad():
        Keeping(graph.graph_module).run(given)
    np.testing.assert_array_equal(readings.student.stage(1).features, shown[node][0].numpy())


def test_codes_count_every_element_once(readings):
    for level in LEVELS:
        stage = readings.student.stage(level)
        wanted = {"features": stage.features, "gate": stage.gate, "gated": stage.gated}
        assert set(stage.codes) == {name for name, value in wanted.items() if value is not None}
        for name, counts in stage.codes.items():
            assert counts.shape == (256,) and counts.sum() == wanted[name].size
            assert (counts > 0).sum() == len(np.unique(wanted[name]))
    assert readings.teacher.stage(4).codes == {}


def test_codes_by_hand():
    quantiser = FakeQuantize(Encoding(0.5, 10))
    constant = code_counts(quantiser, torch.full((1, 3, 4, 5), 1.5))
    assert constant[13] == 60 and constant.sum() == 60
    ends = code_counts(quantiser, torch.tensor([-5.0, 122.5, 0.0, 0.0]))
    assert (ends[0], ends[255], ends[10]) == (1, 1, 2)
    wide = FakeQuantize(Encoding(2.0**-16, 0, 16))
    assert code_counts(wide, torch.tensor([0.5, 0.501, 0.0]))[[0, 128]].tolist() == [1, 2]  # by their upper eight bits


def test_side_heads_of_a_student_are_the_teacher_s(tiny, graph, readings):
    for level in GATED:
        features = torch.from_numpy(readings.student.stage(level).features.copy())[None]
        with torch.no_grad():
            wanted = torch.sigmoid(tiny.decoder.part("conv_ms_spvn_", level)(features))[0, 0].numpy()
        np.testing.assert_array_equal(readings.student.stage(level).side, wanted)
    assert not any("conv_ms_spvn" in name or "gdt_convs_pred" in name for name in graph.weights())  # dead by design


# Both


def test_the_error_s_mean_is_the_distance_that_training_lowers(readings):
    for level in LEVELS:
        actual, reference = (
            torch.from_numpy(network.stage(level).passed_on.copy())[None] for network in readings.networks.values()
        )
        wanted = float(feature_distance(reference, actual))
        error = readings.student.stage(level).error
        assert error.shape == readings.student.stage(level).features.shape[1:]
        assert float(error.mean()) == pytest.approx(wanted, rel=1e-4) and wanted > 0
        assert readings.teacher.stage(level).error is None


def test_a_student_that_is_the_teacher_has_no_error(tiny, given):
    found = read_heads(tiny, given, student=copy.deepcopy(tiny))
    for level in LEVELS:
        assert np.abs(found.student.stage(level).error).max() == 0
        for view, maps in ((view, maps) for (at, view), maps in found.maps.items() if at == level and view != "error"):
            np.testing.assert_array_equal(maps["teacher"], maps["student"], err_msg=view)


def test_a_student_rewritten_but_in_float(tiny, tiny_student, image):
    found = read_heads(tiny, image, student=tiny_student, size=(96, 64))
    assert found.size == (96, 64) and found.student.stage(1).codes == {}
    assert found.student.stage(2).features.shape[0] == found.teacher.stage(2).features.shape[0]
    assert {row["network"] for row in found.rows()} == {"teacher", "student"} and len(found.rows()) == 8


@pytest.mark.parametrize("size", [(64, 64), (96, 128), (32, 160)])
def test_any_size_that_the_network_takes(tiny, size):
    found = read_heads(tiny, torch.zeros(1, 3, *size))
    assert found.teacher.mask.shape == found.teacher.stage(4).without.shape == size
    assert found.teacher.stage(4).features.shape[1:] == (size[0] // 32, size[1] // 32)


def test_a_tensor_is_shown_as_the_photograph_it_was_made_from(tiny, image, given):
    of_tensor, of_image = read_heads(tiny, given), read_heads(tiny, image)
    np.testing.assert_array_equal(of_tensor.image, of_image.image)
    np.testing.assert_array_equal(of_tensor.teacher.mask, of_image.teacher.mask)


def test_what_cannot_be_read_is_refused(tiny, graph, given, spoilt):
    with pytest.raises(LumenError, match="in eval mode"):
        read_heads(spoilt.train(), given)
    with pytest.raises(LumenError, match=r"Linear has no 'decoder.decoder_block4'"):
        read_heads(torch.nn.Linear(2, 2), given)
    with pytest.raises(LumenError, match=r"student takes pictures of \(64, 96\), this one has \(64, 64\)"):
        read_heads(tiny, given[..., :64], student=graph)
    with pytest.raises(LumenError, match=r"one finite picture \(1, 3, H, W\); found \(2, 3"):
        read_heads(tiny, torch.cat([given, given]))
    with pytest.raises(LumenError, match="finite"):
        read_heads(tiny, given * torch.nan)
    with pytest.raises(ImageError):
        read_heads(tiny, np.zeros((8, 8), np.uint8))


# What is made of the readings


def test_values_at_a_pixel_are_those_of_the_cell_that_covers_it(readings):
    rows = {(row["stage"], row["head"]): row for row in readings.values_at((63, 0))}
    assert rows[3, "gate"]["teacher"] == readings.teacher.stage(3).gate[-1, 0]
    assert rows["final", "mask"]["student"] == readings.student.mask[63, 0]
    assert rows[3, "error"]["teacher"] is None and rows[3, "error"]["student"] is not None
    assert (3, "components") not in rows
    assert readings.values_at((0, 0)) != readings.values_at((63, 0))
    with pytest.raises(LumenError, match="row 64, column 0.*64 × 96"):
        readings.values_at((64, 0))
    with pytest.raises(LumenError, match="they are 4, 3, 2, 1"):
        readings.teacher.stage(5)


@pytest.mark.parametrize("pixel, cell", [((0, 0), (0, 0)), ((63, 95), (2, 4)), ((21, 19), (0, 0)), ((22, 20), (1, 1))])
def test_cells_by_hand(pixel, cell):
    """Of a map of 3 × 5 over 64 × 96, cells begin at rows 0, 21⅓, 42⅔ and columns 0, 19⅕, …"""
    assert cell_of(pixel, (64, 96), (3, 5)) == cell


def test_principal_axes_by_hand():
    """Two channels that vary together by (2, 1), one that is constant."""
    along = np.linspace(-1, 1, 20).reshape(4, 5)
    features = np.stack([2 * along + 3, along - 1, np.full((4, 5), 7.0)]).astype(np.float32)
    axes = PrincipalAxes.of(features)
    np.testing.assert_allclose(axes.axes[0], np.array([2, 1, 0]) / 5**0.5, atol=1e-6)
    assert axes.deviations[0] == pytest.approx(along.std() * 5**0.5) and axes.deviations[1] < 1e-6
    colours = axes.colours(features)
    assert (colours[..., 1:] == 128).all()  # nothing along the others: grey
    assert colours[0, 0, 0] < colours[1, 1, 0] < colours[3, 4, 0]
    np.testing.assert_array_equal(colours, axes.colours(features.copy()))
    assert axes.colours(features + np.array([2, 1, 0])[:, None, None])[1, 1, 0] > colours[1, 1, 0]


def test_limits_are_shared_where_they_must_be(readings):
    for level in GATED:
        assert readings.limits[level, "gated"] == readings.limits[level, "features"]
        assert readings.limits[level, "gate"] == (0.0, 1.0)
    assert len({readings.limits[level, "adds"] for level in LEVELS}) == 1
    most = max(
        np.abs(one).max() for (_, view), maps in readings.maps.items() if view == "adds" for one in maps.values()
    )
    assert readings.limits[1, "adds"] == (-most, most)
    for (level, view), maps in readings.maps.items():
        if view in ("features", "error"):
            assert readings.limits[level, view] == (0.0, max(float(one.max()) for one in maps.values()))


def test_the_views_are_in_order_and_each_has_a_meaning(readings):
    order = list(head_readings.VIEWS)
    for level in LEVELS:
        views = [view for at, view in readings.maps if at == level]
        assert views == sorted(views, key=order.index)
    assert isinstance(readings, HeadReadings) and list(readings.networks) == ["teacher", "student"]


def test_double_precision_is_read_too(tiny_config, given):
    network = load_network(tiny_config, "golden").double()
    assert read_heads(network, given).teacher.mask.dtype == np.float32
