"""Predicted against measured step time of different plans on different networks: `python benchmarks/lab_prediction.py`.

Every network is played by the lab. Its links are measured first, and the prediction uses what was measured, not what
was asked. On the networks named *emulated* the devices' speed is emulated (computations are stretched to what the
device model says), so what is tested there is schedule, transfers, reduction and overheads; on those named *real* the
layers are profiled on this machine first and run as fast as they do. Plans: the planner's own choice, and what else one
might take. Prints a table, the mean error, and how the plan predicted best did; writes out/lab_prediction.json.

With `--drawn 20` the networks are drawn instead: two to four regions, devices of unequal speed, 5 to 200 ms and 20 to
500 Mbit/s, another value each way. Each has three plans: the planner's own, data parallel and a pipeline of regions,
these two with micro-batches dealt by speed, so that shares are uneven. Where three stages spread over all regions are
quicker in an order of their own than under any spans, they are played both ways. With `--uneven 8` a region has three
to five hosts and the others one or two, everything on cards of one link's rate, slow enough that two cores play it;
data parallel then is tried plain and packed. `--sums PLAN` plays what the stages of a plan exchange between regions, a
host for each region, and bytes and rates scaled down alike, so that times are the plan's. `--again FILE` measures
nothing: it prices anew what a run has measured, on the links as they were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "comm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from polygon.cost.estimate import estimate
from polygon.cost.profiles import KindProfile, kind_profile
from polygon.cost.stage_reduction import group_packing
from polygon.cost.step_times import step_times
from polygon.cost.tables import CostTables
from polygon.cost.transfers import matrix_values, packed_bytes
from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.model import Batch, Model
from polygon.domain.plan import LinkUse, Plan, Problem, Stage, Worker
from polygon.domain.schedule import stage_spans
from polygon.formats.convert import model_data
from polygon.formats.convert_plan import plan_data, plan_from_spec
from polygon.formats.files import read_json, read_plan, write_json
from polygon.formats.schema import PlanSpec, check
from polygon.planning.decode import useful_streams
from polygon.planning.search_engine import Effort, find_plan
from polygon.planning.sum_trees import able_groups, drafted
from polygon.planning.warmup_depths import Pacing
from runners.engine.options import Options
from runners.engine.summary import log_lines
from runners.lab_launch import train_in_lab
from runners.lab_net.measuring import measure
from runners.lab_net.running import Lab
from runners.lab_net.topology import lab_network

MODEL = Model(
    name="lab-gpt", blocks=6, hidden_size=128, heads=4, kv_heads=4, head_dim=32, ffn_size=512, vocab_size=256,
    max_seq_len=64,
)  # fmt: skip
BATCH = Batch(global_batch=8, seq_len=64, precision="fp32")
STEPS, LEFT_OUT = 8, 2
"""Of those that count, an even number, the median is taken: regions that only exchange gradients lead by turns, and
steps alternate."""
PAUSE_S = 0.01
"""Before every pass that is profiled for pipelines: what their ranks wait for messages, in order of magnitude."""
TALK = Path("out/lab.log")
"""Where the ranks' talk goes."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Regions with so many hosts of given device types, and the links between them."""

    name: str
    hosts: tuple[tuple[str, ...], ...]
    """Device type of every host, region by region."""
    latency_ms: tuple[tuple[float, ...], ...]
    mbit_per_s: tuple[tuple[float, ...], ...]
    devices_per_host: int = 1
    card_mbit_per_s: float = 1000.0
    """Of every host: all its links together get no more."""
    processors: bool = False
    """Whether devices are said to be processors: sums inside regions are then priced as gloo's, else as NCCL's."""
    real: bool = False


def symmetric(n: int, values: dict[tuple[int, int], float]) -> tuple[tuple[float, ...], ...]:
    """A matrix from its upper triangle."""
    return tuple(tuple(values.get((min(a, b), max(a, b)), 0.0) if a != b else 0.0 for b in range(n)) for a in range(n))


