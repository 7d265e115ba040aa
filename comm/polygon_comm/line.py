"""Sums on their way: each begins, gathers, goes through its rounds, is shared and ends in threads of its own, so that
none waits for another one's part.

Packing and sending the next vector does not wait until an earlier one has arrived, what has arrived is unpacked and
handed out at once; each of these is done in one fixed order, since collectives inside a region need one. Rounds of a
sum wait for earlier rounds of the same sum and for earlier sums alone, on whatever ranks: so none waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Condition
from typing import Any, NamedTuple, TypeVar

from polygon_comm.accelerator import Accelerator

T = TypeVar("T")
SUMS_UNDER_WAY = 4
"""So many sums may have begun and not ended, whatever their size."""
BYTES_UNDER_WAY = 2 << 30
"""More may, up to so many bytes of buffers, most in a host's memory: then latencies pass side by side, however large a
layer is. A layer of 50 million parameters in int8 needs 150 MB at a single leader; over six regions 20 to 220 ms apart
a dozen of them under way are as good as all, of six steps take 1.2 to 1.5 times as long, of four twice."""
MOST_UNDER_WAY = 32
"""But never more than this, so that tags suffice."""
MOST_ROUNDS = 3
"""Of messages after a sum's first ones: those of relays, of roots, and of relays again (`polygon_comm.members`)."""


def _nothing() -> None:
    pass


class Pending:
    """A sum that has begun; the call ends it.

    It holds the tensors that it works on until it is dropped, which must not be before the device has done what
    `arrive` and `finish` hand over: their memory belongs to the stream of the thread that began the sum, which would
    use it anew.

    Parameters
    ----------
    arrive : callable
        Waits until the sum is there.
    gather : callable, optional
        Waits for what the region's members have, and sends it on.
    rounds : sequence of callables
        Each waits for what another round of messages needs, and sends that; at most `MOST_ROUNDS`.
    share : callable, optional
        Waits for what this rank leads of the sum, and begins to give it to the region's members.
    finish : callable, optional
        What is done with the sum.
    """

    def __init__(
        self,
        arrive: Callable[[], None],
        *,
        gather: Callable[[], None] = _nothing,
        rounds: Sequence[Callable[[], None]] = (),
        share: Callable[[], None] = _nothing,
        finish: Callable[[], None] = _nothing,
    ) -> None:
        self._parts, self._done = (gather, *rounds, share, arrive), 0
        self._finish = finish

    def _do(self, parts: int) -> None:
        """The first so many parts, but for those that have been done."""
        while self._done < parts:
            self._done += 1
            self._parts[self._done - 1]()

    def gather(self) -> None:
        """Send the first round, if that has not been done."""
        self._do(1)

    @property
    def rounds(self) -> tuple[Callable[[], None], ...]:
        """Each sends another round, if it has not been sent."""
        return tuple(partial(self._do, number) for number in range(2, len(self._parts) - 1))

    def share(self) -> None:
        """Begin to hand out what this rank leads, if that has not been done."""
        self._do(len(self._parts) - 1)

    def arrive(self) -> None:
        """Return when the sum is there."""
        self._do(len(self._parts))

    def then(self, finish: Callable[[], None]) -> Pending:
        """The same sum, with something else to be done with it."""
        return Pending(self.arrive, gather=self.gather, rounds=self.rounds, share=self.share, finish=finish)

    def __call__(self) -> None:
        """Wait for the sum and do with it what is to be done."""
        self.arrive()
        self._finish()


class _Threads(NamedTuple):
    """Of one each, for what follows when a sum has gathered."""

    rounds: tuple[ThreadPoolExecutor, ...]
    share: ThreadPoolExecutor
    end: ThreadPoolExecutor


class SumLine:
    """The threads of one rank that sums pass through. Sums must be added in the same order on all members.

    Parameters
    ----------
    accelerator : Accelerator
        Where the vectors are.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._begin, self._gather = [accelerator.threads(1, f"sum-{name}") for name in ("begin", "gather")]
        self._sums, self._exchanges = (
            _Threads(
                tuple(accelerator.threads(1, f"{of}-round-{number}") for number in range(MOST_ROUNDS)),
                accelerator.threads(1, f"{of}-share"),
                accelerator.threads(1, f"{of}-end"),
            )
            for of in ("sum", "exchange")
        )
        self._finish, self.device = accelerator.finish, accelerator.device
        self._added: list[Future[None]] = []
        self._under_way, self._bytes = 0, 0
        self._changed = Condition()

    def add(self, begin: Callable[[], Pending], n_bytes: int = 0) -> None:
        """Begin a sum after those added before, and end it when it is there; `wait` waits for it."""
        ended: Future[None] = Future()

        def end(pending: Pending) -> None:
            pending()
            self._finish()
            ended.set_result(None)

        self._added.append(ended)
        self._begin.submit(self._start, begin, n_bytes, self._sums, end, ended)

    def exchange(self, begin: Callable[[], Pending]) -> Callable[[], None]:
        """Begin a sum that those added later may overtake; the call of the result ends it, in the caller's thread.

        Its bytes take no room from theirs: it may be under way for steps.
        """
        arrived: Future[Pending] = Future()

        def end(pending: Pending) -> None:
            pending.arrive()
            self._finish()
            arrived.set_result(pending)

        def take() -> None:
            pending = arrived.result()
            pending()
            self._finish()

        self._begin.submit(self._start, begin, 0, self._exchanges, end, arrived)
        return take

    def _start(
        self,
        begin: Callable[[], Pending],
        n_bytes: int,
        threads: _Threads,
        end: Callable[[Pending], None],
        future: Future[Any],
    ) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._room(n_bytes))
            self._under_way, self._bytes = self._under_way + 1, self._bytes + n_bytes
        with self._told(future):
            pending = begin()
            done = self._gather.submit(pending.gather)
            for thread, part in zip(threads.rounds, pending.rounds, strict=False):
                done = thread.submit(self._after, done, part)
            done = threads.share.submit(self._after, done, pending.share)
            threads.end.submit(self._end, pending, done, n_bytes, end, future)
            return
        self._leave(n_bytes)

    def _room(self, n_bytes: int) -> bool:
        small = self._bytes + n_bytes <= BYTES_UNDER_WAY and self._under_way < MOST_UNDER_WAY
        return self._under_way < SUMS_UNDER_WAY or small

    @staticmethod
    def _after(before: Future[None], part: Callable[[], None]) -> None:
        before.result()
        part()

    def _end(
        self,
        pending: Pending,
        before: Future[None],
        n_bytes: int,
        end: Callable[[Pending], None],
        future: Future[Any],
    ) -> None:
        with self._told(future):
            before.result()
            end(pending)
        self._leave(n_bytes)

    def _leave(self, n_bytes: int) -> None:
        with self._changed:
            self._under_way, self._bytes = self._under_way - 1, self._bytes - n_bytes
            self._changed.notify()

    @staticmethod
    @contextmanager
    def _told(future: Future[Any]) -> Iterator[None]:
        """Tell whoever waits for a sum what went wrong with it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised where the sum is waited for
            future.set_exception(error)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Do something between two begins, after all sums added so far have ended."""
        before = list(self._added)

        def run() -> T:
            for done in before:
                done.result()
            return job()

        return self._begin.submit(run)

    def wait(self) -> None:
        """Return when the sums added so far have ended; raise what went wrong in them."""
        added, self._added = self._added, []
        for done in added:
            done.result()

    def close(self) -> None:
        """End the threads."""
        for threads in (self._sums, self._exchanges):
            for thread in (self._begin, self._gather, *threads.rounds, threads.share, threads.end):
                thread.shutdown()
