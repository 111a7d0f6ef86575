"""Speed of rewriting BiRefNet-lite: ``python tests/benchmarks/rewriting.py [--sides 256 512] [--json OUT.json]``.

Golden weights, float32, both cores. Three things are timed, each beside a forward pass of the published network in the
same run, which is the peer:

- *apply*: ``rewrite`` with every plan at 1024², the size of the published recipe;
- *check*: ``check_plan`` for every rewrite of the catalogue by itself, in float64 on one sample of 96 × 160;
- *forward*: the network after every plan at the sides given, in turns with the published one.

Beside them *start*: how far the masks of micro on the sample photographs are from the teacher's after each plan, before
any training (mean absolute difference).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from lumen_lab import EXACT_PLAN, LUMEN_PLAN, load_image, load_network, rewrite
from lumen_lab.equivalence import random_samples
from lumen_lab.images import to_network_input
from lumen_lab.rewrites import LEAN_PLAN, check_plan
from lumen_lab.rewrites.catalogue import CATALOGUE
from lumen_lab.specs import tool_versions, write_whole

PLANS = {"EXACT_PLAN": EXACT_PLAN, "LUMEN_PLAN": LUMEN_PLAN, "LEAN_PLAN": LEAN_PLAN}
RECIPE_SIDE_PX = 1024
SAMPLE_SIZE = (96, 160)  # (H, W)
TOOLS = ("torch", "torchvision")
PHOTOGRAPHS = Path(__file__).parents[2] / "data/photographs"


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_in_turns(works: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """The shortest of ``rounds`` calls of each work, in seconds; they take turns, so that noise meets all alike."""
    for work in works.values():
        work()
    times = [{name: seconds(work) for name, work in works.items()} for _ in range(rounds)]
    return {name: min(turn[name] for turn in times) for name in works}


def row(what: str, about: str, taken_s: float, peer_s: float) -> dict[str, object]:
    print(f"{what} {about}: {taken_s:.2f} s, {taken_s / peer_s:.2f} of the published forward", file=sys.stderr)
    return {"what": what, "about": about, "s": round(taken_s, 3), "of_published_forward": round(taken_s / peer_s, 3)}


@torch.no_grad()
def apply_rows(network: nn.Module) -> list[dict[str, object]]:
    """How long each plan takes to apply at the recipe's size."""
    image = torch.zeros(1, 3, RECIPE_SIDE_PX, RECIPE_SIDE_PX)
    peer_s = seconds(lambda: network(image))
    return [
        row("apply", name, seconds(lambda plan=plan: rewrite(network, plan, example_inputs=(image,))), peer_s)
        for name, plan in PLANS.items()
    ]


@torch.no_grad()
def check_rows(network: nn.Module) -> list[dict[str, object]]:
    """How long the proof of each rewrite takes, and of all of them; "sites" says how many were judged."""
    samples = random_samples([SAMPLE_SIZE])
    peer_s = seconds(lambda: network(samples[0].float()))
    rows = []
    for rule in CATALOGUE:
        tables = []
        taken_s = seconds(lambda rule=rule, tables=tables: tables.append(check_plan(network, (rule,), samples=samples)))
        rows.append(row("check", rule.name, taken_s, peer_s) | {"sites": len(tables[0].verdicts) - 1})
    total_s = sum(r["s"] for r in rows)
    return [*rows, row("check", "all", total_s, peer_s) | {"sites": sum(r["sites"] for r in rows)}]


@torch.no_grad()
def forward_rows(network: nn.Module, side_px: int, *, rounds: int) -> list[dict[str, object]]:
    """A forward pass after each plan beside the published one."""
    image = torch.rand(1, 3, side_px, side_px, generator=torch.Generator().manual_seed(0))
    models = {name: rewrite(network, plan, example_inputs=(image,)).model for name, plan in PLANS.items()}
    works = {name: (lambda model=model: model(image)) for name, model in {"published": network, **models}.items()}
    best_s = best_in_turns(works, rounds=rounds)
    return [row("forward", f"{name}, {side_px}²", taken, best_s["published"]) for name, taken in best_s.items()]


@torch.no_grad()
def start_rows() -> list[dict[str, object]]:
    """Mean mask difference from the teacher on each sample photograph."""
    teacher = load_network("micro")
    pictures = {
        path.stem: torch.from_numpy(to_network_input(load_image(path), size=teacher.config.image_size))
        for path in sorted(PHOTOGRAPHS.glob("*.jpg"))
    }
    rows = []
    for name, plan in PLANS.items():
        student = rewrite(teacher, plan).model
        away = {key: float((student(x).sigmoid() - teacher(x).sigmoid()).abs().mean()) for key, x in pictures.items()}
        rows.append({"what": "start", "about": name, "mean_difference": round(sum(away.values()) / len(away), 4)})
        rows[-1]["by_photograph"] = {key: round(value, 4) for key, value in away.items()}
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="*", default=[256, 512, 1024], help="of the forward passes, pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    network = load_network("lite", weights="golden")
    rows = [*start_rows(), *apply_rows(network), *check_rows(network)]
    for side_px in asked.sides:
        rows += forward_rows(network, side_px, rounds=asked.rounds)
    if asked.json:
        header = {
            "command": " ".join(["python", "tests/benchmarks/rewriting.py", *sys.argv[1:]]),
            "versions": tool_versions(*TOOLS),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }
        print(write_whole(asked.json, json.dumps(header | {"rows": rows}, indent=1) + "\n"))


if __name__ == "__main__":
    main()
