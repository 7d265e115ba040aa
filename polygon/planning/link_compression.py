"""How links pack their messages: for every link the allowed kind that takes least, packing and unpacking included.

A draft takes for each pair of regions, and inside each, what is quickest for a message that is alone on the link. A
routed plan is then settled by exact simulation: where another kind makes its value better, or a gentler one leaves it
as it is, it takes the place. Messages inside a region and inside a node are packed where that pays (`PAYS`). Weight
gradients of regions that add up together are packed alike, because every leader must add up the same numbers. Inside a
region they are sums of NCCL or gloo, which nothing packs, or its nodes send one another packed ones as regions do
(`Plan.packed_inside`): TCP carries these, so that it is looked at where the nodes are joined by nothing faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from polygon.cost.convergence import Allowed
from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values, codec_s, matrix_values, packed_bytes
from polygon.domain.plan import LinkUse, Plan, Problem, Stage

MOST_PAIRS = 6
"""Pairs of regions whose packing of activations is settled one by one, those that carry most first."""

PAYS = 1e-3
"""Part by which packing inside a region has to make the value better: for less nothing lossy is done there."""

Pair = tuple[int, int]


def _memory_bytes_per_s(problem: Problem) -> np.ndarray:
    """Memory rate of the slowest allowed device of every region, shape (regions,)."""
    rate = np.full(len(problem.cluster.regions), np.inf)
    for pool in problem.cluster.pools:
        if problem.may_use(pool):
            rate[pool.region] = min(rate[pool.region], pool.device.memory_bytes_per_s)
    return rate


def link_seconds(
    tables: CostTables, n_values: float, element_bytes: int, mode: str, *, feedback: bool = False
) -> np.ndarray:
    """Seconds of packing, sending (latency left out) and unpacking between regions, at best their nodes' cards, and
    between nodes of one on the diagonal; inf without a link."""
    known = tables.packing.get((), n_values, element_bytes, mode, feedback)
    if known is not None:
        return known
    problem = tables.problem
    memory = _memory_bytes_per_s(problem)
    rate = np.minimum(problem.cluster.bytes_per_s, tables.links.capacity_bytes_per_s)
    card = np.zeros(len(rate))
    np.maximum.at(card, tables.links.region, tables.links.card_bytes_per_s)
    rate = np.minimum(rate, np.minimum.outer(card, card))
    for r in range(len(rate)):
        rate[r, r] = min((tables.links.bytes_per_s[pair] for pair in _pairs_inside(problem, r)), default=0.0)
    pack, unpack = codec_s(n_values, element_bytes, mode, 1.0, feedback=feedback)
    n_bytes = packed_bytes(n_values, element_bytes, mode, matrix_values(problem.model))
    with np.errstate(divide="ignore"):
        found = np.asarray(n_bytes / rate + (pack / memory)[:, None] + (unpack / memory)[None, :])
    return tables.packing.put(found, (), n_values, element_bytes, mode, feedback)


def activation_modes(tables: CostTables, micro_batch_size: int, modes: Sequence[str]) -> np.ndarray:
    """Packing of activations that is quickest between regions and inside them, the gentlest of equals, shape
    (regions, regions)."""
    batch = tables.problem.batch
    values = boundary_values(tables.problem.model, batch, micro_batch_size)
    seconds = np.array([link_seconds(tables, values, batch.element_bytes, mode) for mode in modes])
    found: np.ndarray = np.array(modes)[seconds.argmin(axis=0)]
    return found


def gradient_mode(tables: CostTables, modes: Sequence[str]) -> str:
    """Packing of weight gradients that is quickest on the slowest link, the gentlest of equals.

    Links between regions count; in one region alone, those between its nodes.
    """
    regions = len(tables.problem.cluster.regions)
    joined = ~np.eye(regions, dtype=bool) & (tables.problem.cluster.bytes_per_s > 0)
    if not joined.any():
        joined = np.diag(by_tcp(tables))
    if not joined.any():
        return modes[0]
    return modes[int(np.argmin([float(_gradient_s(tables, mode)[joined].max()) for mode in modes]))]


def _gradient_s(tables: CostTables, mode: str) -> np.ndarray:
    """`link_seconds` of the weight gradients of a block."""
    problem = tables.problem
    values = 4 * matrix_values(problem.model)
    return link_seconds(tables, values, problem.batch.gradient_bytes, mode, feedback=True)


def pays_inside(tables: CostTables, mode: str) -> np.ndarray:
    """In which regions the nodes pass a large gradient on sooner if it is packed, shape (regions,) of bool."""
    plain_s, packed_s = (_gradient_s(tables, kind).diagonal() for kind in ("none", mode))
    return np.asarray(by_tcp(tables) & (packed_s < plain_s))


def by_tcp(tables: CostTables) -> np.ndarray:
    """Which regions have several nodes, joined by TCP alone, shape (regions,) of bool."""
    known = tables.packing.get((), by_tcp.__name__)
    if known is not None:
        return known
    problem, rdma = tables.problem, tables.links.rdma
    pairs = [_pairs_inside(problem, r) for r in range(len(problem.cluster.regions))]
    pools = problem.cluster.pools
    found = np.array([of != [] and all(pools[p].device.is_cpu or not rdma[p, q] for p, q in of) for of in pairs])
    return tables.packing.put(found, (), by_tcp.__name__)


def _pairs_inside(problem: Problem, region: int) -> list[Pair]:
    """Pools of a region, by number, between whose nodes a plan may send."""
    mine = [pool for pool in problem.cluster.pools if pool.region == region and problem.may_use(pool)]
    return [(p.index, q.index) for p in mine for q in mine if p is not q or p.nodes > 1]


def different(modes: Iterable[str], n_values: float, element_bytes: int) -> list[str]:
    """Packings without those that leave a message as it is."""
    plain = n_values * element_bytes
    return [mode for mode in modes if mode == "none" or packed_bytes(n_values, element_bytes, mode) < plain]


def settled(tables: CostTables, plan: Plan, may: Allowed, value: Callable[[Plan], float]) -> Plan:
    """The plan with the packings that make its value least, the gentlest of equals.

    One class of messages after another, on all links together; activations then on the busiest links one by one.
    """
    problem = tables.problem
    plan, inside = _with_inside(problem, plan)
    plan, summing = _with_sums_inside(tables, plan, may)
    if not plan.links:
        return plan
    batch = problem.batch
    pairs: list[Pair] = [(use.source, use.target) for use in plan.links if use.source != use.target]
    idle = set(pairs).difference(*_adding_up(problem, plan, pairs))
    plan = replace(plan, links=_repacked(plan.links, "weight_gradients", idle, "none"))
    busiest = _busiest(problem, plan)[:MOST_PAIRS]
    values = boundary_values(problem.model, batch, plan.micro_batch_size)
    weights = 4 * matrix_values(problem.model)
    best = value(plan)
    for field, n_values, element_bytes in (
        ("weight_gradients", weights, batch.gradient_bytes),
        ("activation_gradients", values, batch.element_bytes),
        ("activations", values, batch.element_bytes),
    ):
        modes = different(getattr(may, field), n_values, element_bytes)
        if field == "weight_gradients":
            plan, best = _settled_gradients(problem, plan, best, [*pairs, *summing], modes, value)
            scopes = []
        else:
            scopes = [pairs, *([pair] for pair in busiest if len(busiest) > 1)] if pairs else []
        for scope in scopes:
            plan, best = _best_mode(plan, best, field, scope, modes, value)
        if field != "weight_gradients" and inside:
            plan, best = _plain_unless_it_pays(plan, best, field, inside, value)
            plan, best = _best_mode(plan, best, field, inside, modes, value, gain=PAYS)
    own = {(use.source, use.target) for use in plan.links if use.source == use.target}
    unused = {pair for pair in own if plan.link_use(*pair) == LinkUse(source=pair[0], target=pair[1])}
    return replace(plan, links=tuple(use for use in plan.links if (use.source, use.target) not in unused))


def _settled_gradients(
    problem: Problem, plan: Plan, best: float, pairs: list[Pair], modes: Sequence[str], value: Callable[[Plan], float]
) -> tuple[Plan, float]:
    """The plan with the best packing of weight gradients, between regions and inside them, and its value."""
    for scope in _adding_up(problem, plan, pairs):
        far = [pair for pair in scope if pair[0] != pair[1]]
        plan, best = _plain_unless_it_pays(plan, best, "weight_gradients", set(scope) - set(far), value)
        if far:
            plan, best = _best_mode(plan, best, "weight_gradients", far, modes, value)
        if len(far) < len(scope):
            plan, best = _best_mode(plan, best, "weight_gradients", scope, modes, value, gain=PAYS)
    return plan, best


def _plain_unless_it_pays(
    plan: Plan, best: float, field: str, scope: Iterable[Pair], value: Callable[[Plan], float]
) -> tuple[Plan, float]:
    """The plan without a packing of one class inside regions that makes its value better by less than `PAYS`."""
    if all(getattr(plan.link_use(*pair), field) == "none" for pair in scope):
        return plan, best
    plain = replace(plan, links=_repacked(plan.links, field, scope, "none"))
    found = value(plain)
    return (plain, found) if found <= best * (1 + PAYS) else (plan, best)


def without_inside(links: Iterable[LinkUse]) -> tuple[LinkUse, ...]:
    """The links, no nodes of a region sending one another packed weight gradients."""
    return tuple(replace(use, weight_gradients="none") if use.source == use.target else use for use in links)


def _with_sums_inside(tables: CostTables, plan: Plan, may: Allowed) -> tuple[Plan, list[Pair]]:
    """The plan with an entry for every region inside which packing weight gradients may pay, and these as pairs."""
    if plan.reduction != "all-reduce" or plan.local_steps > 1:
        return plan, []
    pays = np.any([pays_inside(tables, mode) for mode in may.weight_gradients], axis=0)
    found = [r for r in summing_inside(tables.problem, plan.stages) if pays[r]] if pays.any() else []
    known = {use.source for use in plan.links if use.source == use.target}
    added = tuple(LinkUse(source=r, target=r) for r in found if r not in known)
    return replace(plan, links=(*plan.links, *added)), [(r, r) for r in found]


def summing_inside(problem: Problem, stages: Sequence[Stage]) -> list[int]:
    """Regions of which several nodes add up gradients: of a stage, or of an embedding that two stages hold."""
    pools, found = problem.cluster.pools, set[int]()
    sums = [stage.workers for stage in stages]
    if problem.model.tied_embeddings and len(stages) > 1:
        sums.append((*stages[0].workers, *stages[-1].workers))
    for workers in sums:
        nodes: dict[int, set[tuple[int, int]]] = {}
        for worker in workers:
            pool = pools[worker.pool]
            nodes.setdefault(pool.region, set()).update((pool.index, pool.node_of(d)) for d in worker.devices)
        found |= {region for region, of in nodes.items() if len(of) > 1}
    return sorted(found)


def alone_on_nodes(problem: Problem, stage: Stage) -> bool:
    """Whether some device of a stage is the only one of its node that holds the same slices."""
    pools = problem.cluster.pools
    held: dict[tuple[int, int], int] = {}
    for worker in stage.workers:
        for device in worker.devices[:: worker.tp]:
            node = worker.pool, pools[worker.pool].node_of(device)
            held[node] = held.get(node, 0) + 1
    return min(held.values()) < 2


def _with_inside(problem: Problem, plan: Plan) -> tuple[Plan, list[Pair]]:
    """The plan with an entry for every region inside which micro-batches travel, and these regions as pairs."""
    pools, inside = problem.cluster.pools, set[Pair]()
    places = [np.array([pools[worker.pool].region for worker in stage.workers]) for stage in plan.stages]
    for s in range(len(plan.stages) - 1):
        here, there = (places[t][plan.routes[:, t]] for t in (s, s + 1))
        inside |= {(r, r) for r in np.unique(here[here == there]).tolist()}
    known = {(use.source, use.target) for use in plan.links}
    added = tuple(LinkUse(source=r, target=r) for r, _ in sorted(inside - known))
    unused = {pair for pair in known - inside if pair[0] == pair[1]}
    links = _repacked(_repacked(plan.links, "activations", unused, "none"), "activation_gradients", unused, "none")
    return replace(plan, links=(*links, *added)), sorted(inside)


def _best_mode(
    plan: Plan,
    best: float,
    field: str,
    scope: list[Pair],
    modes: Sequence[str],
    value: Callable[[Plan], float],
    gain: float = 1e-9,
) -> tuple[Plan, float]:
    """The plan with the best packing of one class on some links, and its value; `gain`: part that it has to win."""
    now = {getattr(plan.link_use(*pair), field) for pair in scope}
    chosen, where = plan, max((modes.index(mode) if mode in modes else len(modes) for mode in now), default=0)
    for place, mode in enumerate(modes):
        if now == {mode}:
            continue
        candidate = replace(plan, links=_repacked(plan.links, field, scope, mode))
        found = value(candidate)
        if found < best * (1 - gain) or (place < where and found <= best * (1 + 1e-9)):
            chosen, best, where = candidate, min(best, found), place
    return chosen, best


def _repacked(links: Sequence[LinkUse], field: str, scope: Iterable[Pair], mode: str) -> tuple[LinkUse, ...]:
    inside = set(scope)
    return tuple(replace(use, **{field: mode}) if (use.source, use.target) in inside else use for use in links)  # type: ignore[arg-type]


def _busiest(problem: Problem, plan: Plan) -> list[Pair]:
    """Pairs of regions, both ways, between which micro-batches travel, those with most first."""
    count: dict[Pair, int] = {}
    pools = problem.cluster.pools
    places = [np.array([pools[worker.pool].region for worker in stage.workers]) for stage in plan.stages]
    for s in range(len(plan.stages) - 1):
        here, there = (places[t][plan.routes[:, t]].tolist() for t in (s, s + 1))
        for a, b in zip(here, there, strict=True):
            if a != b:
                count[a, b] = count.get((a, b), 0) + 1
                count[b, a] = count.get((b, a), 0) + 1
    known = {(use.source, use.target) for use in plan.links}
    return sorted((pair for pair in count if pair in known), key=lambda pair: -count[pair])


def _adding_up(problem: Problem, plan: Plan, pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs of regions by the gradients that they add up together, directly or by way of others."""
    pools = problem.cluster.pools
    together = [{pools[worker.pool].region for worker in stage.workers} for stage in plan.stages]
    if problem.model.tied_embeddings:
        together.append(together[0] | together[-1])
    merged: list[set[int]] = []
    for regions in together:
        apart = [group for group in merged if not group & regions]
        merged = [*apart, regions.union(*(group for group in merged if group & regions))]
    return [scope for group in merged if (scope := [(a, b) for a, b in pairs if a in group and b in group])]
