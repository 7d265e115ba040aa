"""When regions that train by themselves exchange what: all at once every H steps, or fragments in turn.

Of F fragments (every F-th layer) one goes to the other regions every H / F steps, and arrives some steps later, while
training goes on. Then the regions' weights are never all equal, except where they meet: where a checkpoint is due or
the run ends, all fragments are exchanged at once and waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from polygon_comm.local_updates import OuterUpdate
from polygon_comm.reduction import SUMS_UNDER_WAY, SumGroup

from polygon.domain.errors import require
from runners.engine.gradients import Bucket, Reducer
from runners.engine.options import Options


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
    reducer : Reducer
        Whose thread exchanges.
    """

    def __init__(
        self, buckets: Sequence[Bucket], everyone: SumGroup, local_steps: int, options: Options, reducer: Reducer
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
        self._everyone, self._reducer, self._device = everyone, reducer, buckets[0].weights.device
        self.outer: dict[str, OuterUpdate] = {}
        """By bucket."""
        self._fragment_of: dict[str, int] = {}
        for place, bucket in enumerate(buckets):
            if bucket.group is not None and bucket.fraction is not None:
                self.outer[bucket.name] = OuterUpdate(
                    bucket.name,
                    bucket.weights,
                    bucket.group,
                    bucket.fraction,
                    bucket.shapes,
                    rate=options.outer_rate,
                    momentum=options.outer_momentum,
                )
                # A tied weight's bucket has another place on the other stage that holds it.
                self._fragment_of[bucket.name] = 0 if bucket.name == "tied" else place % self._fragments
        self._under_way: deque[tuple[int, Future[Callable[[], None]]]] = deque()
        """Step at whose end an exchange is waited for, and what then ends it."""
        self._stop_heard = False

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

    def go_on(self, step: int, *, stop: bool) -> bool:
        """Begin and end the exchanges that are due after a step in which not all meet; whether weights changed.

        `stop` says whether this rank wants to stop; the others hear of it with the next whole round.
        """
        ended = self._end(step)
        done = step + 1 - self._first
        for fragment in range(self._fragments):
            if self._streams and (done - fragment * self._every // self._fragments) % self._every == 0:
                due = [outer for name, outer in self.outer.items() if self._fragment_of[name] == fragment]
                sent = [outer.weights.clone() for outer in due]
                ended |= self._begin(step, partial(_begin_all, due, sent))
                if fragment == 0:
                    self._begin(step, partial(self._begin_stops, stop=stop))
        return ended

    def _begin_stops(self, *, stop: bool) -> Callable[[], None]:
        stops = torch.tensor([float(stop)], device=self._device)
        end_sum = self._everyone.begin(stops, "stops")

        def end() -> None:
            end_sum()
            self._stop_heard = stops.item() > 0

        return end

    def _begin(self, step: int, begin: Callable[[], Callable[[], None]]) -> bool:
        self._under_way.append((step + self._overlap, self._reducer.submit(begin)))
        return self._end(step)

    def _end(self, step: float) -> bool:
        """End the exchanges that have had their steps; whether there were any."""
        ended = False
        while self._under_way and self._under_way[0][0] <= step:
            begun = self._under_way.popleft()[1]
            self._reducer.submit(lambda begun=begun: begun.result()()).result()  # type: ignore[misc]
            ended = True
        return ended

    def meet(self) -> None:
        """End what is under way and exchange everything: then all regions have the same weights."""
        self._end(float("inf"))
        outers = list(self.outer.values())
        self._reducer.submit(lambda: _begin_all(outers, (outer.weights.clone() for outer in outers))()).result()


def _begin_all(outers: Sequence[OuterUpdate], sent: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Start several exchanges, not more than may be under way; the call of the result ends those that still are."""
    begun: deque[Callable[[], None]] = deque()
    for outer, weights in zip(outers, sent, strict=True):
        if len(begun) == SUMS_UNDER_WAY:
            begun.popleft()()
        begun.append(outer.begin(weights))

    def end() -> None:
        while begun:
            begun.popleft()()

    return end
