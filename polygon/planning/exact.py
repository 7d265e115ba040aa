"""The best plan of a small problem, proved: every allocation that the search could choose, decoded or excluded.

The search chooses how many workers of each class serve each stage, and their setting; decode does the rest. So
all of these are enumerated (stages up to a limit, every pool dealt out in every way, idle devices too). What
`polygon.planning.allocation_bound` shows to be no better than the best known is left out; the others are decoded and
simulated as the search does with its best, lowest bound first; the best is polished (`polygon.planning.polish`). What
is proved is that no allocation decodes to a better plan; borders and options other than decode's are not enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from polygon.cost.tables import CostTables
from polygon.domain.clock import Clock
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.planning.allocation_bound import floors_s, limits_of
from polygon.planning.candidates import Candidates
from polygon.planning.decode import Allocation, Decoder, most_stages
from polygon.planning.polish import polished
from polygon.planning.problem_arrays import Setting
from polygon.planning.search_engine import Effort, Found, find_plan
from polygon.planning.telling import Tell, share
from solvers.allocation import AllocationSpace
from solvers.exhaustive import Exhaustive
from solvers.stop import MaxEvaluations, TimeLimit

MOST_ALLOCATIONS = 2_000_000
"""More (allocations times settings) are refused."""
KNOWN = 8
"""Of the search's allocations so many are tried first."""


class AllAllocations(Candidates):
    """The search's allocations, all of them, valued by the step time of the finished plan."""

    def __init__(self, decoder: Decoder, stages: int) -> None:
        super().__init__(decoder, stages)
        pools = decoder.problem.cluster.pools
        self.settings = [Setting(size, *degrees) for size in self.sizes for degrees in self.degrees]
        self.spaces = [
            AllocationSpace(
                groups=s,
                capacity=np.array([pool.devices for pool in pools]),
                pool=np.array([p for p, _ in decoder.classes]),
                units=np.array([t for _, t in decoder.classes]),
            )
            for s in range(1, stages + 1)
        ]

    def count(self) -> int:
        """How many there are, those with empty stages counted as well."""
        return sum(space.count() for space in self.spaces) * len(self.settings)

    def evaluate(self, x: Allocation) -> float:
        """Step time of the plan as the search would return it [s]."""
        plan = self.decoder.decode(x)
        return self.decoder.plan_value(plan) if isinstance(plan, Plan) else math.inf

    def solutions(self) -> Iterator[Allocation]:
        """Every allocation without empty stages, under every setting, in whole units of it: others are the same as one
        of these."""
        for space in self.spaces:
            for x in space.solutions():
                for setting in self.settings:
                    if not (x % setting.unit).any():
                        size, cp, ep = setting
                        yield Allocation(workers=x, micro_batch_size=size, cp=cp, ep=ep)

    def solutions_by_floor(self) -> Iterator[tuple[float, Allocation]]:
        """Those that have a plan, with a step time that it cannot beat."""
        every: list[np.ndarray] = []
        floors: list[np.ndarray] = []
        settings: list[Setting] = []
        limits = {setting: limits_of(self.decoder, setting.micro_batch_size) for setting in self.settings}
        for space in self.spaces:
            for block in space.solution_blocks():
                xs = block.astype(np.int16)
                for setting in self.settings:
                    whole = xs[~(xs % setting.unit).any(axis=(1, 2))] if setting.unit > 1 else xs
                    out = floors_s(self.decoder.banks(setting), limits[setting], whole)
                    every.append(whole[np.isfinite(out)])
                    floors.append(out[np.isfinite(out)])
                    settings.append(setting)
        block_of = np.repeat(np.arange(len(floors)), [len(part) for part in floors])
        first = np.cumsum([0, *(len(part) for part in floors)])
        values = np.concatenate([*floors, np.zeros(0)])
        for i in np.argsort(values, kind="stable").tolist():
            block_at = int(block_of[i])
            x = every[block_at][i - int(first[block_at])].astype(np.int64)
            size, cp, ep = settings[block_at]
            yield float(values[i]), Allocation(workers=x, micro_batch_size=size, cp=cp, ep=ep)


def find_optimum(
    problem: Problem,
    rng: np.random.Generator,
    *,
    effort: Effort | None = None,
    tell: Tell | None = None,
    tables: CostTables | None = None,
    first: Found | None = None,
) -> Found:
    """The plan with the least step time of all allocations that the search could choose, with proof.

    Parameters
    ----------
    effort : Effort, optional
        Of the search that finds the first plan to beat. Its time limit ends the enumeration as well; then the best so
        far is returned and nothing is proved (`Found.proved`).
    first : Found, optional
        What a search found before, in place of that one.

    Raises
    ------
    InputError
        There are more than `MOST_ALLOCATIONS` allocations, or something beside time is limited, or rules pin stages.
    """
    effort = effort or Effort()
    clock = Clock(effort.time_limit_s)
    decoder = Decoder(problem, tables=tables)
    if not decoder.classes:
        return Found(plan=None, value_s=math.inf, reason=Message("reason.all_forbidden"))
    if problem.constraints.limits_cost or decoder.rules:
        raise InputError("method: exhaustive search knows no budget, deadline, egress cap or rule for stages")
    everything = AllAllocations(decoder, most_stages(problem))
    count = everything.count()
    if count > MOST_ALLOCATIONS:
        raise InputError(
            f"method: found exhaustive for {count:.1e} allocations, expected at most {MOST_ALLOCATIONS:.0e} "
            f"(fewer devices, or fewer stages by constraints.most_stages)"
        )
    first = first or find_plan(problem, rng, effort=effort, tell=share(tell, 0.0, 0.5), tables=decoder.tables)
    known = [_compact(x) for _, x in first.bills[:KNOWN]]
    result = Exhaustive().solve(
        everything,
        rng,
        MaxEvaluations(count + KNOWN) | TimeLimit(clock.left_s()),
        start=known,
        callback=(lambda progress, _: tell(Message("phase.every_allocation"), 0.5, progress.value)) if tell else None,
    )
    plan = decoder.decode(result.solution) if result.solution is not None else None
    value_s = result.value
    if isinstance(plan, Plan):
        plan = polished(
            plan,
            decoder.tables,
            decoder.plan_value,
            evaluations=effort.polish_evaluations,
            by_time=decoder.by_time,
            expired=lambda: clock.left_s() <= 0,
        )
        value_s = decoder.plan_value(plan)
    if first.value_s < value_s:
        plan, value_s = first.plan, first.value_s
    return Found(
        plan=replace(plan, solver="exhaustive") if isinstance(plan, Plan) else None,
        value_s=value_s,
        reason=first.reason,
        evaluations=first.evaluations + result.evaluations,
        seconds=first.seconds + result.seconds,
        interrupted=result.stopped_by == "interrupt",
        proved=result.status == "optimal",
    )


def _compact(x: Allocation) -> Allocation:
    return replace(x, workers=x.workers[x.workers.any(axis=1)])
