"""Polygon's search under Sailor's score: plans of Sailor's form for Sailor's problems, profiles and network.

Allocations, moves and solver are those of `polygon.planning`; only the value differs (`sailor_kernel`). The final
choice looks at polygon's own estimate as well, because the two disagree about how dear messages and reductions are.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.rivals.sailor import Setup, plan_from_form, problem_from_setup, type_names
from benchmarks.rivals.sailor_kernel import ScoreBank, score_allocation_s, score_bank, walk_order
from benchmarks.rivals.sailor_score import BUCKET_BYTES, Measured, measured_from_documents
from polygon.cost.estimate import worker_memory
from polygon.cost.profiles import model_profiles
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import Plan
from polygon.planning.candidates import Candidates
from polygon.planning.decode import Allocation, Decoder, Infeasible
from polygon.planning.initial_solutions import kind_sequences
from solvers.genetic import Genetic
from solvers.stop import MaxEvaluations

MOST_STAGES = 16
EVALUATIONS = 3_000
FINALISTS = 24
"""Of the best allocations met, how many polygon's estimate is asked about."""

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Those that its profiles were measured at."""


class ScoreDecoder(Decoder):
    """Allocations valued by Sailor's score, and decoded to Sailor's form of a plan."""

    def __init__(self, setup: Setup, profiles: Mapping[str, Any], network: Mapping[str, Any]) -> None:
        problem = problem_from_setup(setup, profiles, network)
        super().__init__(problem, tables=CostTables(problem, [model_profiles(profiles)[setup.model]]))
        self.measured: Measured = measured_from_documents(profiles, network, setup.model)
        self.global_batch = setup.global_batch
        cluster, names = problem.cluster, type_names(setup)
        pools = [cluster.pools[p] for p, _ in self.classes]
        self.kinds = [
            (cluster.regions[pool.region].name, names[pool.device.name], tp)
            for pool, (_, tp) in zip(pools, self.classes, strict=True)
        ]
        self.order = walk_order(self.measured, list(dict.fromkeys(kind[:2] for kind in self.kinds)))
        sizes = [size for size in MICRO_BATCH_SIZES if setup.global_batch % size == 0]
        self.sizes = tuple(
            size for size in sizes if any((gpu, size, tp) in self.measured.forward_s for _, gpu, tp in self.kinds)
        )
        self._score_bank = lru_cache(maxsize=None)(self._build_score_bank)
        self._kept = np.zeros((MOST_STAGES, len(self.kinds)), dtype=np.int64)
        self._bounds = np.zeros(MOST_STAGES + 1, dtype=np.int64)

    def _build_score_bank(self, size: int) -> ScoreBank:
        return score_bank(self.measured, self.kinds, self.order, size, self.global_batch)

    def value(self, allocation: Allocation) -> float:
        """Sailor's score of the equally wide stages that the allocation allows, its best layer split found."""
        bank = self._score_bank(allocation.micro_batch_size)
        return score_allocation_s(bank, allocation.workers, self._kept, self._bounds)

    def form(self, allocation: Allocation) -> tuple[float, dict[str, Any]]:
        """Score and plan in Sailor's form; workers are listed so that reductions run along quick links."""
        bank = self._score_bank(allocation.micro_batch_size)
        value = self.value(allocation)
        used = {self.kinds[c][:2] for c in bank.column[self._kept[:, : len(bank.column)].any(axis=0)]}
        width = max(1, int(self._kept[0].sum()))
        piece_bytes = min(BUCKET_BYTES, bank.weight_bytes[-1] / max(1, self._kept.any(axis=1).sum())) / width
        order = walk_order(self.measured, [place for place in self.order if place in used], piece_bytes)
        shorter = score_bank(self.measured, self.kinds, order, allocation.micro_batch_size, self.global_batch)
        # Without the places that are not used the walk through the others may be quicker.
        if score_allocation_s(shorter, allocation.workers, self._kept, self._bounds) < value:
            bank = shorter
        value = score_allocation_s(bank, allocation.workers, self._kept, self._bounds)
        stages = [
            {
                "layers": list(range(int(self._bounds[s]), int(self._bounds[s + 1]))),
                "workers": [
                    {"gpu_type": gpu, "tp": tp, "zone": zone}
                    for c, count in zip(bank.column, row, strict=False)
                    for zone, gpu, tp in [self.kinds[c]] * int(count)
                ],
            }
            for s, row in enumerate(self._kept)
            if row.any()
        ]
        return value, {
            "micro_batch_size_sequences": allocation.micro_batch_size,
            "pipelines_count": 1,
            "stages": stages,
            "independent_pipelines": None,
        }

    def plan(self, form: Mapping[str, Any]) -> Plan:
        """A plan of Sailor's form as polygon's, on devices of the setup (see `plan_from_form`)."""
        return plan_from_form(form, self.problem, self.measured.layers)

    def estimate_s(self, form: Mapping[str, Any]) -> float:
        """Polygon's estimate of a plan of Sailor's form; inf where its own memory model objects."""
        plan = self.plan(form)
        place = self.tables.placement(plan)
        memory = worker_memory(plan, self.tables, place)
        limits = self.tables.limit_bytes[place.pool]
        if any(m.total_bytes > limit for m, limit in zip(memory, limits, strict=True)):
            return math.inf
        return step_times(plan, self.tables).step_s


