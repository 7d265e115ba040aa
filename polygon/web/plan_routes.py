"""Operations of the API on a plan: views of it, what-ifs, explanations, exports and deployments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, Lock, to_thread
from fastapi import Body, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from polygon.api import planner
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.errors import InputError
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export
from polygon.export.launch_hosts import read_hosts
from polygon.export.predicted import predicted_trace
from polygon.export.targets import TARGETS, export
from polygon.formats.convert_plan import plan_data, plan_from_spec
from polygon.formats.schema import PlanSpec, Strict, check
from polygon.formats.serialization import format_json, parse_json
from polygon.messages.report import seconds
from polygon.planning.checker import violations
from polygon.web import responses, views
from polygon.web.answers import Answers, compact
from polygon.web.deploy import check_folder, deployment_files, pack_deployment, read_deployment, write_deployment
from polygon.web.jobs import MOST_SECONDS, USUAL_EXPLAIN_SECONDS, Jobs
from polygon.web.language import Asked, in_language
from polygon.web.limits import assumed, limits, replanned
from polygon.web.search_routes import RESPONSES, JobId, answer, as_bytes
from polygon.web.sliders import Changes, price, timed
from polygon.web.store import Store
from polygon.web.strategies import compare
from polygon.web.timeline import timeline

Target = Literal["deepspeed", "megatron", "torchtitan", "torchrun", "slurm", "kubernetes", "skypilot", "tc"]
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


class Window(BaseModel):
    """A part of a step; the words of an address are not strict."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    from_s: Annotated[float, Field(ge=0)] = 0.0
    to_s: Annotated[float, Field(ge=0)] | None = None
    open: Annotated[list[Annotated[int, Field(ge=0, le=100_000)]], Field(max_length=200)] = []
    """Stages of which every worker has a row."""
    messages: bool = False


class VariantRequest(Strict):
    """A plan with something changed, to be kept under a name."""

    name: Annotated[str, Field(min_length=1, max_length=120)]
    changes: Changes


class ExplainRequest(Strict):
    """How long an explanation may take."""

    time_limit_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = USUAL_EXPLAIN_SECONDS


BEYOND = ("algorithm", "chunk_mb", "overlap")
"""Changes that reach beyond what a plan can say; a variant is priced with them, files of it go without."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A plan ready to be priced."""

    problem: Problem
    plan: Plan
    tables: CostTables
    beyond: dict[str, Any]
    """Changes of a variant that its plan file cannot say (`BEYOND`)."""


Load = Callable[[str], Loaded]


