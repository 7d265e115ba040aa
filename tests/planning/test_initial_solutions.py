"""Starts: one pipeline in every region, and one over regions that are near each other."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from polygon import Problem as PosedProblem
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning.decode import Allocation, Decoder, most_stages
from polygon.planning.initial_solutions import (
    FARTHEST,
    MOST_BESIDE,
    _one_and_others,
    _regions_alone,
    _sequences,
    closed_starts,
    grown_starts,
    kind_sequences,
    narrow_starts,
    region_sequences,
    relays,
    replicated_starts,
    simple_starts,
    trimmed,
    window_starts,
)
from tests.drawn_problems import larger_problems
from tests.exported_plans import INSTANCES
from tests.linked_regions import cluster_of, small_gpt


@pytest.fixture(scope="module")
def decoder():
    """Regions with 3, 4, 5 and 1 single-device nodes."""
    groups = [[("v100-16gb", n, 1)] for n in (3, 4, 5, 1)]
    cluster = cluster_of(groups, latency_s=0.02, bytes_per_s=1e9)
    model = small_gpt(blocks=8, hidden_size=1024, head_dim=64, ffn_size=4096)
    return Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=512)))


def test_regions_are_alike_and_the_best_is_no_worse_than_all_of_them(decoder):
    """Every region has as many workers in each stage or none; two stages everywhere is among what was looked at."""
    starts = replicated_starts(decoder, 4, (1, 2), decoder.value, lambda: math.inf)
    assert starts
    for x in starts:
        rows = x.workers[x.workers.any(axis=1)]
        assert (rows == rows[0]).all()
        assert (rows.sum(axis=0) > 0).any()
    everywhere = Allocation(workers=np.array([[1, 1, 1, 0]] * 2 + [[0] * 4] * 2), micro_batch_size=1)
    assert min(decoder.value(x) for x in starts) <= decoder.value(everywhere)


def test_every_pool_is_a_stage_along_a_walk_through_the_regions(decoder):
    """All of its devices; walks that are too long for the stages there may be are not cut short."""
    starts = [x.tolist() for x in simple_starts(decoder, 4, 1)]
    walks = [[np.diag([3, 4, 5, 1])[list(order)].tolist() for order in itertools.permutations(range(4))]]
    assert any(x in walks[0] for x in starts)
    assert not any((np.count_nonzero(x, axis=1) == 1).all() and np.sum(x) > 12 for x in simple_starts(decoder, 3, 1))


def test_what_is_far_from_the_best_is_not_tried_with_fewer_regions(decoder):
    """Regions are left out of the best only where other starts are not `FARTHEST` times as quick."""

    def looked_at(known):
        met = []

        def value_of(x):
            met.append(x)
            return decoder.value(x)

        replicated_starts(decoder, 4, (1, 2), value_of, lambda: math.inf, known)
        return met

    def with_less(met):
        """Whether one is another without the workers of some regions."""
        return any(
            (y <= x).all() and set(np.flatnonzero(y.any(axis=0))) < set(np.flatnonzero(x.any(axis=0)))
            for x, y in itertools.combinations((start.workers for start in met), 2)
        )

    best = min(decoder.value(x) for x in looked_at(0.0))
    assert with_less(looked_at(1.01 * best / FARTHEST))
    assert not with_less(looked_at(0.99 * best / FARTHEST))


def test_every_region_is_tried_alone(decoder):
    """In one and in more stages, each with the value of its allocation, those with most devices first."""
    found = _regions_alone(decoder, {r: [r] for r in range(4)}, 4, decoder.value, lambda: math.inf)
    assert list(dict.fromkeys(entry.region for entry in found)) == [2, 1, 0, 3]
    for entry in found:
        x, (stages, tp, size) = entry.allocation(decoder, 4), entry.how
        assert entry.value == decoder.value(x) < math.inf
        assert set(np.flatnonzero(x.workers.any(axis=0)).tolist()) == {entry.region}
        assert (int(x.workers.any(axis=1).sum()), tp, size) == (stages, 1, x.micro_batch_size)
    assert {entry.how[0] for entry in found} >= {1, 2, 3}


def two_cities(decoder):
    """Regions 0 and 2 in one city, 1 and 3 in another, far behind a slow link."""
    near = np.equal.outer(np.arange(4) % 2, np.arange(4) % 2)
    cluster = replace(
        decoder.problem.cluster, latency_s=np.where(near, 1e-3, 0.2), bytes_per_s=np.where(near, 5e9, 1e6)
    )
    return Decoder(replace(decoder.problem, cluster=cluster))


def test_near_regions_share_a_pipeline_each_with_stages_of_its_own(decoder):
    """The best lies in one city, over several of its regions, none of which shares a stage with another here."""
    cities = two_cities(decoder)
    starts = window_starts(cities, 8, (1, 2), cities.value, lambda: math.inf)
    region = cities.tables.links.region[[p for p, _ in cities.classes]]
    used = [[set(region[row > 0].tolist()) for row in x.workers if row.any()] for x in starts]
    assert all(len(stage) == 1 for stages in used for stage in stages)
    assert set.union(*used[0]) in ({0, 2}, {1, 3})
    values = [cities.value(x) for x in starts]
    assert values == sorted(values)


def test_sequences_of_types_too_many_to_try_change_once():
    """Of four stages on two types: all of one, or a quarter, half or three quarters of the stages on the first."""
    kinds = [("a100-40gb", 1), ("t4", 1)]
    a, b = kinds
    every = [list(sequence) for sequence in _sequences(kinds, 4, 1, 16)]
    assert len(every) == 2 + 4 + 8 + 16 and every[:2] == [[a], [b]]
    few = [list(sequence) for sequence in _sequences(kinds, 4, 1, 1)]
    assert few[:8] == [[a], [b], [a] * 2, [b] * 2, [a] * 3, [b] * 3, [a] * 4, [b] * 4]
    assert few[8:] == [[x] * n + [y] * (4 - n) for x, y in ((a, b), (b, a)) for n in (1, 2, 3)]


def test_every_sequence_of_whole_regions_is_tried(decoder):
    """Of two, three and four of four regions, each from one end; not of a length with more than so many."""
    rows = [tuple(map(tuple, x.workers[x.workers.any(axis=1)])) for x in region_sequences(decoder, 8, (1,), 12)]
    whole = [tuple(row) for row in np.diag([3, 4, 5, 1]).tolist()]
    orders = [order for n in (2, 3, 4) for order in itertools.permutations(range(4), n) if order[0] < order[-1]]
    assert sorted(rows) == sorted(tuple(whole[r] for r in order) for order in orders) and len(orders) == 6 + 12 + 12
    fewer = list(region_sequences(decoder, 8, (1, 2), 12))
    assert len(fewer) == 2 * 6 and {x.micro_batch_size for x in fewer} == {1, 2}
    assert all(x.workers.any(axis=1).sum() == 2 for x in region_sequences(decoder, 2, (1,), 12))


def test_regions_have_workers_of_a_degree_or_the_largest_below():
    """Nodes of two and of eight devices: groups of two stay so where the others are of four and eight."""
    cluster = cluster_of([[("v100-16gb", 2, 2), ("t4", 1, 8)], [("v100-16gb", 1, 8)]], bytes_per_s=1e9)
    wide = Decoder(Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=64, seq_len=512)))
    found = {}
    for x in region_sequences(wide, 4, (1,)):
        used = [wide.classes[c] + (int(n),) for row in x.workers for c, n in enumerate(row) if n]
        found[max(tp for _, tp, _ in used)] = used
    assert found[1] == [(0, 1, 4), (1, 1, 8), (2, 1, 8)]
    assert found[8] == [(0, 2, 2), (1, 8, 1), (2, 8, 1)]


def test_weak_devices_between_strong_ones_are_found():
    """Two regions of two A100 nodes each and one of four with T4: every two nodes have a link, so that a micro-batch
    passes the weak region in half of the time that it takes from one strong one to the other."""
    problem = PosedProblem.from_file(INSTANCES / "native" / "medium-64-regional.yaml").data
    own = Decoder(problem)
    rows, sizes = most_stages(problem), own.tables.micro_batch_sizes
    others = [Allocation(workers=x, micro_batch_size=m) for m in sizes for x in simple_starts(own, rows, m)]
    others += kind_sequences(own, rows, sizes, 1_000)
    best = min(region_sequences(own, rows, sizes, 1_000), key=own.value)
    assert own.value(best) < 0.95 * min(own.value(x) for x in others)
    regions = own.tables.links.region[[p for p, _ in own.classes]]
    named = [[problem.cluster.regions[r].name for r in regions[row > 0]] for row in best.workers if row.any()]
    assert named == [["virginia"], ["california"], ["ohio"]]


def test_devices_of_a_type_are_between_every_two_regions():
    """All that are elsewhere, at every degree, whatever the ends' is; the strongest two regions first; three stages."""
    groups = [[("a100-40gb", 1, 4)], [("t4", 1, 2)], [("a100-40gb", 2, 4)], [("t4", 2, 2), ("v100-16gb", 1, 1)]]
    cluster, batch = cluster_of(groups, bytes_per_s=1e9), Batch(global_batch=64, seq_len=512)
    problem = Problem(cluster=cluster, model=small_gpt(), batch=batch)
    own = Decoder(problem)
    found = list(relays(own, 4, (1, 2)))
    assert {x.micro_batch_size for x in found} == {1, 2} and not list(relays(own, 2, (1,)))
    device_of = [problem.cluster.pools[p].device.name for p, _ in own.classes]
    region_of = own.tables.links.region[[p for p, _ in own.classes]]
    degrees = np.array([tp for _, tp in own.classes])
    seen: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for x in found:
        assert not x.workers[3].any()
        first, middle, last = ([c for c, n in enumerate(row) if n] for row in x.workers[:3])
        (a,), (b,), (name,) = {*region_of[first]}, {*region_of[last]}, {device_of[c] for c in middle}
        devices = int(x.workers[1] @ degrees)
        here = [p for p, pool in enumerate(problem.cluster.pools) if pool.device.name == name]
        assert devices == sum(
            problem.cluster.pools[p].devices for p in here if own.tables.links.region[p] not in (a, b)
        )
        seen.setdefault((a, b, name), []).append((int(degrees[first].max()), int(degrees[middle].max())))
    assert next(iter(seen))[:2] == (2, 0)
    few = list(relays(own, 4, (1, 2), 12))  # as many as there are of the two strongest regions
    assert 0 < len(few) == sum(len(ways) for ends, ways in seen.items() if ends[:2] == (2, 0))
    assert set(seen[2, 0, "t4"]) == set(itertools.product((1, 2, 4), (1, 2)))


