"""What the runner costs over a plain torch loop: CPU seconds a step of the same model, data and optimizer.

    python benchmarks/runtime_overhead.py [--steps 60]

One rank, a GPT of width 128 with 4 blocks, 128 tokens, 8 micro-batches of 1 in both. CPU time, not wall time, and one
step of each in turn in the same process: what else runs on the machine then slows both alike. Prints medians over the
steps, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem, Stage, Worker

MICRO_BATCHES = 8
WARM_UPS = 4


def make_problem() -> tuple[Problem, Plan]:
    """One device, one stage, eight micro-batches."""
    link = Link(latency_s=1e-5, bytes_per_s=1e10)
    device = Device(name="cpu", memory_bytes=1e10, flops={"fp32": 1e11}, memory_bytes_per_s=1e10, power_w=10)
    nodes = NodeGroup(device="cpu", nodes=1, devices_per_node=1, intra_node=link, inter_node=link)
    one = np.ones((1, 1))
    cluster = Cluster(
        name="one",
        regions=(Region(name="here", node_groups=(nodes,), intra_region=link),),
        latency_s=one,
        bytes_per_s=one,
        capacity_bytes_per_s=one,
        catalogue={"cpu": device},
    )
    model = Model(
        name="gpt", blocks=4, hidden_size=128, heads=4, kv_heads=4, head_dim=32, ffn_size=512, vocab_size=256,
        max_seq_len=128,
    )  # fmt: skip
    batch = Batch(global_batch=MICRO_BATCHES, seq_len=128, precision="fp32")
    plan = Plan(
        stages=(Stage(first_layer=0, last_layer=6, workers=(Worker(pool=0, devices=(0,)),)),),
        routes=np.zeros((MICRO_BATCHES, 1), dtype=int),
        micro_batch_size=1,
        spans=((1,),),
    )
    return Problem(cluster=cluster, model=model, batch=batch), plan


def plain_step() -> Callable[[], None]:
    """A step of a loop over micro-batches as one writes it by hand."""
    import torch

    from runners.data.sources import samples_for
    from runners.engine.layers import build_layers

    problem, _ = make_problem()
    model = problem.model
    layers = build_layers(model, range(model.layers), 0)
    samples = samples_for(model, 128, 0)
    parameters = list(dict.fromkeys(layers.parameters()))
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    number = 0

    def step() -> None:
        nonlocal number
        for _ in range(MICRO_BATCHES):
            x, targets = samples.batch(range(number, number + 1))
            number += 1
            for layer, module in layers.items():
                x = module(x, targets) if int(layer) == model.layers - 1 else module(x)
            (x / problem.batch.tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: int) -> list[tuple[float, float]]:
    """CPU seconds of a plain step and of the runner's step before it, over and over."""
    import torch

    from runners.dist_runner import end_process
    from runners.engine.options import Options
    from runners.engine.run import train

    torch.set_num_threads(1)
    step, pairs, mark_s = plain_step(), [], time.process_time()

    def report(result: dict[str, Any]) -> None:
        nonlocal mark_s
        end_s = time.process_time()
        step()
        pairs.append((time.process_time() - end_s, end_s - mark_s))
        mark_s = time.process_time()

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = Options(steps=steps + WARM_UPS, traced_steps=0)
    train(*make_problem(), 0, "127.0.0.1", port, options, on_loss=end_process, report=report)
    return pairs[WARM_UPS:]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    pairs = measure(parser.parse_args().steps)
    print(f"plain torch loop  {median(plain_s for plain_s, _ in pairs) * 1e3:7.2f} ms of CPU a step")
    print(f"runner, one rank  {median(ours_s for _, ours_s in pairs) * 1e3:7.2f} ms of CPU a step")
    print(f"overhead          {median(ours_s / plain_s for plain_s, ours_s in pairs) - 1:+7.1%}")


if __name__ == "__main__":
    main()
