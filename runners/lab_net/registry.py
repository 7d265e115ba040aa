"""The list of running labs: a small folder per lab, so that other commands find it and a dead one can be swept away."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from runners.lab_net.linux import outer_user
from runners.relay import end_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """A lab as its folder describes it."""

    name: str
    pid: int
    started_ticks: int
    """Start time of the process [clock ticks since boot]; tells a process from a later one of the same number."""
    cluster: str
    hosts: list[str]
    namespaces: list[int]
    """File descriptors, in the lab's process, of the hosts' network namespaces."""

    @property
    def alive(self) -> bool:
        """Whether the lab's process still runs."""
        return start_ticks(self.pid) == self.started_ticks

    @property
    def folder(self) -> Path:
        """Where the record and the control socket are."""
        return labs_folder() / self.name


def labs_folder() -> Path:
    """Folder of all labs of this user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"polygon-labs-{outer_user()}"


def start_ticks(pid: int) -> int:
    """When a process started [clock ticks since boot]; -1 where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text.rsplit(")", 1)[1].split()[19])


def register(record: LabRecord) -> None:
    """Write a lab's record."""
    record.folder.mkdir(parents=True, exist_ok=True)
    (record.folder / "lab.json").write_text(json.dumps(asdict(record)))


def unregister(name: str) -> None:
    """Remove a lab's folder."""
    shutil.rmtree(labs_folder() / name, ignore_errors=True)


def labs() -> list[LabRecord]:
    """Every recorded lab, running or dead."""
    found = []
    for file in sorted(labs_folder().glob("*/lab.json")):
        try:
            found.append(LabRecord(**json.loads(file.read_text())))
        except (OSError, ValueError, TypeError):
            continue  # being written or removed by its lab
    return found


def clean_up() -> tuple[list[str], int]:
    """Sweep away what dead labs left: their processes and folders. Running labs are left alone.

    Returns
    -------
    tuple
        Names of the labs, and how many processes were ended. Namespaces and devices need no sweeping: they vanish with
        the processes.
    """
    dead = [record for record in labs() if not record.alive]
    ended = sum(end_processes(record.name) for record in dead)
    for record in dead:
        unregister(record.name)
    return [record.name for record in dead], ended
