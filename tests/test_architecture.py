"""The shape of the library: who may import whom, how long things may be, what `import lumen_lab` costs."""

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import lumen_lab

PACKAGE = Path(lumen_lab.__file__).parent

# From left to right; rooms of one group do not import each other. Everyone may import the records and the errors.
FOR_EVERYONE = {"errors", "specs"}
GROUPS = (
    ("images", "metrics", "chips"),
    ("datasets",),
    ("network",),
    ("taps",),
    ("auditing", "equivalence"),
    ("rewrites",),
    ("quantization",),
    ("distillation",),
    ("deploy",),
    ("prediction",),
    ("evaluation",),
    ("figures", "widgets"),
    ("bench",),
    ("walk",),
)
PLACE = {room: place for place, group in enumerate(GROUPS) for room in group}
SHOWROOMS = ("figures", "widgets")

# Imported where they are used, so that a room can be opened without them.
IMPORTED_LATE = {"IPython", "jupyter", "jupyterlab", "nbclient", "nbconvert", "netron", "qai_hub", "onnxruntime"} | {
    "onnxruntime_qnn",
    "huggingface_hub",
}
NOT_WITH_THE_PACKAGE = IMPORTED_LATE | {"ipykernel", "ipywidgets", "anywidget", "onnx", "torch", "timm", "matplotlib"}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST, *, package: str) -> set[str]:
    """Dotted names of the modules that ``tree`` imports at any depth, doors resolved to the room behind them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = ".".join(filter(None, (above, node.module))) if node.level else node.module
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {lumen_lab.DOORS.get(name.removeprefix("lumen_lab."), name) for name in names}


def rooms_imported(path: Path) -> set[str]:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    modules = imported_modules(parsed(path), package=".".join(parts[:-1]))
    inside = {module.split(".")[1] for module in modules if module.startswith("lumen_lab.")}
    return inside - {room_of(path), "__version__", "DOORS"}


def forbidden(room: str, imports: set[str]) -> set[str]:
    """Those of ``imports`` that ``room`` may not make."""
    if room in FOR_EVERYONE:
        return imports - FOR_EVERYONE
    return {other for other in imports - FOR_EVERYONE if PLACE[other] >= PLACE[room]}


def top_level_statements(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import: not those inside functions, nor those for a type checker."""
    found, waiting = [], list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found.append(node)
        waiting.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
    return found


def imported_on_opening(tree: ast.Module) -> set[str]:
    """First names of the modules that importing ``tree`` imports."""
    names = set()
    for node in top_level_statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names


def function_lengths(tree: ast.AST) -> dict[str, int]:
    """Lines of each function, its docstring left out."""
    lengths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            docstring = first.end_lineno - first.lineno + 1 if documented else 0
            lengths[f"{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1 - docstring
    return lengths


def in_a_fresh_process(program: str) -> dict:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_room_has_a_place_in_the_order():
    rooms = {room_of(path) for path in sources()} - {"__init__"}
    assert rooms - FOR_EVERYONE - set(PLACE) == set()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_to_the_left_only(path):
    imports = rooms_imported(path)
    assert imports - FOR_EVERYONE - set(PLACE) == set(), "imports a room that does not exist"
    room = room_of(path)
    assert (imports if room == "__init__" and path.parent == PACKAGE else forbidden(room, imports)) == set()


@pytest.mark.parametrize(
    ("room", "statement", "refused"),
    [
        ("network", "from lumen_lab.deploy import htp", {"deploy"}),
        ("network", "from lumen_lab import audit", {"auditing"}),
        ("auditing", "def f():\n    import lumen_lab.equivalence", {"equivalence"}),
        ("deploy", "from ..figures import graph", {"figures"}),
        ("deploy", "from . import htp\nfrom lumen_lab import chips, errors", set()),
        ("specs", "from lumen_lab.images import load_image", {"images"}),
    ],
)
def test_a_wrong_import_is_seen(room, statement, refused):
    modules = imported_modules(ast.parse(statement), package=f"lumen_lab.{room}")
    rooms = {module.split(".")[1] for module in modules if module.startswith("lumen_lab.")} - {room}
    assert forbidden(room, rooms) == refused


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_are_imported_where_they_are_used(path):
    assert imported_on_opening(parsed(path)) & IMPORTED_LATE == set()


@pytest.mark.parametrize("room", SHOWROOMS)
def test_figures_and_widgets_know_no_torch(room):
    files = [path for path in sources() if room_of(path) == room]
    assert files, f"lumen_lab/{room} is empty"
    for path in files:
        modules = {name.split(".")[0] for name in imported_modules(parsed(path), package=f"lumen_lab.{room}")}
        assert not modules & {"torch", "torchvision", "timm"}, path.name


def test_functions_are_short():
    lengths = {f"{path.name}:{name}": n for path in sources() for name, n in function_lengths(parsed(path)).items()}
    assert statistics.median(lengths.values()) <= 12
    assert {name: n for name, n in lengths.items() if n > 60} == {}


def test_a_function_is_measured_without_its_docstring():
    source = 'def f(x):\n    """One.\n\n    Two.\n    """\n    y = x\n\n    return y\n'
    assert function_lengths(ast.parse(source)) == {"f:1": 4}


def test_files_are_short():
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources() + tests}
    assert {path: n for path, n in lines.items() if n > 450} == {}


def test_no_file_has_a_name_that_says_nothing():
    parts = {part for path in sources() for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert parts & EMPTY_NAMES == set()


def test_importing_the_package_is_quick_and_light():
    program = (
        "import json, sys, time; before = set(sys.modules); start = time.perf_counter(); import lumen_lab; "
        "seconds = time.perf_counter() - start; "
        "print(json.dumps({'seconds': seconds, 'modules': sorted(set(sys.modules) - before)}))"
    )
    runs = [in_a_fresh_process(program) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 2
    assert {name.split(".")[0] for name in runs[0]["modules"]} & NOT_WITH_THE_PACKAGE == set()


def test_no_door_bears_the_name_of_a_room():
    rooms = {room_of(path) for path in sources()} | set(PLACE) | FOR_EVERYONE
    assert set(lumen_lab.DOORS) & rooms == set()


@pytest.mark.parametrize("rooms_first", [True, False])
def test_doors_open_in_either_order(rooms_first):
    """A door is the same object whether its room was imported before or after it, and never the room itself."""
    import_rooms = "rooms = {name: importlib.import_module(module) for name, module in DOORS.items()}"
    open_doors = "doors = {name: getattr(lumen_lab, name) for name in DOORS}"
    first, second = (import_rooms, open_doors) if rooms_first else (open_doors, import_rooms)
    program = f"""
import importlib, json, types, lumen_lab
from lumen_lab import DOORS
{first}
{second}
same = {{name: door is getattr(rooms[name], name) is getattr(lumen_lab, name) for name, door in doors.items()}}
print(json.dumps({{name: same[name] and not isinstance(door, types.ModuleType) for name, door in doors.items()}}))
"""
    opened = in_a_fresh_process(program)
    assert opened == dict.fromkeys(lumen_lab.DOORS, True)


def test_an_unknown_door_is_refused_by_name():
    with pytest.raises(AttributeError, match="no 'adit'; its doors are .*audit"):
        lumen_lab.adit  # noqa: B018
    assert set(lumen_lab.DOORS) <= set(dir(lumen_lab))
