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
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.bounds.lower_bound import lower_bound_s
from polygon.cost.tables import CostTables
from polygon.planning.decode import Decoder, most_stages
from polygon.planning.exact import AllAllocations, find_optimum
from polygon.planning.search_engine import find_plan
from tests.drawn_problems import small_problem

MOST = 200_000
WITHIN = 0.01


class Row(NamedTuple):
    """One problem: found plan over optimum, optimum over lower bound (both less 1), CPU seconds."""

    seed: int
    over: float
    gap: float
    search_s: float
    proof_s: float


def solve(seed: int) -> Row | None:
    """Search and prove; None for a problem that is too large or has no plan."""
    problem = small_problem(seed)
    tables = CostTables(problem)
    if AllAllocations(Decoder(problem, tables=tables), most_stages(problem)).count() > MOST:
        return None
    began_s = time.process_time()
    found = find_plan(problem, np.random.default_rng(seed), tables=tables)
    searched_s = time.process_time()
    if found.plan is None:
        return None
    optimum = find_optimum(problem, np.random.default_rng(seed), tables=tables, first=found)
    if found.interrupted or not optimum.proved:
        raise KeyboardInterrupt
    return Row(
        seed=seed,
        over=found.value_s / optimum.value_s - 1,
        gap=optimum.value_s / lower_bound_s(tables) - 1,
        search_s=searched_s - began_s,
        proof_s=time.process_time() - searched_s,
    )


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    args = parser.parse_args()
    rows: list[Row] = []
    try:
        for seed in count(args.first):
            if len(rows) == args.count:
                break
            row = solve(seed)
            if row is not None:
                rows.append(row)
                print(
                    f"{seed:5d}  {row.over:8.3%}  {row.search_s:6.2f} s  {row.proof_s:6.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    except KeyboardInterrupt:
        print("interrupted: what was solved so far", file=sys.stderr)
    over, gap = np.array([row.over for row in rows]), np.array([row.gap for row in rows])
    print(f"problems                    {len(rows)}")
    print(f"optimum found               {(over < 1e-6).mean():.1%}")
    print(f"within 1 %                  {(over <= WITHIN).mean():.1%}")
    print(f"mean and worst              {over.mean():.2%}, {over.max():.1%} (seed {rows[int(over.argmax())].seed})")
    print(f"optimum over lower bound    median {np.median(gap):.1%}, worst {gap.max():.1%}")
    search_s, proof_s = (float(np.mean([getattr(row, name) for row in rows])) for name in ("search_s", "proof_s"))
    print(f"CPU per search, per proof   {search_s:.1f} s, {proof_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
