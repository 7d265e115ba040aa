"""Tiny clusters, models and plans for tests with real ranks."""

from __future__ import annotations

import numpy as np

from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.model import Batch, Model
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans

LAN = Link(latency_s=1e-5, bytes_per_s=1e10)


def small_cluster(*devices_per_region: int) -> Cluster:
    """Regions of one node each, all connected."""
    n = len(devices_per_region)
    device = Device(
        name="cpu", memory_bytes=1e9, flops={"fp32": 1e10}, memory_bytes_per_s=1e10, power_w=10, source="made up"
    )
    regions = tuple(
        Region(
            name=f"region-{r}",
            node_groups=(NodeGroup(device="cpu", nodes=1, devices_per_node=count, intra_node=LAN, inter_node=LAN),),
            intra_region=LAN,
        )
        for r, count in enumerate(devices_per_region)
    )
    return Cluster(
        name="small",
        regions=regions,
        latency_s=np.full((n, n), 0.01),
        bytes_per_s=np.full((n, n), 1e8),
        capacity_bytes_per_s=np.full((n, n), np.inf),
        catalogue={"cpu": device},
    )


def small_model(blocks: int = 4, **changes) -> Model:
    """A GPT of width 32 over bytes."""
    fields = {
        "name": "small", "blocks": blocks, "hidden_size": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn_size": 64,
        "vocab_size": 256, "max_seq_len": 32,
    }  # fmt: skip
    return Model(**(fields | changes))


def small_plan(cluster, layers, stages, routes, *, micro_batch_size=2, spans=None, compression="none", streams=1):
    """A plan from layer borders, devices of each stage and routes (GPipe unless spans of the stages are given)."""
    pool_of = {d: p.index for p in cluster.pools for d in range(p.first_device, p.first_device + p.devices)}
    routes = np.asarray(routes)
    n = len(cluster.regions)
    built = tuple(
        Stage(
            first_layer=first,
            last_layer=last,
            workers=tuple(Worker(pool=pool_of[device], devices=(device,)) for device in devices),
        )
        for (first, last), devices in zip(layers, stages, strict=True)
    )
    return Plan(
        stages=built,
        routes=routes,
        micro_batch_size=micro_batch_size,
        spans=stage_spans(built, spans or (len(routes),) * len(stages)),
        links=tuple(
            LinkUse(
                source=a,
                target=b,
                activations=compression,
                activation_gradients=compression,
                weight_gradients=compression,
                streams=streams,
            )
            for a in range(n)
            for b in range(n)
            if a != b
        ),
    )


def routed_problem(ranks: int, *, compression: str = "none", streams: int = 1, model: Model | None = None, **batch):
    """A problem and a routed plan for it with uneven layers, widths and shares on 1, 2, 4 or 8 ranks.

    Global batch 16 as 8 micro-batches of 2. Regions: one device each for 1 and 2 ranks; (2, 2); (3, 3, 2).
    """
    shapes = {
        1: ((1,), [(0, 6)], [[0]], [[0]] * 8, (8,)),
        2: ((1, 1), [(0, 2), (2, 6)], [[0], [1]], [[0, 0]] * 8, (1, 1)),
        4: ((2, 2), [(0, 2), (2, 6)], [[0], [1, 2, 3]], [[0, w] for w in (0, 1, 2, 0, 1, 0, 2, 0)], (1, 3)),
        8: (
            (3, 3, 2),
            [(0, 1), (1, 4), (4, 6)],
            [[0, 1], [2, 3, 4, 6], [5, 7]],
            [[0, 0, 0], [1, 1, 1], [0, 2, 0], [0, 3, 0], [1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 2, 0]],
            (1, 2, 2),
        ),
    }
    regions, layers, stages, routes, spans = shapes[ranks]
    cluster = small_cluster(*regions)
    problem = Problem(
        cluster=cluster,
        model=model or small_model(),
        batch=Batch(**({"global_batch": 16, "seq_len": 16, "precision": "fp32"} | batch)),
    )
    plan = small_plan(cluster, layers, stages, routes, spans=spans, compression=compression, streams=streams)
    return problem, plan
