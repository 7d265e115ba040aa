"""The arrays that the search works on: one entry a class (pool and tensor-parallel degree), each its own pool's."""

import numba
import numpy as np
import pytest

from polygon.cost.convergence import allowed
from polygon.cost.memory import breakdown, gradient_copies, stage_rows
from polygon.cost.tables import CostTables
from polygon.domain.cluster import Cluster, Link, NodeGroup, Region
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats import catalogue
from polygon.planning.layer_split import states_bytes
from polygon.planning.problem_arrays import Setting, build_bank, worker_classes
from polygon.planning.stage_lists import stages_for
from tests.small_problems import routed_problem

LAN = Link(latency_s=1e-5, bytes_per_s=1e10)


def test_optimizer_speed_is_that_of_each_class_own_pool():
    """Classes are more than pools where devices may form tensor-parallel groups; each has its pool's speed."""
    region = Region(
        name="one",
        intra_region=LAN,
        node_groups=tuple(
            NodeGroup(device=name, nodes=1, devices_per_node=4, intra_node=LAN, inter_node=LAN)
            for name in ("a100-40gb", "t4")
        ),
    )
    cluster = Cluster(
        name="test", regions=(region,), latency_s=np.zeros((1, 1)), bytes_per_s=np.ones((1, 1)),
        capacity_bytes_per_s=np.full((1, 1), np.inf),
        catalogue={name: catalogue.device(name) for name in ("a100-40gb", "t4")},
    )  # fmt: skip
    tables = CostTables(
        Problem(cluster=cluster, model=catalogue.model("gpt3-1.3b"), batch=Batch(global_batch=8, seq_len=1024))
    )
    classes = worker_classes(tables, None)
    bank = build_bank(tables, classes, Setting(1), allowed(tables.problem))
    assert len(classes) > len(cluster.pools)
    expected = [tables.update_s(pool, 1e6) / 1e6 for pool, _ in classes]
    assert bank.update_s_per_parameter.tolist() == pytest.approx(expected)


@numba.njit
def _states_bytes(bank, stages, c, zero, shards, first, last):
    """Kernels within kernels cannot be called from Python."""
    return states_bytes(bank, stages, 0, c, zero, shards, first, last)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_states_of_a_stage_are_those_of_the_exact_price(optimizer):
    """Weights, gradients and optimizer of any layers under any ZeRO stage, the copy of a tied embedding included."""
    problem = routed_problem(2, optimizer=optimizer)[0]
    tables = CostTables(problem)
    classes = worker_classes(tables, 1)
    bank = build_bank(tables, classes, Setting(2), allowed(problem))
    layers = tables.memory(1, 2, "none").layers
    stages = stages_for(1, len(classes))
    for first, last in ((0, 6), (0, 2), (2, 4), (3, 6)):
        for zero in range(4):
            parts = breakdown(
                *stage_rows(layers, first, last), in_flight=0, zero=zero, shards=2, batch=problem.batch,
                gradient_copies=gradient_copies(problem.batch, problem.runtime, zero),
            )  # fmt: skip
            found = _states_bytes(bank, stages, 0, zero, 2, first, last)
            assert found == pytest.approx(parts.weights + parts.gradients + parts.optimizer)
