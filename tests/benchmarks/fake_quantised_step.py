"""A training step in integers: ``python tests/benchmarks/fake_quantised_step.py [--json OUT.json]``.

Forward, loss, backward and AdamW of micro under ``LUMEN_PLAN``: as a float module, as its NPU graph (ranges fixed,
learnt, and computed in parts), and as AIMET simulates it (where aimet-torch is installed: the peers extra), in turns
within one run; the best of each beside the float step, and what each keeps for its backward pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import lumen_lab as lab
from lumen_lab.distillation.views import LOGITS, GraphView
from lumen_lab.quantization.capture import capture
from lumen_lab.specs import tool_versions, write_whole

SIZE = (192, 192)
PARTS = 4


class Logits(nn.Module):
    """What a view shows, its logits alone."""

    def __init__(self, view: GraphView):
        super().__init__()
        self.view = view

    def forward(self, image: Tensor) -> Tensor:
        return self.view(image)[LOGITS]


def step_of(model: nn.Module, images: Tensor, mattes: Tensor) -> Callable[[], None]:
    """One training step of a model that gives logits."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(images), mattes).backward()
        optimiser.step()

    return step


def kept_mb(model: nn.Module, images: Tensor) -> float:
    """Megabytes kept for the backward pass, each storage counted once."""
    storages: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with saved_tensors_hooks(pack, lambda value: value):
        output = model(images)
    del output
    return sum(size for place, size in storages.items() if place not in own) / 1e6


def best_in_turns(steps: dict[str, Callable[[], None]], *, rounds: int) -> dict[str, float]:
    """The least seconds of each, after one round that is not counted."""
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if turn:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def of_aimet(module: nn.Module, images: Tensor) -> nn.Module:
    """The network as AIMET simulates it in 8 bits, its encodings from ``images``."""
    from aimet_torch import QuantizationSimModel

    from tests.benchmarks.peers.as_modules import as_modules

    sim = QuantizationSimModel(as_modules(capture(module, images[:1])), images, default_output_bw=8, default_param_bw=8)
    sim.compute_encodings(lambda model, _: model(images), None)
    return sim.model


def models_of(images: Tensor) -> dict[str, nn.Module]:
    """Every form of the step."""
    plain = lab.rewrite(lab.load_network("micro"), lab.LUMEN_PLAN).model
    found: dict[str, nn.Module] = {"float": plain}
    for name in ("fixed ranges", "learnt ranges", f"fixed ranges, in {PARTS} parts"):
        found[name] = lab.quantize(plain, [images], output="logits", progress=False)
    found["learnt ranges"].learn_scales()
    parts = found[f"fixed ranges, in {PARTS} parts"]
    found[f"fixed ranges, in {PARTS} parts"] = Logits(GraphView(parts, parts=PARTS))
    if importlib.util.find_spec("aimet_torch"):
        found["AIMET, learnt ranges"] = of_aimet(plain, images)
    else:
        print("AIMET is not installed: pip install '.[peers]'", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(asked.batch, 3, *SIZE, generator=generator).clamp(-2, 2)
    mattes = (torch.rand(asked.batch, 1, *SIZE, generator=generator) > 0.5).float()
    models = models_of(images)
    best_s = best_in_turns({name: step_of(m, images, mattes) for name, m in models.items()}, rounds=asked.rounds)
    rows = [
        {
            "step": name,
            "s": round(seconds, 3),
            "of_float": round(seconds / best_s["float"], 2),
            "kept_for_backward_mb": round(kept_mb(models[name], images), 1),
        }
        for name, seconds in best_s.items()
    ]
    print(*rows, sep="\n")
    if asked.json:
        command = " ".join(["python", "tests/benchmarks/fake_quantised_step.py", *sys.argv[1:]])
        versions = tool_versions("torch", *(["aimet-torch"] if len(models) > 4 else []))
        header = {
            "command": command,
            "batch": asked.batch,
            "size": SIZE,
            "threads": asked.threads,
            "versions": versions,
        }
        write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
