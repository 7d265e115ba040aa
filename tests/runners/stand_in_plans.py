"""Plans of every kind, small enough to run on a stand-in for GPUs, and a run of them there."""

from __future__ import annotations

from dataclasses import replace

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.run import train
from runners.engine.runnable import check_runnable
from tests.comm.stand_in import StandIn
from tests.patience import PATIENCE_S
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

OPTIONS = Options(steps=3, learning_rate=3e-3, clip_norm=0.5, timeout_s=PATIENCE_S)
DENSE = small_model()
MOE = small_model(experts=4, experts_per_token=2, expert_ffn_size=32, shared_experts=1, tied_embeddings=False)


def problem_of(model, *regions):
    return Problem(
        cluster=small_cluster(*regions), model=model, batch=Batch(global_batch=16, seq_len=16, precision="fp32")
    )


def uniform(model=DENSE, **config):
    """A uniform split of one region's devices."""
    config = ParallelConfig(micro_batch_size=2, **config)
    problem = problem_of(model, config.devices)
    return problem, uniform_plan(problem, config)


def in_16_bits(problem, plan):
    """The same plan, products and what passes between ranks in bf16."""
    return replace(problem, batch=replace(problem.batch, precision="bf16")), plan


def in_a_ring(problem, plan):
    """The same plan, keys and values passing round a ring."""
    return replace(problem, runtime=catalogue.runtime("polygon-ring")), plan


def wide(*regions, routes=None, **stage):
    """One stage over regions, with a worker on every device."""
    problem, width = problem_of(DENSE, *regions), sum(regions)
    routes = routes or [[m % width] for m in range(8)]
    plan = small_plan(problem.cluster, [(0, 6)], [range(width)], routes)
    return problem, replace(plan, stages=tuple(replace(each, **stage) for each in plan.stages))


def split(ranks, compression="none", **changes):
    """Routed plans over two or three regions."""
    problem, plan = routed_problem(ranks, compression=compression)
    stage = {key: changes.pop(key) for key in ("zero", "recompute") if key in changes}
    return problem, replace(plan, stages=tuple(replace(each, **stage) for each in plan.stages), **changes)


PLANS = {
    "one rank": lambda: uniform(),
    "data parallel": lambda: uniform(dp=2),
    "1F1B": lambda: uniform(pp=3),
    "GPipe": lambda: uniform(pp=3, schedule="gpipe"),
    "1F1B, two wide": lambda: uniform(pp=2, dp=2),
    "interleaved": lambda: uniform(pp=2, chunks=2),
    "interleaved, two wide, ZeRO-2": lambda: uniform(pp=2, dp=2, chunks=2, zero=2),
    "ZeRO-1": lambda: uniform(dp=4, zero=1),
    "ZeRO-2": lambda: uniform(dp=2, zero=2),
    "ZeRO-3": lambda: uniform(dp=4, zero=3),
    "ZeRO-3, recomputed, pipeline": lambda: uniform(pp=2, dp=2, zero=3, recompute="full"),
    "ZeRO-2, uneven shares": lambda: wide(3, routes=[[0], [1], [0], [1], [2], [0], [0], [1]], zero=2),
    "ZeRO-3, uneven shares": lambda: wide(3, routes=[[0], [1], [0], [1], [2], [0], [0], [1]], zero=3),
    "ZeRO-3, shard groups": lambda: wide(4, zero=3, shards=2),
    "ZeRO-2, shard groups cut unequally": lambda: wide(3, zero=2, shards=2),
    "ZeRO-3, shard groups in two regions": lambda: wide(4, 2, zero=3, shards=2),
    "tensor parallel": lambda: uniform(tp=2),
    "tensor parallel, by tokens, pipeline": lambda: uniform(tp=2, pp=2, sequence_parallel=True),
    "context parallel": lambda: uniform(cp=2, dp=2),
    "context parallel, ring": lambda: in_a_ring(*uniform(cp=4)),
    "expert parallel": lambda: uniform(MOE, dp=2, ep=2),
    "expert parallel, pipeline, ZeRO-2": lambda: uniform(MOE, dp=2, ep=2, pp=2, zero=2),
    "sums in two levels": lambda: wide(2, 2),
    "sums in two levels, int8": lambda: split(8, compression="int8"),
    "uneven, four ranks": lambda: split(4),
    "uneven, ZeRO-2": lambda: split(8, zero=2),
    "uneven, ZeRO-3": lambda: split(8, zero=3, recompute="full"),
    "parameter servers": lambda: split(4, reduction="sharded-server"),
    "local steps": lambda: split(4, local_steps=2),
    "data parallel in 16 bits": lambda: in_16_bits(*uniform(dp=2)),
    "interleaved, two wide, ZeRO-2, in 16 bits": lambda: in_16_bits(*uniform(pp=2, dp=2, chunks=2, zero=2)),
    "ZeRO-3, recomputed, pipeline, in 16 bits": lambda: in_16_bits(*uniform(pp=2, dp=2, zero=3, recompute="full")),
    "tensor parallel, by tokens, in 16 bits": lambda: in_16_bits(*uniform(tp=2, dp=2, sequence_parallel=True)),
    "expert parallel, ZeRO-2, in 16 bits": lambda: in_16_bits(*uniform(MOE, dp=2, ep=2, zero=2)),
    "sums in two levels, in 16 bits": lambda: in_16_bits(*wide(2, 2)),
}
"""By name, a function that makes problem and plan."""


def made(name):
    """Problem and plan of a name."""
    problem, plan = PLANS[name]()
    check_runnable(problem, plan)
    return problem, plan


def losses_on_stand_in(rank, port, board, problem, plan, options, seed, late):
    """Losses of a rank whose device is a stand-in; `late` are its arguments."""
    losses = []
    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
        accelerator=StandIn(rank, seed, board, **late),
    )
    return losses


def losses_on_cores(rank, port, problem, plan, options):
    """Losses of a rank whose device is a core."""
    losses = []
    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
    )
    return losses


def reference_of(name):
    """Ranks, problem and plan of the run on cores whose losses a plan's are to be: one process's where they can be."""
    problem, plan = made(name)
    # Ranks that sum in 16 bits round otherwise than one: the same ranks on cores do as they do.
    if "int8" in name or "16 bits" in name or plan.local_steps > 1:
        return plan.world_size, problem, plan
    return (1, *uniform(problem.model))