NETWORKS = (
    Network(
        name="two regions, emulated",
        hosts=(("slow", "slow"), ("slow", "slow")),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 100}),
    ),
    Network(
        name="far and thin, emulated",
        hosts=(("slow", "slow"), ("slow", "slow")),
        latency_ms=symmetric(2, {(0, 1): 75}),
        mbit_per_s=symmetric(2, {(0, 1): 50}),
    ),
    Network(
        name="three hosts beside three, emulated",
        hosts=(("slow", "slow", "slow"), ("slow", "slow", "slow")),
        latency_ms=symmetric(2, {(0, 1): 40}),
        mbit_per_s=symmetric(2, {(0, 1): 20}),
    ),
    Network(
        name="three regions, emulated",
        hosts=(("fast", "fast"), ("slow",), ("slow",)),
        latency_ms=symmetric(3, {(0, 1): 10, (0, 2): 50, (1, 2): 45}),
        mbit_per_s=symmetric(3, {(0, 1): 300, (0, 2): 80, (1, 2): 100}),
    ),
    Network(
        name="four regions, emulated",
        hosts=(("fast",), ("slow",), ("slow",), ("fast",)),
        latency_ms=symmetric(4, {(0, 1): 5, (0, 2): 30, (0, 3): 40, (1, 2): 25, (1, 3): 40, (2, 3): 15}),
        mbit_per_s=symmetric(4, {(0, 1): 500, (0, 2): 150, (0, 3): 100, (1, 2): 150, (1, 3): 100, (2, 3): 200}),
    ),
    Network(
        name="hosts of two, emulated",
        hosts=(("slow",), ("slow",)),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 50}),
        devices_per_host=2,
    ),
    Network(
        name="narrow cards of three, emulated",
        hosts=(("slow",), ("slow",), ("slow",)),
        latency_ms=symmetric(3, {(0, 1): 20, (0, 2): 30, (1, 2): 25}),
        mbit_per_s=symmetric(3, {(0, 1): 100, (0, 2): 100, (1, 2): 100}),
        card_mbit_per_s=110,
    ),
    Network(
        name="narrow cards of four, emulated",
        hosts=(("slow",), ("slow",), ("slow",), ("slow",)),
        latency_ms=symmetric(4, {(0, 1): 10, (0, 2): 20, (0, 3): 30, (1, 2): 20, (1, 3): 30, (2, 3): 15}),
        mbit_per_s=symmetric(4, {(a, b): 100 for a in range(4) for b in range(a + 1, 4)}),
        card_mbit_per_s=120,
    ),
    Network(
        name="narrow cards, hosts of two, emulated",
        hosts=(("slow", "slow"), ("slow", "slow"), ("slow", "slow")),
        latency_ms=symmetric(3, {(0, 1): 15, (0, 2): 40, (1, 2): 35}),
        mbit_per_s=symmetric(3, {(0, 1): 80, (0, 2): 60, (1, 2): 60}),
        card_mbit_per_s=70,
    ),
    Network(
        name="narrow cards, two stages a host, emulated",
        hosts=(("slow", "slow"), ("slow", "slow")),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 60}),
        devices_per_host=2,
        card_mbit_per_s=60,
    ),
    Network(
        name="narrow cards, five beside one, emulated",
        hosts=(("slow",) * 5, ("slow",)),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 60}),
        card_mbit_per_s=60,
        processors=True,
    ),
    Network(
        name="narrow cards, two workers a host, emulated",
        hosts=(("slow", "slow"), ("slow", "slow")),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 60}),
        devices_per_host=2,
        card_mbit_per_s=60,
        processors=True,
    ),
    Network(
        name="cards of two links, emulated",
        hosts=(("slow", "slow"), ("slow", "slow")),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 50}),
        card_mbit_per_s=100,
        processors=True,
    ),
    Network(
        name="two hosts, real",
        hosts=(("cpu-core",), ("cpu-core",)),
        latency_ms=symmetric(2, {(0, 1): 20}),
        mbit_per_s=symmetric(2, {(0, 1): 100}),
        real=True,
    ),
)