def test_weak_devices_of_many_regions_between_strong_ones_are_found():
    """Ten regions: all T4 of eight of them pass on what two regions of H100 would take longer to send one another."""
    problem = PosedProblem.from_file(INSTANCES / "native" / "large-192-drawn.yaml").data
    own = Decoder(problem)
    rows, sizes = most_stages(problem), own.tables.micro_batch_sizes[:2]
    others = [Allocation(workers=x, micro_batch_size=m) for m in sizes for x in simple_starts(own, rows, m)]
    others += [*kind_sequences(own, rows, sizes, 1_000), *region_sequences(own, rows, sizes, 1_000)]
    others += window_starts(own, rows, sizes, own.value, lambda: math.inf)
    best = min(relays(own, rows, sizes, 1_000), key=own.value)
    assert own.value(best) < 0.96 * min(own.value(x) for x in others)


def test_pipelines_of_tied_models_come_back_to_where_they_begin(decoder):
    """Either end is halved and nobody is lost; over slow links that is quicker than the pipeline it came from."""
    slow = replace(decoder.problem.cluster, bytes_per_s=np.full((4, 4), 5e7))
    tied = Decoder(replace(decoder.problem, cluster=slow))
    one_way = Allocation(workers=np.array([[0, 4, 0, 0], [0, 0, 5, 0], [0, 0, 0, 0]]), micro_batch_size=1)
    found = list(closed_starts(tied, [one_way]))
    assert [x.workers.tolist() for x in found] == [
        [[0, 2, 0, 0], [0, 0, 5, 0], [0, 2, 0, 0]],
        [[0, 0, 3, 0], [0, 4, 0, 0], [0, 0, 2, 0]],
    ]
    assert min(tied.value(x) for x in found) < tied.value(one_way)
    # Closed already; no room for one stage more; nobody to halve; nothing tied.
    assert not list(closed_starts(tied, [found[0], replace(one_way, workers=one_way.workers[:2])]))
    assert not list(closed_starts(tied, [replace(one_way, workers=np.minimum(one_way.workers, 1))]))
    untied = replace(decoder.problem, model=replace(decoder.problem.model, tied_embeddings=False))
    assert not list(closed_starts(Decoder(untied), [one_way]))


