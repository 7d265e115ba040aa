"""What a rank writes while it trains: one JSON object a line, times in seconds since the epoch.

Types of line: `run` (once), `step` (every step), `order` (actions of a step as executed), `event` (an interval, for the
trace; only during the traced steps), `end`.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

from polygon_comm.accelerator import Accelerator, Instant

from polygon.domain.errors import InputError
from runners.engine.emulation import Pace

DIRECTIONS = {"F": "forward", "B": "backward"}
"""Parts of `compute`, by the first letter of an action's name."""


def check_nobody_writes(folder: Path) -> None:
    """Raise `InputError` where ranks of a run that still goes on keep their logs: they would be cut off."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        with path.open("a", encoding="utf-8") as file:
            _keep(file, path)


def _keep(file: TextIO, path: Path) -> None:
    """Lock a log for as long as it is open, where the file system has locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(f"{path.parent}: found logs of a run that still goes on, expected none") from None
    except OSError:
        return


class RunLog:
    """JSONL of one rank; usable from several threads."""

    def __init__(
        self,
        path: Path | None,
        traced_steps: int = 8,
        pace: Pace | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.pace = pace
        self._accelerator = accelerator or Accelerator()
        self._passing: list[tuple[str, str, Instant, Instant, int]] = []
        """Intervals that the device need not have come to."""
        self.traced_steps = traced_steps
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        """What an interval runs in while a profiler records (`torch.profiler.record_function`)."""
        self.step = 0
        self.seconds: dict[str, float] = {}
        """Seconds spent by kind of interval since the last `take_seconds`."""
        self.handed_s: dict[str, Instant] = {}
        """When messages were handed over in this step, by the action that they let start."""
        self.waited_s: dict[str, tuple[Instant, Instant]] = {}
        """From when to when actions of this step waited for their message."""
        self._lock = Lock()
        self._file: TextIO | None = None
        self._failed = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            _keep(self._file, path)
            path.open("w", encoding="utf-8").close()  # what an earlier run wrote goes once it is sure that it has ended

    def write(self, type_: str, **fields: Any) -> None:
        """Write one line."""
        if self._file is not None:
            with self._lock:
                try:
                    self._file.write(json.dumps({"type": type_, **fields}) + "\n")
                    if type_ != "event":
                        self._file.flush()
                except OSError as error:
                    self._say_failed(self._file.name, error)

    def _say_failed(self, name: str, error: OSError) -> None:
        """A log that cannot be written (a full disk) is no reason to stop training; what is held back follows later."""
        if not self._failed:
            self._failed = True
            print(f"{name}: {error.strerror}; training goes on", file=sys.stderr, flush=True)  # noqa: T201

    @contextmanager
    def interval(self, kind: str, name: str) -> Iterator[None]:
        """Time what happens inside as an interval of a kind (compute, wait, reduce, update)."""
        step, start = self.step, self._accelerator.instant()
        pace = self.pace.hold(name) if self.pace is not None and kind in ("compute", "update") else nullcontext()
        try:
            with self.annotate(f"{kind}: {name}") if self.annotate is not None else nullcontext(), pace:
                yield
        finally:
            end = self._accelerator.instant()
            if self._accelerator.later:
                self._passing.append((kind, name, start, end, step))
            else:
                self.add(kind, name, start(), end(), step)

    def add(self, kind: str, name: str, start_s: float, end_s: float, step: int) -> None:
        """Note an interval that has passed."""
        with self._lock:
            for part in (kind, DIRECTIONS[name[0]]) if kind == "compute" else (kind,):
                self.seconds[part] = self.seconds.get(part, 0.0) + end_s - start_s
        if step < self.traced_steps:
            self.write("event", kind=kind, name=name, start_s=start_s, end_s=end_s, step=step)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by kind since the last call; waits for a device that has not come to all of it."""
        passing, self._passing = self._passing, []
        for kind, name, start, end, step in passing:
            self.add(kind, name, start(), end(), step)
        with self._lock:
            seconds, self.seconds = self.seconds, {}
        return seconds

    def take_messages(self, start_s: float) -> dict[str, Any]:
        """`handed_s` and `waited_s` since the last call, in seconds after `start_s`."""
        handed, waited = self.handed_s, self.waited_s
        self.handed_s, self.waited_s = {}, {}
        return {
            "handed_s": {action: round(at() - start_s, 6) for action, at in handed.items()},
            "waited_s": {action: [round(at() - start_s, 6) for at in pair] for action, pair in waited.items()},
        }

    def close(self) -> None:
        """Write what is still held back."""
        if self._file is not None:
            with self._lock:
                file, self._file = self._file, None
                try:
                    file.close()
                except OSError as error:
                    self._say_failed(file.name, error)
