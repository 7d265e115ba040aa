"""Traffic-control commands that give real hosts (or the lab's) a cluster's links: htb for rates, netem for delays.

Text only: nothing here runs a command. Every host shapes what it sends, by destination address, so each direction of a
link is shaped once, at its source.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polygon.domain.errors import require, require_number
from polygon.domain.message import Message

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
"""IFNAMSIZ leaves 15 characters (linux/if.h); '@' and ':' name aliases, which tc cannot shape."""

PACKET_BYTES = 1500
QUEUE_S = 0.2
"""Backlog that a shaped queue may hold beside what is on its way: with 0.1 s eight flows lost a sixth of the rate."""
MAX_TARGETS = 0xFFFE
"""Class numbers are 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedTarget:
    """What a host's packets to one address are given."""

    address: str
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_address(self.address, "address")
        require_number(self.latency_s, "latency_s", at_least=0)
        require_number(self.bytes_per_s, "bytes_per_s", above=0)


def check_address(text: str, where: str | Message) -> None:
    """Require an IPv4 address.

    Raises
    ------
    InputError
        For anything else.
    """
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        require(False, where, text, "an IPv4 address such as 10.0.0.2")


def check_interface(name: str) -> None:
    """Require a network interface's name: at most 15 letters, digits, '_', '.', '-' and no leading '-'."""
    require(_INTERFACE.fullmatch(name) is not None, "interface", name, "a network interface such as eth0")


def check_host_name(name: str) -> None:
    """Require a host name of letters, digits, '.', '_' and '-' (it is written into a shell script)."""
    require(_HOST_NAME.fullmatch(name) is not None, "host", name, "a name of letters, digits, '.', '_' and '-'")


def shaping_commands(interface: str, targets: Sequence[ShapedTarget], *, netem: bool = True) -> list[list[str]]:
    """The `tc` commands (as argument lists, without the word tc) that shape what one host sends.

    Traffic to other addresses is left alone. The rate comes first, then the latency, as on a real link; netem's queue
    holds one bandwidth-delay product and `QUEUE_S` of backlog.

    Parameters
    ----------
    netem : bool
        Write the delays; False for kernels without netem, where only zero latencies can be had.
    """
    check_interface(interface)
    require(len(targets) <= MAX_TARGETS, "targets", len(targets), Message("expected.at_most", most=MAX_TARGETS))
    commands = [["qdisc", "replace", "dev", interface, "root", "handle", "1:", "htb", "default", "0"]]
    for number, target in enumerate(targets, start=1):
        class_id = f"1:{number:x}"
        rate = f"{round(8 * target.bytes_per_s)}bit"
        burst = f"{max(round(0.005 * target.bytes_per_s), 65_536)}b"
        shape = ["htb", "rate", rate, "ceil", rate, "burst", burst, "cburst", burst, "quantum", "60000"]
        commands.append(["class", "add", "dev", interface, "parent", "1:", "classid", class_id, *shape])
        limit = math.ceil(target.bytes_per_s * (target.latency_s + QUEUE_S) / PACKET_BYTES) + 100
        if netem and target.latency_s > 0:
            delay = ["netem", "delay", f"{round(1e6 * target.latency_s)}us", "limit", str(limit)]
        else:
            delay = ["pfifo", "limit", str(limit)]
        commands.append(["qdisc", "add", "dev", interface, "parent", class_id, "handle", f"{number + 1:x}:", *delay])
        match = ["u32", "match", "ip", "dst", f"{target.address}/32", "flowid", class_id]
        commands.append(["filter", "add", "dev", interface, "protocol", "ip", "parent", "1:", "prio", "1", *match])
    return commands


_HEADER = """\
#!/usr/bin/env bash
# Gives this host the links of cluster {cluster}, by traffic control. Needs root, and a kernel with htb and netem.
#   {name} apply [HOST]   shape what this host sends (HOST: this host's name in the list below)
#   {name} check          whether this kernel has what it takes (what is set on the interface is lost)
#   {name} show           what is set, with counters
#   {name} clear          undo it
# The interface is the first line's, or $POLYGON_INTERFACE. Latencies are one way: run it on every host.
set -euo pipefail

interface="${{POLYGON_INTERFACE:-{interface}}}"

usage() {{
    echo "usage: $0 apply [HOST] | check | show | clear" >&2
    exit 2
}}
"""

_CHECK = """\
# Asking for a queue makes the kernel load the module, where it has it.
check() {
    command -v tc >/dev/null || { echo "tc not found; install iproute2" >&2; exit 3; }
    if ! tc qdisc replace dev "$interface" root netem delay 1us; then
        echo "$interface takes no netem: run as root, on an interface that exists (ip link), with sch_netem in the" >&2
        echo "kernel (modprobe sch_netem; package linux-modules-extra-$(uname -r) or kernel-modules-extra)" >&2
        exit 3
    fi
}
"""

_FOOTER = """\
case "${1:-}" in
    apply)
        check
        tc qdisc del dev "$interface" root 2>/dev/null || true
        apply "${2:-$(hostname -s)}"
        ;;
    check) check && tc qdisc del dev "$interface" root && echo "$interface takes htb and netem" ;;
    show) tc -s class show dev "$interface" && tc -s qdisc show dev "$interface" ;;
    clear) tc qdisc del dev "$interface" root 2>/dev/null || true ;;
    *) usage ;;
esac
"""


def tc_script(
    cluster: str, hosts: Mapping[str, Sequence[ShapedTarget]], *, interface: str = "eth0", file_name: str = "shape.sh"
) -> str:
    """A bash script, the same for all hosts, that shapes what the host it runs on sends.

    Parameters
    ----------
    cluster : str
        Name of the cluster, for the comment.
    hosts : mapping
        For every host its name (as `hostname -s` gives it) and its targets.

    Raises
    ------
    InputError
        For a host name, an address or an interface that is not one (nothing hostile reaches the script).
    """
    check_interface(interface)
    comment = re.sub(r"[^\w .,()-]", "?", cluster)
    lines = [_HEADER.format(cluster=comment, name=shlex.quote(file_name), interface=interface), _CHECK, "apply() {"]
    lines.append('    case "$1" in')
    for host, targets in hosts.items():
        check_host_name(host)
        lines.append(f"        {shlex.quote(host)})")
        for command in shaping_commands(interface, targets):
            words = ['"$interface"' if word == interface else shlex.quote(word) for word in command]
            lines.append(f"            tc {' '.join(words)}")
        lines.append("            ;;")
    known = shlex.quote(f"expected one of: {', '.join(hosts)}")
    lines += ["        *)", f"""            echo "host $1 is not in this script;" {known} >&2""", "            exit 2"]
    lines += ["            ;;", "    esac", "}", "", _FOOTER]
    return "\n".join(lines)
