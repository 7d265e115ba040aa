"""A running lab: namespaces wired together, processes inside them, links that can be changed while they run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from polygon.domain.errors import InputError
from runners.lab_net import linux, registry
from runners.lab_net.topology import SUBNET, LabHost, LabNetwork
from runners.lab_net.veth import VethWiring, has_netem
from runners.relay import LAB_VARIABLE, end_processes, processes_of_lab

BACKENDS = ("auto", "relay", "netem")
MTU_BYTES = 1500
_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 2.0
"""How long a stopped process may take after SIGTERM before it is killed."""


class RelayWiring:
    """TUN devices and one relay process."""

    def __init__(self, network: LabNetwork, namespaces: list[int], folder: Path) -> None:
        self._devices = []
        for host, namespace in zip(network.hosts, namespaces, strict=True):
            with linux.inside(namespace):
                self._devices.append(linux.open_tun(linux.INTERFACE))
                linux.configure(linux.INTERFACE, host.address, str(SUBNET.netmask), MTU_BYTES)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = {
            "devices": self._devices,
            "control": theirs.fileno(),
            "addresses": [host.address for host in network.hosts],
            "latency_s": network.latency_s.tolist(),
            "bytes_per_s": network.bytes_per_s.tolist(),
            "shared": [[capacity.bytes_per_s, capacity.pairs] for capacity in network.shared],
            "lab": folder.name,
            "socket": str(folder / "control"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runners.relay"],
            stdin=subprocess.PIPE,
            pass_fds=[*self._devices, theirs.fileno()],
            start_new_session=True,
            cwd=_ROOT,
        )
        theirs.close()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(setup).encode())
        self.process.stdin.close()
        self._control.settimeout(20.0)
        self.real_time: bool = self._answer()["real_time"]

    def _answer(self) -> dict[str, Any]:
        message = self._control.recv(1 << 22)
        if not message:
            raise linux.LabUnavailableError(f"the relay ended with status {self.process.wait()}")
        return json.loads(message)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send the relay one request and wait for its answer."""
        self._control.send(json.dumps(request).encode())
        return self._answer()

    def change(self, pairs: Sequence[tuple[int, int]], values: dict[str, Any]) -> None:
        """Change what ordered pairs are given."""
        self.ask({"verb": "change", "pairs": list(pairs), "values": values})

    def let_go(self) -> None:
        """Close a forked child's copy of the control socket: the relay must see the lab's own process end."""
        self._control.close()

    def close(self) -> None:
        """End the relay; the devices vanish with it."""
        self._control.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for device in self._devices:
            os.close(device)


