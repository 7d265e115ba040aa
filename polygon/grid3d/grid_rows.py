"""One split with all its options, priced by the planner's cost model: rows that are ready to be written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from polygon.cost.estimate import estimate
from polygon.cost.lanes import TERMS, Lanes
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, NodeGroup, Pool, Region
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.domain.runnable import runnable
from polygon.domain.runtime import POLYGON, Runtime
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.grid3d.splits import GridOptions, GridSplit, configurations, split_fault

KEYS = (
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "micro_batch_size",
    "zero",
    "recompute",
    "schedule",
    "interleave",
    "sequence_parallel",
)
FIELDS = {"interleave": "chunks"}
"""Fields of `ParallelConfig` that a row calls by another name."""


class GridRow(NamedTuple):
    """A configuration as it is sorted and written."""

    rejected: bool
    step_s: float
    """inf where nothing was computed."""
    order: str
    """Decides between equals, so that the order never depends on who computed what."""
    line: str
    """JSON object."""
    why: str = ""
    """Of one that is rejected what for: `memory`, `runtime`, a degree's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a worker needs to price a split."""

    model: Model
    batch: Batch
    pool: Pool
    usable_bytes: float
    options: GridOptions
    runtime: Runtime = POLYGON

    @property
    def problem(self) -> Problem:
        """The problem of a cluster that has this pool alone."""
        pool, one = self.pool, np.zeros((1, 1))
        group = NodeGroup(
            device=pool.device.name,
            nodes=pool.nodes,
            devices_per_node=pool.devices_per_node,
            intra_node=pool.intra_node,
            inter_node=pool.inter_node,
            price_usd_per_hour=pool.price_usd_per_hour,
        )
        cluster = Cluster(
            name="one pool",
            regions=(Region(name="here", node_groups=(group,), intra_region=pool.inter_node),),
            latency_s=one,
            bytes_per_s=one,
            capacity_bytes_per_s=one + np.inf,
            catalogue={pool.device.name: pool.device},
        )
        return Problem(cluster=cluster, model=self.model, batch=self.batch, runtime=self.runtime)

    def rows(self, split: GridSplit) -> list[GridRow]:
        """Every configuration of a split: its terms, its memory, and why it is rejected, if it is."""
        fault = split_fault(split, self.model, self.batch, self.pool.devices_per_node)
        if fault:
            return [row({**split._asdict(), "rejected": fault}, math.inf)]
        configs: list[ParallelConfig] = []
        found, lanes = [], _lanes_of(self)
        problem = lanes.tables.problem
        runs = runnable(problem)
        for config, reason in configurations(split, self.model, self.batch, self.options):
            if not isinstance(config, ParallelConfig):
                found.append(row({**split._asdict(), "micro_batch_size": config, "rejected": reason}, math.inf))
            elif runs is not None and (lacks := runs.lacking(problem, config)) is not None:
                rejected = f"runtime: {self.runtime.name} does not run {lacks}"
                found.append(row({**_values(config), "rejected": rejected}, math.inf))
            else:
                configs.append(config)
        return found + self._priced(configs, lanes)

    def _priced(self, configs: list[ParallelConfig], lanes: Lanes) -> list[GridRow]:
        """Rows of configurations, in bulk."""
        found = []
        for config in configs:
            priced = lanes.estimate(config)
            step_s, peak_bytes = priced.step_s, priced.peak_bytes
            values = _values(config)
            values["step_s"] = short(step_s)
            values["terms_s"] = dict(zip(TERMS, map(short, priced.terms_s), strict=True))
            values["memory_bytes"] = short(peak_bytes)
            values["rejected"] = None
            if peak_bytes > self.usable_bytes:
                room = f"{self.usable_bytes / 1e9:.4g} GB usable"
                values["rejected"] = f"memory: needs {peak_bytes / 1e9:.4g} GB of {room}"
            found.append(row(values, step_s))
        return found

    def details(self, config: ParallelConfig) -> dict[str, Any]:
        """What a bulk row leaves out: the ends of the 90 % interval, and memory by owner."""
        lanes, problem = _lanes_of(self), self.problem
        whole = estimate(problem, uniform_plan(problem, config), lanes.tables)
        peak = {f"{name}_bytes": short(value) for name, value in asdict(lanes.estimate(config).peak).items()}
        return {"low_s": short(whole.low_s), "high_s": short(whole.high_s), "memory": peak}


