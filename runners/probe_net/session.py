"""A probe session: one coordinator (in rank 0), one agent per rank, measurements one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polygon.domain.errors import InputError
from runners.probe_net.diagnose import (
    HostFacts,
    NetworkFault,
    as_message,
    connect_problem,
    host_facts,
    host_problems,
    interface_addresses,
)
from runners.probe_net.fit import fit_streams
from runners.probe_net.wire import (
    DataServer,
    measure_messages_s,
    measure_rate,
    measure_rtt_s,
    receive_line,
    send_line,
)

_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What is measured on each link."""

    streams: tuple[int, ...] = (1, 2, 4, 8)
    sizes_bytes: tuple[int, ...] = (65_536, 1 << 20, 8 << 20)
    seconds: float | None = None
    """Per stream count; None: 1 s and 14 round trips."""
    pairs: str = "regions"
    """`regions`: one pair of ranks for every ordered pair of regions (one inside each too); `all`: every pair."""
    timeout_s: float = 60.0
    data_port: int = 0
    interface: str = ""


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not url.startswith("tcp://") or not host or not port:
        raise InputError(f"--dist-url: found {url!r}, expected tcp://HOST:PORT")
    return host, port


def _interface_address(name: str) -> str | None:
    if not name:
        return None
    known = interface_addresses()
    if name not in known:
        listed = ", ".join(f"{key} ({value})" for key, value in known.items())
        raise InputError(f"--interface: found {name!r}, expected one of {listed}")
    return known[name]


