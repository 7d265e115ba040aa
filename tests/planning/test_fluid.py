"""The fluid kernel is the same function compiled as in plain Python."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Constraints, Problem
from polygon.planning.candidates import Candidates
from polygon.planning.decode import Allocation, Decoder
from tests.linked_regions import cluster_of, small_gpt


def fluid_values() -> list[list[float]]:
    """Seconds (-1: never) and reason of allocations drawn at random."""
    cluster = cluster_of([[("a100-40gb", 1, 4)], [("a100-40gb", 1, 4), ("t4", 2, 1)], [("v100-16gb", 1, 2)]])
    problem = Problem(
        cluster=cluster,
        model=small_gpt(),
        batch=Batch(global_batch=32, seq_len=512),
        constraints=Constraints(parity="any"),
    )
    decoder = Decoder(problem)
    candidates, rng = Candidates(decoder, 4), np.random.default_rng(0)
    values = []
    for _ in range(40):
        seconds, why = decoder.fluid_s(candidates.random(rng))
        values.append([seconds if np.isfinite(seconds) else -1.0, why])
    return values


def test_compiled_and_plain_python_agree():
    """Allocations drawn at random have the same step time and reason without the compiler."""
    code = "import json; from tests.planning.test_fluid import fluid_values; print(json.dumps(fluid_values()))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    plain, compiled = np.array(json.loads(run.stdout)), np.array(fluid_values())
    assert (plain[:, 0] > 0).sum() >= 10
    assert plain == pytest.approx(compiled, rel=1e-12)


def test_tied_embeddings_of_one_node_take_its_fabric_in_the_relaxation_too():
    """Two stages on one node behind a slow network: the relaxation waits for the network no more than the step does."""
    slow = Link(latency_s=1e-3, bytes_per_s=1e7)
    cluster = cluster_of([[("a100-40gb", 1, 4)]], inside=Link(latency_s=5e-6, bytes_per_s=1e11), between=slow)
    problem = Problem(cluster=cluster, model=small_gpt(), batch=Batch(global_batch=32, seq_len=512))
    decoder = Decoder(problem)
    workers = np.array([[2 if tp == 1 else 0 for _, tp in decoder.classes]] * 2)
    x = Allocation(workers=workers, micro_batch_size=1)
    exact_s = decoder.step_times(decoder.decode(x)).step_s
    assert decoder.fluid_s(x)[0] < 1.5 * exact_s < small_gpt().head_weight_parameters() * 4 / 1e7
