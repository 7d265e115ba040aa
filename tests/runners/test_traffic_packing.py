"""Every packing serves every kind of traffic by itself, on real ranks."""

from dataclasses import replace

import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import COMPRESSIONS, Problem
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.run import train
from tests.real_ranks import run_ranks
from tests.small_problems import small_cluster, small_model, small_plan

KINDS = ("activations", "activation_gradients", "weight_gradients")
CASES = [(kind, packing) for packing in COMPRESSIONS if packing != "none" for kind in KINDS]


def rank_of(rank, port, problem, plan):
    """What this rank saw of its steps: loss, what packing dropped, bytes to other ranks."""
    steps = []
    options = Options(steps=6, learning_rate=3e-3)
    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=steps.append)
    return [(step["loss"], step["packing_error"], sum(step["sent_bytes"].values())) for step in steps]


def run_with(**packings):
    """A run of a pipeline whose second stage lies in both regions."""
    batch = Batch(global_batch=16, seq_len=16, precision="fp32")
    problem = Problem(cluster=small_cluster(2, 1), model=small_model(blocks=2), batch=batch)
    routes = [[0, 0], [0, 1], [0, 1], [0, 0]]
    plan = small_plan(problem.cluster, [(0, 2), (2, 4)], [[0], [1, 2]], routes, micro_batch_size=4)
    plan = replace(plan, links=tuple(replace(use, **packings) for use in plan.links))
    return run_ranks(rank_of, 3, problem, plan)


@pytest.fixture(scope="module")
def plain():
    """The run without any packing."""
    return run_with()


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_a_packing_of_one_kind_of_traffic_packs_that_alone(plain, kind, packing):
    """Fewer bytes, something dropped of that kind and of no other, the same loss on all ranks, and it falls."""
    packed = run_with(**{kind: packing})
    for rank in packed:
        assert [loss for loss, _, _ in rank] == [loss for loss, _, _ in packed[0]]
        assert {name for _, dropped, _ in rank for name in dropped} <= {kind}
    assert any(0 < dropped[kind] < 1 for rank in packed for _, dropped, _ in rank if dropped)
    last = packed[0][-1][0]
    assert last < packed[0][0][0] - 0.05
    assert last == pytest.approx(plain[0][-1][0], rel=0.1) and last != plain[0][-1][0]
    assert sum(step[2] for rank in packed for step in rank) < sum(step[2] for rank in plain for step in rank)
