"""What is written can be read back: the same domain data, and the same bytes when written again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.errors import InputError
from polygon.domain.groups import Groups
from polygon.domain.model import Batch, Model
from polygon.domain.plan import (
    COMPRESSIONS,
    RECOMPUTE,
    REDUCTIONS,
    Constraints,
    LinkUse,
    Plan,
    Problem,
    Stage,
    SumTree,
    Worker,
)
from polygon.formats import catalogue, convert, convert_plan, files
from polygon.formats.schema import ClusterSpec, GroupsSpec, PlanSpec, check
from polygon.formats.serialization import MOST_YAML, format_json, format_yaml, parse_json, parse_yaml
from tests.exported_plans import of_dimensions
from tests.nightly import cases
from tests.small_problems import small_cluster, small_model, small_plan

positive = st.floats(1e4, 1e14)
links = st.builds(Link, latency_s=st.floats(0, 10), bytes_per_s=positive)
devices = [
    Device(name="own", memory_bytes=16e9, flops={"fp32": 1.7e13, "bf16": 1e14}, memory_bytes_per_s=9e11, power_w=250.0),
    catalogue.device("t4"),
    catalogue.device("h100-sxm"),
]


@st.composite
def clusters(draw):
    """Small clusters with any numbers in them, some pairs of regions without a link."""
    n = draw(st.integers(1, 4))
    regions = tuple(
        Region(
            name=f"r{r}",
            node_groups=tuple(
                NodeGroup(
                    device=draw(st.sampled_from(devices)).name,
                    nodes=draw(st.integers(1, 3)),
                    devices_per_node=draw(st.integers(1, 4)),
                    intra_node=draw(links),
                    inter_node=draw(links),
                    price_usd_per_hour=draw(st.none() | st.floats(0, 100)),
                )
                for _ in range(draw(st.integers(1, 2)))
            ),
            intra_region=draw(links),
            latitude=draw(st.none() | st.floats(-90, 90)),
            longitude=draw(st.none() | st.floats(-180, 180)),
            egress_usd_per_gb=draw(st.floats(0, 1)),
            egress_bytes_per_s=draw(st.just(math.inf) | positive),
        )
        for r in range(n)
    )
    latency_s, bytes_per_s = np.zeros((n, n)), np.zeros((n, n))
    capacity = np.full((n, n), math.inf)
    for a in range(n):
        for b in range(n):
            # Each region is joined to the next, so that no region is out of reach.
            if a != b and (abs(a - b) == 1 or draw(st.booleans())):
                latency_s[a, b], bytes_per_s[a, b] = draw(st.floats(0, 10)), draw(positive)
                capacity[a, b] = draw(st.just(math.inf) | positive)
        latency_s[a, a] = regions[a].intra_region.latency_s
        bytes_per_s[a, a] = regions[a].intra_region.bytes_per_s
    used = {group.device for region in regions for group in region.node_groups}
    return Cluster(
        name=draw(st.text("abc-é", min_size=1)),
        regions=regions,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        capacity_bytes_per_s=capacity,
        catalogue={device.name: device for device in devices if device.name in used},
        stages=draw(st.none() | st.integers(1, 9)),
    )


MODEL = Model(
    name="m", blocks=6, hidden_size=64, heads=4, kv_heads=2, head_dim=16, ffn_size=96, vocab_size=99, max_seq_len=32
)


@st.composite
def problems(draw):
    """A cluster with a model, a batch and constraints."""
    cluster = draw(clusters())
    names = [region.name for region in cluster.regions]
    return Problem(
        cluster=cluster,
        model=MODEL,
        batch=Batch(
            global_batch=draw(st.integers(1, 64)), seq_len=32, precision=draw(st.sampled_from(["fp32", "bf16"]))
        ),
        constraints=Constraints(
            memory_headroom=draw(st.floats(0, 0.99)),
            forbidden_regions=tuple(draw(st.lists(st.sampled_from(names), unique=True))),
            compressions=tuple(draw(st.lists(st.sampled_from(COMPRESSIONS), unique=True))),
        ),
        runtime=dataclasses.replace(
            draw(st.sampled_from(list(catalogue.runtimes().values()))),
            **draw(st.sampled_from([{}, {"dp_overlap": "none"}, {"fused": False, "bucket_bytes": 1e6}])),
        ),
    )


def relays(regions):
    """Parents of some regions."""
    region = st.integers(0, regions - 1)
    return st.dictionaries(region, region, max_size=2)


@st.composite
def plans(draw):
    """A problem and a plan that refers to it rightly (it need not be a good plan)."""
    problem = draw(problems())
    pools = problem.cluster.pools
    free = {pool.index: list(range(pool.first_device, pool.first_device + pool.devices)) for pool in pools}
    stages = []
    for _ in range(draw(st.integers(1, 3))):
        workers = []
        for _ in range(draw(st.integers(1, 3))):
            pool = draw(st.sampled_from([index for index in free if free[index]] or [None]))
            if pool is None:
                break
            size = draw(st.integers(1, len(free[pool])))
            picked = draw(st.permutations(free[pool]))[:size]
            free[pool] = [device for device in free[pool] if device not in picked]
            cp = draw(st.sampled_from([cp for cp in range(1, size + 1) if size % cp == 0]))
            workers.append(Worker(pool=pool, devices=tuple(picked), cp=cp))
        if not workers:
            break
        first = draw(st.integers(0, MODEL.layers - 1))
        last = draw(st.integers(first + 1, MODEL.layers))
        zero, recompute = draw(st.integers(0, 3)), draw(st.sampled_from(RECOMPUTE))
        stages.append(
            Stage(
                first_layer=first,
                last_layer=last,
                workers=tuple(workers),
                zero=zero,
                shards=draw(st.integers(0, 3)),
                recompute=recompute,
                sequence_parallel=draw(st.booleans()),
                ep=draw(st.integers(1, 3)),
                trees=tuple(
                    SumTree(
                        part=draw(st.floats(0, 1, exclude_min=True)),
                        root=draw(st.integers(0, len(problem.cluster.regions) - 1)),
                        relays=tuple(sorted(draw(relays(len(problem.cluster.regions))).items())),
                    )
                    for _ in range(draw(st.integers(0, 2)))
                ),
            )
        )
    micro_batches = draw(st.integers(1, 5))
    routes = [[draw(st.integers(0, stage.width - 1)) for stage in stages] for _ in range(micro_batches)]
    n = len(problem.cluster.regions)
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), unique=True, max_size=4))
    plan = Plan(
        stages=tuple(stages),
        routes=np.array(routes),
        micro_batch_size=draw(st.integers(1, 4)),
        spans=tuple(tuple(draw(st.integers(1, 9)) for _ in stage.workers) for stage in stages),
        links=tuple(
            LinkUse(
                source=a, target=b, activations=draw(st.sampled_from(COMPRESSIONS)), streams=draw(st.integers(1, 8))
            )
            for a, b in sorted(pairs)
        ),
        reduction=draw(st.sampled_from(REDUCTIONS)),
        local_steps=draw(st.integers(1, 64)),
        solver=draw(st.sampled_from(["", "genetic"])),
        seed=draw(st.integers(0, 2**40)),
    )
    return problem, plan


def assert_same_cluster(a, b):
    """Equal but for the last digit of numbers that no decimal in the file's unit gives exactly."""

    def numbers(cluster):
        data = convert.cluster_data(cluster)
        flat: list[float] = []

        def shape(value):
            if isinstance(value, dict):
                return {key: shape(item) for key, item in value.items()}
            if isinstance(value, list):
                return [shape(item) for item in value]
            if isinstance(value, (int, float)):
                flat.append(value)
                return "number"
            return value

        return shape(data), flat

    (shape_a, flat_a), (shape_b, flat_b) = numbers(a), numbers(b)
    assert shape_a == shape_b
    np.testing.assert_allclose(flat_a, flat_b, rtol=4e-16)
    np.testing.assert_allclose(a.latency_s, b.latency_s, rtol=4e-16)
    np.testing.assert_allclose(a.bytes_per_s, b.bytes_per_s, rtol=4e-16)
    np.testing.assert_allclose(a.capacity_bytes_per_s, b.capacity_bytes_per_s, rtol=4e-16)


