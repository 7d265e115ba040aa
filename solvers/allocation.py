"""Integer allocations: how many units of each class serve each group.

An allocation is a matrix X of whole numbers, groups x classes. A unit of class c takes `units[c]` from pool `pool[c]`,
and no pool gives more than it has (so two classes may be two ways to use the same pool). The order of the rows is
part of the solution, unless the space says that groups are interchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from solvers.problem import SearchProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocationSpace:
    """All allocations of classes to groups.

    Parameters
    ----------
    groups : int
        Rows of X.
    capacity : ndarray of int, shape (pools,)
        What each pool has.
    pool, units : ndarray of int, shape (classes,), optional
        Which pool a class draws from, and how much one unit of it takes; by default every class is its own pool.
    ordered : bool
        Whether exchanging two rows changes the solution.
    use_all : bool
        Whether every pool must be used up (as far as its classes' units allow).
    empty_groups : bool
        Whether a row may be all zero.
    """

    groups: int
    capacity: np.ndarray
    pool: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    units: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ordered: bool = True
    use_all: bool = False
    empty_groups: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "capacity", np.asarray(self.capacity, dtype=np.int64))
        pools = len(self.capacity)
        set_field(self, "pool", np.asarray(self.pool if len(self.pool) else np.arange(pools), dtype=np.int64))
        set_field(self, "units", np.asarray(self.units if len(self.units) else np.ones(self.classes), dtype=np.int64))
        if self.groups < 1 or pools < 1 or len(self.units) != self.classes:
            raise ValueError("an allocation needs at least one group and one pool, and as many units as classes")
        if self.capacity.min() < 0 or self.units.min() < 1 or self.pool.min() < 0 or self.pool.max() >= pools:
            raise ValueError("capacity must be >= 0, units >= 1, pool a number of a pool")

    @property
    def classes(self) -> int:
        """Columns of X."""
        return len(self.pool)

    @cached_property
    def _classes_of_pool(self) -> list[np.ndarray]:
        return [np.flatnonzero(self.pool == p) for p in range(len(self.capacity))]

    def used(self, x: np.ndarray) -> np.ndarray:
        """What X takes from each pool, shape (pools,)."""
        return np.bincount(self.pool, weights=x.sum(axis=0) * self.units, minlength=len(self.capacity)).astype(np.int64)

    def free(self, x: np.ndarray) -> np.ndarray:
        """What X leaves in each pool, shape (pools,); negative where it takes too much."""
        found: np.ndarray = self.capacity - self.used(x)
        return found

    def feasible(self, x: np.ndarray) -> bool:
        """Whether X is an allocation of this space."""
        if x.shape != (self.groups, self.classes) or (x < 0).any():
            return False
        free = self.free(x)
        if (free < 0).any() or (not self.empty_groups and (x.sum(axis=1) == 0).any()):
            return False
        return not self.use_all or not (free[self.pool] >= self.units).any()

    def key(self, x: np.ndarray) -> Hashable:
        """Equal for allocations that differ only in the names of interchangeable groups."""
        return self.canonical(x).tobytes()

    def canonical(self, x: np.ndarray) -> np.ndarray:
        """X with interchangeable rows in one fixed order (largest first)."""
        if self.ordered:
            return x
        return x[np.lexsort(x.T[::-1])[::-1]]

    # -- making ------------------------------------------------------------------------------------------------------

    def random(self, rng: np.random.Generator) -> np.ndarray:
        """A random allocation: every pool is dealt to a few groups in random chunks.

        Half of the time nothing is left idle, else each pool keeps a random part idle.
        """
        x = np.zeros((self.groups, self.classes), dtype=np.int64)
        keep_idle = not self.use_all and rng.random() < 0.5
        spread = int(rng.integers(1, self.groups + 1))
        for p, classes in enumerate(self._classes_of_pool):
            left = int(self.capacity[p])
            if keep_idle:
                left = int(rng.integers(0, left + 1))
            if not len(classes):
                continue
            chunk = max(1, math.ceil(left / int(rng.integers(1, spread + 1))))
            while True:
                fitting = classes[self.units[classes] <= left]
                if not len(fitting):
                    break
                c = fitting[rng.integers(len(fitting))]
                count = max(1, min(chunk, left) // int(self.units[c]))
                x[rng.integers(self.groups), c] += count
                left -= count * int(self.units[c])
        return self.repair(x, rng)

    def repair(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The nearest thing to X that is an allocation: nothing over capacity, no empty group that must not be.

        Takes from random groups what is too much, gives idle units where all must be used, and moves units from rows
        with several to empty rows. Impossible only where pools are too small for the groups.
        """
        x = np.maximum(x, 0)
        free = self.free(x)
        for p in np.flatnonzero(free < 0):
            cells = [(s, c) for c in self._classes_of_pool[p] for s in np.flatnonzero(x[:, c])]
            for i in rng.permutation(len(cells)):
                s, c = cells[i]
                take = min(int(x[s, c]), math.ceil(-free[p] / self.units[c]))
                x[s, c] -= take
                free[p] += take * self.units[c]
                if free[p] >= 0:
                    break
        if not self.empty_groups:
            for s in np.flatnonzero(x.sum(axis=1) == 0):
                self._fill_row(x, int(s), rng)
        if self.use_all:
            self._use_idle(x, rng)
        return x

    def _fill_row(self, x: np.ndarray, s: int, rng: np.random.Generator) -> None:
        """Give the empty row s one unit: an idle one if there is one, else one of a row that has several."""
        idle = np.flatnonzero(self.free(x)[self.pool] >= self.units)
        if len(idle) and not self.use_all:
            x[s, idle[rng.integers(len(idle))]] = 1
            return
        rich = np.argwhere(x * (x.sum(axis=1, keepdims=True) > 1))
        if len(rich):
            source, c = rich[rng.integers(len(rich))]
            count = max(1, int(x[source, c]) // 2)
            x[source, c] -= count
            x[s, c] += count
        else:
            if not len(idle):
                self._split_unit(x, rng)
                idle = np.flatnonzero(self.free(x)[self.pool] >= self.units)
            if len(idle):
                x[s, idle[rng.integers(len(idle))]] = 1

    def _split_unit(self, x: np.ndarray, rng: np.random.Generator) -> None:
        """Replace one unit by one of a smaller class of its pool, so that something of the pool falls idle."""
        smallest = np.array([min(classes, key=self.units.__getitem__, default=0) for classes in self._classes_of_pool])[
            self.pool
        ]
        cells = np.argwhere(x * (self.units > self.units[smallest]))
        if len(cells):
            s, c = cells[rng.integers(len(cells))]
            x[s, c] -= 1
            x[s, smallest[c]] += 1

    def _use_idle(self, x: np.ndarray, rng: np.random.Generator) -> None:
        free = self.free(x)
        for p, classes in enumerate(self._classes_of_pool):
            while True:
                fitting = classes[self.units[classes] <= free[p]]
                if not len(fitting):
                    break
                c = fitting[rng.integers(len(fitting))]
                count = max(1, int(free[p] // self.units[c]) // 2)
                x[rng.integers(self.groups), c] += count
                free[p] -= count * self.units[c]

    # -- moving ------------------------------------------------------------------------------------------------------

    def neighbour(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """X after one random move: shift, exchange, exchange of rows, employ, release or transmute."""
        for _ in range(8):
            y = x.copy()
            if _MOVES[_MOVE_CHOICE[rng.integers(len(_MOVE_CHOICE))]](self, y, rng):
                if not self.empty_groups and (y.sum(axis=1) == 0).any():
                    continue
                if self.use_all:
                    self._use_idle(y, rng)
                return y
        return self.repair(x.copy(), rng)

    def _shift(self, x: np.ndarray, rng: np.random.Generator) -> bool:
        """Some units of a class go from one group to another."""
        cell = _random_cell(x, rng)
        if cell is None or self.groups < 2:
            return False
        s, c = cell
        t = _other(s, self.groups, rng)
        count = _some(int(x[s, c]), rng)
        x[s, c] -= count
        x[t, c] += count
        return True

    def _exchange(self, x: np.ndarray, rng: np.random.Generator) -> bool:
        """Two groups exchange units of two classes."""
        cell = _random_cell(x, rng)
        if cell is None or self.groups < 2:
            return False
        s, c = cell
        t = _other(s, self.groups, rng)
        others = np.flatnonzero(x[t])
        others = others[others != c]
        if not len(others):
            return False
        d = others[rng.integers(len(others))]
        give, take = _some(int(x[s, c]), rng), _some(int(x[t, d]), rng)
        if rng.random() < 0.5:
            give = take = min(give, take)
        x[s, c] -= give
        x[t, c] += give
        x[t, d] -= take
        x[s, d] += take
        return True

    def _exchange_rows(self, x: np.ndarray, rng: np.random.Generator) -> bool:
        """Two groups change places; pointless where groups are interchangeable."""
        if not self.ordered or self.groups < 2:
            return False
        s = int(rng.integers(self.groups))
        t = _other(s, self.groups, rng)
        x[[s, t]] = x[[t, s]]
        return True

    def _employ(self, x: np.ndarray, rng: np.random.Generator) -> bool:
        """Idle units join a group."""
        free = self.free(x)
        idle = np.flatnonzero(free[self.pool] >= self.units)
        if not len(idle):
            return False
        c = idle[rng.integers(len(idle))]
        x[rng.integers(self.groups), c] += _some(int(free[self.pool[c]] // self.units[c]), rng)
        return True

    def _release(self, x: np.ndarray, rng: np.random.Generator) -> bool:
        """Some units of a group fall idle."""
        cell = _random_cell(x, rng)
        if cell is None or self.use_all:
            return False
        x[cell] -= _some(int(x[cell]), rng)
        return True

    def _transmute(self, x: np.ndarray, rng: np.random.Generator) -> bool:
        """A group uses a pool through another class."""
        cell = _random_cell(x, rng)
        if cell is None:
            return False
        s, c = cell
        siblings = self._classes_of_pool[self.pool[c]]
        if len(siblings) < 2:
            return False
        d = siblings[rng.integers(len(siblings))]
        held = int(x[s, c] * self.units[c])
        if rng.random() < 0.5:
            held += int(self.free(x)[self.pool[c]])
        count = held // int(self.units[d])
        if d == c or count < 1:
            return False
        x[s, c] = 0
        x[s, d] += count
        return True

    def crossover(self, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A mixture of two allocations, repaired: whole classes from either, whole groups from either, or the mean."""
        kind = rng.integers(3)
        if kind == 0:
            x = np.where((rng.random(len(self.capacity)) < 0.5)[self.pool], a, b)
        elif kind == 1:
            x = np.where(rng.random((self.groups, 1)) < 0.5, a, b)
        else:
            x = (a + b + rng.integers(0, 2, size=a.shape)) // 2
        return self.repair(x, rng)

    # -- counting ----------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """Allocations without regard to empty groups and symmetry: no fewer than exhaustive search sees."""
        return math.prod(self._count_pool(p) for p in range(len(self.capacity)))

    def _count_pool(self, p: int) -> int:
        """Ways to deal out a pool, by counting change for every (group, class) cell."""
        capacity = int(self.capacity[p])
        ways = [1] + [0] * capacity
        for c in self._classes_of_pool[p]:
            unit = int(self.units[c])
            for _ in range(self.groups):
                for amount in range(unit, capacity + 1):
                    ways[amount] += ways[amount - unit]
        if not self.use_all:
            return sum(ways)
        smallest = min((int(self.units[c]) for c in self._classes_of_pool[p]), default=1)
        return sum(ways[max(0, capacity - smallest + 1) :])

    def solutions(self) -> Iterator[np.ndarray]:
        """Every allocation once (interchangeable groups in canonical order only)."""
        for block in self.solution_blocks():
            yield from block

    def solution_blocks(self, most: int = 4096) -> Iterator[np.ndarray]:
        """The solutions by blocks of at most so many, shape (block, groups, classes)."""
        columns = [np.array(list(self._dealings(p))) for p, classes in enumerate(self._classes_of_pool) if len(classes)]
        order = np.concatenate(self._classes_of_pool)
        sizes = [len(column) for column in columns]
        total = math.prod(sizes)
        for first in range(0, total, most):
            places = np.unravel_index(np.arange(first, min(first + most, total)), sizes)
            cells = np.concatenate([column[place] for column, place in zip(columns, places, strict=True)], axis=1)
            block = np.empty((len(cells), self.groups, self.classes), dtype=np.int64)
            block[:, :, order] = cells.reshape(len(cells), len(order), self.groups).transpose(0, 2, 1)
            if not self.empty_groups:
                block = block[np.all(block.sum(axis=2) > 0, axis=1)]
            if not self.ordered:
                block = np.array([x for x in block if np.array_equal(x, self.canonical(x))]).reshape(
                    -1, *block.shape[1:]
                )
            yield block

    def _dealings(self, p: int) -> Iterator[tuple[int, ...]]:
        """Every way to deal a pool to its (class, group) cells."""
        units = [int(self.units[c]) for c in self._classes_of_pool[p] for _ in range(self.groups)]
        idle_limit = min(units, default=1) if self.use_all else math.inf

        def deal(cell: int, left: int) -> Iterator[tuple[int, ...]]:
            if cell == len(units):
                if left < idle_limit:
                    yield ()
                return
            for count in range(left // units[cell] + 1):
                for rest in deal(cell + 1, left - count * units[cell]):
                    yield (count, *rest)

        yield from deal(0, int(self.capacity[p]))


def _random_cell(x: np.ndarray, rng: np.random.Generator) -> tuple[int, int] | None:
    """A random (group, class) with at least one unit."""
    cells = np.flatnonzero(x)
    if not len(cells):
        return None
    s, c = divmod(int(cells[rng.integers(len(cells))]), x.shape[1])
    return s, c


def _other(s: int, groups: int, rng: np.random.Generator) -> int:
    """A random group other than s; a neighbour of s half of the time."""
    if rng.random() < 0.5:
        t = s + (1 if rng.random() < 0.5 else -1)
        if 0 <= t < groups:
            return t
    t = int(rng.integers(groups - 1))
    return t + (t >= s)


def _some(n: int, rng: np.random.Generator) -> int:
    """One, half, all or a random number of n units."""
    kind = rng.integers(4)
    if kind == 0 or n <= 1:
        return min(n, 1)
    if kind == 1:
        return (n + 1) // 2
    return n if kind == 2 else int(rng.integers(1, n + 1))


_MOVES = (
    AllocationSpace._shift,
    AllocationSpace._exchange,
    AllocationSpace._exchange_rows,
    AllocationSpace._employ,
    AllocationSpace._release,
    AllocationSpace._transmute,
)
_MOVE_CHOICE = (0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 5)


class AllocationProblem(SearchProblem[np.ndarray]):
    """A problem over an allocation space; a subclass adds `evaluate`."""

    def __init__(self, space: AllocationSpace) -> None:
        self.space = space

    def random(self, rng: np.random.Generator) -> np.ndarray:
        """A random allocation."""
        return self.space.random(rng)

    def neighbour(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One random move away."""
        return self.space.neighbour(x, rng)

    def crossover(self, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A repaired mixture."""
        return self.space.crossover(a, b, rng)

    def key(self, x: np.ndarray) -> Hashable:
        """Equal up to the names of interchangeable groups."""
        return self.space.key(x)

    def solutions(self) -> Iterator[np.ndarray]:
        """Every allocation once."""
        return self.space.solutions()

    # -- what ants go by ---------------------------------------------------------------------------------------------

    def weight(self) -> np.ndarray:
        """How much one unit of each class counts towards a full group, shape (classes,); ants fill groups evenly."""
        return self.space.units.astype(float)

    def affinity(self) -> np.ndarray:
        """How desirable it is to have two classes in one group, > 0, shape (classes, classes)."""
        return np.ones((self.space.classes, self.space.classes))

    def next_affinity(self) -> np.ndarray:
        """How desirable it is to have one class in a group and the other in the next, > 0, shape (classes, classes)."""
        return np.ones((self.space.classes, self.space.classes))
