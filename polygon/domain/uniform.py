"""Uniform parallelism: one (dp, tp, pp, cp, ep) split of equal devices, and the plan that it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from polygon.domain.cluster import Pool
from polygon.domain.errors import fault, require
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.plan import RECOMPUTE, Plan, Problem, Stage, Worker

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """A uniform way to spread a model: dp x cp x tp x pp devices, ranks dealt tensor first, then context, data and
    pipeline (Megatron-LM's order)."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Devices over which the experts of a layer are spread, among the dp x cp that hold the same layers."""
    chunks: int = 1
    """Stages per device (interleaving, virtual pipeline stages)."""
    micro_batch_size: int = 1
    zero: int = 0
    shards: int = 0
    """Data-parallel ranks over which ZeRO divides, the others holding copies; 0: all of them."""
    recompute: str = "none"
    recompute_blocks: int | None = None
    """Blocks of every stage that are recomputed, its first; None: all."""
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stage_layers: tuple[int, ...] = ()
    """Layers of each of the pp x chunks stages, embedding and head included; empty: see `stage_bounds`."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "chunks", "micro_batch_size"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        require(self.zero in (0, 1, 2, 3), "zero", self.zero, "0, 1, 2 or 3")
        require(self.recompute in RECOMPUTE, "recompute", self.recompute, " or ".join(RECOMPUTE))
        require(self.schedule in SCHEDULES, "schedule", self.schedule, " or ".join(SCHEDULES))
        require(self.chunks == 1 or self.pp > 1, "chunks", self.chunks, "1 where pp is 1")
        require(
            self.shards >= 0 and (self.dp * self.cp) % max(self.shards, 1) == 0,
            "shards",
            self.shards,
            Message("expected.divisor_of", name="dp x cp", value=self.dp * self.cp),
        )
        require(
            (self.dp * self.cp) % self.ep == 0,
            "ep",
            self.ep,
            Message("expected.divisor_of", name="dp x cp", value=self.dp * self.cp),
        )

    @property
    def shard_width(self) -> int:
        """Ranks over which ZeRO divides."""
        return self.shards or self.dp * self.cp

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        """Stages that a micro-batch visits."""
        return self.pp * self.chunks


def stage_bounds(model: Model, config: ParallelConfig) -> list[int]:
    """First layer of every stage and, last, the number of layers.

    Blocks are dealt evenly; where only all layers, embedding and head included, can be, they are.
    """
    stages = config.stages
    if config.stage_layers:
        require(
            len(config.stage_layers) == stages and sum(config.stage_layers) == model.layers,
            "stage_layers",
            config.stage_layers,
            Message("expected.numbers_with_sum", numbers=stages, total=model.layers),
        )
        return [0, *np.cumsum(config.stage_layers).tolist()]
    if model.blocks % stages and model.layers % stages == 0:
        return list(range(0, model.layers + 1, model.layers // stages))
    cuts = [1 + round(model.blocks * s / stages) for s in range(stages + 1)]
    cuts[0], cuts[-1] = 0, model.layers
    return cuts


def uniform_plan(problem: Problem, config: ParallelConfig, pool: Pool | None = None) -> Plan:
    """The plan of a uniform split on the first devices of a cluster, or of one of its pools.

    Raises
    ------
    InputError
        Where the split takes more devices than there are, or does not divide the batch, or the layers.
    """
    cluster, batch = problem.cluster, problem.batch
    require(
        config.devices <= cluster.devices,
        "dp x tp x pp x cp",
        config.devices,
        Message("expected.at_most", most=cluster.devices),
    )
    shared = config.dp * config.micro_batch_size
    require(
        batch.global_batch % shared == 0,
        "global_batch",
        batch.global_batch,
        Message("expected.multiple_of_share", share=shared),
    )
    micro_batches, stages = batch.global_batch // config.micro_batch_size, config.stages
    bounds = stage_bounds(problem.model, config)
    if any(a >= b for a, b in pairwise(bounds)):
        raise fault("pp", config.pp, Message("expected.at_most_stages", most=problem.model.blocks))
    workers = _workers((pool,) if pool else problem.cluster.pools, config)
    made = tuple(
        Stage(
            first_layer=bounds[s],
            last_layer=bounds[s + 1],
            workers=tuple(workers[(s % config.pp) * config.dp :][: config.dp]),
            zero=config.zero,
            shards=config.shards,
            recompute=config.recompute,
            recompute_blocks=config.recompute_blocks,
            sequence_parallel=config.sequence_parallel and config.tp > 1,
            ep=config.ep,
        )
        for s in range(stages)
    )
    span = config.dp if config.schedule == "1f1b" else micro_batches
    return Plan(
        stages=made,
        routes=np.repeat((np.arange(micro_batches) % config.dp)[:, None], stages, axis=1),
        micro_batch_size=config.micro_batch_size,
        spans=((span,) * config.dp,) * stages,
        chunks=config.chunks,
    )


def _workers(pools: Iterable[Pool], config: ParallelConfig) -> list[Worker]:
    """The workers in the order of their devices; none on devices of two pools."""
    size = config.tp * config.cp
    workers = []
    for pool in pools:
        starts = range(pool.first_device, pool.first_device + pool.devices - size + 1, size)
        workers += [Worker(pool=pool.index, devices=tuple(range(a, a + size)), cp=config.cp) for a in starts]
    wanted = config.dp * config.pp
    require(
        len(workers) >= wanted, "dp x pp", wanted, Message("expected.at_most_workers", most=len(workers), devices=size)
    )
    return workers[:wanted]


def uniform_order(plan: Plan) -> str | None:
    """The schedule of a uniform split that a plan's spans are those of: `gpipe`, `1f1b` or none."""
    if plan.order is not None:
        return None
    spans = {span for row in plan.spans for span in row}
    if spans == {plan.micro_batches}:
        return "gpipe"
    return "1f1b" if spans == {plan.stages[0].width} else None


def uniform_config(plan: Plan) -> ParallelConfig | None:
    """The split that a plan is, if it is one: devices of one pool in order, all stages alike, micro-batches in turn."""
    stages, first = plan.stages, plan.stages[0]
    groups = len(stages) // plan.chunks
    worker = first.workers[0]
    size, dp = len(worker.devices), first.width
    if any(stage.width != dp for stage in stages) or plan.micro_batches % dp:
        return None
    alike = {(s.zero, s.shards, s.recompute, s.recompute_blocks, s.sequence_parallel, s.ep) for s in stages}
    if len(alike) > 1 or (plan.routes != (np.arange(plan.micro_batches) % dp)[:, None]).any():
        return None
    order = uniform_order(plan)
    if order is None and len(stages) > 1:
        return None
    start = worker.devices[0]
    for s, stage in enumerate(stages):
        for w, other in enumerate(stage.workers):
            begin = start + ((s % groups) * dp + w) * size
            if other.pool != worker.pool or other.cp != worker.cp:
                return None
            if other.devices != tuple(range(begin, begin + size)):
                return None
    return ParallelConfig(
        dp=dp,
        tp=worker.tp,
        pp=groups,
        cp=worker.cp,
        ep=first.ep,
        chunks=plan.chunks,
        micro_batch_size=plan.micro_batch_size,
        zero=first.zero,
        shards=first.shards,
        recompute=first.recompute,
        recompute_blocks=first.recompute_blocks,
        sequence_parallel=first.sequence_parallel,
        schedule="gpipe" if order == "gpipe" and groups > 1 and plan.micro_batches > dp else "1f1b",
        stage_layers=tuple(stage.last_layer - stage.first_layer for stage in stages),
    )