def test_one_region_and_those_near_it_are_two_stages_either_way(decoder):
    """All devices of a region make a stage, all of the others the next one, or the one before."""
    region = decoder.tables.links.region
    column = {p: decoder.widest_class(p, 1)[0] for p in decoder.columns}
    chain = sorted(column, key=lambda p: (region[p] != 2, p))
    one_way, other_way = _one_and_others(chain, column, decoder, 3)
    assert one_way.shape == (3, len(decoder.classes)) and not one_way[2].any()
    assert np.array_equal(one_way[:2], other_way[1::-1])
    at = region[[p for p, _ in decoder.classes]]
    assert set(at[one_way[0] > 0].tolist()) == {2} and set(at[one_way[1] > 0].tolist()) == {0, 1, 3}
    devices = {p: decoder.problem.cluster.pools[p].devices for p in column}
    assert {p: int(one_way[:, c].sum()) for p, c in column.items()} == devices
    alone = [p for p in chain if region[p] == 2]
    assert not list(_one_and_others(alone, {p: column[p] for p in alone}, decoder, 3))
    assert not list(_one_and_others(chain, column, decoder, 1))


def test_weak_regions_share_a_stage_beside_a_strong_one():
    """Of pipelines of two stages over three regions, the best has one of both regions of one device each."""
    cluster = cluster_of([[("a100-40gb", n, 1)] for n in (4, 1, 1)], latency_s=1e-3, bytes_per_s=5e9)
    model = small_gpt(blocks=12, hidden_size=2048, head_dim=64, ffn_size=8192)
    own = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024)))
    starts = window_starts(own, 2, (1,), own.value, lambda: math.inf)
    at = own.tables.links.region[[p for p, _ in own.classes]]
    used = [[set(at[row > 0].tolist()) for row in x.workers if row.any()] for x in starts]
    everywhere = [stages for stages in used if set.union(*stages) == {0, 1, 2}]
    assert everywhere[0] in ([{0}, {1, 2}], [{1, 2}, {0}])


