"""The lab's relay: carries packets between the hosts' TUN devices, late and slowly enough (see `lab_net.shaper`).

One process for all pairs, at real-time priority where that is allowed: on busy cores an ordinary process is woken
milliseconds late. It watches the lab it belongs to; when the lab dies it ends every process the lab started.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from runners.lab_net.linux import VNET_HEADER_BYTES
from runners.lab_net.shaper import Shaper

LAB_VARIABLE = "POLYGON_LAB"
"""Environment variable that every process of a lab inherits; its value is the lab's name."""

_READ_BYTES = 65_536 + 256
_BATCH = 64
"""Packets read from one device before the others and the clock get a turn."""
_PRIORITY = 10
_SWEEPS = 100
"""Most times that the processes of a dead lab are looked for."""


def raise_priority() -> bool:
    """Real-time priority for the calling process; False where it is not allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError:
        return False
    return True


def processes_of_lab(name: str) -> list[int]:
    """Ids of the running processes that carry the lab's name in their environment (other users' cannot be read)."""
    tag = f"{LAB_VARIABLE}={name}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if tag in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # ended meanwhile, or not ours
    return found


def end_processes(name: str) -> int:
    """Kill every process of a lab; returns how many there were.

    Looks again until none is found: what is forked while it looks is not seen in that round.
    """
    ended: set[int] = set()
    for _ in range(_SWEEPS):
        found = processes_of_lab(name)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        time.sleep(0.01)
    return len(ended)


class Relay:
    """Moves packets between TUN devices until its control socket closes.

    Parameters
    ----------
    devices : list of int
        File descriptors of the hosts' TUN devices, by host number.
    addresses : list of str
        IPv4 addresses of the hosts, by host number.
    control : socket
        To the lab; its closing ends the relay.
    listener : socket
        Where other programs of the user ask for changes while the lab runs.
    """

    def __init__(
        self,
        devices: list[int],
        addresses: list[str],
        shaper: Shaper,
        control: socket.socket,
        listener: socket.socket,
    ) -> None:
        self._devices = devices
        self._host_of_device = {descriptor: host for host, descriptor in enumerate(devices)}
        self._host_of_address = {socket.inet_aton(address): host for host, address in enumerate(addresses)}
        self._shaper = shaper
        self._control = control
        self._listener = listener
        self._clients: dict[int, socket.socket] = {control.fileno(): control}
        self._open = True

    def run(self) -> None:
        """Serve until the other end of the control socket is closed."""
        shaper = self._shaper
        while self._open:
            wait_s = shaper.next_s() - time.monotonic()
            watched = [*self._devices, self._listener.fileno(), *self._clients]
            ready, _, _ = select.select(watched, [], [], min(max(wait_s, 0.0), 1.0))
            for descriptor in ready:
                if descriptor in self._host_of_device:
                    self._read(descriptor)
                elif descriptor in self._clients:
                    self._serve(self._clients[descriptor])
                else:
                    client, _ = self._listener.accept()
                    self._clients[client.fileno()] = client
            for target, packet in shaper.due(time.monotonic()):
                self._write(target, packet)

    def _read(self, descriptor: int) -> None:
        source = self._host_of_device[descriptor]
        for _ in range(_BATCH):
            try:
                packet = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            target = self._host_of_address.get(packet[VNET_HEADER_BYTES + 16 : VNET_HEADER_BYTES + 20])
            if target is not None and packet[VNET_HEADER_BYTES] >> 4 == 4:
                n_bytes = len(packet) - VNET_HEADER_BYTES
                self._shaper.offer(time.monotonic(), source, target, packet, n_bytes)

    def _write(self, target: int, packet: bytes) -> None:
        # The kernel refuses a packet when the host's receive path is full; TCP sends it again, as on a real link.
        with contextlib.suppress(OSError):
            os.write(self._devices[target], packet)

    def _serve(self, client: socket.socket) -> None:
        try:
            message = client.recv(1 << 20)
        except OSError:
            message = b""
        if not message:
            del self._clients[client.fileno()]
            client.close()
            self._open = self._open and client is not self._control
            return
        answer = json.dumps(self._answer(json.loads(message))).encode()
        with contextlib.suppress(OSError):  # a client that left without waiting for the answer
            client.send(answer)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["verb"] == "change":
            for source, target in request["pairs"]:
                self._shaper.change(source, target, **request["values"])
            return {}
        return {
            f"{a},{b}": [pair.bytes_carried, pair.packets, pair.drops]
            for (a, b), pair in self._shaper.pairs.items()
            if pair.packets or pair.drops
        }


def main() -> None:
    """Body of the relay's process: read the setup from stdin, serve, end what the lab left running."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setup = json.load(sys.stdin)
    control = socket.socket(fileno=setup["control"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(setup["socket"])
    listener.listen()
    shaper = Shaper(setup["latency_s"], setup["bytes_per_s"], setup["shared"])
    control.send(json.dumps({"real_time": raise_priority()}).encode())
    gc.disable()  # no cycles are made; a collection would delay packets
    try:
        Relay(setup["devices"], setup["addresses"], shaper, control, listener).run()
    finally:
        end_processes(setup["lab"])
        shutil.rmtree(Path(setup["socket"]).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
