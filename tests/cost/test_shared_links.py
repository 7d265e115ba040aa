"""Reductions of several stages over the same links."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.cost.estimate import estimate
from polygon.cost.reduction import pairs_at_once, part_of_pair, turns_between
from polygon.cost.shared_links import last_end_s, node_pairs
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.domain.runtime import MOST_LANES, TURNS
from polygon.domain.schedule import stage_spans
from tests.linked_regions import cluster_of, small_gpt


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


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 5), (3, 2), (4, 4), (6, 9)])
@pytest.mark.parametrize(("turns", "every"), [(1, False), (5, False), (1, True)])
def test_nodes_of_two_regions_have_equal_parts_of_what_they_exchange(senders, receivers, turns, every):
    """Each of the one region, each of the other; in one turn in order, no more pairs than that takes."""
    i, k, part = node_pairs(senders, receivers, turns, every=every)
    table = np.zeros((senders, receivers))
    table[i, k] = part
    assert (part > 0).all()
    assert table.sum(axis=1) == pytest.approx(np.full(senders, 1 / senders))
    assert table.sum(axis=0) == pytest.approx(np.full(receivers, 1 / receivers))
    if every or turns == 1:
        assert len(i) == (senders * receivers if every else senders + receivers - math.gcd(senders, receivers))
    if not every:
        assert part.max() == pytest.approx(1 / pairs_at_once(senders, receivers, turns))
        alone = [part_of_pair(a, senders, b, receivers, turns) for a, b in np.ndindex(table.shape)]
        assert table.ravel() == pytest.approx(np.array(alone))


@given(senders=st.integers(1, 40), receivers=st.integers(1, 40), turns=st.sampled_from((1, *TURNS)))
def test_as_many_pairs_of_nodes_share_a_sum_as_turns_let_meet(senders, receivers, turns):
    """No more than there are, nor than the nodes of the larger region have in all turns; in one turn so many. In as
    many turns as a region has nodes every pair has the same."""
    pairs, many = pairs_at_once(senders, receivers, turns), max(senders, receivers)
    assert many * (1 - 1e-9) <= pairs <= min(senders * receivers, turns * many) * (1 + 1e-9)
    assert pairs_at_once(senders, receivers, 1) == pytest.approx(many)
    assert pairs_at_once(turns, receivers, turns) == pytest.approx(turns * receivers)


@given(nodes=st.lists(st.integers(0, 60), min_size=1, max_size=8), most=st.integers(1, 7))
def test_regions_take_as_many_turns_as_help(nodes, most):
    """One where nobody would meet more, or lanes would be too many; else no fewer than regions, so that none turn
    alike, and no more than it takes to have as many as asked for, or as the second largest region has nodes."""
    turns = turns_between(np.array(nodes), most)
    regions, second = sum(n > 0 for n in nodes), sorted([0, *nodes])[-2]
    enough = min(t for t in TURNS if t >= max(regions, min(second, most)))
    fits = [t for t in TURNS if regions <= t <= enough and t * sum(nodes) <= MOST_LANES]
    assert turns == (max(fits, default=1) if min(second, most) > 1 else 1)


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
