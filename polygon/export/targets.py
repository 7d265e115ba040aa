"""All targets by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from polygon.cost.tables import CostTables
from polygon.domain.errors import Phrase, fault, one_of, require
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.domain.runtime import is_ours
from polygon.export.bundle import Export, check_script, readme
from polygon.export.deepspeed import export_deepspeed
from polygon.export.kubernetes import export_kubernetes
from polygon.export.launch_hosts import Host, default_hosts, slug
from polygon.export.megatron import export_megatron
from polygon.export.shaping import export_tc
from polygon.export.skypilot import export_skypilot
from polygon.export.slurm import export_slurm
from polygon.export.torchrun import export_torchrun
from polygon.export.torchtitan import export_torchtitan
from polygon.planning.checker import require_whole

Exporter = Callable[[Problem, Plan, CostTables, Sequence[Host]], Export | None]

TARGETS: dict[str, Exporter] = {
    "deepspeed": export_deepspeed,
    "megatron": export_megatron,
    "torchtitan": export_torchtitan,
    "torchrun": export_torchrun,
    "slurm": export_slurm,
    "kubernetes": export_kubernetes,
    "skypilot": export_skypilot,
    "tc": export_tc,
}
OTHER_PROGRAMS = ("deepspeed", "megatron", "torchtitan")
"""Targets that train by themselves."""
OUR_RANKS = ("torchrun", "slurm", "kubernetes", "skypilot")
"""Targets that start polygon's ranks."""


def export(
    problem: Problem,
    plan: Plan,
    target: str,
    *,
    hosts: Sequence[Host] | None = None,
    tables: CostTables | None = None,
    name: str = "",
) -> Export | None:
    """Files for a target, with a README and a dry-run check; None where the target can express no plan that fits.

    Raises
    ------
    InputError
        For an unknown target, for host names that are none, for an optimizer that the target is not told of, and for a
        plan that is none for its model and batch.
    """
    if target not in TARGETS:
        raise fault("target", target, one_of(target, TARGETS))
    require_whole(problem, plan)
    if target in OTHER_PROGRAMS:
        require(problem.batch.optimizer in ("adamw", "sgd"), "batch.optimizer", problem.batch.optimizer, "adamw or sgd")
    kept = problem.batch.state_precision
    require(kept == "fp32" or target not in (*OTHER_PROGRAMS, *OUR_RANKS), "batch.state_precision", kept, "fp32")
    if target in OUR_RANKS and not is_ours(problem.runtime):
        expected = Message("expected.our_runtime", targets=OTHER_PROGRAMS)
        raise fault("problem.runtime", Phrase(problem.runtime.name), expected)
    tables = tables or CostTables(problem)
    result = TARGETS[target](problem, plan, tables, hosts or default_hosts(problem.cluster))
    if result is None:
        return None
    lacking = tuple(problem.model.beyond_engine(problem.batch.seq_len)) if target in OUR_RANKS else ()
    if lacking:
        result = replace(result, notes=(Message("note.own_layers", fields=lacking), *result.notes))
    files = dict(result.files)
    result = replace(result, files={**files, "README.md": "", "check.sh": ""})
    text = readme(problem, plan, result, name or f"{slug(problem.model.name)}-{target}")
    return replace(result, files={**files, "README.md": text, "check.sh": check_script(files)})
