"""Processes of their own in which plans are priced: what-ifs take no turn from the server, nor it from them.

Questions go through a socket and answers come back by the number of the question, those in parts part by part. What was
asked in one turn of the server's loop goes in one message, and so do its quick answers; the others are answered in
threads beside them (`Lines`). The first process starts with the first question and answers all that are not
quick; more, up to one a core, start where many wait, and share the quick ones. They are forked from one that has loaded
what pricing needs and has no threads. A process keeps the plans that it was last asked about, ends when the socket
closes (so with the server, however that ends), and is started anew if it is lost.

In the server all of it happens in the event loop: no thread wakes for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from asyncio import Future, Task
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, cast

import orjson
from anyio import from_thread
from fastapi.concurrency import run_in_threadpool

from polygon.domain.errors import PolygonError
from polygon.domain.message import Language
from polygon.web import questions
from polygon.web.answers import Answers, compact
from polygon.web.sliders import Changes

log = logging.getLogger(__name__)

MOST_PLANS = 32
"""Plans kept ready to be priced."""
TRIES = 2
"""Of a question with which the process is lost."""
MOST_PROCESSES = 4
"""However many cores there are."""

TOGETHER_S = 0.008
"""For which an answer waits for those asked with it: each message wakes the server, which answers and asks the next
while the process works on those that it still has."""

LONG_LINES = 3
"""In which plans wait for what takes long, a minute where they are large: an export waits for none, and a small plan
not for a large one that somebody has left."""

LENGTH = struct.Struct("!i")
"""Before each message, as `Connection` of the standard library has it."""

Tell = Callable[[bytes], None]
Answer = tuple[int, "bytes | Exception", bool]
"""Number of the question, the answer or a part of it, and whether it is the last."""

# Not forked from the server, which has threads and a database open, but from a process that has only loaded what is
# needed to price: one more is there at once, and costs what it changes in memory.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["polygon.web.pricing_ready"])


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about a plan."""

    plan: str
    """What tells it from every other plan."""
    what: str
    """One of `questions.QUESTIONS`."""
    language: Language = "en"
    changes: str = "{}"
    """JSON of `Changes`."""
    arguments: tuple[tuple[str, Any], ...] = ()
    file: tuple[str, Mapping[str, Any]] | None = None
    """The plan's file and the changes that made it, for a process that does not have it."""

    @property
    def quick(self) -> bool:
        """Whether somebody at a slider waits for it: it is answered while others are worked on."""
        if self.what == "view" and ("bound", False) not in self.arguments:
            return questions.is_bound_quick(orjson.loads(self.changes))
        return self.what in questions.QUICK


class NoPlanError(Exception):
    """The process does not have the plan yet, or no more."""


class LostError(Exception):
    """The process has ended before it answered."""


