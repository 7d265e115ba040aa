"""What links deliver: laws of the collectives' times."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygon import Cluster
from polygon.cost.estimate import Estimate, estimate
from polygon.cost.network import (
    CARD_EFFICIENCY,
    MESH,
    PCIE,
    SWITCH,
    Group,
    all_reduce_s,
    gather_s,
    intra_kernel,
    intra_node_all_reduce_s,
    ring_kernel,
    socket_share,
)
from polygon.cost.transfers import LinkTable
from polygon.domain.cluster import Link
from polygon.domain.model import Batch
from polygon.domain.plan import Plan, Problem, Stage, Worker
from polygon.formats import catalogue
from tests.nightly import cases

MEASURED = Path(__file__).parents[2] / "instances" / "measured"


def group(nodes: int, per_node: int, fabric: float = 300e9, node: float = 200e9) -> Group:
    return Group(
        members=nodes * per_node,
        per_node=per_node,
        devices_per_node=8,
        intra_node=Link(latency_s=2e-6, bytes_per_s=fabric),
        inter_node=Link(latency_s=5e-6, bytes_per_s=node),
    )


groups = st.builds(group, nodes=st.sampled_from([1, 2, 7, 64]), per_node=st.sampled_from([1, 2, 4, 8]))


@settings(deadline=None)
@given(group=groups, n_bytes=st.floats(1, 1e11))
def test_never_below_the_bound(group: Group, n_bytes: float):
    """An all-reduce moves 2(n-1)/n of the buffer through a port, a gather half of that."""
    n = group.members
    port = group.intra_node.bytes_per_s
    if group.nodes > 1:
        port = min(port, group.inter_node.bytes_per_s * group.per_node / 8) if group.per_node > 1 else 200e9 / 8
    assert all_reduce_s(n_bytes, group) >= 2 * (n - 1) / n * n_bytes / port * (1 - 1e-12)
    assert gather_s(n_bytes, group) >= (n - 1) / n * n_bytes / port * (1 - 1e-12)
    assert gather_s(n_bytes, group) <= all_reduce_s(n_bytes, group) + 64 * 2 * 8 * 6.3e-6 + 64 * 12e-6


@settings(deadline=None)
@given(group=groups, n_bytes=st.floats(1, 1e10), factor=st.floats(1, 20))
def test_longer_messages_and_slower_links_never_help(group: Group, n_bytes: float, factor: float):
    """Time grows with the size, and falls with bandwidth."""
    wide = Group(
        members=group.members,
        per_node=group.per_node,
        devices_per_node=8,
        intra_node=Link(latency_s=2e-6, bytes_per_s=300e9 * factor),
        inter_node=Link(latency_s=5e-6, bytes_per_s=200e9 * factor),
    )
    for cost in (all_reduce_s, gather_s):
        assert cost(n_bytes, group) <= cost(n_bytes * factor, group) * (1 + 1e-9)
        assert cost(n_bytes, wide) <= cost(n_bytes, group) * (1 + 1e-9)


def test_measured_all_reduces_are_met():
    """The tables are the measurement: 1 MB to 1 GB among two to eight A100 and V100 as nccl-tests timed them."""
    fits = json.loads((MEASURED / "allreduce_lut_fit.json").read_text())
    sizes = {"1MB": 1e6, "16MB": 16e6, "64MB": 64e6, "256MB": 256e6, "1GB": 1e9}
    for name, rate, mesh in (("a100", 300e9, SWITCH), ("v100", 150e9, MESH)):
        link = Link(latency_s=2e-6, bytes_per_s=rate)
        for n, (key, size) in itertools.product(range(2, 9), sizes.items()):
            expected = 2 * (n - 1) / n * size / (fits[f"{name}_{n}"][f"busbw_{key}"] * 1e9)
            assert intra_node_all_reduce_s(size, n, link, fabric=mesh) == pytest.approx(expected, rel=1e-6)


def test_many_nodes_are_as_inefficient_as_measured():
    """SimAI's efficiencies of 1, 4 and 16 GB on 16 and 128 nodes are met within 20 %."""
    table = json.loads((MEASURED / "collectives_calibration.json").read_text())["simai"]["nic_ratio"]
    nic = 8 * 48.5e9
    for nodes, column in ((16, 4), (128, 7)):
        for size in (2**30, 2**32, 2**34):
            measured = table["efficiency"][table["size_bytes"].index(size)][column]
            ring = ring_kernel(size, 8 * nodes, 8, 8, 1e15, 0.0, nic, 0.0, False, 1) * 2
            ideal = 2 * (8 * nodes - 1) / (8 * nodes) * size / min(nic, 370.8e9)
            assert ideal / ring == pytest.approx(measured, rel=0.2)


@settings(deadline=None, max_examples=cases(30))
@given(n_bytes=st.floats(1, 1e10), members=st.integers(1, 9), passes=st.sampled_from([1, 2]))
def test_kernels_equal_their_python(n_bytes: float, members: int, passes: int):
    """Compiled and interpreted agree."""
    for rate, mesh in ((3e11, SWITCH), (1.5e11, MESH)):
        args = (n_bytes, members, rate, 2e-6, mesh)
        assert intra_kernel(*args) == pytest.approx(intra_kernel.py_func(*args))
    args = (n_bytes, 8 * members, 4, 8, 3e11, 2e-6, 2e11, 5e-6, False, passes)
    assert ring_kernel(*args) == pytest.approx(ring_kernel.py_func(*args))


