"""What the search finds where there is more to plan with."""

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning.frontier import find_within_limits
from polygon.planning.search_engine import Effort
from tests.linked_regions import TYPES, cluster_of, small_gpt
from tests.nightly import NIGHTLY, at_night

PATIENT = Effort(fluid_evaluations=24_000, exact_evaluations=250, patience=6_000, rounds=2)
"""Twice the usual, twice: two searches are held against each other, and chance must not decide."""
USUAL = Effort(fluid_evaluations=6_000, exact_evaluations=60, patience=1_500)
"""By day, for the cluster that every change is tried on."""


@pytest.mark.parametrize("seed", [2, *at_night(4, 7, 9, 11)])
def test_more_devices_or_bandwidth_never_make_the_found_plan_worse(seed):
    """On clusters drawn at random: one node more, or links three times as fast (up to 5 %: a heuristic)."""
    rng = np.random.default_rng(seed)
    groups = [
        [
            (TYPES[rng.integers(3)], int(rng.integers(1, 3)), int(2 ** rng.integers(0, 3)))
            for _ in range(rng.integers(1, 3))
        ]
        for _ in range(rng.integers(1, 4))
    ]
    latency_s, bytes_per_s = float(rng.choice([0.001, 0.02, 0.1])), float(rng.choice([1e7, 1e8, 1e9]))
    model = small_gpt(blocks=16, hidden_size=2048, head_dim=128, ffn_size=8192)
    batch = Batch(global_batch=int(rng.choice([128, 256])), seq_len=512)

    def found_s(members, rate):
        problem = Problem(cluster=cluster_of(members, latency_s=latency_s, bytes_per_s=rate), model=model, batch=batch)
        return find_within_limits(problem, 0, effort=PATIENT if NIGHTLY else USUAL).value_s

    larger = [list(members) for members in groups]
    region = int(rng.integers(len(groups)))
    name, nodes, per_node = larger[region][0]
    larger[region][0] = (name, nodes + 1, per_node)
    base_s = found_s(groups, bytes_per_s)
    assert found_s(larger, bytes_per_s) <= base_s * 1.05
    assert found_s(groups, 3 * bytes_per_s) <= base_s * 1.05
