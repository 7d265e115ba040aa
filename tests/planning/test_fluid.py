"""The fluid kernel is the same function compiled as in plain Python."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.formats import catalogue
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.fluid import BEST, FIRST, FOURTH, SECOND, THIRD, fluid_step_s
from polygon.planning.fluid_work import work_for
from tests.drawn_problems import larger_problems
from tests.linked_regions import cluster_of, small_gpt


def fluid_values() -> list[list[float]]:
    """Seconds (-1: never) and reason of allocations drawn at random."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("a100-40gb", 1, 4), ("t4", 2, 1)], [("v100-16gb", 1, 2)]])
    problem = Problem(
        cluster=cluster,
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
        constraints=Constraints(parity="any"),
    )
    decoder = Decoder(problem)
    candidates, rng = Candidates(decoder, 4), np.random.default_rng(0)
    values = []
    for _ in range(40):
        seconds, why = decoder.fluid_s(candidates.random(rng))
        values.append([seconds if np.isfinite(seconds) else -1.0, why])
    return values


def test_compiled_and_plain_python_agree():
    """Allocations drawn at random have the same step time and reason without the compiler."""
    code = "import json; from tests.planning.test_fluid import fluid_values; print(json.dumps(fluid_values()))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    plain, compiled = np.array(json.loads(run.stdout)), np.array(fluid_values())
    assert (plain[:, 0] > 0).sum() >= 10
    assert plain == pytest.approx(compiled, rel=1e-12)


@pytest.mark.parametrize(("nodes", "stages"), [(1, 2), (2, 4)])
def test_tied_embeddings_of_one_node_take_its_fabric_in_the_relaxation_too(nodes, stages):
    """Stages of two on nodes of four behind a slow network: the last is dealt beside the first, and the relaxation
    waits for the network no more than the step does."""
    slow = Link(latency_s=1e-3, bytes_per_s=1e7)
    cluster = cluster_of([[("a100-40gb", nodes, 4)]], inside=Link(latency_s=5e-6, bytes_per_s=1e11), between=slow)
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))
    decoder = Decoder(problem)
    workers = np.array([[2 if tp == 1 else 0 for _, tp in decoder.classes]] * stages)
    x = Allocation(workers=workers, micro_batch_size=1)
    plan = decoder.decode(x)
    assert {d // 4 for s in (0, -1) for worker in plan.stages[s].workers for d in worker.devices} == {0}
    exact_s = decoder.step_times(plan).step_s
    assert decoder.fluid_s(x)[0] < 1.5 * exact_s < small_gpt().head_weight_parameters() * 4 / 1e7


def test_nodes_of_a_region_pack_what_they_sum_in_the_relaxation_too():
    """Four times less over a slow network: the relaxed step is that of the plan, and so with nothing packed."""
    slow = Link(latency_s=1e-4, bytes_per_s=1e8)
    cluster = cluster_of([[("a100-40gb", 2, 2)]], inside=Link(latency_s=5e-6, bytes_per_s=1e11), between=slow)
    batch, steps_s = Batch(global_batch=32, seq_len=512), []
    for modes in ("int8",), ("none",):
        decoder = Decoder(
            Problem(cluster=cluster, model=small_gpt(), batch=batch, constraints=Constraints(compressions=modes))
        )
        workers = np.array([[4 if tp == 1 else 0 for _, tp in decoder.classes]])
        x = Allocation(workers=workers, micro_batch_size=1)
        steps_s.append(decoder.fluid_s(x)[0])
        assert steps_s[-1] == pytest.approx(decoder.step_times(decoder.decode(x)).step_s, rel=0.02)
    assert steps_s[0] < 0.3 * steps_s[1]


@pytest.mark.parametrize("parity", ["safe", "any"])
def test_nodes_pack_nothing_in_the_relaxation_where_they_could_not_hold_it(parity):
    """Packed sums divide inside nodes: a node of two does not hold half of the states, and the relaxation knows."""
    slow = Link(latency_s=1e-4, bytes_per_s=1e8)
    cluster = cluster_of([[("t4", 4, 2)]], inside=Link(latency_s=5e-6, bytes_per_s=1e11), between=slow)
    model, batch = replace(small_gpt(), blocks=100), Batch(global_batch=32, seq_len=512)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=batch, constraints=Constraints(parity=parity)))
    x = Allocation(workers=np.array([[8 if tp == 1 else 0 for _, tp in decoder.classes]]), micro_batch_size=1)
    plan = decoder.decode(x)
    assert plan.stages[0].zero and not plan.packed_inside
    assert decoder.fluid_s(x)[0] == pytest.approx(decoder.step_times(plan).step_s, rel=0.01)


