"""Plans that the search makes."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.bounds.lower_bound import lower_bound
from polygon.cost.calibration import Calibration
from polygon.cost.estimate import estimate
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.domain.clock import Clock
from polygon.domain.groups import Groups
from polygon.domain.model import Batch
from polygon.domain.plan import PARITY_LEVELS, Constraints, Problem
from polygon.formats import catalogue
from polygon.planning import search_engine as engine
from polygon.planning.candidates import Candidates, NothingNew, leaves_out, used_of
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder, Infeasible, most_stages
from polygon.planning.efforts import QUICK
from polygon.planning.frontier import find_within_limits
from polygon.planning.objectives import MONEY, STEP_TIME
from polygon.planning.polish import changes, fitted
from polygon.planning.search_engine import Effort, find_groups, find_plan
from solvers.genetic import Genetic
from tests.drawn_problems import larger_problems
from tests.linked_regions import TYPES, cluster_of, small_gpt
from tests.nightly import cases

begin = engine._begin
FAST = Effort(fluid_evaluations=300, exact_evaluations=12, patience=150)
LONGER = Effort(fluid_evaluations=2_000, exact_evaluations=40, patience=500)
"""Where how good a plan is counts."""


@st.composite
def problems(draw):
    members = st.tuples(st.sampled_from(TYPES), st.integers(1, 2), st.sampled_from([1, 2, 4]))
    groups = draw(st.lists(st.lists(members, min_size=1, max_size=2), min_size=1, max_size=3))
    cluster = cluster_of(
        groups, latency_s=draw(st.sampled_from([0.001, 0.05, 0.2])), bytes_per_s=draw(st.sampled_from([1e7, 1e8, 1e9]))
    )
    batch = Batch(global_batch=draw(st.sampled_from([8, 12, 32])), seq_len=512)
    allowed = draw(st.sampled_from([("none",), ("none", "bf16", "int8")]))
    return Problem(cluster=cluster, model=small_gpt(), batch=batch, constraints=Constraints(compressions=allowed))


@settings(max_examples=cases(25), deadline=None)
@given(problem=problems(), seed=st.integers(0, 9))
def test_decoded_plans_break_no_rule(problem, seed):
    """Whatever allocation is decoded: the independent checker finds nothing. (That none beats the bound is shown where
    the bound is, of more problems.)"""
    decoder = Decoder(problem)
    candidates = Candidates(decoder, min(5, most_stages(problem)))
    rng = np.random.default_rng(seed)
    for _ in range(6):
        plan = decoder.decode(candidates.random(rng))
        if not isinstance(plan, Infeasible):
            assert violations(problem, plan) == []


@settings(max_examples=cases(6), deadline=None)
@given(problem=problems())
def test_search_is_repeatable_and_its_terms_add_up(problem):
    """The same seed gives the same plan; the estimate's terms sum to the step."""
    first, second = (find_plan(problem, np.random.default_rng(3), effort=FAST) for _ in range(2))
    assert first.value_s == second.value_s
    assert (first.plan.routes == second.plan.routes).all()
    assert first.plan.stages == second.plan.stages
    result = estimate(problem, first.plan)
    assert np.isclose(sum(result.terms.values()), result.step_s)
    assert np.isclose(result.step_s, first.value_s)
    assert result.step_s >= lower_bound(CostTables(problem)).seconds * (1 - 1e-9)
    assert violations(problem, first.plan) == []


