"""Starts our programs in processes of their own that need not import torch anew: that takes five seconds a process.

What is started is a program's `main` with its arguments, folder, environment, standard output and error, and signals,
as from a shell. How a program is found by its path or module name is tested where real commands are run.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from tests.patience import PATIENCE_S
from tests.real_ranks import CONTEXT


def _enter(
    main: Callable[[list[str]], int],
    words: list[str],
    folder: str,
    environment: dict[str, str],
    *ends: Connection,
    forks: bool = False,
) -> None:
    """Be the program; never returns."""
    for number, end in enumerate(ends, start=1):
        os.dup2(end.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if forks:
        _fork_from_here()
    try:
        code = main(words)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - the test reads it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_from_here() -> None:
    """Let what this process starts by `multiprocessing` be forked from a copy of it, which has loaded what it has.

    A server of forks of its own would import all of that anew.
    """

    def fork(_: object, words: Sequence[str], passed: Sequence[int]) -> int:
        process = os.fork()
        if process == 0:
            with suppress(BaseException):
                begin = 3
                for number in sorted(passed):  # a program that is started anew has no others
                    os.closerange(begin, number)
                    begin = number + 1
                os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
                exec(words[-1])
            os._exit(0)
        return process

    spawn, util.spawnv_passfds = util.spawnv_passfds, fork
    try:
        forkserver.set_forkserver_preload([])
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


class Program:
    """A running program, with what the tests use of `subprocess.Popen`; on leaving a `with` block it is killed.

    Parameters
    ----------
    main : callable
        Of a module that processes forked from the server can import; its exit code is what it returns.
    words : sequence
        Its arguments.
    folder : Path
        Where it runs.
    environment : dict, optional
        All its variables; this process's by default. Libraries that the server has loaded do not read theirs again.
    forks : bool
        Whether it starts processes by `multiprocessing` itself.
    """

    def __init__(
        self,
        main: Callable[[list[str]], int],
        words: Sequence[object],
        folder: Path,
        environment: dict[str, str] | None = None,
        *,
        forks: bool = False,
    ) -> None:
        ours, theirs = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(2)), strict=True)
        arguments = main, [str(word) for word in words], str(folder), dict(environment or os.environ), *theirs
        self.process = CONTEXT.Process(target=_enter, args=arguments, kwargs={"forks": forks}, daemon=not forks)
        self.process.start()
        for end in theirs:
            end.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno()), encoding="utf-8") for end in ours)
        for end in ours:
            end.close()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, that of a signal negative; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """As a shell would."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code, at its end."""
        self.process.join(PATIENCE_S)
        assert self.returncode is not None, f"{self.pid} did not end within {PATIENCE_S} s"
        return self.returncode

    def said(self) -> str:
        """The rest of standard error, at its end."""
        text = self.stderr.read()
        self.wait()
        return text

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.stdout.close()
        self.stderr.close()


def ran(
    main: Callable[[list[str]], int], words: Sequence[object], folder: Path, environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a program that ended; the output fits a pipe or ends last."""
    with Program(main, words, folder, environment) as program:
        said = program.said()
        return program.wait(), program.stdout.read(), said
