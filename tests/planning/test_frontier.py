"""Searches in rounds and along a front: each has a seed of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from polygon.cost.money import priced
from polygon.domain import clock
from polygon.domain.message import Message, say
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.planning import frontier
from polygon.planning.frontier import Collection, _between, _seed_of, find_front, find_within_limits
from polygon.planning.search_engine import Effort
from tests.linked_regions import cluster_of, small_gpt


def test_the_first_search_is_the_one_with_the_users_seed():
    """So that a search in rounds finds at least what a plain one does; later rounds draw other numbers, each seed's."""
    assert [_seed_of(seed, 0) for seed in (0, 7)] == [0, 7]
    later = [_seed_of(seed, index) for seed in (0, 7) for index in (1, 2, 3)]
    assert len({0, 7, *later}) == 8
    assert later == [_seed_of(seed, index) for seed in (0, 7) for index in (1, 2, 3)]


def test_the_searches_with_and_without_a_budget_share_the_time(monkeypatch):
    """A budget that no plan keeps: the fastest and the cheapest are looked for, and two fifths are left."""
    limits, collect, now_s = [], frontier.collect, [0.0]

    def noting(*args, effort, **more):
        limits.append(effort.time_limit_s)
        now_s[0] += 200
        return collect(*args, effort=effort, **more)

    monkeypatch.setattr(frontier, "collect", noting)
    monkeypatch.setattr(clock, "perf_counter", lambda: now_s[0])
    problem = Problem(
        cluster=cluster_of([[("t4", 1, 2)]]), model=small_gpt(), batch=Batch(global_batch=4, seq_len=128),
        constraints=Constraints(most_usd_per_step=1e-12),
    )  # fmt: skip
    effort = Effort(time_limit_s=1000.0, fluid_evaluations=20, exact_evaluations=2, patience=10)
    assert find_within_limits(problem, 0, effort=effort).plan is None
    assert limits == [400.0, 600.0 - 200.0]


def test_progress_along_a_front_names_what_is_searched_in_both_languages():
    """Between the ends, time within a budget."""
    told: list[Message] = []
    problem = Problem(
        cluster=cluster_of([[("a100-40gb", 1, 3), ("v100-16gb", 5, 3), ("t4", 7, 1)]]), model=small_gpt(),
        batch=Batch(global_batch=90, seq_len=1024),
    )  # fmt: skip
    effort = Effort(fluid_evaluations=160, exact_evaluations=10, patience=80)
    find_front(problem, 0, effort=effort, tell=lambda phase, part, best: told.append(phase))
    english = {say(message).split(", ")[0] for message in told}
    assert {"time", "money"} < english
    assert all(re.fullmatch(r"time|money|time within [\d.e-]+ USD a step", words) for words in english)
    assert any(re.match(r"每步 [\d.e-]+ 美元以内的时间，", say(message, "zh")) for message in told)


def test_budgets_between_the_ends_are_in_the_middle_of_the_widest_gap():
    """100 s for 1 USD and 10 s for 4 at the ends: the middle is 2 USD. Nothing faster than 90 s is found for that: the
    gap from 2 USD up is the widest; with 20 s for 3 USD it is that from there down."""
    problem = Problem(cluster=cluster_of([[("t4", 1, 2)]]), model=small_gpt(), batch=Batch(global_batch=4, seq_len=128))

    def met(*pairs):
        bills = [priced(problem, step_s, 3600 * usd / step_s, 0.0, np.zeros(1)) for step_s, usd in pairs]
        return Collection(bills=tuple((bill, None) for bill in bills))

    def budget(collection, tried=(), own=None):
        asked = problem if own is None else replace(problem, constraints=Constraints(most_usd_per_step=own))
        found = _between(asked, collection, tried)
        return None if found is None else pytest.approx(found.constraints.most_usd_per_step)

    ends = (100.0, 1.0), (10.0, 4.0)
    assert budget(met(*ends)) == 2.0
    assert budget(met(*ends, (90.0, 1.9)), [(2.0, 90.0)]) == 8**0.5
    assert budget(met(*ends, (90.0, 1.9), (20.0, 3.0)), [(2.0, 90.0)]) == 6**0.5
    assert budget(met((100.0, 1.0), (99.0, 1.01))) is None
    assert budget(met((100.0, 1.0))) is None
    assert budget(met(*ends), own=3.0) == 3.0
    assert budget(met(*ends, (30.0, 3.0)), [(3.0, 30.0)], own=3.0) == 3**0.5