ON_HOST = Link(latency_s=2e-3, bytes_per_s=2e9)
"""Between ranks on one host, which no lab shapes: gloo's messages of 4 bytes and of 4.8 MB over the loopback."""
FACTORS = {"snail": 0.5, "slow": 1.0, "mid": 1.5, "fast": 2.0, "cpu-core": 25.0}


PACKED_BYTES_PER_S = 5e9
"""Memory traffic at which a core of this machine packs gradients, by `polygon.cost.transfers.codec_s`: int8, with error
feedback, 200,000 numbers 4.1e9, 1,200,000 numbers 5.8e9 (int4 7.7e9 and 6.5e9). Computations are emulated; packing
takes what it takes here, whatever device is played, and so has to be priced."""


def device(name: str) -> Device:
    """A made-up accelerator: `slow` does 2 GFLOP/s, the others so many times that; memory is this machine's."""
    return Device(
        name=name,
        memory_bytes=2e9,
        flops={"fp32": 2e9 * FACTORS[name]},
        memory_bytes_per_s=PACKED_BYTES_PER_S,
        power_w=10.0,
    )


def cluster_of(network: Network) -> Cluster:
    """The network as a cluster; hosts of one type in a region are one node group."""
    regions = []
    lan = Link(latency_s=1e-4, bytes_per_s=network.card_mbit_per_s * 1e6 / 8)
    for r, hosts in enumerate(network.hosts):
        groups = tuple(
            NodeGroup(
                device=name,
                nodes=hosts.count(name),
                devices_per_node=network.devices_per_host,
                intra_node=ON_HOST,
                inter_node=lan,
            )
            for name in sorted(set(hosts))
        )
        regions.append(Region(name=f"R{r}", node_groups=groups, intra_region=lan))
    n = len(regions)
    return Cluster(
        name=network.name,
        regions=tuple(regions),
        latency_s=np.array(network.latency_ms) * 1e-3,
        bytes_per_s=np.array(network.mbit_per_s) * 1e6 / 8,
        capacity_bytes_per_s=np.full((n, n), np.inf),
        catalogue={
            name: replace(device(name), architecture="cpu" if network.processors else device(name).architecture)
            for name in FACTORS
        },
    )


def plan_of(
    cluster: Cluster,
    layers: list[tuple[int, int]],
    stages: list[list[int]],
    *,
    size: int,
    compression: str,
    spans: int,
    global_batch: int = BATCH.global_batch,
    by_speed: bool = False,
) -> Plan:
    """A plan with micro-batches dealt in turn, or by speed; each stage's span is its width, times `spans`."""
    pool_of = {d: p.index for p in cluster.pools for d in range(p.first_device, p.first_device + p.devices)}
    built = tuple(
        Stage(first_layer=first, last_layer=last, workers=tuple(Worker(pool=pool_of[d], devices=(d,)) for d in devices))
        for (first, last), devices in zip(layers, stages, strict=True)
    )
    n, micro_batches = len(cluster.regions), global_batch // size
    routes = np.stack([np.arange(micro_batches) % stage.width for stage in built], axis=1)
    if by_speed:
        routes = np.stack([dealt([speed_of(cluster, w) for w in s.workers], micro_batches) for s in built], axis=1)
    uses = tuple(
        LinkUse(
            source=a, target=b, activations=compression, activation_gradients=compression,
            weight_gradients=compression,
            streams=useful_streams(float(cluster.latency_s[a, b]), float(cluster.bytes_per_s[a, b])),
        )
        for a in range(n) for b in range(n) if a != b
    )  # fmt: skip
    return Plan(
        stages=built,
        routes=routes,
        micro_batch_size=size,
        spans=stage_spans(built, [min(micro_batches, stage.width * spans) for stage in built]),
        links=uses,
    )


