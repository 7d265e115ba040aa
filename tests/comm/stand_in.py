"""A stand-in for a GPU and NCCL, on cores: work is done later than it is handed over, and waits hold up streams.

Every operation of torch that a thread with a stream calls goes into that stream, unless all before it is done; its
result holds NaN until the stream has come to it, so that whoever reads without having waited shows in the loss. A
communicator has one stream: an operation starts when the caller's stream has come to where it was issued, after those
issued before it, and a message waits for the peer's receive. `wait()` holds up the caller's stream. Streams and
communicators are late at random.

What it leaves out: that kernels share a device, which `most_running` stands for (so many communicators have
operations under way at once; those of further ones wait for them), and memory that is used again before a stream is
done.

Ranks that wait for one another in a circle are found by looking (`watched_ranks`): every thread of every rank sleeps,
and no stream moves. However slow the machine is, somebody who has work to do does not sleep.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
from polygon_comm.accelerator import PAST, Accelerator, OrderedThreads, gloo_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.patience import PATIENCE_S
from tests.real_ranks import CONTEXT, end_ranks, result_of, start_ranks

LOOK_S, LOOKS = 0.05, 40
"""All that is late is late by far less than so many looks take."""
DOING_BYTES, STREAMS, THREADS = 80, 48, 96
VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class Board:
    """What ranks show of themselves: how often any of their streams has moved, and what each waits for."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.moves = CONTEXT.RawArray("q", ranks)
        self.most_running = CONTEXT.RawArray("q", ranks)
        self.host_waits = CONTEXT.RawArray("q", ranks)
        self._threads = CONTEXT.RawArray("q", ranks * THREADS)
        self._doing = CONTEXT.RawArray("c", ranks * STREAMS * DOING_BYTES)

    def write(self, rank, stream, text):
        at = (rank * STREAMS + stream) * DOING_BYTES
        self._doing[at : at + DOING_BYTES] = text.encode()[: DOING_BYTES - 1].ljust(DOING_BYTES, b"\0")

    def add_thread(self, rank, number, native_id):
        self._threads[rank * THREADS + number] = native_id

    def sleeps(self, rank, pid):
        """Whether all threads of a rank sleep, or have ended, that work for its device or hand work to it."""
        for number in filter(None, self._threads[rank * THREADS : (rank + 1) * THREADS]):
            try:
                state = Path(f"/proc/{pid}/task/{number}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "SZX":
                return False
        return True

    def waiting(self):
        """By rank what its streams wait for."""
        found = {}
        for rank in range(self.ranks):
            for stream in range(STREAMS):
                at = (rank * STREAMS + stream) * DOING_BYTES
                text = self._doing[at : at + DOING_BYTES].rstrip(b"\0").decode()
                if text:
                    found.setdefault(rank, []).append(text)
        return found


class Stream:
    """Jobs that are done one after the other, by a thread."""

    def __init__(self, device, name):
        self.device, self.name = device, name
        self._jobs, self._changed, self._busy = deque(), threading.Condition(), False
        self.number = device.number_of(self)
        threading.Thread(target=self._run, name=f"stream-{name}", daemon=True).start()

    def put(self, job, text=""):
        with self._changed:
            self._jobs.append((job, text))
            self._changed.notify()

    @contextmanager
    def idle(self):
        """Whether all is done; nothing can be put until the block ends."""
        with self._changed:
            yield not self._jobs and not self._busy

    def _run(self):
        self.device.add_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs)
                job, text = self._jobs.popleft()
                self._busy = True
            if text:
                self.device.show(self, f"{self.name}: {text}")
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised where the device is waited for
                self.device.error = self.device.error or error
                text = ""
                self.device.show(self, f"{self.name}: {error!r}")
            if text:
                self.device.show(self, "")
            self.device.move()
            with self._changed:
                self._busy = False


