"""Where layers are cut: what a part of them takes under a memory option."""

from dataclasses import replace

import numpy as np
import pytest
from numba import njit

from polygon.cost.convergence import allowed
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.layer_split import _ends_s, in_flight_estimate, passing_s, whole_makespan_s
from polygon.planning.problem_arrays import Setting, build_bank, worker_classes
from tests.linked_regions import cluster_of, small_gpt
from tests.small_problems import routed_problem


@pytest.mark.parametrize("mode", [1, 2])
def test_layers_take_what_each_of_them_takes_by_itself(mode):
    """Forward and backward of any run of layers: the first so many blocks as if all were recomputed, others as if none;
    fully sharded without adding gradients up.

    The layer before the first block (the embedding) is recomputed by nobody.
    """
    problem = routed_problem(2)[0]
    tables = CostTables(problem)
    bank = build_bank(tables, worker_classes(tables, 1), Setting(2), allowed(problem))
    # A forward that recomputation makes longer, too: of what is only there while gradients are wanted, say.
    bank.forward_s[:, mode] *= 1.25
    layers = bank.parameters.shape[1] - 1
    for c in range(bank.parameters.shape[0]):
        each = {way: np.diff([bank.forward_s[c, way], bank.backward_s[c, way]]) for way in (0, mode)}
        for first, last in ((0, layers), (0, 3), (1, 2), (2, 5), (3, layers)):
            for blocks in range(last - first + 1):
                again = [max(first, 1) <= i < max(first, 1) + blocks for i in range(first, last)]
                ways = [mode if recomputed else 0 for recomputed in again]
                expected = np.sum([each[way][:, i] for way, i in zip(ways, range(first, last), strict=True)], axis=0)
                assert passing_s(bank, c, mode, blocks, first, last, 2) == pytest.approx(expected)
                adding = [0.0, bank.accumulation_s[c, last] - bank.accumulation_s[c, first]]
                assert passing_s(bank, c, mode, blocks, first, last, 3) == pytest.approx(expected - adding)
                assert first + 1 == last or adding[1] > 0


@njit
def end_s(bank, stages, zero, seconds, last):
    """Of the first kind of the first stage."""
    return _ends_s(bank, stages, 0, 0, zero, seconds, 0, last)


@njit
def in_flight(bank, stages, n, window):
    """Of the kinds of the first stage of n."""
    in_flight_estimate(bank, stages, 0, n, window)
    return stages.held[0]


def one_stage(groups, runtime="polygon", **cluster):
    """All devices of a region in one stage, four micro-batches for each of four: its decoder and allocation."""
    batch = Batch(global_batch=16, seq_len=512)
    problem = Problem(
        cluster=cluster_of([groups], **cluster), model=small_gpt(), batch=batch, runtime=catalogue.runtime(runtime)
    )
    decoder = Decoder(problem)
    counts = [problem.cluster.pools[pool].devices if tp == 1 else 0 for pool, tp in decoder.classes]
    return decoder, Allocation(workers=np.array([counts]), micro_batch_size=1)


@pytest.mark.parametrize("runtime", ["megatron-core", "fsdp", "polygon"])
def test_a_stage_ends_when_its_sums_and_gathers_do(runtime):
    """Micro-batches and what is seen of gradients and weights over slow links: the step, but for its update."""
    decoder, x = one_stage([("t4", 1, 4)], runtime, inside=Link(latency_s=5e-6, bytes_per_s=1e9))
    plan = decoder.decode(x)
    decoder.fluid_s(x)
    bank, stages = decoder.bank(x.setting), decoder._work(1).stages
    seconds = stages.kind_seconds[0, 0]
    step_s = 4 * seconds + end_s(bank, stages, plan.stages[0].zero, seconds, bank.parameters.shape[1] - 1)
    assert step_s == pytest.approx(decoder.step_times(plan).step_s, rel=0.02)
    once, scattered, sharded = (end_s(bank, stages, zero, seconds, 8) for zero in (1, 2, 3))
    assert sharded == 0 and (scattered < once) == decoder.problem.runtime.zero2_by_micro_batch


