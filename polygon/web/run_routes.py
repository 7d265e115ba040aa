"""Operations of the API on runs: list, follow, hold against the prediction, open files of one, rehearse, stop."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.formats.convert_plan import plan_data
from polygon.formats.schema import Strict
from polygon.formats.serialization import format_json
from polygon.web import responses
from polygon.web.answers import Answers, compact
from polygon.web.language import Asked
from polygon.web.plan_routes import DeployName, Load
from polygon.web.rehearsals import MOST_RANKS, MOST_STEPS, USUAL_RANKS, USUAL_STEPS, Rehearsals
from polygon.web.runs import PLAN, Follower, Mark, Runs, as_opened, checked_files
from polygon.web.search_routes import RESPONSES, JobId, as_bytes, followed
from polygon.web.sliders import NO_CHANGE, price
from polygon.web.timeline import measured_timeline, timeline

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}$")]
MOST_FILES = 64
FOLLOW_S = 0.4
"""Between two looks at a run that is followed."""


class RehearsalRequest(Strict):
    """A rehearsal to be started."""

    name: DeployName
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = USUAL_STEPS
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] = USUAL_RANKS


class ImportRequest(Strict):
    """Files of a run: logs of ranks, or traces; its plan too, unless it is the one that is open."""

    name: DeployName
    plan: JobId
    files: Annotated[dict[str, str], Field(min_length=1, max_length=MOST_FILES)]


class RunWindow(BaseModel):
    """Which timeline, and which part of it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    which: Literal["predicted", "measured"] = "measured"
    from_s: Annotated[float, Field(ge=0)] = 0.0
    to_s: Annotated[float, Field(ge=0)] | None = None
    open: Annotated[list[Annotated[int, Field(ge=0, le=100_000)]], Field(max_length=200)] = []


class RunViews:
    """What is told of runs, to the users whose they are."""

    def __init__(self, runs: Runs, rehearsals: Rehearsals) -> None:
        self._runs, self._rehearsals = runs, rehearsals
        self._answers = Answers(most=40)

    def of(self, name: str, user: str) -> Follower:
        """A run that a user may see."""
        run = self._runs.get(name)
        if run is None or run.place.user not in (None, user):
            raise HTTPException(404, Message("missing.run"))
        return run

    def all_of(self, user: str) -> list[dict[str, Any]]:
        """Every run that a user may see, as in the list."""
        rows = []
        for name, place in self._runs.places().items():
            if place.user in (None, user):
                try:
                    run = self._runs.get(name)
                except InputError:
                    continue  # somebody else's folder, with a plan or a log that is none
                if run is not None:
                    rows.append(self.row(name, run))
        return rows

    def row(self, name: str, run: Follower) -> dict[str, Any]:
        """A run in the list."""
        mark = run.place.mark
        state = self._rehearsals.state(name, mark, ended=run.ended)
        run.update()  # after the state: of one that has ended nothing is missed
        measured_s = run.median_step_s()
        predicted_s = float(run.times.step_s)
        return {
            "name": name, "plan": mark.plan if mark else "", "kind": run.place.kind, "state": state,
            "model": run.problem.model.name, "ranks": run.plan.world_size, "device": run.device,
            "steps": len(run.steps), "reached": run.reached(), "traced": run.traced,
            "wanted": (mark.wanted if mark else None) or run.wanted,
            "predicted_step_s": predicted_s, "step_s": measured_s,
            "loss": run.last_loss(),
            "error": predicted_s / measured_s - 1 if measured_s else None,
        }  # fmt: skip

    def told(self, name: str, user: str) -> dict[str, Any]:
        """A run that is followed: its points and the end of its log too."""
        run = self.of(name, user)
        return self.row(name, run) | {"points": run.points(), "log": run.log_tail()}

    def kept(self, name: str, user: str, what: str, language: Asked, work: Callable[[Follower], Any]) -> Any:
        """An answer about the traced steps, kept until the run has more of them."""
        run = self.of(name, user)
        asked = (str(run.place.path), run.place.plan_path.stat().st_mtime_ns, what, len(run.steps), run.ended, language)
        text = self._answers.get(asked, lambda: compact(work(run), language))
        return Response(text, media_type="application/json")


