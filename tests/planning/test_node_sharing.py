"""The search knows of the nodes that stages share what the exact estimate knows of the decoded plan."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from polygon.cost.shared_links import busy_on_shared, last_end_s
from polygon.cost.stage_reduction import stage_devices
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, LinkUse, Plan, Problem
from polygon.domain.runtime import POLYGON, Runtime
from polygon.planning.candidates import Candidates
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.fluid import FIRST, FITS, fluid_step_s
from polygon.planning.fluid_sums import tied_pair_s, tied_sum_s
from polygon.planning.node_sharing import cards_free_s, find_sums, pairs_free_s
from polygon.planning.problem_arrays import ZERO
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

GROUPS = [[("a100-40gb", 2, 4)], [("a100-40gb", 1, 4), ("t4", 2, 2)], [("v100-16gb", 2, 4)]]
EQUAL_PARTS = replace(POLYGON, sum_trees=False)
"""What the relaxation says of sums over trees is no more than near."""


@njit
def free_s(bank, work, n, begin_s, tail_s):
    """Both kernels on what `fluid_step_s` has left in its room."""
    hosts, of = work.hosts, work.reduction
    regions, nodes = np.arange(3), work.places.nodes
    find_sums(hosts, n, nodes, work.packed, bank.links.sum_turns)
    cards = cards_free_s(bank, hosts, n, regions, nodes, of.card_bytes, of.wire_bytes, work.packed, begin_s, tail_s)
    return cards, pairs_free_s(bank, hosts, n, regions, nodes, of.wire_bytes, of.tree_s, begin_s, tail_s, 0.0)


@njit
def tied_s_of(bank, work, last, apart):
    """Seconds of the sum of tied embeddings."""
    return tied_sum_s(bank, work, last, apart)[0]


@njit
def tied_pair_s_of(bank, work):
    """The same of two stages, between a worker of each."""
    return tied_pair_s(bank, work, 1)


@pytest.fixture(scope="module")
def decoder():
    """Nodes of two and four devices in three regions."""
    batch = Batch(global_batch=32, seq_len=512)
    return Decoder(Problem(cluster=cluster_of(GROUPS), model=small_gpt(), batch=batch, runtime=EQUAL_PARTS))


@settings(max_examples=cases(60), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_stages_are_on_the_nodes_of_the_plan_and_wait_as_long(decoder, seed):
    """Nodes by stage and region are those of the plan; whoever shares links ends as `last_end_s` has it."""
    rng = np.random.default_rng(seed)
    x = decoder.legal(Candidates(decoder, 4).random(rng))
    plan = decoder.decode(x, relax=False, cuts=(FIRST,))
    n = int(x.workers.any(axis=1).sum())
    if not isinstance(plan, Plan) or sum(stage.width for stage in plan.stages) < x.workers.sum():
        return  # it has no plan, or one without some of the workers
    work, rows = decoder._work(len(x.workers)), len(x.workers)
    room = np.zeros(rows + 1, dtype=np.int64), np.zeros((3, rows), dtype=np.int64), np.zeros(3, dtype=np.int64)
    assert fluid_step_s(decoder.bank(x.setting), x.workers, *room, work, FIRST)[1] == FITS
    # A plan packs inside a region for all stages or none, the relaxation for those that it makes shorter.
    work.packed[:] = apart = np.isin(np.arange(3), list(plan.packed_inside))
    if n > 1:
        tied_s = tied_s_of(decoder.bank(x.setting), work, n - 1, apart)
        assert tied_s == pytest.approx(decoder.step_times(plan).tied_s)
        assert work.reduction.tied[0] <= tied_s * (1 + 1e-9)
    times = decoder.step_times(plan)
    place = times.place
    for s in range(n):
        mine = np.unique(np.stack([place.region[place.members(s)], place.node[place.members(s)]]), axis=1)
        assert np.bincount(mine[0], minlength=3).tolist() == work.places.nodes[s].tolist()
    begin_s = np.zeros(len(x.workers))
    begin_s[:n] = np.sort(rng.uniform(0, 2, n))[::-1]
    found = free_s(decoder.bank(x.setting), work, n, begin_s, np.zeros_like(begin_s))
    n_bytes = work.reduction.card_bytes[:n]
    turns = decoder.problem.runtime.sum_turns
    busy = busy_on_shared(plan, place, decoder.tables.links, times.reductions, n_bytes, turns)
    for mine_s, busy_s in zip(found, busy, strict=True):
        exact_s = last_end_s(begin_s[:n], busy_s).max()
        if np.isfinite(exact_s):
            assert mine_s == pytest.approx(exact_s)


@settings(max_examples=cases(30), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_sums_take_in_the_relaxation_what_they_do_in_the_plan(seed):
    """All of a stage's, what comes last of them, and of a shared weight, where nothing is packed or divided."""
    limits = Constraints(compressions=("none",))
    batch = Batch(global_batch=32, seq_len=512)
    decoder = Decoder(
        Problem(cluster=cluster_of(GROUPS), model=small_gpt(), batch=batch, constraints=limits, runtime=EQUAL_PARTS)
    )
    x = decoder.legal(Candidates(decoder, 4).random(np.random.default_rng(seed)))
    plan = decoder.decode(x, relax=False, cuts=(FIRST,))
    if not isinstance(plan, Plan) or sum(stage.width for stage in plan.stages) < x.workers.sum():
        return
    work, rows = decoder._work(len(x.workers)), len(x.workers)
    room = np.zeros(rows + 1, dtype=np.int64), np.zeros((3, rows), dtype=np.int64), np.zeros(3, dtype=np.int64)
    assert fluid_step_s(decoder.bank(x.setting), x.workers, *room, work, FIRST)[1] == FITS
    times, of = decoder.step_times(plan), work.reduction
    for s, stage in enumerate(plan.stages):
        if not stage.zero and not room[1][ZERO, s]:
            # Norms count once a device: with more of them a layer's part is another in the fourth digit.
            assert of.whole[s] == pytest.approx(times.sums[0, s], rel=1e-3)
            assert of.last[s] == pytest.approx(times.sums[1, s], rel=1e-3)
    if len(plan.stages) > 1:
        assert of.tied_inside[0] == pytest.approx(times.tied.node_s + times.tied.region_s)


