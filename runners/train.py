"""Train a recipe: model, data, degrees of parallelism and memory switches from one YAML file.

    python -m runners.train instances/recipes/llm-1d-tiny.yaml --set parallel.dp=4 --steps 20 -o out/run

Started alone it starts all ranks on this machine; under torchrun or the `deepspeed` launcher it is one of their ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: this folder must not shadow other modules, and the root must be found
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands.cli import ProgramParser
from polygon.domain.errors import InputError, PolygonError
from polygon.formats.serialization import format_json
from runners.data.prepared import writable_folder
from runners.dist_runner import meeting_point
from runners.engine.arguments import require_torch
from runners.engine.summary import log_lines
from runners.engine.trackers import check_trackers
from runners.launch import LocalRanks, check_memory_here, say
from runners.recipes.backends import Job, Place, backend_of
from runners.recipes.data import check_paths, training_and_validation
from runners.recipes.models import batch_of, beside, model_of
from runners.recipes.predicted_memory import measured_peaks, write_measured
from runners.recipes.recipe_schema import read_recipe


def make_parser() -> ProgramParser:
    """The command line."""
    parser = ProgramParser("train", __doc__)
    parser.add_argument("recipes", type=Path, nargs="+", metavar="recipe", help="YAML, see instances/recipes")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--table",
        action="store_true",
        help="run all the recipes, each also on one process and with its memory followed, and print a table",
    )
    instead.add_argument(
        "--check",
        action="store_true",
        help="run nothing: parameters and predicted memory of every stage (exit 3 where a device has too little)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of the recipe to set otherwise, as parallel.dp=4; may be repeated",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("-o", "--out", type=Path, help="where logs go (default: out/<recipe>-<time>)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default auto")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    # The `deepspeed` launcher adds this option to the command; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


@dataclass
class RecipeRanks(LocalRanks):
    """The ranks of a recipe on this machine."""

    job: Job
    ranks_needed: int

    @property
    def world_size(self) -> int:
        """The ranks that the recipe needs."""
        return self.ranks_needed

    def train(self, number: int, host: str, port: int, listen_fd: int | None) -> int:
        """One rank, with the environment that torchrun would give it."""
        names = {
            "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": host, "MASTER_PORT": port,
        }  # fmt: skip
        os.environ.update({key: str(value) for key, value in names.items()})
        return be_rank(self.job, Place(number, self.world_size, number, host, port, listen_fd))


def be_rank(job: Job, place: Place) -> int:
    """All that a rank does; its exit code."""
    if job.recipe.metrics.wandb != "off":
        os.environ["WANDB_MODE"] = job.recipe.metrics.wandb
    if not job.recipe.metrics.tensor_bytes:
        return int(backend_of(job).run_rank(job, place))
    from runners.recipes.tensor_bytes import TensorBytes

    with TensorBytes() as tensors:
        code = int(backend_of(job).run_rank(job, place))
    write_measured(job.out, place.rank, tensors.peak_bytes)
    return code


def prepare(job: Job, world_size: int) -> None:
    """Let mistakes be found once, not by every rank, and what is cached be there for all of them."""
    from runners.data.samples import digest_of
    from runners.engine.device import check_devices
    from runners.engine.log import check_nobody_writes

    check_devices(job.device, world_size)
    check_trackers(job.recipe.metrics.trackers, job.recipe.metrics.wandb)
    remedy = "shorter sequences, smaller micro-batches, or more machines under torchrun"
    check_memory_here(backend_of(job).needed_bytes(job), world_size, job.device, remedy)
    check_nobody_writes(writable_folder("--out", job.out))
    if job.recipe.checkpoint is not None:
        writable_folder("checkpoint.folder", beside(job.folder, job.recipe.checkpoint.folder))
    model = model_of(job.recipe.model, job.folder)
    for samples in training_and_validation(job.recipe, model, batch_of(job.recipe, model).seq_len, job.folder):
        if samples is not None:
            digest_of(samples)  # it reads some: files that cannot be read, or are too large for memory, end here


def figures(job: Job, world_size: int, start_s: float) -> dict[str, Any]:
    """The summary of a run that has ended."""
    summary = backend_of(job).summary(job) | {"ranks": world_size, "wall_s": time.monotonic() - start_s}
    # The folder may hold what an earlier run measured.
    measured = measured_peaks(job.out, world_size) if job.recipe.metrics.tensor_bytes else {}
    return summary | ({"measured_peak_bytes": max(measured.values())} if measured else {})


def run_here(job: Job) -> tuple[int, dict[str, Any]]:
    """Run all ranks on this machine; exit code and summary."""
    check_paths(job.recipe, job.folder)
    backend = backend_of(job)
    ranks = RecipeRanks(job, backend.world_size(job))
    prepare(job, ranks.world_size)
    say(f"{job.recipe.name}: {ranks.world_size} ranks, logs in {job.out}")
    start_s = time.monotonic()
    guilty = ranks.run()
    if ranks.interrupted:
        say(f"interrupted; all {ranks.world_size} ranks ended, logs in {job.out}")
        return 128 + ranks.interrupted, {}
    if guilty is not None:
        say(f"failed: rank {guilty.number}: {guilty.outcome()}; all ranks stopped")
        return (2 if guilty.severity() == 1 else 1), {}
    return 0, figures(job, ranks.world_size, start_s)


def run_as_rank(job: Job, environment: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """Be one rank of torchrun's or DeepSpeed's launcher; rank 0 returns the summary."""
    backend = backend_of(job)
    host, port, world_size, rank = meeting_point(None, None, None, environment)
    needed = backend.world_size(job)
    if world_size != needed:
        raise InputError(f"launcher: found {world_size} ranks, expected {needed}, the product of the recipe's degrees")
    start_s = time.monotonic()
    code = be_rank(job, Place(rank, world_size, int(environment.get("LOCAL_RANK", rank)), host, port))
    if code or rank:
        return code, {}
    elsewhere = [other for other in range(world_size) if not any(log_lines(job.out, other))]
    if elsewhere:
        say(f"{job.recipe.name}: logs of ranks {elsewhere} are not in {job.out} (other hosts?): no summary")
        return 0, {}
    return 0, figures(job, world_size, start_s)


def _job(path: Path, settings: Sequence[str], arguments: argparse.Namespace) -> Job:
    recipe = read_recipe(path, settings)
    # Ranks of a launcher must agree on a folder: each has its own clock, but one parent.
    unique = f"launcher-{os.getppid()}" if "RANK" in os.environ else time.strftime("%Y%m%d-%H%M%S")
    out = arguments.out or Path("out") / f"{recipe.name}-{unique}"
    return Job(recipe, path.parent, out / recipe.name if arguments.table else out, arguments.device)


def _print_table(jobs: Sequence[Job], *, as_json: bool) -> int:
    from runners.recipes.table import format_rows, rows

    found = []
    for row in rows(jobs, run_here):
        found.append(row)
        if "failed" in row:
            say(f"train: {row['recipe']}: {row['failed']}")
    sys.stdout.write(format_json(found) if as_json else format_rows(found))
    return 1 if any("failed" in row for row in found) else 0


def _check(job: Job, *, as_json: bool) -> int:
    from runners.recipes.needs import format_needs

    check_paths(job.recipe, job.folder)
    backend = backend_of(job)
    backend.check(job)
    rows = backend.needs(job)
    sys.stdout.write(format_json(rows) if as_json else format_needs(rows))
    over = [row for row in rows if row["peak_bytes"] > row["memory_bytes"]]
    for row in over:
        missing = row["peak_bytes"] - row["memory_bytes"]
        say(f"train: stage {row['stage']}: {missing / 1e9:,.3f} GB more than its devices have")
    return 3 if over else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 fine, 1 a rank failed, 2 bad input, 128 + n ended by signal n."""
    arguments = make_parser().parse_args(argv)
    settings = [*arguments.set, *([f"steps={arguments.steps}"] if arguments.steps is not None else [])]
    try:
        require_torch()
        jobs = [_job(path, settings, arguments) for path in arguments.recipes]
        if arguments.table:
            return _print_table(jobs, as_json=arguments.json)
        if len(jobs) > 1:
            raise InputError(f"recipe: found {len(jobs)} of them, expected one (or --table)")
        job = jobs[0]
        if arguments.check:
            return _check(job, as_json=arguments.json)
        code, summary = run_as_rank(job, os.environ) if "RANK" in os.environ else run_here(job)
    except PolygonError as error:
        say(f"train: {error}")
        return 2 if isinstance(error, InputError) else 1
    except MemoryError as error:
        say(f"train: memory: {error or 'no more of it'}")
        return 1
    except KeyboardInterrupt:  # ranks, once there, are asked to end and say so
        say("interrupted")
        return 128 + signal.SIGINT
    if summary:
        from runners.engine.summary import print_summary

        print_summary(summary, as_json=arguments.json)
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # After a lost peer the network threads of the process may never end by themselves.
    os._exit(code)