def test_workers_of_unlike_speed_may_have_one_more_in_flight():
    """Of a window of eight, four equal workers have two each; where some are faster shares cannot be dealt evenly. The
    last stage has one each."""
    for groups, more in (([("t4", 1, 4)], 0), ([("t4", 1, 2), ("a100-40gb", 1, 2)], 1)):
        decoder, x = one_stage(groups)
        decoder.fluid_s(x)
        bank, stages = decoder.bank(x.setting), decoder._work(1).stages
        kinds = stages.kind_members[0]
        assert in_flight(bank, stages, 1, 8.0)[:kinds].tolist() == [1] * kinds
        held = in_flight(bank, stages, 2, 8.0)[:kinds]
        layer_s = [
            np.diff(bank.forward_s[c, 0])[1] + np.diff(bank.backward_s[c, 0])[1] for c in stages.kinds[0, :kinds]
        ]
        speed = 1 / np.array(layer_s)
        rate = stages.kind_counts[0, :kinds] @ speed
        assert held == pytest.approx(np.minimum(np.ceil(8 * speed / rate) + more, np.ceil(16 * speed / rate)))


def test_stages_that_hold_more_micro_batches_recompute_where_memory_lacks_room():
    """48 blocks of 2048 on eight T4, one a stage: the first have most under way and recompute, the last does not."""
    model = small_gpt(blocks=48, hidden_size=2048, head_dim=128, ffn_size=8192)
    batch = Batch(global_batch=32, seq_len=1024)
    decoder = Decoder(Problem(cluster=cluster_of([[("t4", 1, 8)]]), model=model, batch=batch))
    workers = np.array([[1 if tp == 1 else 0 for _, tp in decoder.classes]] * 8)
    plan = decoder.decode(Allocation(workers=workers, micro_batch_size=4), relax=False)
    ways = [stage.recompute for stage in plan.stages]
    assert ways[0] == "full" and ways[-1] == "none"
    assert ways == sorted(ways)


def test_layers_are_cut_where_the_slower_stage_takes_least():
    """Two equal devices, and two of which one is several times as fast: no other cut is quicker."""
    for second in ("a100-40gb", "t4"):
        cluster = cluster_of([[("a100-40gb", 1, 1), (second, 1, 1)]])
        problem = Problem(cluster=cluster, model=small_gpt(blocks=12), batch=Batch(global_batch=32, seq_len=512))
        decoder = Decoder(problem)
        plan = decoder.decode(Allocation(workers=np.eye(2, dtype=np.int64), micro_batch_size=1), relax=False)
        first, last = plan.stages
        steps_s = {
            cut: decoder.step_times(
                replace(plan, stages=(replace(first, last_layer=cut), replace(last, first_layer=cut)))
            ).step_s
            for cut in range(2, problem.model.layers - 1)
        }
        assert steps_s[first.last_layer] <= 1.01 * min(steps_s.values())
        assert max(steps_s.values()) > 1.5 * min(steps_s.values())


def test_a_whole_makespan_is_the_first_end_by_which_all_are_done():
    """Of two to four kinds whose speeds differ by up to 30,000, against all ends of micro-batches in order."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        kinds, micro_batches = int(rng.integers(2, 5)), int(rng.integers(1, 200))
        counts, seconds = rng.integers(1, 9, kinds), 10 ** rng.uniform(-3, 1.5, kinds)
        ends = np.unique(np.outer(seconds, np.arange(1, micro_batches + 1)))
        done = np.floor(ends[:, None] / seconds + 1e-9) @ counts
        expected = ends[done >= micro_batches][0]
        assert whole_makespan_s(counts, seconds, kinds, micro_batches) == pytest.approx(expected, rel=1e-6)


def test_a_whole_makespan_of_very_many_micro_batches_ends():
    """Thirds and sevenths of a second, a thousand million of them: 44 a second."""
    found = whole_makespan_s(np.array([3, 5]), np.array([1 / 3, 1 / 7]), 2, 10**9)
    assert found == pytest.approx(10**9 / 44, rel=1e-6)
