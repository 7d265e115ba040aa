"""Allocations as the search sees them: what is kept of those met, and what single steps do."""

import math
from dataclasses import replace

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue
from polygon.formats.recognition import cluster_from_data
from polygon.planning import candidates as candidates_module
from polygon.planning.candidates import Candidates, ExactCandidates, GroupCandidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.initial_solutions import block_rates
from polygon.planning.link_compression import without_inside
from polygon.planning.neighbourhood import with_idle
from polygon.planning.objectives import MONEY
from polygon.planning.polish import with_wide_spans
from polygon.planning.problem_arrays import Setting
from polygon.planning.warmup_depths import Pacing
from tests.linked_regions import cluster_of, small_gpt


@pytest.fixture(scope="module")
def decoder():
    """Two regions: four A100 on a node, and four T4."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 1, 4)]])
    return Decoder(Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512)))


def allocation(*rows, size=1):
    """Of workers by class, in four stages at most: A100 by 1, 2, 4, then T4."""
    workers = np.zeros((4, 6), dtype=np.int64)
    workers[: len(rows), : len(rows[0])] = rows
    return Allocation(workers=workers, micro_batch_size=size)


def told(values):
    """A decoder that values allocations, in the order in which they come."""
    given = iter(values)

    class Told:
        """As far as it is asked."""

        def value(self, x):
            return next(given)

    return Told()


def test_what_was_valued_is_not_priced_again(decoder, monkeypatch):
    """Not by the same decoder, nor by another of the same problem, tables and objective; empty rows make no other."""
    priced = []
    fluid_s = Decoder.fluid_s
    monkeypatch.setattr(Decoder, "fluid_s", lambda self, x: priced.append(x) or fluid_s(self, x))
    first, moved = allocation([2, 0], [0, 1]), allocation([2, 0], [0, 0], [0, 1])
    again = Decoder(decoder.problem, tables=decoder.tables)
    values = [of.value(x) for of in (decoder, again) for x in (first, first, moved)]
    assert len(priced) == 1 and values == [fluid_s(decoder, first)[0]] * 6
    other = allocation([2, 0], [0, 1], size=2)
    assert decoder.value(other) == fluid_s(decoder, other)[0] and len(priced) == 2
    dear = Decoder(decoder.problem, tables=decoder.tables, objective=MONEY)
    assert dear.value(first) == pytest.approx(dear.fluid_bill(first).usd) != values[0]


def test_beside_a_known_plan_only_what_may_be_quicker_gets_every_pace(decoder):
    """A plan is never better for one that is known, and the same wherever it is the quicker one."""
    for x in (allocation([2], [1], [1]), allocation([1, 1, 0, 0], [0, 0, 0, 2])):
        step_s = decoder.step_times(decoder.decode(x, relax=False)).step_s
        for known_s in (0.5 * step_s, 1.001 * step_s, 1.1 * step_s, 10 * step_s):
            found_s = decoder.step_times(decoder.decode(x, relax=False, known_s=known_s)).step_s
            assert found_s >= step_s * (1 - 1e-12)
            assert found_s == pytest.approx(step_s, rel=1e-12) or found_s > known_s
        assert found_s == pytest.approx(step_s, rel=1e-12)


def test_the_best_three_of_every_structure_are_kept(decoder):
    """Best of all and best of each structure in turn; what has no value, or was met before, is not."""
    found = Candidates(decoder, 4)
    one, two, three, four, five = (allocation([n]) for n in (1, 2, 3, 4, 5))
    other = allocation([1], [1])
    found.decoder = told([5.0, 3.0, 3.0, 4.0, 6.0, 2.0, math.inf])
    for x in (one, two, two, three, four, other, allocation([2], [2])):
        found.evaluate(x)
    assert found.different == [other, two, three, one]
    assert found.elite == [other, two, three, one]
    found.decoder = told([1.0])
    found.evaluate(five)
    assert found.different == [five, other, two, three]
    assert found.elite == [five, other, two, three]
    best = Candidates(decoder, 4)
    best.decoder = told([1.0, 2.0, 3.0])
    for x in (one, two, other):
        best.evaluate(x)
    assert best.elite == [one, two, other]
    assert best.different == [one, other, two]


def test_one_plan_with_other_workers_idle_is_kept_once(decoder):
    """Their values agree, whatever classes they name; with another number of stages or setting it is another plan."""
    found = Candidates(decoder, 4)
    alone, idle, longer, larger = (
        allocation([2]),
        allocation([2, 0, 0, 1]),
        allocation([1], [1]),
        allocation([2], size=2),
    )
    found.decoder = told([2.0, 2.0 + 1e-12, 2.0, 2.0])
    for x in (alone, idle, longer, larger):
        found.evaluate(x)
    assert found.different == found.elite == [alone, longer, larger]


def test_an_exact_step_goes_where_the_value_is_another(decoder, monkeypatch):
    """The best of twelve steps away, but for those to the same plan with other workers idle."""
    exact = ExactCandidates(decoder, 4)
    own, best = 1.0, 1.5
    for values in ([own] * 5 + [3.0, best] + [own] * 5, [own + 1e-12] * 11 + [best]):
        exact.decoder = told([*values, own])
        steps = iter(range(12))
        monkeypatch.setattr(Candidates, "neighbour", lambda *_, steps=steps: next(steps))
        assert exact.neighbour(allocation([2]), np.random.default_rng(0)) == values.index(best)


def test_of_too_many_structures_the_better_half_is_kept(decoder, monkeypatch):
    """Of three where two are too many: one."""
    monkeypatch.setattr(candidates_module, "MOST_STRUCTURES", 2)
    found = Candidates(decoder, 4)
    xs = [allocation(*[[1]] * n) for n in (1, 2, 3)]
    found.decoder = told([3.0, 1.0, 2.0])
    for x in xs[:2]:
        found.evaluate(x)
    assert len(found.different) == 2
    found.evaluate(xs[2])
    assert found.different == [xs[1]]


def test_another_degree_keeps_the_devices(decoder):
    """Four A100 as 2 + 1 x 2 become one worker of four; another pool's workers stay."""
    found = Candidates(decoder, 4)
    assert decoder.classes[:3] == ((0, 1), (0, 2), (0, 4))
    workers = allocation([2, 1, 0, 3], [0, 1, 0, 1]).workers
    changed = found._change_degree(workers, [0, 1, 2], 4)
    assert changed[:2, :4].tolist() == [[0, 0, 1, 3], [0, 0, 0, 1]]
    changed = found._change_degree(workers, [0, 1, 2], 1)
    assert changed[:2, :4].tolist() == [[4, 0, 0, 3], [2, 0, 0, 1]]
    assert found.compact(np.array([[0] * 6, [1] * 6, [0] * 6, [2] * 6])).tolist() == [
        [1] * 6,
        [2] * 6,
        [0] * 6,
        [0] * 6,
    ]


