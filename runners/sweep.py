"""Instances x methods x seeds: how good, how fast, how sure.

    python -m runners.sweep dtfm --seeds 10
    python -m runners.sweep ptafm --methods ants,genetic --json
    python -m runners.sweep regional --seeds 3 --evaluations 2000 -o results/regional

Runs in parallel processes here, or on a Dask or Ray cluster (--backend), and writes one line per run to
DIR/runs.jsonl as it ends, so that an interrupted sweep goes on where it stopped and a finished one does nothing but
report. From these lines come DIR/runs.csv, DIR/table.md (also on standard output) and, with matplotlib,
DIR/convergence.png and DIR/profile.png. A run is known by instance, method, seed and limits; its generator is seeded
with the seed alone. Times are wall time of the search itself, after a short run that compiles the kernels.

    python -m runners.sweep native
    python -m runners.sweep native --keep

compares planners on polygon's own problems (instances/native) and, with --keep, writes what is better than the best
known to instances/best-known.json, all at today's prices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from polygon.commands import cli
from polygon.domain.errors import InputError, fault, located, one_of, require
from polygon.domain.plan import Plan
from polygon.formats.files import make_folder, write_text
from polygon.grid3d.spread import BACKENDS, spread
from runners.sweeps import best_known
from runners.sweeps import sweep_summary as report
from runners.sweeps.suites import SUITES, Suite, check_files, suite
from solvers.stop import MaxEvaluations, Target, TimeLimit

BOUND = "bound"
"""Method name of the rows that hold an instance's lower bound."""
MOST_DEATHS = 3
"""Worker processes that may die one after another, with no run ending between."""
LOT = 32
"""Runs after which Ray hands over what it has: an interrupt costs no more than these."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a sweep."""

    suite: str
    files: tuple[str, ...]
    instance: str
    method: str
    seed: int
    evaluations: int
    time_limit_s: float | None

    @property
    def key(self) -> tuple[str, str, int, int, float | None]:
        """What makes it the same run."""
        return self.instance, self.method, self.seed, self.evaluations, self.time_limit_s


def _names(text: str | None) -> list[str]:
    """Each once: what is named twice is no second run."""
    return list(dict.fromkeys(text.split(","))) if text else []


def tasks(chosen: Suite, args: argparse.Namespace) -> list[Task]:
    """Every run that is asked for: bounds first, then seed by seed, so that a sweep cut short compares all methods."""
    methods = _names(args.methods) or list(chosen.chosen or chosen.methods)
    for method in methods:
        if method not in chosen.methods:
            raise fault("--methods", method, one_of(method, chosen.methods))
    instances = _names(args.instances) or list(chosen.instances)
    for instance in instances:
        if instance not in chosen.instances:
            raise fault("--instances", instance, one_of(instance, chosen.instances))
    evaluations = args.evaluations or chosen.evaluations
    limit_s = args.time_limit if args.time_limit is not None else chosen.time_limit_s
    limit_s = None if math.isinf(limit_s) else limit_s

    def task(instance: str, method: str, seed: int) -> Task:
        return Task(chosen.name, tuple(args.files), instance, method, seed, evaluations, limit_s)

    bounds = [task(instance, BOUND, 0) for instance in instances] if chosen.bound else []
    return bounds + [
        task(instance, method, seed)
        for seed in range(args.first_seed, args.first_seed + (args.seeds or chosen.seeds))
        for instance in instances
        for method in methods
        if (chosen.methods[method].seeded or seed == args.first_seed) and _takes(chosen, method, instance)
    ]


@lru_cache(maxsize=4)
def _suite(name: str, files: tuple[str, ...]) -> Suite:
    return suite(name, list(files))


def _takes(chosen: Suite, method: str, instance: str) -> bool:
    """Whether a method applies; only those that are picky need to look."""
    planner: Any = chosen.methods[method]
    return not planner.picky or planner.applies(chosen.instances[instance]())


