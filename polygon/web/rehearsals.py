"""Rehearsals that the server starts on its own machine, where its owner allows it: `runners.launch --rehearse`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.formats.convert_plan import plan_data
from polygon.formats.serialization import format_json
from polygon.planning.rehearsal import rehearsal_problem
from polygon.web.jobs import RETRY_S, BusyError
from polygon.web.runs import LOG, PLAN, Mark, Runs, State

ASKED = "asked.json"
"""The plan as it was planned; `plan.json` beside it is what is run."""
MOST_RUNNING = 1
MOST_STEPS, USUAL_STEPS = 500, 20
MOST_RANKS, USUAL_RANKS = 16, 4
NICENESS = 10
"""Of the ranks: the page comes first."""
GRACE_S = 5.0
"""That ranks have when the server itself ends."""


class Rehearsals:
    """Processes of this server, by the names of their runs."""

    def __init__(self, runs: Runs, *, allowed: bool) -> None:
        self.allowed = allowed and importlib.util.find_spec("runners") is not None
        self._runs = runs
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: set[str] = set()

    def start(self, name: str, job: str, user: str, problem: Problem, plan: Plan, *, steps: int, ranks: int) -> str:
        """Rehearse a plan; the name of its run.

        Raises
        ------
        InputError
            Where this server may not, and for a plan that cannot be scaled down so far.
        BusyError
            While another one runs.
        """
        if not self.allowed:
            raise InputError(Message("refused.rehearsals"))
        small, scaled = rehearsal_problem(problem, plan, max_ranks=ranks)
        texts = {ASKED: format_json(plan_data(problem, plan)), PLAN: format_json(plan_data(small, scaled))}
        with self._lock:
            if len(self._running) >= MOST_RUNNING:
                raise BusyError(Message("refused.rehearsal_runs", seconds=RETRY_S))
            mark = Mark(kind="rehearsal", plan=job, user=user, started_s=time.time(), wanted=steps, state="running")
            name = self._runs.add(name, mark, texts)
            folder = self._runs.folder / name
            command = [sys.executable, "-m", "runners.launch", ASKED, "--rehearse", "--max-ranks", str(ranks)]
            command += ["--steps", str(steps), "--log-dir", ".", "--device", "cpu"]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            with (folder / LOG).open("wb") as log:
                process = subprocess.Popen(
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            self._running[name] = process
        threading.Thread(target=self._wait, args=(name, mark, process), daemon=True).start()
        return name

    def _wait(self, name: str, mark: Mark, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        state = "stopped" if name in self._stopped else "failed" if code else "done"
        folder = self._runs.folder / name
        if folder.is_dir():
            replace(mark, state=state).write(folder)
        with self._lock:
            self._running.pop(name, None)
            self._stopped.discard(name)

    def stop(self, name: str) -> None:
        """Ask one to end as Ctrl-C would; one that has ended is left as it is."""
        with self._lock:
            process = self._running.get(name)
            if process is not None:
                self._stopped.add(name)
                process.send_signal(signal.SIGINT)

    def state(self, name: str, mark: Mark | None, *, ended: bool) -> State:
        """How it is with a run."""
        if name in self._running:
            return "running"
        if mark is None:
            return "done" if ended else "open"
        # What ran when another server ended, ended with it.
        return "stopped" if mark.state == "running" else mark.state  # type: ignore[return-value]

    def close(self) -> None:
        """End all that run."""
        with self._lock:
            running = dict(self._running)
            self._stopped |= set(running)
        for process in running.values():
            process.terminate()
        for process in running.values():
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
