"""Operations of the API before there is a plan: catalogues, clusters and models, searches."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, Field

from polygon.api.choices import EffortName, Objective
from polygon.cost.convergence import rows
from polygon.domain.cluster import Cluster
from polygon.domain.errors import InputError, located
from polygon.domain.message import Message
from polygon.domain.model import Model
from polygon.domain.optimizer import OPTIMIZERS
from polygon.domain.plan import COMPRESSIONS, PARITY_LEVELS
from polygon.formats import catalogue, convert, files
from polygon.formats import recognition as formats
from polygon.formats.hugging_face_export import hugging_face_config
from polygon.formats.schema import ClusterSpec, ModelSpec, Strict, all_different, check, seen_if_any
from polygon.formats.serialization import format_json, parse_json
from polygon.messages.report import seconds, three
from polygon.web import responses
from polygon.web.answers import Answers, compact
from polygon.web.editing import default_link, default_link_between, lean, resolved, with_measured
from polygon.web.jobs import MOST_SECONDS, Jobs, numbered_name, problem_of
from polygon.web.language import Asked, in_language
from polygon.web.pricing import Pricing
from polygon.web.questions import small_plan
from polygon.web.store import LABELS, Store, StoredJob

MOST_VALUES = 50_000
"""Of a YAML text: matrices of a hundred regions, read in a second; more comes as JSON."""
FOLLOW_S = 0.1
"""Between two looks at a search that is followed."""
JOB = r"^[A-Za-z0-9_-]{1,40}$"
JobId = Annotated[str, Field(pattern=JOB)]

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "model": responses.Refusal}
    for status, words in {
        401: "The token is missing or wrong.",
        403: "The plan is another user's, or the request another site's.",
        404: "There is no such thing.",
        409: "The name is taken.",
        413: "The request is too large.",
        421: "The server does not answer to the name in Host.",
        422: "Bad input; `detail` says where, what was found and what is allowed.",
        429: "Too many searches are waiting; the header Retry-After says when to ask again.",
    }.items()
}


def as_bytes(kind: str) -> dict[int | str, dict[str, Any]]:
    """The answer of an operation that is no JSON."""
    return {200: {"description": "As it is.", "content": {kind: {"schema": {"type": "string"}}}}}


Called = Annotated[str, Field(max_length=120), AfterValidator(seen_if_any)]
"""What people call a plan; empty: nothing."""
Tag = Annotated[str, MinLen(1), Field(max_length=40), AfterValidator(seen_if_any)]


class SearchRequest(Strict):
    """A search to be started."""

    problem: dict[str, Any]
    """As in a problem file; checked by the same validator."""
    name: Called = ""
    objective: Objective = "time"
    """What is best, as with the command line's --objective."""
    effort: EffortName = "quick"
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = MOST_SECONDS


class ClusterRequest(Strict):
    """A cluster as it is being edited."""

    cluster: dict[str, Any]


class Labels(Strict):
    """What people call a plan; what is left out stays."""

    name: Called | None = None
    tags: Annotated[list[Tag], Field(max_length=12), AfterValidator(all_different)] | None = None
    archived: bool | None = None


class TextRequest(Strict):
    """A text that the planner reads: a cluster (YAML, JSON, PTAFM, hostfile) or a model (YAML, config.json)."""

    kind: Literal["cluster", "model"]
    text: Annotated[str, Field(max_length=2_000_000)]
    name: Annotated[str, Field(min_length=1, max_length=120)] = "upload"


class ModelRequest(Strict):
    """A model as a problem has it: by name, or spelt out."""

    model: Annotated[str, Field(max_length=120)] | dict[str, Any]


class MeasuredRequest(Strict):
    """A file of measurements, and the problem whose cluster it is of."""

    problem: dict[str, Any]
    text: Annotated[str, Field(max_length=2_000_000)]
    name: Annotated[str, Field(min_length=1, max_length=120)] = "upload"