def run(task: Task) -> dict[str, Any]:
    """One run, as a line of the record."""
    chosen = _suite(task.suite, task.files)
    problem: Any = chosen.instances[task.instance]()
    row: dict[str, Any] = asdict(task) | {"files": list(task.files), "bound": None, "best_known": None}
    row["commit"] = best_known.commit()
    if task.method == BOUND:
        assert chosen.bound is not None
        known = chosen.known(problem) if chosen.known else None
        bound = chosen.bound(problem)
        return row | {"value": None, "bound": bound, "best_known": known, "history": [], "status": "bound"}
    method: Any = chosen.methods[task.method]
    method.warm_up(chosen.instances[task.instance]())
    known = chosen.best_known.get(task.instance)
    stop = MaxEvaluations(task.evaluations) | TimeLimit(task.time_limit_s or math.inf)
    if known is not None:
        # Within rounding of the best known: a better one would be found after it only by luck.
        stop |= Target(known * (1 + 1e-9) if chosen.tolerance > 1e-3 else known * (1 + chosen.tolerance))
    began_s = time.process_time()
    result = method.solve(problem, np.random.default_rng(task.seed), stop, task.evaluations)
    cpu_s = time.process_time() - began_s
    if isinstance(result.solution, Plan):
        row["plan"] = best_known.packed(problem.data, result.solution)
    return row | {
        "value": result.value if math.isfinite(result.value) else None,
        "bound": result.bound if math.isfinite(result.bound) else None,
        "best_known": known,
        "status": result.status,
        "stopped_by": result.stopped_by,
        "used_evaluations": result.evaluations,
        "seconds": result.seconds,
        "cpu_s": cpu_s,
        "history": [[h.evaluations, round(h.seconds, 6), h.value] for h in result.history if math.isfinite(h.value)],
    }


