"""Compiles the planner's kernels, which would otherwise be compiled by every process of tests that needs them first.

python -m tests.kernels      # a minute where none is kept yet, seconds where all are
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polygon.bounds.lower_bound import lower_bound
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.planning.exact import find_optimum
from polygon.planning.frontier import find_within_limits
from polygon.planning.objectives import MONEY, STEP_TIME
from polygon.planning.search_engine import Effort
from tests.linked_regions import cluster_of, small_gpt

FEW = Effort(fluid_evaluations=40, exact_evaluations=4, patience=20)


def main() -> None:
    """A short search by time, one by money, one of all allocations; a bound; nodes that share what joins regions."""
    cluster = cluster_of([[("a100-40gb", 1, 2)], [("t4", 1, 2)]])
    limits = Constraints(compressions=("none", "int8"), local_steps=(1, 8), most_stages=2)
    batch = Batch(global_batch=8, seq_len=512)
    problem = Problem(cluster=cluster, model=small_gpt(blocks=4), batch=batch, constraints=limits)
    for objective in (STEP_TIME, MONEY):
        find_within_limits(problem, 0, objective=objective, effort=FEW)
    find_optimum(problem, np.random.default_rng(0), effort=FEW)
    lower_bound(CostTables(problem))
    nodes = cluster_of([[("a100-40gb", 2, 2)], [("t4", 3, 2)]], capacity=2e8)
    shared = replace(problem, cluster=nodes)
    for known in (problem, shared):
        for dp, pp in ((1, 4), (2, 2), (4, 1)):
            estimate(known, uniform_plan(known, ParallelConfig(dp=dp, pp=pp, micro_batch_size=1)))


if __name__ == "__main__":
    main()
