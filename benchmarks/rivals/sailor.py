"""Sailor's planning problems and its form of a plan, to and fro.

A setup says how many GPUs of each type are in each zone. The form of a plan lists stages with their layers and workers
(type, tensor-parallel degree, zone); layers are numbered as polygon's. It has no shares, routes or schedule: every
worker of a stage takes as many micro-batches as the others. So an exported plan loses its shares, and an imported one
gets even ones and 1F1B.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polygon.accuracy.foreign_rows import NotExpressibleError
from polygon.accuracy.sailor_runs import profiled_model
from polygon.cost.link_curves import LinkCurves, link_curves
from polygon.domain.cluster import Cluster, Link, NodeGroup, Pool, Region
from polygon.domain.errors import InputError, require
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Plan, Problem, Stage, Worker
from polygon.formats.catalogue import device as device_by_name

LATENCY_S = {"node": 20e-6, "zone": 1e-4, "region": 5e-4, "world": 17e-3}
"""One way, inside a node, a zone, between zones of a region and between regions: at least so much is assumed where the
measured curves show less (the last is half the round trip between us-central1 and us-west1)."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One planning problem of the file."""

    name: str
    model: str
    global_batch: int
    devices: Mapping[tuple[str, str], int]
    """By zone and Sailor's name of the type."""
    devices_per_node: int
    results: Mapping[str, Mapping[str, Any]]
    """By planner: its plan, the step time that Sailor's simulator gives it, its search time."""


def setups_from_document(document: Mapping[str, Any]) -> list[Setup]:
    """Planning problems of the `sailor_planner_bench` format.

    Raises
    ------
    InputError
        The document is not of that format.
    """
    require("setups" in document, "setups", sorted(document), "a list of planning problems")
    setups: list[Setup] = []
    for number, entry in enumerate(document["setups"]):
        try:
            counts = entry["gpus_available_count_by_zone_and_type"]
            devices = {(zone, gpu): int(n) for zone, by_type in counts.items() for gpu, n in by_type.items()}
            name = str(entry.get("figure", f"setup{number}"))
            setups.append(
                Setup(
                    name=f"{name}-{number}" if any(name == setup.name for setup in setups) else name,
                    model=entry["model"],
                    global_batch=int(entry["global_batch_sequences"]),
                    devices=devices,
                    devices_per_node=int(entry["gpus_per_node"]),
                    results=entry.get("results", {}),
                )
            )
        except (KeyError, AttributeError) as error:
            raise InputError(f"setups[{number}]: found {error}, expected Sailor's planning format") from None
    return setups


def cluster_from_setup(setup: Setup, network: Mapping[str, Any]) -> Cluster:
    """A zone becomes a region; links are the straight lines nearest to the curves that Sailor measured.

    Between two nodes the curve of as many devices as a node has counts, between two zones that of the fastest types.
    Devices that do not fill a node are a node of their own.

    Parameters
    ----------
    network : mapping
        The `sailor_network` format.
    """
    zones = list(dict.fromkeys(zone for zone, _ in setup.devices))
    types = list(dict.fromkeys(gpu for _, gpu in setup.devices))
    curves = link_curves(network)
    regions = []
    for zone in zones:
        here = [gpu for gpu in types if setup.devices.get((zone, gpu), 0) > 0]
        groups = [group for gpu in here for group in _node_groups(setup, zone, gpu, network, curves)]
        mixed = [_link(curves, setup, zone, a, zone, b) for a, b in itertools.permutations(here, 2)]
        links = [link for link in mixed if link] or [group.inter_node for group in groups]
        prices = network.get("egress_price_usd_per_GB", {}).get(zone, {})
        regions.append(
            Region(
                name=zone,
                node_groups=tuple(groups),
                intra_region=_at_least(min(links, key=lambda link: link.bytes_per_s), "zone"),
                egress_usd_per_gb=max((float(prices.get(other, 0.0)) for other in zones if other != zone), default=0.0),
            )
        )
    n = len(zones)
    latency_s, rates_s = np.zeros((n, n)), np.zeros((n, n))
    for (i, a), (j, b) in itertools.permutations(enumerate(zones), 2):
        found = [_link(curves, setup, a, x, b, y) for x in types for y in types]
        links = [link for link in found if link]
        if links:
            near = "region" if a.rsplit("-", 1)[0] == b.rsplit("-", 1)[0] else "world"
            link = _at_least(max(links, key=lambda link: link.bytes_per_s), near)
            latency_s[i, j], rates_s[i, j] = link.latency_s, link.bytes_per_s
    return Cluster(
        name=setup.name,
        regions=tuple(regions),
        latency_s=latency_s,
        bytes_per_s=rates_s,
        capacity_bytes_per_s=np.full((n, n), np.inf),
        catalogue={device_by_name(gpu).name: device_by_name(gpu) for gpu in types},
    )


