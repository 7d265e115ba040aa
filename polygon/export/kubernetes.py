"""Kubernetes: one JobSet, a replicated job for every group of equal hosts, that runs the plan as it is.

A pod is a host: its index in its job and the first rank of its group give its ranks. Plan and start script come from a
ConfigMap that kustomize makes of the files. Sources: jobset.sigs.k8s.io (v1alpha2), kubernetes.io (Indexed jobs),
labels of github.com/NVIDIA/k8s-device-plugin's feature discovery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count
from typing import Any

from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster
from polygon.domain.message import Message
from polygon.domain.plan import Plan, Problem
from polygon.export.bundle import Export, Loss, plan_text
from polygon.export.launch_hosts import Host, hosts_text, seats, slug
from polygon.export.rank_script import NAME, RANKS_SCRIPT, HostGroup, host_groups
from polygon.export.scripts import PORT
from polygon.export.torchrun import by_rank
from polygon.formats.serialization import format_yaml

PRODUCTS = {
    "a100-40gb": "NVIDIA-A100-SXM4-40GB", "a100-80gb": "NVIDIA-A100-SXM4-80GB", "h100-sxm": "NVIDIA-H100-80GB-HBM3",
    "h100-pcie": "NVIDIA-H100-PCIe", "h200": "NVIDIA-H200", "b200": "NVIDIA-B200", "v100-16gb": "Tesla-V100-SXM2-16GB",
    "v100-32gb": "Tesla-V100-SXM2-32GB", "t4": "Tesla-T4", "l4": "NVIDIA-L4", "a10": "NVIDIA-A10",
    "l40s": "NVIDIA-L40S", "rtx-3090": "NVIDIA-GeForce-RTX-3090", "rtx-4090": "NVIDIA-GeForce-RTX-4090",
}  # fmt: skip
"""Label `nvidia.com/gpu.product` that feature discovery gives a node, by our name of the device."""

CONFIG = "polygon-run"
"""Name of the ConfigMap with plan and script."""

SECRET = "polygon-secret"
"""Name of a Secret whose keys become variables of every rank (tokens of trackers and data), if there is one."""

GRACE_S = 300
"""Between TERM and KILL, in which ranks may end their step and write a checkpoint."""

MOST_CONFIG_BYTES = 2**20
"""That a ConfigMap takes."""

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Kubernetes takes as a label's value, beside nothing."""

Manifest = dict[str, Any]


def region_labels(cluster: Cluster) -> list[str]:
    """`topology.kubernetes.io/region` of every region's nodes: its name or, where that is none, what no other has."""
    names = [region.name for region in cluster.regions]
    labels = [name if LABEL.fullmatch(name) else "" for name in names]
    for r, name in enumerate(names):
        tried = (f"{slug(name)}-{number}" if number > 1 else slug(name) for number in count(1))
        labels[r] = labels[r] or next(label for label in tried if label not in labels)
    return labels


def job_set(name: str, cluster: Cluster, groups: Sequence[HostGroup]) -> Manifest:
    """The JobSet, as plain data."""
    world = groups[-1].first_rank + groups[-1].hosts * groups[-1].ranks_per_host
    master = f"{name}-{_job(groups[0])}-0-0.{name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [_replicated(group, cluster, master, world) for group in groups],
        },
    }


def _job(group: HostGroup) -> str:
    return f"g{group.index}"


def _replicated(group: HostGroup, cluster: Cluster, master: str, world: int) -> Manifest:
    """Pods of one group of equal hosts."""
    arguments = [str(group.first_rank), str(group.ranks_per_host), str(world), "/etc/polygon/plan.json"]
    container: Manifest = {
        "name": "ranks",
        "image": "polygon-train",
        "command": ["bash", f"/etc/polygon/{NAME}", *arguments],
        "args": ["--steps", "100", "--checkpoint-dir", "/checkpoints", "--resume"],
        "env": [{"name": "MASTER_ADDR", "value": master}, {"name": "MASTER_PORT", "value": str(PORT)}],
        "envFrom": [{"secretRef": {"name": SECRET, "optional": True}}],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": [
            {"name": "run", "mountPath": "/etc/polygon", "readOnly": True},
            {"name": "checkpoints", "mountPath": "/checkpoints"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    device = cluster.pools[group.pool].device
    selector = {"topology.kubernetes.io/region": region_labels(cluster)[cluster.pools[group.pool].region]}
    if not device.is_cpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(group.ranks_per_host)}}
        selector["nvidia.com/gpu.product"] = PRODUCTS.get(device.name, slug(device.name))
        mine = cluster.pools[group.pool]
        alike = (pool for pool in cluster.pools if (pool.region, pool.device.name) == (mine.region, device.name))
        if len({pool.devices_per_node for pool in alike}) > 1:
            # Else pods for small nodes might fill a large one, and its own wait for ever.
            selector["nvidia.com/gpu.count"] = str(mine.devices_per_node)
    pod: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": selector,
        "containers": [container],
        "volumes": [
            {"name": "run", "configMap": {"name": CONFIG}},
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "polygon-checkpoints"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "completionMode": "Indexed",
        "completions": group.hosts,
        "parallelism": group.hosts,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": _job(group), "replicas": 1, "template": {"spec": job}}


def export_kubernetes(problem: Problem, plan: Plan, tables: CostTables, hosts: Sequence[Host]) -> Export:
    """A JobSet, the plan, what starts a pod's ranks, and the kustomization that brings them together."""
    result = estimate(problem, plan, tables)
    rows = seats(problem.cluster, by_rank(plan), hosts)
    groups = host_groups(problem.cluster, rows)
    name = f"polygon-{slug(problem.model.name)[:20].strip('-')}"
    text = plan_text(problem, plan, result)
    comment = (
        "# Fill in: image (one with polygon-train[train]), the region labels of your nodes, the checkpoints' claim.\n"
    )
    regions = dict(
        zip((region.name for region in problem.cluster.regions), region_labels(problem.cluster), strict=True)
    )
    for region in dict.fromkeys(group.region for group in groups):
        if regions[region] != region:
            comment += f"# Region {json.dumps(region, ensure_ascii=False)} is labelled {regions[region]}.\n"
    generated = {"name": CONFIG, "files": ["plan.json", NAME]}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["jobset.yaml"],
        "configMapGenerator": [generated],
        # kustomize does not know where a JobSet names a ConfigMap: the name must stay as it is.
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    lost = [Loss(what=Message("lost.one_kubernetes")), Loss(what=Message("lost.chosen_nodes"))]
    notes = [Message("note.open_port"), Message("note.rehearse")]
    n_bytes = len(text.encode()) + len(RANKS_SCRIPT)
    if n_bytes > MOST_CONFIG_BYTES:
        notes.insert(0, Message("note.plan_size", mib=n_bytes / 2**20))
    return Export(
        target="kubernetes",
        files={
            "plan.json": text,
            "hosts.txt": hosts_text(rows),
            "jobset.yaml": comment + format_yaml(job_set(name, problem.cluster, groups)),
            "kustomization.yaml": format_yaml(kustomization),
            NAME: RANKS_SCRIPT,
        },
        losses=tuple(lost),
        plan_step_s=result.step_s,
        step_s=result.step_s,
        start="kubectl apply -k .",
        notes=tuple(notes),
    )
