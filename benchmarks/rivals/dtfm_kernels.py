"""Hot loops of DT-FM's objective: bottleneck matching, shortest Hamiltonian path, annealing.

A placement is an array `kind` of shape (stages * width,): which kind of device is at each place, stage after stage.
Devices of one kind are interchangeable. Matrices are kinds x kinds, the diagonal being two different devices of that
kind.
"""

from __future__ import annotations

import math

import numpy as np

from polygon.jit.compilation import general


@general
def bottleneck_s(a: np.ndarray, b: np.ndarray, hop_s: np.ndarray) -> float:
    """Least longest edge over all perfect matchings of two stages.

    Starts at the longest of all shortest edges of a device, which no matching can beat, and raises the threshold to
    the next edge length whenever the matching cannot be augmented.

    Parameters
    ----------
    a, b : ndarray of int, shape (width,)
        Kinds of the devices; width at most 63.
    hop_s : ndarray, shape (kinds, kinds)
        Edge lengths [s].
    """
    width = len(a)
    threshold = 0.0
    for i in range(width):
        shortest_a = math.inf
        shortest_b = math.inf
        for j in range(width):
            shortest_a = min(shortest_a, hop_s[a[i], b[j]])
            shortest_b = min(shortest_b, hop_s[a[j], b[i]])
        threshold = max(threshold, shortest_a, shortest_b)
    partner = np.full(width, -1, np.int64)  # of b's devices
    reached_from = np.empty(width, np.int64)
    queue = np.empty(width, np.int64)
    for i in range(width):
        while True:
            # Breadth-first search for an augmenting path from device i of stage a.
            seen = np.int64(0)
            queue[0] = i
            head, tail, free = 0, 1, -1
            beyond = math.inf
            while head < tail and free < 0:
                node = queue[head]
                head += 1
                for j in range(width):
                    if seen >> j & 1:
                        continue
                    edge = hop_s[a[node], b[j]]
                    if edge > threshold:
                        beyond = min(beyond, edge)
                        continue
                    seen |= np.int64(1) << j
                    reached_from[j] = node
                    if partner[j] < 0:
                        free = j
                        break
                    queue[tail] = partner[j]
                    tail += 1
            if free >= 0:
                break
            threshold = beyond
        while True:
            node = reached_from[free]
            # The device that `node` was matched to before becomes free.
            before = -1
            for j in range(width):
                if partner[j] == node:
                    before = j
                    break
            partner[free] = node
            if node == i:
                break
            free = before
    return threshold


@general
def stage_reduction_s(kind: np.ndarray, pair_s: np.ndarray) -> float:
    """Largest sum, over a stage's devices, of the pair times to all the others [s]."""
    worst = 0.0
    for i in range(len(kind)):
        total = 0.0
        for j in range(len(kind)):
            if i != j:
                total += pair_s[kind[i], kind[j]]
        worst = max(worst, total)
    return worst


@general
def shortest_path(distance: np.ndarray) -> tuple[float, np.ndarray]:
    """Shortest Hamiltonian path with free ends (Held and Karp, 1962), and its order."""
    n = len(distance)
    full = 1 << n
    cost = np.full((full, n), np.inf)
    came_from = np.full((full, n), -1, np.int64)
    for s in range(n):
        cost[1 << s, s] = 0.0
    for done in range(1, full):
        for last in range(n):
            here = cost[done, last]
            if here == np.inf:
                continue
            for s in range(n):
                if not done >> s & 1:
                    then = done | 1 << s
                    if here + distance[last, s] < cost[then, s]:
                        cost[then, s] = here + distance[last, s]
                        came_from[then, s] = last
    done = full - 1
    last = 0
    for s in range(n):
        if cost[done, s] < cost[done, last]:
            last = s
    best = cost[done, last]
    order = np.empty(n, np.int64)
    for place in range(n - 1, -1, -1):
        order[place] = last
        before = came_from[done, last]
        done ^= 1 << last
        last = before
    return best, order


@general
def total_s(kind: np.ndarray, stages: int, hop_s: np.ndarray, pair_s: np.ndarray) -> tuple[float, np.ndarray]:
    """DT-FM's cost of a placement [s] and the order of stages it is reached with."""
    width = len(kind) // stages
    distance = np.zeros((stages, stages))
    reduction = 0.0
    for s in range(stages):
        a = kind[s * width : (s + 1) * width]
        reduction = max(reduction, stage_reduction_s(a, pair_s))
        for t in range(s):
            distance[s, t] = distance[t, s] = bottleneck_s(a, kind[t * width : (t + 1) * width], hop_s)
    path, order = shortest_path(distance)
    return reduction + 2.0 * path, order


@general
def islands(hop_s: np.ndarray) -> np.ndarray:
    """Which kinds are nearer to their own than to any other kind."""
    kinds = len(hop_s)
    island = np.ones(kinds, np.bool_)
    for a in range(kinds):
        for b in range(kinds):
            if a != b and hop_s[a, b] <= hop_s[a, a]:
                island[a] = False
    return island


@general
def _lonely(a: np.ndarray, b: np.ndarray, island: np.ndarray, counts: np.ndarray) -> int:
    """Devices of stage a without a partner of their own island in stage b; `counts` is scratch, all zero."""
    for i in range(len(b)):
        counts[b[i]] += 1
    lonely = 0
    for i in range(len(a)):
        if island[a[i]] and counts[a[i]] > 0:
            counts[a[i]] -= 1
        else:
            lonely += 1
    for i in range(len(b)):
        counts[b[i]] = 0
    return lonely


