"""Evaluations per second of the schedule kernels on one core: plain 1F1B and routed, 8 stages x 64 micro-batches.

python benchmarks/schedule_kernel.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from polygon.cost.simulation import backward_order, plain_step_s, routed_ends_s

STAGES, MICRO_BATCHES, WIDTH = 8, 64, 2


def rate(function: Callable[[], object], calls: int, rounds: int = 7) -> float:
    """Median calls per second of processor time over several rounds (other programs may share the core)."""
    function()
    rates = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            function()
        rates.append(calls / (time.thread_time() - start))
    return statistics.median(rates)


def main() -> None:
    """Print both rates."""
    rng = np.random.default_rng(0)
    forward, transfer = rng.random(STAGES) + 1, rng.random(STAGES) / 10
    windows = np.arange(STAGES, 0, -1)
    backward = 2 * forward
    plain = rate(lambda: plain_step_s(forward, backward, transfer, windows, MICRO_BATCHES), 20_000)

    workers = STAGES * WIDTH
    routes = rng.integers(0, WIDTH, size=(MICRO_BATCHES, STAGES)) + np.arange(STAGES) * WIDTH
    order, first = backward_order(np.broadcast_to(windows * WIDTH, routes.shape).copy())
    times = rng.random(workers) + 1
    twice = 2 * times
    shape = (MICRO_BATCHES, STAGES - 1)
    busy, latency = rng.random(shape) / 10, rng.random(shape) / 10
    down = routes[:, :-1] * workers + routes[:, 1:]
    up = workers * workers + routes[:, 1:] * workers + routes[:, :-1]
    ends, starts = np.empty(workers), np.zeros((0, 0, 0))

    def routed() -> None:
        routed_ends_s(
            routes, order, first, times, twice, busy, latency, busy, latency, down, up, 2 * workers * workers,
            ends, starts,
        )  # fmt: skip

    print(f"schedule kernel, {STAGES} stages x {MICRO_BATCHES} micro-batches, per second of one core")
    print(f"plain 1F1B   {plain:>12,.0f} evaluations/s")
    print(f"routed       {rate(routed, 5_000):>12,.0f} evaluations/s")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