class Lab:
    """Hosts of a cluster on one machine; a context manager.

    Parameters
    ----------
    network : LabNetwork
    tcp : TcpSettings
    backend : str
        `relay`: TUN devices and our own relay. `netem`: veth pairs, htb and the kernel's netem. `auto`: netem where the
        kernel has it and no capacity is shared between hosts, else the relay.

    Raises
    ------
    LabUnavailableError
        Where this user or this kernel cannot have network namespaces or TUN devices.
    """

    def __init__(
        self,
        network: LabNetwork,
        *,
        tcp: linux.TcpSettings | None = None,
        backend: str = "auto",
        cluster_name: str = "",
    ) -> None:
        if backend not in BACKENDS:
            raise InputError(f"backend: found {backend!r}, expected {' or '.join(BACKENDS)}")
        tcp = tcp or linux.TcpSettings()
        if tcp.congestion and tcp.congestion not in linux.available_congestion():
            known = " or ".join(linux.available_congestion())
            raise InputError(f"congestion: found {tcp.congestion!r}, expected {known} (what this kernel has)")
        self.network = network
        self.tcp = tcp
        self.name = f"lab-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}"
        self._wanted_backend = backend
        self._cluster_name = cluster_name
        self._namespaces: list[int] = []
        self._processes: list[subprocess.Popen] = []
        self._wiring: RelayWiring | VethWiring | None = None

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if os.geteuid() != 0:
            linux.enter_user_namespace()
        for _ in self.network.hosts:
            self._namespaces.append(linux.new_namespace())
        folder = registry.labs_folder() / self.name
        registry.register(
            registry.LabRecord(
                name=self.name,
                pid=os.getpid(),
                started_ticks=registry.start_ticks(os.getpid()),
                cluster=self._cluster_name,
                hosts=[host.name for host in self.network.hosts],
                namespaces=self._namespaces,
            )
        )
        backend = self._wanted_backend
        if backend == "auto":
            backend = "netem" if not self.network.shared and has_netem(self._namespaces[0]) else "relay"
        self.backend = backend
        if backend == "netem":
            self._wiring = VethWiring(self.network, self._namespaces, MTU_BYTES)
        else:
            self._wiring = RelayWiring(self.network, self._namespaces, folder)
        for namespace in self._namespaces:
            with linux.inside(namespace):
                linux.apply_tcp(self.tcp)

    @property
    def real_time(self) -> bool:
        """Whether delays are kept at real-time priority (always so where the kernel makes them)."""
        return not isinstance(self._wiring, RelayWiring) or self._wiring.real_time

    @contextlib.contextmanager
    def inside(self, host: LabHost) -> Iterator[None]:
        """The calling thread on a host: sockets opened and processes started inside are the host's."""
        with linux.inside(self._namespaces[host.index]):
            yield

    def move_to(self, host: LabHost) -> None:
        """Put the calling process, a forked child with one thread, on a host for good; it ends when its parent does."""
        linux.end_with_parent()
        if isinstance(self._wiring, RelayWiring):
            self._wiring.let_go()
        linux.move_into(self._namespaces[host.index])

    def environment(self, host: LabHost) -> dict[str, str]:
        """Variables that a process on the host gets beside those of the lab's own process."""
        return {
            LAB_VARIABLE: self.name,
            "POLYGON_HOST": host.name,
            "POLYGON_REGION": host.region_name,
            "POLYGON_ADDRESS": host.address,
            "POLYGON_INTERFACE": linux.INTERFACE,
            "GLOO_SOCKET_IFNAME": linux.INTERFACE,
            "TP_SOCKET_IFNAME": linux.INTERFACE,
            "NCCL_SOCKET_IFNAME": linux.INTERFACE,
        }

    def popen(
        self, host: LabHost, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen:
        """Start a process on a host, in a process group of its own; options as for `subprocess.Popen`."""
        variables = {**os.environ, **self.environment(host), **(environment or {})}
        with self.inside(host):
            process = subprocess.Popen(list(command), env=variables, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def change(self, source: LabHost, target: LabHost, **values: Any) -> None:
        """Change what one direction of a link is given: `latency_s`, `bytes_per_s`, `connected`, `loss` (relay)."""
        self.change_pairs([(source.index, target.index)], **values)

    def change_pairs(self, pairs: Sequence[tuple[int, int]], **values: Any) -> None:
        """The same for several ordered pairs at once."""
        assert self._wiring is not None
        self._wiring.change(pairs, values)

    def cut(self, hosts: Sequence[LabHost], *, connected: bool = False) -> None:
        """Cut (or join again) all links between some hosts and the others: a network partition."""
        chosen = {host.index for host in hosts}
        others = {host.index for host in self.network.hosts} - chosen
        joined = [pair for a in chosen for b in others for pair in ((a, b), (b, a))]
        self.change_pairs([p for p in joined if self.network.bytes_per_s[p] > 0], connected=connected)

    def counters(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Per ordered pair, since the start: bytes carried, packets (segments), drops. Relay only."""
        if not isinstance(self._wiring, RelayWiring):
            raise InputError("counters: found backend netem, expected relay (use tc -s class show)")
        found = self._wiring.ask({"verb": "count"})
        return {tuple(map(int, key.split(","))): tuple(value) for key, value in found.items()}  # type: ignore[misc]

    def stop(self, processes: Sequence[subprocess.Popen] | None = None) -> None:
        """End processes of the lab: SIGTERM to their groups, SIGKILL to what is left after a grace period."""
        running = [p for p in (self._processes if processes is None else processes) if p.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        for process in running:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.05))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def close(self) -> None:
        """End all processes, the relay, and with them namespaces and devices. May be called twice."""
        self.stop()
        if processes_of_lab(self.name):
            end_processes(self.name)
        self._processes.clear()
        if self._wiring is not None:
            self._wiring.close()
            self._wiring = None
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces.clear()
        registry.unregister(self.name)
