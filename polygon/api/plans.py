"""A plan: who does what, what it costs, and everything that can be done with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from polygon.api.comparison import Comparison
from polygon.api.html import html_table
from polygon.bounds.gap import Bounds, estimate_data
from polygon.bounds.lower_bound import LowerBound
from polygon.cost.calibration import Calibration
from polygon.cost.convergence import assumptions as loss_assumptions
from polygon.cost.estimate import Estimate, estimate
from polygon.cost.money import TrainingRun, step_bill, whole_run
from polygon.cost.step_times import step_times
from polygon.cost.tables import Profile
from polygon.domain import plan as domain_plan
from polygon.domain.clock import Clock
from polygon.domain.errors import require, require_number
from polygon.domain.message import Message, Violation
from polygon.export.bundle import Export
from polygon.export.chrome_trace import Interval
from polygon.export.launch_hosts import read_hosts
from polygon.export.predicted import predicted_intervals
from polygon.export.targets import export
from polygon.formats import files
from polygon.formats.convert import runtime_data
from polygon.formats.files import PathLike
from polygon.formats.serialization import plain
from polygon.messages.report import STAGE_COLUMNS, describe_assumptions, describe_plan, seconds, stage_rows
from polygon.planning.assumptions import Assumption, assumptions
from polygon.planning.checker import violations
from polygon.planning.limits import Limits, limits
from polygon.planning.plan_bounds import bounds_beyond, is_beyond_bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polygon.api.planner import Problem

MOST_ROWS = 32
"""Workers that a picture of a timeline shows, unless told otherwise."""


class _Assumed(NamedTuple):
    """Links that nobody gave, and whether time ended before all were looked at."""

    found: list[Assumption]
    cut_short: bool


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Who computes which layers of which micro-batch, and by which way everything travels.

    Parameters
    ----------
    problem : Problem
    data : polygon.domain.plan.Plan
        The planner's record: stages, routes, schedule, packing of links.
    bound_in_time : LowerBound, optional
        What a search with a time limit left of the bound; it may be weaker (`LowerBound.cut_short`) than
        `Problem.bound`.
    """

    problem: Problem
    data: domain_plan.Plan
    bound_in_time: LowerBound | None = None

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
        from polygon.api.planner import Problem  # which imports this module

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

    @property
    def bound(self) -> LowerBound:
        """What no plan can beat: as a search with a time limit left it, else worked out when it is asked for; of a plan
        that breaks limits which that takes for granted a weaker one (`polygon.planning.plan_bounds`)."""
        return self.bound_in_time or (self.bounds.step if self._is_beyond else self.problem.bound())

    @cached_property
    def bounds(self) -> Bounds:
        """The same, and what no plan can beat in money and energy."""
        return bounds_beyond(self.problem.tables) if self._is_beyond else Bounds.of(self.problem.tables, self.bound)

    @cached_property
    def _is_beyond(self) -> bool:
        return self.bound_in_time is None and is_beyond_bound(self.violations())

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
            Where the other is no plan, or trains another model or batch: their steps are not of one size.
        """
        require(isinstance(other, Plan), "other", other, f"a polygon.{Plan.__name__}")
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

        Raises
        ------
        InputError
            For what is no number above 0.
        """
        require_number(tokens, "tokens", above=0)
        times = step_times(self.data, self.problem.tables)
        return whole_run(step_bill(self.problem.data, self.data, times), tokens)

    def to_dict(self, *, brief: bool = False) -> dict[str, object]:
        """Plain data of the estimate, the bound and what is assumed of the loss, as plan files and ``--json`` say.

        Parameters
        ----------
        brief : bool
            Without the bound, the links that nobody gave and the limits, which take longer than a price.
        """
        if brief:
            priced, more = self.evaluate().to_dict(), {}
        else:
            limited = self.limits()
            priced = estimate_data(self.evaluate(), self.bounds)
            more = {
                "assumed": [asdict(assumption) for assumption in self.assumptions()],
                "limited_by": limited.said,
                "limits": limited.to_dict(),
            }
        loss = loss_assumptions(self.problem.data, self.data)
        said: dict[str, object] = plain({"runtime": runtime_data(self.problem.runtime), **priced, "loss": loss, **more})
        return said

    def describe(self) -> str:
        """Stages, speed, memory, traffic, bound and what limits the plan, for people."""
        text = describe_plan(self.problem.data, self.data, self.evaluate(), self.bounds, self.limits().said)
        assumed = self.assumptions()
        return text + describe_assumptions(assumed, cut_short=self._assumptions[max(self._assumptions)].cut_short)

    def limits(self, *, time_limit_s: float = math.inf) -> Limits:
        """What limits the step: every resource of the cluster made 10 % better in turn and the plan priced again.

        Parameters
        ----------
        time_limit_s : float
            After which no more resources are looked at. What was found by then is kept.

        Returns
        -------
        Limits
            ``limits``, worst first, each with what it ``saves`` as a part of the step; those that limit it only
            ``together``; ``said`` in words.
        """
        known: list[Limits] = self._limits
        if not known:
            clock = Clock(time_limit_s)
            known.append(limits(self.problem.data, self.data, self.problem.tables, clock.left_s))
        return known[0]

    @cached_property
    def _limits(self) -> list[Limits]:
        """Once they are asked for."""
        return []

    def assumptions(self, *, anew: bool = False, time_limit_s: float = math.inf) -> list[Assumption]:
        """Links that nobody gave and that move the step by more than 2 %: those that hide most first.

        Parameters
        ----------
        anew : bool
            Whether plans are also made anew for faster links, by short searches; what they say is kept, so `describe`
            and `to_dict` say it from then on.
        time_limit_s : float
            After which no more links are looked at; if making plans anew takes longer, none was made. What was found
            by then is kept as well, and `describe` says that it is not all.
        """
        known: dict[bool, _Assumed] = self._assumptions
        wanted = anew or True in known
        if wanted not in known:
            clock, data, tables = Clock(time_limit_s), self.problem.data, self.problem.tables
            found = assumptions(data, self.data, tables, anew=wanted, seconds_left=clock.left_s)
            known[wanted] = _Assumed(found, cut_short=clock.left_s() <= 0)
        return known[wanted].found

    @cached_property
    def _assumptions(self) -> dict[bool, _Assumed]:
        """Those found so far, by whether plans were made anew."""
        return {}

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
        stages = Message("variant.stages", stages=self.stages)
        return f"Plan({stages} on {self.devices} of {self.problem.cluster.devices} devices)"

    def _repr_html_(self) -> str:
        priced = self.evaluate()
        caption = f"{self!r}: {seconds(priced.step_s)} a step ({seconds(priced.low_s)} to {seconds(priced.high_s)})"
        return html_table(caption, STAGE_COLUMNS, stage_rows(self.problem.data, self.data, priced))
