"""Fronts of time and money beside those of NSGA-II (DEAP) on the same moves, by the hypervolume that each beats.

    python benchmarks/fronts.py [NAME ...] [--seeds 2] [--effort quick] [--times 1]

NSGA-II begins with the best of the search's simple starts, changes allocations by the search's moves and crossover,
decodes and prices each exactly, and has as much CPU as the front took, `--times` over. Hypervolumes (DEAP's) are in
logarithms of seconds and dollars of a step, of a box from both fronts' best to a tenth beyond their worst.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from deap import base, creator, tools
from deap.benchmarks.tools import hypervolume

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon import Problem
from polygon.domain.clock import Clock
from polygon.domain.plan import Plan
from polygon.planning import search_engine as engine
from polygon.planning.decode import Decoder
from polygon.planning.efforts import EFFORTS

NATIVE = Path(__file__).resolve().parents[1] / "instances" / "native"
NAMES = (
    "small-24-europe",
    "medium-64-regional",
    "medium-80-aws",
    "medium-128-sailor-a100-v100",
    "medium-160-sailor-zones",
)
POPULATION = 48
CROSSED, FURTHER = 0.5, 0.5
"""Parts of children that have two parents, and that are moved once more."""
BEYOND = 0.1
Point = tuple[float, float]
"""Seconds and dollars of a step."""


def ours(problem: Problem, effort: str, seed: int) -> list[Point]:
    """The front that `polygon pareto` finds."""
    return [(bill.step_s, bill.usd) for bill in problem.front(effort=EFFORTS[effort], seed=seed).bills]


def evolved(problem: Problem, effort: str, seed: int, cpu_s: float) -> tuple[list[Point], int]:
    """What NSGA-II finds in so many CPU-seconds, and how many plans it has priced."""
    began_s = time.process_time()
    decoder, rng = Decoder(problem.data, tables=problem.tables), np.random.default_rng(seed)
    _, candidates = engine._begin_once(decoder, None, [], EFFORTS[effort], Clock(math.inf), None)
    known: dict[object, Point] = {}

    def price(person: Any) -> Point:
        key = candidates.key(person[0])
        if key not in known:
            plan = decoder.decode(person[0])
            bill = decoder.bill(plan) if isinstance(plan, Plan) else None
            known[key] = (bill.step_s, bill.usd) if bill is not None else (math.inf, math.inf)
        return known[key]

    def priced(people: list[Any]) -> list[Any]:
        for person in people:
            person.fitness.values = price(person)
        return [person for person in people if math.isfinite(person.fitness.values[0])]

    def child(parents: list[Any]) -> Any:
        mother, father = (parents[int(i)][0] for i in rng.integers(len(parents), size=2))
        x = candidates.crossover(mother, father, rng) if rng.random() < CROSSED else candidates.neighbour(mother, rng)
        while rng.random() < FURTHER:
            x = candidates.neighbour(x, rng)
        return creator.Person([x])

    random.seed(seed)  # DEAP's tournaments draw from it
    people = priced([creator.Person([x]) for x in candidates.elite[:POPULATION]])
    best = tools.ParetoFront(similar=lambda a, b: candidates.key(a[0]) == candidates.key(b[0]))
    best.update(people)
    people = tools.selNSGA2(people, len(people))
    while people and time.process_time() - began_s < cpu_s:
        parents = tools.selTournamentDCD(people, len(people) // 4 * 4) if len(people) >= 4 else people
        children = priced([child(parents) for _ in range(POPULATION)])
        best.update(children)
        people = tools.selNSGA2(people + children, min(POPULATION, len(people) + len(children)))
    return [person.fitness.values for person in best], len(known)


def beaten(fronts: list[list[Point]]) -> list[float]:
    """Of the box from the best to the worst of all fronts, in logarithms, the part that each beats."""
    every = np.log(np.concatenate([np.array(front) for front in fronts if front]))
    low, high = every.min(axis=0), every.max(axis=0)
    span = np.maximum(high - low, 1e-9)
    found = []
    for front in fronts:
        people = []
        for point in front:
            person = creator.Person([None])
            person.fitness.values = tuple((np.log(point) - low) / span)
            people.append(person)
        found.append(float(hypervolume(people, [1 + BEYOND] * 2) / (1 + BEYOND) ** 2) if people else 0.0)
    return found


def main(argv: list[str] | None = None) -> int:
    """Print a row a problem and seed; 1 if NSGA-II beats more in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="of instances/native")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--effort", choices=EFFORTS, default="quick")
    parser.add_argument("--times", type=float, default=1.0, help="CPU of NSGA-II, over that of the front")
    args = parser.parse_args(argv)
    creator.create("Least", base.Fitness, weights=(-1.0, -1.0))
    creator.create("Person", list, fitness=creator.Least)
    print("instance                       seed  CPU-s  front  points  NSGA-II  points  priced")
    lost = 0
    for name in args.names:
        for seed in range(args.seeds):
            began_s = time.process_time()
            front = ours(Problem.from_file(NATIVE / f"{name}.yaml"), args.effort, seed)
            spent_s = time.process_time() - began_s
            other, count = evolved(Problem.from_file(NATIVE / f"{name}.yaml"), args.effort, seed, args.times * spent_s)
            one, two = beaten([front, other])
            lost += two > one
            print(
                f"{name:30} {seed:4}  {spent_s:5.1f}  {one:5.3f}  {len(front):6}  {two:7.3f}  {len(other):6}  {count:6}"
            )
    print(f"NSGA-II beats more in {lost} of {len(args.names) * args.seeds}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