class Place:
    """A place in a stream."""

    def __init__(self, device, what):
        self._device, self._what, self._passed, self.at_s = device, what, threading.Event(), 0.0

    def reach(self):
        self.at_s = time.time()
        self._passed.set()

    def passed(self):
        return self._passed.is_set()

    def hold(self):
        """Return when the stream has come here."""
        self._passed.wait()

    def wait(self):
        """Hold up this thread's stream."""
        if not self.passed():
            self._device.stream().put(self._passed.wait, f"waits for {self._what}")


class Work:
    """An operation of a communicator."""

    def __init__(self, done):
        self._done = done

    def wait(self, timeout=None):
        self._done.wait()
        return True

    def is_completed(self):
        return self._done.passed()


class Communicator:
    """A process group whose operations are done in the order in which they are issued here, one at a time."""

    def __init__(self, device, gloo, name):
        self._device, self._gloo, self._name, self._issued = device, gloo, name, 0
        self._stream = Stream(device, name)

    def _issue(self, what, *given):
        self._issued += 1
        name = f"{self._name} #{self._issued} {what}"
        before, done = self._device.event(), Place(self._device, name)
        # Tensors of this thread's own: torch does not expect its objects to end in another one meanwhile.
        given = tree_map_only(torch.Tensor, torch.Tensor.detach, given)

        def start():
            before.hold() if before is not PAST else None
            self._device.be_late()
            with self._device.running(self):
                getattr(self._gloo, what)(*given).wait()
            done.reach()

        self._device.queue(self)
        self._stream.put(start, name)
        return Work(done)

    def send(self, tensors, peer, tag=0):
        return self._issue("send", tensors, peer, tag)

    def recv(self, tensors, peer, tag=0):
        return self._issue("recv", tensors, peer, tag)

    def allreduce(self, tensors, options):
        return self._issue("allreduce", tensors, options)

    def reduce(self, tensors, options):
        return self._issue("reduce", tensors, options)

    def broadcast(self, tensors, options):
        return self._issue("broadcast", tensors, options)

    def allgather(self, outputs, inputs):
        return self._issue("allgather", outputs, inputs)

    def reduce_scatter(self, outputs, inputs):
        return self._issue("reduce_scatter", outputs, inputs)

    def alltoall_base(self, output, source, received, sent, options):
        return self._issue("alltoall_base", output, source, received, sent, options)


