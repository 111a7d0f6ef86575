"""Every rewrite by name, and a plan as the Python code that makes it."""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import importlib.util
import pkgutil
from collections.abc import Sequence

import lumen_lab.rewrites
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.attention import (
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_MERGE_TO_4D,
    CONVERT_WINDOW_PARTITION_TO_4D,
)
from lumen_lab.rewrites.channels import PAD_CHANNELS, SPLIT_CONV_OVER_INPUTS, SPLIT_CONV_OVER_OUTPUTS
from lumen_lab.rewrites.convolution import FOLD_BATCH_NORM
from lumen_lab.rewrites.deform import DECOMPOSE_DEFORM_CONV
from lumen_lab.rewrites.deform_shifts import APPROXIMATE_DEFORM_CONV_BY_SHIFTS
from lumen_lab.rewrites.deform_substitutes import (
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
)
from lumen_lab.rewrites.heads import REDUCE_ATTENTION_RANK, SPLIT_ATTENTION_BY_HEADS
from lumen_lab.rewrites.input_paths import SUBSTITUTE_INPUT_PATHS
from lumen_lab.rewrites.linear import CONVERT_LINEAR_TO_CONV
from lumen_lab.rewrites.plan import Plan
from lumen_lab.rewrites.record import Rewrite
from lumen_lab.rewrites.resolution import CONVERT_IMAGE_TILES_TO_4D
from lumen_lab.rewrites.tail import FOLD_FULL_RESOLUTION_TAIL, SUBSTITUTE_SLIM_TAIL
from lumen_lab.rewrites.windows import SUBSTITUTE_GLOBAL_WINDOW, SUBSTITUTE_WINDOW

CATALOGUE: tuple[Rewrite, ...] = (
    SUBSTITUTE_INPUT_PATHS,
    SUBSTITUTE_GLOBAL_WINDOW,
    SUBSTITUTE_WINDOW,
    CONVERT_CYCLIC_SHIFT_TO_PADDING,
    CONVERT_WINDOW_PARTITION_TO_4D,
    CONVERT_WINDOW_MERGE_TO_4D,
    SPLIT_ATTENTION_BY_HEADS,
    REDUCE_ATTENTION_RANK,
    CONVERT_LINEAR_TO_CONV,
    DECOMPOSE_DEFORM_CONV,
    APPROXIMATE_DEFORM_CONV_BY_SHIFTS,
    SUBSTITUTE_MODULATED_CONV,
    SUBSTITUTE_PLAIN_CONV,
    SUBSTITUTE_SEPARABLE_CONV,
    FOLD_FULL_RESOLUTION_TAIL,
    SUBSTITUTE_SLIM_TAIL,
    CONVERT_IMAGE_TILES_TO_4D,
    PAD_CHANNELS,
    FOLD_BATCH_NORM,
    SPLIT_CONV_OVER_INPUTS,
    SPLIT_CONV_OVER_OUTPUTS,
)
"""The rewrites to choose from, in an order in which any of them may follow one another."""

_ROOM = lumen_lab.rewrites.__name__
_LINE_LENGTH = 120


def find_rewrite(name: str, catalogue: Sequence[Rewrite] = CATALOGUE) -> Rewrite:
    """The rewrite of that name; ``RewriteError`` with the nearest names if there is none."""
    by_name = {rule.name: rule for rule in catalogue}
    if name not in by_name:
        near = difflib.get_close_matches(str(name), by_name, 3) or list(by_name)
        raise RewriteError(f"There is no rewrite '{name}' in the catalogue; the nearest are {', '.join(near)}.")
    return by_name[name]


def plan_code(plan: Plan) -> str:
    """Python source that makes ``plan``: the imports it needs, then ``plan = (…)``, as a formatter would write it.

    Each rewrite stands as its ``expression``. ``RewriteError`` for a rewrite whose expression is no Python, or names
    what no module of ``lumen_lab.rewrites`` defines (one that was made in a notebook).
    """
    imports: dict[str, set[str]] = {}
    for rule in plan:
        for name in _free_names(rule):
            imports.setdefault(_defining_module(name, rule), set()).add(name)
    head = [_import_line(module, sorted(names)) for module, names in sorted(imports.items())]
    items = "".join(f"    {rule.expression},\n" for rule in plan)
    body = f"plan = (\n{items})\n" if plan else "plan = ()\n"
    return "\n".join(head) + ("\n\n" if head else "") + body


def family_of(rule: Rewrite) -> str:
    """The file that a rewrite stands in: "deform", "attention", …"""
    return _module_of_built(rule).rpartition(".")[2]


def _module_of_built(rule: Rewrite) -> str:
    built = rule.built
    while isinstance(built, functools.partial):
        built = built.func
    return built.__module__


def _free_names(rule: Rewrite) -> list[str]:
    """Names in a rewrite's expression that must be imported."""
    try:
        tree = ast.parse(rule.expression, mode="eval")
    except SyntaxError:
        raise RewriteError(f"The code of {rule.name} is no Python expression: {rule.expression!r}.") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return sorted(name for name in names if not hasattr(builtins, name))


def _defining_module(name: str, rule: Rewrite) -> str:
    """The module that defines ``name``: the one that builds the rewrite if it does, else another of this room."""
    home = _module_of_built(rule)
    for module in sorted(_modules(), key=lambda module: module != home):
        if name in _defined_names(module):
            return module
    raise RewriteError(
        f"{rule.name} is written {rule.expression}, but no module of {_ROOM} defines {name}; put it in one, or give "
        "the rewrite another `code`."
    )


def _modules() -> list[str]:
    return [f"{_ROOM}.{info.name}" for info in pkgutil.iter_modules(lumen_lab.rewrites.__path__)]


@functools.cache
def _defined_names(module: str) -> frozenset[str]:
    """Constants and functions that a module makes itself, as opposed to those it imports."""
    names: set[str] = set()
    for node in ast.parse(importlib.util.find_spec(module).loader.get_source(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _import_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
