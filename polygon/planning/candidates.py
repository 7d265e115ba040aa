"""Allocations as the solvers see them: what to evaluate, what a small step is, where to begin."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.money import Bill
from polygon.domain.plan import Plan
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.initial_solutions import block_rates, even_parts
from polygon.planning.neighbourhood import at_degree, near, with_idle
from polygon.planning.objectives import OVER_LIMIT, STEP_TIME, value_of
from polygon.planning.problem_arrays import Bank, Setting
from solvers.allocation import AllocationProblem, AllocationSpace
from solvers.problem import SearchProblem
from solvers.stop import Progress

MOST_STRUCTURES = 3000
NEW_STAGE = 0.1
"""Of small steps: how often a stage more is offered to the workers that move."""
LISTED, MOST_NEAR = 0.5, 1000
"""Of exact steps: how often the next best of all one change away is taken, and how many of these are looked at."""
JOINING = 0.5
"""Of changes of a degree: how often idle devices join in."""
APART = 0.4
"""Of whole pools that are spread anew: how often as a stage of their own."""
MOST_LISTED = 200
"""Classes of workers up to which either is done: of more such a list takes as long as many steps."""
MOST_OF_REGIONS = 0.75
"""Part of all regions that a set of regions is at most which is searched by itself."""
UNLIKE = 0.3
"""Sum of the differences of the shares that pools have of the devices in use above which allocations are unlike."""
RUNNER_UP = 0.08
"""Part by which an allocation may be worse than the best and still be polished, as polishing may turn them."""
DIGITS = 9
"""To which values of allocations agree that differ in idle workers alone."""


def used_of(x: Allocation, of_class: np.ndarray) -> tuple[int, ...]:
    """The regions, or device types, of an allocation's workers, by the classes of these."""
    return tuple(np.unique(of_class[x.workers.any(axis=0)]).tolist())


def leaves_out(part: tuple[int, ...], of_class: np.ndarray, most: float = MOST_OF_REGIONS) -> bool:
    """Whether a set of regions, or of device types, is not all of them, nor more than a part of all."""
    every = len(np.unique(of_class))
    return len(part) <= min(most * every, every - 1)


