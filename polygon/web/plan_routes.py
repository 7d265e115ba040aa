"""Operations of the API on a plan: views of it, what-ifs, explanations, exports and deployments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, Lock, to_thread
from fastapi import Body, FastAPI, HTTPException, Request, Response
from pydantic import Field

from polygon.convert_plan import plan_from_spec
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export
from polygon.export.hosts import read_hosts
from polygon.export.predicted import predicted_trace
from polygon.export.targets import TARGETS, export
from polygon.notation import format_json, parse_json
from polygon.planning.violations import violations
from polygon.report import seconds
from polygon.schema import PlanSpec, Strict, check
from polygon.web import views
from polygon.web.alternatives import compare
from polygon.web.answers import Answers, compact
from polygon.web.deploy import check_folder, deployment_files, read_deployment, write_deployment
from polygon.web.jobs import MOST_SECONDS, USUAL_EXPLAIN_SECONDS, Jobs
from polygon.web.language import Asked, in_language
from polygon.web.search_routes import RESPONSES, JobId, answer
from polygon.web.store import Store
from polygon.web.timeline import timeline
from polygon.web.whatif import Changes, price

Target = Literal["deepspeed", "megatron", "torchtitan", "torchrun", "skypilot", "tc"]
assert set(TARGETS) == set(Target.__args__)  # type: ignore[attr-defined]
DeployName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
MOST_PLANS = 32
"""Plans kept ready to be priced."""
MOST_ANSWERS = 500
"""Kept, some 30 kB each."""


class DeployRequest(Strict):
    """Files to be written into a named deployment."""

    name: DeployName
    target: Target
    hosts: Annotated[str, Field(max_length=200_000)] = ""


class ExplainRequest(Strict):
    """How long an explanation may take."""

    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = USUAL_EXPLAIN_SECONDS


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A plan ready to be priced."""

    problem: Problem
    plan: Plan
    tables: CostTables


Load = Callable[[str], Loaded]


