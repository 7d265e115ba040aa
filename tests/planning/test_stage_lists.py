"""Stages as lists: the classes of workers that they have, and those that are alike taken together."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning.decode import Decoder
from polygon.planning.problem_arrays import Setting
from polygon.planning.stage_lists import gather_stages, merge_kinds, stages_for
from tests.linked_regions import cluster_of, small_gpt
from tests.nightly import cases

GROUPS = [[("t4", 1, 4), ("a100-40gb", 1, 4)], [("a100-40gb", 1, 4)], [("t4", 1, 4), ("a100-40gb", 2, 4)]]


@njit
def lists(bank, stages, x, on_node):
    """Both in one, for kernels within kernels cannot be called from Python."""
    n = gather_stages(x, stages, 1)
    merge_kinds(bank, stages, n, on_node)
    return n


@pytest.fixture(scope="module")
def bank():
    """Two device types in three regions."""
    problem = Problem(cluster=cluster_of(GROUPS), model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))
    return Decoder(problem).bank(Setting(1))


@settings(max_examples=cases(40), deadline=None)
@given(data=st.data())
def test_workers_alike_are_one_kind_wherever_they_are(bank, data):
    """As many of each kind as of its classes; the least and the most that a pool has; rows of nobody are left out.

    Of what classes have on one node, the least, and no more than a node has groups of tensor-parallel devices.
    """
    shape = 3, len(bank.pool)
    x = np.array(data.draw(st.lists(st.integers(0, 2), min_size=3 * shape[1], max_size=3 * shape[1]))).reshape(shape)
    stages = stages_for(*shape)
    rows = [row for row in x if row.any()]
    on_node = np.arange(1, 1 + x.size).reshape(shape)  # by stage and by place among its classes
    assert lists(bank, stages, x, on_node) == len(rows)
    for s, row in enumerate(rows):
        counts, shards, near = Counter[int](), dict[int, list[int]](), dict[int, int]()
        for k, c in enumerate(np.flatnonzero(row)):
            counts[int(bank.kind[c])] += int(row[c])
            most = max(1, int(bank.devices_per_node[c]) // int(bank.tp[c]))
            near[int(bank.kind[c])] = min(near.get(int(bank.kind[c]), most), int(on_node[s, k]), most)
            shards.setdefault(int(bank.kind[c]), []).append(int(row[c]))
        kinds = stages.kinds[s, : stages.kind_members[s]].tolist()
        assert sorted(kinds) == sorted(counts)
        for i, kind in enumerate(kinds):
            assert stages.kind_counts[s, i] == counts[kind]
            assert stages.kind_shards[s, i] == min(shards[kind])
            assert stages.kind_spread[s, i].tolist() == [max(shards[kind]), near[kind]]