@pytest.mark.parametrize("inside", [(), (0,), (0, 1)])
def test_nodes_that_pack_share_pairs_as_places_by_themselves(decoder, inside):
    """Two stages on some of the same nodes, two of one region and three of another: where nodes of a region pack, every
    node sends to every other, in no turns; the plan's pairs are busy as long."""
    workers = np.zeros((2, len(decoder.classes)), dtype=np.int64)
    for pool, counts in ((0, (5, 3)), (1, (3, 1)), (2, (3, 1))):
        workers[:, decoder.classes.index((pool, 1))] = counts
    x = Allocation(workers=workers, micro_batch_size=1)
    plan = decoder.decode(x, relax=False, cuts=(FIRST,))
    far = [use for use in plan.links if use.source != use.target]
    near = [LinkUse(source=r, target=r, weight_gradients="int8") for r in inside]
    plan = replace(plan, links=(*far, *near))
    assert plan.packed_inside == set(inside)
    decoder.fluid_s(x)
    work, times, begin_s = decoder._work(2), decoder.step_times(plan), np.array([0.3, 0.0])
    work.packed[:] = np.isin(np.arange(3), inside)
    work.reduction.wire_bytes[:2] = [of.wire_bytes for of in times.reductions]
    found = free_s(decoder.bank(x.setting), work, 2, begin_s, np.zeros(2))
    turns, n_bytes = decoder.problem.runtime.sum_turns, work.reduction.card_bytes[:2]
    busy = busy_on_shared(plan, times.place, decoder.tables.links, times.reductions, n_bytes, turns)
    assert found == pytest.approx([last_end_s(begin_s, busy_s).max() for busy_s in busy])


