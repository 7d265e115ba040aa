"""Runs beside their predictions: folders of logs that are followed while ranks write, and what they say of a plan.

A run is a folder with the plan as it was run (`plan.json`) and `rank-N.jsonl` of the ranks, as `runners.launch` writes
them, or traces of it. Three places hold some: the server's own folder (rehearsals it started, files that were opened
in the page), the deployments, and folders that are named when the server starts. Nothing but their names is taken from
requests, and only names that were found there.
"""

from __future__ import annotations

import json
import math
import re
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polygon.cost.step_times import StepTimes, step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError, Phrase, fault, located, require
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.chrome_trace import Interval
from polygon.export.measured import compare, intervals_of, intervals_of_logs, whole_steps
from polygon.export.predicted import predicted_intervals
from polygon.formats import files
from polygon.formats.run_log import LogFollower, log_lines, rank_log, usual_step_s
from polygon.formats.serialization import check_text
from polygon.messages.report import layer_span
from polygon.web.deploy import OWNER, owner_of

UNUSUAL = re.compile(r"[^A-Za-z0-9_.-]")
MARK = "run.json"
"""File of the server's own runs that says what they are."""
PLAN, LOG = "plan.json", "launch.log"
MOST_POINTS = 300
"""Steps that are told one by one; of more, neighbours are told together."""
MOST_LOG_BYTES = 8000
MOST_RUNS = 200
MOST_WORKERS = 1024
"""Of a run whose traced steps are read."""
MOST_RANKS = 1_000_000
DEPTH = 3
"""Folders below a place that are looked into."""
PARTS = ("forward", "backward", "update", "reduce", "waiting")
State = Literal["running", "done", "failed", "stopped", "open"]
"""`open`: somebody else's, and its ranks have not said that they ended."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What a run of the server's own is."""

    kind: Literal["rehearsal", "import"]
    plan: str = ""
    """The stored plan that it belongs to."""
    user: str = ""
    started_s: float = 0.0
    wanted: int | None = None
    """Steps that were asked for."""
    state: str = "done"

    @staticmethod
    def read(folder: Path) -> Mark | None:
        """That of a folder, if it has one."""
        path = folder / MARK
        return Mark(**files.read_json(path)) if path.is_file() else None

    def write(self, folder: Path) -> None:
        """Keep it in a folder."""
        files.write_json(folder / MARK, self.__dict__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder that holds a run."""

    path: Path
    plan_path: Path
    kind: Literal["rehearsal", "import", "deployment", "folder"]
    mark: Mark | None = None
    owner: str | None = None
    """Of a deployment, whose it is."""

    @property
    def user(self) -> str | None:
        """Who may see it; None: everybody."""
        return self.owner if self.mark is None else self.mark.user


@dataclass(kw_only=True, eq=False)
class Follower:
    """A run that is followed: its plan, its steps so far.

    The steps are those of the lowest rank whose log is here: losses are the same on all, and it is by its seconds that
    the runner's own summary counts.
    """

    place: Place
    problem: Problem
    plan: Plan
    tables: CostTables
    times: StepTimes
    steps: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    device: str = ""
    """What the ranks computed on, as the runner calls it."""
    ended: bool = False
    wanted: int | None = None
    _rank: int | None = None
    _log: LogFollower | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of(place: Place) -> Follower:
        """Begin to follow.

        Raises
        ------
        InputError
            For a plan that cannot be read.
        """
        problem, plan, _ = files.read_plan(place.plan_path)
        tables = CostTables(problem)
        return Follower(place=place, problem=problem, plan=plan, tables=tables, times=step_times(plan, tables))

    def update(self) -> None:
        """Read what was written since."""
        with self._lock:
            # Ranks begin at about the same time: a lower one's log may come after a higher one's was found.
            ranks = range(self.plan.world_size if self._rank is None else self._rank)
            lower = next((rank for rank in ranks if rank_log(self.place.path, rank).is_file()), None)
            if lower is not None:
                self._rank, self._log = lower, LogFollower(rank_log(self.place.path, lower), events=False)
                for column in (self.steps, self.seconds, self.losses):
                    del column[:]
            if self._log is None:
                return
            for line in self._log.new():
                self._take(line, self._log)

    def _take(self, line: Mapping[str, Any], log: LogFollower) -> None:
        try:
            if line["type"] == "run":  # begun anew, or gone on with from a checkpoint
                kept = int(np.searchsorted(np.asarray(self.steps), int(line.get("first_step", 0))))
                for column in (self.steps, self.seconds, self.losses):
                    del column[kept:]
                self.device, self.ended = str(line.get("device", "")), False
                wanted = str(line.get("options", {}).get("steps", ""))
                self.wanted = int(wanted) if wanted.isdecimal() else None
            elif line["type"] == "step":
                step, seconds, loss = int(line["step"]), float(line["seconds"]), float(line["loss"])
                if not 0 < seconds < math.inf:
                    raise ValueError(seconds)
                self.steps.append(step)
                self.seconds.append(seconds)
                self.losses.append(loss)
            elif line["type"] == "end":
                self.ended = True
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise fault(log.place, Message("found.event_without", what=str(error)[:60]), "the runner's lines") from None

    @property
    def traced(self) -> bool:
        """Whether there is a timeline of a step."""
        return (self._log is not None and self._log.skipped > 0) or any(self.place.path.glob("*trace*.json"))

    def reached(self) -> int:
        """Steps that are done, those before the log began included."""
        with self._lock:
            return self.steps[-1] + 1 if self.steps else 0

    def median_step_s(self) -> float | None:
        """Measured step (`usual_step_s`); None before the first."""
        with self._lock:
            seconds = list(self.seconds)
        return usual_step_s(seconds) if seconds else None

    def last_loss(self) -> float | None:
        """Of the last step; None where there is none, or no number."""
        with self._lock:
            return finite(self.losses[-1]) if self.losses else None

    def points(self) -> list[tuple[int, float, float | None]]:
        """Step, its seconds and loss; of many steps the means of neighbours, told at the last of them."""
        with self._lock:  # a log that is begun anew meanwhile takes steps away
            count = len(self.steps)
            edges = np.linspace(0, count, min(count, MOST_POINTS) + 1).astype(int).tolist()
            return [
                (self.steps[b - 1], sum(self.seconds[a:b]) / (b - a), finite(sum(self.losses[a:b]) / (b - a)))
                for a, b in pairwise(edges)
            ]

    def log_tail(self) -> str:
        """The last that the launcher said, for people."""
        path = self.place.path / LOG
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
            text = file.read().decode(errors="replace")
        return text if len(text) < MOST_LOG_BYTES else text.split("\n", 1)[-1]

    # The traced steps

    def measured(self) -> list[Interval]:
        """The timeline of the traced steps, from the ranks' logs, else from traces.

        Raises
        ------
        InputError
            Where nothing was traced, or by more workers than are read.
        """
        workers = sum(stage.width for stage in self.plan.stages)
        require(workers <= MOST_WORKERS, "run", workers, Message("expected.at_most", most=MOST_WORKERS))
        path = self.place.path
        logs = {rank: log_lines(path, rank) for rank in self.plan.rank_places}
        found = list(intervals_of_logs(self.plan, logs))
        if not found:
            traces = sorted(path.glob("*trace*.json"))
            found = [row for trace in traces for row in intervals_of(files.read_json(trace), trace.name)]
        if not found:
            raise InputError(Message("missing.traced_steps"))
        return found

    def comparison(self) -> dict[str, Any]:
        """The predicted step beside the median of the traced ones, stage by stage: means of its workers [s]."""
        found = compare(predicted_intervals(self.times), self.measured())
        parts: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for row in found.differences:
            parts[row.stage, row.what].append((row.predicted_s, row.measured_s))
        regions, pools = self.problem.cluster.regions, self.problem.cluster.pools
        stages = []
        for s, stage in enumerate(self.plan.stages):
            places = sorted({regions[pools[worker.pool].region].name for worker in stage.workers})
            means = {part: np.mean(parts.get((s, part), [(0.0, 0.0)]), axis=0).tolist() for part in PARTS}
            stages.append(
                {
                    "stage": s,
                    "layers": layer_span(self.problem, stage.first_layer, stage.last_layer),
                    "regions": places,
                    **means,
                }
            )
        return {
            "steps": found.steps, "predicted_step_s": found.predicted_step_s, "measured_step_s": found.measured_step_s,
            "error": found.error, "stages": stages,
        }  # fmt: skip

    def middle_step(self) -> tuple[list[Interval], float]:
        """Intervals of the traced step of median length, from its start [s], and that length."""
        whole, lengths_s = whole_steps(predicted_intervals(self.times), self.measured())
        used = sorted(list(whole)[1:] or whole, key=lambda step: lengths_s[step])
        step = used[len(used) // 2]
        start_s = min(i.start_s for i in whole[step] if i.kind == "compute")
        moved = [i._replace(start_s=i.start_s - start_s, end_s=i.end_s - start_s) for i in whole[step]]
        return moved, lengths_s[step]


def finite(value: float) -> float | None:
    """A number for JSON; None for one that JSON lacks, as the loss of a run that has blown up."""
    return value if math.isfinite(value) else None


class Runs:
    """All runs that the server knows of."""

    def __init__(self, folder: Path, deployments: Path, more: tuple[Path, ...] = ()) -> None:
        self.folder = folder
        self._deployments = deployments
        self._more = more
        self._lock = threading.Lock()
        self._followed: dict[str, Follower] = {}

    def places(self) -> dict[str, Place]:
        """Folders with a run, by the names that they go by."""
        found: dict[str, Place] = {}
        if self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                mark = None if path.is_symlink() else Mark.read(path)
                if mark is not None:
                    found[path.name] = Place(path=path, plan_path=path / PLAN, kind=mark.kind, mark=mark)
        roots: list[tuple[Path, Literal["deployment", "folder"]]] = [(self._deployments, "deployment")]
        roots += [(path, "folder") for path in self._more]
        for root, kind in roots:
            for path in _with_logs(root, DEPTH + (kind == "deployment")):
                plan = next((p / PLAN for p in (path, *path.parents) if (p / PLAN).is_file()), None)
                parts = path.relative_to(root).parts
                owner = owner_of(parts) if kind == "deployment" else None
                called = parts if kind == "deployment" else (root.resolve().name, *parts)
                name = UNUSUAL.sub("-", ".".join(called).removeprefix(OWNER))
                if plan is not None and plan.is_relative_to(root) and len(found) < MOST_RUNS:
                    found.setdefault(name, Place(path=path, plan_path=plan, kind=kind, owner=owner))
        return found

    def get(self, name: str) -> Follower | None:
        """A run, with what was written until now; None where there is none of that name."""
        place = self.places().get(name)
        if place is None:
            with self._lock:
                self._followed.pop(name, None)
            return None
        with self._lock:
            run = self._followed.get(name)
        if run is None or (run.place.path, run.place.plan_path) != (place.path, place.plan_path):
            run = Follower.of(place)
            with self._lock:
                self._followed[name] = run
        run.place = place  # its mark may say something new
        run.update()
        return run

    def add(self, name: str, mark: Mark, texts: Mapping[str, str]) -> str:
        """A new run of these files; the name that it got: another where the wanted one is taken.

        Raises
        ------
        InputError
            Where there are too many.
        """
        require(len(self.places()) < MOST_RUNS, "runs", MOST_RUNS, "fewer (remove some)")
        taken, i, own = {p.name for p in self.folder.iterdir()} if self.folder.is_dir() else set(), 2, name
        while own in taken:
            own, i = f"{name}-{i}", i + 1
        files.write_folder(self.folder / own, texts)
        mark.write(self.folder / own)
        return own


def _with_logs(root: Path, depth: int) -> Iterator[Path]:
    """A folder and those below it in which ranks have written; links are not followed."""
    if root.is_symlink() or not root.is_dir():
        return
    if next(root.glob("rank-*.jsonl"), None) is not None:
        yield root
    elif depth:
        for path in sorted(root.iterdir()):
            yield from _with_logs(path, depth - 1)


def checked_files(texts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Files of a run that somebody opens: logs of ranks, a plan, and traces under names of their own; and what the
    logs were called where they were opened.

    Raises
    ------
    InputError
        For a file that is none of these.
    """
    kept: dict[str, str] = {}
    opened: dict[str, str] = {}
    for name, text in texts.items():
        with located(f"{name}: "):
            check_text(text, "a trace, a rank's log or a plan")
        if name.endswith(".jsonl"):
            first = text.split("\n", 1)[0]
            try:
                rank = json.loads(first)["rank"]
                require(type(rank) is int and 0 <= rank < MOST_RANKS, f"{name}: rank", rank, "a number")
            except (ValueError, KeyError, TypeError, RecursionError):
                raise fault(name, first[:40], "a rank's log (rank-N.jsonl)") from None
            own = f"rank-{rank}.jsonl"
            require(own not in kept, f"{name}: rank", rank, Message("expected.other_rank", file=opened.get(own, own)))
            kept[own], opened[own] = text, name
            continue
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise fault(name, text[:40], "a trace, a rank's log or a plan") from None
        if isinstance(data, dict) and data.get("format") == "polygon-plan":
            kept[PLAN] = text
        else:
            intervals_of(data, name)
            kept[f"trace-{len(kept)}.json"] = text
    require(any(name != PLAN for name in kept), "files", Phrase("a plan alone"), "a rank's log or a trace beside it")
    return kept, opened


def as_opened(fault: Message | str, opened: Mapping[str, str]) -> Message | str:
    """A fault in a line of a log, told by what the file was called where it was opened."""
    where = fault["where"] if isinstance(fault, Message) and fault.kind == "input.expected" else None
    if not (isinstance(fault, Message) and isinstance(where, Message) and "file" in where.arguments):
        return fault
    own = Message(where.kind, **{**where.arguments, "file": opened.get(where["file"], where["file"])})
    return Message(fault.kind, **{**fault.arguments, "where": own})
