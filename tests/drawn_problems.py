"""Planning problems drawn at random: small enough to enumerate, and pairs of which one has more to offer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from tests.linked_regions import TYPES, cluster_of, small_gpt

Groups = list[list[tuple[str, int, int]]]


def drawn_groups(rng: np.random.Generator, most_groups: int, nodes: int, per_node: tuple[int, ...]) -> Groups:
    """Node groups of one to three regions: type, nodes, devices per node."""
    while True:
        groups = [
            [
                (str(rng.choice(TYPES)), int(rng.integers(1, nodes + 1)), int(rng.choice(per_node)))
                for _ in range(rng.integers(1, 3))
            ]
            for _ in range(rng.integers(1, 4))
        ]
        if sum(map(len, groups)) <= most_groups:
            return groups


def small_problem(seed: int) -> Problem:
    """At most four node groups of one to three regions, at most four stages: few enough allocations to see them all."""
    rng = np.random.default_rng(seed)
    groups = drawn_groups(rng, 4, 3, (1, 1, 2))
    cluster = cluster_of(
        groups,
        latency_s=float(rng.choice([1e-3, 2e-2, 1e-1]) * rng.uniform(0.5, 2)),
        bytes_per_s=float(rng.choice([3e7, 1e8, 1e9]) * rng.uniform(0.5, 2)),
        node_bytes_per_s=float(rng.choice([1e10, 3e10, 1e11])),
    )
    n = len(groups)
    spread = rng.uniform(0.5, 2, (n, n))
    spread = np.maximum(spread, spread.T)
    cluster = replace(cluster, latency_s=cluster.latency_s * spread, bytes_per_s=cluster.bytes_per_s / spread)
    width = int(rng.choice([1024, 2048]))
    model = small_gpt(blocks=int(rng.integers(4, 17)), hidden_size=width, head_dim=width // 16, ffn_size=4 * width)
    batch = Batch(global_batch=int(rng.choice([16, 32, 64])), seq_len=512)
    return Problem(cluster=cluster, model=model, batch=batch, constraints=Constraints(most_stages=4))