def test_groups_cover_no_more_than_the_cluster_and_seed_the_search():
    """Ants give every stage devices; a plan from the groups is at least as good as the fluid search without them."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 2, 2)], [("t4", 4, 1)], [("t4", 2, 1)]]),
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
    )
    groups, _ = find_groups(problem, np.random.default_rng(0), stages=3, effort=FAST)
    assert groups.stages == 3
    assert (groups.allocation.sum(axis=0) <= [4, 4, 2]).all()
    found = find_plan(problem, np.random.default_rng(0), groups=groups, effort=FAST)
    assert violations(problem, found.plan) == []


def test_model_too_large_says_by_how_much():
    """No plan, and the reason has the missing bytes: more than the weights, in two bytes each, are over the device."""
    problem = Problem(
        cluster=cluster_of([[("t4", 1, 1)]]),
        model=small_gpt(blocks=96, hidden_size=8192, heads=64, kv_heads=64, head_dim=128, ffn_size=32768),
        batch=Batch(global_batch=8, seq_len=512),
    )
    found = find_plan(problem, np.random.default_rng(0), effort=FAST)
    assert found.plan is None
    least = problem.model.parameters * 2 - problem.cluster.pools[0].device.memory_bytes
    assert found.reason.kind == "reason.too_large" and found.reason["lacking_bytes"] > least


def test_regions_without_links_are_not_joined():
    """Two regions without a link: the plan stays in one."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 2, 1)], [("a100-40gb", 2, 1)]], bytes_per_s=0.0),
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
    )
    plan = find_plan(problem, np.random.default_rng(0), effort=FAST).plan
    assert len({problem.cluster.pools[w.pool].region for stage in plan.stages for w in stage.workers}) == 1


def test_an_interrupted_search_keeps_a_plan_that_can_be_run():
    """Ctrl-C at the first sign of life: a plan, and that it may not be the best."""

    def interrupt(phase, part, best):
        raise KeyboardInterrupt

    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 2, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))
    found = find_plan(problem, np.random.default_rng(0), effort=FAST, tell=interrupt)
    assert found.interrupted
    assert violations(problem, found.plan) == []


