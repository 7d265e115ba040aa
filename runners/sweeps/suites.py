"""Suites: which instances, which methods, and what is known about them."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.dtfm import DtfmProblem, PathAnnealing, scenario_from_document
from benchmarks.rivals.ptafm import AntProblem, GeneticProblem, centers_from_document
from benchmarks.rivals.sailor import setups_from_document
from benchmarks.rivals.sailor_search import ScoreCandidates, ScoreDecoder
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.formats.files import read_cluster, read_json
from runners.sweeps import best_known, native
from solvers.allocation import AllocationProblem
from solvers.annealing import Annealing
from solvers.ants import Ants
from solvers.exhaustive import Exhaustive
from solvers.genetic import Genetic
from solvers.local_search import Restarts
from solvers.problem import SearchProblem
from solvers.result import Improvement, SearchResult
from solvers.stop import AnyOf, MaxEvaluations, Stop

INSTANCES = Path(__file__).parents[2] / "instances"


class Method:
    """A solver as a suite uses it."""

    seeded = True
    """Whether the generator decides anything."""

    def __init__(self, solver: Any) -> None:
        self.solver = solver

    @property
    def picky(self) -> bool:
        """Whether it cannot take every problem."""
        return isinstance(self.solver, Ants)

    def applies(self, problem: SearchProblem[Any]) -> bool:
        """Whether the solver can take the problem; ants need an allocation space."""
        return isinstance(problem, AllocationProblem) or not isinstance(self.solver, Ants)

    def solve(self, problem: Any, rng: np.random.Generator, stop: Stop, evaluations: int) -> SearchResult[Any]:
        """Run on a problem until the stop rule speaks; at most `evaluations`."""
        return self.solver.solve(problem, rng, stop)

    def warm_up(self, problem: Any) -> None:
        """Compile the kernels."""
        self.solve(problem, np.random.default_rng(0), MaxEvaluations(30), 30)


Starts = Callable[[Any, np.random.Generator, int], tuple[list[Any], int]]
"""From problem, generator and a budget: solutions to begin with, and the evaluations that finding them took."""


class Seeded(Method):
    """A solver that begins with what other means offer; half of the evaluations at most are spent on that."""

    def __init__(self, solver: Any, starts: Starts) -> None:
        super().__init__(solver)
        self.starts = starts

    def solve(self, problem: Any, rng: np.random.Generator, stop: Stop, evaluations: int) -> SearchResult[Any]:
        """Starts first, then the solver on what is left; both are counted."""
        began = time.perf_counter()
        starts, used = self.starts(problem, rng, evaluations // 2)
        spent_s = time.perf_counter() - began
        limit = AnyOf((stop, MaxEvaluations(max(1, evaluations - used))))
        result = self.solver.solve(problem, rng, limit, start=starts)
        history = tuple(Improvement(h.evaluations + used, h.seconds + spent_s, h.value) for h in result.history)
        return replace(
            result, evaluations=result.evaluations + used, seconds=result.seconds + spent_s, history=history
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Instances by name (made when they are needed), methods by name, and the limits that fit them."""

    name: str
    about: str
    unit: str
    instances: Mapping[str, Callable[[], SearchProblem[Any]]]
    methods: Mapping[str, Method | native.Planner]
    chosen: tuple[str, ...] = ()
    """Methods that run unless the user says which; all of them where this is empty. The first is what the others are
    compared with."""
    seeds: int = 10
    evaluations: int
    """Of a run, unless the user says otherwise."""
    time_limit_s: float
    tolerance: float = 1e-6
    """A run has reached the best known value when it is at most this part above."""
    bound: Callable[[SearchProblem[Any]], float] | None = None
    best_known: Mapping[str, float] = field(default_factory=dict)
    known: Callable[[Any], float | None] | None = None
    """Best known value of an instance, where it has to be computed (`runners.sweeps.best_known`)."""


def suite(name: str, files: list[str]) -> Suite:
    """The suite of a name; `files` are further instances of its kind."""
    makers: dict[str, Callable[[list[str]], Suite]] = {
        "dtfm": _dtfm,
        "ptafm": _ptafm,
        "sailor": _sailor,
        "regional": functools.partial(_clusters, "regional"),
        "world": functools.partial(_clusters, "world"),
        "large": functools.partial(_clusters, "large"),
        "study": functools.partial(_clusters, "study"),
        "native": _native,
        "ablation": _ablation,
    }
    if name not in makers:
        raise InputError(f"suite: found {name!r}, expected one of {sorted(makers)}")
    return makers[name](files)


