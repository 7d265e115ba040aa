"""DT-FM's objective (Yuan et al., NeurIPS 2022), exactly as its scheduler computes it, and a solver for it.

All stages are equally wide and every device is a pipeline's member. The cost of a placement is

    max over stages, devices i of a stage:  sum over j != i of 2 (latency_ij + G / (width * bandwidth_ij))
    + 2 * shortest Hamiltonian path over the stages,

the length between two stages being the longest edge of the perfect matching whose longest edge is shortest, with edges
latency_ij + A / bandwidth_ij (G gradient bytes of a stage, A activation bytes of a device per step). It ignores
compute, so it serves here to compare searches, not to predict.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from benchmarks.rivals import dtfm_kernels as kernels
from polygon.domain.errors import InputError, require
from solvers.population import Search, Solver
from solvers.problem import SearchProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """Devices to be placed, by kind: devices of one kind are interchangeable.

    Parameters
    ----------
    stages, width : int
        Stages, and devices per stage.
    kind : ndarray of int, shape (stages * width,)
        Kind of each device.
    hop_s, pair_s : ndarray, shape (kinds, kinds)
        Edge length [s] between consecutive stages, and pair time [s] inside a stage; the diagonal holds for two
        devices of one kind.
    """

    name: str
    stages: int
    width: int
    kind: np.ndarray
    hop_s: np.ndarray
    pair_s: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Devices of each kind, shape (kinds,)."""
        return np.bincount(self.kind, minlength=len(self.hop_s))


def scenario_from_document(document: Mapping[str, Any], name: str = "scenario") -> Scenario:
    """Scenario from matrices and a workload.

    The matrices are per device, or per region where the document lists `regions` with their numbers of devices (the
    diagonal then holds for two devices of one region).

    Raises
    ------
    InputError
        A key is missing, a matrix has the wrong shape, is negative or not symmetric, or the devices do not fill the
        stages.
    """
    try:
        workload = document["workload"]
        latency_s = np.array(document["latency_ms"], dtype=float) / 1e3
        gbit_per_s = np.array(document["bandwidth_gbit_per_s"], dtype=float)
        stages, width = int(workload["pipeline_stages"]), int(workload["stage_width_devices"])
        if "regions" in document:
            counts = [int(region["devices"]) for region in document["regions"]]
            region = np.repeat(np.arange(len(counts)), counts)
            latency_s, gbit_per_s = latency_s[np.ix_(region, region)], gbit_per_s[np.ix_(region, region)]
        gradient_gbit = 8 * float(workload["gradient_gigabyte_per_stage"])
        activation_gbit = 8 * float(workload["activation_gigabyte_per_device_per_iteration"])
    except KeyError as error:
        raise InputError(f"{name}: {error.args[0]}: not found, expected by the DT-FM format") from None
    except (TypeError, ValueError, IndexError) as error:
        raise InputError(f"{name}: found {error}, expected matrices of numbers and a workload") from None
    devices = stages * width
    for label, matrix in (("latency_ms", latency_s), ("bandwidth_gbit_per_s", gbit_per_s)):
        require(matrix.shape == (devices, devices), f"{name}: {label}", matrix.shape, f"shape ({devices}, {devices})")
        require(np.array_equal(matrix, matrix.T), f"{name}: {label}", "an asymmetric matrix", "a symmetric one")
    apart = ~np.eye(devices, dtype=bool)
    require(bool((latency_s[apart] >= 0).all()), f"{name}: latency_ms", float(latency_s.min()), "numbers >= 0")
    require(
        bool((gbit_per_s[apart] > 0).all()), f"{name}: bandwidth_gbit_per_s", float(gbit_per_s.min()), "numbers > 0"
    )
    require(2 <= stages <= 12, f"{name}: pipeline_stages", stages, "2..12 (the path is solved exactly)")
    require(width <= 63, f"{name}: stage_width_devices", width, "at most 63")
    np.fill_diagonal(gbit_per_s, np.inf)
    hop_s = latency_s + activation_gbit / gbit_per_s
    pair_s = 2 * (latency_s + gradient_gbit / (gbit_per_s * width))
    kind = _kinds(hop_s, pair_s)
    return Scenario(
        name=str(document.get("name", name)),
        stages=stages,
        width=width,
        kind=kind,
        hop_s=_by_kind(hop_s, kind),
        pair_s=_by_kind(pair_s, kind),
    )


def _kinds(hop_s: np.ndarray, pair_s: np.ndarray) -> np.ndarray:
    """Numbers of kinds: two devices are of one kind when exchanging them changes no matrix."""
    devices = len(hop_s)
    kind = np.full(devices, -1)
    kinds = 0
    for i in range(devices):
        if kind[i] >= 0:
            continue
        for j in range(i, devices):
            others = np.ones(devices, dtype=bool)
            others[[i, j]] = False
            if kind[j] < 0 and all(np.array_equal(m[i, others], m[j, others]) for m in (hop_s, pair_s)):
                kind[j] = kinds
        kinds += 1
    return kind