def test_whoever_stops_late_does_not_wait_for_small_changes():
    """Once the exact race has begun, nothing more is tried after an interrupt, and the plan so far is kept."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 2, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))
    parts = []

    def interrupt_at(count):
        def tell(phase, part, best):
            if phase.kind == "phase.exact":
                parts.append(part)
            if len(parts) == count:
                raise KeyboardInterrupt

        parts.clear()
        return find_plan(problem, np.random.default_rng(0), effort=FAST, tell=tell), len(parts)

    _, whole = interrupt_at(math.inf)
    assert whole > 3
    for count in (1, whole // 2, whole):
        found, told = interrupt_at(count)
        assert found.interrupted and told == count
        assert violations(problem, found.plan) == []


def test_no_small_change_of_a_long_pipeline_helps_once_a_search_has_ended():
    """Fourteen stages have more changes than a quick search may polish by: the plan was 1.1 % above one of them."""
    t4 = cluster_of([[("t4", 6, 4)]], latency_s=0.001)
    problem = Problem(cluster=t4, model=catalogue.model("gpt3-6.7b"), batch=Batch(global_batch=16, seq_len=1024))
    tables = CostTables(problem)
    found = find_plan(problem, np.random.default_rng(0), effort=QUICK, tables=tables)
    drafts = list(changes(found.plan, tables))
    assert len(drafts) > QUICK.polish_evaluations
    changed = [plan for draft in drafts if (plan := fitted(draft, tables, found.value_s)) is not None]
    assert all(step_times(plan, tables).step_s > 0.9998 * found.value_s for plan in changed)


def test_forbidden_region_is_left_out():
    """Constraints hold in the found plan; forbidding everything leaves nothing."""
    cluster = cluster_of([[("a100-40gb", 2, 1)], [("a100-40gb", 2, 1)]])
    for forbidden in (("r0",), ("r0", "r1")):
        problem = Problem(
            cluster=cluster,
            model=small_gpt(),
            batch=Batch(global_batch=32, seq_len=512),
            constraints=Constraints(forbidden_regions=forbidden),
        )
        found = find_plan(problem, np.random.default_rng(0), effort=FAST)
        if len(forbidden) == 2:
            assert found.plan is None
        else:
            assert violations(problem, found.plan) == []
            assert all(problem.cluster.pools[w.pool].region == 1 for stage in found.plan.stages for w in stage.workers)


@settings(max_examples=cases(15), deadline=None)
@given(problem=problems(), factor=st.floats(1.0, 50.0), seed=st.integers(0, 5))
def test_faster_links_never_slow_a_plan(problem, factor, seed):
    """The same plan on a cluster whose links are faster takes no longer (without queues that overtake: latency too)."""
    from dataclasses import replace

    decoder = Decoder(problem)
    plan = decoder.decode(Candidates(decoder, 3).random(np.random.default_rng(seed)))
    if isinstance(plan, Infeasible):
        return
    cluster = problem.cluster
    faster = replace(cluster, bytes_per_s=cluster.bytes_per_s * factor)
    better = step_times(plan, CostTables(replace(problem, cluster=faster))).step_s
    assert better <= step_times(plan, CostTables(problem)).step_s * (1 + 1e-9)


@pytest.mark.parametrize("change", ["device", "layer", "route", "span", "micro_batch", "link"])
def test_checker_finds_what_is_broken(change):
    """Each kind of damage to a good plan is reported."""
    from dataclasses import replace

    from polygon.domain.plan import LinkUse

    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 2, 1)], [("a100-40gb", 2, 1)]], bytes_per_s=1e10),
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
    )
    plan = find_plan(problem, np.random.default_rng(0), effort=FAST).plan
    assert violations(problem, plan) == []
    stage = plan.stages[0]
    broken = {
        "device": lambda: replace(
            plan,
            stages=(
                replace(stage, workers=(replace(stage.workers[0], devices=(99,)), *stage.workers[1:])),
                *plan.stages[1:],
            ),
        ),
        "layer": lambda: replace(plan, stages=(replace(stage, last_layer=stage.last_layer - 1), *plan.stages[1:])),
        "route": lambda: replace(plan, routes=plan.routes + 7),
        "span": lambda: replace(plan, spans=((0,) * stage.width, *plan.spans[1:])),
        "micro_batch": lambda: replace(plan, micro_batch_size=plan.micro_batch_size * 2),
        "link": lambda: replace(plan, links=(LinkUse(source=0, target=1, activations="int4"),)),
    }[change]()
    assert violations(problem, broken)


@pytest.mark.parametrize("objective", [STEP_TIME, MONEY])
def test_more_rounds_are_never_worse_and_begin_with_the_same(objective):
    """The best of N searches is the best of the first N: three are no worse than one, and end where it is enough."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 2, 2)], [("v100-16gb", 1, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))

    def search(**fields):
        effort = replace(FAST, fluid_evaluations=60, exact_evaluations=4, **fields)
        return find_within_limits(problem, 7, objective=objective, effort=effort)

    one, three = (search(rounds=rounds) for rounds in (1, 3))
    assert one.value_s >= three.value_s
    assert three.evaluations > one.evaluations
    assert search(rounds=3, enough=one.value_s).evaluations == one.evaluations
    assert search(rounds=3, time_limit_s=1e-9).plan is not None


def test_an_interrupt_in_a_later_round_keeps_the_best_so_far():
    """Rounds before the interrupt count."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 2, 2)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))

    def interrupt(phase, part, best):
        if phase["round"] == 2:
            raise KeyboardInterrupt

    found = find_within_limits(problem, 0, effort=replace(FAST, rounds=3), tell=interrupt)
    assert found.interrupted
    assert found.value_s <= find_within_limits(problem, 0, effort=FAST).value_s


def test_a_time_limit_of_nothing_still_gives_a_plan():
    """However little time there is: what was met first is returned, not a claim that nothing fits."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 2, 2)], [("t4", 4, 1)]]),
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
    )
    found = find_plan(problem, np.random.default_rng(0), effort=Effort(time_limit_s=1e-6))
    assert found.plan is not None
    assert violations(problem, found.plan) == []


