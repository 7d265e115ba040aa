"""Least time of every kind of plan for one micro-batch size: the dynamic program over stages, bisected over time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from polygon.bounds.lanes import lanes_end
from polygon.bounds.least_traffic import Across, LeastTraffic, hidden_part
from polygon.bounds.pipeline_costs import Pipeline, best_class, device_sums
from polygon.bounds.region_sets import ENUMERATED, RegionSets
from polygon.bounds.region_sums import LedSets
from polygon.bounds.size_work import HELD, SizeWork
from polygon.bounds.stage_bound import FEW, least_capacity
from polygon.bounds.stage_tiers import (
    MANY_NODES,
    Tier,
    best_tiers,
    differences,
    region_tiers,
)
from polygon.cost.tables import running_sum
from polygon.jit.by_pointer import pointed

MOST_STAGES = 8
"""Messages between stages are counted up to so many."""
GROUPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32)
"""Groups of an interleaved plan at which the bound takes a step; of more than the last any number."""
WEIGHTS = (0.0, 0.1, 0.3, 1.0)
"""Of the time that a micro-batch takes to pass all groups of an interleaved plan (`least_capacity`)."""
TIED = 3e-3
"""Of a step that a sum of tied embeddings takes longer than another from which the bound tells it apart."""
SAME = 1e-2
"""Of a step of compute alone: sets of regions that wait so much longer than others are looked at with these."""
PARTS, FEWER = 6, 3
"""In so many the sets are looked at where that is too fine, and neighbourhoods that stand for sets."""
TOLERANCE = 5e-4
"""Relative precision to which the least time is bisected (the lower end is returned)."""


def constant(capacity: float) -> Callable[[float], float]:
    """As much compute whatever the time."""
    return lambda _: capacity


OfSets = Callable[[RegionSets, float, float, float], float]
"""Least time over some sets of regions together, given which is known, which is too little, and how precisely
(`_waiting_s`)."""
NOWHERE = Tier(0.0, np.inf, 0.0, 0.0)
"""A tier without any room."""


class PipelineBound:
    """The dynamic program over stages for one micro-batch size."""

    def __init__(self, size: SizeWork, traffic: LeastTraffic) -> None:
        self.size, self.traffic, self.traffic_s = size, traffic, traffic.between_regions(size).least_s
        self.tells_apart = 1 < len(traffic.used_regions) <= ENUMERATED and len(size.kinds.classes) <= FEW
        """Whether there are sets of regions, few of them, and few classes, so that looking takes little time."""
        capacity = size.class_capacity
        # A worker that has whole sequences sums with nobody.
        most = float(max(held for held, of in zip(capacity, size.kinds.classes, strict=True) if of.cp == 1))
        inside = [
            [Tier(most, 0.0, 0.0, most), *best_tiers(tiers)]
            for tiers in region_tiers(traffic.tables, size.kinds, size.device_capacity, traffic.packed)
        ]
        self.inside = max(map(len, inside))
        inside = [[*tiers, *[NOWHERE] * (self.inside - len(tiers))] for tiers in inside]
        # (end or scattered, tiers, layers, layers + 1)
        whole_s = np.array(
            [[tier.fixed_s + tier.s_per_byte * traffic.gradient_bytes for tier in tiers] for tiers in inside]
        )
        runtime = traffic.tables.problem.runtime
        layers = np.maximum(differences(np.arange(whole_s.shape[2] + 1.0)), 1.0)
        # Layers are reduced one after another while backward of the last micro-batch still runs.
        backward_s = differences(size.backward_s).max(axis=(0, 1)) + traffic.codec_s(size.micro_batch_size)
        each_s = np.diff(size.backward_s).max(axis=(0, 1))
        others_s, others = each_s.sum() - each_s[size.run].sum(), len(each_s) - len(each_s[size.run])

        def exposed(more: int, more_s: float) -> tuple[np.ndarray, np.ndarray, tuple[list[Across], list[Across]]]:
            """Sums as far as the longest backward does not hide them, with and without latency between regions, of
            stages that may have so many more layers, with a backward of so much."""
            hidden_s = (backward_s + more_s) * hidden_part(runtime, layers + more)
            last = np.full_like(layers, traffic.part_of_any) if more else traffic.part_at_end
            last = last if runtime.by_layer else np.minimum(last, runtime.last_bucket)
            if not more:
                self.hidden_s, self.last = float(hidden_s[0, -1]), float(last[0, -1])
            # Nothing is left of a sum of which nothing comes last, even where there is no link for it.
            inside_s = np.maximum(np.where(last > 0, whole_s, 0.0) * last, whole_s - hidden_s)
            across = traffic.across(size.device_capacity, hidden_s, last)
            return _by_tier(inside_s, across, "exposed_s"), _by_tier(inside_s, across, "near_s"), across

        tier_s, self.near_s, across = exposed(0, 0.0)
        self.group_tier_s = exposed(others, float(others_s))[0]
        self.whole_s, self.rest_s = (_by_tier(whole_s, across, name) for name in ("whole_s", "rest_s"))
        self.group_hidden_part = hidden_part(runtime, layers + others)
        own_forward_s = np.ascontiguousarray(np.moveaxis(differences(size.forward_s.min(axis=1)), 0, -1))
        # Regions that meet only every so many steps do it after the update.
        self.local_tier_s = tier_s.copy()
        for i, tiers in enumerate(across):
            for t, tier in enumerate(tiers, self.inside):
                self.local_tier_s[i, ..., t] = np.minimum(tier_s[i, ..., t], tier.whole_s / traffic.local_steps)
        self.most_stages_inside = traffic.second_largest
        one_layer = np.arange(len(layers)), np.arange(1, len(layers) + 1)
        self.meeting_s = min(
            (float(tier.whole_s[one_layer].min()) / traffic.local_steps for tiers in across for tier in tiers),
            default=np.inf,
        )
        self.tied_levels: list[tuple[float, float]] = []
        for tied_s, most in traffic.tied_levels(size.device_capacity):
            if self.tied_levels and tied_s < self.tied_levels[-1][0] + TIED * size.compute_s:
                self.tied_levels[-1] = (self.tied_levels[-1][0], most)
            else:
                self.tied_levels.append((tied_s, most))
        self.pipeline = pointed(
            Pipeline(
                micro_batches=float(size.micro_batches),
                forward_s=_least_sum(size.forward_s),
                backward_s=_least_sum(size.backward_s),
                work=size.worth,
                class_s=size.fitting_s,
                spreads=np.array([float(fewest) for fewest, _ in size.spreads]) * float(size.device_capacity.min()),
                held=np.ones(1),
                levels=np.ones(1, dtype=np.int64),
                class_capacity=capacity,
                class_kind=np.array([of.kind for of in size.kinds.classes]),
                class_devices=np.array([float(of.devices) for of in size.kinds.classes]),
                kind_devices=size.kind_devices,
                best=best_class(size.fitting_s, capacity),
                tier_s=tier_s,
                whole_s=self.whole_s,
                hidden_part=hidden_part(runtime, layers),
                own_forward_s=own_forward_s,
                tier_capacity=np.array(
                    [
                        [*(t.capacity for t in near), *(t.capacity for t in far)]
                        for near, far in zip(inside, across, strict=True)
                    ]
                ),
                tier_free=np.array([*(t.free for t in inside[1]), *(t.free for t in across[1])]),
                message_s=traffic.message_s(size.micro_batch_size),
                per_node=traffic.per_node,
                passing_s=(0.0, 0.0),
                tied_s=traffic.tied_s,
                tied_capacity=np.inf,
                sums=device_sums(size.device_capacity, size.kind_devices),
                fewest=1,
                back_s=np.zeros((3, len(capacity))),
                path_s=np.zeros(len(capacity)),
                alike=False,
                whole=True,
            )
        )

    def least_s(
        self,
        capacity: Callable[[float], float],
        known_s: float,
        *,
        only: Pipeline | None = None,
        most_stages: int = MOST_STAGES,
        further: bool = True,
        lanes: bool = True,
        rest: float = 0.0,
        above_s: float = 0.0,
        tolerance: float = TOLERANCE,
    ) -> float:
        """Least time in which a pipeline can end, if it is less than `known_s` (else that).

        Parameters
        ----------
        capacity : callable
            Compute of the devices, given the time.
        only : Pipeline, optional
            With these costs.
        most_stages, further
            See `least_capacity`.
        lanes : bool
            Whether groups of an interleaved plan are looked at as lanes too.
        rest : float
            Work that is not the pipeline's, and is not in the capacity.
        above_s : float
            Less is of no use.
        tolerance : float
            Relative precision; inf to be told no more than whether it is less than `known_s`.
        """
        ends = partial(self._ends, capacity=capacity, most_stages=most_stages, further=further, lanes=lanes, rest=rest)
        pipeline, levels = only or self.pipeline, self.tied_levels if most_stages > 1 else self.tied_levels[:1]
        pipeline = pipeline._replace(tied_s=levels[0][0])
        if len(levels) > 1 and np.isfinite(known_s) and not ends(pipeline, known_s):
            return known_s
        for tied_s, most in levels:
            own = pipeline._replace(tied_s=tied_s, tied_capacity=most)
            known_s = self._first_s(partial(ends, own), known_s, above_s, tolerance)
        return known_s

    def _ends(
        self,
        pipeline: Pipeline,
        time_s: float,
        *,
        capacity: Callable[[float], float],
        most_stages: int,
        further: bool,
        lanes: bool,
        rest: float,
    ) -> bool:
        """Whether a pipeline can end in so much time."""
        limit = min(capacity(time_s), self.size.capacity)
        if self.size.work - rest > limit * time_s * (1 + 1e-9):
            return False
        for weight in WEIGHTS if pipeline.alike else (0.0,):
            if least_capacity(pipeline, time_s, most_stages, limit, further, weight) == np.inf:
                return False
        if not pipeline.alike or not pipeline.whole or further or not lanes:
            return True
        return bool(lanes_end(pipeline, time_s, most_stages, limit))

    def _first_s(self, ends: Callable[[float], bool], known_s: float, above_s: float, tolerance: float) -> float:
        """First time, `above_s` at least, at which something ends, if it is less than `known_s` (else that)."""
        low_s = max(self.size.path_s, self.size.compute_s, above_s)
        if low_s >= known_s or not ends(known_s if np.isfinite(known_s) else 1e6 * low_s):
            return known_s
        if tolerance == np.inf or ends(low_s):
            return low_s
        high_s = 2 * low_s
        while high_s < known_s and not ends(high_s):
            low_s, high_s = high_s, 2 * high_s
        high_s = min(high_s, known_s)
        while high_s - low_s > tolerance * low_s:
            middle_s = 0.5 * (low_s + high_s)
            if ends(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def kinds_of_plan(self, local_steps: int, *, finely: bool) -> dict[str, Callable[[float], float]]:
        """For every kind of plan the least time; what it is given, if that is less.

        Parameters
        ----------
        finely : bool
            Whether to tell sets of regions apart as finely as it matters (`tells_apart`).
        """
        same_s = SAME * self.size.compute_s if finely else np.inf
        kinds: dict[str, Callable[[float], float]] = {
            "stages": partial(self._of_sets, self._sets, same_s, self.apart_s),
            "one stage": self.single_s,
            "interleaved": partial(self.interleaved_s, self._sets, same_s),
        }
        return kinds | {"local steps": self.local_s} if local_steps > 1 else kinds

    @cached_property
    def _sets(self) -> RegionSets:
        return self.traffic.sets(self.size)

    @cached_property
    def _led(self) -> LedSets:
        return self.traffic.led(self.size, self.hidden_s, self.last)

    def _of_sets(self, sets: RegionSets, same_s: float, least_s: OfSets, known_s: float) -> float:
        """Least time over sets of regions, if it is less than `known_s` (else that), given what finds it for some of
        them together; those that wait no more than `same_s` longer than others stay with them."""
        parts = 1 if same_s < np.inf else PARTS if sets.enumerated else FEWER
        return self._of_parts(sets.by_first(parts), same_s, least_s, known_s, 0.0)

    def _of_parts(
        self, parts: list[RegionSets], same_s: float, least_s: OfSets, known_s: float, above_s: float
    ) -> float:
        """Least time over parts of the sets of regions, if it is less than `known_s` (else that), given what finds a
        bound for a part's sets together: those that may be quickest first, and each part in ever smaller ones while
        it may be quicker than what is known."""

        def computing_s(some: RegionSets) -> float:
            return float(((self.size.work + some.away) / some.capacity + some.waits_s).min())

        for some in sorted(parts, key=computing_s):
            if computing_s(some) >= known_s:
                continue
            halves = some.halves(same_s)
            if (found_s := least_s(some, known_s, above_s, np.inf if halves else TOLERANCE)) < known_s:
                known_s = self._of_parts(halves, same_s, least_s, known_s, found_s) if halves else found_s
        return known_s

    def apart_s(self, sets: RegionSets, known_s: float, above_s: float, tolerance: float) -> float:
        """Least time of a plan on one of some sets of regions; `known_s` if that is less.

        What all wait is taken off the time. A stage's own sum goes on while they wait, but for the first stage's, whose
        latency it is.
        """
        first_s, tier_s, whole_s = float(sets.first_s.max()), self.pipeline.tier_s.copy(), self.whole_s
        if first_s == 0:
            tier_s[:, 0, :, self.inside :] = np.inf
        else:
            tier_s, whole_s = np.maximum(tier_s - first_s, 0.0), whole_s - first_s
            tier_s[:, 0, :, : self.inside] = np.inf
            tier_s[:, 0, :, self.inside :] = self.near_s[:, 0, :, self.inside :]
            whole_s[:, 0, :, self.inside :] = self.rest_s[:, 0, :, self.inside :]
        pipeline = self.pipeline._replace(tier_s=tier_s, whole_s=whole_s)
        return self._waiting_s(sets, known_s, above_s, tolerance, pipeline)

    def _waiting_s(
        self,
        sets: RegionSets,
        known_s: float,
        above_s: float,
        tolerance: float,
        pipeline: Pipeline,
        *,
        part: Pipeline | None = None,
        rest: float = 0.0,
        most_stages: int = MOST_STAGES,
        further: bool = True,
        lanes: bool = True,
    ) -> float:
        """Least time of a pipeline after what all of some sets of regions wait, `above_s` at least; `known_s` if that
        is less.

        Workers do whole micro-batches; and those whose regions are away do less of everything, parts of one included.
        Work beside the pipeline's counts with these alone: who does not begin another micro-batch may do it meanwhile.

        Parameters
        ----------
        part : Pipeline, optional
            What counts where parts of micro-batches are allowed, in which `rest` is not.
        most_stages, further, lanes, tolerance
            See `least_s`.
        rest : float
            Work beside the pipeline's.
        """
        if self.traffic_s >= known_s:
            return known_s
        waits_s, most = float(sets.waits_s.min()), float(sets.capacity.max())
        least = partial(
            self.least_s,
            most_stages=most_stages,
            further=further,
            lanes=lanes,
            above_s=above_s - waits_s,
            tolerance=tolerance,
        )
        least_s = least(constant(most), known_s - waits_s, only=pipeline)
        if least_s + waits_s < known_s and (sets.away.any() or rest > 0):
            # The quickest message is that which links between regions are held against.
            near_s = np.tile(pipeline.message_s[0], (2, 1)) if sets.away.any() else pipeline.message_s
            parts, most_s = (part or pipeline)._replace(whole=False, message_s=near_s), known_s - waits_s
            parts_s = least(lambda time_s: sets.most(time_s) - rest / time_s, most_s, only=parts, rest=rest)
            least_s = max(least_s, parts_s)
        return min(known_s, max(least_s + waits_s, self.traffic_s))

    def single_s(self, known_s: float) -> float:
        """Least time of one stage in several regions, which find the norm in what they have summed and may lead."""
        tier_s, whole_s = self.pipeline.tier_s.copy(), self.whole_s.copy()
        tier_s[..., self.inside :] = whole_s[..., self.inside :] = 0.0
        pipeline = self.pipeline._replace(tier_s=tier_s, whole_s=whole_s)
        least = partial(self.least_s, most_stages=1, further=False)
        least_s = least(constant(float(self._led.capacity.max(initial=0.0))), known_s, only=pipeline)
        if least_s < known_s:
            least_s = max(least_s, least(self._led.most, known_s, only=pipeline._replace(whole=False)))
        return least_s

    def interleaved_s(self, sets: RegionSets, same_s: float, known_s: float) -> float:
        """Least time of an interleaved plan; `known_s` if that is less. `same_s`: see `_of_sets`.

        Its groups hold any layers: what the blocks of a group ask counts, and compute for the rest, in what regions
        apart leave of the time. A group waits for a layer or more of every group before. Of p groups with v chunks
        group g holds (2 (p - g - 1) + p (v - 1) + 1) / v micro-batches in flight, min(p, (3 p - 1) / 2 - g) or more,
        or all that it does if these are fewer (`polygon.domain.schedule.interleaved_in_flight`). Of layers of one kind
        any are as good as neighbours; those outside of the longest run of one kind count as compute alone,
        but for the model's first and last layer, which the first and the last group hold (`SizeWork.held_s`).
        Two chunks of p groups are 2 p stages of a layer or more.
        """
        least_s = np.maximum((self.size.work + sets.away) / sets.capacity, self.size.path_s) + sets.waits_s
        sets = sets.some(least_s < known_s)
        blocks = len(self.size.layer_work[self.size.run])
        # Two chunks of a group have a layer each.
        most = min(blocks, len(self.size.layer_work) // 2, int(self.size.kind_devices.sum()))
        if min(blocks, most) < 2 or not len(sets.capacity):
            return min(known_s, float(least_s.min()))
        steps = pairwise((*(groups for groups in GROUPS if groups <= most), MANY_NODES))
        # A group has none of the run if of its stages some are before it and all others, p or more further on, behind
        # it, or all on one side: then there are p + 1 layers outside, and all groups have two.
        without = self.size.others // 2
        some_without = [(*step, without) for step in pairwise((*GROUPS, MANY_NODES)) if step[0] < self.size.others]
        for fewest, more, without in [*((*step, 0) for step in steps), *some_without]:
            (pipeline, part), further = self._groups(fewest, without), fewest == GROUPS[-1] < most
            least = partial(
                self._waiting_s,
                rest=self.size.rest_work,
                most_stages=fewest if further else min(more - 1, most) - (without > 0),
                further=further,
                lanes=not without,
            )
            known_s = self._of_sets(sets, same_s, partial(_in_groups_s, least, pipeline, part), known_s)
        return known_s

    def _groups(self, fewest: int, without: int) -> tuple[Pipeline, Pipeline]:
        """The longest run of alike layers in so many groups or more, up to so many of which have none of it; with the
        model's ends, and with their memory alone where their time counts with the rest."""
        run = self.size.run
        count = run.stop - run.start
        group = np.arange(count)
        groups = np.maximum(fewest, group + 1)
        place = np.minimum(group + without, groups - 1)
        levels = np.searchsorted(HELD, np.minimum(groups, 1.5 * groups - 0.5 - place), side="right")
        nothing = np.zeros(count + 1)
        class_s = np.ascontiguousarray(self.size.held_s[..., : levels.max()])
        ends_s, back_s = self.size.end_s, self.size.back_s
        if without:  # the model's ends may be in groups that have none of the run
            ends_s, back_s = np.zeros_like(ends_s), back_s * np.array([[1.0], [0.0], [0.0]])
        rest_s = class_s.copy()
        if self.size.at_ends:
            rest_s[:, ::2] -= ends_s[:, None, :, None]
        else:
            class_s[:, ::2] += ends_s[:, None, :, None]
        tier_s, whole_s = (_of_groups(of, run, 1) for of in (self.group_tier_s, self.whole_s))
        hidden, own_forward_s = (_of_groups(of, run, 0) for of in (self.group_hidden_part, self.pipeline.own_forward_s))
        pipeline = self.pipeline._replace(
            forward_s=nothing,
            backward_s=nothing,
            work=np.ascontiguousarray(self.size.worth[:, run.start : run.stop + 1]),
            class_s=class_s,
            held=np.array(HELD[: levels.max()]),
            levels=levels,
            best=best_class(class_s, self.pipeline.class_capacity),
            tier_s=tier_s,
            whole_s=whole_s,
            hidden_part=hidden,
            own_forward_s=own_forward_s,
            fewest=max(1, fewest - without),
            back_s=back_s,
            path_s=self.size.trip_s,
            passing_s=(float(self.size.block_s[0]), float(self.size.block_s[1])),
            alike=True,
        )
        return pipeline, pipeline._replace(class_s=rest_s, best=best_class(rest_s, pipeline.class_capacity))

    def local_s(self, known_s: float) -> float:
        """Least time of two regions or more that each hold all layers and meet every so many steps.

        All have the same stages, so of these no more than the second largest has devices.
        """
        pipeline = self.pipeline._replace(tier_s=self.local_tier_s, whole_s=np.zeros_like(self.whole_s))
        most = self.most_stages_inside
        least_s = self.least_s(
            constant(self.size.capacity),
            known_s,
            only=pipeline,
            most_stages=min(most, MOST_STAGES),
            further=most > MOST_STAGES,
        )
        return min(known_s, max(least_s, self.meeting_s))


