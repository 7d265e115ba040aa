"""Plans whose steps are nearly as short: the surest, and the simplest."""

from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning import robust
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.objectives import MONEY, STEP_TIME
from polygon.planning.robust import options, simpler, surest
from tests.linked_regions import cluster_of, small_gpt


@pytest.fixture(scope="module")
def met():
    """A problem of two equal regions, and bills of allocations: both as a pipeline, one in two stages and in one."""
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 2, 1)]] * 2), model=small_gpt(), batch=Batch(global_batch=8, seq_len=512)
    )
    tables = CostTables(problem)
    decoder = Decoder(problem, tables=tables)
    rows = {"two regions": [[2, 0], [0, 2]], "two stages": [[1, 0], [1, 0]], "one": [[2, 0], [0, 0]]}
    found = {name: Allocation(workers=np.array(row), micro_batch_size=1) for name, row in rows.items()}
    plans = {name: decoder.decode(x) for name, x in found.items()}
    bills = [(decoder.bill(plans[name]), x) for name, x in found.items()]
    return problem, tables, plans, bills


def test_parts_are_regions_stages_and_ways(met):
    """A pipeline over two regions uses the way there and the way back."""
    problem, tables, _, bills = met
    found = {option.parts: option.estimate.step_s for option in options(problem, bills, tables, most=float("inf"))}
    assert set(found) == {(2, 2, 2), (1, 2, 0), (1, 1, 0)}
    assert list(found.values()) == sorted(found.values())


def test_options_are_no_longer_than_said_and_not_too_many(met, monkeypatch):
    """The border included; the quickest are priced."""
    problem, tables, _, bills = met
    steps = sorted(bill.step_s for bill, _ in bills)
    assert len(options(problem, bills, tables, most=steps[1])) == 2
    assert not options(problem, bills, tables, most=steps[0] * 0.999)
    monkeypatch.setattr(robust, "MOST_PRICED", 1)
    [only] = options(problem, bills, tables, most=steps[2])
    assert only.estimate.step_s == pytest.approx(steps[0], rel=0.05)


def test_options_keep_the_limits_of_cost(met):
    """What was met above a budget is not taken: the quickest plan is on twice as many devices."""
    problem, tables, plans, bills = met
    dearest, cheapest = (choose(bills, key=lambda pair: pair[0].usd_per_hour)[0] for choose in (max, min))
    assert cheapest.usd_per_hour < dearest.usd_per_hour
    limits = replace(problem.constraints, most_usd_per_hour=cheapest.usd_per_hour)
    limited = replace(problem, constraints=limits)
    own = tables.for_problem(limited)
    found = options(limited, bills, own, most=float("inf"))
    assert 0 < len(found) < len(bills)
    assert not any(violations(limited, option.plan, own) for option in found)
    chosen = [surest(limited, plans["one"], bills, own), simpler(limited, plans["two stages"], bills, own)]
    assert not any(option and violations(limited, option.plan, own) for option in chosen)


def test_what_is_simpler_takes_hardly_longer(met, monkeypatch):
    """Within a part of the plan's own step, fewest parts first; none where the plan is the simplest itself."""
    problem, tables, plans, bills = met
    own = plans["two regions"]
    steps = {name: robust.estimate(problem, plan, tables).step_s for name, plan in plans.items()}
    monkeypatch.setattr(robust, "NEARLY", 1e3)
    assert simpler(problem, own, bills, tables).parts == (1, 1, 0)
    assert simpler(problem, plans["one"], bills, tables) is None
    monkeypatch.setattr(robust, "NEARLY", 0.0)
    quickest = min(steps, key=steps.get)
    assert simpler(problem, plans[quickest], bills, tables) is None
    longest = max(steps, key=steps.get)
    if longest != "one":
        monkeypatch.setattr(robust, "NEARLY", 1e-9)
        assert simpler(problem, plans[longest], bills, tables).parts < robust.Option(
            plan=plans[longest], estimate=robust.estimate(problem, plans[longest], tables)
        ).parts  # fmt: skip


def single(problem, tables):
    """One device, and what it costs: longer than two stages, and cheaper."""
    decoder, x = Decoder(problem, tables=tables), Allocation(workers=np.array([[1, 0], [0, 0]]), micro_batch_size=1)
    return decoder.bill(decoder.decode(x)), x


def test_what_is_simpler_is_held_against_what_the_plan_was_made_for(met):
    """One device in place of two stages costs no more, and takes longer."""
    problem, tables, plans, _ = met
    own, one = plans["two stages"], single(problem, tables)
    before = Decoder(problem, tables=tables).bill(own)
    assert one[0].step_s > 1.1 * before.step_s and one[0].usd < before.usd
    assert simpler(problem, own, [one], tables, STEP_TIME) is None
    assert simpler(problem, own, [one], tables, MONEY).parts == (1, 1, 0)


def test_a_plan_that_is_decoded_anew_must_be_as_good_as_what_was_met(met):
    """Search and decoding again may differ: what counts is the plan that is offered."""
    problem, tables, plans, _ = met
    own, (bill, one) = plans["two stages"], single(problem, tables)
    flattering = [(replace(bill, step_s=0.5 * Decoder(problem, tables=tables).bill(own).step_s), one)]
    assert simpler(problem, own, flattering, tables) is None


def test_the_surest_ends_first(met, monkeypatch):
    """Of those whose intervals end nearly together the one with fewest parts."""
    problem, tables, plans, bills = met
    ends = {name: robust.estimate(problem, plan, tables).high_s for name, plan in plans.items()}
    steps = {name: bill.step_s for name, (bill, _) in zip(plans, bills, strict=True)}
    monkeypatch.setattr(robust, "NEARLY", 0.0)
    for name, plan in plans.items():
        may = [other for other in plans if steps[other] <= ends[name]]
        assert surest(problem, plan, bills, tables).estimate.high_s == pytest.approx(min(ends[other] for other in may))
    slowest = max(plans, key=lambda name: ends[name])
    monkeypatch.setattr(robust, "NEARLY", 1e3)
    assert surest(problem, plans[slowest], bills, tables).parts == (1, 1, 0)
    assert surest(problem, plans["one"], [], tables).plan is plans["one"]