@settings(max_examples=cases(2), deadline=None)
@given(problem=problems())
def test_what_may_be_packed_more_tightly_is_never_slower_for_it(problem):
    """Levels of parity above the default one: each search is no worse than the one before."""
    values = []
    for level in PARITY_LEVELS[PARITY_LEVELS.index(Constraints().parity) :]:
        other = replace(problem, constraints=Constraints(parity=level))
        values.append(find_plan(other, np.random.default_rng(3), effort=FAST).value_s)
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("seed", [5, 13])
def test_local_steps_that_may_be_taken_are_never_slower(seed):
    """Problems where small changes of the plan without them bring what the search with them did not find."""
    problem, _ = larger_problems(seed)
    may = replace(problem, constraints=replace(problem.constraints, local_steps=(1, 10, 30, 100)))
    plain, other = (find_plan(each, np.random.default_rng(0), effort=FAST).value_s for each in (problem, may))
    assert other <= plain * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_a_region_more_is_not_slower_for_pipelines_that_the_fluid_value_misjudges(seed):
    """The best in one region is looked for and simulated, though fluid values of many pipelines over both are less."""
    effort = Effort(fluid_evaluations=6_000, exact_evaluations=40, polish_evaluations=80, patience=2_400)
    problem, larger = larger_problems(14)
    plain, other = (
        find_plan(each, np.random.default_rng(seed), effort=effort).value_s for each in (problem, larger["region"])
    )
    assert other <= plain * (1 + 1e-9)


def test_a_region_more_is_not_slower_for_searches_that_are_led_away():
    """A short search in what the best plans met leave out finds what one over all four regions ends 10 % above."""
    problem, larger = larger_problems(7)
    plain, other = (
        find_plan(each, np.random.default_rng(0), effort=LONGER).value_s for each in (problem, larger["region"])
    )
    assert other <= plain * (1 + 1e-9)


@pytest.mark.parametrize("many", [engine.MANY_REGIONS, 1])
def test_searches_in_parts_keep_to_their_regions_and_are_plans_of_the_whole(monkeypatch, many):
    """Their allocations, in the classes of all regions, are worth what they were there; no set has all regions. So too
    where they begin with what was met there."""
    monkeypatch.setattr(engine, "MANY_REGIONS", many)
    problem = larger_problems(7)[1]["region"]
    met = []
    in_parts = engine._in_parts

    def watched(decoder, candidates, exact, *args):
        parts, known = engine._likely_parts(exact, args[0]), len(exact.bills)
        found, interrupted = in_parts(decoder, candidates, exact, *args)
        met.append((decoder, parts, exact, exact.bills[known:], found))
        return found, interrupted

    monkeypatch.setattr(engine, "_in_parts", watched)
    find_plan(problem, np.random.default_rng(0), effort=LONGER)
    ((decoder, parts, exact, bills, found),) = met
    assert 1 <= len(parts) <= engine.PARTS and len(found) == len(parts)
    assert all(len(part) <= 3 for part in parts)  # of four regions
    assert {exact.regions_of(x) for _, x in bills} <= {
        regions for part in parts for n in range(1, 4) for regions in itertools.combinations(part, n)
    }
    for (outcome, draft), part in zip(found, parts, strict=True):
        value, plan, x = draft
        assert {problem.cluster.pools[w.pool].region for stage in plan.stages for w in stage.workers} <= set(part)
        assert value == pytest.approx(estimate(problem, plan).step_s, rel=1e-9)
        assert decoder.bill(decoder.decode(x)).step_s == pytest.approx(outcome.bills[0][0].step_s, rel=0.02)