def test_trimming_leaves_out_who_holds_a_stage_up(decoder):
    """T4 beside A100 behind a slow link are let go; no change is better then, and time that is up ends it."""
    groups = [[("a100-40gb", 4, 1)], [("a100-40gb", 2, 1), ("t4", 1, 1)]]
    cluster = cluster_of(groups, latency_s=0.02, bytes_per_s=2e8)
    model = small_gpt(blocks=8, hidden_size=2048, head_dim=64, ffn_size=8192)
    own = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024)))
    column = {p: own.widest_class(p, 1)[0] for p in own.columns}
    x = Allocation(workers=next(_one_and_others(sorted(column), column, own, 3)), micro_batch_size=1)
    found = trimmed(own, x, own.value, lambda: math.inf)
    assert own.value(found) < own.value(x) and found.micro_batch_size == 1
    assert not found.workers[:, column[2]].any() and found.workers.any()
    assert np.array_equal(trimmed(own, found, own.value, lambda: math.inf).workers, found.workers)
    for s, c in np.argwhere(found.workers).tolist():
        less = found.workers.copy()
        less[s, c] //= 2
        assert not less.any() or own.value(replace(found, workers=less)) >= own.value(found)
    assert trimmed(own, x, own.value, lambda: 0.0) is x


def test_what_is_slow_is_left_out_of_a_window_as_well(decoder):
    """Beside all devices of a window those at least half as fast as the fastest are tried: here without the T4."""
    cluster = cluster_of([[("a100-40gb", 4, 1), ("t4", 4, 1)]] * 2, latency_s=1e-3, bytes_per_s=5e9)
    model = small_gpt(blocks=8, hidden_size=2048, head_dim=64, ffn_size=8192)  # large enough for hosts not to decide
    mixed = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=16, seq_len=1024)))
    starts = window_starts(mixed, 4, (1,), mixed.value, lambda: math.inf)
    kinds = {frozenset(mixed.classes[c][0] % 2 for c in np.flatnonzero(x.workers.any(axis=0)).tolist()) for x in starts}
    assert kinds == {frozenset({0}), frozenset({0, 1})}


