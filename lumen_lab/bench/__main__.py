"""Score the micro teacher, or any predictor, on the bench lists: ``python -m lumen_lab.bench [SOURCES]``.

SOURCES is the folder of the Debian photographs; --fetch brings them there. Without it, the list of drawn scenes alone
is scored. The teacher's table is compared with the recorded one in data/bench: exit code 1 if a mean differs, 2 if
something that was asked for cannot be had.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lumen_lab.bench.lists import BENCH_DIR, PHOTOGRAPHS, BenchList, read_lists, scenes_of
from lumen_lab.bench.report import aim_rows, write_report
from lumen_lab.bench.table import BenchTable, bench_table, differences, not_compared, run_bench
from lumen_lab.datasets.debian import fetch_debian_sources
from lumen_lab.datasets.sources import SourceBank, open_sources
from lumen_lab.errors import ArtifactError, DatasetError, LumenError
from lumen_lab.network import MICRO_WEIGHTS, load_network
from lumen_lab.specs import file_sha256, writable_folder

SHOWN = ("s_measure", "weighted_f", "f_max", "e_mean", "mae", "iou", "boundary_iou", "thin_recall", "soft_edge_gap_px")
RECORDED = BENCH_DIR / "teacher.json"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lumen_lab.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="?", help="folder of the Debian photographs")
    parser.add_argument("--fetch", action="store_true", help="bring the photographs to SOURCES if they are not there")
    parser.add_argument("--weights", help="score these weights of the micro network, or an .onnx file, instead")
    parser.add_argument("--lists", nargs="+", help="names of lists; by default every one that can be composed")
    parser.add_argument("--out", default="build/bench", help="where scores and the report are left")
    parser.add_argument("--workers", type=int, help="processes; by default as evaluate chooses")
    parser.add_argument("--record", action="store_true", help="write the table to data/bench instead of comparing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        return bench(parse_arguments(arguments))
    except LumenError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename2 or error.filename or "a file"
        print(f"The bench cannot read or write {where} ({error.strerror or error}).", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        for note in getattr(stopped, "__notes__", ()):
            print(note, file=sys.stderr)
        return 130


def bench(given: argparse.Namespace) -> int:
    """Score, report, and compare or record; the exit code."""
    predictor, described = chosen_predictor(given.weights)
    recorded = None if given.record or given.weights else recorded_table()  # before hours of work
    bank = photographs(given.sources, fetch=given.fetch)
    lists = chosen_lists(given.lists, photographs=bank is not None)
    if given.record and (given.weights or set(lists) != set(read_lists())):
        raise DatasetError("A record is of the shipped weights on every list; give SOURCES, and neither --weights.")
    scenes = {name: scenes_of(entry, bank) for name, entry in lists.items()}
    page = page_in(given.out)
    scores = run_bench(predictor, scenes, out_dir=given.out, workers=given.workers)
    table = bench_table(described, predictor, scores, scenes)
    print_table(table, lists)
    print(write_report(page, predictor, table, lists, scores, scenes))
    if given.record:
        print(table.save(RECORDED))
    return compared(recorded, table) if recorded else 0


def recorded_table() -> BenchTable:
    """What the teacher's table is compared with; ``ArtifactError`` if there is none."""
    if not RECORDED.is_file():
        raise ArtifactError(
            f"There is no recorded table {RECORDED} to compare with; --record makes it, and --weights scores weights "
            "without comparing."
        )
    return BenchTable.load(RECORDED)


def page_in(folder: str | Path) -> Path:
    """Where the report will lie; ``ArtifactError``, before the work, if it cannot be written there."""
    page = writable_folder(folder) / "bench.html"
    if page.is_dir():
        raise ArtifactError(f"The report would be {page}, which is a folder; move it, or give another --out.")
    return page


def chosen_predictor(weights: str | None) -> tuple[nn.Module | Path, str]:
    """The predictor and what it is, in words."""
    path = Path(weights) if weights else MICRO_WEIGHTS
    if not path.is_file():
        raise DatasetError(f"{path} was asked for and is not there; give weights (.safetensors) or an .onnx file.")
    predictor = path if path.suffix == ".onnx" else load_network("micro", weights=path)
    return predictor, f"{path.name} sha256 {file_sha256(path)}"


def photographs(sources: str | None, *, fetch: bool) -> SourceBank | None:
    """The photographs at ``sources``; None, and why, where they were to be fetched and could not be."""
    if sources is None:
        return None
    if fetch:
        try:
            fetch_debian_sources(sources)
        except DatasetError as error:
            print(f"{error} Without photographs the list of drawn scenes alone is scored.", file=sys.stderr)
            return None
    return open_sources(sources)


def chosen_lists(names: Sequence[str] | None, *, photographs: bool) -> dict[str, BenchList]:
    """The lists named, or all that can be composed; ``DatasetError`` for an unknown name."""
    lists = read_lists()
    unknown = set(names or ()) - set(lists)
    if unknown:
        raise DatasetError(f"There is no list {', '.join(sorted(unknown))}; the lists are {', '.join(lists)}.")
    if names:
        return {name: entry for name, entry in lists.items() if name in names}
    return {name: entry for name, entry in lists.items() if photographs or entry.sources != PHOTOGRAPHS}


def print_table(table: BenchTable, lists: dict[str, BenchList]) -> None:
    """The means over all images, in columns, the gates, and what was aimed at."""
    print(f"{'list':<10} {'reading':<10} {'images':>6} " + " ".join(f"{name:>12.12}" for name in SHOWN))
    for row in table.rows():
        cells = " ".join(f"{'' if row[name] is None else format(row[name], '.4f'):>12}" for name in SHOWN)
        print(f"{row['list']:<10} {row['reading']:<10} {row['images']:>6} {cells}")
    for row in table.gate_rows():
        print(f"{row['list']:<10} gate {row['gate']:<8} mean {row['mean']:.3f}, {'alive' if row['alive'] else 'dead'}")
    for row in aim_rows(table, lists):
        verdict = "reached" if row["reached"] else "not reached"
        print(f"{row['list']:<10} {row['metric']} {row['found']:.4f}, aim {row['aim']}: {verdict}")


def compared(recorded: BenchTable, table: BenchTable) -> int:
    """0 if every mean is the recorded one; else 1, and the means that are not."""
    for note in not_compared(recorded, table):
        print(f"Not compared, or otherwise: {note}.")
    apart = differences(recorded, table)
    for row in apart[:20]:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"{len(apart)} means differ from {RECORDED.name}." if apart else f"Every mean is that of {RECORDED.name}.")
    return 1 if apart else 0


if __name__ == "__main__":
    raise SystemExit(main())
