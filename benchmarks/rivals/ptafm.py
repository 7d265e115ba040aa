"""PTAFM's two objectives, exactly as its programs compute them.

Both group data centers into pipeline stages. A center with more power than a stage needs is split first: full stages
are cut off until less than a stage is left, which is then grouped like a small center.

**Ants** (groups of the small centers), with E_jk = latency_ms + MB / (MB/s): milliseconds and seconds are added.

    sum over groups of  max over j of  sum over k != j of  E_jk   +   2 sqrt(sum (P_g - C)^2 / stages)

**Genetic** (all stages, the order inside a stage matters), with E_jk = latency + size / bandwidth in whatever units:

    sum over stages of max E_jk   +   2 * shortest path over stages   +   5 sqrt(sum (P_g - C)^2 / stages)

where the length between two stages is the longest E_jk met by a walk through both, which advances in the stage whose
power so far is the smaller; and P_g counts a split center whole wherever a part of it is. P is 7 for an A100 and 1 for
a T4, C the total over the stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.rivals.dtfm_kernels import shortest_path
from polygon.domain.errors import InputError, require
from solvers.allocation import AllocationProblem, AllocationSpace
from solvers.problem import SearchProblem

Stages = tuple[tuple[int, ...], ...]
"""Parts (their numbers), stage by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A data center, a full stage cut off a large one, or what is left of it."""

    center: int
    power: int
    full: bool
    """Whether it is a stage by itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Centers:
    """PTAFM's instance.

    Parameters
    ----------
    power : ndarray of int, shape (centers,)
        7 for an A100, 1 for a T4.
    parts : tuple of Part
        After the large centers are split.
    ant_link, genetic_link : ndarray, shape (centers, centers)
        E of the two objectives, in their own units.
    ant_link_s : ndarray, shape (centers, centers)
        The ants' E in consistent units [s].
    """

    stages: int
    power: np.ndarray
    parts: tuple[Part, ...]
    ant_link: np.ndarray
    ant_link_s: np.ndarray
    genetic_link: np.ndarray

    @property
    def mean_power(self) -> float:
        """Power of a stage if all were equal."""
        return float(self.power.sum()) / self.stages

    @property
    def small(self) -> tuple[int, ...]:
        """Numbers of the parts that are to be grouped."""
        return tuple(i for i, part in enumerate(self.parts) if not part.full)

    @property
    def full(self) -> tuple[int, ...]:
        """Numbers of the parts that are stages by themselves."""
        return tuple(i for i, part in enumerate(self.parts) if part.full)


def centers_from_document(document: Mapping[str, Any], name: str = "ptafm") -> Centers:
    """PTAFM's instance from its exchange format: device counts, both programs' networks and message sizes.

    Raises
    ------
    InputError
        A key is missing or a matrix has the wrong shape.
    """
    try:
        stages = int(document["num_stages"])
        fast, slow = int(document["power_units"]["a100"]), int(document["power_units"]["t4"])
        devices = [(int(center["a100_count"]), int(center["t4_count"])) for center in document["devices"]]
        network, message_mb = document["aco_network"], float(document["aco"]["message_megabyte"])
        latency_ms = np.array(network["latency_ms"], dtype=float)
        mb_per_s = np.array(network["bandwidth_gbit_per_s"], dtype=float) * 125
        genetic = document["ga_network"]
        latency, bandwidth = (np.array(genetic[key], dtype=float) for key in ("latency", "bandwidth"))
        sizes = {float(document["ga"][key]) for key in ("dp_message", "pp_message")}
    except KeyError as error:
        raise InputError(f"{name}: {error.args[0]}: not found, expected by the PTAFM format") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: found {error}, expected counts and matrices of numbers") from None
    n = len(devices)
    for label, matrix in (("latency_ms", latency_ms), ("bandwidth_gbit_per_s", mb_per_s), ("latency", latency)):
        require(matrix.shape == (n, n), f"{name}: {label}", matrix.shape, f"shape ({n}, {n})")
    require(bandwidth.shape == (n, n), f"{name}: bandwidth", bandwidth.shape, f"shape ({n}, {n})")
    require(len(sizes) == 1, f"{name}: ga", sorted(sizes), "one message size for both terms")
    require(2 <= stages <= 12, f"{name}: num_stages", stages, "2..12 (the path is solved exactly)")
    power = np.array([fast * a + slow * t for a, t in devices])
    parts = [
        part
        for center, (a, t) in enumerate(devices)
        for part in _split(center, a, t, (fast, slow), float(power.sum()) / stages)
    ]
    return Centers(
        stages=stages,
        power=power,
        parts=tuple(parts),
        ant_link=latency_ms + message_mb / mb_per_s,
        ant_link_s=latency_ms / 1e3 + message_mb / mb_per_s,
        genetic_link=latency + sizes.pop() / bandwidth,
    )