class Pricing:
    """The processes, seen from the server; everything but `start` is called in its event loop.

    Parameters
    ----------
    read : callable
        From what tells a plan to its file and the changes that made it; raises what is to be said where there is none.
    """

    def __init__(self, read: Callable[[str], tuple[str, Mapping[str, Any]]]) -> None:
        self._read = read
        self._workers: list[_Worker] = []
        self._starting: Task[None] | None = None
        self._most = min(MOST_PROCESSES, os.cpu_count() or 1)

    def start(self) -> None:
        """Have a process ready before the first question; called in a thread of the event loop's pool."""
        if not self._workers:
            from_thread.run_sync(self._begin)

    def _begin(self) -> Task[None]:
        """One more process, unless one is starting."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._add())
        return self._starting

    async def _add(self) -> None:
        worker = await _Worker.started()  # meanwhile the list may be another
        self._workers.append(worker)

    def grow(self) -> None:
        """Start another, unless one is starting or every core has one; it is asked once it is ready."""
        if 0 < len(self._workers) < self._most:
            self._begin()

    @property
    def processes(self) -> int:
        """How many answer quick questions."""
        return max(1, len(self._workers))

    @property
    def rests(self) -> bool:
        """Whether nothing waits for its answer."""
        return not any(worker.waiting() for worker in self._workers)

    async def ask(self, question: Question, tell: Tell | None = None) -> bytes:
        """The answer as JSON; `tell` hears of its parts.

        Raises
        ------
        PolygonError
            As the question does.
        LostError
            Where the process is lost again and again.
        """
        for attempt in range(TRIES):
            worker = await self._running(quick=question.quick)
            try:
                try:
                    return await worker.ask(question, tell)
                except NoPlanError:
                    file = await run_in_threadpool(self._read, question.plan)
                    return await worker.ask(replace(question, file=file), tell)
            except LostError:
                if attempt + 1 == TRIES:
                    raise
        raise AssertionError

    async def _running(self, *, quick: bool) -> _Worker:
        """The first process, or for what is quick the least busy."""
        while not (alive := [worker for worker in self._workers if not worker.lost]):
            self._workers = alive
            await asyncio.shield(self._begin())
        self._workers = alive
        return min(alive if quick else alive[:1], key=_Worker.waiting)

    async def close(self) -> None:
        """End the processes."""
        if self._starting is not None:
            await self._starting
        for worker in self._workers:
            worker.close()
            worker.process.terminate()
            await run_in_threadpool(worker.process.join)


class _Worker(asyncio.Protocol):
    """One life of a process."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._asked: dict[int, tuple[Future[bytes], Tell | None]] = {}
        self._numbers = 0
        self._together: list[tuple[int, Question]] = []
        self._read = bytearray()

    @classmethod
    async def started(cls) -> _Worker:
        """A process that waits for questions."""

        def begin() -> tuple[socket.socket, Any]:
            ours, theirs = CONTEXT.Pipe()
            with ours, theirs:
                process = CONTEXT.Process(target=work, args=(theirs,), name="pricing", daemon=True)
                process.start()
                return socket.socket(fileno=os.dup(ours.fileno())), process

        own, process = await run_in_threadpool(begin)
        own.setblocking(False)
        _, worker = await asyncio.get_running_loop().create_connection(lambda: cls(process), sock=own)
        return worker

    def waiting(self) -> int:
        """Questions that wait for their answers."""
        return len(self._asked)

    def ask(self, question: Question, tell: Tell | None) -> Future[bytes]:
        """The answer, once it is there."""
        if self.lost or self._transport is None:
            raise LostError
        self._numbers += 1
        loop = asyncio.get_running_loop()
        future: Future[bytes] = loop.create_future()
        self._asked[self._numbers] = future, tell
        # What is asked in one turn of the loop goes together: so it is read, and so it is answered.
        if not self._together:
            loop.call_soon(self._send)
        self._together.append((self._numbers, question))
        return future

    def _send(self) -> None:
        """Hand over what was asked since the last time."""
        message = pickle.dumps(self._together, pickle.HIGHEST_PROTOCOL)
        self._together.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((LENGTH.pack(len(message)), message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what writes to the process."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Tell who asked, once an answer is whole."""
        self._read += data
        while len(self._read) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            answers = pickle.loads(memoryview(self._read)[LENGTH.size : end])
            del self._read[:end]
            for number, answer, last in answers:
                self._hear(number, answer, last=last)

    def _hear(self, number: int, answer: bytes | BaseException, *, last: bool) -> None:
        """Tell who asked."""
        future, tell = self._asked[number]
        if not last:
            if tell is not None and isinstance(answer, bytes):
                tell(answer)
            return
        del self._asked[number]
        if future.done():
            return  # who asked no longer waits
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def close(self) -> None:
        """Ask nothing more."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """The process has ended."""
        self.lost = True
        for future, _tell in self._asked.values():
            if not future.done():
                future.set_exception(LostError())


# In the process


class Lines:
    """Threads that each answer one question after another: one those of all plans that take seconds at most, the others
    those that take long (`questions.LONG`), of a plan in turn, as each goes on from what the last has found."""

    def __init__(self, answer: Callable[[int, Question], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._queues = [SimpleQueue[tuple[int, Question]]() for _ in range(1 + LONG_LINES)]
        self._waiting: list[Counter[str]] = [Counter() for _ in self._queues]
        for line in range(len(self._queues)):
            threading.Thread(target=self._work, args=(line,), daemon=True).start()

    def put(self, number: int, asked: Question) -> None:
        """Have it answered: what takes long where its plan waits already, else where fewest wait."""
        with self._lock:
            line = min(range(1, len(self._queues)), key=self._order(asked.plan)) if asked.what in questions.LONG else 0
            self._waiting[line][asked.plan] += 1
        self._queues[line].put((number, asked))

    def _order(self, plan: str) -> Callable[[int], tuple[bool, int]]:
        return lambda line: (not self._waiting[line][plan], self._waiting[line].total())

    def _work(self, line: int) -> None:
        while True:
            number, asked = self._queues[line].get()
            self._answer(number, asked)
            with self._lock:
                self._waiting[line][asked.plan] -= 1
                self._waiting[line] += Counter()  # without those that wait no more


def work(pipe: Connection) -> None:
    """Answer what comes through the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the server ends this one
    plans, sending = Answers(MOST_PLANS), threading.Lock()

    def send(*answers: Answer) -> None:
        with sending, contextlib.suppress(OSError):  # the server has ended; so will this
            pipe.send(answers)

    def answer(number: int, asked: Question) -> Answer:
        def loaded() -> questions.Loaded:
            if asked.file is None:
                raise NoPlanError
            return questions.load(*asked.file)

        try:
            changes = Changes.model_validate_json(asked.changes)
            found = questions.answer(asked.what, plans.get(asked.plan, loaded), changes, dict(asked.arguments))
            if not isinstance(found, Iterator):
                return number, compact(found, asked.language), True
            whole = b""
            for part in found:
                whole = compact(part, asked.language)
                send((number, whole, False))
            return number, whole, True
        except (PolygonError, NoPlanError) as error:
            return number, error, True
        except Exception as error:  # a fault of ours: said here, where its traceback is, and to who asked
            log.exception("%s of plan %s", asked.what, asked.plan)
            return number, RuntimeError(repr(error)), True

    slow = Lines(lambda number, asked: send(answer(number, asked)))
    more = select.poll()
    more.register(pipe, select.POLLIN)
    ready: list[Answer] = []
    since_s = 0.0
    with contextlib.suppress(EOFError, OSError):
        while True:
            for number, asked in pipe.recv():
                if not asked.quick:
                    slow.put(number, asked)
                    continue
                if not ready:
                    since_s = time.monotonic()
                ready.append(answer(number, asked))
                if time.monotonic() - since_s > TOGETHER_S:
                    send(*ready)
                    ready.clear()
            # What was asked meanwhile is worked out before these answers go, as long as they have waited for little.
            if ready and not more.poll(0):
                send(*ready)
                ready.clear()