def _link(curves: LinkCurves, setup: Setup, zone_a: str, gpu_a: str, zone_b: str, gpu_b: str) -> Link | None:
    """Between a node of one zone and type and one of another; None if it was not measured."""
    a, b = device_by_name(gpu_a).name, device_by_name(gpu_b).name
    return curves.link(zone_a, a, zone_b, b, setup.devices_per_node)


def _at_least(link: Link, near: str) -> Link:
    """The link with no less than the latency that is assumed for the distance."""
    return Link(latency_s=max(link.latency_s, LATENCY_S[near]), bytes_per_s=link.bytes_per_s)


def _node_groups(
    setup: Setup, zone: str, gpu: str, network: Mapping[str, Any], curves: LinkCurves
) -> Iterator[NodeGroup]:
    """Full nodes, and a node of what is left over."""
    count, per_node = setup.devices[zone, gpu], setup.devices_per_node
    name = device_by_name(gpu).name
    inter = _link(curves, setup, zone, gpu, zone, gpu)
    if inter is None:
        # A zone that was not measured inside is taken as the fastest that was.
        others = [curves.link(za, a, zb, b, per_node) for za, a, zb, b in curves.between if a == b == name and za == zb]
        inter = max((link for link in others if link), key=lambda link: link.bytes_per_s, default=None)
    if inter is None:
        raise InputError(f"setup {setup.name}: found no measured link between two {gpu}, expected one in the network")
    inside = curves.inside.get(name)
    price = network.get("gpu_price_usd_per_gpu_hour_planner", {}).get(gpu)
    for nodes, devices in ((count // per_node, per_node), (min(1, count % per_node), count % per_node)):
        if nodes:
            yield NodeGroup(
                device=name,
                nodes=nodes,
                devices_per_node=devices,
                intra_node=_at_least(inside.line() if inside else inter, "node"),
                inter_node=_at_least(inter, "zone"),
                price_usd_per_hour=None if price is None else float(price),
            )


def problem_from_setup(setup: Setup, profiles: Mapping[str, Any], network: Mapping[str, Any]) -> Problem:
    """A setup as polygon's problem: 32-bit training, nothing packed, sequences as long as the profile's.

    Parameters
    ----------
    profiles, network : mapping
        The `sailor_profiles` and `sailor_network` formats.

    Raises
    ------
    InputError
        The profiles have no such model, or say too little about it.
    """
    models = profiles.get("models", {})
    require(setup.model in models, f"setup {setup.name}: model", setup.model, f"one of {sorted(models)}")
    try:
        model = profiled_model(setup.model, models[setup.model]["info"])
    except NotExpressibleError as error:
        raise InputError(f"setup {setup.name}: {error}") from None
    sent = models[setup.model]["by_tensor_parallel"]["1"]["output_activation_bytes_per_layer_per_sequence"]
    seq_len = int(sent[1]) // (4 * model.hidden_size)
    return Problem(
        cluster=cluster_from_setup(setup, network),
        model=replace(model, max_seq_len=seq_len, tied_embeddings=False),
        batch=Batch(global_batch=setup.global_batch, seq_len=seq_len, precision="fp32"),
        constraints=Constraints(compressions=("none",)),
    )


def plan_form(plan: Plan, cluster: Cluster, types: Mapping[str, str], layers: int | None = None) -> dict[str, Any]:
    """A plan in Sailor's form.

    Parameters
    ----------
    types : mapping
        Sailor's name of each device type that the plan uses, by polygon's.
    layers : int, optional
        How many the profile has, where it counts a final norm as one of its own.
    """
    last_layer = max(plan.stages[-1].last_layer, layers or 0)
    stages = []
    for stage in plan.stages:
        workers = []
        for worker in stage.workers:
            pool = cluster.pools[worker.pool]
            name = pool.device.name
            require(name in types, "plan: device", name, f"one of {sorted(types)}")
            workers.append({"gpu_type": types[name], "tp": worker.tp, "zone": cluster.regions[pool.region].name})
        end = stage.last_layer if stage is not plan.stages[-1] else last_layer
        stages.append({"layers": list(range(stage.first_layer, end)), "workers": workers})
    return {
        "micro_batch_size_sequences": plan.micro_batch_size,
        "pipelines_count": 1,
        "stages": stages,
        "independent_pipelines": None,
    }


def type_names(setup: Setup) -> dict[str, str]:
    """Sailor's names of a setup's types, by polygon's."""
    return {device_by_name(gpu).name: gpu for _, gpu in setup.devices}


def plan_from_form(form: Mapping[str, Any], problem: Problem, layers: int | None = None) -> Plan:
    """A plan of Sailor's form on a cluster whose regions are its zones.

    Devices are dealt node by node, so that a tensor-parallel worker stays on one node where that is possible.

    Parameters
    ----------
    layers : int, optional
        How many the profile has, where it counts a final norm as one of its own: that joins the head.

    Raises
    ------
    InputError
        The form has independent pipelines or workers on several nodes, layers that do not cover the model, more
        workers than the cluster has devices, or a batch that its micro-batches do not divide.
    """
    if form.get("independent_pipelines") or not form.get("stages"):
        raise InputError("plan: found pipelines with stages of their own, expected stages that all pipelines share")
    size = int(form["micro_batch_size_sequences"])
    global_batch = problem.batch.global_batch
    require(size >= 1 and global_batch % size == 0, "micro_batch_size_sequences", size, f"a divisor of {global_batch}")
    free = _Free(problem.cluster)
    first, stages = 0, []
    # Wide workers first: they need whole nodes.
    wanted = sorted(
        (-int(worker["tp"]), s, w)
        for s, stage in enumerate(form["stages"])
        for w, worker in enumerate(stage["workers"])
    )
    placed = {(s, w): free.take(form["stages"][s]["workers"][w], f"stages[{s}].workers[{w}]") for _, s, w in wanted}
    for s, entry in enumerate(form["stages"]):
        held = list(entry["layers"])
        require(held == list(range(first, first + len(held))), f"stages[{s}].layers", held, f"{first} and on")
        workers = tuple(placed[s, w] for w in range(len(entry["workers"])))
        require(bool(held and workers), f"stages[{s}]", "nothing", "at least one layer and one worker")
        stages.append(Stage(first_layer=first, last_layer=first + len(held), workers=workers))
        first += len(held)
    count = problem.model.layers
    wanted_layers = layers or count
    require(first == wanted_layers, "layers", first, f"all {wanted_layers} of the model")
    require(stages[-1].first_layer < count, "layers of the last stage", first - count, "more than the final norm")
    stages[-1] = replace(stages[-1], last_layer=count)
    micro_batches = global_batch // size
    routes = np.stack([np.arange(micro_batches) % stage.width for stage in stages], axis=1)
    return Plan(
        stages=tuple(stages),
        routes=routes,
        micro_batch_size=size,
        spans=tuple((stage.width,) * stage.width for stage in stages),
        solver="sailor-form",
    )


def _node_starts(pool: Pool) -> range:
    """Number of the first device of each node."""
    return range(pool.first_device, pool.first_device + pool.devices, pool.devices_per_node)


class _Free:
    """Devices not yet dealt, node by node."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = [
            [list(range(first, first + pool.devices_per_node)) for first in _node_starts(pool)]
            for pool in cluster.pools
        ]

    def take(self, worker: Mapping[str, Any], where: str) -> Worker:
        """Devices of one node for a worker of Sailor's form; of the fullest node that it fits in."""
        tp, zone, name = int(worker["tp"]), worker["zone"], device_by_name(worker["gpu_type"]).name
        nodes_needed = int(worker.get("spans_nodes_count", 1))
        require(nodes_needed == 1, f"{where}.spans_nodes_count", nodes_needed, "1, as a worker stays on one node")
        for pool in self.cluster.pools:
            if pool.device.name != name or self.cluster.regions[pool.region].name != zone:
                continue
            fitting = [node for node in self.nodes[pool.index] if len(node) >= tp]
            if fitting:
                node = min(fitting, key=len)
                devices, node[:] = node[:tp], node[tp:]
                return Worker(pool=pool.index, devices=tuple(devices))
        raise InputError(f"{where}: found no node with {tp} free {name} in {zone}, expected one")
