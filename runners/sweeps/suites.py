"""Suites: which instances, which methods, and what is known about them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.dtfm import DtfmProblem, PathAnnealing, scenario_from_document
from benchmarks.rivals.ptafm import AntProblem, GeneticProblem, centers_from_document
from benchmarks.rivals.sailor import setups_from_document
from benchmarks.rivals.sailor_search import ScoreCandidates, ScoreDecoder
from polygon.domain.errors import InputError, Phrase, require
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.formats.files import read_cluster, read_json
from runners.sweeps import best_known, native
from runners.sweeps.methods import (
    Method,
    Seeded,
    ant_groups,
    grown,
    kind_sequences,
    planning_methods,
    replicated,
    several,
    simple,
)
from solvers.annealing import Annealing
from solvers.ants import Ants
from solvers.exhaustive import Exhaustive
from solvers.genetic import Genetic
from solvers.local_search import Restarts
from solvers.problem import SearchProblem

INSTANCES = Path(__file__).parents[2] / "instances"


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


def check_files(name: str, files: list[str]) -> None:
    """Require that the user's files can be read, and that their names are those of no other instances."""
    taken = set(suite(name, []).instances)
    for file in files:
        both = suite(name, [file]).instances
        new = both.keys() - taken
        # One that is called as another would stand in its place, beside what is known of that one.
        require(len(new) > 0, "files", Phrase(file), "another name: there is an instance of this one")
        for instance in new:
            both[instance]()
        taken |= new


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
    from polygon.planning.decode import Decoder, most_stages

    return Candidates(Decoder(problem), most_stages(problem))


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
        methods=planning_methods(),
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
        name: native.Planner(find=native.Pieced(method=method)) for name, method in planning_methods().items()
    }  # fmt: skip
    return Suite(
        name="native",
        about="polygon's own problems (exact step time)",
        unit="s",
        instances=_native_instances([*sorted((INSTANCES / "native").glob("*.yaml")), *map(Path, files)]),
        methods={**native.own(), **native.rivals(), **pieced},
        chosen=("polygon", "ants+memetic", "sequences+memetic", "grid3d", "dt-fm", "ptafm"),
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
        "all": several(simple, grown, replicated, kind_sequences),
        "all and ants": several(simple, grown, replicated, kind_sequences, ant_groups),
        "simple": simple,
        "grown": grown,
        "replicated": replicated,
        "sequences": kind_sequences,
        "ants": ant_groups,
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
        methods=planning_methods(),
        evaluations=10_000,
        time_limit_s=math.inf,
        tolerance=0.01,
        best_known=_known("sailor"),
    )
