"""The native suite: whole problems of instances/native, and the planners that are compared on them.

All planners get the same budget: so many evaluations of the fluid step time, and `EXACT` and `POLISH` for each of them.
What counts is the exact step time of the plan that comes out; a plan that breaks a rule counts as none. Rivals' ideas
run on the same problems: their objective or their set of candidates decides who serves which stage, polygon's decoding
does the rest (layers, memory, shares, packing), which is more than they have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.dtfm import DtfmProblem, PathAnnealing, Scenario
from polygon.bounds.lower_bound import lower_bound_s
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem
from polygon.formats.files import read_problem
from polygon.planning.candidates import Candidates, ExactCandidates, GroupCandidates
from polygon.planning.decode import Allocation, Decoder, most_stages
from polygon.planning.efforts import EFFORTS
from polygon.planning.exact import MOST_ALLOCATIONS, AllAllocations, find_optimum
from polygon.planning.frontier import find_within_limits
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.polish import polished
from polygon.planning.search_engine import Effort, Found
from runners.sweeps import best_known
from solvers.ants import Ants
from solvers.local_search import Restarts
from solvers.result import Improvement, SearchResult
from solvers.stop import MaxEvaluations

SMALLEST = Path(__file__).parents[2] / "instances" / "native" / "tiny-2-t4-one-site.yaml"
QUICK = EFFORTS["quick"]
EXACT = QUICK.exact_evaluations / QUICK.fluid_evaluations
"""Exact simulations for an evaluation of the fluid step time."""
POLISH = QUICK.polish_evaluations / QUICK.fluid_evaluations
"""Small changes of the finished plan for an evaluation of the fluid step time."""
DTFM_STEPS = 40
"""Steps of DT-FM's annealing, which looks at no schedule and no memory, for an evaluation."""
STAGE_COUNTS = (1, 2, 3, 4, 6, 8, 12)
FINALISTS = 12
"""Allocations of a rival that are simulated exactly, at most."""


