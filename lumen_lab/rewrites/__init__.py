"""Rewrites: the same network written with operators that the NPU takes."""

from lumen_lab.rewrites.check import check_plan
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.plan import Plan, RewriteLog, Rewritten, rewrite
from lumen_lab.rewrites.plans import EXACT_PLAN, LEAN_PLAN, LUMEN_PLAN
from lumen_lab.rewrites.record import Constraint, LogEntry, Rewrite, Site

__all__ = [
    "EXACT_PLAN",
    "FOLD_BATCH_NORM",
    "LEAN_PLAN",
    "LUMEN_PLAN",
    "Constraint",
    "LogEntry",
    "Plan",
    "Rewrite",
    "RewriteLog",
    "Rewritten",
    "Site",
    "check_plan",
    "rewrite",
]
