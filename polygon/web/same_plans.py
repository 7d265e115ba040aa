"""Plans that are the same, as strangers have who planned the same example: what one is asked answers for all."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from fastapi import HTTPException

MOST_JOBS = 10_000
"""Whose plans are known, those asked about last."""

Read = Callable[[str], tuple[str, Mapping[str, Any]]]
"""From a job to its plan's file and the changes that made it; raises what is to be said where there is none."""


class SamePlans:
    """Jobs by what their plans are: the file, and what it cannot say of a variant."""

    def __init__(self, read: Read) -> None:
        self._read_job = read
        self._lock = Lock()
        self._plans: OrderedDict[str, str] = OrderedDict()
        self._jobs: dict[str, list[str]] = {}

    def known(self, job: str) -> str | None:
        """What is the same for all jobs with this plan; None where the plan was not looked at."""
        with self._lock:
            if job in self._plans:
                self._plans.move_to_end(job)
            return self._plans.get(job)

    def look(self, job: str) -> str:
        """The same, of a plan that is read where it is not known."""
        known = self.known(job)
        if known is not None:
            return known
        text, changes = self._read_job(job)
        plan = hashlib.sha256(f"{json.dumps(dict(changes), sort_keys=True)}\n{text}".encode()).hexdigest()
        with self._lock:
            if job not in self._plans:
                self._plans[job] = plan
                self._jobs.setdefault(plan, []).append(job)
        while len(self._plans) > MOST_JOBS:
            self.forget(next(iter(self._plans)))
        return plan

    def forget(self, job: str) -> None:
        """Look at its plan anew, if there still is one."""
        with self._lock:
            plan = self._plans.pop(job, None)
            if plan is not None:
                self._jobs[plan].remove(job)
                if not self._jobs[plan]:
                    del self._jobs[plan]

    def read(self, plan: str) -> tuple[str, Mapping[str, Any]]:
        """The file and changes of one of the jobs with this plan; raises as they do where none has it any more."""
        while True:
            with self._lock:
                jobs = list(self._jobs.get(plan, ()))
            try:
                return self._read_job(jobs[0] if jobs else "")
            except HTTPException:
                if len(jobs) < 2:
                    raise
                self.forget(jobs[0])