@general
def _hop_energy(
    kind: np.ndarray, width: int, s: int, hop_s: np.ndarray, pull_s: float, island: np.ndarray, counts: np.ndarray
) -> float:
    """Cost of the hop from place s of the path to place s + 1, with the pull towards like partners."""
    a, b = kind[s * width : (s + 1) * width], kind[(s + 1) * width : (s + 2) * width]
    return 2.0 * bottleneck_s(a, b, hop_s) + pull_s * math.sqrt(_lonely(a, b, island, counts))


@general
def path_energy(
    kind: np.ndarray,
    stages: int,
    hop_s: np.ndarray,
    pair_s: np.ndarray,
    pull_s: float,
    hops: np.ndarray,
    reductions: np.ndarray,
) -> float:
    """What annealing minimises, from scratch; fills the parts per hop and per stage."""
    width = len(kind) // stages
    island = islands(hop_s)
    counts = np.zeros(len(hop_s), np.int64)
    for s in range(stages):
        reductions[s] = stage_reduction_s(kind[s * width : (s + 1) * width], pair_s)
        if s + 1 < stages:
            hops[s] = _hop_energy(kind, width, s, hop_s, pull_s, island, counts)
    return reductions.max() + hops.sum()


@general
def _exchange_stages(kind: np.ndarray, width: int, s: int, t: int) -> None:
    """Stages s and t change places in the path."""
    for i in range(width):
        kind[s * width + i], kind[t * width + i] = kind[t * width + i], kind[s * width + i]


@general
def _find(kind: np.ndarray, first: int, end: int, wanted: int) -> int:
    """First place in [first, end) that holds a kind; -1 if none."""
    for i in range(first, end):
        if kind[i] == wanted:
            return i
    return -1


@general
def _exchange_runs(
    kind: np.ndarray,
    width: int,
    stages: int,
    s: int,
    t: int,
    rng: np.random.Generator,
    gave: np.ndarray,
    took: np.ndarray,
) -> int:
    """Exchange a random kind c of stage s with a random kind d of stage t, and again in the stages that follow s.

    The partners are the stages that follow t, or more devices of kind d in t itself. Returns the number of exchanges
    made (their places in `gave` and `took`), at most four; 0 if c is d.
    """
    p = s * width + int(rng.random() * width)
    q = t * width + int(rng.random() * width)
    c, d = kind[p], kind[q]
    if c == d:
        return 0
    kind[p], kind[q] = d, c
    gave[0], took[0] = p, q
    run = 1
    choice = rng.random()
    longest = 1 if choice < 0.5 else 2 + int(rng.random() * 3)
    step = 0 if choice > 0.85 else 1
    while run < longest and max(s + run, t + step * run) < stages:
        if s + run == t or t + step * run == s:
            break
        p = _find(kind, (s + run) * width, (s + run + 1) * width, c)
        q = _find(kind, (t + step * run) * width, (t + step * run + 1) * width, d)
        if p < 0 or q < 0:
            break
        kind[p], kind[q] = d, c
        gave[run], took[run] = p, q
        run += 1
    return run


@general
def anneal(
    kind: np.ndarray,
    stages: int,
    hop_s: np.ndarray,
    pair_s: np.ndarray,
    pull_s: float,
    steps: int,
    temperature_s: float,
    cooling: float,
    best_kind: np.ndarray,
    best_energy: float,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Anneal a placement whose stages are in path order, in place.

    A move exchanges two stages, or a device of kind c with one of kind d in each of a run of one to four pairs of
    stages (or of a run and one stage): good placements have runs of equal stages, which single exchanges would have to
    break up first. Only the reductions of the stages and the hops that are touched are computed anew.

    Returns
    -------
    tuple
        Best energy and the last temperature; `best_kind` holds the best placement.
    """
    places = len(kind)
    width = places // stages
    island = islands(hop_s)
    counts = np.zeros(len(hop_s), np.int64)
    hops = np.zeros(stages)
    reductions = np.zeros(stages)
    energy = path_energy(kind, stages, hop_s, pair_s, pull_s, hops, reductions)
    new_hops = hops.copy()
    new_reductions = reductions.copy()
    if energy < best_energy:
        best_energy = energy
        best_kind[:] = kind
    gave = np.empty(stages, np.int64)
    took = np.empty(stages, np.int64)
    touched = np.zeros(stages, np.bool_)
    for _ in range(steps):
        temperature_s *= cooling
        s = int(rng.random() * stages)
        t = int(rng.random() * stages)
        if s == t:
            continue
        run = 0
        if rng.random() < 0.05:
            _exchange_stages(kind, width, s, t)
        else:
            run = _exchange_runs(kind, width, stages, s, t, rng, gave, took)
            if run == 0:
                continue
        touched[:] = False
        touched[s] = touched[t] = True
        for i in range(run):
            touched[gave[i] // width] = touched[took[i] // width] = True
        for stage in range(stages):
            if touched[stage]:
                new_reductions[stage] = stage_reduction_s(kind[stage * width : (stage + 1) * width], pair_s)
            if stage + 1 < stages and (touched[stage] or touched[stage + 1]):
                new_hops[stage] = _hop_energy(kind, width, stage, hop_s, pull_s, island, counts)
        new_energy = new_reductions.max() + new_hops.sum()
        if new_energy <= energy or rng.random() < math.exp((energy - new_energy) / temperature_s):
            energy = new_energy
            hops[:] = new_hops
            reductions[:] = new_reductions
            if energy < best_energy - 1e-12:
                best_energy = energy
                best_kind[:] = kind
        else:
            if run == 0:
                _exchange_stages(kind, width, s, t)
            for i in range(run - 1, -1, -1):
                kind[gave[i]], kind[took[i]] = kind[took[i]], kind[gave[i]]
            new_hops[:] = hops
            new_reductions[:] = reductions
    return best_energy, temperature_s
