"""Operations of the API on a plan: views of it, what-ifs, explanations, exports and deployments."""

from __future__ import annotations

import re
from asyncio import Queue, create_task
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from anyio import Semaphore
from fastapi import Body, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from polygon.api import planner, plans
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError, Phrase, require
from polygon.domain.message import Message
from polygon.export.targets import TARGETS
from polygon.formats.convert_plan import plan_data, plan_from_spec
from polygon.formats.schema import PlanSpec, Strict, check
from polygon.formats.serialization import format_json, parse_json
from polygon.messages.report import seconds
from polygon.planning.checker import PRICEABLE, violations
from polygon.web import responses
from polygon.web.ahead import Ahead
from polygon.web.answers import Answers
from polygon.web.deploy import (
    NAME,
    NAME_IN_WORDS,
    TakenError,
    check_folder,
    check_free,
    deployment_files,
    folder_of,
    pack_deployment,
    read_deployment,
    write_deployment,
)
from polygon.web.guard import Receive, Scope, Send
from polygon.web.jobs import MOST_SECONDS, USUAL_EXPLAIN_SECONDS, Jobs, numbered_name, plan_name
from polygon.web.language import Asked, in_language, preferred
from polygon.web.pricing import Pricing, Question, Tell
from polygon.web.questions import WORDED, Loaded, own_changes
from polygon.web.questions import load as read_plan
from polygon.web.same_plans import SamePlans
from polygon.web.search_routes import JOB, RESPONSES, Called, JobId, answer, as_bytes
from polygon.web.sliders import NO_CHANGE, Changes, positions, timed
from polygon.web.store import Store

Target = Literal["deepspeed", "megatron", "torchtitan", "torchrun", "slurm", "kubernetes", "skypilot", "tc"]
assert set(TARGETS) == set(Target.__args__)  # type: ignore[attr-defined]
DeployName = Annotated[str, Field(pattern=f"^{NAME.pattern}$"), NAME_IN_WORDS]
MOST_PLANS = 8
"""Plans kept ready to be exported or kept as variants."""
MOST_ANSWERS = 1000
"""Kept, some 30 kB each; of a plan that was opened 70 before anybody asks for them."""
CROWD = 8
"""What-ifs that wait for their turn, from which on another process is started."""
AHEAD = 16
"""What-ifs that a process has at a time: with fewer, server and process wait for one another; more could no longer be
taken back."""
NONE = "{}"
"""What is changed where nothing is."""
VIEW = re.compile(rf"/api/v1/plans/({JOB.strip('^$')})/view")
BOUND = {b"": True, b"bound=true": True, b"bound=false": False}
"""Whether the bound of a view is asked for, by the usual query strings."""


class DeployRequest(Strict):
    """Files to be written into a named deployment."""

    name: DeployName
    target: Target
    hosts: Annotated[str, Field(max_length=200_000)] = ""
    replace: bool = False
    """Whether a deployment of that name may be replaced."""


