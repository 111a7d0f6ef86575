"""A plan as the Python code that makes it."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType

import torch

import lumen_lab.rewrites
from lumen_lab.errors import RewriteError
from lumen_lab.rewrites.plan import Plan, as_plan
from lumen_lab.rewrites.record import Rewrite, first_line

_ROOM = lumen_lab.rewrites.__name__
_LINE_LENGTH = 120


@dataclass
class Names:
    """What an expression needs: names by the module that they come from, modules, and values that must be loaded."""

    imported: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def plan_code(plan: Plan, *, leave_out: bool = False) -> str:
    """Python source that makes ``plan``: the imports it needs, then ``plan = (…)``, as a formatter would write it.

    Each rewrite stands as its ``expression``, which is evaluated and must give that very record: a changed copy needs a
    ``code`` of its own. Names come from ``lumen_lab.rewrites``, from the module that builds the rewrite, or from one
    that the expression names (``mine.FOLD_X``). What a rewrite was made from, given by keyword and kept in memory alone
    (``statistics=statistics``), cannot be written: a comment says that it must be loaded first, and the record is taken
    at its word. ``RewriteError`` for a rewrite that cannot be written; with ``leave_out`` a comment takes its place.
    """
    found, items = Names(), []
    for rule in as_plan(plan):
        try:
            names = names_in(rule)
            if not names.values:
                check_makes(rule, names)
        except RewriteError as error:
            if not leave_out:
                raise
            items.append(f"    # left out: {error}\n")
            continue
        items.append(f"    {rule.expression},\n")
        found.imported |= names.imported
        found.modules |= names.modules
        found.values |= names.values
    return _head(found) + (f"plan = (\n{''.join(items)})\n" if items else "plan = ()\n")


def family_of(rule: Rewrite) -> str:
    """The file that a rewrite stands in: "deform", "attention", …"""
    return _module_of_built(rule).rpartition(".")[2]


def _module_of_built(rule: Rewrite) -> str:
    built = rule.built
    while isinstance(built, functools.partial):
        built = built.func
    return built.__module__


# The names in an expression


def names_in(rule: Rewrite) -> Names:
    """What must be there for the rewrite's expression; ``RewriteError`` for a name that nothing defines."""
    try:
        tree = ast.parse(rule.expression, mode="eval")
    except SyntaxError:
        raise RewriteError(f"The code of {rule.name} is no Python expression: {rule.expression!r}.") from None
    given = {id(node) for keyword in ast.walk(tree) if isinstance(keyword, ast.keyword) for node in ast.walk(keyword)}
    found = Names()
    found.modules = {m for node, path in _dotted(tree) if id(node) not in given and (m := _module_in(path, rule))}
    roots = {module.partition(".")[0] for module in found.modules}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id in roots or hasattr(builtins, node.id):
            continue
        module = _defining_module(node.id, rule)
        if module:
            found.imported[node.id] = module
        elif id(node) in given:
            found.values.add(node.id)
        else:
            raise RewriteError(
                f"{rule.name} is written {rule.expression}, but no module of {_ROOM} defines {node.id}; put it in a "
                f"module of yours and name that in the rewrite's `code`, as in code='mine.{node.id}'."
            )
    return found


def _dotted(tree: ast.AST) -> Iterator[tuple[ast.Name, str]]:
    """(name node, whole path) of every ``a.b.c`` in an expression."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield node, ".".join([node.id, *parts])


def _module_in(path: str, rule: Rewrite) -> str | None:
    """The longest beginning of ``a.b.c`` that can be imported as a module, unless ``a`` is defined in this room."""
    if _defining_module(path.partition(".")[0], rule):
        return None
    parts = path.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next(filter(_is_module, beginnings), None)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _defining_module(name: str, rule: Rewrite) -> str | None:
    """The module that defines ``name``: the one that builds the rewrite if it does, else another of this room."""
    home = _module_of_built(rule)
    room = [f"{_ROOM}.{info.name}" for info in pkgutil.iter_modules(lumen_lab.rewrites.__path__)]
    if home not in room and home != "__main__" and _is_module(home) and hasattr(importlib.import_module(home), name):
        return home
    return next((module for module in sorted(room, key=lambda m: m != home) if name in _defined_names(module)), None)


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


def _head(names: Names) -> str:
    """The imports, and what must be loaded before the plan; then an empty line."""
    by_module: dict[str, list[str]] = {}
    for name, module in sorted(names.imported.items()):
        by_module.setdefault(module, []).append(name)
    lines = [f"import {module}" for module in sorted(names.modules)]
    lines += [_import_line(module, members) for module, members in sorted(by_module.items())]
    if names.values:
        lines += ["", f"# Load first what the plan was chosen from: {', '.join(sorted(names.values))}."]
    return "\n".join(lines) + ("\n\n" if lines else "")


def _import_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


# Whether an expression makes the record that bears it


def check_makes(rule: Rewrite, names: Names) -> None:
    """``RewriteError`` unless the rewrite's expression, evaluated, is that rewrite."""
    try:
        space = {name: getattr(importlib.import_module(module), name) for name, module in names.imported.items()}
        for module in names.modules:
            importlib.import_module(module)
            root = module.partition(".")[0]
            space[root] = importlib.import_module(root)
        made = eval(compile(rule.expression, "plan", "eval"), space)
    except Exception as error:
        raise RewriteError(
            f"{rule.name} is written {rule.expression}, which cannot be evaluated: {first_line(error)}."
        ) from error
    if not isinstance(made, Rewrite):
        raise RewriteError(f"{rule.name} is written {rule.expression}, which is a {type(made).__name__}, no rewrite.")
    other = [name for name, one, two in _fields(rule, made) if name != "code" and not same(one, two)]
    if other:
        raise RewriteError(
            f"{rule.name} is written {rule.expression}, which makes another rewrite (they differ in "
            f"{', '.join(other)}); give the changed copy a `code` that makes it, as in code='mine.MY_REWRITE'."
        )


def _fields(one: object, other: object) -> Iterator[tuple[str, object, object]]:
    """(name, its value in one, in the other) of every field of two records of one class."""
    return ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))


def same(one: object, other: object) -> bool:
    """Equal in every part; functions made anew are, with the same code and the same values bound to it."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(same(mine, others) for _, mine, others in _fields(one, other))
    if isinstance(one, functools.partial | FunctionType):
        return all(map(same, _bound(one), _bound(other)))
    return bool(one == other)


def _bound(function: Callable) -> tuple:
    """What makes a partial or a function what it is."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    closure = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__, closure, function.__defaults__, function.__kwdefaults__