def test_idle_devices_join_workers_of_their_class(decoder):
    """As evenly as may be, and in whole workers of a sequence's parts."""
    space_of = Candidates(decoder, 4)._space_of

    def joined(x, classes=None):
        return with_idle(x, space_of, np.random.default_rng(0), classes)[:2, :4].tolist()

    assert joined(allocation([1, 0, 0, 0], [1, 0, 0, 0])) == [[2, 0, 0, 0], [2, 0, 0, 0]]
    assert joined(allocation([1, 0, 0, 1], [1, 0, 0, 0])) == [[2, 0, 0, 4], [2, 0, 0, 0]]
    assert joined(allocation([1, 0, 0, 1], [1, 0, 0, 0]), [0, 1]) == [[2, 0, 0, 1], [2, 0, 0, 0]]
    assert joined(allocation([0, 1], [0, 0])) == [[0, 2, 0, 0], [0, 0, 0, 0]]
    assert joined(replace(allocation([2, 0, 0, 0], [0, 0, 0, 2]), cp=2)) == [[4, 0, 0, 0], [0, 0, 0, 4]]
    assert joined(replace(allocation([0, 1]), cp=2)) == [[0, 0, 0, 0], [0, 0, 0, 0]]  # was none
    assert joined(replace(allocation([2, 0, 0, 1], [0, 0, 0, 2]), ep=2)) == [[4, 0, 0, 0], [0, 0, 0, 4]]
    assert joined(allocation([4, 0, 0, 0], [0, 0, 0, 3])) == [[4, 0, 0, 0], [0, 0, 0, 4]]


