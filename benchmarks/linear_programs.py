"""The linear programs of a search by HiGHS (scipy) and by GLOP (OR-tools): milliseconds and values.

    python benchmarks/linear_programs.py [NAME ...]

Trees of sums (`polygon.planning.sum_trees`) and the bound on computing (`polygon.bounds.size_work`) are such programs:
all that a quick search of an instance and its bound pose are recorded, then solved by both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp
from scipy.optimize import linprog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon import Problem
from polygon.bounds import size_work
from polygon.planning import sum_trees

NATIVE = Path(__file__).resolve().parents[1] / "instances" / "native"
NAMES = ("medium-48-ptafm-testbed", "medium-80-aws", "medium-64-dtfm-worldwide")
Program = tuple[np.ndarray, dict[str, Any]]
"""What is minimised, and what `linprog` is given beside."""


def posed(name: str) -> list[Program]:
    """The programs of a search of an instance, and of its bound."""
    found: list[Program] = []

    def watched(costs: np.ndarray, **limits: Any) -> Any:
        found.append((costs, limits))
        return linprog(costs, **limits)

    for module in (sum_trees, size_work):
        module.linprog = watched  # type: ignore[attr-defined]
    try:
        problem = Problem.from_file(NATIVE / f"{name}.yaml")
        problem.search(effort="quick")
        problem.bound()
    finally:
        for module in (sum_trees, size_work):
            module.linprog = linprog  # type: ignore[attr-defined]
    return found


def by_glop(costs: np.ndarray, limits: dict[str, Any]) -> float:
    """The value of a program; its rows without any entry are left out, and dual values asked for as the search does."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    xs = [solver.NumVar(0.0, solver.infinity(), "") for _ in costs]
    goal = solver.Objective()
    for x, cost in zip(xs, costs.tolist(), strict=True):
        goal.SetCoefficient(x, cost)
    goal.SetMinimization()
    rows = []
    for name, least in (("A_ub", False), ("A_eq", True)):
        if name not in limits:
            continue
        table, most = limits[name], limits[name.replace("A", "b")]
        for i in np.flatnonzero(table.any(axis=1)).tolist():
            row = solver.Constraint(float(most[i]) if least else -solver.infinity(), float(most[i]))
            for x, value in zip(xs, table[i].tolist(), strict=True):
                if value:
                    row.SetCoefficient(x, value)
            rows.append(row)
    solver.Solve()
    _ = [row.dual_value() for row in rows]
    return float(goal.Value())


def by_highs(costs: np.ndarray, limits: dict[str, Any]) -> float:
    """The same by scipy, as the search has it."""
    return float(linprog(costs, **limits).fun)


def main(argv: list[str] | None = None) -> int:
    """Print a row an instance; 1 where the two differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="of instances/native")
    args = parser.parse_args(argv)
    print("instance                       programs  HiGHS ms  GLOP ms  search CPU-s  differ")
    differ = 0
    for name in args.names:
        began_s = time.process_time()
        programs = posed(name)
        search_s = time.process_time() - began_s
        values, each_ms = [], []
        solvers: tuple[Callable[[np.ndarray, dict[str, Any]], float], ...] = (by_highs, by_glop)
        for solve in solvers:
            began_s = time.process_time()
            values.append(np.array([solve(*program) for program in programs]))
            each_ms.append((time.process_time() - began_s) / len(programs) * 1e3)
        unlike = int((~np.isclose(values[0], values[1], rtol=1e-6)).sum())
        differ += unlike
        print(f"{name:30} {len(programs):8}  {each_ms[0]:8.2f}  {each_ms[1]:7.2f}  {search_s:12.1f}  {unlike:6}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