def test_regions_that_keep_their_share_take_whole_micro_batches_in_the_relaxation_too():
    """A T4 beside four A100 takes one micro-batch or none, not a part of one."""
    groups = [[("a100-40gb", 1, 8)], [("t4", 1, 2)]]
    cluster = cluster_of(groups, latency_s=0.05, bytes_per_s=1e9)
    model, batch = replace(small_gpt(), blocks=24), Batch(global_batch=16, seq_len=1024)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=batch))
    workers = np.array([[(4 if c == 0 else 1) if tp == 1 else 0 for c, tp in decoder.classes]] * 2)
    x = Allocation(workers=workers, micro_batch_size=1)
    assert decoder.fluid_s(x)[0] == pytest.approx(decoder.step_times(decoder.decode(x)).step_s, rel=0.04)


@pytest.mark.parametrize(("runtime", "zero"), [("fsdp", 2), ("megatron-core", 1)])
def test_gradients_are_scattered_as_often_as_the_runtime_does_it(runtime, zero):
    """ZeRO-2 after every micro-batch; once a step it holds no less than ZeRO-1, and is not taken: relaxed as in the
    plan."""
    cluster = cluster_of([[("t4", 1, 4)]])
    model, batch = replace(small_gpt(), blocks=100), Batch(global_batch=32, seq_len=512)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=batch, runtime=catalogue.runtime(runtime)))
    workers = np.array([[4 if tp == 1 else 0 for _, tp in decoder.classes]])
    x = Allocation(workers=workers, micro_batch_size=1)
    plan = decoder.decode(x)
    times = decoder.step_times(plan)
    assert plan.stages[0].zero == zero and decoder.problem.runtime.zero2_by_micro_batch == (zero == 2)
    assert decoder.fluid_s(x)[0] == pytest.approx(times.step_s, rel=0.05)


def test_weights_stay_whole_where_memory_holds_them():
    """Four micro-batches a worker: ZeRO-1 sends weights once a step, ZeRO-3 twice a micro-batch."""
    decoder = Decoder(
        Problem(cluster=cluster_of([[("t4", 1, 4)]]), model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    )
    workers = np.array([[4 if tp == 1 else 0 for _, tp in decoder.classes]])
    assert decoder.decode(Allocation(workers=workers, micro_batch_size=1)).stages[0].zero == 1


@pytest.mark.parametrize("latency_s", [0.0005, 0.2])
def test_layers_are_cut_again_for_what_is_under_way(latency_s):
    """Stages far apart have more in flight than one micro-batch per worker; where memory lacks room, another cut.

    16 blocks of 2048 on three times two T4, 32 micro-batches of 11: near one another the first is best; far apart
    memory holds too little of what is under way, and the step is longer than by the other cut (14.1 s, not 11.9).
    """
    cluster = cluster_of([[("t4", 2, 1)]] * 3, latency_s=latency_s, bytes_per_s=1e9)
    model = small_gpt(blocks=16, hidden_size=2048, head_dim=128, ffn_size=8192)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=352, seq_len=512)))
    x = Allocation(workers=2 * np.eye(3, dtype=np.int64), micro_batch_size=11)
    bank, out = decoder.bank(x.setting), (np.zeros(4, np.int64), np.zeros((3, 3), np.int64), np.zeros(3, np.int64))
    first, second, best = (
        fluid_step_s(bank, x.workers, *out, work_for(bank, 3), cut)[0] for cut in (FIRST, SECOND, BEST)
    )
    exact_s = decoder.step_times(decoder.decode(x)).step_s
    assert best == min(first, second)
    assert exact_s == pytest.approx(best, rel=0.05)
    if latency_s < 0.1:
        assert first < second
        return
    again = decoder.decode(x, relax=False, cuts=(SECOND,))
    assert violations(decoder.problem, again) == []
    assert decoder.step_times(again).step_s == pytest.approx(second, rel=0.05)
    assert second < 0.99 * first


def test_layers_are_not_cut_again_where_memory_holds_all_that_is_under_way():
    """Two stages of a small model on A100: a step of less than a second is bound by no memory, so there is no second
    cut."""
    decoder = Decoder(
        Problem(
            cluster=cluster_of([[("a100-40gb", 1, 2)]]), model=small_gpt(), batch=Batch(global_batch=16, seq_len=512)
        )
    )
    rows = np.array([[1 if tp == 1 else 0 for _, tp in decoder.classes]] * 2)
    bank = decoder.bank(Allocation(workers=rows, micro_batch_size=1).setting)
    steps_s = []
    for cut in (FIRST, SECOND, BEST):
        out = np.zeros(3, np.int64), np.zeros((3, 2), np.int64), np.zeros(3, np.int64)
        steps_s.append(fluid_step_s(bank, rows, *out, work_for(bank, 2), cut)[0])
    assert steps_s[0] == steps_s[2] < 1.0 and steps_s[1] == np.inf