def test_steps_are_of_whole_units(decoder):
    """Of four groups where experts are divided among four, of six where sequences are cut in two and experts in three:
    random allocations, steps and all neighbours, from what is none as well."""
    found, rng = Candidates(decoder, 4), np.random.default_rng(0)
    assert replace(allocation([1]), cp=2, ep=4).unit == 4 and replace(allocation([1]), cp=2, ep=3).unit == 6
    for cp, ep, unit in ((1, 2, 2), (2, 1, 2), (2, 4, 4)):
        found.degrees = ((cp, ep),)
        x = replace(allocation([4, 0, 0, 0], [0, 0, 0, 3]), cp=cp, ep=ep)
        met = [found.random(rng) for _ in range(50)] + [found.neighbour(x, rng) for _ in range(300)]
        for _ in range(300):
            x = found.neighbour(x, rng)
            met.append(x)
            assert (found.space.free(x.workers) >= 0).all()
        met += list(found.neighbours(replace(allocation([4, 0, 0, 0], [0, 0, 0, 4]), cp=cp, ep=ep), rng))
        changed = [y for y in met if (y.workers != allocation([4, 0, 0, 0], [0, 0, 0, 3]).workers).any()]
        assert len(changed) > 600 and all((y.workers % unit == 0).all() for y in changed)
        assert any(y.workers.any() for y in met[:50])


def test_a_change_of_degrees_leaves_idle_devices_or_takes_them(decoder):
    """Half of the changes of context parallelism, and of tensor parallelism, let all join that stand by."""
    found = Candidates(decoder, 4)
    found.degrees = ((1, 1), (2, 1))
    x = replace(allocation([2, 0, 0, 2], [0, 0, 0, 0]), cp=2)
    near = [found.neighbour(x, np.random.default_rng(seed)) for seed in range(2000)]
    other = [y.workers[0, :4].tolist() for y in near if y.cp == 1]
    alone, all_ = (sum(row == how for row in other) for how in ([2, 0, 0, 2], [4, 0, 0, 4]))
    assert alone + all_ == len(other) > 40 and 0.3 < all_ / len(other) < 0.7
    changed = [found._whole_pools(allocation([0, 1, 0, 0], [0, 0, 0, 2]), np.random.default_rng(s)) for s in range(600)]
    degrees = [row[0, :3].tolist() for row in changed if row[1, 3] == 2 and row[0, 0]]
    assert [2, 0, 0] in degrees and [4, 0, 0] in degrees


def test_a_stage_gets_other_workers_that_are_as_quick(decoder):
    """Two A100 make room for idle T4 (as many as there are) or for workers of other degrees; nobody else moves."""
    found = Candidates(decoder, 4)
    x = allocation([2, 0, 0, 0], [0, 0, 0, 1])
    rates = block_rates(decoder, 1)
    seen = set()
    for seed in range(300):
        changed = found._replace(x, np.random.default_rng(seed))
        s = int((changed != x.workers).any(axis=1).argmax())
        assert (np.delete(changed, s, axis=0) == np.delete(x.workers, s, axis=0)).all()
        (c,), (d,) = (np.flatnonzero(rows[s]) for rows in (x.workers, changed))
        part = changed[s, d] * rates[d] / (x.workers[s, c] * rates[c])
        free = found.space.free(np.delete(changed, s, axis=0))[found.space.pool[d]] // found.space.units[d]
        assert c != d and (part >= 0.6 or changed[s, d] == free)
        assert part <= 1.6 or changed[s, d] == 1
        seen.add((s, int(d)))
    # No room for a worker of four T4 beside the one, nor of four A100 beside two.
    assert seen == {(0, d) for d in (1, 2, 3, 4)} | {(1, d) for d in (0, 1, 4, 5)}
    taken = allocation([4, 0, 0, 0], [0, 0, 0, 4])
    kept = [found._replace(taken, np.random.default_rng(seed)) for seed in range(100)]
    assert all((y.sum(axis=1) > 0).sum() == 2 for y in kept)


