"""What micro-batches of one size cost on each class of worker, and what compute alone asks of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from scipy.optimize import linprog

from polygon.bounds.fitting import Executions, fitting_s
from polygon.bounds.stage_tiers import (
    Kinds,
)
from polygon.cost.tables import CostTables, running_sum
from polygon.domain.plan import RECOMPUTE

HELD = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Micro-batches in flight of these at which it takes a step."""
SPREADS, FEW = (3, 7), 8
"""Devices of a stage at which the bound takes a step, because they share out less than more would (experts at every
number of devices up to the last); and one over the part of all devices below which that is not looked at."""


def size_work(tables: CostTables, kinds: Kinds, micro_batch_size: int) -> SizeWork:
    """Kept in the tables: links between regions do not change it, and prices only where there is a budget."""
    problem = tables.problem
    budget = problem.constraints.most_usd_per_hour
    prices = () if budget is None else tuple(pool.price_usd_per_hour for pool in problem.cluster.pools)
    key = micro_batch_size, problem.batch.global_batch, budget, prices
    if key not in tables.bounds_by_size:
        tables.bounds_by_size[key] = SizeWork(tables, kinds, micro_batch_size)
    known: SizeWork = tables.bounds_by_size[key]
    return known


class SizeWork:
    """What a micro-batch of one size costs on each class of worker, and what that alone asks of a step."""

    def __init__(self, tables: CostTables, kinds: Kinds, micro_batch_size: int) -> None:
        problem = tables.problem
        self.tables, self.kinds, self.micro_batch_size = tables, kinds, micro_batch_size
        self.micro_batches = problem.batch.global_batch // micro_batch_size
        times = np.array(
            [
                [Executions(tables, c, micro_batch_size).least_s(r, accumulates=False) for r in RECOMPUTE]
                for c in kinds.classes
            ]
        )
        sums = np.concatenate([np.zeros((*times.shape[:-1], 1)), np.cumsum(times, axis=-1)], axis=-1)
        self.forward_s, self.backward_s = sums[:, :, 0], sums[:, :, 1]
        """Running sums over the layers, shape (classes, recomputations, layers + 1)."""
        each_s = np.diff(self.forward_s + self.backward_s).min(axis=1)
        least_s = each_s.min(axis=0)
        self.path_s = float(least_s.sum())
        self.rest_s = running_sum(least_s[::-1])[::-1]
        """Least seconds of a micro-batch, forward and backward, in layers [b, layers), shape (layers + 1,)."""
        names = problem.model.layer_kinds()
        layer_kinds = list(dict.fromkeys(names))
        sample = [names.index(name) for name in layer_kinds]
        device_s = np.full((len(layer_kinds), int(kinds.of_pool.max()) + 1), np.inf)
        for c, of in enumerate(kinds.classes):
            device_s[:, of.kind] = np.minimum(device_s[:, of.kind], each_s[c, sample] * of.devices)
        used = kinds.of_pool >= 0
        devices = np.array([pool.devices for pool in problem.cluster.pools])
        count = np.bincount(kinds.of_pool[used], weights=devices[used])
        work = np.array([names.count(name) for name in layer_kinds]) * float(self.micro_batches)
        self.device_s, self.count = device_s, work
        rates = _rates(tables, kinds)
        most_usd = problem.constraints.most_usd_per_hour
        affordable = (rates, np.inf if most_usd is None else most_usd / 3600)
        self.compute_s, prices = _compute_program(device_s, work, count, affordable)
        self.device_capacity = (prices[:, None] / device_s).max(axis=0)
        """Worth of what a device of each kind computes in a second, shape (kinds,)."""
        self.class_capacity = np.array([self.device_capacity[c.kind] * c.devices for c in kinds.classes])
        self.capacity = _affordable_capacity(self.device_capacity, count, *affordable)
        self.kind_devices = count
        """Devices of each kind, shape (kinds,)."""
        self.work = float(prices @ work)
        """Worth of all layers of all micro-batches."""
        self.layer_work = prices[[layer_kinds.index(name) for name in names]] * self.micro_batches
        """Of these, of every layer, shape (layers,)."""
        self.run = slice(*longest_run(names))
        """The most layers of one kind that follow one another."""
        self.rest_work = float(self.layer_work.sum() - self.layer_work[self.run].sum())
        """Worth of all other layers."""
        ways = [np.diff(way).min(axis=1) * self.class_capacity[:, None] for way in (self.forward_s, self.backward_s)]
        self.worth = np.array([running_sum(of) for of in (*(way.min(axis=0) for way in ways), self.layer_work)])
        """Running sums of what forward and backward of a micro-batch are worth at least, and of `layer_work`, shape
        (3, layers + 1)."""
        self.others = len(names) - (self.run.stop - self.run.start)
        """How many are outside of that run."""
        self.at_ends = self.run.start <= 1 and self.run.stop >= len(names) - 1
        """Whether these are the model's first and last layer alone."""
        apart = np.array([self.run.start > 0, self.run.stop < len(names)])
        self.end_s = np.stack([each_s[:, layer] * of for layer, of in zip((0, -1), apart, strict=True)])
        """Least seconds of a micro-batch in the first and in the last layer on each class, shape (2, classes); 0 where
        it is of that run."""
        forward_s, backward_s = (np.diff(way).min(axis=1) for way in (self.forward_s, self.backward_s))
        self.back_s = np.stack(
            [backward_s[:, self.run].min(axis=1), backward_s[:, 0] * apart[0], backward_s[:, -1] * apart[1]]
        )
        """Least seconds of backward in a layer of that run, and of `end_s`, shape (3, classes)."""
        smaller = self.class_capacity[None, :] <= self.class_capacity[:, None]
        self.trip_s = np.array([forward_s[of].min(axis=0).sum() + backward_s[of, -1].min() for of in smaller])
        """Least seconds of all forwards of a micro-batch, and of backward in the last layer, on workers with no more
        compute than one of each class, shape (classes,)."""
        self.block_s = np.diff([self.forward_s, self.backward_s])[..., self.run].min(axis=(1, 2, 3))
        """Least seconds of forward and of backward of a layer of that run."""

    @cached_property
    def fitting_s(self) -> np.ndarray:
        """See `fitting.fitting_s`; one spread after the other."""
        known: dict[Any, Any] = {}
        return np.concatenate(
            [fitting_s(self.tables, of, self.micro_batch_size, self.rest_s, known=known) for of in self._spread_kinds]
        )

    @cached_property
    def spreads(self) -> list[tuple[int, int]]:
        """Fewest and most devices of a stage between the steps of the bound."""
        devices = int(self.kind_devices.sum())
        steps = range(1, SPREADS[-1] + 1) if self.tables.problem.model.experts else SPREADS
        most = [*(step for step in steps if devices // FEW <= step < devices), devices]
        return list(zip([1, *(step + 1 for step in most)], most, strict=False))

    @property
    def _spread_kinds(self) -> list[Kinds]:
        """Kinds with classes whose workers share out what they hold with others of a stage of so many devices."""
        return [
            Kinds(
                of_pool=self.kinds.of_pool,
                classes=tuple(
                    of._replace(shards=min(of.shards, most // of.tp), stage_devices=(fewest, most))
                    for of in self.kinds.classes
                ),
            )
            for fewest, most in self.spreads
        ]

    @cached_property
    def held_s(self) -> np.ndarray:
        """Seconds of a micro-batch in so many layers of the run on a worker of the first group of an interleaved plan,
        of one between, and of the last, with so many in flight as `HELD` says (`fitting.fitting_s`).

        Where these are the others (`at_ends`), the first group holds the model's first layer beside, the last its last
        one. Shape (3 spreads, 3, n + 3, classes, levels) for a run of n, k layers of row r at r + k.
        """
        first, last, layers = self.run.start, self.run.stop, len(self.layer_work)
        count = last - first
        found_s = np.full((3 * len(self.spreads), 3, count + 3, len(self.kinds.classes), len(HELD)), np.inf)

        def of(rows: slice, columns: slice) -> np.ndarray:
            fitting = partial(fitting_s, held=HELD, rows=rows, columns=columns, known={})
            size = self.micro_batch_size
            return np.concatenate([fitting(self.tables, of, size, self.rest_s) for of in self._spread_kinds])

        found_s[:, 1, 2 : count + 1] = of(slice(first + 1, first + 2), slice(first + 2, last + 1))[:, 0]
        if self.at_ends:
            found_s[:, 0, 1 : count + 1] = of(slice(0, 1), slice(first + 1, last + 1))[:, 0]
            found_s[:, 2, 3 : count + 3] = of(slice(first, last), slice(layers, layers + 1))[:, ::-1, 0]
        else:
            found_s[:, 0, 1 : count + 1] = of(slice(first, first + 1), slice(first + 1, last + 1))[:, 0]
            found_s[:, 2, 3 : count + 3] = found_s[:, 0, 1 : count + 1]
        return found_s

    @property
    def least_s(self) -> float:
        """What compute and path ask."""
        return max(self.compute_s, self.path_s)


def _rates(tables: CostTables, kinds: Kinds) -> np.ndarray:
    """Least dollars a second of a device of each kind, shape (kinds,)."""
    rates = np.full(int(kinds.of_pool.max()) + 1, np.inf)
    for pool in tables.problem.cluster.pools:
        if (kind := kinds.of_pool[pool.index]) >= 0:
            rates[kind] = min(rates[kind], pool.price_usd_per_hour / 3600)
    return rates


def _affordable_capacity(capacity: np.ndarray, devices: np.ndarray, rates: np.ndarray, usd_per_s: float) -> float:
    """Most compute of devices, shape (kinds,) each, that cost no more than so much a second; parts of one allowed."""
    total, left = 0.0, usd_per_s
    for kind in np.argsort(rates / np.maximum(capacity, 1e-300), kind="stable"):
        count = min(devices[kind], left / rates[kind] if rates[kind] > 0 else np.inf)
        total, left = total + count * capacity[kind], left - (count * rates[kind] if rates[kind] > 0 else 0.0)
    return float(total)


def _compute_program(
    device_s: np.ndarray, work: np.ndarray, devices: np.ndarray, affordable: tuple[np.ndarray, float]
) -> tuple[float, np.ndarray]:
    """Optimum of the compute program and its prices: what one (layer, micro-batch) of each kind is worth.

    Parameters
    ----------
    device_s : ndarray, shape (layer kinds, device kinds)
        Device-seconds for a layer and a micro-batch.
    work : ndarray, shape (layer kinds,)
        How many of these there are.
    devices : ndarray, shape (device kinds,)
    affordable : tuple
        What a device of each kind costs a second, and what all used ones may: devices that compute are paid for all the
        step, so that sum_d rate_d (device-seconds of d) <= limit T.
    """
    kinds, types = device_s.shape
    rates, usd_per_s = affordable
    # Each kind's work is scaled to one unit, so that the program is well scaled.
    scale = float((work[:, None] * device_s).min())
    equal = np.zeros((kinds, kinds * types + 1))
    limit = np.zeros((types, kinds * types + 1))
    for k in range(kinds):
        equal[k, k * types : (k + 1) * types] = 1.0
        for d in range(types):
            limit[d, k * types + d] = work[k] * device_s[k, d] / scale
    limit[:, -1] = -devices
    if np.isfinite(usd_per_s) and rates @ devices > usd_per_s > 0:
        paid = rates @ limit
        paid[-1] = -usd_per_s
        limit = np.vstack([limit, paid / rates.max()])
    objective = np.zeros(kinds * types + 1)
    objective[-1] = 1.0
    result = linprog(objective, A_ub=limit, b_ub=np.zeros(len(limit)), A_eq=equal, b_eq=np.ones(kinds), method="highs")
    return float(result.fun) * scale, np.maximum(result.eqlin.marginals, 0.0) / work


def longest_run(names: Sequence[str]) -> tuple[int, int]:
    """Where the most equal names that follow one another begin, and where they have ended."""
    best, begin = (0, 1), 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[begin]:
            best, begin = max(best, (begin, i), key=lambda run: run[1] - run[0]), i
    return best
