"""Score the micro teacher, or any predictor, on the bench lists: ``python -m lumen_lab.bench [SOURCES]``.

Without SOURCES (the folder of ``python -m lumen_lab.datasets.sources``) the lists of drawn scenes alone are scored.
The teacher's table is compared with the recorded one in data/bench: exit code 1 if a mean differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lumen_lab.bench.lists import BENCH_DIR, PHOTOGRAPHS, read_lists, scenes_of
from lumen_lab.bench.report import write_report
from lumen_lab.bench.table import BenchTable, differences, run_bench
from lumen_lab.datasets.scenes import ComposedScenes
from lumen_lab.datasets.sources import open_sources
from lumen_lab.distillation.gates import gate_rows
from lumen_lab.errors import DatasetError, LumenError
from lumen_lab.network import MICRO_WEIGHTS, load_network
from lumen_lab.specs import file_sha256

SHOWN = ("s_measure", "weighted_f", "f_max", "e_mean", "mae", "iou", "boundary_iou", "thin_recall", "soft_edge_gap_px")
GATE_SCENES = 24
RECORDED = BENCH_DIR / "teacher.json"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lumen_lab.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="?", help="folder of cut-outs and backgrounds")
    parser.add_argument("--weights", help="score these weights of the micro network, or an .onnx file, instead")
    parser.add_argument("--lists", nargs="+", help="names of lists; by default every one that SOURCES allows")
    parser.add_argument("--out", default="build/bench", help="where scores and the report are left")
    parser.add_argument("--workers", type=int, help="processes; by default the cores")
    parser.add_argument("--record", action="store_true", help="write the table to data/bench instead of comparing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse_arguments(arguments)
    try:
        return bench(given)
    except LumenError as error:
        print(error, file=sys.stderr)
        return 2


def bench(given: argparse.Namespace) -> int:
    """Score, report, and compare or record; the exit code."""
    predictor, described = chosen_predictor(given.weights)
    lists = chosen_lists(given.lists, photographs=given.sources is not None)
    bank = open_sources(given.sources) if given.sources else None
    scores = run_bench(predictor, lists, bank=bank, out_dir=given.out, workers=given.workers)
    scenes = {entry.name: scenes_of(entry, bank) for entry in lists}
    gates = gates_of(predictor, next(iter(scenes.values())))
    table = BenchTable.from_scores(described, scores, gates=gates)
    print_table(table)
    print(write_report(Path(given.out) / "bench.html", predictor, table, scores, scenes))
    if given.record:
        print(table.save(RECORDED))
        return 0
    return compared(table) if given.weights is None else 0


def chosen_predictor(weights: str | None) -> tuple[nn.Module | Path, str]:
    """The predictor and what it is, in words."""
    path = Path(weights) if weights else MICRO_WEIGHTS
    if not path.is_file():
        raise DatasetError(f"{path} was asked for and is not there; give weights (.safetensors) or an .onnx file.")
    predictor = path if path.suffix == ".onnx" else load_network("micro", weights=path)
    return predictor, f"{path.name} sha256 {file_sha256(path)}"


def chosen_lists(names: Sequence[str] | None, *, photographs: bool) -> list:
    """The lists named, or all that can be composed; ``DatasetError`` for an unknown name."""
    lists = read_lists()
    unknown = set(names or ()) - set(lists)
    if unknown:
        raise DatasetError(f"There is no list {', '.join(sorted(unknown))}; the lists are {', '.join(lists)}.")
    chosen = [entry for entry in lists.values() if entry.name in (names or lists)]
    return [entry for entry in chosen if names or photographs or entry.sources != PHOTOGRAPHS]


def gates_of(predictor: nn.Module | Path, scenes: ComposedScenes) -> list[dict[str, object]]:
    """The gates of a network on its first scenes; none for a file."""
    if not isinstance(predictor, nn.Module):
        return []
    return gate_rows(predictor, [scenes[index]["image"] for index in range(min(GATE_SCENES, len(scenes)))])


def print_table(table: BenchTable) -> None:
    """The means over all images, in columns, and the gates."""
    print(f"{'list':<10} {'reading':<10} {'images':>6} " + " ".join(f"{name:>12.12}" for name in SHOWN))
    for row in table.rows():
        cells = " ".join(f"{'' if row[name] is None else format(row[name], '.4f'):>12}" for name in SHOWN)
        print(f"{row['list']:<10} {row['reading']:<10} {row['images']:>6} {cells}")
    for row in table.gates:
        print(f"gate {row['gate']:<8} mean {row['mean']:.3f}, {'alive' if row['alive'] else 'dead'}")


def compared(table: BenchTable) -> int:
    """0 if every mean is the recorded one; else 1, and the means that are not."""
    recorded = BenchTable.load(RECORDED)
    apart = differences(recorded, table)
    for row in apart[:20]:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"{len(apart)} means differ from {RECORDED.name}." if apart else f"Every mean is that of {RECORDED.name}.")
    return 1 if apart else 0


if __name__ == "__main__":
    raise SystemExit(main())
