"""A training step in integers: ``python tests/benchmarks/fake_quantised_step.py [--json OUT.json]``.

Forward, loss, backward and AdamW of micro under ``LUMEN_PLAN``, as a float module and as its fake-quantised NPU graph
(ranges fixed, and learnt), in turns within one run; the best of each beside the float step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lumen_lab as lab
from lumen_lab.specs import tool_versions, write_whole

SIZE = (192, 192)


def step_of(model: nn.Module, images: torch.Tensor, mattes: torch.Tensor) -> Callable[[], None]:
    """One training step of a model that gives logits."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(images), mattes).backward()
        optimiser.step()

    return step


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(asked.batch, 3, *SIZE, generator=generator)
    mattes = (torch.rand(asked.batch, 1, *SIZE, generator=generator) > 0.5).float()
    models = {"float": lab.rewrite(lab.load_network("micro"), lab.LUMEN_PLAN).model}
    for name in ("fixed ranges", "learnt ranges"):
        models[name] = lab.quantize(models["float"], [images.clamp(-2, 2)], output="logits", progress=False)
    models["learnt ranges"].learn_scales()
    best_s = best_in_turns({name: step_of(m, images, mattes) for name, m in models.items()}, rounds=asked.rounds)
    rows = [{"step": n, "s": round(s, 3), "of_float": round(s / best_s["float"], 2)} for n, s in best_s.items()]
    print(*rows, sep="\n")
    if asked.json:
        command = " ".join(["python", "tests/benchmarks/fake_quantised_step.py", *sys.argv[1:]])
        header = {"command": command, "batch": asked.batch, "size": SIZE, "versions": tool_versions("torch")}
        write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
