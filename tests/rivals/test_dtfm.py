"""DT-FM's objective against its definition, and its scenarios against their optima."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rivals import dtfm_kernels as kernels
from benchmarks.rivals.dtfm import DtfmProblem, PathAnnealing, Scenario, scenario_from_document
from polygon.domain.errors import InputError
from solvers.stop import MaxEvaluations, Target
from tests.nightly import cases

INSTANCES = Path(__file__).parents[2] / "instances" / "dtfm"
OPTIMA_S = {"case1": 3.439799, "case2": 31.634160, "case3": 16.086840, "case4": 34.802041, "case5": 49.218380}


def document(name: str) -> dict:
    """A shipped scenario."""
    return json.loads((INSTANCES / f"{name}.json").read_text())


def brute_force_s(latency_s: np.ndarray, gbit_per_s: np.ndarray, groups: np.ndarray, workload: dict) -> float:
    """The formula of the module's docstring over devices, by looking at all matchings and all paths."""
    stages, width = groups.shape
    gradient = workload["gradient_gigabyte_per_stage"]
    activation = workload["activation_gigabyte_per_device_per_iteration"]
    reduction = max(
        sum(2 * (latency_s[i, j] + gradient * 8 / (gbit_per_s[i, j] * width)) for j in group if j != i)
        for group in groups
        for i in group
    )
    distance = np.zeros((stages, stages))
    for a, b in itertools.permutations(range(stages), 2):
        distance[a, b] = min(
            max(latency_s[i, j] + activation * 8 / gbit_per_s[i, j] for i, j in zip(groups[a], matched, strict=True))
            for matched in itertools.permutations(groups[b])
        )
    path = min(sum(distance[a, b] for a, b in itertools.pairwise(p)) for p in itertools.permutations(range(stages)))
    return reduction + 2 * path


def random_document(rng: np.random.Generator, stages: int, width: int, cities: int) -> dict:
    """Devices in a few cities."""
    city = rng.integers(cities, size=stages * width)
    latency = np.triu(rng.uniform(1, 200, (cities, cities)), 1)
    gbit = np.triu(rng.uniform(0.3, 2, (cities, cities)), 1)
    latency, gbit = latency + latency.T + 5 * np.eye(cities), gbit + gbit.T + 2 * np.eye(cities)
    workload = {
        "pipeline_stages": stages,
        "stage_width_devices": width,
        "gradient_gigabyte_per_stage": 0.65,
        "activation_gigabyte_per_device_per_iteration": 0.47,
    }
    matrices = {"latency_ms": latency, "bandwidth_gbit_per_s": gbit}
    return {"workload": workload} | {key: m[np.ix_(city, city)].tolist() for key, m in matrices.items()}


@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(2, 3), (3, 2), (4, 3), (3, 4)]))
@settings(max_examples=cases(25), deadline=None)
def test_cost_is_the_formula(seed: int, shape: tuple[int, int]) -> None:
    """The kernels' cost of a random placement is the definition's, by brute force."""
    rng = np.random.default_rng(seed)
    doc = random_document(rng, *shape, cities=4)
    scenario = scenario_from_document(doc)
    devices = rng.permutation(len(scenario.kind))
    expected = brute_force_s(
        np.array(doc["latency_ms"]) / 1e3,
        np.array(doc["bandwidth_gbit_per_s"]),
        devices.reshape(shape),
        doc["workload"],
    )
    assert DtfmProblem(scenario).evaluate(scenario.kind[devices]) == pytest.approx(expected, rel=1e-12)


def small_scenario(seed: int, stages: int = 4, width: int = 3) -> Scenario:
    """A random one."""
    return scenario_from_document(random_document(np.random.default_rng(seed), stages, width, 4))


def test_kernels_equal_their_python() -> None:
    """Compiled and interpreted kernels agree on random placements."""
    rng = np.random.default_rng(0)
    for seed in range(10):
        scenario = small_scenario(seed)
        x = rng.permutation(scenario.kind)
        a, b = x[:3], x[3:6]
        hop_s, pair_s = scenario.hop_s, scenario.pair_s
        assert kernels.bottleneck_s(a, b, hop_s) == kernels.bottleneck_s.py_func(a, b, hop_s)
        assert kernels.stage_reduction_s(a, pair_s) == kernels.stage_reduction_s.py_func(a, pair_s)
        distance = rng.uniform(size=(5, 5))
        compiled, interpreted = kernels.shortest_path(distance), kernels.shortest_path.py_func(distance)
        assert compiled[0] == interpreted[0] and np.array_equal(compiled[1], interpreted[1])
        total, order = kernels.total_s(x, 4, hop_s, pair_s)
        total_py, order_py = kernels.total_s.py_func(x, 4, hop_s, pair_s)
        assert total == total_py and np.array_equal(order, order_py)


