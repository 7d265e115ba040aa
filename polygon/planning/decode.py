"""From an allocation to a complete plan: everything that follows from who serves which stage.

An allocation says how many workers of each class (pool and tensor-parallel degree) serve each stage, and the
micro-batch size. Decode adds the layer split, recomputation and ZeRO (`polygon.planning.layer_split`), devices,
shares and routes (`polygon.planning.routing`), the windows of the schedule, and the packing of every link.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b

import numpy as np

from polygon.cost.convergence import Allowed, allowed
from polygon.cost.estimate import worker_memory
from polygon.cost.money import Bill, priced, step_bill
from polygon.cost.step_times import StepTimes, group_work, step_times
from polygon.cost.tables import CostTables, context_degrees, powers_of_two, widest_pool
from polygon.cost.transfers import Placement
from polygon.domain.message import Message
from polygon.domain.plan import PARITY_LEVELS, RECOMPUTE, LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.runnable import Runnable, is_run, runnable
from polygon.planning.checker import broken_rules, violations
from polygon.planning.device_assignment import deal_devices, dealt_as
from polygon.planning.flow import lock_shares
from polygon.planning.fluid import (
    BEST,
    CUTS,
    FIRST,
    FITS,
    NEVER_ENDS,
    NO_LINK,
    NO_MEMORY,
    REASONS,
    fluid_step_s,
)
from polygon.planning.fluid_work import FluidWork, work_for
from polygon.planning.link_compression import (
    activation_modes,
    alone_on_nodes,
    gradient_mode,
    pays_inside,
    settled,
    summing_inside,
    without_inside,
)
from polygon.planning.objectives import STEP_TIME, FluidBills, Objective, is_step_time, value_of
from polygon.planning.polish import in_chunks
from polygon.planning.problem_arrays import Bank, Setting, build_bank, splits_sequence, worker_classes
from polygon.planning.routing import build_routes
from polygon.planning.stage_rules import StageRules
from polygon.planning.sum_trees import legal, with_quick_sums
from polygon.planning.uniform_plans import compute_s, fitting, uniform_drafts, variants
from polygon.planning.warmup_depths import Pacing

SOCKET_WINDOW_BYTES = 4 * 2**20
"""Largest TCP send buffer of a Linux host as it comes (net.ipv4.tcp_wmem)."""
WINDOW_USE = 0.82
"""Part of window / round trip that one TCP stream was measured to reach at 80 ms."""
MAX_STREAMS = 16
FILLING = 0.01
"""Part of a pipeline's computing in which it fills and empties, above which chunks are looked at."""
MOST_VALUES = 200_000
"""Fluid values that are kept of a problem; then all are dropped."""
HOPELESS = 1.1
"""Factor over the fluid value of the best cut of the layers from which on another is not simulated."""
NEARLY = 1.01
"""Of several numbers of local steps, the fewest within this factor of the best are taken."""


