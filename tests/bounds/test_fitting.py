"""What layers take that have to fit: below every way to recompute and to shard, and no further than it has to be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.fitting import Work, _least_scatter, _steps
from polygon.bounds.size_work import size_work
from polygon.bounds.stage_tiers import Kinds, differences
from polygon.cost.reduction import collective_s
from polygon.cost.tables import CostTables, running_sum
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.schedule import interleaved_units
from tests.drawn_problems import small_problem
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

LAYERS = 3
WAYS = st.lists(st.floats(0, 100), min_size=LAYERS, max_size=LAYERS)


@settings(max_examples=cases(60), deadline=None)
@given(freed=st.tuples(WAYS, WAYS), more_s=st.tuples(WAYS, WAYS), room=st.floats(0, 1))
def test_no_choice_of_recomputation_is_quicker_than_the_knapsack(freed, more_s, room):
    """Every layer recomputed in one of two ways or not at all: what fits takes as long as the relaxation, or longer."""
    freed, more_s = np.array(freed), np.array(more_s)
    held, once = np.full(LAYERS, 100.0), np.ones(LAYERS)
    work = Work(
        seconds=differences(running_sum(once)),
        bytes=differences(running_sum(held)),
        gives=[(rate, differences(running_sum(each))) for rate, each in _steps(freed, more_s)],
        least_s=np.zeros((LAYERS, LAYERS + 1)),
    )
    limit = room * held.sum()
    least_s = work.held_s(np.full((LAYERS, LAYERS + 1), limit), 1.0)[0, LAYERS]
    for ways in itertools.product(range(3), repeat=LAYERS):
        chosen = [(freed[w - 1, i], more_s[w - 1, i]) if w else (0.0, 0.0) for i, w in enumerate(ways)]
        if held.sum() - sum(f for f, _ in chosen) <= limit:
            assert least_s <= LAYERS + sum(s for _, s in chosen) + 1e-6


def test_the_knapsack_takes_what_gives_most_for_its_time_first():
    """One layer: 40 bytes for a second, then 20 more for two: 50 bytes take 2 s more."""
    steps = _steps([np.array([40.0]), np.array([60.0])], [np.array([1.0]), np.array([3.0])])
    assert [rate for rate, _ in steps] == pytest.approx([40.0, 10.0], rel=1e-6)
    work = Work(
        seconds=differences(np.array([0.0, 5.0])),
        bytes=differences(np.array([0.0, 100.0])),
        gives=[(rate, differences(running_sum(each))) for rate, each in steps],
        least_s=np.zeros((1, 2)),
    )
    assert work.held_s(np.full((1, 2), 50.0), 1.0)[0, 1] == pytest.approx(5 + 2, rel=1e-6)
    assert work.held_s(np.full((1, 2), 39.0), 1.0)[0, 1] == np.inf


@settings(max_examples=cases(30), deadline=None)
@given(shards=st.integers(2, 32), per_node=st.integers(1, 8), n_bytes=st.floats(1e5, 1e10))
def test_no_shard_group_scatters_at_less_than_the_least(shards, per_node, n_bytes):
    """On the nodes of either pool, however many of a group are on each: at the least per byte, or more."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 4, 8), ("t4", 4, 2)]]),
        model=small_gpt(),
        batch=Batch(global_batch=8, seq_len=512),
    )
    tables = CostTables(problem)
    kinds, links = Kinds.of(tables), tables.links
    arrays = links.arrays(problem.runtime)
    for of in kinds.classes:
        held = problem.cluster.pools[of.pool].devices_per_node // of.tp
        near = min(per_node, held, shards)
        if of.cp > 1 or shards > of.shards or shards > near * 4:
            continue
        p, apart = of.pool, shards > near
        each = collective_s(
            n_bytes, shards, near, p, links.ring_latency_s[p, p], links.ring_bytes_per_s[p, p], 1, arrays
        )
        assert each >= n_bytes * _least_scatter(tables, kinds, of, apart=apart) * (1 - 1e-9)


def test_groups_of_interleaved_plans_hold_as_much_as_their_place_says():
    """min(p, (3 p - 1) / 2 - g) micro-batches for any number of chunks, and that for two or for very many."""
    for groups, group in ((p, g) for p in range(2, 20) for g in range(p)):
        least = min(interleaved_units(groups, chunks, group) / chunks for chunks in range(2, 200))
        law = min(groups, 1.5 * groups - 0.5 - group)
        assert law <= least <= law * 1.2


def test_the_last_group_has_room_for_the_head():
    """An interleaved plan's last group holds the model's last layer beside its blocks: it takes longer."""
    tables = CostTables(small_problem(3))
    kinds = Kinds.of(tables)
    size = size_work(tables, kinds, tables.micro_batch_sizes[0])
    blocks = size.run.stop - size.run.start
    for layers in range(1, blocks):
        between, last = size.held_s[:, 1, 1 + layers], size.held_s[:, 2, 2 + layers]
        apart = size.end_s[1][:, None] > 0
        assert (last >= np.where(np.isfinite(between), between, 0.0) * (1 - 1e-9)).all()
        assert ((last > between) | ~np.isfinite(last) | ~apart).all()