def test_sums_over_pcie_take_what_sailors_profiles_show():
    """A block of k Turing boards less a k-th of the block on one is two sums each way: those of 32 MB and more are
    predicted within 10 %."""
    took = {}
    for row in json.loads((MEASURED / "sailor_profiles.json").read_text())["compute"]:
        if row["model"] == "OPT-350" and row["gpu_type"] in ("RTX-2080", "Titan-RTX"):
            seconds = sum(np.median(row[f"{way}_s_per_layer"][1:-1]) for way in ("forward", "backward"))
            took[row["gpu_type"], row["tensor_parallel"], row["micro_batch_size_sequences"]] = seconds
    pcie, checked = Link(latency_s=5e-6, bytes_per_s=15.75e9), 0
    for (board, k, size), seconds in took.items():
        if k > 1 and size >= 4 and (board, 1, size) in took:
            four_s = 4 * intra_node_all_reduce_s(size * 2048 * 1024 * 4, k, pcie, fabric=PCIE)
            assert four_s == pytest.approx(seconds - took[board, 1, size] / k, rel=0.1)
            checked += 1
    assert checked > 8


def test_sockets_reach_of_fast_links_what_was_measured():
    """Shares of 10, 32 and 100 Gbit/s lie within nccl-tests' (those of `socket_share`); what is slower gets 0.9."""
    found = socket_share(np.array([1.0, 10.0, 32.0, 100.0]) * 1e9 / 8)
    assert found[:2] == pytest.approx(0.9)
    assert 0.46 <= found[2] <= 0.7 and 0.32 <= found[3] <= 0.48


def test_collectives_over_efa_take_what_nccl_tests_show():
    """Two latencies and one bandwidth: all-gathers within a quarter, large all-reduces within a sixth, on 4 to 32 nodes
    (between two a tree counts twice). Through sockets they would take five times as long."""
    measured = json.loads((MEASURED / "efa_collectives.json").read_text())
    fabric, network = catalogue.usual_link(measured["device"]), catalogue.link(measured["link"])
    checked = 0
    for operation, of, least, within in (("all_gather", gather_s, 64, 0.25), ("all_reduce", all_reduce_s, 2048, 0.17)):
        for nodes, mebibytes, rate in measured[operation]:
            if nodes > 2 and mebibytes >= least:
                joined = Group(members=8 * nodes, per_node=8, devices_per_node=8, intra_node=fabric, inter_node=network)
                n_bytes = mebibytes * 2**20
                assert of(n_bytes, joined) == pytest.approx(n_bytes / (rate * 1e9), rel=within), (operation, nodes)
                checked += 1
    assert checked == 36


def test_what_goes_through_sockets_is_said_or_told_by_latency():
    """EFA is RDMA and slow to begin, a 100-Gbit/s Ethernet is neither; a better latency does not change what it is."""
    efa, ethernet = catalogue.link("efa-3200g"), catalogue.link("ethernet-100g")
    assert efa.rdma and not efa.rdma_by_latency and not ethernet.rdma
    assert not replace(ethernet, latency_s=ethernet.latency_s / 10).rdma
    hall = {"name": "hall", "nodes": [{"device": "h100-sxm", "count": 2, "devices_per_node": 8}]}
    reached = [
        LinkTable(Cluster.from_dict({"regions": [hall | {"intra_region": link}]}).data).bytes_per_s[0, 0]
        for link in ("efa-3200g", {"latency_us": 30, "bandwidth_gbps": 3200})
    ]
    assert reached[0] == pytest.approx(CARD_EFFICIENCY * 400e9)
    assert reached[1] == pytest.approx(socket_share(np.array(400e9)) * 400e9)


def test_unlike_nodes_sum_at_the_rate_of_the_narrower_card():
    """One node with a card of 1 Gbit/s beside one of 25, on a network of 25: gradients and messages pass the former,
    as they do where the network itself has no more."""
    groups = [
        {
            "device": "rtx-3090",
            "count": 1,
            "devices_per_node": 2,
            "inter_node": {"latency_ms": 0.05, "bandwidth_gbps": 1},
        },
        {"device": "titan-rtx", "count": 1, "devices_per_node": 2, "inter_node": "ethernet-25g"},
    ]

    def step(rate: float) -> Estimate:
        region = {"name": "lab", "nodes": groups, "intra_region": {"latency_ms": 0.05, "bandwidth_gbps": rate}}
        cluster = Cluster.from_dict({"regions": [region]}).data
        model = replace(catalogue.model("gpt2-medium"), max_seq_len=512)
        problem = Problem(cluster=cluster, model=model, batch=Batch(global_batch=2, seq_len=512, precision="fp16"))
        workers = tuple(Worker(pool=i, devices=(2 * i,)) for i in range(2))
        stage = Stage(first_layer=0, last_layer=model.layers, workers=workers)
        plan = Plan(stages=(stage,), routes=np.array([[0], [1]]), micro_batch_size=1, spans=((1, 1),))
        return estimate(problem, plan)

    fast, slow = step(25), step(1)
    assert fast.terms["reduction"] == pytest.approx(slow.terms["reduction"])
    # Two nodes send each other as much as a gradient has: 355 million parameters of four bytes.
    assert fast.terms["reduction"] > 355e6 * 4 / 125e6 / 2