def reread(schema, convert_from, data, text_format, parse):
    """Write as text, parse, check, convert."""
    return convert_from(check(schema, parse(text_format(data))))


@pytest.mark.parametrize(("text_format", "parse"), [(format_json, parse_json), (format_yaml, parse_yaml)])
@given(cluster=clusters())
@settings(max_examples=cases(40), deadline=None)
def test_cluster_survives_its_file(text_format, parse, cluster):
    """Reading what was written gives the cluster; writing that again gives the same text (a fixed point)."""
    once = reread(ClusterSpec, convert.cluster_from_spec, convert.cluster_data(cluster), text_format, parse)
    assert_same_cluster(cluster, once)
    text = text_format(convert.cluster_data(once))
    again = convert.cluster_from_spec(check(ClusterSpec, parse(text)))
    assert text_format(convert.cluster_data(again)) == text
    assert again.regions == once.regions
    np.testing.assert_array_equal(again.bytes_per_s, once.bytes_per_s)


@given(case=plans())
@settings(max_examples=cases(60), deadline=None)
def test_plan_survives_its_file(case):
    """Stages, routes, spans, links and options come back equal, and the text is a fixed point."""
    problem, plan = case
    data = convert_plan.plan_data(problem, plan, {"step_s": 1.5})
    back = reread(PlanSpec, convert_plan.plan_from_spec, data, format_json, parse_json)
    assert back.estimate == {"step_s": 1.5}
    assert back.problem.model == problem.model
    assert back.problem.batch == problem.batch
    assert back.problem.runtime == problem.runtime
    assert dataclasses.asdict(back.problem.constraints) == dataclasses.asdict(problem.constraints)
    assert_same_cluster(back.problem.cluster, problem.cluster)
    np.testing.assert_array_equal(back.plan.routes, plan.routes)
    for field in dataclasses.fields(Plan):
        if field.name != "routes":
            assert getattr(back.plan, field.name) == getattr(plan, field.name)
    text = format_json(convert_plan.plan_data(*back))
    assert format_json(convert_plan.plan_data(*convert_plan.plan_from_spec(check(PlanSpec, parse_json(text))))) == text