def test_a_restructured_allocation_has_the_same_workers(decoder):
    """Split, merged or moved; or half as wide, rounded up."""
    found = Candidates(decoder, 4)
    x = allocation([3, 0, 0, 1], [0, 1, 0, 2])
    workers = x.workers
    seen = set()
    for seed in range(200):
        changed = found._restructure(x, np.random.default_rng(seed))
        stages = int(changed.any(axis=1).sum())
        assert changed[:stages].any(axis=1).all()
        if (changed.sum(axis=0) != workers.sum(axis=0)).any():
            assert changed.tolist() == ((workers + 1) // 2).tolist()
            stages = 0
        seen.add(stages)
    assert seen == {0, 1, 2, 3}
    alone = allocation([1])
    assert all((found._restructure(alone, np.random.default_rng(seed)) == alone.workers).all() for seed in range(50))
    full = allocation([1], [1], [1], [1])
    assert all(found._restructure(full, np.random.default_rng(seed)).sum() == 4 for seed in range(100))


def test_a_stage_is_split_into_halves_or_by_classes(decoder):
    """Half of every class's workers to each of the two stages, or all of a class to one of them."""
    found = Candidates(decoder, 4)
    changed = [found._restructure(allocation([4, 0, 0, 4]), np.random.default_rng(seed))[:2] for seed in range(200)]
    split = {tuple(map(tuple, rows[:, [0, 3]].tolist())) for rows in changed if rows.any(axis=1).all()}
    assert split == {((2, 2), (2, 2)), ((4, 0), (0, 4)), ((0, 4), (4, 0))}


def test_stages_in_a_row_are_turned_round(decoder):
    """Some in the middle or all: a walk through the regions the other way takes one move."""
    found = Candidates(decoder, 4)
    x = allocation([1, 0], [2, 0], [0, 1], [1, 1])
    first, *_, last = order = [row.tolist() for row in x.stages]
    met = [found._restructure(x, np.random.default_rng(seed)).tolist() for seed in range(300)]
    assert order[::-1] in met and [first, order[2], order[1], last] in met and [*order[:1], *order[:0:-1]] in met


def test_whole_pools_become_stages_of_their_own(decoder):
    """Idle ones, and such as shared one: at the ends and between the others, which stay as they are."""
    found = Candidates(decoder, 4)
    for x in (allocation([2, 0, 0, 0], [1, 0, 0, 0]), allocation([2, 0, 0, 4], [1, 0, 0, 0])):
        others = [[2, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
        met = [found.compact(found._whole_pools(x, np.random.default_rng(seed))) for seed in range(1500)]
        alone = {
            at
            for rows in (y[y.any(axis=1)] for y in met)
            for at in range(len(rows))
            if len(rows) == 3 and np.delete(rows, at, axis=0).tolist() == others and not rows[at, :3].any()
        }
        assert alone == {0, 1, 2}


def test_exact_candidates_are_valued_before_their_packings_are_settled():
    """What regions send is settled by simulation in the search's draft alone; whether nodes of a region send one
    another packed gradients, which counts for more, is tried in every draft: in one stage of both regions too."""
    groups = [[("t4", 2, 2)], [("a100-40gb", 1, 4)]]
    cluster = cluster_of(groups, latency_s=1e-3, bytes_per_s=2e8, node_bytes_per_s=5e9)
    decoder = Decoder(Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512)))
    for rows in ([{(0, 2): 2, (1, 1): 2}], [{(0, 1): 4, (1, 1): 2}, {(1, 1): 2}]):
        workers = np.array([[row.get(of, 0) for of in decoder.classes] for row in rows])
        x = Allocation(workers=workers, micro_batch_size=1)
        draft, settled = (decoder.decode(x, relax=relax) for relax in (False, True))
        assert draft.links != settled.links and draft.packed_inside == settled.packed_inside == {0}
        value, least = decoder.plan_value(draft), decoder.plan_value(settled)
        assert ExactCandidates(decoder, len(rows)).evaluate(x) == value >= least
    assert 1.01 * least > value > least


def test_nodes_pack_gradients_where_zero_has_nothing_to_divide_by_then():
    """Cards alone on their nodes: packing needs more memory, and is worth shorter spans; settled plans are no worse."""
    cluster = cluster_of([[("v100-16gb", 8, 1)]], latency_s=1e-3, bytes_per_s=1e8)
    model = small_gpt(blocks=16, hidden_size=2048, head_dim=128, ffn_size=8192)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=256, seq_len=1024)))
    workers = np.array([[row.get(of, 0) for of in decoder.classes] for row in [{(0, 1): 4}, {(0, 1): 4}]])
    x = Allocation(workers=workers, micro_batch_size=1)
    draft, settled = (decoder.decode(x, relax=relax) for relax in (False, True))
    for plan in (draft, settled):
        assert any(stage.zero for stage in plan.stages) and plan.packed_inside == {0}
        assert violations(decoder.problem, plan) == []
    plain = replace(draft, links=without_inside(draft.links))
    assert decoder.plan_value(settled) <= decoder.plan_value(draft) < 0.9 * decoder.plan_value(plain)


