"""Searches in the background: a few threads, a queue in the store, cancelling, limits."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from polygon import catalogue
from polygon.convert import model_data, problem_from_spec
from polygon.convert_plan import plan_data
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError, PolygonError, located
from polygon.domain.plan import Problem
from polygon.notation import format_json
from polygon.planning.engine import Effort, find_plan
from polygon.report import seconds
from polygon.schema import ProblemSpec, check
from polygon.web.store import Store

log = logging.getLogger(__name__)

WORKERS = 2
MOST_WAITING = 20
MOST_SECONDS = 600.0
EFFORTS = {
    "quick": Effort(fluid_evaluations=1500, exact_evaluations=40, patience=600),
    "thorough": Effort(),
    "long": Effort(fluid_evaluations=100_000, exact_evaluations=2000, patience=20_000),
}
"""Quick answers in about a second for clusters of up to some hundred devices."""


def problem_of(data: Any) -> Problem:
    """The problem that a request poses, by the validator of files; its model may be a name of the catalogue."""
    if isinstance(data, dict) and isinstance(data.get("model"), str):
        with located("model: "):
            data = data | {"model": model_data(catalogue.model(data["model"]))}
    return problem_from_spec(check(ProblemSpec, data))


class Jobs:
    """Runs the searches of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="search")
        self._stop: dict[str, threading.Event] = {}
        self._closing = threading.Event()
        for job in store.unfinished():
            self._submit(job)

    def close(self) -> None:
        """Stop all searches; those not finished begin again with the next start."""
        self._closing.set()
        for event in list(self._stop.values()):
            event.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, request: dict[str, Any]) -> str:
        """Queue a search.

        Raises
        ------
        InputError
            For a problem that is none, and where too many are waiting.
        """
        problem_of(request["problem"])
        if self.store.waiting() >= MOST_WAITING:
            raise InputError(f"jobs: found {MOST_WAITING} waiting, expected fewer (cancel one, or try again later)")
        job = self.store.add(request)
        self._submit(job)
        return job

    def cancel(self, job: str) -> None:
        """Stop a search; the best plan so far is kept."""
        event = self._stop.get(job)
        if event is not None:
            event.set()

    def _submit(self, job: str) -> None:
        self._stop[job] = threading.Event()
        self._pool.submit(self._run, job)

    def _run(self, job: str) -> None:
        stop = self._stop[job]
        try:
            found = self.store.get(job)
            if found is not None:
                self._search(job, found.request, stop)
        except PolygonError as error:
            self.store.finish(job, "failed", error=str(error))
        except Exception as error:  # a job must end in a state, whatever happens
            log.exception("job %s", job)
            self.store.finish(job, "failed", error=f"internal error: {type(error).__name__}")
        finally:
            self._stop.pop(job, None)

    def _search(self, job: str, request: dict[str, Any], stop: threading.Event) -> None:
        problem = problem_of(request["problem"])
        seed = int(request.get("seed", 0))
        last = 0.0

        def tell(phase: str, part: float, best_s: float) -> None:
            nonlocal last
            if stop.is_set():
                raise KeyboardInterrupt  # the solvers' way to stop with the best so far
            if time.monotonic() - last > 0.1:
                last = time.monotonic()
                self.store.tell(
                    job, 0.5 * part + (0.5 if phase.startswith("exact") else 0.0), f"{phase}: {seconds(best_s)}"
                )

        self.store.tell(job, 0.0, "")
        if stop.is_set() and not self._closing.is_set():
            self.store.finish(job, "cancelled")
            return
        limit_s = min(float(request.get("time_limit_s", MOST_SECONDS)), MOST_SECONDS)
        effort = replace(EFFORTS[str(request.get("effort", "quick"))], time_limit_s=limit_s)
        tables = CostTables(problem)
        try:
            result = find_plan(problem, np.random.default_rng(seed), effort=effort, tell=tell, tables=tables)
        except KeyboardInterrupt:
            result = None
        if self._closing.is_set():
            return
        if result is None:
            self.store.finish(job, "cancelled")
        elif result.plan is None:
            self.store.finish(job, "cancelled" if stop.is_set() else "infeasible", error=result.reason)
        else:
            plan = replace(result.plan, seed=seed)
            text = format_json(plan_data(problem, plan, estimate(problem, plan, tables).to_dict()))
            self.store.finish(job, "cancelled" if stop.is_set() else "done", result=text)
