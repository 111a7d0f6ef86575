"""Run a compiled network in Qualcomm's x86 emulation of the NPU."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lumen_lab.chips import find_chip
from lumen_lab.deploy.child_process import ChildOutcome, run_child
from lumen_lab.deploy.errors_in_words import explain, kept_log, read_log, telling_lines
from lumen_lab.deploy.toolchain import installed_qairt, require_npu_toolchain
from lumen_lab.errors import ArtifactError, CompileError
from lumen_lab.specs import Manifest, TensorSpec

CHILD = Path(__file__).with_name("htp_child.py")

Sample = np.ndarray | Mapping[str, np.ndarray]


def emulate(
    context_path: str | Path,
    inputs: Sample | Sequence[Sample],
    *,
    time_limit_s: float = 1800,
    progress: bool = True,
) -> dict[str, np.ndarray] | list[dict[str, np.ndarray]]:
    """Outputs of a compiled network, by name, from the emulated NPU (bit for bit the same in every process).

    ``inputs`` is a dict of arrays by input name, or the array itself where there is one input; a list of these is a
    list of samples, answered by a list (the context is then loaded once). Shapes and dtypes are those of the
    manifest; float arrays are converted to its float type.

    Raises ``ArtifactError`` if the artefact does not fit its manifest (changed files, other QAIRT version) or the
    inputs do not fit its contract, ``CompileError`` if the emulation fails or passes ``time_limit_s``, and
    ``MissingDependencyError`` where there is no emulation.
    """
    require_npu_toolchain()
    context_path = Path(context_path)
    manifest = fitting_manifest(context_path)
    several = isinstance(inputs, Sequence)
    samples = [_fitting_inputs(sample, manifest.inputs) for sample in (inputs if several else [inputs])]
    outputs = _emulated(context_path, manifest, samples, time_limit_s, progress) if samples else []
    return outputs if several else outputs[0]


def fitting_manifest(context_path: str | Path) -> Manifest:
    """The manifest beside a context model; ``ArtifactError`` if its files or the QAIRT version do not fit."""
    manifest = Manifest.beside(context_path)
    built, here = manifest.versions.get("qairt"), installed_qairt()
    if built != here:
        raise ArtifactError(f"{context_path} was built by QAIRT {built}, and {here} is installed; compile it again.")
    return manifest


def _fitting_inputs(sample: Sample, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    if not isinstance(sample, Mapping):
        if len(specs) != 1:
            raise ArtifactError(f"The network has the inputs {_names(specs)}; give a dict of arrays by name.")
        sample = {specs[0].name: sample}
    if set(sample) != {spec.name for spec in specs}:
        raise ArtifactError(
            f"The network has the inputs {_names(specs)}, and {', '.join(sample) or 'none'} were given."
        )
    return {spec.name: _fitting_array(np.asarray(sample[spec.name]), spec) for spec in specs}


def _fitting_array(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    both_float = array.dtype.kind == "f" and spec.dtype.startswith("float")
    if tuple(array.shape) != spec.shape or not (array.dtype == spec.dtype or both_float):
        scale = "" if spec.scale is None else f" with scale {spec.scale:g} and zero point {spec.zero_point}"
        raise ArtifactError(
            f"Input {spec.name} takes {spec.dtype} of shape {spec.shape}{scale}, and {array.dtype} of shape "
            f"{tuple(array.shape)} was given."
        )
    return np.ascontiguousarray(array, dtype=spec.dtype)


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _emulated(
    context_path: Path, manifest: Manifest, samples: list[dict[str, np.ndarray]], time_limit_s: float, progress: bool
) -> list[dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory(prefix="lumen_emulate_") as temporary:
        folder = Path(temporary)
        request = _write_request(folder, context_path, manifest, samples)
        with _sample_bar(folder / "outputs", len(samples), progress) as on_poll:
            outcome = run_child(
                [sys.executable, "-P", str(CHILD), str(request)],
                log_path=folder / "raw.log",
                time_limit_s=time_limit_s,
                on_poll=on_poll,
            )
        if not outcome.ok:
            raise _failure(context_path, manifest, folder, outcome, time_limit_s)
        names = json.loads((folder / "result.json").read_text())["output_names"]
        return [_read_outputs(folder / "outputs" / f"{index}.npz", names) for index in range(len(samples))]


def _write_request(folder: Path, context_path: Path, manifest: Manifest, samples: list[dict[str, np.ndarray]]) -> Path:
    chip = find_chip(manifest.chip)
    request = {
        "task": "emulate",
        "model": str(context_path.resolve()),
        "result": str(folder / "result.json"),
        "provider_options": {"soc_model": str(chip.soc_model)},
        "config": {},
        "samples": len(samples),
        "input_names": [spec.name for spec in manifest.inputs],
        "inputs": str(folder / "inputs"),
        "outputs": str(folder / "outputs"),
    }
    for name in ("inputs", "outputs"):
        (folder / name).mkdir()
    for index, sample in enumerate(samples):
        np.savez(folder / "inputs" / f"{index}.npz", *(sample[name] for name in request["input_names"]))
    (folder / "request.json").write_text(json.dumps(request))
    return folder / "request.json"


def _read_outputs(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    with np.load(path) as values:
        return {name: values[f"arr_{place}"] for place, name in enumerate(names)}


@contextmanager
def _sample_bar(outputs: Path, total: int, shown: bool) -> Iterator[Callable[[float], None]]:
    from tqdm.auto import tqdm

    options = {"unit": "sample", "disable": not shown, "leave": False, "mininterval": 1}
    with tqdm(desc="Emulating the NPU", total=total, **options) as bar:
        # A finished sample is the file of that number; glob would count one that is being written.
        yield lambda _: bar.update((outputs / f"{bar.n}.npz").exists()) if shown and bar.n < total else None


def _failure(
    context_path: Path, manifest: Manifest, folder: Path, outcome: ChildOutcome, time_limit_s: float
) -> CompileError:
    lines = kept_log(read_log(folder / "raw.log"))
    done = len([path for path in (folder / "outputs").glob("*.npz") if not path.name.endswith(".part.npz")])
    words = explain("\n".join(lines))
    cause = f" Cause: {words}." if words else ""
    last = "\n  ".join(telling_lines(lines))
    return CompileError(
        f"Emulating {context_path.name} for {manifest.chip} failed after {done} samples: "
        f"{outcome.in_words(time_limit_s)}{cause}\nLast lines:\n  {last}"
    )