def test_packing_that_memory_is_short_for_gets_other_spans():
    """Settling a plan whose spans fill memory packs inside the region and shortens them: memory holds the plan."""
    cluster = cluster_of([[("v100-16gb", 8, 1)]], latency_s=1e-3, bytes_per_s=1e8)
    model = small_gpt(blocks=19, hidden_size=2048, head_dim=128, ffn_size=8192)
    decoder = Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=1024)))
    workers = np.array([[row.get(of, 0) for of in decoder.classes] for row in [{(0, 1): 4}, {(0, 1): 4}]])
    draft = decoder.decode(Allocation(workers=workers, micro_batch_size=1), relax=False)
    plain, _ = Pacing(with_wide_spans(replace(draft, links=without_inside(draft.links))), decoder.tables).best()
    settled = decoder.settled(plain)
    assert settled.packed_inside == {0} and settled.spans != plain.spans
    assert violations(decoder.problem, settled) == []
    assert decoder.plan_value(settled) < 0.9 * decoder.plan_value(plain)


def test_neighbours_are_allocations_that_differ_in_one_thing(decoder):
    """Workers or the micro-batch size, one step up or down; of nothing any."""
    found = Candidates(decoder, 4)
    sizes = list(found.sizes)
    x = allocation([2, 0, 0, 2], [1, 0, 0, 2], size=sizes[1])
    near = [found.neighbour(x, np.random.default_rng(seed)) for seed in range(300)]
    other = [y for y in near if y.micro_batch_size != x.micro_batch_size]
    assert {y.micro_batch_size for y in other} == {sizes[0], sizes[2]}
    assert all((y.workers == x.workers).all() for y in other)
    units = np.array([t for _, t in decoder.classes])
    pool = np.array([p for p, _ in decoder.classes])
    for y in near:
        devices = (y.workers * units).sum(axis=0)
        assert all(devices[pool == p].sum() <= 4 for p in (0, 1))
    # Most steps move workers: about a tenth changes the size.
    assert 0.05 < len(other) / len(near) < 0.2
    first = replace(x, micro_batch_size=sizes[0])
    steps = {found.neighbour(first, np.random.default_rng(seed)).micro_batch_size for seed in range(300)}
    assert steps == {sizes[0], sizes[1]}
    assert found.neighbour(allocation([0]), np.random.default_rng(0)).workers.any()


def test_whole_pools_are_dropped_added_or_spread(decoder):
    """Whatever is taken of a pool, it is all of it, evenly, in one stage, a new one or all; or at another degree."""
    found = Candidates(decoder, 4)
    x = allocation([2, 0, 0, 2], [2, 0, 0, 2])
    units = np.array([t for _, t in decoder.classes])
    pool = np.array([p for p, _ in decoder.classes])
    seen = set()
    for seed in range(300):
        changed = found._whole_pools(x, np.random.default_rng(seed))
        if len(changed) > 4:
            (at,) = (s for s in range(3) if np.count_nonzero(changed[s]) == 1 and changed[s] @ units == 4)
            changed = np.delete(changed, at, axis=0)
            assert sorted((changed[:2] * units).sum(axis=1).tolist()) == [2, 2]
            continue
        devices = [(changed * units)[:, pool == p].sum(axis=1)[:2].tolist() for p in (0, 1)]
        assert sum(part == [2, 2] for part in devices) >= 1  # only one pool is another
        assert not changed[2:].any()
        seen.update(map(tuple, devices))
    assert {(0, 0), (2, 2), (4, 0), (0, 4)} <= seen
    assert all(sum(part) in (0, 4) for part in seen)


