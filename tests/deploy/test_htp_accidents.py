"""What lies in the way of an artefact, what a killed compile leaves, and options that mean nothing."""

import json
from pathlib import Path

import pytest

from lumen_lab.deploy.htp import compile_for_chip
from lumen_lab.errors import CompileError

pytestmark = pytest.mark.npu


@pytest.fixture
def conv(nets, tmp_path):
    """A tiny ONNX file and an empty folder to compile into."""
    return nets.conv(tmp_path / "n.onnx"), tmp_path / "out"


def compiled_quietly(conv, **options):
    return compile_for_chip(conv[0], "SM8850", out_dir=conv[1], progress=False, **options)


@pytest.mark.parametrize("kind", ["notes", "file", "link"])
def test_what_is_not_an_artefact_is_never_replaced(conv, kind, tmp_path):
    place = conv[1] / "n_SM8850"
    conv[1].mkdir()
    if kind == "notes":
        place.mkdir()
        (place / "my_notes.txt").write_text("mine")
    elif kind == "file":
        place.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CompileError, match="is in the way and is not an earlier artefact"):
        compiled_quietly(conv)
    mine = place / "my_notes.txt" if kind == "notes" else place
    assert place.is_symlink() if kind == "link" else mine.read_text() == "mine"
    assert not list(conv[1].glob(".*.part"))


def test_what_a_killed_compile_left_is_cleared_and_an_artefact_moved_aside_comes_back(conv):
    (conv[1] / ".n_SM8850.abcd.part").mkdir(parents=True)
    report = compiled_quietly(conv)
    assert [path.name for path in conv[1].iterdir()] == ["n_SM8850"]
    (conv[1] / "n_SM8850").rename(conv[1] / ".n_SM8850.7.earlier.part")
    with pytest.raises(CompileError):
        compiled_quietly(conv, time_limit_s=0.01)
    assert (conv[1] / "n_SM8850" / "n_SM8850_ctx.onnx").samefile(report.context_path)


def test_a_report_that_was_tampered_with_is_not_reused(conv):
    first = compiled_quietly(conv)
    path = conv[1] / "n_SM8850" / "n_SM8850.report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chip": "SM8650", "nodes": []}))
    again = compiled_quietly(conv, reuse=True)
    assert (again.chip, again.nodes) == (first.chip, first.nodes)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"optimization_mode": 9}, "1, 2 or 3"), ({"vtcm_mb": -4}, "from 1 on"), ({"vtcm_mb": "x"}, "from 1 on")],
)
def test_options_that_mean_nothing_are_refused(conv, options, words):
    with pytest.raises(CompileError, match=words):
        compiled_quietly(conv, **options)
    assert not conv[1].exists()


def test_the_context_is_found_from_another_folder(conv, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    report = compile_for_chip("n.onnx", "SM8850", out_dir="out", progress=False)
    monkeypatch.chdir(conv[1])
    assert Path(report.context_path).is_file()