def test_narrow_pipelines_leave_out_what_they_do_not_need(decoder):
    """Every stage is as many workers of one pool as the others; each pool is used as long as it lasts."""
    starts = narrow_starts(decoder, 8, (1, 2), decoder.value, lambda: math.inf)
    for x in starts:
        rows = x.workers[x.workers.any(axis=1)]
        assert len(rows) >= 2 and ((rows > 0).sum(axis=1) == 1).all() and np.unique(rows.sum(axis=1)).size == 1
        order = rows.argmax(axis=1).tolist()
        assert len(list(itertools.groupby(order))) == len(set(order))
    values = [decoder.value(x) for x in starts]
    assert values == sorted(values) and len({x.key for x in starts}) == len(starts)


def test_a_narrow_pipeline_may_be_the_best_start():
    """Of six pools in three regions nine A100 of one region, one a stage, are a fifth sooner than any other start."""
    problem, _ = larger_problems(100)
    own = Decoder(problem)
    rows, sizes = most_stages(problem), own.tables.micro_batch_sizes
    narrow = narrow_starts(own, rows, sizes, own.value, lambda: math.inf)
    others = grown_starts(own, rows, own.value, lambda: math.inf)
    others += replicated_starts(own, rows, sizes, own.value, lambda: math.inf)
    others += window_starts(own, rows, sizes, own.value, lambda: math.inf)
    others += [Allocation(workers=x, micro_batch_size=m) for m in sizes for x in simple_starts(own, rows, m)]
    others += kind_sequences(own, rows, sizes, 1_000)
    assert own.value(narrow[0]) < 0.85 * min(own.value(x) for x in others)


def test_where_narrow_pipelines_leave_nearly_all_out_there_is_none(decoder):
    """Nothing is valued on clusters of many devices."""
    cluster = cluster_of([[("a100-40gb", MOST_BESIDE // 8, 8)], [("t4", 1, 1)]], latency_s=1e-3, bytes_per_s=5e9)
    large = Decoder(replace(decoder.problem, cluster=cluster))
    assert narrow_starts(large, 8, (1,), lambda x: pytest.fail("valued"), lambda: math.inf) == []


@pytest.mark.parametrize("starts_of", [narrow_starts, replicated_starts, window_starts])
def test_no_time_gives_no_starts(decoder, starts_of):
    """Nothing is valued when the time is up."""
    values = []
    assert starts_of(decoder, 4, (1,), lambda x: values.append(x) or 1.0, lambda: 0.0) == []
    assert values == []
