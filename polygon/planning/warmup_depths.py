"""The spans of a schedule: how many micro-batches are let pass behind every worker (`polygon.domain.schedule`).

A micro-batch that is away for L seconds, while one is finished every P seconds, needs a window of L / P. Workers of
unlike speed do not get their micro-batches quite evenly, so longer windows pay where memory holds them. Several paces
are simulated, each cut down, worker by worker, to what its memory holds; the one with the shortest step is taken.

Cutting takes from whoever memory is short for, and the stages behind keep what they wanted, or those before it have
left the least. Where memory cuts, P itself is longer than work alone asks for, and a pace is tried whose spans are all
shorter by one factor, the largest of which memory cuts none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from polygon.cost.estimate import group_memory
from polygon.cost.simulation import backward_order
from polygon.cost.stage_reduction import room_of_sums
from polygon.cost.step_times import StepTimes, alike, numbered, unpaced_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan
from polygon.domain.schedule import in_flight
from polygon.jit.compilation import general
from polygon.planning.list_schedule import listed_starts, ranks_by


class StagePace(NamedTuple):
    """How long spans are wanted: parts of what working takes, of what messages take, and of both in the last stage."""

    work: float
    messages: float
    last: float
    """Behind the last stage nothing is waited for, but its spans lengthen the windows before it."""
    kept: float
    """Part of what working takes for which stages leave room in the memory of those before them."""


PACES = (
    StagePace(1.0, 1.0, 0.7, kept=1.0),
    StagePace(1.5, 0.5, 0.4, kept=0.5),
    StagePace(1.0, 3.0, 0.4, kept=1.0),
    StagePace(1.0, 0.5, 1.0, kept=0.0),
    StagePace(1.0, 0.25, 0.7, kept=0.5),
    StagePace(0.8, 0.0, 0.7, kept=0.0),
    StagePace(1.0, 1.0, 0.7, kept=0.0),
    StagePace(3.0, 3.0, 0.4, kept=1.0),
    StagePace(1.5, 1.5, 0.4, kept=0.0),
    StagePace(2.0, 2.0, 0.4, kept=1.0),
)
"""Of 42 tried on some 4,000 drafts, those that together come within 0.2 % of the best of all in the mean, the most
useful first."""
AT_ONCE = StagePace(0.0, 0.0, 0.0, kept=0.0)
"""Every backward at once: memory holds this pace if it holds any."""
LOOKS = 2
"""Paces that are simulated before a plan is given up."""
NEARLY = 1.01
"""Times the best end of any order for which no order but that of spans is looked for."""
LISTS, MORE_LISTS = 2, 4
"""Orders that are listed, and how many more without gain where other spans are tried too."""
GAIN = 1e-4
"""Part by which a step has to be shorter to count as gain."""
HURDLE = 1.2
"""Of the step of the best plan known: one that takes longer at its first paces gets no other. These overstate drafts
that memory holds back by up to a quarter, which is more than a search has between its best allocations."""


STRETCHES = (1.0, 1.5)
"""Times the longest spans in proportion that memory holds uncut: a few workers may be short where most are not."""
HALVINGS = 7
"""With which their factor is found."""


CHANGES = (1.25, 0.8, 1.6, 0.6)
"""Factors by which the spans of single stages are changed."""


def wanted_spans(times: StepTimes, *, messages: bool) -> np.ndarray:
    """Micro-batches that pass while a worker is busy with one, and (if `messages`) its message travels and returns.

    A worker that computes n of M micro-batches is busy with one while M / n pass; a message under way for L seconds,
    in a step whose busiest worker needs T, lets M L / T pass.

    Returns
    -------
    ndarray, shape (workers,)
    """
    schedule, place = times.schedule, times.place
    micro_batches, stages = schedule.routes.shape
    shares = np.maximum(np.bincount(schedule.routes.ravel(), minlength=len(place.stage)), 1)
    spans = micro_batches / shares
    if messages and stages > 1:
        period_s = float((shares * (schedule.forward_s + schedule.backward_s)).max()) / micro_batches
        trip_s = (times.messages.busy_s + times.messages.latency_s).sum(axis=0)
        longest_s = np.zeros(len(spans))
        np.maximum.at(longest_s, schedule.routes[:, :-1].ravel(), trip_s.ravel())
        spans = spans + longest_s / period_s
    found: np.ndarray = np.minimum(spans, micro_batches)
    return found


def rooms(plan: Plan, tables: CostTables, times: StepTimes) -> np.ndarray:
    """Micro-batches whose activations every worker's memory holds at one time, shape (workers,); 0: not one."""
    place = times.place
    result = np.empty(len(place.stage), dtype=np.int64)
    for s in range(len(plan.stages)):
        mine = place.members(s)
        which, different = numbered(room_of_sums(plan, place, s, tables.links, tables.problem.runtime))
        kinds, kind = alike(place.pool[mine], place.tp[mine], place.shards[s], which)
        room = np.empty(len(kinds), dtype=np.int64)
        for k, (pool, tp, shards, sums) in enumerate(kinds):
            one = group_memory(plan, tables, s, tp=tp, in_flight=1.0, shards=shards, sums=different[sums])
            free = float(tables.limit_bytes[pool]) - one.total_bytes
            more = math.floor(free / one.activations) if one.activations > 0 else plan.micro_batches
            room[k] = min(1 + more, plan.micro_batches) if free >= 0 else 0
        result[mine] = room[kind]
    return result