def test_near_classes_are_close(decoder):
    """1 / (1 + seconds over their median); where there is no link, next to nothing."""
    found = GroupCandidates(decoder, 2, 1)
    bank = decoder.bank(Setting(1))
    inside = found._closeness(bank, np.zeros((2, 2)))
    latency = bank.links.latency_s[np.ix_(bank.pool, bank.pool)]
    scale = np.median(latency[latency > 0])
    assert inside == pytest.approx(1 / (1 + latency / scale))
    # A gigabyte as well: seconds at every link's rate beside its latency.
    rate = bank.links.bytes_per_s[np.ix_(bank.pool, bank.pool)]
    seconds = latency + 1e9 / rate
    loaded = found._closeness(bank, np.full((2, 2), 1e9))
    assert loaded == pytest.approx(1 / (1 + seconds / np.median(seconds)))
    far = bank._replace(links=bank.links._replace(bytes_per_s=np.where(np.eye(2), 1e9, 0.0)))
    apart = found._closeness(far, np.full((2, 2), 1e9))
    region = bank.region
    assert (apart[np.not_equal.outer(region, region)] == 1e-6).all()
    assert (apart[np.equal.outer(region, region)] > 0.1).all()
    rates = found.weight()
    assert (rates > 0).all() and rates[0] > rates[3]  # an A100 and a T4


def test_sizes_that_only_parts_of_a_sequence_can_hold_are_tried():
    """Two sequences of a million tokens fit 128 devices when these cut them into 16; no tensor-parallel group holds a
    block of them."""
    nodes = [{"device": "h100-sxm", "count": 16, "devices_per_node": 8}]
    cluster = cluster_from_data({"name": "pod", "regions": [{"name": "here", "nodes": nodes}]}, "pod")
    model = replace(catalogue.model("llama3-70b"), max_seq_len=2**20)
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=4, seq_len=2**20))
    degrees = {"tp": 8, "cp": 16, "zero": 3, "recompute": "full", "sequence_parallel": True}
    plan = uniform_plan(problem, ParallelConfig(dp=1, micro_batch_size=2, **degrees))
    assert violations(problem, plan) == []
    decoder = Decoder(problem)
    assert decoder.tables.memory(8, 2, "full", sequence_parallel=True).layers.transient_bytes.max() > 80e9
    assert 2 in Candidates(decoder, 4).sizes


def test_of_every_kind_the_best_is_kept(decoder):
    """Alone in either region, in both, in one stage or two: the best of every set of regions, and of every length."""
    candidates = Candidates(decoder, 4)
    met = [
        allocation([4, 0, 0, 0, 0, 0]),
        allocation([2, 0, 0, 0, 0, 0]),
        allocation([0, 0, 0, 4, 0, 0]),
        allocation([4, 0, 0, 4, 0, 0]),
        allocation([2, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]),
        allocation([4, 0, 0, 0, 0, 0], [0, 0, 0, 4, 0, 0]),
    ]
    value = {x.key: candidates.evaluate(x) for x in met}
    for kind, kinds in (
        (candidates.regions_of, ([0, 1, 4], [2], [3, 5])),
        (lambda x: len(x.stages), ([0, 1, 2, 3], [4, 5])),
    ):
        best = sorted(min(value[met[i].key] for i in of) for of in kinds)
        assert [value[x.key] for x in candidates.best_of(kind)] == best


def test_what_a_copy_met_is_joined_once(decoder):
    """The best three of every structure, of both; joined again nothing changes."""
    found = Candidates(decoder, 4)
    one, two, three, four = (allocation([n]) for n in (1, 2, 3, 4))
    other = allocation([1], [1])
    found.decoder = told([4.0, 3.0])
    for x in (one, two):
        found.evaluate(x)
    copy = found.copy()
    copy.decoder = told([3.0, 2.0, 1.0, 5.0])
    for x in (two, three, four, other):
        copy.evaluate(x)
    assert found.different == [two, one]
    found.join(copy)
    assert found.different == [four, other, three, two] and copy.different == found.different
    found.join(copy)
    assert found.different == [four, other, three, two]
    found.decoder = told([9.0])
    found.evaluate(other)
    assert found.old_in_a_row == 1  # the copy met it


