"""The script and style beside each widget: whole by themselves, and valid."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lumen_lab.widgets import MaskCompare, RewritePicker, mask_compare, rewrite_picker

each_widget = pytest.mark.parametrize(
    ("module", "widget"), [(mask_compare, MaskCompare), (rewrite_picker, RewritePicker)], ids=["compare", "picker"]
)


@each_widget
def test_nothing_is_fetched_from_a_network(module, widget):
    for suffix in (".js", ".css"):
        source = Path(module.__file__).with_suffix(suffix).read_text()
        assert not re.search(r"https?:|\burl\(|\bimport\b|\bfetch\(", source)


@each_widget
def test_the_module_is_valid_javascript(module, widget, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed, so the module's syntax is checked by the browser test only")
    script = tmp_path / "widget.mjs"
    script.write_text(str(widget._esm))
    checked = subprocess.run([node, "--check", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