@general
def find_limits(
    routes: np.ndarray, order: np.ndarray, offset: np.ndarray, room: np.ndarray, least: np.ndarray, limits: np.ndarray
) -> None:
    """The longest window of every micro-batch in every stage for which memory holds it there and before.

    Parameters
    ----------
    routes, order, offset, room
        As in `cut_spans`.
    least : ndarray of int64, shape (workers,)
        Spans to keep for the workers before.
    limits : ndarray of int64, shape (micro_batches, stages)
        Out; below 1 where memory does not hold these spans.
    """
    micro_batches, stages = routes.shape
    limits[:, 0] = stages * micro_batches
    for s in range(stages):
        first = 0
        while first < micro_batches:
            local = routes[order[first, s], s]
            worker = offset[s] + local
            last = first
            while last < micro_batches and routes[order[last, s], s] == local:
                last += 1
            for j in range(first, last):
                m = order[j, s]
                if j + room[worker] < last:
                    limits[m, s] = min(limits[m, s], order[j + room[worker], s] - m)
                if s + 1 < stages:
                    limits[m, s + 1] = limits[m, s] - least[worker]
            first = last


@general
def cut_spans(
    routes: np.ndarray,
    order: np.ndarray,
    offset: np.ndarray,
    room: np.ndarray,
    limits: np.ndarray,
    spans: np.ndarray,
    windows: np.ndarray,
) -> bool:
    """Cut the spans of all workers down to what memory holds, last stage first; whether that is possible.

    With e the ends m + W(m, s + 1) of a worker's micro-batches m, both in rising order, its j-th backward finds no more
    than `room` micro-batches in flight if its span is at most m[j + room] - e[j].

    Parameters
    ----------
    routes, order : ndarray of int64, shape (micro_batches, stages)
        Worker of each micro-batch in its stage, and the micro-batches of every stage sorted by worker.
    offset : ndarray of int64, shape (stages,)
        First worker of each stage.
    room : ndarray of int64, shape (workers,)
    limits : ndarray of int64, shape (micro_batches, stages)
        Of `find_limits`: windows are no longer, if spans of at least 1 allow that.
    spans : ndarray of int64, shape (workers,)
        In: what is wanted; out: what is held.
    windows : ndarray of int64, shape (micro_batches, stages)
        Out.
    """
    micro_batches, stages = routes.shape
    behind = np.zeros(micro_batches, dtype=np.int64)
    ends = np.empty(micro_batches, dtype=np.int64)
    for s in range(stages - 1, -1, -1):
        first = 0
        while first < micro_batches:
            local = routes[order[first, s], s]
            worker = offset[s] + local
            last = first
            while last < micro_batches and routes[order[last, s], s] == local:
                m = order[last, s]
                spans[worker] = max(1, min(spans[worker], limits[m, s] - behind[m]))
                last += 1
            last = first
            while last < micro_batches and routes[order[last, s], s] == local:
                end = order[last, s] + behind[order[last, s]]
                at = last
                while at > first and ends[at - 1] > end:
                    ends[at] = ends[at - 1]
                    at -= 1
                ends[at] = end
                last += 1
            for j in range(first, last - room[worker]):
                spans[worker] = min(spans[worker], order[j + room[worker], s] - ends[j])
            if spans[worker] < 1 or room[worker] < 1:
                return False
            first = last
        for m in range(micro_batches):
            behind[m] += spans[offset[s] + routes[m, s]]
            windows[m, s] = behind[m]
    return True


