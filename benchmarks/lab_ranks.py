"""Runs a function on hosts of a lab: one forked process each, torch imported before."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from runners.lab_net.running import Lab
from runners.lab_net.topology import LabHost, LabNetwork


def star_network(latency_s: np.ndarray, bytes_per_s: np.ndarray) -> LabNetwork:
    """Hosts h0, h1, ... with the given links."""
    hosts = tuple(
        LabHost(
            index=i, name=f"h{i}", region=i, region_name=f"R{i}", pool=i, node=0, address=f"10.88.{i}.1", devices=(i,)
        )
        for i in range(len(latency_s))
    )
    return LabNetwork(hosts=hosts, latency_s=latency_s, bytes_per_s=bytes_per_s)


def _enter(connection: Any, lab: Lab, host: LabHost, rank: int, function: Callable, args: tuple) -> None:
    os.environ.update(lab.environment(host))
    lab.move_to(host)
    import torch

    torch.set_num_threads(1)
    try:
        connection.send(("result", function(rank, *args)))
    except BaseException as error:  # noqa: BLE001 - reported by the parent
        connection.send(("error", f"rank {rank}: {error!r}\n{traceback.format_exc()}"))


def run_on_hosts(
    lab: Lab, hosts: Sequence[LabHost], function: Callable, *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """What ``function(rank, *args)`` returns on every host; raises what any of them raises."""
    import torch.distributed  # noqa: F401  # before forking

    context = multiprocessing.get_context("fork")
    started = []
    for rank, host in enumerate(hosts):
        mine, theirs = context.Pipe()
        process = context.Process(target=_enter, args=(theirs, lab, host, rank, function, args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    results: dict[int, Any] = {}
    try:
        open_ends: dict[Any, int] = {end: rank for rank, (_, end) in enumerate(started)}
        while open_ends:
            ready: list[Any] = list(wait(list(open_ends), timeout=timeout_s))
            if not ready:
                raise TimeoutError(f"ranks {sorted(open_ends.values())} did not end within {timeout_s:g} s")
            for end in ready:
                rank = open_ends.pop(end)
                kind, value = end.recv()
                if kind == "error":
                    raise RuntimeError(value)
                results[rank] = value
    finally:
        for process, end in started:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            end.close()
    return [results[rank] for rank in range(len(hosts))]