class ScoreCandidates(Candidates):
    """The allocations of a setup at the micro-batch sizes that were measured."""

    def __init__(self, decoder: ScoreDecoder) -> None:
        super().__init__(decoder, min(MOST_STAGES, decoder.measured.layers, decoder.problem.cluster.devices))
        self.sizes = decoder.sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A plan in Sailor's form with what the two estimates say of it."""

    form: Mapping[str, Any]
    score_s: float
    estimate_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundForm:
    """Outcome of a search."""

    best: Choice
    """Of the best score; of several, the one with the best estimate."""
    balanced: Choice
    """Of the best met, the one with the least product of the two: one percent of either is worth one of the other."""
    evaluations: int
    seconds: float
    cpu_s: float


def find_form(
    decoder: ScoreDecoder, rng: np.random.Generator, evaluations: int = EVALUATIONS
) -> FoundForm | Infeasible:
    """Search for the plan with the best score.

    Sequences of worker kinds (each stage of one type and degree), the best of them by region, then polygon's memetic
    search; last, polygon's estimate of the best allocations met.
    """
    if not decoder.sizes:
        # No micro-batch size that divides the batch was measured on these devices.
        return Infeasible(reason=Message("reason.no_allocation"))
    candidates = ScoreCandidates(decoder)
    rows = candidates.space.groups
    candidates.evaluate(next(kind_sequences(decoder, rows, candidates.sizes)))  # compiles, or loads what was compiled
    began, cpu_began = time.perf_counter(), time.process_time()
    starts = list(kind_sequences(decoder, rows, candidates.sizes))
    likely = _best(decoder, [*starts, *_runs_of_regions(decoder, [x for x in starts if not x.workers[2:].any()])], 200)
    likely += [replace(x, workers=_one_after_another(decoder, x.workers)) for x in likely[:32]]
    values = [candidates.evaluate(x) for x in likely]
    order = [i for i in np.argsort(values, kind="stable")[:12] if math.isfinite(values[i])]
    result = Genetic().solve(candidates, rng, MaxEvaluations(evaluations), start=[likely[i] for i in order])
    if result.solution is None or not math.isfinite(result.value):
        # Memory is as Sailor counts it.
        return Infeasible(reason=Message("reason.no_memory"))
    best, balanced = choose(decoder, [result.solution, *candidates.elite[: FINALISTS - 1]])
    return FoundForm(
        best=best,
        balanced=balanced,
        evaluations=len(starts) + len(likely) + result.evaluations,
        seconds=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
    )


def choose(decoder: ScoreDecoder, finalists: list[Allocation]) -> tuple[Choice, Choice]:
    """The best score (ties by estimate), and the least product of score and estimate."""
    forms = [decoder.form(x) for x in finalists]
    choices = [Choice(form=form, score_s=value, estimate_s=decoder.estimate_s(form)) for value, form in forms]
    best = min(choices, key=lambda choice: (round(choice.score_s, 9), choice.estimate_s))
    balanced = min(choices, key=lambda choice: choice.score_s * choice.estimate_s)
    return best, balanced if math.isfinite(balanced.estimate_s) else best


def _best(decoder: ScoreDecoder, allocations: list[Allocation], count: int) -> list[Allocation]:
    """The best few by score."""
    values = [decoder.value(x) for x in allocations]
    return [allocations[i] for i in np.argsort(values, kind="stable")[:count]]


def _runs_of_regions(decoder: ScoreDecoder, allocations: list[Allocation]) -> Iterator[Allocation]:
    """The same in every run of regions, along the walk through them, alone."""
    zones = list(dict.fromkeys(zone for zone, _ in decoder.order))
    for first, last in itertools.combinations(range(len(zones) + 1), 2):
        if last - first < len(zones):
            kept = np.array([kind[0] in zones[first:last] for kind in decoder.kinds])
            for x in allocations:
                yield replace(x, workers=x.workers * kept)


def _one_after_another(decoder: ScoreDecoder, workers: np.ndarray) -> np.ndarray:
    """As many workers of each type and degree in each stage, dealt out stage by stage along the walk through regions.

    A stage's workers, and so its reduction, are then in as few regions as possible.
    """
    zones = list(dict.fromkeys(zone for zone, _ in decoder.order))
    pools = decoder.problem.cluster.pools
    used = {decoder.kinds[c][0] for c in np.flatnonzero(workers.any(axis=0))}
    inside = [c for c, kind in enumerate(decoder.kinds) if kind[0] in used]
    along = sorted(inside, key=lambda c: zones.index(decoder.kinds[c][0]))
    free = [int(pool.devices) for pool in pools]
    result = np.zeros_like(workers)
    for s, row in enumerate(workers):
        wanted: dict[tuple[str, int], int] = {}
        for c, count in enumerate(row.tolist()):
            wanted[decoder.kinds[c][1:]] = wanted.get(decoder.kinds[c][1:], 0) + count
        for c in along:
            pool, tp = decoder.classes[c]
            taken = min(wanted[decoder.kinds[c][1:]], free[pool] // tp)
            result[s, c] = taken
            free[pool] -= taken * tp
            wanted[decoder.kinds[c][1:]] -= taken
    return result
