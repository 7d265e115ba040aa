"""What the runner can execute: every plan for it, but for what its layers and messages have no way to do."""

from __future__ import annotations

from dataclasses import fields

from polygon.domain.errors import InputError, Phrase, one_of, require
from polygon.domain.message import Violation
from polygon.domain.model import Model
from polygon.domain.plan import COMPRESSIONS, Plan, Problem, Stage, Worker
from polygon.domain.runtime import is_ours
from polygon.domain.schedule import worker_order
from polygon.planning.checker import require_whole
from runners.engine.rank_layout import Layout


def check_runnable(problem: Problem, plan: Plan, *, own_model: bool = False) -> None:
    """Require what the runner can execute; `InputError` says what it cannot. A user's own model has its own layers."""
    expected = "polygon, polygon-compiled, polygon-ring or polygon-whole-experts, to be run here"
    require(is_ours(problem.runtime), "problem.runtime", Phrase(problem.runtime.name), expected)
    kept = problem.batch.state_precision
    require(kept == "fp32", "batch.state_precision", kept, "fp32, to be run here")
    if own_model:
        precision, expected = problem.batch.precision, "fp32, tf32, bf16 or fp16 (with --model-file)"
        require(precision != "fp8", "batch.precision", precision, expected)
        # Which of its matrices are hidden ones is not known.
        optimizer, expected = problem.batch.optimizer, "adamw or sgd or adafactor (with --model-file)"
        require(optimizer != "muon", "batch.optimizer", optimizer, expected)
    else:
        require_plain(problem.model, problem.batch.seq_len)
    parts = plan.stages[0].workers[0].cp
    for s, stage in enumerate(plan.stages):
        where = f"plan.stages[{s}]"
        if stage.zero == 3 and plan.local_steps > 1:
            raise InputError(f"{where}.zero: found 3, expected 0, 1 or 2 (with local steps)")
        for w, worker in enumerate(stage.workers):
            require(worker.cp == parts, f"{where}.workers[{w}].cp", worker.cp, f"{parts}, as in all stages")
            _check_worker(problem, stage, worker, f"{where}.workers[{w}]")
    require_whole(problem, plan)
    _check_experts(Layout(problem, plan))
    _check_exchange(problem, plan)


def require_plain(model: Model, seq_len: int = 1) -> None:
    """Require blocks that this engine has layers for (`runners.engine.layers`), on sequences of this length."""
    usual = {field.name: field.default for field in fields(model)}
    for name, value in model.beyond_engine(seq_len).items():
        plain = "gpt, llama or vit" if name == "family" else usual[name]
        raise InputError(f"model.{name}: found {value!r}, expected {plain or 'none'}, to be run here")


def _check_worker(problem: Problem, stage: Stage, worker: Worker, where: str) -> None:
    """Require layers that a worker's devices can cut."""
    model = problem.model
    for what in ("heads", "kv_heads", "expert_ffn_size" if model.experts else "ffn_size"):
        if what == "kv_heads" and worker.tp % model.kv_heads == 0:
            continue  # every device then has one of them, several the same
        if getattr(model, what) % worker.tp:
            raise InputError(
                f"{where}: found a tensor-parallel group of {worker.tp} devices, "
                f"expected a divisor of the model's {what} = {getattr(model, what)}"
            )
    if worker.cp > 1:
        _check_context(problem, worker, where)
    if stage.sequence_parallel and worker.tp > 1:
        _check_sequence_parallel(problem, worker, where)


def _check_context(problem: Problem, worker: Worker, where: str) -> None:
    """Require sequences that the parts of a worker can share."""
    model, seq_len, cp = problem.model, problem.batch.seq_len, worker.cp
    if model.family == "vit":
        raise InputError(f"{where}: found a cp degree of {cp} with an image model, expected a language model")
    if seq_len % cp:
        raise InputError(f"batch.seq_len: found {seq_len}, expected a multiple of the cp degree {cp}")


def _check_sequence_parallel(problem: Problem, worker: Worker, where: str) -> None:
    """Require tokens that the devices of a tensor-parallel group can split."""
    tokens = problem.batch.seq_len // worker.cp
    if problem.model.family == "vit":
        raise InputError(f"{where}: found sequence parallelism with an image model, expected a language model")
    if tokens % worker.tp:
        raise InputError(
            f"batch.seq_len: found {tokens} tokens on a device, expected a multiple of the tp degree {worker.tp} (with "
            "sequence parallelism)"
        )


