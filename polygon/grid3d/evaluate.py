"""One split with all its options, priced by the planner's cost model: rows that are ready to be written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from polygon.cost.uniform import TERMS, ParallelConfig, estimate_many, estimate_uniform
from polygon.domain.cluster import Cluster, Link, Pool
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Problem
from polygon.grid3d.splits import Options, Split, configurations, split_fault

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


class Row(NamedTuple):
    """A configuration as it is sorted and written."""

    rejected: bool
    step_s: float
    """inf where nothing was computed."""
    order: str
    """Decides between equals, so that the order never depends on who computed what."""
    line: str
    """JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a worker needs to price a split."""

    model: Model
    batch: Batch
    pool: Pool
    usable_bytes: float
    options: Options

    def rows(self, split: Split) -> list[Row]:
        """Every configuration of a split: its terms, its memory, and why it is rejected, if it is."""
        fault = split_fault(split, self.model, self.batch, self.pool.devices_per_node)
        if fault:
            return [row({**split._asdict(), "rejected": fault}, math.inf)]
        configs: list[ParallelConfig] = []
        found = []
        for config, reason in configurations(split, self.model, self.batch, self.options):
            if isinstance(config, ParallelConfig):
                configs.append(config)
            else:
                found.append(row({**split._asdict(), "micro_batch_size": config, "rejected": reason}, math.inf))
        return found + self._priced(configs)

    def _priced(self, configs: list[ParallelConfig]) -> list[Row]:
        """Rows of configurations, in bulk."""
        estimates = estimate_many(self.model, self.batch, self.pool, configs)
        columns = (estimates.step_s.tolist(), estimates.terms_s.tolist(), estimates.peak_bytes.tolist())
        names = [name for name, *_ in TERMS]
        found = []
        for config, step_s, seconds, peak_bytes in zip(configs, *columns, strict=True):
            values: dict[str, Any] = {name: getattr(config, name) for name in KEYS}
            values["step_s"] = short(step_s)
            values["terms_s"] = dict(zip(names, map(short, seconds), strict=True))
            values["memory_bytes"] = short(peak_bytes)
            values["rejected"] = None
            if peak_bytes > self.usable_bytes:
                room = f"{self.usable_bytes / 1e9:.4g} GB usable"
                values["rejected"] = f"memory: needs {peak_bytes / 1e9:.4g} GB of {room}"
            found.append(row(values, step_s))
        return found

    def details(self, config: ParallelConfig) -> dict[str, Any]:
        """What a bulk row leaves out: the ends of the 90 % interval, and memory by owner."""
        estimate = estimate_uniform(self.model, self.batch, self.pool, config)
        peak = {f"{name}_bytes": short(value) for name, value in asdict(estimate.peak).items()}
        return {"low_s": short(estimate.low_s), "high_s": short(estimate.high_s), "memory": peak}


def short(value: float) -> float:
    """Seven digits: more than any estimate is worth, and half the bytes in the file."""
    return float(f"{value:.7g}")


def row(values: dict[str, Any], step_s: float) -> Row:
    """A row of these values."""
    order = "/".join(f"{value:>6}" for key, value in values.items() if key in KEYS)
    return Row(values["rejected"] is not None, step_s, order, json.dumps(values))


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
    """Largest latency, smallest bandwidth."""
    latency_s = max(link.latency_s for link in links)
    return Link(latency_s=latency_s, bytes_per_s=min(link.bytes_per_s for link in links))


def case_of(problem: Problem, options: Options) -> tuple[Case, str | None]:
    """The case of a problem, and what was levelled down to make its devices equal."""
    pool, note = uniform_pool(problem.cluster, problem.batch.precision)
    usable = pool.device.memory_bytes * (1 - problem.constraints.memory_headroom)
    case = Case(model=problem.model, batch=problem.batch, pool=pool, usable_bytes=usable, options=options)
    return case, note
