"""Random plans that can be run, for the tests of exports and of the web application."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from polygon.cost.estimate import estimate
from polygon.cost.tables import CostTables
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem
from polygon.domain.uniform import ParallelConfig, uniform_plan
from polygon.formats import catalogue, files
from polygon.formats.recognition import cluster_from_data
from polygon.planning.candidates import Candidates
from polygon.planning.checker import violations
from polygon.planning.decode import Allocation, Decoder
from polygon.planning.initial_solutions import simple_starts
from polygon.planning.search_engine import Effort, find_plan

INSTANCES = Path(__file__).resolve().parents[1] / "instances"

DIMENSIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-30b-a3b", {"dp": 4, "pp": 4, "ep": 4, "zero": 1, "recompute": "full"}),
    ("qwen3-30b-a3b", {"dp": 2, "tp": 2, "pp": 4, "ep": 2, "sequence_parallel": True, "chunks": 2, "zero": 1}),
    ("llama3-8b", {"dp": 2, "tp": 2, "cp": 4, "sequence_parallel": True, "zero": 3}),
    ("llama3-8b", {"dp": 2, "cp": 2, "pp": 4, "recompute": "full", "recompute_blocks": 3, "zero": 1}),
    ("llama3-8b", {"dp": 8, "tp": 2, "sequence_parallel": True, "zero": 1, "shards": 4}),
    ("deepseek-v2-lite", {"dp": 4, "tp": 2, "pp": 2, "ep": 4, "sequence_parallel": True, "zero": 1}),
    ("gpt-oss-20b", {"dp": 4, "cp": 2, "pp": 2, "ep": 8, "zero": 1, "recompute": "full"}),
]


def of_dimensions(model: str, degrees: Mapping[str, Any]) -> tuple[Problem, Plan, CostTables]:
    """A uniform plan on 16 H100 of two nodes, as Megatron-LM would train it."""
    nodes = [{"device": "h100-sxm", "count": 2, "devices_per_node": 8}]
    cluster = cluster_from_data({"name": "h100", "regions": [{"name": "here", "nodes": nodes}]}, "h100")
    batch = Batch(global_batch=32, seq_len=4096)
    problem = Problem(cluster=cluster, model=catalogue.model(model), batch=batch)
    plan = uniform_plan(problem, ParallelConfig(**degrees))
    assert violations(problem, plan) == []
    return problem, plan, CostTables(problem)


@cache
def planned(name: str = "two-campus", model: str = "gpt3-1.3b", global_batch: int = 32) -> tuple[Problem, Plan]:
    """A short search's plan for a shipped cluster."""
    problem = Problem(
        cluster=files.read_cluster(INSTANCES / f"{name}.yaml"),
        model=catalogue.model(model),
        batch=Batch(global_batch=global_batch, seq_len=1024),
    )
    effort = Effort(fluid_evaluations=600, exact_evaluations=15, patience=300)
    found = find_plan(problem, np.random.default_rng(0), effort=effort)
    assert found.plan is not None
    return problem, found.plan


@cache
def wide() -> tuple[Problem, Plan]:
    """Ten regions in stages that span regions: activations and gradients both cross, on one link at least."""
    problem = Problem(
        cluster=files.read_cluster(INSTANCES / "aws-regions.yaml"),
        model=catalogue.model("gpt3-6.7b"),
        batch=Batch(global_batch=16, seq_len=1024),
    )
    decoder = Decoder(problem)
    best: tuple[float, Plan] | None = None
    for x in simple_starts(decoder, 4, 1):
        plan = decoder.decode(Allocation(workers=x, micro_batch_size=1), relax=False)
        if isinstance(plan, Plan):
            priced = estimate(problem, plan, decoder.tables)
            both = any(link.activation_bytes > 0 and link.gradient_bytes > 0 for link in priced.links)
            if both and (best is None or priced.step_s < best[0]):
                best = priced.step_s, plan
    assert best is not None, "no simple start spans regions"
    return problem, best[1]


@cache
def drawing(seed: int) -> Iterator[tuple[Problem, Plan, CostTables]]:
    """Plans of random allocations without an end; every one fits its devices."""
    rng = np.random.default_rng(seed)
    names = [("two-campus", "gpt3-1.3b"), ("regional-16", "gpt3-1.3b"), ("sailor-a100", "llama3-8b")]
    names += [("sailor-a100", "gpt3-6.7b"), ("one-node", "opt-350m")]
    while True:
        cluster, model = names[int(rng.integers(len(names)))]
        problem = Problem(
            cluster=files.read_cluster(INSTANCES / f"{cluster}.yaml"),
            model=catalogue.model(model),
            batch=Batch(
                global_batch=int(rng.choice([8, 12, 32, 64])),
                seq_len=512,
                precision=str(rng.choice(["bf16", "fp16", "fp32"])),
                optimizer=str(rng.choice(["adamw", "sgd"])),
            ),
        )
        decoder = Decoder(problem)
        candidates = Candidates(decoder, 4)
        made = [plan for _ in range(8) if isinstance(plan := decoder.decode(candidates.random(rng)), Plan)]
        yield from ((problem, plan, decoder.tables) for plan in made[:4])


@cache
def met(seed: int) -> list[tuple[Problem, Plan, CostTables]]:
    """Those that were drawn already."""
    return []


def drawn(count: int, seed: int = 0) -> list[tuple[Problem, Plan, CostTables]]:
    """As many plans of random allocations, on several clusters and models: the same ones for all who ask."""
    met(seed).extend(islice(drawing(seed), max(count - len(met(seed)), 0)))
    return met(seed)[:count]