def test_annealing_equals_its_python_and_keeps_its_books() -> None:
    """Compiled and interpreted annealing take the same steps, and the kept energy is that of the kept placement."""
    for seed in range(3):
        scenario = small_scenario(seed)
        hop_s, pair_s = scenario.hop_s, scenario.pair_s
        outcome = []
        for kernel in (kernels.anneal, kernels.anneal.py_func):
            rng = np.random.default_rng(seed)
            x = rng.permutation(scenario.kind)
            best = x.copy()
            energy, _ = kernel(x, 4, hop_s, pair_s, 0.3, 60, 3.0, 0.95, best, np.inf, rng)
            outcome.append((energy, best.tolist(), x.tolist()))
        assert outcome[0] == outcome[1]
        energy, best, x = outcome[0]
        assert sorted(x) == sorted(best) == sorted(scenario.kind.tolist())
        again = kernels.path_energy(np.array(best), 4, hop_s, pair_s, 0.3, np.zeros(4), np.zeros(4))
        assert energy == pytest.approx(again, rel=1e-12)


def test_regions_and_devices_say_the_same() -> None:
    """A document by regions is the document by devices, written shorter."""
    short = document("irregular0")
    counts = [region["devices"] for region in short["regions"]]
    region = np.repeat(np.arange(len(counts)), counts)
    long = {
        key: np.array(short[key])[np.ix_(region, region)].tolist() for key in ("latency_ms", "bandwidth_gbit_per_s")
    }
    a, b = scenario_from_document(short), scenario_from_document({"workload": short["workload"]} | long)
    assert np.array_equal(a.kind, b.kind)
    assert np.array_equal(a.hop_s, b.hop_s) and np.array_equal(a.pair_s, b.pair_s)


def test_best_known_placements_have_their_values() -> None:
    """Where the best known value is not proved, its stages are kept, and cost what the table says."""
    table = json.loads((INSTANCES.parent / "best-known.json").read_text())["dtfm"]
    unproved = {name: entry for name, entry in table.items() if not entry["proved"] and "stages" in entry}
    assert {"irregular0", "irregular1"} <= set(unproved)
    for name, entry in unproved.items():
        problem = DtfmProblem(scenario_from_document(document(name)))
        counts = np.array(entry["stages"])
        assert np.array_equal(counts.sum(axis=0), problem.scenario.counts)
        x = np.concatenate([np.repeat(np.arange(counts.shape[1]), row) for row in counts])
        assert problem.evaluate(x) == pytest.approx(entry["value"], abs=1e-6)


@pytest.mark.parametrize("case", OPTIMA_S)
def test_scenarios_are_solved_to_their_optima(case: str) -> None:
    """Three seeds reach the proved optimum within 400,000 steps."""
    problem = DtfmProblem(scenario_from_document(document(case)))
    for seed in range(3):
        stop = Target(OPTIMA_S[case] + 1e-6) | MaxEvaluations(400_000)
        result = PathAnnealing().solve(problem, np.random.default_rng(seed), stop)
        assert result.value == pytest.approx(OPTIMA_S[case], abs=2e-6)
        assert result.solution is not None
        assert sorted(result.solution) == sorted(problem.scenario.kind)


def test_annealing_keeps_the_promises_of_solvers() -> None:
    """Same seed, same result; exact count; never worse than the start; strict history."""
    problem = DtfmProblem(small_scenario(5))
    start = problem.random(np.random.default_rng(9))
    runs = [
        PathAnnealing(cycle_steps=700, chunk_steps=300).solve(
            problem, np.random.default_rng(1), MaxEvaluations(1501), start=[start]
        )
        for _ in range(2)
    ]
    assert runs[0].value == runs[1].value and np.array_equal(runs[0].solution, runs[1].solution)  # type: ignore[arg-type]
    assert runs[0].evaluations == 1501
    assert runs[0].value <= problem.evaluate(start)
    values = [step.value for step in runs[0].history]
    assert values == sorted(set(values), reverse=True)


def test_moves_and_mixtures_keep_the_devices() -> None:
    """Neighbours and children place the same devices, and the key forgets orders."""
    rng = np.random.default_rng(0)
    problem = DtfmProblem(small_scenario(1))
    for _ in range(50):
        a, b = problem.random(rng), problem.random(rng)
        for x in (problem.neighbour(a, rng), problem.crossover(a, b, rng), problem.path(a)):
            assert sorted(x) == sorted(problem.scenario.kind)
        shuffled = np.concatenate([rng.permutation(row) for row in rng.permutation(a.reshape(4, 3))])
        assert problem.key(a) == problem.key(shuffled) == problem.key(problem.path(a))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("latency_ms", [[0.0]], "latency_ms"),
        ("bandwidth_gbit_per_s", None, "bandwidth_gbit_per_s"),
        ("workload", {"pipeline_stages": 4}, "stage_width_devices"),
    ],
)
def test_bad_scenarios_are_refused(key: str, value: object, message: str) -> None:
    """The message names the field."""
    doc = random_document(np.random.default_rng(0), 4, 3, 4)
    doc[key] = value
    if key == "bandwidth_gbit_per_s":
        doc[key] = (np.ones((12, 12)) - 1).tolist()
    with pytest.raises(InputError, match=message):
        scenario_from_document(doc)
