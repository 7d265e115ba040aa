"""Slurm: one batch job, a component for every group of equal hosts, that runs the plan as it is.

Groups of different hosts make a heterogeneous job; every component is one `srun` of its own, whose tasks, one a node,
start the ranks of their node. Sources: slurm.schedmd.com/sbatch.html, heterogeneous_jobs.html.
"""

from __future__ import annotations

from collections.abc import Sequence

from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export, Loss, plan_text
from polygon.export.launch_hosts import Host, hosts_text, seats, slug
from polygon.export.rank_script import NAME, RANKS_SCRIPT, HostGroup, host_groups
from polygon.export.torchrun import by_rank

CPUS_PER_RANK = 4
"""Asked for: a rank computes, sends, receives and reads data, each in a thread of its own."""

NOTICE_S = 300
"""Before the time limit, in which ranks may end their step and write a checkpoint."""


def batch_script(job: str, groups: Sequence[HostGroup], cpu_pools: frozenset[int]) -> str:
    """The script for `sbatch`; `cpu_pools`: pools whose devices are processors, for which no GPU is asked."""
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={job}"]
    for group in groups:
        if group.index:
            lines.append("#SBATCH hetjob")
        lines.append(f"#SBATCH --nodes={group.hosts} --ntasks-per-node=1")
        lines.append(f"#SBATCH --cpus-per-task={CPUS_PER_RANK * group.ranks_per_host}")
        if group.pool not in cpu_pools:
            lines.append(f"#SBATCH --gpus-per-node={group.ranks_per_host}")
        lines.append(f"#SBATCH --signal=TERM@{NOTICE_S}")
        lines.append(f"##SBATCH --partition=FILL-IN   # where {slug(group.device)} in {slug(group.region)} is")
    world = groups[-1].first_rank + groups[-1].hosts * groups[-1].ranks_per_host
    lines += [
        "# Runs a plan of polygon; submit it from its folder, on a file system that all nodes see. Extra arguments go",
        "# to the runner: sbatch job.sbatch --steps 1000 --checkpoint-dir checkpoints --resume",
        "set -euo pipefail",
        'here="${POLYGON_FOLDER:-$SLURM_SUBMIT_DIR}"',
        'nodes="${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"',
        'MASTER_ADDR="$(scontrol show hostnames "$nodes" | head -n 1)"',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export MASTER_ADDR MASTER_PORT",
        "pids=()",
        'stop() { kill -TERM "${pids[@]}" 2> /dev/null || true; }',
        "trap stop TERM INT",
        "# A component's first rank and ranks a node, then what srun is told of it.",
        "start() {",
        "    local first=$1 ranks=$2",
        "    shift 2",
        f"    srun --ntasks-per-node=1 --cpus-per-task=$(({CPUS_PER_RANK} * ranks)) --cpu-bind=none \\",
        "        --kill-on-bad-exit=1 \\",
        f'        "${{options[@]}}" bash "$here/{NAME}" "$first" "$ranks" {world} "$here/plan.json" "$@" &',
        "    pids+=($!)",
        "}",
    ]
    for group in groups:
        component = f"--het-group={group.index}" if len(groups) > 1 else ""
        lines.append(f"options=({component})")
        lines.append(f'start {group.first_rank} {group.ranks_per_host} "$@"')
    lines += [
        "worst=0",
        'for _ in "${pids[@]}"; do',
        "    code=0",
        "    # Of those that it was asked for before bash says that it knows them no more.",
        '    wait -n "${pids[@]}" 2> /dev/null || code=$?',
        "    if ((code != 0)); then",
        "        worst=$code",
        "        stop",
        "        break",
        "    fi",
        "done",
        "wait || true",
        'exit "$worst"',
    ]
    return "\n".join(lines) + "\n"


def export_slurm(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export:
    """A batch script, the plan, and what starts a node's ranks."""
    result = estimate(problem, plan, tables)
    rows = seats(problem.cluster, by_rank(plan), hosts)
    groups = host_groups(problem.cluster, rows)
    cpu_pools = frozenset(pool.index for pool in problem.cluster.pools if pool.device.is_cpu)
    lost = [Loss(what=Message("lost.one_slurm", components=len(groups)))]
    if len(problem.cluster.pools) > 1 or problem.cluster.pools[0].nodes > 1:
        lost.append(Loss(what=Message("lost.chosen_nodes")))
    return Export(
        target="slurm",
        files={
            "plan.json": plan_text(problem, plan, result),
            "hosts.txt": hosts_text(rows),
            "job.sbatch": batch_script(f"polygon-{slug(problem.model.name)}", groups, cpu_pools),
            NAME: RANKS_SCRIPT,
        },
        losses=tuple(lost),
        plan_step_s=result.step_s,
        step_s=result.step_s,
        start="sbatch job.sbatch --steps 100",
        notes=(Message("note.open_port"), Message("note.rehearse")),
    )
