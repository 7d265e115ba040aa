"""Measured runs of the `sailor_validation` format: plans that name the workers of every stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from polygon.accuracy.foreign_rows import NotExpressibleError, device_named
from polygon.accuracy.measured import MeasuredRun, card_bytes_per_s, cluster_of_regions
from polygon.cost.link_curves import LinkCurves
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.errors import InputError, require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.runtime import Runtime
from polygon.formats.catalogue import model as model_by_name
from polygon.formats.catalogue import runtime as runtime_by_name
from polygon.formats.catalogue import usual_link

ETHERNET_S = 50e-6
"""One way between two nodes on Ethernet, where a file says the rates of cards alone."""


class SailorPlace(NamedTuple):
    """A worker of a stage: `tp` devices of one type in a zone."""

    device: Device
    tp: int
    zone: str


def sailor_runs(
    data: Mapping[str, Any], curves: LinkCurves | None = None, runtime: Runtime | None = None
) -> list[MeasuredRun | tuple[str, str]]:
    """Every configuration of a file; (identifier, reason) where one cannot be expressed.

    Parameters
    ----------
    curves : LinkCurves, optional
        Links between nodes and zones; without it nodes have the usual cards, and several zones cannot be expressed.
    runtime : Runtime, optional
        In place of Sailor's own.
    """
    require("models" in data, "models", sorted(data), "a description of every model")
    runtime = runtime or runtime_by_name("sailor")
    runs: list[MeasuredRun | tuple[str, str]] = []
    for entry in data["configurations"]:
        try:
            runs.append(_run(entry, data["models"], curves, runtime))
        except NotExpressibleError as error:
            runs.append((str(entry.get("id")), str(error)))
        except KeyError as error:
            runs.append((str(entry.get("id")), f"the field {error} is missing"))
    return runs


def profiled_model(name: str, info: Mapping[str, Any]) -> Model:
    """The model that a file describes; the catalogue's of that name where its width is left out."""
    length = int(info.get("sequence_length_tokens") or 2048)
    if not info.get("hidden_size"):
        for called in (name, f"{name}b"):
            try:
                return replace(model_by_name(called), max_seq_len=length)
            except InputError:
                continue
        raise NotExpressibleError(f"model {name}: hidden_size is missing, and no such model is in the catalogue")
    hidden, heads = int(info["hidden_size"]), int(info["attention_heads"])
    return Model(
        name=name,
        blocks=int(info["profiled_layers"]) - 2,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        vocab_size=int(info["vocabulary_size"]),
        max_seq_len=length,
        tied_embeddings=False,
        classes=int(info.get("classes") or 0),
    )


def _run(
    entry: Mapping[str, Any], models: Mapping[str, Any], curves: LinkCurves | None, runtime: Runtime
) -> MeasuredRun:
    if entry["model"] not in models:
        raise NotExpressibleError(f"model {entry['model']} is not described in the file")
    model = profiled_model(entry["model"], models[entry["model"]])
    placed = [
        [
            SailorPlace(device=device_named(w["gpu_type"]), tp=int(w["tp"]), zone=str(w.get("zone", "")))
            for w in stage["workers"]
        ]
        for stage in entry["plan"]["stages"]
    ]
    bounds = np.cumsum([0, *(len(stage["layers"]) for stage in entry["plan"]["stages"])]).tolist()
    if bounds[-1] != model.layers:
        raise NotExpressibleError(f"the plan has {bounds[-1]} layers, the model {model.layers}")
    size = int(entry["micro_batch_size_sequences"])
    micro_batches = max(1, math.ceil(int(entry["global_batch_sequences"]) / size))
    installed = {device_named(k).name: int(v) for k, v in entry["cluster"]["gpus_installed_per_node"].items()}
    cards = {device_named(k).name: float(v) for k, v in (entry["cluster"].get("card_bytes_per_s") or {}).items()}
    cluster, workers = _cluster(placed, installed, cards, curves)
    widths = [len(places) for places in placed]
    plan = Plan(
        stages=tuple(
            Stage(first_layer=bounds[s], last_layer=bounds[s + 1], workers=tuple(workers[s]))
            for s in range(len(placed))
        ),
        routes=np.arange(micro_batches)[:, None] % np.array(widths)[None, :],
        micro_batch_size=size,
        spans=tuple((width,) * width for width in widths),
    )
    measured, again = entry.get("measured") or {}, entry.get("measured_rerun_artifact_branch") or {}

    def numbers(key: str, use: str) -> tuple[float, ...]:
        if not entry.get(use, True):
            return ()
        return tuple(float(source[key]) for source in (measured, again) if source.get(key))

    times, memories = numbers("iteration_time_s", "use_time"), numbers("peak_memory_per_gpu_bytes", "use_memory")
    return MeasuredRun(
        identifier=str(entry["id"]),
        dataset=str(entry.get("dataset") or "sailor_validation"),
        problem=Problem(
            cluster=cluster,
            model=model,
            batch=Batch(
                global_batch=micro_batches * size,
                seq_len=model.max_seq_len,
                precision="tf32",
                gradient_precision="fp32",
            ),
            runtime=runtime,
        ),
        plan=plan,
        step_s=sum(times) / len(times) if times else None,
        memory_bytes=sum(memories) / len(memories) if memories else None,
        model_key=entry["model"],
        measurements={"time": times, "memory": memories},
        device_label="+".join(sorted(entry["cluster"]["gpus_by_type_count"])),
    )


