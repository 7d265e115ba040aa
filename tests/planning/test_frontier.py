"""Searches in rounds and along a front: each has a seed of its own."""

from __future__ import annotations

from polygon.domain.message import Message, say
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.planning import clock, frontier
from polygon.planning.frontier import _seed_of, find_front, find_within_limits
from polygon.planning.search_engine import Effort
from tests.linked_regions import cluster_of, small_gpt


def test_the_first_search_is_the_one_with_the_users_seed():
    """So that a search in rounds finds at least what a plain one does; later rounds draw other numbers, each seed's."""
    assert [_seed_of(seed, 0) for seed in (0, 7)] == [0, 7]
    later = [_seed_of(seed, index) for seed in (0, 7) for index in (1, 2, 3)]
    assert len({0, 7, *later}) == 8
    assert later == [_seed_of(seed, index) for seed in (0, 7) for index in (1, 2, 3)]


def test_the_searches_with_and_without_a_budget_share_the_time(monkeypatch):
    """A budget that no plan keeps: first the fastest and the cheapest are looked for, with two fifths left for others."""
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
    """Shares of time and money as per cent, not the exponents by which they are mixed."""
    told: list[Message] = []
    problem = Problem(cluster=cluster_of([[("t4", 1, 2)]]), model=small_gpt(), batch=Batch(global_batch=4, seq_len=128))
    effort = Effort(fluid_evaluations=20, exact_evaluations=2, patience=10)
    find_front(problem, 0, effort=effort, tell=lambda phase, part, best: told.append(phase))
    english = {say(message).split(", ")[0] for message in told}
    assert {"time", "money", "75 % time and 25 % money", "50 % time and 50 % money"} <= english
    assert any(say(message, "zh").startswith("时间占 75 %、费用占 25 %，") for message in told)
    assert not any("^" in say(message, language) for message in told for language in ("en", "zh"))
