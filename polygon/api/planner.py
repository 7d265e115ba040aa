"""Problem: what is to be trained where, and the search for who does what."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from polygon.api.choices import METHODS, EffortName, Method, Objective, Status
from polygon.api.front import Front, nearest_bill, why_none
from polygon.api.inputs import Cluster, Model
from polygon.api.plans import Plan
from polygon.api.results import Milestone, Result
from polygon.bounds.lower_bound import LowerBound, lower_bound
from polygon.cost.calibration import Calibration
from polygon.cost.tables import CostTables, Profile
from polygon.domain import plan as domain_plan
from polygon.domain.clock import Clock
from polygon.domain.errors import one_of, require, require_number
from polygon.domain.groups import Groups
from polygon.domain.message import Message
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints
from polygon.domain.runtime import POLYGON, Runtime
from polygon.formats import catalogue, files
from polygon.formats.files import PathLike
from polygon.planning.efforts import EFFORTS, UNTIL_ROUNDS, times_thorough
from polygon.planning.exact import find_optimum
from polygon.planning.frontier import find_front, find_within_limits
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.objectives import objective_named
from polygon.planning.robust import surest
from polygon.planning.search_engine import Effort, Found
from polygon.planning.telling import Tell

BOUND_PART, MOST_BOUND_S = 0.15, 10.0
"""Of a time limit, what is kept for the bound, and the most: a search of 10,000 devices takes so long for it."""
BOUND_AFTER_INTERRUPT_S = 2.0
"""Seconds that the bound of an interrupted answer may take: who presses Ctrl-C wants what there is."""


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """Train this model with this batch on this cluster.

    Parameters
    ----------
    cluster : Cluster
    model : Model or str
        A string is a name of the catalogue.
    batch : Batch
    runtime : Runtime or str
        The program that is to execute the step, or its name in the catalogue; by default our own engine.
    constraints : Constraints
        What a plan must keep beside being possible: memory headroom, regions, budget, deadline, parity of the loss.
    profiles : sequence
        Measured layer times (`load`, `runners.profile_layers`) in place of the device model.
    calibration : Calibration, optional
        Factors fitted to real runs (`calibrate`).

    Raises
    ------
    InputError
        Where one is of another kind, or they do not fit together, as sequences that are longer than the model takes.

    Examples
    --------
    >>> from polygon import Batch, Cluster, Problem
    >>> node = {"device": "a100-40gb", "count": 1, "devices_per_node": 2}
    >>> pair = Cluster.from_dict({"regions": [{"name": "here", "nodes": [node]}]})
    >>> problem = Problem(pair, "opt-350m", Batch(global_batch=8, seq_len=512))
    >>> result = problem.search(effort="quick")
    >>> result.status, result.estimate.step_s >= problem.bound().seconds
    ('feasible', True)
    """

    cluster: Cluster
    model: Model
    batch: Batch
    runtime: Runtime
    constraints: Constraints
    profiles: tuple[Profile, ...]
    calibration: Calibration | None

    def __init__(
        self,
        cluster: Cluster,
        model: Model | str,
        batch: Batch,
        *,
        runtime: Runtime | str = POLYGON,
        constraints: Constraints | None = None,
        profiles: Iterable[Profile] = (),
        calibration: Calibration | None = None,
    ) -> None:
        given = {
            "cluster": cluster,
            "model": Model.from_catalogue(model) if isinstance(model, str) else model,
            "batch": batch,
            "runtime": catalogue.runtime(runtime) if isinstance(runtime, str) else runtime,
            "constraints": constraints or Constraints(),
            "profiles": (profiles,) if isinstance(profiles, str) else tuple(profiles),
            "calibration": calibration,
        }
        kinds = {"cluster": Cluster, "model": Model, "batch": Batch, "runtime": Runtime, "constraints": Constraints}
        for name, value in given.items():
            kind = kinds.get(name, object)
            require(isinstance(value, kind), name, value, f"a polygon.{kind.__name__}")
            object.__setattr__(self, name, value)
        for i, profile in enumerate(self.profiles):
            require(isinstance(profile, Profile), f"profiles[{i}]", profile, "one of those that polygon.load gives")
        known = calibration is None or isinstance(calibration, Calibration)
        require(known, "calibration", calibration, f"a polygon.{Calibration.__name__}")
        _ = self.data  # what does not fit together is said here, not by the first search

    def __getstate__(self) -> dict[str, Any]:
        """What was given, for another process: what was worked out of it is worked out there again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(
        cls, data: domain_plan.Problem, *, profiles: Iterable[Profile] = (), calibration: Calibration | None = None
    ) -> Problem:
        """The planner's record (of a file, of `Groups`) as a problem.

        Parameters
        ----------
        data : polygon.domain.plan.Problem
        profiles, calibration
            As of `Problem`.
        """
        return cls(
            Cluster(data.cluster),
            Model(data.model),
            data.batch,
            runtime=data.runtime,
            constraints=data.constraints,
            profiles=profiles,
            calibration=calibration,
        )

    @classmethod
    def from_file(cls, path: PathLike) -> Problem:
        """The problem of a file (docs/file-formats.md); its cluster may be another file, its model a name.

        Parameters
        ----------
        path : path

        Raises
        ------
        InputError
            With the file, the place in it, what was found and what is allowed.
        """
        return cls.of(files.read_problem(path))

    @cached_property
    def data(self) -> domain_plan.Problem:
        """The planner's record."""
        return domain_plan.Problem(
            cluster=self.cluster.data,
            model=self.model.data,
            batch=self.batch,
            constraints=self.constraints,
            runtime=self.runtime,
        )

    @cached_property
    def tables(self) -> CostTables:
        """What layers, links and memory cost, filled as they are asked for."""
        return CostTables(self.data, self.profiles, self.calibration)

    def bound(self) -> LowerBound:
        """What no plan can beat, whatever the search finds.

        Returns
        -------
        LowerBound
            ``seconds`` per step, the ``parts`` that prove it, and which of them is ``binding``.
        """
        return lower_bound(self.tables)

    def search(
        self,
        *,
        objective: Objective = "time",
        method: Method = "memetic",
        effort: EffortName | int | Effort = "thorough",
        until_gap: float | None = None,
        seed: int = 0,
        time_limit_s: float | None = None,
        groups: Groups | None = None,
        robust: bool = False,
        progress: Tell | None = None,
        configurations: PathLike | None = None,
        jobs: int = 1,
    ) -> Result:
        """Find the best plan.

        Parameters
        ----------
        objective : {'time', 'money', 'energy', 'tokens-per-usd'}
            What is best: least step time, least money or energy per step, or most tokens per dollar.
        method : {'memetic', 'grid3d', 'exhaustive'}
            A genetic algorithm with local search; every uniform split of all devices; or every allocation of a small
            problem, which proves the best (time only).
        effort : {'quick', 'thorough', 'long'}, int or Effort
            How long to search, in evaluations: the same seed and effort give the same plan. A number N is the best of N
            thorough searches with generators of their own: never worse than a smaller one. grid3d looks at all.
        until_gap : float, optional
            Search again until the step is no more than this part above the bound (time only): N times at most, or 32
            where the effort is a name.
        seed : int
        time_limit_s : float, optional
            Of the whole answer: stop after about so many seconds with the best so far; then a seed may give another
            plan another time. A part is kept for the bound (`Plan.bound`), which is weaker where it takes longer. A
            first plan is made however short the limit.
        groups : Groups, optional
            Which devices form which stage (``polygon init``): where the memetic search begins.
        robust : bool
            Take the plan whose interval ends first (``estimate.high_s``) of those that the search met, and of nearly
            equal ones the simplest; time only.
        progress : callable, optional
            Told the phase, the part of it that is done (0 to 1) and the best value so far. It may raise
            KeyboardInterrupt, which ends the search with the best so far.
        configurations : path, optional
            grid3d: where every configuration goes, priced (JSON).
        jobs : int
            Memetic: processes that search at the same time, of which each of the effort's searches keeps one busy, as
            soon as a search is seen to take long; -1: one a core. The plan does not depend on it. A script that asks
            for several does so under ``if __name__ == "__main__"``, as Python starts them anew.

        Returns
        -------
        Result
            That no plan fits is a result with its reason, not an error.

        Raises
        ------
        InputError
            For a word that is none of those above, and for a problem too large for a proof.
        """
        require(method in METHODS, "method", method, one_of(method, METHODS))
        _require_asked(seed, jobs, groups, progress)
        require(jobs in (1, -1) or method == "memetic", "jobs", jobs, "1 with any method but memetic")
        require(objective == "time" or not robust, "objective", objective, "time for a robust plan")
        if until_gap is not None:
            may = objective == "time" and method == "memetic"
            require(may, "until_gap", until_gap, "the objective time and the method memetic")
            require_number(until_gap, "until_gap", at_least=0)
        if configurations is not None:
            require(method == "grid3d", "configurations", str(configurations), "none, but of the method grid3d")
        clock = _clock(time_limit_s)
        chosen = objective_named(objective)
        history: list[Milestone] = []
        tell = _noted(history, progress, clock)
        if method == "grid3d":
            found = self._grid(objective, tell, configurations, clock)
        else:
            limits = self._limits(effort, clock, until_gap)
            if method == "exhaustive":
                require(objective == "time", "objective", objective, "time with the method exhaustive")
                rng = np.random.default_rng(seed)
                found = find_optimum(self.data, rng, effort=limits, tell=tell, tables=self.tables)
            else:
                found = find_within_limits(
                    self.data,
                    seed,
                    objective=chosen,
                    groups=groups,
                    effort=limits,
                    tell=tell,
                    tables=self.tables,
                    jobs=jobs,
                )
        if robust and found.plan is not None:
            sure = surest(self.data, found.plan, found.bills, self.tables, clock.left_s)
            found = replace(found, plan=sure.plan)
        return self._result(found, seed, objective, tuple(history), clock)

    def front(
        self,
        *,
        with_energy: bool = False,
        effort: EffortName | int | Effort = "thorough",
        seed: int = 0,
        time_limit_s: float | None = None,
        groups: Groups | None = None,
        progress: Tell | None = None,
        jobs: int = 1,
    ) -> Front:
        """Find what lies between the fastest and the cheapest plan.

        Parameters
        ----------
        with_energy : bool
            Energy as the third thing to weigh.
        effort, seed, time_limit_s, groups, progress, jobs
            As of `search`.

        Returns
        -------
        Front
            Fastest first; empty, with the reason, where no plan keeps the constraints.
        """
        _require_asked(seed, jobs, groups, progress)
        clock = _clock(time_limit_s)
        data = self.data
        points, met = find_front(
            data,
            seed,
            with_energy=with_energy,
            groups=groups,
            effort=_effort(effort, clock),
            tell=progress,
            tables=self.tables,
            jobs=jobs,
        )
        bound = self._bound_within(clock, interrupted=met.interrupted) if points else None
        return Front(
            plans=tuple(Plan(self, replace(point.plan, seed=seed), bound) for point in points),
            bills=tuple(point.bill for point in points),
            with_energy=with_energy,
            interrupted=met.interrupted,
            reason=None if points else why_none(data, met),
            over=None if points else nearest_bill(data, met),
            evaluations=met.evaluations,
            seconds=met.seconds,
            title=f"{data.model.name} on {data.cluster.name}",
        )

    def _bound_within(self, clock: Clock, *, interrupted: bool) -> LowerBound | None:
        """The bound as far as an answer's time allows, of which one that was interrupted has little; None without a
        limit: worked out when it is asked for."""
        ends = Clock(min(clock.left_s(), BOUND_AFTER_INTERRUPT_S)) if interrupted else clock
        return lower_bound(self.tables, seconds_left=ends.left_s) if math.isfinite(ends.limit_s) else None

    def _limits(self, effort: EffortName | int | Effort, clock: Clock, until_gap: float | None) -> Effort:
        """How long to search, and what is good enough to end before that."""
        if until_gap is None:
            return _effort(effort, clock)
        bound = lower_bound(self.tables, seconds_left=lambda: clock.left_s(BOUND_PART))
        limits = _effort(effort, clock)
        rounds = UNTIL_ROUNDS if isinstance(effort, str) else limits.rounds
        return replace(limits, rounds=rounds, enough=bound.seconds * (1 + until_gap))

    def _grid(self, objective: Objective, tell: Tell, configurations: PathLike | None, clock: Clock) -> Found:
        """The best uniform split."""
        data = self.data
        head: dict[str, object] = {"cluster": data.cluster.name, "model": data.model.name, "cost_model": "polygon"}
        head |= {"batch": {"global_batch": self.batch.global_batch, "seq_len": self.batch.seq_len}}
        head["devices"] = data.cluster.devices
        return find_grid_plan(
            data,
            tables=self.tables,
            objective=objective_named(objective),
            tell=tell,
            keep=None if configurations is None else lambda rows: rows.write(str(configurations), head),
            seconds_left=lambda: clock.before_s(BOUND_PART, MOST_BOUND_S),
        )

    def _result(
        self, found: Found, seed: int, objective: Objective, history: tuple[Milestone, ...], clock: Clock
    ) -> Result:
        """What a search found, priced."""
        plan = None
        if found.plan is not None:
            bound = self._bound_within(clock, interrupted=found.interrupted)
            plan = Plan(self, replace(found.plan, seed=seed), bound)
        assert plan is None or not plan.violations(), "the search made a plan that breaks a rule"
        ended: Status = "infeasible" if plan is None else "proved" if found.proved else "feasible"
        return Result(
            status="interrupted" if found.interrupted else ended,
            plan=plan,
            estimate=plan.evaluate() if plan is not None else None,
            reason=found.reason if plan is None else None,
            objective=objective,
            met=found.bills,
            history=history,
            seconds=found.seconds,
            evaluations=found.evaluations,
            cut_short=found.cut_short,
        )

    def __repr__(self) -> str:
        return f"Problem({self.cluster!r}, {self.model!r}, {self.batch!r})"


