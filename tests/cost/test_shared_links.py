"""Reductions of several stages over the same links."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polygon.cost.estimate import estimate
from polygon.cost.reduction import messages_of_leader, pairs_at_once, part_of_pair
from polygon.cost.shared_links import last_end_s, node_pairs, turns_of
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.runtime import turns_of_region
from polygon.domain.schedule import stage_spans
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases


def two_stages(nodes, per_node, local_steps=1):
    """Times of a plan of `on_both`."""
    problem, plan = on_both(nodes, per_node, local_steps)
    return step_times(plan, CostTables(problem))


def on_both(nodes, per_node, local_steps=1):
    """Both stages have a device in each of two regions; so many nodes a region, so many devices a node."""
    cluster = cluster_of([[("t4", nodes, per_node)]] * 2)
    batch = Batch(global_batch=8, seq_len=256, precision="fp32")
    problem = Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch)
    layers = problem.model.layers
    stages = tuple(
        Stage(
            first_layer=s * layers // 2,
            last_layer=(s + 1) * layers // 2,
            workers=tuple(Worker(pool=r, devices=(2 * r + s,)) for r in range(2)),
        )
        for s in range(2)
    )
    plan = Plan(
        stages=stages,
        routes=np.array([[m % 2] * 2 for m in range(8)]),
        micro_batch_size=1,
        spans=stage_spans(stages, (2, 1)),
        local_steps=local_steps,
    )
    return problem, plan


def test_what_is_kept_of_shared_pairs_follows_their_links():
    """Twice the rate, half the time, whatever was priced with the same workers before; none over a link that is not."""
    problem, plan = on_both(1, 2)
    tables, cluster = CostTables(problem), problem.cluster
    busy_s = step_times(plan, tables).shared_pairs_s
    assert busy_s.all()
    for factor in (2.0, 0.5, 0.0, 1.0):
        other = replace(problem, cluster=cluster.with_links(cluster.latency_s, cluster.bytes_per_s * factor))
        kept, fresh = (step_times(plan, t).shared_pairs_s for t in (tables.with_other_links(other), CostTables(other)))
        assert np.array_equal(kept, fresh)
        assert np.array_equal(kept, busy_s / factor) if factor else not len(kept)


@pytest.mark.parametrize(
    ("nodes", "per_node", "capacity", "rate"), [(1, 2, np.inf, 1e8), (2, 1, np.inf, 2e8), (2, 1, 1.5e8, 1.5e8)]
)
def test_a_link_is_busy_with_what_each_pair_of_nodes_sends(nodes, per_node, capacity, rate):
    """Stages on the same nodes share one pair's 1e8 bytes/s; two on nodes of their own have two, or the capacity."""
    problem, plan = on_both(nodes, per_node)
    shared = replace(problem.cluster, capacity_bytes_per_s=np.full((2, 2), capacity))
    result = estimate(replace(problem, cluster=shared), plan)
    assert len(result.links) == 2
    for link in result.links:
        assert link.activation_bytes == 0  # every micro-batch stays in its region
        assert 0 < link.busy_fraction < 1
        assert link.busy_fraction * result.step_s == pytest.approx(link.gradient_bytes / rate)


def test_stages_on_one_node_pair_take_turns():
    """On the same nodes both end when the link has passed both gradients; on nodes of their own each by itself."""
    apart, together = two_stages(2, 1), two_stages(1, 2)
    assert len(apart.shared_pairs_s) == 0
    spans = [apart.reduction_span_s(s) for s in range(2)]
    assert apart.reduced_s.tolist() == [end for _, end in spans]
    busy_s = together.shared_pairs_s
    assert busy_s.shape == (2, 2)  # both directions
    sent = [[n_bytes for *_, n_bytes in cost.across_bytes] for cost in together.reductions]
    assert busy_s == pytest.approx(np.array(sent).T / 1e8)
    begin_s = np.array([together.reduction_span_s(s)[0] for s in range(2)])
    first = begin_s.argmin()
    floor_s = max(begin_s[first] + busy_s[0].sum(), begin_s[1 - first] + busy_s[0, 1 - first])
    alone_s = [together.reduction_span_s(s)[1] for s in range(2)]
    assert together.reduced_s == pytest.approx(np.maximum(alone_s, floor_s))
    assert together.step_s > apart.step_s
    waited_s = together.whole_reductions_s - [cost.total_s for cost in together.reductions]
    assert waited_s == pytest.approx(together.reduced_s - alone_s)
    assert apart.whole_reductions_s == pytest.approx([cost.total_s for cost in apart.reductions])


