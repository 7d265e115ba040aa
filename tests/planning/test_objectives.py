"""Money, energy, limits and rules: what they must never do to a plan."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.cost.estimate import estimate
from polygon.cost.money import excesses, whole_run
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Link
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Plan, Problem, StageRule
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.frontier import find_front, find_within_limits
from polygon.planning.objectives import MONEY, OBJECTIVES, STEP_TIME, objective_named
from polygon.planning.polish import polished
from polygon.planning.search_engine import Effort, find_groups, find_plan
from tests.linked_regions import TYPES, cluster_of, small_gpt
from tests.nightly import cases

SHORT = Effort(fluid_evaluations=160, exact_evaluations=10, patience=80)
FEW = Effort(fluid_evaluations=40, exact_evaluations=4, patience=20)
"""Where any plan will do, or none is found however long one looks."""


def problem_of(groups, constraints=None, **links):
    return Problem(
        cluster=cluster_of(groups, **({"latency_s": 0.01, "bytes_per_s": 1e9, "egress_usd_per_gb": 0.05} | links)),
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
        constraints=constraints or Constraints(),
    )


THREE = ([("a100-40gb", 1, 2)], [("t4", 2, 2)], [("v100-16gb", 2, 1)])


@st.composite
def problems(draw, prices=(0.0, 0.09)):
    members = st.tuples(st.sampled_from(TYPES), st.integers(1, 2), st.sampled_from([1, 2]))
    groups = draw(st.lists(st.lists(members, min_size=1, max_size=2), min_size=1, max_size=3))
    return problem_of(
        groups,
        bytes_per_s=draw(st.sampled_from([1e8, 1e9, 1e10])),
        egress_usd_per_gb=draw(st.sampled_from(prices)),
    )


def regions_of(problem, plan, stage):
    return {problem.cluster.regions[problem.cluster.pools[w.pool].region].name for w in plan.stages[stage].workers}


@settings(max_examples=cases(5), deadline=None)
@given(problem=problems(), with_energy=st.booleans())
def test_front_is_not_dominated_and_has_both_ends(problem, with_energy):
    """No point beats another; the first is the fastest, one is the cheapest of all that was simulated; all can run.

    What is heard of on the way are fronts, too, none of which beats the last.
    """
    so_far = []
    front, collection = find_front(problem, 0, with_energy=with_energy, effort=SHORT, met=so_far.append)

    def costs(bill):
        return (bill.step_s, bill.usd, bill.energy_j)[: 3 if with_energy else 2]

    for i, a in enumerate(front):
        for b in front[i + 1 :]:
            assert not all(x <= y for x, y in zip(costs(a.bill), costs(b.bill), strict=True))
            assert not all(x >= y for x, y in zip(costs(a.bill), costs(b.bill), strict=True))
    for k in range(len(costs(front[0].bill))):
        best = min(costs(bill)[k] for bill, _ in collection.bills)
        assert min(costs(point.bill)[k] for point in front) <= best * (1 + 1e-9)
    assert so_far and all(so_far)
    for point in [point for early in so_far for point in early]:
        assert any(
            all(x <= y * (1 + 1e-9) for x, y in zip(costs(a.bill), costs(point.bill), strict=True)) for a in front
        )
    for early in so_far:
        assert [point.bill.step_s for point in early] == sorted(point.bill.step_s for point in early)
    for point in front:
        assert violations(problem, point.plan) == []
        assert np.isclose(estimate(problem, point.plan).cost_usd, point.bill.usd)


@settings(max_examples=cases(5), deadline=None)
@given(problem=problems(), name=st.sampled_from(["money", "energy", "tokens-per-usd"]))
def test_another_objective_is_no_worse_by_itself_than_the_fastest_plan(problem, name):
    """The cheapest plan costs no more than the fastest; so for energy and tokens per dollar."""
    objective = objective_named(name)
    decoder = Decoder(problem, objective=objective)
    fastest = find_within_limits(problem, 1, effort=SHORT)
    best = find_within_limits(problem, 1, objective=objective, effort=SHORT)
    value = decoder.plan_value(fastest.plan)
    assert decoder.plan_value(best.plan) <= value + 1e-9 * abs(value)
    assert violations(problem, best.plan) == []


def test_where_nothing_costs_money_the_fastest_plan_has_most_tokens_for_it():
    """As many as one likes for nothing is no number to search by: the same search as for time, and as long."""
    free = problem_of(THREE, egress_usd_per_gb=0.0)
    regions = [
        replace(region, node_groups=tuple(replace(group, price_usd_per_hour=0.0) for group in region.node_groups))
        for region in free.cluster.regions
    ]
    free = replace(free, cluster=replace(free.cluster, regions=tuple(regions)))
    names = "tokens-per-usd", "time"
    tokens, time = (find_within_limits(free, 0, objective=objective_named(name), effort=SHORT) for name in names)
    assert tokens.plan is not None and 0 < tokens.value_s < 1e-5
    assert tokens.bills[0][0].step_s <= time.bills[0][0].step_s * 1.001
    assert tokens.evaluations <= 2 * time.evaluations


@settings(max_examples=cases(2), deadline=None)
@given(problem=problems(), parts=st.lists(st.floats(0.5, 1.3), min_size=2, max_size=2))
def test_a_budget_gives_the_best_that_was_met_and_a_tighter_one_none_that_is_much_faster(problem, parts):
    """Budgets in parts of what the fastest plan costs; what the fastest keeps changes nothing. Each is searched for by
    itself, so that chance may favour the tighter one, by little."""
    fastest = find_within_limits(problem, 0, effort=SHORT)
    usd = estimate(problem, fastest.plan).cost_usd
    times = []
    for part in sorted(parts):
        limits = replace(problem.constraints, most_usd_per_step=part * usd)
        limited = replace(problem, constraints=limits)
        found = find_within_limits(limited, 0, effort=SHORT)
        if found.plan is None:
            assert [over.kind for over in found.reason["over"]] == ["limit.usd_per_step"]
            times.append(np.inf)
            continue
        assert violations(limited, found.plan) == []
        times.append(estimate(problem, found.plan).step_s)
        if part >= 1:
            assert found.plan.stages == fastest.plan.stages
            assert (found.plan.routes == fastest.plan.routes).all()
        met = [bill.step_s for bill, _ in fastest.bills if not excesses(limited, bill)]
        assert times[-1] <= min(met, default=np.inf) * (1 + 1e-9)
    assert times[0] >= times[1] * 0.95


def test_a_budget_between_the_fastest_and_the_cheapest_is_searched_for():
    """Nine tenths of what the fastest plan costs, on devices of three prices: searches that know no budget met nothing
    there, and what they had met took 1.85 times as long."""
    free = problem_of(([("a100-40gb", 1, 3), ("v100-16gb", 5, 3), ("t4", 7, 1)],))
    free = replace(free, batch=Batch(global_batch=90, seq_len=1024))
    fastest = find_within_limits(free, 0, effort=SHORT)
    usd = estimate(free, fastest.plan).cost_usd
    limited = replace(free, constraints=Constraints(most_usd_per_step=0.9 * usd))
    found = find_within_limits(limited, 0, effort=SHORT)
    assert violations(limited, found.plan) == []
    assert found.value_s < 1.4 * fastest.value_s
    front, _ = find_front(free, 0, effort=SHORT)
    assert any(usd / 2 < point.bill.usd < 0.95 * usd and point.bill.step_s < 1.4 * fastest.value_s for point in front)


def test_limits_that_nothing_keeps_are_a_result_with_a_reason():
    """A deadline below the bound, a budget of a millionth of a dollar."""
    for limit in ("step_s", "usd_per_step", "usd_per_hour"):
        problem = problem_of(THREE, Constraints(**{f"most_{limit}": 1e-6}))
        found = find_within_limits(problem, 0, effort=FEW)
        assert found.plan is None
        (over,) = found.reason["over"]
        assert over.kind == f"limit.{limit}" and over["limit"] == 1e-6 < over["value"]


def test_half_of_what_all_cost_by_the_hour_buys_half_of_the_devices():
    """A budget by the hour that a plan on half of eight equal nodes keeps: the step is about twice as long."""
    free = replace(problem_of(([("a100-40gb", 8, 1)],)), batch=Batch(global_batch=1024, seq_len=512))
    fastest = find_within_limits(free, 0, effort=SHORT)
    assert fastest.plan.world_size == 8
    usd_per_hour = 3600 * estimate(free, fastest.plan).cost_usd / fastest.value_s
    limited = replace(free, constraints=Constraints(most_usd_per_hour=usd_per_hour / 2))
    assert find_within_limits(limited, 0, effort=SHORT).value_s <= 2.1 * fastest.value_s


def test_a_front_under_a_limit_begins_with_the_fastest_that_keeps_it():
    """Seven tenths of what eight devices of a node cost by the hour: searches for time and money alone met one device,
    which takes 5.9 times as long."""
    free = replace(problem_of(([("a100-40gb", 1, 8)],)), batch=Batch(global_batch=1024, seq_len=512))
    fastest = find_within_limits(free, 0, effort=SHORT)
    usd_per_hour = 3600 * estimate(free, fastest.plan).cost_usd / fastest.value_s
    limited = replace(free, constraints=Constraints(most_usd_per_hour=0.7 * usd_per_hour))
    front, _ = find_front(limited, 0, effort=SHORT)
    assert all(not excesses(limited, point.bill) for point in front)
    assert front[0].bill.step_s <= 2.1 * fastest.value_s


def test_polishing_keeps_the_rules_of_local_steps():
    """Regions that train by themselves share no weights, even where that is what is asked for."""
    two = ([("a100-40gb", 1, 2)], [("a100-40gb", 1, 2)])
    problem = problem_of(two, Constraints(local_steps=(1, 10, 100)), bytes_per_s=5e7, latency_s=0.124)
    found = find_within_limits(problem, 0, effort=SHORT)
    assert found.plan.local_steps > 1

    def shared(plan):
        return -float(sum(stage.zero for stage in plan.stages))

    better = polished(found.plan, CostTables(problem), shared, evaluations=200)
    assert shared(better) < shared(found.plan) and violations(problem, better) == []


def test_money_under_a_deadline():
    """The plan keeps the deadline and costs no more than the fastest, which keeps it too."""
    free = problem_of(THREE)
    fastest = estimate(free, find_within_limits(free, 0, effort=SHORT).plan)
    problem = replace(free, constraints=Constraints(most_step_s=1.5 * fastest.step_s))
    found = find_within_limits(problem, 0, objective=MONEY, effort=SHORT)
    result = estimate(problem, found.plan)
    assert result.step_s <= 1.5 * fastest.step_s
    assert result.cost_usd <= fastest.cost_usd * (1 + 1e-9)


@settings(max_examples=cases(25), deadline=None)
@given(problem=problems(prices=(0.05,)), seed=st.integers(0, 50))
def test_fluid_egress_is_near_the_plans(problem, seed):
    """Bytes that leave each region, by flow and by routes: whole micro-batches make the difference.

    Over links that hold nobody up: routes give less to workers behind slow ones, the relaxation does not.
    """
    fast = replace(problem.cluster, bytes_per_s=100 * problem.cluster.bytes_per_s)
    problem = replace(problem, cluster=fast, constraints=Constraints(compressions=("none",)))
    decoder = Decoder(problem, objective=MONEY)
    x = Candidates(decoder, 4).random(np.random.default_rng(seed))
    plan = decoder.decode(x)
    if not isinstance(plan, Plan) or sum(stage.width for stage in plan.stages) < x.workers.sum():
        return
    fluid, exact = decoder.fluid_bill(x), decoder.bill(plan)
    message = x.micro_batch_size * 512 * small_gpt().hidden_size * 2
    workers = sum(stage.width for stage in plan.stages)
    assert (np.abs(fluid.egress_bytes - exact.egress_bytes) <= 4 * workers * message).all()
    assert np.isclose(fluid.usd - fluid.egress_bytes.sum() / 1e9 * problem.cluster.regions[0].egress_usd_per_gb,
                      (exact.usd - exact.egress_bytes.sum() / 1e9 * problem.cluster.regions[0].egress_usd_per_gb)
                      / exact.step_s * fluid.step_s)  # fmt: skip


@settings(max_examples=cases(10), deadline=None)
@given(
    first=st.lists(st.sampled_from(["r0", "r1", "r2"]), max_size=2, unique=True),
    last=st.lists(st.sampled_from(["r0", "r1", "r2"]), max_size=2, unique=True),
    never=st.sampled_from(["r0", "r1", "r2"]),
    most_stages=st.sampled_from([None, 1, 2]),
    forbidden=st.sampled_from([(), ("t4",), ("a100-40gb",)]),
)
def test_rules_hold_in_found_plans(first, last, never, most_stages, forbidden):
    """Whatever is pinned or forbidden: the plan keeps it, or there is none and a reason."""
    constraints = Constraints(
        first_stage_regions=tuple(first),
        last_stage_regions=tuple(last),
        stage_rules=(StageRule(stage=1, never_regions=(never,)),),
        most_stages=most_stages,
        forbidden_devices=forbidden,
    )
    problem = problem_of(THREE, constraints)
    found = find_plan(problem, np.random.default_rng(0), effort=FEW)
    if found.plan is None:
        assert found.reason
        return
    assert violations(problem, found.plan) == []
    assert not first or regions_of(problem, found.plan, 0) <= set(first)
    assert not last or regions_of(problem, found.plan, -1) <= set(last)
    assert len(found.plan.stages) <= (most_stages or 99)


def test_residency_in_two_regions_is_found():
    """Data in r1, loss in r2: a plan exists, and the search finds it."""
    problem = problem_of(THREE, Constraints(first_stage_regions=("r1",), last_stage_regions=("r2",)))
    plan = find_plan(problem, np.random.default_rng(0), effort=SHORT).plan
    assert regions_of(problem, plan, 0) == {"r1"}
    assert regions_of(problem, plan, -1) == {"r2"}


def test_rules_that_leave_no_devices_say_so():
    """First stage in r0, which is forbidden: no plan, and the reason names the rules."""
    problem = problem_of(THREE, Constraints(first_stage_regions=("r0",), forbidden_regions=("r0",)))
    found = find_plan(problem, np.random.default_rng(0), effort=FEW)
    assert found.plan is None
    assert found.reason.kind == "reason.no_devices_by_rules"


@pytest.mark.parametrize("once", [True, False])
def test_a_shared_weight_leaves_regions_as_often_as_it_is_summed(once):
    """Two stages of both regions and a vocabulary that is most of the model: summed once over all, or in each stage and
    then exchanged."""
    cluster = cluster_of([[("a100-40gb", 1, 2)]] * 2, bytes_per_s=1e9, egress_usd_per_gb=0.05)
    batch, limits = Batch(global_batch=8, seq_len=512), Constraints(compressions=("none",))
    problem = Problem(cluster=cluster, model=small_gpt(vocab_size=200_000), batch=batch, constraints=limits)
    problem = replace(problem, runtime=replace(problem.runtime, tied_once=once))
    decoder = Decoder(problem, objective=MONEY)
    workers = np.array([[1 if tp == 1 else 0 for _, tp in decoder.classes]] * 2)
    x = Allocation(workers=workers, micro_batch_size=1)
    fluid, exact = decoder.fluid_bill(x).egress_bytes, decoder.bill(decoder.decode(x)).egress_bytes
    assert fluid == pytest.approx(exact, rel=0.1)
    weights = 4 * problem.model.tied_values * (1 if once else 2)
    assert exact.min() > weights


def test_egress_cap_is_kept_and_a_cap_of_zero_keeps_the_plan_at_home():
    """Nothing may leave: one region; a cap that the free plan keeps changes nothing."""
    free = problem_of((THREE[0], THREE[0]), bytes_per_s=1e11, between=Link(latency_s=5e-5, bytes_per_s=1e11))
    fastest = find_within_limits(free, 0, effort=SHORT).plan
    sent = Decoder(free).bill(fastest).egress_bytes
    assert sent.max() > 0
    home = replace(free, constraints=Constraints(egress_bytes_per_step={"*": 0.0}))
    found = find_within_limits(home, 0, effort=SHORT).plan
    assert violations(home, found) == []
    assert len({w.pool for stage in found.stages for w in stage.workers}) == 1
    assert {v["excess"].kind for v in violations(home, fastest)} == {"limit.egress_bytes"}
    loose = replace(free, constraints=Constraints(egress_bytes_per_step={"*": float(sent.max())}))
    assert find_within_limits(loose, 0, effort=SHORT).plan.stages == fastest.stages


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"forbidden_devices": ("h100",)}, "forbidden_devices: found 'h100'"),
        ({"stage_rules": (StageRule(stage=0, only_regions=("r9",)),)}, r"stage_rules\[0\].only_regions: found 'r9'"),
        ({"egress_bytes_per_step": {"r9": 1.0}}, "egress_bytes_per_step: found 'r9'"),
        (
            {"stage_rules": (StageRule(stage=9),)},
            r"\[0\].stage: found 9, expected a stage from -8 to 7: the model has 8",
        ),
        ({"stage_rules": (StageRule(stage=-9),)}, r"stage_rules\[0\].stage: found -9"),
        ({"most_usd_per_step": 0.0}, "most_usd_per_step: found 0.0, expected a number > 0"),
        ({"most_stages": 0}, "most_stages: found 0"),
    ],
)
def test_constraints_that_make_no_sense_are_refused(constraints, message):
    """Names that the cluster does not have, limits that are no limits."""
    with pytest.raises(InputError, match=message):
        problem_of(THREE, Constraints(**constraints))


def test_whole_run_is_whole_steps():
    """As many steps as the tokens take, rounded up; time, money and energy in proportion."""
    problem = problem_of(THREE)
    bill = Decoder(problem).bill(find_plan(problem, np.random.default_rng(0), effort=FEW).plan)
    run = whole_run(bill, 10.5 * bill.tokens)
    assert run.steps == 11
    assert np.isclose([run.seconds, run.usd, run.energy_j], [11 * bill.step_s, 11 * bill.usd, 11 * bill.energy_j]).all()
    assert excesses(problem, bill) == []


def test_unknown_objective_names_the_known_ones():
    """One line with the nearest name."""
    with pytest.raises(InputError, match="objective: found 'mony', expected 'money'"):
        objective_named("mony")
    assert set(OBJECTIVES) == {"time", "money", "energy", "tokens-per-usd"}


def test_groups_follow_the_objective_and_keep_the_limits():
    """By money the ants' groups cost no more than by time; a deadline holds; one that none can keep is said."""
    problem = problem_of(THREE)

    def bill(**options):
        groups, reason = find_groups(options.pop("of", problem), np.random.default_rng(0), effort=SHORT, **options)
        return groups and groups.objective, reason

    fastest, cheapest = bill(objective=STEP_TIME)[0], bill(objective=MONEY)[0]
    assert cheapest["name"] == "money" and fastest["name"] == "time"
    assert fastest["step_s"] <= cheapest["step_s"]
    between = (fastest["step_s"] + cheapest["step_s"]) / 2
    limited = problem_of(THREE, Constraints(most_step_s=between))
    assert bill(of=limited, objective=MONEY)[0]["step_s"] <= between * (1 + 1e-9)
    nothing, reason = bill(of=problem_of(THREE, Constraints(most_step_s=1e-6)), objective=MONEY)
    assert nothing is None and [over["limit"] for over in reason["over"]] == [1e-6]
