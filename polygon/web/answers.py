"""Answers as JSON, computed once however many ask for them, at the same time or later."""

from __future__ import annotations

import threading
from asyncio import wrap_future
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import orjson

from polygon.domain.message import Language, Message, say


def compact(data: Any, language: Language = "en") -> bytes:
    """JSON of plain data, numpy values and messages (as words of a language) on one line; NaN and infinities, which
    JSON lacks, become null."""

    def plain(value: Any) -> Any:
        """What orjson does not know: messages, mappings that are no dict, arrays that are not contiguous."""
        if isinstance(value, Message):
            return say(value, language) if value.arguments else _said(value.kind, language)
        return value.tolist() if isinstance(value, np.ndarray) else dict(value)

    return orjson.dumps(data, default=plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


@cache
def _said(kind: str, language: Language) -> str:
    """The words of a message that has no arguments."""
    return say(Message(kind), language)


class Answers:
    """The latest answers by what was asked.

    Equal questions that come while the first is being worked on wait for its answer. Errors are told to all who wait
    and are not kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Future[Any]] = OrderedDict()

    def get(self, asked: Hashable, work: Callable[[], Any]) -> Any:
        """The kept answer, or that of `work`, which is kept."""
        future, mine = self._place(asked)
        if mine:
            with self._settled(asked, future):
                future.set_result(work())
        return future.result()

    async def later(self, asked: Hashable, work: Callable[[], Awaitable[Any]]) -> Any:
        """The same where the work is waited for by an event loop."""
        future, mine = self._place(asked)
        if mine:
            with self._settled(asked, future):
                future.set_result(await work())
        return future.result() if future.done() else await wrap_future(future)

    def __contains__(self, asked: Hashable) -> bool:
        """Whether the answer is kept or being worked out."""
        with self._lock:
            return asked in self._kept

    def _place(self, asked: Hashable) -> tuple[Future[Any], bool]:
        """Where the answer is or will be, and whether the caller is to work it out."""
        with self._lock:
            future = self._kept.get(asked)
            if future is not None:
                self._kept.move_to_end(asked)
                return future, False
            future = self._kept[asked] = Future()
            future.set_running_or_notify_cancel()  # who no longer waits must not take it from the others
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return future, True

    @contextmanager
    def _settled(self, asked: Hashable, future: Future[Any]) -> Iterator[None]:
        """Tell an error of the work to all who wait, and forget it."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._kept.pop(asked, None)
            future.set_exception(error)
            raise
