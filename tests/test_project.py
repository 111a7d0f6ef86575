"""The project around the library: its packages, its commands, its notebooks."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lumen_lab.walk import WALK

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]

# Packages that are run or plugged in rather than imported by code of ours, and what does that.
RUN_BY_NAME = {
    "onnxscript": "torch.onnx.export",
    "jupyterlab": "make lab",
    "ipykernel": "the notebooks' kernel",
    "ipywidgets": "the layout under anywidget",
    "pytest-xdist": "make test",
    "nbmake": "make test",
    "ruff": "make lint",
    "pre-commit": ".pre-commit-config.yaml",
    "nbstripout": ".pre-commit-config.yaml",
}


def reasons(text: str, opening: str) -> dict[str, str]:
    """Requirement → comment behind it, for the lines of a TOML array or YAML list that ``opening`` matches."""
    found = re.findall(opening + r"(?P<requirement>[^\"#]+?)\"?,?\s*(?:#(?P<reason>.*))?$", text, flags=re.MULTILINE)
    return {requirement.strip(): reason.strip() for requirement, reason in found}


def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def pip_lines() -> list[str]:
    (lines,) = [entry["pip"] for entry in environment()["dependencies"] if isinstance(entry, dict)]
    return [line for line in lines if not line.startswith("-")]


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    """The cell's Python, without the lines that only IPython reads."""
    lines = "".join(cell["source"]).splitlines()
    return "\n".join("pass" if line.startswith(("%", "!")) else line for line in lines)