def test_many_cycles_begin_by_themselves_and_end_in_the_best_regions(monkeypatch):
    """Four: three from the starts, of which the second knows nothing of the first and begins from unlike ones, one from
    what all met; after three or more short ones in sets of regions and on sets of device types, which are not all.
    Fewer go on from each other, and end in sets of device types alone."""
    monkeypatch.setattr(engine, "CYCLE", 600)
    monkeypatch.setattr(engine, "NARROW", 60)
    problem, made = larger_problems(7)[1]["region"], []
    solve = Genetic.solve

    def watched(self, candidates, rng, stop, *, start, callback):
        made.append((candidates, [x.key for x in start], {x.key for x in candidates.different}))
        return solve(self, candidates, rng, stop, start=start, callback=callback)

    monkeypatch.setattr(Genetic, "solve", watched)
    for cycles, own in ((2, 1), (3, 1), (4, 4)):
        made.clear()
        decoder = Decoder(problem)
        effort = Effort(fluid_evaluations=cycles * 600)
        begun, candidates = engine._begin_once(decoder, None, [], effort, Clock(math.inf), None)
        met, interrupted, _ = engine._explore(
            candidates, np.random.default_rng(0), effort, begun, Clock(math.inf), None
        )
        short, each = (2 * engine.NARROWED, 60) if cycles > 2 else (engine.NARROWED, 100)
        most = cycles * 600 + short * each
        assert not interrupted and 0.8 * most < met <= most + 50
        whole = [entry for entry in made if entry[0].space is candidates.space]
        assert len(whole) == cycles and len({id(entry[0]) for entry in whole}) == own
        assert whole[-1][0] is candidates
        narrow = made[cycles:]
        assert len(narrow) == short
        for place, (of, _, _) in enumerate(narrow):
            regions = short > engine.NARROWED > place
            kind = candidates.region_of_class if regions else candidates.type_of_class
            used = {part for x in of.different for part in used_of(x, kind)}
            assert used and leaves_out(tuple(used), kind, 0.75 if regions else 1.0)
    (first, _, _), (second, starts, before), _, (_, _, joined) = made[:4]
    ends = [{x.key for x in of.different} for of in (first, second)]
    assert ends[0] - before and ends[1] - ends[0]  # what the first met is not where the second began
    assert starts != [x.key for x in second.different[: engine.RACERS]]
    assert joined & (ends[0] - before)


def test_starts_are_valued_once_for_searches_of_unlike_effort(monkeypatch):
    """Only how many uniform splits are priced depends on it; each search goes on from starts of its own."""
    valued = []
    monkeypatch.setattr(engine, "_begin", lambda *a: valued.append(0) or begin(*a))
    problem = Problem(
        cluster=cluster_of([[(TYPES[0], 2, 4)]]), model=small_gpt(), batch=Batch(global_batch=32, seq_len=512)
    )
    decoder = Decoder(problem)
    found = [engine._begin_once(decoder, None, [], x, Clock(math.inf), None) for x in (FAST, LONGER, FAST)]
    assert len(valued) == 1
    for (begun, candidates), effort in zip(found, (FAST, LONGER, FAST), strict=True):
        alone, own = engine._begin_once(Decoder(problem), None, [], effort, Clock(math.inf), None)
        assert [value for value, _, _ in begun.uniform] == [value for value, _, _ in alone.uniform] != []
        assert [x.key for x in candidates.elite] == [x.key for x in own.elite]
    assert found[0][1] is not found[2][1]
    engine._begin_once(decoder, None, [], replace(FAST, time_limit_s=60), Clock(60), None)
    assert len(valued) == 1 + 3


def test_whoever_stops_a_search_in_parts_keeps_the_plan_so_far():
    """Before the first of them, and before the next."""
    problem, told = larger_problems(7)[1]["region"], []

    def tell(phase, part, best):
        if phase.kind == "phase.in_parts":
            told.append(best)
            if len(told) == stop:
                raise KeyboardInterrupt

    for stop in (1, 2):
        told.clear()
        found = find_plan(problem, np.random.default_rng(0), effort=LONGER, tell=tell)
        assert found.interrupted and len(told) == stop
        assert found.value_s <= told[-1] * (1 + 1e-9)
        assert violations(problem, found.plan) == []


