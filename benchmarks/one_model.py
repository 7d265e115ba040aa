"""Whether there is one model of a step: grid and plan agree, no bound is above a plan, the search's objective ranks.

    python benchmarks/one_model.py [--only agree,bound,rank,factor,speed] [--splits 500] [--bounds 500] [--clusters 10]

- agree: rows of the grid against `evaluate` of their plans, on drawn problems of equal nodes;
- bound: the lower bound against exact steps of drawn plans;
- rank: what the search ranks candidates by (the relaxation) against the exact step of the plans that they decode to;
- factor: how much each term of communication grows under a calibration of 10;
- speed: exact estimates of one plan, and configurations of a grid, per second of one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.bounds.lower_bound import lower_bound
from polygon.commands.generate import generate
from polygon.cost.calibration import Calibration
from polygon.cost.estimate import estimate
from polygon.cost.lanes import Lanes
from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, NodeGroup, Region
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem
from polygon.domain.runtime import POLYGON, Runtime
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.grid3d.grid_rows import case_of
from polygon.grid3d.splits import EVERYTHING, GridOptions, all_splits, configurations, split_fault
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder, Infeasible
from polygon.planning.initial_solutions import simple_starts
from tests.drawn_problems import small_problem

LEAST_PLANS = 10
"""Of candidates that become a plan, for a rank correlation."""
FUSED = Runtime(name="fused", dp_overlap="full", tp_overlap="backward", p2p_overlap=False)


def equal_nodes(device: str, nodes: int, between: Link, model: Model, batch: Batch, runtime: Runtime) -> Problem:
    """A problem on nodes of eight devices."""
    link = catalogue.usual_link(device)
    group = NodeGroup(device=device, nodes=nodes, devices_per_node=8, intra_node=link, inter_node=between)
    none = np.zeros((1, 1))
    cluster = Cluster(
        name="bench",
        regions=(Region(name="r", node_groups=(group,), intra_region=between),),
        latency_s=none,
        bytes_per_s=none,
        capacity_bytes_per_s=none + np.inf,
        catalogue={device: catalogue.device(device)},
    )
    return Problem(cluster=cluster, model=model, batch=batch, runtime=runtime)


def drawn_split(rng: np.random.Generator) -> tuple[Problem, ParallelConfig]:
    """Equal nodes on a slow or a fast network, and one of all the ways to use them."""
    while True:
        between = Link(latency_s=float(rng.choice([5e-6, 1e-4])), bytes_per_s=float(rng.choice([1.25e9, 25e9, 200e9])))
        model = catalogue.model(str(rng.choice(["gpt3-1.3b", "gpt3-6.7b", "llama2-7b", "mixtral-8x7b"])))
        nodes = int(2 ** rng.integers(0, 7))
        batch = Batch(global_batch=int(8 * nodes * rng.choice([1, 4, 16])), seq_len=2048)
        runtime = (POLYGON, FUSED)[rng.integers(2)]
        problem = equal_nodes(str(rng.choice(["a100-80gb", "v100-32gb"])), nodes, between, model, batch, runtime)
        splits = [s for s in all_splits(8 * nodes, None) if not split_fault(s, model, batch, 8)]
        drawn = configurations(splits[rng.integers(len(splits))], model, batch, EVERYTHING)
        found = [config for config, _ in drawn if isinstance(config, ParallelConfig)]
        if found:
            return problem, found[rng.integers(len(found))]


def agree(count: int) -> None:
    """Grid rows against plans."""
    rng, times, memory, verdicts = np.random.default_rng(0), [], [], 0
    for _ in range(count):
        problem, config = drawn_split(rng)
        case, _ = case_of(problem, GridOptions())
        tables = CostTables(problem)
        row, plan = Lanes(tables).estimate(config), uniform_plan(problem, config)
        whole = estimate(problem, plan, tables)
        times.append(abs(row.step_s / whole.step_s - 1))
        memory.append(abs(row.peak.total_bytes / max(worker.peak_bytes for worker in whole.workers) - 1))
        verdicts += (row.peak.total_bytes > case.usable_bytes) != bool(violations(problem, plan, tables))
    print(
        f"grid row against plan, {count} splits: time differs by at most {max(times):.1e}, memory by {max(memory):.1e}"
    )
    print(f"verdicts of checker and grid that differ: {verdicts}")


def drawn_plans(
    problem: Problem, decoder: Decoder, rng: np.random.Generator, count: int, draws: int
) -> list[tuple[float, Plan]]:
    """Candidates of the search, simple ones and random ones, by their objective, with the plans that they become.

    As many as `count` plans, half of them of simple candidates at most; at most so many `draws` of random ones.
    """
    candidates = Candidates(decoder, min(8, problem.model.layers))
    starts = [
        Allocation(workers=workers, micro_batch_size=size)
        for size in candidates.sizes
        for workers in simple_starts(decoder, min(8, problem.model.layers), size)
    ]
    plans: list[tuple[float, Plan]] = []

    def take(chosen: Iterable[Allocation], most: int) -> None:
        for candidate in chosen:
            if len(plans) >= most:
                return
            legal = decoder.legal(candidate)
            plan = decoder.decode(legal)
            if not isinstance(plan, Infeasible):
                plans.append((decoder.fluid_s(legal)[0], plan))

    take((starts[i] for i in rng.permutation(len(starts))), count // 2)
    take((candidates.random(rng) for _ in range(draws)), count)
    return plans


def bound(count: int) -> None:
    """The lower bound against exact steps."""
    above, plans, nearest = 0, 0, np.inf
    for seed in range(count):
        problem = small_problem(seed)
        decoder = Decoder(problem)
        least_s = lower_bound(decoder.tables).seconds
        for _, plan in drawn_plans(problem, decoder, np.random.default_rng(seed), 12, 12):
            ratio = step_times(plan, decoder.tables).step_s / least_s
            above, plans, nearest = above + (ratio < 1 - 1e-9), plans + 1, min(nearest, ratio)
    print(f"bound above the step in {above} of {plans} plans of {count} problems; least step over bound {nearest:.4f}")


def rank(count: int) -> None:
    """Rank correlation of the relaxation and the exact step."""
    values = []
    for i in range(count):
        rng = np.random.default_rng(i)
        devices = int(64 * (10240 / 64) ** (i / max(1, count - 1)))
        cluster = generate(int(rng.integers(2, 9)), int(rng.integers(2, 5)), devices, rng)
        model, batch = catalogue.model("gpt3-6.7b"), Batch(global_batch=1024, seq_len=2048)
        problem = Problem(cluster=cluster, model=model, batch=batch)
        decoder = Decoder(problem)
        plans = drawn_plans(problem, decoder, rng, 60, 600)
        if len(plans) < LEAST_PLANS:
            print(f"{devices:6} devices, {len(plans):3} plans: too few", flush=True)
            continue
        exact_s = [step_times(plan, decoder.tables).step_s for _, plan in plans]
        values.append(float(spearmanr([fluid_s for fluid_s, _ in plans], exact_s).statistic))
        print(f"{devices:6} devices, {len(plans):3} plans: rank correlation {values[-1]:.3f}", flush=True)
    print(f"least {min(values):.3f}, median {statistics.median(values):.3f}")


def factor() -> None:
    """What a calibration of 10 makes of every term."""
    link = Link(latency_s=5e-6, bytes_per_s=25e9)
    model, batch = catalogue.model("gpt3-1.3b"), Batch(global_batch=64, seq_len=2048)
    problem = equal_nodes("a100-80gb", 2, link, model, batch, POLYGON)
    plan = uniform_plan(problem, ParallelConfig(dp=2, tp=2, pp=4, zero=1))
    one, ten = (CostTables(problem, calibration=Calibration(communication=f)) for f in (1.0, 10.0))
    a, b = step_times(plan, one), step_times(plan, ten)
    terms: dict[str, Callable[[CostTables, StepTimes], float]] = {
        "sums": lambda tables, times: times.reductions[0].total_s,
        "gathers": lambda tables, times: times.reductions[0].gather_s,
        "tied embeddings": lambda tables, times: times.tied_s,
        "messages": lambda tables, times: float((times.messages.busy_s + times.messages.latency_s).sum()),
        "tensor-parallel": lambda tables, times: float(tables.times(0, 2, 1, "none").communication_s[-1]),
        "update": lambda tables, times: float(times.update_s.max()),
    }
    grown = ", ".join(f"{name} {seconds(ten, b) / seconds(one, a):.6g}" for name, seconds in terms.items())
    print(f"communication x 10 makes of: {grown}")


def speed() -> None:
    """Estimates a second of one core."""
    link = Link(latency_s=5e-6, bytes_per_s=200e9)
    batch = Batch(global_batch=64, seq_len=2048)
    problem = equal_nodes("a100-80gb", 8, link, catalogue.model("gpt3-13b"), batch, POLYGON)
    tables, plan = CostTables(problem), uniform_plan(problem, ParallelConfig(tp=8, pp=8))
    routed = replace(plan, spans=((2,),) * 8)  # no uniform split: messages in turn
    for name, one in (("uniform", plan), ("routed", routed)):
        step_times(one, tables)
        took: dict[bool, list[float]] = {False: [], True: []}
        for i in range(4000):
            if i % 2:
                for kept in (tables.plan_terms, tables.plan_traffic, tables.group_terms):
                    kept.clear()
            start = time.thread_time()
            step_times(one, tables).step_s  # noqa: B018
            took[bool(i % 2)].append(time.thread_time() - start)
            step_times(one, tables)
        known, new = (statistics.median(took[forgotten]) * 1e6 for forgotten in (False, True))
        print(f"exact step, 8 stages x 64 micro-batches, warm, {name}: {known:.0f} us; with terms anew {new:.0f} us")
    lanes, config, seconds = Lanes(tables), ParallelConfig(tp=8, pp=8), []
    for i in range(2000):
        start = time.thread_time()
        lanes.estimate(replace(config, zero=i % 2, recompute=("none", "full")[i // 2 % 2]))
        seconds.append(time.thread_time() - start)
    print(f"the same as a lane, in bulk: {statistics.median(seconds) * 1e6:.0f} us")
    model, batch = catalogue.model("gpt3-175b"), Batch(global_batch=1536, seq_len=2048)
    problem = equal_nodes("a100-80gb", 128, link, model, batch, POLYGON)
    case, _ = case_of(problem, EVERYTHING)
    splits = [s for s in all_splits(1024, None) if not split_fault(s, model, batch, 8)]
    case.rows(splits[-1])
    start, done = time.thread_time(), 0
    for split in splits:
        done += len(case.rows(split))
    print(
        f"grid of gpt3-175b on 1,024 A100: {done:,} configurations, {done / (time.thread_time() - start):,.0f} a second"
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="agree,bound,rank,factor,speed", help="parts, between commas")
    parser.add_argument("--splits", type=int, default=500)
    parser.add_argument("--bounds", type=int, default=500)
    parser.add_argument("--clusters", type=int, default=10)
    args = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "agree": lambda: agree(args.splits),
        "bound": lambda: bound(args.bounds),
        "rank": lambda: rank(args.clusters),
        "factor": factor,
        "speed": speed,
    }
    for name in args.only.split(","):
        parts[name]()


if __name__ == "__main__":
    main()