def speed_of(cluster: Cluster, worker: Worker) -> float:
    """FLOP/s of a worker's device."""
    return float(cluster.pools[worker.pool].device.flops["fp32"])


def dealt(speeds: Sequence[float], count: int) -> np.ndarray:
    """Worker of each of `count` micro-batches: who would be done with it first, shape (count,)."""
    taken, order = np.zeros(len(speeds)), []
    for _ in range(count):
        order.append(int(np.argmin((taken + 1) / np.array(speeds))))
        taken[order[-1]] += 1
    return np.array(order)


def drawn_links(rng: np.random.Generator, regions: int, low: float, high: float) -> tuple[tuple[float, ...], ...]:
    """A value for every ordered pair of regions, its logarithm even between two ends."""
    values = np.exp(rng.uniform(np.log(low), np.log(high), (regions, regions))) * (1 - np.eye(regions))
    return tuple(tuple(float(value) for value in row) for row in values.round(1))


def drawn_network(seed: int) -> Network:
    """Two to four regions with up to five hosts: links that differ by direction, devices of unequal speed.

    Cards of every other network carry half as much as its fastest link.
    """
    rng = np.random.default_rng(seed)
    regions = int(rng.integers(2, 5))
    hosts: list[list[str]] = [[] for _ in range(regions)]
    for place in [*range(regions), *rng.integers(0, regions, rng.integers(0, 6 - regions))]:
        hosts[int(place)].append(str(rng.choice(["snail", "slow", "mid", "fast"])))

    latency_ms, mbit_per_s = drawn_links(rng, regions, 5, 200), drawn_links(rng, regions, 20, 500)
    return Network(
        name=f"drawn {seed}",
        hosts=tuple(tuple(sorted(of)) for of in hosts),
        latency_ms=latency_ms,
        mbit_per_s=mbit_per_s,
        card_mbit_per_s=max(map(max, mbit_per_s)) / 2 if seed % 2 else 1000.0,
    )


def uneven_network(seed: int) -> Network:
    """Many hosts beside few: three to five in a region, what is left of six or less in one or two others."""
    rng = np.random.default_rng([seed, 1])
    counts = [int(rng.integers(3, 6)), 1]
    for _ in range(int(rng.integers(0, 6 - sum(counts) + 1))):
        counts[int(rng.integers(1, len(counts)))] += 1
        if len(counts) < 3 and rng.random() < 0.5:
            counts[-1] -= 1
            counts.append(1)
    hosts = tuple(tuple(sorted(str(rng.choice(["slow", "mid"])) for _ in range(count))) for count in counts)
    latency_ms, mbit_per_s = drawn_links(rng, len(counts), 5, 100), drawn_links(rng, len(counts), 40, 100)
    return Network(
        name=f"uneven {seed}, {'+'.join(map(str, counts))}",
        hosts=hosts,
        latency_ms=latency_ms,
        mbit_per_s=mbit_per_s,
        card_mbit_per_s=max(map(max, mbit_per_s)),
        processors=True,
    )


