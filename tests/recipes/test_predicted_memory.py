"""Bytes that ranks are predicted to hold are those that they hold, also where stages share out their states unlike."""

from dataclasses import replace

import pytest
import torch

from polygon.cost.estimate import worker_memory
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.run import train
from runners.recipes.predicted_memory import predicted_peaks
from tests.real_ranks import run_ranks
from tests.runners.test_every_dimension import losses_and_bytes
from tests.small_problems import small_cluster, small_model, small_plan


def two_stages(zeros, routes, precision="fp32"):
    """Two workers, then one, of a small model whose last stage has a copy of the embedding."""
    batch = Batch(global_batch=2 * len(routes), seq_len=16, precision=precision)
    problem = Problem(cluster=small_cluster(3), model=small_model(), batch=batch)
    plan = small_plan(problem.cluster, [(0, 3), (3, 6)], [[0, 1], [2]], routes)
    stages = tuple(replace(stage, zero=zero) for stage, zero in zip(plan.stages, zeros, strict=True))
    return problem, replace(plan, stages=stages, micro_batch_size=2)


@pytest.mark.parametrize("zeros", [(2, 0), (3, 1), (2, 2)])
def test_a_weight_of_two_stages_is_divided_as_both_divide(zeros):
    """Its sum is theirs together, so that ZeRO does no more to it than the lesser of the two says."""
    problem, plan = two_stages(zeros, [[m % 2, 0] for m in range(8)])
    found = run_ranks(losses_and_bytes, 3, problem, plan)
    tables = CostTables(problem)
    predicted, planned = predicted_peaks(problem, plan), worker_memory(plan, tables, tables.placement(plan))
    for rank, (_, held) in enumerate(found):
        for what in ("weights", "gradients", "optimizer"):
            assert held[what] == pytest.approx(getattr(predicted[rank], what), rel=1e-3, abs=1000)
            # The planner leaves out that both ends are in a region.
            most = 1.3 if min(zeros) else 1.0
            assert 0.999 <= getattr(planned[rank], what) / getattr(predicted[rank], what) <= most + 1e-3


def bytes_of_states(rank, port, problem, plan):
    """Of weights, with their 16-bit copies where buckets have none of their own, and of the optimizer's state."""
    held = []
    options = Options(steps=1, learning_rate=1e-3)
    train(*(problem, plan, rank, "127.0.0.1", port, options), on_loss=end_process, on_start=held.append)
    weights = [
        bucket.weights_bytes if bucket.zero < 3 and bucket.whole_weights.dtype == torch.bfloat16
        else bucket.weights.nbytes * (1 + 2 / 4)
        for bucket in held[0].buckets
    ]  # fmt: skip
    return sum(weights) + held[0].held_bytes()["optimizer"]


@pytest.mark.parametrize("zeros", [(0, 0), (1, 1), (2, 0), (2, 2), (3, 1)])
def test_weights_of_32_bits_are_there_beside_their_copies(zeros):
    """All of both, or where ZeRO divides the weights that are updated all 16-bit ones beside a part of these."""
    problem, plan = two_stages(zeros, [[m % 2, 0] for m in range(8)], "bf16")
    predicted = predicted_peaks(problem, plan)
    for rank, held in enumerate(run_ranks(bytes_of_states, 3, problem, plan)):
        assert predicted[rank].weights + predicted[rank].optimizer == pytest.approx(held, rel=1e-3, abs=1000)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_regions_that_train_by_themselves_hold_the_weights_of_the_last_meeting(zero):
    """And the outer optimizer's momentum, both of 32 bits; ZeRO divides them as what the region updates."""
    problem, plan = two_stages((0, 0), [[0, 0]] * 4, "bf16")
    problem = replace(problem, cluster=small_cluster(2, 2))
    plan = small_plan(problem.cluster, [(0, 6)], [[0, 1, 2, 3]], [[0], [1], [2], [3]])
    plan = replace(plan, stages=(replace(plan.stages[0], zero=zero),), local_steps=2)
    tables, predicted = CostTables(problem), predicted_peaks(problem, plan)
    planned = worker_memory(plan, tables, tables.placement(plan))
    for rank, held in enumerate(run_ranks(bytes_of_states, 4, problem, plan)):
        for said in (predicted[rank], planned[rank]):
            assert said.weights + said.optimizer == pytest.approx(held, rel=1e-3, abs=1000)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_blocks_that_are_not_recomputed_keep_all(recompute):
    """Of two equal blocks, one recomputed: half of what none and both keep, and what the planner says."""

    def kept(recompute, blocks):
        problem, plan = two_stages((0, 0), [[m % 2, 0] for m in range(8)])
        stages = replace(plan.stages[0], recompute=recompute, recompute_blocks=blocks), plan.stages[1]
        plan, tables = replace(plan, stages=stages), CostTables(problem)
        return predicted_peaks(problem, plan)[0], worker_memory(plan, tables, tables.placement(plan))[0]

    (none, _), (one, planned), (both, _) = kept("none", None), kept(recompute, 1), kept(recompute, None)
    assert both.activations < one.activations == pytest.approx((none.activations + both.activations) / 2)
    assert one.activations == pytest.approx(planned.activations, rel=0.1)


def test_who_computes_nothing_expects_nothing():
    """Receives are posted for a worker's own micro-batches, of the steps that are left."""
    problem, plan = two_stages((0, 0), [[0, 0]] * 4)
    peaks = predicted_peaks(problem, plan)
    assert peaks[1].activations == peaks[1].transient == 0 < peaks[0].transient
    message = 4 * 2 * 16 * problem.model.hidden_size
    least, more = (predicted_peaks(problem, plan, steps)[0].transient for steps in (2, 3))
    assert 0 <= more - least <= 4 * message and more <= peaks[0].transient