def answer(data: Any) -> Response:
    """JSON by the planner's own writer: numpy values, no NaN."""
    return Response(compact(data), media_type="application/json")


def add_catalogue(app: FastAPI, instances: Path | None) -> None:
    """Catalogues, shipped clusters, and what an uploaded text says."""
    kept = Answers(most=200)
    names = {path.stem for path in instances.glob("*.yaml")} if instances else set()

    @app.get("/api/v1/catalogue", responses=RESPONSES, response_model=responses.Known)
    def catalogues() -> Any:
        """Names of devices, models, links, runtimes and instances, and places of cloud regions."""
        text = kept.get("", lambda: compact(known() | {"instances": sorted(names)}))
        return Response(text, media_type="application/json")

    @app.get("/api/v1/instances/{name}", responses=RESPONSES, response_model=dict[str, Any])
    def instance(name: str) -> Any:
        """A shipped cluster."""
        if instances is None or name not in names:
            raise HTTPException(404, Message("missing.instance"))
        folder = instances

        def text() -> bytes:
            return compact(lean(files.read_cluster(folder / f"{name}.yaml")))

        return Response(kept.get(name, text), media_type="application/json")

    @app.post("/api/v1/read", responses=RESPONSES, response_model=dict[str, Any])
    def read(request: TextRequest) -> Any:
        """What an uploaded text says, as plain data."""
        if request.kind == "cluster":
            cluster: Cluster = formats.cluster_from_text(request.text, request.name, MOST_VALUES)
            return answer(lean(cluster))
        model: Model = formats.model_from_text(request.text, request.name, MOST_VALUES)
        if model.name == "config":  # as everybody's file is called
            kind = str(parse_json(request.text).get("model_type", "model")).replace("_", "-")
            scale, unit = (1e9, "b") if model.parameters >= 1e9 else (1e6, "m")
            model = replace(model, name=f"{kind}-{three(model.parameters / scale)}{unit}")
        return answer(convert.model_data(model))

    @app.post("/api/v1/config", responses=RESPONSES, response_model=dict[str, Any])
    def config(request: ModelRequest) -> Any:
        """Hugging Face's `config.json` of a model; refused for one that none of its kinds computes alike."""
        asked = request.model
        with located("model: "):
            if isinstance(asked, str):
                model = catalogue.model(asked)
            else:
                model = catalogue.model_from_spec(check(ModelSpec, asked))
            try:
                return hugging_face_config(model)
            except InputError as error:
                raise InputError(Message("refused.config", model=model.name)) from error

    @app.post("/api/v1/measured", responses=RESPONSES, response_model=responses.MeasuredCluster)
    def measured(request: MeasuredRequest) -> Any:
        """A cluster with what a file of measurements says: of `runners.probe` or of `polygon bench-device`."""
        problem = problem_of(request.problem)
        with located(f"{request.name}: "):
            return with_measured(problem, request.text)

    @app.post("/api/v1/clusters", responses=RESPONSES, response_model=responses.Resolved)
    def resolve(request: ClusterRequest) -> Any:
        """A cluster with every value that was not given spelt out, and its file."""
        return answer(resolved(request.cluster))


def known() -> dict[str, Any]:
    """What the planner knows: devices, models, links, runtimes, and places of cloud regions."""
    devices = [
        {"name": d.name, "memory_gib": d.memory_bytes / 2**30, "price_usd_per_hour": d.price_usd_per_hour}
        for d in catalogue.devices().values()
    ]
    models = [
        {"name": name, "parameters": m.parameters, "blocks": m.blocks, "max_seq_len": m.max_seq_len,
         "tokens_per_image": m.tokens_per_image}
        for name, m in catalogue.models().items()
    ]  # fmt: skip
    regions = [
        {"name": name, "latitude": place["latitude"], "longitude": place["longitude"]}
        for name, place in catalogue.cloud_regions()["regions"].items()
    ]
    return {
        "devices": devices, "architectures": sorted({d.architecture for d in catalogue.devices().values()}),
        "models": models, "links": sorted(catalogue.links()), "regions": regions,
        "runtimes": [{"name": name, "version": r.version} for name, r in catalogue.runtimes().items()],
        "optimizers": [{"name": name, "label": o.label} for name, o in OPTIMIZERS.items()],
        "parity_levels": PARITY_LEVELS, "compressions": COMPRESSIONS, "local_steps": sorted(rows("local_steps")),
        "default_link": default_link(), **default_link_between(),
    }  # fmt: skip


