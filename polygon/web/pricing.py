"""Processes of their own in which plans are priced: what-ifs take no turn from the server, nor it from them.

Questions go through a pipe and answers come back by the number of the question, those in parts part by part. Quick ones
are answered as they come, the others one after another in a thread beside them. The first process starts with the first
question and answers all that are not quick; more, up to one a core, start where many wait, and share the quick ones. A
process keeps the plans that it was last asked about, ends when the pipe closes (so with the server, however that ends),
and is started anew if it is lost.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from polygon.domain.errors import PolygonError
from polygon.domain.message import Language
from polygon.web import questions, views
from polygon.web.answers import Answers, compact
from polygon.web.sliders import Changes

log = logging.getLogger(__name__)

MOST_PLANS = 32
"""Plans kept ready to be priced."""
TRIES = 2
"""Of a question with which the process is lost."""
MOST_PROCESSES = 4
"""However many cores there are."""

READY = 0
"""In place of a question's number: the kernels are loaded."""

Tell = Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about a plan."""

    job: str
    what: str
    """One of `questions.QUESTIONS`."""
    language: Language = "en"
    changes: str = "{}"
    """JSON of `Changes`."""
    arguments: tuple[tuple[str, Any], ...] = ()
    plan: tuple[str, Mapping[str, Any]] | None = None
    """The plan's file and the changes that made it, for a process that does not have it."""


class NoPlanError(Exception):
    """The process does not have the plan yet, or no more."""


class LostError(Exception):
    """The process has ended before it answered."""


class Pricing:
    """The processes, seen from the server.

    Parameters
    ----------
    read : callable
        From the id of a plan to its file and the changes that made it; raises what is to be said where there is none.
    """

    def __init__(self, read: Callable[[str], tuple[str, Mapping[str, Any]]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._most = min(MOST_PROCESSES, os.cpu_count() or 1)

    def start(self) -> None:
        """Have a process ready before the first question."""
        self._running(quick=False)

    def grow(self) -> None:
        """Start another, unless one is starting or every core has one; it is asked once it is ready."""
        with self._lock:
            if len(self._workers) < self._most and all(worker.ready for worker in self._workers):
                self._workers.append(_Worker())

    @property
    def processes(self) -> int:
        """How many answer quick questions."""
        return max(1, sum(worker.ready for worker in self._workers))

    def ask(self, question: Question, tell: Tell | None = None) -> bytes:
        """The answer as JSON; `tell` hears of its parts, from another thread.

        Raises
        ------
        PolygonError
            As the question does.
        LostError
            Where the process is lost again and again.
        """
        for attempt in range(TRIES):
            worker = self._running(quick=question.what in questions.QUICK)
            try:
                try:
                    return worker.ask(question, tell)
                except NoPlanError:
                    return worker.ask(replace(question, plan=self._read(question.job)), tell)
            except LostError:
                if attempt + 1 == TRIES:
                    raise
        raise AssertionError

    def _running(self, *, quick: bool) -> _Worker:
        """The first process, or for what is quick the least busy of those that are ready."""
        with self._lock:
            self._workers = [worker for worker in self._workers if not worker.lost] or [_Worker()]
            first, *others = self._workers
            return min((first, *(worker for worker in others if quick and worker.ready)), key=_Worker.waiting)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            for worker in self._workers:
                worker.close()


class _Worker:
    """One life of a process."""

    def __init__(self) -> None:
        # Not forked: the server has threads and a database open.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), name="pricing", daemon=True)
        self.process.start()
        theirs.close()
        self.ready, self.lost = False, False
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[Future[bytes], Tell | None]] = {}
        self._numbers = 0
        threading.Thread(target=self._listen, name="pricing", daemon=True).start()

    def waiting(self) -> int:
        """Questions that wait for their answers."""
        return len(self._asked)

    def ask(self, question: Question, tell: Tell | None) -> bytes:
        future: Future[bytes] = Future()
        with self._lock:
            if self.lost:
                raise LostError
            self._numbers += 1
            self._asked[self._numbers] = future, tell
            try:
                self._pipe.send((self._numbers, question))
            except OSError as error:
                raise LostError from error
        return future.result()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer, last = self._pipe.recv()
                if number == READY:
                    self.ready = True
                    continue
                future, tell = self._asked[number]
                if not last:
                    if tell is not None:
                        tell(answer)
                    continue
                del self._asked[number]
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        with self._lock:
            self.lost = True
            for future, _ in self._asked.values():
                future.set_exception(LostError())

    def close(self) -> None:
        self.process.terminate()
        self.process.join()
        self._pipe.close()


# In the process


def work(pipe: Connection) -> None:
    """Answer what comes through the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the server ends this one
    plans, sending = Answers(MOST_PLANS), threading.Lock()
    slow: SimpleQueue[tuple[int, Question]] = SimpleQueue()

    def send(number: int, answer: bytes | Exception, *, last: bool) -> None:
        with sending, contextlib.suppress(OSError):  # the server has ended; so will this
            pipe.send((number, answer, last))

    def answer(number: int, asked: Question) -> None:
        def loaded() -> questions.Loaded:
            if asked.plan is None:
                raise NoPlanError
            return questions.load(*asked.plan)

        try:
            changes = Changes.model_validate_json(asked.changes)
            found = questions.answer(asked.what, plans.get(asked.job, loaded), changes, dict(asked.arguments))
            whole = b""
            if isinstance(found, Iterator):
                for part in found:
                    whole = compact(part, asked.language)
                    send(number, whole, last=False)
            else:
                whole = compact(found, asked.language)
            send(number, whole, last=True)
        except (PolygonError, NoPlanError) as error:
            send(number, error, last=True)
        except Exception as error:  # a fault of ours: said here, where its traceback is, and to who asked
            log.exception("%s of plan %s", asked.what, asked.job)
            send(number, RuntimeError(repr(error)), last=True)

    def one_after_another() -> None:
        while True:
            answer(*slow.get())

    small = questions.small_plan()
    if small is not None:
        views.warm_up(*small)
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not look at it again and again
    send(READY, b"", last=True)
    threading.Thread(target=one_after_another, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, asked = pipe.recv()
            if asked.what in questions.QUICK:
                answer(number, asked)
            else:
                slow.put((number, asked))
