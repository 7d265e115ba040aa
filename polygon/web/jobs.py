"""Searches and explanations in the background: a few threads, a queue in the store, cancelling, limits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from polygon.api import planner, plans
from polygon.api.choices import Objective
from polygon.api.front import why_none
from polygon.cost.money import unpriced
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError, PolygonError, located
from polygon.domain.message import Message
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.formats.convert import model_data, problem_from_spec
from polygon.formats.convert_plan import plan_data, plan_from_spec
from polygon.formats.schema import PlanSpec, ProblemSpec, check
from polygon.formats.serialization import format_json, parse_json
from polygon.messages.explanation import explanation_data
from polygon.messages.report import seconds, valued
from polygon.planning.alternatives import Explainer
from polygon.planning.efforts import EFFORTS
from polygon.planning.frontier import FrontPoint, find_front
from polygon.planning.objectives import objective_named
from polygon.planning.rounds import cores
from polygon.planning.search_engine import Effort
from polygon.planning.what_ifs import sensitivities
from polygon.web.store import Store, StoredJob

log = logging.getLogger(__name__)

WORKERS = 2
"""Searches that run at a time."""
MOST_WAITING = 20
"""Searches that run or wait, of all users."""
MOST_WAITING_EACH = 10
"""Of one user where there are several."""
RETRY_S = 10
"""When one who was turned away may ask again: a quick search has ended by then."""
MOST_NAME = 120
"""Characters of a plan's name."""
MOST_SECONDS = 600.0
USUAL_EXPLAIN_SECONDS = 60.0


def plan_name(problem: Problem) -> str:
    """What a plan is called that nobody gave a name."""
    return " · ".join(filter(None, (problem.model.name, problem.cluster.name)))[:MOST_NAME]


def numbered_name(name: str, taken: Collection[str]) -> str:
    """The name, with the first number behind it that makes it unlike those taken."""
    number, own = 1, name
    while own in taken:
        number += 1
        own = f"{name[: MOST_NAME - 8]} · {number}"
    return own


def problem_of(data: Any) -> Problem:
    """The problem that a request poses, by the validator of files; its model may be a name of the catalogue."""
    if isinstance(data, dict) and isinstance(data.get("model"), str):
        with located("model: "):
            data = data | {"model": model_data(catalogue.model(data["model"]))}
    return problem_from_spec(check(ProblemSpec, data))


def _effort(request: Mapping[str, Any]) -> Effort:
    """How long to search: the limit is the search's alone. The bound is worked out for who looks at the plan."""
    limit_s = min(float(request.get("time_limit_s", MOST_SECONDS)), MOST_SECONDS)
    return replace(EFFORTS[request.get("effort", "quick")], time_limit_s=limit_s)


