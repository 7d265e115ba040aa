"""Problem, plan and result: what is to be trained where, who does what, and how good that is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from polygon.api.choices import METHODS, EffortName, Method, Objective, Status
from polygon.api.comparison import Comparison
from polygon.api.front import Front
from polygon.api.html import html_table
from polygon.api.inputs import Cluster, Model
from polygon.bounds.gap import estimate_data, gap
from polygon.bounds.lower_bound import LowerBound, lower_bound
from polygon.cost.calibration import Calibration
from polygon.cost.convergence import assumptions as loss_assumptions
from polygon.cost.estimate import Estimate, estimate
from polygon.cost.money import Bill, TrainingRun, step_bill, whole_run
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables, Profile
from polygon.domain import plan as domain_plan
from polygon.domain.errors import one_of, require
from polygon.domain.groups import Groups
from polygon.domain.message import Message, Violation
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints
from polygon.domain.runtime import POLYGON, Runtime
from polygon.export.bundle import Export
from polygon.export.chrome_trace import Interval
from polygon.export.launch_hosts import read_hosts
from polygon.export.predicted import predicted_intervals
from polygon.export.targets import export
from polygon.formats import catalogue, files
from polygon.formats.convert import runtime_data
from polygon.formats.files import PathLike
from polygon.messages.report import STAGE_COLUMNS, describe_assumptions, describe_plan, seconds, stage_rows
from polygon.planning.assumptions import Assumption, assumptions
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation
from polygon.planning.efforts import EFFORTS, THOROUGH, UNTIL_ROUNDS
from polygon.planning.exact import find_optimum
from polygon.planning.frontier import find_front, find_within_limits
from polygon.planning.grid_plans import find_grid_plan
from polygon.planning.local_updates import LocalUpdates, local_updates
from polygon.planning.objectives import objective_named
from polygon.planning.robust import simpler, surest
from polygon.planning.search_engine import Effort, Found, Tell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 32
"""Workers that a picture of a timeline shows, unless told otherwise."""


class Milestone(NamedTuple):
    """A new best within a phase of a search."""

    phase: Message
    """Phases may value a plan differently: the fluid objective leaves some waiting out."""
    seconds: float
    """Since the search began."""
    value: float
    """Of the objective; the step time [s] unless another was asked for."""


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
        Where they do not fit together, as sequences that are longer than the model takes.

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
        fields = {
            "cluster": cluster,
            "model": Model.from_catalogue(model) if isinstance(model, str) else model,
            "batch": batch,
            "runtime": catalogue.runtime(runtime) if isinstance(runtime, str) else runtime,
            "constraints": constraints or Constraints(),
            "profiles": tuple(profiles),
            "calibration": calibration,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        _ = self.data  # what does not fit together is said here, not by the first search

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
            thorough searches with generators of their own: never worse than a smaller one. grid3d has its own end.
        until_gap : float, optional
            Search again until the step is no more than this part above the bound (time only): N times at most, or 32
            where the effort is a name.
        seed : int
        time_limit_s : float, optional
            Stop after so many seconds with the best so far; then a seed may give another plan another time.
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
        chosen = objective_named(objective)
        history: list[Milestone] = []
        tell = _noted(history, progress)
        if method == "grid3d":
            found = self._grid(objective, tell, configurations)
        else:
            limits = _effort(effort, time_limit_s)
            if until_gap is not None:
                require(
                    objective == "time" and method == "memetic",
                    "until_gap",
                    until_gap,
                    "the objective time and the method memetic",
                )
                require(until_gap >= 0, "until_gap", until_gap, "a part >= 0, as 0.25")
                rounds = UNTIL_ROUNDS if isinstance(effort, str) else limits.rounds
                limits = replace(limits, rounds=rounds, enough=self.bound().seconds * (1 + until_gap))
            if method == "exhaustive":
                require(objective == "time", "objective", objective, "time with the method exhaustive")
                rng = np.random.default_rng(seed)
                found = find_optimum(self.data, rng, effort=limits, tell=tell, tables=self.tables)
            else:
                found = find_within_limits(
                    self.data, seed, objective=chosen, groups=groups, effort=limits, tell=tell, tables=self.tables
                )
        if robust:
            require(objective == "time", "objective", objective, "time for a robust plan")
            if found.plan is not None:
                found = replace(found, plan=surest(self.data, found.plan, found.bills, self.tables).plan)
        return self._result(found, seed, tuple(history))

    def front(
        self,
        *,
        with_energy: bool = False,
        effort: EffortName | int | Effort = "thorough",
        seed: int = 0,
        time_limit_s: float | None = None,
        groups: Groups | None = None,
        progress: Tell | None = None,
    ) -> Front:
        """Find what lies between the fastest and the cheapest plan.

        Parameters
        ----------
        with_energy : bool
            Energy as the third thing to weigh.
        effort, seed, time_limit_s, groups, progress
            As of `search`.

        Returns
        -------
        Front
            Fastest first; empty, with the reason, where no plan keeps the constraints.
        """
        data = self.data
        points, met = find_front(
            data,
            seed,
            with_energy=with_energy,
            groups=groups,
            effort=_effort(effort, time_limit_s),
            tell=progress,
            tables=self.tables,
        )
        return Front(
            plans=tuple(Plan(self, replace(point.plan, seed=seed)) for point in points),
            bills=tuple(point.bill for point in points),
            with_energy=with_energy,
            interrupted=met.interrupted,
            reason=met.reason,
            over=next((bill for bill, _ in met.bills), None) if not points else None,
            evaluations=met.evaluations,
            seconds=met.seconds,
            title=f"{data.model.name} on {data.cluster.name}",
        )

    def _grid(self, objective: Objective, tell: Tell, configurations: PathLike | None) -> Found:
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
        )

    def _result(self, found: Found, seed: int, history: tuple[Milestone, ...]) -> Result:
        """What a search found, priced."""
        plan = Plan(self, replace(found.plan, seed=seed)) if found.plan is not None else None
        assert plan is None or not plan.violations(), "the search made a plan that breaks a rule"
        ended: Status = "infeasible" if plan is None else "proved" if found.proved else "feasible"
        return Result(
            status="interrupted" if found.interrupted else ended,
            plan=plan,
            estimate=plan.evaluate() if plan is not None else None,
            bound=self.bound() if plan is not None else None,
            reason=found.reason if plan is None else None,
            met=found.bills,
            history=history,
            seconds=found.seconds,
            evaluations=found.evaluations,
        )

    def __repr__(self) -> str:
        return f"Problem({self.cluster!r}, {self.model!r}, {self.batch!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Who computes which layers of which micro-batch, and by which way everything travels.

    Parameters
    ----------
    problem : Problem
    data : polygon.domain.plan.Plan
        The planner's record: stages, routes, schedule, packing of links.
    """

    problem: Problem
    data: domain_plan.Plan

    @classmethod
    def from_file(
        cls, path: PathLike, *, profiles: Iterable[Profile] = (), calibration: Calibration | None = None
    ) -> Plan:
        """The plan of a file, with its problem.

        Parameters
        ----------
        path : path
            What `save` and the commands wrote.
        profiles, calibration
            As of `Problem`.

        Raises
        ------
        InputError
            With the file, the place in it, what was found and what is allowed.
        """
        problem, plan, _ = files.read_plan(path)
        return cls(Problem.of(problem, profiles=profiles, calibration=calibration), plan)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.data.stages)

    @property
    def devices(self) -> int:
        """Devices that the plan uses."""
        return self.data.world_size

    def evaluate(self) -> Estimate:
        """Predict one step: time by term, memory by worker, traffic by link, money and energy.

        Returns
        -------
        Estimate
            ``step_s`` with its 90 % interval ``low_s`` to ``high_s``.
        """
        return self._estimate

    @cached_property
    def _estimate(self) -> Estimate:
        return estimate(self.problem.data, self.data, self.problem.tables)

    def violations(self) -> list[Violation]:
        """Everything that is wrong with the plan; empty for a plan that can be run.

        Returns
        -------
        list of Violation
            Each with the `kind` of rule, its arguments, and the `stage` and `worker` that break it; `str` gives words.
        """
        return violations(self.problem.data, self.data, self.problem.tables)

    def compare(self, other: Plan) -> Comparison:
        """Hold another plan beside this one.

        Parameters
        ----------
        other : Plan
            For the same model and batch, on any cluster and for any runtime.

        Returns
        -------
        Comparison
            ``speedup`` of the other, whether it ``is_clear``, and the ``differences``; `str` gives a table.

        Raises
        ------
        InputError
            Where the other trains another model or batch: their steps are not of one size.
        """
        for what in ("model", "batch"):
            mine, theirs = getattr(self.problem, what), getattr(other.problem, what)
            require(mine == theirs, f"other.{what}", repr(theirs), repr(mine))
        return Comparison(self, other)

    def export(self, to: str, folder: PathLike | None = None, *, hosts: PathLike | None = None) -> Export | None:
        """Files by which another program runs the plan, and what it cannot express.

        Parameters
        ----------
        to : str
            Of ``polygon export``: deepspeed, megatron, torchtitan, torchrun, slurm, kubernetes, skypilot or tc.
        folder : path, optional
            Where the files go; made if missing. Without it they are only returned.
        hosts : path, optional
            Names of the nodes in the cluster's order, a line each; by default names are made up.

        Returns
        -------
        Export or None
            ``files``, ``losses`` and ``start``; None where the target can express no plan that fits.

        Raises
        ------
        InputError
            For an unknown target, for host names that are none, and where files cannot be written.
        """
        problem = self.problem.data
        named = None if hosts is None else read_hosts(files.read_text(hosts), problem.cluster, self.data)
        made = export(problem, self.data, to, hosts=named, tables=self.problem.tables)
        if made is not None and folder is not None:
            files.write_folder(folder, made.files)
        return made

    def timeline(self, most_workers: int | None = None) -> tuple[Interval, ...]:
        """What every worker is predicted to do in one step, and when.

        Parameters
        ----------
        most_workers : int, optional
            Only so many workers, evenly drawn from all; by default all.

        Returns
        -------
        tuple of Interval
            Forward and backward of every micro-batch, messages, reduction and update: stage, number of the worker in
            it, kind, name, and start and end [s] from the step's beginning.

        Raises
        ------
        InputError
            For less than one worker.
        """
        times = step_times(self.data, self.problem.tables)
        workers = len(times.place.stage)
        drawn = None
        if most_workers is not None:
            require(most_workers >= 1, "most_workers", most_workers, "a whole number >= 1")
            drawn = np.zeros(workers, dtype=np.bool_)
            drawn[np.linspace(0, workers - 1, min(most_workers, workers)).round().astype(np.int64)] = True
        return tuple(predicted_intervals(times, drawn))

    def plot_timeline(self, most_workers: int = MOST_ROWS) -> Figure:
        """Picture of `timeline` (needs matplotlib, and says so).

        Parameters
        ----------
        most_workers : int
            Rows; of larger plans so many workers, evenly spaced, are shown.
        """
        from polygon.api.plots import plot_timeline

        return plot_timeline(self.timeline(most_workers), f"{self!r}: {seconds(self.evaluate().step_s)} a step")

    def plot_stages(self) -> Figure:
        """Picture of how busy and how full the workers of every stage are (needs matplotlib)."""
        from polygon.api.plots import plot_stages

        return plot_stages(self.data, self.evaluate(), repr(self))

    def plot_map(self) -> Figure:
        """Picture of the regions, those that the plan uses, and its traffic between them (needs matplotlib)."""
        from polygon.api.plots import plot_map

        return plot_map(self.problem.cluster.data, self.evaluate())

    def whole_run(self, tokens: float) -> TrainingRun:
        """Time, money and energy of training on so many tokens.

        Parameters
        ----------
        tokens : float
            Of all steps together, as 1e9.
        """
        times = step_times(self.data, self.problem.tables)
        return whole_run(step_bill(self.problem.data, self.data, times), tokens)

    def to_dict(self) -> dict[str, object]:
        """Plain data of the estimate, the bound and what is assumed of the loss, as plan files and ``--json`` say."""
        priced = estimate_data(self.evaluate(), self.problem.bound())
        return {
            "runtime": runtime_data(self.problem.runtime),
            **priced,
            "loss": loss_assumptions(self.problem.data, self.data),
            "assumed": [asdict(assumption) for assumption in self.assumptions()],
        }

    def describe(self) -> str:
        """Stages, speed, memory, traffic, bound and what limits the plan, for people."""
        text = describe_plan(self.problem.data, self.data, self.evaluate(), self.problem.bound())
        return text + describe_assumptions(self.assumptions())

    def assumptions(self, *, anew: bool = False) -> list[Assumption]:
        """Links that nobody gave and that move the step by more than 2 %: those that hide most first.

        Parameters
        ----------
        anew : bool
            Whether plans are also made anew for faster links, by short searches; what they say is kept, so `describe`
            and `to_dict` say it from then on.
        """
        return self._assumptions_anew if anew or "_assumptions_anew" in vars(self) else self._assumptions

    @cached_property
    def _assumptions(self) -> list[Assumption]:
        return assumptions(self.problem.data, self.data, self.problem.tables)

    @cached_property
    def _assumptions_anew(self) -> list[Assumption]:
        return assumptions(self.problem.data, self.data, self.problem.tables, anew=True)

    def save(self, path: PathLike) -> None:
        """Write the plan with its problem and estimate (JSON), for the runner, `load` and every command.

        Parameters
        ----------
        path : path

        Raises
        ------
        InputError
            Where the file cannot be written.
        """
        files.write_plan(path, self.problem.data, self.data, self.to_dict())

    def __repr__(self) -> str:
        return f"Plan({self.stages} stages on {self.devices} of {self.problem.cluster.devices} devices)"

    def _repr_html_(self) -> str:
        priced = self.evaluate()
        caption = f"{self!r}: {seconds(priced.step_s)} a step ({seconds(priced.low_s)} to {seconds(priced.high_s)})"
        return html_table(caption, STAGE_COLUMNS, stage_rows(self.problem.data, self.data, priced))


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """Outcome of a search."""

    status: Status
    """`feasible`; `proved`, no allocation of devices to stages has a better plan; `infeasible`, nothing fits;
    `interrupted`, the best so far (no plan if there was none)."""
    plan: Plan | None = field(default=None, repr=False)
    estimate: Estimate | None = field(default=None, repr=False)
    bound: LowerBound | None = field(default=None, repr=False)
    """Least step time of any plan, whatever the objective."""
    reason: Message | None = None
    """Why there is no plan; `str` puts it into words."""
    met: tuple[tuple[Bill, Allocation], ...] = field(default=(), repr=False)
    """What every allocation costs that was simulated exactly."""
    history: tuple[Milestone, ...] = field(default=(), repr=False)
    """Every improvement, oldest first."""
    seconds: float = 0.0
    """That the search took."""
    evaluations: int = 0

    def simpler(self) -> Plan | None:
        """A plan with fewer regions, stages or links whose step is within 1 % of the plan's, if the search met one."""
        if self.plan is None:
            return None
        problem = self.plan.problem
        other = simpler(problem.data, self.plan.data, self.met, problem.tables)
        return None if other is None else Plan(problem, replace(other.plan, seed=self.plan.data.seed))

    def local_updates(self) -> LocalUpdates | None:
        """What the plan's regions would gain by training by themselves for some steps; None if they do, or little."""
        if self.plan is None or self.plan.data.local_steps > 1:
            return None
        return local_updates(self.plan.problem.data, self.plan.data, self.plan.problem.tables)

    def _repr_html_(self) -> str:
        rows = [["status", self.status]]
        if self.plan is None:
            return html_table("Result", ["", ""], [*rows, ["reason", str(self.reason)]])
        rows += [["step", seconds(self.plan.evaluate().step_s)]]
        if self.bound is not None and self.gap is not None:
            rows += [["no plan is faster than", seconds(self.bound.seconds)], ["above that", f"{self.gap:.1%}"]]
        return html_table("Result", ["", ""], rows) + self.plan._repr_html_()

    @property
    def gap(self) -> float | None:
        """How far the step is above the bound, as a part of it; None without a plan."""
        return None if self.estimate is None or self.bound is None else gap(self.estimate.step_s, self.bound)


def _effort(effort: EffortName | int | Effort, time_limit_s: float | None) -> Effort:
    """An effort by name, number of rounds or spelt out, within a time limit."""
    if isinstance(effort, int):
        require(effort >= 1, "effort", effort, "a whole number >= 1")
        effort = replace(THOROUGH, rounds=effort)
    if isinstance(effort, str):
        require(effort in EFFORTS, "effort", effort, one_of(effort, EFFORTS))
        effort = EFFORTS[effort]
    return effort if time_limit_s is None else replace(effort, time_limit_s=time_limit_s)


def _noted(history: list[Milestone], progress: Tell | None) -> Tell:
    """Puts every improvement on record and passes on what is told."""
    began_s = time.perf_counter()

    def tell(phase: Message, part: float, best: float) -> None:
        last = history[-1] if history else None
        if math.isfinite(best) and (last is None or last.phase != phase or best < last.value):
            history.append(Milestone(phase, time.perf_counter() - began_s, best))
        if progress is not None:
            progress(phase, part, best)

    return tell