def drawn_plans(problem: Problem, tables: CostTables, *, uneven: bool = False) -> dict[str, Plan]:
    """The planner's choice, data parallel and a pipeline of regions, with shares by speed; each in one packing.

    Of three regions or more data parallel over trees, too, with all relays that let more pass. Also three stages under
    spans and in an order of their own, where there is one. Of `uneven` networks data parallel
    plain instead of pipelines.
    """
    cluster, chosen = problem.cluster, plans_for(problem, tables)
    by_region: list[list[int]] = [[] for _ in cluster.regions]
    for pool in cluster.pools:
        by_region[pool.region] += range(pool.first_device, pool.first_device + pool.devices)
    layers = problem.model.layers
    borders = np.linspace(0, layers, len(by_region) + 1).round().astype(int).tolist()
    way = partial(plan_of, cluster, size=1, global_batch=problem.batch.global_batch, by_speed=True)
    everyone = [[d for devices in by_region for d in devices]]
    if uneven:
        borders, by_region, last = [0, layers], everyone, "data parallel, plain"
    else:
        last = "pipeline of regions, by speed"
    plans = {
        **({"polygon": chosen["polygon"]} if "polygon" in chosen else {}),
        "data parallel, by speed": way([(0, layers)], everyone, compression="int8", spans=1),
        last: way(list(pairwise(borders)), by_region, compression="none", spans=1 if uneven else 2),
    }
    if not uneven and able_groups(plans["data parallel, by speed"], problem):
        plans["data parallel, over trees"] = drafted(plans["data parallel, by speed"], tables, [0], 1.0)
    devices = everyone[0]
    if not uneven and len(devices) > 2:
        thirds = list(pairwise(np.linspace(0, layers, 4).round().astype(int).tolist()))
        spread = way(thirds, [devices[s::3] for s in range(3)], compression="none", spans=2)
        paced = Pacing(spread, tables).best()
        if paced is not None and paced[0].order is not None:
            plans["three stages, spans"] = paced[0].with_spans(paced[0].spans)
            plans["three stages, own order"] = paced[0]
    return plans


def sums_of_stage(problem: Problem, plan: Plan, s: int) -> tuple[Problem, Plan, float]:
    """What a stage exchanges between regions as a data-parallel plan, and the seconds that it is priced at there.

    A host stands for each region, and its links for those of all the region's nodes; it takes one micro-batch, and as
    long for its backward as the stage's slowest worker. The model has as many blocks, of a 32nd of the width, and links
    are slower by the part of the gradient that is left. Left out: sums inside regions, packing by the plan's devices.
    """
    times, old = step_times(plan, CostTables(problem)), problem.cluster
    place, stage = times.place, plan.stages[s]
    mine = place.members(s)
    regions, first = np.unique(place.region[mine], return_index=True)
    nodes = np.array([len(np.unique(place.node[mine][place.region[mine] == r])) for r in regions])
    blocks = stage.last_layer - stage.first_layer - (s == 0) - (s == len(plan.stages) - 1)
    width = problem.model.hidden_size // 32
    model = replace(
        MODEL, blocks=blocks, hidden_size=width, heads=2, kv_heads=2, head_dim=width // 2, ffn_size=4 * width
    )
    packing = group_packing(plan, regions)
    wire_bytes = packed_bytes(model.parameters, 4, packing, matrix_values(model))
    mbit = 8e-6 * wire_bytes / times.reductions[s].wire_bytes
    pairs, others = np.ix_(regions, regions), 1 - np.eye(len(regions))
    cards = [old.pools[p].inter_node.bytes_per_s for p in place.pool[mine][first]]
    network = Network(
        name=f"sums of stage {s}",
        hosts=(("slow",),) * len(regions),
        latency_ms=tuple(map(tuple, (1e3 * old.latency_s[pairs] * others).tolist())),
        mbit_per_s=tuple(
            map(tuple, (mbit * old.bytes_per_s[pairs] * np.maximum.outer(nodes, nodes) * others).tolist())
        ),
        card_mbit_per_s=float(mbit * np.min(cards * nodes)),
    )
    cluster, count = cluster_of(network), len(regions)
    alike = Problem(cluster=cluster, model=model, batch=replace(BATCH, global_batch=count, seq_len=16))
    everyone = [list(range(count))]
    sums = plan_of(
        cluster, [(0, model.layers)], everyone, size=1, compression=packing, spans=1, global_batch=count
    )  # fmt: skip
    takes_s = step_times(sums, CostTables(alike)).schedule.backward_s.max()
    slow = cluster.catalogue["slow"]
    flops = {"fp32": slow.flops["fp32"] * takes_s / times.schedule.backward_s[mine].max()}
    cluster = replace(cluster, catalogue=dict(cluster.catalogue) | {"slow": replace(slow, flops=flops)})
    return replace(alike, cluster=cluster), sums, times.reductions[s].across_s


