"""The walk: execute the notebooks in order and leave each as an HTML report.

``python -m lumen_lab.walk`` runs the notebooks of ``WALK``; paths given as arguments replace them. Every notebook runs
in its own kernel, in its own folder, so that it behaves as it does when a reader opens it. One line a notebook is
printed with its seconds. The first cell that fails ends its notebook, which is kept as far as it came; the others are
executed all the same, what failed is listed at the end, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path

from lumen_lab.errors import LumenError, MissingDependencyError
from lumen_lab.specs import write_whole

ROOT = Path(__file__).resolve().parents[1]
WALK = tuple(sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")))


class WalkError(LumenError):
    """A notebook that is not there, or of which a cell failed."""


class FailedCellsError(WalkError):
    """What failed in a walk, notebook by notebook."""


class Progress:
    """One line on ``stream``: overwritten cell by cell on a terminal, written once elsewhere."""

    def __init__(self, name: str, cells: int, stream=None):
        self.stream = stream or sys.stdout
        self.name, self.cells, self.started = name, cells, time.monotonic()
        self._write(f"  {name:<30}", end="")

    def cell(self, number: int) -> None:
        """Say that cell ``number`` (from 1) has started; only a terminal shows it."""
        if self.stream.isatty():
            self._write(f"\r  {self.name:<30} cell {number} of {self.cells}, {self.seconds():4.0f} s ", end="")

    def done(self, outcome: str) -> None:
        """End the line with the seconds and ``outcome``."""
        start = "\r\x1b[K" + f"  {self.name:<30}" if self.stream.isatty() else ""
        self._write(f"{start} {self.seconds():6.1f} s  {outcome}", end="\n")

    def seconds(self) -> float:
        """Seconds since the notebook was started."""
        return time.monotonic() - self.started

    def _write(self, text: str, *, end: str) -> None:
        print(text, end=end, file=self.stream, flush=True)


def walk(notebooks: Sequence[str | Path] = WALK, *, out_dir: str | Path = ROOT / "build", stream=None) -> list[Path]:
    """Execute ``notebooks`` in order; returns the HTML reports, in ``out_dir/reports``.

    The executed notebooks lie in ``out_dir/notebooks``. ``WalkError`` if a notebook is missing, before any is run;
    ``FailedCellsError`` once all have run, with the cells that failed: their notebooks are kept and reported as far as
    they came. Relative paths start at the repository.
    """
    paths = [ROOT / notebook for notebook in notebooks]
    for path in paths:
        if not path.is_file():
            raise WalkError(f"{path} was asked for and is not there; the walk is {', '.join(WALK)}.")
    done = [_report(path, Path(out_dir), stream) for path in paths]
    if problems := [problem for _, problem in done if problem]:
        failed = f"{len(problems)} of {len(paths)} notebooks failed:" if len(paths) > 1 else ""
        raise FailedCellsError("\n\n".join(filter(None, [failed, *problems])))
    return [report for report, _ in done]


def _report(path: Path, out_dir: Path, stream) -> tuple[Path, str]:
    """The report of one executed notebook, and what failed in it ("": nothing)."""
    nbformat = _needed("nbformat")
    notebook = nbformat.read(path, as_version=4)
    progress = Progress(path.stem, sum(cell.cell_type == "code" for cell in notebook.cells), stream)
    problem = _execute(notebook, path.parent, progress)
    write_whole(out_dir / "notebooks" / path.name, nbformat.writes(notebook))
    report = write_whole(out_dir / "reports" / f"{path.stem}.html", _html(notebook, path.stem))
    if problem:
        progress.done("failed")
        return report, f"{path.name}, {problem}\nThe notebook as far as it came: {report}"
    progress.done(str(report.relative_to(Path.cwd()) if report.is_relative_to(Path.cwd()) else report))
    return report, ""


def _execute(notebook, folder: Path, progress: Progress) -> str:
    """Run the cells in place; returns what failed and where, or ""."""
    nbclient = _needed("nbclient")
    code_cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    running = [0]

    def started(cell, cell_index: int) -> None:
        running[0] = code_cells.index(cell_index) + 1 if cell_index in code_cells else running[0]
        progress.cell(running[0])

    client = nbclient.NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        extra_arguments=["--log-level=CRITICAL"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=started,
    )
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        said = ": ".join(filter(None, (error.ename, error.evalue)))
        return f"code cell {running[0]}: {said}{_failing_lines(error.traceback)}"
    except nbclient.exceptions.DeadKernelError:
        return f"code cell {running[0]}: the kernel died (out of memory?)"
    except AssertionError:
        # On SIGINT nbclient stops the kernel in a handler of its own and then trips over the missing kernel.
        raise KeyboardInterrupt from None
    return ""


def _failing_lines(traceback: str) -> str:
    """The lines of cells that the traceback goes through, outermost first, by their numbers; "" if it shows none.

    IPython marks them with an arrow, in parts headed by the cell, or by the path of a file, which are left out.
    """
    parts = CELL_PART.findall(ANSI.sub("", traceback))
    return "".join(f"\n  {line.lstrip('-> ')}" for part in parts for line in MARKED_LINE.findall(part))


ANSI = re.compile(r"\x1b\[[0-9;]*m")
CELL_PART = re.compile(r"^Cell In\s?\[\d+\].*?(?=^$|\Z)", re.MULTILINE | re.DOTALL)
MARKED_LINE = re.compile(r"^-+>\s*\d+ .*$", re.MULTILINE)


def _html(notebook, title: str) -> str:
    """The report: pictures inside it and nothing fetched from a network, so widgets show their static form."""
    nbconvert = _needed("nbconvert")
    static = deepcopy(notebook)
    static.metadata.pop("widgets", None)
    exporter = nbconvert.HTMLExporter(embed_images=True, require_js_url="", jquery_url="", mathjax_url="")
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    page, _ = exporter.from_notebook_node(static, resources={"metadata": {"name": title}})
    return page.replace('<script src=""></script>', "").replace('<script src=""> </script>', "")


def _needed(module: str):
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"The walk executes notebooks, and {error.name} is not installed: pip install -e '.[notebooks]'."
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lumen_lab.walk", description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", default=WALK, help="instead of the whole walk")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "build", help="where reports/ and notebooks/ go")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        reports = walk(options.notebooks, out_dir=options.out_dir)
    except FailedCellsError as error:
        print(error, file=sys.stderr)
        return 2
    except LumenError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    print(f"The reports are in {reports[0].parent} ({time.monotonic() - started:.0f} s in all).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
