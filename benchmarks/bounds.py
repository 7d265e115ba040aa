"""Whether any plan beats the bound, and how far above it plans are.

    python benchmarks/bounds.py violations [--count 500] [--first 0]
    python benchmarks/bounds.py gaps PLAN.json ...
    python benchmarks/bounds.py shares [INSTANCE ...]

`violations` draws problems (one to five regions; devices that are equal or not; dense models and, one in five, experts;
runtimes, packings, local steps), plans each by a short search, and holds the plan, changes of it (borders, ZeRO,
recomputation, chunks, packings, warm-up depths, experts over other numbers of devices), random allocations and random
interleaved plans against the bounds on time, money and energy, and each against the least time of its own kind in its
own micro-batches, which says more than that of all kinds. Plans that the checker does
not accept are passed over. `gaps` prints a line for every plan file. `shares` says for the best known plans of the
native benchmark (all, or those named) where their steps go beside what the bound knows of them: a plan's devices at
their best in its micro-batches, its busiest worker, the same schedule with messages that take no time, with those it
has, and the whole step; the bound's compute, its stages, all of it, and the kind of plan that may be as quick.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.bounds.least_traffic import LeastTraffic
from polygon.bounds.lower_bound import lower_bound
from polygon.bounds.pipeline_bound import PipelineBound
from polygon.bounds.price_bound import least_energy_j, least_usd
from polygon.bounds.size_work import size_work
from polygon.bounds.stage_tiers import Kinds
from polygon.cost.convergence import allowed
from polygon.cost.money import step_bill
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import COMPRESSIONS, Constraints, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from polygon.formats import catalogue
from polygon.formats.files import read_plan, read_problem
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder, Infeasible
from polygon.planning.objectives import objective_named
from polygon.planning.polish import changes
from polygon.planning.search_engine import Effort, find_plan
from runners.sweeps.best_known import best_known, unpacked
from tests.drawn_problems import larger_problems, packed_at_random, small_problem
from tests.linked_regions import TYPES, cluster_of, small_gpt

EFFORT = Effort(fluid_evaluations=300, exact_evaluations=12, polish_evaluations=80, patience=200)
RUNTIMES = ("polygon", "polygon", "polygon", "megatron-core", "deepspeed", "torchtitan")
OBJECTIVES = ("time", "time", "money", "energy")
CHANGES = 16
"""Of a plan, by one thing each, and of that as many again."""
INTERLEAVED = 20
"""Random interleaved plans of a problem, of which few keep the rules."""
LONG_S = 1e9
"""More than any step takes."""
TOLERANCE = 1e-9
NATIVE = Path(__file__).resolve().parents[1] / "instances" / "native"


def regions_apart(rng: np.random.Generator) -> Problem:
    """Two to five regions, some of them near, some pairs without a link; prices of devices and egress."""
    n = int(rng.integers(2, 6))
    groups = [
        [
            (str(rng.choice(TYPES)), int(rng.integers(1, 5)), int(rng.choice([1, 2, 4])))
            for _ in range(rng.integers(1, 3))
        ]
        for _ in range(n)
    ]
    latency_s = float(rng.choice([1e-3, 2e-2, 1e-1])) * rng.uniform(0.1, 2, (n, n))
    bytes_per_s = float(rng.choice([1e7, 1e8, 1e9])) * rng.uniform(0.2, 2, (n, n))
    latency_s, bytes_per_s = np.maximum(latency_s, latency_s.T), np.maximum(bytes_per_s, bytes_per_s.T)
    if n > 2 and rng.random() < 0.3:
        bytes_per_s[0, 1] = bytes_per_s[1, 0] = 0.0
    cluster = cluster_of(
        groups,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        node_bytes_per_s=float(rng.choice([1e10, 1e11])),
        capacity=float(rng.choice([np.inf, np.inf, 2e8])),
        egress_usd_per_gb=float(rng.choice([0.0, 0.02, 0.12])),
    )
    width = int(rng.choice([1024, 2048]))
    model = small_gpt(
        blocks=int(rng.integers(2, 25)),
        hidden_size=width,
        head_dim=width // 16,
        ffn_size=4 * width,
        tied_embeddings=bool(rng.random() < 0.5),
    )
    steps = (1,) if rng.random() < 0.7 else (1, 8)
    packings = (("none",), (), (), COMPRESSIONS)[int(rng.integers(4))]
    return Problem(
        cluster=cluster,
        model=model,
        batch=Batch(global_batch=int(rng.choice([7, 16, 32, 50, 64, 96])), seq_len=int(rng.choice([512, 1000]))),
        constraints=Constraints(compressions=packings, local_steps=steps),
        runtime=catalogue.runtime(str(rng.choice(RUNTIMES))),
    )


def fast_links(rng: np.random.Generator) -> Problem:
    """One or two regions with links that hardly count and many micro-batches: plans come near their bound."""
    apart = rng.random() < 0.5
    groups = [[(str(rng.choice(TYPES)), int(rng.integers(1, 4)), int(rng.choice([1, 2, 4])))] for _ in range(1 + apart)]
    cluster = cluster_of(
        groups,
        latency_s=float(rng.choice([1e-4, 1e-2, 1e-1])),
        bytes_per_s=float(rng.choice([1e9, 1e10])),
        inside=Link(latency_s=1e-6, bytes_per_s=3e11),
        between=Link(latency_s=5e-6, bytes_per_s=float(rng.choice([3e9, 5e10]))),
    )
    model = small_gpt(blocks=int(rng.integers(2, 13)), tied_embeddings=bool(rng.random() < 0.5))
    batch = Batch(global_batch=int(rng.choice([3, 7, 64, 250, 512])), seq_len=int(rng.choice([512, 1000])))
    return Problem(cluster=cluster, model=model, batch=batch, runtime=catalogue.runtime(str(rng.choice(RUNTIMES))))


def with_experts(problem: Problem, rng: np.random.Generator) -> Problem:
    """A problem whose model has experts in some of its blocks, few of them or many."""
    dense = problem.model
    experts = int(rng.choice([2, 4, 8, 32]))
    model = replace(
        dense,
        experts=experts,
        experts_per_token=int(rng.integers(1, min(experts, 4) + 1)),
        expert_ffn_size=dense.hidden_size * int(rng.choice([1, 4])) // int(rng.choice([1, 4])),
        shared_experts=int(rng.integers(2)),
        dense_blocks=int(rng.integers(2)),
        expert_every=int(rng.integers(1, 3)),
    )
    return replace(problem, model=model)


def drawn(seed: int) -> Problem:
    """A problem of one of five kinds."""
    rng = np.random.default_rng(seed)
    if seed % 5 == 0:
        return replace(small_problem(seed), constraints=Constraints())
    if seed % 5 == 1:
        return larger_problems(seed)[0]
    if seed % 5 == 2:
        return fast_links(rng)
    if seed % 5 == 4:
        return with_experts(fast_links(rng) if rng.random() < 0.3 else regions_apart(rng), rng)
    return regions_apart(rng)


def plans(problem: Problem, tables: CostTables, seed: int) -> Iterator[tuple[str, Plan]]:
    """Plans of a problem, each with how it was found."""
    rng = np.random.default_rng(seed)
    objective = objective_named(OBJECTIVES[seed // 5 % len(OBJECTIVES)])
    found = find_plan(problem, rng, effort=EFFORT, tables=tables, objective=objective)
    if found.interrupted:
        raise KeyboardInterrupt
    if found.plan is not None:
        yield "search", found.plan
        best, best_s = found.plan, step_times(found.plan, tables).step_s
        for _ in range(2):
            for plan in islice(changes(best, tables), CHANGES):
                yield "change", plan
                step_s = step_times(plan, tables).step_s
                if step_s < best_s:
                    best, best_s = plan, step_s
        links = packed_at_random(problem, best.links, rng)
        for steps in allowed(problem).local_steps:
            yield "packed", replace(best, links=links, local_steps=steps)
        for depth in (1, 2, best.micro_batches):
            yield "depth", best.with_spans(tuple(tuple(depth for _ in row) for row in best.spans))
        if problem.model.experts:
            for plan in (found.plan, best):
                yield from (("experts", other) for other in spread_experts(plan))
    decoder = Decoder(problem, tables=tables)
    candidates = Candidates(decoder, min(6, problem.model.layers))
    for _ in range(4):
        decoded = decoder.decode(candidates.random(rng))
        if not isinstance(decoded, Infeasible):
            yield "random", decoded
    for plan in interleaved_at_random(problem, rng):
        yield "interleaved", plan


def spread_experts(plan: Plan) -> Iterator[Plan]:
    """A plan with experts over other numbers of devices, under each way of ZeRO."""
    for ep in (1, 2, 4, 8, 16):
        for zero in (0, 1, 2, 3):
            stages = tuple(replace(stage, ep=ep, zero=zero, shards=0) for stage in plan.stages)
            yield replace(plan, stages=stages)


def interleaved_at_random(problem: Problem, rng: np.random.Generator) -> Iterator[Plan]:
    """Plans whose groups of workers hold several runs of layers each."""
    layers = problem.model.layers
    sizes = CostTables(problem).micro_batch_sizes[:6]
    for _ in range(INTERLEAVED):
        groups, chunks, tp = int(rng.integers(2, 6)), int(rng.integers(2, 5)), int(rng.choice([1, 1, 1, 2]))
        size = int(rng.choice(sizes))
        workers = [
            Worker(pool=pool.index, devices=tuple(pool.first_device + a + i for i in range(tp)))
            for pool in problem.cluster.pools
            for a in range(0, pool.devices - tp + 1, tp)
            if a % pool.devices_per_node + tp <= pool.devices_per_node
        ]
        if rng.random() < 0.5:
            rng.shuffle(workers)
        most, parts = min(len(workers) // groups, problem.batch.global_batch // size), groups * chunks
        if most < 1 or parts > layers:
            continue
        width = int(rng.integers(max(1, most // 2), most + 1))
        mine = [workers[g * width : (g + 1) * width] for g in range(groups)]
        if rng.random() < 0.5:
            mine = [workers[g : groups * width : groups] for g in range(groups)]
        cuts = np.round(np.linspace(0, layers, parts + 1)).astype(int)
        if rng.random() < 0.5:
            cuts[1:-1] = np.sort(rng.choice(np.arange(1, layers), parts - 1, replace=False))
        # Of the devices of any pool in a group whole sets share the experts.
        spread = [e for e in (1, 2, 4, 8) if problem.model.experts % e == 0 and problem.model.experts]
        alike = [sum(w.pool == pool for w in of) for of in mine for pool in {w.pool for w in of}]
        spread = [e for e in spread if all(n % e == 0 for n in alike)]
        ep = int(rng.choice(spread or [1]))
        zero, recompute = int(rng.choice([0, 1, 1, 2, 3])), str(rng.choice(["none", "none", "full", "selective"]))
        stages = tuple(
            Stage(
                first_layer=int(cuts[s]),
                last_layer=int(cuts[s + 1]),
                workers=tuple(mine[s % groups]),
                zero=zero,
                recompute=recompute,
                ep=ep,
            )
            for s in range(parts)
        )
        lane = np.arange(problem.batch.global_batch // size) % width
        yield Plan(
            stages=stages,
            routes=np.repeat(lane[:, None], parts, axis=1),
            micro_batch_size=size,
            spans=stage_spans(stages, [1] * parts),
            chunks=chunks,
        )


class OwnBounds:
    """Least times of the kinds of plans of a problem, by micro-batch size."""

    def __init__(self, tables: CostTables) -> None:
        self._tables, self._kinds = tables, Kinds.of(tables)
        self._least: dict[tuple[int, str], float] = {}
        self._traffic: dict[int, LeastTraffic] = {}

    def least_s(self, plan: Plan) -> float:
        """Of plans like this one."""
        steps = 1 if plan.local_steps == 1 else max(allowed(self._tables.problem).local_steps)
        kind = "local steps" if steps > 1 else "interleaved" if plan.chunks > 1 else "stages"
        names = ("stages", "one stage") if len(plan.stages) == 1 and steps == 1 else (kind,)
        key = plan.micro_batch_size, str(names)
        if key not in self._least:
            if steps not in self._traffic:
                self._traffic[steps] = LeastTraffic(self._tables, self._kinds, steps)
            size = size_work(self._tables, self._kinds, plan.micro_batch_size)
            bound = PipelineBound(size, self._traffic[steps])
            kinds = bound.kinds_of_plan(steps, finely=bound.tells_apart)
            self._least[key] = min(kinds[name](LONG_S) for name in names)
        return self._least[key]


def hold(first: int, count: int) -> int:
    """Hold plans of many problems against their bounds; returns how many of them are beaten."""
    names = ("time", "time of its kind", "money", "energy")
    beaten, closest, tried = 0, dict.fromkeys(names, np.inf), dict[str, int]()
    bound_s, began_s = 0.0, time.process_time()
    for seed in range(first, first + count):
        problem = drawn(seed)
        tables = CostTables(problem)
        before_s = time.process_time()
        least = {
            "time": lower_bound(tables).seconds,
            "money": least_usd(tables),
            "energy": least_energy_j(tables),
        }
        bound_s += time.process_time() - before_s
        own = OwnBounds(tables)
        for how, plan in plans(problem, tables, seed):
            if violations(problem, plan, tables):
                continue
            tried[how] = tried.get(how, 0) + 1
            bill = step_bill(problem, plan, step_times(plan, tables))
            least["time of its kind"] = own.least_s(plan)
            for name, value in zip(names, (bill.step_s, bill.step_s, bill.usd, bill.energy_j), strict=True):
                ratio = value / least[name] if least[name] > 0 else np.inf
                closest[name] = min(closest[name], ratio)
                if ratio < 1 - TOLERANCE:
                    beaten += 1
                    print(f"seed {seed}: {how} plan has {ratio:.5f} of the bound on {name}", flush=True)
        if sys.stderr.isatty() or seed % 50 == 49:
            print(f"{seed + 1 - first} problems, {sum(tried.values())} plans", file=sys.stderr, flush=True)
    print(f"{count} problems, {sum(tried.values())} plans ({tried}): {beaten} beat a bound")
    print("closest plan over its bound:", ", ".join(f"{name} {ratio:.3f}" for name, ratio in closest.items()))
    print(f"{bound_s / count:.2f} CPU-seconds for the bounds of a problem, {time.process_time() - began_s:.0f} in all")
    return beaten


def gaps(paths: list[Path]) -> None:
    """Print how far each plan of some files is above the bound of its problem."""
    found = []
    for path in paths:
        file = read_plan(path)
        tables = CostTables(file.problem)
        step_s = step_times(file.plan, tables).step_s
        began_s = time.process_time()
        bound = lower_bound(tables)
        spent_s = time.process_time() - began_s
        found.append(step_s / bound.seconds - 1)
        parts = ", ".join(f"{name} {value:.3g}" for name, value in bound.parts.items())
        print(f"{path.stem:32} {step_s:8.3f} s, bound {bound.seconds:8.3f} s, gap {found[-1]:6.1%}; {parts}; "
              f"{spent_s:.2f} CPU-s", flush=True)  # fmt: skip
    print(f"median gap {np.median(found):.1%}")


def shares(names: list[str]) -> None:
    """Print the shares of the best known plans' steps beside the bound's."""
    known = best_known("native")
    columns = ["devices busiest +stages +messages  step ", " compute stages  bound   gap  may be as quick"]
    print(f"{'':32}{columns[0]:>42}   {columns[1]}")
    gaps_found, spent_s = [], 0.0
    for name in names or sorted(known, key=lambda name: (int(name.split("-")[1]), name)):
        problem = read_problem(NATIVE / f"{name}.yaml")
        plan, tables = unpacked(problem, known[name]["plan"]), CostTables(problem)
        began_s = time.process_time()
        bound = lower_bound(tables)
        spent_s += time.process_time() - began_s
        times, least = step_times(plan, tables), [*bound.parts.values()]
        gaps_found.append(times.step_s / bound.seconds - 1)
        mine = (*step_shares(plan, tables), times.step_s)
        kind = "{}, micro-batches of {}".format(*bound.of) if bound.of else ""
        print(f"{name:32}" + "".join(f"{value:8.3f} " for value in mine) + " "
              + "".join(f"{value:8.3f}" for value in (least[0], *least[2:])) + f" {gaps_found[-1]:6.0%}  {kind}",
              flush=True)  # fmt: skip
    print(f"median gap {np.median(gaps_found):.1%} of {len(gaps_found)}; {spent_s:.1f} CPU-seconds for the bounds")


def step_shares(plan: Plan, tables: CostTables) -> tuple[float, float, float, float]:
    """Seconds of a step with only some of what it takes, each with all before it.

    Its devices doing its micro-batches as quickly as they can, each as much as it is able to; its busiest worker; its
    schedule with messages that take no time; and with its messages.
    """
    kinds, schedule = Kinds.of(tables), step_times(plan, tables).schedule
    size = size_work(tables, kinds, plan.micro_batch_size)
    able = sum(size.device_capacity[kinds.of_pool[pool]] * count for pool, count in plan.devices_of_pools.items())
    share = np.bincount(schedule.routes.ravel(), minlength=len(schedule.forward_s))
    each_s = share * (schedule.forward_s + schedule.backward_s)
    silent = replace(schedule, hold_s=np.zeros_like(schedule.hold_s), latency_s=np.zeros_like(schedule.latency_s))
    busiest_s = np.bincount(schedule.holder, weights=each_s).max()
    ends_s = [float(of.simulate()[0].max()) for of in (silent, schedule)]
    return float(size.work / able), float(busiest_s), ends_s[0], ends_s[1]


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    hold_parser = commands.add_parser("violations", help="hold plans of drawn problems against their bounds")
    hold_parser.add_argument("--count", type=int, default=500, help="problems")
    hold_parser.add_argument("--first", type=int, default=0, help="first seed")
    gaps_parser = commands.add_parser("gaps", help="gap of plan files")
    gaps_parser.add_argument("plans", type=Path, nargs="+")
    shares_parser = commands.add_parser("shares", help="where the steps of the best known plans go")
    shares_parser.add_argument("names", nargs="*", help="of instances/native")
    args = parser.parse_args()
    if args.command == "shares":
        shares(args.names)
        return 0
    if args.command == "violations":
        return 1 if hold(args.first, args.count) else 0
    gaps(args.plans)
    return 0


if __name__ == "__main__":
    sys.exit(main())
