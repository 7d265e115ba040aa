"""Pipelines whose stages name their workers: unequal widths, device types and tensor-parallel degrees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polygon.cost.compute import FUSED, Kernels, LayerTimes, layer_times, update_s
from polygon.cost.link_curves import LinkCurves
from polygon.cost.memory import CONTEXT_BYTES, LayerMemory, MemoryBreakdown, layer_memory, stage_memory
from polygon.cost.profiles import ModelProfile
from polygon.cost.uniform import Term, interval_s
from polygon.domain.cluster import Device, Link
from polygon.domain.model import Batch, Model

FRAMEWORK_BYTES = {"gh200": 5.06e9}
"""What Megatron-DeepSpeed holds beside states and activations: context, communication buffers, workspaces, by device
(GH200: the constant of Sailor's simulator, eth-easl/sailor@cf2c8e3c); `CONTEXT_BYTES` on any other."""
BUCKET_COPIES = 2
"""Flattened copies of the gradients that its reduction keeps (the same source: 24 bytes for an fp32 parameter)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A worker of a stage: `tp` devices of one type in a zone."""

    device: Device
    tp: int
    zone: str

    @property
    def kind(self) -> tuple[str, int, str]:
        """What makes two workers alike."""
        return self.device.name, self.tp, self.zone


def _kinds(workers: tuple[Place, ...]) -> list[Place]:
    """One worker of every kind."""
    return list({place.kind: place for place in workers}.values())


@dataclass(frozen=True, kw_only=True)
class StagedConfig:
    """Layers [bounds[s], bounds[s + 1]) on the workers ``stages[s]``; micro-batches are dealt evenly."""

    bounds: tuple[int, ...]
    stages: tuple[tuple[Place, ...], ...]
    micro_batch_size: int
    micro_batches: int
    """Per step, over all workers of a stage."""
    kernels: Kernels = FUSED


@dataclass(frozen=True, kw_only=True)
class StagedEstimate:
    """What such a pipeline is predicted to cost."""

    step_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, Term]
    memory: tuple[MemoryBreakdown, ...]
    """Per stage, of its worst worker."""

    @property
    def peak(self) -> MemoryBreakdown:
        """Of the stage that needs most."""
        return max(self.memory, key=lambda stage: stage.total_bytes)


def estimate_staged(
    model: Model,
    batch: Batch,
    config: StagedConfig,
    *,
    profile: ModelProfile | None = None,
    curves: LinkCurves | None = None,
    fabric: Link,
    network: Link,
) -> StagedEstimate:
    """Step time and memory.

    A stage keeps step with its slowest worker: each takes ceil(micro-batches / width) of them, so that the step takes
    :math:`\\max_s n_s t_s + \\sum_{r \\ne s} t_r`; every boundary is crossed twice by every micro-batch, unpacked and
    not overlapped; gradients are reduced by a flat ring after backward.

    Parameters
    ----------
    fabric, network : Link
        Inside and between nodes, for one device, where no curve was measured.
    """
    stages = len(config.stages)
    stage_s, updates_s, memories = np.zeros(stages), np.zeros(stages), []
    rounds = np.array([math.ceil(config.micro_batches / len(workers)) for workers in config.stages])
    sources, error = set(), 0.0
    for s, workers in enumerate(config.stages):
        a, b = config.bounds[s], config.bounds[s + 1]
        for place in _kinds(workers):
            times = _times(model, batch, place, config, profile, fabric)
            stage_s[s] = max(stage_s[s], float((times.forward_s + times.backward_s)[a:b].sum()))
            sources.add(times.source)
            error = max(error, times.relative_error)
            layers = _memory(model, batch, place, config, profile)
            updates_s[s] = max(updates_s[s], _update_s(model, batch, place, config, layers, profile, a, b))
            held = stage_memory(
                layers,
                a,
                b,
                in_flight=min(int(rounds[s]), stages - s),
                zero=0,
                shards=1,
                batch=batch,
                context_bytes=FRAMEWORK_BYTES.get(place.device.name, CONTEXT_BYTES),
                gradient_copies=BUCKET_COPIES,
            )
            memories.append((s, held))
    slowest = int(np.argmax(rounds * stage_s))
    busy_s = float((rounds * stage_s)[slowest])
    fill_s = float(stage_s.sum() - stage_s[slowest])
    p2p_s = _p2p_s(model, batch, config, curves, fabric, network) * 2 * (int(rounds.max()) + stages - 2)
    reduce_s = max(
        _reduce_s(model, batch, config, s, profile, curves, fabric, network) for s in range(len(config.stages))
    )
    source = "+".join(sorted(sources))
    terms = {
        "compute": Term(seconds=busy_s, source=source, relative_error=error),
        "bubble": Term(seconds=fill_s, source=source, relative_error=error),
        "p2p": Term(seconds=p2p_s, source="profile" if curves else "spec", relative_error=0.5),
        "data-parallel": Term(seconds=reduce_s, source="profile" if curves else "spec", relative_error=1.0),
        "optimizer": Term(seconds=float(updates_s.max()), source=source, relative_error=0.5),
    }
    step = sum(term.seconds for term in terms.values())
    spread = interval_s(terms)
    return StagedEstimate(
        step_s=step,
        low_s=max(0.0, step - spread),
        high_s=step + spread,
        terms=terms,
        memory=tuple(
            max((m for where, m in memories if where == s), key=lambda m: m.total_bytes) for s in range(stages)
        ),
    )


