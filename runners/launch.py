"""Run all ranks of a plan on this machine, say what they do, and stop all when one fails.

    python -m runners.launch plan.json --rehearse --max-ranks 8 --steps 50

Ranks are forked from a process that has torch imported, so that eight of them start in a second.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

if __package__ in (None, ""):
    _root = Path(__file__).resolve().parents[1]
    sys.path[0] = str(_root)
    sys.path.insert(1, str(_root / "comm"))

from polygon.commands.cli import ProgramParser, handled_signals
from polygon.domain.errors import InputError, PolygonError
from polygon.domain.plan import Plan, Problem
from polygon.formats.files import make_folder, write_plan
from polygon.messages.report import three
from runners.engine.arguments import add_training_options, options_from, read_run
from runners.engine.options import Options
from runners.host_memory import available_memory
from runners.recipes.predicted_memory import predicted_peaks

PR_SET_PDEATHSIG = 1
FAILURE_GRACE_S, INTERRUPT_GRACE_S = 3.0, 60.0
"""How long ranks have to end by themselves, and after an interruption to finish the step and save."""


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


@dataclass
class Rank:
    """A rank as the launcher sees it."""

    number: int
    pid: int
    pipe: int
    text: bytes = b""
    last_line: str = ""
    status: int | None = None

    def outcome(self) -> str:
        """How it ended."""
        assert self.status is not None
        if os.WIFSIGNALED(self.status):
            return f"killed by {signal.Signals(os.WTERMSIG(self.status)).name}"
        return f"exit {os.WEXITSTATUS(self.status)}: {self.last_line}"

    @property
    def asked_by(self) -> int:
        """Signal on which it saved and ended, as one that is asked to stop does; 0: none."""
        assert self.status is not None
        number = os.WEXITSTATUS(self.status) - 128 if os.WIFEXITED(self.status) else 0
        return number if number in (signal.SIGINT, signal.SIGTERM) else 0

    def severity(self) -> int:
        """Which of several failures is the cause: a killed rank before bad input before a lost peer."""
        assert self.status is not None
        if os.WIFSIGNALED(self.status):
            return 0
        return {2: 1, 1: 3}.get(os.WEXITSTATUS(self.status), 2)


@dataclass
class LocalRanks(ABC):
    """Starts ranks on this machine, passes on what they print, and ends all when one fails."""

    ranks: list[Rank] = field(default_factory=list, kw_only=True)
    interrupted: int = field(default=0, kw_only=True)
    interruptions: int = field(default=0, kw_only=True)

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks there are."""

    @abstractmethod
    def train(self, number: int, host: str, port: int, listen_fd: int | None) -> int:
        """What a rank does in its own process; its exit code. Rank 0 gets the socket that listens at the port."""

    def meeting_point(self) -> socket.socket:
        """A socket that listens where rank 0 will be."""
        return socket.create_server(("127.0.0.1", 0))

    def settle(self, number: int) -> None:  # noqa: B027 - on one machine there is nothing to do
        """Called in a rank's process before anything else: where it lives."""

    def start(self) -> None:
        """Fork all ranks."""
        listener = self.meeting_point()
        os.set_inheritable(listener.fileno(), True)
        host, port = listener.getsockname()
        for number in range(self.world_size):
            out, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(out)
                self._be_rank(number, host, port, listener if number == 0 else None, into)
            os.close(into)
            self.ranks.append(Rank(number=number, pid=pid, pipe=out))
        listener.close()

    def _be_rank(self, number: int, host: str, port: int, listener: socket.socket | None, into: int) -> NoReturn:
        """What a forked child does; never returns."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # Ctrl-C reaches the whole terminal group; the launcher alone decides what it means.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(into, 1)
            os.dup2(into, 2)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            self.settle(number)
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            code = self.train(number, host, port, None if listener is None else listener.detach())
        except PolygonError as error:
            say(str(error))
            code = 2 if isinstance(error, InputError) else 1
        except MemoryError as error:
            say(f"memory: {error or 'no more of it'}")
            code = 3
        except BaseException:  # noqa: BLE001 - a bug in a rank is shown whole, then the rank ends
            import traceback

            traceback.print_exc()
            code = 3
        finally:
            sys.stderr.flush()
            os._exit(code)

    def watch(self) -> Rank | None:
        """Pass on output until all ranks have ended; the rank that failed first, if any."""
        selector = selectors.DefaultSelector()
        for rank in self.ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        guilty: Rank | None = None
        deadline = float("inf")
        while any(rank.status is None for rank in self.ranks):
            for key, _ in selector.select(timeout=0.05):
                self._read(selector, key.data)
            ended = self._reap()
            failed = [rank for rank in ended if rank.status != 0]
            if failed and guilty is None and not self.interrupted:
                first = min(failed, key=Rank.severity)
                self.interrupted = first.asked_by
                guilty = None if self.interrupted else first
            if (guilty is not None or self.interrupted) and deadline == float("inf"):
                deadline = time.monotonic() + (INTERRUPT_GRACE_S if self.interrupted else FAILURE_GRACE_S)
                self._signal_all(signal.SIGTERM)
            if time.monotonic() > deadline or self.interruptions > 1:
                self._signal_all(signal.SIGKILL)
        for rank in self.ranks:
            if rank.pipe in selector.get_map():
                self._read(selector, rank)
        selector.close()
        return guilty

    def _read(self, selector: selectors.BaseSelector, rank: Rank) -> None:
        data = os.read(rank.pipe, 65536)
        if not data:
            selector.unregister(rank.pipe)
            os.close(rank.pipe)
        *lines, rank.text = (rank.text + data).split(b"\n")
        if not data and rank.text:
            lines, rank.text = [rank.text], b""
        for line in lines:
            text = line.decode(errors="replace")
            if text.strip():
                rank.last_line = text.strip()
            say(f"[rank {rank.number}] {text}")

    def _reap(self) -> list[Rank]:
        ended = []
        for rank in self.ranks:
            if rank.status is None:
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    rank.status = status
                    ended.append(rank)
        return ended

    def _signal_all(self, number: int) -> None:
        for rank in self.ranks:
            if rank.status is None:
                os.kill(rank.pid, number)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """First signal: ask the ranks to end; second: make them."""
        self.interrupted = number
        self.interruptions += 1

    def run(self) -> Rank | None:
        """Run all ranks to their end; the one that failed first, if any."""
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.world_size)))
        # Imported before forking: a second each for torch and for what its optimizers import on their first step.
        import torch._dynamo  # noqa: F401

        # Nor does every rank look through all that was loaded, which would copy it, whenever Python collects garbage.
        gc.freeze()
        with handled_signals((signal.SIGINT, signal.SIGTERM), self.interrupt):
            try:
                self.start()
                return self.watch()
            finally:
                self._signal_all(signal.SIGKILL)


@dataclass
class Launcher(LocalRanks):
    """The ranks of a plan."""

    problem: Problem
    plan: Plan
    options: Options

    @property
    def world_size(self) -> int:
        """The plan's ranks."""
        return self.plan.world_size

    def train(self, number: int, host: str, port: int, listen_fd: int | None) -> int:
        """A rank of the plan."""
        from runners.dist_runner import run_rank

        return run_rank(self.problem, self.plan, number, host, port, self.options, listen_fd)