def _cluster(
    placed: list[list[SailorPlace]],
    installed: Mapping[str, int],
    cards: Mapping[str, float],
    curves: LinkCurves | None,
) -> tuple[Cluster, list[list[Worker]]]:
    """A region a zone with as many nodes of every device type as the workers fill, and the workers on them.

    A worker's devices lie in one node where it holds so many. Nodes of unlike types have Ethernet cards of the rates
    [bytes/s] that are said (`cards`), on a network that passes the fastest of them.
    """
    zones = list(dict.fromkeys(place.zone for places in placed for place in places))
    devices = {place.device.name: place.device for places in placed for place in places}
    kinds = {(p.zone, p.device.name): None for z in zones for places in placed for p in places if p.zone == z}
    taken = dict.fromkeys(kinds, 0)
    seats: list[list[tuple[tuple[str, str], int]]] = []
    for places in placed:
        seats.append([])
        for place in places:
            kind, per_node = (place.zone, place.device.name), installed[place.device.name]
            left = -taken[kind] % per_node
            taken[kind] += left if left < place.tp <= per_node else 0
            seats[-1].append((kind, taken[kind]))
            taken[kind] += place.tp
    regions = []
    for zone in zones:
        groups = []
        for kind in (kind for kind in kinds if kind[0] == zone):
            device, per_node = devices[kind[1]], installed[kind[1]]
            usual = Link(latency_s=4e-6, bytes_per_s=card_bytes_per_s(device) * per_node)
            if device.name in cards:
                usual = Link(latency_s=ETHERNET_S, bytes_per_s=cards[device.name])
            elif len([name for at, name in kinds if at == zone]) > 1:
                raise NotExpressibleError(f"cluster.card_bytes_per_s of {device.name}, beside other types, is missing")
            measured = curves.link(zone, device.name, zone, device.name, per_node) if curves and not cards else None
            groups.append(
                NodeGroup(
                    device=device.name,
                    nodes=math.ceil(taken[kind] / per_node),
                    devices_per_node=per_node,
                    intra_node=usual_link(device.name),
                    inter_node=measured or usual,
                )
            )
        widest = max((group.inter_node for group in groups), key=lambda link: link.bytes_per_s)
        regions.append(Region(name=zone or "here", node_groups=tuple(groups), intra_region=widest))
    links = {
        (a, b): _between(zones[a], zones[b], regions, curves)
        for a in range(len(zones))
        for b in range(len(zones))
        if a != b
    }
    cluster = cluster_of_regions(regions, devices, links)
    pool_of = {(cluster.regions[p.region].name, p.device.name): p for p in cluster.pools}
    workers: list[list[Worker]] = []
    for places, row in zip(placed, seats, strict=True):
        workers.append([])
        for place, ((zone, name), start) in zip(places, row, strict=True):
            pool = pool_of[(zone or "here", name)]
            first = pool.first_device + start
            workers[-1].append(Worker(pool=pool.index, devices=tuple(range(first, first + place.tp))))
    return cluster, workers


def _between(a: str, b: str, regions: list[Region], curves: LinkCurves | None) -> Link:
    """What a node of one zone gets to a node of another."""
    first = {region.name: region.node_groups[0] for region in regions}
    link = curves.link(a, first[a].device, b, first[b].device, first[a].devices_per_node) if curves else None
    if link is None:
        raise NotExpressibleError(f"no link between the zones {a} and {b} is known, expected it in a network file")
    return link
