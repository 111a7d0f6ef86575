"""What docs/layers.md shows as code runs as it stands, on a small network in the place of micro."""

import re

import pytest

import lumen_lab
from lumen_lab.equivalence import LayerReport


@pytest.mark.npu
def test_the_page_on_layers_runs_as_it_stands(repository, tiny, tmp_path, monkeypatch):
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (repository / "docs/layers.md").read_text(), re.DOTALL | re.MULTILINE
    )
    monkeypatch.setitem(vars(lumen_lab), "load_network", lambda name: {"micro": tiny}[name])
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(compile(block, "docs/layers.md", "exec"), found)
    assert found["report"].passed and LayerReport.load(tmp_path / "build/layers.json") == found["report"]
    assert found["on_cpu"].passed and len(found["on_cpu"].layers) > 100
    assert [layer.site for layer in found["on_npu"].layers] == ["decoder.decoder_block3", ""]
    assert found["on_npu"].passed and found["on_npu"].precisions == ("float32", "float16")
