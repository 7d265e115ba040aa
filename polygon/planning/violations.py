"""An independent check of a plan against its problem, sharing no code with the search."""

from __future__ import annotations

from collections import Counter

from polygon.cost.bill import excesses, step_bill
from polygon.cost.estimate import worker_memory
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import Placement
from polygon.domain.plan import COMPRESSIONS, PARITY_LEVELS, RECOMPUTE, REDUCTIONS, Plan, Problem
from polygon.parity import allowed, level_needed


def violations(problem: Problem, plan: Plan, tables: CostTables | None = None) -> list[str]:
    """Everything that is wrong with a plan, in words; empty for a plan that can be run.

    Checks layers, workers, devices, routes, spans, links, constraints and memory.
    """
    found = _structure(problem, plan)
    if found:
        return found
    found += _links(problem, plan)
    found += _local_steps(problem, plan)
    found += _constraints(problem, plan)
    tables = tables or CostTables(problem)
    if problem.constraints.limits_cost:
        bill = step_bill(problem, plan, step_times(plan, tables))
        found += [f"limit: {text}" for _, text in excesses(problem, bill)]
    place = Placement.of(plan, tables.links)
    for i, memory in enumerate(worker_memory(plan, tables, place)):
        pool = problem.cluster.pools[place.pool[i]]
        allowed = pool.device.memory_bytes * (1 - problem.constraints.memory_headroom)
        if memory.total_bytes > allowed:
            s = int(place.stage[i])
            found.append(
                f"stage {s} worker {i - place.offset[s]} ({pool.device.name}): needs "
                f"{memory.total_bytes / 2**30:.1f} GiB, {(memory.total_bytes - allowed) / 2**30:.1f} GiB over its "
                f"limit, most of it {memory.owner}"
            )
    return found


def _structure(problem: Problem, plan: Plan) -> list[str]:
    found = []
    cluster, model = problem.cluster, problem.model
    next_layer = 0
    for s, stage in enumerate(plan.stages):
        if stage.first_layer != next_layer or stage.last_layer <= stage.first_layer:
            found.append(
                f"stage {s}: layers [{stage.first_layer}, {stage.last_layer}) do not follow layer {next_layer}"
            )
        next_layer = stage.last_layer
        if not stage.workers:
            found.append(f"stage {s}: no workers")
        if stage.zero not in (0, 1, 2, 3):
            found.append(f"stage {s}: ZeRO {stage.zero} is not 0, 1, 2 or 3")
        if stage.recompute not in RECOMPUTE:
            found.append(f"stage {s}: recompute {stage.recompute!r} is unknown")
        for w, worker in enumerate(stage.workers):
            if not 0 <= worker.pool < len(cluster.pools):
                found.append(f"stage {s} worker {w}: pool {worker.pool} does not exist")
                continue
            pool = cluster.pools[worker.pool]
            if not worker.devices:
                found.append(f"stage {s} worker {w}: no devices")
            elif not all(pool.first_device <= d < pool.first_device + pool.devices for d in worker.devices):
                found.append(f"stage {s} worker {w}: devices {worker.devices} are not all of pool {worker.pool}")
            elif len({pool.node_of(d) for d in worker.devices}) > 1:
                found.append(f"stage {s} worker {w}: devices {worker.devices} lie on several nodes")
            if worker.tp and model.heads % worker.tp:
                found.append(f"stage {s} worker {w}: {model.heads} heads cannot be split {worker.tp} ways")
    if next_layer != model.layers:
        found.append(f"stages end at layer {next_layer}, the model has {model.layers}")
    uses = Counter(d for stage in plan.stages for worker in stage.workers for d in worker.devices)
    found += [f"device {d}: used {count} times" for d, count in uses.items() if count > 1]
    if plan.routes.ndim != 2 or plan.routes.shape[1] != len(plan.stages) or not plan.micro_batches:
        return [*found, f"routes: shape {plan.routes.shape}, expected (micro-batches, {len(plan.stages)})"]
    if plan.micro_batches * plan.micro_batch_size != problem.batch.global_batch:
        found.append(
            f"{plan.micro_batches} micro-batches of {plan.micro_batch_size} are not the global batch of "
            f"{problem.batch.global_batch}"
        )
    for s, stage in enumerate(plan.stages):
        column = plan.routes[:, s]
        if column.min() < 0 or column.max() >= stage.width:
            found.append(f"stage {s}: a route names worker {column.min()}..{column.max()} of {stage.width}")
    if [len(row) for row in plan.spans] != [stage.width for stage in plan.stages]:
        found.append("spans: not one for every worker of every stage")
    elif min(min(row) for row in plan.spans) < 1:
        found.append("spans: must be at least 1")
    if plan.reduction not in REDUCTIONS:
        found.append(f"reduction {plan.reduction!r} is unknown")
    if plan.local_steps < 1:
        found.append(f"local_steps {plan.local_steps} is less than 1")
    return found