def test_a_card_passes_what_stays_and_what_leaves():
    """Two nodes a region that both stages use: each card sends its half of both gradients inside, and to the other
    region what its node pair carries."""
    cluster = cluster_of([[("t4", 2, 2)]] * 2)
    batch = Batch(global_batch=8, seq_len=256, precision="fp32")
    problem = Problem(cluster=cluster, model=small_gpt(tied_embeddings=False), batch=batch)
    layers, links = problem.model.layers, CostTables(problem).links
    stages = tuple(
        Stage(
            first_layer=s * layers // 2,
            last_layer=(s + 1) * layers // 2,
            workers=tuple(Worker(pool=r, devices=(4 * r + 2 * n + s,)) for r in range(2) for n in range(2)),
        )
        for s in range(2)
    )
    routes = np.array([[m % 4] * 2 for m in range(8)])
    plan = Plan(stages=stages, routes=routes, micro_batch_size=1, spans=stage_spans(stages, (8, 4)))
    times = step_times(plan, CostTables(problem))
    assert times.shared_cards_s.shape == (4, 2)
    for s, cost in enumerate(times.reductions):
        n_bytes = cost.across_bytes[0][2]  # unpacked: a region sends the other as much as a worker holds
        inside_s, out_s = n_bytes / links.bytes_per_s[0, 0], n_bytes / 2 / links.card_bytes_per_s[0]
        assert times.shared_cards_s[:, s] == pytest.approx(np.full(4, inside_s + out_s))


def test_regions_that_meet_share_too():
    """With local steps all stages meet after the update, so that a link passes the sum of their bytes."""
    together = two_stages(1, 2, local_steps=4)
    outer_s = together.step_s - (together.reduced_s[together.place.stage] + together.update_s).max()
    alone_s = max(cost.outer_s for cost in together.reductions)
    assert outer_s == pytest.approx(together.shared_pairs_s.sum(axis=1).max())
    assert outer_s > alone_s
    assert two_stages(1, 2).shared_pairs_s == pytest.approx(4 * together.shared_pairs_s)


REGIONS = st.lists(st.integers(1, 24), min_size=2, max_size=4)


def shared_of(nodes, others, turns):
    """Shape (others, nodes): of what a region of so many nodes adds up, in cells that go to them in turn, the part that
    is in the stretch of each node of another region and in the cells of each of its own."""
    cells = nodes * turns
    table = np.zeros((others, nodes))
    for i, c in np.ndindex(others, cells):
        both = min(Fraction(i + 1, others), Fraction(c + 1, cells)) - max(Fraction(i, others), Fraction(c, cells))
        table[i, c % nodes] += max(both, 0)
    return table


def halves_of(nodes, most):
    """What the first two of some regions exchange: the halves that the second and the first add up, by their nodes;
    and the turns of both."""
    turns = turns_of(np.array(nodes), most).tolist()
    return shared_of(nodes[1], nodes[0], turns[1]), shared_of(nodes[0], nodes[1], turns[0]).T, turns[:2]


@settings(deadline=None, max_examples=cases(60))
@given(nodes=REGIONS, most=st.sampled_from((1, 3, 7)))
@example(nodes=[24, 24], most=7)
@example(nodes=[1, 5], most=1)
def test_nodes_of_two_regions_have_equal_parts_of_what_they_exchange(nodes, most):
    """Each of the one region, each of the other; each pair what lies in a stretch of the one and cells of the other, of
    both halves. The first node of both has most."""
    given, added, turns = halves_of(nodes, most)
    table = np.zeros(given.shape)
    i, k, part = node_pairs(*nodes[:2], *turns, every=False)
    table[i, k] = part
    assert (part > 0).all()
    assert table == pytest.approx((given + added) / 2)
    assert table.sum(axis=1) == pytest.approx(np.full(nodes[0], 1 / nodes[0]))
    assert table.sum(axis=0) == pytest.approx(np.full(nodes[1], 1 / nodes[1]))
    assert table[0, 0] == pytest.approx(table.max()) == pytest.approx(1 / pairs_at_once(*nodes[:2], *turns))
    alone = [part_of_pair(a, nodes[0], b, nodes[1], *turns) for a, b in np.ndindex(table.shape)]
    assert table.ravel() == pytest.approx(np.array(alone))


def test_nodes_that_are_places_by_themselves_send_to_all():
    """Six of one region and three of another, all as much."""
    i, k, part = node_pairs(6, 3, 1, 1, every=True)
    assert sorted(zip(i.tolist(), k.tolist(), strict=True)) == list(np.ndindex(6, 3))
    assert part == pytest.approx(np.full(18, 1 / 18))


@given(nodes=REGIONS, most=st.integers(1, 9))
def test_as_many_pairs_of_nodes_share_a_sum_as_turns_let_meet(nodes, most):
    """No fewer than the larger of two regions has nodes. Of two regions all pairs, where one has no more nodes than may
    meet; else at least as many of these as nodes of the larger. Both ways alike."""
    a, b = nodes[:2]
    first, second = turns_of(np.array(nodes), most).tolist()[:2]
    pairs = pairs_at_once(a, b, first, second)
    assert max(a, b) * (1 - 1e-9) <= pairs <= a * b * (1 + 1e-9)
    assert pairs == pytest.approx(pairs_at_once(b, a, second, first))
    first, second = turns_of(np.array([a, b]), most).tolist()
    pairs = pairs_at_once(a, b, first, second)
    assert pairs >= min(a * b, most * max(a, b)) * (1 - 1e-9)
    assert most < min(a, b) or pairs == pytest.approx(a * b)