def add_plans(app: FastAPI, store: Store, jobs: Jobs) -> Load:
    """Everything asked about a plan; returns what loads one."""
    plans, answers = Answers(MOST_PLANS), Answers(MOST_ANSWERS)
    # What-ifs one after another: threads that compute only take the interpreter's lock from one another.
    turn, pricing = Lock(), CapacityLimiter(1)

    def load(job: str) -> Loaded:
        return plans.get(job, lambda: _read(store, job))

    def kept(job: str, what: str, language: Asked, changes: Changes | None, work: Callable[..., Any]) -> Response:
        """The answer to a question about a plan: worked out once, then kept."""

        def text() -> bytes:
            it = load(job)
            if changes is None:
                return compact(work(it), language)
            asked = it.beyond | changes.model_dump(exclude_defaults=True)
            return compact(work(it, Changes.model_validate(asked)), language)

        asked = (job, what, language, "" if changes is None else changes.model_dump_json(exclude_defaults=True))
        return Response(answers.get(asked, text), media_type="application/json")

    @app.post("/api/v1/plans", status_code=201, responses=RESPONSES, response_model=responses.Job)
    def upload_plan(plan: Annotated[dict[str, Any], Body()], http: Request) -> Any:
        """Keep a plan file that was made elsewhere."""
        problem, read, _ = plan_from_spec(check(PlanSpec, plan))
        wrong = [violation for violation in violations(problem, read) if violation.kind != "plan.memory"]
        if wrong:
            raise InputError(Message("input.located", prefix="plan: ", fault=wrong[0]))
        name = f"{problem.model.name} · {problem.cluster.name}"[:120]
        step_s = float(step_times(read, CostTables(problem)).step_s)
        job = store.add({"name": name, "user": http.state.user}, "done", format_json(plan), note=seconds(step_s))
        row = store.get(job)
        assert row is not None
        return row.to_dict()

    @app.get("/api/v1/plans/{job}", responses=RESPONSES, response_model=dict[str, Any])
    def plan_file(job: JobId) -> Any:
        """The plan file."""
        text = store.result(job)
        if text is None:
            raise HTTPException(404, Message("missing.plan"))
        return Response(text, media_type="application/json")

    @app.post("/api/v1/plans/{job}/view", responses=RESPONSES, response_model=responses.View)
    async def plan_view(job: JobId, changes: Changes, language: Asked, request: Request) -> Any:
        """Everything shown of a plan, with changes applied."""

        def work(it: Loaded, changes: Changes) -> Any:
            return views.view(price(it.problem, it.plan, changes, it.tables))

        async with turn:
            if await request.is_disconnected():  # a slider that has moved on
                return Response(status_code=204)
            return await to_thread.run_sync(kept, job, "view", language, changes, work, limiter=pricing)

    @app.post("/api/v1/plans/{job}/timeline", responses=RESPONSES, response_model=responses.Timeline)
    def plan_timeline(job: JobId, changes: Changes, language: Asked, window: Annotated[Window, Query()]) -> Any:
        """Rows of the predicted step or of a part of it, with changes applied, in as much detail as a screen shows."""
        opened = frozenset(window.open)

        def work(it: Loaded, changes: Changes) -> Any:
            priced = price(it.problem, it.plan, changes, it.tables)
            return timeline(priced, opened=opened, from_s=window.from_s, to_s=window.to_s, messages=window.messages)

        return kept(job, f"timeline {window.model_dump_json()}", language, changes, work)

    @app.get("/api/v1/plans/{job}/limits", responses=RESPONSES, response_model=responses.Limits)
    def plan_limits(job: JobId, language: Asked) -> Any:
        """What limits the step, found by making every resource 10 % better."""
        return kept(job, "limits", language, None, lambda it: limits(it.problem, it.plan, it.tables))

    @app.get("/api/v1/plans/{job}/assumed", responses=RESPONSES, response_model=list[responses.AssumedLink])
    def plan_assumed(job: JobId, language: Asked) -> Any:
        """The links that nobody gave, by how much of the step depends on them."""
        return kept(job, "assumed", language, None, lambda it: assumed(it.problem, it.plan, it.tables))

    @app.get("/api/v1/plans/{job}/limits/{index}", responses=RESPONSES, response_model=responses.Anew)
    def plan_limit(job: JobId, index: Annotated[int, PathParameter(ge=0, le=1000)], language: Asked) -> Any:
        """What more of one of these would bring if the cluster were planned anew."""

        def work(it: Loaded) -> Any:
            found = replanned(it.problem, it.plan, it.tables, index)
            if found is None:
                raise HTTPException(404, Message("missing.address"))
            return found

        return kept(job, f"limit {index}", language, None, work)

    @app.post("/api/v1/plans/{job}/variants", status_code=201, responses=RESPONSES, response_model=responses.Job)
    def keep_variant(job: JobId, request: VariantRequest, language: Asked, http: Request) -> Any:
        """Keep the plan with changes as a plan of its own, which can be opened, shared and deployed."""
        it = load(job)
        changes = Changes.model_validate(it.beyond | request.changes.model_dump(exclude_defaults=True))
        problem, plan, _, times = timed(it.problem, it.plan, changes, it.tables)
        own = planner.Plan(planner.Problem.of(problem), plan)
        said = changes.model_dump(exclude_defaults=True)
        asked = {"name": request.name, "parent": job, "changes": said, "user": http.state.user}
        text = format_json(plan_data(problem, plan, own.to_dict()))
        row = store.get(store.add(asked, "done", text, note=seconds(float(times.step_s))))
        assert row is not None
        return in_language(row.to_dict(), language)

    @app.post("/api/v1/plans/{job}/advice", responses=RESPONSES, response_model=responses.Advice)
    def plan_advice(job: JobId, changes: Changes, language: Asked) -> Any:
        """How communication could be hidden, each measure with its computed effect."""
        return kept(job, "advice", language, changes, lambda it, own: views.advice(it.problem, it.plan, own, it.tables))

    @app.post("/api/v1/plans/{job}/sensitivities", responses=RESPONSES, response_model=list[responses.Saving])
    def plan_sensitivities(job: JobId, changes: Changes, language: Asked) -> Any:
        """What better links would save."""
        return kept(
            job, "links", language, changes, lambda it, own: views.sensitivities(it.problem, it.plan, own, it.tables)
        )

    @app.get("/api/v1/plans/{job}/alternatives", responses=RESPONSES, response_model=responses.Alternatives)
    def plan_alternatives(job: JobId, language: Asked) -> Any:
        """The plan beside naive, uniform and one-region ones; time against money."""
        return kept(job, "alternatives", language, None, lambda it: compare(it.problem, it.plan, it.tables))

    @app.post("/api/v1/plans/{job}/explanation", status_code=202, responses=RESPONSES, response_model=responses.Job)
    def start_explanation(job: JobId, request: ExplainRequest, language: Asked, http: Request) -> Any:
        """Work out in the background why this plan and not another; asked again, anew only if time ran out."""
        load(job)
        return in_language(jobs.explain(job, request.time_limit_s, http.state.user).to_dict(), language)

    @app.get("/api/v1/plans/{job}/explanation", responses=RESPONSES, response_model=responses.Explanation)
    def plan_explanation(job: JobId, language: Asked) -> Any:
        """Other plans and rejected ideas with what they cost, what a better cluster would bring; or how far that is."""
        load(job)
        own = jobs.explanation_id(job)
        row, text = store.get(own), store.result(own)
        data = row.to_dict() if row is not None else {"id": own, "state": "none"}
        return answer(in_language(data | {"answers": parse_json(text) if text else None}, language))

    @app.get("/api/v1/plans/{job}/trace", responses=RESPONSES, response_model=dict[str, Any])
    def plan_trace(job: JobId, language: Asked) -> Any:
        """The predicted step as a Chrome trace (opens in Perfetto)."""
        response = kept(job, "trace", language, None, lambda it: predicted_trace(it.problem, it.plan, it.tables))
        response.headers["Content-Disposition"] = 'attachment; filename="predicted-trace.json"'
        return response

    @app.get("/api/v1/plans/{job}/exports/{target}", responses=RESPONSES, response_model=responses.ExportOut)
    def plan_export(job: JobId, target: Target, language: Asked) -> Any:
        """Files for another system, and what it cannot express."""
        return kept(job, target, language, None, lambda it: _exported(it, target).to_dict())

    return load


