"""Messages over shared links: the price against streams that share fairly: `python benchmarks/shared_messages.py`.

The planner lets messages pass a shared link one after another (`polygon.cost.shared_schedule`). Real streams share it
at the same time. Here every message is a flow; all flows have their max-min fair rates over node pairs, network cards
and what regions share, worked out anew whenever one begins or ends. Prints how far the price of drawn pipelines is off,
and of every plan file that is named.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.domain.schedule import worker_order
from polygon.formats.files import read_plan
from polygon.planning.candidates import Candidates
from polygon.planning.decode import Decoder, Infeasible
from tests.linked_regions import TYPES, cluster_of, small_gpt

Channel = tuple[bool, int, int]
"""Whether down the stages, sender, receiver."""


class FairLinks:
    """Flows and the rates at which they share what they pass."""

    def __init__(self, times: StepTimes, tables: CostTables) -> None:
        self.place, self.links = times.place, tables.links
        self.left: dict[Channel, float] = {}
        self.rates: dict[Channel, float] = {}
        self._passed: dict[Channel, dict[Hashable, float]] = {}

    def _passes(self, sender: int, receiver: int) -> dict[Hashable, float]:
        """What a flow passes, and the bytes/s of each."""
        place, links = self.place, self.links
        a, b = place.pool[sender], place.pool[receiver]
        ends = int(place.node[sender]), int(place.node[receiver])
        if ends[0] == ends[1]:
            return {(sender, receiver): links.node_bytes_per_s[a]}
        passed: dict[Hashable, float] = {("pair", *ends): links.bytes_per_s[a, b]}
        passed["card", ends[0]] = links.card_bytes_per_s[a]
        r, s = int(place.region[sender]), int(place.region[receiver])
        if r != s:
            passed["capacity", r, s] = links.capacity_bytes_per_s[r, s]
            passed["egress", r] = links.egress_bytes_per_s[r]
        return passed

    def begin(self, channel: Channel, n_bytes: float) -> None:
        """A flow more."""
        self.left[channel] = n_bytes
        self._passed[channel] = self._passes(*channel[1:])

    def share(self) -> None:
        """Max-min fair rates: what is tightest gives all that pass it equal parts, and so on with what is left."""
        left: dict[Hashable, float] = {}
        users: dict[Hashable, set[Channel]] = {}
        for channel in self.left:
            for thing, rate in self._passed[channel].items():
                left[thing] = rate
                users.setdefault(thing, set()).add(channel)
        self.rates = {}
        while len(self.rates) < len(self.left):
            tightest = min(
                (thing for thing in users if users[thing]), key=lambda thing: left[thing] / len(users[thing])
            )
            rate = left[tightest] / len(users[tightest])
            for channel in tuple(users[tightest]):
                self.rates[channel] = rate
                for thing in self._passed[channel]:
                    users[thing].discard(channel)
                    left[thing] -= rate

    def next_end_s(self, now_s: float) -> tuple[float, Channel | None]:
        """When the next flow ends if none begins, and which."""
        ends = ((now_s + left / self.rates[channel], channel) for channel, left in self.left.items())
        return min(ends, default=(np.inf, None))

    def pass_on(self, seconds: float) -> None:
        """Let time go by."""
        for channel in self.left:
            self.left[channel] -= self.rates[channel] * seconds


def fair_makespan_s(plan: Plan, times: StepTimes, tables: CostTables) -> float:
    """When the last worker has ended its last backward [s], messages sharing fairly."""
    place, messages, schedule = times.place, times.messages, times.schedule
    micro_batches, stages = plan.routes.shape
    todo = {
        int(place.offset[s]) + w: [(a.kind, a.micro_batch, s) for a in worker_order(plan, s, w)]
        for s, stage in enumerate(plan.stages)
        for w in range(stage.width)
    }
    ready = {("F", m, 0) for m in range(micro_batches)}
    flows, queues, busy = FairLinks(times, tables), dict[Channel, list](), set[int]()
    events: list[tuple] = []
    tick, now_s, last_s = itertools.count(), 0.0, 0.0

    def begin(workers: Iterator[int]) -> None:
        for worker in workers:
            if worker not in busy and todo[worker] and todo[worker][0] in ready:
                action = todo[worker].pop(0)
                busy.add(worker)
                duration_s = (schedule.forward_s if action[0] == "F" else schedule.backward_s)[worker]
                heapq.heappush(events, (now_s + duration_s, next(tick), worker, action))

    def send(worker: int, kind: str, m: int, s: int) -> None:
        down = kind == "F"
        to = s + 1 if down else s - 1
        if not 0 <= to < stages:
            ready.update({("B", m, s)} if down else ())
            return
        message = 0 if down else 1, m, min(s, to)
        channel = down, worker, int(messages.receiver[message])
        queue = queues.setdefault(channel, [])
        queue.append((float(messages.n_bytes[message]), float(messages.latency_s[message]), (kind, m, to)))
        if len(queue) == 1:
            flows.begin(channel, queue[0][0])
            flows.share()

    begin(iter(todo))
    while events or flows.left:
        sent_s, channel = flows.next_end_s(now_s)
        due_s = min(sent_s, events[0][0] if events else np.inf)
        flows.pass_on(due_s - now_s)
        now_s = due_s
        if channel is not None and sent_s <= due_s:
            _, latency_s, action = queues[channel].pop(0)
            del flows.left[channel]
            if queues[channel]:
                flows.begin(channel, queues[channel][0][0])
            flows.share()
            heapq.heappush(events, (now_s + latency_s, next(tick), -1 - channel[2], action))
            continue
        _, _, worker, action = heapq.heappop(events)
        if worker < 0:
            ready.add(action)
            begin(iter([-1 - worker]))
        else:
            busy.discard(worker)
            last_s = now_s
            send(worker, *action)
            begin(iter([worker]))
    return last_s


def drawn(count: int, seed: int) -> Iterator[tuple[str, Plan, CostTables]]:
    """Plans of random allocations to small clusters with slow links."""
    rng = np.random.default_rng(seed)
    while count > 0:
        groups = [[(str(rng.choice(TYPES)), *map(int, (rng.integers(1, 4), rng.choice([1, 2, 4]))))] for _ in range(3)]
        cluster = cluster_of(
            groups[: rng.integers(1, 4)],
            latency_s=float(rng.choice([1e-4, 0.01, 0.05])),
            bytes_per_s=float(rng.choice([1e7, 3e7, 1e8, 1e9])),
            node_bytes_per_s=1e11,
            between=Link(latency_s=5e-5, bytes_per_s=float(rng.choice([3e7, 1e8, 1e9]))),
        )
        batch = Batch(global_batch=int(rng.choice([16, 32])), seq_len=512)
        decoder = Decoder(Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch))
        plan = decoder.decode(Candidates(decoder, 5).random(rng))
        if not isinstance(plan, Infeasible) and len(plan.stages) > 1:
            count -= 1
            yield "drawn", plan, decoder.tables


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("plans", nargs="*", metavar="FILE", help="plan files")
    parser.add_argument("--drawn", type=int, default=80, metavar="N", help="pipelines to draw (default 80)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    files = ((name, read_plan(name)) for name in arguments.plans)
    named = ((name, file.plan, CostTables(file.problem)) for name, file in files)
    errors = []
    for name, plan, tables in itertools.chain(named, drawn(arguments.drawn, arguments.seed)):
        times = step_times(plan, tables)
        price_s, fair_s = float(times.ends_s.max()), fair_makespan_s(plan, times, tables)
        if name == "drawn":
            errors.append(price_s / fair_s - 1)
        else:
            print(f"{name}: {price_s:.4g} s, sharing fairly {fair_s:.4g} s: {price_s / fair_s - 1:+.1%}")
    if errors:
        off = np.abs(errors)
        print(
            f"{len(errors)} drawn pipelines: mean {off.mean():.1%}, median {np.median(off):.1%}, "
            f"from {min(errors):+.1%} to {max(errors):+.1%}, {(off > 0.05).mean():.0%} over 5 %"
        )


if __name__ == "__main__":
    main()