def warm_up() -> None:
    """Read the catalogues and load the compiled kernels, so that the first question need not.

    What is loaded then stays, so the garbage collector need not look at it again and again.
    """
    known()
    small_plan()
    gc.collect()
    gc.freeze()


def asked_of(job: StoredJob, plan: str | None) -> dict[str, Any]:
    """What a job was asked, its cluster as it was given; of an uploaded plan what its file says."""
    kept = job.request
    problem = kept.get("problem")
    if problem is None or "parent" in kept:
        problem = parse_json(plan or "{}").get("problem", {})
        if problem:
            problem["cluster"] = lean(convert.cluster_from_spec(check(ClusterSpec, problem["cluster"])))
    if problem and isinstance(problem.get("model"), dict):
        problem = problem | {"model": by_name(problem["model"])}
    return {"problem": problem, **{key: kept.get(key, LABELS[key]) for key in ("objective", "effort", "seed")}}


def by_name(model: dict[str, Any]) -> str | dict[str, Any]:
    """A model that is spelt out, by its name where it is the catalogue's: one's own may be called like that."""
    name = str(model.get("name"))
    same = name in catalogue.models() and catalogue.model_from_spec(check(ModelSpec, model)) == catalogue.model(name)
    return name if same else model


def found_job(store: Store, job: str, language: Asked) -> dict[str, Any]:
    """A job as it is told, or 404."""
    row = store.get(job)
    if row is None:
        raise HTTPException(404, Message("missing.job"))
    return dict(in_language(row.to_dict(), language))


def check_owner(store: Store, job: str, user: str) -> None:
    """Answer 404 for a job that is none, and 403 for another user's: who has its address may look at it only."""
    row = store.get(job)
    if row is None:
        raise HTTPException(404, Message("missing.job"))
    if user and row.request.get("user", "") != user:
        raise HTTPException(403, Message("refused.other_user"))


