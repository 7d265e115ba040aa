"""What a plan says of parallelism changes no loss: each dimension that the planner may choose, on real ranks."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.runtime import POLYGON
from polygon.domain.schedule import worker_order
from polygon.domain.uniform import ParallelConfig, uniform_plan
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.rank_layout import Layout
from runners.engine.run import train
from runners.engine.runnable import check_runnable
from tests.real_ranks import run_ranks
from tests.runners.test_training import plain_loop, run_rank
from tests.small_problems import small_cluster, small_model, small_plan

OPTIONS = Options(steps=3, learning_rate=3e-3, clip_norm=0.5)
"""A loss of the first weights, one of the first gradients, one of the optimizer's state."""
DENSE = small_model()
SHORT = small_model(blocks=2)
MOE = small_model(blocks=2, experts=4, experts_per_token=2, expert_ffn_size=32, shared_experts=1, tied_embeddings=False)


def problem_of(model, ranks=1):
    return Problem(cluster=small_cluster(ranks), model=model, batch=Batch(global_batch=8, seq_len=16, precision="fp32"))


def planned(model, config):
    """Problem and plan of a uniform split."""
    problem = problem_of(model, config.devices)
    return problem, uniform_plan(problem, config)


def losses_and_bytes(rank, port, problem, plan, options=OPTIONS):
    """Losses of a rank, and the bytes that it holds after the last step."""
    losses, held = [], []
    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process,
        report=lambda result: losses.append(result["loss"]),
        on_start=held.append,
    )
    return losses, held[0].held_bytes()


@pytest.fixture(scope="module")
def plain():
    """Losses of a plain loop, dense and with experts."""
    return {model: run_ranks(plain_loop, 1, problem_of(model), OPTIONS)[0] for model in (DENSE, SHORT, MOE)}


def agree(found, expected):
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_interleaved_workers_keep_the_loss(plain):
    """Two groups of two workers hold two stages each; routes of either are uneven, and one of the stages is ZeRO-3."""
    problem, plan = planned(DENSE, ParallelConfig(pp=2, dp=2, chunks=2, micro_batch_size=1, zero=2))
    assert plan.chunks == 2 and len(plan.stages) == 4
    routes = plan.routes.copy()
    routes[0, 0], routes[5, 3] = 1, 0
    stages = (*plan.stages[:3], replace(plan.stages[3], zero=3, recompute="full"))
    plan = replace(plan, stages=stages, routes=routes)
    assert worker_order(plan, 0, 0)[-1].chunk == 0 != np.ptp(plan.shares(0))
    check_runnable(problem, plan)
    agree(run_ranks(run_rank, 4, problem, plan, OPTIONS), plain[DENSE])