class Deferring(TorchDispatchMode):
    """Puts the operations of a thread into its stream."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._device.give(func, args, kwargs or {})


class Owed(NamedTuple):
    """Memory that is to be given back when a stream comes to it."""

    storage: object
    cancelled: list


class StandIn(Accelerator):
    """One rank's device.

    Parameters
    ----------
    rank, seed : int
        Of which rank, and how it is late.
    board : Board
    one_stream : bool
        All threads share a stream, as they do where nobody gives them one (CUDA's default).
    late_s : float
        Most seconds by which a communicator's operation, or now and then a stream, is late.
    most_running : int
        So many communicators can have operations under way at once, first come, first served.
    """

    later = True

    def __init__(self, rank, seed, board, *, one_stream=False, late_s=0.003, most_running=32):
        self._rank, self._board, self._one_stream, self._late_s = rank, board, one_stream, late_s
        self._random = random.Random(f"{seed} {rank}")
        self._most_running, self._running, self._lock = most_running, 0, threading.Lock()
        self._room, self._queued = threading.Condition(), {}
        self._streams, self._local, self._known, self._owed = [], threading.local(), {}, {}
        self.error, self._threads = None, 0
        self.add_thread()
        self._main = Stream(self, "main")
        self._local.stream = self._main
        self._patch()
        self.move()
        Deferring(self).__enter__()

    # What the streams need

    def number_of(self, stream):
        with self._lock:
            self._streams.append(stream)
            return len(self._streams) - 1

    def add_thread(self):
        with self._lock:
            self._threads += 1
            self._board.add_thread(self._rank, self._threads - 1, threading.get_native_id())

    def show(self, stream, text):
        if stream.number < STREAMS:
            self._board.write(self._rank, stream.number, text)

    def move(self):
        self._board.moves[self._rank] += 1

    def be_late(self):
        if self._random.random() < 0.5:
            time.sleep(self._random.uniform(0, self._late_s))

    def queue(self, communicator):
        """An operation is issued: its communicator gets one of the device's queues, when one is free."""
        with self._room:
            self._queued[communicator] = self._queued.get(communicator, 0) + 1

    @contextmanager
    def running(self, communicator):
        with self._room:
            self._room.wait_for(lambda: communicator in list(self._queued)[: self._most_running])
            self._running += 1
            self._board.most_running[self._rank] = max(self._board.most_running[self._rank], self._running)
        try:
            yield
        finally:
            with self._room:
                self._running -= 1
                self._queued[communicator] -= 1
                if not self._queued[communicator]:
                    del self._queued[communicator]
                self._room.notify_all()

    def stream(self):
        return self._local.stream

    # Accelerator

    def group(self, store, rank, size, devices, timeout_s):
        return Communicator(self, gloo_group(store, rank, size, devices[:1], timeout_s), f"group{len(self._streams)}")

    def direction(self, store, place, devices, timeout_s):
        return self.group(store, place, 2, devices, timeout_s)

    def _own_stream(self):
        self.add_thread()
        self._local.stream = self._main if self._one_stream else Stream(self, threading.current_thread().name)
        Deferring(self).__enter__()

    def threads(self, count, name):
        return OrderedThreads(self, self._own_stream, count, name)

    def event(self):
        stream = self.stream()
        with stream.idle() as idle:
            if idle:
                return PAST
            place = Place(self, f"{stream.name}")
            stream.put(place.reach)
        return place

    def finish(self):
        place = self.event()
        if place is not PAST:
            place.hold()
        if self.error is not None:
            raise RuntimeError("stand-in") from self.error

    def instant(self):
        place = self.event()
        if place is PAST:
            return super().instant()

        def seconds():
            place.hold()
            return place.at_s

        return seconds

    def to_host(self, tensor):
        copy = tensor.clone()
        self.finish()
        return copy

    def from_host(self, tensor):
        return tensor.clone()

    def free(self, tensor):
        owed = Owed(tensor.untyped_storage(), [])

        def give_back():
            with self._lock:
                if not owed.cancelled:
                    owed.storage.resize_(0)

        with self._lock:
            self._owed[owed.storage._cdata] = owed
        self.stream().put(give_back)

    def fill_again(self, tensor):
        storage = tensor.untyped_storage()
        with self._lock:
            owed = self._owed.pop(storage._cdata, None)
            if owed is not None:
                owed.cancelled.append(True)
            if not storage.nbytes():
                storage.resize_(tensor.numel() * tensor.element_size())

    # Operations

    def read(self):
        """The host wants to know a value: it waits for this thread's stream."""
        if getattr(self._local, "stream", None) is self._main:
            self._board.host_waits[self._rank] += 1
        self.finish()

    def _patch(self):
        """Let reads that torch does not dispatch wait too, in threads that have a stream."""
        device = self

        def waiting(function):
            def read(tensor, *args, **kwargs):
                if getattr(device._local, "stream", None) is not None:
                    device.read()
                return function(tensor, *args, **kwargs)

            return read

        torch.Tensor.tolist, torch.Tensor.numpy = waiting(torch.Tensor.tolist), waiting(torch.Tensor.numpy)

    def give(self, func, args, kwargs):
        """Do an operation if this thread's stream is idle, else put it there; its result."""
        stream = self.stream()
        if self._random.random() < 0.002:
            stream.put(self.be_late)
        flat, shape = tree_flatten((args, kwargs))
        if func.is_view or not any(isinstance(item, torch.Tensor) for item in flat):
            return func(*args, **kwargs)
        returned = func._schema.returns
        if any("Tensor" not in str(value.type) for value in returned):
            self.read()
            return func(*args, **kwargs)
        with stream.idle() as idle:
            if idle:
                return func(*args, **kwargs)
            result = self._result(func, args, kwargs, flat, shape)
            if result is not None:
                # What the tensors are is settled now, also of those that get other memory afterwards.
                given = tree_unflatten([x.detach() if isinstance(x, torch.Tensor) else x for x in flat], shape)
                targets = None if result[1] is None else [target.detach() for target in result[1]]
                stream.put(lambda: self._do(func, *given, targets))
                return result[0]
        self.read()
        return func(*args, **kwargs)

    def _result(self, func, args, kwargs, flat, shape):
        """What an operation will return, and which new tensors it has to fill; None where only doing it tells."""
        if func._schema.is_mutable:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            found = []
            for value in func._schema.returns:
                same = [
                    named[a.name]
                    for a in func._schema.arguments
                    if a.alias_info is not None and value.alias_info is not None
                    and a.alias_info.before_set == value.alias_info.before_set and a.name in named
                ]  # fmt: skip
                if not same:
                    return None
                found.append(same[0])
            return (found[0] if len(found) == 1 else tuple(found) if found else None), None
        key = (func, shape, *(_kind(item) for item in flat))
        try:
            known = self._known.get(key)
        except TypeError:
            key, known = None, None
        if known is None:
            try:
                known = func(*tree_map_only(torch.Tensor, _meta, args), **_to_meta(kwargs))
            except (NotImplementedError, RuntimeError):
                return None
            if func is torch.ops.aten.native_layer_norm.default:
                # What divides has 32 bits on GPUs, and so without memory; on cores it has those of the input.
                known = (known[0], *(part.to(args[0].dtype) for part in known[1:]))
            if key is not None:
                self._known[key] = known
        made = tree_map_only(torch.Tensor, _empty, known)
        return made, [item for item in tree_flatten(made)[0] if isinstance(item, torch.Tensor)]

    def _do(self, func, args, kwargs, targets):
        # As where torch hands operations to a mode: no graph is built, and nothing counts as changed a second time.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(VIEWS):
            done = func(*args, **kwargs)
            if targets is not None:
                found = [item for item in tree_flatten(done)[0] if isinstance(item, torch.Tensor)]
                for target, values in zip(targets, found, strict=True):
                    target.copy_(values)


def _kind(item):
    if isinstance(item, torch.Tensor):
        return item.dtype, tuple(item.shape), item.stride()
    return type(item), item


def _meta(tensor):
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _to_meta(kwargs):
    moved = tree_map_only(torch.Tensor, _meta, kwargs)
    return {key: torch.device("meta") if isinstance(value, torch.device) else value for key, value in moved.items()}


def _empty(meta):
    made = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype)
    return made.fill_(float("nan")) if made.is_floating_point() else made.zero_()


class HangError(Exception):
    """All ranks wait for one another; what for, by rank."""


def watched_ranks(function, n_ranks, *args):
    """What `function(rank, port, board, *args)` returns on every rank, and the board; `HangError` where they hang."""
    board = Board(n_ranks)
    started = start_ranks(function, n_ranks, board, *args)
    results, ends = {}, {end: rank for rank, (_, end) in enumerate(started)}
    asleep, before, end_s = 0, None, time.monotonic() + PATIENCE_S
    try:
        while ends:
            if time.monotonic() > end_s:
                raise TimeoutError(f"ranks {sorted(ends.values())} did not end")
            for end in wait(list(ends), timeout=LOOK_S):
                rank = ends.pop(end)
                results[rank] = result_of(end, rank)
            now = tuple(board.moves)
            still = now == before and all(now) and all(board.sleeps(r, started[r][0].pid) for r in ends.values())
            # Ranks that sleep and wait for nothing on their devices begin or end, as long as that takes.
            asleep, before = asleep + 1 if still and board.waiting() else 0, now
            if asleep >= LOOKS:
                raise HangError(board.waiting())
    finally:
        end_ranks(started, patient=len(results) == n_ranks)
    return [results[rank] for rank in range(n_ranks)], board
