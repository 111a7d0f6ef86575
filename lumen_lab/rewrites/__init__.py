"""Rewrites: the same network written with operators that the NPU takes."""

from lumen_lab.rewrites.check import check_plan
from lumen_lab.rewrites.plan import EXACT_PLAN, Plan, RewriteLog, Rewritten, rewrite
from lumen_lab.rewrites.record import LogEntry, Rewrite, Site

__all__ = ["EXACT_PLAN", "LogEntry", "Plan", "Rewrite", "RewriteLog", "Rewritten", "Site", "check_plan", "rewrite"]