def add_plans(app: FastAPI, store: Store, jobs: Jobs) -> Load:
    """Everything asked about a plan; returns what loads one."""
    plans, answers = Answers(MOST_PLANS), Answers(MOST_ANSWERS)
    # What-ifs one after another: threads that compute only take the interpreter's lock from one another.
    turn, pricing = Lock(), CapacityLimiter(1)

    def load(job: str) -> Loaded:
        return plans.get(job, lambda: _read(store, job))

    def kept(job: str, what: str, language: Asked, changes: Changes | None, work: Callable[[Loaded], Any]) -> Response:
        """The answer to a question about a plan: worked out once, then kept."""

        def text() -> bytes:
            return compact(in_language(work(load(job)), language))

        asked = (job, what, language, "" if changes is None else changes.model_dump_json(exclude_defaults=True))
        return Response(answers.get(asked, text), media_type="application/json")

    @app.post("/api/plans", status_code=201, responses=RESPONSES)
    def upload_plan(plan: Annotated[dict[str, Any], Body()]) -> Any:
        """Keep a plan file that was made elsewhere."""
        problem, read, _ = plan_from_spec(check(PlanSpec, plan))
        wrong = [text for text in violations(problem, read) if "GiB over" not in text]
        if wrong:
            raise InputError(f"plan: {wrong[0]}")
        name = f"{problem.model.name} · {problem.cluster.name}"[:120]
        step_s = float(step_times(read, CostTables(problem)).step_s)
        job = store.add({"name": name}, "done", format_json(plan), note=seconds(step_s))
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
    async def plan_view(job: JobId, changes: Changes, language: Asked, request: Request) -> Any:
        """Everything shown of a plan, with changes applied."""

        def work(it: Loaded) -> Any:
            return views.view(price(it.problem, it.plan, changes, it.tables))

        async with turn:
            if await request.is_disconnected():  # a slider that has moved on
                return Response(status_code=204)
            return await to_thread.run_sync(kept, job, "view", language, changes, work, limiter=pricing)

    @app.post("/api/plans/{job}/timeline", responses=RESPONSES)
    def plan_timeline(job: JobId, changes: Changes, language: Asked, messages: bool = False) -> Any:
        """Intervals of the predicted step, with changes applied."""
        return kept(
            job, f"timeline {messages}", language, changes,
            lambda it: timeline(price(it.problem, it.plan, changes, it.tables), messages=messages),
        )  # fmt: skip

    @app.post("/api/plans/{job}/advice", responses=RESPONSES)
    def plan_advice(job: JobId, changes: Changes, language: Asked) -> Any:
        """How communication could be hidden, each measure with its computed effect."""
        return kept(job, "advice", language, changes, lambda it: views.advice(it.problem, it.plan, changes, it.tables))

    @app.post("/api/plans/{job}/sensitivities", responses=RESPONSES)
    def plan_sensitivities(job: JobId, changes: Changes, language: Asked) -> Any:
        """What better links would save."""
        return kept(
            job, "links", language, changes, lambda it: views.sensitivities(it.problem, it.plan, changes, it.tables)
        )

    @app.get("/api/plans/{job}/alternatives", responses=RESPONSES)
    def plan_alternatives(job: JobId, language: Asked) -> Any:
        """The plan beside naive, uniform and one-region ones; time against money."""
        return kept(job, "alternatives", language, None, lambda it: compare(it.problem, it.plan, it.tables))

    @app.post("/api/plans/{job}/explanation", status_code=202, responses=RESPONSES)
    def start_explanation(job: JobId, request: ExplainRequest, language: Asked) -> Any:
        """Work out in the background why this plan and not another; asked again, anew only if time ran out."""
        load(job)
        return in_language(jobs.explain(job, request.time_limit_s).to_dict(), language)

    @app.get("/api/plans/{job}/explanation", responses=RESPONSES)
    def plan_explanation(job: JobId, language: Asked) -> Any:
        """Other plans and rejected ideas with what they cost, what a better cluster would bring; or how far that is."""
        load(job)
        own = jobs.explanation_id(job)
        row, text = store.get(own), store.result(own)
        data = row.to_dict() if row is not None else {"id": own, "state": "none"}
        return answer(in_language(data | {"answers": parse_json(text) if text else None}, language))

    @app.get("/api/plans/{job}/trace", responses=RESPONSES)
    def plan_trace(job: JobId, language: Asked) -> Any:
        """The predicted step as a Chrome trace (opens in Perfetto)."""
        response = kept(job, "trace", language, None, lambda it: predicted_trace(it.problem, it.plan, it.tables))
        response.headers["Content-Disposition"] = 'attachment; filename="predicted-trace.json"'
        return response

    @app.get("/api/plans/{job}/exports/{target}", responses=RESPONSES)
    def plan_export(job: JobId, target: Target, language: Asked) -> Any:
        """Files for another system, and what it cannot express."""
        return kept(job, target, language, None, lambda it: _exported(it, target).to_dict())

    return load


def _read(store: Store, job: str) -> Loaded:
    text = store.result(job)
    if text is None:
        raise HTTPException(404, "there is no such plan")
    problem, plan, _ = plan_from_spec(check(PlanSpec, parse_json(text)))
    return Loaded(problem=problem, plan=plan, tables=CostTables(problem))


def _exported(it: Loaded, target: Target, request: DeployRequest | None = None) -> Export:
    hosts = None
    if request is not None and request.hosts.strip():
        hosts = read_hosts(request.hosts, it.problem.cluster)
    name = request.name if request is not None else ""
    result = export(it.problem, it.plan, target, hosts=hosts, tables=it.tables, name=name)
    if result is None:
        raise InputError(f"{target} can express no plan for this problem that fits the devices' memory")
    return result


def add_deployments(app: FastAPI, load: Load, folder: Path) -> None:
    """Exports written to disk, and what is there."""

    @app.post("/api/plans/{job}/deploy", status_code=201, responses=RESPONSES)
    def deploy(job: JobId, request: DeployRequest, language: Asked) -> Any:
        """Write an export into deployments/NAME and check it without starting anything."""
        result = _exported(load(job), request.target, request)
        written = write_deployment(folder, request.name, result)
        data = {"name": request.name, "files": sorted(result.files), "checks": check_folder(written)}
        data["start"] = result.start
        return in_language(data, language)

    @app.get("/api/deployments", responses=RESPONSES)
    def deployments() -> Any:
        """Names of deployments and their files."""
        return deployment_files(folder)

    @app.get("/api/deployments/{name}/{file}", responses=RESPONSES)
    def deployment_file(name: DeployName, file: str) -> Any:
        """One file of a deployment."""
        text = read_deployment(folder, name, file)
        if text is None:
            raise HTTPException(404, "there is no such file")
        return Response(text, media_type="text/plain; charset=utf-8")