def _links(problem: Problem, plan: Plan) -> list[str]:
    found = []
    cluster = problem.cluster
    region = [[cluster.pools[w.pool].region for w in stage.workers] for stage in plan.stages]
    for s in range(len(plan.stages) - 1):
        pairs = {(region[s][a], region[s + 1][b]) for a, b in plan.routes[:, s : s + 2]}
        found += [
            f"stages {s} and {s + 1}: no link between {cluster.regions[a].name} and {cluster.regions[b].name}"
            for a, b in sorted(pairs)
            if not cluster.connected(a, b)
        ]
    for s, members in enumerate(region):
        found += [
            f"stage {s}: no link between {cluster.regions[a].name} and {cluster.regions[b].name} for its gradients"
            for a in sorted(set(members))
            for b in sorted(set(members))
            if a < b and not cluster.connected(a, b)
        ]
    may = allowed(problem)
    seen = Counter((use.source, use.target) for use in plan.links)
    found += [f"links: {pair} is given {count} times" for pair, count in seen.items() if count > 1]
    for use in plan.links:
        for field in ("activations", "activation_gradients", "weight_gradients"):
            mode = getattr(use, field)
            if mode not in COMPRESSIONS:
                found.append(f"link {use.source}-{use.target}: {field} {mode!r} is unknown")
            elif use.source != use.target and mode not in getattr(may, field) and not _unseen(problem, field, mode):
                why = _not_allowed(problem, field, mode)
                found.append(f"link {use.source}-{use.target}: {field} {mode!r} is not allowed ({why})")
        if use.streams < 1:
            found.append(f"link {use.source}-{use.target}: {use.streams} streams")
    return found


def _unseen(problem: Problem, traffic: str, mode: str) -> bool:
    """Whether the search does not take a packing because nobody has shown what it does, though it would be allowed."""
    limits = problem.constraints
    by_level = PARITY_LEVELS.index(level_needed(problem, traffic, mode)) <= PARITY_LEVELS.index(limits.parity)
    return mode in limits.compressions if limits.compressions else by_level


def _not_allowed(problem: Problem, traffic: str, kind: str | int) -> str:
    """Why the search may not choose a kind: the constraints' own list, or the level of parity that it needs."""
    limits = problem.constraints
    if limits.local_steps if traffic == "local_steps" else limits.compressions:
        return "not in the constraints' list"
    return f"parity {limits.parity!r}; it needs {level_needed(problem, traffic, kind)!r}"


def _local_steps(problem: Problem, plan: Plan) -> list[str]:
    """What keeps regions from training by themselves for some steps, if the plan has them do so."""
    if plan.local_steps == 1:
        return []
    found = []
    limits, steps = problem.constraints, plan.local_steps
    by_level = PARITY_LEVELS.index(level_needed(problem, "local_steps", steps)) <= PARITY_LEVELS.index(limits.parity)
    if not (steps in limits.local_steps if limits.local_steps else by_level):
        found.append(f"local_steps {steps}: not allowed ({_not_allowed(problem, 'local_steps', steps)})")
    if plan.reduction != "all-reduce":
        found.append(f"local_steps {steps}: not with reduction {plan.reduction!r}")
    if problem.batch.precision == "fp16":
        found.append(f"local_steps {steps}: not in fp16 (they have no loss scaling)")
    if any(len({worker.tp for worker in stage.workers}) > 1 for stage in plan.stages):
        found.append(f"local_steps {steps}: a stage has workers of several tensor-parallel degrees")
    if any(stage.zero == 3 for stage in plan.stages):
        found.append(f"local_steps {steps}: a stage splits its weights (ZeRO-3)")
    if not plan.stays_in_regions(problem.cluster):
        found.append(f"local_steps {steps}: not every region holds a whole pipeline of its own")
    return found


def _constraints(problem: Problem, plan: Plan) -> list[str]:
    cluster, limits = problem.cluster, problem.constraints
    names = [[cluster.regions[cluster.pools[w.pool].region].name for w in stage.workers] for stage in plan.stages]
    found = [
        f"stage {s}: uses forbidden region {name}"
        for s, members in enumerate(names)
        for name in sorted(set(members) & set(limits.forbidden_regions))
    ]
    found += [
        f"stage {s}: uses forbidden device {name}"
        for s, stage in enumerate(plan.stages)
        for name in sorted({cluster.pools[w.pool].device.name for w in stage.workers} & set(limits.forbidden_devices))
    ]
    if limits.most_stages is not None and len(plan.stages) > limits.most_stages:
        found.append(f"stages: {len(plan.stages)}, at most {limits.most_stages} are allowed")
    for rule in limits.rules:
        s = rule.stage if rule.stage >= 0 else len(names) + rule.stage
        if not 0 <= s < len(names):
            continue
        if rule.only_regions:
            found += [
                f"stage {s}: region {name} is not one of {rule.only_regions}"
                for name in sorted(set(names[s]) - set(rule.only_regions))
            ]
        found += [
            f"stage {s}: region {name} is one of {rule.never_regions}, where it must not be"
            for name in sorted(set(names[s]) & set(rule.never_regions))
        ]
    return found
