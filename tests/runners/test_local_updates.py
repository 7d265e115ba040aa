"""Laws of training in local steps, on real ranks."""

from dataclasses import replace

import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.training import train
from tests.real_ranks import run_ranks
from tests.small_problems import small_cluster, small_model, small_plan

STEPS, LOCAL_STEPS = 80, 4


def run_rank(rank, port, problem, plan, options):
    """Loss of the steps in which all regions met, and the bytes sent to the other region over all steps."""
    losses, sent = {}, []

    def note(result):
        sent.append(sum(n for peer, n in result["sent_bytes"].items() if (int(peer) < 2) != (rank < 2)))
        if result["together"]:
            losses[result["step"]] = result["loss"]

    train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=note)
    return losses, sum(sent)


@pytest.fixture(scope="module")
def problem_and_plan():
    """Two regions with a whole pipeline each; one has twice the share of the other."""
    problem = Problem(
        cluster=small_cluster(2, 2),
        model=small_model(blocks=2),
        batch=Batch(global_batch=12, seq_len=16, precision="fp32"),
    )
    routes = [[0, 0], [1, 1], [0, 0]]
    plan = small_plan(
        problem.cluster, [(0, 2), (2, 4)], [[0, 2], [1, 3]], routes, micro_batch_size=4, compression="int8"
    )
    return problem, plan


def test_local_steps_keep_the_loss_and_send_less(problem_and_plan):
    """The same loss at equal tokens to 3 % (plain averaging), with H times fewer bytes between regions."""
    problem, plan = problem_and_plan
    options = Options(steps=STEPS, learning_rate=3e-3, outer_rate=1.0, outer_momentum=0.0)
    every_step = run_ranks(run_rank, 4, problem, plan, options)
    local = run_ranks(run_rank, 4, problem, replace(plan, local_steps=LOCAL_STEPS), options)
    assert sorted(local[0][0]) == list(range(LOCAL_STEPS - 1, STEPS, LOCAL_STEPS))
    assert all(losses == local[0][0] for losses, _ in local)
    common = sorted(local[0][0])[-5:]
    expected = sum(every_step[0][0][step] for step in common)
    assert expected / 5 < 3.4
    assert sum(local[0][0][step] for step in common) == pytest.approx(expected, rel=0.03)
    bytes_every_step, bytes_local = (sum(sent for _, sent in results) for results in (every_step, local))
    assert bytes_every_step > 3.5 * bytes_local > 0


def test_local_run_resumes_where_it_stopped(problem_and_plan, tmp_path):
    """A checkpoint waits for the regions to meet; a plan of one region goes on from it."""
    problem, plan = problem_and_plan
    plan = replace(plan, local_steps=4)
    options = Options(steps=8, learning_rate=3e-3, checkpoint_dir=tmp_path, checkpoint_every=3)
    whole = run_ranks(run_rank, 4, problem, plan, replace(options, checkpoint_dir=None, checkpoint_every=0))
    run_ranks(run_rank, 4, problem, plan, replace(options, steps=4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    rest = run_ranks(run_rank, 4, problem, plan, replace(options, resume=True))
    # Of the two regions' inner optimizer states one is kept.
    assert rest[0][0] == pytest.approx({7: whole[0][0][7]}, rel=5e-3)
    single = small_plan(problem.cluster, [(0, 4)], [[0]], [[0]] * 3, micro_batch_size=4)
    after = run_ranks(run_rank, 1, problem, single, replace(options, steps=9, resume=True))
    assert after[0][0][8] < whole[0][0][3]
