"""Bounds are never above an optimum, and meet it on four of DT-FM's five scenarios."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rivals import dtfm_bound
from benchmarks.rivals.dtfm import DtfmProblem, Scenario, scenario_from_document
from benchmarks.rivals.dtfm_bound import lower_bound

INSTANCES = Path(__file__).parents[2] / "instances" / "dtfm"


def small(seed: int, stages: int, width: int, kinds: int) -> Scenario:
    """A random scenario with few kinds."""
    rng = np.random.default_rng(seed)
    kind = np.sort(rng.integers(kinds, size=stages * width))
    kind = np.unique(kind, return_inverse=True)[1]
    n = int(kind.max()) + 1
    matrices = [np.triu(rng.uniform(1, 6, (n, n)).round(1), 1) for _ in range(2)]
    hop_s, pair_s = (m + m.T + np.diag(rng.uniform(0.5, 2.5, n).round(1)) for m in matrices)
    return Scenario(name="small", stages=stages, width=width, kind=kind, hop_s=hop_s, pair_s=pair_s)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (4, 2), (3, 3)])
def test_bound_is_never_above_the_optimum(shape: tuple[int, int]) -> None:
    """Against the best of all placements, for twelve random scenarios of each shape."""
    for seed in range(12):
        scenario = small(seed, *shape, kinds=3)
        problem = DtfmProblem(scenario)
        best = min(problem.evaluate(x) for x in _placements(scenario).values())
        bound = lower_bound(scenario)
        assert bound.total_s <= best * (1 + 1e-12)
        assert bound.total_s == pytest.approx(bound.reduction_s + 2 * bound.path_s, rel=1e-12)


def _placements(scenario: Scenario) -> dict:
    """Every placement up to the order of stages, stage by stage."""
    problem, found = DtfmProblem(scenario), {}

    def fill(placed: tuple[int, ...], left: tuple[int, ...]) -> None:
        if not left:
            x = np.array(placed)
            found[problem.key(x)] = x
            return
        for stage in {tuple(left[i] for i in c) for c in itertools.combinations(range(len(left)), scenario.width)}:
            rest = list(left)
            for kind in stage:
                rest.remove(kind)
            fill(placed + stage, tuple(rest))

    fill((), tuple(int(k) for k in scenario.kind))
    return found


@pytest.mark.parametrize(("case", "optimum_s"), [("case2", 31.634160), ("case3", 16.086840), ("case4", 34.802041)])
def test_bound_proves_scenarios(case: str, optimum_s: float) -> None:
    """The bound is the optimum, so the search's result is proved."""
    scenario = scenario_from_document(json.loads((INSTANCES / f"{case}.json").read_text()))
    assert lower_bound(scenario).total_s == pytest.approx(optimum_s, abs=1e-6)


def test_too_many_kinds_leave_the_trivial_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages cannot be enumerated, the bound is that of the shortest hops."""
    scenario = small(0, 3, 3, kinds=3)
    monkeypatch.setattr(dtfm_bound, "MOST_STAGES_ENUMERATED", 1)
    bound = lower_bound(scenario)
    assert bound.stages_seen == 0
    hops_s = scenario.hop_s[np.ix_(scenario.kind, scenario.kind)][~np.eye(9, dtype=bool)]
    assert bound.total_s == pytest.approx(2 * 2 * hops_s.min())


def test_table_equals_its_python() -> None:
    """The compiled kernels equal their Python on a small scenario."""
    scenario = small(3, 3, 2, kinds=3)
    rows = dtfm_bound._stage_rows(scenario.counts, scenario.width)
    assert rows is not None
    reduction_s = dtfm_bound._reductions(rows, scenario.pair_s)
    total = scenario.counts.astype(np.int64)
    radix = np.array([1, total[0] + 1, 0])
    states = int((total[0] + 1) * (total[1] + 1))
    table = dtfm_bound._table(rows, reduction_s, reduction_s, radix, total, states, 3)
    assert np.array_equal(table, dtfm_bound._table.py_func(rows, reduction_s, reduction_s, radix, total, states, 3))
