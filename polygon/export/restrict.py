"""What a target cannot say of a plan, and what that costs.

What is exported is the best uniform plan that the target runs (`polygon.planning.uniform_plans`). What was lost is
priced one thing after another, so that the costs add up to the difference of the two steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.plan import Plan, Problem
from polygon.domain.runnable import Runnable
from polygon.export.bundle import Loss
from polygon.planning.uniform_plans import Uniform, gradient_packing, without_trees


def _none(model: Model) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a target's files can say of a model's blocks."""

    rotary_scalings: tuple[str, ...] = ()
    """Kinds of scaled rotary positions."""
    said_fields: Callable[[Model], tuple[str, ...]] = _none
    """Fields of a model that make its blocks other than plain."""


PLAIN = Words()


def losses(
    problem: Problem, plan: Plan, tables: CostTables, runnable: Runnable, uniform: Uniform, words: Words = PLAIN
) -> list[Loss]:
    """What the target cannot express, each with what it adds to a step; the costs add up to the difference."""
    found: list[Loss] = []
    here, before_s = plan, step_times(plan, tables).step_s
    packing = gradient_packing(plan, runnable)

    def lose(what: Message, changed: Plan) -> None:
        nonlocal here, before_s
        after_s = step_times(changed, tables).step_s
        if math.isfinite(after_s):
            found.append(Loss(what=what, cost_s=after_s - before_s))
            here, before_s = changed, after_s

    kinds = sorted(
        ({use.activations for use in plan.links} | {use.activation_gradients for use in plan.links}) - {"none"}
    )
    if any(use.activations != "none" or use.activation_gradients != "none" for use in plan.links):
        links = tuple(replace(use, activations="none", activation_gradients="none") for use in here.links)
        lose(Message("lost.activations", modes=tuple(kinds)), replace(here, links=links))
    if any(use.weight_gradients != packing for use in plan.links):
        links = tuple(replace(use, weight_gradients=packing) for use in here.links)
        kept = Message("lost.weight_gradients_kept", mode=packing)
        lose(Message("lost.weight_gradients") if packing == "none" else kept, replace(here, links=links))
    if plan.local_steps > 1:
        lose(Message("lost.local_steps", steps=plan.local_steps), replace(here, local_steps=1))
    if any(stage.trees for stage in plan.stages):
        lose(Message("lost.trees"), without_trees(here))
    if plan.reduction != "all-reduce":
        lose(Message("lost.reduction", reduction=plan.reduction), replace(here, reduction="all-reduce"))
    shares = [plan.shares(s) for s in range(len(plan.stages))]
    if any(share.min() != share.max() for share in shares):
        turns = np.stack([np.arange(plan.micro_batches) % stage.width for stage in plan.stages], axis=1)
        lose(Message("lost.shares"), replace(here, routes=turns, order=None))
    one_f_one_b = tuple((stage.width,) * stage.width for stage in plan.stages)
    if (plan.order is not None or plan.spans != one_f_one_b) and len(plan.stages) > 1:
        lose(Message("lost.schedule"), here.with_spans(one_f_one_b))
    rest = uniform.step_s - before_s
    if _shape(plan) != _shape(uniform.plan) or abs(rest) > 1e-9 * uniform.step_s:
        found.append(Loss(what=_structure(problem, plan, uniform, runnable), cost_s=rest))
    said = ("family", *words.said_fields(problem.model))
    special = tuple(name for name in problem.model.special(problem.batch.seq_len) if name not in said)
    scaling = problem.model.rope_scaling
    if scaling is not None and scaling.kind not in words.rotary_scalings:
        special = (*special, "rope_scaling")
    if special:
        found.append(Loss(what=Message("lost.blocks", fields=special)))
    return found


def _shape(plan: Plan) -> list[tuple[int, int, int]]:
    return [(stage.first_layer, stage.last_layer, stage.width) for stage in plan.stages]


def _structure(problem: Problem, plan: Plan, uniform: Uniform, runnable: Runnable) -> Message:
    """The change of structure."""
    widths = ", ".join(
        f"{count} x {width}" if count > 1 else str(width)
        for width, alike in itertools.groupby(stage.width for stage in plan.stages[: plan.groups])
        for count in [len(list(alike))]
    )
    left_out = plan.world_size - uniform.plan.world_size
    degrees = {"pp": uniform.pp, "dp": uniform.dp, "tp": uniform.tp, "cp": uniform.cp, "ep": uniform.ep}
    changes = [Message("lost.widths", widths=widths, **degrees)]
    if not runnable.context and any(worker.cp > 1 for worker in plan.workers):
        changes.append(Message("lost.context"))
    if not runnable.experts and any(stage.ep > 1 for stage in plan.stages):
        changes.append(Message("lost.spread_experts"))
    if plan.chunks > 1 and uniform.plan.chunks == 1:
        changes.append(Message("lost.chunks", chunks=plan.chunks))
    if runnable.blocks_apart is not None:
        changes.append(Message("lost.uneven_layers"))
    if left_out > 0:
        changes.append(Message("lost.devices", devices=left_out))
    return Message("lost.structure", changes=tuple(changes))
