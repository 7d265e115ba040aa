"""When regions that train by themselves exchange what: all at once every H steps, or fragments in turn.

Of F fragments (every F-th layer) one goes to the other regions every H / F steps, and arrives some steps later, while
training goes on. Then the regions' weights are never all equal, except where they meet: where a checkpoint is due or
the run ends, all fragments are exchanged at once and waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from polygon_comm.line import Pending, SumLine
from polygon_comm.local_updates import OuterUpdate
from polygon_comm.reduction import SumGroup

from polygon.domain.errors import require
from runners.engine.gradients import Bucket
from runners.engine.options import Options

STOPS = "stops"
"""Who wants to stop: exchanged as a bucket is."""


class Rounds:
    """One rank's exchanges with the other regions.

    Parameters
    ----------
    buckets : sequence of Bucket
        Those whose gradients only their region sums (`Bucket.fraction`) take part.
    everyone : SumGroup
        All ranks.
    local_steps : int
        Steps between two exchanges of the same weights (H).
    options : Options
    line : SumLine
        Whose threads exchange.
    """

    def __init__(
        self, buckets: Sequence[Bucket], everyone: SumGroup, local_steps: int, options: Options, line: SumLine
    ) -> None:
        first = options.synchronous_steps
        self._every, self._first = local_steps, options.steps // 5 if first is None else first
        self._fragments, self._overlap = options.outer_fragments, options.outer_overlap
        wanted = f"at most the plan's local steps ({local_steps})"
        require(local_steps == 1 or self._fragments <= local_steps, "--outer-fragments", self._fragments, wanted)
        spacing = local_steps // self._fragments
        wanted = f"at most local steps / fragments ({spacing}): one exchange ends before the next begins"
        require(local_steps == 1 or self._overlap <= spacing, "--outer-overlap", self._overlap, wanted)
        self._streams = self._fragments > 1 or self._overlap > 0
        self._everyone, self._line = everyone, line
        self.outer: dict[str, OuterUpdate] = {}
        """By bucket."""
        self._fragment_of: dict[str, int] = {}
        for place, bucket in enumerate(buckets):
            if bucket.group is not None and bucket.fraction is not None:
                self.outer[bucket.name] = OuterUpdate(
                    bucket.name,
                    bucket.weights_of(bucket.own.start, bucket.own.stop),
                    bucket.group,
                    bucket.fraction,
                    bucket.shapes,
                    part=bucket.own,
                    whole=bucket.whole_of,
                    rate=options.outer_rate,
                    momentum=options.outer_momentum,
                )
                # A tied weight's bucket has another place on the other stage that holds it.
                self._fragment_of[bucket.name] = 0 if bucket.name == "tied" else place % self._fragments
        self._under_way: deque[tuple[int, str, Callable[[], None]]] = deque()
        """Step at whose end an exchange is waited for, of which bucket it is, and what then ends it."""
        self._stop_heard = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the outer optimizer: the weights that all regions had, and its momentum."""
        return sum(outer.start.nbytes + outer.momentum.nbytes for outer in self.outer.values())

    def alone(self, step: int) -> bool:
        """Whether regions sum the step's gradients each for itself."""
        return self._every > 1 and step >= self._first

    def meets(self, step: int, *, wanted: bool) -> bool:
        """Whether all regions have the same weights after a step; `wanted`: where there is a choice."""
        if not self.alone(step):
            return True
        round_ends = (step + 1 - self._first) % self._every == 0
        return round_ends and (not self._streams or wanted or self._stop_heard)

    def restart(self) -> None:
        """Take the weights as they are for those that all regions have."""
        for outer in self.outer.values():
            outer.restart()

    def go_on(self, step: int, *, stop: bool) -> set[str]:
        """Begin and end the exchanges that are due after a step in which not all meet; buckets whose weights changed.

        `stop` says whether this rank wants to stop; the others hear of it with the next whole round.
        """
        ended = self._end(step)
        done = step + 1 - self._first
        for fragment in range(self._fragments):
            if self._streams and (done - fragment * self._every // self._fragments) % self._every == 0:
                due = [outer for name, outer in self.outer.items() if self._fragment_of[name] == fragment]
                begins = [(outer.name, partial(outer.begin, outer.weights.clone())) for outer in due]
                if fragment == 0:
                    begins.append((STOPS, partial(self._begin_stops, stop=stop)))
                self._under_way += [(step + self._overlap, name, self._line.exchange(begin)) for name, begin in begins]
                ended |= self._end(step)
        return ended

    def _begin_stops(self, *, stop: bool) -> Pending:
        stops = torch.tensor([float(stop)], device=self._line.device)
        under_way = self._everyone.begin(stops, STOPS)

        def finish() -> None:
            self._stop_heard = stops.item() > 0

        return under_way.then(finish)

    def _end(self, step: float) -> set[str]:
        """End the exchanges that have had their steps; of which buckets."""
        ended = set()
        while self._under_way and self._under_way[0][0] <= step:
            _, name, end = self._under_way.popleft()
            end()
            ended.add(name)
        return ended - {STOPS}

    def meet(self) -> set[str]:
        """End what is under way and exchange everything: then all regions have the same weights; those that changed."""
        self._end(float("inf"))
        for end in [self._line.exchange(outer.begin_now) for outer in self.outer.values()]:
            end()
        return set(self.outer)