def test_stages_shorter_than_what_uniform_splits_recompute_are_read_back():
    """A file says how many blocks a stage recomputes, of no more than it has."""
    problem, plan, _ = of_dimensions("llama3-8b", {"dp": 2, "cp": 2, "pp": 4})
    stages = tuple(
        dataclasses.replace(stage, recompute="full", recompute_blocks=9 - s) for s, stage in enumerate(plan.stages)
    )
    data = convert_plan.plan_data(problem, dataclasses.replace(plan, stages=stages))
    assert [stage["recompute_blocks"] for stage in data["stages"]] == [8, 8, 7, 6]
    _, again, _ = convert_plan.plan_from_spec(check(PlanSpec, parse_json(format_json(data))))
    assert [stage.recomputed_until for stage in again.stages] == [stage.recomputed_until for stage in stages]


@given(problem=problems(), data=st.data())
@settings(max_examples=cases(40), deadline=None)
def test_groups_survive_their_file(problem, data):
    """The allocation comes back equal."""
    pools = problem.cluster.pools
    stages = data.draw(st.integers(1, 3))
    allocation = np.zeros((stages, len(pools)), dtype=int)
    for p, pool in enumerate(pools):
        for _ in range(pool.devices):
            allocation[data.draw(st.integers(0, stages - 1)), p] += 1
    allocation = allocation[allocation.sum(axis=1) > 0]
    groups = Groups(problem=problem, allocation=allocation, objective={"total": 2.5}, solver="ants", seed=3)
    back = reread(GroupsSpec, convert_plan.groups_from_spec, convert_plan.groups_data(groups), format_json, parse_json)
    np.testing.assert_array_equal(back.allocation, allocation)
    assert (back.objective, back.solver, back.seed) == ({"total": 2.5}, "ants", 3)


def test_numbers_that_people_write_come_back_exactly():
    """What a file says in ms, Gbit/s and GiB is written again with the same digits."""
    for ms in (0.1, 0.003, 5, 30, 123.45, 0.0017):
        assert convert.to_ms(ms / 1e3) == ms
    for gbps in (0.332, 1.119, 1.2, 100, 2400, 0.05):
        assert convert.to_gbps(gbps * 1e9 / 8) == gbps