def test_within_some_regions_nothing_leaves_them(decoder):
    """Random allocations, steps and all neighbours take no other devices; what was met elsewhere is no start."""
    found, rng = Candidates(decoder, 4), np.random.default_rng(0)
    here, across, there = (
        allocation([2], [2]),
        allocation([2, 0, 0, 0], [0, 0, 0, 2]),
        allocation([0, 0, 0, 2], [0, 0, 0, 1]),
    )
    for x in (here, across, there):
        found.evaluate(x)
    for part, start, columns in (((0,), here, slice(0, 3)), ((1,), there, slice(3, 6))):
        narrow = found.within(part, found.region_of_class)
        assert [x.key for x in narrow.different] == [start.key]
        met = [narrow.random(rng) for _ in range(20)]
        x = start
        for _ in range(300):
            x = narrow.neighbour(x, rng)
            met.append(x)
        met += list(narrow.neighbours(start, rng))
        used = sum(x.workers for x in met)
        assert used[:, columns].any() and used.sum() == used[:, columns].sum()
        for x in met:
            narrow.evaluate(x)
        found.join(narrow)
    assert {found.regions_of(x) for x in found.different} == {(0,), (0, 1), (1,)}
    steps = [found.neighbour(here, rng) for _ in range(300)]
    assert any(x.workers[:, 3:].any() for x in steps)  # the one that has all goes on everywhere


def test_sets_of_regions_are_the_best_first_but_for_nearly_all(decoder, monkeypatch):
    """One of two regions is a set that is searched by itself, both are not."""
    found = Candidates(decoder, 4)
    found.decoder = told([3.0, 1.0, 2.0])
    for x in (allocation([2]), allocation([2, 0, 0, 0], [0, 0, 0, 2]), allocation([0, 0, 0, 2])):
        found.evaluate(x)
    assert found.parts(found.region_of_class) == [(1,), (0,)]


def test_within_some_device_types_nothing_leaves_them(decoder):
    """Those of the second type alone, wherever they are; a set of types is of those in which the best were met."""
    found, rng = Candidates(decoder, 4), np.random.default_rng(0)
    types = [decoder.problem.cluster.pools[p].device.name for p, _ in decoder.classes]
    assert [types[c] for c in np.flatnonzero(found.type_of_class == 0)] == [types[0]] * types.count(types[0])
    first, second = allocation([2]), allocation([0, 0, 0, 2])
    for x in (first, second, allocation([2, 0, 0, 0], [0, 0, 0, 2])):
        found.evaluate(x)
    assert set(found.parts(found.type_of_class)) == {(0,), (1,)}
    narrow = found.within((1,), found.type_of_class)
    assert [x.key for x in narrow.different] == [second.key]
    met = [narrow.random(rng) for _ in range(20)] + list(narrow.neighbours(second, rng))
    assert not sum(x.workers for x in met)[:, found.type_of_class == 0].any()


def test_allocations_are_unlike_by_their_shares_of_devices(decoder):
    """The best first; those that take the same pools in the same proportions are alike, in whatever stages."""
    found = Candidates(decoder, 4)
    best, alike, mixed, other = (
        allocation([4, 0, 0, 1]),
        allocation([2, 0, 0, 0], [2, 0, 0, 1]),
        allocation([2, 0, 0, 2]),
        allocation([0, 0, 0, 4]),
    )
    found.decoder = told([1.0, 2.0, 3.0, 4.0])
    for x in (best, alike, mixed, other):
        found.evaluate(x)
    assert found.unlike(4) == [best, other, mixed]
    assert found.unlike(2) == [best, other]


