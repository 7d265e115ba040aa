"""What is wrong with a host's network is named, with what mends it."""

import dataclasses

import pytest

from runners.probe_net.diagnose import HostFacts, connect_problem, host_problems

GOOD = HostFacts(
    rank=0,
    host="a",
    region="R",
    port=4000,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1"},
    used_address="10.0.0.1",
    hostname_address="10.0.0.1",
    wmem_bytes=1 << 26,
    rmem_bytes=1 << 27,
    boot_id="m0",
    seen_address="10.0.0.1",
)
OTHER = dataclasses.replace(
    GOOD, rank=1, host="b", boot_id="m1", used_address="10.0.0.2", seen_address="10.0.0.2",
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.2"}, hostname_address="10.0.0.2",
)  # fmt: skip


def problems_of(facts, links=()):
    return [(p.kind, p.found, p.remedy) for p in host_problems([facts, OTHER], list(links)) if p.rank == 0]


def test_a_good_host_has_no_problem():
    """Nothing is said where nothing is wrong, also with the right interface set, by name or NCCL prefix."""
    assert problems_of(GOOD) == []
    assert problems_of(dataclasses.replace(GOOD, wanted_interfaces={"NCCL_SOCKET_IFNAME": "eth"})) == []
    assert problems_of(dataclasses.replace(GOOD, wanted_interfaces={"GLOO_SOCKET_IFNAME": "eth0,eth0"})) == []
    assert problems_of(dataclasses.replace(GOOD, wanted_interfaces={"NCCL_SOCKET_IFNAME": "^docker"})) == []


@pytest.mark.parametrize(
    ("changes", "kind", "found", "remedy"),
    [
        ({"hostname_address": "127.0.1.1"}, "loopback", "resolves to 127.0.1.1", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"hostname_address": ""}, "loopback", "does not resolve", "export GLOO_SOCKET_IFNAME=eth0"),
        (
            {"wanted_interfaces": {"GLOO_SOCKET_IFNAME": "docker0"}},
            "wrong interface",
            "GLOO_SOCKET_IFNAME=docker0 (172.17.0.1), but the others are reached by eth0 (10.0.0.1)",
            "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
        ),
        (
            {"wanted_interfaces": {"NCCL_SOCKET_IFNAME": "ib0"}},
            "wrong interface",
            "there is no interface ib0",
            "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
        ),
        ({"seen_address": "203.0.113.9"}, "NAT", "calls itself 10.0.0.1, the others see 203.0.113.9", "WireGuard"),
    ],
)
def test_each_fault_is_named_with_its_remedy(changes, kind, found, remedy):
    """One fault, one problem."""
    ((its_kind, its_found, its_remedy),) = problems_of(dataclasses.replace(GOOD, **changes))
    assert its_kind == kind and found in its_found and remedy in its_remedy


def test_loopback_does_not_matter_on_one_machine():
    """Ranks of one machine may use the loopback."""
    alone = dataclasses.replace(GOOD, hostname_address="127.0.1.1")
    assert host_problems([alone, dataclasses.replace(OTHER, boot_id="m0")], []) == []


def test_small_windows_by_hand():
    """500 Mbit/s, 80 ms: 5e6 bytes under way, over 0.82 about 6.1e6 of buffer. 4 MiB give 344 Mbit/s; 8 MiB mend it."""
    link = {"source": 0, "target": 1, "rtt_s": 0.08, "link_bytes_per_s": 62.5e6}
    small = dataclasses.replace(GOOD, wmem_bytes=4 << 20, rmem_bytes=6 << 20)
    ((kind, found, remedy),) = problems_of(dataclasses.replace(small, rmem_bytes=1 << 27), [link])
    assert kind == "small TCP window" and "at most 344 of 500 Mbit/s" in found
    assert "net.ipv4.tcp_wmem='4096 65536 8388608' net.ipv4.tcp_rmem='4096 131072 16777216'" in remedy
    assert remedy.endswith("or 2 streams")
    ((_, found, _),) = problems_of(small, [link])
    assert "at most 258 of 500" in found  # half of tcp_rmem is the window
    assert problems_of(GOOD, [link]) == []


@pytest.mark.parametrize(
    ("error", "remedy"),
    [("timed out", "firewall drops"), ("[Errno 111] Connection refused", "firewall rejects"), ("No route", "ip route")],
)
def test_a_failed_connection_names_port_and_cause(error, remedy):
    """The address and port that could not be reached, and what to look at."""
    problem = connect_problem(0, OTHER, error)
    assert problem.kind == "blocked port" and "rank 1 at 10.0.0.2:4000" in problem.found and remedy in problem.remedy