SUITES = ("dtfm", "ptafm", "sailor", "regional", "world", "large", "study", "native", "ablation")


def _known(name: str) -> dict[str, float]:
    """Best known values of a suite, from the file that the instances ship with."""
    return {instance: float(entry["value"]) for instance, entry in best_known.best_known(name).items()}


def _generic() -> dict[str, Method]:
    return {"genetic": Method(Genetic()), "annealing": Method(Annealing()), "restarts": Method(Restarts())}


def _dtfm(files: list[str]) -> Suite:
    def scenario(path: Path) -> Callable[[], SearchProblem[Any]]:
        return lambda: DtfmProblem(scenario_from_document(read_json(path), path.stem))

    def bound(problem: Any) -> float:
        from benchmarks.rivals.dtfm_bound import lower_bound

        return lower_bound(problem.scenario).total_s

    paths = [*sorted((INSTANCES / "dtfm").glob("*.json")), *map(Path, files)]
    return Suite(
        name="dtfm",
        about="DT-FM's scenarios under DT-FM's objective",
        unit="s",
        instances={path.stem: scenario(path) for path in paths},
        methods={"path-annealing": Method(PathAnnealing()), **_generic()},
        evaluations=10_000_000,
        time_limit_s=10.0,
        bound=bound,
        best_known=_known("dtfm"),
    )


def _ptafm(files: list[str]) -> Suite:
    def centers(path: Path, kind: str) -> Callable[[], SearchProblem[Any]]:
        def make() -> SearchProblem[Any]:
            instance = centers_from_document(read_json(path), path.stem)
            return GeneticProblem(instance) if kind == "genetic" else AntProblem(instance)

        return make

    paths = [*sorted((INSTANCES / "ptafm").glob("*.json")), *map(Path, files)]
    return Suite(
        name="ptafm",
        about="PTAFM's data centers under its ant and genetic objectives",
        unit="",
        instances={f"{path.stem}-{kind}": centers(path, kind) for path in paths for kind in ("ants", "genetic")},
        methods={"ants": Method(Ants()), **_generic(), "exhaustive": Method(Exhaustive())},
        evaluations=100_000,
        time_limit_s=10.0,
        best_known=_known("ptafm"),
    )


# Planning: polygon's own objective over allocations of devices to stages


def _planning(problem: Problem) -> SearchProblem[Any]:
    from polygon.planning.candidates import Candidates
    from polygon.planning.decode import Decoder
    from polygon.planning.search_engine import most_stages

    return Candidates(Decoder(problem), most_stages(problem))