def _in_groups_s(
    least_s: Callable[..., float],
    pipeline: Pipeline,
    part: Pipeline,
    sets: RegionSets,
    known_s: float,
    above_s: float,
    tolerance: float,
) -> float:
    """Least time of an interleaved plan on some sets of regions, whose sums begin while the first group's is on its
    way."""
    first_s = float(sets.first_s.max())
    tier_s, whole_s = np.maximum(pipeline.tier_s - first_s, 0.0), pipeline.whole_s - first_s
    own, own_part = (of._replace(tier_s=tier_s, whole_s=whole_s) for of in (pipeline, part))
    return least_s(sets, known_s, above_s, tolerance, own, part=own_part)


def _of_groups(of_layers: np.ndarray, run: slice, axis: int) -> np.ndarray:
    """What so many layers of a run of alike ones have in a first group, in one between and in the last, given what
    layers [a, b) have by a and b on two axes; inf elsewhere."""
    values = np.moveaxis(of_layers, (axis, axis + 1), (0, 1))
    found = np.full((3, run.stop - run.start + 3, *values.shape[2:]), np.inf)
    for row in range(3):
        first = run.start + min(row, 1)
        found[row, row + 1 : row + 1 + run.stop - first] = values[first, first + 1 : run.stop + 1]
    return np.ascontiguousarray(np.moveaxis(found, (0, 1), (axis, axis + 1)))


def _by_tier(inside_s: np.ndarray, across: tuple[list[Across], list[Across]], name: str) -> np.ndarray:
    """Seconds of layers [a, b), shape (2, n, n + 1, tiers): the program looks at all tiers for the same layers."""
    found = np.array([[*inside_s[i], *(getattr(tier, name) for tier in across[i])] for i in range(2)])
    return np.ascontiguousarray(np.moveaxis(found, 1, 3))


def _least_sum(sums: np.ndarray) -> np.ndarray:
    """Running sum over the layers of the least over classes and recomputations."""
    return running_sum(np.diff(sums).min(axis=(0, 1)))
