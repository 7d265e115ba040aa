"""Laws of training in local steps, on real ranks."""

import math
import re
import shutil
from dataclasses import replace

import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from runners.dist_runner import end_process
from runners.engine.checkpoint import steps_in
from runners.engine.options import Options
from runners.engine.run import train
from tests.real_ranks import run_ranks
from tests.small_problems import small_cluster, small_model, small_plan

STEPS, LOCAL_STEPS = 80, 4
OPTIONS = Options(steps=STEPS, learning_rate=3e-3, outer_rate=1.0, outer_momentum=0.0, synchronous_steps=0)


def run_rank(rank, port, problem, plan, options):
    """Loss of the steps in which all regions met, and the bytes sent to the other region over all steps."""
    losses, sent = {}, []

    def note(result):
        sent.append(sum(n for peer, n in result["sent_bytes"].items() if (int(peer) < 2) != (rank < 2)))
        assert not result["gradient_norm"] <= 0  # of this region's steps, where regions meet too
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


@pytest.fixture(scope="module")
def synchronous(problem_and_plan):
    """A run in which all regions sum every step's gradients."""
    problem, plan = problem_and_plan
    return run_ranks(run_rank, 4, problem, plan, OPTIONS)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 2)])
def test_local_steps_keep_the_loss_and_send_less(problem_and_plan, synchronous, fragments, overlap):
    """The same loss at equal tokens to 3 %, with H times fewer bytes between regions, also in overlapped fragments."""
    problem, plan = problem_and_plan
    options = replace(OPTIONS, outer_fragments=fragments, outer_overlap=overlap)
    local = run_ranks(run_rank, 4, problem, replace(plan, local_steps=LOCAL_STEPS), options)
    met = sorted(local[0][0])
    # In fragments the regions' weights are equal only at the end.
    assert met == (list(range(LOCAL_STEPS - 1, STEPS, LOCAL_STEPS)) if fragments == 1 else [STEPS - 1])
    assert all(losses == local[0][0] for losses, *_ in local)
    expected = sum(synchronous[0][0][step] for step in met[-5:])
    assert expected / len(met[-5:]) < 3.4
    assert sum(local[0][0][step] for step in met[-5:]) == pytest.approx(expected, rel=0.03)
    bytes_every_step, bytes_local = (sum(sent for _, sent in results) for results in (synchronous, local))
    assert bytes_every_step > 3.5 * bytes_local > 0


def test_first_steps_may_be_synchronous(problem_and_plan, synchronous):
    """Before local steps begin, losses are those of a synchronous run, number for number."""
    problem, plan = problem_and_plan
    options = replace(OPTIONS, steps=16, synchronous_steps=6)
    results = run_ranks(run_rank, 4, problem, replace(plan, local_steps=LOCAL_STEPS), options)
    losses = results[0][0]
    assert sorted(losses) == [0, 1, 2, 3, 4, 5, 9, 13, 15]
    assert [losses[step] for step in range(6)] == [synchronous[0][0][step] for step in range(6)]
    assert losses[15] == pytest.approx(synchronous[0][0][15], rel=0.03)


def stopped_rank(rank, port, problem, plan, options):
    """Like `run_rank`; rank 3 asks to stop before the first step."""
    losses = {}

    def note(result):
        losses[result["step"]] = result["loss"]

    def ask(training):
        if rank == 3:
            training.stop_requested.set()

    done = train(problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, report=note, on_start=ask)
    return done, sorted(losses)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_run_that_diverges_ends_where_regions_meet(problem_and_plan, fragments, tmp_path):
    """While they train by themselves they do not know of each other; nothing is saved before they do."""
    options = replace(
        OPTIONS, steps=9, learning_rate=1e30, clip_norm=None, outer_fragments=fragments, checkpoint_dir=tmp_path
    )
    problem, plan = problem_and_plan
    plan = replace(plan, local_steps=LOCAL_STEPS)
    with pytest.raises(RuntimeError, match="found loss nan and gradient norm"):
        run_ranks(run_rank, 4, problem, plan, replace(options, checkpoint_every=LOCAL_STEPS))
    assert not steps_in(tmp_path)