class Window(BaseModel):
    """A part of a step; the words of an address are not strict."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    from_s: Annotated[float, Field(ge=0)] = 0.0
    to_s: Annotated[float, Field(ge=0)] | None = None
    open: Annotated[list[Annotated[int, Field(ge=0, le=100_000)]], Field(max_length=200)] = []
    """Stages of which every worker has a row."""
    messages: bool = False


class VariantRequest(Strict):
    """A plan with something changed, to be kept; without a name it is called by what differs, in any language."""

    name: Called = ""
    changes: Changes


class ExplainRequest(Strict):
    """How long an explanation may take."""

    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = USUAL_EXPLAIN_SECONDS


Load = Callable[[str], Loaded]


class Asking:
    """Plans kept ready by their jobs, and answers about them from the processes that price."""

    def __init__(self, same: SamePlans, store: Store, pricing: Pricing, jobs: Jobs) -> None:
        self._same, self._store, self._pricing = same, store, pricing
        self._plans, self._answers = Answers(MOST_PLANS), Answers(MOST_ANSWERS)
        self._ahead = Ahead(self.answer, lambda: pricing.rests and jobs.rest)

    def load(self, job: str) -> Loaded:
        """The plan of a job."""
        found: Loaded = self._plans.get(job, lambda: read_plan(*stored(self._store, job)))
        return found

    async def answered(
        self, job: str, what: str, language: Asked, changes: Changes | None = None, tell: Tell | None = None,
        **arguments: Any,
    ) -> Response:  # fmt: skip
        """One answer, worked out once for all who ask the same, be it of a plan of their own that is the same."""
        return await self.answer(question_of(await self.plan(job), what, language, changes, **arguments), tell)

    async def plan(self, job: str) -> str:
        """What a job's plan is asked about by, the same for all jobs with that plan."""
        known = self._same.known(job)
        return await run_in_threadpool(self._same.look, job) if known is None else known

    async def answer(self, question: Question, tell: Tell | None = None) -> Response:
        """The answer to a question, worked out once for all who ask it."""
        text = await self._answers.later(question, lambda: self._pricing.ask(question, tell))
        return Response(text, media_type="application/json")

    def knows(self, question: Question) -> bool:
        """Whether its answer is there or being worked out."""
        return question in self._answers

    def opened(self, question: Question, view: Response) -> None:
        """When there is time, work out what the page's controls can ask next about the plan of this view."""
        self._ahead.ask((question.plan, question.language), moved(question, orjson.loads(view.body)))

    def close(self) -> None:
        """Work nothing out ahead any more."""
        self._ahead.close()


def question_of(
    plan: str, what: str, language: Asked, changes: Changes | None = None, **arguments: Any
) -> Question:  # fmt: skip
    """What is asked, the same for all who ask the same: of what has no words, in whatever language."""
    own = NONE if changes is None else changes.model_dump_json(exclude_defaults=True)
    language = language if what in WORDED else "en"
    return Question(plan=plan, what=what, language=language, changes=own, arguments=tuple(arguments.items()))


def moved(question: Question, view: Mapping[str, Any]) -> Iterator[Question]:
    """The same question with each of the page's controls at each of its positions; `view` is the answer to it."""
    devices = {device for region in view["regions"] for device in region["devices"]}
    for asks in positions(devices, view["local_steps"]).values():
        for ask in asks:
            changes = Changes.model_validate(ask).model_dump_json(exclude_defaults=True)
            yield replace(question, changes=changes)


def add_plans(app: FastAPI, same: SamePlans, store: Store, jobs: Jobs, pricing: Pricing) -> Asking:
    """Everything asked about a plan; returns what loads one, to be closed."""
    asked = Asking(same, store, pricing, jobs)
    add_views(app, pricing, asked)
    add_files(app, store, pricing, asked)
    add_limits(app, store, asked)
    add_explanations(app, store, jobs, asked)
    return asked


