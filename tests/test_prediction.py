"""The same door for a network, an ONNX file, a compiled binary and a function."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import lumen_lab
from lumen_lab.deploy.report import CompileReport
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.images import to_network_input
from lumen_lab.network.checkpoints import save_weights
from lumen_lab.prediction import predict, predict_all, working_size
from lumen_lab.quantization.graph_file import load_graph, save_graph
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path

SIZE = (32, 48)


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def channel_mean(value: np.ndarray) -> np.ndarray:
    """Logits of the stand-in network: the mean of the three channels."""
    return value.mean(axis=1, keepdims=True)


def write_stand_in(path: Path, shape: tuple = (1, 3, *SIZE)) -> Path:
    """An ONNX file of ``channel_mean``, without a manifest."""
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, (shape[0], 1, *shape[2:]))
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    node = helper.make_node("ReduceMean", ["image", "axes"], ["logits"], keepdims=1)
    graph = helper.make_graph([node], "stand_in", [image], [logits], [axes])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def write_manifest(path: Path, *, size: tuple = SIZE, chip: str | None = None) -> Path:
    """A manifest beside ``path`` that fits it; with ``chip``, that of a compiled context."""
    Manifest(
        kind="onnx" if chip is None else "htp context",
        made_from={},
        versions={},
        inputs=(TensorSpec("image", (1, 3, *size), "NCHW", "float32"),),
        outputs=(TensorSpec("logits", (1, 1, *size), "NCHW", "float32"),),
        files={path.name: file_sha256(path)},
        chip=chip,
    ).save(manifest_path(path))
    return path


class TinyMean(nn.Module):
    """The stand-in as a network with one weight, a batch norm that changes nothing in eval mode, and no ``config``."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm2d(1, eps=0)

    def forward(self, image):
        return self.norm(self.weight * image.mean(dim=1, keepdim=True))


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory) -> Path:
    return lumen_lab.export_onnx(tiny, tmp_path_factory.mktemp("exported") / "tiny.onnx")


@pytest.fixture
def stand_in(tmp_path) -> Path:
    return write_manifest(write_stand_in(tmp_path / "net.onnx"))


# The mask


@pytest.mark.parametrize("size", [(37, 53), (1, 1), (3, 400), (131, 64)])
def test_a_mask_has_the_size_of_its_photograph(tiny, size):
    mask = predict(tiny, photograph(*size))
    assert mask.shape == size
    assert mask.dtype == np.float32
    assert 0 <= mask.min() <= mask.max() <= 1


