"""Operations of the API before there is a plan: catalogues, clusters and models, searches."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import Field

from polygon import catalogue, convert, files, formats
from polygon.domain.cluster import Cluster
from polygon.domain.plan import COMPRESSIONS, PARITY_LEVELS
from polygon.limits import OBJECTIVES
from polygon.parity import rows
from polygon.planning.engine import Effort, find_plan
from polygon.schema import Strict
from polygon.web import views
from polygon.web.answers import Answers, compact
from polygon.web.jobs import MOST_SECONDS, Jobs, problem_of
from polygon.web.language import Asked, in_language
from polygon.web.store import Store

JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]

RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"description": "The token is missing or wrong."},
    404: {"description": "There is no such thing."},
    413: {"description": "The request is too large."},
    422: {"description": "Bad input; `detail` says where, what was found and what is allowed."},
}


class SearchRequest(Strict):
    """A search to be started."""

    problem: dict[str, Any]
    """As in a problem file; checked by the same validator."""
    name: Annotated[str, Field(max_length=120)] = ""
    objective: Literal["time", "money", "energy", "tokens-per-usd"] = "time"
    """What is best, as with the command line's --objective."""
    effort: Literal["quick", "thorough", "long"] = "quick"
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = MOST_SECONDS


assert SearchRequest.model_fields["objective"].annotation == Literal[OBJECTIVES]


class TextRequest(Strict):
    """A text that the planner reads: a cluster (YAML, JSON, PTAFM, hostfile) or a model (YAML, config.json)."""

    kind: Literal["cluster", "model"]
    text: Annotated[str, Field(max_length=2_000_000)]
    name: Annotated[str, Field(min_length=1, max_length=120)] = "upload"


def answer(data: Any) -> Response:
    """JSON by the planner's own writer: numpy values, no NaN."""
    return Response(compact(data), media_type="application/json")


def add_catalogue(app: FastAPI, instances: Path | None) -> None:
    """Catalogues, shipped clusters, and what an uploaded text says."""
    kept = Answers(most=200)
    names = {path.stem for path in instances.glob("*.yaml")} if instances else set()

    @app.get("/api/catalogue", responses=RESPONSES)
    def catalogues() -> Any:
        """Names of devices, models, links and instances, and places of cloud regions."""
        text = kept.get("", lambda: compact(known() | {"instances": sorted(names)}))
        return Response(text, media_type="application/json")

    @app.get("/api/instances/{name}", responses=RESPONSES)
    def instance(name: str) -> Any:
        """A shipped cluster."""
        if instances is None or name not in names:
            raise HTTPException(404, "there is no such instance")
        folder = instances

        def text() -> bytes:
            return compact(convert.cluster_data(files.read_cluster(folder / f"{name}.yaml")))

        return Response(kept.get(name, text), media_type="application/json")

    @app.post("/api/read", responses=RESPONSES)
    def read(request: TextRequest) -> Any:
        """What an uploaded text says, as plain data."""
        if request.kind == "cluster":
            cluster: Cluster = formats.cluster_from_text(request.text, request.name)
            return answer(convert.cluster_data(cluster))
        return answer(convert.model_data(formats.model_from_text(request.text, request.name)))


def known() -> dict[str, Any]:
    """What the planner knows: devices, models, links, and places of cloud regions."""
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
    floor_ms, slope_ms = latency_per_km()
    return {
        "devices": devices, "models": models, "links": sorted(catalogue.links()), "regions": regions,
        "parity_levels": PARITY_LEVELS, "compressions": COMPRESSIONS, "local_steps": sorted(rows("local_steps")),
        "latency_ms_floor": floor_ms, "latency_ms_per_km": slope_ms,
    }  # fmt: skip


@lru_cache(maxsize=1)
def latency_per_km() -> tuple[float, float]:
    """Floor [ms] and slope [ms/km] of one-way latency over distance: least squares over the catalogue's cloud pairs."""
    table = catalogue.cloud_regions()
    places = {name: (p["latitude"], p["longitude"]) for name, p in table["regions"].items()}
    rows = [(views.km_between(places[a], places[b]), pair["latency_ms"]) for pair in table["pairs"]
            for a, b in [pair["between"]]]  # fmt: skip
    km, latency_ms = np.array(rows).T
    slope, floor = np.polyfit(km, latency_ms, 1)
    return max(0.1, float(floor)), float(slope)


def warm_up() -> None:
    """Read the catalogues and load the compiled kernels, so that the first question need not.

    What is loaded then stays, so the garbage collector need not look at it again and again.
    """
    known()
    nodes = [{"device": "t4", "count": 1, "devices_per_node": 2}]
    cluster = {"regions": [{"name": "a", "nodes": nodes}]}
    problem = problem_of({"cluster": cluster, "model": "opt-350m", "batch": {"global_batch": 4, "seq_len": 128}})
    found = find_plan(problem, np.random.default_rng(0), effort=Effort(fluid_evaluations=20, exact_evaluations=2))
    if found.plan is not None:
        views.warm_up(problem, found.plan)
    gc.collect()
    gc.freeze()


def add_jobs(app: FastAPI, store: Store, jobs: Jobs) -> None:
    """Searches: start, list, follow, stop."""

    def found(job: str, language: Asked) -> dict[str, Any]:
        row = store.get(job)
        if row is None:
            raise HTTPException(404, "there is no such job")
        return dict(in_language(row.to_dict(), language))

    @app.post("/api/jobs", status_code=202, responses=RESPONSES)
    def start_search(request: SearchRequest, language: Asked) -> Any:
        """Start a search; its link is /#plan=ID."""
        return found(jobs.start(request.model_dump()), language)

    @app.get("/api/jobs", responses=RESPONSES)
    def list_jobs(language: Asked) -> Any:
        """The newest searches and plans."""
        return in_language([job.to_dict() for job in store.jobs()], language)

    @app.get("/api/jobs/{job}", responses=RESPONSES)
    def job_state(job: JobId, language: Asked) -> Any:
        """How far a job is."""
        return found(job, language)

    @app.delete("/api/jobs/{job}", responses=RESPONSES)
    def cancel_job(job: JobId, language: Asked) -> Any:
        """Stop a search and keep the best plan so far."""
        found(job, language)
        jobs.cancel(job)
        return found(job, language)

    @app.get("/api/jobs/{job}/events", responses=RESPONSES)
    async def job_events(job: JobId, request: Request, language: Asked) -> StreamingResponse:
        """Progress as server-sent events, until the job has ended."""
        await run_in_threadpool(found, job, language)

        async def events() -> AsyncIterator[str]:
            last = ""
            while not await request.is_disconnected():
                state = await run_in_threadpool(found, job, language)
                text = json.dumps(state)
                if text != last:
                    last = text
                    yield f"data: {text}\n\n"
                if state["state"] not in ("queued", "running"):
                    return
                await asyncio.sleep(0.1)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
