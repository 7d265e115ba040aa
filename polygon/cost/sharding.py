"""What ZeRO adds to every micro-batch: weights gathered layer by layer before they are used, gradients scattered after.

A runtime fetches a layer ahead, so that the gather of one hides behind the compute of another; what is seen of it is
the longer part, and the compute that it slows (`Runtime.contention`).
"""

from __future__ import annotations

import numpy as np

from polygon.cost.kernels import silicon, stream_s
from polygon.cost.memory import state_bytes
from polygon.cost.overlap import overlap_of, visible_s
from polygon.cost.reduction import apart_sums_s
from polygon.cost.tables import CostTables
from polygon.domain.plan import Stage

SHARD_COPIES = 3.7
"""Passes over gathered weights and gradients that fully sharded training adds to every micro-batch (fitted)."""


def copies_s(parameters: float, tables: CostTables, pool: int) -> float:
    """Seconds per micro-batch for copies of fully sharded weights and gradients; 0 where a runtime works in place."""
    if tables.problem.runtime.by_layer:
        return 0.0
    batch = tables.problem.batch
    weight_bytes, gradient_bytes, _ = state_bytes(batch)
    chip = silicon(tables.problem.cluster.pools[pool].device, batch.precision)
    return stream_s(chip, SHARD_COPIES * parameters * (weight_bytes + gradient_bytes), 0.0)


class ShardingTraffic:
    """ZeRO's traffic of a stage's layers on devices of one pool that shard over so many of them.

    Attributes
    ----------
    forward_s, backward_s : float
        What is seen of it in every micro-batch.
    first_s : float
        Of the layers that nothing hides, once a step.
    """

    def __init__(
        self,
        tables: CostTables,
        stage: Stage,
        *,
        pool: int,
        tp: int,
        cp: int,
        shards: int,
        per_node: int,
        micro_batch_size: int,
    ) -> None:
        self.forward_s = self.backward_s = self.first_s = 0.0
        runtime, batch = tables.problem.runtime, tables.problem.batch
        gathers, scatters = stage.zero == 3, stage.zero == 3 or (stage.zero == 2 and runtime.zero2_by_micro_batch)
        if shards < 2 or not scatters:
            return
        layers = tables.layers_of(stage, tp=tp, micro_batch_size=micro_batch_size)
        held, spread = layers.parameters, layers.spread_over(stage.ep)
        model, links = tables.problem.model, tables.links
        arrays, near = links.arrays(runtime), min(per_node, shards)
        latency_s, rate = float(links.ring_latency_s[pool, pool]), float(links.ring_bytes_per_s[pool, pool])
        weight_bytes, gradient_bytes, _ = state_bytes(batch)
        # The next layer is fetched beside this one's compute, of which so much hides it.
        hidden = overlap_of(runtime, batch).gather_hidden
        pieces = runtime.gathers_per_layer
        # Layers of one kind cost the same: one of each is priced, and counted as often as it is there.
        kinds: dict[tuple[str, bool], list[int]] = {}
        for layer in range(*stage.layers):
            kinds.setdefault((model.layer_kind(layer), layer < stage.recomputed_until), []).append(layer)
        for number, ((_, recomputed), alike) in enumerate(kinds.items()):
            at, count = alike[0], len(alike)
            times = tables.times(
                pool,
                tp,
                micro_batch_size,
                stage.recompute if recomputed else "none",
                cp,
                stage.ep,
                stage.sequence_parallel,
                accumulates=stage.zero < 3,
            ).layers
            once = [
                pieces
                * apart_sums_s(
                    held[at] * size / pieces,
                    spread[at] * size / pieces,
                    stage.ep,
                    shards,
                    near,
                    pool,
                    latency_s,
                    rate,
                    1,
                    arrays,
                )
                for size in (weight_bytes, gradient_bytes)
            ]
            gather_s, scatter_s = (once[0] if gathers else 0.0), once[1]
            forward, backward = hidden * times.forward_s[at], hidden * times.backward_s[at]
            self.forward_s += count * visible_s(gather_s, forward, runtime.contention)
            # Weights that were let go after forward come once more for the forward that is repeated.
            again = recomputed and stage.recompute == "full" and runtime.gathers_again
            sent_s = (2 if again else 1) * gather_s + scatter_s
            self.backward_s += count * visible_s(sent_s, backward, runtime.contention)
            # Before the first gathers nothing computes; the gradients of the first layer come last of all.
            if number < 2:
                self.first_s += gather_s + (scatter_s if number == 0 else 0.0)
        if gathers:
            self.backward_s += copies_s(float(np.sum(held[stage.first_layer : stage.last_layer])), tables, pool)