def run_rank_without_gradient(rank, port, problem, plan, options):
    """Like `run_rank`; the gradient of rank 3 is no number in the second step, though the loss is one."""

    def spoil(training):
        run = training.worker.run_schedule

        def run_schedule(step):
            run(step)
            if rank == 3 and step == 1:
                training.buckets[0].vector.fill_(math.nan)

        training.worker.run_schedule = run_schedule

    done = []
    train(
        problem, plan, rank, "127.0.0.1", port, options, on_loss=end_process, on_start=spoil,
        report=lambda result: done.append(result["step"]),
    )  # fmt: skip
    return done


def test_a_gradient_that_one_region_lost_ends_all_where_they_meet(problem_and_plan, tmp_path):
    """Or its weights stay as they are, step for step, and pass for trained."""
    problem, plan = problem_and_plan
    run = problem, replace(plan, local_steps=LOCAL_STEPS), replace(OPTIONS, steps=6, checkpoint_dir=tmp_path)
    message = rf"step {LOCAL_STEPS - 1}: found loss \d.* and gradient norm nan, expected finite numbers"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(run_rank_without_gradient, 4, *run)
    assert not steps_in(tmp_path)


def test_a_stop_is_heard_through_fragments(problem_and_plan, tmp_path):
    """All ranks meet, save and end after the same step: the wish travels with a round and the next one ends the run."""
    problem, plan = problem_and_plan
    options = replace(OPTIONS, outer_fragments=2, outer_overlap=1, checkpoint_dir=tmp_path)
    results = run_ranks(stopped_rank, 4, problem, replace(plan, local_steps=LOCAL_STEPS), options)
    assert results == [(False, list(range(2 * LOCAL_STEPS)))] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_fragments": 5}, "--outer-fragments: found 5, expected at most the plan's local steps"),
        ({"outer_fragments": 2, "outer_overlap": 3}, "--outer-overlap: found 3, expected at most local steps"),
    ],
)
def test_exchanges_that_cannot_keep_their_turn_are_refused(problem_and_plan, options, message):
    """More fragments than steps, or an exchange that would last into the next one."""
    problem, plan = problem_and_plan
    with pytest.raises(RuntimeError, match=re.escape(message)):
        run_ranks(run_rank, 4, problem, replace(plan, local_steps=LOCAL_STEPS), replace(OPTIONS, **options))


def test_local_run_resumes_where_it_stopped(problem_and_plan, tmp_path):
    """A checkpoint waits for the regions to meet; each goes on with its own optimizer state, a plan of one region too.

    Without the regions' own files the run says so, and goes on with the one state that is left.
    """
    problem, plan = problem_and_plan
    plan = replace(plan, local_steps=4)
    options = replace(OPTIONS, steps=8, checkpoint_dir=tmp_path, checkpoint_every=3)
    whole = run_ranks(run_rank, 4, problem, plan, replace(options, checkpoint_dir=None, checkpoint_every=0))
    run_ranks(run_rank, 4, problem, plan, replace(options, steps=4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    shutil.copytree(tmp_path, tmp_path / "copy")
    rest = run_ranks(run_rank, 4, problem, plan, replace(options, resume=True))
    assert rest[0][0] == {7: whole[0][0][7]}
    own = list((tmp_path / "copy").glob("*/*@region-1.layer"))
    assert {path.name.partition("@")[0] for path in own} == {"tied", "embedding", "blocks.0", "blocks.1", "head"}
    for path in own:
        path.unlink()
    changed = replace(options, resume=True, checkpoint_dir=tmp_path / "copy", log_dir=tmp_path / "log")
    other = run_ranks(run_rank, 4, problem, plan, changed)
    assert other[0][0] == pytest.approx({7: whole[0][0][7]}, rel=5e-3) and other[0][0] != rest[0][0]
    said = [(tmp_path / "log" / f"rank-{rank}.jsonl").read_text().count("taking another one's") for rank in range(4)]
    assert sum(said) == 1
    shutil.rmtree(tmp_path / "copy")
    shutil.rmtree(tmp_path / "log")
    single = small_plan(problem.cluster, [(0, 4)], [[0]], [[0]] * 3, micro_batch_size=4)
    after = run_ranks(run_rank, 1, problem, single, replace(options, steps=9, resume=True))
    assert after[0][0][8] < whole[0][0][3]