def make_parser() -> ProgramParser:
    """The command line."""
    parser = ProgramParser("launch", __doc__)
    parser.add_argument("plan", type=Path, help="plan file of polygon.search")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    add_training_options(parser)
    return parser


def check_fits_here(problem: Problem, plan: Plan, options: Options) -> None:
    """Raise `InputError` for a plan whose ranks need more memory than is available here, before it is taken down."""
    if options.model_file is None:
        needed = sum(peak.total_bytes for peak in predicted_peaks(problem, plan).values())
        remedy = "--rehearse runs the plan's shape with a small model"
        check_memory_here(needed, plan.world_size, options.device, remedy)


def check_memory_here(needed_bytes: float, ranks: int, device: str, remedy: str) -> None:
    """Raise `InputError` for ranks on CPUs that need more memory than is available here."""
    on_gpus = device == "cuda" or (device == "auto" and Path("/dev/nvidia0").exists())
    here = available_memory()
    if needed_bytes > here.n_bytes and not on_gpus:
        raise InputError(
            f"memory: found {three(here.n_bytes / 1e9)} GB {here.where}, "
            f"expected the {needed_bytes / 1e9:,.0f} GB that {ranks} ranks need ({remedy})"
        )


def read_data_once(problem: Problem, options: Options) -> None:
    """Find what is wrong with the data before ranks start, and prepare what all of them read."""
    if options.model_file is not None:  # it may bring its own
        return
    from runners.data.samples import digest_of
    from runners.data.sources import training_and_held_out

    for samples in training_and_held_out(problem.model, problem.batch.seq_len, options.seed, options.data):
        if samples is not None:
            digest_of(samples)  # reads some: of the wrong type of numbers or tokenizer, these are wrong


