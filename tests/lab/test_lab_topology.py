"""Which hosts a cluster becomes, and what every pair of them is given."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polygon.domain.cluster import Cluster, Device, Link, NodeGroup, Region
from polygon.domain.errors import InputError
from polygon.domain.plan import Plan, Stage, Worker
from runners.lab_net.topology import MAX_HOSTS, host_label, lab_network

LINK = Link(latency_s=1e-4, bytes_per_s=1e9)
DEVICE = Device(name="D", memory_bytes=1e9, flops={"fp32": 1e12}, memory_bytes_per_s=1e11, power_w=10.0)


def cluster_of(nodes, *, names=None, capacity=np.inf, egress=np.inf):
    """Regions with the given numbers of nodes per group, two devices a node, joined by 10 ms and 1e7 bytes/s."""
    n = len(nodes)
    regions = tuple(
        Region(
            name=names[r] if names else f"R{r}",
            node_groups=tuple(
                NodeGroup(device="D", nodes=count, devices_per_node=2, intra_node=LINK, inter_node=LINK)
                for count in groups
            ),
            intra_region=Link(latency_s=2e-4, bytes_per_s=5e8),
            egress_bytes_per_s=egress,
        )
        for r, groups in enumerate(nodes)
    )
    return Cluster(
        name="c",
        regions=regions,
        latency_s=np.full((n, n), 0.01),
        bytes_per_s=np.full((n, n), 1e7),
        capacity_bytes_per_s=np.full((n, n), capacity),
        catalogue={"D": DEVICE},
    )


@given(
    nodes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=4), limit=st.integers(1, 4)
)
def test_hosts_have_different_names_addresses_and_devices(nodes, limit):
    """A host is one node: names, addresses and devices never repeat, and a region has at most the hosts asked for."""
    network = lab_network(cluster_of(nodes), hosts_per_region=limit)
    for values in ([h.name for h in network.hosts], [h.address for h in network.hosts]):
        assert len(set(values)) == len(values)
    devices = [device for host in network.hosts for device in host.devices]
    assert len(set(devices)) == len(devices) == 2 * len(network.hosts)
    for r, groups in enumerate(nodes):
        assert sum(host.region == r for host in network.hosts) == min(limit, sum(groups))


def test_pairs_get_the_link_that_the_cluster_says():
    """Same group: its inter-node link; same region: the region's; other regions: the matrices; no host to itself."""
    network = lab_network(cluster_of([[2, 1], [1]]))
    assert [host.name for host in network.hosts] == ["r0-0", "r0-1", "r0-2", "r1-0"]
    assert network.bytes_per_s[0, 1] == 1e9 and network.latency_s[0, 1] == 1e-4
    assert network.bytes_per_s[0, 2] == 5e8 and network.latency_s[2, 1] == 2e-4
    assert network.bytes_per_s[2, 3] == 1e7 and network.latency_s[3, 0] == 0.01
    assert not network.bytes_per_s.diagonal().any()


def test_a_limit_leaves_no_device_type_out():
    """With two node groups and two hosts a region, each group has a host."""
    network = lab_network(cluster_of([[3, 3]]), hosts_per_region=2)
    assert {host.pool for host in network.hosts} == {0, 1}


def test_shared_capacities_name_all_their_pairs():
    """A finite capacity of a region pair and of an egress is shared by every ordered host pair that crosses it."""
    network = lab_network(cluster_of([[2], [1]], capacity=2e7, egress=3e7))
    shared = {item.name: item for item in network.shared}
    assert shared["R0->R1"].pairs == ((0, 2), (1, 2)) and shared["R0->R1"].bytes_per_s == 2e7
    assert shared["egress of R1"].pairs == ((2, 0), (2, 1)) and shared["egress of R1"].bytes_per_s == 3e7


def test_plan_keeps_only_the_nodes_it_uses():
    """A plan on devices 2 and 7 (two a node) needs the nodes 1 and 3 only."""
    cluster = cluster_of([[2], [2]])
    stages = tuple(
        Stage(first_layer=s, last_layer=s + 1, workers=(Worker(pool=s, devices=(device,)),))
        for s, device in enumerate((2, 7))
    )
    plan = Plan(stages=stages, routes=np.zeros((1, 2), int), micro_batch_size=1, spans=((1,), (1,)))
    network = lab_network(cluster, plan=plan)
    assert [host.devices for host in network.hosts] == [(2, 3), (6, 7)]
    assert network.host_of_device(7).index == 1
    with pytest.raises(InputError, match="--hosts-per-region"):
        lab_network(cluster, plan=plan, hosts_per_region=1)


def test_too_many_hosts_are_refused_with_the_way_out():
    """More nodes than the lab can hold name the option that chooses."""
    with pytest.raises(InputError, match="--hosts-per-region"):
        lab_network(cluster_of([[MAX_HOSTS + 1]]))


@given(st.text(max_size=60))
def test_labels_are_host_names(name):
    """Whatever a region is called, its label is a host name."""
    label = host_label(name)
    assert label and label == label.strip("-") and all(c.isascii() and (c.isalnum() or c == "-") for c in label)


def test_regions_whose_labels_collide_stay_apart():
    """`us east` and `us-east` become different hosts."""
    network = lab_network(cluster_of([[1], [1]], names=["us east", "us-east"]))
    assert len({host.name for host in network.hosts}) == 2


def test_a_card_that_links_fill_together_is_shared_by_all_that_leaves_or_enters_its_host():
    """Two links of 6e8 bytes/s to other regions over a card of 1e9, or to two nodes of its own region; one link alone,
    or narrow ones, need none."""
    wide = replace(cluster_of([[1], [1], [1]]), bytes_per_s=np.full((3, 3), 6e8))
    shared = {item.name: item for item in lab_network(wide).shared}
    assert len(shared) == 6
    assert all(item.bytes_per_s == 1e9 for item in shared.values())
    assert shared["card out of r0-0"].pairs == ((0, 1), (0, 2))
    assert shared["card into r2-0"].pairs == ((0, 2), (1, 2))
    inside = {item.name: item.pairs for item in lab_network(cluster_of([[3]])).shared}
    assert len(inside) == 6 and inside["card out of r0-1"] == ((1, 0), (1, 2))
    assert not lab_network(cluster_of([[2]])).shared
    assert not lab_network(cluster_of([[1], [1], [1]])).shared
    assert not lab_network(replace(cluster_of([[1], [1]]), bytes_per_s=np.full((2, 2), 6e8))).shared
