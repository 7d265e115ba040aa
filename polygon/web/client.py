"""A client of the server's API for Python programs: typed answers, checked as they come in.

from polygon.web.client import Client

client = Client("http://127.0.0.1:5000")
job = client.result(client.search(problem)["id"])
print(client.view(job["id"])["estimate"]["step_s"], client.limits(job["id"])["limits"][0])
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from polygon.domain.errors import PolygonError
from polygon.domain.message import Language
from polygon.formats.serialization import format_json
from polygon.web import responses

if TYPE_CHECKING:  # the planner takes ten times as long to load as a client that has none
    from polygon.api.planner import Problem
    from polygon.api.plans import Plan

Changes = Mapping[str, Any]
"""As `polygon.web.sliders.Changes`: what is left out stays as the plan has it."""


class RefusedError(PolygonError):
    """The server's no, in its words."""

    def __init__(self, status: int, detail: str, retry_after_s: float | None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after_s = retry_after_s
        """When one who was turned away may ask again."""


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Client:
    """A server at an address.

    Parameters
    ----------
    url : str
        As `polygon serve` says it, without a path.
    token : str
        Of a user, where the server asks for one.
    language : 'en' or 'zh'
        Of what it says.
    timeout_s : float
        Longest wait for an answer, or for the next event of a job [s].

    Raises
    ------
    RefusedError
        By every method, for an answer of 400 or more.
    pydantic.ValidationError
        For an answer that is not what its type says: the server is of another version.
    """

    def __init__(self, url: str, *, token: str = "", language: Language = "en", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept-Language": language}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s

    def _open(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else format_json(body).encode()
        asked = urllib.request.Request(f"{self.url}/api/v1{path}", data, self._headers, method=method)
        try:
            return urllib.request.urlopen(asked, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                text, wait = error.read().decode(errors="replace"), error.headers.get("Retry-After")
            try:
                detail = str(json.loads(text)["detail"])
            except (ValueError, KeyError, TypeError):
                detail = text[:200]
            raise RefusedError(error.code, detail, float(wait) if wait else None) from None

    def _ask(self, kind: Any, method: str, path: str, body: Any = None) -> Any:
        with self._open(method, path, body) as answer:
            return _reader(kind).validate_json(answer.read())

    # Searches

    def search(
        self,
        problem: Problem | Mapping[str, Any],
        *,
        name: str = "",
        objective: str = "time",
        effort: str = "quick",
        seed: int = 0,
    ) -> responses.Job:
        """Start the search of a problem, given as it is or as in its file; the model may be a catalogue's name."""
        if not isinstance(problem, Mapping):
            from polygon.formats.convert import problem_data

            problem = problem_data(problem.data)
        asked = {"problem": problem, "name": name, "objective": objective, "effort": effort, "seed": seed}
        found: responses.Job = self._ask(responses.Job, "POST", "/jobs", asked)
        return found

    def follow(self, job: str) -> Iterator[responses.Job]:
        """States of a job as they change, until it has ended."""
        with self._open("GET", f"/jobs/{_quoted(job)}/events") as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    yield _reader(responses.Job).validate_json(line[6:])

    def result(self, job: str) -> responses.Job:
        """A job once it has ended."""
        *_, last = self.follow(job)
        return last

    def stop(self, job: str) -> responses.Job:
        """Stop a search, which keeps its best plan so far."""
        found: responses.Job = self._ask(responses.Job, "DELETE", f"/jobs/{_quoted(job)}")
        return found

    def jobs(self) -> list[responses.Job]:
        """The user's newest searches and plans."""
        found: list[responses.Job] = self._ask(list[responses.Job], "GET", "/jobs")
        return found

    # Plans

    def upload(self, plan: Plan | Mapping[str, Any]) -> responses.Job:
        """Keep a plan, or what its file says, that was made elsewhere."""
        if not isinstance(plan, Mapping):
            from polygon.formats.convert_plan import plan_data

            plan = plan_data(plan.problem.data, plan.data)
        found: responses.Job = self._ask(responses.Job, "POST", "/plans", plan)
        return found

    def plan(self, plan: str) -> dict[str, Any]:
        """The plan file, as every command reads it."""
        found: dict[str, Any] = self._ask(dict[str, Any], "GET", f"/plans/{_quoted(plan)}")
        return found

    def view(self, plan: str, changes: Changes | None = None) -> responses.View:
        """Everything that is shown of a plan, with changes applied."""
        found: responses.View = self._ask(responses.View, "POST", f"/plans/{_quoted(plan)}/view", dict(changes or {}))
        return found

    def limits(self, plan: str) -> responses.Limits:
        """What limits the step, worst first."""
        found: responses.Limits = self._ask(responses.Limits, "GET", f"/plans/{_quoted(plan)}/limits")
        return found

    def keep(self, plan: str, name: str, changes: Changes) -> responses.Job:
        """Keep a plan with changes as a plan of its own."""
        asked = {"name": name, "changes": dict(changes)}
        found: responses.Job = self._ask(responses.Job, "POST", f"/plans/{_quoted(plan)}/variants", asked)
        return found

    # Runs

    def runs(self) -> responses.RunList:
        """Runs that the server knows of."""
        found: responses.RunList = self._ask(responses.RunList, "GET", "/runs")
        return found

    def run(self, name: str) -> responses.FollowedRun:
        """How far a run is."""
        found: responses.FollowedRun = self._ask(responses.FollowedRun, "GET", f"/runs/{_quoted(name)}")
        return found

    def comparison(self, name: str) -> responses.Comparison:
        """The predicted step of a run beside the measured ones."""
        found: responses.Comparison = self._ask(responses.Comparison, "GET", f"/runs/{_quoted(name)}/comparison")
        return found


def _quoted(part: str) -> str:
    return urllib.parse.quote(part, safe="")