def add_files(app: FastAPI, store: Store, pricing: Pricing, asked: Asking) -> None:
    """Plan files: brought, fetched, kept with changes, written for other systems."""

    @app.post("/api/v1/plans", status_code=201, responses=RESPONSES, response_model=responses.Job)
    def upload_plan(plan: Annotated[dict[str, Any], Body()], http: Request) -> Any:
        """Keep a plan file that was made elsewhere."""
        problem, read, _ = plan_from_spec(check(PlanSpec, plan))
        wrong = [violation for violation in violations(problem, read) if violation.kind not in PRICEABLE]
        if wrong:
            raise InputError(Message("input.located", prefix="plan: ", fault=wrong[0]))
        step_s = float(step_times(read, CostTables(problem)).step_s)
        pricing.start()
        name = numbered_name(plan_name(problem), store.names(http.state.user))
        request_data = {"name": name, "user": http.state.user}
        job = store.add(request_data, "done", format_json(plan), note=seconds(step_s))
        row = store.get(job)
        assert row is not None
        return row.to_dict()

    @app.get("/api/v1/plans/{job}", responses=RESPONSES, response_model=dict[str, Any])
    async def plan_file(job: JobId) -> Any:
        """The plan file: as it was brought, or of a search or a change here as the command line writes it."""
        text, row = await run_in_threadpool(lambda: (store.result(job), store.get(job)))
        if text is None or row is None:
            raise HTTPException(404, Message("missing.plan"))
        if row.kind in ("search", "variant"):
            return await asked.answered(job, "file", "en")
        return Response(text, media_type="application/json")

    @app.post("/api/v1/plans/{job}/variants", status_code=201, responses=RESPONSES, response_model=responses.Job)
    def keep_variant(job: JobId, request: VariantRequest, language: Asked, http: Request) -> Any:
        """Keep the plan with changes as a plan of its own, which can be opened, shared and deployed.

        What takes longer than a price, its bound, the processes that price add to the file for who asks.
        """
        it = asked.load(job)
        require(request.changes != NO_CHANGE, "changes", Phrase("none"), "what differs from the plan")
        changes = own_changes(it, request.changes)
        problem, plan, _, times = timed(it.problem, it.plan, changes, it.tables)
        own = plans.Plan(planner.Problem.of(problem), plan)
        said = changes.model_dump(exclude_defaults=True)
        request_data = {"name": request.name, "parent": job, "changes": said, "user": http.state.user}
        row = store.get(job)
        if row is not None and "objective" in row.request:
            request_data["objective"] = row.request["objective"]  # what it is held against
        text = format_json(plan_data(problem, plan, own.to_dict(brief=True)))
        row = store.get(store.add(request_data, "done", text, note=seconds(float(times.step_s))))
        assert row is not None
        return in_language(row.to_dict(), language)

    @app.get("/api/v1/plans/{job}/trace", responses=RESPONSES, response_model=dict[str, Any])
    async def plan_trace(job: JobId, language: Asked) -> Any:
        """The predicted step as a Chrome trace (opens in Perfetto)."""
        response = await asked.answered(job, "trace", language)
        response.headers["Content-Disposition"] = 'attachment; filename="predicted-trace.json"'
        return response

    @app.get("/api/v1/plans/{job}/exports/{target}", responses=RESPONSES, response_model=responses.ExportOut)
    async def plan_export(job: JobId, target: Target, language: Asked) -> Any:
        """Files for another system, and what it cannot express."""
        return await asked.answered(job, "export", language, target=target)


def add_views(app: FastAPI, pricing: Pricing, asked: Asking) -> None:
    """What is shown of a plan, with changes applied, and beside other plans."""
    turn = Turns(pricing)

    @app.post("/api/v1/plans/{job}/view", responses=RESPONSES, response_model=responses.View)
    async def plan_view(job: JobId, changes: Changes, language: Asked, request: Request, bound: bool = True) -> Any:
        """Everything shown of a plan, with changes applied; sooner without the bound, whose values are null then."""
        question = question_of(await asked.plan(job), "view", language, changes, bound=bound)
        if asked.knows(question) or not question.quick:
            return await asked.answer(question)
        async with turn.one():
            if has_left(request):  # a slider that has moved on
                return Response(status_code=204)
            found = await asked.answer(question)
        if question.changes == NONE:
            asked.opened(question, found)
        return found

    app.add_middleware(WhatIf, view=plan_view)

    @app.post("/api/v1/plans/{job}/timeline", responses=RESPONSES, response_model=responses.Timeline)
    async def plan_timeline(job: JobId, changes: Changes, language: Asked, window: Annotated[Window, Query()]) -> Any:
        """Rows of the predicted step or of a part of it, with changes applied, in as much detail as a screen shows."""
        return await asked.answered(
            job, "timeline", language, changes, opened=tuple(sorted(set(window.open))), from_s=window.from_s,
            to_s=window.to_s, messages=window.messages,
        )  # fmt: skip

    @app.post("/api/v1/plans/{job}/advice", responses=RESPONSES, response_model=responses.Advice)
    async def plan_advice(job: JobId, changes: Changes, language: Asked) -> Any:
        """How communication could be hidden, each measure with its computed effect."""
        return await asked.answered(job, "advice", language, changes)

    @app.post("/api/v1/plans/{job}/sensitivities", responses=RESPONSES, response_model=list[responses.Saving])
    async def plan_sensitivities(job: JobId, changes: Changes, language: Asked) -> Any:
        """What better links would save."""
        return await asked.answered(job, "sensitivities", language, changes)

    @app.get("/api/v1/plans/{job}/alternatives", responses=RESPONSES, response_model=responses.Alternatives)
    async def plan_alternatives(job: JobId, language: Asked) -> Any:
        """The plan beside naive, uniform and one-region ones; time against money."""
        return await asked.answered(job, "alternatives", language)


