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

from polygon.domain.errors import InputError, Phrase, fault
from polygon.domain.message import Message, is_message_data, message_from, plain

MOST_JOBS = 500
"""Oldest finished ones beyond are forgotten."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, created_s REAL NOT NULL, state TEXT NOT NULL, request TEXT NOT NULL,
    progress REAL NOT NULL DEFAULT 0, note TEXT NOT NULL DEFAULT '""', result TEXT, error TEXT
)
"""
VERSION = 1
"""Of the database: from 1 on notes and errors are JSON, texts or messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A search, or an uploaded plan (which is done from the start)."""

    id: str
    created_s: float
    state: str
    request: dict[str, Any]
    progress: float
    note: Message | str
    """What it is at; the step time once there is a plan."""
    error: Message | str
    has_plan: bool

    def to_dict(self) -> dict[str, Any]:
        """What the API says of it."""
        return {
            "id": self.id, "created_s": self.created_s, "state": self.state, "progress": self.progress,
            "note": self.note, "error": self.error, "name": str(self.request.get("name", "")),
            "has_plan": self.has_plan and not self.is_front, "kind": self.kind,
            **{key: self.request.get(key, empty) for key, empty in LABELS.items()},
        }  # fmt: skip

    @property
    def is_front(self) -> bool:
        """Whether it looks for many plans instead of one."""
        return bool(self.request.get("front"))

    @property
    def kind(self) -> str:
        """What made it: a search, a search for a front, a change of another plan, or an upload."""
        if self.is_front:
            return "front"
        return "variant" if "parent" in self.request else "search" if "problem" in self.request else "upload"


LABELS: dict[str, Any] = {
    "tags": [], "archived": False, "parent": "", "changes": {}, "objective": "time", "effort": "quick", "seed": 0,
}  # fmt: skip
"""What is told of a job beside its state, and its value where the request does not have it."""
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
            self._tell_in_json()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise fault(f"{path}", Phrase("it in use by another server"), "one of its own") from None
            raise InputError(Message("input.database", path=str(path), why=str(error))) from None

    def _tell_in_json(self) -> None:
        """What an earlier version kept as text becomes JSON, as messages are kept."""
        if self._db.execute("PRAGMA user_version").fetchone()[0] < VERSION:
            self._db.execute("UPDATE jobs SET note = json_quote(note), error = json_quote(error)")
            self._db.execute(f"PRAGMA user_version={VERSION}")

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
            job, time.time(), state, json.dumps(request), progress, result, json.dumps(note),
        )  # fmt: skip
        self._run(
            "DELETE FROM jobs WHERE state NOT IN ('queued', 'running') AND id NOT IN "
            "(SELECT id FROM jobs ORDER BY created_s DESC LIMIT ?)",
            MOST_JOBS,
        )
        return job

    def get(self, job: str) -> StoredJob | None:
        """A job by its id."""
        rows = self._run(f"SELECT {COLUMNS} FROM jobs WHERE id = ?", job)
        return _job(rows[0]) if rows else None

    def jobs(self, user: str = "", limit: int = 100) -> list[StoredJob]:
        """The newest searches and plans of a user."""
        where = "json_extract(request, '$.explain') IS NULL AND COALESCE(json_extract(request, '$.user'), '') = ?"
        sql = f"SELECT {COLUMNS} FROM jobs WHERE {where} ORDER BY created_s DESC LIMIT ?"
        return [_job(row) for row in self._run(sql, user, limit)]

    def names(self, user: str = "") -> set[str]:
        """What all searches and plans of a user are called."""
        sql = "SELECT json_extract(request, '$.name') FROM jobs WHERE COALESCE(json_extract(request, '$.user'), '') = ?"
        return {name for (name,) in self._run(sql, user) if name}

    def label(self, job: str, labels: dict[str, Any]) -> None:
        """Give a job another name, other tags, or put it away."""
        self._run("UPDATE jobs SET request = json_patch(request, ?) WHERE id = ?", json.dumps(labels), job)

    def remove(self, job: str) -> None:
        """Forget a job."""
        self._run("DELETE FROM jobs WHERE id = ?", job)

    def result(self, job: str) -> str | None:
        """Plan file (JSON text) of a job that has one."""
        rows = self._run("SELECT result FROM jobs WHERE id = ?", job)
        return rows[0][0] if rows else None

    def unfinished(self) -> list[str]:
        """Jobs that were queued or running when the program ended; they begin again."""
        return [
            row[0] for row in self._run("SELECT id FROM jobs WHERE state IN ('queued', 'running') ORDER BY created_s")
        ]

    def waiting(self, user: str | None = None) -> int:
        """Jobs that are queued or running, of all or of one user."""
        sql = "SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'running')"
        if user is None:
            return int(self._run(sql)[0][0])
        return int(self._run(f"{sql} AND COALESCE(json_extract(request, '$.user'), '') = ?", user)[0][0])

    def tell(self, job: str, progress: float, note: Message | str) -> None:
        """How far a job is."""
        sql = "UPDATE jobs SET state = 'running', progress = ?, note = ? WHERE id = ?"
        self._run(sql, progress, json.dumps(plain(note)), job)

    def keep(self, job: str, result: str) -> None:
        """What a job has found so far."""
        self._run("UPDATE jobs SET result = ? WHERE id = ?", result, job)

    def finish(
        self, job: str, state: str, *, result: str | None = None, error: Message | str = "", note: str = ""
    ) -> None:
        """The end of a job."""
        self._run(
            "UPDATE jobs SET state = ?, progress = 1, result = ?, error = ?, note = ? WHERE id = ?",
            state, result, json.dumps(plain(error)), json.dumps(note), job,
        )  # fmt: skip


def _told(text: str | None) -> Message | str:
    """A note or an error as it was told."""
    data = json.loads(text or '""')
    return message_from(data) if is_message_data(data) else str(data or "")


def _job(row: tuple[Any, ...]) -> StoredJob:
    ident, created_s, state, request, progress, note, error, has_plan = row
    return StoredJob(
        id=ident, created_s=created_s, state=state, request=json.loads(request), progress=progress,
        note=_told(note), error=_told(error), has_plan=bool(has_plan),
    )  # fmt: skip
