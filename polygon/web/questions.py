"""What is asked about a plan, by name: from a loaded plan and changes to the plain data of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polygon.api import planner, plans
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export
from polygon.export.launch_hosts import read_hosts
from polygon.export.predicted import predicted_trace
from polygon.export.targets import export
from polygon.formats.convert_plan import plan_data, plan_from_spec
from polygon.formats.schema import PlanSpec, check
from polygon.formats.serialization import format_json, parse_json
from polygon.planning.limits import Limits, assumed, limits_as_found, replanned
from polygon.planning.search_engine import Effort, find_plan
from polygon.web import views
from polygon.web.jobs import problem_of
from polygon.web.sliders import Changes, keeps_bound, price
from polygon.web.strategies import compare
from polygon.web.timeline import timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A plan ready to be priced."""

    problem: Problem
    plan: Plan
    tables: CostTables
    beyond: Mapping[str, Any]
    """Changes of a variant that its plan file cannot say (`BEYOND`)."""
    found: list[Limits] = field(default_factory=list)
    """What limits it, once that was asked."""


BEYOND = ("algorithm", "chunk_mb", "overlap")
"""Changes that reach beyond what a plan can say; a variant is priced with them, files of it go without."""


def load(text: str, changes: Mapping[str, Any]) -> Loaded:
    """A plan file's text, and the changes that made it where it is a variant."""
    problem, plan, _ = plan_from_spec(check(PlanSpec, parse_json(text)))
    beyond = {key: changes[key] for key in BEYOND if key in changes}
    return Loaded(problem=problem, plan=plan, tables=CostTables(problem), beyond=beyond)


def own_changes(it: Loaded, changes: Changes) -> Changes:
    """Changes together with those that a variant has of its own."""
    if not it.beyond:
        return changes
    return Changes.model_validate({**it.beyond, **changes.model_dump(exclude_defaults=True)})


def view(it: Loaded, changes: Changes, *, bound: bool = True) -> Any:
    """Everything shown of a plan."""
    return views.view(price(it.problem, it.plan, changes, it.tables), bound=bound)


def rows(
    it: Loaded, changes: Changes, *, opened: tuple[int, ...], from_s: float, to_s: float | None, messages: bool
) -> Any:
    """The timeline, or a part of it."""
    priced = price(it.problem, it.plan, changes, it.tables)
    return timeline(priced, opened=frozenset(opened), from_s=from_s, to_s=to_s, messages=messages)


def exported(it: Loaded, target: str, *, hosts: str = "", name: str = "") -> Export:
    """Files for another system, whose hosts are a line a node.

    Raises
    ------
    InputError
        Where it cannot say the plan, and for hosts that are none.
    """
    own = read_hosts(hosts, it.problem.cluster, it.plan) if hosts.strip() else None
    result = export(it.problem, it.plan, target, hosts=own, tables=it.tables, name=name)
    if result is None:
        raise InputError(Message("reason.not_expressible", target=target))
    return result


def limits(it: Loaded, _: Changes) -> Iterator[Any]:
    """What limits the step, as it is found."""
    for now in it.found or limits_as_found(it.problem, it.plan, it.tables):
        if now.whole:
            it.found[:] = [now]
        yield now.to_dict()


def limit(it: Loaded, changes: Changes, *, index: int) -> Any:
    """What more of a limit would bring with another plan; None where there is none of that number."""
    if not it.found:
        deque(limits(it, changes), maxlen=0)
    [known] = it.found
    return replanned(it.problem, it.plan, it.tables, known.limits[index]) if index < len(known.limits) else None


def file(it: Loaded, _: Changes) -> Any:
    """The plan file as the command line writes it, with the bound and what is assumed."""
    own = plans.Plan(planner.Problem.of(it.problem), it.plan)
    # Of messages files keep kind and arguments, not their words in a language alone.
    return parse_json(format_json(plan_data(it.problem, it.plan, own.to_dict())))


QUESTIONS: dict[str, Callable[..., Any]] = {
    "file": file,
    "view": view,
    "timeline": rows,
    "export": lambda it, _, target, **more: exported(it, target, **more).to_dict(),
    "advice": lambda it, changes: views.advice(it.problem, it.plan, changes, it.tables),
    "sensitivities": lambda it, changes: views.sensitivities(it.problem, it.plan, changes, it.tables),
    "assumed": lambda it, _: assumed(it.problem, it.plan, it.tables),
    "alternatives": lambda it, _: compare(it.problem, it.plan, it.tables),
    "limits": limits,
    "limit": limit,
    "trace": lambda it, _: predicted_trace(it.problem, it.plan, it.tables),
}
"""By name; an answer that comes in parts is an iterator of what is known so far, the last being the whole."""

WORDED = frozenset(("view", "export", "advice"))
"""Questions whose answers have words of a language; the others' are the same in all, and worked out once for all."""

QUICK = frozenset(("view", "timeline"))
"""Questions that take milliseconds, the bound of a view apart."""


LONG = frozenset(("limits", "limit", "assumed"))
"""Questions that search, which of a large cluster takes minutes."""


def is_bound_quick(changes: Mapping[str, Any]) -> bool:
    """Whether the bound of a changed plan takes no longer than its price: where it is that of compute and path, of
    devices and a batch that were looked at before."""
    return not keeps_bound(changes) and not changes.keys() & {"device_factors", "accumulation"}


def answer(what: str, it: Loaded, changes: Changes, arguments: Mapping[str, Any]) -> Any:
    """The answer to a question of that name."""
    return QUESTIONS[what](it, own_changes(it, changes), **arguments)


def small_plan() -> tuple[Problem, Plan] | None:
    """A plan for two devices, whose search loads the compiled kernels."""
    nodes = [{"device": "t4", "count": 1, "devices_per_node": 2}]
    cluster = {"regions": [{"name": "a", "nodes": nodes}]}
    problem = problem_of({"cluster": cluster, "model": "opt-350m", "batch": {"global_batch": 4, "seq_len": 128}})
    effort = Effort(fluid_evaluations=20, exact_evaluations=2)
    plan = find_plan(problem, np.random.default_rng(0), effort=effort).plan
    return None if plan is None else (problem, plan)
