"""What every rewrite buys: ``python tests/benchmarks/plan_costs.py --preset micro --json OUT.json``.

Compiles the published network, every rewrite of the catalogue alone, each left out of the plan, and the plans whole,
for three architectures (float16). Hours on two cores; rows already in ``--work`` are not made again. ``--preset lite``
uses golden weights, which prove graphs and not masks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from lumen_lab import load_network
from lumen_lab.deploy.plan_costs import measure_costs, plan_cases
from lumen_lab.rewrites import plans
from lumen_lab.rewrites.catalogue import CATALOGUE

CHIPS = ("SM8850", "SM8650", "SM8450")
FULL = {"LUMEN_PLAN": plans.LUMEN_PLAN}
WHOLE_PLANS = {"EXACT_PLAN": plans.EXACT_PLAN, "LUMEN_PLAN": plans.LUMEN_PLAN, "LEAN_PLAN": plans.LEAN_PLAN}
WEIGHTS = {"micro": "published", "lite": "golden"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=WEIGHTS, default="micro")
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="default: the preset's own")
    parser.add_argument("--kinds", nargs="+", help="of: alone without whole (default: all)")
    parser.add_argument("--only", nargs="+", help="names of plans or rewrites")
    parser.add_argument("--work", type=Path, default=Path("build/plan_costs"))
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    network = load_network(asked.preset, weights=WEIGHTS[asked.preset])
    size = asked.size or network.config.image_size
    cases = plan_cases(CATALOGUE, FULL, WHOLE_PLANS)
    cases = [case for case in cases if not asked.kinds or case.kind in asked.kinds]
    cases = [case for case in cases if not asked.only or case.about in asked.only]
    table = measure_costs(
        network,
        cases,
        asked.chips,
        out_dir=asked.work / f"{asked.preset}_{size[0]}x{size[1]}",
        example_inputs=(torch.zeros(1, 3, *size),),
        command=" ".join(["python", "tests/benchmarks/plan_costs.py", *sys.argv[1:]]),
    )
    print(table.save(asked.json))


if __name__ == "__main__":
    main()
