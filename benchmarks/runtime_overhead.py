"""What the runner costs over a plain torch loop: CPU seconds of the same model, data and optimizer.

    python benchmarks/runtime_overhead.py [--steps 200] [--every 50] [--links 4]

One rank, a GPT of width 128 with 4 blocks, 128 tokens, 8 micro-batches of 1 in both. Both validate on the same 40
samples and save weights and optimizer state every so many steps: the runner in the background, with checksums, the
plain loop by `torch.save`. The runner has a link watch besides, over connections of this machine to itself (one rank
alone has no links to watch).

CPU time of all threads, not wall time, and one step of each in turn in the same process: what else runs on the machine
then slows both alike. Steps are added up to rounds from one save to the next; prints medians over the rounds, and the
median of the ratios of what a round took. The watch works by the clock, whatever the steps take: it counts as the part
of a core that it takes, which is what it adds where nothing else runs.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem, Stage, Worker

if TYPE_CHECKING:
    from polygon_comm.link_watch import LinkWatch

MICRO_BATCHES = 8


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


def plain_step(samples: Any, held_out: Any, every: int, folder: Path) -> Callable[[], None]:
    """A step of a loop over micro-batches as one writes it by hand, with what follows it every so many steps."""
    import torch

    from runners.engine.layers import build_layers

    problem, _ = make_problem()
    model = problem.model
    layers = build_layers(model, range(model.layers), 0)
    parameters = list(dict.fromkeys(layers.parameters()))
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    step_number = 0

    def loss_of(source: Any, number: int) -> torch.Tensor:
        x, targets = source.batch(range(number, number + 1))
        for layer, module in layers.items():
            x = module(x, targets) if int(layer) == model.layers - 1 else module(x)
        return x

    def step() -> None:
        nonlocal step_number
        for m in range(MICRO_BATCHES):
            (loss_of(samples, step_number * MICRO_BATCHES + m) / problem.batch.tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step_number += 1
        if step_number % every == 0:
            with torch.no_grad():
                sum(loss_of(held_out, number).item() for number in range(len(held_out)))
            torch.save({"weights": layers.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")

    return step


def watched_links(count: int, opened: ExitStack) -> LinkWatch:
    """A watch over connections within this machine, as over those to so many peers (two each)."""
    from polygon_comm.link_watch import LinkWatch, WatchedLink

    links = []
    for number in range(count):
        ends = []
        for _ in range(2):
            listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            ends.append(opened.enter_context(socket.create_connection(listening.getsockname())))
            opened.enter_context(listening.accept()[0])
        links.append(WatchedLink(f"peer {number}", [end.fileno() for end in ends], 1e9))
    return opened.enter_context(closing(LinkWatch(links, print)))


def measure(steps: int, every: int, links: int, folder: Path) -> tuple[list[tuple[float, float]], float]:
    """CPU seconds of rounds of plain steps and of the runner's beside them, and the watch's part of a core."""
    import torch

    from runners.data.choice import DataChoice
    from runners.data.sources import training_and_held_out
    from runners.dist_runner import end_process
    from runners.engine.options import Options
    from runners.engine.run import train

    torch.set_num_threads(1)
    problem, plan = make_problem()
    choice = DataChoice(validate=True, validation_samples=40)
    samples, held_out = training_and_held_out(problem.model, problem.batch.seq_len, 0, choice)
    step = plain_step(samples, held_out, every, folder)
    rounds: list[tuple[float, float]] = []
    mark_s = plain_s = 0.0

    def watch_s() -> float:
        threads = [thread.ident for thread in threading.enumerate() if thread.name == "link-watch" and thread.ident]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(thread)) for thread in threads)

    def report(result: dict[str, Any]) -> None:
        nonlocal mark_s, plain_s
        begin_s = time.thread_time()
        # Backward runs in this thread; a checkpoint that is written meanwhile, in another.
        step()
        plain_s += time.thread_time() - begin_s
        # The save of a step is begun after its report.
        if (result["step"] + 1) % every == every - 1:
            now_s = time.process_time() - watch_s()
            rounds.append((plain_s, now_s - mark_s - plain_s))
            mark_s, plain_s = now_s, 0.0

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = Options(
        steps=every * (1 + steps // every), traced_steps=0, data=choice, validate_every=every,
        checkpoint_dir=folder / "saved", checkpoint_every=every,
    )  # fmt: skip
    with ExitStack() as opened:
        watched_links(links, opened)
        begin_s = time.monotonic()
        train(problem, plan, 0, "127.0.0.1", port, options, on_loss=end_process, report=report)
        watch_part = watch_s() / (time.monotonic() - begin_s)
    return rounds[1:], watch_part


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two saves and validations")
    parser.add_argument("--links", type=int, default=4, help="that the watch looks at")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds, watch = measure(args.steps, args.every, args.links, Path(folder))
    per_ms = 1e3 / args.every
    print(f"plain torch loop  {median(plain_s for plain_s, _ in rounds) * per_ms:7.2f} ms of CPU a step")
    print(f"runner, one rank  {median(ours_s for _, ours_s in rounds) * per_ms:7.2f} ms of CPU a step")
    print(f"link watch        {watch:8.2%} of a core")
    print(f"overhead          {median(ours_s / plain_s for plain_s, ours_s in rounds) - 1 + watch:+8.2%}")


if __name__ == "__main__":
    main()
