"""What a rank computes on: where its tensors lie, and in which order work that is handed over there gets done.

A GPU does later what threads hand over, stream by stream, and NCCL's `wait` holds up a stream and not the thread. Four
rules keep ranks from waiting for one another in a circle, and memory from being used twice:

- Every thread that hands work over has a stream of its own (`Accelerator.threads`): what one waits for holds up none of
  the others' work. On one stream a wait for a peer's later work would also hold up what the peer waits for.
- What a job finds was handed over before it was submitted, and is done first (an event).
- A job ends when the device has done its work: whoever waits for its result finds it there. What a job was given it
  holds until then, so that memory which another thread's stream owns is not used anew meanwhile (what `record_stream`
  is for); what it makes for itself belongs to its own stream.
- One thread issues the operations of a communicator, in an order that follows from the plan.

References
----------
NCCL user guide, "Using multiple NCCL communicators concurrently" and "Stream semantics".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroupGloo, Store

T = TypeVar("T")
Instant = Callable[[], float]
"""Seconds since the epoch at which work handed over before was done; the call waits for that."""


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Let what this thread hands over from now on be done after what was handed over before the event."""


class _Past:
    """Of a device on which everything is done at once."""

    def wait(self) -> None:
        """Nothing to wait for."""


PAST = _Past()


def gloo_group(store: Store, rank: int, size: int, devices: list, timeout_s: float) -> Any:
    """A gloo process group over the given network devices (one connection per pair and device)."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 2 * len(devices)
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


class Accelerator:
    """The host's own cores: what is handed over is done at once, and groups wait on the host (gloo)."""

    device = torch.device("cpu")
    later = False
    """Whether work is done later than it is handed over, by a device whose groups hold up streams and not threads."""

    def group(self, store: Store, rank: int, size: int, devices: list, timeout_s: float) -> Any:
        """A process group of ranks that this device reaches by itself; of all groups in one order on all of them.

        `devices` are gloo's network devices.
        """
        return gloo_group(store, rank, size, devices[:1], timeout_s)

    def direction(self, store: Store, place: int, devices: list, timeout_s: float) -> Any:
        """A process group of two for messages from the first to the second alone, where `later`."""
        raise NotImplementedError("messages between hosts go by groups that have tags (see polygon_comm.transport)")

    def threads(self, count: int, name: str) -> ThreadPoolExecutor:
        """Threads with a stream each."""
        return ThreadPoolExecutor(count, thread_name_prefix=name)

    def event(self) -> Event:
        """The place that this thread's work has come to."""
        return PAST

    def finish(self) -> None:
        """Return when what this thread has handed over is done."""

    def instant(self) -> Instant:
        """When what this thread has handed over is done."""
        now_s = time.time()
        return lambda: now_s

    def set_clock(self) -> None:
        """Bring the device's clock in line with the host's, after `finish`."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, once its values are there; holds up the thread, not the device."""
        return tensor

    def host_buffer(self, n_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from, and to, by itself."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host's tensor on the device, without holding up the thread; the host's must not change any more."""
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Give the memory of a whole storage back, after what was handed over."""
        tensor.untyped_storage().resize_(0)

    def fill_again(self, tensor: torch.Tensor) -> None:
        """Give a storage that was freed memory for the tensor's elements."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


class OrderedThreads(ThreadPoolExecutor):
    """Threads with a stream each: a job starts after what its submitter had handed over, and ends when it is done."""

    def __init__(self, accelerator: Accelerator, own_stream: Callable[[], None], count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name, initializer=own_stream)
        self._accelerator = accelerator

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As `ThreadPoolExecutor.submit`."""
        before = self._accelerator.event()

        def job() -> T:
            before.wait()
            result = fn(*args, **kwargs)
            self._accelerator.finish()
            return result

        return super().submit(job)


class CudaAccelerator(Accelerator):
    """A GPU: a stream for every thread, NCCL between ranks, pinned memory on the way to and from the host."""

    later = True

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.device = device
        self.set_clock()

    def _nccl(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupNCCL(store, rank, size, options)

    # A communicator is made with its first operation, which holds up the whole device: made at once, nobody waits.

    def group(self, store: Store, rank: int, size: int, devices: list, timeout_s: float) -> Any:
        """An NCCL communicator for collectives."""
        group = self._nccl(store, rank, size, timeout_s)
        group.allreduce([torch.zeros(1, device=self.device)]).wait()
        self.finish()
        return group

    def direction(self, store: Store, place: int, devices: list, timeout_s: float) -> Any:
        """An NCCL communicator for messages one way: its operations wait for one another, whichever way they go."""
        group = self._nccl(store, place, 2, timeout_s)
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        (group.recv if place else group.send)([token], 1 - place, 0).wait()
        self.finish()
        return group

    def _own_stream(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def threads(self, count: int, name: str) -> ThreadPoolExecutor:
        """Threads with a stream each."""
        return OrderedThreads(self, self._own_stream, count, name)

    def event(self) -> Event:
        """The place that this thread's stream has come to."""
        return torch.cuda.current_stream(self.device).record_event()

    def finish(self) -> None:
        """Sleep until this thread's stream is done."""
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self.device))
        done.synchronize()

    def instant(self) -> Instant:
        """By an event of this thread's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        zero, zero_s = self._zero, self._zero_s

        def seconds() -> float:
            event.synchronize()
            return zero_s + zero.elapsed_time(event) / 1e3

        return seconds

    def set_clock(self) -> None:
        """Count from now: events know milliseconds since another event, as a 32-bit number."""
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(self.device))
        self._zero.synchronize()
        self._zero_s = time.time()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        self.finish()
        return pinned

    def host_buffer(self, n_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """By way of pinned memory, where it is not in it."""
        return tensor.pin_memory().to(self.device, non_blocking=True)