def big_plan():
    """10,240 devices in 64 stages, 4,096 micro-batches."""
    regions = [{"name": f"r{i}", "nodes": [{"device": "a100", "count": 20, "devices_per_node": 8}]} for i in range(64)]
    spec = {"regions": regions, "latency_ms": [[10.0] * 64] * 64, "bandwidth_gbps": [[1.0] * 64] * 64}
    cluster = convert.cluster_from_spec(check(ClusterSpec, spec))
    model = dataclasses.replace(MODEL, blocks=62)
    problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=4096, seq_len=32))
    stages = tuple(
        Stage(
            first_layer=s,
            last_layer=s + 1,
            workers=tuple(Worker(pool=s, devices=(device,)) for device in range(160 * s, 160 * s + 160)),
        )
        for s in range(64)
    )
    routes = np.tile(np.arange(4096)[:, None] % 160, (1, 64))
    return problem, Plan(stages=stages, routes=routes, micro_batch_size=1, spans=((160,) * 160,) * 64)


def test_large_plan(tmp_path):
    """A plan of ten thousand devices goes through a file unchanged, and the file stays small."""
    problem, plan = big_plan()
    file = tmp_path / "plan.json"
    files.write_plan(file, problem, plan)
    back = files.read_plan(file)
    assert back.plan.stages == plan.stages
    np.testing.assert_array_equal(back.plan.routes, plan.routes)
    assert file.stat().st_size < 3e6


def test_devices_are_written_as_runs():
    """Consecutive device numbers shrink to [first, count]; the order of a tensor-parallel group is kept."""
    worker = {"devices": (4, 5, 6, 7, 3, 9)}
    assert convert_plan._runs(worker["devices"]) == [[4, 4], [3, 1], [9, 1]]


def test_defaults_of_a_short_cluster_file(tmp_path):
    """Three lines are a cluster: the device's usual link inside a node, 0.5 ms and 10 Gbit/s between nodes."""
    file = tmp_path / "short.yaml"
    file.write_text("regions:\n  - name: lab\n    nodes: [{device: A100, count: 2}]\n", encoding="utf-8")
    cluster = files.read_cluster(file)
    (pool,) = cluster.pools
    assert cluster.name == "short"
    assert (pool.device.name, pool.devices, pool.devices_per_node) == ("a100-40gb", 2, 1)
    assert pool.intra_node == catalogue.link("nvlink3")
    assert pool.inter_node == cluster.regions[0].intra_region == convert.DEFAULT_INTRA_REGION


OWN = """
name: own
description: bought second-hand
source: the seller's list
devices:
  mine: {memory_gib: 24, tflops: {fp32: 30, bf16: 120}, memory_bandwidth_gb_per_s: 900, power_w: 300, link: nvlink4,
    clock: 1.1}
  plain: {memory_gib: 24, tflops: {fp32: 30, bf16: 120}, memory_bandwidth_gb_per_s: 900, power_w: 300}
regions:
- name: a
  nodes: [{device: mine, count: 2, devices_per_node: 8}, {device: plain, count: 1, devices_per_node: 2}]
"""


def test_the_link_of_an_own_device_is_given_and_stays(tmp_path):
    """What its entry says joins its devices is nobody's guess, in the file that is written as well; of a device that
    says nothing PCIe is assumed. What the file says of itself stays too."""
    file, written = tmp_path / "own.yaml", tmp_path / "written.yaml"
    file.write_text(OWN, encoding="utf-8")
    first = files.read_cluster(file)
    files.write_cluster(written, first)
    for cluster in (first, files.read_cluster(written)):
        mine, plain = cluster.regions[0].node_groups
        assert mine.intra_node == cluster.catalogue["mine"].link == catalogue.link("nvlink4")
        assert plain.intra_node == catalogue.link("pcie3-x16") and cluster.catalogue["plain"].link is None
        assert (cluster.catalogue["mine"].clock, cluster.catalogue["plain"].clock) == (1.1, 1.0)
        assert cluster.defaults == ("a.intra_region", "a.nodes[1].intra_node")
        assert (cluster.description, cluster.source) == ("bought second-hand", "the seller's list")
    again = parse_yaml(written.read_text("utf-8"))
    again["regions"][0]["nodes"][0].pop("intra_node")
    assert cluster_of(again).regions[0].node_groups[0].intra_node == catalogue.link("nvlink4")