def followed(
    request: Request, state_of: Callable[[], Mapping[str, Any]], under_way: Sequence[str], pause_s: float
) -> StreamingResponse:
    """Server-sent events: a state whenever it is another, until it is none of those under way, or was removed."""

    async def events() -> AsyncIterator[str]:
        last = ""
        while not await request.is_disconnected():
            try:
                state = await run_in_threadpool(state_of)
            except (HTTPException, InputError):
                return
            text = json.dumps(state)
            if text != last:
                last = text
                yield f"data: {text}\n\n"
            if state["state"] not in under_way:
                return
            await asyncio.sleep(pause_s)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def add_jobs(app: FastAPI, store: Store, jobs: Jobs, pricing: Pricing, *, forget: Callable[[str], None]) -> None:
    """Searches: start, list, follow, stop; `forget` hears of those that are removed."""
    add_fronts(app, store, jobs)

    @app.post("/api/v1/jobs", status_code=202, responses=RESPONSES, response_model=responses.Job)
    def start_search(request: SearchRequest, language: Asked, http: Request) -> Any:
        """Start a search; its link is /#plan=ID."""
        pricing.start()
        return found_job(store, jobs.start(request.model_dump() | {"user": http.state.user}), language)

    @app.get("/api/v1/jobs", responses=RESPONSES, response_model=list[responses.Job])
    def list_jobs(language: Asked, http: Request) -> Any:
        """The newest searches and plans."""
        return in_language([job.to_dict() for job in store.jobs(http.state.user)], language)

    @app.get("/api/v1/jobs/{job}", responses=RESPONSES, response_model=responses.Job)
    def job_state(job: JobId, language: Asked) -> Any:
        """How far a job is."""
        return found_job(store, job, language)

    @app.get("/api/v1/jobs/{job}/request", responses=RESPONSES, response_model=responses.Asked)
    def job_request(job: JobId, language: Asked) -> Any:
        """What was asked: problem, objective, effort and seed, as a search takes them."""
        found_job(store, job, language)
        row = store.get(job)
        assert row is not None
        return answer(asked_of(row, store.result(job)))

    @app.patch("/api/v1/jobs/{job}", responses=RESPONSES, response_model=responses.Job)
    def label_job(job: JobId, labels: Labels, language: Asked, http: Request) -> Any:
        """Give a plan another name, tags, or put it into the archive."""
        check_owner(store, job, http.state.user)
        store.label(job, labels.model_dump(exclude_none=True))
        return found_job(store, job, language)

    @app.delete("/api/v1/plans/{job}", status_code=204, responses=RESPONSES)
    def remove_plan(job: JobId, http: Request) -> None:
        """Stop a search and forget it with its plan."""
        check_owner(store, job, http.state.user)
        jobs.cancel(job)
        store.remove(job)
        forget(job)

    @app.delete("/api/v1/jobs/{job}", responses=RESPONSES, response_model=responses.Job)
    def cancel_job(job: JobId, language: Asked, http: Request) -> Any:
        """Stop a search and keep the best plan so far."""
        check_owner(store, job, http.state.user)
        jobs.cancel(job)
        return found_job(store, job, language)

    @app.get("/api/v1/jobs/{job}/events", responses=RESPONSES | as_bytes("text/event-stream"))
    async def job_events(job: JobId, request: Request, language: Asked) -> StreamingResponse:
        """Progress as server-sent events, until the job has ended."""
        await run_in_threadpool(found_job, store, job, language)
        return followed(request, lambda: found_job(store, job, language), ("queued", "running"), FOLLOW_S)


def add_fronts(app: FastAPI, store: Store, jobs: Jobs) -> None:
    """Searches for plans of which none is beaten in time and money."""

    @app.post("/api/v1/fronts", status_code=202, responses=RESPONSES, response_model=responses.Job)
    def start_front(request: SearchRequest, language: Asked, http: Request) -> Any:
        """Start a search for plans of which none is beaten in time and money."""
        asked = request.model_dump() | {"user": http.state.user, "front": True}
        return found_job(store, jobs.start(asked), language)

    @app.get("/api/v1/fronts/{job}", responses=RESPONSES, response_model=responses.Front)
    def front(job: JobId, language: Asked) -> Any:
        """The plans of a front so far without their files, and how far its search is."""
        points = parse_json(store.result(job) or "{}").get("points", [])
        told = [{key: value for key, value in point.items() if key != "plan"} for point in points]
        return answer(found_job(store, job, language) | {"points": told})

    @app.post("/api/v1/fronts/{job}/points/{index}", status_code=201, responses=RESPONSES, response_model=responses.Job)
    def front_plan(
        job: JobId,
        index: Annotated[int, PathParameter(ge=0, le=10_000)],
        language: Asked,
        http: Request,
        step_s: Annotated[float | None, Query(ge=0)] = None,
    ) -> Any:
        """Keep a plan of a front as a plan of its own; with its step, as places change while the search goes on."""
        row, points = store.get(job), parse_json(store.result(job) or "{}").get("points", [])
        if row is None or index >= len(points) or step_s not in (None, points[index]["step_s"]):
            raise HTTPException(404, Message("missing.plan"))
        point = points[index]
        request = {key: value for key, value in row.request.items() if key != "front"}
        user = request["user"] = http.state.user
        request["name"] = numbered_name(request["name"], store.names(user))
        note = seconds(point["step_s"])
        return found_job(store, store.add(request, "done", format_json(point["plan"]), note=note), language)