def test_all_neighbours_are_allocations_of_one_change(decoder):
    """None takes more than there is, or less than nothing, whatever the degree; all are met that a step leads to."""
    found, rng = Candidates(decoder, 4), np.random.default_rng(0)
    for cp in (1, 2):
        for _ in range(10):
            x = replace(found.neighbour(found.random(rng), rng), cp=cp)
            near = list(found.neighbours(x, rng))
            assert all((y.workers >= 0).all() and (found.space.free(y.workers) >= 0).all() for y in near)
            assert len({y.key for y in near} - {x.key}) > 4
    found.degrees = ((1, 1), (2, 1))
    x = allocation([2, 0, 0, 1], [0, 0, 0, 2], size=found.sizes[1])
    near = {y.key for y in found.neighbours(x, rng)}
    rows = [
        [[3, 0, 0, 1], [0, 0, 0, 2]],  # one more
        [[4, 0, 0, 1], [0, 0, 0, 2]],  # all that stand by
        [[2, 0, 0, 0], [0, 0, 0, 2]],  # one fewer
        [[2, 0, 0, 0], [0, 0, 0, 3]],  # one at another place
        [[0, 1, 0, 1], [0, 0, 0, 2]],  # another degree
        [[0, 2, 0, 1], [0, 0, 0, 2]],  # and all that stand by
        [[0, 1, 0, 0, 0], [0, 0, 0, 0, 1]],  # of all pools, in all stages
        [[2, 0, 0, 0, 0], [0, 0, 0, 0, 1]],  # of one pool, in all stages
        [[0, 0, 0, 2], [2, 0, 0, 1]],  # stages exchanged
        [[2, 0, 0, 3], [0, 0, 0, 0]],  # joined
        [[2, 0, 0, 1], [0, 0, 0, 0]],  # left out
        [[1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 2]],  # cut
        [[2, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 2]],  # one more stage
    ]
    for row in rows:
        assert allocation(*row, size=x.micro_batch_size).key in near, row
    for other in (replace(x, micro_batch_size=found.sizes[0]), replace(x, cp=2)):
        assert other.key in near
    joined = replace(allocation([4, 0, 0, 1], [0, 0, 0, 2], size=x.micro_batch_size), cp=2)
    assert any(y.cp == 2 and (y.workers[:, 0] == joined.workers[:, 0]).all() for y in found.neighbours(x, rng))


def test_other_degrees_and_sizes_at_once_and_whole_pools(decoder):
    """What a descent through large clusters tries: each is an allocation, and two things may differ at once."""
    found, rng = Candidates(decoder, 4), np.random.default_rng(1)
    for cp in (1, 2):
        for _ in range(10):
            x = replace(found.neighbour(found.random(rng), rng), cp=cp)
            near = [*found.scaled(x), *found.exchanged(x)]
            assert all((y.workers >= 0).all() and (found.space.free(y.workers) >= 0).all() for y in near)
            assert all((y.workers % y.unit == 0).all() for y in near)
    size, twice = found.sizes[1:3]
    x = allocation([2, 0, 0, 1], [0, 0, 0, 2], size=size)
    scaled = {y.key for y in found.scaled(x)}
    for row in ([[0, 1, 0, 0, 0], [0, 0, 0, 0, 1]], [[2, 0, 0, 1], [0, 0, 0, 2]]):  # both at degree 2; both at 1
        assert {allocation(*row, size=size).key, allocation(*row, size=twice).key} <= scaled
    exchanged = {y.key for y in found.exchanged(x)}
    for row in ([[0, 0, 0, 1], [0, 0, 0, 2]], [[2, 0, 0, 0]], [[4, 0, 0, 0]]):  # without one pool, and all of the other
        assert allocation(*row, size=size).key in exchanged, row
    alone = {y.key for y in found.exchanged(allocation([1, 0, 0, 0], [1, 0, 0, 0], size=size))}
    for row in ([[0, 0, 0, 2], [0, 0, 0, 2]], [[1, 0, 0, 2], [1, 0, 0, 2]], [[2, 0, 0, 2], [2, 0, 0, 2]]):
        assert allocation(*row, size=size).key in alone, row  # in the place of the pool, or beside it


def test_an_exact_step_is_the_next_best_neighbour_half_of_the_time(decoder):
    """The best by the fluid objective of all one change away, then the second best, none of them twice."""
    exact = ExactCandidates(decoder, 4)
    x = allocation([2, 0, 0, 1], [1, 0, 0, 2])
    near = [float(f"{decoder.value(y):.9g}") for y in exact.neighbours(x, np.random.default_rng(0))]
    own = float(f"{decoder.value(x):.9g}")  # some have the same workers in another order
    order = [float(f"{decoder.value(y):.9g}") for y in reversed(exact._listed(x, np.random.default_rng(0)))]
    assert order == sorted(set(order)) and len(order) > 20 and own not in order
    assert order[0] == min(value for value in near if value != own)
    rng, met = np.random.default_rng(2), []
    for _ in range(12):
        y = exact.neighbour(x, rng)
        exact.evaluate(y)
        met.append(float(f"{decoder.value(y):.9g}"))
    assert set(order[:3]) <= set(met)