def add_limits(app: FastAPI, store: Store, asked: Asking) -> None:
    """What limits a step, and what better resources would bring."""

    @app.get("/api/v1/plans/{job}/limits", responses=RESPONSES, response_model=responses.Limits)
    async def plan_limits(job: JobId, language: Asked) -> Any:
        """What limits the step, found by making every resource 10 % better."""
        return await asked.answered(job, "limits", language)

    @app.get("/api/v1/plans/{job}/limits/events", responses=RESPONSES | as_bytes("text/event-stream"))
    async def limits_events(job: JobId, language: Asked) -> StreamingResponse:
        """The same as server-sent events, known so far, whenever one more limit is found."""
        stored(store, job)
        told: Queue[bytes] = Queue()

        async def events() -> AsyncIterator[bytes]:
            whole = create_task(asked.answered(job, "limits", language, tell=told.put_nowait))
            whole.add_done_callback(lambda _: told.put_nowait(b""))
            while part := await told.get():
                yield b"data: " + part + b"\n\n"
            yield b"data: " + bytes((await whole).body) + b"\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get("/api/v1/plans/{job}/assumed", responses=RESPONSES, response_model=list[responses.AssumedLink])
    async def plan_assumed(job: JobId, language: Asked) -> Any:
        """The links that nobody gave, by how much of the step depends on them."""
        return await asked.answered(job, "assumed", language)

    @app.get("/api/v1/plans/{job}/limits/{index}", responses=RESPONSES, response_model=responses.Anew)
    async def plan_limit(job: JobId, index: Annotated[int, PathParameter(ge=0, le=1000)], language: Asked) -> Any:
        """What more of one of these would bring if the cluster were planned anew."""
        found = await asked.answered(job, "limit", language, index=index)
        if found.body == b"null":
            raise HTTPException(404, Message("missing.address"))
        return found


def add_explanations(app: FastAPI, store: Store, jobs: Jobs, asked: Asking) -> None:
    """Why this plan and not another, worked out in the background."""

    @app.post("/api/v1/plans/{job}/explanation", status_code=202, responses=RESPONSES, response_model=responses.Job)
    def start_explanation(job: JobId, request: ExplainRequest, language: Asked, http: Request) -> Any:
        """Work out in the background why this plan and not another; asked again, anew only if time ran out."""
        asked.load(job)
        return in_language(jobs.explain(job, request.time_limit_s, http.state.user).to_dict(), language)

    @app.get("/api/v1/plans/{job}/explanation", responses=RESPONSES, response_model=responses.Explanation)
    def plan_explanation(job: JobId, language: Asked) -> Any:
        """Other plans and rejected ideas with what they cost, what a better cluster would bring; or how far that is."""
        asked.load(job)
        own = jobs.explanation_id(job)
        row, text = store.get(own), store.result(own)
        data = row.to_dict() if row is not None else {"id": own, "state": "none"}
        return answer(in_language(data | {"answers": parse_json(text) if text else None}, language))


class WhatIf:
    """ASGI middleware, inside the guard: the operation that is asked most, whose usual request is answered at once.

    Every other one, and whatever is wrong with one, goes the framework's general way, which takes as long as all else
    that the server does for an answer.
    """

    def __init__(self, app: Any, view: Callable[..., Awaitable[Response]]) -> None:
        self.app, self.view = app, view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        usual = VIEW.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        headers = dict(scope["headers"]) if usual is not None else {}
        bound = BOUND.get(scope["query_string"]) if headers.get(b"content-type") == b"application/json" else None
        if usual is None or bound is None:
            await self.app(scope, receive, send)
            return
        language = preferred(headers.get(b"accept-language", b"").decode("latin-1"))
        read = [await receive()]

        async def again() -> Any:
            return read.pop() if read else await receive()

        try:
            whole = not read[0].get("more_body", False)
            changes = Changes.model_validate(orjson.loads(read[0].get("body", b"") if whole else b""))
            found = await self.view(usual[1], changes, language, Request(scope, receive), bound)
        except (ValueError, RecursionError, InputError, HTTPException):
            await self.app(scope, again, send)
        else:
            await found(scope, receive, send)


