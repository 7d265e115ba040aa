"""Searches and explanations in the background: a few threads, a queue in the store, cancelling, limits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from polygon import catalogue
from polygon.convert import model_data, problem_from_spec
from polygon.convert_plan import plan_data, plan_from_spec
from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError, PolygonError, located
from polygon.domain.plan import Problem
from polygon.explain import explanation_data
from polygon.notation import format_json, parse_json
from polygon.planning.engine import Effort
from polygon.planning.explain import Explainer
from polygon.planning.frontier import find_within_limits
from polygon.planning.objectives import objective_named
from polygon.planning.whatif import sensitivities
from polygon.report import seconds
from polygon.schema import PlanSpec, ProblemSpec, check
from polygon.web.store import Job, Store

log = logging.getLogger(__name__)

WORKERS = 2
MOST_WAITING = 20
MOST_SECONDS = 600.0
USUAL_EXPLAIN_SECONDS = 60.0
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
        self._asking = threading.Lock()
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
        self._check_room()
        job = self.store.add(request)
        self._submit(job)
        return job

    def explain(self, plan: str, time_limit_s: float = USUAL_EXPLAIN_SECONDS) -> Job:
        """The job that explains a plan: the one that does, will, or has and left nothing out; else a new one.

        Raises
        ------
        InputError
            Where too many are waiting.
        """
        job = self.explanation_id(plan)
        with self._asking:
            found = self.store.get(job)
            whole = found is not None and (found.state in ("queued", "running") or self._whole(found))
            if not whole:
                self._check_room()
                self.store.add({"explain": plan, "time_limit_s": time_limit_s}, job=job)
                self._submit(job)
        found = self.store.get(job)
        assert found is not None
        return found

    def _whole(self, job: Job) -> bool:
        """Whether an explanation has ended with every question answered."""
        data = parse_json(self.store.result(job.id) or "{}")
        return job.state == "done" and not data.get("left_out") and not data.get("changes_left_out")

    @staticmethod
    def explanation_id(plan: str) -> str:
        """The job that explains a plan has an id made of the plan's."""
        return f"why-{plan}"[:40]

    def _check_room(self) -> None:
        if self.store.waiting() >= MOST_WAITING:
            raise InputError(f"jobs: found {MOST_WAITING} waiting, expected fewer (cancel one, or try again later)")

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
                work = self._explain if "explain" in found.request else self._search
                work(job, found.request, Progress(self.store, job, stop))
        except KeyboardInterrupt:
            if not self._closing.is_set():
                self.store.finish(job, "cancelled")
        except PolygonError as error:
            self.store.finish(job, "failed", error=str(error))
        except Exception as error:  # a job must end in a state, whatever happens
            log.exception("job %s", job)
            self.store.finish(job, "failed", error=f"internal error: {type(error).__name__}")
        finally:
            self._stop.pop(job, None)

    def _search(self, job: str, request: dict[str, Any], progress: Progress) -> None:
        progress.tell("", 0.0)
        problem = problem_of(request["problem"])
        seed = int(request.get("seed", 0))
        objective = objective_named(str(request.get("objective", "time")))

        def tell(phase: str, part: float, best: float) -> None:
            value = seconds(best) if objective.name == "time" else f"{best:.4g}"
            # A plain search has two halves; a series of searches counts its own.
            whole = part if ", memetic" in phase or ", exact" in phase else 0.5 * (part + phase.startswith("exact"))
            progress.tell(f"{phase}: {value}", whole)

        limit_s = min(float(request.get("time_limit_s", MOST_SECONDS)), MOST_SECONDS)
        effort = replace(EFFORTS[str(request.get("effort", "quick"))], time_limit_s=limit_s)
        tables = CostTables(problem)
        result = find_within_limits(problem, seed, objective=objective, effort=effort, tell=tell, tables=tables)
        if self._closing.is_set():
            return
        stopped = progress.stop.is_set()
        if result.plan is None:
            self.store.finish(job, "cancelled" if stopped else "infeasible", error=result.reason)
            return
        plan = replace(result.plan, seed=seed)
        priced = estimate(problem, plan, tables)
        text = format_json(plan_data(problem, plan, priced.to_dict()))
        self.store.finish(job, "cancelled" if stopped else "done", result=text, note=seconds(priced.step_s))

    def _explain(self, job: str, request: dict[str, Any], progress: Progress) -> None:
        progress.tell("", 0.0)
        problem, plan, _ = plan_from_spec(check(PlanSpec, parse_json(self.store.result(request["explain"]) or "")))
        tables = CostTables(problem)
        limit_s = float(request.get("time_limit_s", USUAL_EXPLAIN_SECONDS))
        began_s = time.monotonic()

        def left(part: float) -> Callable[[], float]:
            """Seconds until a part of the limit; none once it is to stop, which keeps the answers so far."""
            return lambda: 0.0 if progress.stop.is_set() else part * limit_s - (time.monotonic() - began_s)

        def tell(text: str, part: float) -> None:
            if not progress.stop.is_set():
                progress.tell(text, part)

        explainer = Explainer(problem, plan, tables)
        why = explainer.explain(seconds_left=left(0.5), tell=lambda text, part: tell(text, part / 2))
        what = sensitivities(
            problem, plan, tables=tables, seconds_left=left(1.0), tell=lambda text, part: tell(text, 0.5 + part / 2)
        )
        if self._closing.is_set():
            return
        data = explanation_data(plan, SimpleNamespace(bill=explainer.bill, why=why, what=what))
        self.store.finish(job, "cancelled" if progress.stop.is_set() else "done", result=format_json(data))


class Progress:
    """Tells a job's progress to the store, ten times a second at most, and stops the job when asked to."""

    def __init__(self, store: Store, job: str, stop: threading.Event) -> None:
        self.stop = stop
        self._store, self._job = store, job
        self._told_s = -1.0

    def tell(self, note: str, part: float) -> None:
        """How far the job is, 0 to 1.

        Raises
        ------
        KeyboardInterrupt
            Where it is to stop: the solvers' way to end with the best so far.
        """
        if self.stop.is_set():
            raise KeyboardInterrupt
        if time.monotonic() - self._told_s > 0.1:
            self._told_s = time.monotonic()
            self._store.tell(self._job, part, note)
