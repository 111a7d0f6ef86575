"""What is left on disk: a result that is taken again, rows that survive a kill, nobody's scores lost or mixed up."""

import base64
import dataclasses
import importlib.metadata
import json
import os
import random
import re
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from lumen_lab import evaluate
from lumen_lab import evaluation as evaluation_module
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.evaluation import resuming
from lumen_lab.evaluation.rows import read_row, write_row
from lumen_lab.images import to_network_input
from lumen_lab.metrics import Scores, score_mask
from lumen_lab.specs import Manifest, manifest_path
from tests.evaluation.predictors import LENGTH, LOOKS, SIZE, Listed, Logged, calls_by, disc, scenes


def run(predictor, out, *, data=None, **options):
    return evaluate(predictor, data or scenes(), **{"size": SIZE, "out": out, "workers": 0} | options)


def interrupted(log, out, *, after):
    """An evaluation that fails after so many images; its file of rows."""
    calls = len(calls_by(log)) + LOOKS + after + 1
    with pytest.raises(LumenError, match="no more") as caught:
        run(Logged(log, fails_at=calls), out)
    (note,) = caught.value.__notes__
    assert re.match(rf"\d+ images are scored and kept in {resuming.partial_path(out)}", note)
    return resuming.partial_path(out)


# The result


def test_a_complete_result_is_returned_without_work(log, out, undisturbed):
    assert run(Logged(log), out) == undisturbed
    assert sorted(path.name for path in out.parent.iterdir()) == ["scores.json", "scores.json.manifest.json"]
    assert Scores.load(out) == undisturbed
    assert Manifest.beside(out).kind == "scores"
    assert len(calls_by(log)) == LOOKS + LENGTH
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) == LOOKS + LENGTH + LOOKS


def test_a_line_is_compact_and_gives_back_every_bit():
    sample = scenes(1).sample(0)
    scores = score_mask(np.random.default_rng(0).random(SIZE), sample.matte)
    line = write_row(4, sample, scores)
    row = read_row(line)
    assert len(line) < 12_500
    assert line.endswith(b"\n")
    assert (row.index, row.name, row.attributes) == (4, sample.name, sample.attributes)
    assert (row.scores.values, row.scores.bins, row.scores.grey_share) == (
        scores.values,
        scores.bins,
        scores.grey_share,
    )
    for reading, curves in scores.curves.items():
        assert {name: tuple(curve) for name, curve in row.scores.curves[reading].items()} == curves


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hce": False}, "hce: True there, False here"),
        ({"size": (32, 32)}, r"size: \(48, 64\) there, \(32, 32\) here"),
        ({"data": scenes(seed=6)}, "dataset seed: 5 there, 6 here"),
        ({"data": scenes(5)}, "images: 12 there, 5 here"),
    ],
)
def test_the_scores_of_another_evaluation_are_moved_aside_with_a_warning(log, out, undisturbed, options, words):
    run(Logged(log), out)
    with pytest.warns(UserWarning, match=f"held the scores of another evaluation .*{words}.* they are now"):
        other = run(Logged(log), out, **options)
    assert other == Scores.load(out) != undisturbed
    (aside,) = set(out.parent.glob("scores.*.json")) - {*out.parent.glob("*.manifest.json"), out}
    assert Scores.load(aside) == undisturbed
    assert Manifest.beside(aside).made_from["hce"] == "True"


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_functions_of_one_name_are_told_apart_by_the_first_middle_and_last_mask(out, changed):
    data = Listed([disc("a"), disc("b", seed=1), disc("c", seed=2)])
    its_input = to_network_input(data.samples[changed].image, size=SIZE)

    def brighter_by(step):
        return lambda image: 3 * image.mean(axis=1, keepdims=True) + step * np.array_equal(image, its_input)

    first = run(brighter_by(0), out, data=data)
    with pytest.warns(UserWarning, match=r"evaluation \(first, middle and last mask: up to \d+ grey levels apart\)"):
        assert run(brighter_by(0.5), out, data=data) != first


def test_a_mask_that_rounds_otherwise_is_of_the_same_predictor(log, out, undisturbed):
    assert run(Logged(log), out) == undisturbed
    assert run(Logged(log, bias=0.01), out) == undisturbed
    assert len(calls_by(log)) == LOOKS + LENGTH + LOOKS
    assert run(Logged(log, bias=0.01), out.with_name("other.json")) != undisturbed


def test_networks_of_the_same_weights_are_told_apart_by_what_they_predict(out):
    net = nn.Conv2d(3, 1, 1).eval()
    run(net, out)
    net.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.warns(UserWarning, match=r"evaluation \(first, middle and last mask: up to \d+ grey levels"):
        run(net, out)