def test_gentler_levels_are_searched_with_the_same_measurements(monkeypatch):
    """Profiles decide which degrees a worker may have, so a search without them would speak of other workers."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 2, 4)], [("t4", 1, 4)]]),
        model=small_gpt(),
        batch=Batch(global_batch=8, seq_len=512),
        constraints=Constraints(parity="any"),
    )
    tables = CostTables(problem, calibration=Calibration(compute={"t4": 3.0}))
    seen = []
    plain = engine.Decoder

    def decoder(*args, **kwargs):
        made = plain(*args, **kwargs)
        if not made.problem.constraints.forbidden_regions:  # no search in parts
            seen.append((made.problem.constraints.parity, made.tables.calibration))
        return made

    monkeypatch.setattr(engine, "Decoder", decoder)
    find_plan(problem, np.random.default_rng(0), effort=FAST, tables=tables)
    assert seen == [(level, tables.calibration) for level in ("safe", "known", "any")]


@pytest.mark.parametrize(
    ("blocks", "nodes", "asked", "most"),
    [(62, 8, None, 32), (62, 8, 40, 32), (62, 8, 3, 3), (62, 1, None, 8), (4, 8, None, 6)],
)
def test_stages_are_no_more_than_layers_devices_what_is_asked_and_32(blocks, nodes, asked, most):
    """Whichever is least."""
    cluster = cluster_of([[("t4", nodes, 8)]], latency_s=0.0, bytes_per_s=1e9)
    batch, model = Batch(global_batch=8, seq_len=128), small_gpt(blocks=blocks)
    constraints = Constraints() if asked is None else Constraints(most_stages=asked)
    assert most_stages(Problem(cluster=cluster, model=model, batch=batch, constraints=constraints)) == most


def test_groups_begin_with_all_their_devices_at_every_degree():
    """A stage of seven of eight T4 and one of three A100: alone, in pairs and one left over, in fours and the rest."""
    problem = Problem(
        cluster=cluster_of([[("t4", 1, 8)], [("a100-40gb", 1, 4)]]),
        model=small_gpt(),
        batch=Batch(global_batch=16, seq_len=512),
    )
    decoder = Decoder(problem)
    candidates = Candidates(decoder, 2)
    groups = Groups(problem=problem, allocation=np.array([[7, 0], [0, 3]]))
    starts = list(itertools.islice(engine._starts(decoder, candidates, groups, ()), 4 * len(candidates.sizes)))
    workers = {tuple(tuple(row) for row in x.workers.tolist()) for x in starts}
    classes = decoder.classes
    assert {tp for _, tp in classes} == {1, 2, 4, 8}

    def stages(first, second):
        return tuple(
            tuple({p: of}.get(pool, {}).get(tp, 0) for pool, tp in classes) for p, of in enumerate((first, second))
        )

    assert workers == {
        stages({1: 7}, {1: 3}),
        stages({1: 1, 2: 3}, {1: 1, 2: 1}),
        stages({1: 1, 2: 1, 4: 1}, {1: 1, 2: 1}),
    }


def test_the_evaluations_of_a_race_are_its_starts_and_laps():
    """Sixteen racers are halved four times, each time after laps that all of them together take as long for, and the
    last one goes on by itself; too few evaluations for two make no race."""
    racing, taken, patience = engine._race(16 + 16 * 60 * 5, 7)
    assert (racing.racers, racing.lap, racing.memory) == (16, 60, 7) and taken == patience == 16 + 16 * 60 * 5
    racing, taken, _ = engine._race(16 + 16 * 60 * 5 - 1, 0)
    assert (racing.racers, racing.lap, racing.memory) == (16, 59, 0) and taken == 16 + 16 * 59 * 5
    shortest = 2 * (1 + 2 * engine.SHORTEST_LAP)
    assert engine._race(shortest, 0)[1] == shortest and engine._race(shortest - 1, 0)[1] == 0


@pytest.mark.parametrize("listed", (0, 200))
@pytest.mark.parametrize("evaluations", (1, 40, 200, 3300, 4000, 12_900, 19_999, 24_000))
def test_races_take_no_more_than_their_parts(evaluations, listed, monkeypatch):
    """Few evaluations make laps short before they make starts few; descents again and again get half of all, or of more
    classes than are `listed` a second race, which accepts late. Many evaluations go through both several times, and
    then some are left for descents, which may need fewer."""
    asked = []

    def noted(kind):
        class Noted(kind):
            def solve(self, problem, rng, stop, **more):
                before = problem.evaluations
                found = super().solve(problem, rng, stop, **more)
                asked.append((getattr(self, "memory", "iterated"), problem.evaluations - before))
                return found

        return Noted

    class Counted(Candidates):
        evaluations = 0

        def evaluate(self, x):
            self.evaluations += 1
            return super().evaluate(x)

    for kind in (engine.Racing, engine.Iterated):
        monkeypatch.setattr(engine, kind.__name__, noted(kind))
    monkeypatch.setattr(engine, "NARROWED", 0)
    monkeypatch.setattr(engine, "MOST_LISTED", listed)
    monkeypatch.setattr(engine, "_settle", lambda *_: 0)
    cluster = cluster_of([[("a100-40gb", 2, 4), ("t4", 2, 4)], [("v100-16gb", 2, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    decoder = Decoder(problem)
    candidates = Counted(decoder, 4)
    effort = Effort(fluid_evaluations=evaluations, patience=evaluations)
    clock = Clock()
    begun = engine._begin(decoder, candidates, None, [], clock)
    taken, *_ = engine._explore(candidates, np.random.default_rng(0), effort, begun, clock, None)
    cycles = {19_999: 2, 24_000: 3}.get(evaluations, 1)
    each = evaluations // cycles
    descents = each // 5 if each >= 8000 else 0
    assert 0 <= evaluations - taken < cycles * (1 + descents)
    each -= descents
    half = each // 2 if listed or each >= 100 else 0
    first = [spent for memory, spent in asked if memory == 0]
    assert sum(first) <= engine.RACE * (taken - cycles * half) and len(first) == (cycles if each >= 340 else 0)
    second = "iterated" if listed else engine.LATE
    assert [spent for memory, spent in asked if memory == second] == ([half] * cycles if half else [])
    assert {memory for memory, _ in asked} <= {0, second}


def test_searches_that_begin_alike_begin_once(monkeypatch):
    """By another seed from the same start, and to the same end as if it had begun by itself; not where time ends it."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 1, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    tables, begun = CostTables(problem), []
    plain = engine._begin

    def begin(decoder, *args):
        if decoder.problem == problem:  # no search in parts
            begun.append(args)
        return plain(decoder, *args)

    monkeypatch.setattr(engine, "_begin", begin)

    def ended(seed, tables, **changes):
        found = find_plan(problem, np.random.default_rng(seed), effort=replace(FAST, **changes), tables=tables)
        return found.value_s, found.evaluations, [bill.step_s for bill, _ in found.bills]

    first, second = (ended(seed, tables) for seed in (0, 1))
    assert len(begun) == 1
    assert (first, second) == (ended(0, CostTables(problem)), ended(1, CostTables(problem)))
    assert len(begun) == 3
    limited = CostTables(problem)
    ended(0, limited, time_limit_s=60.0)
    ended(0, limited, time_limit_s=60.0)
    ended(0, tables, fluid_evaluations=FAST.fluid_evaluations + 1)
    assert len(begun) == 5