def test_the_links_of_catalogue_devices_are_assumed_also_where_a_file_spells_the_devices_out():
    """A file that was written has them with their numbers; without the node's link it is still the catalogue's."""
    nodes = [{"device": "h100-sxm", "count": 2, "devices_per_node": 8}]
    written = convert.cluster_data(cluster_of({"name": "c", "regions": [{"name": "a", "nodes": nodes}]}))
    assert "link" not in written["devices"]["h100-sxm"]
    assert cluster_of(written).defaults == ("a.intra_region", "a.nodes[0].intra_node")
    del written["regions"][0]["nodes"][0]["intra_node"]
    assert cluster_of(written).regions[0].node_groups[0].intra_node == catalogue.usual_link("h100-sxm")


def test_an_edited_value_under_defaults_has_been_given(tmp_path):
    """`defaults` of a written file names what was assumed; whoever puts another value there has said it."""
    places = [{"latitude": 47.4, "longitude": 8.5}, {"latitude": 46.5, "longitude": 6.6}]
    data = {"name": "c", "regions": [
        {"name": name, **place, "nodes": [{"device": "t4", "count": 2, "devices_per_node": 4}]}
        for name, place in zip("ab", places, strict=True)]}  # fmt: skip
    written = convert.cluster_data(cluster_of(data))
    every = ["a.intra_region", "a.nodes[0].intra_node", "b.intra_region", "b.nodes[0].intra_node", "a - b"]
    assert written["defaults"] == every and list(cluster_of(written).defaults) == every
    region, node = written["regions"][0], written["regions"][1]["nodes"][0]
    region["intra_region"] = {"latency_ms": 0.5, "bandwidth_gbps": 100}
    node["intra_node"] = {"latency_ms": 0.006, "bandwidth_gbps": 200}
    written["bandwidth_gbps"][1][0] = 2
    cluster = cluster_of(written)
    assert cluster.defaults == ("a.nodes[0].intra_node", "b.intra_region")
    assert cluster.regions[0].intra_region.bytes_per_s == 100e9 / 8 and cluster.bytes_per_s[1, 0] == 2e9 / 8
    assert cluster.regions[1].node_groups[0].intra_node.bytes_per_s == 200e9 / 8


def cluster_of(data):
    return convert.cluster_from_spec(check(ClusterSpec, data))


def test_directed_link_and_capacity(tmp_path):
    """`from`/`to` gives one direction, `capacity_gbps` what all flows share, and links override matrices."""
    text = """
regions:
  - {name: a, egress_gbps: 4, nodes: [{device: t4, count: 1}]}
  - {name: b, nodes: [{device: t4, count: 1}]}
latency_ms: [[0, 10], [10, 0]]
bandwidth_gbps: [[0, 1], [1, 0]]
links:
  - {from: a, to: b, latency_ms: 12, bandwidth_gbps: 2, capacity_gbps: 8}
"""
    file = tmp_path / "directed.yaml"
    file.write_text(text, encoding="utf-8")
    cluster = files.read_cluster(file)
    assert cluster.latency_s[0, 1] == 0.012 and cluster.latency_s[1, 0] == 0.010
    assert cluster.bytes_per_s[0, 1] == 2.5e8 and cluster.bytes_per_s[1, 0] == 1.25e8
    assert cluster.capacity_bytes_per_s[0, 1] == 1e9 and cluster.capacity_bytes_per_s[1, 0] == math.inf
    assert cluster.regions[0].egress_bytes_per_s == 5e8