class Pacing:
    """Spans for the routes of one plan.

    `beside` is that of a plan that differs in packings alone: where these change nothing before the sums of gradients,
    what one has simulated is what the other would.
    """

    def __init__(self, plan: Plan, tables: CostTables, beside: Pacing | None = None) -> None:
        self.plan, self._tables = plan, tables
        self.times = unpaced_times(plan, tables)
        """Without an order of the backwards: `timed` has one."""
        self._simulated: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """By windows: order, begin of each key's backwards, and ends of workers."""
        if beside is not None and self._computes_as(beside):
            self._simulated = beside._simulated

    @cached_property
    def _least(self) -> np.ndarray:
        return wanted_spans(self.times, messages=False)

    @cached_property
    def _away(self) -> np.ndarray:
        away: np.ndarray = wanted_spans(self.times, messages=True) - self._least
        return away

    @cached_property
    def _room(self) -> np.ndarray:
        return rooms(self.plan, self._tables, self.times)

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.plan.routes, axis=0, kind="stable")

    def _computes_as(self, other: Pacing) -> bool:
        """Whether workers compute and send the same, for as long."""
        mine, others = self.times.schedule, other.times.schedule
        arrays = ("routes", "forward_s", "backward_s", "link", "hold_s", "latency_s")
        return all(np.array_equal(getattr(mine, name), getattr(others, name)) for name in arrays)

    def windows(self, pace: StagePace) -> tuple[np.ndarray, np.ndarray] | None:
        """Spans at a pace, cut down to what memory holds, and the windows that they give; None if it holds none.

        Returns
        -------
        spans : ndarray of int64, shape (workers,)
        windows : ndarray of int64, shape (micro_batches, stages)
        """
        return self.held(self._wanted(pace), pace.kept)

    def _wanted(self, pace: StagePace) -> np.ndarray:
        """The spans of a pace before they are cut down, shape (workers,)."""
        wanted: np.ndarray = pace.work * self._least + pace.messages * self._away
        wanted[self.times.place.offset[-1] :] *= pace.last
        return wanted

    def held(self, wanted: np.ndarray, kept: float = 0.0) -> tuple[np.ndarray, np.ndarray] | None:
        """See `windows`."""
        place, routes = self.times.place, self.plan.routes
        micro_batches, stages = routes.shape
        spans = np.clip(np.ceil(wanted - 1e-6), 1, micro_batches).astype(np.int64)
        windows = np.empty((micro_batches, stages), dtype=np.int64)
        limits = np.full((micro_batches, stages), stages * micro_batches, dtype=np.int64)
        if kept > 0:
            least = np.ceil(kept * self._least - 1e-6).astype(np.int64)
            find_limits(routes, self._order, place.offset, self._room, least, limits)
        held = cut_spans(routes, self._order, place.offset, self._room, limits, spans, windows)
        return (spans, windows) if held else None

    def longest_in_proportion(self) -> np.ndarray | None:
        """The longest spans in proportion to what work and messages take that memory holds uncut, shape (workers,).

        None where it holds those for the time that work alone takes, or not even spans of one.
        """
        schedule, micro_batches = self.times.schedule, self.plan.micro_batches
        busy_s = schedule.forward_s + schedule.backward_s
        shares = np.maximum(np.bincount(schedule.routes.ravel(), minlength=len(busy_s)), 1)
        whole = micro_batches * busy_s / (shares * busy_s).max() + self._away

        def uncut(factor: float) -> bool:
            cut = self.held(factor * whole)
            return cut is not None and bool((cut[0] >= np.minimum(factor * whole - 1e-6, micro_batches)).all())

        if uncut(1.0):
            return None
        least, most = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = 0.5 * (least + most)
            least, most = (middle, most) if uncut(middle) else (least, middle)
        return least * whole if least > 0 else None

    def timed(self, windows: np.ndarray) -> StepTimes:
        """The step under given windows."""
        key = windows.tobytes()
        known = self._simulated.get(key)
        if known is not None:
            order, first, ends_s = known
            return replace(self.times, schedule=replace(self.times.schedule, order=order, first=first), ends_s=ends_s)
        order, first = backward_order(windows)
        schedule = replace(self.times.schedule, order=order, first=first)
        ends_s = schedule.simulate()[0]
        self._simulated[key] = order, first, ends_s
        return replace(self.times, schedule=schedule, ends_s=ends_s)

    def ordered(self, ranks: np.ndarray) -> StepTimes:
        """The step in an order of its own (`Plan.order`)."""
        schedule = replace(self.times.schedule, ranks=ranks)
        return replace(self.times, schedule=schedule, ends_s=schedule.simulate()[0])

    @cached_property
    def least_s(self) -> float:
        """No order of these routes ends sooner: a worker is busy for all that it computes, after the quickest way to it
        and before the quickest way back; so is a link for all that passes it."""
        schedule = self.times.schedule
        longest_s = self._least_ends_s.copy()
        _, back_s = self._ways_s
        quickest_s = np.full(len(longest_s), math.inf)
        np.minimum.at(quickest_s, schedule.routes.ravel(), back_s.ravel())
        longest_s += quickest_s
        return max(float(longest_s.max(initial=0.0, where=np.isfinite(longest_s))), self._links_s)

    @cached_property
    def floor_s(self) -> float:
        """No order of these routes has a shorter step, sums of gradients included unless local steps may do without."""
        if self.plan.local_steps == 1 < max(self._tables.problem.constraints.local_steps, default=1):
            return self.least_s
        return max(self.least_s, replace(self.times, ends_s=self._least_ends_s).step_s)

    @cached_property
    def _ways_s(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds on the way of every micro-batch to its forward, and from the end of its backward to that of the
        first stage, nobody waited for: (micro_batches, stages) each."""
        schedule = self.times.schedule
        alone_s = schedule.hold_s.max(axis=3) + schedule.latency_s
        ways = []
        for seconds, sent_s in zip((schedule.forward_s, schedule.backward_s), alone_s, strict=True):
            way_s = np.zeros(schedule.routes.shape)
            way_s[:, 1:] = (seconds[schedule.routes[:, :-1]] + sent_s).cumsum(axis=1)
            ways.append(way_s)
        return ways[0], ways[1]

    @cached_property
    def _least_ends_s(self) -> np.ndarray:
        """No worker ends sooner [s], shape (workers,); 0 for those without a micro-batch."""
        schedule = self.times.schedule
        busy_s = schedule.forward_s + schedule.backward_s
        quickest_s = np.full(len(busy_s), math.inf)
        np.minimum.at(quickest_s, schedule.routes.ravel(), self._ways_s[0].ravel())
        ends_s = quickest_s + np.bincount(schedule.routes.ravel(), minlength=len(busy_s)) * busy_s
        return np.where(np.isfinite(quickest_s), ends_s, 0.0)

    @cached_property
    def _links_s(self) -> float:
        """No order ends before the link that is busy longest has passed all its messages, the first after the quickest
        way to it and the last before the quickest way back."""
        schedule = self.times.schedule
        to_s, back_s = self._ways_s
        if not schedule.links or not np.isfinite(to_s).all() or not np.isfinite(back_s).all():
            return 0.0
        forward_s, backward_s = (of[schedule.routes] for of in (schedule.forward_s, schedule.backward_s))
        whole_s = (to_s + forward_s + backward_s + back_s)[:, -1:]
        before_s = np.stack([(to_s + forward_s)[:, :-1], whole_s - back_s[:, 1:]])
        after_s = np.stack([whole_s - to_s[:, 1:], (backward_s + back_s)[:, :-1]]) + schedule.latency_s
        used = schedule.link >= 0
        link = schedule.link[used]
        first_s, last_s = np.full((2, schedule.links), math.inf)
        for least_s, of_s in ((first_s, before_s), (last_s, after_s)):
            np.minimum.at(least_s, link, np.broadcast_to(of_s[..., None], used.shape)[used])
        ends_s = first_s + np.bincount(link, schedule.hold_s[used], schedule.links) + last_s
        return float(ends_s.max(initial=0.0, where=np.isfinite(ends_s)))

    def best(self, known_s: float = math.inf, tries: int = 0) -> tuple[Plan, StepTimes] | None:
        """The plan at its best pace, and its times; None if memory holds none.

        Where no order can be quicker than the best plan known, whose step takes `known_s`, or the first few paces that
        memory holds take much longer, no other is tried; else so many `tries` go into other spans of single stages.
        Spans that the plan has, but for the widest, are tried first. Last come orders that no spans say
        (`polygon.planning.list_schedule`), and the plan's own.
        """
        best: _Paced | None = None
        seen: set[bytes] = set()

        def better(wanted: np.ndarray, kept: float) -> bool:
            """Simulate what memory holds of these spans; whether that is the best."""
            nonlocal best
            cut = self.held(wanted, kept)
            if cut is None or cut[0].tobytes() in seen:
                return False
            seen.add(cut[0].tobytes())
            times = self.timed(cut[1])
            step_s = times.step_s
            if best is not None and step_s >= best.step_s:
                return False
            best = _Paced(step_s, wanted, kept, cut[0], times)
            return True

        looks, paces = LOOKS, [(self._wanted(pace), pace.kept) for pace in PACES]
        if (fitting := self.longest_in_proportion()) is not None:
            paces[LOOKS:LOOKS] = [(stretch * fitting, 0.0) for stretch in STRETCHES]
            looks += 1  # the first of them

        def hopeless() -> bool:
            late = best is not None and len(seen) >= looks and best.step_s > HURDLE * known_s
            return late or (best is not None and self.floor_s > known_s)

        own = np.array([span for of in self.plan.spans for span in of], dtype=float)
        if len(own) == len(self._least) and own.min() < self.plan.micro_batches:
            better(own, 0.0)
        for wanted, kept in paces:
            if not hopeless():
                better(wanted, kept)
        if best is None:
            better(self._wanted(AT_ONCE), AT_ONCE.kept)
        if best is None:
            return None
        # Lists may be far shorter than the first spans, but not than the floor.
        listed = None if self.floor_s > known_s else self._listed(best.times, min(tries, MORE_LISTS))
        if not hopeless() and (listed is None or best.step_s <= NEARLY * listed.step_s):
            self._change_stages(better, lambda: best, tries)
        spans = by_stage(best.spans, best.times)
        if listed is not None and listed.step_s < best.step_s:
            plan = replace(self.plan, spans=spans, order=listed.schedule.ranks)
            return plan, self._tables.paced_times.put(listed, (plan,))
        plan = self.plan.with_spans(spans)
        return plan, self._tables.paced_times.put(best.times, (plan,))

    def _listed(self, paced: StepTimes, more: int) -> StepTimes | None:
        """The best step in an order of its own; None if spans leave nothing to gain, and where workers do the same at
        the same time, as those that share experts do.

        Lists follow the order that the plan has or the schedule of the best spans, whichever is shorter, and then one
        another, until so many `more` have not helped.
        """
        alone = all(stage.ep == 1 for stage in self.plan.stages)
        if not alone or len(self.plan.stages) == 1 or paced.ends_s.max() <= NEARLY * self.least_s:
            return None
        best, tried = self._own_order(), 0
        starts_s = (paced if best is None or paced.step_s < best.step_s else best).schedule.simulate(record=True)[1]
        from_end = False
        while tried < LISTS + more:
            starts_s = listed_starts(self.times.schedule, self._room, starts_s, from_end=from_end)
            times = self.ordered(ranks_by(starts_s, self.times.schedule.routes))
            tried, from_end = tried + 1, not from_end
            if best is None or times.step_s < (1 - GAIN) * best.step_s:
                best, tried = times, min(tried, LISTS)
        return best

    def _own_order(self) -> StepTimes | None:
        """The step in the plan's own order, if it has one that memory holds."""
        order = self.plan.order
        if order is None:
            return None
        held = np.concatenate([in_flight(self.plan, s) for s in range(len(self.plan.stages))])
        return self.ordered(order) if (held <= self._room).all() else None

    def _change_stages(
        self, better: Callable[[np.ndarray, float], bool], best: Callable[[], _Paced | None], tries: int
    ) -> None:
        """Lengthen or shorten the spans of one stage after another, then of workers of one kind in a stage that has
        several; what helped is tried again first."""
        place = self.times.place
        stages = [place.members(s) for s in range(len(self.plan.stages))]
        of_kind: list[np.ndarray] = []
        for mine in stages:
            kinds, kind = alike(place.pool[mine], place.tp[mine])
            of_kind += [mine.start + np.flatnonzero(kind == k) for k in range(len(kinds)) if len(kinds) > 1]
        moves = [*itertools.product(CHANGES, stages), *itertools.product(CHANGES, of_kind)]
        at, failures = 0, 0
        for _ in range(tries):
            now = best()
            if now is None or failures >= len(moves):
                break
            factor, part = moves[at % len(moves)]
            wanted = now.wanted.copy()
            # Of what memory has cut down, only a shorter one than it holds is another.
            wanted[part] = factor * np.minimum(wanted[part], now.spans[part])
            if better(wanted, now.kept):
                failures = 0
            else:
                at, failures = at + 1, failures + 1


class _Paced(NamedTuple):
    """A step, the spans wanted and how much room was kept (`StagePace`), the spans that memory holds, and times."""

    step_s: float
    wanted: np.ndarray
    kept: float
    spans: np.ndarray
    times: StepTimes


def by_stage(values: np.ndarray, times: StepTimes) -> tuple[tuple[int, ...], ...]:
    """Whole numbers of all workers, stage by stage."""
    offset = times.place.offset.tolist()
    return tuple(tuple(values[a:b].tolist()) for a, b in zip(offset, [*offset[1:], len(values)], strict=True))
