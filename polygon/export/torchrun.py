"""A plan as it is: `dist_runner.py` started by torchrun on every host. Nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem, Worker
from polygon.export.bundle import Export, plan_text
from polygon.export.launch_hosts import Host, hosts_text, seats
from polygon.export.scripts import run_name, start_all_script, torchrun_script


def by_rank(plan: Plan) -> list[Worker]:
    """One worker a device, in the order of the plan's ranks."""
    pool_of = {d: worker.pool for stage in plan.stages for worker in stage.workers for d in worker.devices}
    return [Worker(pool=pool_of[device], devices=(device,)) for device in plan.device_ranks]


def export_torchrun(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export:
    """Scripts for every host; the plan file decides everything else."""
    result = estimate(problem, plan, tables)
    rows = seats(problem.cluster, by_rank(plan), hosts)
    program = ["runners/dist_runner.py", "--plan"]
    files = {
        "plan.json": plan_text(problem, plan, result),
        "hosts.txt": hosts_text(rows),
    }
    for index, seat in enumerate(rows):
        text = torchrun_script(
            "Runs a plan of polygon; POLYGON_ROOT is its checkout.", rows, index, program, "POLYGON_ROOT"
        )
        # The plan lies beside the script, wherever that is.
        files[run_name(seat)] = text.replace("--plan ", '--plan "$here/plan.json" ')
    files["start-all.sh"] = start_all_script(rows)
    return Export(
        target="torchrun",
        files=files,
        plan_step_s=result.step_s,
        step_s=result.step_s,
        start="POLYGON_ROOT=/path/to/polygon bash start-all.sh --steps 100",
        notes=(Message("note.rehearse"),),
    )
