"""Searches that know nothing of one another: one after another, or side by side in processes.

What they find is the same either way: each has a number, and random numbers that follow from it. The process that asks
makes rounds as well, and hears of the others whenever its own tells how far it is. The others are started once a search
is seen to take long, and anew, not forked, as numeric libraries have threads; the round of one that is lost is made by
another.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from polygon.domain.clock import Clock
from polygon.domain.message import Message
from polygon.planning.telling import STARTS, Tell, in_round

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from polygon.planning.search_engine import Effort

log = logging.getLogger(__name__)

TOLD_S = 0.1
"""How often a process tells how far it is, and hears of others."""
WORTH_S = 5.0
"""A search that is over sooner gets no help: a process takes two to three seconds before it can begin."""
OTHERS_S = 2.0
"""How long one who interrupts waits for what the other processes have, where this one has something."""
READY, TOLD, FOUND, FAILED = range(4)
"""What a process says: that it can begin; phase, part and best value; what a round has found; why it could not."""


class Outcome(Protocol):
    """What a round has found."""

    @property
    def interrupted(self) -> bool:
        """Whether it was broken off."""
        ...


Made = TypeVar("Made", bound=Outcome)
Search = Callable[[int, "Effort", Tell | None], Made]
"""Of the number of a round, its effort, and whom to tell."""


def in_rounds(
    search: Search[Made], effort: Effort, tell: Tell | None, is_enough: Callable[[Made], bool], jobs: int = 1
) -> tuple[list[Made], bool]:
    """What the rounds of an effort find, in their order, up to the first that is enough.

    Parameters
    ----------
    search : callable
        For more than one job one that can be pickled.
    effort : Effort
        Each round gets what is left of its time; once that is over no other begins.
    tell : callable, optional
        May raise KeyboardInterrupt: all rounds end with what they have.
    is_enough : callable
        Whether no round is needed after one that found this.
    jobs : int
        Processes at most, this one included; -1: one a core.

    Returns
    -------
    made : list
    interrupted : bool
        Whether some were broken off, or not made.

    Raises
    ------
    KeyboardInterrupt
        Before anything was found.
    """
    with _Rounds(search, effort, tell, is_enough, jobs) as rounds:
        return rounds.made()


@dataclass(eq=False)
class _Helper:
    """A process that makes rounds."""

    process: BaseProcess
    line: Connection
    index: int | None = None
    """Of the round that it makes now."""
    phase: Message = STARTS


class _Rounds(Generic[Made]):
    """See `in_rounds`."""

    def __init__(
        self, search: Search[Made], effort: Effort, tell: Tell | None, is_enough: Callable[[Made], bool], jobs: int = 1
    ) -> None:
        self._search, self._efforts, self._clock = search, effort.searches(), Clock(effort.time_limit_s)
        self._tell, self._is_enough = tell, is_enough
        self._left = list(range(len(self._efforts)))
        """To be begun."""
        self._last = len(self._efforts) - 1
        """No round after this one is needed."""
        self._found: dict[int, Made] = {}
        self._parts = [0.0] * len(self._efforts)
        self._jobs = jobs
        self._best = math.inf
        self._interrupted: Clock | None = None
        """How long to wait for the others since."""
        self._helpers: list[_Helper] = []
        self._due = _NowAndThen(TOLD_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.process.terminate()
            helper.process.join()
            helper.line.close()

    def made(self) -> tuple[list[Made], bool]:
        """See `in_rounds`."""
        try:
            while self._make_next() or self._attend():
                pass
        except KeyboardInterrupt:
            self._interrupt()
            with contextlib.suppress(KeyboardInterrupt):  # asked for again: without what the others have
                while self._attend():
                    pass
            if not self._found:
                raise
        return [self._found[i] for i in sorted(self._found) if i <= self._last], self._interrupted is not None

    def _make_next(self) -> bool:
        """Make the next round here; whether there was one."""
        index = self._begun()
        if index is None:
            return False
        told = partial(self._hear, index) if self._tell is not None or self._jobs != 1 else None
        try:
            found: Made | None = self._search(index, self._effort(index), told)
        except KeyboardInterrupt:
            if index <= self._last:
                raise
            found = None
        self._keep(index, found)
        return True

    def _begun(self) -> int | None:
        """Number of the round that begins now, if any does."""
        if self._interrupted or not self._left or self._left[0] > self._last:
            return None
        return self._left.pop(0) if self._left[0] == 0 or self._clock.left_s() > 0 else None

    def _effort(self, index: int) -> Effort:
        return replace(self._efforts[index], time_limit_s=self._clock.left_s())

    def _keep(self, index: int, found: Made | None) -> None:
        """Note what a round has found that is over; nothing if it was broken off before there was anything."""
        self._parts[index] = 1.0
        if index > self._last:
            return
        if found is None or found.interrupted:
            self._interrupt()
        if found is not None:
            self._found[index] = found
            if self._is_enough(found):
                self._last = index
                self._stop(after=index)

    def _interrupt(self) -> None:
        """Let no other round begin, and those of the others end."""
        if self._interrupted is None:
            self._interrupted = Clock(OTHERS_S)
            self._stop(after=-1)

    def _stop(self, after: int) -> None:
        """Have the others' rounds with larger numbers end."""
        for helper in [*self._helpers]:
            if helper.index is not None and helper.index > after:
                self._ask(helper, None)

    def _hear(self, index: int, phase: Message, part: float, best: float) -> None:
        """How far the round is that is made here."""
        self._parts[index], self._best = part, min(self._best, best)
        if self._jobs != 1 and self._due():
            self._get_help()
            self._answer(0.0)
            if index > self._last:
                raise KeyboardInterrupt
        self._say(index, phase)

    def _get_help(self) -> None:
        """Start processes for the rounds that nobody has begun, where these take long enough."""
        done, spent_s = self._done(), self._clock.spent_s
        left_s = min(spent_s * (1 - done) / done, self._clock.left_s()) if done > 0 else 0.0
        if self._left and left_s > WORTH_S:
            if self._jobs < 0:
                self._jobs = cores()
            if _may_have_no_children():
                self._jobs = 1
            for _ in range(min(self._jobs - 1, len(self._left)) - len(self._helpers)):
                self._helpers.append(_started(self._search))

    def _done(self) -> float:
        """The part of all rounds that is done, by how long each is to search."""
        sizes = [max(1, effort.fluid_evaluations) for effort in self._efforts[: self._last + 1]]
        return sum(part * size for part, size in zip(self._parts, sizes, strict=False)) / sum(sizes)

    def _attend(self) -> bool:
        """Wait for the others, and tell how far they are; whether any makes a round that is waited for."""
        if self._found and self._interrupted is not None and self._interrupted.left_s() <= 0:
            return False
        working = {helper.index: helper.phase for helper in self._helpers if helper.index is not None}
        if working:
            self._say(min(working), working[min(working)])
            self._answer(TOLD_S)
        return bool(working)

    def _say(self, index: int, phase: Message) -> None:
        """Tell how far all rounds are, by the phase of one of them."""
        if self._tell is not None and not self._interrupted:
            self._tell(in_round(phase, index, len(self._parts)), self._done(), self._best)

    def _answer(self, seconds: float) -> None:
        """Take what the others say within so many seconds."""
        from multiprocessing.connection import wait

        of_line: dict[Any, _Helper] = {helper.line: helper for helper in self._helpers}
        for line in wait(list(of_line), seconds):
            if of_line[line] in self._helpers:  # else it was lost while another was told to end
                self._take(of_line[line])

    def _take(self, helper: _Helper) -> None:
        """Take what one of the others says, and give it a round to make once it has none."""
        try:
            what, told = helper.line.recv()
        except (EOFError, OSError):
            self._lose(helper)
            return
        if what == FAILED:
            raise told
        if what == TOLD and helper.index is not None:
            helper.phase, self._parts[helper.index], best = told
            self._best = min(self._best, best)
            return
        if what == FOUND and helper.index is not None:
            index, helper.index = helper.index, None
            self._keep(index, told)
        begun = self._begun()
        if begun is not None:
            helper.index, helper.phase = begun, STARTS
            self._ask(helper, (begun, self._effort(begun)))

    def _ask(self, helper: _Helper, asked: tuple[int, Effort] | None) -> None:
        try:
            helper.line.send(asked)
        except OSError:
            self._lose(helper)

    def _lose(self, helper: _Helper) -> None:
        """Have another make the round of a process that has ended."""
        helper.process.join()
        log.warning("a process of the search has ended by itself (%s): others go on", helper.process.exitcode)
        self._helpers.remove(helper)
        self._jobs = 1 + len(self._helpers)  # it is not started again
        helper.line.close()
        if helper.index is not None:
            self._left = sorted([*self._left, helper.index])