def test_masks_and_external_weights_are_told_apart_by_every_file(out, tmp_path):
    from lumen_lab import save_mask
    from tests.evaluation.test_evaluate import write_masks, write_onnx

    data, folder = scenes(3), tmp_path / "masks"
    run(write_masks(folder, data), out, data=data, size=None)
    save_mask(np.zeros(SIZE), folder / f"{data.name(2)}.png")
    with pytest.warns(UserWarning, match="predictor: masks .* there, masks .* here"):
        run(folder, out, data=data, size=None)
    apart = {"save_as_external_data": True, "size_threshold": 0, "location": "weights.bin"}
    path = write_onnx(tmp_path / "net.onnx", **apart)
    with pytest.warns(UserWarning, match="they are now"):
        first = run(path, out, data=data)
    weights = tmp_path / "weights.bin"
    weights.write_bytes((np.frombuffer(weights.read_bytes(), np.float32) * 2).tobytes())
    with pytest.warns(UserWarning, match="predictor: file .* there, file .* here"):
        assert run(path, out, data=data) != first


def test_another_sample_under_the_same_words_is_another_data_set(log, out):
    run(Logged(log), out, data=Listed([disc("a"), disc("b")]))
    with pytest.warns(UserWarning, match="first, middle and last sample"):
        run(Logged(log), out, data=Listed([disc("a"), disc("b", seed=1)]))


@pytest.mark.parametrize("content", [b"{}", b"", b"my own notes"])
def test_a_file_that_is_no_result_is_refused_and_left(log, out, content):
    out.parent.mkdir()
    out.write_bytes(content)
    with pytest.raises(ArtifactError, match="cannot be told to be scores .*; move it, or give another out"):
        run(Logged(log), out)
    assert out.read_bytes() == content


def test_an_edited_result_is_refused(log, out):
    run(Logged(log), out)
    out.write_text(out.read_text().replace("0.9", "1.0", 1))
    with pytest.raises(ArtifactError, match="does not fit its manifest"):
        run(Logged(log), out)
    assert len(calls_by(log)) == LOOKS + LENGTH + LOOKS


# The rows


def test_what_was_scored_before_a_failure_is_not_scored_again(log, out, undisturbed):
    partial = interrupted(log, out, after=7)
    assert not out.exists()
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 7
    assert not partial.exists()


@pytest.mark.parametrize("cut_bytes", [1, 300])
def test_a_line_that_was_cut_is_scored_again(log, out, undisturbed, cut_bytes):
    partial = interrupted(log, out, after=4)
    partial.write_bytes(partial.read_bytes()[:-cut_bytes])
    interrupted(log, out, after=2)
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - (4 - 1 + 2)


def with_checksum(text):
    return b"%08x %s" % (zlib.crc32(text.rstrip(b"\n")), text)


@pytest.mark.parametrize("name", ["mae", "thin"])
def test_one_changed_character_is_scored_again(log, out, undisturbed, name):
    partial = interrupted(log, out, after=4)
    rows = partial.read_bytes()
    first_row = rows.index(b"\n") + 1  # the head is told apart by what it says
    at = rows.index(f'"{name}":'.encode(), first_row)
    at += len(name) + 5 if name == "mae" else 2  # a digit, or a letter of an attribute's name
    partial.write_bytes(rows[:at] + (b"7" if rows[at : at + 1] != b"7" else b"3") + rows[at + 1 :])
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 3


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (b'"index":1', b'"index":[1]'),
        (b"test/5/000001", b"test/5/000007"),
        (b'"thin":', b'"thick":'),
    ],
)
def test_a_row_of_no_image_or_with_other_attributes_is_scored_again(log, out, undisturbed, said, instead):
    partial = interrupted(log, out, after=4)
    lines = partial.read_bytes().splitlines(keepends=True)
    assert said in lines[2]
    lines[2] = with_checksum(lines[2][9:].replace(said, instead, 1))
    partial.write_bytes(b"".join(lines))
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 3


def test_a_damaged_line_is_scored_again(log, out, undisturbed):
    partial = interrupted(log, out, after=4)
    lines = partial.read_bytes().splitlines(keepends=True)
    curves = json.loads(lines[2][9:])["scores"]["curves"].encode()
    short = base64.b64encode(zlib.compress(zlib.decompress(base64.b64decode(curves))[:-8]))
    lines[1], lines[2] = b"\0" * 40 + b"\n", with_checksum(lines[2][9:].replace(curves, short))
    partial.write_bytes(b"".join(lines))
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 2


