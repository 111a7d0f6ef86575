"""What the documents show as code runs, in order, as it stands."""

import re
import sys

import pytest


def python_blocks(path):
    """The Python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def in_scratch(tmp_path, monkeypatch):
    """The working folder is an empty one from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_rewrite_of_ones_own_goes_from_the_record_to_onnx(repository, in_scratch, capsys):
    module, use = python_blocks(repository / "docs/rewrites.md")
    (in_scratch / "mine.py").write_text(module)
    exec(compile(use, "docs/rewrites.md", "exec"), {})
    assert "import mine" in capsys.readouterr().out
    assert (in_scratch / "build/mine.onnx").is_file()


def test_a_network_of_ones_own_goes_from_pictures_to_integers(repository, in_scratch):
    (block,) = python_blocks(repository / "docs/quantization.md")
    (in_scratch / "build").mkdir()
    found = {}
    exec(compile(block, "docs/quantization.md", "exec"), found)
    assert (in_scratch / "build/mine.onnx").is_file()
    assert found["mixed"].ends_in_mask
    assert {name: found["mixed"].quantisers[name].bits for name in found["choice"].bits} == dict(found["choice"].bits)
