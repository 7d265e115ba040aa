"""One configuration: what every dimension sends, the step's communication, the memory under ZeRO 0-3, does it fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from polygon.cost.compute import LayerTimes, layer_times
from polygon.cost.memory import FUSED, LayerMemory, MemoryBreakdown, layer_memory, stage_memory
from polygon.cost.overlap import gathered_s, overlap_of, seen_parts, summed_s
from polygon.domain.cluster import Device
from polygon.domain.errors import require
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Constraints
from polygon.domain.schedule import interleaved_units
from polygon.domain.uniform import ParallelConfig, stage_bounds
from polygon.formats import catalogue
from polygon.overhead.dimensions import AxisTraffic, Degrees, Shape, traffic
from polygon.overhead.topologies import Topology

VOCABULARY = 32000
"""Assumed where only sizes are given: logits count in memory, a vocabulary is not among the sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is analysed."""

    shape: Shape
    degrees: Degrees
    whole: Topology
    batch: Batch
    model: Model | None = None
    """None where only a parameter count is known."""
    device: Device | None = None
    schedule: str = "1f1b"
    overlap: str = "backward"
    p2p_overlap: bool = False
    tree_algorithm: bool = False


@dataclass(frozen=True, kw_only=True)
class TrafficAnalysis:
    """What a configuration costs beside its compute."""

    configuration: Configuration
    traffic: tuple[AxisTraffic, ...]
    upper_bound_s: float
    """What the step waits for if nothing hides it: also what others send a stage, and filling and draining."""
    scheduled_s: Mapping[str, float] | None
    """By dimension, what the step waits for; None where compute is unknown (no device or no shape)."""
    compute_s: float | None
    """Per step on the busiest device, tensor-parallel traffic included."""
    memory: Mapping[int, MemoryBreakdown]
    """By ZeRO stage, of the pipeline stage that needs most."""
    fits: bool | None
    """None where no device was named."""
    usable_bytes: float | None

    @property
    def chosen_memory(self) -> MemoryBreakdown:
        """Under the ZeRO stage asked for."""
        return self.memory[self.configuration.degrees.zero]


def expert_parameters(model: Model) -> float:
    """Parameters of all routed experts: what one rank of an infinite expert-parallel group would be rid of."""
    if not model.experts:
        return 0.0
    batch = Batch(global_batch=1, seq_len=1)
    whole, half = (layer_memory(model, batch, ep=ep).parameters.sum() for ep in (1, 2))
    return 2 * float(whole - half)


def shape_of(model: Model, batch: Batch, micro_batch_size: int, micro_batches: int) -> Shape:
    """What decides message sizes, from a model and a batch; attention is that of the last block."""
    block = model.block(model.blocks)
    return Shape(
        parameters=float(model.parameters),
        expert_parameters=expert_parameters(model),
        blocks=model.blocks,
        moe_blocks=sum(model.is_sparse(layer) for layer in range(model.layers)),
        hidden_size=model.hidden_size,
        seq_len=batch.seq_len,
        query_share=block.query_size / model.hidden_size,
        kv_share=(block.key_size + block.value_size) / 2 / model.hidden_size,
        experts_per_token=model.experts_per_token,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        element_bytes=batch.element_bytes,
        gradient_bytes=batch.gradient_bytes,
    )


def model_of_sizes(parameters: float, blocks: int, hidden_size: int, seq_len: int) -> Model:
    """A GPT of these sizes, for its activations; its own parameter count is replaced by `parameters`."""
    head_dim = next(d for d in (128, 64, hidden_size) if hidden_size % d == 0)
    return Model(
        name=f"{parameters:.3g} parameters, {blocks} x {hidden_size}",
        blocks=blocks,
        hidden_size=hidden_size,
        heads=hidden_size // head_dim,
        kv_heads=hidden_size // head_dim,
        head_dim=head_dim,
        ffn_size=4 * hidden_size,
        vocab_size=VOCABULARY,
        max_seq_len=seq_len,
    )


def parallel_config(c: Configuration) -> ParallelConfig:
    """The configuration in the cost engine's words."""
    d = c.degrees
    return ParallelConfig(
        dp=d.dp,
        tp=d.tp,
        pp=d.pp,
        cp=d.cp,
        ep=d.ep,
        chunks=d.interleave,
        micro_batch_size=c.shape.micro_batch_size,
        zero=d.zero,
        recompute=d.recompute,
        sequence_parallel=d.sequence_parallel,
        schedule=c.schedule,
    )