def test_stages_that_sum_over_slow_links_get_fewer_layers():
    """Two regions of four A100 on a link of 30 MB/s: a stage of both in the middle, so that half of the micro-batches
    cross before it and half after. With as many layers as its workers compute in time it sums for longer than all
    else takes."""
    cluster = cluster_of([[("a100-40gb", 1, 4)]] * 2, latency_s=0.01, bytes_per_s=3e7)
    model = small_gpt(blocks=32, hidden_size=1024, head_dim=64, ffn_size=4096)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=512)))
    near, far = (next(c for c, (pool, tp) in enumerate(decoder.classes) if (pool, tp) == (p, 1)) for p in (0, 1))
    rows = np.zeros((3, len(decoder.classes)), dtype=np.int64)
    rows[0, near], rows[1, [near, far]], rows[2, far] = 3, 1, 3
    x = Allocation(workers=rows, micro_batch_size=1)
    bank, out = decoder.bank(x.setting), (np.zeros(4, np.int64), np.zeros((3, 3), np.int64), np.zeros(3, np.int64))
    steps_s, layers = {}, {}
    for cut in (FIRST, THIRD, BEST):
        steps_s[cut] = fluid_step_s(bank, rows, *out, work_for(bank, 3), cut)[0]
        layers[cut] = int(out[0][2] - out[0][1])
    assert steps_s[BEST] == steps_s[THIRD] < 0.8 * steps_s[FIRST]
    assert 1 <= layers[THIRD] < layers[FIRST] and layers[BEST] == layers[THIRD]
    by_cut = {cut: decoder.decode(x, relax=False, cuts=(cut,)) for cut in (FIRST, THIRD)}
    assert violations(decoder.problem, by_cut[THIRD]) == []
    exact_s = {cut: decoder.plan_value(plan) for cut, plan in by_cut.items()}
    assert exact_s[THIRD] < 0.8 * exact_s[FIRST]
    assert decoder.plan_value(decoder.decode(x, relax=False)) == exact_s[THIRD]


def test_stages_that_sum_together_over_slow_cards_end_before_the_pipeline():
    """An A100 before two stages of the same two V100 nodes: nine blocks on it compute longer than all else, and both
    sums over the slow cards begin before it ends. Balanced cuts wait for them."""
    decoder = Decoder(larger_problems(802)[0])
    rows = np.zeros((4, len(decoder.classes)), dtype=np.int64)
    for s, workers in enumerate([{(1, 1): 1}, {(2, 1): 1, (3, 1): 1}, {(2, 1): 1, (3, 1): 1}, {(0, 1): 2}]):
        for of, count in workers.items():
            rows[s, decoder.classes.index(of)] = count
    x = Allocation(workers=rows, micro_batch_size=4)
    bank, out = decoder.bank(x.setting), (np.zeros(5, np.int64), np.zeros((3, 4), np.int64), np.zeros(3, np.int64))
    steps_s, blocks = {}, {}
    for cut in (BEST, FOURTH):
        steps_s[cut] = fluid_step_s(bank, rows, *out, work_for(bank, 4), cut)[0]
        blocks[cut] = int(out[0][1])
    assert steps_s[FOURTH] < 0.95 * steps_s[BEST] and blocks[FOURTH] > blocks[BEST]
    balanced = decoder.decode(x, relax=False, cuts=(FIRST, SECOND, THIRD))
    moved = decoder.decode(x, relax=False)
    assert violations(decoder.problem, moved) == []
    assert decoder.plan_value(moved) < 0.9 * decoder.plan_value(balanced)
    assert steps_s[FOURTH] == pytest.approx(decoder.plan_value(moved), rel=0.05)


@pytest.mark.parametrize("layers", [3, 5])
def test_what_passes_a_slow_link_last_goes_the_rest_of_its_way(layers):
    """One worker in each of three regions, links far slower than they compute: the step is what a
    link takes and the whole way of one micro-batch, as simulated, not only the way before that link."""
    cluster = cluster_of([[("a100-40gb", 1, 1)]] * 3, latency_s=0.5, bytes_per_s=1e6)
    batch, model = Batch(global_batch=16, seq_len=512), small_gpt(blocks=layers, tied_embeddings=False)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=batch))
    rows = np.zeros((3, len(decoder.classes)), dtype=np.int64)
    for s in range(3):
        rows[s, decoder.classes.index((s, 1))] = 1
    x = Allocation(workers=rows, micro_batch_size=1)
    plan = decoder.decode(x, relax=False)
    assert decoder.value(x) == pytest.approx(decoder.plan_value(plan), rel=0.03)


