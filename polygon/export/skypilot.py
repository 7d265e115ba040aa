"""SkyPilot: one task file a node group, all joining one torchrun rendezvous that runs the plan as it is.

Source: SkyPilot docs/source/reference/yaml-spec.rst. A task is homogeneous and lives in one place, so every node group
of a region is a task of its own; ranks follow from the offset that each file carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export, Loss, plan_text
from polygon.export.launch_hosts import Host, Seat, hosts_text, seats, slug
from polygon.export.scripts import PORT
from polygon.export.torchrun import by_rank
from polygon.formats.serialization import format_yaml

ACCELERATORS = {
    "a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100-sxm": "H100", "h100-pcie": "H100", "h200": "H200",
    "v100-16gb": "V100", "v100-32gb": "V100-32GB", "t4": "T4", "l4": "L4", "a10": "A10", "l40s": "L40S",
    "rtx-3090": "RTX3090", "rtx-4090": "RTX4090", "b200": "B200",
}  # fmt: skip
"""Names of accelerators as `sky show-gpus` lists them."""


def task(cluster: Cluster, rows: Sequence[Seat], first: int, total: int) -> str:
    """The task (YAML) of consecutive hosts of one pool with equally many ranks; `first` is the first's node rank."""
    pool = cluster.pools[rows[0].host.pool]
    accelerator = ACCELERATORS.get(pool.device.name, pool.device.name)
    run = [
        "set -eu",
        'cd "${POLYGON_ROOT:-$HOME/polygon}"',
        f"export CUDA_VISIBLE_DEVICES={','.join(map(str, rows[0].devices))}",
        f'torchrun --nnodes {total} --node-rank "$(({first} + SKYPILOT_NODE_RANK))" \\',
        f"  --nproc-per-node {len(rows[0].devices)} \\",
        f'  --master-addr "$MASTER_ADDR" --master-port {PORT} \\',
        '  runners/dist_runner.py --plan "$HOME/plan.json" --steps "$STEPS"',
    ]
    data: dict[str, Any] = {
        "name": f"polygon-{slug(cluster.regions[pool.region].name)}-{first}",
        "num_nodes": len(rows),
        "resources": {"accelerators": f"{accelerator}:{pool.devices_per_node}", "ports": [PORT]},
        "envs": {"MASTER_ADDR": "", "STEPS": "100"},
        "file_mounts": {"~/plan.json": "./plan.json"},
    }
    body = "".join(f"  {line}\n" for line in run)
    return format_yaml(data) + f'setup: |\n  pip install -e "${{POLYGON_ROOT:-$HOME/polygon}}[train]"\nrun: |\n{body}'


def export_skypilot(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export:
    """A YAML file for every node group of the plan."""
    result = estimate(problem, plan, tables)
    rows = seats(problem.cluster, by_rank(plan), hosts)
    files = {
        "plan.json": plan_text(problem, plan, result),
        "hosts.txt": hosts_text(rows),
    }
    first = 0
    idle = 0
    for (p, devices), group in groupby(rows, key=lambda seat: (seat.host.pool, seat.devices)):
        members = list(group)
        pool = problem.cluster.pools[p]
        idle += len(members) * (pool.devices_per_node - len(devices))
        region = slug(problem.cluster.regions[pool.region].name)
        name = f"sky-{first:03d}-{region}-{slug(pool.device.name)}.yaml"
        comment = "# Fill in resources.infra (cloud/region) and MASTER_ADDR, the first task's address.\n"
        files[name] = comment + task(problem.cluster, members, first, len(rows))
        first += len(members)
    lost = [
        Loss(what=Message("lost.places")),
        Loss(what=Message("lost.private_network")),
    ]
    if idle:
        lost.append(Loss(what=Message("lost.parts_of_nodes", devices=idle)))
    return Export(
        target="skypilot",
        files=files,
        losses=tuple(lost),
        plan_step_s=result.step_s,
        step_s=result.step_s,
        start=Message("start.sky"),
    )