def test_problem_file_with_names(tmp_path):
    """A problem file may name its cluster by path and its model by the catalogue."""
    (tmp_path / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 2}]}]\n", encoding="utf-8")
    problem = tmp_path / "problem.yaml"
    problem.write_text(
        "format: polygon-problem\ncluster: lab.yaml\nmodel: gpt3-1.3b\nbatch: {global_batch: 8, seq_len: 2048}\n",
        encoding="utf-8",
    )
    read = files.read_problem(problem)
    assert read.cluster.name == "lab" and read.model == catalogue.model("gpt3-1.3b")
    either = files.read_cluster_or_problem(problem)
    assert isinstance(either, Problem) and either.model == read.model
    assert isinstance(files.read_cluster_or_problem(tmp_path / "lab.yaml"), Cluster)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lab.yaml", "lob.yaml", "cluster: {folder}/lob.yaml: found no such file, expected a file"),
        ("gpt3-1.3b", "gpt3-1.4b", "model: found model 'gpt3-1.4b', expected 'gpt3-1.3b' (nearest) or another of"),
        ("seq_len: 2048", "seq_len: 4096", "batch.seq_len: found 4096, expected at most 2048"),
        ("global_batch: 8,", "", "batch.global_batch: found nothing, expected a whole number"),
    ],
)
def test_faults_of_a_problem_file(old, new, message, tmp_path):
    """The message begins with the problem's file, then says what in it is wrong."""
    (tmp_path / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 2}]}]\n", encoding="utf-8")
    text = "format: polygon-problem\ncluster: lab.yaml\nmodel: gpt3-1.3b\nbatch: {global_batch: 8, seq_len: 2048}\n"
    problem = tmp_path / "problem.yaml"
    problem.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError) as error:
        files.read_cluster_or_problem(problem)
    assert str(error.value).startswith(f"{problem}: {message.format(folder=tmp_path)}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("megatron-cor", "runtime: found runtime 'megatron-cor', expected 'megatron-core' (nearest) or another of"),
        ("{name: nemo, dp_overlap: some}", "runtime.dp_overlap: found 'some', expected none or backward or full"),
        ("{name: nemo, update: x}", "runtime.update: found 'x', expected fused or apart or operations"),
        ("{name: nemo, experts: half}", "runtime.experts: found 'half', expected cut or whole"),
        ("{name: nemo, buckets: 3}", "runtime.buckets: found unknown key 'buckets', expected 'bucket_bytes'"),
        ("{dp_overlap: none}", "runtime.name: found nothing, expected a text"),
    ],
)
def test_faults_of_a_runtime(given, message, tmp_path):
    """A program or a switch that nobody knows is refused, with the nearest."""
    (tmp_path / "lab.yaml").write_text("regions: [{name: lab, nodes: [{device: t4, count: 2}]}]\n", encoding="utf-8")
    text = "format: polygon-problem\ncluster: lab.yaml\nmodel: gpt3-1.3b\nbatch: {global_batch: 8, seq_len: 2048}\n"
    (tmp_path / "problem.yaml").write_text(f"{text}runtime: {given}\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        files.read_problem(tmp_path / "problem.yaml")
    assert str(error.value).startswith(f"{tmp_path / 'problem.yaml'}: {message}")


def interleaved():
    """Plan data of two workers that hold two stages each."""
    problem = Problem(
        cluster=small_cluster(1, 1), model=small_model(), batch=Batch(global_batch=8, seq_len=16, precision="fp32")
    )
    plan = small_plan(problem.cluster, [(0, 2), (2, 3), (3, 4), (4, 6)], [[0], [1], [0], [1]], [[0] * 4] * 4)
    return convert_plan.plan_data(problem, dataclasses.replace(plan, chunks=2))


def test_chunks_share_workers():
    """Stage s + n / chunks is on the workers of stage s, and nothing else may use a device twice; ranks are two."""
    back = convert_plan.plan_from_spec(check(PlanSpec, parse_json(format_json(interleaved()))))
    assert back.plan.chunks == 2
    assert back.plan.world_size == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": 1}, "stages[2].workers[0].devices[0]: found [0, 1], expected devices that no other worker holds"),
        ({"chunks": 3}, "chunks: found 3, expected a divisor of the 4 stages"),
        ({"chunks": 0}, "chunks: found 0, expected a divisor of the 4 stages"),
        ({"chunks": 4}, "stages[1].workers: found other workers, expected those of the first chunk's stage"),
        ({"cp": 2}, "stages[0].workers[0].cp: found 2, expected a divisor of the 1 devices"),
    ],
)
def test_faults_of_chunks_and_parts(change, message):
    """A plan that repeats devices otherwise, or cuts a sequence over a number that is no divisor, is refused."""
    data = parse_json(format_json(interleaved()))
    data["stages"][0]["workers"][0] |= {"cp": change.pop("cp", 1)}
    with pytest.raises(InputError) as error:
        convert_plan.plan_from_spec(check(PlanSpec, data | change))
    assert str(error.value).startswith(message)