def test_the_order_in_which_images_were_finished_does_not_matter(log, out, undisturbed, monkeypatch):
    """All rows were kept and the process was killed before it could write the result."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluation_module, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(Logged(log), out)
    partial = resuming.partial_path(out)
    head, *lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == LENGTH
    random.Random(1).shuffle(lines)
    partial.write_bytes(b"".join([head, *lines]))
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS


def test_rows_of_another_evaluation_are_refused_and_stay(log, out, undisturbed):
    partial = interrupted(log, out, after=3)
    rows = partial.read_bytes()
    with pytest.raises(ArtifactError, match="holds 3 images of another evaluation.*hce: True there, False here"):
        run(Logged(log), out, hce=False)
    assert partial.read_bytes() == rows
    assert run(Logged(log), out) == undisturbed


@pytest.mark.parametrize(
    "first_line",
    [
        "minutes of the meeting",
        *("[1,2]", "5", "null", "{}"),
        json.dumps(Manifest("scores", ["size"], {}, (), (), {}).to_json()),
        json.dumps(Manifest("scores", {}, None, (), (), {}).to_json()),
    ],
)
def test_a_file_of_something_else_where_rows_would_lie_is_refused(log, out, first_line):
    out.parent.mkdir()
    resuming.partial_path(out).write_text(f"{first_line}\nall agreed\n")
    with pytest.raises(ArtifactError, match="its first line does not say which"):
        run(Logged(log), out)
    assert resuming.partial_path(out).read_text().endswith("all agreed\n")


def test_scores_whose_manifest_does_not_say_what_they_are_of_are_refused(log, out):
    run(Logged(log), out)
    dataclasses.replace(Manifest.beside(out), made_from=["size"]).save(manifest_path(out))
    with pytest.raises(ArtifactError, match="cannot be told to be scores .The saved Manifest is damaged: made_from"):
        run(Logged(log), out)
    assert out.exists()


def test_what_decides_scores_is_among_the_tools(log, out):
    run(Logged(log), out)
    found = Manifest.beside(out).versions
    assert {"opencv-python-headless", "scikit-image", "pysodmetrics", "onnxruntime-qnn", "timm"} <= found.keys()
    assert found["timm"] == importlib.metadata.version("timm")


@pytest.mark.parametrize("head_bytes", [0, 10, 200, None])
def test_rows_that_ended_before_the_first_are_nobodys_loss(log, out, undisturbed, head_bytes):
    partial = interrupted(log, out, after=1)
    head = partial.read_bytes().splitlines(keepends=True)[0].replace(b'"hce": "True"', b'"hce": "other"')
    partial.write_bytes(head[:head_bytes])
    assert run(Logged(log), out) == undisturbed


def test_rows_beside_their_own_result_are_cleared_away(log, out, undisturbed):
    partial = interrupted(log, out, after=3)
    rows = partial.read_bytes()
    run(Logged(log), out)
    partial.write_bytes(rows)
    assert run(Logged(log), out) == undisturbed
    assert not partial.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here to stand for a full disk")
def test_a_full_disk_is_said_before_the_work(log, out):
    out.parent.mkdir()
    resuming.partial_path(out).symlink_to("/dev/full")
    with pytest.raises(ArtifactError, match="Cannot write .*scores.json.partial .No space left on device.; make room"):
        run(Logged(log), out)
    assert len(calls_by(log)) == LOOKS


def test_a_disk_that_fills_up_later_leaves_what_was_kept(log, out, undisturbed, monkeypatch):
    def write(file, line, *, real=resuming._write):
        if len(resuming.partial_path(out).read_bytes().splitlines()) == 5:
            file.write(line[:100])
            raise ArtifactError("Cannot write: the disk is full")
        real(file, line)

    with monkeypatch.context() as patch, pytest.raises(ArtifactError, match="the disk is full"):
        patch.setattr(resuming, "_write", write)
        run(Logged(log), out)
    before = len(calls_by(log))
    assert run(Logged(log), out) == undisturbed
    assert len(calls_by(log)) - before == LOOKS + LENGTH - 4


def test_a_place_that_cannot_be_written_is_refused_before_the_work(log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="Cannot write .*file/scores.json.partial"):
        run(Logged(log), tmp_path / "file" / "scores.json")
    assert len(calls_by(log)) == LOOKS


def test_of_two_with_one_out_the_second_waits_and_takes_what_the_first_made(log, out, undisturbed, monkeypatch):
    said, found = [], []
    monkeypatch.setattr(resuming.warnings, "warn", lambda message, **_: said.append(message))
    second = threading.Thread(target=lambda: found.append(run(Logged(log), os.path.relpath(out))))
    with resuming.one_at_a_time(out):
        second.start()
        second.join(timeout=1.5)
        assert second.is_alive()
        assert not resuming.partial_path(out).exists()
    second.join(timeout=60)
    assert found == [undisturbed]
    assert [message.startswith("Another process is evaluating to ") for message in said] == [True]
