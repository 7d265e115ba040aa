"""A process group whose messages arrive as late as given links would bring them: no privilege, any system, one machine.

Every message carries the time at which its last byte would have arrived: a pair's messages leave one after the other at
the link's rate, then travel for the latency. The receiver waits until then, in real time (*paced*) or on a clock that
only counts (*virtual*: nothing is slept, compute takes the seconds one says it takes). What this leaves out is TCP:
windows, slow start, lost packets, and that several processes share cores.

Collectives are built from such messages (ring for sums and gathers, direct for broadcasts), so that their times follow
from the links too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store
from torch.futures import Future

STAMP_TAG = 1 << 30
"""Added to a message's tag for the eight bytes that carry its time of arrival."""
_COLLECTIVE_TAG = 1 << 29
_TAGS = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What one direction of a link gives: one-way latency [s] and rate [bytes/s]."""

    latency_s: float
    bytes_per_s: float


class Clock(Protocol):
    """Time as a group sees it."""

    def now_s(self) -> float:
        """Seconds from a start that all ranks share."""

    def wait_until(self, time_s: float) -> None:
        """Return when it is that late."""


class RealClock:
    """The machine's monotonic clock, which all its processes share."""

    def now_s(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()

    def wait_until(self, time_s: float) -> None:
        """Sleep until then."""
        left_s = time_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class VirtualClock:
    """A clock that only moves when it is told to, or when a message from later arrives; one for each rank.

    Exact for ranks that use one thread: a rank's time is then the longest path through its computations and messages.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since all ranks started."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Compute for so many seconds."""
        with self._lock:
            self._now_s += seconds

    def wait_until(self, time_s: float) -> None:
        """Move on to that time, if it is later."""
        with self._lock:
            self._now_s = max(self._now_s, time_s)


class Pacer:
    """One direction of one link: messages leave one after the other."""

    def __init__(self, shape: LinkShape, clock: Clock) -> None:
        self._shape, self._clock = shape, clock
        self._free_at_s = float("-inf")
        self._lock = threading.Lock()

    def arrival_s(self, n_bytes: int) -> float:
        """When a message handed over now has arrived with its last byte."""
        with self._lock:
            start_s = max(self._clock.now_s(), self._free_at_s)
            self._free_at_s = start_s + n_bytes / self._shape.bytes_per_s
            return self._free_at_s + self._shape.latency_s


class ShapedReceipt(dist._Work):
    """A receive that is complete when its bytes are there and its time has come: the latest of its tensors' stamps."""

    def __init__(self, works: list, stamp: torch.Tensor, clock: Clock, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._stamp, self._clock, self._tensors = works, stamp, clock, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message has arrived; gloo's error if it cannot."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        self._works = []
        self._clock.wait_until(float(self._stamp.max()))
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works) and self._clock.now_s() >= float(self._stamp.max())


class ShapedSending(dist._Work):
    """A send; complete when the bytes are out of the sender's hands."""

    def __init__(self, works: list, keep: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._keep = works, keep

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the tensor may be written to again."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        self._works, self._keep = [], []
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


class _Done(dist._Work):
    """A collective under way in the group's thread."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future:
        return self._future


_SUMS: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.PRODUCT: torch.Tensor.mul_,
}


class ShapedGroup(dist.ProcessGroup):
    """A process group over gloo whose messages take the time that given links would need.

    Parameters
    ----------
    group : ProcessGroupGloo
        Carries the bytes.
    shapes : mapping of rank to LinkShape
        The way from this rank to each other rank of the group; a rank not named is reached at once.
    clock : Clock
        `RealClock` (paced) or `VirtualClock` (counting).
    """

    def __init__(self, group: Any, shapes: Mapping[int, LinkShape], clock: Clock | None = None) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the stub lacks this constructor
        self._rank, self._size = group.rank(), group.size()
        self._group = group
        self.clock: Clock = clock if clock is not None else RealClock()
        self._pacers = {peer: Pacer(shape, self.clock) for peer, shape in shapes.items()}
        self._thread: ThreadPoolExecutor | None = None
        self._collectives = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """`shaped`."""
        return "shaped"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> ShapedSending:
        """Start sending tensors to a rank."""
        works, keep = [], list(tensors)
        for tensor in tensors:
            pacer = self._pacers.get(peer)
            arrival_s = pacer.arrival_s(tensor.nbytes) if pacer else self.clock.now_s()
            stamp = torch.tensor([arrival_s], dtype=torch.float64)
            keep.append(stamp)
            works += [self._group.send([stamp], peer, tag + STAMP_TAG), self._group.send([tensor], peer, tag)]
        return ShapedSending(works, keep)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> ShapedReceipt:
        """Post a receive from a rank."""
        stamp = torch.zeros(len(tensors), dtype=torch.float64)
        works = []
        for place, tensor in enumerate(tensors):
            works.append(self._group.recv([stamp[place : place + 1]], peer, tag + STAMP_TAG))
            works.append(self._group.recv([tensor], peer, tag))
        return ShapedReceipt(works, stamp, self.clock, list(tensors))

    def _collective(self, body: Callable[[int], None], result: Any) -> _Done:
        """Do something with messages in the group's thread, collectives one after the other."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shaped")
        self._collectives += 1
        first_tag = _COLLECTIVE_TAG + (self._collectives * 4 * self._size) % _TAGS
        future: Future = Future()

        def job() -> None:
            try:
                body(first_tag)
            except RuntimeError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if isinstance(self.clock, VirtualClock):
            job()  # in the rank's own thread, so that its clock waits for the end
        else:
            self._thread.submit(job)
        return _Done(future)

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, tag: int) -> None:
        """Send to the next rank of the ring what the previous one sends likewise."""
        receipt = self.recv([received], (self._rank - 1) % self._size, tag)
        sending = self.send([sent], (self._rank + 1) % self._size, tag)
        receipt.wait()
        sending.wait()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        """Ring all-reduce: 2 (p - 1) rounds of one p-th."""
        operation = opts.reduceOp if opts is not None else ReduceOp.SUM
        combine = next((f for op, f in _SUMS.items() if operation == op), None)
        if combine is None:
            raise RuntimeError(f"shaped group: found all-reduce of {operation}, expected SUM, AVG, MAX, MIN or PRODUCT")

        def body(tag: int) -> None:
            for tensor in tensors:
                flat = tensor.contiguous().view(-1)
                parts = list(flat.tensor_split(self._size))
                for step in range(self._size - 1):
                    mine = parts[(self._rank - step) % self._size]
                    target = parts[(self._rank - step - 1) % self._size]
                    received = torch.empty_like(target)
                    self._exchange(mine, received, tag + step)
                    combine(target, received)
                for step in range(self._size - 1):
                    mine = parts[(self._rank + 1 - step) % self._size]
                    self._exchange(mine, parts[(self._rank - step) % self._size], tag + self._size + step)
                if operation == ReduceOp.AVG:
                    flat /= self._size
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.view_as(tensor))

        return self._collective(body, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Done:  # type: ignore[override]
        """From the root to each other rank directly."""
        root = opts.rootRank

        def body(tag: int) -> None:
            for tensor in tensors:
                if self._rank == root:
                    others = [peer for peer in range(self._size) if peer != root]
                    for sending in [self.send([tensor], peer, tag) for peer in others]:
                        sending.wait()
                else:
                    self.recv([tensor], root, tag).wait()

        return self._collective(body, tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        """Ring all-gather: p - 1 rounds of one rank's tensor."""

        def body(tag: int) -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                parts[self._rank].copy_(own)
                for step in range(self._size - 1):
                    mine = parts[(self._rank - step) % self._size].contiguous()
                    target = parts[(self._rank - step - 1) % self._size]
                    received = torch.empty(target.shape, dtype=target.dtype)
                    self._exchange(mine, received, tag + step)
                    target.copy_(received)

        return self._collective(body, outputs)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> _Done:
        parts = [part.view_as(own) for part in output.view(-1).tensor_split(self._size)]
        return self.allgather([parts], [own], opts)

    def barrier(self, opts: Any = None) -> _Done:
        """A sum of one number."""
        return self.allreduce([torch.zeros(self._size)])


def register_shaped_backend(
    shape: Callable[[int, int], LinkShape | None], clock: Clock | None = None, name: str = "shaped"
) -> None:
    """Make ``torch.distributed.init_process_group("shaped")`` give a `ShapedGroup`.

    Parameters
    ----------
    shape : callable of (source, target)
        What the way from one rank to another is given; None: nothing.
    """

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> ShapedGroup:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 2
        options._timeout = timeout
        gloo = ProcessGroupGloo(PrefixStore("shaped", store), rank, size, options)
        shapes = {peer: found for peer in range(size) if peer != rank and (found := shape(rank, peer)) is not None}
        return ShapedGroup(gloo, shapes, clock)

    dist.Backend.register_backend(name, create, devices=["cpu"])
