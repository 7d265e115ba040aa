"""How fast uniform configurations are priced: one at a time, and many at once, per second of one core.

    python benchmarks/estimates.py

GPT-3 13B, 8 stages x 64 micro-batches on 64 A100, all terms (compute, tensor, pipeline and data parallel, optimizer,
memory); the layers' times are warm, as they are in a search.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np

from polygon import catalogue, files
from polygon.cost.parallel import ParallelConfig
from polygon.cost.uniform import estimate_many, estimate_uniform
from polygon.domain.cluster import Cluster, Link, NodeGroup, Region
from polygon.domain.model import Batch

MANY = 20_000


def main() -> None:
    """Print both rates."""
    device = catalogue.device("a100-80gb")
    inside, between = Link(latency_s=3e-6, bytes_per_s=300e9), Link(latency_s=5e-6, bytes_per_s=200e9)
    group = NodeGroup(device=device.name, nodes=8, devices_per_node=8, intra_node=inside, inter_node=between)
    none = np.zeros((1, 1))
    cluster = Cluster(
        name="bench",
        regions=(Region(name="r", node_groups=(group,), intra_region=between),),
        latency_s=none,
        bytes_per_s=none,
        capacity_bytes_per_s=none,
        catalogue={device.name: device},
    )
    pool, model = cluster.pools[0], files.read_model("gpt3-13b")
    batch = Batch(global_batch=64, seq_len=2048)
    config = ParallelConfig(dp=1, tp=8, pp=8)
    estimate_uniform(model, batch, pool, config)
    one = []
    for _ in range(2000):
        start = time.thread_time()
        estimate_uniform(model, batch, pool, config)
        one.append(time.thread_time() - start)
    configs = [replace(config, zero=i % 2) for i in range(MANY)]
    estimate_many(model, batch, pool, configs)
    many = []
    for _ in range(5):
        start = time.thread_time()
        estimate_many(model, batch, pool, configs)
        many.append(MANY / (time.thread_time() - start))
    print(f"one estimate, warm     {statistics.median(one) * 1e6:10.1f} us")
    print(f"many at once           {statistics.median(many):10,.0f} estimates/s")


if __name__ == "__main__":
    main()
