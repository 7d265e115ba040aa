"""What the page's controls can ask next about a plan that was opened, answered while nobody waits for anything."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Task
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator

from fastapi import HTTPException

from polygon.domain.errors import PolygonError
from polygon.web.pricing import LostError, Question

log = logging.getLogger(__name__)

FAULTS = PolygonError, HTTPException, LostError, RuntimeError
"""Of a plan that is no more, of a process, of ours."""
MOST_PLANS = 8
"""That wait; those opened last are looked at first."""
MOST_S = 1.0
"""That a plan gets: of those that take long the first answers alone, for who asks meanwhile waits for one."""
PAUSE_S = 0.05
"""Between two looks whether all is quiet."""


class Ahead:
    """Answers questions one after another, each only while nothing else is asked or searched.

    Parameters
    ----------
    answer : callable
        Works an answer out and keeps it for who asks.
    quiet : callable
        Whether nobody waits for anything.
    """

    def __init__(self, answer: Callable[[Question], Awaitable[object]], quiet: Callable[[], bool]) -> None:
        self._answer, self._quiet = answer, quiet
        self._plans: OrderedDict[Hashable, Iterator[Question]] = OrderedDict()
        self._working: Task[None] | None = None

    def ask(self, plan: Hashable, questions: Iterator[Question]) -> None:
        """Answer these about a plan when there is time; called in the event loop."""
        self._plans[plan] = questions
        self._plans.move_to_end(plan)
        while len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._plans:
            plan, questions = self._plans.popitem()
            left_s = MOST_S
            for question in questions:
                while not self._quiet():
                    await asyncio.sleep(PAUSE_S)
                began_s = time.monotonic()
                try:
                    await self._answer(question)
                except FAULTS as error:  # who asks for it will hear it
                    log.info("nothing ahead of plan %s: %r", plan, error)
                    break
                left_s -= time.monotonic() - began_s
                if left_s < 0:
                    break

    def close(self) -> None:
        """Answer no more."""
        if self._working is not None:
            self._working.cancel()
