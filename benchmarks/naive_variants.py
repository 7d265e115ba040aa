"""What `explain` says of naive ideas, held against variants of them written by hand.

    python -m benchmarks.naive_variants [--count 8] [--first 0] [--variants 300]

Problems are drawn: equal devices in one region, and regions of several device types. `explain` works out its naive
ideas for a plan; for each idea variants are drawn among ZeRO stage, recomputation, micro-batch size, tensor-, context-
and expert-parallel degree, sequence parallelism, schedule and packing, written without any help of the planner, checked
and priced. What explain says of an idea must be no slower than the best of these. Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.convergence import allowed
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.divisors import divisors
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import RECOMPUTE, LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.planning.alternatives import VARIED, Explainer
from polygon.planning.checker import violations
from polygon.planning.search_engine import Effort, find_plan
from tests.drawn_problems import equal_devices, larger_problems

QUICK = Effort(fluid_evaluations=1_000, exact_evaluations=20, patience=400)
"""Of the search for the plan that is explained: any will do."""
MOST_DEVICES = 64
TOLERANCE = 1e-3
"""Part by which a variant may be faster: what polishing takes for no gain comes to as much."""

Draw = Callable[[np.random.Generator], Plan | None]


def drawn_uniform(problem: Problem, rng: np.random.Generator, **fixed: int) -> Plan | None:
    """A uniform split of all devices; None where what was drawn cannot be."""
    devices, batch, experts = problem.cluster.devices, problem.batch, problem.model.experts
    widest = min(pool.devices_per_node for pool in problem.cluster.pools)

    def choice(values: list[int]) -> int:
        return int(rng.choice(values))

    tp = fixed.get("tp") or choice([d for d in divisors(devices) if d <= widest])
    pp = fixed.get("pp") or choice([d for d in divisors(devices // tp) if d > 1 or "pp" not in fixed] or [1])
    cp = choice([c for c in (1, 1, 2, 4) if devices // tp // pp % c == 0])
    dp = devices // tp // pp // cp
    if batch.global_batch % dp or problem.model.heads % tp or batch.seq_len % cp:
        return None
    try:
        plan = uniform_plan(
            problem,
            ParallelConfig(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=choice([e for e in divisors(dp * cp) if e == 1 or (experts and experts % e == 0)]),
                micro_batch_size=choice([m for m in divisors(batch.global_batch // dp) if m <= 32]),
                zero=choice([0, 1, 2, 3]),
                recompute=str(rng.choice(RECOMPUTE)),
                recompute_blocks=choice([0, 0, 2, 4, 8, 16]) or None,
                shards=choice([0, 0, *divisors(dp * cp)]),
                sequence_parallel=bool(rng.integers(2)) and tp > 1,
                schedule=str(rng.choice(["1f1b", "1f1b", "gpipe"])),
                chunks=choice([1, 1, 2]) if pp > 1 else 1,
            ),
        )
    except InputError:
        return None
    if plan.stages[0].recompute == "none":
        plan = replace(plan, stages=tuple(replace(stage, recompute_blocks=None) for stage in plan.stages))
    return packed(problem, plan, rng)


def packed(problem: Problem, plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with packings drawn from those that are allowed, the same on all links."""
    may, cluster = allowed(problem), problem.cluster
    kinds = {
        "activations": str(rng.choice(may.activations)),
        "activation_gradients": str(rng.choice(may.activation_gradients)),
        "weight_gradients": str(rng.choice(may.weight_gradients)),
    }
    regions = sorted(plan.regions(cluster))
    inside = {**kinds, "weight_gradients": "none"}
    links = tuple(
        LinkUse(source=a, target=b, streams=16, **(kinds if a != b else inside))
        for a, b in product(regions, repeat=2)
        if a == b or cluster.connected(a, b)
    )
    return replace(plan, links=links)


def stage_per_region(problem: Problem, rng: np.random.Generator) -> Plan | None:
    """A stage per region in a drawn order, layers by the power of the regions, micro-batches in turn."""
    cluster, model, batch = problem.cluster, problem.model, problem.batch
    order = [int(r) for r in rng.permutation(len(cluster.regions))]
    tp = int(rng.choice([1, min(pool.devices_per_node for pool in cluster.pools)]))
    workers = [_workers_of(problem, r, tp) for r in order]
    power = [sum(cluster.pools[w.pool].device.peak_flops(batch.precision) for w in mine) for mine in workers]
    cuts = np.round(np.cumsum(power) / sum(power) * model.blocks).astype(int) + 1
    bounds = [0, *cuts[:-1].tolist(), model.layers]
    if any(b <= a for a, b in pairwise(bounds)):
        return None
    size = int(rng.choice([m for m in divisors(batch.global_batch) if m <= 32]))
    count, zero, recompute = batch.global_batch // size, int(rng.choice([0, 1, 2, 3])), str(rng.choice(RECOMPUTE))
    stages = tuple(
        Stage(first_layer=bounds[s], last_layer=bounds[s + 1], workers=mine[:count], zero=zero, recompute=recompute)
        for s, mine in enumerate(workers)
    )
    turns = np.arange(count)[:, None] % np.array([stage.width for stage in stages])
    plan = Plan(
        stages=stages,
        routes=turns,
        micro_batch_size=size,
        spans=tuple((max(stage.width for stage in stages),) * stage.width for stage in stages),
    )
    return packed(problem, plan, rng)


