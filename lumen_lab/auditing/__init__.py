"""Reads any network operation by operation: cost, predicted place on the NPU, and what the compiler really did."""

from lumen_lab.auditing.comparison import ComparedOp, Comparison, actual_partition_rows, compare_with_actual
from lumen_lab.auditing.cost_notes import COST_NOTES, CostNote
from lumen_lab.auditing.network_audit import audit
from lumen_lab.auditing.onnx_join import ExportedOp, onnx_nodes_by_operation
from lumen_lab.auditing.operations import OpRow
from lumen_lab.auditing.partitions import Cut
from lumen_lab.auditing.report import AuditReport
from lumen_lab.auditing.rules import RULES, Rule

__all__ = [
    "COST_NOTES",
    "RULES",
    "AuditReport",
    "ComparedOp",
    "Comparison",
    "CostNote",
    "Cut",
    "ExportedOp",
    "OpRow",
    "Rule",
    "actual_partition_rows",
    "audit",
    "compare_with_actual",
    "onnx_nodes_by_operation",
]