def run(
    problem: Problem, plan: Plan, options: Options, make: Callable[[Problem, Plan, Options], Launcher] = Launcher
) -> tuple[int, dict[str, Any]]:
    """Run all ranks; exit code and summary. The plan as run is kept in the log directory."""
    from runners.engine.checkpoint import prepare_folder
    from runners.engine.log import check_nobody_writes
    from runners.engine.rank_layout import Layout
    from runners.engine.run import check_options
    from runners.engine.summary import summarise, write_trace
    from runners.engine.trackers import check_trackers

    check_options(problem, plan, options)
    check_trackers(options.track)
    check_fits_here(problem, plan, options)
    read_data_once(problem, options)
    launcher = make(problem, plan, options)
    assert options.log_dir is not None
    make_folder(options.log_dir)
    check_nobody_writes(options.log_dir)
    if options.checkpoint_dir is not None:
        # A model of the user's own has sizes that the plan's does not say; its ranks know them.
        model = problem.model if options.model_file is None else None
        prepare_folder(
            options.checkpoint_dir, resume=options.resume, model=model, seed=options.seed, lora=options.additions
        )
    write_plan(options.log_dir / "plan.json", problem, plan)
    start_s = time.monotonic()
    guilty = launcher.run()
    try:
        write_trace(problem, plan, options.log_dir)
    except InputError as error:  # a full disk: what was trained is none the worse, and its figures are to be seen
        say(str(error))
    if launcher.interrupted:
        # A rank that was asked to end and did so says which signal it was; another code is one that could not save.
        unsaved = [rank for rank in launcher.ranks if rank.status is not None and rank.severity() == 3]
        if unsaved:
            say(f"interrupted; rank {unsaved[0].number}: {unsaved[0].outcome()}; logs in {options.log_dir}")
            return 1, {}
        say(f"interrupted; all {plan.world_size} ranks ended, logs in {options.log_dir}")
        return 128 + launcher.interrupted, {}
    if guilty is not None:
        say(f"failed: {Layout(problem, plan).describe(guilty.number)}: {guilty.outcome()}; all ranks stopped")
        return (2 if guilty.severity() == 1 else 1), {}
    return 0, summarise(problem, plan, options.log_dir) | {"wall_s": time.monotonic() - start_s}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code: 0 fine, 1 a rank failed, 2 bad input, 128 + n ended by signal n."""
    arguments = make_parser().parse_args(argv)
    try:
        problem, plan = read_run(arguments)
        options = replace(options_from(arguments), device=arguments.device)
        widths = "-".join(str(stage.width) for stage in plan.stages)
        ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
        say(f"{ranks} in stages of widths {widths}, {plan.micro_batches} micro-batches a step")
        code, summary = run(problem, plan, options)
    except PolygonError as error:
        say(f"launch: {error}")
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:  # the ranks, once there, are asked to end and say so
        say("interrupted before any rank was started")
        return 128 + signal.SIGINT
    if summary:
        from runners.engine.summary import print_summary

        print_summary(summary, as_json=arguments.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
