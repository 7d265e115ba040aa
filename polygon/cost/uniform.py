"""Plain 3D to 5D parallelism on equal devices: seconds per step and bytes per device of one configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polygon.cost.compute import LayerTimes, model_flops_per_step, update_s
from polygon.cost.layout import Layout, config_memory, config_times, data_parallel_group, lay_out, layout_of, network_of
from polygon.cost.memory import CONTEXT_BYTES, LayerMemory, MemoryBreakdown, breakdown, state_bytes
from polygon.cost.parallel import (
    OVERLAPS,
    SCHEDULES,
    ParallelConfig,
    exposed_data_parallel_s,
    exposed_sends,
    in_flight,
    stage_bounds,
)
from polygon.cost.uniform_kernel import many_kernel, terms_kernel
from polygon.domain.cluster import Pool
from polygon.domain.errors import InputError
from polygon.domain.model import Batch, Model

__all__ = [
    "OVERLAPS",
    "SCHEDULES",
    "TERMS",
    "ParallelConfig",
    "Term",
    "UniformEstimate",
    "UniformEstimates",
    "data_parallel_group",
    "estimate_many",
    "estimate_uniform",
    "exposed_data_parallel_s",
    "exposed_sends",
    "in_flight",
    "interval_s",
    "stage_bounds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of the step's time, where it comes from, and how sure it is."""

    seconds: float
    source: str
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class UniformEstimate:
    """What a configuration is predicted to cost."""

    step_s: float
    low_s: float
    high_s: float
    """Ends of the 90 % interval."""
    terms: Mapping[str, Term]
    """compute, tensor-parallel (with context and expert traffic), bubble, p2p, data-parallel, optimizer: they add
    up to step_s."""
    memory: tuple[MemoryBreakdown, ...]
    """Per stage."""
    flops: float = 0.0

    @property
    def peak(self) -> MemoryBreakdown:
        """Of the stage that needs most."""
        return max(self.memory, key=lambda stage: stage.total_bytes)


def _micro_batches(batch: Batch, config: ParallelConfig) -> int:
    share, rest = divmod(batch.global_batch, config.dp * config.micro_batch_size)
    if rest or share == 0:
        raise InputError(
            f"global_batch: found {batch.global_batch}, expected a multiple of dp x micro_batch_size = "
            f"{config.dp * config.micro_batch_size}"
        )
    return share


def _gradient_copies(batch: Batch, config: ParallelConfig) -> float:
    """Low-precision gradients that live beside the wider ones they are added to, in units of those."""
    if config.kernels.fused_accumulation or config.zero == 3 or batch.gradient_bytes <= batch.element_bytes:
        return 0.0
    return batch.element_bytes / batch.gradient_bytes


def _update_line(batch: Batch, pool: Pool, config: ParallelConfig) -> tuple[float, float]:
    """Seconds of the optimizer: what it costs at least, and per parameter."""
    base = update_s(0.0, pool.device, batch, fused=config.kernels.fused)
    return base, (update_s(1e9, pool.device, batch, fused=config.kernels.fused) - base) / 1e9


def estimate_uniform(
    model: Model,
    batch: Batch,
    pool: Pool,
    config: ParallelConfig,
    *,
    times: LayerTimes | None = None,
    memory: LayerMemory | None = None,
    context_bytes: float = CONTEXT_BYTES,
) -> UniformEstimate:
    r"""Step time and memory of one configuration on equal devices.

    .. math:: T = \sum_s t_s / v + (m - 1) \max_s t_s + T_{dp} + T_{optimizer}

    with v chunks of layers per device (the slowest stage's own share of the first sum is not divided). Ignores
    stragglers and data loading.

    Parameters
    ----------
    times, memory : optional
        Measured ones in place of the model's (see `polygon.cost.profiles`).
    """
    micro_batches = _micro_batches(batch, config)
    if times is None and memory is None:
        layout = layout_of(model, batch, pool, config)
    else:
        layout = lay_out(
            model,
            batch,
            pool,
            config,
            times or config_times(model, batch, pool, config),
            memory or config_memory(model, batch, config),
        )
    group = data_parallel_group(pool, config)
    per_weight, per_gradient, _ = state_bytes(batch)
    seconds = np.empty(6)
    step = terms_kernel(
        layout.stages[:, 0],
        layout.stages[:, 1],
        layout.backward_s,
        layout.parameters,
        layout.kinds,
        micro_batches,
        config.interleave,
        exposed_sends(config, micro_batches),
        layout.send_s,
        group.members,
        group.per_node,
        config.shard_width,
        network_of(pool),
        config.zero,
        OVERLAPS.index(config.overlap),
        config.gathers_per_layer,
        int(config.gathers_again),
        config.owned_matrices,
        float(per_weight),
        float(per_gradient),
        layout.copies_s,
        *_update_line(batch, pool, config),
        seconds,
    )
    terms = {
        name: Term(seconds=float(value), source=source or layout.source, relative_error=error or layout.relative_error)
        for (name, source, error), value in zip(TERMS, seconds, strict=True)
    }
    half = interval_s(terms)
    return UniformEstimate(
        step_s=step,
        low_s=max(0.0, step - half),
        high_s=step + half,
        terms=terms,
        memory=tuple(
            breakdown(
                *row,
                in_flight=in_flight(config, s, micro_batches),
                zero=config.zero,
                shards=config.shard_width,
                batch=batch,
                context_bytes=context_bytes,
                gradient_copies=_gradient_copies(batch, config),
            )
            for s, row in enumerate(layout.stages[:, 2:].tolist())
        ),
        flops=model_flops_per_step(model, batch),
    )


