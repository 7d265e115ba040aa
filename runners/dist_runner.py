"""Run one rank of a plan: the same command on every device, with its own --rank.

    python runners/dist_runner.py --plan plan.json --dist-url tcp://10.0.0.1:9000 --world-size 8 --rank 3

Under torchrun the environment says where and who: `torchrun --nproc-per-node 8 runners/dist_runner.py --plan p.json`.
GLOO_SOCKET_IFNAME names the network interface where the one towards --dist-url is not the right one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if __package__ in (None, ""):  # run by path: this folder must not shadow other modules, and the root must be found
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands.cli import ProgramParser, handled_signals, stop_signals
from polygon.domain.errors import InputError, PolygonError
from polygon.domain.plan import Plan, Problem
from polygon.formats.files import make_folder, write_plan
from polygon.formats.run_log import rank_log
from runners.engine.arguments import add_training_options, options_from, read_run
from runners.engine.options import Options
from runners.engine.summary import format_validation, print_summary, summarise, write_trace

if TYPE_CHECKING:
    from runners.data.samples import Samples, Shuffled


def make_parser() -> ProgramParser:
    """The command line."""
    parser = ProgramParser("dist_runner", __doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan file of polygon.search")
    parser.add_argument("--dist-url", help="tcp://HOST:PORT where rank 0 listens (default: torchrun's environment)")
    parser.add_argument("--world-size", type=int, help="ranks in all (default: torchrun's environment)")
    parser.add_argument("--rank", type=int, help="this one, from 0 (default: torchrun's environment)")
    add_training_options(parser)
    return parser


def meeting_point(
    dist_url: str | None, world_size: int | None, rank: int | None, environment: Mapping[str, str]
) -> tuple[str, int, int, int]:
    """Host, port, world size and rank, from the options or else from torchrun's environment."""
    if dist_url is None and "MASTER_ADDR" in environment:
        dist_url = f"tcp://{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '')}"
    if dist_url is None:
        raise InputError("--dist-url: found none, expected tcp://HOST:PORT (or torchrun's MASTER_ADDR and MASTER_PORT)")
    parts = urlsplit(dist_url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise InputError(f"--dist-url: found {dist_url!r}, expected tcp://HOST:PORT")
    numbers = {}
    for option, variable, value in (("--world-size", "WORLD_SIZE", world_size), ("--rank", "RANK", rank)):
        text = environment.get(variable) if value is None else str(value)
        if text is None or not text.isdecimal():
            raise InputError(
                f"{option}: found {text or 'none'}, expected a whole number >= 0 (or torchrun's {variable})"
            )
        numbers[option] = int(text)
    return parts.hostname, port, numbers["--world-size"], numbers["--rank"]


def check_place(plan: Plan, world_size: int, rank: int) -> None:
    """Require the plan's world size and a rank in it."""
    if world_size != plan.world_size:
        raise InputError(f"--world-size: found {world_size}, expected {plan.world_size}, the ranks of the plan")
    if rank >= world_size:
        raise InputError(f"--rank: found {rank}, expected 0..{world_size - 1}")


def print_progress(result: dict[str, Any]) -> None:
    """One line a step."""
    loss, norm, rate = result["loss"], result["gradient_norm"], result["tokens_per_s"]
    text = f"step {result['step']:5d}  loss {loss:.4f}  norm {norm:.3f}  {rate:,.0f} tokens/s"
    print(f"{text}{format_validation(result)}", file=sys.stderr)  # noqa: T201


def end_process(message: str) -> None:
    """What to do when some rank was lost: say so and end at once, whatever the other threads wait for."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)


def run_rank(
    problem: Problem,
    plan: Plan,
    rank: int,
    host: str,
    port: int,
    options: Options,
    listen_fd: int | None = None,
    samples: Samples | None = None,
    before_steps: Callable[[], None] = lambda: None,
    validation: Shuffled | None = None,
) -> int:
    """Train; SIGTERM and SIGINT end the run after the current step, with a checkpoint where one is wanted.

    Parameters
    ----------
    problem, plan, rank, host, port, options, listen_fd, samples, validation
        As `runners.engine.run.train` takes them.
    before_steps : callable
        Called when the model is built, before the first step.

    Returns
    -------
    int
        Exit code: 0, or 128 + signal where the run was stopped by a signal (on any rank: then by SIGTERM).
    """
    from runners.engine.run import train
    from runners.engine.training import Training

    received: list[int] = []
    handlers = ExitStack()

    def listen(training: Training) -> None:
        before_steps()

        def stop(number: int, frame: FrameType | None) -> None:
            received.append(number)
            training.stop_requested.set()

        handlers.enter_context(handled_signals(stop_signals(), stop))

    report = print_progress if rank == 0 else (lambda result: None)
    with handlers:
        finished = train(
            problem,
            plan,
            rank,
            host,
            port,
            options,
            on_loss=end_process,
            report=report,
            on_start=listen,
            listen_fd=listen_fd,
            samples=samples,
            validation=validation,
        )
    return 0 if finished else 128 + (received or [signal.SIGTERM])[0]


def keep_plan(problem: Problem, plan: Plan, folder: Path) -> None:
    """Write the plan as it is run beside the logs; where that fails a line says so, and training goes on."""
    try:
        make_folder(folder)
        write_plan(folder / "plan.json", problem, plan)
    except InputError as error:
        print(error, file=sys.stderr)  # noqa: T201


def sum_up(problem: Problem, plan: Plan, folder: Path, seconds: float) -> None:
    """Trace, lines of steps and figures of all ranks, as the launcher has them, where their logs are in one folder."""
    missing = [rank for rank in range(plan.world_size) if not rank_log(folder, rank).is_file()]
    if missing:
        what = f"rank-{missing[0]}.jsonl" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        print(f"{folder}: {what} are on other hosts: no figures of all ranks", file=sys.stderr)  # noqa: T201
        return
    try:
        write_trace(problem, plan, folder)
    except InputError as error:
        print(error, file=sys.stderr)  # noqa: T201
    print_summary(summarise(problem, plan, folder) | {"wall_s": seconds}, as_json=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 fine, 1 a peer was lost, 2 bad input, 128 + n stopped by signal n."""
    arguments = make_parser().parse_args(argv)
    try:
        options = options_from(arguments)
        problem, plan = read_run(arguments)
        host, port, world_size, rank = meeting_point(
            arguments.dist_url, arguments.world_size, arguments.rank, os.environ
        )
        check_place(plan, world_size, rank)
        folder, start_s = options.log_dir, time.monotonic()
        if rank > 0 or folder is None:
            return run_rank(problem, plan, rank, host, port, options)
        code = run_rank(problem, plan, rank, host, port, options, before_steps=lambda: keep_plan(problem, plan, folder))
        if code == 0:
            sum_up(problem, plan, folder, time.monotonic() - start_s)
        return code
    except PolygonError as error:
        print(f"dist_runner: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:  # before the first step, or when all is done: between, steps end first
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 128 + signal.SIGINT


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # After a lost peer the network threads of the process may never end by themselves.
    os._exit(code)