def test_a_mask_is_the_sigmoid_of_the_logits_at_the_working_size():
    seen = []

    def half_on(value):
        seen.append((value.shape, value.dtype))
        logits = np.full((1, 1, *SIZE), -30, np.float32)
        logits[..., : SIZE[1] // 2] = 0
        return logits

    mask = predict(half_on, photograph(64, 96), size=SIZE)
    assert seen == [((1, 3, *SIZE), np.float32)]
    np.testing.assert_allclose(mask[:, :40], 0.5, atol=1e-6)
    np.testing.assert_allclose(mask[:, 56:], 0, atol=1e-6)


def test_several_photographs_get_their_own_masks_in_order():
    pictures = [photograph(37, 53), photograph(20, 11, seed=1), photograph(37, 53, seed=2)]
    masks = predict_all(channel_mean, pictures, size=SIZE)
    for mask, picture in zip(masks, pictures, strict=True):
        np.testing.assert_array_equal(mask, predict(channel_mean, picture, size=SIZE))
    assert np.abs(masks[0] - masks[2]).max() > 0.01


# Networks and functions


def test_a_network_works_at_its_own_size_unless_told(tiny):
    assert working_size(tiny) == tiny.config.image_size
    picture = photograph(70, 90)
    np.testing.assert_array_equal(predict(tiny, picture), predict(tiny, picture, size=tiny.config.image_size))
    assert np.abs(predict(tiny, picture) - predict(tiny, picture, size=(32, 32))).max() > 1e-4


def test_a_network_computes_in_its_own_dtype():
    picture = photograph(37, 53)
    single, double = (
        predict(TinyMean().to(dtype).eval(), picture, size=SIZE) for dtype in (torch.float32, torch.float64)
    )
    np.testing.assert_allclose(single, double, atol=1e-6)


@pytest.mark.parametrize(("model", "name"), [(channel_mean, "channel_mean"), (TinyMean().eval(), "TinyMean")])
def test_what_states_no_size_needs_one(model, name):
    with pytest.raises(LumenError, match=rf"^{name} does not state its image size; pass size=\(H, W\)\.$"):
        predict(model, photograph(8, 8))
    assert predict(model, photograph(9, 7), size=SIZE).shape == (9, 7)


@pytest.mark.parametrize("part", ["", "norm"])
def test_a_network_in_training_mode_is_refused_and_left_as_it_was(part):
    model = TinyMean().eval()
    model.get_submodule(part).train()
    with pytest.raises(LumenError, match=r"in training mode.*call \.eval\(\) first"):
        predict(model, photograph(8, 8), size=SIZE)
    assert model.norm.num_batches_tracked == 0


def test_a_network_without_weights_can_predict():
    class Mean(nn.Module):
        def forward(self, image):
            return image.mean(dim=1, keepdim=True)

    picture = photograph(37, 53)
    expected = predict(channel_mean, picture, size=SIZE)
    np.testing.assert_allclose(predict(Mean().eval(), picture, size=SIZE), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["cat.jpg", "coffee.jpg", "flower.jpg", "horse.png"])
def test_the_shipped_network_finds_the_object_of_a_sample_photograph(repository, name):
    """Each shows one thing in the middle, upper corners are background (the astronaut's hold a flag and a shuttle)."""
    image = lumen_lab.load_image(repository / "data" / "photographs" / name)
    mask = predict(lumen_lab.load_network("micro"), image)
    height, width = mask.shape
    middle = mask[height // 3 : 2 * height // 3, width // 3 : 2 * width // 3]
    corners = np.concatenate([mask[: height // 8, : width // 8], mask[: height // 8, -width // 8 :]], 1)
    assert mask.shape == image.shape[:2]
    assert middle.mean() > 0.7
    assert corners.mean() < 0.3


# ONNX files


@pytest.mark.slow
def test_a_network_and_its_onnx_file_give_the_same_mask(tiny, exported):
    picture = photograph(75, 101)
    expected = predict(tiny, picture)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(predict(exported, picture), expected, rtol=0, atol=1e-4)
    assert working_size(exported) == tiny.config.image_size


@pytest.mark.parametrize("as_given", [str, Path])
def test_an_onnx_file_works_at_the_size_of_its_manifest(stand_in, as_given):
    picture = photograph(37, 53)
    expected = predict(channel_mean, picture, size=SIZE)
    np.testing.assert_allclose(predict(as_given(stand_in), picture), expected, atol=1e-6)


def test_an_onnx_file_without_a_manifest_works_at_its_own_size(tmp_path):
    path = write_stand_in(tmp_path / "elsewhere.onnx")
    assert working_size(path) == SIZE
    picture = photograph(37, 53)
    expected = predict(channel_mean, picture, size=SIZE)
    np.testing.assert_allclose(predict(path, picture), expected, atol=1e-6)


def test_an_onnx_file_of_open_shape_needs_a_size(tmp_path):
    path = write_stand_in(tmp_path / "open.onnx", (1, 3, "height", "width"))
    with pytest.raises(ArtifactError, match=r"not one fixed \(1, 3, H, W\); pass size"):
        predict(path, photograph(8, 8))
    assert predict(path, photograph(9, 7), size=SIZE).shape == (9, 7)


@pytest.mark.parametrize("size", [None, SIZE])
def test_a_changed_onnx_file_is_refused(stand_in, size):
    content = bytearray(stand_in.read_bytes())
    content[len(content) // 2] ^= 1
    stand_in.write_bytes(content)
    with pytest.raises(ArtifactError, match="net.onnx does not fit its manifest"):
        predict(stand_in, photograph(8, 8), size=size)


def test_a_size_that_the_file_does_not_take_is_refused(stand_in):
    with pytest.raises(ArtifactError, match=r"net.onnx cannot be run on an image of \(64, 64\)"):
        predict(stand_in, photograph(8, 8), size=(64, 64))


@pytest.mark.parametrize("size", [None, SIZE])
def test_a_missing_file_is_named(tmp_path, size):
    with pytest.raises(ArtifactError, match=r"predict with .*none\.onnx, which is not there; export or compile it"):
        predict(tmp_path / "none.onnx", photograph(8, 8), size=size)


def test_a_file_that_went_missing_beside_its_manifest_is_named(stand_in):
    stand_in.unlink()
    with pytest.raises(ArtifactError, match="There is no artefact .*net.onnx"):
        predict(stand_in, photograph(8, 8))


def test_a_file_that_is_no_onnx_model_is_refused(tmp_path):
    (tmp_path / "text.onnx").write_text("a letter")
    with pytest.raises(ArtifactError, match="text.onnx is not a model that onnxruntime can run"):
        predict(tmp_path / "text.onnx", photograph(8, 8))


# Compiled contexts


@pytest.fixture
def context(tmp_path) -> Path:
    """A file that only the emulation could read, with the manifest of a compiled context."""
    path = tmp_path / "net_sm8850_ctx.onnx"
    path.write_bytes(b"names a binary")
    return write_manifest(path, chip="sm8850")


def test_a_compiled_context_runs_once_in_the_emulation(context, monkeypatch):
    calls = []

    def emulate(path, inputs):
        calls.append((path, [value.shape for value in inputs]))
        return [{"logits": channel_mean(value).astype(np.float16)} for value in inputs]

    monkeypatch.setattr("lumen_lab.deploy.htp.emulate", emulate)
    pictures = [photograph(37, 53), photograph(20, 11, seed=1)]
    masks = predict_all(context, pictures)
    assert calls == [(context, [(1, 3, *SIZE)] * 2)]
    assert [mask.dtype for mask in masks] == [np.float32] * 2
    for mask, picture in zip(masks, pictures, strict=True):
        np.testing.assert_allclose(mask, predict(channel_mean, picture, size=SIZE), atol=1e-3)


def test_a_changed_context_does_not_reach_the_emulation(context, monkeypatch):
    monkeypatch.setattr("lumen_lab.deploy.htp.emulate", lambda *_: pytest.fail("emulated a changed file"))
    context.write_bytes(b"names another binary")
    with pytest.raises(ArtifactError, match="does not fit its manifest"):
        predict(context, photograph(8, 8))


def report_of(context: Path) -> CompileReport:
    """A report of which only the context is looked at."""
    numbers = {"htp_arch": 81, "soc_model": 87, "binary_bytes": 1, "compile_s": 1.0, "peak_memory_bytes": None}
    empty = {"options": {}, "onnx_sha256": "", "versions": {}, "partition_rows": (), "nodes": (), "ops": ()}
    return CompileReport(
        model="net.onnx", chip="SM8850", log_path="net.log", context_path=str(context), **numbers, **empty
    )


def test_a_compile_report_stands_for_its_context(context, monkeypatch):
    monkeypatch.setattr(
        "lumen_lab.deploy.htp.emulate", lambda path, inputs: [{"logits": channel_mean(x)} for x in inputs]
    )
    picture = photograph(37, 53)
    assert working_size(report_of(context)) == SIZE
    np.testing.assert_array_equal(predict(report_of(context), picture), predict(context, picture))


@pytest.mark.parametrize("strange", [None, 3, np.zeros((8, 8, 3)), [channel_mean]])
def test_what_cannot_predict_is_refused_in_a_sentence(strange):
    words = f"predict takes a network, .* a CompileReport or a function, found a {type(strange).__name__};"
    for size in (None, SIZE):
        with pytest.raises(LumenError, match=words):
            predict(strange, photograph(8, 8), size=size)


@pytest.mark.parametrize("size", [None, SIZE])
@pytest.mark.parametrize("name", ["net.safetensors", "net.pt", "net.PTH"])
def test_a_file_of_weights_is_refused_with_the_doors_that_read_it(tmp_path, name, size):
    with pytest.raises(
        ArtifactError, match=r"holds weights and no network .*load_network\(.*load_graph\(path, network"
    ):
        predict(tmp_path / name, photograph(8, 8), size=size)


def test_a_saved_graph_is_refused_with_the_door_that_reads_it(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 1, 1)).eval()
    graph = lumen_lab.quantize(net, [photograph(8, 8)], example=torch.zeros(1, 3, 8, 8), output="mask", progress=False)
    path = save_graph(graph, tmp_path / "graph.safetensors")
    with pytest.raises(ArtifactError, match=r"load it with load_graph\(path, network\)") as caught:
        predict(path, photograph(8, 8))
    assert "load_network" not in str(caught.value)
    image = photograph(8, 8)
    np.testing.assert_array_equal(predict(load_graph(path, net), image), predict(graph, image))


def test_saved_weights_are_refused_with_the_door_that_reads_them(tmp_path):
    path = save_weights(TinyMean(), tmp_path / "weights.safetensors", made_from={})
    with pytest.raises(ArtifactError, match=r"load it with load_network\(") as caught:
        predict(path, photograph(8, 8))
    assert "load_graph" not in str(caught.value)


@pytest.mark.parametrize(
    ("logits", "words"), [((1, 2, 8, 8), "logits"), ((1, 1000), "logits"), (None, "NaN or infinity")]
)
def test_what_is_not_a_mask_network_is_refused(logits, words):
    output = np.full((1, 1, 8, 8), np.nan, np.float32) if logits is None else np.zeros(logits, np.float32)
    with pytest.raises(LumenError, match=words):
        predict(lambda image: output, np.zeros((5, 7, 3), np.uint8), size=(8, 8))


# What looks like something else


def sharp(image):
    """Logits of −8 and 8."""
    return np.where(image.mean(axis=1, keepdims=True) > 0, 8.0, -8.0).astype(np.float32)


def left_half_bright(side_px=32):
    image = np.zeros((side_px, side_px, 3), np.uint8)
    image[:, : side_px // 2] = 255
    return image


def test_probabilities_in_the_place_of_logits_are_warned_of():
    with pytest.warns(UserWarning, match="these look like probabilities; give logits"):
        predict(lambda image: 1 / (1 + np.exp(-sharp(image))), left_half_bright(), size=(32, 32))


@pytest.mark.parametrize(
    "logits",
    [
        sharp,
        lambda image: sharp(image) * 0.01,  # a timid network
        lambda image: sharp(image) * 0,
        lambda image: 0.3 + 0.025 * sharp(image),  # near neither end
        lambda image: 4 + 0.5 * sharp(image),  # foreground all over
        lambda image: 0.05 * sharp(image),
    ],
)
def test_logits_are_not_warned_of(logits, recwarn):
    predict(logits, left_half_bright(), size=(32, 32))
    assert not [warning for warning in recwarn if "probabilities" in str(warning.message)]


def test_a_size_that_is_no_pair_is_refused():
    for size in (32, "32", (32,), (32, -1), (32.5, 32)):
        with pytest.raises(LumenError, match="was asked for; give .H, W. in pixels"):
            predict(sharp, left_half_bright(), size=size)


# Integer ends


def write_quantised(path: Path, *, name: str = "logits", scale: float = 1 / 16, zero_point: int = 120) -> Path:
    """``channel_mean`` in uint8 from end to end, with the manifest of a quantised file."""
    constants = {"s_x": np.float32(1 / 48), "z_x": np.uint8(112), "s_y": np.float32(scale), "z_y": np.uint8(zero_point)}
    nodes = [
        helper.make_node("DequantizeLinear", ["image", "s_x", "z_x"], ["x"]),
        helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1),
        helper.make_node("QuantizeLinear", ["m", "s_y", "z_y"], [name]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.UINT8, (1, c, *SIZE)) for n, c in (("image", 3), (name, 1))]
    initializers = [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "quantised", ends[:1], ends[1:], [*initializers, axes])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    image = TensorSpec("image", (1, 3, *SIZE), "NCHW", "uint8", float(constants["s_x"]), 112)
    returned = TensorSpec(name, (1, 1, *SIZE), "NCHW", "uint8", float(constants["s_y"]), zero_point)
    files = {path.name: file_sha256(path)}
    Manifest("qdq", {}, {}, inputs=(image,), outputs=(returned,), files=files).save(manifest_path(path))
    return path


def test_integer_ends_are_converted_by_the_manifest(tmp_path):
    picture = photograph(*SIZE)
    mask = predict(write_quantised(tmp_path / "net.onnx"), picture)
    logits = channel_mean(to_network_input(picture, size=SIZE))[0, 0]
    error = np.abs(np.log(mask / (1 - mask)) - logits)
    assert error.max() < 1 / 32 + 1 / 96 + 1e-3, "half a step of the output and half a step of the input"
    assert error.std() > 0.005, "as exact as a file without quantisers"


def test_an_output_called_mask_is_the_probability_itself(tmp_path):
    picture = photograph(*SIZE)
    mask = predict(write_quantised(tmp_path / "net.onnx", name="mask", scale=1 / 256, zero_point=0), picture)
    expected = np.clip(channel_mean(to_network_input(picture, size=SIZE))[0, 0], 0, 255 / 256)
    assert mask.min() < 1e-9
    np.testing.assert_allclose(mask, expected, atol=1 / 512 + 1 / 96 + 1e-4)


@pytest.mark.parametrize("name", ["logits", "mask"])
def test_integers_without_an_encoding_are_refused(tmp_path, name):
    path = write_quantised(tmp_path / "net.onnx", name=name, scale=1 / 16, zero_point=9)
    manifest = Manifest.load(manifest_path(path))
    replace(manifest, outputs=(replace(manifest.outputs[0], scale=None),)).save(manifest_path(path))
    with pytest.raises(ArtifactError, match="does not say which numbers its integers stand for"):
        predict(path, photograph(5, 7))


@pytest.mark.npu
def test_a_quantised_file_and_its_compiled_form_give_the_same_mask(tmp_path):
    path = write_quantised(tmp_path / "net.onnx", zero_point=121)
    report = lumen_lab.compile_for_chip(path, "SM8850", out_dir=tmp_path, traffic=False, progress=False)
    picture = photograph(40, 30)
    on_cpu, emulated = predict(path, picture), predict(report.context_path, picture)
    assert np.ptp(on_cpu) > 0.1
    np.testing.assert_allclose(emulated, on_cpu, atol=1 / 64)
    assert np.mean(emulated != on_cpu) < 0.2


@pytest.mark.parametrize("output", ["mask", "logits"])
def test_a_quantised_graph_and_its_file_give_one_mask(tmp_path, output):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)).eval()
    image = photograph(*SIZE)
    graph = lumen_lab.quantize(net, [image], example=torch.zeros(1, 3, *SIZE), output=output, progress=False)
    mask = predict(graph, image)
    assert mask.std() > 0.01
    assert np.abs(mask - predict(lumen_lab.export_qdq(graph, tmp_path / "net.onnx"), image)).max() <= 1 / 255
    assert np.abs(mask - predict(net, image, size=SIZE)).max() < 0.02
