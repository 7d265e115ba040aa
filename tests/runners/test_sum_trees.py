"""Plans that give trees over which regions sum gradients: the same training, on real ranks."""

from dataclasses import replace
from itertools import pairwise

import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem, SumTree
from runners.dist_runner import end_process
from runners.engine.ideal import IdealRun, Speed
from runners.engine.options import Options
from runners.engine.rank_layout import Layout
from runners.engine.rendezvous import plan_digest
from runners.engine.run import train
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

TREES = (
    SumTree(part=0.5, root=2, relays=((0, 1), (3, 1))),
    SumTree(part=0.375, root=0),
    SumTree(part=0.125, root=1, relays=((0, 2),)),
)


def described(packing="none", trees=TREES, **changes):
    """Five workers, two of them in one of four regions, with unequal parts of the batch; and what else is said."""
    cluster = small_cluster(1, 2, 1, 1)
    problem = Problem(
        cluster=cluster, model=small_model(blocks=2), batch=Batch(global_batch=16, seq_len=16, precision="fp32")
    )
    routes = [[0], [1], [2], [3], [4], [0], [1], [0]]
    plan = small_plan(cluster, [(0, 4)], [range(5)], routes, compression=packing)
    stage = {name: changes.pop(name) for name in ("zero",) if name in changes}
    return problem, replace(plan, stages=(replace(plan.stages[0], trees=trees, **stage),), **changes)


def run_rank(rank, port, problem, plan):
    """Losses that this rank saw when all regions met, and what packing dropped in the last step."""
    steps, options = [], Options(steps=6, learning_rate=3e-3, clip_norm=0.5, synchronous_steps=2)
    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=steps.append)
    return [step["loss"] for step in steps if step["together"]], steps[-1]["packing_error"]


@pytest.mark.parametrize(
    ("packing", "changes", "error"),
    [("none", {}, 1e-5), ("none", {"zero": 2}, 1e-5), ("none", {"local_steps": 2}, 1e-5), ("int8", {}, 1e-3)],
)
def test_training_over_trees_is_the_same(packing, changes, error):
    """Losses as of sums without, to rounding or what packing drops, and the same on all ranks."""
    plans = [described(packing, trees, **changes) for trees in (TREES, ())]
    assert [Layout(*plan).groups["stage-0.0"].rounds for plan in plans] == [4, 2]
    over, straight = (run_ranks(run_rank, 5, *plan) for plan in plans)
    losses, dropped = over[0]
    assert all(of == losses for of, _ in over)
    assert losses == pytest.approx(straight[0][0], rel=error) and losses[-1] < losses[0]
    assert not dropped or 0 < dropped["weight_gradients"] < 0.1


def test_groups_have_the_trees_of_their_stage():
    """By places among the stage's regions; a tied weight, which others hold, and a server's sums have none."""
    cluster = small_cluster(1, 1, 1, 1, 1)
    problem = replace(routed_problem(1)[0], cluster=cluster, model=small_model(tied_embeddings=True))
    plan = small_plan(cluster, [(0, 3), (3, 6)], [[0, 4], [3, 1, 2]], [[m % 2, m % 3] for m in range(8)])
    trees = SumTree(part=0.75, root=2, relays=((3, 1),)), SumTree(part=0.25, root=1)
    plan = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], trees=trees)))
    groups = Layout(problem, plan).groups
    assert [(tree.part, tree.parents) for tree in groups["stage-1.0"].trees] == [(0.75, (1, -1, 0)), (0.25, (-1, 0, 0))]
    assert {name for name, group in groups.items() if group.trees} == {"stage-1.0"} < groups.keys() - {"tied.0", "all"}
    tags = sorted((group.first_tag, group.first_tag + group.tags) for group in groups.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(tags))
    assert not any(group.trees for group in Layout(problem, replace(plan, reduction="central-server")).groups.values())


def test_what_packing_owes_is_of_the_trees_of_the_plan():
    """Under others a checkpoint's error feedback is not taken."""
    problem, plan = described("int8")
    others = replace(plan, stages=(replace(plan.stages[0], trees=TREES[:1] + TREES[2:]),))
    digests = {plan_digest(problem, each) for each in (plan, others, described("int8", ())[1])}
    assert len(digests) == 3


def test_the_ideal_run_waits_for_the_way_over_trees():
    """Three regions of which the second is the root of all: the others have the last gradient after two latencies and
    its bytes, the second after one, and the same bytes over two links."""
    cluster = small_cluster(1, 1, 1)
    problem = replace(routed_problem(1)[0], cluster=cluster, batch=Batch(global_batch=6, seq_len=16, precision="fp32"))
    plan = small_plan(cluster, [(0, 6)], [[0, 1, 2]], [[m] for m in range(3)])
    plan = replace(plan, stages=(replace(plan.stages[0], trees=(SumTree(part=1.0, root=1),)),))
    shares = [(k + 1) / 6 for k in range(6)]
    speeds = {rank: Speed(seconds=(1.0, 2.0), update_s=0.0, shares=shares) for rank in range(3)}
    model, latency_s = problem.model, 0.01
    way_s = model.hidden_size * (model.vocab_size + model.max_seq_len) * 4 / 1e8
    lines = IdealRun(problem, plan, speeds, Options()).step()
    expected = [3 + 2 * latency_s + way_s, 3 + latency_s + way_s / 2, 3 + 2 * latency_s + way_s]
    assert [line["seconds"] for line in lines] == pytest.approx(expected, rel=1e-9)
