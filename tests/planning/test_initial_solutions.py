"""The same pipeline in every region: alike in all of them, and without the regions that hold it up."""

import math

import numpy as np
import pytest

from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.initial_solutions import replicated_starts
from tests.linked_regions import cluster_of, small_gpt


@pytest.fixture(scope="module")
def decoder():
    """Regions with 3, 4, 5 and 1 single-device nodes."""
    groups = [[("v100-16gb", n, 1)] for n in (3, 4, 5, 1)]
    cluster = cluster_of(groups, latency_s=0.02, bytes_per_s=1e9)
    model = small_gpt(blocks=8, hidden_size=1024, head_dim=64, ffn_size=4096)
    return Decoder(Problem(cluster=cluster, model=model, batch=Batch(global_batch=64, seq_len=512)))


def test_regions_are_alike_and_the_best_is_no_worse_than_all_of_them(decoder):
    """Every region has as many workers in each stage or none; two stages everywhere is among what was looked at."""
    starts = replicated_starts(decoder, 4, (1, 2), decoder.value, lambda: math.inf)
    assert starts
    for x in starts:
        rows = x.workers[x.workers.any(axis=1)]
        assert (rows == rows[0]).all()
        assert (rows.sum(axis=0) > 0).any()
    everywhere = Allocation(workers=np.array([[1, 1, 1, 0]] * 2 + [[0] * 4] * 2), micro_batch_size=1)
    assert min(decoder.value(x) for x in starts) <= decoder.value(everywhere)


def test_no_time_gives_no_starts(decoder):
    """Nothing is valued when the time is up."""
    values = []
    assert replicated_starts(decoder, 4, (1,), lambda x: values.append(x) or 1.0, lambda: 0.0) == []
    assert values == []
