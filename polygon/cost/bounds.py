"""What no plan can beat under the cost model: relaxations of a problem to linear programs.

- **Compute.** Every (layer, sequence) is done somewhere. With t[k, d] the least device-seconds that device type d
  needs for one sequence in a layer of kind k (over tensor-parallel degrees and micro-batch sizes), the step takes at
  least the optimum of: min T subject to sum_d x[k, d] = layers_k * sequences, sum_k x[k, d] t[k, d] <= T n_d, x >= 0.
- **Path.** One micro-batch passes every layer forward and backward, one after another, at best on the fastest worker.
- **Region.** A plan lies in one region, or some message crosses the fastest link between regions. So the step takes
  at least the smaller of the best single-region compute bound and that message's time (once in H steps where the
  constraints allow H local steps).

The bound is the largest of these (the third joined with the first).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from polygon.cost.tables import CostTables
from polygon.cost.transfers import boundary_values, packed_bytes
from polygon.domain.plan import COMPRESSIONS
from polygon.parity import allowed


def _layer_costs(tables: CostTables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least device-seconds per sequence and least seconds per micro-batch, by kind of layer and pool; layer counts."""
    problem = tables.problem
    layers = problem.model.layers
    kinds = sorted({problem.model.layer_kind(layer) for layer in range(layers)})
    sample = [next(i for i in range(layers) if problem.model.layer_kind(i) == kind) for kind in kinds]
    counts = np.array([sum(problem.model.layer_kind(i) == kind for i in range(layers)) for kind in kinds], dtype=float)
    pools = problem.cluster.pools
    device_s = np.full((len(kinds), len(pools)), np.inf)
    worker_s = np.full((len(kinds), len(pools)), np.inf)
    seen: dict[tuple[object, ...], int] = {}
    for p, pool in enumerate(pools):
        key = (pool.device.name, pool.intra_node, pool.devices_per_node)
        if key in seen:
            device_s[:, p], worker_s[:, p] = device_s[:, seen[key]], worker_s[:, seen[key]]
            continue
        seen[key] = p
        for tp in tables.tensor_degrees(p):
            for size in tables.micro_batch_sizes:
                times = tables.times(p, tp, size, "none")
                each = np.diff(times.forward_s)[sample] + np.diff(times.backward_s)[sample]
                device_s[:, p] = np.minimum(device_s[:, p], each * tp / size)
                worker_s[:, p] = np.minimum(worker_s[:, p], each)
    return device_s, worker_s, counts


def _compute_bound_s(device_s: np.ndarray, counts: np.ndarray, available: np.ndarray, sequences: int) -> float:
    """Optimum of the compute program over devices of equal cost taken together; inf without devices."""
    columns, inverse = np.unique(device_s, axis=1, return_inverse=True)
    n = np.bincount(inverse.ravel(), weights=available, minlength=columns.shape[1])
    columns, n = columns[:, n > 0], n[n > 0]
    if not n.size:
        return np.inf
    kinds, types = columns.shape
    # Each kind's work is scaled to one unit, so that the program is well scaled.
    work = counts * sequences
    scale = float((work[:, None] * columns).min())
    equal = np.zeros((kinds, kinds * types + 1))
    limit = np.zeros((types, kinds * types + 1))
    for k in range(kinds):
        equal[k, k * types : (k + 1) * types] = 1.0
        for d in range(types):
            limit[d, k * types + d] = work[k] * columns[k, d] / scale
    limit[:, -1] = -n
    objective = np.zeros(kinds * types + 1)
    objective[-1] = 1.0
    result = linprog(objective, A_ub=limit, b_ub=np.zeros(types), A_eq=equal, b_eq=np.ones(kinds), method="highs")
    return float(result.fun) * scale


def lower_bound_s(tables: CostTables) -> float:
    """Seconds per step that no plan for the problem can beat (cached in the tables).

    Valid for every plan whose micro-batch sizes and tensor-parallel degrees are those of `polygon.cost.tables`.
    """
    cached = getattr(tables, "_lower_bound_s", None)
    if cached is not None:
        return float(cached)
    key = tables.micro_batch_sizes
    if key not in tables.compute_bounds:
        tables.compute_bounds[key] = _compute_bounds(tables)
    everything, path, single = tables.compute_bounds[key]
    sequences = tables.problem.batch.global_batch
    everything, single = everything * sequences, single * sequences
    bound = max(everything, path)
    if single > bound:
        bound = min(single, max(bound, _crossing_s(tables)))
    tables._lower_bound_s = bound  # type: ignore[attr-defined]
    return bound


def _compute_bounds(tables: CostTables) -> tuple[float, float, float]:
    """Seconds that links and batch do not change: a sequence on all devices, a micro-batch's path, the best region."""
    problem = tables.problem
    device_s, worker_s, counts = _layer_costs(tables)
    allowed = np.array([pool.devices if problem.may_use(pool) else 0 for pool in problem.cluster.pools], dtype=float)
    usable = allowed > 0
    path = float((counts * worker_s[:, usable].min(axis=1)).sum()) if usable.any() else np.inf
    region = tables.links.region
    single = min(
        _compute_bound_s(device_s[:, region == r], counts, allowed[region == r], 1)
        for r in range(len(problem.cluster.regions))
    )
    return _compute_bound_s(device_s, counts, allowed, 1), path, single


def _crossing_s(tables: CostTables) -> float:
    """Least time of the smallest message that joins two regions; inf if none are joined."""
    problem = tables.problem
    links = tables.links
    values = boundary_values(problem.model, problem.batch, min(tables.micro_batch_sizes))
    smallest = min(packed_bytes(values, problem.batch.element_bytes, mode) for mode in COMPRESSIONS)
    off = links.region[:, None] != links.region[None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = links.latency_s + smallest / links.bytes_per_s
    joined = off & (links.bytes_per_s > 0)
    return float(seconds[joined].min()) / max(allowed(problem).local_steps) if joined.any() else np.inf
