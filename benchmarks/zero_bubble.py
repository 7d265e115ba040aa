"""What a zero-bubble schedule would gain: `python -m benchmarks.zero_bubble [NAME ...]`.

Of native problems and of 64 equal devices the quick search finds a plan; pipelines are then simulated by events, their
messages as the plan has them: as polygon orders actions; by the same work without a fixed order (whoever is free takes
a backward, else a forward while it may hold one more); and so with the backward in two, the input's gradient first
and the weights' later, when nothing else is there (Qi et al., ICLR'24, arXiv:2401.10241): ZB-H1, which holds as many
micro-batches as the plan does, and ZB-H2, which holds twice as many, whether memory has room or not. The first
simulation must end when the planner's does (`TIES`).

What speaks for zero bubble is left in: weight gradients take what their products take in the forward; sums of
gradients hide behind as much as a whole backward. A stage that recomputes its blocks does not split its backward: the
recomputed activations would have to be held meanwhile.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.plan import Plan, Problem, Stage
from polygon.domain.schedule import worker_order
from polygon.formats import files
from polygon.messages.report import table
from polygon.planning.efforts import QUICK
from polygon.planning.search_engine import find_plan
from tests.drawn_problems import equal_devices

NATIVE = Path(__file__).resolve().parents[1] / "instances" / "native"
DRAWN = range(12)
"""Problems on equal devices."""
FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
TIES = 0.005
"""Part of a step that the first simulation may differ from the planner's: which of two messages that are there at the
same moment goes first over what they share."""


def products_part(problem: Problem, stage: Stage) -> float:
    """Part of a stage's forward that are linear layers, of which a backward has the weights' gradients."""
    model, linear, scores = problem.model, 0.0, 0.0
    for layer in range(max(1, stage.first_layer), min(model.layers - 1, stage.last_layer)):
        block = model.block(layer)
        linear += sum(product.flops_per_token for product in block.products())
        scores += 2 * block.keys_seen(problem.batch.seq_len) * block.heads * (block.head_dim + block.value_dim)
    if stage.last_layer == model.layers:
        linear += 2 * model.head_weight_parameters()
    return linear / (linear + scores) if linear else 0.0


@dataclass
class Workplace:
    """The devices that compute for a worker: what is there to do."""

    order: deque[tuple[int, int, int]]
    """Actions (kind, micro-batch, stage) in a fixed order; empty: whatever is there."""
    most: int
    """Micro-batches that may be held."""
    forwards: list[tuple[int, int]] = field(default_factory=list)
    backwards: list[tuple[float, int, int]] = field(default_factory=list)
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    held: int = 0
    free_s: float = 0.0


class Run:
    """One step of a pipeline without chunks, by events.

    Parameters
    ----------
    fixed : bool
        Whether actions come in the plan's order.
    weights : bool
        Whether weight gradients come later.
    hold : float
        Micro-batches that a worker may hold, times the plan's.
    """

    def __init__(
        self, problem: Problem, plan: Plan, times: StepTimes, *, fixed: bool, weights: bool, hold: float
    ) -> None:
        self.schedule, self.plan = times.schedule, plan
        self.routes = self.schedule.routes
        self.micro_batches, self.stages = self.routes.shape
        forward_s = self.schedule.forward_s
        parts = np.array([products_part(problem, stage) for stage in plan.stages])[times.place.stage]
        whole = np.array([stage.recompute == "full" for stage in plan.stages])[times.place.stage]
        self.weights_s = np.where(
            whole | (not weights), 0.0, np.minimum(parts * forward_s, self.schedule.backward_s / 2)
        )
        self.places = [self._place(times, w, fixed, hold) for w in range(len(forward_s))]
        self.taken = np.zeros(self.schedule.links)

    def _place(self, times: StepTimes, w: int, fixed: bool, hold: float) -> Workplace:
        stage = int(times.place.stage[w])
        order = worker_order(self.plan, stage, w - int(times.place.offset[stage]))
        held = np.cumsum([1 if action.kind == "F" else -1 for action in order])
        actions = [(int(action.kind == "B"), action.micro_batch, stage) for action in order]
        return Workplace(deque(actions if fixed else ()), max(1, math.ceil(hold * held.max(initial=1))))

    def ends_s(self) -> np.ndarray:
        """When every worker has ended."""
        events: list[tuple[float, int, int, int, int]] = []
        for m in range(self.micro_batches):
            events.append((0.0, 0, FORWARD, m, 0))
        heapq.heapify(events)
        self.events, self.number, self.done = events, 1, 0
        self.busy = [False] * len(self.places)
        while events:
            now = events[0][0]
            touched = set()
            while events and events[0][0] == now:
                _, _, kind, m, s = heapq.heappop(events)
                touched.add(self._happened(now, kind, m, s))
            for w in sorted(touched):
                if not self.busy[w]:
                    self._begin(w, now)
        if any(place.held for place in self.places) or self.done != 2 * self.routes.size:
            raise AssertionError("some micro-batches never came back")
        return np.array([place.free_s for place in self.places])

    def _happened(self, now: float, kind: int, m: int, s: int) -> int:
        """What there is to do has arrived (a kind as it is), or has been done (plus 10); whom it concerns."""
        w = int(self.routes[m, s])
        place = self.places[w]
        if kind == FORWARD:
            heapq.heappush(place.forwards, (m, s))
        elif kind == BACKWARD:
            heapq.heappush(place.backwards, (now, m, s))
        else:
            self.busy[w], place.free_s = False, now
            self._done(now, kind - 10, m, s)
        return w

    def _done(self, now: float, kind: int, m: int, s: int) -> None:
        place = self.places[int(self.routes[m, s])]
        self.done += kind != WEIGHTS
        if kind == FORWARD and s == self.stages - 1:
            heapq.heappush(place.backwards, (now, m, s))
        elif kind == WEIGHTS or (kind == BACKWARD and not self.weights_s[self.routes[m, s]]):
            place.held -= 1
        elif kind == BACKWARD:
            place.weights.append((m, s))
        to = s + 1 if kind == FORWARD else s - 1
        if kind != WEIGHTS and 0 <= to < self.stages:
            self._event(self._arrival_s(now, kind, m, min(s, to)), kind, m, to)

    def _arrival_s(self, now: float, kind: int, m: int, boundary: int) -> float:
        """As `polygon.cost.shared_schedule` lets messages pass."""
        leaves = now
        for number, hold_s in zip(
            self.schedule.link[kind, m, boundary], self.schedule.hold_s[kind, m, boundary], strict=True
        ):
            if number >= 0:
                self.taken[number] = max(now, self.taken[number]) + hold_s
                leaves = max(leaves, self.taken[number])
        return float(leaves + self.schedule.latency_s[kind, m, boundary])

    def _event(self, time_s: float, kind: int, m: int, s: int) -> None:
        heapq.heappush(self.events, (time_s, self.number, kind, m, s))
        self.number += 1

    def _begin(self, w: int, now: float) -> None:
        """Let a worker begin what it may do next."""
        place = self.places[w]
        action = self._next(place)
        if action is None:
            return
        kind, m, s = action
        later_s = float(self.weights_s[w])
        whole_s = float((self.schedule.forward_s if kind == FORWARD else self.schedule.backward_s)[w])
        spent_s = {FORWARD: whole_s, BACKWARD: whole_s - later_s, WEIGHTS: later_s}[kind]
        place.held += kind == FORWARD
        self.busy[w] = True
        self._event(now + spent_s, kind + 10, m, s)

    @staticmethod
    def _next(place: Workplace) -> tuple[int, int, int] | None:
        if place.order:
            kind, m, s = place.order[0]
            here = (m, s) in place.forwards if kind == FORWARD else any((m, s) == it[1:] for it in place.backwards)
            if not here:
                return None
            place.order.popleft()
            if kind == FORWARD:
                place.forwards.remove((m, s))
                heapq.heapify(place.forwards)
            else:
                place.backwards = [it for it in place.backwards if it[1:] != (m, s)]
                heapq.heapify(place.backwards)
            return kind, m, s
        if place.backwards:
            _, m, s = heapq.heappop(place.backwards)
            return BACKWARD, m, s
        if place.forwards and place.held < place.most:
            m, s = heapq.heappop(place.forwards)
            return FORWARD, m, s
        if place.weights:
            return WEIGHTS, *place.weights.popleft()
        return None


def compared(problem: Problem) -> tuple[Plan, list[float]] | None:
    """A plan, and its step as polygon orders it, without an order, as ZB-H1 and ZB-H2; None: it is no pipeline."""
    tables = CostTables(problem)
    plan = find_plan(problem, np.random.default_rng(0), effort=QUICK, tables=tables).plan
    if plan is None or len(plan.stages) == 1 or plan.chunks > 1:
        return None
    times = step_times(plan, tables)
    steps = []
    for fixed, weights, hold in ((True, False, 1.0), (False, False, 1.0), (False, True, 1.0), (False, True, 2.0)):
        ends_s = Run(problem, plan, times, fixed=fixed, weights=weights, hold=hold).ends_s()
        if fixed and abs(ends_s.max() / times.ends_s.max() - 1) > TIES:
            raise AssertionError(
                f"ends at {ends_s.max():.6g} s, of the planner's simulation at {times.ends_s.max():.6g} s"
            )
        steps.append(replace(times, ends_s=ends_s).step_s)
    return plan, steps


def problems(names: list[str]) -> Iterator[tuple[str, Problem]]:
    """Native problems (those named, else all of less than 200 devices), and some on equal devices."""
    for path in sorted(NATIVE.glob("*.yaml")):
        if path.stem in names or (not names and path.stem.startswith(("tiny", "small", "medium"))):
            yield path.stem, files.read_problem(path)
    for seed in DRAWN if not names else ():
        yield f"equal devices, {seed}", equal_devices(seed)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", help="native problems (default: all but the large ones)")
    rows, gains = [], []
    for name, problem in problems(parser.parse_args().names):
        found = compared(problem)
        if found is None:
            continue
        plan, (ordered, free, first, second) = found
        gains.append([value / ordered - 1 for value in (free, first, second)])
        shape = f"{len(plan.stages)} x {len(plan.routes)}"
        rows.append([name, shape, f"{ordered:.3f}", *(f"{gain:+.1%}" for gain in gains[-1])])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(table(["plan", "stages x micro-batches", "step s", "no order", "ZB-H1", "ZB-H2"], rows))
    for name, column in zip(("no order", "ZB-H1", "ZB-H2"), zip(*gains, strict=True), strict=True):
        print(f"{name}: median {statistics.median(column):+.1%}, best {min(column):+.1%}, worst {max(column):+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