def _processes(effort: Effort) -> int:
    """For a search: its share of the cores, where it makes several that know nothing of one another."""
    return max(1, cores() // WORKERS) if len(effort.searches()) > 1 else 1


class BusyError(Exception):
    """Too much is waiting or running already."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message


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

    @property
    def rest(self) -> bool:
        """Whether none runs or waits."""
        return not self._stop

    def start(self, request: dict[str, Any]) -> str:
        """Queue a search.

        Raises
        ------
        InputError
            For a problem that is none.
        BusyError
            Where too many are waiting.
        """
        problem = problem_of(request["problem"])
        self._check_room(request.get("user", ""))
        name, user = request.get("name"), request.get("user", "")
        job = self.store.add(request | {"name": name or numbered_name(plan_name(problem), self.store.names(user))})
        self._submit(job)
        return job

    def explain(self, plan: str, time_limit_s: float = USUAL_EXPLAIN_SECONDS, user: str = "") -> StoredJob:
        """The job that explains a plan: the one that does, will, or has and left nothing out; else a new one.

        Raises
        ------
        BusyError
            Where too many are waiting.
        """
        job = self.explanation_id(plan)
        with self._asking:
            found = self.store.get(job)
            whole = found is not None and (found.state in ("queued", "running") or self._whole(found))
            if not whole:
                self._check_room(user)
                self.store.add({"explain": plan, "time_limit_s": time_limit_s, "user": user}, job=job)
                self._submit(job)
        found = self.store.get(job)
        assert found is not None
        return found

    def _whole(self, job: StoredJob) -> bool:
        """Whether an explanation has ended with every question answered."""
        data = parse_json(self.store.result(job.id) or "{}")
        return job.state == "done" and not data.get("left_out") and not data.get("changes_left_out")

    @staticmethod
    def explanation_id(plan: str) -> str:
        """The job that explains a plan has an id made of the plan's."""
        return f"why-{plan}"[:40]

    def _check_room(self, user: str) -> None:
        waiting = self.store.waiting()
        if waiting >= MOST_WAITING or (user and self.store.waiting(user) >= MOST_WAITING_EACH):
            raise BusyError(Message("refused.busy", jobs=waiting, seconds=RETRY_S))

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
                work = self._explain if "explain" in found.request else self._front if found.is_front else self._search
                work(job, found.request, JobProgress(self.store, job, stop))
        except KeyboardInterrupt:
            if not self._closing.is_set():
                self.store.finish(job, "cancelled")
        except PolygonError as error:
            said = error.message if isinstance(error, InputError) else str(error)
            self.store.finish(job, "failed", error=said)
        except Exception as error:  # a job must end in a state, whatever happens
            log.exception("job %s", job)
            self.store.finish(job, "failed", error=Message("error.internal", what=type(error).__name__))
        finally:
            self._stop.pop(job, None)

    def _search(self, job: str, request: dict[str, Any], progress: JobProgress) -> None:
        progress.tell("", 0.0)
        objective: Objective = request.get("objective", "time")
        effort = _effort(request)

        def tell(phase: Message, part: float, best: float) -> None:
            progress.tell(Message("phase.best", phase=phase, best=valued(objective, best)), part)

        result = planner.Problem.of(problem_of(request["problem"])).search(
            objective=objective,
            effort=effort,
            seed=int(request.get("seed", 0)),
            progress=tell,
            jobs=_processes(effort),
        )
        if self._closing.is_set():
            return
        stopped = progress.stop.is_set()
        if result.plan is None:
            self._without_plan(job, result.reason, stopped=stopped)
            return
        plan = result.plan
        # The bound and what is assumed take as long as the search: the processes that price add them to who asks.
        text = format_json(plan_data(plan.problem.data, plan.data, plan.to_dict(brief=True)))
        note = seconds(plan.evaluate().step_s)
        self.store.finish(job, "cancelled" if stopped else "done", result=text, note=note)

    def _without_plan(self, job: str, reason: Message | None, *, stopped: bool) -> None:
        """Nothing was found, for a reason; of a search that was stopped it says nothing."""
        state, why = ("cancelled", "") if stopped else ("infeasible", reason or "")
        self.store.finish(job, state, error=why)

    def _front(self, job: str, request: dict[str, Any], progress: JobProgress) -> None:
        """Plans of which none is beaten in time and money."""
        progress.tell("", 0.0)

        def tell(phase: Message, part: float, _: float) -> None:
            progress.tell(phase, part)  # of what mixes time and money the best has no unit

        problem, effort = planner.Problem.of(problem_of(request["problem"])), _effort(request)

        def points_of(found: Sequence[FrontPoint]) -> str:
            points = []
            for point in found:
                plan = plans.Plan(problem, point.plan)
                points.append(
                    {"step_s": point.bill.step_s, "usd": point.bill.usd, "energy_j": point.bill.energy_j,
                     "devices": plan.devices, "stages": plan.stages, "unpriced": unpriced(problem.data, point.plan),
                     "plan": plan_data(problem.data, point.plan, plan.to_dict(brief=True))}
                )  # fmt: skip
            return format_json({"points": points})

        found, collection = find_front(
            problem.data, int(request.get("seed", 0)), effort=effort, tell=tell, tables=problem.tables,
            met=lambda points: self.store.keep(job, points_of(points)), jobs=_processes(effort),
        )  # fmt: skip
        if self._closing.is_set():
            return
        stopped = progress.stop.is_set()
        if not found:
            self._without_plan(job, why_none(problem.data, collection), stopped=stopped)
            return
        state = "cancelled" if stopped else "done"
        self.store.finish(job, state, result=points_of(found), note=str(len(found)))

    def _explain(self, job: str, request: dict[str, Any], progress: JobProgress) -> None:
        progress.tell("", 0.0)
        problem, plan, _ = plan_from_spec(check(PlanSpec, parse_json(self.store.result(request["explain"]) or "")))
        tables = CostTables(problem)
        limit_s = float(request.get("time_limit_s", USUAL_EXPLAIN_SECONDS))
        began_s = time.monotonic()

        def left(part: float) -> Callable[[], float]:
            """Seconds until a part of the limit; none once it is to stop, which keeps the answers so far."""
            return lambda: 0.0 if progress.stop.is_set() else part * limit_s - (time.monotonic() - began_s)

        def tell(what: Message, part: float) -> None:
            if not progress.stop.is_set():
                progress.tell(what, part)

        row = self.store.get(request["explain"])
        objective = objective_named(row.request.get("objective", "time") if row is not None else "time")
        explainer = Explainer(problem, plan, tables, objective=objective)
        why = explainer.explain(seconds_left=left(0.5), tell=lambda idea, part: tell(idea, part / 2))
        what = sensitivities(
            problem, plan, tables=tables, objective=objective, seconds_left=left(1.0),
            tell=lambda change, part: tell(change, 0.5 + part / 2),
        )  # fmt: skip
        if self._closing.is_set():
            return
        answers = SimpleNamespace(bill=explainer.bill, measure=explainer.measure, why=why, what=what)
        data = explanation_data(problem, plan, answers)
        self.store.finish(job, "cancelled" if progress.stop.is_set() else "done", result=format_json(data))


class JobProgress:
    """Tells a job's progress to the store, ten times a second at most, and stops the job when asked to.

    What is told never goes back, though a phase may count its work anew: from it people are told what time is left.
    """

    def __init__(self, store: Store, job: str, stop: threading.Event) -> None:
        self.stop = stop
        self._store, self._job = store, job
        self._told_s, self._most = -1.0, 0.0

    def tell(self, note: Message | str, part: float) -> None:
        """How far the job is, 0 to 1.

        Raises
        ------
        KeyboardInterrupt
            Where it is to stop: the solvers' way to end with the best so far.
        """
        if self.stop.is_set():
            raise KeyboardInterrupt
        self._most = max(self._most, part)
        if time.monotonic() - self._told_s > 0.1:
            self._told_s = time.monotonic()
            self._store.tell(self._job, self._most, note)
