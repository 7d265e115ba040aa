"""What ranks write while they train: `rank-N.jsonl`, a JSON object a line, followed while it grows.

Types of line: `run` (once, the first), `step`, `order`, `event` (an interval of a traced step), `note`, `end`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from polygon.domain.errors import fault
from polygon.domain.message import Message

EVENT = b'{"type": "event"'
"""How the lines begin of which there are most."""

HEAD_BYTES = 400
"""By which a log is told from another one in its place: its first line says when it began."""


def rank_log(directory: Path, rank: int) -> Path:
    """Where a rank writes."""
    return directory / f"rank-{rank}.jsonl"


def line_of(name: str, line: int) -> Message:
    """A line of a log, from 1, as the place of a fault."""
    return Message("input.line_of", file=name, line=line)


def usual_step_s(seconds: Sequence[float]) -> float:
    """Median of the steps of a run (at least one) without the first, which opens connections and warms caches.

    Regions that only exchange gradients lead by turns, and steps alternate: two in a row are taken together.
    """
    steady = seconds[1:] or seconds
    return median((a + b) / 2 for a, b in pairwise(steady)) if len(steady) > 1 else steady[0]


class LogFollower:
    """Reads a log as far as it goes, and goes on from there when asked again.

    Parameters
    ----------
    path : Path
        Need not be there yet.
    events : bool
        Whether lines of type `event` are wanted, which are most of a traced run.
    """

    def __init__(self, path: Path, *, events: bool = True) -> None:
        self.path = path
        self._events = events
        self._offset = 0
        self._head = b""
        self.line = 0
        """Number of the line that was read last, from 1."""
        self.skipped = 0
        """Lines of type `event` that were not wanted."""

    def new(self) -> Iterator[dict[str, Any]]:
        """Lines that came since; a last one that is not whole yet (or was cut short by a kill) is left for later.

        A file that begins otherwise than before, or has become shorter, was begun anew and is read from its start.

        Raises
        ------
        InputError
            For a line that is no JSON object with a type.
        """
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            head, whole = file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
            if not head.startswith(self._head) or whole < self._offset:
                self._offset = self.line = 0
            self._head = head  # read once: between two looks another may have taken its place
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self.line += 1
                if not self._events and line.startswith(EVENT):
                    self.skipped += 1
                    continue
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    entry = None
                if not isinstance(entry, dict) or "type" not in entry:
                    raise fault(self.place, line[:60].decode(errors="replace").strip(), "lines of a run's log")
                yield entry

    @property
    def place(self) -> Message:
        """What a fault of the line that was read last is told by."""
        return line_of(self.path.name, self.line)


def log_lines(directory: Path, rank: int) -> Iterator[dict[str, Any]]:
    """All that a rank wrote, events too."""
    return LogFollower(rank_log(directory, rank)).new()