def imports_of(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "importorskip"):
            names |= {arg.value.split(".")[0] for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


def our_imports() -> set[str]:
    """First names of all modules that the library, tests and notebooks import."""
    files = [path for folder in ("lumen_lab", "tests") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    texts += [source(cell) for path in NOTEBOOKS for cell in code_cells(path)]
    texts.append("import nbformat, nbclient, nbconvert")  # lumen_lab.walk imports these by name
    return set().union(*map(imports_of, texts))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_has_its_reason():
    stated = reasons((ROOT / "pyproject.toml").read_text(encoding="utf-8"), r"^ {4}\"")
    assert set(REQUIREMENTS) <= set(stated)
    assert [line for line in REQUIREMENTS if len(stated[line].split()) < 2] == []


def test_every_package_of_the_environment_has_its_reason():
    stated = reasons((ROOT / "environment.yml").read_text(encoding="utf-8"), r"^ +- (?!pip:$)")
    assert set(pip_lines()) <= set(stated)
    assert [line for line, reason in stated.items() if len(reason.split()) < 2 and line != "conda-forge"] == []


def test_a_missing_reason_is_seen():
    assert reasons('    "a>=1",  # why not\n    "b>=2",\n', r"^ {4}\"") == {"a>=1": "why not", "b>=2": ""}


def test_conda_and_pip_install_the_same():
    assert sorted(pip_lines()) == sorted(line for line in REQUIREMENTS if line not in EXTRAS["peers"])
    python, *_ = environment()["dependencies"]
    assert Requirement(python).specifier == SpecifierSet(PROJECT["requires-python"])


def test_requirements_are_ranges():
    """A range with both ends: nobody is pinned to one release, nobody gets the next major one unasked."""
    for requirement in map(Requirement, REQUIREMENTS):
        operators = {clause.operator for clause in requirement.specifier}
        assert operators == {">=", "<"} or requirement.name in ("netron", "packaging"), str(requirement)


def test_torch_and_torchvision_are_not_tied_to_a_build():
    torch = [
        Requirement(line) for line in PROJECT["dependencies"] if normal(Requirement(line).name).startswith("torch")
    ]
    assert [requirement.name for requirement in torch] == ["torch", "torchvision"]
    assert all(not requirement.url and not requirement.extras and not requirement.marker for requirement in torch)
    assert (
        "+cu" not in (ROOT / "pyproject.toml").read_text()
        and "--index-url" not in (ROOT / "environment.yml").read_text()
    )


@pytest.mark.parametrize("line", REQUIREMENTS, ids=lambda line: Requirement(line).name)
def test_what_is_installed_fits(line):
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        pytest.skip(f"not for this platform: {requirement.marker}")
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        extras = [extra for extra, lines in EXTRAS.items() if line in lines]
        assert extras, f"{requirement.name} is a dependency and is not installed"
        pytest.skip(f"the extra {extras[0]} is not installed")
    assert requirement.specifier.contains(installed, prereleases=True), installed


def test_what_is_imported_is_declared_and_the_other_way_round():
    ours = {"lumen_lab", "tests", "conftest", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    foreign = our_imports() - set(sys.stdlib_module_names) - ours
    providers = importlib.metadata.packages_distributions()
    imported = {normal(name) for module in foreign for name in providers.get(module, [module])}
    declared = {normal(Requirement(line).name) for line in REQUIREMENTS}
    assert imported - declared == set()
    assert declared - imported - set(RUN_BY_NAME) == set()


def make(*arguments: str, **environment_variables: str) -> subprocess.CompletedProcess:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TORCH", "PYTHON"))}
    command = ["make", "--silent", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=variables | environment_variables, capture_output=True, text=True, timeout=60
    )


def test_the_setup_installs_the_pair_of_pyproject_first():
    recipe = make("--dry-run", "--always-make", "setup").stdout
    first, second = [line.split(" install ")[1] for line in recipe.splitlines() if " pip " in line]
    assert first == " ".join(f"'{line}'" for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert "--editable" in second
    assert recipe.splitlines()[-1].startswith("touch "), "an interrupted installation must be done again"


def test_the_pair_can_be_chosen():
    chosen = "torch==2.14.1 torchvision==0.29.1 --index-url https://packages.example/cpu"
    recipe = make("--dry-run", "--always-make", "setup", TORCH=chosen).stdout
    assert "install " + " ".join(f"'{word}'" for word in chosen.split()) + "\n" in recipe


def test_without_a_new_enough_python_one_sentence_says_so(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(["make", "test", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and not (tmp_path / ".venv").exists()
    assert done.stderr.startswith("No Python 3.11, 3.12 or 3.13") and str(old) in done.stderr.splitlines()[0]


def test_continuous_integration_runs_the_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make --silent --dry-run test" in script
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["everything"]["steps"]]
    assert ".ci/run" in steps
    assert {"3.11", "3.13"} == set(workflow["jobs"]["everything"]["strategy"]["matrix"]["python"])


def test_the_commands_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(
        re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"```.*?```|`[^`\n]+`", readme, flags=re.DOTALL)))
    )
    assert {"run", "lab", "test"} <= named <= targets
    assert set(re.findall(r"notebooks/[\w.]+", readme)) <= {f"notebooks/{path.name}" for path in NOTEBOOKS}


def test_the_walk_is_every_notebook_in_order():
    assert list(WALK) == [f"notebooks/{path.name}" for path in sorted(NOTEBOOKS)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_outputs_are_stripped(self, path):
        left = [index for index, cell in enumerate(code_cells(path)) if cell["outputs"] or cell["execution_count"]]
        assert left == []
        assert "widgets" not in json.loads(path.read_text(encoding="utf-8"))["metadata"]

    def test_it_opens_with_a_question_and_a_kernel(self, path):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        first = notebook["cells"][0]
        assert first["cell_type"] == "markdown" and "".join(first["source"]).startswith("# ")

    def test_cells_are_small(self, path):
        for number, cell in enumerate(code_cells(path), start=1):
            assert len("".join(cell["source"]).splitlines()) <= 30, f"code cell {number}"
            for node in ast.walk(ast.parse(source(cell))):
                assert not isinstance(node, ast.ClassDef), f"code cell {number} defines {node.name}"
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno - node.lineno + 1 <= 10, f"code cell {number} defines a long {node.name}"

    def test_parameters_are_literal_and_mocked(self, path):
        (cell,) = [cell for cell in code_cells(path) if "parameters" in cell["metadata"].get("tags", [])]
        values = {}
        for statement in ast.parse(source(cell)).body:
            assert isinstance(statement, ast.Assign), "a parameters cell only assigns"
            values[statement.targets[0].id] = ast.literal_eval(statement.value)
        mocks = cell["metadata"]["nbmake"]["mock"]
        assert mocks and set(mocks) <= set(values)
        for name, mock in mocks.items():
            assert isinstance(mock, type(values[name])), f"the mock of {name} is of another type"
