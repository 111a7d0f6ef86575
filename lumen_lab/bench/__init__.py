"""The bench: fixed lists of held-out scenes, and the teacher's scores on them that anyone can compute again."""

from lumen_lab.bench.lists import BENCH_DIR, BenchList, read_lists, scenes_of
from lumen_lab.bench.table import BenchTable, bench_table, differences, not_compared, run_bench

__all__ = [
    "BENCH_DIR",
    "BenchList",
    "BenchTable",
    "bench_table",
    "differences",
    "not_compared",
    "read_lists",
    "run_bench",
    "scenes_of",
]