def _clock(time_limit_s: float | None) -> Clock:
    """Of an answer that may take so long."""
    if time_limit_s is not None:
        require_number(time_limit_s, "time_limit_s", at_least=0)
    return Clock(time_limit_s)


def _effort(effort: EffortName | int | Effort, clock: Clock) -> Effort:
    """An effort by name, number of rounds or spelt out, within what is left of a time limit."""
    if isinstance(effort, int):
        require(effort >= 1 and not isinstance(effort, bool), "effort", effort, "a whole number >= 1")
        effort = times_thorough(effort)
    if isinstance(effort, str):
        require(effort in EFFORTS, "effort", effort, one_of(effort, EFFORTS))
        effort = EFFORTS[effort]
    require(isinstance(effort, Effort), "effort", effort, f"{', '.join(EFFORTS)}, a whole number or a polygon.Effort")
    if math.isinf(clock.limit_s):
        return effort
    return replace(effort, time_limit_s=clock.before_s(BOUND_PART, MOST_BOUND_S))


def _require_asked(seed: int, jobs: int, groups: Groups | None, progress: Tell | None) -> None:
    """Require what random numbers can begin with, a number of processes, groups, and somebody to tell."""
    fits = isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0
    require(fits, "seed", seed, "a whole number >= 0")
    require(isinstance(jobs, int) and (jobs >= 1 or jobs == -1), "jobs", jobs, "a whole number >= 1, or -1: one a core")
    require(groups is None or isinstance(groups, Groups), "groups", groups, f"a polygon.{Groups.__name__}")
    require(progress is None or callable(progress), "progress", progress, "a function")


def _noted(history: list[Milestone], progress: Tell | None, clock: Clock) -> Tell:
    """Puts every improvement on record and passes on what is told."""

    def tell(phase: Message, part: float, best: float) -> None:
        last = history[-1] if history else None
        if math.isfinite(best) and (last is None or last.phase != phase or best < last.value):
            history.append(Milestone(phase, clock.spent_s, best))
        if progress is not None:
            progress(phase, part, best)

    return tell
