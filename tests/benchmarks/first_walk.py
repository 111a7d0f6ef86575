"""Speed and size of the first walk: ``python tests/benchmarks/first_walk.py [NAME …] [--json PATH]``.

Each measurement runs in a process of its own, so that its peak memory (its own or that of the largest process it
starts) is its own. Absolute times depend on the machine; where there is a peer it is measured in the same run, and the
ratio is the figure to compare. ``lite profile 512`` says where the time of a forward pass goes. The published
implementation of BiRefNet-lite took 5.9 s at 512² and 24.1 s and 2.8 GB at 1024² on a 2-core machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lumen_lab.specs import tool_versions, write_whole

TOOLS = ("torch", "torchvision", "timm", "onnx", "onnxscript", "onnxruntime", "onnxruntime-qnn")


def timed(work: Callable[[], object], *, repeats: int = 1) -> float:
    """The smallest of ``repeats`` wall times, in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def lite_forward(side_px: int, *, rewritten: bool = False) -> float:
    """One forward pass of BiRefNet-lite with golden weights, after a warm-up, in float32 on the CPU."""
    import torch

    from lumen_lab import EXACT_PLAN, load_network, rewrite

    image = torch.zeros(1, 3, side_px, side_px)
    model = load_network("lite", weights="golden")
    if rewritten:
        model = rewrite(model, EXACT_PLAN, example_inputs=(image,)).model
    with torch.no_grad():
        model(image)
        return timed(lambda: model(image), repeats=3 if side_px <= 512 else 2)


def lite_profile() -> float:
    """Prints the operators that a forward pass of BiRefNet-lite at 512² spends its time in; returns their sum."""
    import torch

    from lumen_lab import load_network

    model, image = load_network("lite", weights="golden"), torch.zeros(1, 3, 512, 512)
    with torch.no_grad():
        model(image)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(image)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print("; ".join(f"{row.key} {row.self_cpu_time_total / total:.0%}" for row in rows[:8]), file=sys.stderr)
    return total / 1e6


def micro_forward() -> float:
    """One float forward pass of the micro network at its own size."""
    import torch

    from lumen_lab import load_network

    model = load_network("micro", weights="golden")
    image = torch.zeros(1, 3, *model.config.image_size)
    with torch.no_grad():
        model(image)
        return timed(lambda: model(image), repeats=5)


def lite_audit() -> float:
    """The audit of BiRefNet-lite at 1024², which runs nothing."""
    import torch

    from lumen_lab import audit, load_network

    model = load_network("lite", weights=None)
    return timed(lambda: audit(model, (torch.empty(1, 3, 1024, 1024, device="meta"),), chip="SM8850"))


def lite_trace() -> float:
    """The peer of the audit: ``torch.export`` of the same network and nothing else."""
    import torch

    from lumen_lab import load_network
    from lumen_lab.taps import shapes_only

    model = load_network("lite", weights=None)
    with shapes_only():
        image = torch.empty(1, 3, 1024, 1024)
        return timed(lambda: torch.export.export(model, (image,), strict=False))


def micro_export(*, rewritten: bool) -> float:
    """``export_onnx`` of the micro network, written to a temporary folder."""
    from lumen_lab import EXACT_PLAN, export_onnx, load_network, rewrite

    model = load_network("micro", weights="golden")
    model = rewrite(model, EXACT_PLAN).model if rewritten else model
    with tempfile.TemporaryDirectory() as folder:
        return timed(lambda: export_onnx(model, Path(folder) / "micro.onnx"))


def micro_compile(*, emulated: bool) -> float:
    """HTP compile of the rewritten micro network for SM8850, or one emulated inference of it."""
    import numpy as np

    from lumen_lab import EXACT_PLAN, compile_for_chip, emulate, export_onnx, load_network, rewrite

    model = rewrite(load_network("micro", weights="golden"), EXACT_PLAN).model
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(model, Path(folder) / "micro.onnx")
        report = compile_for_chip(path, "SM8850", out_dir=folder, progress=False)
        image = np.zeros((1, 3, *model.config.image_size), np.float32)
        return timed(lambda: emulate(report.context_path, image, progress=False)) if emulated else report.compile_s


def importing(name: str) -> float:
    """``import name`` in a fresh interpreter, the start of the interpreter taken off."""
    empty = timed(lambda: subprocess.run([sys.executable, "-c", ""], check=True), repeats=3)
    return timed(lambda: subprocess.run([sys.executable, "-c", f"import {name}"], check=True), repeats=3) - empty


MEASUREMENTS: dict[str, Callable[[], float]] = {
    "lite forward 512": lambda: lite_forward(512),
    "lite forward 512, rewritten": lambda: lite_forward(512, rewritten=True),
    "lite forward 1024": lambda: lite_forward(1024),
    "lite forward 1024, rewritten": lambda: lite_forward(1024, rewritten=True),
    "lite profile 512": lite_profile,
    "micro forward": micro_forward,
    "lite audit 1024": lite_audit,
    "lite torch.export 1024": lite_trace,
    "micro export, rewritten": lambda: micro_export(rewritten=True),
    "micro export, published": lambda: micro_export(rewritten=False),
    "micro compile SM8850": lambda: micro_compile(emulated=False),
    "micro emulated inference": lambda: micro_compile(emulated=True),
    "import lumen_lab": lambda: importing("lumen_lab"),
    "import torch": lambda: importing("torch"),
}
PEERS = {
    "lite forward 512, rewritten": "lite forward 512",
    "lite forward 1024, rewritten": "lite forward 1024",
    "lite audit 1024": "lite torch.export 1024",
    "micro export, rewritten": "micro export, published",
    "micro emulated inference": "micro compile SM8850",
    "import lumen_lab": "import torch",
}


def measure(name: str) -> dict[str, float]:
    """Seconds and peak memory (MiB) of one measurement, in a child process."""
    done = subprocess.run([sys.executable, __file__, "--child", name], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child(name: str) -> None:
    """Run one measurement here and print it as JSON."""
    import resource

    seconds = MEASUREMENTS[name]()
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"seconds": round(seconds, 3), "peak_mib": round(peak_kib / 1024)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(MEASUREMENTS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    rows: dict[str, dict] = {}
    for name in arguments.names or MEASUREMENTS:
        rows[name] = measure(name)
        peer = PEERS.get(name)
        ratio = f"{rows[name]['seconds'] / rows[peer]['seconds']:.2f} x {peer}" if peer in rows else ""
        print(f"{name:<30} {rows[name]['seconds']:>9.2f} s {rows[name]['peak_mib']:>7} MiB  {ratio}", flush=True)
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count())}
        table = {"command": "python tests/benchmarks/first_walk.py", "versions": tool_versions(*TOOLS) | machine}
        write_whole(arguments.json, json.dumps(table | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