@settings(max_examples=cases(25), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_stages_wait_for_the_few_nodes_that_they_share_in_large_regions(seed):
    """Two or three stages one after another over many nodes: one or two of these in each region are of several stages,
    and wherever among a stage's own they are, pairs of them are free when they are in the plan."""
    rng, sizes, limits = np.random.default_rng(seed), (12, 9, 20), Constraints(compressions=("none",))
    cluster, batch = cluster_of([[("a100-40gb", n, 4)] for n in sizes]), Batch(global_batch=1024, seq_len=64)
    decoder = Decoder(Problem(cluster=cluster, model=small_gpt(), batch=batch, constraints=limits, runtime=EQUAL_PARTS))
    n = int(rng.integers(2, 4))
    workers = np.zeros((n, len(decoder.classes)), dtype=np.int64)
    for pool, most in enumerate(sizes):
        counts = rng.multinomial(int(4 * most * rng.uniform(0.4, 0.9)), rng.dirichlet(np.full(n, 3)))
        workers[:, decoder.classes.index((pool, 1))] = np.maximum(counts, 1)
    x, begin_s = Allocation(workers=workers, micro_batch_size=1), np.sort(rng.uniform(0, 2, n))[::-1]
    plan = decoder.decode(x, relax=False, cuts=(FIRST,))
    assert [stage.width for stage in plan.stages] == workers.sum(axis=1).tolist()
    decoder.fluid_s(x)
    work, times = decoder._work(n), decoder.step_times(plan)
    work.reduction.wire_bytes[:n] = [of.wire_bytes for of in times.reductions]
    turns, n_bytes = decoder.problem.runtime.sum_turns, work.reduction.card_bytes[:n]
    busy = busy_on_shared(plan, times.place, decoder.tables.links, times.reductions, n_bytes, turns)
    exact_s = last_end_s(begin_s, busy[1]).max()
    found_s = free_s(decoder.bank(x.setting), work, n, begin_s, np.zeros(n))[1]
    assert found_s == (pytest.approx(exact_s) if np.isfinite(exact_s) else 0)


def test_two_stages_on_one_node_pair_take_turns(decoder):
    """Both have a worker on one node of each of two regions: begun at 0, the link is free when it has passed both."""
    workers = np.zeros((2, len(decoder.classes)), dtype=np.int64)
    workers[:, [decoder.classes.index((pool, 1)) for pool in (0, 3)]] = 1
    x = Allocation(workers=workers, micro_batch_size=1)
    assert decoder.fluid_s(x)[1] == FITS
    work, bank = decoder._work(2), decoder.bank(x.setting)
    zeros = np.zeros(2)
    cards_s, pairs_s = free_s(bank, work, 2, zeros, zeros)
    sent_bytes = work.reduction.wire_bytes[:2].sum()  # as much each way as there is, between two
    assert cards_s == pytest.approx(sent_bytes / bank.links.card_bytes_per_s[[0, 3]].min())
    rate = bank.links.bytes_per_s[0, 3] / bank.gradient_ratio[0, 2]
    assert pairs_s == pytest.approx(work.reduction.n_bytes[:2].sum() / rate)
    late = np.array([5.0, 0.0])
    assert free_s(bank, work, 2, late, zeros)[1] == pytest.approx(max(pairs_s, 5.0 + work.reduction.n_bytes[0] / rate))


def test_nothing_is_packed_of_a_tied_weight_where_memory_holds_no_debt():
    """Of programs that exchange it between two workers: int8 over the way between regions, or all of it."""
    runtime = Runtime(tied_once=False)
    batch, limits = Batch(global_batch=32, seq_len=512), Constraints(compressions=("int8",))
    decoder = Decoder(
        Problem(cluster=cluster_of(GROUPS), model=small_gpt(), batch=batch, constraints=limits, runtime=runtime)
    )
    workers = np.zeros((2, len(decoder.classes)), dtype=np.int64)
    workers[0, decoder.classes.index((0, 1))] = workers[1, decoder.classes.index((3, 1))] = 1
    x = Allocation(workers=workers, micro_batch_size=1)
    assert decoder.fluid_s(x)[1] == FITS
    work, bank = decoder._work(2), decoder.bank(x.setting)
    plain_s = 32000 * 1024 * decoder.problem.batch.gradient_bytes / bank.links.bytes_per_s[0, 3]
    for plain, ratio in ((False, bank.packed_ratio), (True, 1.0)):
        work.stages.plain[0] = plain
        assert tied_pair_s_of(bank, work) == pytest.approx(bank.links.latency_s[0, 3] + plain_s * ratio)


def test_workers_that_fill_a_node_go_on_with_the_next(decoder):
    """Of a stage of six on nodes of four the last two are on the second node, beside those of the other stage."""
    workers = np.zeros((2, len(decoder.classes)), dtype=np.int64)
    column = decoder.classes.index((3, 1))
    workers[:, column] = 6, 2
    assert decoder.fluid_s(Allocation(workers=workers, micro_batch_size=1))[1] == FITS
    hosts, bank = decoder._work(2).hosts, decoder.bank(Allocation(workers=workers, micro_batch_size=1).setting)
    found = {(hosts.stage[e], hosts.node[e] - bank.first_node[column], hosts.workers[e]) for e in range(3)}
    assert found == {(0, 0, 4), (0, 1, 2), (1, 1, 2)}


def test_kinds_of_a_stage_are_told_apart_though_the_widest_are_dealt_out_first():
    """Workers of one, two and four devices, each kind with a node of its own."""
    batch = Batch(global_batch=32, seq_len=512)
    decoder = Decoder(Problem(cluster=cluster_of([[("v100-16gb", 3, 4)]]), model=small_gpt(), batch=batch))
    workers = np.zeros((1, len(decoder.classes)), dtype=np.int64)
    workers[0, [decoder.classes.index((0, tp)) for tp in (1, 2, 4)]] = 4, 2, 1
    assert decoder.fluid_s(Allocation(workers=workers, micro_batch_size=1))[1] == FITS
    hosts = decoder._work(1).hosts
    assert hosts.member_nodes[0, :3].tolist() == [1, 1, 1]
    assert hosts.member_most[0, :3].tolist() == [4, 2, 1]


@pytest.mark.parametrize("counts", [(2, 1, 2), (4, 2, 0), (6, 1, 1)])
def test_kinds_of_a_pool_sum_together(counts):
    """Workers of one and of two devices, of which the narrow go on where the wide end, and others of a second pool: who
    sums how much where is what it is in the plan."""
    batch, cluster = Batch(global_batch=32, seq_len=512), cluster_of([[("v100-16gb", 3, 4)], [("t4", 2, 2)]])
    decoder = Decoder(Problem(cluster=cluster, model=small_gpt(), batch=batch))
    workers = np.zeros((1, len(decoder.classes)), dtype=np.int64)
    workers[0, [decoder.classes.index(kind) for kind in ((0, 1), (0, 2), (1, 1))]] = counts
    x = Allocation(workers=workers, micro_batch_size=1)
    assert decoder.fluid_s(x)[1] == FITS
    place, work = decoder.step_times(decoder.decode(x, relax=False)).place, decoder._work(1)
    pools, nodes, members = stage_devices(place, 0, decoder.tables.links)
    for exact, found in (
        (pools, work.pools), (nodes, work.ring_nodes), (members, work.near), (place.degrees[0], work.degrees)
    ):  # fmt: skip
        assert found[: len(pools)].tolist() == exact.tolist()


@pytest.mark.parametrize("pools", [(0, 0), (0, 3, 0), (0, 3, 0, 0), (0, 3, 0, 3), (0, 0, 3, 3, 0)])
def test_messages_of_stages_on_shared_nodes_cost_what_they_do_in_the_plan(pools):
    """Stages of one worker, by pool: on one node they use its own link; those of one node pair or card take turns."""
    batch = Batch(global_batch=32, seq_len=512)
    limits = Constraints(compressions=("none",))
    decoder = Decoder(
        Problem(cluster=cluster_of(GROUPS), model=small_gpt(), batch=batch, constraints=limits, runtime=EQUAL_PARTS)
    )
    workers = np.zeros((len(pools), len(decoder.classes)), dtype=np.int64)
    for s, pool in enumerate(pools):
        workers[s, decoder.classes.index((pool, 1))] = 1
    x = Allocation(workers=workers, micro_batch_size=1)
    messages = decoder.step_times(decoder.decode(x, relax=False)).messages
    decoder.fluid_s(x)
    slowest_s = (messages.hold_s.max(axis=-1) + messages.latency_s).max(axis=1).mean(axis=0)
    assert decoder._work(len(pools)).pipeline.message[: len(pools) - 1] == pytest.approx(slowest_s)
