"""What is wrong with a host's network for training, and the exact remedy. Pure; `host_facts` gathers what is judged."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
WINDOW_SHARE = 0.82
"""See `runners.probe_net.fit.WINDOW_SHARE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a rank says of itself when it joins the probe."""

    rank: int
    host: str
    region: str
    port: int
    """Of its data server."""
    interfaces: dict[str, str]
    """IPv4 address by interface."""
    used_address: str
    """The address from which it reached the coordinator."""
    hostname_address: str
    """What its host name resolves to; empty where it does not."""
    wanted_interfaces: dict[str, str] = field(default_factory=dict)
    """Interface variables that are set (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."""
    wmem_bytes: int = 0
    rmem_bytes: int = 0
    congestion: str = ""
    boot_id: str = ""
    """Tells machines apart; the same for two ranks of one machine."""
    seen_address: str = ""
    """The address that the coordinator saw; filled in there."""

    @property
    def interface(self) -> str:
        """The interface that holds the used address; empty where none does."""
        return next((name for name, address in self.interfaces.items() if address == self.used_address), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFault:
    """One thing that is wrong, where, and what mends it."""

    kind: str
    rank: int
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.found}; {self.remedy}"


def interface_addresses() -> dict[str, str]:
    """IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def _sysctl(name: str) -> str:
    try:
        return (Path("/proc/sys/net/ipv4") / name).read_text().strip()
    except OSError:
        return ""  # not Linux, or hidden in a container


def machine() -> str:
    """A name that tells machines apart (the kernel's boot id); empty where there is none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def host_facts(rank: int, region: str, port: int, used_address: str) -> HostFacts:
    """Gather what this host says of itself."""
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = ""
    return HostFacts(
        rank=rank,
        host=os.environ.get("POLYGON_HOST") or socket.gethostname(),
        region=region,
        port=port,
        interfaces=interface_addresses(),
        used_address=used_address,
        hostname_address=resolved,
        wanted_interfaces={key: os.environ[key] for key in INTERFACE_VARIABLES if os.environ.get(key)},
        wmem_bytes=int((_sysctl("tcp_wmem").split() or ["0"])[-1]),
        rmem_bytes=int((_sysctl("tcp_rmem").split() or ["0"])[-1]),
        congestion=_sysctl("tcp_congestion_control"),
        boot_id=machine(),
    )


def as_message(facts: HostFacts) -> dict[str, Any]:
    """Facts as plain data."""
    return asdict(facts)


def _interface_problems(facts: HostFacts) -> list[NetworkFault]:
    problems: list[NetworkFault] = []
    if ipaddress.ip_address(facts.used_address).is_loopback:
        return problems  # rank 0 calls itself; nothing can be said of the way to the others
    remedy = f"export GLOO_SOCKET_IFNAME={facts.interface} NCCL_SOCKET_IFNAME={facts.interface}"
    for variable, wanted in facts.wanted_interfaces.items():
        for name in wanted.lstrip("^=").split(","):
            if wanted.startswith("^") or not facts.interface or name == facts.interface:
                continue
            if name not in facts.interfaces and not any(known.startswith(name) for known in facts.interfaces):
                found = f"{variable}={wanted}, but there is no interface {name} with an IPv4 address"
            elif facts.interface.startswith(name) and variable.startswith("NCCL"):
                continue  # NCCL takes a prefix
            else:
                found = (
                    f"{variable}={wanted} ({facts.interfaces.get(name, 'no address')}), but the others are reached by "
                    f"{facts.interface} ({facts.used_address})"
                )
            problems.append(NetworkFault(kind="wrong interface", rank=facts.rank, found=found, remedy=remedy))
    return problems


def _loopback_problem(facts: HostFacts, several_machines: bool) -> NetworkFault | None:
    if "GLOO_SOCKET_IFNAME" in facts.wanted_interfaces or not several_machines:
        return None
    address = facts.hostname_address
    if address and not ipaddress.ip_address(address).is_loopback:
        return None
    found = (
        f"host name {facts.host} resolves to {address}, a loopback address"
        if address
        else f"host name {facts.host} does not resolve"
    )
    remedy = (
        f"export GLOO_SOCKET_IFNAME={facts.interface or 'the interface towards the others'} (else gloo binds there)"
    )
    return NetworkFault(kind="loopback", rank=facts.rank, found=found, remedy=remedy)


def _nat_problem(facts: HostFacts) -> NetworkFault | None:
    if not facts.seen_address or facts.seen_address == facts.used_address:
        return None
    if ipaddress.ip_address(facts.seen_address).is_loopback:
        return None
    found = f"it calls itself {facts.used_address}, the others see {facts.seen_address}"
    remedy = (
        "address translation lets it call but not be called: join the hosts by a VPN (WireGuard) or give it a public "
        f"address, and export GLOO_SOCKET_IFNAME to that interface; or forward ports of {facts.seen_address} to it"
    )
    return NetworkFault(kind="NAT", rank=facts.rank, found=found, remedy=remedy)


def window_problem(facts: HostFacts, rtt_s: float, link_bytes_per_s: float, where: str) -> NetworkFault | None:
    """A buffer too small for one stream to fill a link: tcp_wmem and tcp_rmem against bandwidth times round trip.

    Half of a receive buffer is window (`tcp_adv_win_scale`), so tcp_rmem must be twice as large.
    """
    needed = rtt_s * link_bytes_per_s / WINDOW_SHARE
    window = min(facts.wmem_bytes or needed, (facts.rmem_bytes or 2 * needed) / 2)
    if window >= 0.98 * needed:
        return None
    round_up = 1 << max(int(needed - 1).bit_length(), 22)
    streams = -(-needed // window)
    got_mbit, link_mbit = 8e-6 * WINDOW_SHARE * window / rtt_s, 8e-6 * link_bytes_per_s
    found = (
        f"one stream to {where} gets at most {got_mbit:.0f} of {link_mbit:.0f} Mbit/s "
        f"(tcp_wmem {facts.wmem_bytes}, tcp_rmem {facts.rmem_bytes} bytes, round trip {rtt_s * 1e3:.1f} ms)"
    )
    remedy = (
        f"sysctl -w net.ipv4.tcp_wmem='4096 65536 {round_up}' net.ipv4.tcp_rmem='4096 131072 {2 * round_up}' on both "
        f"hosts, or {streams:.0f} streams"
    )
    return NetworkFault(kind="small TCP window", rank=facts.rank, found=found, remedy=remedy)


def broken_problem(rank: int, target: HostFacts, error: str) -> NetworkFault:
    """A measurement that did not come to its end on a connection that was there; `error` is the socket's own word."""
    found = f"the connection to rank {target.rank} ({target.host}) broke while it was measured ({error})"
    remedy = "the link lost it: measure once more; on a very slow link with --streams 1 --sizes 0"
    return NetworkFault(kind="broken connection", rank=rank, found=found, remedy=remedy)


def left_problem(facts: HostFacts) -> NetworkFault:
    """A rank that is no longer there."""
    found = f"rank {facts.rank} ({facts.host}) left while links were measured"
    remedy = "its own message says why (none: it was killed, or its host or link went down); start all ranks again"
    return NetworkFault(kind="left", rank=facts.rank, found=found, remedy=remedy)


def connect_problem(rank: int, target: HostFacts, error: str) -> NetworkFault:
    """A data connection that did not come about; `error` is the socket's own word."""
    address = f"{target.seen_address or target.used_address}:{target.port}"
    found = f"no connection to rank {target.rank} at {address} ({error})"
    if "timed out" in error:
        remedy = (
            f"a firewall drops it: open TCP ports on rank {target.rank}'s host for the others "
            f"(probe: --data-port {target.port}; training also uses the ports of net.ipv4.ip_local_port_range)"
        )
    elif "refused" in error:
        remedy = f"a firewall rejects it or another machine answers at that address: check rank {target.rank}'s address"
    else:
        remedy = f"check the route: ip route get {target.seen_address or target.used_address}"
    return NetworkFault(kind="blocked port", rank=rank, found=found, remedy=remedy)


def host_problems(ranks: Sequence[HostFacts], links: Sequence[Mapping[str, Any]]) -> list[NetworkFault]:
    """Everything that is wrong, by rank.

    Parameters
    ----------
    links : list of mappings
        With `source`, `target`, `rtt_s`, `link_bytes_per_s` of the links that could be measured.
    """
    several = len({facts.boot_id for facts in ranks}) > 1 or any("POLYGON_LAB" in key for key in os.environ)
    problems: list[NetworkFault] = []
    for facts in ranks:
        problems += _interface_problems(facts)
        problems += [p for p in (_loopback_problem(facts, several), _nat_problem(facts)) if p is not None]
        mine = [link for link in links if link["source"] == facts.rank]
        if mine:
            worst = max(mine, key=lambda link: link["rtt_s"] * link["link_bytes_per_s"])
            target = ranks[worst["target"]]
            small = window_problem(facts, worst["rtt_s"], worst["link_bytes_per_s"], target.host)
            problems += [small] if small else []
    return problems
