"""Laws of messages between ranks, on real ranks."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from polygon_comm.accelerator import Accelerator
from polygon_comm.transport import Wires
from torch.distributed import TCPStore

from runners.engine.rank_layout import MOST_WARM_BYTES, Layout
from tests.patience import PATIENCE_S
from tests.real_ranks import leave_together, run_ranks
from tests.small_problems import routed_problem

RANKS, MESSAGES = 3, 12


def talking_rank(rank, port, warm_bytes):
    """What this rank got of messages of growing size from all others, and the bytes that count as sent before them."""
    store = TCPStore("127.0.0.1", port, RANKS, rank == 0, wait_for_workers=False)
    others = [peer for peer in range(RANKS) if peer != rank]
    streams = {peer: 1 + (peer + rank) % 3 for peer in others}
    warm = {peer: warm_bytes for peer in others if peer + rank != 2}
    wires = Wires(
        store, rank, streams, address="127.0.0.1", timeout_s=PATIENCE_S, accelerator=Accelerator(), warm_bytes=warm
    )
    before = sum(wires.sent_bytes.values())
    sizes = [1 << (8 + m) for m in range(MESSAGES)]
    receipts = [(peer, m, wires.post_receive(peer, m, sizes[m])) for peer in others for m in range(MESSAGES)]
    sendings = [
        wires.send(peer, m, torch.full((sizes[m],), 10 * rank + m, dtype=torch.uint8))
        for peer in others
        for m in range(MESSAGES)
    ]
    wrong = [(peer, m) for peer, m, receipt in receipts if bool((receipt.wait() != 10 * peer + m).any())]
    for sending in sendings:
        sending.wait()
    leave_together(store, rank, RANKS)
    return before, wrong


@pytest.mark.parametrize("warm_bytes", [0, 1, 100_000])
def test_messages_arrive_as_they_were_sent(warm_bytes):
    """Over one to three streams, whatever went over them first; that counts as nothing sent."""
    assert run_ranks(talking_rank, RANKS, warm_bytes) == [(0, [])] * RANKS


def paced_rank(rank, port):
    """How many connections this rank finds to each other, on an address of its own, and what they may carry at most."""
    store = TCPStore("127.0.0.1", port, RANKS, rank == 0, wait_for_workers=False)
    streams = {peer: peer + rank for peer in range(RANKS) if peer != rank}
    wires = Wires(
        *(store, rank, streams), address=f"127.0.0.{10 + rank}", timeout_s=PATIENCE_S, accelerator=Accelerator(),
        bytes_per_s=dict.fromkeys(streams, 1e12),
    )  # fmt: skip
    most = {}
    for peer, descriptors in wires.connections.items():
        rates = []
        for descriptor in descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as tcp:
                rates.append(int.from_bytes(tcp.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder))
        most[peer] = rates
    leave_together(store, rank, RANKS)
    return most


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="pacing by socket option is Linux'")
def test_a_pair_s_streams_share_its_link_s_rate():
    """Every stream is found and nothing else; together they may carry 1.2 times what the link is said to."""
    for rank, most in enumerate(run_ranks(paced_rank, RANKS)):
        assert {peer: len(rates) for peer, rates in most.items()} == {p: p + rank for p in range(RANKS) if p != rank}
        for peer, rates in most.items():
            assert rates == [pytest.approx(1.2e12 / (peer + rank))] * (peer + rank)


def test_streams_to_other_regions_are_warmed_by_four_times_what_the_link_holds():
    """10 ms each way at 10 MB/s: 800 kB; a wider link: the limit. Not to ranks of the same region."""
    problem, plan = routed_problem(4)
    for bytes_per_s, expected in ((1e7, 800_000), (1e12, MOST_WARM_BYTES)):
        cluster = replace(problem.cluster, bytes_per_s=np.full((2, 2), bytes_per_s))
        layout = Layout(replace(problem, cluster=cluster), plan)
        for rank in range(4):
            far = [peer for peer in layout.streams(rank) if (peer < 2) != (rank < 2)]
            assert layout.warm_bytes(rank) == dict.fromkeys(far, expected)
