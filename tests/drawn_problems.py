"""Planning problems drawn at random: small enough to enumerate, and pairs of which one has more to offer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polygon.cost.convergence import allowed
from polygon.domain.cluster import Cluster, NodeGroup, Region
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, LinkUse, Problem
from polygon.formats import catalogue
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


def packed_at_random(problem: Problem, links: tuple[LinkUse, ...], rng: np.random.Generator) -> tuple[LinkUse, ...]:
    """The links, each packed in one of the ways that the problem allows."""
    may = allowed(problem)
    return tuple(
        replace(
            use,
            activations=str(rng.choice(may.activations)),
            activation_gradients=str(rng.choice(may.activation_gradients)),
            weight_gradients=str(rng.choice(may.weight_gradients)),
        )
        for use in links
    )


def larger_problems(seed: int) -> tuple[Problem, dict[str, Problem]]:
    """A problem, and others that offer more: a node, a region, links three times as fast or as near."""
    rng = np.random.default_rng(seed)
    groups = drawn_groups(rng, 6, 2, (1, 2, 4))
    near_s, rate = float(rng.choice([0.001, 0.02, 0.1])), float(rng.choice([1e7, 1e8, 1e9]))
    model = small_gpt(blocks=16, hidden_size=2048, head_dim=128, ffn_size=8192)
    batch = Batch(global_batch=int(rng.choice([128, 256])), seq_len=512)

    def problem(members: Groups, latency_s: float = near_s, bytes_per_s: float = rate) -> Problem:
        cluster = cluster_of(members, latency_s=latency_s, bytes_per_s=bytes_per_s)
        return Problem(cluster=cluster, model=model, batch=batch)

    region = int(rng.integers(len(groups)))
    (name, nodes, per_node), *others = groups[region]
    wider = [*groups[:region], [(name, nodes + 1, per_node), *others], *groups[region + 1 :]]
    return problem(groups), {
        "node": problem(wider),
        "region": problem([*groups, groups[int(rng.integers(len(groups)))]]),
        "bandwidth": problem(groups, bytes_per_s=3 * rate),
        "latency": problem(groups, latency_s=near_s / 3),
    }


NETWORKS = {"infiniband-ndr-x8": 0.35, "infiniband-hdr": 0.35, "ethernet-10g": 0.3}
"""Links between nodes, and how often each is drawn."""
MODELS = ("gpt3-1.3b", "llama3-8b", "llama2-13b", "qwen3-30b-a3b", "deepseek-moe-16b", "llama3.2-1b", "llama3-70b")
NODES = (1, 1, 1, 2, 2, 4, 4, 8, 16, 64)


def equal_devices(seed: int) -> Problem:
    """One pool: 1 to 64 nodes of eight, a dense model or one of experts, sequences of 2,048 to 131,072 tokens."""
    rng = np.random.default_rng(seed)
    device, nodes = str(rng.choice(["a100-80gb", "h100-sxm"])), int(rng.choice(NODES))
    link = catalogue.link(str(rng.choice(list(NETWORKS), p=list(NETWORKS.values()))))
    model = catalogue.model(str(rng.choice(MODELS)))
    long = model.name == "llama3.2-1b"
    tokens = int(rng.choice([32768, 131072])) if long else int(rng.choice([2048, 4096]))
    batch = int(rng.choice([4, 8, 16])) if long else int(rng.choice([12, 64, 128, 512, 720])) * max(1, nodes // 4)
    group = NodeGroup(
        device=device, nodes=nodes, devices_per_node=8, intra_node=catalogue.usual_link(device), inter_node=link
    )
    cluster = Cluster(
        name=f"drawn {seed}",
        regions=(Region(name="here", node_groups=(group,), intra_region=link),),
        latency_s=np.zeros((1, 1)),
        bytes_per_s=np.zeros((1, 1)),
        capacity_bytes_per_s=np.full((1, 1), np.inf),
        catalogue={device: catalogue.device(device)},
    )
    runtime = catalogue.runtime(str(rng.choice(["polygon", "megatron-core", "torchtitan", "deepspeed"])))
    return Problem(
        cluster=cluster,
        model=model,
        batch=Batch(global_batch=batch, seq_len=min(tokens, model.max_seq_len)),
        runtime=runtime,
    )