class Candidates(SearchProblem[Allocation]):
    """Allocations of a problem's devices to at most `stages` stages, with their setting.

    The value is the decoder's objective by the fluid step time; good and different ones are kept in `elite`.
    """

    def __init__(self, decoder: Decoder, stages: int) -> None:
        self.decoder = decoder
        pools = decoder.problem.cluster.pools
        self.space = AllocationSpace(
            groups=stages,
            capacity=np.array([pool.devices for pool in pools]),
            pool=np.array([p for p, _ in decoder.classes]),
            units=np.array([t for _, t in decoder.classes]),
            empty_groups=True,
        )
        self._spaces: dict[tuple[int, int], AllocationSpace] = {}
        self._block_rates: dict[int, np.ndarray] = {}
        self.region_of_class = np.array([pools[p].region for p, _ in decoder.classes])
        types = list(dict.fromkeys(pool.device.name for pool in pools))
        self.type_of_class = np.array([types.index(pools[p].device.name) for p, _ in decoder.classes])
        """Region and device type of every class of workers, by number, shape (classes,) each."""
        self.sizes = decoder.tables.micro_batch_sizes
        self.degrees = decoder.degrees
        self._best: dict[Hashable, list[tuple[float, int, Allocation]]] = {}
        self._seen: set[bytes] = set()
        self.old_in_a_row = 0
        """Evaluations since the last of an allocation that was not met before."""
        self._count = itertools.count()
        self._ranking: list[tuple[float, int, Allocation, int]] | None = None
        """Of `_ranked`, until another is met."""

    def copy(self) -> Candidates:
        """The same, which goes on by itself."""
        found = copy.copy(self)
        found._best = {structure: list(best) for structure, best in self._best.items()}
        found._seen, found._count, found._ranking = set(self._seen), copy.copy(self._count), None
        return found

    def within(self, part: Sequence[int], of_class: np.ndarray) -> Candidates:
        """The same, which goes on by itself with the devices of some regions or types alone, from what was met in
        these: `of_class` is `region_of_class` or `type_of_class`."""
        found, here = self.copy(), np.zeros(len(self.space.capacity), dtype=bool)
        here[self.space.pool[np.isin(of_class, part)]] = True
        found.space, found._spaces = replace(self.space, capacity=self.space.capacity * here), {}
        found._best = {of: best for of, best in found._best.items() if set(used_of(best[0][2], of_class)) <= set(part)}
        return found

    def join(self, other: Candidates) -> None:
        """Take over what a copy has met since."""
        for structure, best in other._best.items():
            own = self._best.setdefault(structure, [])
            keys = {x.key for _, _, x in own}
            own += [(value, next(self._count), x) for value, _, x in best if x.key not in keys]
            own.sort(key=lambda entry: entry[:2])
            del own[3:]
        self._seen |= other._seen
        self._ranking = None
        self._forget()

    def evaluate(self, x: Allocation) -> float:
        """The objective at the fluid step time."""
        value = self.decoder.value(x)
        if x.key in self._seen:
            self.old_in_a_row += 1
            return value
        self._seen.add(x.key)
        self.old_in_a_row = 0
        if np.isfinite(value):
            structure = (len(x.stages), x.setting, x.stages.any(axis=0).tobytes())
            best = self._best.setdefault(structure, [])
            if len(best) < 3 or value < best[-1][0]:
                best.append((value, next(self._count), x))
                best.sort(key=lambda entry: entry[:2])
                del best[3:]
                self._ranking = None
            self._forget()
        return value

    def _forget(self) -> None:
        """Of too many structures the worse half."""
        if len(self._best) > MOST_STRUCTURES:
            kept = sorted(self._best.items(), key=lambda item: item[1][0][:2])[: MOST_STRUCTURES // 2]
            self._best = dict(kept)

    def evaluate_degrees(self, x: Allocation, degrees: Sequence[tuple[int, int]]) -> tuple[float, Allocation]:
        """The best of some context- and expert-parallel degrees of an allocation, and its value."""
        options = [x if (cp, ep) == (x.cp, x.ep) else replace(x, cp=cp, ep=ep) for cp, ep in degrees]
        values = [self.evaluate(option) for option in options]
        best = int(np.argmin(values))
        return values[best], options[best]

    @property
    def elite(self) -> list[Allocation]:
        """Good and different allocations met: in turn the best of all, and the best of every structure.

        A structure is a number of stages, the worker classes used, and a setting. The fluid value misjudges
        some structures more than others, so the best few of all would often be of one kind.
        """
        overall = [x for _, _, x, _ in self._ranked()]
        return list({id(x): x for pair in zip(overall, self.different, strict=True) for x in pair}.values())

    @property
    def different(self) -> list[Allocation]:
        """Allocations met: the best of every structure, then the second best, and so on."""
        return [x for _, _, x, _ in sorted(self._ranked(), key=lambda entry: entry[3])]

    def unlike(self, count: int) -> list[Allocation]:
        """So many at most of `different`, no two of which have nearly the same devices in use."""
        found: list[Allocation] = []
        shares: list[np.ndarray] = []
        for x in self.different:
            used = self.space.used(x.stages)
            share = used / used.sum()
            if all(np.abs(share - other).sum() > UNLIKE for other in shares):
                found.append(x)
                shares.append(share)
                if len(found) == count:
                    break
        return found

    def parts(self, of_class: np.ndarray, most: float = MOST_OF_REGIONS) -> list[tuple[int, ...]]:
        """The sets of regions, or of device types (`within`), in which the best were met that leave some out."""
        found = [used_of(x, of_class) for x in self.best_of(lambda x: used_of(x, of_class))]
        return [part for part in found if leaves_out(part, of_class, most)]

    def best_of(self, kind: Callable[[Allocation], Hashable]) -> list[Allocation]:
        """The best of every kind met, best first: the fluid value misjudges some kinds more than others."""
        found: dict[Hashable, Allocation] = {}
        for _, _, x, _ in self._ranked():
            found.setdefault(kind(x), x)
        return list(found.values())

    def regions_of(self, x: Allocation) -> tuple[int, ...]:
        """The regions of an allocation's workers."""
        return used_of(x, self.region_of_class)

    def _ranked(self) -> list[tuple[float, int, Allocation, int]]:
        """Values, numbers, allocations and places in their structure of the good ones met, best first.

        Of those that are one plan with other workers idle beside it, the first.
        """
        if self._ranking is None:
            ranked = sorted((*entry, place) for best in self._best.values() for place, entry in enumerate(best))
            kept: dict[Hashable, tuple[float, int, Allocation, int]] = {}
            for entry in ranked:
                kept.setdefault((f"{entry[0]:.{DIGITS}g}", len(entry[2].stages), entry[2].setting), entry)
            self._ranking = list(kept.values())
        return self._ranking

    def random(self, rng: np.random.Generator) -> Allocation:
        """A random allocation and micro-batch size."""
        size = int(self.sizes[rng.integers(len(self.sizes))])
        cp, ep = self.degrees[rng.integers(len(self.degrees))]
        stages = min(self.space.groups, int(2 ** rng.uniform(0, math.log2(self.space.groups + 1))))
        none = Allocation(workers=np.empty((0, 0)), micro_batch_size=size, cp=cp, ep=ep)
        return none.with_workers(self.compact(self._space_of(stages, none.unit).random(rng)) * none.unit)

    def neighbour(self, x: Allocation, rng: np.random.Generator) -> Allocation:
        """Shift, exchange, employ, release or replace workers; split, merge or move a stage; another setting."""
        kind = rng.random()
        unit = x.unit
        whole = x.with_workers(x.workers // unit) if unit > 1 else x
        if not len(whole.stages):
            return self.random(rng)
        if kind < 0.12 and len(self.sizes) > 1:
            at = self.sizes.index(x.micro_batch_size)
            choices = [i for i in (at - 1, at + 1) if 0 <= i < len(self.sizes)]
            return replace(x, micro_batch_size=int(self.sizes[choices[rng.integers(len(choices))]]))
        if kind < 0.18 and len(self.degrees) > 1:
            cp, ep = self.degrees[rng.integers(len(self.degrees))]
            other = replace(x, cp=cp, ep=ep)
            return other.with_workers(with_idle(other, self._space_of, rng)) if self._joins(rng) else other
        if kind < 0.34:
            return x.with_workers(self._restructure(whole, rng) * unit)
        if kind < 0.48:
            return x.with_workers(self.compact(self._whole_pools(whole, rng)) * unit)
        if kind < 0.60:
            return x.with_workers(self.compact(self._replace(whole, rng)) * unit)
        return x.with_workers(self._small_step(whole, rng) * unit)

    def neighbours(self, x: Allocation, rng: np.random.Generator) -> Iterator[Allocation]:
        """All that differ in one thing, in random order (`polygon.planning.neighbourhood`)."""
        at = self.sizes.index(x.micro_batch_size)
        settings = [(self.sizes[i], x.cp, x.ep) for i in (at - 1, at + 1) if 0 <= i < len(self.sizes)]
        settings += [(x.micro_batch_size, *how) for how in self.degrees if how != (x.cp, x.ep)]

        return near(x, self._space_of, settings, self._rates(x.micro_batch_size), rng)

    def scaled(self, x: Allocation) -> Iterator[Allocation]:
        """The same devices in the same stages, all at one tensor-parallel degree, in micro-batches as large, half or
        twice: more than one thing differs, and each alone may be worse."""
        at, unit = self.sizes.index(x.micro_batch_size), x.unit
        rows = x.stages // unit
        used = sorted(set(self.space.pool[rows.any(axis=0)].tolist()))
        for tp in sorted(set(self.space.units[np.isin(self.space.pool, used)].tolist())):
            workers = self.compact(at_degree(rows, self.space, used, tp)) * unit
            for size in self.sizes[max(0, at - 1) : at + 2] if workers.any() else ():
                yield replace(x, workers=workers, micro_batch_size=size)

    def exchanged(self, x: Allocation) -> Iterator[Allocation]:
        """With a whole pool out, or one that has no part in the place of it or beside it, in the same stages; the other
        pools as they are, and with all of their devices. No stage gets more workers than there are micro-batches."""
        devices, pool = self.space.capacity // x.unit, self.space.pool
        most = self.decoder.problem.batch.global_batch // x.micro_batch_size
        own = x.stages // x.unit
        used = self.space.used(own)
        idle = np.setdiff1d(np.unique(pool[devices[pool] > 0]), np.flatnonzero(used))
        filled = (own * (devices / np.maximum(used, 1))[pool]).astype(np.int64)
        filled = np.where(filled.sum(axis=1, keepdims=True) <= most, filled, own)
        for rows, p in itertools.product((own, filled), np.flatnonzero(used).tolist()):
            without = np.where(pool == p, 0, rows)
            leaving = rows - without
            part, tp = leaving.sum(axis=1) / leaving.sum(), int(self.space.units[leaving.any(axis=0)].max())
            if without.any():
                yield x.with_workers(self.compact(without) * x.unit)
            for c in np.flatnonzero(np.isin(pool, idle) & (self.space.units == tp)):
                for others in (without, rows):
                    changed, room = others.copy(), np.maximum(most - others.sum(axis=1), 0)
                    changed[:, c] = np.minimum(part * (devices[pool[c]] // tp), room)
                    if changed.any():
                        yield x.with_workers(self.compact(changed) * x.unit)

    def _small_step(self, x: Allocation, rng: np.random.Generator) -> np.ndarray:
        """A random move of some workers among the stages that there are, and at times a new one somewhere.

        As all such steps it takes and gives workers in units (`Allocation.unit`).
        """
        rows = x.stages
        if len(rows) < self.space.groups and rng.random() < NEW_STAGE:
            rows = np.insert(rows, int(rng.integers(len(rows) + 1)), 0, axis=0)
        return self.compact(self._space_of(len(rows), x.unit).neighbour(rows, rng))

    def _space_of(self, stages: int, unit: int) -> AllocationSpace:
        """The space of so many stages, whose units are of so many groups each."""
        if (stages, unit) not in self._spaces:
            self._spaces[stages, unit] = replace(self.space, groups=stages, units=self.space.units * unit)
        return self._spaces[stages, unit]

    def _whole_pools(self, x: Allocation, rng: np.random.Generator) -> np.ndarray:
        """Drop, add or re-spread a region, a pool, or a device type everywhere, or in a stage of its own; or change its
        degree."""
        pools = self.decoder.problem.cluster.pools
        classes, workers, devices = self.decoder.classes, x.workers, self.space.capacity
        (open_,) = devices[self.space.pool].nonzero()
        pool = pools[classes[int(open_[rng.integers(len(open_))])][0]]
        kind = rng.integers(4)
        if kind == 0:
            chosen = {p.index for p in pools if p.region == pool.region}
        elif kind == 1:
            chosen = {p.index for p in pools if p.device.name == pool.device.name}
        else:
            chosen = {pool.index}
        columns = [c for c, (p, _) in enumerate(classes) if p in chosen]
        result = workers.copy()
        used = result[:, columns].sum() > 0
        if used and rng.random() < 0.4:
            result[:, columns] = 0
            return result
        rows = np.flatnonzero(workers.any(axis=1))
        degrees = sorted({classes[c][1] for c in columns})
        tp = degrees[int(rng.integers(len(degrees)))]
        if used and rng.random() < 0.6:
            result = self._change_degree(result, columns, tp)
            if not self._joins(rng):
                return result
            return with_idle(x.with_workers(result * x.unit), self._space_of, rng, columns) // x.unit
        result[:, columns] = 0
        if rng.random() < APART and len(rows) < self.space.groups:
            beside = np.flatnonzero(result[:, self.region_of_class == pool.region].any(axis=1))
            near_by = len(beside) > 0 and rng.random() < 0.5
            at = int(rng.choice(beside) + rng.integers(2) if near_by else rng.integers(len(rows) + 1))
            result, rows = np.insert(result, at, 0, axis=0), np.array([at])
        elif rng.random() < 0.5 and len(rows) > 1:
            rows = rows[[int(rng.integers(len(rows)))]]
        for c in columns:
            if classes[c][1] == tp:
                result[rows, c] = even_parts(
                    int(devices[classes[c][0]]) // (tp * x.unit), len(rows), int(rng.integers(len(rows)))
                )
        return result

    def _replace(self, x: Allocation, rng: np.random.Generator) -> np.ndarray:
        """A stage's workers of one class make room for idle ones of another that are about as quick together.

        Between stages whose speeds are in balance such a step is rarely a series of steps that are no worse each.
        """
        result = x.workers.copy()
        cells = np.argwhere(result)
        s, c = cells[rng.integers(len(cells))]
        lost = int(result[s, c])
        result[s, c] = 0
        space = self._space_of(len(result), x.unit)
        free = space.free(result)[space.pool] // space.units
        free[c] = 0
        idle = np.flatnonzero(free > 0)
        if not len(idle):
            return x.workers
        d = idle[rng.integers(len(idle))]
        rates = self._rates(x.micro_batch_size)
        wanted = round(lost * rates[c] / rates[d] * (1.0, 1.0, 0.75, 1.5)[rng.integers(4)])
        result[s, d] += min(max(1, wanted), free[d])
        return result

    def _rates(self, micro_batch_size: int) -> np.ndarray:
        """Of a worker of each class, as in `block_rates`."""
        if micro_batch_size not in self._block_rates:
            self._block_rates[micro_batch_size] = block_rates(self.decoder, micro_batch_size)
        return self._block_rates[micro_batch_size]

    def _change_degree(self, workers: np.ndarray, columns: list[int], tp: int) -> np.ndarray:
        """The same devices in the same stages at another tensor-parallel degree."""
        classes = self.decoder.classes
        result = workers.copy()
        for target in columns:
            if classes[target][1] != tp:
                continue
            same = [c for c in columns if classes[c][0] == classes[target][0]]
            devices = sum(workers[:, c] * classes[c][1] for c in same)
            result[:, same] = 0
            result[:, target] = devices // tp
        return result

    def _joins(self, rng: np.random.Generator) -> bool:
        """Whether idle devices join in where a degree changes."""
        return self.space.classes <= MOST_LISTED and rng.random() < JOINING

    def _restructure(self, x: Allocation, rng: np.random.Generator) -> np.ndarray:
        """Split a stage into two, merge two neighbours, move a stage to another place, turn some stages in a row round,
        or halve all widths."""
        workers, rows = x.workers, list(x.stages)
        kind = rng.integers(5)
        if kind == 3:
            halved = (workers + 1) // 2
            return halved if (halved != workers).any() else workers
        if kind == 0 and len(rows) < self.space.groups:
            s = int(rng.integers(len(rows)))
            part = (rows[s] + rng.integers(0, 2, size=rows[s].shape)) // 2 if rng.random() < 0.5 else None
            if part is None:
                keep = rng.random(rows[s].shape) < 0.5
                part = np.where(keep, rows[s], 0)
            rows[s : s + 1] = [part, rows[s] - part]
        elif kind == 1 and len(rows) > 1:
            s = int(rng.integers(len(rows) - 1))
            rows[s : s + 2] = [rows[s] + rows[s + 1]]
        elif kind == 4 and len(rows) > 1:
            first, end = sorted(rng.choice(len(rows) + 1, size=2, replace=False).tolist())
            rows[first:end] = rows[first:end][::-1]
        elif len(rows) > 1:
            row = rows.pop(int(rng.integers(len(rows))))
            rows.insert(int(rng.integers(len(rows) + 1)), row)
        return self.compact(np.array(rows))

    def compact(self, workers: np.ndarray) -> np.ndarray:
        """Stages first, then the empty rows."""
        result = np.zeros((self.space.groups, self.space.classes), dtype=np.int64)
        rows = workers[workers.any(axis=1)]
        result[: len(rows)] = rows
        return result

    def crossover(self, a: Allocation, b: Allocation, rng: np.random.Generator) -> Allocation:
        """A repaired mixture of the matrices; the setting of one parent."""
        mixed = self.space.crossover(a.workers, b.workers, rng)
        return (a if rng.random() < 0.5 else b).with_workers(self.compact(mixed))

    def key(self, x: Allocation) -> Hashable:
        """Stages and setting."""
        return x.key


@dataclass(frozen=True, slots=True)
class NothingNew:
    """Stop where so many allocations in a row were met before: of few devices there are soon no others."""

    candidates: Candidates
    most: int = 2_000

    def reason(self, progress: Progress) -> str | None:
        """As `solvers.stop.Stop` has it."""
        return "nothing new" if self.candidates.old_in_a_row >= self.most else None

    def evaluations_left(self, progress: Progress) -> float:
        """Until it looks again."""
        return max(1.0, self.most - self.candidates.old_in_a_row)


class ExactCandidates(Candidates):
    """The same allocations, valued by the exact simulation of the decoded plan.

    `met` hears of all values before there is another.
    """

    def __init__(
        self,
        decoder: Decoder,
        stages: int,
        met: Callable[[Mapping[Hashable, float]], None] = lambda values: None,
    ) -> None:
        super().__init__(decoder, stages)
        self._met = met
        self._values: dict[Hashable, float] = {}
        self._known_s = math.inf
        self._near: tuple[Hashable, list[Allocation]] = None, []
        """An allocation by its key, and what of its neighbours is not yet taken."""
        self.bills: list[tuple[Bill, Allocation]] = []
        """What every allocation evaluated costs."""

    def neighbour(self, x: Allocation, rng: np.random.Generator) -> Allocation:
        """The best by the fluid objective of a few steps away, or the next best of all one change away: exact values
        are dear, most steps are bad."""
        if self.space.classes <= MOST_LISTED and rng.random() < LISTED:
            listed = self._listed(x, rng)
            while listed:
                y = listed.pop()
                if self.key(y) not in self._values:
                    return y
        steps = [super(ExactCandidates, self).neighbour(x, rng) for _ in range(12)]
        values = np.array([self.decoder.value(step) for step in steps])
        # Steps of idle workers alone lead to the same plan: mostly the best of all.
        values[np.isclose(values, self.decoder.value(x), rtol=10.0**-DIGITS, atol=0.0)] = math.inf
        return steps[int(np.argmin(values))]

    def _listed(self, x: Allocation, rng: np.random.Generator) -> list[Allocation]:
        """What is one change away and not yet taken, the best by the fluid objective last."""
        if self._near[0] != x.key:
            found: dict[str, tuple[float, Allocation]] = {f"{self.decoder.value(x):.{DIGITS}g}": (math.inf, x)}
            for y in itertools.islice(self.neighbours(x, rng), MOST_NEAR):
                value = self.decoder.value(y)
                found.setdefault(f"{value:.{DIGITS}g}", (value, y))  # one plan, whoever is idle beside it
            order = sorted((entry for entry in found.values() if entry[0] < math.inf), key=lambda entry: -entry[0])
            self._near = x.key, [y for _, y in order]
        return self._near[1]

    def met(self) -> Iterator[tuple[Allocation, float]]:
        """Every allocation that was evaluated and has a plan, and its value."""
        for bill, x in self.bills:
            yield x, value_of(self.decoder.problem, self.decoder.objective, bill)

    def evaluate(self, x: Allocation) -> float:
        """The objective, exactly; what was evaluated before is remembered."""
        key = self.key(x)
        if key not in self._values:
            self._met(self._values)
            plan = self.decoder.decode(x, relax=False, known_s=(1 + RUNNER_UP) * self._known_s)
            self._values[key] = math.inf
            if isinstance(plan, Plan):
                bill = self.decoder.bill(plan)
                self.bills.append((bill, x))
                self._values[key] = value_of(self.decoder.problem, self.decoder.objective, bill)
                if self.decoder.objective is STEP_TIME and self._values[key] < OVER_LIMIT:
                    self._known_s = min(self._known_s, bill.step_s)
        return self._values[key]


class GroupCandidates(AllocationProblem):
    """Whole regions dealt to a fixed number of stages, for the ants: value, weight and affinity.

    Classes are pools at one tensor-parallel degree; the micro-batch size is fixed.
    """

    def __init__(self, decoder: Decoder, stages: int, micro_batch_size: int) -> None:
        pools = decoder.problem.cluster.pools
        super().__init__(
            AllocationSpace(
                groups=stages,
                capacity=np.array([pool.devices for pool in pools]),
                pool=np.array([p for p, _ in decoder.classes]),
                units=np.array([t for _, t in decoder.classes]),
            )
        )
        self.decoder = decoder
        self.micro_batch_size = micro_batch_size

    def evaluate(self, x: np.ndarray) -> float:
        """The decoder's objective at the fluid step time."""
        return self.decoder.value(Allocation(workers=x, micro_batch_size=self.micro_batch_size))

    def weight(self) -> np.ndarray:
        """Micro-batches per second of one worker in a block, shape (classes,)."""
        return block_rates(self.decoder, self.micro_batch_size)

    def affinity(self) -> np.ndarray:
        """How well two classes combine gradients: 1 / (1 + a gradient's seconds over the median)."""
        bank = self.decoder.bank(Setting(self.micro_batch_size))
        blocks = self.decoder.problem.model.blocks / self.space.groups
        per_block = float(bank.parameters[0, 2] - bank.parameters[0, 1]) * int(bank.tp[0]) * bank.gradient_bytes
        return self._closeness(bank, per_block * blocks * bank.gradient_ratio)

    def next_affinity(self) -> np.ndarray:
        """How well one class passes activations to another in the next stage."""
        bank = self.decoder.bank(Setting(self.micro_batch_size))
        return self._closeness(bank, bank.activation_wire * bank.micro_batches / self.space.groups)

    def _closeness(self, bank: Bank, n_bytes: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            seconds = (
                bank.links.latency_s[np.ix_(bank.pool, bank.pool)]
                + n_bytes[np.ix_(bank.region, bank.region)] / bank.links.bytes_per_s[np.ix_(bank.pool, bank.pool)]
            )
        finite = seconds[np.isfinite(seconds)]
        scale = float(np.median(finite[finite > 0])) if (finite > 0).any() else 1.0
        return np.where(np.isfinite(seconds), 1 / (1 + seconds / scale), 1e-6)
