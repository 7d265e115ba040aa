"""What is said of a naive idea is said of its best variant: none that is written by hand is faster."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from benchmarks import naive_variants
from polygon.domain.message import Message, say
from polygon.domain.model import Batch
from polygon.domain.plan import LinkUse, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.planning.alternatives import Explainer
from polygon.planning.checker import violations
from polygon.planning.decode import Decoder
from polygon.planning.naive_plans import TRIES, NaivePlans, memory_variants, variant
from polygon.planning.search_engine import Effort
from tests.drawn_problems import equal_devices
from tests.linked_regions import cluster_of, small_gpt


def problem_of(groups, batch=32):
    cluster = cluster_of(groups, latency_s=0.005, bytes_per_s=1e9)
    return Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=batch, seq_len=512))


TWO_REGIONS = problem_of(([("a100-40gb", 1, 4)], [("v100-16gb", 2, 2)]))
EQUAL = problem_of(([("a100-40gb", 2, 4)],))


@pytest.mark.parametrize("problem", [TWO_REGIONS, EQUAL], ids=["two regions", "equal devices"])
def test_no_variant_written_by_hand_is_faster_than_what_is_said(problem, monkeypatch):
    """ZeRO x recomputation x micro-batch x degrees x packing, drawn: what explain says of the idea is no slower."""
    monkeypatch.setattr(naive_variants, "QUICK", Effort(fluid_evaluations=100, exact_evaluations=4, patience=50))
    kinds, ran = set(), 0
    for idea, said_s, best_s, tried in naive_variants.compared(problem, 80):
        assert said_s <= best_s * (1 + naive_variants.TOLERANCE), str(idea)
        kinds, ran = kinds | {idea.kind}, ran + tried
    assert {"idea.plain_3d", "idea.data_parallel", "idea.tensor_parallel", "idea.pipeline"} <= kinds
    assert ran > 100


def test_uniform_ideas_are_nested():
    """A wider idea is never slower than a narrower one, and what is said of each can be run."""
    decoder = Decoder(EQUAL)
    naive = NaivePlans(decoder)
    every, pipeline = naive.best("any", lambda row: True), naive.best("pipeline", lambda row: row["pp"] > 1)
    assert pipeline.plan.groups > 1
    for outcome in (every, pipeline):
        assert violations(EQUAL, outcome.plan) == []
        assert outcome.bill.step_s == decoder.bill(outcome.plan).step_s
    assert every.bill.step_s <= pipeline.bill.step_s * (1 + 1e-9)
    assert naive.best("none", lambda row: False).reason == Message("reason.no_such_plan")


def test_ideas_are_of_what_the_program_runs():
    """A slower variant that it runs before faster ones that it does not; where it runs none, that is said."""
    asked = replace(EQUAL, runtime=catalogue.runtime("deepspeed"))
    decoder = Decoder(asked)
    naive = NaivePlans(decoder)
    every = naive.best("any", lambda row: True)
    assert decoder.is_run(every.plan) and {worker.tp for worker in every.plan.workers} == {1}
    assert naive.best("tensor", lambda row: row["tp"] == 4).reason == Message("reason.not_run", runtime="deepspeed")


def test_drafts_are_compared_with_their_links_packed():
    """More stages send more and gain more by packing: none of the drafts is faster packed than what is said."""
    problem = equal_devices(8)
    naive = NaivePlans(Decoder(problem))
    pipeline = lambda row: row["tp"] == 1 and row["pp"] > 1  # noqa: E731
    said = naive.best("pipeline", pipeline)
    for draft in islice(naive._likely(pipeline), TRIES):
        packed = naive.decoder.settled(draft)
        if not violations(problem, packed):
            assert said.bill.step_s <= naive.decoder.bill(packed).step_s * (1 + 1e-9)


def test_whole_nodes_of_unlike_widths_train_together():
    """Four devices a node here and two there: each worker is a node."""
    problem = problem_of(([("a100-40gb", 1, 4)], [("v100-16gb", 3, 2)]), batch=40)
    explainer = Explainer(problem, uniform_plan(problem, ParallelConfig(dp=5, tp=2)))
    outcome = explainer._whole_nodes(4)
    assert outcome.bill is not None, outcome.reason
    assert violations(problem, outcome.plan) == []
    assert {(worker.pool, worker.tp) for worker in outcome.plan.workers} <= {(0, 4), (1, 2)}


def test_a_stage_has_no_more_workers_than_micro_batches():
    """Few large micro-batches over many workers: those of the largest pools take part."""
    problem = problem_of(([("a100-40gb", 1, 4)], [("v100-16gb", 2, 1), ("t4", 1, 4)]), batch=4)
    plan = uniform_plan(problem, ParallelConfig(dp=2, pp=2))
    explainer = Explainer(problem, plan)
    found = [x.workers[x.workers.any(axis=1)] for x in explainer._stage_per_region(4)]
    assert found
    for rows in found:
        assert rows.sum(axis=1).max() <= 1
    assert len({tuple(map(tuple, np.argwhere(rows).tolist())) for rows in found}) >= 2  # both orders of the regions


APART = ([("a100-80gb", 1, 2)], [("v100-16gb", 2, 2)], [("t4", 1, 2)])
FAR = replace(problem_of(APART, batch=16), cluster=cluster_of(APART, latency_s=0.05, bytes_per_s=2e7))
"""Eight devices so far apart that one region alone is faster than all."""


@pytest.mark.parametrize("program", ["polygon", "deepspeed", "torchtitan"])
def test_what_is_said_of_all_devices_is_of_all(program):
    """Not of those that get micro-batches where the others get none, nor of few large micro-batches on some."""
    asked = replace(FAR, runtime=catalogue.runtime(program))
    plan = uniform_plan(asked, ParallelConfig(dp=2))
    explainer = Explainer(asked, plan)
    found = {"one stage": explainer._data_parallel(), "nodes": explainer._whole_nodes(2), "any": explainer._uniform(2)}
    for name, outcome in found.items():
        if name == "nodes" and program == "deepspeed":
            assert outcome.reason == Message("reason.not_run", runtime=program)
            continue
        assert outcome.plan.devices_of_pools.total() == 8, name
        assert violations(asked, outcome.plan) == []
    assert found["one stage"].bill.step_s > explainer.decoder.bill(plan).step_s


def test_a_stage_per_region_needs_as_many_stages():
    """None of one region where there may be one stage alone; of three as many as there are, or more of equal width."""
    explainer = Explainer(FAR, uniform_plan(FAR, ParallelConfig(dp=2)))
    for x in islice(explainer._stage_per_region(1), 2):
        outcome = explainer._best([x], explainer._in_as_many_stages)
        assert outcome.plan.groups >= 3 and set(outcome.plan.devices_of_pools) == {0, 1, 2}
    asked = replace(FAR, runtime=catalogue.runtime("fsdp"))
    assert not list(Explainer(asked, uniform_plan(asked, ParallelConfig(dp=2)))._stage_per_region(1))


def test_memory_variants_and_their_words():
    """All pairs of ZeRO and recomputation; the words name what a plan does and leave out what it does not."""
    plan = uniform_plan(EQUAL, ParallelConfig(dp=4, tp=2, zero=1, micro_batch_size=2))
    pairs = {(p.stages[0].zero, p.stages[0].recompute) for p in memory_variants(plan)}
    assert len(pairs) == 12
    assert str(variant(plan)) == "tp 2, ZeRO-1, micro-batches of 2"
    link = LinkUse(source=0, target=1, activations="int8")
    other = replace(
        plan, links=(link,), stages=tuple(replace(s, recompute="full", recompute_blocks=2) for s in plan.stages)
    )
    assert str(variant(other)) == "tp 2, ZeRO-1, full recomputation of some blocks, micro-batches of 2, int8 on links"
    said = Message("idea.at_best", idea=Message("idea.data_parallel"), variant=variant(plan))
    assert str(said) == "data parallelism over all devices, shares by speed: at best tp 2, ZeRO-1, micro-batches of 2"
    assert "微批大小 2" in say(said, "zh")
