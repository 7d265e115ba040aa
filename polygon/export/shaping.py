"""tc scripts that give real hosts the links of a plan's cluster (`polygon.export.tc` writes the commands)."""

from __future__ import annotations

from collections.abc import Sequence

from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export, Loss
from polygon.export.launch_hosts import Host, hosts_text, seats
from polygon.export.tc import ShapedTarget, tc_script
from polygon.export.torchrun import by_rank


def export_tc(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export:
    """One script for all hosts that the plan uses: traffic between regions gets the cluster's latency and rate."""
    cluster = problem.cluster
    rows = seats(cluster, by_rank(plan), hosts)
    made_up = any(not seat.host.address for seat in rows)
    address = {seat.host.name: seat.host.address or f"10.77.{k // 250}.{k % 250 + 1}" for k, seat in enumerate(rows)}
    region = {seat.host.name: cluster.pools[seat.host.pool].region for seat in rows}
    targets = {
        seat.host.name: [
            ShapedTarget(
                address=address[other.host.name],
                latency_s=float(cluster.latency_s[region[seat.host.name], region[other.host.name]]),
                bytes_per_s=float(cluster.bytes_per_s[region[seat.host.name], region[other.host.name]]),
            )
            for other in rows
            if region[other.host.name] != region[seat.host.name]
            and cluster.bytes_per_s[region[seat.host.name], region[other.host.name]] > 0
        ]
        for seat in rows
    }
    step_s = step_times(plan, tables).step_s
    lost = [Loss(what=Message("lost.shared_links"))]
    return Export(
        target="tc",
        files={"shape.sh": tc_script(cluster.name, targets), "hosts.txt": hosts_text(rows)},
        losses=tuple(lost),
        plan_step_s=step_s,
        step_s=step_s,
        start=Message("start.shape"),
        notes=(Message("note.made_up_addresses"),) if made_up else (),
    )