def _times(
    model: Model, batch: Batch, place: Place, config: StagedConfig, profile: ModelProfile | None, fabric: Link
) -> LayerTimes:
    return layer_times(
        model,
        batch,
        place.device,
        fabric,
        tp=place.tp,
        micro_batch_size=config.micro_batch_size,
        kernels=config.kernels,
        profile=profile,
    )


def _memory(
    model: Model, batch: Batch, place: Place, config: StagedConfig, profile: ModelProfile | None
) -> LayerMemory:
    measured = profile.memory(model, batch, place.tp, config.micro_batch_size) if profile else None
    return measured or layer_memory(
        model,
        batch,
        tp=place.tp,
        micro_batch_size=config.micro_batch_size,
        flash_attention=config.kernels.attention != "materialised",
        fused=config.kernels.fused,
        dropout=config.kernels.dropout,
    )


def _update_s(
    model: Model,
    batch: Batch,
    place: Place,
    config: StagedConfig,
    layers: LayerMemory,
    profile: ModelProfile | None,
    a: int,
    b: int,
) -> float:
    if profile is not None:
        measured = profile.updates_s(model, place.device, place.tp, config.micro_batch_size)
        if measured is not None:
            return float(measured[a:b].sum())
    return update_s(float(layers.parameters[a:b].sum()), place.device, batch, fused=False)


def _hop_s(
    n_bytes: float, here: Place, there: Place, *, inside: bool, curves: LinkCurves | None, fabric: Link, network: Link
) -> float:
    """Seconds of a message between two devices."""
    measured = None
    if curves is not None and inside:
        curve = curves.inside.get(here.device.name)
        measured = None if curve is None else curve.transfer_s(n_bytes)
    elif curves is not None:
        senders = max(here.tp, there.tp)
        measured = curves.transfer_s(
            n_bytes, here.zone, here.device.name, there.zone, there.device.name, senders=senders
        )
    return (fabric if inside else network).transfer_s(n_bytes) if measured is None else measured


def _one_node(places: tuple[Place, ...], curves: LinkCurves | None) -> bool:
    """Whether these workers fit in one node together."""
    first = places[0]
    per_node = curves.devices_per_node.get(first.device.name, 1) if curves else 1
    same = all((p.device.name, p.zone) == (first.device.name, first.zone) for p in places)
    return same and sum(p.tp for p in places) <= per_node


def _p2p_s(
    model: Model, batch: Batch, config: StagedConfig, curves: LinkCurves | None, fabric: Link, network: Link
) -> float:
    """Seconds of the slowest boundary: every device sends the whole activation to its counterpart."""
    message = config.micro_batch_size * batch.seq_len * model.hidden_size * batch.element_bytes
    worst = 0.0
    for before, after in zip(config.stages, config.stages[1:], strict=False):
        inside = _one_node(before + after, curves)
        for i in range(max(len(before), len(after))):
            here, there = before[i % len(before)], after[i % len(after)]
            hop = _hop_s(message, here, there, inside=inside, curves=curves, fabric=fabric, network=network)
            worst = max(worst, hop)
    return worst


def _reduce_s(
    model: Model,
    batch: Batch,
    config: StagedConfig,
    stage: int,
    profile: ModelProfile | None,
    curves: LinkCurves | None,
    fabric: Link,
    network: Link,
) -> float:
    """Seconds of a flat ring over the workers of a stage, at the pace of its slowest hop."""
    workers = config.stages[stage]
    n = len(workers)
    if n < 2:
        return 0.0
    a, b = config.bounds[stage], config.bounds[stage + 1]
    parameters = max(float(_memory(model, batch, p, config, profile).parameters[a:b].sum()) for p in _kinds(workers))
    chunk = parameters * batch.gradient_bytes / n
    inside = _one_node(workers, curves)
    hops = {
        (here.kind, there.kind): _hop_s(
            chunk, here, there, inside=inside, curves=curves, fabric=fabric, network=network
        )
        for here, there in zip(workers, workers[1:] + workers[:1], strict=True)
    }
    return 2 * (n - 1) * max(hops.values())
