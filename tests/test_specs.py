"""Records: whole files, tables, JSON there and back, manifests."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lumen_lab import errors
from lumen_lab.errors import ArtifactError, LumenError
from lumen_lab.specs import (
    Manifest,
    Record,
    Table,
    TensorSpec,
    escaped,
    file_sha256,
    html_table,
    manifest_path,
    replacing,
    tool_versions,
    write_whole,
)

SPEC = TensorSpec("image", (1, 3, 8, 8), "NCHW", "uint8", scale=0.5, zero_point=128)


@dataclass(frozen=True)
class Point(Record):
    x: float
    label: str = ""
    path: tuple[tuple[int, ...], ...] = ()


def manifest(files=None):
    return Manifest(
        kind="onnx",
        made_from={"network": "tiny"},
        versions={"torch": "2"},
        inputs=(SPEC,),
        outputs=(dataclasses.replace(SPEC, name="logits"), SPEC),
        files=files or {},
    )


# Whole files


@pytest.mark.parametrize("content", ["text – ü\n", b"\x00bytes"])
def test_content_is_written_and_readable_by_others(tmp_path, content):
    path = write_whole(tmp_path / "new" / "file.txt", content)
    expected = content.encode() if isinstance(content, str) else content
    assert path.read_bytes() == expected
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failure_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "file.txt", "old")

    def full(self, data):
        with open(self, "wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert os.listdir(tmp_path) == ["file.txt"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_block_leaves_nothing(tmp_path, failure):
    with pytest.raises(failure), replacing(tmp_path / "file.txt") as temporary:
        temporary.write_text("half")
        raise failure
    assert os.listdir(tmp_path) == []


def test_no_reader_sees_a_file_before_it_is_whole(tmp_path):
    path = tmp_path / "file.txt"
    with replacing(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        assert temporary.parent == tmp_path  # the same file system, so that the rename is one step
    assert path.read_text() == "whole"


# Tables


def test_cells_heads_and_captions_are_escaped():
    text = html_table([{"<a>": "<script>alert(1)</script>", "b&c": "x"}], caption="<b>")
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt;a&gt;" in text
    assert "b&amp;c" in text
    assert "<caption>&lt;b&gt;</caption>" in text
    assert "&lt;i&gt; (no rows)" in html_table([], caption="<i>")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0.123456, "0.1235"),
        (1234.5, "1,234"),
        (44313720, "44,313,720"),
        (9999, "9,999"),
        (-7, "-7"),
        (True, "True"),
        ((1, 2), "(1, 2)"),
        (1e-9, "<span style='white-space:nowrap'>1e-09</span>"),
    ],
)
def test_cells_are_written_for_reading(value, shown):
    assert f">{shown}</td>" in html_table([{"value": value}])


def test_a_power_of_ten_is_not_broken_across_lines():
    assert escaped("≤ 1e-09 of <a>") == "≤ <span style='white-space:nowrap'>1e-09</span> of &lt;a&gt;"


def test_a_long_table_ends_with_a_count():
    rows = [{"row": f"r{index}."} for index in range(7)]
    text = html_table(rows, limit=5)
    assert "r4." in text
    assert "r5." not in text
    assert "and 2 more rows" in text
    assert "more rows" not in html_table(rows, limit=7)


def test_a_record_shows_itself_as_a_table():
    assert "<caption>Point</caption>" in Point(3, "a<b")._repr_html_()
    assert "a&lt;b" in Point(3, "a<b")._repr_html_()


def test_a_table_shows_its_lines_each_time_it_is_asked():
    table = Table(({"chip": name} for name in ("<v81>", "v75")), caption="a & b")
    for _ in range(2):
        text = table._repr_html_()
        assert "<caption>a &amp; b</caption>" in text
        assert text.count("<tr>") == 3
        assert "&lt;v81&gt;" in text


# JSON


def test_a_record_comes_back_equal_tuples_included(tmp_path):
    point = Point(3, "ü", ((1, 2), (), (3,)))
    path = point.save(tmp_path / "point.json")
    assert Point.load(path) == point
    assert json.loads(path.read_text())["record"] == "Point"
    assert Point.from_json(point.to_json()) == point


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}])
def test_what_json_has_no_word_for_is_refused_and_leaves_no_file(tmp_path, value):
    with pytest.raises(ArtifactError, match="A Point cannot be written as JSON"):
        Point(value).save(tmp_path / "point.json")
    assert os.listdir(tmp_path) == []


def test_numbers_of_numpy_are_written_as_plain_ones(tmp_path):
    path = Point(np.float32(0.5), "", ((np.int64(3),),)).save(tmp_path / "point.json")
    assert Point.load(path) == Point(0.5, "", ((3,),))


def test_unknown_missing_and_other_fields_are_refused():
    with pytest.raises(ArtifactError, match=r"Expected a saved Point, found .*\['colour'\]"):
        Point.from_json({"x": 1, "colour": "red"})
    with pytest.raises(ArtifactError, match="The saved Point is incomplete"):
        Point.from_json({"label": "a"})
    with pytest.raises(ArtifactError, match="Expected a saved Point, found TensorSpec"):
        Point.from_json(SPEC.to_json())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b'{"record": "Other"}', b'{"x": 1, "y": 2}', b"null"]
)
def test_a_file_that_is_no_such_record_is_refused(tmp_path, content):
    (tmp_path / "point.json").write_bytes(content)
    with pytest.raises(ArtifactError, match="Point"):
        Point.load(tmp_path / "point.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="Cannot read .*point.json as a saved Point"):
        Point.load(tmp_path / "point.json")


# Manifests


def test_a_manifest_comes_back_equal_with_its_tensor_specs(tmp_path):
    path = manifest({"a.onnx": "0"}).save(tmp_path / "a.manifest.json")
    assert Manifest.load(path) == manifest({"a.onnx": "0"})
    assert Manifest.load(path).inputs[0].shape == (1, 3, 8, 8)


@pytest.mark.parametrize("harm", [{"inputs": 3}, {"inputs": [3]}, {"outputs": [{"name": "a"}]}, {"kind": None, "x": 1}])
def test_a_damaged_manifest_is_refused(tmp_path, harm):
    values = manifest().to_json() | harm
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError):
        Manifest.load(tmp_path / "a.json")


def test_files_are_checked_against_their_hashes(tmp_path):
    path = write_whole(tmp_path / "a.bin", b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    record = manifest({"a.bin": file_sha256(path)})
    record.check_files(tmp_path)
    write_whole(path, b"abd")
    with pytest.raises(ArtifactError, match="does not fit its manifest: SHA-256 a52d159f262b… found, ba7816bf8f01…"):
        record.check_files(tmp_path)
    path.unlink()
    with pytest.raises(ArtifactError, match="a.bin is listed in its manifest but is not there"):
        record.check_files(tmp_path)


@pytest.fixture
def artefact(tmp_path):
    """A file with the manifest that fits it."""
    path = write_whole(tmp_path / "a.onnx", b"abc")
    manifest({"a.onnx": file_sha256(path)}).save(manifest_path(path))
    return path


@pytest.mark.parametrize("as_given", [str, Path])
def test_a_good_artefact_has_its_manifest_beside_it(artefact, as_given):
    assert Manifest.beside(as_given(artefact)) == manifest({"a.onnx": file_sha256(artefact)})


def test_an_artefact_that_is_not_there_is_said_to_be_missing(artefact):
    artefact.unlink()
    with pytest.raises(ArtifactError, match="There is no artefact .*a.onnx; make it first"):
        Manifest.beside(artefact)


def test_an_artefact_without_a_manifest_is_refused(artefact):
    manifest_path(artefact).unlink()
    with pytest.raises(ArtifactError, match=r"no manifest a\.onnx\.manifest\.json beside .*a.onnx"):
        Manifest.beside(artefact)


def test_the_manifest_of_another_file_is_refused(artefact):
    other = write_whole(artefact.with_name("b.onnx"), b"abc")
    manifest_path(artefact).rename(manifest_path(other))
    with pytest.raises(ArtifactError, match=r"b\.onnx\.manifest\.json is the manifest of a\.onnx, not of .*b\.onnx"):
        Manifest.beside(other)


@pytest.mark.parametrize("place", [0, 2])
def test_an_artefact_with_one_bit_flipped_is_refused(artefact, place):
    content = bytearray(artefact.read_bytes())
    content[place] ^= 1
    artefact.write_bytes(content)
    with pytest.raises(ArtifactError, match="a.onnx does not fit its manifest"):
        Manifest.beside(artefact)


@pytest.mark.parametrize("files", [None, 3, ["a.onnx"], "a.onnx", {"a.onnx": None}])
def test_a_manifest_whose_list_of_files_is_damaged_is_refused(artefact, files):
    values = manifest().to_json() | {"files": files}
    manifest_path(artefact).write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match="damaged"):
        Manifest.beside(artefact)


def test_the_manifest_of_a_file_bears_its_whole_name(tmp_path):
    assert manifest_path(tmp_path / "a.b.onnx") == tmp_path / "a.b.onnx.manifest.json"
    assert manifest_path("a.onnx") != manifest_path("a.safetensors")


def test_versions_of_what_is_not_installed_are_absent():
    found = tool_versions("torch", "surely-not-installed")
    assert found["surely-not-installed"] == "absent"
    assert found["torch"][0].isdigit()


def test_there_is_one_hierarchy_of_exceptions():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 10
    assert all(issubclass(kind, LumenError) for kind in kinds)
    assert all(kind.__doc__ for kind in kinds)


@dataclass(frozen=True)
class Line(Record):
    points: tuple[Point, ...]
    middle: Point | None = None
    named: dict[str, str] = dataclasses.field(default_factory=dict)


def test_fields_that_are_records_are_read_back_as_records(tmp_path):
    for line in (Line((Point(1, "a"), Point(3, path=((1, 2),))), Point(0)), Line(())):
        assert Line.load(line.save(tmp_path / "line.json")) == line


@pytest.mark.parametrize("broken", [{"points": [{"x": 1, "z": 2}]}, {"points": None}, {"points": [], "middle": 7}])
def test_a_broken_record_inside_another_is_named_with_it(tmp_path, broken):
    path = tmp_path / "line.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(ArtifactError, match="The saved Line .*is damaged"):
        Line.load(path)


@dataclass(frozen=True)
class Kinds(Record):
    count: int = 0
    share: float | None = None
    name: str = ""
    flag: bool = False
    pair: tuple[int, str] = (0, "")
    many: tuple[tuple[float, ...], ...] = ()
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    nested: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    status: Literal["passed", "failed"] = "passed"
    anything: object = None


def test_values_of_the_annotated_types_are_read(tmp_path):
    kinds = Kinds(3, 1, "a", True, (1, "b"), ((1, 2.5), ()), {"a": 1}, {"a": (1, 2)}, "failed", [1])
    found = Kinds.load(kinds.save(tmp_path / "kinds.json"))
    assert found == dataclasses.replace(kinds, nested={"a": [1, 2]}, anything=(1,))
    assert Kinds.from_json(Kinds().to_json()) == Kinds()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", "many"), ("count", 1.5), ("count", True), ("count", None), ("share", "0.5"), ("share", False),
        ("name", 3), ("flag", 1), ("pair", [1]), ("pair", [1, 2]), ("pair", "ab"), ("many", "abc"), ("many", [1]),
        ("many", [["a"]]), ("counts", None), ("counts", {"a": "b"}), ("counts", [1]), ("nested", {"a": [None]}),
        ("status", "PASSED"), ("status", ["passed"]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_its_field(tmp_path, field, value):
    path = tmp_path / "kinds.json"
    path.write_text(json.dumps({field: value}))
    with pytest.raises(ArtifactError, match=f"The saved Kinds is damaged: {field} is .*, found .*; make it again"):
        Kinds.load(path)
