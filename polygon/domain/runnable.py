"""Which plans a program runs: what its configuration can say.

Polygon's engine runs every plan. Others know one degree of each kind of parallelism, stages of equal width and
micro-batches dealt in turn (1F1B, interleaved or not), and of these not all: a search for them finds what they run, and
exports leave out what they cannot say.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from polygon.domain.model import Model
from polygon.domain.plan import Plan, Problem, Stage
from polygon.domain.uniform import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """Of uniform plans those that a program runs."""

    pipeline: bool = True
    tensor: bool = True
    """Tensor parallelism, with norms on parts of the sequence where there is some."""
    context: bool = True
    experts: bool = True
    """Experts spread over devices that hold the same layers."""
    chunks: bool = True
    """Several stages on each group of workers."""
    blocks_apart: int | None = None
    """By how many blocks stages may differ; None: by any number, and the first may have the
    embedding alone, the last the head."""
    zero_with_pipeline: int = 1
    zero_alone: int = 3
    shard_groups: bool = True
    """ZeRO within groups of a stage's devices, copies between them."""
    gradient_packings: tuple[str, ...] = ("none",)
    """Packings of weight gradients, one for all links."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    some_blocks: tuple[str, ...] = ()
    """Kinds of recomputation that may be for a number of a stage's blocks, the same in all."""

    def most_zero(self, stages: int) -> int:
        """The highest stage of ZeRO in a pipeline of so many."""
        return self.zero_with_pipeline if stages > 1 else self.zero_alone

    def runs(self, problem: Problem, plan: Plan) -> bool:
        """Whether the program runs a plan as it is, but for how links are packed."""
        first, model = plan.stages[0], problem.model
        worker, dp = first.workers[0], first.width
        if any(stage.width != dp for stage in plan.stages):
            return False
        turns = np.arange(plan.micro_batches) % dp
        alike = {
            (stage.zero, stage.shards, stage.recompute, stage.recompute_blocks, stage.ep,
             stage.sequence_parallel, *((w.tp, w.cp) for w in stage.workers))
            for stage in plan.stages
        }  # fmt: skip
        blocks = [blocks_of(model, stage) for stage in plan.stages]
        return (
            len(alike) == 1
            and len({(w.tp, w.cp) for w in first.workers}) == 1
            and plan.micro_batches % dp == 0
            and (plan.routes == turns[:, None]).all()
            and (len(plan.stages) == 1 or (plan.order is None and plan.spans == in_turn(dp, len(plan.stages))))
            and min(blocks[1:-1] if self.blocks_apart is None and len(blocks) > 2 else blocks) > 0
            and (self.blocks_apart is None or max(blocks) - min(blocks) <= self.blocks_apart)
            and (plan.chunks == 1 or (plan.groups > 1 and (plan.micro_batches // dp) % plan.groups == 0))
            and (self.shard_groups or first.shards in (0, dp * worker.cp))
            and self._lacking(
                problem,
                pp=plan.groups,
                chunks=plan.chunks,
                tp=worker.tp,
                cp=worker.cp,
                ep=first.ep,
                zero=first.zero,
                recompute=first.recompute,
            )
            is None
            and (first.recompute_blocks is None or first.recompute in self.some_blocks)
        )

    def sends(self, problem: Problem, plan: Plan) -> bool:
        """Whether the program packs what goes between regions as a plan does, which sums in every step."""
        used = set(plan.regions(problem.cluster))
        links = [use for use in plan.links if {use.source, use.target} <= used]
        return (
            plan.local_steps == 1
            and all(use.activations == use.activation_gradients == "none" for use in links)
            and len({use.weight_gradients for use in links}) <= 1
            and all(use.weight_gradients in self.gradient_packings for use in links)
        )

    def _lacking(
        self, problem: Problem, *, pp: int, chunks: int, tp: int, cp: int, ep: int, zero: int, recompute: str
    ) -> str | None:
        """What of the degrees, chunks and memory options of a split the program has not; None where it has all."""
        has = (
            ("pp", pp, self.pipeline or pp == 1),
            ("interleave", chunks, self.chunks or chunks == 1),
            ("tp", tp, self.tensor or tp == 1),
            ("cp", cp, self.cuts_sequences(problem, cp)),
            ("ep", ep, self.experts or ep == 1),
            ("zero", zero, zero <= self.most_zero(pp)),
            ("recompute", recompute, recompute in self.recompute),
        )
        return next((f"{name} {value}" for name, value, there in has if not there), None)

    def lacking(self, problem: Problem, config: ParallelConfig) -> str | None:
        """What of a uniform split the program has not, as the grid says it (``"zero 2"``); None where it runs it.

        The plan of a split (`uniform_plan`) is run where nothing is lacking.
        """
        lacks = self._lacking(
            problem, pp=config.pp, chunks=config.chunks, tp=config.tp, cp=config.cp, ep=config.ep, zero=config.zero,
            recompute=config.recompute,
        )  # fmt: skip
        stages, blocks, apart = config.stages, problem.model.blocks, self.blocks_apart
        alike = apart is None or blocks % stages == 0 or (apart > 0 and blocks > stages)
        each = problem.batch.global_batch // (config.dp * config.micro_batch_size)
        if lacks is None and not alike:
            return f"{stages} stages of {blocks} blocks"
        if lacks is None and config.schedule != "1f1b" and config.pp > 1 and each > 1:
            return f"schedule {config.schedule}"
        return lacks

    def says(self, problem: Problem, config: ParallelConfig) -> bool:
        """Whether the program runs a uniform split."""
        return self.lacking(problem, config) is None

    def cuts_sequences(self, problem: Problem, cp: int) -> bool:
        """Whether sequences can be cut into cp parts: uniform programs give every rank two pieces, an early, a late."""
        return cp == 1 or (self.context and problem.batch.seq_len % (2 * cp) == 0)

    def degrees(self, problem: Problem, plan: Plan) -> list[tuple[int, int]]:
        """Context- and expert-parallel degrees worth a try for a plan's devices: none, and those that it has."""
        context = {1, *(w.cp for stage in plan.stages for w in stage.workers if self.cuts_sequences(problem, w.cp))}
        experts = {1, *(stage.ep for stage in plan.stages if self.experts)}
        return sorted(itertools.product(context, experts))


RUNNABLE: Mapping[str, Runnable] = {
    "uniform": Runnable(),
    "equal": Runnable(
        context=False, experts=False, blocks_apart=0, zero_alone=1, shard_groups=False, some_blocks=("full",)
    ),
    "even": Runnable(chunks=False, blocks_apart=1, shard_groups=False),
    "sharded": Runnable(pipeline=False, tensor=False, context=False, experts=False, chunks=False),
    "megatron": Runnable(some_blocks=("full",)),
    "nanotron": Runnable(
        context=False, experts=False, chunks=False, blocks_apart=1, zero_alone=1, shard_groups=False,
        recompute=("none", "full"),
    ),
    "torchtitan": Runnable(zero_with_pipeline=3),
    "deepspeed": Runnable(
        tensor=False, context=False, experts=False, chunks=False, blocks_apart=1, shard_groups=False,
        gradient_packings=("none", "bf16"), recompute=("none", "full"),
    ),
}  # fmt: skip
"""By what a runtime says (`Runtime.plans`); of `any` there is none."""


def runnable(problem: Problem) -> Runnable | None:
    """What the problem's program runs; None where it runs every plan."""
    plans = problem.runtime.plans
    return None if plans == "any" else runnable_as(problem, plans)


def runnable_as(problem: Problem, plans: str) -> Runnable:
    """What a program that runs such plans runs of a problem."""
    found = RUNNABLE[plans]
    if plans == "megatron" and problem.batch.optimizer == "sgd":
        # Its distributed optimizer refuses SGD, also under Megatron-FSDP (core/optimizer/distrib_optimizer.py).
        return replace(found, zero_with_pipeline=0, zero_alone=0)
    return found


def is_run(problem: Problem, plan: Plan) -> bool:
    """Whether the problem's program runs a plan as it is."""
    runs = runnable(problem)
    return runs is None or (runs.runs(problem, plan) and runs.sends(problem, plan))


@lru_cache(maxsize=256)
def in_turn(width: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Spans of a pipeline of equal width whose micro-batches are dealt in turn: one object, by which what follows from
    it is kept."""
    return ((width,) * width,) * stages


def blocks_of(model: Model, stage: Stage) -> int:
    """Blocks of a stage: its layers less embedding and head."""
    return min(stage.last_layer, model.blocks + 1) - max(stage.first_layer, 1)