def _read(store: Store, job: str) -> Loaded:
    text, row = store.result(job), store.get(job)
    if text is None or row is None or row.is_front:
        raise HTTPException(404, Message("missing.plan"))
    problem, plan, _ = plan_from_spec(check(PlanSpec, parse_json(text)))
    changes = row.request.get("changes", {})
    beyond = {key: changes[key] for key in BEYOND if key in changes}
    return Loaded(problem=problem, plan=plan, tables=CostTables(problem), beyond=beyond)


def _exported(it: Loaded, target: Target, request: DeployRequest | None = None) -> Export:
    hosts = None
    if request is not None and request.hosts.strip():
        hosts = read_hosts(request.hosts, it.problem.cluster, it.plan)
    name = request.name if request is not None else ""
    result = export(it.problem, it.plan, target, hosts=hosts, tables=it.tables, name=name)
    if result is None:
        raise InputError(Message("reason.not_expressible", target=target))
    return result


def add_deployments(app: FastAPI, load: Load, folder: Path) -> None:
    """Exports written to disk, and what is there."""

    @app.post("/api/v1/plans/{job}/deploy", status_code=201, responses=RESPONSES, response_model=responses.Written)
    def deploy(job: JobId, request: DeployRequest, language: Asked) -> Any:
        """Write an export into deployments/NAME and check it without starting anything."""
        result = _exported(load(job), request.target, request)
        written = write_deployment(folder, request.name, result)
        data: dict[str, Any] = {"name": request.name, "files": sorted(result.files), "checks": check_folder(written)}
        data["start"] = result.start
        return in_language(data, language)

    @app.get("/api/v1/deployments", responses=RESPONSES, response_model=list[responses.Deployment])
    def deployments() -> Any:
        """Names of deployments and their files."""
        return deployment_files(folder)

    @app.get("/api/v1/deployments/{name}", responses=RESPONSES | as_bytes("application/zip"))
    def deployment_archive(name: DeployName) -> Any:
        """All files of a deployment in one (zip)."""
        packed = pack_deployment(folder, name)
        if packed is None:
            raise HTTPException(404, Message("missing.file"))
        headers = {"Content-Disposition": f'attachment; filename="{name}.zip"'}
        return Response(packed, media_type="application/zip", headers=headers)

    @app.get("/api/v1/deployments/{name}/{file}", responses=RESPONSES | as_bytes("text/plain"))
    def deployment_file(name: DeployName, file: str) -> Any:
        """One file of a deployment."""
        text = read_deployment(folder, name, file)
        if text is None:
            raise HTTPException(404, Message("missing.file"))
        return Response(text, media_type="text/plain; charset=utf-8")