def _split(center: int, fast: int, slow: int, power: tuple[int, int], needed: float) -> list[Part]:
    """Full stages of a center, fast devices first, and what is left.

    Where fast devices alone overshoot, one less of them topped up with slow ones is taken if that wastes less.
    """
    parts = []
    while power[0] * fast + power[1] * slow >= needed:
        options = []
        most = min(fast, math.ceil(needed / power[0]))
        for a in {most, max(0, most - 1)}:
            t = max(0, math.ceil((needed - power[0] * a) / power[1]))
            if t <= slow:
                options.append((power[0] * a + power[1] * t, -a, a, t))
        if not options:
            break
        total, _, a, t = min(options)
        parts.append(Part(center=center, power=total, full=True))
        fast, slow = fast - a, slow - t
    left = power[0] * fast + power[1] * slow
    return [*parts, Part(center=center, power=left, full=False)] if left else parts


class AntProblem(AllocationProblem):
    """The ants' objective: small parts into the stages that full ones leave.

    Parameters
    ----------
    consistent_units : bool
        Latency in seconds like the transfer, in place of the original's milliseconds plus seconds. On PTAFM's own
        instance this changes the best groups: 26.6 s of links inside stages in place of 48.2 s.
    """

    def __init__(self, centers: Centers, *, consistent_units: bool = False) -> None:
        small = [centers.parts[i] for i in centers.small]
        groups = centers.stages - len(centers.full)
        require(1 <= groups <= len(small), "num_stages", centers.stages, f"{len(centers.full) + 1} or more")
        space = AllocationSpace(
            groups=groups, capacity=np.ones(len(small), dtype=int), ordered=False, use_all=True
        )  # fmt: skip
        super().__init__(space)
        self.centers = centers
        at = [part.center for part in small]
        link = centers.ant_link_s if consistent_units else centers.ant_link
        self.link = link[np.ix_(at, at)] * (1 - np.eye(len(at)))
        self.power = np.array([part.power for part in small])

    def communication(self, x: np.ndarray) -> float:
        """Sum over groups of the largest sum of links of a member."""
        return float(((x @ self.link) * x).max(axis=1).sum())

    def imbalance(self, x: np.ndarray) -> float:
        """Root of the squared deviations of the groups' power over all stages."""
        return math.sqrt(float(((x @ self.power - self.centers.mean_power) ** 2).sum()) / self.centers.stages)

    def evaluate(self, x: np.ndarray) -> float:
        """The ants' cost."""
        return self.communication(x) + 2 * self.imbalance(x)

    def weight(self) -> np.ndarray:
        """Power, which the groups should share evenly."""
        return self.power.astype(float)

    def affinity(self) -> np.ndarray:
        """Short links are desirable."""
        return np.divide(self.link[self.link > 0].min(), self.link, out=np.ones_like(self.link), where=self.link > 0)

    def groups(self, x: np.ndarray) -> list[list[int]]:
        """Centers, counted from 1 as PTAFM does, by group; full stages are not among them."""
        return [[self.centers.parts[self.centers.small[c]].center + 1 for c in np.flatnonzero(row)] for row in x]


