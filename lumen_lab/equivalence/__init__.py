"""Is it the same network? Verdicts under a claim, and reports that find the first layer that differs."""

from lumen_lab.equivalence.layer_report import LayerReport, LayerRow, UnmatchedLayer
from lumen_lab.equivalence.layers import LayerTensor, LayerTrace, trace_torch
from lumen_lab.equivalence.matching import compare_layers
from lumen_lab.equivalence.rewritten import compare_rewritten
from lumen_lab.equivalence.tolerance import DEFAULT_TOLERANCES, Tolerance
from lumen_lab.equivalence.verdict import (
    Sample,
    Verdict,
    VerdictTable,
    check_equivalence,
    claim_text,
    difference,
    judge,
    learned_verdict,
    output_pairs,
    random_samples,
    sqnr_db,
)

__all__ = [
    "DEFAULT_TOLERANCES",
    "LayerReport",
    "LayerRow",
    "LayerTensor",
    "LayerTrace",
    "Sample",
    "Tolerance",
    "UnmatchedLayer",
    "Verdict",
    "VerdictTable",
    "check_equivalence",
    "claim_text",
    "compare_layers",
    "compare_rewritten",
    "difference",
    "judge",
    "learned_verdict",
    "output_pairs",
    "random_samples",
    "sqnr_db",
    "trace_torch",
]
