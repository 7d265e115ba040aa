"""Laws of ZeRO-2 and ZeRO-3, on real ranks: the same numbers, and the memory that the planner says."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.memory import breakdown, layer_memory, stage_rows
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from runners.data.samples import TextSamples, hold_out
from runners.data.sources import english_text
from runners.dist_runner import end_process
from runners.engine.options import Options
from runners.engine.run import train
from runners.engine.runnable import check_runnable
from tests.nightly import at_night
from tests.real_ranks import run_ranks
from tests.small_problems import routed_problem, small_cluster, small_model, small_plan

OPTIONS = Options(steps=7, learning_rate=3e-3, clip_norm=0.5)


def run_rank(rank, port, problem, plan, options):
    """Loss by step, and bytes that the rank holds after the last one."""
    losses, held = {}, []

    def note(result):
        losses[result["step"]] = result["loss"]

    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process,
        report=note,
        on_start=lambda training: held.append(training),
    )
    return losses, held[0].held_bytes()


def with_zero(plan, zero, **changes):
    """The plan with every stage under that ZeRO stage."""
    return replace(plan, stages=tuple(replace(stage, zero=zero, **changes) for stage in plan.stages))


def one_stage():
    """Three workers of one region that hold all layers and take 4, 3 and 1 of 8 micro-batches, in different orders."""
    problem = Problem(
        cluster=small_cluster(3),
        model=small_model(),
        batch=Batch(global_batch=16, seq_len=16, precision="fp32"),
    )
    routes = [[0], [1], [0], [1], [2], [0], [0], [1]]
    return problem, small_plan(problem.cluster, [(0, 6)], [[0, 1, 2]], routes)


@pytest.fixture(scope="module")
def reference():
    """Losses of one rank that holds everything."""
    return run_ranks(run_rank, 1, *routed_problem(1), OPTIONS)[0][0]


@pytest.mark.parametrize("zero", [2, 3])
def test_split_gradients_and_weights_keep_the_loss(reference, zero, tmp_path):
    """Stages over regions of unequal widths, uneven shares, a tied weight split over two stages: one rank's losses.

    Its checkpoint is resumed by a plan of other stages and without ZeRO, and that one's by the first again.
    """
    problem, plan = routed_problem(8)
    plan = with_zero(plan, zero, recompute="full" if zero == 3 else "none")
    options = replace(OPTIONS, checkpoint_dir=tmp_path, resume=True)
    losses = {}
    for until in (3, 7):
        for found, _ in run_ranks(run_rank, 8, problem, plan, replace(options, steps=until)):
            assert found == pytest.approx({step: reference[step] for step in found}, rel=1e-5)
        losses |= found
        if until == 3:
            losses |= run_ranks(run_rank, 2, *routed_problem(2), replace(options, steps=5))[0][0]
    assert sorted(losses) == list(range(7))
    assert losses == pytest.approx(reference, rel=1e-5)


def test_bytes_per_rank_are_those_that_the_planner_counts(reference):
    """Weights, gradients and optimizer state fall with each ZeRO stage as `polygon.cost.memory` says, on every rank."""
    problem, plan = one_stage()
    rows = stage_rows(layer_memory(problem.model, problem.batch), 0, problem.model.layers)
    for zero in range(4):
        expected = breakdown(*rows, in_flight=0, zero=zero, shards=3, batch=problem.batch)
        for losses, held in run_ranks(run_rank, 3, problem, with_zero(plan, zero), replace(OPTIONS, steps=4)):
            assert losses == pytest.approx({step: reference[step] for step in range(4)}, rel=1e-5)
            # A part may be longer than another by one number in every layer.
            for part in ("weights", "gradients", "optimizer"):
                assert held[part] == pytest.approx(getattr(expected, part), abs=8 * problem.model.layers), (zero, part)
            # Two layers' weights; gradients of a layer, of the one before on its way, and of the tied embedding.
            largest_bytes = 4 * rows[1]
            assert held["passing"] <= (0, 0, 3 * largest_bytes, 5 * largest_bytes)[zero]


def in_bf16(problem, **changes):
    """The problem, trained in 16 bits."""
    return replace(problem, batch=replace(problem.batch, precision="bf16", **changes))


@pytest.mark.parametrize("optimizer", ["adamw", *at_night("muon", "adafactor")])
@pytest.mark.parametrize("zero", [1, 2])
def test_in_16_bits_32_bit_weights_are_divided(zero, optimizer, tmp_path):
    """Losses are those of whole 32-bit weights to what 16 bits can tell, the same to the bit after a resumption, and
    go on under a plan without ZeRO; every rank holds what the planner counts."""
    problem, plan = one_stage()
    problem = in_bf16(problem, optimizer=optimizer)
    whole = run_ranks(run_rank, 3, problem, with_zero(plan, 0), OPTIONS)[0][0]
    plan = with_zero(plan, zero)
    straight = run_ranks(run_rank, 3, problem, plan, OPTIONS)
    options = replace(OPTIONS, checkpoint_dir=tmp_path, resume=True)
    run_ranks(run_rank, 3, problem, plan, replace(options, steps=3))
    resumed = run_ranks(run_rank, 3, problem, plan, replace(options, steps=5))[0][0]
    last = run_ranks(run_rank, 3, problem, with_zero(plan, 0), options)[0][0]
    assert straight[0][0] == pytest.approx(whole, rel=5e-3)
    assert straight[0][0] != whole
    assert resumed == {step: straight[0][0][step] for step in (3, 4)}
    assert last == pytest.approx({step: straight[0][0][step] for step in (5, 6)}, rel=5e-3)
    rows = stage_rows(layer_memory(problem.model, problem.batch), 0, problem.model.layers)
    expected = breakdown(*rows, in_flight=0, zero=zero, shards=3, batch=problem.batch)
    for _, held in straight if optimizer == "adamw" else ():
        assert held["gradients"] == pytest.approx(expected.gradients, abs=8 * problem.model.layers)
        states = expected.weights + expected.optimizer
        assert held["weights"] + held["optimizer"] == pytest.approx(states, abs=16 * problem.model.layers)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("streams", [{}, {"outer_fragments": 2, "outer_overlap": 1}], ids=["at-once", "in-turn"])
def test_regions_that_train_by_themselves_divide_32_bit_weights(zero, streams, tmp_path):
    """What they send one another has all 32 bits of every owner's part: losses are those of whole weights to what 16
    bits can tell, after a resumption too."""
    problem = in_bf16(replace(one_stage()[0], cluster=small_cluster(2, 3)))
    plan = small_plan(problem.cluster, [(0, 6)], [[0, 1, 2, 3, 4]], [[w] for w in (0, 1, 0, 2, 3, 4, 3, 2)])
    plan = replace(plan, local_steps=2)

    def losses(zero, folder):
        options = replace(OPTIONS, synchronous_steps=1, checkpoint_dir=folder, resume=True, **streams)
        runs = [run_ranks(run_rank, 5, problem, with_zero(plan, zero), replace(options, steps=n)) for n in (3, 7)]
        return runs[0][0][0] | runs[1][0][0]

    whole, divided = losses(0, tmp_path / "whole"), losses(zero, tmp_path / "divided")
    assert sorted(whole) == sorted(divided) == list(range(7))
    assert divided == pytest.approx(whole, rel=5e-3)
    assert divided != whole
    if not streams:  # in turn, regions meet once more where a run ends
        assert (
            divided
            == run_ranks(run_rank, 5, problem, with_zero(plan, zero), replace(OPTIONS, synchronous_steps=1))[0][0]
        )
    rows = [bucket for found in run_ranks(formats_of, 5, problem, with_zero(plan, zero), OPTIONS) for bucket in found]
    assert rows and all(kept < size and name == "bfloat16" for size, kept, name in rows)


def formats_of(rank, port, problem, plan, options):
    """Of every bucket that several share: how many weights it has, how many this rank keeps, and their format."""
    held = []
    train(
        *(problem, plan, rank, "127.0.0.1", port, replace(options, steps=1)),
        on_loss=end_process, on_start=lambda training: held.append(training),
    )  # fmt: skip
    return [
        (bucket.size, len(bucket.weights), str(bucket.whole_weights.dtype).removeprefix("torch."))
        for bucket in held[0].buckets
        if bucket.owners is not None and bucket.owners.near_size > 1
    ]


def test_local_steps_refuse_split_weights():
    """Regions that train by themselves compare whole weights."""
    problem, plan = routed_problem(8)
    with pytest.raises(InputError, match=r"plan\.stages\[0\]\.zero: found 3, expected 0, 1 or 2 \(with local steps\)"):
        check_runnable(problem, with_zero(replace(plan, local_steps=4), 3))


def validated(rank, port, problem, plan, options):
    """Losses of the text that was held out, at every validation that this rank was told of."""
    whole = TextSamples(tokens=np.frombuffer(english_text()[:4001], dtype=np.uint8) % 60, seq_len=16, seed=0)
    samples, held = hold_out(whole, 0.2)
    found = []
    train(
        *(problem, plan, rank, "127.0.0.1", port, options),
        on_loss=end_process, report=lambda result: found.append(result.get("validation_loss")),
        samples=samples, validation=held,
    )  # fmt: skip
    return found


def test_split_weights_are_gathered_for_validation_too():
    """Forward alone, 50 samples in rounds of 16: the losses of one rank that holds everything."""
    options = replace(OPTIONS, steps=4, validate_every=2)
    [expected] = run_ranks(validated, 1, *routed_problem(1), options)
    assert [loss is None for loss in expected] == [True, False, True, False]
    problem, plan = one_stage()
    found = run_ranks(validated, 3, problem, with_zero(plan, 3), options)[0]
    assert [found[1], found[3]] == pytest.approx([expected[1], expected[3]], rel=1e-5)