@pytest.mark.parametrize(("far_in_a_row", "looked_at"), [(engine.MOST_IN_VAIN - 1, True), (engine.MOST_IN_VAIN, False)])
def test_starts_much_slower_than_the_best_are_not_looked_at_further(far_in_a_row, looked_at):
    """In other micro-batch sizes no more, and after so many in a row no others, whatever is impossible between them."""
    values = {1: 1.0, 2: engine.FARTHEST + 0.01, 3: math.inf, 4: engine.FARTHEST}
    met = []

    class Told(Candidates):
        def evaluate_degrees(self, x, degrees):
            met.append((int(x.workers[0, 0]), x.micro_batch_size))
            return values[met[-1][0] % 10], x

    cluster = cluster_of([[("a100-40gb", 1, 4), ("t4", 1, 4)]])
    decoder = Decoder(Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512)))
    candidates, clock = Told(decoder, 4), Clock()

    def start(kind, size=1):
        workers = np.zeros((4, len(decoder.classes)), dtype=np.int64)
        workers[0, 0] = kind
        return Allocation(workers=workers, micro_batch_size=size)

    starts = [start(1), start(2), start(2, size=2), start(3), start(3, size=2), start(4), start(4, size=2)]
    starts += [start(10 * i + 2) for i in range(1, far_in_a_row + 1)] + [start(13), start(21)]
    begun = engine._begin(decoder, candidates, None, [], clock, begins_with=starts)
    first = [(1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2)]
    again = [(10 * i + 2, 1) for i in range(1, far_in_a_row + 1)]
    assert met == first + again + ([(13, 1), (21, 1)] if looked_at else [])
    assert begun.looked_at == len(met)