class NativeProblem:
    """An instance: the problem of a file, with tables of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def data(self) -> Problem:
        """The problem."""
        return read_problem(self.path)

    @cached_property
    def tables(self) -> CostTables:
        """What its layers, links and memory cost."""
        return CostTables(self.data)

    def candidates(self) -> Candidates:
        """Its allocations, valued by the fluid step time."""
        return Candidates(Decoder(self.data, tables=self.tables), most_stages(self.data))

    def bound_s(self) -> float:
        """Step time that no plan beats [s]."""
        return float(lower_bound_s(self.tables))

    def known_s(self) -> float | None:
        """Step time of the best known plan by today's estimator [s]; None where there is none."""
        entry = best_known.best_known("native").get(self.path.stem)
        if entry is None:
            return None
        value = best_known.price(self.data, best_known.unpacked(self.data, entry["plan"]), self.tables)
        return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Answer:
    """What a planner found: a plan or none, and what that took."""

    plan: Plan | None
    evaluations: int
    proved: bool = False


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A way to plan, as a suite uses it.

    Parameters
    ----------
    find : callable
        From instance, generator and evaluations of the fluid step time to an answer.
    seeded : bool
        Whether the generator decides anything; else one seed is run.
    may_use : callable, optional
        Whether it can take a problem.
    """

    find: Callable[[NativeProblem, np.random.Generator, int], Answer]
    seeded: bool = True
    may_use: Callable[[NativeProblem], bool] | None = None

    @property
    def picky(self) -> bool:
        """Whether it cannot take every problem."""
        return self.may_use is not None

    def applies(self, problem: NativeProblem) -> bool:
        """Whether the planner can take the problem."""
        return self.may_use is None or self.may_use(problem)

    def warm_up(self, problem: NativeProblem) -> None:
        """Compile the kernels, which all planners share, once a process."""
        _compile()

    def solve(
        self, problem: NativeProblem, rng: np.random.Generator, stop: object, evaluations: int
    ) -> SearchResult[Plan]:
        """Plan; the budget alone says when to stop."""
        began = time.perf_counter()
        answer = self.find(problem, rng, evaluations)
        seconds = time.perf_counter() - began
        value = math.inf if answer.plan is None else best_known.price(problem.data, answer.plan, problem.tables)
        found = math.isfinite(value)
        return SearchResult(
            solution=answer.plan if found else None,
            value=value,
            bound=-math.inf,  # every allocation tried is no bound on plans that none decodes to
            status="optimal" if answer.proved and found else "feasible" if found else "unknown",
            stopped_by="exhausted",
            evaluations=answer.evaluations,
            seconds=seconds,
            history=(Improvement(answer.evaluations, seconds, value),) if found else (),
        )


@cache
def _compile() -> None:
    """Plan a small instance in the ways that use other kernels."""
    small = NativeProblem(SMALLEST)
    for find in (_polygon, _grid, _dtfm):
        find(small, np.random.default_rng(0), 30)


# polygon's own


def effort_of(evaluations: int) -> Effort:
    """The effort `quick` at this many fluid evaluations in place of its own."""
    part = evaluations / QUICK.fluid_evaluations
    return replace(
        QUICK,
        fluid_evaluations=evaluations,
        exact_evaluations=max(4, round(part * QUICK.exact_evaluations)),
        polish_evaluations=round(part * QUICK.polish_evaluations),
        patience=max(20, round(part * QUICK.patience)),
    )


def _polygon(problem: NativeProblem, rng: np.random.Generator, evaluations: int) -> Answer:
    """`polygon search`; its starts are not counted."""
    return _searched(problem, rng, effort_of(evaluations))


def _searched(problem: NativeProblem, rng: np.random.Generator, effort: Effort) -> Answer:
    found = find_within_limits(problem.data, int(rng.integers(2**31)), effort=effort, tables=problem.tables)
    return _answer(found)


def _answer(found: Found) -> Answer:
    if found.interrupted:
        raise KeyboardInterrupt
    return Answer(found.plan, found.evaluations, found.proved)


def _grid(problem: NativeProblem, rng: np.random.Generator, evaluations: int) -> Answer:
    """The best of all uniform splits (Megatron-LM's plans)."""
    return _answer(find_grid_plan(problem.data, tables=problem.tables, jobs=1))


def _exhaustive(problem: NativeProblem, rng: np.random.Generator, evaluations: int) -> Answer:
    """Every allocation."""
    return _answer(find_optimum(problem.data, rng, effort=EFFORTS["thorough"], tables=problem.tables))


def _can_exhaust(problem: NativeProblem) -> bool:
    candidates = problem.candidates()
    if problem.data.constraints.limits_cost or candidates.decoder.rules:
        return False
    return AllAllocations(candidates.decoder, most_stages(problem.data)).count() <= MOST_ALLOCATIONS


@dataclass(frozen=True, kw_only=True)
class Pieced:
    """A search put together from parts: a solver by fluid values, an exact descent from the best, small changes.

    Parameters
    ----------
    method : object
        Its `solve(candidates, rng, stop, evaluations)` looks at candidates by fluid value.
    candidates : type
        With other moves, for instance.
    descend : bool
        Whether the exact phase moves; else it looks at that many of the best only.
    polish : bool
    """

    method: Any
    candidates: type[Candidates] = Candidates
    descend: bool = True
    polish: bool = True

    def __call__(self, problem: NativeProblem, rng: np.random.Generator, evaluations: int) -> Answer:
        """Plan."""
        decoder = Decoder(problem.data, tables=problem.tables)
        candidates = self.candidates(decoder, most_stages(problem.data))
        found = self.method.solve(candidates, rng, MaxEvaluations(evaluations), evaluations)
        exact = ExactCandidates(decoder, candidates.space.groups)
        budget = max(4, round(evaluations * EXACT))
        if self.descend:
            start = candidates.elite[: max(1, budget // 3)]
            solver = Restarts(patience=max(20, budget // 4))
            best = solver.solve(exact, rng, MaxEvaluations(budget), start=start).solution
        else:
            best = min(candidates.elite[:budget], key=exact.evaluate, default=None)
        plan = decoder.decode(best) if best is not None else None
        if not isinstance(plan, Plan):
            return Answer(None, found.evaluations)
        if self.polish:
            changes = round(evaluations * POLISH)
            plan = polished(plan, decoder.tables, decoder.plan_value, evaluations=changes, expired=lambda: False)
        return Answer(plan, found.evaluations)


# Rivals


def _best_of(decoder: Decoder, allocations: Sequence[Allocation], evaluations: int) -> Answer:
    """The exactly best of some allocations."""
    exact = ExactCandidates(decoder, max((len(x.workers) for x in allocations), default=1))
    best = min(allocations, key=exact.evaluate, default=None)
    plan = decoder.decode(best) if best is not None else None
    return Answer(plan if isinstance(plan, Plan) else None, evaluations)


def _at_sizes(decoder: Decoder, grouped: Sequence[np.ndarray]) -> list[Allocation]:
    """Groupings in the micro-batch size in which each has the least fluid step time, the best few of all."""
    tried: list[tuple[float, int, Allocation]] = []
    for x in grouped:
        sizes = [Allocation(workers=x, micro_batch_size=size) for size in decoder.tables.micro_batch_sizes]
        values = [decoder.value(allocation) for allocation in sizes]
        tried.append((min(values), len(tried), sizes[int(np.argmin(values))]))
    return [x for value, _, x in sorted(tried, key=lambda entry: entry[:2])[:FINALISTS] if math.isfinite(value)]


def _dtfm(problem: NativeProblem, rng: np.random.Generator, evaluations: int) -> Answer:
    """DT-FM's placement: equally wide stages of single devices, by the time of messages and reductions alone.

    All numbers of stages that it can take; devices that do not fill the stages are left out, the slowest first.
    """
    decoder = Decoder(problem.data, tables=problem.tables)
    counts = [n for n in STAGE_COUNTS[1:] if n <= most_stages(problem.data)]
    grouped = []
    for stages in counts:
        scenario = dtfm_scenario(problem.data, stages)
        if scenario is None:
            continue
        steps = max(1_000, DTFM_STEPS * evaluations // len(counts))
        found = PathAnnealing(cycle_steps=min(20_000, steps)).solve(DtfmProblem(scenario), rng, MaxEvaluations(steps))
        if found.solution is not None:
            grouped.append(_of_devices(decoder, found.solution.reshape(stages, -1)))
    return _best_of(decoder, _at_sizes(decoder, grouped), evaluations)


def dtfm_scenario(problem: Problem, stages: int) -> Scenario | None:
    """A problem as DT-FM sees it; None where it has too few devices, or its stages are too wide for it (63)."""
    cluster, model, batch = problem.cluster, problem.model, problem.batch
    flops = [pool.device.peak_flops(batch.precision) for pool in cluster.pools]
    kind = np.repeat(np.arange(len(flops)), [pool.devices for pool in cluster.pools])
    kind = kind[np.argsort([-flops[k] for k in kind], kind="stable")]
    width = min(63, len(kind) // stages)
    if width < 1:
        return None
    links = CostTables(problem).links
    gradient_bytes = 4 * model.parameters / stages
    activation_bytes = 2 * batch.global_batch * batch.seq_len * model.hidden_size / width
    with np.errstate(divide="ignore"):
        hop_s = links.latency_s + activation_bytes / links.bytes_per_s
        pair_s = 2 * (links.latency_s + gradient_bytes / (width * links.bytes_per_s))
    far_s = 1e6
    return Scenario(
        name=cluster.name,
        stages=stages,
        width=width,
        kind=kind[: stages * width],
        hop_s=np.minimum(np.maximum(hop_s, hop_s.T), far_s),
        pair_s=np.minimum(np.maximum(pair_s, pair_s.T), far_s),
    )


def _of_devices(decoder: Decoder, kinds: np.ndarray) -> np.ndarray:
    """Stages x classes from the pools of single devices, shape (stages, width)."""
    x = np.zeros((len(kinds), len(decoder.classes)), dtype=np.int64)
    column = {pool: c for c, (pool, tp) in enumerate(decoder.classes) if tp == 1}
    for s, row in enumerate(kinds):
        for pool in row:
            if int(pool) in column:
                x[s, column[int(pool)]] += 1
    return x


class PtafmGroups(GroupCandidates):
    """PTAFM's objective of ants over groups of pools, in one unit [s] and with as many kinds of devices as there are.

    Sum over groups of the largest sum of a member's links to the others, and twice the root of the mean squared
    deviation of the groups' power (`benchmarks.rivals.ptafm`); power in that of a T4, a link's time for one boundary's
    activations of a micro-batch.
    """

    T4_FLOPS = 65e12

    def __init__(self, decoder: Decoder, stages: int, micro_batch_size: int) -> None:
        super().__init__(decoder, stages, micro_batch_size)
        problem, links = decoder.problem, decoder.tables.links
        pool = np.array([p for p, _ in decoder.classes])
        n_bytes = 2 * micro_batch_size * problem.batch.seq_len * problem.model.hidden_size
        with np.errstate(divide="ignore"):
            link_s = links.latency_s + n_bytes / links.bytes_per_s
        self.link_s = np.minimum(link_s, 1e6)[np.ix_(pool, pool)] * (pool[:, None] != pool)
        flops = [p.device.peak_flops(problem.batch.precision) for p in problem.cluster.pools]
        self.power = np.array([flops[p] * tp for p, tp in decoder.classes]) / self.T4_FLOPS
        self.mean_power = sum(flops[p.index] * p.devices for p in problem.cluster.pools) / self.T4_FLOPS / stages

    def evaluate(self, x: np.ndarray) -> float:
        """The ants' cost; inf where a stage is empty."""
        held = x > 0
        if not held.any(axis=1).all():
            return math.inf
        communication = float(((held @ self.link_s) * held).max(axis=1).sum())
        return communication + 2 * math.sqrt(float(((x @ self.power - self.mean_power) ** 2).mean()))


def _ptafm(problem: NativeProblem, rng: np.random.Generator, evaluations: int) -> Answer:
    """Groups by PTAFM's objective, by ants; the number of stages is the best one's."""
    decoder = Decoder(problem.data, tables=problem.tables)
    counts = [n for n in STAGE_COUNTS if n <= most_stages(problem.data)]
    sizes = decoder.tables.micro_batch_sizes
    grouped = []
    for stages in counts:
        groups = PtafmGroups(decoder, stages, sizes[len(sizes) // 2])
        found = Ants().solve(groups, rng, MaxEvaluations(max(1, evaluations // len(counts))))
        if found.solution is not None:
            grouped.append(found.solution)
    return _best_of(decoder, _at_sizes(decoder, grouped), evaluations)


def rivals() -> dict[str, Planner]:
    """Planners of others."""
    return {
        "grid3d": Planner(find=_grid, seeded=False),
        "dt-fm": Planner(find=_dtfm),
        "ptafm": Planner(find=_ptafm),
    }


def own() -> dict[str, Planner]:
    """polygon's search at several efforts, and the proof; the first is what others are compared with."""
    return {
        "polygon": Planner(find=_polygon),
        "polygon-thorough": Planner(find=lambda problem, rng, _: _searched(problem, rng, EFFORTS["thorough"])),
        "exhaustive": Planner(find=_exhaustive, seeded=False, may_use=_can_exhaust),
    }


# The search with a part taken out


class _NoCrossover(Candidates):
    def crossover(self, a: Allocation, b: Allocation, rng: np.random.Generator) -> Allocation:
        return self.neighbour(a if rng.random() < 0.5 else b, rng)


class _NoStructure(Candidates):
    def _restructure(self, x: Allocation, rng: np.random.Generator) -> np.ndarray:
        return self.compact(self.space.neighbour(x.workers, rng))


class _NoPools(Candidates):
    def _whole_pools(self, x: Allocation, rng: np.random.Generator) -> np.ndarray:
        return self.space.neighbour(x.workers, rng)


class _NoSettings(Candidates):
    def neighbour(self, x: Allocation, rng: np.random.Generator) -> Allocation:
        """The same setting."""
        return replace(super().neighbour(x, rng), micro_batch_size=x.micro_batch_size, cp=x.cp, ep=x.ep)

    def neighbours(self, x: Allocation, rng: np.random.Generator) -> Iterator[Allocation]:
        """Those of the same setting."""
        return (y for y in super().neighbours(x, rng) if y.setting == x.setting)


WITHOUT: dict[str, type[Candidates]] = {
    "crossover": _NoCrossover,
    "stage moves": _NoStructure,
    "pool moves": _NoPools,
    "setting moves": _NoSettings,
}
"""Candidates that lack a move."""
