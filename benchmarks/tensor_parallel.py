"""Tensor parallelism by DTensor beside the engine's own sums and copies: the same numbers, and what each costs.

    python benchmarks/tensor_parallel.py [--steps 20] [--rounds 5]

A GPT block of width 128 on two ranks (gloo), forward and backward, cut as Megatron-LM cuts it: once by
`parallelize_module` (Colwise, Rowwise), once by `runners.engine.layers.shard_layer`. Prints the largest difference of
outputs and gradients, CPU seconds a step of each in turn, and their ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from statistics import median

TOKENS, WARM_UPS = 128, 3


def measure(rank: int, port: int, steps: int, rounds: int, end: Connection) -> None:
    """One of the two ranks."""
    import torch
    from polygon_comm.accelerator import Accelerator
    from polygon_comm.tensor_group import TensorGroup
    from polygon_comm.transport import gloo_devices
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from benchmarks.runtime_overhead import make_problem
    from runners.engine.layers import build_layer

    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    group = TensorGroup(
        distributed.PrefixStore("own", store), rank, 2, devices=gloo_devices(1, "127.0.0.1"), timeout_s=60.0,
        accelerator=Accelerator(),
    )  # fmt: skip
    model = make_problem()[0].model
    own = build_layer(model, 1, 0, tp=group)
    theirs = build_layer(model, 1, 0)
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    cuts = {name: ColwiseParallel() for name in columns}
    theirs = parallelize_module(
        theirs, mesh, {**cuts, "attention.output": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    )
    x = torch.randn(1, TOKENS, model.hidden_size, generator=torch.Generator().manual_seed(1))

    def pass_through(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        assert given.grad is not None
        return out.detach(), given.grad

    def seconds(module: nn.Module) -> float:
        start_s = time.process_time()
        for _ in range(steps):
            pass_through(module)
        return (time.process_time() - start_s) / steps

    differences = [float((a - b).abs().max()) for a, b in zip(pass_through(own), pass_through(theirs), strict=True)]
    for module in (own, theirs) * WARM_UPS:
        pass_through(module)
    end.send((differences, [(seconds(own), seconds(theirs)) for _ in range(rounds)]))
    distributed.destroy_process_group()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mine, theirs = multiprocessing.Pipe()
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=measure, args=(rank, port, arguments.steps, arguments.rounds, theirs)
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    (output, gradient), rounds = mine.recv()
    for process in processes:
        process.join()
    print(f"largest difference of outputs {output:.1e}, of input gradients {gradient:.1e}")
    print(f"own sums and copies  {min(own for own, _ in rounds) * 1e3:6.2f} ms of CPU a block and micro-batch")
    print(f"DTensor              {min(other for _, other in rounds) * 1e3:6.2f} ms")
    print(f"ratio                {median(other / own for own, other in rounds):6.2f} (median of {len(rounds)} rounds)")


if __name__ == "__main__":
    main()
