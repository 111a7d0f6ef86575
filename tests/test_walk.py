"""The walk over small notebooks: what it leaves, what it prints, and how it fails."""

import io

import pytest

from lumen_lab.walk import WalkError, main, walk

nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")
v4 = nbformat.v4


@pytest.fixture
def notebook(tmp_path):
    """A function that writes a notebook of code cells into a folder of its own and returns its path."""

    def write(name: str, *cells: str):
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells]), path)
        return path

    return write


def test_reports_hold_the_outputs_and_fetch_nothing(notebook, tmp_path):
    first = notebook("first", "import os\nprint('ran in', os.path.basename(os.getcwd()))")
    second = notebook("second", "import ipywidgets\nipywidgets.IntSlider(41)")
    printed = io.StringIO()
    reports = walk([first, second], out_dir=tmp_path / "build", stream=printed)
    assert reports == [tmp_path / "build" / "reports" / f"{name}.html" for name in ("first", "second")]
    pages = [report.read_text(encoding="utf-8") for report in reports]
    assert "ran in notebooks" in pages[0]
    assert "IntSlider(value=41)" in pages[1], "a widget is shown in its static form"
    assert not any('src="http' in page or "unpkg" in page for page in pages)
    assert nbformat.read(first, 4).cells[0].outputs == [], "the notebook itself keeps no outputs"
    assert "ran in notebooks" in (tmp_path / "build" / "notebooks" / "first.ipynb").read_text()
    lines = printed.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["first", "second"]
    assert all(" s  " in line and line.endswith(".html") for line in lines)


def test_a_failing_cell_ends_its_notebook_and_the_others_are_run(notebook, tmp_path, capsys):
    bad = notebook("bad", "print('so far')", "x = 1\nraise ValueError('no such chip')", "print('never')")
    bare = notebook("bare", "def check(found):\n    assert found == 2\n\nfound = 1\ncheck(found)")
    after = notebook("after", "print('reached')")
    assert main([str(bad), str(after), str(bare), "--out-dir", str(tmp_path / "build")]) == 2
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()] == ["bad", "after", "bare"]
    first, second, third = output.err.strip().split("\n\n")
    assert first == "2 of 3 notebooks failed:"
    assert second.startswith("bad.ipynb, code cell 2: ValueError: no such chip\n  2 raise ValueError('no such chip')\n")
    assert third.startswith("bare.ipynb, code cell 1: AssertionError\n  5 check(found)\n  2     assert found == 2\n")
    pages = {name: (tmp_path / "build" / "reports" / f"{name}.html").read_text() for name in ("bad", "after", "bare")}
    assert "so far" in pages["bad"] and "no such chip" in pages["bad"]
    assert "reached" in pages["after"]


def test_a_kernel_that_dies_is_named(notebook, tmp_path):
    dying = notebook("dying", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WalkError, match=r"dying\.ipynb, code cell 1: the kernel died"):
        walk([dying], out_dir=tmp_path, stream=io.StringIO())


def test_a_missing_notebook_is_refused_before_any_is_run(notebook, tmp_path):
    there = notebook("there", "print('ran')")
    with pytest.raises(WalkError, match=r"08_no_such\.ipynb was asked for and is not there; the walk is .*01_operator"):
        walk([there, "notebooks/08_no_such.ipynb"], out_dir=tmp_path / "build")
    assert not (tmp_path / "build").exists()