def _recorded(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of an earlier sweep; a last line torn by an interrupt is left out."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _key(row: dict[str, Any]) -> tuple[str, str, int, int, float | None]:
    return row["instance"], row["method"], row["seed"], row["evaluations"], row["time_limit_s"]


def _require_of_today(todo: list[Task], record: Path) -> None:
    """Raise `InputError` where a record has some of these runs by another commit: bounds and prices were others."""
    wanted, now = {task.key for task in todo}, best_known.commit()
    others = {str(row.get("commit")) for row in _recorded(record) if _key(row) in wanted} - {now}
    if others:
        raise InputError(
            f"--keep: found runs of {', '.join(sorted(others))} in {record}, expected those of {now} alone, which runs "
            "now (another folder by -o, or remove this one)"
        )


def sweep(todo: list[Task], record: Path, *, quiet: bool, **where: Any) -> list[dict[str, Any]]:
    """Run what the record lacks (`where`: as `spread` takes it), and return the rows of all tasks, in their order.

    An interrupt ends the sweep with the runs that are done. Where a worker process dies, what it had is run again by
    others; when that ends `MOST_DEATHS` times without a run more, the error is raised.
    """
    done = {_key(row): row for row in _recorded(record)}
    deaths = 0
    while missing := [task for task in todo if task.key not in done]:
        before = len(done)
        try:
            _run_all(missing, done, record, quiet=quiet, **where)
        except KeyboardInterrupt:
            print("\ninterrupted: the runs that ended are kept", file=sys.stderr)  # noqa: T201
            break
        except BrokenProcessPool:
            deaths = deaths + 1 if len(done) == before else 0
            if deaths == MOST_DEATHS:
                raise
            print("\na worker died: its runs are begun again", file=sys.stderr)  # noqa: T201
    return [done[task.key] for task in todo if task.key in done]


def _run_all(
    missing: list[Task],
    done: dict[tuple[str, str, int, int, float | None], dict[str, Any]],
    record: Path,
    *,
    quiet: bool,
    **where: Any,
) -> None:
    """Run tasks; what ends is put into `done` and into the record at once."""
    # The record may end in a torn line: begin a new one.
    with record.open("a", encoding="utf-8") as lines, contextlib.closing(spread(run, missing, **where)) as results:
        if record.stat().st_size and not record.read_text(encoding="utf-8").endswith("\n"):
            lines.write("\n")
        for count, row in enumerate(results, start=1):
            done[_key(row)] = row
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if not quiet and (sys.stderr.isatty() or count % max(1, len(missing) // 10) == 0):
                end = "" if sys.stderr.isatty() else "\n"
                print(f"\r{count}/{len(missing)} runs", end=end, file=sys.stderr, flush=True)  # noqa: T201
    if not quiet and sys.stderr.isatty():
        print(file=sys.stderr)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = cli.CommandParser(
        prog="runners.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[cli.output_options()],
    )  # fmt: skip
    parser.add_argument("suite", choices=SUITES, help="which instances and methods")
    parser.add_argument("files", nargs="*", default=[], help="further instances of the suite's kind")
    parser.add_argument("-o", "--out", metavar="DIR", help="where the record and reports go (default sweeps/SUITE)")
    parser.add_argument("--seeds", type=cli.whole(1), help="seeds per method (default: the suite's)")
    parser.add_argument("--first-seed", type=cli.whole(0), default=0, help="the first of them (default %(default)s)")
    parser.add_argument("--methods", metavar="A,B", help="only these (default: all of the suite)")
    parser.add_argument("--instances", metavar="A,B", help="only these (default: all of the suite)")
    parser.add_argument("--evaluations", type=cli.whole(1), help="limit of a run (default: the suite's)")
    parser.add_argument("--time-limit", type=cli.number(above=0), metavar="SECONDS", help="limit of a run")
    parser.add_argument(
        "--workers", type=cli.whole(1), help="parallel processes (default: all cores, or the cluster's)"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="processes", help="where they run (default %(default)s)")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="of a Dask cluster (default: one of this machine)")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="native: write better plans, and today's prices, to instances/best-known.json and README.md",
    )
    parser.add_argument("--no-plots", action="store_true", help="no convergence and profile plots")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a sweep and report it."""
    args = _parser().parse_args(argv)
    check_files(args.suite, args.files)
    chosen = _suite(args.suite, tuple(args.files))
    out = Path(args.out or Path("sweeps") / args.suite)
    where = {"backend": args.backend, "scheduler": args.scheduler, "jobs": args.workers or -1, "lot": LOT}
    todo = tasks(chosen, args)
    if args.keep:
        require(chosen.known is not None, "--keep", chosen.name, "the suite native, whose plans can be stored")
        _require_of_today(todo, out / "runs.jsonl")
    with located("--out: "):
        make_folder(out)
    with cli.interrupted_by_signals() as asked:
        rows = sweep(todo, out / "runs.jsonl", quiet=args.quiet, **where)
    if todo and not rows:
        return asked.exit_code
    commits = sorted({row["commit"] for row in rows if "commit" in row})
    if len(commits) > 1 and not args.quiet:
        print(f"the record has runs of {len(commits)} commits: {', '.join(commits)}", file=sys.stderr)  # noqa: T201
    summary = report.summary(rows, chosen.tolerance)
    methods = report.standings(rows, summary)
    write_text(out / "runs.csv", report.csv_text(rows))
    table = report.standings_table(methods) + "\n" + report.markdown(summary, chosen.about, chosen.unit)
    write_text(out / "table.md", table)
    if args.keep:
        entries = best_known.improved(best_known.best_known(chosen.name), rows)
        best_known.write(chosen.name, entries)
        best_known.write_table(entries)
    drawn = args.no_plots or (
        report.plot(rows, out / "convergence.png") and report.plot_profile(rows, summary, out / "profile.png")
    )
    if not drawn and not args.quiet:
        print("no plots: matplotlib is missing (pip install matplotlib)", file=sys.stderr)  # noqa: T201
    cli.emit({"methods": methods, "instances": summary}, table, as_json=args.json)
    return cli.EXIT_OK if len(rows) == len(todo) else asked.exit_code


if __name__ == "__main__":
    # Other processes import what they run by its name, which `__main__` is not.
    from runners import sweep as program

    sys.exit(cli.run(program.main))