@pytest.mark.parametrize(
    ("zero", "regions", "shards"),
    [(3, (4,), 2), (2, (3,), 2), (2, (4, 2), 2), (1, (4,), 2)],
    ids=["copies of one region", "copies cut unequally", "copies in two regions", "optimizer state alone"],
)
def test_shard_groups_keep_the_loss_and_divide_less(plain, zero, regions, shards):
    """ZeRO between some of a stage's workers, the others holding copies: a rank keeps a part of its own copy alone."""
    problem = replace(problem_of(DENSE), cluster=small_cluster(*regions))
    routes = [[m % sum(regions)] for m in range(8)]
    plan = small_plan(problem.cluster, [(0, 6)], [range(sum(regions))], routes, micro_batch_size=1)
    plan = replace(plan, stages=(replace(plan.stages[0], zero=zero, shards=shards),))
    check_runnable(problem, plan)
    found = run_ranks(losses_and_bytes, sum(regions), problem, plan)
    agree([losses for losses, _ in found], plain[DENSE])
    whole = 4 * DENSE.parameters
    parts = [shards] * (sum(regions) // shards * shards) + [1] * (sum(regions) % shards)
    for (_, held), divided in zip(found, parts, strict=True):
        expected = {"weights": 3, "gradients": 2, "optimizer": 1}
        for what, least in expected.items():
            n_bytes = whole * (2 if what == "optimizer" else 1) / (divided if zero >= least else 1)
            assert held[what] == pytest.approx(n_bytes, abs=8 * DENSE.layers)


def test_16_bit_weights_that_are_fetched_keep_the_loss(plain):
    """ZeRO-3 in bf16: weights travel, and gradients come, in 16 bits; the kept parts, and the loss, as of 32 bits."""
    problem, plan = planned(DENSE, ParallelConfig(dp=2, micro_batch_size=2, zero=3))
    problem = replace(problem, batch=replace(problem.batch, precision="bf16"))
    (losses, held), _ = run_ranks(losses_and_bytes, 2, problem, plan)
    assert losses == pytest.approx(plain[DENSE], rel=0.01) and losses != plain[DENSE]
    assert held["weights"] == pytest.approx(4 * DENSE.parameters / 2, abs=8 * DENSE.layers)
    # Two layers' weights in 16 bits, a layer's gradient, and as it travels (32 bits), beside the tied embedding's.
    largest = DENSE.parameters - sum(DENSE.layer_parameters(layer) for layer in range(1, DENSE.layers))
    assert held["passing"] < 2 * 4 * max(largest, DENSE.layer_parameters(1)) + 4 * largest


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (SHORT, {"dp": 2, "zero": 3}),
        (SHORT, {"tp": 2, "sequence_parallel": True}),
        (SHORT, {"cp": 2}),
        (MOE, {"dp": 2, "ep": 2}),
    ],
    ids=["ZeRO-3", "sequence", "context", "experts"],
)
def test_what_lies_between_messages_is_compiled(plain, model, split):
    """Where other ranks hold a part of a block: the losses of one process that compiles nothing."""
    problem, plan = planned(model, ParallelConfig(micro_batch_size=2, **split))
    found = run_ranks(run_rank, plan.world_size, problem, plan, replace(OPTIONS, compile="aot_eager"))
    agree(found, plain[model])


FOLDED = [
    {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "zero": 3},
    {"tp": 2, "cp": 2, "ep": 2, "zero": 1, "recompute": "full"},
    {"dp": 2, "tp": 2, "zero": 2, "recompute": "selective"},
    {"dp": 4, "tp": 2, "ep": 2, "zero": 2, "shards": 2},
]


def folded(degrees):
    """Problem and plan of a uniform split whose tensor-parallel devices have whole experts."""
    problem, plan = planned(MOE, ParallelConfig(micro_batch_size=2, sequence_parallel=True, **degrees))
    return replace(problem, runtime=replace(problem.runtime, experts="whole")), plan


@pytest.mark.parametrize("degrees", FOLDED, ids=lambda degrees: " ".join(f"{k} {v}" for k, v in degrees.items()))
def test_experts_are_whole_on_tensor_parallel_devices(plain, degrees):
    """Each has a part of the experts, also where ep x tp is more than dp x cp, and as many weights as with slices of
    them; losses, clipped by the norm of all gradients, are those of one process."""
    problem, plan = folded(degrees)
    check_runnable(problem, plan)
    layout, apart = Layout(problem, plan), degrees.get("ep", 1) * 2
    for stage, held in enumerate(plan.stages):
        first = plan.device_ranks[held.workers[0].devices[0]]
        assert layout.experts_apart(stage) == apart == len(layout.expert_ranks(first, stage))
    found = run_ranks(losses_and_bytes, plan.world_size, problem, plan)
    agree([losses for losses, _ in found], plain[MOE])
    sliced = replace(problem, runtime=POLYGON)
    cut = run_ranks(losses_and_bytes, plan.world_size, sliced, plan, replace(OPTIONS, steps=1))
    for (_, whole), (_, sliced) in zip(found, cut, strict=True):  # but for biases of the experts, which no slice cuts
        assert whole["weights"] == pytest.approx(sliced["weights"], rel=0.02)


def test_whole_experts_go_on_under_another_plan(plain, tmp_path):
    """Saved by tensor-parallel ranks with experts of their own, resumed by one process, then by such ranks again."""
    losses = []
    for steps, degrees in ((1, FOLDED[0]), (2, None), (3, FOLDED[1])):
        problem, plan = planned(MOE, ParallelConfig(micro_batch_size=2)) if degrees is None else folded(degrees)
        options = replace(OPTIONS, steps=steps, checkpoint_dir=tmp_path, resume=True)
        losses += run_ranks(run_rank, plan.world_size, problem, plan, options)[0]
    assert losses == pytest.approx(plain[MOE], rel=1e-5)