MAX_STAGES = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """Tensor-parallel groups of each class in each stage, and how they work.

    Parameters
    ----------
    workers : ndarray of int64, shape (stages, classes)
        Columns as in the decoder's `classes`; empty rows are skipped. A worker takes `cp` of a class's groups; what is
        no whole `unit` is left out.
    micro_batch_size, cp, ep : int
        See `Setting`.
    """

    workers: np.ndarray
    micro_batch_size: int
    cp: int = 1
    ep: int = 1

    def with_workers(self, workers: np.ndarray) -> Allocation:
        """Others that work in the same way."""
        return Allocation(workers=workers, micro_batch_size=self.micro_batch_size, cp=self.cp, ep=self.ep)

    @property
    def unit(self) -> int:
        """As `Setting.unit`."""
        return self.setting.unit

    @cached_property
    def setting(self) -> Setting:
        """How the workers work."""
        return Setting(self.micro_batch_size, self.cp, self.ep)

    @cached_property
    def stages(self) -> np.ndarray:
        """The rows that are stages."""
        found: np.ndarray = self.workers[self.workers.any(axis=1)]
        return found

    @cached_property
    def key(self) -> bytes:
        """Equal for allocations whose stages and setting are: a digest, as matrices of large clusters are long."""
        how = f"{self.micro_batch_size} {self.cp} {self.ep} {len(self.stages)} ".encode()
        counts = self.stages.ravel()
        (places,) = counts.nonzero()
        return blake2b(how + places.tobytes() + counts[places].tobytes(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Infeasible:
    """Why an allocation, or a whole problem, has no plan."""

    reason: Message


class Decoder:
    """Decodes allocations of one problem; holds its cost tables and arrays."""

    def __init__(
        self,
        problem: Problem,
        *,
        tensor_limit: int | None = None,
        tables: CostTables | None = None,
        objective: Objective = STEP_TIME,
    ) -> None:
        self.problem = problem
        self.objective = objective
        self.tables = tables or CostTables(problem)
        self.classes = worker_classes(self.tables, tensor_limit)
        self.degrees = parallel_degrees(problem)
        """Context- and expert-parallel degrees that the search may choose."""
        self.runs = runnable(problem)
        """What the problem's program runs; None: every plan."""
        self.columns: dict[int, list[tuple[int, int]]] = {}
        """The classes of every pool, and their tensor-parallel degrees."""
        self.widest_class = lru_cache(maxsize=None)(self._widest_class)
        for c, (pool, tp) in enumerate(self.classes):
            self.columns.setdefault(pool, []).append((c, tp))
        if self.classes:
            self.may = allowed(problem)
            self._chain = nested(problem)
            self.rules = StageRules(problem, np.array([problem.cluster.pools[p].region for p, _ in self.classes]))
            self._bills = FluidBills(problem, self.classes)
            self._bank = lru_cache(maxsize=None)(self._build_bank)
            self._banks: dict[Setting, Bank] = {}
            self._packings = lru_cache(maxsize=None)(self._pays)
            self._work = lru_cache(maxsize=None)(self._room)
            of = (problem, objective)
            known = self.tables.fluid_values.get(of, tensor_limit)
            self._values = self.tables.fluid_values.put({}, of, tensor_limit) if known is None else known

    def _widest_class(self, pool: int, most: int) -> tuple[int, int] | None:
        """The class of a pool with the largest tensor-parallel degree up to `most`, and this degree; None if none."""
        return max((pair for pair in self.columns.get(pool, ()) if pair[1] <= most), key=lambda p: p[1], default=None)

    def _build_bank(self, setting: Setting, may: Allowed) -> Bank:
        return build_bank(self.tables, self.classes, setting, may)

    def _room(self, rows: int) -> FluidWork:
        return work_for(self.bank(Setting(self.tables.micro_batch_sizes[0])), rows)

    def bank(self, setting: Setting) -> Bank:
        """Arrays of the problem under a setting."""
        found = self._banks.get(setting)
        if found is None:
            found = self._banks[setting] = self._bank(setting, self.may)
        return found

    def banks(self, setting: Setting) -> list[Bank]:
        """As `bank`, for all packings that `decode` tries: those of every level of parity, the problem's own last."""
        return [self._bank(setting, may) for may in self._chain]

    def warm_up(self) -> None:
        """Have the kernels compiled (or loaded), so that time limits count searching alone."""
        x = np.zeros((1, len(self.classes)), dtype=np.int64)
        x[0, 0] = 1
        self.fluid_s(Allocation(workers=x, micro_batch_size=self.tables.micro_batch_sizes[0]))

    def fluid_s(self, allocation: Allocation) -> tuple[float, int]:
        """Fluid step time [s], and why it is inf (`polygon.planning.fluid`)."""
        allocation = self.legal(allocation)
        rows = allocation.workers.shape[0]
        bank = self.bank(allocation.setting)
        return fluid_step_s(bank, allocation.workers, *_out(rows), self._work(rows), BEST)

    def left_over(self, allocation: Allocation) -> float:
        """Layers of an allocation that memory has no room for, 0 if it holds all; inf where it is no plan otherwise."""
        allocation = self.legal(allocation)
        rows = allocation.workers.shape[0]
        bounds, options, out = _out(rows)
        work = self._work(rows)
        value, why = fluid_step_s(self.bank(allocation.setting), allocation.workers, bounds, options, out, work, FIRST)
        if why == NO_MEMORY:
            return float(out[1])
        return 0.0 if math.isfinite(value) else math.inf

    @property
    def by_time(self) -> bool:
        """Whether the search minimises the time of the step and nothing else."""
        return is_step_time(self.problem, self.objective)

    def legal(self, allocation: Allocation) -> Allocation:
        """The allocation in whole units, and without the workers that the constraints keep out of their stages.

        Units first: a stage of less than one falls away, and the rules are about the stages that are left.
        """
        if (unit := allocation.unit) > 1:
            allocation = allocation.with_workers(allocation.workers // unit * unit)
        return allocation.with_workers(self.rules.legal(allocation.workers)) if self.rules else allocation

    def value(self, allocation: Allocation) -> float:
        """What the search minimises (`polygon.planning.objectives`), by the fluid step time.

        Random moves lead to the same allocations again and again, and so do searches of one problem: values are kept.
        """
        value = self._values.get(allocation.key)
        if value is None:
            if self.by_time:
                value = self.fluid_s(allocation)[0]
            else:
                value = value_of(self.problem, self.objective, self.fluid_bill(allocation))
            if len(self._values) >= MOST_VALUES:
                self._values.clear()
            self._values[allocation.key] = value
        return value

    def fluid_bill(self, allocation: Allocation) -> Bill:
        """What an allocation's step costs, by the fluid step time."""
        allocation = self.legal(allocation)
        bank = self.bank(allocation.setting)
        bounds, options, out = _out(allocation.workers.shape[0])
        step_s, _ = fluid_step_s(bank, allocation.workers, bounds, options, out, self._work(len(bounds) - 1), BEST)
        if not math.isfinite(step_s):
            return priced(self.problem, step_s, 0.0, 0.0, np.zeros(len(self.problem.cluster.regions)))
        return self._bills.bill(bank, allocation.workers, bounds, options, out, step_s)

    def bill(self, plan: Plan) -> Bill:
        """Exact time, money, energy and egress of a plan's step."""
        return step_bill(self.problem, plan, self.step_times(plan))

    def plan_value(self, plan: Plan) -> float:
        """What the search minimises, exactly."""
        return value_of(self.problem, self.objective, self.bill(plan))

    def decode(
        self,
        allocation: Allocation,
        *,
        relax: bool = True,
        cuts: tuple[int, ...] = CUTS,
        known_s: float = math.inf,
    ) -> Plan | Infeasible:
        """The plan of an allocation.

        Windows are first set so that messages can hide, and shrunk to what memory holds. Links get what is quickest for
        a message alone; regions that hold whole pipelines take local steps where that is allowed and saves time.

        Parameters
        ----------
        relax : bool
            Whether to settle packings by exact simulation, and to try what gentler levels of parity allow too: then no
            plan is worse than under fewer packings and local steps.
        cuts : tuple of int
            Ways to cut the layers (`polygon.planning.fluid`), of which the better is taken when simulated.
        known_s : float
            Without `relax`: the step of the best plan known (`Pacing.best`).
        """
        allocation = self.legal(allocation)
        if self.rules and not allocation.workers.any():
            return Infeasible(reason=Message("reason.no_devices_by_rules"))
        if self.runs is not None:
            return self._decode_uniform(allocation, self.runs, known_s if self.by_time and not relax else math.inf)
        if not relax:
            return self._decode(allocation, self.may, cuts, known_s)
        best: Plan | Infeasible = Infeasible(reason=NEVER_ENDS)
        value = math.inf
        for may in self._chain:
            plan = self._decode(allocation, may, cuts)
            if isinstance(plan, Plan):
                plan = self._settled(plan, may)
                found = self.plan_value(plan)
                if found < value:
                    best, value = plan, found
            elif not isinstance(best, Plan):
                best = plan
        return best

    def is_run(self, plan: Plan) -> bool:
        """Whether the problem's program runs a plan as it is."""
        return is_run(self.problem, plan)

    def settled(self, plan: Plan) -> Plan:
        """A plan, from wherever, with the allowed packings and local steps that make its value least."""
        if self.runs is not None:
            return plan
        options = [plan]
        for may in self._chain:
            options.append(
                self._settled(replace(plan, links=self._links(list(plan.stages), plan.micro_batch_size, may)), may)
            )
        return min(options, key=self.plan_value)

    def _settled(self, plan: Plan, may: Allowed) -> Plan:
        def fitting(candidate: Plan) -> Plan | None:
            # Packing owes what it drops, and where nodes send one another packed gradients ZeRO divides inside them
            # alone: both take memory.
            packs = candidate.links != plan.links and any(use.weight_gradients != "none" for use in candidate.links)
            if not packs or not self._over_memory(candidate).any():
                return candidate
            paced = Pacing(candidate, self.tables).best() if candidate.chunks == 1 else None
            return None if paced is None else paced[0]

        def value(candidate: Plan) -> float:
            fits = fitting(legal(candidate, self.problem))
            return math.inf if fits is None else self.plan_value(fits)

        found = legal(settled(self.tables, plan, may, value), self.problem)
        return self._with_local_steps(replace(fitting(found) or found, local_steps=1), may)

    def _decode(
        self, allocation: Allocation, may: Allowed, cuts: tuple[int, ...], known_s: float = math.inf
    ) -> Plan | Infeasible:
        """The plan of a legal allocation with the packings that are quickest for a message alone."""
        rows, bank = allocation.workers.shape[0], self._bank(allocation.setting, may)
        ways: list[tuple[float, tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        for cut in cuts:
            arrays = _out(rows)
            value, why = fluid_step_s(bank, allocation.workers, *arrays, self._work(rows), cut)
            if why == FITS and math.isfinite(value):
                ways.append((value, arrays))
            elif not ways and cut == cuts[0]:
                return Infeasible(reason=REASONS.get(why, NEVER_ENDS))
        least = min(value for value, _ in ways)
        found: list[Plan | Infeasible] = []
        for value, of in ways:
            if value <= HOPELESS * least:
                found.append(self._decode_cut(allocation, may, *of, known_s))
                # Another's first spans are looked at without local steps.
                if self.by_time and isinstance(found[-1], Plan) and found[-1].local_steps == 1:
                    known_s = min(known_s, self.plan_value(found[-1]))
        plans = [plan for plan in found if isinstance(plan, Plan)]
        return self._otherwise_divided(min(plans, key=self.plan_value)) if plans else found[0]

    def _otherwise_divided(self, plan: Plan) -> Plan:
        """The plan, or where one stage in several regions is all of it, that with ZeRO's level whose step is shortest:
        the relaxation knows nothing of regions that lead by turns (`Plan.gradient_everywhere`)."""
        stage, pools = plan.stages[0], self.problem.cluster.pools
        if len(plan.stages) > 1 or plan.local_steps > 1 or stage.ep > 1:
            return plan
        if len({pools[worker.pool].region for worker in stage.workers}) == 1:
            return plan
        best, value = plan, self.plan_value(plan)
        for zero in range(4):
            other = replace(plan, stages=(replace(stage, zero=zero, shards=0),))
            found = value if zero == stage.zero or self._over_memory(other).any() else self.plan_value(other)
            if found < value and not violations(self.problem, other, self.tables):
                best, value = other, found
        return best

    def _decode_cut(
        self,
        allocation: Allocation,
        may: Allowed,
        bounds: np.ndarray,
        options: np.ndarray,
        out: np.ndarray,
        known_s: float,
    ) -> Plan | Infeasible:
        """See `_decode`; the layers are cut as `polygon.planning.fluid` says."""
        stages = self._stages(allocation, bounds, options, int(out[0]))
        draft = self._route(stages, allocation.setting, may, locked=bool(out[1]))
        if isinstance(draft, Infeasible):
            return draft
        pacing = Pacing(draft, self.tables)
        quick = with_quick_sums(draft, self.tables, pacing.times)
        if quick is not draft:
            draft, pacing = quick, Pacing(quick, self.tables, beside=pacing)
        paced = pacing.best(known_s)
        packed = self._links(list(draft.stages), allocation.micro_batch_size, may, everywhere=True)
        if packed != draft.links:
            known_s = known_s if paced is None else min(known_s, paced[1].step_s)
            other = Pacing(legal(replace(draft, links=packed), self.problem), self.tables, beside=pacing).best(known_s)
            if other is not None and (paced is None or other[1].step_s < paced[1].step_s):
                paced = other
        # What packing owes takes memory, too.
        plain = replace(draft, links=tuple(replace(use, weight_gradients="none") for use in draft.links))
        for other_draft in (plain, self._dividing_ends_alike(plain)) if paced is None else ():
            if paced is None and other_draft is not None:
                paced = Pacing(other_draft, self.tables).best()
        if paced is None:
            draft = plain
            shortest = tuple((1,) * stage.width for stage in draft.stages)
            return Infeasible(reason=self.over_memory(replace(draft, spans=shortest)) or REASONS[NO_MEMORY])
        return self._with_local_steps(paced[0], may)

    def _decode_uniform(self, allocation: Allocation, runs: Runnable, known_s: float) -> Plan | Infeasible:
        """The best plan that the program runs on an allocation's devices, in the order of its stages.

        Of every tensor-parallel degree that it has: as many stages as it has, or as many as make all as wide as one of
        its own; all over the same number of workers, so that some devices may be left out. What takes `known_s` or more
        is not simulated.
        """
        best: Plan | Infeasible = Infeasible(reason=Message("reason.not_runnable", runtime=self.problem.runtime.name))
        value = math.inf

        def most_s() -> float:
            return min(value, known_s) if self.by_time else math.inf

        size, ep = allocation.micro_batch_size, allocation.ep
        for tp in dict.fromkeys(self.classes[c][1] for c in np.flatnonzero(allocation.workers.any(axis=0)).tolist()):
            rows = [tuple(workers) for workers in self._workers_at(allocation, tp) if workers]
            drafts = list(uniform_drafts(rows, size, ep, most_stages(self.problem), self.tables, runs)) if rows else []
            for floor_s, draft in sorted(drafts, key=lambda pair: pair[0]):
                if floor_s >= most_s():
                    break
                if broken_rules(self.problem, draft):
                    continue
                for may in self._chain:
                    linked = replace(draft, links=self._links(list(draft.stages), size, may))
                    for plan in fitting(linked, self.tables, runs, most_s):
                        found = self.plan_value(plan)
                        if found < value:
                            best, value = plan, found
        if not isinstance(best, Plan) or value >= known_s:
            return best
        others = [best, *variants(self.problem, best, best, self.tables, runs)]
        # Chunks shorten what the pipeline waits for while it fills and empties, at most.
        filling = (len(best.stages) - 1) / (best.micro_batches // best.stages[0].width + len(best.stages) - 1)
        pays = filling > FILLING and value - filling * compute_s(best, self.tables) < known_s
        if runs.chunks and pays and (chunked := in_chunks(best, self.tables, self.plan_value)) is not None:
            others.append(chunked)
        return min(others, key=self.plan_value)

    def _workers_at(self, allocation: Allocation, tp: int) -> list[list[Worker]]:
        """Workers of every stage on its devices at one tensor-parallel degree, of pools that have it."""
        rows = allocation.stages
        counts = np.zeros_like(rows)
        for columns in self.columns.values():
            target = next((c for c, own in columns if own == tp), None)
            if target is not None:
                devices = sum(rows[:, c] * own for c, own in columns)
                counts[:, target] = devices // (tp * allocation.cp) * allocation.cp
        return self._workers(counts // allocation.cp, allocation.cp)

    def _dividing_ends_alike(self, plan: Plan) -> Plan | None:
        """The plan with one ZeRO stage at both ends, by the lesser of which a weight is divided that both have."""
        first, *middle, last = plan.stages if len(plan.stages) > 1 else (plan.stages[0],) * 2
        zero = max(first.zero, last.zero)
        if not self.problem.model.tied_embeddings or first.zero == last.zero or not min(first.zero, last.zero):
            return None
        return replace(plan, stages=(replace(first, zero=zero), *middle, replace(last, zero=zero)))

    def _with_local_steps(self, plan: Plan, may: Allowed) -> Plan:
        """The plan with the fewest allowed local steps within 1 % of the best, or with none if they do not help."""
        more = [steps for steps in may.local_steps if steps > 1]
        if not more or not can_take_local_steps(self.problem, plan):
            return plan
        alone = replace(plan, links=without_inside(plan.links), local_steps=more[-1])
        if self._over_memory(alone).any():  # what is under way takes the room of the outer optimizer
            paced = Pacing(alone, self.tables).best()
            if paced is None:  # nor is there room beside what packing owes
                plain = tuple(replace(use, weight_gradients="none") for use in alone.links)
                paced = Pacing(replace(alone, links=plain), self.tables).best()
            if paced is None:
                return plan
            alone = paced[0]
        options = [plan, *(replace(alone, local_steps=steps) for steps in more)]
        values = [self.plan_value(option) for option in options]
        limit = min(values) * (NEARLY if min(values) > 0 else 1.0)
        return next(option for option, value in zip(options, values, strict=True) if value <= limit)

    def _stages(self, allocation: Allocation, bounds: np.ndarray, options: np.ndarray, count: int) -> list[Stage]:
        """Deal out devices, pool by pool (`polygon.planning.device_assignment`)."""
        cp = allocation.cp
        rows = allocation.workers // cp
        workers = self._workers(rows[rows.any(axis=1)], cp)
        return [
            self._stage(int(bounds[s]), int(bounds[s + 1]), tuple(workers[s]), options[:, s].tolist(), allocation.ep)
            for s in range(count)
        ]

    def _workers(self, rows: np.ndarray, cp: int) -> list[list[Worker]]:
        """Workers of cp groups each, so many of every class in every stage."""
        workers: list[list[Worker]] = [[] for _ in rows]
        tied = self.problem.model.tied_embeddings
        order = [dealt_as(place, len(rows), tied) for place in range(len(rows))]
        of_pool: dict[int, list[int]] = {}
        for c in np.flatnonzero(rows.any(axis=0)).tolist():
            of_pool.setdefault(self.classes[c][0], []).append(c)
        for p in sorted(of_pool):
            columns = sorted(of_pool[p], key=lambda c: -self.classes[c][1])
            pool = self.problem.cluster.pools[p]
            degrees = [self.classes[c][1] * cp for c in columns]
            dealt = deal_devices(rows[np.ix_(order, columns)], degrees, pool.devices, pool.devices_per_node)
            for s, devices in zip(order, dealt, strict=True):
                begins = [(pool.first_device + first, n) for first, n in devices]
                workers[s] += [Worker(pool=p, devices=tuple(range(a, a + n)), cp=cp) for a, n in begins]
        return workers

    def _stage(self, first: int, last: int, workers: tuple[Worker, ...], option: list[int], ep: int) -> Stage:
        """A stage of layers [first, last) under a memory option of `polygon.planning.layer_split`."""
        mode, zero, blocks = option
        whole = max(first, 1) + blocks >= last
        alike = Counter[tuple[int, int]]()
        for worker in workers:
            alike[worker.pool, worker.tp] += worker.cp
        return Stage(
            first_layer=first,
            last_layer=last,
            workers=workers,
            recompute=RECOMPUTE[mode] if blocks else "none",
            recompute_blocks=None if whole or not blocks else blocks,
            zero=zero if alike.total() > 1 else 0,
            sequence_parallel=any(splits_sequence(self.problem, worker.tp, worker.cp) for worker in workers),
            ep=math.gcd(ep, *alike.values()) if ep > 1 else 1,
        )

    def _route(
        self, stages: list[Stage], setting: Setting, may: Allowed, *, locked: bool, alike: bool = False
    ) -> Plan | Infeasible:
        """Shares and routes; workers left without a micro-batch are dropped.

        Who shares experts takes as many micro-batches as the others: where these do not divide, or devices differ, all
        of such a stage are dealt `alike`, on as many workers as divide them.
        """
        problem, micro_batch_size = self.problem, setting.micro_batch_size
        micro_batches = problem.batch.global_batch // micro_batch_size
        seconds, place = self._seconds(stages, micro_batch_size)
        if alike:
            kept = [_dividing(stage, own, micro_batches) for stage, own in zip(stages, seconds, strict=True)]
            if kept != stages:
                stages, (seconds, place) = kept, self._seconds(kept, micro_batch_size)
            seconds = [
                np.full_like(own, own.max()) if stage.ep > 1 else own
                for stage, own in zip(stages, seconds, strict=True)
            ]
        regions, nodes = ([of[place.members(s)] for s in range(len(stages))] for of in (place.region, place.node))
        share = None
        if locked:
            count = len(problem.cluster.regions)
            rates = [np.bincount(r, weights=1 / t, minlength=count) for r, t in zip(regions, seconds, strict=True)]
            share = np.zeros((len(rates), count))
            lock_shares(np.array(rates), len(rates), True, share)
        routes = build_routes(seconds, regions, self._message_s(setting, may), micro_batches, share, nodes)
        if routes is None:
            return Infeasible(reason=REASONS[NO_LINK])
        kept = []
        for s, stage in enumerate(stages):
            busy = np.unique(routes[:, s])
            if len(busy) < stage.width:
                routes[:, s] = np.searchsorted(busy, routes[:, s])
                stage = replace(stage, workers=tuple(stage.workers[w] for w in busy), ep=1)
            shares = np.bincount(routes[:, s], minlength=stage.width)
            if stage.ep > 1 and shares.min() < shares.max():
                if alike:
                    return Infeasible(reason=Message("reason.expert_shares"))
                return self._route(stages, setting, may, locked=locked, alike=True)
            kept.append(stage)
        return Plan(
            stages=tuple(kept),
            routes=routes,
            micro_batch_size=micro_batch_size,
            spans=tuple((micro_batches,) * stage.width for stage in kept),
            links=self._links(kept, micro_batch_size, may),
        )

    def _seconds(self, stages: list[Stage], micro_batch_size: int) -> tuple[list[np.ndarray], Placement]:
        """Forward and backward of a micro-batch on every worker, what is seen of ZeRO's traffic included; and where the
        workers are."""
        routes = np.zeros((1, len(stages)), dtype=np.int64)
        draft = Plan(stages=tuple(stages), routes=routes, micro_batch_size=micro_batch_size, spans=())
        place = self.tables.placement(draft)
        work = [group_work(draft, self.tables, place, s) for s in range(len(stages))]
        return [of.forward_s[0] + of.backward_s[0] for of in work], place

    def _message_s(self, setting: Setting, may: Allowed) -> np.ndarray:
        """Seconds of one message between regions; inf where there is no link."""
        cluster = self.problem.cluster
        with np.errstate(divide="ignore"):
            found: np.ndarray = cluster.latency_s + self._bank(setting, may).activation_wire / cluster.bytes_per_s
            return found

    def _pays(self, micro_batch_size: int, may: Allowed) -> tuple[np.ndarray, np.ndarray, str, np.ndarray]:
        """What is quickest for a message alone: activations down and up, weight gradients, and where inside regions."""
        gradients = gradient_mode(self.tables, may.weight_gradients)
        return (
            activation_modes(self.tables, micro_batch_size, may.activations),
            activation_modes(self.tables, micro_batch_size, may.activation_gradients),
            gradients,
            pays_inside(self.tables, gradients),
        )

    def _links(
        self, stages: list[Stage], micro_batch_size: int, may: Allowed, *, everywhere: bool = False
    ) -> tuple[LinkUse, ...]:
        """One entry for every ordered pair of regions between which the plan may send.

        Nodes send one another packed gradients where that pays, no stage adds up with other regions and ZeRO, if any,
        has something to divide by inside nodes; `everywhere`: where it pays.
        """
        cluster = self.problem.cluster
        down, up, gradients, inside = self._packings(micro_batch_size, may)
        places = [{cluster.pools[w.pool].region for w in stage.workers} for stage in stages]
        regions = sorted(set[int]().union(*places))
        summing = summing_inside(self.problem, stages) if inside.any() else []
        whole = [
            everywhere or (len(of) == 1 and not (stage.zero and alone_on_nodes(self.problem, stage)))
            for of, stage in zip(places, stages, strict=True)
        ]
        own = [r for r in summing if inside[r] and all(whole[s] for s, of in enumerate(places) if r in of)]
        within = tuple(
            LinkUse(
                source=r,
                target=r,
                activations=str(down[r, r]),
                activation_gradients=str(up[r, r]),
                weight_gradients=gradients if r in own else "none",
            )
            for r in regions
            if r in own or down[r, r] != "none" or up[r, r] != "none"
        )
        return within + tuple(
            LinkUse(
                source=a,
                target=b,
                activations=str(down[a, b]),
                activation_gradients=str(up[a, b]),
                weight_gradients=gradients,
                streams=useful_streams(float(cluster.latency_s[a, b]), float(cluster.bytes_per_s[a, b])),
            )
            for a in regions
            for b in regions
            if a != b and cluster.bytes_per_s[a, b] > 0
        )

    def _over_memory(self, plan: Plan) -> np.ndarray:
        """Which workers have too little memory, shape (workers,)."""
        place = self.tables.placement(plan)
        breakdowns = worker_memory(plan, self.tables, place)
        total = {id(memory): memory.total_bytes for memory in breakdowns}
        need = np.array([total[id(memory)] for memory in breakdowns])
        found: np.ndarray = need > self.tables.limit_bytes[place.pool]
        return found

    def over_memory(self, plan: Plan) -> Message | None:
        """Which worker of a plan has too little memory, and by how much; None if all fit."""
        place = self.tables.placement(plan)
        for i, memory in enumerate(worker_memory(plan, self.tables, place)):
            limit = float(self.tables.limit_bytes[place.pool[i]])
            if memory.total_bytes > limit:
                pool = self.problem.cluster.pools[place.pool[i]]
                return Message(
                    "reason.lacks_memory",
                    stage=int(place.stage[i]),
                    device=pool.device.name,
                    region=self.problem.cluster.regions[pool.region].name,
                    lacking_bytes=memory.total_bytes - limit,
                    owner=Message(f"memory.{memory.owner}"),
                )
        return None

    def step_times(self, plan: Plan) -> StepTimes:
        """Exact times of a plan."""
        return step_times(plan, self.tables)


def parallel_degrees(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Pairs of context- and expert-parallel degrees that a search looks at; (1, 1) first.

    Experts are spread over powers of two.
    """
    experts = problem.model.experts
    cps, powers = context_degrees(problem), powers_of_two(widest_pool(problem))
    eps = [ep for ep in powers if ep == 1 or (experts and experts % ep == 0)]
    if (runs := runnable(problem)) is not None:
        cps, eps = [cp for cp in cps if runs.cuts_sequences(problem, cp)], eps if runs.experts else [1]
    return tuple((cp, ep) for cp in cps for ep in eps)


def nested(problem: Problem) -> list[Allowed]:
    """What the levels of parity up to the problem's own allow, gentlest first, and last what the problem allows."""
    levels = PARITY_LEVELS[: PARITY_LEVELS.index(problem.constraints.parity)]
    own = allowed(problem)
    smaller = [
        may
        for may in (allowed(problem, level) for level in levels)
        if all(set(getattr(may, name)) <= set(getattr(own, name)) for name in Allowed.__dataclass_fields__)
    ]
    return list(dict.fromkeys([*smaller, own]))


def can_take_local_steps(problem: Problem, plan: Plan) -> bool:
    """Whether the regions of a plan can train by themselves for some steps (what the runner can do of it)."""
    alike = all(len({worker.tp for worker in stage.workers}) == 1 and stage.zero < 3 for stage in plan.stages)
    alike = alike and not plan.cuts_tied_unlike(problem.model)
    return alike and problem.batch.precision != "fp16" and plan.stays_in_regions(problem.cluster)


def useful_streams(latency_s: float, bytes_per_s: float) -> int:
    """TCP streams that fill a link: rate / (0.82 window / round trip), 1 to 16."""
    round_trip_s = 2 * latency_s
    if round_trip_s <= 0 or bytes_per_s <= 0:
        return 1
    one = WINDOW_USE * SOCKET_WINDOW_BYTES / round_trip_s
    return max(1, min(MAX_STREAMS, math.ceil(bytes_per_s / one)))


def _out(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Room for what `fluid_step_s` hands back."""
    return (
        np.zeros(rows + 1, dtype=np.int64),
        np.zeros((3, rows), dtype=np.int64),
        np.zeros(3, dtype=np.int64),
    )


def most_stages(problem: Problem) -> int:
    """More stages than these are never tried: layers, devices, and 32."""
    if (runs := runnable(problem)) is not None and not runs.pipeline:
        return 1
    return min(problem.model.layers, problem.cluster.devices, problem.constraints.most_stages or MAX_STAGES, MAX_STAGES)


def _dividing(stage: Stage, seconds: np.ndarray, micro_batches: int) -> Stage:
    """A stage that shares experts on as many of its workers as divide the micro-batches: groups of those that hold one
    of each expert are left out, of the slowest kind first. As it is where no number of groups divides them.

    Parameters
    ----------
    seconds : ndarray, shape (width,)
        Of a micro-batch on every worker.
    """
    if stage.ep == 1:
        return stage
    group = stage.ep // math.gcd(stage.ep, stage.workers[0].cp)
    left = next((n for n in range(stage.width, 0, -group) if micro_batches % n == 0), stage.width)
    kinds: dict[tuple[int, int], list[int]] = {}
    for place, worker in enumerate(stage.workers):
        kinds.setdefault((worker.pool, worker.tp), []).append(place)
    out = [place for own in sorted(kinds.values(), key=lambda own: -float(seconds[own].max())) for place in own[::-1]]
    dropped = set(out[: stage.width - left])
    return replace(stage, workers=tuple(w for place, w in enumerate(stage.workers) if place not in dropped))


def carried_over(allocation: Allocation, source: Decoder, target: Decoder) -> Allocation:
    """The allocation in the classes of another problem on the same pools; what that problem forbids is left out."""
    column = {key: c for c, key in enumerate(target.classes)}
    workers = np.zeros((most_stages(target.problem), len(target.classes)), dtype=np.int64)
    rows = allocation.workers[allocation.workers.any(axis=1)][: len(workers)]
    for c, key in enumerate(source.classes):
        if key in column:
            workers[: len(rows), column[key]] = rows[:, c]
    return replace(allocation, workers=workers)