def add_runs(app: FastAPI, load: Load, runs: Runs, rehearsals: Rehearsals) -> None:
    """Runs beside predictions."""
    views = RunViews(runs, rehearsals)
    add_run_views(app, views)

    @app.get("/api/v1/runs", responses=RESPONSES, response_model=responses.RunList)
    def list_runs(http: Request) -> Any:
        """Runs that the server knows of, and whether it may start some."""
        return {"runs": views.all_of(http.state.user), "may_start": rehearsals.allowed}

    @app.post("/api/v1/runs", status_code=201, responses=RESPONSES, response_model=responses.Run)
    def import_run(request: ImportRequest, http: Request) -> Any:
        """Keep logs or traces of a run that was made elsewhere."""
        it = load(request.plan)
        texts, opened = checked_files(request.files)
        texts.setdefault(PLAN, format_json(plan_data(it.problem, it.plan)))
        name = runs.add(request.name, Mark(kind="import", plan=request.plan, user=http.state.user), texts)
        try:
            return views.row(name, views.of(name, http.state.user))
        except InputError as error:
            shutil.rmtree(runs.folder / name)
            raise InputError(as_opened(error.message, opened)) from None

    @app.post("/api/v1/plans/{job}/rehearsals", status_code=202, responses=RESPONSES, response_model=responses.Run)
    def rehearse(job: JobId, request: RehearsalRequest, http: Request) -> Any:
        """Rehearse a plan on the server's machine: its shape with a small model, on processors."""
        it, user = load(job), http.state.user
        name = rehearsals.start(request.name, job, user, it.problem, it.plan, steps=request.steps, ranks=request.ranks)
        return views.row(name, views.of(name, user))

    @app.post("/api/v1/runs/{name}/stop", responses=RESPONSES, response_model=responses.Run)
    def stop_run(name: RunName, http: Request) -> Any:
        """Stop a rehearsal as Ctrl-C would; the steps so far are kept."""
        run = views.of(name, http.state.user)
        rehearsals.stop(name)
        return views.row(name, run)

    @app.delete("/api/v1/runs/{name}", status_code=204, responses=RESPONSES)
    def remove_run(name: RunName, http: Request) -> None:
        """Forget a run of the server's own that has ended."""
        run = views.of(name, http.state.user)
        if run.place.mark is None or rehearsals.state(name, run.place.mark, ended=run.ended) == "running":
            raise InputError(Message("refused.remove_run"))
        shutil.rmtree(run.place.path)


def add_run_views(app: FastAPI, views: RunViews) -> None:
    """How far runs are, and what they measured beside what was predicted."""

    @app.get("/api/v1/runs/{name}", responses=RESPONSES, response_model=responses.FollowedRun)
    def run_state(name: RunName, http: Request) -> Any:
        """How far a run is: its steps with time and loss, and what its launcher said last."""
        return views.told(name, http.state.user)

    @app.get("/api/v1/runs/{name}/events", responses=RESPONSES | as_bytes("text/event-stream"))
    async def run_events(name: RunName, request: Request) -> StreamingResponse:
        """The same as server-sent events, until the run has ended."""
        user = request.state.user
        await run_in_threadpool(views.told, name, user)
        return followed(request, lambda: views.told(name, user), ("running", "open"), FOLLOW_S)

    @app.get("/api/v1/runs/{name}/comparison", responses=RESPONSES, response_model=responses.Comparison)
    def run_comparison(name: RunName, language: Asked, http: Request) -> Any:
        """Predicted beside measured, stage by stage, from the steps that were traced."""
        return views.kept(name, http.state.user, "comparison", language, lambda run: run.comparison())

    @app.get("/api/v1/runs/{name}/timeline", responses=RESPONSES, response_model=responses.Timeline)
    def run_timeline(name: RunName, language: Asked, window: Annotated[RunWindow, Query()], http: Request) -> Any:
        """Rows of the predicted step of what was run, or of the traced step of median length."""
        opened = frozenset(window.open)

        def work(run: Follower) -> Any:
            if window.which == "predicted":
                priced = price(run.problem, run.plan, NO_CHANGE, run.tables)
                return timeline(priced, opened=opened, from_s=window.from_s, to_s=window.to_s)
            rows, step_s = run.middle_step()
            return measured_timeline(
                run.problem, run.plan, run.times, rows, step_s, opened=opened, from_s=window.from_s, to_s=window.to_s
            )

        return views.kept(name, http.state.user, window.model_dump_json(), language, work)
