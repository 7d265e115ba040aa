"""The JSON API and the page: the planner's functions behind HTTP, and nothing else is served.

OpenAPI is at /api/openapi.json. Bad input answers 422 with the planner's own line; a problem without a plan is a job
in the state `infeasible` with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import Field

from polygon import __version__, catalogue, convert, files, formats
from polygon.convert_plan import plan_from_spec
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.plan import Plan, Problem
from polygon.export.hosts import read_hosts
from polygon.export.predicted import predicted_trace
from polygon.export.targets import TARGETS, export
from polygon.notation import format_json, parse_json
from polygon.planning.violations import violations
from polygon.schema import PlanSpec, Strict, check
from polygon.web import views
from polygon.web.alternatives import compare
from polygon.web.deploy import check_folder, deployment_files, read_deployment, write_deployment
from polygon.web.guard import Guard
from polygon.web.jobs import MOST_SECONDS, Jobs
from polygon.web.store import Store
from polygon.web.whatif import Changes, price

Target = Literal["deepspeed", "megatron", "torchtitan", "torchrun", "skypilot", "tc"]
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
DeployName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
PAGE_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.[A-Za-z0-9_.-]*[a-z0-9]")


class SearchRequest(Strict):
    """A search to be started."""

    problem: dict[str, Any]
    """As in a problem file; checked by the same validator."""
    name: Annotated[str, Field(max_length=120)] = ""
    effort: Literal["quick", "thorough", "long"] = "quick"
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = MOST_SECONDS


class TextRequest(Strict):
    """A text that the planner reads: a cluster (YAML, JSON, PTAFM, hostfile) or a model (YAML, config.json)."""

    kind: Literal["cluster", "model"]
    text: Annotated[str, Field(max_length=2_000_000)]
    name: Annotated[str, Field(min_length=1, max_length=120)] = "upload"


class DeployRequest(Strict):
    """Files to be written into a named deployment."""

    name: DeployName
    target: Target
    hosts: Annotated[str, Field(max_length=200_000)] = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where the application keeps things, and who may use it."""

    database: Path
    deployments: Path
    instances: Path | None = None
    token: str = ""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A plan ready to be priced."""

    problem: Problem
    plan: Plan
    tables: CostTables


def create_app(settings: Settings) -> FastAPI:
    """The application."""
    store = Store(settings.database)
    jobs = Jobs(store)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(jobs.close)
        store.close()

    app = FastAPI(
        title="polygon", version=__version__, lifespan=lifespan, openapi_url="/api/openapi.json", docs_url=None,
        redoc_url=None, description="Plans the training of foundation models on unequal, distant devices.",
        generate_unique_id_function=lambda route: route.name if isinstance(route, APIRoute) else "route",
    )  # fmt: skip
    app.add_middleware(Guard, token=settings.token)
    app.add_exception_handler(InputError, _say_bad_input)
    app.add_exception_handler(RequestValidationError, _say_bad_request)
    _add_catalogue(app, settings)
    _add_jobs(app, store, jobs)
    _add_plans(app, store, settings)
    _add_page(app)
    return app


async def _say_bad_input(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=422)


async def _say_bad_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return JSONResponse({"detail": f"{where}: {fault['msg']}"}, status_code=422)


def _answer(data: Any) -> Response:
    """JSON by the planner's own writer: numpy values, no NaN."""
    return Response(format_json(data), media_type="application/json")


RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"description": "The token is missing or wrong."},
    404: {"description": "There is no such thing."},
    413: {"description": "The request is too large."},
    422: {"description": "Bad input; `detail` says where, what was found and what is allowed."},
}


