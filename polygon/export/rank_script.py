"""One host's ranks started by a script, for hosts that somebody else hands out: Slurm's nodes, Kubernetes' pods.

Hosts of one group are alike, and which of them is which says their manager: a rank is the first of its group's, plus
the host's place in the group times the ranks of a host, plus its place on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from polygon.domain.cluster import Cluster
from polygon.export.launch_hosts import Seat
from polygon.export.scripts import STRICT

NAME = "ranks.sh"

RANKS_SCRIPT = (
    STRICT
    + r"""# Starts this host's ranks of a plan: ranks.sh FIRST RANKS WORLD_SIZE PLAN [arguments of the runner ...]
# FIRST is the first rank of this group of hosts; Slurm or Kubernetes says which of the group this host is. MASTER_ADDR
# and MASTER_PORT say where rank 0 listens. TERM and INT reach every rank, which ends after its step, with a checkpoint
# where --checkpoint-dir names a place. When one rank fails the others of this host are ended too.
first=$1 ranks=$2 world=$3 plan=$4
shift 4
host=${JOB_COMPLETION_INDEX:-${SLURM_NODEID:-0}}
read -r -a runner <<< "${POLYGON_RUNNER:-polygon dist-runner}"
IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
pids=()
stop() { kill -TERM "${pids[@]}" 2> /dev/null || true; }
trap stop TERM INT
for ((local = 0; local < ranks; local++)); do
    CUDA_VISIBLE_DEVICES=${gpus[local]:-$local} "${runner[@]}" --plan "$plan" \
        --dist-url "tcp://$MASTER_ADDR:$MASTER_PORT" --world-size "$world" \
        --rank "$((first + host * ranks + local))" "$@" &
    pids+=($!)
done
worst=0
for _ in "${pids[@]}"; do
    code=0
    # Of those that it was asked for before bash says that it knows them no more.
    wait -n "${pids[@]}" 2> /dev/null || code=$?
    if ((code != 0)); then
        worst=$code
        stop
        break
    fi
done
# A signal ends a wait, not the rank: nobody leaves before the last one.
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2> /dev/null; do wait "$pid" || true; done
done
exit "$worst"
"""
)
"""Bash; the same on every host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Consecutive hosts of one pool that run equally many ranks each."""

    pool: int
    region: str
    device: str
    devices_per_node: int
    hosts: int
    ranks_per_host: int
    first_rank: int
    index: int

    @property
    def idle(self) -> int:
        """Devices of these hosts that the plan does not use."""
        return self.hosts * (self.devices_per_node - self.ranks_per_host)


def host_groups(cluster: Cluster, rows: Sequence[Seat]) -> list[HostGroup]:
    """Hosts in the order of their ranks, those that are alike and follow each other together."""
    groups: list[HostGroup] = []
    first = 0
    for (p, ranks), members in groupby(rows, key=lambda seat: (seat.host.pool, len(seat.devices))):
        pool = cluster.pools[p]
        hosts = len(list(members))
        groups.append(
            HostGroup(
                pool=p,
                region=cluster.regions[pool.region].name,
                device=pool.device.name,
                devices_per_node=pool.devices_per_node,
                hosts=hosts,
                ranks_per_host=ranks,
                first_rank=first,
                index=len(groups),
            )
        )
        first += hosts * ranks
    return groups