@settings(deadline=None, max_examples=cases(30))
@given(nodes=st.lists(st.integers(1, 12), min_size=2, max_size=4), most=st.integers(1, 7))
@example(nodes=[18, 7, 14], most=7)
def test_no_other_turns_share_out_more_evenly(nodes, most):
    """Of those that may be taken, by what pairs of nodes really share: no fewer are as good, and none better."""
    own, others = nodes[0], nodes[1:]

    def worst(turns):
        loads = [shared_of(own, n, turns).max() * min(own * n, most * max(own, n)) for n in others]
        return max(1.0, *loads)

    chosen, largest = turns_of_region(nodes, 0, most), max(others)
    fewest = min(largest, math.ceil(most * max(own, largest) / own))
    step = fewest if fewest == largest else 1
    for turns in range(fewest, (3 if fewest == largest else 2) * fewest + 1, step):
        assert worst(turns) >= worst(chosen) - 1e-8
        assert turns >= chosen or worst(turns) > worst(chosen) + 1e-12


@given(nodes=st.lists(st.integers(0, 60), min_size=1, max_size=8), most=st.integers(1, 7))
def test_regions_deal_out_in_turns_for_all_others(nodes, most):
    """As many as let the largest other one meet enough or all, up to twice, or three times where it is all; who has no
    part, or nobody to add up for, in one. Who is in no sum changes nothing."""
    for a, turns in enumerate(turns_of(np.array(nodes), most)):
        largest = max([*nodes[:a], *nodes[a + 1 :], 1])
        fewest = min(largest, math.ceil(most * max(nodes[a], largest) / nodes[a])) if nodes[a] else 1
        assert fewest <= turns <= (3 if fewest == largest else 2) * fewest
        assert largest > 1 or turns == 1
        if nodes[a]:
            assert turns == turns_of_region([*nodes, 0, 0], a, most)


@pytest.mark.parametrize(
    ("nodes", "pairs"), [([4, 3, 3], 9), ([18, 7, 14], 96.2), ([18, 14, 7], 96.2), ([20, 6, 9], 52.68), ([3, 7, 2], 6)]
)
def test_two_smaller_regions_share_as_evenly_as_with_the_largest(nodes, pairs):
    """Turns of a region are for all others, not for the largest alone: nearly k l pairs of k and l nodes."""
    turns = turns_of(np.array(nodes), 7).tolist()
    a, b = sorted(range(3), key=lambda r: nodes[r])[:2]
    assert pairs_at_once(nodes[a], nodes[b], turns[a], turns[b]) == pytest.approx(pairs, rel=1e-3)


@settings(deadline=None, max_examples=cases(60))
@given(nodes=REGIONS, most=st.sampled_from((1, 3, 7)))
@example(nodes=[24, 24], most=7)
@example(nodes=[6, 24, 3], most=7)
def test_no_leader_is_said_to_have_more_messages_than_the_busiest(nodes, most):
    """With whoever adds up of its stretch, and whoever has a stretch of what it adds up, both rounds each. Two regions
    in one: of nodes that meet in one half few meet in the other, and they may have twice as many as is said."""
    given, added, turns = halves_of(nodes, most)
    two = 2 * ((given > 0).sum(axis=1) + (added > 0).sum(axis=1))
    one = 2 * ((given > 0) | (added > 0)).sum(axis=1)
    for rounds, exact, least in ((2, two, 0.5), (1, one, 0.35)):
        said = messages_of_leader(*nodes[:2], *turns, rounds)
        assert said <= exact.max() * (1 + 1e-9)
        assert most < 7 or said >= least * exact.max()
    assert messages_of_leader(1, 1, *turns, 1) == 2


@given(
    begin_s=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    busy_s=st.lists(st.floats(0.1, 5), min_size=6, max_size=6),
)
def test_a_link_that_never_rests_ends_then(begin_s, busy_s):
    """One link ends as any server does that works whenever there is work, in whatever order: here first come."""
    clock_s = 0.0
    for begin, busy in sorted(zip(begin_s, busy_s, strict=False)):
        clock_s = max(clock_s, begin) + busy
    count = len(begin_s)
    ends_s = last_end_s(np.array(begin_s), np.array([busy_s[:count]]))
    assert ends_s == pytest.approx(np.full(count, clock_s))
    assert np.isneginf(last_end_s(np.array(begin_s), np.zeros((0, count)))).all()
