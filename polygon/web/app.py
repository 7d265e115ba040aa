"""The JSON API and the page: the planner's functions behind HTTP, and nothing else is served.

OpenAPI is at /api/v1/openapi.json. Bad input answers 422 with the planner's own line; a problem without a plan is a job
in the state `infeasible` with its reason. Words are English or Chinese, by the header Accept-Language.
"""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException

from polygon import __version__
from polygon.domain.errors import InputError, Phrase, fault
from polygon.domain.message import Message, say
from polygon.formats.schema import Strict, fault_message
from polygon.web.guard import Guard
from polygon.web.headless import HeadAsGet
from polygon.web.jobs import RETRY_S, BusyError, Jobs
from polygon.web.language import preferred
from polygon.web.plan_routes import add_deployments, add_plans, stored
from polygon.web.pricing import Pricing
from polygon.web.rehearsals import Rehearsals
from polygon.web.run_routes import add_runs
from polygon.web.runs import Runs
from polygon.web.same_plans import SamePlans
from polygon.web.search_routes import add_catalogue, add_jobs, warm_up
from polygon.web.store import Store

THREADS = 4
"""Requests that are computed at the same time: the work holds the interpreter's lock, so more only wait longer."""


LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where the application keeps things, and who may use it."""

    database: Path
    deployments: Path
    instances: Path | None = None
    runs: Path = Path("runs")
    """Rehearsals that the server starts, and runs that are opened in the page."""
    logs: tuple[Path, ...] = ()
    """Folders in which other runs write, to be followed."""
    rehearsals: bool = False
    """Whether users may start rehearsals on this machine."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Of users, by their names; none: everybody who reaches it is the same user, who need not say who that is."""
    hosts: frozenset[str] = LOOPBACK
    """Names by which the server may be called."""


def create_app(settings: Settings) -> FastAPI:
    """The application."""
    store = Store(settings.database)
    same = SamePlans(lambda job: stored(store, job))
    pricing = Pricing(same.read)
    jobs = Jobs(store)
    runs = Runs(settings.runs, settings.deployments, settings.logs)
    rehearsals = Rehearsals(runs, allowed=settings.rehearsals)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        threading.Thread(target=warm_up, daemon=True).start()
        yield
        asked.close()
        await run_in_threadpool(rehearsals.close)
        await run_in_threadpool(jobs.close)
        await pricing.close()
        store.close()

    app = FastAPI(
        title="polygon", version=__version__, lifespan=lifespan, openapi_url="/api/v1/openapi.json", docs_url=None,
        redoc_url=None, description="Plans the training of foundation models on unequal, distant devices.",
        generate_unique_id_function=lambda route: route.name if isinstance(route, APIRoute) else "route",
    )  # fmt: skip
    app.add_exception_handler(InputError, _say_bad_input)
    app.add_exception_handler(BusyError, _say_busy)
    app.add_exception_handler(RequestValidationError, _say_bad_request)
    app.add_exception_handler(StarletteHTTPException, _say_http_error)
    asked = add_plans(app, same, store, jobs, pricing)  # what is asked most is looked up first
    add_catalogue(app, settings.instances)
    add_jobs(app, store, jobs, pricing, forget=same.forget)
    add_deployments(app, asked, pricing, settings.deployments)
    add_runs(app, asked.load, runs, rehearsals)
    _add_page(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, tokens=settings.tokens, hosts=settings.hosts)  # the last one stands before all others
    return app


def _refused(request: Request, detail: Message | str, status: int = 422) -> JSONResponse:
    language = preferred(request.headers.get("accept-language", ""))
    return JSONResponse({"detail": say(detail, language)}, status_code=status)


async def _say_bad_input(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InputError)
    return _refused(request, error.message)


async def _say_busy(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BusyError)
    answer = _refused(request, error.message, 429)
    answer.headers["Retry-After"] = str(RETRY_S)
    return answer


async def _say_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    if error.status_code == 400:  # the framework's only one
        deep = isinstance(error.__cause__, RecursionError)
        found = Phrase("JSON nested too deeply" if deep else "bytes that are not UTF-8")
        return _refused(request, fault("body", found, "JSON").message)
    own = {404: Message("missing.address"), 405: Message("refused.method")}
    said: Any = error.detail
    detail = said if isinstance(said, Message) else own.get(error.status_code, said)
    return _refused(request, detail, error.status_code)


async def _say_bad_request(request: Request, error: Exception) -> JSONResponse:
    """The first fault in the words of files: where, what was found, what is expected."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [part for part in first["loc"] if part != "body"]
    field = getattr(request.scope.get("route"), "body_field", None)
    schema: Any = field.field_info.annotation if field is not None else None
    if first["type"] == "json_invalid":
        why = Message("expected.json", why=first["ctx"]["error"])
        return _refused(request, fault("body", Phrase("no JSON"), why).message)
    if first["loc"][0] == "body" and where and isinstance(schema, type) and issubclass(schema, Strict):
        return _refused(request, fault_message(schema, first | {"loc": tuple(where)}))
    if first["loc"] == ("body",):
        if isinstance(first.get("input"), bytes):  # of another kind than JSON, which is not read
            kind = request.headers.get("content-type")
            return _refused(request, fault("Content-Type", kind, "'application/json'").message)
        return _refused(request, fault_message(schema, first | {"loc": ()}))
    pattern = first.get("ctx", {}).get("pattern")
    expected = Message("expected.pattern", pattern=pattern) if pattern else str(first["msg"])
    found = Phrase(repr(first.get("input"))[:60])
    return _refused(request, fault(str(where[-1]) if where else "body", found, expected).message)


def _add_page(app: FastAPI) -> None:
    with resources.as_file(resources.files("polygon.web") / "static") as folder:
        static = Path(folder)

    @cache
    def packed(path: Path) -> bytes:
        return gzip.compress(path.read_bytes(), 6, mtime=0)

    built = {path.name: path for path in (static / "assets").glob("*") if path.is_file()}
    types = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
    for path in built.values():
        if path.suffix in types:
            packed(path)

    @app.get("/", include_in_schema=False)
    def page() -> Any:
        return FileResponse(static / "index.html", headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Any:
        """None: who opens an answer of the API has the browser ask for one, and say that it is missing."""
        return Response(status_code=204, headers={"Cache-Control": "public, max-age=31536000"})

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Any:
        path = built.get(name)
        if path is None:
            raise HTTPException(404, Message("missing.file"))
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        if path.suffix in types and "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(packed(path), media_type=types[path.suffix], headers=headers)
        return FileResponse(path, headers=headers)