def nearest_in_size(parameters: float) -> Model:
    """The dense model of the catalogue whose number of parameters is nearest, as a ratio."""
    dense = [model for model in catalogue.models().values() if model.causal and not model.experts]
    return min(dense, key=lambda model: abs(math.log(model.parameters / parameters)))


def assumed_depth(c: Configuration) -> Model | None:
    """Whose number of layers is assumed, where none is given: what ZeRO-3 gathers at a time depends on it."""
    return nearest_in_size(c.shape.parameters) if c.model is None and c.shape.blocks is None else None


def _layers(c: Configuration) -> tuple[LayerMemory, list[int]]:
    """Memory by layer on one device, and the first layers of the stages."""
    d, s = c.degrees, c.shape
    if c.model is None:
        assumed = assumed_depth(c)
        count = max(d.pp, s.blocks or 0 if assumed is None else assumed.blocks)
        nothing = np.zeros(count)
        each = np.full(count, s.parameters / d.tp / count)
        even = LayerMemory(parameters=each, activation_bytes=nothing, transient_bytes=nothing, tied_parameters=0.0)
        return even, [stage * count // d.pp for stage in range(d.pp + 1)]
    layers = layer_memory(
        c.model,
        c.batch,
        tp=d.tp,
        micro_batch_size=s.micro_batch_size,
        recompute=d.recompute,
        sequence_parallel=d.sequence_parallel,
        cp=d.cp,
        ep=d.ep,
    )
    if s.parameters != c.model.parameters:  # single sizes and a parameter count, which need not agree
        scaled = layers.parameters * (s.parameters / c.model.parameters)
        layers = replace(layers, parameters=scaled, sharded_parameters=None)
    return layers, stage_bounds(c.model, replace(parallel_config(c), chunks=1))


def _in_flight(config: ParallelConfig, group: int, micro_batches: int) -> float:
    """Most micro-batches whose activations a group of devices holds, in units of all of its layers."""
    if config.schedule == "gpipe":
        return float(micro_batches)
    units = interleaved_units(config.pp, config.chunks, group)
    return min(micro_batches * config.chunks, units) / config.chunks


def memory_by_zero(c: Configuration) -> dict[int, MemoryBreakdown]:
    """Peak bytes per device of the neediest stage under ZeRO 0, 1, 2 and 3.

    Sharded over dp x cp; experts over what expert parallelism leaves of that.
    """
    layers, bounds = _layers(c)
    config = parallel_config(c)
    found = {}
    for zero in range(4):
        stages = [
            stage_memory(
                layers,
                first,
                last,
                in_flight=_in_flight(config, stage, c.shape.micro_batches),
                zero=zero,
                shards=c.degrees.dp * c.degrees.cp,
                batch=c.batch,
            )
            for stage, (first, last) in enumerate(itertools.pairwise(bounds))
        ]
        found[zero] = max(stages, key=lambda stage: stage.total_bytes)
    return found


def _times(c: Configuration) -> LayerTimes | None:
    if c.model is None or c.device is None:
        return None
    return layer_times(
        c.model,
        c.batch,
        c.device,
        c.whole.link,
        tp=c.degrees.tp,
        micro_batch_size=c.shape.micro_batch_size,
        recompute=c.degrees.recompute,
        sequence_parallel=c.degrees.sequence_parallel,
        cp=c.degrees.cp,
        ep=c.degrees.ep,
    )


def _pipeline_wait_s(c: Configuration, message: AxisTraffic, *, hidden: bool) -> float:
    r"""What the step waits for messages between stages.

    .. math:: T = t (2 M v + 2 (p - 1)), \quad \text{hidden: } T = t \cdot 2 (p - 1)

    t for a message, M micro-batches, v chunks, p stages: a stage waits for both messages of a micro-batch, whoever
    sends them, and the first and last micro-batch for all stages.
    """
    steady = 0 if hidden else 2 * c.degrees.interleave * c.shape.micro_batches
    return message.cell.chosen.time_s * (steady + 2 * (c.degrees.pp - 1))


def _unhidden_s(c: Configuration, messages: tuple[AxisTraffic, ...]) -> float:
    return sum(_pipeline_wait_s(c, t, hidden=False) if t.dimension == "PP" else t.time_s for t in messages)


def _scheduled(
    c: Configuration, messages: tuple[AxisTraffic, ...], times: LayerTimes
) -> tuple[float, dict[str, float]]:
    """Compute per step on the busiest device, and what the step waits for by dimension.

    Tensor, context (all-to-all, all-gather) and expert traffic blocks its layer. Gradients go beside the last backward,
    ZeRO-3 gathers beside all compute, a context-parallel ring beside its blocks. A pipeline waits for its messages
    unless they overlap, and always for those that fill and drain it.
    """
    config = parallel_config(c)
    assert c.model is not None
    bounds = stage_bounds(c.model, replace(config, chunks=1))[:-1]
    stages = np.stack([np.add.reduceat(t, bounds) for t in (times.forward_s, times.backward_s)])
    busiest = int(stages.sum(axis=0).argmax())
    compute_s = float(stages[:, busiest].sum()) * c.shape.micro_batches
    waits = {t.dimension: 0.0 for t in messages}
    reduce_s = sum(t.time_s for t in messages if t.dimension == "DP" and t.cell.op != "all_gather")
    gather_s = sum(t.time_s for t in messages if t.dimension == "DP" and t.cell.op == "all_gather")
    if "DP" in waits:
        forward_s, backward_s = stages[:, busiest] * (c.shape.micro_batches if config.zero == 3 else 1)
        hides = "full" if config.zero == 3 and c.overlap != "none" else c.overlap
        overlap = overlap_of(replace(FUSED, dp_overlap=hides), c.batch)
        layers = float(c.model.layers / len(bounds))
        last_s = reduce_s * seen_parts(layers, 1 / layers, overlap)[1]
        waits["DP"] = summed_s(0.0, float(backward_s), reduce_s, last_s, layers, overlap)[1]
        waits["DP"] += gathered_s(gather_s, float(forward_s), overlap)
    for t in messages:
        if t.dimension == "PP":
            waits["PP"] = _pipeline_wait_s(c, t, hidden=c.p2p_overlap)
        elif t.dimension == "CP" and t.cell.op == "p2p":
            waits["CP"] += max(0.0, t.time_s - compute_s)
        elif t.dimension != "DP":
            waits[t.dimension] += t.time_s
    return compute_s, waits


def analyse(c: Configuration) -> TrafficAnalysis:
    """Communication and memory of one configuration.

    Raises
    ------
    InputError
        Where degrees do not go together with the model, or a size that a dimension needs is missing.
    """
    if c.shape.blocks is not None:
        require(
            c.degrees.pp <= c.shape.blocks, "--pp", c.degrees.pp, f"at most the {c.shape.blocks} blocks of the model"
        )
    messages = traffic(c.shape, c.degrees, c.whole, tree_algorithm=c.tree_algorithm)
    memory = memory_by_zero(c)
    times = _times(c)
    compute_s, scheduled = (None, None) if times is None else _scheduled(c, messages, times)
    usable = None if c.device is None else c.device.memory_bytes * (1 - Constraints().memory_headroom)
    return TrafficAnalysis(
        configuration=c,
        traffic=messages,
        upper_bound_s=_unhidden_s(c, messages),
        scheduled_s=scheduled,
        compute_s=compute_s,
        memory=memory,
        fits=None if usable is None else memory[c.degrees.zero].total_bytes <= usable,
        usable_bytes=usable,
    )
