"""Why this plan: clearly different plans, ideas that were rejected and what they cost, naive plans.

Every idea becomes a plan that goes through the same estimate and the same checker as the plan itself; what cannot be
run says why. Ideas are worked out with short searches, so a longer search might make one of them better. Of the plans
of an idea that is taken which is best in what the plan was made for: time, money or energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, permutations

import numpy as np

from polygon.cost.convergence import allowed, at_parity
from polygon.cost.money import Bill
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import PARITY_LEVELS, Constraints, Plan, Problem, Stage
from polygon.planning.candidates import Candidates
from polygon.planning.decode import Allocation, Decoder, carried_over, most_stages
from polygon.planning.initial_solutions import region_walks
from polygon.planning.naive_plans import NaivePlans, memory_variants, variant
from polygon.planning.nearby import (
    Outcome,
    allocation_of,
    best_of,
    better_of,
    checked,
    search_around,
    with_idle,
)
from polygon.planning.objectives import ENERGY, MEASURES, STEP_TIME, Objective
from polygon.planning.polish import fitted, with_wide_spans
from polygon.planning.search_engine import Effort, find_plan

SHORT = Effort(fluid_evaluations=1_000, exact_evaluations=20, patience=400)
"""Of the search behind an idea."""

WATT_HOUR_J = 3600

MOST_REGIONS = 8
"""Regions that are tried alone and left out, those with most compute first."""
MOST_POOLS = 12
"""Pools with idle devices that are tried."""
MOST_ORDERED = 4
"""Regions whose every order is tried as a chain of stages."""
VARIED = frozenset(
    f"idea.{name}"
    for name in (
        "plain_3d",
        "data_parallel",
        "tensor_parallel",
        "pipeline",
        "stage_per_region",
        "gpipe",
        "one_f_one_b",
        "no_recomputation",
        "no_sharding",
    )
)
"""Ideas that leave much open: the variant taken, the best of many, is said with them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alternative:
    """Another way to do it."""

    idea: Message
    naive: bool
    """Whether it is what one would try without a planner."""
    bill: Bill | None
    """None where it cannot be run."""
    reason: Message | None = None
    """Why it cannot be run."""
    plan: Plan | None = None


