"""Compile an ONNX network for a phone's NPU with Qualcomm's own compiler, on this machine.

The compiler and an x86 emulation of the NPU come in the onnxruntime-qnn wheel. The compiler runs in a process of its
own (``htp_child.py``). An artefact is a folder ``<out_dir>/<model>_<chip>/`` that appears whole or not at all:

    <name>_ctx.onnx        names the partitions and holds every node left on the CPU; loads the binary beside it
    <name>_ctx_qnn.bin     the context binary for the NPU
    <name>_ctx.onnx.manifest.json   what made it, for which chip, inputs and outputs, hashes
    <name>.report.json     the CompileReport
    <name>.log             what the compiler said, without its routine lines
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from lumen_lab.chips import Chip, find_chip
from lumen_lab.deploy import model_file, qnn_graph
from lumen_lab.deploy.child_process import ChildOutcome, run_child
from lumen_lab.deploy.emulation import emulate, fitting_manifest
from lumen_lab.deploy.errors_in_words import explain, kept_log, read_log, read_refusals, telling_lines
from lumen_lab.deploy.placement import node_places, refused_in_words
from lumen_lab.deploy.report import NOT_ASKED, CompileReport, require_one_partition
from lumen_lab.deploy.toolchain import npu_versions, require_npu_toolchain
from lumen_lab.deploy.traffic import read_traffic
from lumen_lab.errors import ArtifactError, ChipError, CompileError
from lumen_lab.specs import Manifest, TensorSpec, file_sha256, manifest_path, write_whole

if TYPE_CHECKING:
    import onnx

__all__ = ["CompileReport", "compile_for_chip", "emulate", "require_one_partition"]

CHILD = Path(__file__).with_name("htp_child.py")
ARCHITECTURES_BY_NAME = (68, 69, 73, 75, 79, 81)
SPARE_BYTES = 64 * 2**20
SCHEMATIC_BYTES = 100_000  # for each ONNX node, as the micro preset has it; large maps have more tiles a node
STEPS = {  # what the log says: what the compiler is doing
    "FinalizeGraphs completed": "writing",
    "FinalizeGraphs started": "finalising",
    "ComposeQnnGraph": "composing",
    "LogNodeSupport": "asking HTP",
}
INTEGERS = ("uint8", "int8", "uint16", "int16")
OPTRACE = {"profiling_level": "optrace", "profiling_file_path": "profile.csv"}
SCRATCH = "scratch"  # where the compiler leaves its profile and schematics


def compile_for_chip(
    onnx_path: str | Path,
    chip: str | Chip,
    *,
    out_dir: str | Path,
    time_limit_s: float = 1800,
    vtcm_mb: int | None = None,
    optimization_mode: int = 3,
    provider_options: Mapping[str, str] | None = None,
    traffic: bool = True,
    reuse: bool = False,
    progress: bool = True,
) -> CompileReport:
    """Compile ``onnx_path`` for ``chip`` and report what became of every node.

    Nodes that the compiler refuses stay on the CPU and are in the report with the reason; gate on
    ``require_one_partition``. The artefact replaces an earlier one of the same model and chip; ``vtcm_mb`` (on-chip
    memory that the compiler may count on) and ``optimization_mode`` (1 to 3, effort of the finalise step) go to the
    compiler, as do ``provider_options`` of onnxruntime's QNN provider, which win over the library's choices.
    ``traffic`` puts into the report what each operation moves through memory. It changes nothing in the artefact, and
    takes 2 to 5 kB of disk a tile in ``out_dir`` while the compile lasts (0.8 GB for a network of 190,000 tiles).
    With ``reuse``, an artefact made from the same file with the same options and versions is taken as it is, unless
    ``traffic`` is asked for and was not when it was made.

    Raises ``ChipError`` (unknown chip), ``MissingDependencyError`` (no compiler here) and ``CompileError``: no path,
    file missing, not ONNX or of open shape, no room or no right to write, time limit, crash, or nothing taken by the
    NPU. What the compiler said then lies in ``<out_dir>/<model>_<chip>.failed.log``.
    """
    onnx_path = _file_to_compile(onnx_path)
    require_npu_toolchain()
    chip, out_dir = _compilable(find_chip(chip)), Path(out_dir).absolute()
    model = model_file.read_onnx(onnx_path)
    name = f"{onnx_path.stem}_{chip.name}"
    options = _provider_options(chip, vtcm_mb, optimization_mode, provider_options or {})
    made_from = model_file.content_hashes(onnx_path, model) | {"options": json.dumps(options, sort_keys=True)}
    with _one_at_a_time(out_dir / name):
        if reuse and (earlier := _earlier_report(out_dir / name, made_from, traffic)):
            return earlier
        schematic_bytes = SCHEMATIC_BYTES * len(model.graph.node) if traffic else 0
        with _workspace(out_dir, name, 3 * model_file.model_bytes(onnx_path, model) + schematic_bytes) as folder:
            asked = (OPTRACE if traffic else {}) | options
            outcome = _run_compiler(onnx_path, folder, name, asked, time_limit_s, progress)
            context = _read_context(folder, name, chip, model, outcome, time_limit_s)
            report = _report(folder, name, chip, model, context, onnx_path.name, options, made_from["onnx"])
            report = _with_traffic(report, folder, context) if traffic else report
            _write_manifest(folder, name, report, model, made_from)
            report.save(folder / f"{name}.report.json")
            artifact = _publish(folder, out_dir, name)
        return CompileReport.load(artifact / f"{name}.report.json")


def _one_at_a_time(artifact: Path) -> FileLock:
    """A lock on one artefact: of two notebooks that want it, the second waits and takes what the first has made."""
    key = hashlib.sha256(os.fsencode(artifact.resolve())).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"lumen_lab_{os.getuid() if hasattr(os, 'getuid') else 0}_{key}.lock")


def _earlier_report(artifact: Path, made_from: Mapping[str, str], traffic: bool) -> CompileReport | None:
    """The report of an artefact that still fits its manifest and was made from the same things; None otherwise.

    None too if ``traffic`` is wanted and was not asked for then; a schematic that could not be read would not be now.
    """
    try:
        manifest = fitting_manifest(artifact / f"{artifact.name}_ctx.onnx")
        report = CompileReport.load(artifact / f"{artifact.name}.report.json")
        same = manifest.made_from == made_from and manifest.versions == report.versions == npu_versions()
        agree = report.chip == manifest.chip and report.onnx_sha256 == made_from["onnx"] and bool(report.nodes)
        complete = not traffic or report.traffic is not None or report.no_traffic_because != NOT_ASKED
        return report if same and agree and complete else None
    except ArtifactError:
        return None


def _file_to_compile(given: object) -> Path:
    if isinstance(given, str | os.PathLike):
        return Path(given)
    would_do = "give the path that export_onnx or export_qdq returns"
    raise CompileError(f"compile_for_chip takes the path of an ONNX file, found a {type(given).__name__}; {would_do}.")


def _compilable(chip: Chip) -> Chip:
    if chip.soc_model is None:
        raise ChipError(
            f"{chip} cannot be compiled for: no public list has its soc_model, and the compiler picks the chip by it; "
            f"choose another chip with HTP v{chip.htp_arch}."
        )
    return chip


def _provider_options(
    chip: Chip, vtcm_mb: int | None, optimization_mode: int, more: Mapping[str, str]
) -> dict[str, str]:
    if optimization_mode not in (1, 2, 3):
        raise CompileError(f"optimization_mode is 1, 2 or 3, asked for {optimization_mode!r}; 3 is the most thorough.")
    if vtcm_mb is not None and (not isinstance(vtcm_mb, int) or vtcm_mb < 1):
        raise CompileError(
            f"vtcm_mb is a whole number of MB from 1 on, asked for {vtcm_mb!r}; None lets the chip decide."
        )
    if taken := {"soc_model", "htp_arch", "backend_path"} & more.keys():
        raise CompileError(f"provider_options may not set {', '.join(sorted(taken))}: the chip {chip} decides that.")
    options = {
        "soc_model": str(chip.soc_model),
        "htp_graph_finalization_optimization_mode": str(optimization_mode),
        # By default the provider leaves the conversion of a float input or output of an INT8 network on the CPU.
        "offload_graph_io_quantization": "0",
    }
    if chip.htp_arch in ARCHITECTURES_BY_NAME:  # later ones are known by soc_model only
        options["htp_arch"] = str(chip.htp_arch)
    if vtcm_mb is not None:
        options["vtcm_mb"] = str(vtcm_mb)
    return options | {key: str(value) for key, value in more.items()}


@contextmanager
def _workspace(out_dir: Path, name: str, needed_bytes: int) -> Iterator[Path]:
    """A hidden folder inside ``out_dir`` that is gone afterwards; ``CompileError`` if it cannot be had."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        _clear_what_was_killed(out_dir, name)
        folder = Path(tempfile.mkdtemp(dir=out_dir, prefix=f".{name}.", suffix=".part"))
    except OSError as error:
        raise CompileError(f"Cannot write into out_dir {out_dir}: {error.strerror}; choose another folder.") from None
    try:
        _require_room(out_dir, needed_bytes + SPARE_BYTES)
        yield folder
    except OSError as error:
        raise CompileError(f"The artefact could not be written into {out_dir}: {error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_what_was_killed(out_dir: Path, name: str) -> None:
    """Remove what a killed compile has left (the lock is ours), and put back an artefact that it had moved aside."""
    for left in out_dir.glob(f".{name}.*.part"):
        if left.name.endswith(".earlier.part") and not (out_dir / name).exists():
            left.rename(out_dir / name)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _require_room(out_dir: Path, needed: int) -> None:
    free = shutil.disk_usage(out_dir).free
    if free < needed:
        raise CompileError(
            f"Compiling needs about {needed / 2**20:,.0f} MiB in {out_dir} and {free / 2**20:,.0f} MiB are free; "
            "free some space, or choose another out_dir."
        )


def _run_compiler(
    onnx_path: Path, folder: Path, name: str, options: dict[str, str], time_limit_s: float, progress: bool
) -> ChildOutcome:
    request = {
        "task": "compile",
        "model": str(onnx_path.resolve()),
        "result": str(folder / "result.json"),
        "folder": str(folder / SCRATCH),
        "provider_options": options | {"dump_json_qnn_graph": "1", "json_qnn_graph_dir": str(folder)},
        "config": {
            "ep.context_enable": "1",
            "ep.context_file_path": str(folder / f"{name}_ctx.onnx"),
            "ep.context_embed_mode": "0",
        },
    }
    (folder / SCRATCH).mkdir()
    (folder / "request.json").write_text(json.dumps(request))
    with _progress_bar(f"Compiling {name}", folder / "raw.log", progress) as on_poll:
        return run_child(
            [sys.executable, "-P", str(CHILD), str(folder / "request.json")],
            log_path=folder / "raw.log",
            time_limit_s=time_limit_s,
            on_poll=on_poll,
        )


@contextmanager
def _progress_bar(title: str, log: Path, shown: bool) -> Iterator[Callable[[float], None]]:
    """A line with the step that the compiler is in and the seconds passed."""
    from tqdm.auto import tqdm

    with tqdm(desc=title, bar_format="{desc} {elapsed}{postfix}", disable=not shown, leave=False, mininterval=1) as bar:

        def show(seconds: float) -> None:
            if shown and int(seconds * 20) % 20 == 0:
                bar.set_postfix_str(_step(log), refresh=False)
                bar.update(0)

        yield show


def _step(log: Path) -> str:
    """What the compiler does now, from the end of its log."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        tail = file.read().decode(errors="replace")
    found = {tail.rfind(mark): step for mark, step in STEPS.items() if mark in tail}
    return found[max(found)] if found else "starting"


def _read_context(
    folder: Path, name: str, chip: Chip, model: onnx.ModelProto, outcome: ChildOutcome, time_limit_s: float
) -> onnx.ModelProto:
    """The context model that the compiler wrote; ``CompileError`` in words if it wrote none."""
    import onnx

    path = folder / f"{name}_ctx.onnx"
    if not outcome.ok:
        raise _failure(folder, name, chip, outcome.in_words(time_limit_s), model)
    if not path.is_file():
        raise _failure(folder, name, chip, f"the NPU took none of its {len(model.graph.node)} nodes.", model)
    return onnx.load(path, load_external_data=False)


def _failure(folder: Path, name: str, chip: Chip, what: str, model: onnx.ModelProto) -> CompileError:
    """The error to raise for a compile that left nothing; keeps its log beside where the artefact would have been."""
    lines = kept_log(read_log(folder / "raw.log"))
    refused = refused_in_words(read_refusals(read_log(folder / "raw.log")), model)
    log_path = folder.parent / f"{name}.failed.log"
    try:
        write_whole(log_path, "\n".join(lines) + "\n")
        kept = f"Log: {log_path}."
    except OSError as error:
        kept = f"The log could not be kept ({error.strerror})."
    words = explain("\n".join(lines))
    full = shutil.disk_usage(folder).free < 2**20  # the log that would say so may be cut off then
    sentences = [
        f"Compiling {name.removesuffix(f'_{chip.name}')} for {chip} left nothing: {what}",
        f"Cause: {words}." if words else "",
        f"The disk of {folder.parent} is full: free some space, or choose another out_dir." if full else "",
        f"Refused: {refused}." if refused else "",
        f"{chip} has no float16: it takes full INT8 networks only." if chip.supports_fp16 is False else "",
        kept,
    ]
    last = "".join(f"\n  {line}" for line in telling_lines(lines))
    return CompileError(" ".join(filter(None, sentences)) + (f"\nLast lines:{last}" if last else ""))


def _report(
    folder: Path,
    name: str,
    chip: Chip,
    model: onnx.ModelProto,
    context: onnx.ModelProto,
    model_name: str,
    options: dict[str, str],
    onnx_sha256: str,
) -> CompileReport:
    partitions, ops = qnn_graph.read_partitions(context, folder, model)
    result = json.loads((folder / "result.json").read_text())
    refusals = read_refusals(read_log(folder / "raw.log"))
    log_path = write_whole(folder / f"{name}.log", "\n".join(kept_log(read_log(folder / "raw.log"))) + "\n")
    return CompileReport(
        model=model_name,
        chip=chip.name,
        htp_arch=chip.htp_arch,
        soc_model=chip.soc_model,
        options=options,
        onnx_sha256=onnx_sha256,
        versions=npu_versions(),
        partition_rows=partitions,
        nodes=node_places(model, context, ops, refusals),
        ops=ops,
        binary_bytes=(folder / f"{name}_ctx_qnn.bin").stat().st_size,
        compile_s=result["compile_s"],
        peak_memory_bytes=result["peak_memory_bytes"],
        log_path=str(log_path),
        context_path=str(folder / f"{name}_ctx.onnx"),
    )


def _with_traffic(report: CompileReport, folder: Path, context: onnx.ModelProto) -> CompileReport:
    """The report with its traffic. A schematic that cannot be read is a warning: the compile itself is good."""
    try:
        return replace(report, traffic=read_traffic(folder / SCRATCH, context, report.ops), no_traffic_because="")
    except ArtifactError as error:
        warnings.warn(f"{report.model} was compiled for {report.chip}, without its traffic: {error}", stacklevel=3)
        return replace(report, no_traffic_because=str(error).replace(f"{folder / SCRATCH}{os.sep}", ""))


def _write_manifest(
    folder: Path, name: str, report: CompileReport, model: onnx.ModelProto, made_from: dict[str, str]
) -> None:
    inputs = model_file.tensor_specs(model_file.graph_inputs(model))
    outputs = model_file.tensor_specs(model.graph.output)
    found = qnn_graph.encodings(folder, [spec.name for spec in (*inputs, *outputs) if spec.dtype in INTEGERS])
    files = (f"{name}_ctx.onnx", f"{name}_ctx_qnn.bin")
    Manifest(
        kind="htp context",
        made_from=made_from,
        versions=report.versions,
        inputs=_with_encodings(inputs, found),
        outputs=_with_encodings(outputs, found),
        files={file: file_sha256(folder / file) for file in files},
        chip=report.chip,
        notes=f"{report.model}, HTP v{report.htp_arch}, soc_model {report.soc_model}",
    ).save(manifest_path(folder / f"{name}_ctx.onnx"))


def _with_encodings(specs: tuple[TensorSpec, ...], found: Mapping[str, tuple[float, int]]) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, scale=found[spec.name][0], zero_point=found[spec.name][1]) if spec.name in found else spec
        for spec in specs
    )


def _require_own(artifact: Path, name: str) -> None:
    """Refuse to replace what is not an earlier artefact: a file, a link, or a folder with files of somebody else."""
    if not artifact.is_symlink() and not artifact.exists():
        return
    real_folder = artifact.is_dir() and not artifact.is_symlink()
    strangers = [path.name for path in artifact.iterdir() if not path.name.startswith(name)] if real_folder else [name]
    if strangers:
        raise CompileError(
            f"{artifact} is in the way and is not an earlier artefact ({', '.join(strangers[:3])}); move it, or choose "
            "another out_dir."
        )


def _publish(folder: Path, out_dir: Path, name: str) -> Path:
    """Leave the artefact's own files in ``folder`` and move it to its place, in exchange for an earlier one."""
    artifact = out_dir / name
    _require_own(artifact, name)
    shutil.rmtree(folder / SCRATCH)
    for path in folder.iterdir():
        if path.name in ("raw.log", "request.json", "result.json") or path.name.startswith("QNN_"):
            path.unlink()
    folder.chmod(0o755)
    earlier = out_dir / f".{name}.{os.getpid()}.earlier.part"
    if artifact.exists():
        artifact.rename(earlier)
    try:
        folder.rename(artifact)
    except OSError:
        if earlier.exists():
            earlier.rename(artifact)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
    (out_dir / f"{name}.failed.log").unlink(missing_ok=True)
    return artifact