def has_left(request: Request) -> bool:
    """Whether who asked no longer waits, as far as is known now: the next message is taken if it is there already."""
    message = request.receive()
    assert isinstance(message, Coroutine)
    try:
        message.send(None)
    except StopIteration as told:
        return bool(told.value["type"] == "http.disconnect")
    finally:
        message.close()
    return False


class Turns:
    """What-ifs one after another, a few of each process at a time: who takes a question back must still be able to."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._processes = 1
        self._turns = Semaphore(AHEAD)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it."""
        if self._turns.statistics().tasks_waiting >= CROWD:
            self._pricing.grow()
        while self._processes < self._pricing.processes:
            self._processes += 1
            for _ in range(AHEAD):
                self._turns.release()
        async with self._turns:
            yield


def stored(store: Store, job: str) -> tuple[str, Mapping[str, Any]]:
    """The file of a plan, and the changes that made it where it is a variant."""
    text, row = store.result(job), store.get(job)
    if text is None or row is None or row.is_front:
        raise HTTPException(404, Message("missing.plan"))
    return text, row.request.get("changes", {})


@contextmanager
def taken(name: str) -> Iterator[None]:
    """Answer 409 where a deployment of that name is there."""
    try:
        yield
    except TakenError:
        raise HTTPException(409, Message("refused.deployment", name=name)) from None


def add_deployments(app: FastAPI, asked: Asking, pricing: Pricing, folder: Path) -> None:
    """Exports written to disk, and what is there; each user has deployments of their own."""

    @app.post("/api/v1/plans/{job}/deploy", status_code=201, responses=RESPONSES, response_model=responses.Written)
    async def deploy(job: JobId, request: DeployRequest, language: Asked, http: Request) -> Any:
        """Write an export into a folder of deployments and check it without starting anything."""
        own = folder / folder_of(http.state.user)
        with taken(request.name):
            check_free(own, request.name, replace=request.replace)
        arguments = tuple(request.model_dump(exclude={"replace"}).items())
        made = orjson.loads(await pricing.ask(Question(plan=await asked.plan(job), what="export", arguments=arguments)))

        def write() -> Any:
            with taken(request.name):
                path = write_deployment(own, request.name, made["files"], replace=request.replace)
            data = {"name": request.name, "folder": path.relative_to(folder).as_posix(), "files": sorted(made["files"]),
                    "checks": check_folder(path), "start": made["start"]}  # fmt: skip
            return in_language(data, language)

        return await run_in_threadpool(write)

    @app.get("/api/v1/deployments", responses=RESPONSES, response_model=list[responses.Deployment])
    def deployments(http: Request) -> Any:
        """Names of the user's deployments and their files."""
        below = folder_of(http.state.user)
        return [row | {"folder": f"{below}/{row['name']}".lstrip("/")} for row in deployment_files(folder / below)]

    @app.get("/api/v1/deployments/{name}", responses=RESPONSES | as_bytes("application/zip"))
    def deployment_archive(name: DeployName, http: Request) -> Any:
        """All files of a deployment in one (zip)."""
        packed = pack_deployment(folder / folder_of(http.state.user), name)
        if packed is None:
            raise HTTPException(404, Message("missing.file"))
        headers = {"Content-Disposition": f'attachment; filename="{name}.zip"'}
        return Response(packed, media_type="application/zip", headers=headers)

    @app.get("/api/v1/deployments/{name}/{file}", responses=RESPONSES | as_bytes("text/plain"))
    def deployment_file(name: DeployName, file: str, http: Request) -> Any:
        """One file of a deployment."""
        text = read_deployment(folder / folder_of(http.state.user), name, file)
        if text is None:
            raise HTTPException(404, Message("missing.file"))
        return Response(text, media_type="text/plain; charset=utf-8")
