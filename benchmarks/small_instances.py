"""How often the search finds the proved optimum of problems small enough to look at every allocation.

    python benchmarks/small_instances.py [--count 200] [--first 0]

Problems are drawn (at most four node groups in one to three regions, at most four stages; those with more than 200,000
allocations are passed over, and so are those without a plan). The search runs as it does by default.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.bounds import lower_bound_s
from polygon.cost.tables import CostTables
from polygon.planning.decode import Decoder
from polygon.planning.engine import find_plan, most_stages
from polygon.planning.exact import AllAllocations, find_optimum
from tests.drawn_problems import small_problem

MOST = 200_000
WITHIN = 0.01


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    args = parser.parse_args()
    rows: list[tuple[int, float, float, float, float]] = []
    for seed in count(args.first):
        if len(rows) == args.count:
            break
        problem = small_problem(seed)
        tables = CostTables(problem)
        decoder = Decoder(problem, tables=tables)
        if AllAllocations(decoder, most_stages(problem)).count() > MOST:
            continue
        began_s = time.process_time()
        found = find_plan(problem, np.random.default_rng(seed), tables=tables)
        search_s = time.process_time() - began_s
        if found.plan is None:
            continue
        began_s = time.process_time()
        optimum = find_optimum(problem, np.random.default_rng(seed), tables=tables, first=found)
        assert optimum.proved
        over = found.value_s / optimum.value_s - 1
        rows.append((seed, over, optimum.value_s / lower_bound_s(tables) - 1, search_s, time.process_time() - began_s))
        print(f"{seed:5d}  {over:8.3%}  {search_s:6.2f} s  {rows[-1][4]:6.2f} s", file=sys.stderr, flush=True)
    over = np.array([row[1] for row in rows])
    gap = np.array([row[2] for row in rows])
    print(f"problems                    {len(rows)}")
    print(f"optimum found               {(over < 1e-6).mean():.1%}")
    print(f"within 1 %                  {(over <= WITHIN).mean():.1%}")
    print(f"mean and worst              {over.mean():.2%}, {over.max():.1%} (seed {rows[int(over.argmax())][0]})")
    print(f"optimum over lower bound    median {np.median(gap):.1%}, worst {gap.max():.1%}")
    print(f"CPU per search, per proof   {np.mean([r[3] for r in rows]):.1f} s, {np.mean([r[4] for r in rows]):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