def _add_catalogue(app: FastAPI, settings: Settings) -> None:
    instances = settings.instances

    @app.get("/api/catalogue", responses=RESPONSES)
    def catalogues() -> Any:
        """Names of devices, models, links and instances, and places of cloud regions."""
        found = sorted(path.stem for path in instances.glob("*.yaml")) if instances else []
        devices = [
            {"name": d.name, "memory_gib": d.memory_bytes / 2**30, "price_usd_per_hour": d.price_usd_per_hour}
            for d in catalogue.devices().values()
        ]
        models = [
            {"name": name, "parameters": m.parameters, "blocks": m.blocks, "max_seq_len": m.max_seq_len,
             "tokens_per_image": m.tokens_per_image}
            for name, m in catalogue.models().items()
        ]  # fmt: skip
        places = catalogue.cloud_regions()
        regions = [
            {"name": name, "latitude": place["latitude"], "longitude": place["longitude"]}
            for name, place in places["regions"].items()
        ]
        return _answer(
            {"instances": found, "devices": devices, "models": models, "links": sorted(catalogue.links()),
             "regions": regions, "latency_ms_per_km": latency_per_km()[1], "latency_ms_floor": latency_per_km()[0]}
        )  # fmt: skip

    @app.get("/api/instances/{name}", responses=RESPONSES)
    def instance(name: str) -> Any:
        """A shipped cluster."""
        if instances is None or name not in {path.stem for path in instances.glob("*.yaml")}:
            raise HTTPException(404, "there is no such instance")
        return _answer(convert.cluster_data(files.read_cluster(instances / f"{name}.yaml")))

    @app.post("/api/read", responses=RESPONSES)
    def read(request: TextRequest) -> Any:
        """What an uploaded text says, as plain data."""
        if request.kind == "cluster":
            return _answer(convert.cluster_data(formats.cluster_from_text(request.text, request.name)))
        return _answer(convert.model_data(formats.model_from_text(request.text, request.name)))


@lru_cache(maxsize=1)
def latency_per_km() -> tuple[float, float]:
    """Floor [ms] and slope [ms/km] of one-way latency over distance: least squares over the catalogue's cloud pairs."""
    import numpy as np

    table = catalogue.cloud_regions()
    places = {name: (p["latitude"], p["longitude"]) for name, p in table["regions"].items()}
    rows = [(views.km_between(places[a], places[b]), pair["latency_ms"]) for pair in table["pairs"]
            for a, b in [pair["between"]]]  # fmt: skip
    km, latency_ms = np.array(rows).T
    slope, floor = np.polyfit(km, latency_ms, 1)
    return max(0.1, float(floor)), float(slope)