def test_of_many_classes_of_workers_fewer_allocations_are_looked_at(monkeypatch):
    """A hundred, those on either type alone among them, in place of three hundred and these; beside the starts and what
    is simulated."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("t4", 1, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    effort = replace(FAST, patience=FAST.fluid_evaluations)
    monkeypatch.setattr(engine, "PARTS", 0)
    all_of_them = find_plan(problem, np.random.default_rng(0), effort=effort).evaluations
    monkeypatch.setattr(engine, "MOST_CELLS", 100 * len(Decoder(problem).classes))
    fewer = all_of_them - find_plan(problem, np.random.default_rng(0), effort=effort).evaluations
    both = 300 + engine.NARROWED * (300 // engine.FEWER)
    assert both - 100 <= fewer <= both - 98  # parts are whole numbers


def test_of_very_many_classes_the_best_is_taken_to_other_degrees_and_pools():
    """From two T4 of eight that share a worker to A100 in workers of one: nothing near in these things is better."""
    cluster = cluster_of([[("a100-40gb", 1, 4), ("t4", 2, 4), ("v100-16gb", 1, 4)]])
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=16, seq_len=512))
    candidates = Candidates(Decoder(problem), 2)
    workers = np.zeros((2, candidates.space.classes), dtype=np.int64)
    workers[0, candidates.decoder.classes.index((1, 2))] = 1
    start = Allocation(workers=workers, micro_batch_size=1)
    first = candidates.evaluate(start)
    assert engine._settle(candidates.copy(), 7, Clock()) == 7
    valued = engine._settle(candidates, 1000, Clock())
    best = candidates.elite[0]
    least = candidates.decoder.value(best)
    assert valued > 20 and least < first / 2
    assert set(candidates.space.pool[best.workers.any(axis=0)]) == {0}
    assert least <= min(map(candidates.decoder.value, candidates.scaled(best)))


def test_few_devices_are_looked_at_until_nothing_is_new():
    """Two devices have few allocations: a search of them ends early, and with the best that a whole one meets."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 1, 1)], [("t4", 1, 1)]]),
        model=small_gpt(),
        batch=Batch(global_batch=4, seq_len=512),
    )
    effort, found = Effort(fluid_evaluations=8_000, patience=8_000), []
    for most in (2_000, math.inf):
        decoder = Decoder(problem)
        candidates = Candidates(decoder, most_stages(problem))
        begun = engine._begin(decoder, candidates, None, [], Clock())
        candidates.old_in_a_row = 10_000  # starts that were alike are none of it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "NothingNew", partial(NothingNew, most=most))
            taken, *_ = engine._explore(candidates, np.random.default_rng(0), effort, begun, Clock(), None)
        found.append((taken, decoder.value(candidates.elite[0])))
    assert found[0][1] == found[1][1] < math.inf
    assert 2_000 <= found[0][0] < found[1][0] / 2


@pytest.mark.parametrize(("evaluations", "more"), [(2_000, 1.0), (20_000, 1.4)])
def test_whole_searches_of_many_classes_evaluate_more(evaluations, more, monkeypatch):
    """Seven pools of four degrees are 28 classes, 1.4 times as many as usual; short searches stay short."""
    nodes = [("a100-40gb", 1, 8), ("t4", 1, 8), ("v100-16gb", 1, 8)]
    cluster = cluster_of([nodes, nodes, [("a100-40gb", 1, 8)]])
    problem, asked = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512)), []

    def explore(candidates, rng, effort, *others):
        asked.append((candidates.space.classes, effort.fluid_evaluations))
        raise InterruptedError

    monkeypatch.setattr(engine, "_explore", explore)
    with pytest.raises(InterruptedError):
        find_plan(problem, np.random.default_rng(0), effort=Effort(fluid_evaluations=evaluations))
    assert asked == [(28, more * evaluations)]
