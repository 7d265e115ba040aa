"""Pipelines whose stages have workers that differ, as plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.estimate import Estimate, estimate, worker_memory
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link
from polygon.domain.model import Batch, Model
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from tests.linked_regions import cluster_of
from tests.nightly import cases

MODEL = Model(
    name="g",
    blocks=8,
    hidden_size=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_size=4096,
    vocab_size=50272,
    max_seq_len=2048,
)
FABRIC, NETWORK = Link(latency_s=2e-6, bytes_per_s=300e9), Link(latency_s=5e-6, bytes_per_s=12e9)
BOUNDS = {1: (0, 10), 2: (0, 5, 10), 3: (0, 4, 7, 10)}


def cluster(network: Link = NETWORK) -> Cluster:
    """Sixteen nodes of one A100 and sixteen of one T4 on one network."""
    return cluster_of([[("a100-40gb", 16, 1), ("t4", 16, 1)]], inside=FABRIC, between=network)


def case(*stages: str, micro_batches: int = 16, network: Link = NETWORK) -> tuple[Problem, Plan]:
    """A problem, and a plan whose stages have an A100 for every `A` and a T4 for every `T`, with equal shares."""
    batch = Batch(global_batch=4 * micro_batches, seq_len=2048, precision="fp16", gradient_precision="fp16")
    unused = {"A": iter(range(16)), "T": iter(range(16, 32))}
    bounds = BOUNDS[len(stages)]
    made = tuple(
        Stage(
            first_layer=a,
            last_layer=b,
            workers=tuple(Worker(pool="AT".index(kind), devices=(next(unused[kind]),)) for kind in kinds),
        )
        for a, b, kinds in zip(bounds, bounds[1:], stages, strict=False)
    )
    routes = np.stack([np.arange(micro_batches) % stage.width for stage in made], axis=1)
    spans = stage_spans(made, [stage.width for stage in made])
    plan = Plan(stages=made, routes=routes, micro_batch_size=4, spans=spans)
    return Problem(cluster=cluster(network), model=MODEL, batch=batch), plan


def priced(*stages: str, micro_batches: int = 16, network: Link = NETWORK) -> Estimate:
    return estimate(*case(*stages, micro_batches=micro_batches, network=network))


@settings(deadline=None, max_examples=cases(25))
@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    micro_batches=st.integers(4, 40),
    faster=st.floats(1, 10),
)
def test_more_work_never_helps_and_a_faster_network_never_hurts(widths, micro_batches, faster):
    """A step grows with its micro-batches and does not with the bandwidth; its terms add up."""
    stages = ["A" * width for width in widths]
    found = priced(*stages, micro_batches=micro_batches)
    assert found.step_s == pytest.approx(sum(found.terms.values()))
    assert found.low_s <= found.step_s <= found.high_s
    assert priced(*stages, micro_batches=micro_batches + 1).step_s >= found.step_s
    wide = replace(NETWORK, bytes_per_s=NETWORK.bytes_per_s * faster)
    assert priced(*stages, micro_batches=micro_batches, network=wide).step_s <= found.step_s * (1 + 1e-12)


def test_a_stage_keeps_step_with_its_slowest_worker():
    """One T4 beside an A100, with half of the micro-batches each, is as slow as two T4 and slower than two A100.

    But for the end of the step, when the micro-batches of two T4 come at the same time.
    """
    mixed, slow, fast = (priced(pair, "A", micro_batches=64).step_s for pair in ("AT", "TT", "AA"))
    assert fast < mixed <= slow
    assert mixed == pytest.approx(slow, rel=0.02)


def test_memory_is_of_the_stage_that_needs_most():
    """Two micro-batches in flight on the first of two stages, one on the last."""
    memory = []
    for micro_batches in (16, 1):
        problem, plan = case("A", "A", micro_batches=micro_batches)
        tables = CostTables(problem)
        memory.append(worker_memory(plan, tables, step_times(plan, tables).place))
    found, alone = memory
    assert len(found) == 2
    assert found[0].activations == pytest.approx(2 * alone[0].activations)
    assert found[1].activations == pytest.approx(alone[1].activations)