def run_sums(path: str, steps: int, left_out: int) -> list[dict[str, Any]]:
    """Measure and predict what each stage of a plan exchanges between regions."""
    known, rows = read_plan(path), []
    for s in range(len(known.plan.stages)):
        problem, plan, across_s = sums_of_stage(known.problem, known.plan, s)
        # Thirty links of some Mbit/s take minutes to measure, and give 98 % of what was asked.
        predicted, across = estimate(problem, plan), step_times(plan, CostTables(problem)).reductions[0].across_s
        with Lab(lab_network(problem.cluster)) as lab:
            steps_s = [line["seconds"] for line in train(lab, problem, plan, steps)]
        measured_s = float(np.median(steps_s[left_out:]))
        row: dict[str, Any] = {
            "network": problem.cluster.name, "plan": "data parallel", "ranks": plan.world_size,
            "predicted_s": predicted.step_s, "measured_s": measured_s, "error": predicted.step_s / measured_s - 1,
            "terms": predicted.terms, "steps_s": steps_s, "plan_file": plan_data(problem, plan), "emulated": True,
        }  # fmt: skip
        rows.append(row)
        show(row)
        seen_s = predicted.terms["reduction"]
        really_s = measured_s - predicted.step_s + seen_s
        text = f"priced at {across_s:.3f} s in the plan and {across:.3f} s in the lab"
        error = f"{100 * (seen_s / really_s - 1):+.1f} %"
        print(f"  {text}; seen of it {seen_s:.3f} s predicted, {really_s:.3f} s measured ({error})")
    return rows


def plans_for(problem: Problem, tables: CostTables) -> dict[str, Plan]:
    """The planner's choice and some others."""
    cluster = problem.cluster
    found = find_plan(problem, np.random.default_rng(0), effort=Effort(time_limit_s=8.0), tables=tables)
    plans = {"polygon": found.plan} if found.plan is not None else {}
    by_region: list[list[int]] = [[] for _ in cluster.regions]
    for pool in cluster.pools:
        by_region[pool.region] += range(pool.first_device, pool.first_device + pool.devices)
    everyone = [d for devices in by_region for d in devices]
    stages, layers = len(by_region), problem.model.layers
    borders = np.linspace(0, layers, stages + 1).round().astype(int).tolist()
    across = list(pairwise(borders))
    plans["pipeline of regions, 1F1B"] = plan_of(cluster, across, by_region, size=2, compression="none", spans=1)
    plans["pipeline of regions, int8"] = plan_of(cluster, across, by_region, size=1, compression="int8", spans=2)
    if len(everyone) > 2:
        cut = np.linspace(0, layers, len(everyone) + 1).round().astype(int).tolist()
        chain = list(pairwise(cut))
        one_each = [[d] for d in everyone]
        plans["pipeline of devices"] = plan_of(cluster, chain, one_each, size=1, compression="none", spans=2)
        both = [everyone[:-1], everyone[-1:]]
        plans["first stage in all regions"] = plan_of(
            cluster, [(0, layers - 1), (layers - 1, layers)], both, size=1, compression="none", spans=2
        )
    if problem.cluster.pools[0].devices_per_node > 1:
        cut = np.linspace(0, layers, len(by_region[0]) + 1).round().astype(int).tolist()
        of_place = [list(devices) for devices in zip(*by_region, strict=True)]
        plans["a pipeline in every region"] = plan_of(
            cluster, list(pairwise(cut)), of_place, size=1, compression="none", spans=2
        )
    per_host, hosts = cluster.pools[0].devices_per_node, cluster.pools[0].nodes
    if per_host > 1 and hosts > 1:
        cut = np.linspace(0, layers, per_host + 1).round().astype(int).tolist()
        plans["a pipeline in every host"] = plan_of(
            cluster, list(pairwise(cut)), [everyone[d::per_host] for d in range(per_host)], size=1, compression="none",
            spans=2,
        )  # fmt: skip
    for name, packing in {"data parallel": "none", "data parallel, int8": "int8"}.items():
        if packing == "none" or problem.cluster.pools[0].device.architecture == "cpu":
            plans[name] = plan_of(cluster, [(0, layers)], [everyone], size=1, compression=packing, spans=1)
    return plans


