"""Regions that lead by turns: a step is the largest mean of the ways' times over a cycle of regions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.region_sums import Hop, Links, led_sets, summing_sets
from polygon.cost.estimate import estimate
from polygon.cost.finish import led_s
from polygon.cost.network import CARD_EFFICIENCY
from polygon.cost.overlap import overlap_of
from polygon.cost.reduction import lent_s, passed_on_s, passes_of_card, ring_s
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from tests.cost.test_step_times import far_problem, replicas
from tests.linked_regions import cluster_of
from tests.nightly import cases
from tests.small_problems import small_model, small_plan


def done_of(ends_s, whole_s, last_s=None, busy_s=0.0, updates_s=None):
    """One worker a region, nothing hidden by backward."""
    n, problem = len(ends_s), far_problem(2)
    overlap = overlap_of(problem.runtime, problem.batch)._replace(data=0)
    ends_s, updates_s = np.array(ends_s, dtype=float), np.zeros(n) if updates_s is None else updates_s
    whole_s = np.array(whole_s, dtype=float)
    regions = np.arange(n)
    of = (whole_s if last_s is None else last_s, busy_s, 4.0, updates_s, 0.0, overlap)
    return led_s(ends_s, np.zeros(n), regions, regions, whole_s, *of)


@settings(deadline=None, max_examples=cases(30))
@given(n=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_a_step_is_what_many_steps_take_on_average(n, seed):
    """Begins of steps, followed one by one, grow by the largest cycle mean."""
    rng = np.random.default_rng(seed)
    ends_s, updates_s, whole_s = rng.uniform(0, 2, n), rng.uniform(0, 0.5, n), rng.uniform(0, 3, (n, n))
    done = done_of(ends_s, whole_s, updates_s=updates_s)
    steps, begin_s, seen = 120 * 60, np.zeros(n), []
    matrix = ends_s[None, :] + whole_s + updates_s[:, None]
    for _ in range(steps):
        begin_s = (begin_s[None, :] + matrix).max(axis=1)
        seen.append(begin_s.max())
    # Cycles have up to five regions: 60 steps are a whole number of rounds of any.
    assert done.max() == pytest.approx((seen[-1] - seen[-1 - 60 * 60]) / 3600)
    assert done.max() <= matrix.max() * (1 + 1e-12)


def test_two_regions_take_the_mean_of_both_ways():
    """A slow way there and a quick one back: neither 3 s nor 1 s a step, but never less than computing takes, nor than
    a link is busy."""
    ways = [[0.0, 0.5], [2.5, 0.0]]
    assert done_of([0.5, 0.5], ways).max() == pytest.approx(2.0)
    assert done_of([2.9, 0.5], ways).max() == pytest.approx((2.9 + 2.5 + 0.5 + 0.5) / 2)
    assert done_of([0.5, 4.0], ways).max() == pytest.approx(4.0)
    assert done_of([0.5, 0.5], ways, busy_s=2.4).max() == pytest.approx(2.4)
    assert done_of([0.5, 0.5], np.full((2, 2), np.inf)).max() == np.inf


def test_nobody_leads_where_links_are_alike_or_all_wait_for_the_norm():
    """Then a step is what it is where all begin together; else a narrow way costs only its part of the mean."""
    problem = far_problem(2, 2e9)
    tables, plan = CostTables(problem), replicas(problem)
    alike = step_times(plan, tables)
    alone_s = alike.reduced_s.max() + alike.update_s.max()
    assert alike.step_s == pytest.approx(alone_s)
    rate = problem.cluster.bytes_per_s.copy()
    rate[1, 0] /= 4
    narrow = replace(problem, cluster=replace(problem.cluster, bytes_per_s=rate))
    times, waiting = (step_times(p, CostTables(narrow)) for p in (plan, replicas(narrow, zero=2)))
    longest_s = times.reduced_s.max() + times.update_s.max()
    busy_s = times.reductions[0].ways.busy_s
    assert busy_s == pytest.approx(times.reductions[0].wire_bytes / rate[1, 0])  # of the narrow way, not of the other
    assert times.step_s == pytest.approx(max((alone_s + longest_s) / 2, busy_s))
    assert times.step_s < longest_s
    assert waiting.ways is None
    terms = estimate(narrow, plan).terms
    assert sum(terms.values()) == pytest.approx(times.step_s)
    assert min(terms.values()) >= -1e-12


@pytest.mark.parametrize(
    ("back", "zero", "slow_takes", "slowest", "last"),
    [(1e7, 0, 6, 0, 0), *((rate, 0, 6, 1, 1) for rate in (2.9e9, 3.2e9, 4.5e9, 5.1e9, 1e10)), (1e7, 2, 1, 0, 1)],
)
def test_the_region_that_ends_last_tells_why(back, zero, slow_takes, slowest, last):
    """A100s in one region, T4s in the other. Where the way back from the slow to the quick is narrow, these wait for
    gradients, and the step is sums rather than compute; where it is wide, both end a step with the slow ones, whose
    compute it is. Where all wait for the norm, the slow ones update longest, but who computes longest may be another.
    """
    groups, card = [[("a100-40gb", 2, 1)], [("t4", 2, 1)]], Link(latency_s=5e-5, bytes_per_s=1e12)
    cluster = cluster_of(groups, latency_s=0.0, bytes_per_s=np.array([[0, max(back, 1e8)], [back, 0]]), between=card)
    problem = replace(far_problem(2), cluster=cluster)
    plan = replace(replicas(problem, zero=zero), routes=np.repeat([0, 1], [12 - slow_takes, slow_takes])[:, None])
    times, terms = step_times(plan, CostTables(problem)), estimate(problem, plan).terms
    assert (times.ways is None) == (zero == 2)
    busy_s = [12 - slow_takes, slow_takes] * (times.schedule.forward_s + times.schedule.backward_s)
    assert (busy_s[1] > 2 * busy_s[0]) == (slow_takes > 1)
    assert times.update_s[1] > 2 * times.update_s[0]
    assert (terms["compute"], terms["update"]) == pytest.approx((busy_s[slowest], times.update_s[last]))
    assert sum(terms.values()) == pytest.approx(times.step_s)


@settings(deadline=None, max_examples=cases(40))
@given(n=st.integers(2, 4), seed=st.integers(0, 9999), rounds=st.integers(1, 2), hidden_s=st.floats(0, 2))
def test_no_regions_compute_more_than_their_bound(n, seed, rounds, hidden_s):
    """Whatever regions compute, a step in which gradients go by these ways leaves no room for more."""
    rng = np.random.default_rng(seed)
    apart = 1 - np.eye(n)
    latency_s, slowness = rng.uniform(0, 0.5, (n, n)) * apart, 10 ** rng.uniform(-1, 1, (n, n)) * apart
    none = np.zeros((n, n))
    links = Links(
        latency_s=latency_s, slowness=slowness, shared=none, egress=np.zeros(n), nodes=np.ones(n, dtype=np.int64),
        hop=Hop(0.0, 1.0, 0.0), trees=False,
    )  # fmt: skip
    sets = summing_sets(links, whole=rounds == 1)
    capacity, ends_s = rng.uniform(1, 5, n), rng.uniform(0.1, 3, n) + hidden_s
    rounds, last = 1 if n == 2 else rounds, 0.25
    sent_s, whole_s, last_s = 2 / n * slowness, np.zeros((n, n)), np.zeros((n, n))
    for a in range(n):
        for b in range(n):
            ways = [(latency_s[a, b], sent_s[a, b] / 2, sent_s[a, b] / 2)] if a != b else [(0.0, 0.0, 0.0)]
            if rounds == 2:
                ways += [
                    (latency_s[a, k] + latency_s[k, b], sent_s[a, k] / 2, sent_s[k, b] / 2)
                    for k in range(n)
                    if k not in (a, b)
                ]
            way_s = [
                far_s + (there + on if k == 0 else passed_on_s(there, on, last))
                for k, (far_s, there, on) in enumerate(ways)
            ]
            whole_s[b, a] = max(way_s) - hidden_s
            last_s[b, a] = max(far_s + last * (there + on) for far_s, there, on in ways)
    step_s = done_of(ends_s, np.maximum(whole_s, last_s), busy_s=sent_s.max()).max()
    led = led_sets(links, sets, lambda most: capacity, 1.0, 1.0, hidden_s=hidden_s, last=last)
    assert capacity @ ends_s <= led.most(step_s) * step_s * (1 + 1e-9)


def test_leaders_pass_what_others_add_up():
    """All of them: a ring; one alone hears the other and answers, or leaves adding up to several others."""
    for members in (1, 2, 3, 4, 8):
        assert passes_of_card(members, False) == pytest.approx(2 * (members - 1) / members)
    assert [passes_of_card(members, True) for members in (1, 2, 3, 5)] == [0, 1, 2, 2]


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("bytes_per_s", [0.0, 1e9])
def test_leaders_all_of_them_are_a_ring(members, bytes_per_s):
    """The same seconds; never without a link, but one alone needs none."""
    passes = passes_of_card(members, False)
    assert lent_s(1e8, members, 1e-3, bytes_per_s, passes) == pytest.approx(ring_s(1e8, members, 1e-3, bytes_per_s))
    assert ring_s(1e8, 1, 1e-3, bytes_per_s) == 0
    if bytes_per_s:
        assert lent_s(1e8, 4, 1e-3, 1e9, 2.0) == pytest.approx(6e-3 + 0.2)


@pytest.mark.parametrize(("packing", "passes"), [("none", 2 * 4 / 5 + 1 / 5), ("powersgd", 2)])
def test_a_leaders_card_passes_what_it_adds_up(packing, passes):
    """Five hosts beside one, everything on equal cards: each of the five sends its gradient to the others, its fifth of
    the sum to the other region, and that of both back, all after it has gradients. Of low-rank factors one sends all.
    """
    lan = Link(latency_s=1e-4, bytes_per_s=1e7)
    cluster = cluster_of([[("t4", 5, 1)], [("t4", 1, 1)]], latency_s=0.0, bytes_per_s=1e7, between=lan)
    processor = replace(cluster.catalogue["t4"], architecture="cpu")
    problem = Problem(
        cluster=replace(cluster, catalogue=dict(cluster.catalogue) | {"t4": processor}),
        model=small_model(blocks=8, hidden_size=256, heads=4, kv_heads=4, head_dim=64, ffn_size=1024),
        batch=Batch(global_batch=12, seq_len=16, precision="fp32"),
    )
    plan = small_plan(problem.cluster, [(0, 10)], [[0, 1, 2, 3, 4, 5]], [[m] for m in range(6)], compression=packing)
    card = 0.9e7  # what sockets reach
    gradient_s = 4 * problem.model.parameters / card
    found = step_times(plan, CostTables(problem))
    assert found.ways is not None
    factors_s = found.reductions[0].wire_bytes / card if packing == "powersgd" else 0
    assert found.reductions[0].ways.whole_s[0, 0] == pytest.approx(passes * gradient_s + factors_s)
    assert found.step_s > passes * gradient_s


@pytest.mark.parametrize(("part", "seen"), [(0.1, 0.05), (0.9, 0.45), (1.5, 1.0)])
def test_gathering_gets_ahead_while_a_sum_is_on_its_way(part, seen):
    """Of what a way takes half is hidden by hand-outs that are behind, of a region's sums half at most."""
    ways = []
    for latency_s in (0.0, part):
        lan = Link(latency_s=0.0, bytes_per_s=1e7)
        cluster = cluster_of([[("t4", 4, 1)]] * 2, latency_s=latency_s, bytes_per_s=1e12, between=lan)
        processor = replace(cluster.catalogue["t4"], architecture="cpu")
        model = small_model(blocks=8, hidden_size=256, heads=4, kv_heads=4, head_dim=64, ffn_size=1024)
        near_s = 2 * 3 / 4 * 4 * model.parameters / 1e7
        cluster = replace(
            cluster,
            catalogue=dict(cluster.catalogue) | {"t4": processor},
            latency_s=cluster.latency_s * near_s,
        )
        problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=12, seq_len=16, precision="fp32"))
        plan = small_plan(cluster, [(0, 10)], [list(range(8))], [[m] for m in range(8)])
        ways.append(step_times(plan, CostTables(problem)).reductions[0].ways.whole_s[1, 0])
    assert (ways[1] - ways[0]) / near_s == pytest.approx(seen)


@pytest.mark.parametrize(("hosts", "many"), [(1, 4), (4, 1), (2, 3)])
def test_each_host_has_its_part_of_the_way(hosts, many):
    """Between regions of k and l hosts k l pairs share what they exchange; a card has 1 / k of it."""
    link, wide = 1e7, Link(latency_s=0.0, bytes_per_s=1e12)
    for card, took in ((1e12, 1 / (hosts * many)), (1e6 / CARD_EFFICIENCY, 10 / min(hosts, many))):
        cluster = cluster_of(
            [[("t4", n, 1)] for n in (hosts, many)],
            latency_s=0.0,
            bytes_per_s=link,
            between=replace(wide, bytes_per_s=card),
        )
        problem = Problem(cluster=cluster, model=small_model(), batch=Batch(global_batch=12, seq_len=16))
        problem = replace(problem, runtime=replace(problem.runtime, message_s=0.0))
        devices = list(range(hosts + many))
        plan = small_plan(cluster, [(0, problem.model.layers)], [devices], [[m] for m in devices])
        cost = step_times(plan, CostTables(problem)).reductions[0]
        assert cost.ways.busy_s == pytest.approx(took * cost.wire_bytes / link)
