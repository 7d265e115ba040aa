"""How much of a long link the transport gets, beside plain gloo: `python benchmarks/lab_streams.py`.

Two hosts, 80 ms round trip, Linux' default buffers (4 MiB). Messages of 16 MiB one after the other, receives posted
ahead, after a first round in which TCP opens its window; time counts from the posting of the second round's receives
until its last byte has arrived. Beside the rates: how many streams a plan takes on such a link. Prints a table; ratios
belong to one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))

import numpy as np

from benchmarks.lab_ranks import run_on_hosts, star_network
from polygon.commands import cli
from polygon.planning.decode import useful_streams
from runners.lab_net.linux import TcpSettings
from runners.lab_net.running import Lab

MESSAGE_BYTES = 16 << 20
WARM_UPS, MESSAGES = 4, 16
RTT_S = 0.080


def plain_gloo(rank: int, address: str, port: int) -> float:
    """torch.distributed as it comes: one connection, isend and irecv; bytes/s at the receiver."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=2)
    buffers = [torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(MESSAGES)]
    post = dist.isend if rank == 0 else dist.irecv
    rate = _rate(lambda n: [post(buffers[tag], 1 - rank, tag=tag) for tag in range(n)])
    dist.barrier()
    dist.destroy_process_group()
    return rate


def transport(rank: int, address: str, port: int, streams: int, bytes_per_s: float) -> float:
    """The runtime's own transport with so many streams, told what the link carries."""
    import torch
    from polygon_comm.accelerator import Accelerator
    from polygon_comm.transport import Wires
    from torch.distributed import TCPStore

    store = TCPStore(address, port, 2, rank == 0, wait_for_workers=False)
    wires = Wires(
        store, rank, {1 - rank: streams}, address=address, timeout_s=120, accelerator=Accelerator(),
        bytes_per_s={1 - rank: bytes_per_s},
    )  # fmt: skip
    payload = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)

    def post(n: int) -> list:
        if rank == 0:
            return [wires.send(1, tag, payload) for tag in range(n)]
        return [wires.post_receive(0, tag, MESSAGE_BYTES) for tag in range(n)]

    rate = _rate(post)
    store.set(f"done{rank}", "1")
    store.get(f"done{1 - rank}")
    if rank == 0:
        time.sleep(0.5)  # the store is kept until the other has read it
    return rate


def _rate(post: Callable[[int], list]) -> float:
    for work in post(WARM_UPS):
        work.wait()
    start_s = time.monotonic()
    for work in post(MESSAGES):
        work.wait()
    return MESSAGES * MESSAGE_BYTES / (time.monotonic() - start_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rates = [200.0, 350.0, 500.0]
    parser.add_argument("mbit", nargs="*", type=cli.number(above=0), default=rates, help="rates of the link [Mbit/s]")
    rows = []
    port = 29600
    for mbit in parser.parse_args().mbit:
        latency_s, rate = np.full((2, 2), RTT_S / 2), np.full((2, 2), mbit * 1e6 / 8)
        with Lab(star_network(latency_s, rate), tcp=TcpSettings()) as lab:
            hosts = lab.network.hosts
            row = {"link_mbit_per_s": mbit, "streams_of_a_plan": useful_streams(RTT_S / 2, mbit * 1e6 / 8)}
            port += 1
            got = run_on_hosts(lab, hosts, plain_gloo, hosts[0].address, port)[1]
            row["plain_gloo"] = 8e-6 * got
            for streams in (1, 2, 4, 8):
                port += 1
                got = run_on_hosts(lab, hosts, transport, hosts[0].address, port, streams, mbit * 1e6 / 8)[1]
                row[f"streams_{streams}"] = 8e-6 * got
        rows.append(row)
        print("  ".join(f"{key} {value:.0f}" for key, value in row.items()), flush=True)
    Path("out").mkdir(exist_ok=True)
    Path("out/lab_streams.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