def _call(address: tuple[str, int], source: str | None, timeout_s: float) -> socket.socket:
    """Connect to the coordinator, which may not listen yet."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(deadline_s - time.monotonic(), 0.1)
            return socket.create_connection(address, min(left_s, 5.0), source_address=(source, 0) if source else None)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                raise InputError(f"--dist-url: host {address[0]!r} does not resolve, expected an address") from None
            if time.monotonic() >= deadline_s:
                hint = (
                    "a firewall drops it, or the address is wrong"
                    if isinstance(error, TimeoutError)
                    else "rank 0 does not run there, or listens on another port"
                )
                raise InputError(
                    f"--dist-url: tcp://{address[0]}:{address[1]} not reached in {timeout_s:g} s ({error}): {hint}; "
                    f"try: nc -vz {address[0]} {address[1]}"
                ) from None
            time.sleep(_RETRY_S)


def run_agent(rank: int, region: str, url: str, options: ProbeOptions) -> dict[str, Any]:
    """Join the session as a rank, measure what the coordinator asks for, return the final report."""
    source = _interface_address(options.interface)
    server = DataServer(port=options.data_port)
    try:
        with _call(parse_url(url), source, options.timeout_s) as control:
            control.settimeout(None)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            send_line(control, as_message(host_facts(rank, region, server.port, control.getsockname()[0])))
            while True:
                try:
                    task = receive_line(control)
                    if task["do"] == "end":
                        return task["report"]
                    send_line(control, _measure(task, source))
                except OSError as error:
                    raise InputError(f"rank 0 ended the probe ({error}): its own message says why") from None
    finally:
        server.close()


def _measure(task: dict[str, Any], source: str | None) -> dict[str, Any]:
    target = (task["address"], task["port"])
    try:
        rtt_s, median_s = measure_rtt_s(target, source)
        rates = {
            n: measure_rate(target, n, rtt_s=rtt_s, seconds=task["seconds"], source=source) for n in task["streams"]
        }
        sizes = measure_messages_s(target, task["sizes"], source) if task["sizes"] else {}
    except OSError as error:
        return {"error": str(error)}
    return {"rtt_s": rtt_s, "rtt_median_s": median_s, "rates": rates, "messages_s": sizes}


class Coordinator:
    """Gathers the ranks, has the links measured one by one, writes the report."""

    def __init__(self, world_size: int, url: str, options: ProbeOptions, say: Callable[[str], None]) -> None:
        self._world_size = world_size
        self._options = options
        self._say = say
        self._host, port = parse_url(url)
        try:
            self._listener = socket.create_server(("", port), backlog=world_size + 8)
        except OSError as error:
            raise InputError(
                f"--dist-url: port {port} cannot be opened here ({error.strerror}), expected a free port"
            ) from None
        self._controls: dict[int, socket.socket] = {}
        self._ranks: list[HostFacts] = []

    def run(self) -> dict[str, Any]:
        """Gather, measure, report; every rank gets the report."""
        try:
            self._gather()
            report = self._report()
            for control in self._controls.values():
                send_line(control, {"do": "end", "report": report})
        finally:
            self._listener.close()
            for control in self._controls.values():
                control.close()
        return report

    def _gather(self) -> None:
        deadline_s = time.monotonic() + self._options.timeout_s
        found: dict[int, HostFacts] = {}
        while len(found) < self._world_size:
            self._listener.settimeout(max(deadline_s - time.monotonic(), 0.01))
            try:
                control, (seen, _) = self._listener.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(self._world_size) if rank not in found)
                raise InputError(
                    f"--world-size: found {len(found)} of {self._world_size} ranks after "
                    f"{self._options.timeout_s:g} s, expected rank {missing} too (start it, or open this port for it)"
                ) from None
            control.settimeout(30.0)
            try:
                facts = dataclasses.replace(HostFacts(**receive_line(control)), seen_address=seen)
            except (OSError, ValueError, TypeError):
                control.close()  # a port scanner or another program, not a rank
                continue
            if facts.rank in found or not 0 <= facts.rank < self._world_size:
                raise InputError(f"--rank: found {facts.rank} twice or outside 0..{self._world_size - 1}")
            control.settimeout(300.0)
            found[facts.rank] = facts
            self._controls[facts.rank] = control
        self._ranks = [found[rank] for rank in range(self._world_size)]

    def _pairs(self) -> list[tuple[int, int]]:
        every = [(a, b) for a in range(self._world_size) for b in range(self._world_size) if a != b]
        if self._options.pairs == "all" or not all(facts.region for facts in self._ranks):
            return every
        chosen: dict[tuple[str, str], tuple[int, int]] = {}
        for a, b in every:
            chosen.setdefault((self._ranks[a].region, self._ranks[b].region), (a, b))
        return sorted(chosen.values())

    def _address(self, target: HostFacts) -> str:
        # Rank 0 calls itself, perhaps by loopback; the others know it by the URL's host.
        return self._host if target.rank == 0 else target.seen_address

    def _report(self) -> dict[str, Any]:
        links: list[dict[str, Any]] = []
        problems: list[NetworkFault] = []
        pairs = self._pairs()
        for done, (a, b) in enumerate(pairs, start=1):
            result = self._ask(a, self._ranks[b])
            label = f"[{done}/{len(pairs)}] {self._ranks[a].host} -> {self._ranks[b].host}"
            if "error" in result:
                problems.append(connect_problem(a, self._ranks[b], result["error"]))
                self._say(f"{label}: {result['error']}")
                continue
            links.append(self._link(a, b, result))
            self._say(f"{label}: {describe(links[-1])}")
        problems += host_problems(self._ranks, links)
        return {
            "format": "polygon-probe",
            "version": 1,
            "ranks": [as_message(facts) for facts in self._ranks],
            "links": links,
            "problems": [dataclasses.asdict(problem) for problem in problems],
        }

    def _ask(self, rank: int, target: HostFacts) -> dict[str, Any]:
        task = {
            "do": "measure",
            "address": self._address(target),
            "port": target.port,
            "streams": self._options.streams,
            "sizes": self._options.sizes_bytes,
            "seconds": self._options.seconds,
        }
        try:
            send_line(self._controls[rank], task)
            return receive_line(self._controls[rank])
        except OSError as error:
            raise InputError(f"rank {rank} left the probe ({error})") from None

    def _link(self, a: int, b: int, result: dict[str, Any]) -> dict[str, Any]:
        rates = {int(n): rate for n, rate in result["rates"].items()}
        fit = fit_streams(result["rtt_s"], rates)
        return {
            "source": a,
            "target": b,
            "source_region": self._ranks[a].region,
            "target_region": self._ranks[b].region,
            "rtt_s": result["rtt_s"],
            "rtt_median_s": result["rtt_median_s"],
            "bytes_per_s_by_streams": {str(n): rate for n, rate in rates.items()},
            "message_s_by_bytes": result["messages_s"],
            "link_bytes_per_s": fit.link_bytes_per_s,
            "window_bytes": fit.window_bytes,
            "saturated": fit.saturated,
            "streams_needed": fit.streams_needed,
        }


def describe(link: dict[str, Any]) -> str:
    """One line about a measured link."""
    rates = ", ".join(f"{n}: {8e-6 * rate:.1f}" for n, rate in link["bytes_per_s_by_streams"].items())
    window = f", window {link['window_bytes'] / 2**20:.2f} MiB" if link["window_bytes"] else ""
    return f"round trip {1e3 * link['rtt_s']:.2f} ms, Mbit/s by streams {{{rates}}}{window}"


def run_rank(
    rank: int, world_size: int, url: str, region: str, options: ProbeOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    """Take part in a session; rank 0 also coordinates it. Every rank gets the report.

    Raises
    ------
    InputError
        Where a rank is missing, the coordinator cannot be reached, or a rank leaves.
    """
    if rank:
        return run_agent(rank, region, url, options)
    _interface_address(options.interface)
    coordinator = Coordinator(world_size, url, options, say)
    host, port = parse_url(url)
    # By its own address where that is on this host, so that it knows its interface; else (translation) by loopback.
    mine = host if _resolved(host) in interface_addresses().values() else "127.0.0.1"

    def agent() -> None:
        with contextlib.suppress(InputError):  # the coordinator, in this process, reports what ended the session
            run_agent(0, region, f"tcp://{mine}:{port}", options)

    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    report = coordinator.run()
    thread.join(10.0)
    return report


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""