class _NowAndThen:
    """Whether so many seconds have passed since it was last so."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._clock = seconds, Clock()
        self._next_s = 0.0

    def __call__(self) -> bool:
        due = self._clock.spent_s >= self._next_s
        if due:
            self._next_s = self._clock.spent_s + self._seconds
        return due


def cores() -> int:
    """Cores that this process may use."""
    from joblib import cpu_count  # knows what a container may; takes as long to load as a short search

    return int(cpu_count())


def _may_have_no_children() -> bool:
    """Whether this process is one of a pool of Python's that may start none."""
    from multiprocessing import current_process

    return bool(current_process().daemon)


def _started(search: Search[Any]) -> _Helper:
    """A process that is about to make rounds."""
    from multiprocessing import get_context, resource_tracker  # most searches need none, and begin sooner without

    context = get_context("spawn")
    resource_tracker.ensure_running()  # what starts it lets interrupts through
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, search, gc.get_threshold()), daemon=True)
    with _interrupts_kept():  # the keyboard's are for who asks
        process.start()
    there.close()  # so that the end of the process is heard here
    return _Helper(process, here)


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Let no interrupt reach a process that is started meanwhile; those of this one come at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(line: Connection, search: Search[Any], threshold: tuple[int, int, int]) -> None:
    """Make the rounds that are asked for, until nobody asks any more; the garbage collector has the `threshold` of who
    asks."""
    gc.set_threshold(*threshold)
    with contextlib.suppress(EOFError, OSError):  # who asks has ended
        line.send((READY, None))
        while True:
            asked = line.recv()
            if asked is not None:  # else a round was to be broken off that was over
                line.send(_made(line, search, *asked))


def _made(line: Connection, search: Search[Any], index: int, effort: Effort) -> tuple[int, Any]:
    """What a round finds, or why it cannot."""
    due = _NowAndThen(TOLD_S)

    def tell(phase: Message, part: float, best: float) -> None:
        if due():
            line.send((TOLD, (phase, part, best)))
            if line.poll():
                line.recv()
                raise KeyboardInterrupt

    try:
        return FOUND, search(index, effort, tell)
    except KeyboardInterrupt:
        return FOUND, None
    except Exception as error:  # noqa: BLE001 - it is raised where the round was asked for
        return FAILED, error