def profiled(model: Model, pause_s: float) -> KindProfile:
    """Layer times of a model on this machine, measured now, with a pause before every pass."""
    from runners.profile_layers import main as profile_layers

    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "model.json", Path(folder) / "profile.json"
        write_json(path, model_data(model))
        words = [str(path), "--precision", "fp32", "--micro-batch-sizes", "1,2,4,8", "--seconds", "0.4"]
        words += ["--pause", str(pause_s)]
        words += ["-o", str(out)]
        with contextlib.redirect_stderr(Path(os.devnull).open("w")):
            assert profile_layers(words) == 0
        return kind_profile(json.loads(out.read_text()))


def measured_cluster(cluster: Cluster, lab: Lab) -> Cluster:
    """The cluster with the links that the lab gives."""
    latency_s, bytes_per_s = cluster.latency_s.copy(), cluster.bytes_per_s.copy()
    hosts = {host.name: host for host in lab.network.hosts}
    for row in measure(lab, streams=2):
        a, b = hosts[row["source"]].region, hosts[row["target"]].region
        if a != b:
            latency_s[a, b], bytes_per_s[a, b] = row["rtt_s"] / 2, row["bytes_per_s"]
    return replace(cluster, latency_s=latency_s, bytes_per_s=bytes_per_s)


def train(lab: Lab, problem: Problem, plan: Plan, steps: int, *, emulated: bool = True) -> list[dict[str, Any]]:
    """What rank 0 logs of every step of a run; what the ranks say goes to `TALK`."""
    with tempfile.TemporaryDirectory() as folder:
        options = Options(steps=steps, log_dir=Path(folder), device="cpu", emulate_devices=float(emulated))
        with TALK.open("a") as talk, contextlib.redirect_stderr(talk):
            train_in_lab(lab, problem, plan, options)
        return [line for line in log_lines(Path(folder), 0) if line["type"] == "step"]


def run_network(network: Network, args: argparse.Namespace, *, drawn: bool = False) -> list[dict[str, Any]]:
    """Measure and predict every plan on one network."""
    cluster = cluster_of(network)
    rows: list[dict[str, Any]] = []
    model = replace(MODEL, vocab_size=args.vocabulary)
    profiles = {waits: [profiled(model, PAUSE_S * waits)] if network.real else [] for waits in (False, True)}
    with Lab(lab_network(cluster)) as lab:
        # The slowest of five takes some as well; where sums are what is looked at, they are to be much of a step.
        batch = replace(BATCH, global_batch=12 if args.uneven else 24) if drawn else BATCH
        problem = Problem(cluster=measured_cluster(cluster, lab), model=model, batch=batch)
        tables = {waits: CostTables(problem, found) for waits, found in profiles.items()}
        of = partial(drawn_plans, uneven=args.uneven > 0) if drawn else plans_for
        for name, plan in of(problem, tables[False]).items():
            # Ranks of a pipeline wait before their passes, others do not.
            predicted = estimate(problem, plan, tables[len(plan.stages) > 1])
            lines = train(lab, problem, plan, args.steps, emulated=not network.real)
            steps_s = [line["seconds"] for line in lines]
            measured_s = float(np.median(steps_s[args.left_out :]))
            row: dict[str, Any] = {
                "network": network.name, "plan": name, "ranks": plan.world_size, "predicted_s": predicted.step_s,
                "measured_s": measured_s, "error": predicted.step_s / measured_s - 1, "terms": predicted.terms,
                "seconds_by_kind": lines[-1]["seconds_by_kind"], "steps_s": steps_s,
                "plan_file": plan_data(problem, plan), "emulated": not network.real,
            }  # fmt: skip
            rows.append(row)
            show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    print(
        f"{row['network']:<41}{row['plan']:<30}{row['ranks']:>3} ranks{1e3 * row['predicted_s']:>9.0f}"
        f"{1e3 * row['measured_s']:>9.0f} ms{100 * row['error']:>8.1f} %",
        flush=True,
    )


