"""Sailor's score against what its own simulator gave, and its plan form to and fro."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rivals.sailor import (
    Setup,
    cluster_from_setup,
    plan_form,
    plan_from_form,
    setups_from_document,
    type_names,
)
from benchmarks.rivals.sailor_score import Measured, measured_from_documents, memory_fits, score_s
from polygon.domain.errors import InputError
from polygon.domain.model import Batch
from polygon.domain.plan import Problem
from polygon.formats.catalogue import model as model_by_name

INSTANCES = Path(__file__).parents[2] / "instances"
BENCH = json.loads((INSTANCES / "sailor" / "planner_bench.json").read_text())
NETWORK = json.loads((INSTANCES / "measured" / "sailor_network.json").read_text())
SETUPS = {setup.name: setup for setup in setups_from_document(BENCH)}
PLANS = [
    (name, planner)
    for name, setup in SETUPS.items()
    for planner, result in setup.results.items()
    if result.get("plan") and (result["plan"].get("stages") or result["plan"].get("independent_pipelines"))
]
STAGED = [(name, planner) for name, planner in PLANS if SETUPS[name].results[planner]["plan"].get("stages")]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Profiles and links of OPT-350."""
    profiles = json.loads((INSTANCES / "measured" / "sailor_profiles.json").read_text())
    return measured_from_documents(profiles, NETWORK, "OPT-350")


def problem_of(setup: Setup) -> Problem:
    """The setup as a polygon problem."""
    return Problem(
        cluster=cluster_from_setup(setup, NETWORK),
        model=model_by_name("opt-350m"),
        batch=Batch(global_batch=setup.global_batch, seq_len=2048, precision="fp32"),
    )


@pytest.mark.parametrize(("setup", "planner"), PLANS)
def test_score_is_what_sailors_simulator_gave(measured: Measured, setup: str, planner: str) -> None:
    """Every plan of every planner, to rounding; and all of them fit in memory, as they did there."""
    result = SETUPS[setup].results[planner]
    assert score_s(result["plan"], measured, SETUPS[setup].global_batch) == pytest.approx(
        result["iteration_time_s"], rel=1e-12
    )
    assert memory_fits(result["plan"], measured) == []


def test_memory_is_refused_where_it_runs_out(measured: Measured) -> None:
    """Eight sequences of the whole model at once do not fit on one V100."""
    worker = {"gpu_type": "V100-16", "tp": 1, "zone": "us-central1-a"}
    plan = {"micro_batch_size_sequences": 8, "stages": [{"layers": list(range(26)), "workers": [worker]}]}
    assert "V100-16" in memory_fits(plan, measured)[0]


@pytest.mark.parametrize("name", SETUPS)
def test_cluster_has_the_setups_devices(name: str) -> None:
    """Every zone is a region with the counts of the file, and every pair that was measured has a link."""
    setup = SETUPS[name]
    cluster = cluster_from_setup(setup, NETWORK)
    to_sailor = type_names(setup)
    found = {(cluster.regions[p.region].name, to_sailor[p.device.name]): p.devices for p in cluster.pools}
    assert found == dict(setup.devices)
    n = len(cluster.regions)
    assert (cluster.bytes_per_s[~np.eye(n, dtype=bool)] > 0).all()


def _shape(form: dict[str, Any]) -> list[tuple[list[int], Counter[str]]]:
    """Layers and workers of each stage, whatever the order of the workers."""
    return [(list(s["layers"]), Counter(json.dumps(w, sort_keys=True) for w in s["workers"])) for s in form["stages"]]


@pytest.mark.parametrize(("setup", "planner"), [key for key in STAGED if key != ("fig8b", "metis")])
def test_form_survives_the_way_through_a_plan(measured: Measured, setup: str, planner: str) -> None:
    """Imported and exported again, a form has the same stages and score; the plan holds every device once."""
    form = SETUPS[setup].results[planner]["plan"]
    problem = problem_of(SETUPS[setup])
    plan = plan_from_form(form, problem)
    again = plan_form(plan, problem.cluster, type_names(SETUPS[setup]))
    assert _shape(again) == _shape(form)
    batch = SETUPS[setup].global_batch
    assert score_s(again, measured, batch) == pytest.approx(score_s(form, measured, batch), rel=1e-12)
    devices = [d for stage in plan.stages for worker in stage.workers for d in worker.devices]
    assert len(devices) == len(set(devices)) == plan.world_size
    for stage in plan.stages:
        for worker in stage.workers:
            pool = problem.cluster.pools[worker.pool]
            assert len({pool.node_of(d) for d in worker.devices}) == 1
    assert plan.micro_batches * plan.micro_batch_size == batch


def test_forms_that_a_plan_cannot_say_are_refused() -> None:
    """Independent pipelines, workers on several nodes, missing layers, too many workers: each by its name."""
    setup = SETUPS["fig7"]
    problem = problem_of(setup)
    form = setup.results["dtfm"]["plan"]
    first, second = form["stages"]
    worker = {"gpu_type": "A100-40", "tp": 4, "zone": "us-central1-a"}
    cases = {
        "pipelines": setup.results["flashflex"]["plan"],
        "layers": form | {"stages": [first]},
        "stages\\[1\\].layers": form | {"stages": [first, second | {"layers": second["layers"][1:]}]},
        "no node with 4 free": form | {"stages": [first | {"workers": [worker] * 9}, second]},
        "divisor": form | {"micro_batch_size_sequences": 7},
        "spans_nodes_count": form | {"stages": [first | {"workers": [worker | {"spans_nodes_count": 2}]}, second]},
    }
    for message, bad in cases.items():
        with pytest.raises(InputError, match=message):
            plan_from_form(bad, problem)
    with pytest.raises(InputError, match="setups"):
        setups_from_document({})