def _check_experts(layout: Layout) -> None:
    """Require that ranks with different experts of a layer can exchange tokens: same place, same order of actions."""
    plan, model = layout.plan, layout.problem.model
    for s, stage in enumerate(plan.stages):
        ep, members = stage.ep, sum(worker.cp for worker in stage.workers)
        where = f"plan.stages[{s}]"
        if layout.whole_experts(s) and (
            layout.sums_whole([s]) or plan.local_steps > 1 or plan.reduction != "all-reduce"
        ):
            raise InputError(
                f"{where}: found whole experts on tensor-parallel devices, expected experts that are cut (with local "
                "steps, parameter servers or workers of different degrees)"
            )
        if ep == 1:
            continue
        if not model.experts or model.experts % ep:
            raise InputError(f"{where}.ep: found {ep}, expected a divisor of the model's {model.experts} experts")
        if plan.local_steps > 1 or plan.reduction != "all-reduce":
            raise InputError(f"{where}.ep: found {ep}, expected 1 (with local steps or parameter servers)")
        if layout.sums_whole([s]) or members % ep:
            raise InputError(
                f"{where}: found {stage.width} workers x {stage.workers[0].cp} parts of a sequence, "
                f"expected equal ones, and a multiple of the ep degree {ep}"
            )
        kinds = [
            [action._replace(micro_batch=0) for action in worker_order(plan, s % plan.groups, w)]
            for w in range(stage.width)
        ]
        for rank in (layout.rank(s, w) for w in range(stage.width)):
            mates = layout.expert_ranks(rank, s)
            if len({layout.region_of[mate] for mate in mates}) > 1:
                raise InputError(f"{where}: found ranks {mates} in several regions, expected one (they share experts)")
            if any(kinds[plan.rank_places[mate][1]] != kinds[plan.rank_places[rank][1]] for mate in mates):
                raise InputError(
                    f"{where}: found ranks {mates} with different orders of forward and backward, "
                    "expected the same (they share experts)"
                )


def _check_exchange(problem: Problem, plan: Plan) -> None:
    """Require local steps and parameter servers that go with the rest of the plan."""
    servers = plan.reduction != "all-reduce"
    for place, use in enumerate(plan.links):
        where = f"plan.links[{place}]"
        for name in ("activations", "activation_gradients", "weight_gradients"):
            packing = getattr(use, name)
            require(packing in COMPRESSIONS, f"{where}.{name}", packing, one_of(packing, COMPRESSIONS))
        require(use.streams >= 1, f"{where}.streams", use.streams, "a whole number >= 1")
    if servers and any(use.weight_gradients == "powersgd" for use in plan.links):
        raise InputError("plan.links: found weight_gradients 'powersgd', expected another packing (with servers)")
    if servers and plan.local_steps > 1:
        raise InputError(f"plan.reduction: found {plan.reduction!r}, expected 'all-reduce' (with local steps)")
    if plan.local_steps > 1 and not plan.stays_in_regions(problem.cluster):
        raise InputError(f"plan: {Violation('plan.local_steps_regions', local_steps=plan.local_steps)}")
    if plan.local_steps > 1 and problem.batch.precision == "fp16":
        raise InputError("batch.precision: found 'fp16', expected bf16 or fp32 (local steps have no loss scaling)")
    for s, stage in enumerate(plan.stages if plan.local_steps > 1 or servers else ()):
        degrees = sorted({worker.tp for worker in stage.workers})
        if len(degrees) > 1:
            raise InputError(f"plan.stages[{s}]: found tp {degrees}, expected equal ones (with local steps or servers)")
    if (plan.local_steps > 1 or servers) and plan.cuts_tied_unlike(problem.model):
        ends = [stage.workers[0].tp for stage in (plan.stages[0], plan.stages[-1])]
        raise InputError(
            f"plan.stages: found tp {ends[0]} in the first and {ends[1]} in the last, which share the embedding, "
            "expected equal ones (with local steps or servers)"
        )
