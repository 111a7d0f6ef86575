"""Static pictures: each function takes arrays or rows and returns a matplotlib ``Figure``; none opens a window.

The figures are made without pyplot, so they need no display, none is left open, and a notebook shows what a cell
returns, once.
"""

from lumen_lab.figures.contact import contact_sheet, learning_curve, reliability_diagram
from lumen_lab.figures.costs import cost_figure
from lumen_lab.figures.coverage import coverage_figure
from lumen_lab.figures.graph import macs_by_site, partition_strip
from lumen_lab.figures.heads import arrow_figure, attention_figure, head_figure
from lumen_lab.figures.masks import difference_map, mask_grid, mask_overlay
from lumen_lab.figures.offsets import offset_figure
from lumen_lab.figures.pareto import pareto_figure
from lumen_lab.figures.sensitivity import sensitivity_figure
from lumen_lab.figures.steps import steps_figure
from lumen_lab.figures.training import gates_figure, runs_figure

__all__ = [
    "arrow_figure",
    "attention_figure",
    "contact_sheet",
    "cost_figure",
    "coverage_figure",
    "difference_map",
    "gates_figure",
    "head_figure",
    "learning_curve",
    "macs_by_site",
    "mask_grid",
    "mask_overlay",
    "offset_figure",
    "pareto_figure",
    "partition_strip",
    "reliability_diagram",
    "runs_figure",
    "sensitivity_figure",
    "steps_figure",
]