TERMS = (
    ("compute", "", 0.0),
    ("tensor-parallel", "", 0.0),
    ("bubble", "", 0.0),
    ("p2p", "spec", 0.5),
    ("data-parallel", "spec", 0.5),
    ("optimizer", "spec", 0.3),
)
"""Name, source and error of every term, in the kernel's order; empty: the layer times'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformEstimates:
    """Many configurations: what `estimate_uniform` says of each, without the words."""

    step_s: np.ndarray
    """Shape (n,)."""
    terms_s: np.ndarray
    """Shape (n, 6), in the order of `TERMS`."""
    peak_bytes: np.ndarray
    """Shape (n,): of the stage that needs most, context included."""


def estimate_many(
    model: Model, batch: Batch, pool: Pool, configs: Sequence[ParallelConfig], *, context_bytes: float = CONTEXT_BYTES
) -> UniformEstimates:
    """Step time and peak memory of many configurations at once; the kernels on the first one count for all."""
    if not configs:
        return UniformEstimates(step_s=np.zeros(0), terms_s=np.zeros((0, 6)), peak_bytes=np.zeros(0))
    number: dict[int, int] = {}
    layouts: list[Layout] = []
    interleaves: list[int] = []
    integers = np.empty((len(configs), 12), dtype=np.int64)
    per_node = pool.devices_per_node
    for i, config in enumerate(configs):
        micro_batches = _micro_batches(batch, config)
        layout = layout_of(model, batch, pool, config)
        place = number.get(id(layout))
        if place is None:
            place = number[id(layout)] = len(layouts)
            layouts.append(layout)
            interleaves.append(config.interleave)
        members = config.dp * config.cp
        integers[i] = (
            place,
            micro_batches,
            members,
            max(1, min(members, per_node // config.tp)),
            config.zero,
            OVERLAPS.index(config.overlap),
            config.gathers_per_layer,
            exposed_sends(config, micro_batches),
            config.schedule == "gpipe",
            config.shard_width,
            config.owned_matrices,
            config.gathers_again,
        )
    per_weight, per_gradient, per_optimizer = state_bytes(batch)
    held_gradient = per_gradient * (1 + _gradient_copies(batch, configs[0]))
    update = _update_line(batch, pool, configs[0])
    machine = np.array([per_weight, per_gradient, per_optimizer, held_gradient, *update])
    terms, peaks = np.empty((len(configs), 6)), np.empty(len(configs))
    many_kernel(
        integers,
        np.cumsum([0, *(len(layout.stages) for layout in layouts)]),
        np.concatenate([layout.stages for layout in layouts]),
        np.cumsum([0, *(len(layout.kinds) for layout in layouts)]),
        np.concatenate([layout.kinds for layout in layouts]),
        np.array(
            [
                (layout.backward_s, layout.parameters, layout.send_s, layout.copies_s, float(v))
                for layout, v in zip(layouts, interleaves, strict=True)
            ]
        ),
        network_of(pool),
        machine,
        terms,
        peaks,
    )
    return UniformEstimates(step_s=terms.sum(axis=1), terms_s=terms, peak_bytes=peaks + context_bytes)


def interval_s(terms: Mapping[str, Term]) -> float:
    """Half of the 90 % interval: terms of one source and error are wrong together, the others by themselves."""
    together: dict[tuple[str, float], float] = {}
    for term in terms.values():
        key = (term.source, term.relative_error)
        together[key] = together.get(key, 0.0) + term.seconds * term.relative_error
    return math.sqrt(sum(part**2 for part in together.values()))