def _workers_of(problem: Problem, region: int, tp: int) -> tuple[Worker, ...]:
    return tuple(
        Worker(pool=pool.index, devices=tuple(range(a, a + tp)))
        for pool in problem.cluster.pools
        if pool.region == region
        for a in range(pool.first_device, pool.first_device + pool.devices - tp + 1, tp)
    )


def same_devices(explainer: Explainer, kind: str, rng: np.random.Generator) -> Plan | None:
    """The explained plan under a drawn ZeRO stage and recomputation, and what else the idea says."""
    plan = explainer.plan
    zero = 0 if kind == "idea.no_sharding" else int(rng.choice([0, 1, 2, 3]))
    recompute = "none" if kind == "idea.no_recomputation" else str(rng.choice(RECOMPUTE))
    stages = tuple(
        replace(stage, zero=zero if stage.width > 1 else 0, recompute=recompute, recompute_blocks=None)
        for stage in plan.stages
    )
    every = plan.micro_batches
    spans = {
        "idea.gpipe": tuple((every,) * len(row) for row in plan.spans),
        "idea.one_f_one_b": tuple((len(row),) * len(row) for row in plan.spans),
    }
    changed = replace(plan, stages=stages)
    return changed.with_spans(spans[kind]) if kind in spans else changed


def drawn_variant(explainer: Explainer, kind: str) -> Draw:
    """What draws variants of an idea."""
    problem = explainer.problem
    widest = max(pool.devices_per_node for pool in problem.cluster.pools)
    uniform: dict[str, dict[str, int]] = {
        "idea.plain_3d": {},
        "idea.data_parallel": {"pp": 1},
        "idea.tensor_parallel": {"pp": 1, "tp": widest},
        "idea.pipeline": {"pp": 0, "tp": 1},
    }
    if kind in uniform:
        return lambda rng: drawn_uniform(problem, rng, **uniform[kind])
    if kind == "idea.stage_per_region":
        return lambda rng: stage_per_region(problem, rng)
    return lambda rng: same_devices(explainer, kind, rng)


def drawn_problems(first: int, count: int) -> Iterator[tuple[str, Problem]]:
    """Problems of at most `MOST_DEVICES` devices: equal ones and regions of several types in turn."""
    seed = first
    while count:
        equal = seed % 2 == 0
        problem = equal_devices(seed) if equal else larger_problems(seed)[0]
        if problem.cluster.devices <= MOST_DEVICES:
            yield f"{seed} {'equal' if equal else 'regions'}", problem
            count -= 1
        seed += 1


def compared(problem: Problem, variants: int) -> Iterator[tuple[Message, float, float, int]]:
    """Of every idea its words, the step that explain says, the best variant's, and how many variants can be run."""
    tables = CostTables(problem)
    plan = find_plan(problem, np.random.default_rng(0), effort=QUICK, tables=tables).plan
    if plan is None:
        return
    explainer = Explainer(problem, plan, tables)
    for idea, _, work in explainer.ideas():
        if idea.kind not in VARIED:
            continue
        outcome = work()
        said_s = np.inf if outcome.bill is None else outcome.bill.step_s
        rng, draw = np.random.default_rng(1), drawn_variant(explainer, idea.kind)
        best_s, ran = np.inf, 0
        for _ in range(variants):
            drawn = draw(rng)
            if drawn is not None and not violations(problem, drawn, tables):
                best_s, ran = min(best_s, step_times(drawn, tables).step_s), ran + 1
        yield idea, float(said_s), float(best_s), ran


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=8, help="problems")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--variants", type=int, default=300, help="variants of an idea that are drawn")
    args = parser.parse_args()
    ideas, beaten, worst = 0, 0, 0.0
    for name, problem in drawn_problems(args.first, args.count):
        print(f"{name}: {problem.model.name}, {problem.cluster.devices} devices, {problem.runtime.name}", flush=True)
        for idea, said_s, best_s, ran in compared(problem, args.variants):
            over = said_s / best_s - 1 if np.isfinite(best_s) else 0.0
            ideas, beaten, worst = ideas + 1, beaten + (over > TOLERANCE), max(worst, over)
            mark = "  <- beaten" if over > TOLERANCE else ""
            print(
                f"  {said_s:10.4f} s said {best_s:10.4f} s best of {ran:4} by hand {over:+7.2%}  {idea}{mark}",
                flush=True,
            )
    print(f"{ideas} ideas: {beaten} slower as said than written by hand, at most {worst:.2%}")
    return int(beaten > 0)


if __name__ == "__main__":
    sys.exit(main())