def show_errors(rows: Sequence[dict[str, Any]]) -> None:
    """Print what is to be said of the errors of some rows."""
    errors = [abs(row["error"]) for row in rows]
    tail = f"95th percentile {100 * np.percentile(errors, 95):.1f} %, largest {100 * max(errors):.1f} %"
    print(f"mean error {100 * np.mean(errors):.1f} %, {tail}, {len(rows)} plans")


def price_again(path: str) -> list[dict[str, Any]]:
    """Rows of a former run, but for layers profiled then, with what their plans are predicted to take now."""
    rows = [row for row in read_json(path)["rows"] if row["emulated"]]
    for row in rows:
        known = plan_from_spec(check(PlanSpec, row["plan_file"]))
        row["predicted_s"] = estimate(known.problem, known.plan).step_s
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        show(row)
    return rows


def run_networks(
    networks: Sequence[Network],
    run: Callable[[Network, argparse.Namespace], list[dict[str, Any]]],
    args: argparse.Namespace,
    header: str,
    out: Path,
) -> list[dict[str, Any]]:
    """Rows of the networks that `args.only` names; prints their mean error, and writes them."""
    TALK.parent.mkdir(exist_ok=True)
    TALK.write_text("")
    print(header)
    rows: list[dict[str, Any]] = []
    for network in networks:
        if args.only in network.name:
            rows += run(network, args)
            write_json(out, {"arguments": vars(args), "rows": rows})
    if not rows:
        raise SystemExit(f"--only: found {args.only}, expected a part of one of {[n.name for n in networks]}")
    show_errors(rows)
    return rows


def make_parser(description: str, steps: int) -> argparse.ArgumentParser:
    """What all programs over such networks take."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--steps", type=int, default=steps, help="of every run (default: %(default)s)")
    return parser


def main() -> None:
    """Measure, print, write."""
    parser = make_parser(__doc__ or "", STEPS)
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="N drawn networks instead")
    parser.add_argument("--uneven", type=int, default=0, metavar="N", help="N drawn networks of many hosts beside few")
    parser.add_argument(
        "--vocabulary", type=int, default=MODEL.vocab_size, metavar="N",
        help="of the model: with a large one the sum of its tied embedding is seen (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--sums", metavar="PLAN", help="what the stages of a plan exchange between regions instead")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the drawn networks (default: 0)")
    parser.add_argument(
        "--left-out", type=int, default=LEFT_OUT, help="steps at the begin that do not count (default: %(default)s)"
    )
    parser.add_argument("--again", metavar="FILE", help="price what a run measured (out/lab_prediction.json) anew")
    args = parser.parse_args()
    if args.again:
        show_errors(price_again(args.again))
        return
    if args.sums:
        TALK.parent.mkdir(exist_ok=True)
        show_errors(run_sums(args.sums, args.steps, args.left_out))
        return
    draw = uneven_network if args.uneven else drawn_network
    networks = [draw(args.first + i) for i in range(args.uneven or args.drawn)] or list(NETWORKS)
    header = f"{'network':<41}{'plan':<30}{'':>9}{'predicted':>9}{'measured':>9}{'error':>11}"
    run = partial(run_network, drawn=args.drawn + args.uneven > 0)
    rows = run_networks(networks, run, args, header, Path("out/lab_prediction.json"))
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == name]
        chosen = min(mine, key=lambda row: float(row["predicted_s"]))
        best = min(mine, key=lambda row: float(row["measured_s"]))
        regret = chosen["measured_s"] / best["measured_s"] - 1
        text = f"predicted best is {chosen['plan']}, {100 * regret:.1f} % over the measured best ({best['plan']})"
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