def _simple(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """All devices in walks along the links, cut evenly, in every micro-batch size; a sample where they are many."""
    from polygon.planning.decode import Allocation
    from polygon.planning.initial_solutions import simple_starts

    starts = [
        Allocation(workers=x, micro_batch_size=size)
        for size in candidates.sizes
        for x in simple_starts(candidates.decoder, candidates.space.groups, size)
    ]
    if len(starts) > budget:
        starts = [starts[i] for i in rng.choice(len(starts), size=max(1, budget), replace=False)]
    return starts, 0


def _grown(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """One pipeline replicated in more and more regions."""
    from polygon.planning.initial_solutions import grown_starts

    value_of = _Counted(candidates)
    decoder, rows = candidates.decoder, candidates.space.groups
    starts = grown_starts(decoder, rows, value_of, lambda: float(budget - value_of.used))
    return starts, value_of.used


def _replicated(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """The same pipeline in every region that has the workers for it."""
    from polygon.planning.initial_solutions import replicated_starts

    value_of = _Counted(candidates)
    decoder, rows, sizes = candidates.decoder, candidates.space.groups, candidates.sizes
    starts = replicated_starts(decoder, rows, sizes, value_of, lambda: float(budget - value_of.used))
    return starts, value_of.used


class _Counted:
    """Values of allocations, counted."""

    def __init__(self, candidates: Any) -> None:
        self.candidates = candidates
        self.used = 0

    def __call__(self, x: Any) -> float:
        self.used += 1
        return float(self.candidates.evaluate(x))


def _ant_groups(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """What ants make of the budget, dealt over numbers of stages."""
    from polygon.planning.candidates import GroupCandidates
    from polygon.planning.decode import Allocation

    rows, sizes = candidates.space.groups, candidates.sizes
    counts = [count for count in (1, 2, 3, 4, 6, 8) if count <= rows]
    found, used = [], 0
    for count in counts:
        groups = GroupCandidates(candidates.decoder, count, int(sizes[rng.integers(len(sizes))]))
        result = Ants().solve(groups, rng, MaxEvaluations(max(1, budget // len(counts))))
        used += result.evaluations
        if result.solution is not None:
            x = np.zeros((rows, candidates.space.classes), dtype=np.int64)
            x[:count] = result.solution
            found += [Allocation(workers=x, micro_batch_size=size) for size in sizes]
    return found, used


def _planning_methods() -> dict[str, Method]:
    return {
        "memetic": Method(Genetic()),
        "annealing": Method(Annealing()),
        "restarts": Method(Restarts()),
        "ants+memetic": Seeded(Genetic(), _ant_groups),
        "simple+memetic": Seeded(Genetic(), _simple),
        "grown+memetic": Seeded(Genetic(), _grown),
        "replicated+memetic": Seeded(Genetic(), _replicated),
        "grown+genetic": Seeded(Genetic(patience=0), _grown),
        "grown+annealing": Seeded(Annealing(), _grown),
        "grown+restarts": Seeded(Restarts(), _grown),
        "grown+random": Seeded(Restarts(patience=0), _grown),
        "sequences+memetic": Seeded(Genetic(), _kind_sequences),
    }


def _instance(cluster: Path, model: str, global_batch: int, seq_len: int) -> Callable[[], SearchProblem[Any]]:
    def make() -> SearchProblem[Any]:
        batch = Batch(global_batch=global_batch, seq_len=seq_len)
        return _planning(Problem(cluster=read_cluster(cluster), model=catalogue.model(model), batch=batch))

    return make


def _generated(regions: int, types: int, devices: int) -> Callable[[], SearchProblem[Any]]:
    def make() -> SearchProblem[Any]:
        from polygon.commands.generate import generate

        cluster = generate(regions, types, devices, np.random.default_rng(0))
        batch = Batch(global_batch=4096, seq_len=2048)
        return _planning(Problem(cluster=cluster, model=catalogue.model("gpt3-13b"), batch=batch))

    return make


def _clusters(name: str, files: list[str]) -> Suite:
    regional = {f"regional-{n}": INSTANCES / f"regional-{n}.yaml" for n in (16, 32, 64, 128, 256, 512)}
    world = {
        stem: INSTANCES / f"{stem}.yaml"
        for stem in ("ptafm-7dc", "ptafm-testbed", "world-64", "aws-regions", "dtfm-worldwide", "dtfm-irregular0")
    }
    study = {key: (regional | world)[key] for key in ("regional-64", "world-64", "ptafm-7dc", "dtfm-irregular0")}
    paths: dict[str, Path] = {"regional": regional, "world": world, "study": study}.get(name, {})
    paths = paths | {Path(file).stem: Path(file) for file in files}
    instances = {stem: _instance(path, "gpt3-1.3b", 512, 2048) for stem, path in paths.items()}
    if name == "large":
        shapes = [(10, 3, 1920), (16, 4, 1024), (64, 8, 10240)]
        instances |= {f"{r}x{t}x{d}": _generated(r, t, d) for r, t, d in shapes}
    return Suite(
        name=name,
        about="polygon's own objective (fluid step time)",
        unit="s",
        instances=instances,
        methods=_planning_methods(),
        evaluations=6_000,
        time_limit_s=math.inf,
        tolerance=0.01,
        bound=_planning_bound,
        best_known=_known(name),
    )


def _planning_bound(problem: Any) -> float:
    from polygon.bounds.lower_bound import lower_bound_s

    return float(lower_bound_s(problem.decoder.tables))


# The native benchmark: polygon's own problems, whole plans priced exactly

ABLATED = (
    "tiny-6-a100-beside-t4", "tiny-6-three-labs", "tiny-8-a10-two-zones", "small-8-two-campus", "small-8-homes",
    "small-16-regional", "small-16-a100-v100-one-hall", "small-24-europe", "small-24-three-types-one-rack",
    "small-32-pacific", "medium-48-ptafm-testbed", "medium-64-world",
)  # fmt: skip
"""Instances of several regions or types on which parts of the search are taken out: grouping has something to do."""


def _native(files: list[str]) -> Suite:
    pieced = {
        name: native.Planner(find=native.Pieced(method=method)) for name, method in _planning_methods().items()
    }  # fmt: skip
    return Suite(
        name="native",
        about="polygon's own problems (exact step time)",
        unit="s",
        instances=_native_instances([*sorted((INSTANCES / "native").glob("*.yaml")), *map(Path, files)]),
        methods={**native.own(), **native.rivals(), **pieced},
        chosen=("polygon", "memetic", "annealing", "ants+memetic", "sequences+memetic", "grid3d", "dt-fm", "ptafm"),
        evaluations=native.QUICK.fluid_evaluations,
        seeds=1,
        time_limit_s=math.inf,
        tolerance=0.001,
        bound=_native_bound,
        known=native.NativeProblem.known_s,
    )


def _native_bound(problem: Any) -> float:
    return float(problem.bound_s())


def _native_instances(paths: list[Path]) -> dict[str, Callable[[], Any]]:
    """By name, in order of devices."""
    made = {path.stem: functools.partial(native.NativeProblem, path) for path in paths}
    return dict(sorted(made.items(), key=lambda pair: (_devices(pair[0]), pair[0])))


def _devices(name: str) -> int:
    """Devices of an instance, which its name says (size-devices-what)."""
    parts = name.split("-")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def _ablation(files: list[str]) -> Suite:
    def pieced(method: Method, **other: Any) -> native.Planner:
        return native.Planner(find=native.Pieced(method=method, **other))

    builders = {
        "all": _several(_simple, _grown, _replicated, _kind_sequences),
        "all and ants": _several(_simple, _grown, _replicated, _kind_sequences, _ant_groups),
        "simple": _simple,
        "grown": _grown,
        "replicated": _replicated,
        "sequences": _kind_sequences,
        "ants": _ant_groups,
    }
    every = builders["all"]
    methods = {f"starts: {name}": pieced(Seeded(Genetic(), starts)) for name, starts in builders.items()}
    methods["starts: random"] = pieced(Method(Genetic()))
    methods |= {
        f"without {name}": pieced(Seeded(Genetic(), every), candidates=kind) for name, kind in native.WITHOUT.items()
    }
    methods["without descents"] = pieced(Seeded(Genetic(patience=0), every))
    methods["without a population"] = pieced(Seeded(Restarts(), every))
    methods["without exact descent"] = pieced(Seeded(Genetic(), every), descend=False)
    methods["without polish"] = pieced(Seeded(Genetic(), every), polish=False)
    paths = [*(INSTANCES / "native" / f"{name}.yaml" for name in ABLATED), *map(Path, files)]
    return Suite(
        name="ablation",
        about="polygon's search with other starts, or a part taken out (exact step time)",
        unit="s",
        instances=_native_instances(paths),
        methods=methods,
        evaluations=300,
        seeds=2,
        time_limit_s=math.inf,
        tolerance=0.001,
    )


def _several(*starts: Starts) -> Starts:
    """The budget shared evenly by several."""

    def all_of(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        used = 0
        for i, one in enumerate(starts):
            more, spent = one(candidates, rng, (budget - used) // (len(starts) - i))
            found, used = [*found, *more], used + spent
        return found, used

    return all_of


def _sailor(files: list[str]) -> Suite:
    profiles, network = (read_json(INSTANCES / "measured" / f"sailor_{part}.json") for part in ("profiles", "network"))
    paths = [INSTANCES / "sailor" / "planner_bench.json", *map(Path, files)]

    def make(setup: Any) -> Callable[[], SearchProblem[Any]]:
        return lambda: ScoreCandidates(ScoreDecoder(setup, profiles, network))

    setups = [setup for path in paths for setup in setups_from_document(read_json(path))]
    return Suite(
        name="sailor",
        about="Sailor's setups under Sailor's own score",
        unit="s",
        instances={setup.name: make(setup) for setup in setups},
        methods=_planning_methods(),
        evaluations=10_000,
        time_limit_s=math.inf,
        tolerance=0.01,
        best_known=_known("sailor"),
    )


def _kind_sequences(candidates: Any, rng: np.random.Generator, budget: int) -> tuple[list[Any], int]:
    """The best dozen of all sequences of worker kinds, as far as the budget goes."""
    from polygon.planning.initial_solutions import kind_sequences

    sequences = kind_sequences(candidates.decoder, candidates.space.groups, candidates.sizes)
    tried = [(candidates.evaluate(x), i, x) for i, x in enumerate(itertools.islice(sequences, budget))]
    return [x for _, _, x in sorted(tried, key=lambda entry: entry[:2])[:12]], len(tried)
