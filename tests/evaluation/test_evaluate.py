"""Scores of every kind of predictor: those of a plain loop, in whatever form the masks come; and what is refused."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from lumen_lab import evaluate, predict, prediction, save_mask
from lumen_lab.errors import ArtifactError, DatasetError, ImageError, LumenError, MetricError
from lumen_lab.evaluation import task as task_module
from lumen_lab.metrics import METRICS, score_mask, summarise
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path
from tests.evaluation.predictors import LENGTH, SIZE, Listed, Logged, calls_by, disc, scenes


def bright(image):
    return 3 * image.mean(axis=1, keepdims=True)


def write_masks(folder, data, predictor=bright):
    for index in range(len(data)):
        sample = data.sample(index)
        save_mask(predict(predictor, sample.image, size=SIZE), folder / f"{sample.name}.png")
    return folder


def write_onnx(path, weight=1.0, **options):
    """The mean of the channels times ``weight``, as a 1 × 1 convolution."""
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, *SIZE))
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, (1, 1, *SIZE))
    kernel = onnx.numpy_helper.from_array(np.full((1, 3, 1, 1), weight, np.float32), "kernel")
    graph = helper.make_graph([helper.make_node("Conv", ["image", "kernel"], ["logits"])], "g", [image], [logits])
    graph.initializer.append(kernel)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path, **options)
    return path


# Which scores


def test_scores_are_those_of_a_plain_loop():
    data = scenes()
    rows = []
    for index in range(LENGTH):
        sample = data.sample(index)
        mask = predict(bright, sample.image, size=SIZE)
        rows.append((sample.name, sample.attributes, score_mask(mask, sample.matte)))
    expected = summarise(rows)
    found = evaluate(bright, data, size=SIZE, workers=0)
    assert found == expected
    assert [image.name for image in found.images] == [data.name(index) for index in range(LENGTH)]
    assert found.mean("hce") is not None


def test_a_folder_of_a_predictors_masks_has_the_predictors_scores(tmp_path):
    data = scenes()
    expected = evaluate(bright, data, size=SIZE)
    assert evaluate(write_masks(tmp_path / "masks", data), data) == expected
    assert evaluate(str(tmp_path / "masks"), data, workers=0) == expected


def test_masks_are_paired_by_name_whatever_their_case_suffix_and_neighbours(tmp_path):
    data = Listed([disc("Set A/Ä#1 x"), disc("b.c", seed=1)])
    for name, sample in (("set a/A\u0308#1 X.PNG", data.samples[0]), ("B.c.png", data.samples[1])):
        save_mask(sample.matte, tmp_path / "m.png")
        (tmp_path / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m.png").rename(tmp_path / "masks" / name)
    save_mask(data.samples[0].matte, tmp_path / "masks" / "of another set.png")
    scores = evaluate(tmp_path / "masks", data)
    assert [image.name for image in scores.images] == ["Set A/Ä#1 x", "b.c"]
    assert scores.mean("iou") == 1


def test_a_spoiled_mask_changes_the_scores_of_its_image_alone(tmp_path):
    data = scenes()
    folder = write_masks(tmp_path, data)
    before = evaluate(folder, data)
    save_mask(np.roll(predict(bright, data.sample(3).image, size=SIZE), 2, axis=1), folder / f"{data.name(3)}.png")
    after = evaluate(folder, data)
    assert [k for k in range(LENGTH) if before.images[k] != after.images[k]] == [3]
    assert after.images[3].values["raw"]["iou"] != before.images[3].values["raw"]["iou"]
    assert after.mean("mae") != before.mean("mae")


def test_hce_can_be_left_out():
    scores = evaluate(bright, scenes(2), size=SIZE, hce=False)
    assert scores.mean("hce") is None
    assert all(scores.mean(name) is not None for name in METRICS.keys() - {"hce", "thin_recall"})


def test_a_network_is_scored_at_its_own_size_or_at_the_given_one(tiny):
    data = scenes(2)
    own = evaluate(tiny, data)
    assert own == evaluate(tiny, data, size=tiny.config.image_size)
    assert own.mean("mae") != evaluate(tiny, data, size=(32, 32)).mean("mae")


def test_an_onnx_file_is_loaded_once_for_all_images(tmp_path, monkeypatch):
    path, loaded, load = write_onnx(tmp_path / "mean.onnx"), [], prediction.onnx_session
    monkeypatch.setattr(prediction, "onnx_session", lambda path, **named: loaded.append(path) or load(path, **named))
    scores = evaluate(path, scenes(), workers=0)
    assert loaded == [path, path]  # for its size, then for all images
    assert scores == evaluate(lambda image: image.sum(axis=1, keepdims=True), scenes(), size=SIZE, workers=0)


@pytest.mark.parametrize("workers", [0, None])
def test_a_compiled_context_is_started_once_for_many_images(tmp_path, monkeypatch, workers):
    path, started = write_onnx(tmp_path / "mean_ctx.onnx"), []
    spec = TensorSpec("image", (1, 3, *SIZE), "NCHW", "float32")
    manifest = Manifest("htp context", {}, {}, (spec,), (spec,), {path.name: file_sha256(path)}, chip="SM8850")
    manifest.save(manifest_path(path))

    def emulate(path, inputs):
        started.append(len(inputs))
        return [{"logits": bright(value)} for value in inputs]

    monkeypatch.setattr("lumen_lab.deploy.htp.emulate", emulate)
    assert evaluate(path, scenes(20), workers=workers) == evaluate(bright, scenes(20), size=SIZE, workers=0)
    assert started == [16, 4]


# What is refused


def test_a_missing_mask_is_refused_with_counts_before_any_is_read(tmp_path):
    data = scenes()
    folder = write_masks(tmp_path, data)
    for index in (2, 5):
        (folder / f"{data.name(index)}.png").unlink()
    (folder / f"{data.name(0)}.png").write_bytes(b"not read")
    with pytest.raises(
        DatasetError, match=r"of its 10 pictures none is for 2 of the 12 images .first: test/5/000002, "
    ):
        evaluate(folder, data)


def test_a_mask_of_another_size_or_a_broken_one_is_refused_by_name(tmp_path):
    data = scenes(3)
    folder = write_masks(tmp_path, data)
    save_mask(np.zeros((SIZE[0], SIZE[1] + 1)), folder / f"{data.name(1)}.png")
    with pytest.raises(MetricError, match=r"test/5/000001: The prediction is \(48, 65\), its matte \(48, 64\)"):
        evaluate(folder, data)
    (folder / f"{data.name(1)}.png").write_bytes(b"GIF8 no more")
    with pytest.raises(ImageError, match="test/5/000001: .*000001.png"):
        evaluate(folder, data)


def test_a_mask_that_cannot_be_opened_is_refused_by_name(tmp_path, out):
    data = scenes(3)
    folder = write_masks(tmp_path / "masks", data)
    mask = folder / f"{data.name(1)}.png"
    mask.unlink()
    mask.symlink_to(tmp_path / "gone.png")
    with pytest.raises(LumenError, match="000001.png"):
        evaluate(folder, data, out=out)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"predictor": "nowhere.onnx"}, ArtifactError, "Asked to evaluate nowhere.onnx: there is no such file or fold"),
        ({"predictor": bright}, LumenError, "does not state its image size; pass size="),
        ({"dataset": Listed([])}, DatasetError, "the data set is empty"),
        ({"dataset": Listed([disc("a"), disc("b"), disc("a")])}, DatasetError, "1 names .* several images .first: a"),
        ({"size": SIZE, "workers": -1}, LumenError, "workers=-1 was asked for"),
        ({"size": SIZE, "workers": 1.5}, LumenError, "workers=1.5 was asked for"),
        ({"size": SIZE, "workers": "2"}, LumenError, "workers='2' was asked for; give a number of processes"),
        ({"size": 32}, LumenError, r"size=32 was asked for; give \(H, W\) in pixels"),
        ({"size": (32, 0)}, LumenError, r"size=\(32, 0\) was asked for; give \(H, W\) in pixels"),
        (
            {"dataset": [1, 2]},
            DatasetError,
            r"A list was given .* no name\(\), sample\(\), identity\(\); a data set",
        ),
        ({"dataset": None}, DatasetError, r"A NoneType was given .* which has no __len__\(\), name\(\)"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        evaluate(**{"predictor": bright, "dataset": scenes(2)} | arguments)


def test_a_size_for_masks_and_two_images_of_one_mask_are_refused(tmp_path):
    data = Listed([disc("a"), disc("A", seed=1)])
    save_mask(data.samples[0].matte, tmp_path / "a.png")
    with pytest.raises(LumenError, match="holds masks of their images' size; leave it out"):
        evaluate(tmp_path, data, size=SIZE)
    with pytest.raises(DatasetError, match="1 names .* several images .first: a"):
        evaluate(tmp_path, data)


def test_a_network_in_training_mode_is_refused_before_its_scores_are_looked_for(out):
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.BatchNorm2d(1))
    with pytest.raises(LumenError, match=r"training mode.*call \.eval\(\) first"):
        evaluate(net, scenes(2), size=SIZE, out=out)
    assert not out.parent.exists()


def test_samples_must_agree_on_attributes_and_on_their_names():
    data = Listed([disc("a"), disc("b", attributes={"thin": False, "wet": True})])
    with pytest.raises(DatasetError, match="b has the attributes thin, wet, and a has thin"):
        evaluate(bright, data, size=SIZE)
    data.sample = lambda index: dataclasses.replace(data.samples[0], name="c")
    with pytest.raises(DatasetError, match=r"a: sample\(0\) is named 'c'; name\(0\) must say the same"):
        evaluate(bright, data, size=SIZE)


def test_an_error_in_one_image_names_it_and_keeps_its_cause(log):
    with pytest.raises(LumenError, match="test/5/000004: ZeroDivisionError: no more") as caught:
        evaluate(Logged(log, fails_at=5), scenes(), size=SIZE, workers=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(calls_by(log)) == 5


def test_a_network_on_another_device_stays_in_this_process():
    net = nn.Conv2d(3, 1, 1)
    assert not task_module.on_accelerator(net)
    assert task_module.on_accelerator(net.to("meta"))
    assert not task_module.on_accelerator(bright)
    with torch.device("cpu"):
        assert not task_module.on_accelerator(nn.ReLU())
