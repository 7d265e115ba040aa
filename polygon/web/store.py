"""Jobs and plans in one SQLite file: what was asked, how far it is, what came out."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polygon.domain.errors import InputError

MOST_JOBS = 500
"""Oldest finished ones beyond are forgotten."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, created_s REAL NOT NULL, state TEXT NOT NULL, request TEXT NOT NULL,
    progress REAL NOT NULL DEFAULT 0, note TEXT NOT NULL DEFAULT '', result TEXT, error TEXT
)
"""
STATES = ("queued", "running", "done", "cancelled", "infeasible", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A search, or an uploaded plan (which is done from the start)."""

    id: str
    created_s: float
    state: str
    request: dict[str, Any]
    progress: float
    note: str
    """What it is at; the step time once there is a plan."""
    error: str
    has_plan: bool

    def to_dict(self) -> dict[str, Any]:
        """What the API says of it."""
        return {
            "id": self.id, "created_s": self.created_s, "state": self.state, "progress": self.progress,
            "note": self.note, "error": self.error, "name": str(self.request.get("name", "")),
            "has_plan": self.has_plan,
        }  # fmt: skip


COLUMNS = "id, created_s, state, request, progress, note, error, result IS NOT NULL"


class Store:
    """One connection, one lock: writers are few and short."""

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            # Two servers would both work on the jobs that one has not finished.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(SCHEMA)
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise InputError(f"{path}: found it in use by another server, expected one of its own") from None
            raise InputError(f"{path}: cannot be used as a database: {error}") from None

    def close(self) -> None:
        """End the connection."""
        self._db.close()

    def _run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def add(
        self,
        request: dict[str, Any],
        state: str = "queued",
        result: str | None = None,
        *,
        job: str | None = None,
        note: str = "",
    ) -> str:
        """A new job; returns its id, which nobody can guess unless it is given (it then replaces one of that id)."""
        job = job or secrets.token_urlsafe(9)
        progress = 1.0 if result else 0.0
        self._run(
            "INSERT OR REPLACE INTO jobs (id, created_s, state, request, progress, result, note) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            job, time.time(), state, json.dumps(request), progress, result, note,
        )  # fmt: skip
        self._run(
            "DELETE FROM jobs WHERE state NOT IN ('queued', 'running') AND id NOT IN "
            "(SELECT id FROM jobs ORDER BY created_s DESC LIMIT ?)",
            MOST_JOBS,
        )
        return job

    def get(self, job: str) -> Job | None:
        """A job by its id."""
        rows = self._run(f"SELECT {COLUMNS} FROM jobs WHERE id = ?", job)
        return _job(rows[0]) if rows else None

    def jobs(self, limit: int = 50) -> list[Job]:
        """The newest searches and plans."""
        where = "json_extract(request, '$.explain') IS NULL"
        sql = f"SELECT {COLUMNS} FROM jobs WHERE {where} ORDER BY created_s DESC LIMIT ?"
        return [_job(row) for row in self._run(sql, limit)]

    def result(self, job: str) -> str | None:
        """Plan file (JSON text) of a job that has one."""
        rows = self._run("SELECT result FROM jobs WHERE id = ?", job)
        return rows[0][0] if rows else None

    def unfinished(self) -> list[str]:
        """Jobs that were queued or running when the program ended; they begin again."""
        return [
            row[0] for row in self._run("SELECT id FROM jobs WHERE state IN ('queued', 'running') ORDER BY created_s")
        ]

    def waiting(self) -> int:
        """Jobs that are queued or running."""
        return int(self._run("SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'running')")[0][0])

    def tell(self, job: str, progress: float, note: str) -> None:
        """How far a job is."""
        self._run("UPDATE jobs SET state = 'running', progress = ?, note = ? WHERE id = ?", progress, note, job)

    def finish(self, job: str, state: str, *, result: str | None = None, error: str = "", note: str = "") -> None:
        """The end of a job."""
        self._run(
            "UPDATE jobs SET state = ?, progress = 1, result = ?, error = ?, note = ? WHERE id = ?",
            state, result, error, note, job,
        )  # fmt: skip


def _job(row: tuple[Any, ...]) -> Job:
    ident, created_s, state, request, progress, note, error, has_plan = row
    return Job(
        id=ident, created_s=created_s, state=state, request=json.loads(request), progress=progress, note=note,
        error=error or "", has_plan=bool(has_plan),
    )  # fmt: skip