_latest: list[tuple[Case, Lanes]] = []
"""The case that was priced last, and what its splits have in common."""


def _lanes_of(case: Case) -> Lanes:
    if not _latest or _latest[0][0] != case:
        _latest[:] = [(case, Lanes(CostTables(case.problem)))]
    return _latest[0][1]


def _values(config: ParallelConfig) -> dict[str, Any]:
    """A configuration as a row has it."""
    return {name: getattr(config, FIELDS.get(name, name)) for name in KEYS}


def short(value: float) -> float:
    """Seven digits: more than any estimate is worth, and half the bytes in the file."""
    return float(f"{value:.7g}")


def row(values: dict[str, Any], step_s: float) -> GridRow:
    """A row of these values."""
    order = "/".join(f"{value:>6}" for key, value in values.items() if key in KEYS)
    why = values["rejected"].split()[0].rstrip(":") if values["rejected"] else ""
    return GridRow(values["rejected"] is not None, step_s, order, json.dumps(values), why)


def uniform_pool(cluster: Cluster, precision: str) -> tuple[Pool, str | None]:
    """The cluster as plain 3D parallelism sees it: one kind of node; and what was levelled down for that.

    A uniform split keeps step with the slowest, so several pools become one of their slowest device, least memory and
    worst links, in nodes of the largest size that divides all.

    Raises
    ------
    InputError
        Where two regions have no link.
    """
    pools = cluster.pools
    if len(pools) == 1:
        return pools[0], None
    between: list[Link] = []
    for a in pools:
        for b in pools:
            link = cluster.node_link(a.index, b.index)
            if link is None:
                names = [cluster.regions[pool.region].name for pool in (a, b)]
                raise InputError(f"{names[0]} and {names[1]}: found no link, expected one for a uniform split")
            if a is not b or a.nodes > 1:
                between.append(link)
    slowest = min((pool.device for pool in pools), key=lambda device: device.peak_flops(precision))
    device = replace(
        slowest,
        memory_bytes=min(pool.device.memory_bytes for pool in pools),
        memory_bytes_per_s=min(pool.device.memory_bytes_per_s for pool in pools),
    )
    per_node = math.gcd(*(pool.devices_per_node for pool in pools))
    intra = [pool.intra_node for pool in pools]
    levelled = replace(
        pools[0],
        device=device,
        devices_per_node=per_node,
        nodes=cluster.devices // per_node,
        intra_node=_worst(intra),
        inter_node=_worst(between),
    )
    types = sorted({pool.device.name for pool in pools})
    note = f"{len(pools)} pools taken as one: {device.name} (slowest of {', '.join(types)}), nodes of {per_node}"
    return levelled, f"{note}, worst of all links"


def _worst(links: list[Link]) -> Link:
    """Largest latency, smallest bandwidth, RDMA where all have it."""
    return Link(
        latency_s=max(link.latency_s for link in links),
        bytes_per_s=min(link.bytes_per_s for link in links),
        rdma=all(link.rdma for link in links),
    )


def case_of(problem: Problem, options: GridOptions) -> tuple[Case, str | None]:
    """The case of a problem, and what was levelled down to make its devices equal."""
    pool, note = uniform_pool(problem.cluster, problem.batch.precision)
    usable = pool.device.memory_bytes * (1 - problem.constraints.memory_headroom)
    runtime = problem.runtime if options.overlap is None else replace(problem.runtime, dp_overlap=options.overlap)
    case = Case(
        model=problem.model, batch=problem.batch, pool=pool, usable_bytes=usable, options=options, runtime=runtime
    )
    return case, note