def _by_kind(matrix_s: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """A device matrix as a matrix of kinds."""
    kinds = int(kind.max()) + 1
    reduced = np.zeros((kinds, kinds))
    for a in range(kinds):
        for b in range(kinds):
            pairs = matrix_s[np.ix_(kind == a, kind == b)]
            if a != b:
                reduced[a, b] = pairs[0, 0]
            elif len(pairs) > 1:
                reduced[a, b] = pairs[0, 1]
    return reduced


class DtfmProblem(SearchProblem[np.ndarray]):
    """Placements of a scenario: the kinds of all places, stage after stage (the order of stages is free)."""

    def __init__(self, scenario: Scenario, lower_bound_s: float = 0.0) -> None:
        self.scenario = scenario
        self._lower_bound_s = lower_bound_s

    def evaluate(self, x: np.ndarray) -> float:
        """DT-FM's cost [s]."""
        return float(kernels.total_s(x, self.scenario.stages, self.scenario.hop_s, self.scenario.pair_s)[0])

    def random(self, rng: np.random.Generator) -> np.ndarray:
        """All devices in random places."""
        return rng.permutation(self.scenario.kind)

    def neighbour(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Two devices of different kinds and stages change places."""
        y = x.copy()
        width = self.scenario.width
        for _ in range(64):
            p, q = rng.integers(len(x), size=2)
            if p // width != q // width and x[p] != x[q]:
                y[[p, q]] = x[[q, p]]
                break
        return y

    def crossover(self, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Some stages of one parent; the devices left fill the rest in the order of the other."""
        stages, width = self.scenario.stages, self.scenario.width
        keep = np.repeat(rng.random(stages) < 0.5, width)
        child = a.copy()
        left = self.scenario.counts - np.bincount(a[keep], minlength=len(self.scenario.counts))
        rest = []
        for kind in b:
            if left[kind] > 0:
                left[kind] -= 1
                rest.append(kind)
        child[~keep] = rest
        return child

    def key(self, x: np.ndarray) -> Hashable:
        """Equal up to the order of devices in a stage and of stages."""
        rows = np.sort(x.reshape(self.scenario.stages, -1), axis=1)
        return rows[np.lexsort(rows.T[::-1])].tobytes()

    def lower_bound(self) -> float:
        """What the caller has proved."""
        return self._lower_bound_s

    def path(self, x: np.ndarray) -> np.ndarray:
        """A placement with its stages in the order of the shortest path."""
        order = kernels.total_s(x, self.scenario.stages, self.scenario.hop_s, self.scenario.pair_s)[1]
        return x.reshape(self.scenario.stages, -1)[order].ravel()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAnnealing(Solver):
    """Annealing of DT-FM's objective with the stages in path order, so that a move touches few hops.

    Cycles from random placements: half of them hot with a strong pull, half cool with a weak one. The pull adds, per
    hop, the square root of the number of devices without a partner of their own island in the next stage. The square
    root rewards a hop that is rid of all of them over two that are half rid, which leads out of plateaus where the
    longest edge hides all progress. Temperatures and pull are parts of the mean hop of a random device pair.
    """

    cycle_steps: int = 20_000
    chunk_steps: int = 5_000
    """After which the stop rule is asked."""
    hot: tuple[float, float, float] = (1.1, 0.035, 1.4)
    """First and last temperature, and pull, of every other cycle."""
    cool: tuple[float, float, float] = (0.5, 0.01, 0.2)
    """The same of the cycles between."""

    def explore(self, search: Search[np.ndarray], started: list[tuple[float, np.ndarray]]) -> bool:
        """See `solvers.population.Solver.explore`; every step of annealing counts as an evaluation."""
        problem = cast(DtfmProblem, search.problem)
        scenario = problem.scenario
        mean_hop_s = float(scenario.hop_s[np.ix_(scenario.kind, scenario.kind)].mean())
        first = started[0][1] if started else None
        while True:
            for settings in (self.hot, self.cool):
                x = problem.random(search.rng) if first is None else problem.path(first)
                first = None
                self._cycle(search, scenario, x, tuple(mean_hop_s * part for part in settings))
                search.round()

    def _cycle(
        self, search: Search[np.ndarray], scenario: Scenario, x: np.ndarray, settings: tuple[float, ...]
    ) -> None:
        temperature_s, last_s, pull_s = settings
        cooling = (last_s / temperature_s) ** (1 / self.cycle_steps)
        best, energy = x.copy(), np.inf
        done = 0
        while done < self.cycle_steps:
            left = search.stop.evaluations_left(search.check())
            steps = int(min(self.chunk_steps, self.cycle_steps - done, left))
            energy, temperature_s = kernels.anneal(
                x, scenario.stages, scenario.hop_s, scenario.pair_s, pull_s, steps, temperature_s, cooling, best,
                energy, search.rng,
            )  # fmt: skip
            search.record(best.copy(), search.problem.evaluate(best), evaluations=steps)
            done += steps
