"""The lab's other wiring: veth pairs on a bridge, htb for rates and the kernel's netem for delays.

Chosen where the kernel has netem. Without netem it still serves clusters whose latencies are all zero.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

from polygon.domain.errors import InputError
from polygon.export.tc import ShapedTarget, shaping_commands
from runners.lab_net import linux
from runners.lab_net.topology import SUBNET, LabNetwork


def _attempt(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run ip or tc, which lie where only an administrator's search path looks; the result is the caller's to judge."""
    tool = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if tool is None:
        raise linux.LabUnavailableError(f"{command[0]}: not found, install iproute2")
    return subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)


def _run(command: Sequence[str]) -> None:
    done = _attempt(command)
    if done.returncode != 0:
        raise linux.LabUnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")


def has_netem(namespace: int) -> bool:
    """Whether the kernel can delay packets: netem is tried on the loopback of a network namespace."""
    try:
        with linux.inside(namespace):
            _run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
            _run(["tc", "qdisc", "del", "dev", "lo", "root"])
    except linux.LabUnavailableError:
        return False
    return True


class VethWiring:
    """A veth pair per host, the far ends on one bridge in a namespace of its own; shaping on the hosts' ends."""

    def __init__(self, network: LabNetwork, namespaces: list[int], mtu_bytes: int) -> None:
        if network.shared:
            raise InputError(
                "backend: found netem, expected relay where hosts share a capacity (the cluster file's, or a card that "
                "carries less than its links together)"
            )
        self._network = network
        self._namespaces = namespaces
        self._latency_s, self._bytes_per_s = network.latency_s.copy(), network.bytes_per_s.copy()
        self._connected = np.asarray(network.bytes_per_s > 0)
        self._netem = has_netem(namespaces[0])
        if not self._netem and np.any(self._latency_s > 0):
            raise InputError("backend: found netem, which this kernel lacks; expected relay (or latencies of zero)")
        self._switch = linux.new_namespace()
        self._wire(mtu_bytes)
        for source in range(len(namespaces)):
            self._shape(source)

    def _wire(self, mtu_bytes: int) -> None:
        with linux.inside(self._switch):
            _run(["ip", "link", "add", "br0", "type", "bridge"])
            _run(["ip", "link", "set", "br0", "up"])
            for host, namespace in zip(self._network.hosts, self._namespaces, strict=True):
                port, peer = f"port{host.index}", f"host{host.index}"
                _run(["ip", "link", "add", port, "type", "veth", "peer", "name", peer])
                # `ip` opens /proc/PID/fd/N itself, so the descriptor is named by way of this process.
                _run(["ip", "link", "set", peer, "netns", f"/proc/{os.getpid()}/fd/{namespace}"])
                _run(["ip", "link", "set", port, "master", "br0", "up"])
        for host, namespace in zip(self._network.hosts, self._namespaces, strict=True):
            with linux.inside(namespace):
                _run(["ip", "link", "set", f"host{host.index}", "name", linux.INTERFACE])
                linux.configure(linux.INTERFACE, host.address, str(SUBNET.netmask), mtu_bytes)

    def _shape(self, source: int) -> None:
        targets = [
            ShapedTarget(
                address=host.address,
                latency_s=float(self._latency_s[source, host.index]),
                bytes_per_s=float(self._bytes_per_s[source, host.index]),
            )
            for host in self._network.hosts
            if host.index != source and self._bytes_per_s[source, host.index] > 0
        ]
        with linux.inside(self._namespaces[source]):
            _attempt(["tc", "qdisc", "del", "dev", linux.INTERFACE, "root"])
            for command in shaping_commands(linux.INTERFACE, targets, netem=self._netem):
                _run(["tc", *command])
            for host in self._network.hosts:
                if host.index != source:
                    verb = "del" if self._connected[source, host.index] else "replace"
                    _attempt(["ip", "route", verb, "blackhole", f"{host.address}/32"])

    def change(self, pairs: Sequence[tuple[int, int]], values: dict[str, Any]) -> None:
        """Change what ordered pairs are given (packets under way are lost: the queues are rebuilt)."""
        for source, target in pairs:
            if values.get("loss"):
                raise InputError("loss: found backend netem, expected relay")
            if values.get("latency_s") and not self._netem:
                raise InputError("latency_s: found a kernel without netem, expected backend relay")
            self._latency_s[source, target] = values.get("latency_s", self._latency_s[source, target])
            self._bytes_per_s[source, target] = values.get("bytes_per_s", self._bytes_per_s[source, target])
            self._connected[source, target] = values.get("connected", self._connected[source, target])
        for source in sorted({source for source, _ in pairs}):
            self._shape(source)

    def close(self) -> None:
        """Let go of the bridge's namespace; links and bridge vanish with it."""
        os.close(self._switch)