def test_a_third_cut_is_none_where_sums_are_hardly_late():
    """Stages of one worker each sum nothing."""
    decoder = Decoder(
        Problem(
            cluster=cluster_of([[("a100-40gb", 1, 2)]]), model=small_gpt(), batch=Batch(global_batch=16, seq_len=512)
        )
    )
    rows = np.array([[1 if tp == 1 else 0 for _, tp in decoder.classes]] * 2)
    bank = decoder.bank(Allocation(workers=rows, micro_batch_size=1).setting)
    out = np.zeros(3, np.int64), np.zeros((3, 2), np.int64), np.zeros(3, np.int64)
    assert fluid_step_s(bank, rows, *out, work_for(bank, 2), THIRD) == (np.inf, 0)


def test_the_relaxation_waits_for_the_norm_from_the_farthest_region_too():
    """Two stages in two regions a second apart: down, back, the tied weight, and once more for the gradients' norm."""
    cluster = cluster_of([[("a100-40gb", 1, 1)]] * 2, latency_s=1.0, bytes_per_s=1e10)
    decoder = Decoder(Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=4, seq_len=512)))
    x = Allocation(workers=np.eye(2, dtype=np.int64), micro_batch_size=1)
    times = decoder.step_times(decoder.decode(x, relax=False))
    assert times.norm_s == 1.0
    assert decoder.fluid_s(x)[0] == pytest.approx(times.step_s, rel=0.1)


@pytest.mark.parametrize(
    ("groups", "cp", "rate", "zero", "divided"),
    [(1, 1, 1e13, 0, 1), (2, 1, 1e13, 3, 2), (2, 1, 1e10, 1, 2), (4, 1, 1e13, 3, 4), (2, 2, 1e13, 3, 2)],
)
def test_a_worker_updates_its_part_of_what_its_stage_divides(groups, cp, rate, zero, divided):
    """One alone updates all parameters; others as many as ZeRO leaves them, parts of a sequence counted."""
    cluster = cluster_of([[("t4", 1, 4)]], inside=Link(latency_s=1e-6, bytes_per_s=rate))
    problem = Problem(cluster=cluster, model=small_gpt(blocks=24), batch=Batch(global_batch=groups, seq_len=16))
    decoder = Decoder(problem)
    workers = np.array([[groups if tp == 1 else 0 for _, tp in decoder.classes]])
    x = Allocation(workers=workers, micro_batch_size=1, cp=cp)
    plan = decoder.decode(x)
    assert plan.stages[0].zero == zero
    times = decoder.step_times(plan)
    assert times.update_s.max() > 0.06 * times.step_s
    whole_s = 30 * problem.model.parameters / problem.cluster.catalogue["t4"].memory_bytes_per_s
    assert times.update_s.max() > whole_s / divided
    assert decoder.fluid_s(x)[0] == pytest.approx(times.step_s, rel=0.025)


@pytest.mark.parametrize(("devices", "nodes", "tp"), [(2, 1, 1), (4, 1, 1), (4, 1, 2), (4, 2, 1)])
def test_parts_of_a_sequence_sum_their_gradients_in_the_relaxation_too(devices, nodes, tp):
    """One worker whose devices, on a node or two, have a part of every sequence each: over a slow fabric their sums are
    a good part of the step."""
    near, far = (Link(latency_s=1e-6, bytes_per_s=rate) for rate in (1e10, 5e9))
    cluster = cluster_of([[("t4", nodes, devices // nodes)]], inside=near, between=far)
    problem = Problem(cluster=cluster, model=small_gpt(blocks=24), batch=Batch(global_batch=2, seq_len=16))
    decoder, cp = Decoder(problem), devices // tp
    workers = np.array([[cp if degree == tp else 0 for _, degree in decoder.classes]])
    x = Allocation(workers=workers, micro_batch_size=1, cp=cp)
    times = decoder.step_times(decoder.decode(x))
    assert times.whole_reductions_s.max() > 0.3 * times.step_s
    assert decoder.fluid_s(x)[0] == pytest.approx(times.step_s, rel=0.03)


def test_regions_that_meet_seldom_sum_a_shared_weight_seldom_too():
    """A pipeline in each of two regions, a vocabulary that is most of the model and 64 local steps: the relaxed step is
    the plan's, far below what the weight alone takes between regions."""
    cluster = cluster_of([[("t4", 2, 1)]] * 2, latency_s=0.1, bytes_per_s=2e7)
    limits = Constraints(local_steps=(1, 64), compressions=("none",))
    batch = Batch(global_batch=16, seq_len=512)
    problem = Problem(cluster=cluster, model=small_gpt(vocab_size=64000), batch=batch, constraints=limits)
    decoder = Decoder(problem)
    x = Allocation(workers=np.array([[1 if tp == 1 else 0 for _, tp in decoder.classes]] * 2), micro_batch_size=1)
    plan = decoder.decode(x)
    assert plan.local_steps == 64
    assert decoder.fluid_s(x)[0] == pytest.approx(decoder.plan_value(plan), rel=0.1)
    assert decoder.plan_value(plan) < problem.model.tied_values * batch.gradient_bytes / 2e7