Idea = tuple[Message, bool, Callable[[], Outcome]]
"""What it is, whether it is naive, and how to work it out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """Answers to: why not otherwise?"""

    alternatives: tuple[Alternative, ...]
    different: tuple[Alternative, ...]
    """The best plans that use other regions or another number of stages, best first."""
    left_out: tuple[Message, ...]
    """Ideas for which there was no time."""


class Explainer:
    """Works out alternatives to one plan of a problem."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        tables: CostTables | None = None,
        *,
        objective: Objective = STEP_TIME,
        seed: int = 0,
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.measure = MEASURES[objective.name]
        self.tables = tables or CostTables(problem)
        self.decoder = Decoder(problem, tables=self.tables, objective=self.measure)
        self.bill = self.decoder.bill(plan)
        self.naive = NaivePlans(self.decoder)
        self.seed = seed
        found = allocation_of(self.decoder, plan)
        self.allocation = carried_over(found, self.decoder, self.decoder)

    def explain(
        self,
        *,
        count: int = 4,
        seconds_left: Callable[[], float] = lambda: math.inf,
        tell: Callable[[Message, float], None] = lambda idea, part: None,
    ) -> Explanation:
        """Work out all ideas, and the `count` best clearly different plans.

        Parameters
        ----------
        seconds_left : callable
            No further idea is begun when this falls to 0.
        """
        ideas = list(self.ideas())
        alternatives: list[Alternative] = []
        left_out = []
        for i, (idea, naive, work) in enumerate(ideas):
            if seconds_left() <= 0:
                left_out.append(idea)
                continue
            tell(idea, i / (len(ideas) + 1))
            outcome = work()
            if idea.kind in VARIED and outcome.plan is not None:
                idea = Message("idea.at_best", idea=idea, variant=variant(outcome.plan))
            alternatives.append(
                Alternative(idea=idea, naive=naive, bill=outcome.bill, reason=outcome.reason, plan=outcome.plan)
            )
        different: tuple[Alternative, ...] = ()
        if seconds_left() > 0:
            tell(Message("phase.different_plans"), len(ideas) / (len(ideas) + 1))
            different = self.different_plans(count, alternatives)
        return Explanation(alternatives=tuple(alternatives), different=different, left_out=tuple(left_out))

    def ideas(self) -> Iterator[Idea]:
        """Everything worth asking about, naive plans first."""
        yield from self._regions()
        yield from self._types()
        yield from self._naive()
        yield from self._idle()
        yield from self._structure()
        yield from self._options()

    # -- which devices -------------------------------------------------------------------------------------------------

    def _regions(self) -> Iterator[Idea]:
        cluster = self.problem.cluster
        power = np.zeros(len(cluster.regions))
        for pool in cluster.pools:
            if self.problem.may_use(pool):
                power[pool.region] += pool.devices * pool.device.peak_flops(self.problem.batch.precision)
        names = [region.name for region in cluster.regions]
        order = [int(r) for r in np.argsort(-power, kind="stable")[:MOST_REGIONS] if power[r] > 0]
        if len(order) < 2:
            return
        used = {cluster.pools[w.pool].region for stage in self.plan.stages for w in stage.workers}
        for r in order:
            others = tuple(name for name in names if name != names[r])
            if used != {r}:
                yield Message("idea.only_region", region=names[r]), True, self._searched(forbidden_regions=others)
        for r in order:
            if r in used and len(used) > 1:
                forbidden = (*self.problem.constraints.forbidden_regions, names[r])
                yield (
                    Message("idea.without_region", region=names[r]),
                    False,
                    self._searched(forbidden_regions=forbidden),
                )

    def _types(self) -> Iterator[Idea]:
        types = sorted({pool.device.name for pool in self.problem.cluster.pools if self.problem.may_use(pool)})
        pools = self.problem.cluster.pools
        used = {pools[w.pool].device.name for stage in self.plan.stages for w in stage.workers}
        if len(types) > 1:
            for name in types:
                if used == {name}:
                    continue
                others = tuple(other for other in types if other != name)
                others += self.problem.constraints.forbidden_devices
                yield Message("idea.only_device", device=name), True, self._searched(forbidden_devices=others)

    def _idle(self) -> Iterator[Idea]:
        cluster = self.problem.cluster
        used = self.plan.devices_of_pools
        precision = self.problem.batch.precision
        idle = [(pool, pool.devices - used[pool.index]) for pool in cluster.pools if self.problem.may_use(pool)]
        idle.sort(key=lambda entry: -entry[0].device.peak_flops(precision) * entry[1])
        for pool, count in idle[:MOST_POOLS]:
            if count > 0:
                region = cluster.regions[pool.region].name
                idea = Message("idea.idle_too", count=count, device=pool.device.name, region=region)
                yield idea, False, partial(self._best, with_idle(self.decoder, self.allocation, pool.index, count))

    # -- what one would do without a planner ---------------------------------------------------------------------------

    def _naive(self) -> Iterator[Idea]:
        cluster = self.problem.cluster
        widest = max(pool.devices_per_node for pool in cluster.pools)
        yield Message("idea.plain_3d"), True, partial(self._uniform, widest)
        yield Message("idea.data_parallel"), True, self._data_parallel
        if widest > 1:
            yield Message("idea.tensor_parallel"), True, partial(self._whole_nodes, widest)
        if cluster.devices > 1:
            yield Message("idea.pipeline"), True, self._pipeline
        if len(cluster.regions) > 1:
            in_order = (x for size in self._sizes() for x in self._stage_per_region(size))
            yield Message("idea.stage_per_region"), True, partial(self._best, in_order, self._in_as_many_stages)
        yield Message("idea.random"), True, self._random

    def _sizes(self) -> tuple[int, ...]:
        return self.tables.micro_batch_sizes

    def _data_parallel(self) -> Outcome:
        """All devices in one stage: shares by speed, or equal ones."""
        by_speed = self._best((x for size in self._sizes() for x in self._one_stage(size)), self._on_all)
        return self._better_of(by_speed, self.naive.best("one stage", lambda row: row["pp"] == 1))

    def _whole_nodes(self, widest: int) -> Outcome:
        """A worker a node: nodes of any widths with shares by speed, or equal ones with equal shares."""
        equal = self.naive.best("whole nodes", lambda row: row["tp"] == widest and row["pp"] == 1)
        if max(tp for _, tp in self.decoder.classes) == 1:  # the program, or the model, has no tensor parallelism
            return equal
        nodes = (x for size in self._sizes() for x in islice(self._one_stage(size, from_widest=True), 1))
        return self._better_of(self._best(nodes, self._on_all), equal)

    def _on_all(self, plan: Plan, x: Allocation) -> bool:
        """Whether a plan is on all devices of its allocation."""
        degrees = np.array([tp for _, tp in self.decoder.classes])
        return plan.devices_of_pools.total() == int((x.workers @ degrees).sum())

    def _in_as_many_stages(self, plan: Plan, x: Allocation) -> bool:
        """Whether a plan has the stages of its allocation; a program may need more, of equal width."""
        return plan.groups >= int(x.workers.any(axis=1).sum())

    def _pipeline(self) -> Outcome:
        return self.naive.best("pipeline", lambda row: row["tp"] == 1 and row["pp"] > 1)

    def _uniform(self, widest: int) -> Outcome:
        """Any uniform split: those of the narrower ideas are among them."""
        best = self._better_of(self.naive.best("any", lambda row: True), self._pipeline())
        equal = len(self.problem.cluster.pools) == 1
        return self._better_of(best, self._data_parallel() if equal else self._whole_nodes(widest))

    def _columns(self, tp: int) -> dict[int, int]:
        """For every pool its class of the largest degree up to `tp`."""
        column: dict[int, int] = {}
        for c, (p, t) in enumerate(self.decoder.classes):
            if t <= tp and (p not in column or t > self.decoder.classes[column[p]][1]):
                column[p] = c
        return column

    def _one_stage(self, size: int, *, from_widest: bool = False) -> Iterator[Allocation]:
        """As many of all workers as there are micro-batches; none where smaller ones would leave fewer out."""
        for x in self._everything_in_one_stage(size, from_widest=from_widest):
            if size > min(self._sizes()) and x.workers[0].sum() > self.problem.batch.global_batch // size:
                continue
            row = self._at_most(x.workers[0], self.problem.batch.global_batch // size)
            yield replace(x, workers=row * (np.arange(len(x.workers)) == 0)[:, None])

    def _everything_in_one_stage(self, size: int, *, from_widest: bool = False) -> Iterator[Allocation]:
        """For every degree, the least first or the widest, in each pool the widest workers up to it."""
        pools = self.problem.cluster.pools
        for tp in sorted({t for _, t in self.decoder.classes}, reverse=from_widest):
            workers = np.zeros_like(self.allocation.workers)
            for p, c in self._columns(tp).items():
                workers[0, c] = pools[p].devices // self.decoder.classes[c][1]
            yield Allocation(workers=workers, micro_batch_size=size)

    def _stage_per_region(self, size: int) -> Iterator[Allocation]:
        """In every order of few regions, else along walks through close ones; none where there may not be as many."""
        pools = self.problem.cluster.pools
        regions = sorted({pools[p].region for p, _ in self.decoder.classes})
        if len(regions) > most_stages(self.problem):
            return
        orders: Iterable[Sequence[int]] = permutations(regions)
        if len(regions) > MOST_ORDERED:
            walks = ([r for r in walk if r in regions] for walk in region_walks(self.decoder))
            orders = [order for walk in walks for order in (walk, walk[::-1])]
        orders = list(orders)
        for x in self._everything_in_one_stage(size):
            for order in orders:
                workers = np.zeros_like(x.workers)
                for s, r in enumerate(order[: len(workers)]):
                    here = np.array([pools[p].region == r for p, _ in self.decoder.classes])
                    workers[s] = self._at_most(np.where(here, x.workers[0], 0), self.problem.batch.global_batch // size)
                yield replace(x, workers=workers)

    def _at_most(self, row: np.ndarray, micro_batches: int) -> np.ndarray:
        """No more workers of a stage than there are micro-batches: those of the largest pools."""
        left, kept = micro_batches, np.zeros_like(row)
        for c in np.argsort(-row, kind="stable").tolist():
            kept[c] = min(row[c], left)
            left -= kept[c]
        return kept

    def _random(self) -> Outcome:
        """The median of random allocations that can be run."""
        rng = np.random.default_rng(self.seed)
        candidates = Candidates(self.decoder, min(8, most_stages(self.problem)))
        outcomes: list[tuple[float, int, Outcome]] = []
        for _ in range(60):
            x = candidates.random(rng)
            if math.isfinite(self.decoder.fluid_s(x)[0]):
                outcome = checked(self.problem, self.decoder.decode(x), self.tables, self.decoder)
                if outcome.bill is not None:
                    outcomes.append((self.measure.value(outcome.bill), len(outcomes), outcome))
            if len(outcomes) == 15:
                break
        if not outcomes:
            return Outcome(reason=Message("reason.no_random"))
        return sorted(outcomes, key=lambda entry: entry[:2])[len(outcomes) // 2][2]

    # -- another structure ---------------------------------------------------------------------------------------------

    def _structure(self) -> Iterator[Idea]:
        rows = [row for row in self.allocation.workers if row.any()]
        if len(rows) < most_stages(self.problem):
            yield Message("idea.stage_more"), False, partial(self._best, self._split(rows))
        if len(rows) > 1:
            yield Message("idea.stage_less"), False, partial(self._merged, rows)
        sizes = self._sizes()
        for factor, idea in ((2, Message("idea.larger_micro_batches")), (0.5, Message("idea.smaller_micro_batches"))):
            size = self.allocation.micro_batch_size * factor
            if size in sizes:
                x = replace(self.allocation, micro_batch_size=int(size))
                yield idea, False, partial(self._best, [x])

    def _best(
        self, allocations: Iterable[Allocation], wanted: Callable[[Plan, Allocation], bool] = lambda plan, x: True
    ) -> Outcome:
        return best_of(self.decoder, list(allocations), tries=5, wanted=wanted, measure=self.measure)

    def _better_of(self, a: Outcome, b: Outcome) -> Outcome:
        return better_of(a, b, self.measure)

    def _stacked(self, rows: Sequence[np.ndarray]) -> Allocation:
        workers = np.zeros_like(self.allocation.workers)
        workers[: len(rows)] = rows
        return replace(self.allocation, workers=workers)

    def _split(self, rows: list[np.ndarray]) -> Iterator[Allocation]:
        """Every stage in two, each class halved or whole classes apart."""
        for s, row in enumerate(rows):
            used = np.flatnonzero(row)
            parts = [row // 2, *(np.where(np.isin(np.arange(len(row)), used[:k]), row, 0) for k in range(1, len(used)))]
            for part in parts:
                if part.any() and (row - part).any():
                    yield self._stacked([*rows[:s], part, row - part, *rows[s + 1 :]])

    def _merged(self, rows: list[np.ndarray]) -> Outcome:
        """Two neighbours as one, and a short search among plans with at most as many stages."""
        merged = [self._stacked([*rows[:s], rows[s] + rows[s + 1], *rows[s + 2 :]]) for s in range(len(rows) - 1)]
        fewer = replace(self.problem, constraints=replace(self.problem.constraints, most_stages=len(rows) - 1))
        decoder = Decoder(fewer, tables=self.tables.for_problem(fewer), objective=self.measure)
        starts = sorted((carried_over(x, self.decoder, decoder) for x in merged), key=lambda x: decoder.fluid_s(x)[0])
        return search_around(decoder, starts[:3], evaluations=6, seed=self.seed)

    # -- other options of the same plan --------------------------------------------------------------------------------

    def _options(self) -> Iterator[Idea]:
        plan = self.plan
        packed = [
            use for use in plan.links if {use.activations, use.activation_gradients, use.weight_gradients} != {"none"}
        ]
        if packed:
            bare = tuple(
                replace(use, activations="none", activation_gradients="none", weight_gradients="none")
                for use in plan.links
            )
            yield Message("idea.no_compression"), False, self._best_memory(links=bare)
        if plan.local_steps > 1:
            yield Message("idea.no_local_steps"), False, self._changed(local_steps=1)
        for level in PARITY_LEVELS[PARITY_LEVELS.index(self.problem.constraints.parity) + 1 :]:
            if allowed(self.problem, level) != allowed(self.problem):
                yield Message("idea.parity", level=level), False, partial(self._with_parity, level)
        if len(plan.stages) > 1:
            every = plan.micro_batches
            if plan.order is not None or any(span < every for row in plan.spans for span in row):
                gpipe = tuple((every,) * len(row) for row in plan.spans)
                yield Message("idea.gpipe"), True, self._best_memory(spans=gpipe, order=None)
            plain = tuple((stage.width,) * stage.width for stage in plan.stages)
            if plan.order is not None or plain != plan.spans:
                yield Message("idea.one_f_one_b"), True, self._best_memory(spans=plain, order=None)
        if any(stage.recompute != "none" for stage in plan.stages):
            keeps = lambda stage: stage.recompute == "none"  # noqa: E731
            yield Message("idea.no_recomputation"), False, self._best_memory(keeps)
        if any(stage.zero for stage in plan.stages):
            whole = lambda stage: stage.zero == 0  # noqa: E731
            yield Message("idea.no_sharding"), False, self._best_memory(whole)

    def _with_parity(self, level: str) -> Outcome:
        """The plan's allocation under another level of parity: what it would save, and that it is not allowed."""
        problem = at_parity(self.problem, level)
        decoder = Decoder(problem, tables=self.tables.for_problem(problem), objective=self.measure)
        outcome = best_of(decoder, [carried_over(self.allocation, self.decoder, decoder)], measure=self.measure)
        if outcome.bill is None or outcome.plan is None:
            return Outcome(reason=outcome.reason)
        more = self.measure.value(outcome.bill) - self.measure.value(self.bill)
        said = Message(f"more.{self.measure.name}", value=more / WATT_HOUR_J if self.measure is ENERGY else more)
        at, steps = self.problem.constraints.parity, outcome.plan.local_steps
        if steps > 1:
            return Outcome(reason=Message("reason.local_steps_at_parity", level=at, more=said, local_steps=steps))
        return Outcome(reason=Message("reason.at_parity", level=at, more=said))

    def _changed(self, **fields: object) -> Callable[[], Outcome]:
        changed = replace(self.plan, **fields)  # type: ignore[arg-type]
        return lambda: checked(self.problem, changed, self.tables, self.decoder)

    def _best_memory(
        self, wanted: Callable[[Stage], bool] = lambda stage: True, **fields: object
    ) -> Callable[[], Outcome]:
        """The changed plan under the best of the memory options whose stages are all as wanted."""
        changed = replace(self.plan, **fields)  # type: ignore[arg-type]

        def work() -> Outcome:
            best = Outcome(reason=Message("reason.no_such_plan"))
            reason: Message | None = None
            for plan in memory_variants(changed):
                if all(wanted(stage) for stage in plan.stages):
                    if "spans" not in fields:
                        plan = fitted(with_wide_spans(plan), self.tables) or plan
                    outcome = checked(self.problem, plan, self.tables, self.decoder)
                    reason = reason or outcome.reason
                    best = self._better_of(best, outcome)
            return best if best.bill is not None or reason is None else Outcome(reason=reason)

        return work

    def _searched(self, **limits: object) -> Callable[[], Outcome]:
        """A short search under further constraints."""

        def work() -> Outcome:
            constraints: Constraints = replace(self.problem.constraints, **limits)  # type: ignore[arg-type]
            narrower = replace(self.problem, constraints=constraints)
            tables = self.tables.for_problem(narrower)
            decoder = Decoder(narrower, tables=tables, objective=self.measure)
            known = [carried_over(self.allocation, self.decoder, decoder)] if decoder.classes else []
            known = [x for x in known if x.workers.any()]
            rng = np.random.default_rng(self.seed)
            found = find_plan(narrower, rng, effort=SHORT, tables=tables, objective=self.measure, known=known)
            if found.plan is None:
                return Outcome(reason=found.reason)
            return checked(self.problem, found.plan, self.tables, self.decoder)

        return work

    # -- clearly different plans ---------------------------------------------------------------------------------------

    def different_plans(self, count: int, others: Sequence[Alternative]) -> tuple[Alternative, ...]:
        """The best plans that differ in regions or number of stages, from a short search and from other ideas."""
        rng = np.random.default_rng(self.seed)
        found = find_plan(
            self.problem, rng, effort=SHORT, tables=self.tables, objective=self.measure, known=[self.allocation]
        )
        seen = {self.structure(self.plan)}
        candidates: list[tuple[float, int, Alternative]] = []
        for bill, x in found.bills[:200]:
            plan = self.decoder.decode(x, relax=False)
            if isinstance(plan, Plan) and self.structure(plan) not in seen:
                seen.add(self.structure(plan))
                candidates.append((self.measure.value(bill), len(candidates), self._described(plan)))
        for other in others:
            if other.plan is not None:
                assert other.bill is not None
                candidates.append((self.measure.value(other.bill), len(candidates), self._described(other.plan)))
        best: dict[object, Alternative] = {}
        for _, _, alternative in sorted(candidates, key=lambda entry: entry[:2]):
            assert alternative.plan is not None
            key = self.structure(alternative.plan)
            if alternative.bill is not None and key != self.structure(self.plan) and key not in best:
                best[key] = alternative
        return tuple(best.values())[:count]

    def structure(self, plan: Plan) -> tuple[tuple[str, ...], int]:
        """Regions used and number of stages: plans that differ in these are clearly different."""
        cluster = self.problem.cluster
        regions = {cluster.pools[w.pool].region for stage in plan.stages for w in stage.workers}
        return tuple(cluster.regions[r].name for r in sorted(regions)), len(plan.stages)

    def _described(self, plan: Plan) -> Alternative:
        regions, stages = self.structure(plan)
        idea = Message("idea.structure", stages=stages, devices=plan.world_size, regions=regions)
        outcome = checked(self.problem, plan, self.tables, self.decoder)
        return Alternative(idea=idea, naive=False, bill=outcome.bill, reason=outcome.reason, plan=outcome.plan)