def test_documented_examples_are_true(tmp_path):
    """Every YAML example of the documentation is read by the reader that it documents."""
    text = (Path(__file__).parents[2] / "docs" / "file-formats.md").read_text("utf-8")
    cluster, matrices, model, problem = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "lab.yaml").write_text(cluster, encoding="utf-8")
    lab = files.read_cluster(tmp_path / "lab.yaml")
    assert lab.devices == 2 * 8 + 5 * 4 + 4
    with_matrices = cluster[: cluster.index("links:")] + matrices
    (tmp_path / "matrices.yaml").write_text(with_matrices, encoding="utf-8")
    again = files.read_cluster(tmp_path / "matrices.yaml")
    np.testing.assert_array_equal(again.bytes_per_s, lab.bytes_per_s)
    np.testing.assert_array_equal(again.capacity_bytes_per_s, lab.capacity_bytes_per_s)
    (tmp_path / "model.yaml").write_text(model, encoding="utf-8")
    llama = dataclasses.replace(catalogue.model("llama3-8b"), name="mine", source="")
    assert files.read_model(tmp_path / "model.yaml") == llama
    (tmp_path / "problem.yaml").write_text(problem, encoding="utf-8")
    read = files.read_problem(tmp_path / "problem.yaml")
    assert read.batch.global_batch == 1024
    assert read.runtime == dataclasses.replace(catalogue.runtime("megatron-core"), dp_overlap="none")


def test_write_is_atomic_and_keeps_the_mode(tmp_path, monkeypatch):
    """When writing fails half way the old file is whole and nothing lies beside it; its permissions stay."""
    file = tmp_path / "plan.json"
    files.write_json(file, {"a": 1})
    file.chmod(0o640)
    files.write_json(file, {"a": 2})
    assert file.stat().st_mode & 0o777 == 0o640
    monkeypatch.setattr(os, "fdopen", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(InputError, match=r"plan\.json: cannot be written"):
        files.write_json(file, {"a": 3})
    assert json.loads(file.read_text("utf-8")) == {"a": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_standard_streams(capsys, monkeypatch):
    """`-` is standard output for writers; a device file is written, not replaced."""
    files.write_json("-", {"a": np.int64(1), "b": np.array([1.5, math.nan])})
    assert capsys.readouterr().out == '{"a": 1, "b": [1.5, null]}\n'
    files.write_text("/dev/null", "gone")
    assert not os.path.isfile("/dev/null")  # noqa: PTH113


def test_reading_files_stays_cheap():
    """`polygon.formats.files` brings in no heavy library: what it imports decides how fast every command answers."""
    import subprocess

    program = "import sys, polygon.formats.files; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()).isdisjoint({"scipy", "numba", "networkx", "torch", "rich", "yaml", "joblib"})


def test_what_is_too_large_is_refused_early(tmp_path):
    """An endless file, megabytes of YAML, thousands of regions, a hundred thousand keys of which one comes twice."""
    with pytest.raises(InputError, match=r"/dev/zero: found more than \d+ bytes"):
        files.read_yaml("/dev/zero")
    many = tmp_path / "many.yaml"
    many.write_text("- 1\n" * (MOST_YAML // 4 + 1))
    with pytest.raises(InputError, match=r"many\.yaml: found 16777220 characters of YAML, expected at most 16777216"):
        files.read_yaml(many)
    many.write_text(
        json.dumps({"regions": [{"name": f"r{i}", "nodes": [{"device": "t4", "count": 1}]} for i in range(1001)]})
    )
    with pytest.raises(InputError, match=r"many\.yaml: regions: found 1001, expected at most 1000"):
        files.read_cluster(many)
    pairs = "".join(f'"{i}": 1, ' for i in range(100_000))
    with pytest.raises(InputError, match="found key '7' twice"):
        parse_json("{" + pairs + '"7": 2}')
