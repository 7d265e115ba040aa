"""Compiles the planner's kernels, which would otherwise be compiled by every process of tests that needs them first.

python -m tests.kernels      # a minute where none is kept yet, seconds where all are
"""

from __future__ import annotations

import numpy as np

from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.planning.exact import find_optimum
from polygon.planning.frontier import find_within_limits
from polygon.planning.objectives import MONEY, STEP_TIME
from polygon.planning.search_engine import Effort
from tests.linked_regions import cluster_of, small_gpt

FEW = Effort(fluid_evaluations=40, exact_evaluations=4, patience=20)


def main() -> None:
    """A short search by time, one by money, and one of all allocations."""
    cluster = cluster_of([[("a100-40gb", 1, 2)], [("t4", 1, 2)]])
    limits = Constraints(compressions=("none", "int8"), local_steps=(1, 8), most_stages=2)
    batch = Batch(global_batch=8, seq_len=512)
    problem = Problem(cluster=cluster, model=small_gpt(blocks=4), batch=batch, constraints=limits)
    for objective in (STEP_TIME, MONEY):
        find_within_limits(problem, 0, objective=objective, effort=FEW)
    find_optimum(problem, np.random.default_rng(0), effort=FEW)


if __name__ == "__main__":
    main()