def _add_jobs(app: FastAPI, store: Store, jobs: Jobs) -> None:
    def found(job: str) -> dict[str, Any]:
        row = store.get(job)
        if row is None:
            raise HTTPException(404, "there is no such job")
        return row.to_dict()

    @app.post("/api/jobs", status_code=202, responses=RESPONSES)
    def start_search(request: SearchRequest) -> Any:
        """Start a search; its link is /#plan=ID."""
        return found(jobs.start(request.model_dump()))

    @app.get("/api/jobs", responses=RESPONSES)
    def list_jobs() -> Any:
        """The newest jobs."""
        return [job.to_dict() for job in store.jobs()]

    @app.get("/api/jobs/{job}", responses=RESPONSES)
    def job_state(job: JobId) -> Any:
        """How far a job is."""
        return found(job)

    @app.delete("/api/jobs/{job}", responses=RESPONSES)
    def cancel_job(job: JobId) -> Any:
        """Stop a search and keep the best plan so far."""
        found(job)
        jobs.cancel(job)
        return found(job)

    @app.get("/api/jobs/{job}/events", responses=RESPONSES)
    async def job_events(job: JobId, request: Request) -> StreamingResponse:
        """Progress as server-sent events, until the job has ended."""
        await run_in_threadpool(found, job)

        async def events() -> AsyncIterator[str]:
            last = ""
            while not await request.is_disconnected():
                state = await run_in_threadpool(found, job)
                text = json.dumps(state)
                if text != last:
                    last = text
                    yield f"data: {text}\n\n"
                if state["state"] not in ("queued", "running"):
                    return
                await asyncio.sleep(0.1)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _add_plans(app: FastAPI, store: Store, settings: Settings) -> None:
    @lru_cache(maxsize=32)
    def load(job: str) -> Loaded:
        text = store.result(job)
        if text is None:
            raise HTTPException(404, "there is no such plan")
        problem, plan, _ = plan_from_spec(check(PlanSpec, parse_json(text)))
        return Loaded(problem=problem, plan=plan, tables=CostTables(problem))

    @lru_cache(maxsize=32)
    def compared(job: str) -> dict[str, Any]:
        it = load(job)
        return compare(it.problem, it.plan, it.tables)

    def changed(job: str, changes: Changes, what: Callable[..., Any]) -> Any:
        it = load(job)
        return _answer(what(it.problem, it.plan, changes, it.tables))

    def priced(problem: Problem, plan: Plan, changes: Changes, tables: CostTables, show: Callable[..., Any]) -> Any:
        return show(price(problem, plan, changes, tables))

    @app.post("/api/plans", status_code=201, responses=RESPONSES)
    def upload_plan(plan: Annotated[dict[str, Any], Body()]) -> Any:
        """Keep a plan file that was made elsewhere."""
        problem, read, _ = plan_from_spec(check(PlanSpec, plan))
        wrong = [text for text in violations(problem, read) if "GiB over" not in text]
        if wrong:
            raise InputError(f"plan: {wrong[0]}")
        job = store.add({"name": f"{problem.model.name} · {problem.cluster.name}"[:120]}, "done", format_json(plan))
        row = store.get(job)
        assert row is not None
        return row.to_dict()

    @app.get("/api/plans/{job}", responses=RESPONSES)
    def plan_file(job: JobId) -> Any:
        """The plan file."""
        text = store.result(job)
        if text is None:
            raise HTTPException(404, "there is no such plan")
        return Response(text, media_type="application/json")

    @app.post("/api/plans/{job}/view", responses=RESPONSES)
    def plan_view(job: JobId, changes: Changes) -> Any:
        """Everything shown of a plan, with changes applied."""
        return changed(job, changes, partial(priced, show=views.view))

    @app.post("/api/plans/{job}/timeline", responses=RESPONSES)
    def plan_timeline(job: JobId, changes: Changes) -> Any:
        """Intervals of the predicted step, with changes applied."""
        return changed(job, changes, partial(priced, show=views.timeline))

    @app.post("/api/plans/{job}/advice", responses=RESPONSES)
    def plan_advice(job: JobId, changes: Changes) -> Any:
        """How communication could be hidden, each measure with its computed effect."""
        return changed(job, changes, views.advice)

    @app.post("/api/plans/{job}/sensitivities", responses=RESPONSES)
    def plan_sensitivities(job: JobId, changes: Changes) -> Any:
        """What better links would save."""
        return changed(job, changes, views.sensitivities)

    @app.get("/api/plans/{job}/alternatives", responses=RESPONSES)
    def plan_alternatives(job: JobId) -> Any:
        """The plan beside naive, uniform and one-region ones; time against money."""
        return _answer(compared(job))

    @app.get("/api/plans/{job}/trace", responses=RESPONSES)
    def plan_trace(job: JobId) -> Any:
        """The predicted step as a Chrome trace (opens in Perfetto)."""
        it = load(job)
        response = _answer(predicted_trace(it.problem, it.plan, it.tables))
        response.headers["Content-Disposition"] = 'attachment; filename="predicted-trace.json"'
        return response

    @app.get("/api/plans/{job}/exports/{target}", responses=RESPONSES)
    def plan_export(job: JobId, target: Target) -> Any:
        """Files for another system, and what it cannot express."""
        it = load(job)
        result = export(it.problem, it.plan, target, tables=it.tables)
        if result is None:
            raise InputError(f"{target} can express no plan for this problem that fits the devices' memory")
        return _answer(result.to_dict())

    @app.post("/api/plans/{job}/deploy", status_code=201, responses=RESPONSES)
    def deploy(job: JobId, request: DeployRequest) -> Any:
        """Write an export into deployments/NAME and check it without starting anything."""
        it = load(job)
        hosts = read_hosts(request.hosts, it.problem.cluster) if request.hosts.strip() else None
        result = export(it.problem, it.plan, request.target, hosts=hosts, tables=it.tables, name=request.name)
        if result is None:
            raise InputError(f"{request.target} can express no plan for this problem that fits the devices' memory")
        folder = write_deployment(settings.deployments, request.name, result)
        return {"name": request.name, "files": sorted(result.files), "checks": check_folder(folder)}

    @app.get("/api/deployments", responses=RESPONSES)
    def deployments() -> Any:
        """Names of deployments and their files."""
        return deployment_files(settings.deployments)

    @app.get("/api/deployments/{name}/{file}", responses=RESPONSES)
    def deployment_file(name: DeployName, file: str) -> Any:
        """One file of a deployment."""
        text = read_deployment(settings.deployments, name, file)
        if text is None:
            raise HTTPException(404, "there is no such file")
        return Response(text, media_type="text/plain; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    with resources.as_file(resources.files("polygon.web") / "static") as folder:
        static = Path(folder)

    @app.get("/", include_in_schema=False)
    def page() -> Any:
        return FileResponse(static / "index.html")

    @app.get("/assets/{name}", include_in_schema=False)
    def asset(name: str) -> Any:
        if not PAGE_FILE.fullmatch(name) or not (static / "assets" / name).is_file():
            raise HTTPException(404, "there is no such file")
        return FileResponse(static / "assets" / name, headers={"Cache-Control": "public, max-age=31536000, immutable"})


assert set(TARGETS) == set(Target.__args__)  # type: ignore[attr-defined]