class GeneticProblem(SearchProblem[Stages]):
    """The genetic objective, over stages with their parts in order; `least_share` of the mean power is required."""

    def __init__(self, centers: Centers, *, least_share: float = 0.6) -> None:
        self.centers = centers
        self.least_power = least_share * centers.mean_power
        self._length = lru_cache(maxsize=None)(self._walk)
        self._inside = lru_cache(maxsize=None)(self._longest_link)

    def evaluate(self, x: Stages) -> float:
        """The genetic cost; inf where a stage has too little power (by its true parts)."""
        parts = self.centers.parts
        if any(sum(parts[i].power for i in stage) < self.least_power for stage in x):
            return math.inf
        n = len(x)
        distance = np.zeros((n, n))
        for a, b in itertools.combinations(range(n), 2):
            distance[a, b] = distance[b, a] = self._length(x[a], x[b])
        whole = [sum(int(self.centers.power[parts[i].center]) for i in stage) for stage in x]
        deviation = math.sqrt(sum((power - self.centers.mean_power) ** 2 for power in whole) / n)
        return sum(self._inside(stage) for stage in x) + 2 * float(shortest_path(distance)[0]) + 5 * deviation

    def _longest_link(self, stage: tuple[int, ...]) -> float:
        at = [self.centers.parts[i].center for i in stage]
        return max((self.centers.genetic_link[a, b] for a, b in itertools.combinations(at, 2)), default=0.0)

    def _walk(self, first: tuple[int, ...], second: tuple[int, ...]) -> float:
        """Longest link met by walking through both stages by power; it ends early where one stage is used up.

        In a stage with several members a split center counts with what is left of it, alone with its full stage.
        """
        parts, link = self.centers.parts, self.centers.genetic_link
        i = j = 0
        sums = [parts[first[0]].power, parts[second[0]].power]
        longest = link[parts[first[0]].center, parts[second[0]].center]
        while i + 1 < len(first) or j + 1 < len(second):
            before = (i, j)
            while sums[0] > sums[1] and j + 1 < len(second):
                j += 1
                sums[1] += parts[second[j]].power
                longest = max(longest, link[parts[first[i]].center, parts[second[j]].center])
            while sums[1] >= sums[0] and i + 1 < len(first):
                i += 1
                sums[0] += parts[first[i]].power
                longest = max(longest, link[parts[first[i]].center, parts[second[j]].center])
            if before == (i, j):
                break
        return float(longest)

    def random(self, rng: np.random.Generator) -> Stages:
        """Full parts alone, the small ones dealt to the other stages; stages in random order."""
        groups = self.centers.stages - len(self.centers.full)
        small = rng.permutation(self.centers.small)
        cuts = np.sort(rng.choice(np.arange(1, len(small)), size=groups - 1, replace=False))
        stages = [tuple(int(i) for i in group) for group in np.split(small, cuts)] + [(i,) for i in self.centers.full]
        return tuple(stages[i] for i in rng.permutation(len(stages)))

    def neighbour(self, x: Stages, rng: np.random.Generator) -> Stages:
        """A part moves to another place, or two parts or two stages change places."""
        stages = [list(stage) for stage in x]
        open_stages = [s for s, stage in enumerate(stages) if not self.centers.parts[stage[0]].full]
        kind = rng.integers(3)
        s, t = (open_stages[i] for i in rng.integers(len(open_stages), size=2))
        i, j = rng.integers(len(stages[s])), rng.integers(len(stages[t]))
        if kind == 0 and (len(stages[s]) > 1 or s == t):
            part = stages[s].pop(i)
            stages[t].insert(int(rng.integers(len(stages[t]) + 1)), part)
        elif kind == 1:
            stages[s][i], stages[t][j] = stages[t][j], stages[s][i]
        else:
            a, b = rng.integers(len(stages), size=2)
            stages[a], stages[b] = stages[b], stages[a]
        return tuple(tuple(stage) for stage in stages)

    def key(self, x: Stages) -> Hashable:
        """The solution itself."""
        return x

    def solutions(self) -> Iterator[Stages]:
        """Every ordered solution whose stages have enough power.

        The length between two stages is not quite symmetric (ties of power), so the order of stages counts too.
        """
        parts = self.centers.parts
        groups = self.centers.stages - len(self.centers.full)
        for partition in _partitions(self.centers.small, groups):
            if any(sum(parts[i].power for i in group) < self.least_power for group in partition):
                continue
            for orders in itertools.product(*(itertools.permutations(group) for group in partition)):
                yield from itertools.permutations([*orders, *((i,) for i in self.centers.full)])


def _partitions(items: tuple[int, ...], groups: int) -> Iterator[list[list[int]]]:
    """Every way to part items into so many groups that are not empty."""
    if len(items) < groups or groups == 0:
        if not items and groups == 0:
            yield []
        return
    first, rest = items[0], items[1:]
    for partition in _partitions(rest, groups - 1):
        yield [[first], *partition]
    for partition in _partitions(rest, groups):
        for i in range(len(partition)):
            yield [*partition[:i], [first, *partition[i]], *partition[i + 1 :]]
