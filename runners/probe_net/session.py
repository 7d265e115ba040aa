"""A probe session: one coordinator (in rank 0), one agent per rank, measurements one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polygon.domain.errors import InputError, one_of
from runners.probe_net.diagnose import (
    HostFacts,
    NetworkFault,
    as_message,
    broken_problem,
    connect_problem,
    host_facts,
    host_problems,
    interface_addresses,
    left_problem,
)
from runners.probe_net.fit import fit_streams
from runners.probe_net.wire import (
    LONGEST_COUNT_S,
    SILENT_S,
    DataServer,
    NotReachedError,
    keep_alive,
    measure_messages_s,
    measure_rate,
    measure_rtt_s,
    message_sizes,
    receive_line,
    send_line,
)

_RETRY_S = 0.2
_NO_PROBE = "does not answer as rank 0 of a probe does, expected rank 0 (is the port another program's?)"


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
    regions: tuple[str, ...] = ()
    """Of the cluster that the links go into: all that a rank may name; none: any."""


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not url.startswith("tcp://") or not host or not port:
        raise InputError(f"--dist-url: found {url!r}, expected tcp://HOST:PORT")
    if ":" in host:
        raise InputError(f"--dist-url: found the IPv6 address {host}, expected an IPv4 one or a host's name")
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
    server = _data_server(options.data_port)
    try:
        with _call(parse_url(url), source, options.timeout_s) as control:
            _join(control, host_facts(rank, region, server.port, control.getsockname()[0]), url, options.timeout_s)
            control.settimeout(None)
            keep_alive(control)
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


def _data_server(port: int) -> DataServer:
    try:
        return DataServer(port=port)
    except OSError as error:
        raise InputError(
            f"--data-port: port {port} cannot be opened here ({_why(error)}), expected a free port"
        ) from None


def _why(error: OSError) -> str:
    """The system's word alone: `socket.create_server` adds to it."""
    return os.strerror(error.errno) if error.errno else str(error)


def _join(control: socket.socket, facts: HostFacts, url: str, timeout_s: float) -> None:
    """Say who comes; another program than rank 0 may listen there, and say anything or nothing."""
    control.settimeout(timeout_s)
    try:
        send_line(control, as_message(facts))
        joined = receive_line(control) == {"do": "joined"}
    except ValueError:
        joined = False
    except TimeoutError:
        raise InputError(
            f"--dist-url: found a program at {url} that says nothing in {timeout_s:g} s: it {_NO_PROBE}"
        ) from None
    except OSError as error:
        raise InputError(f"rank 0 ended the probe ({error}): its own message says why") from None
    if not joined:
        raise InputError(f"--dist-url: found a program at {url} that {_NO_PROBE}")


def _measure(task: dict[str, Any], source: str | None) -> dict[str, Any]:
    target = (task["address"], task["port"])
    try:
        rtt_s, median_s = measure_rtt_s(target, source)
        rates = {
            n: measure_rate(target, n, rtt_s=rtt_s, seconds=task["seconds"], source=source) for n in task["streams"]
        }
        sizes = message_sizes(task["sizes"], max(rates.values())) if task["sizes"] else []
        messages_s = measure_messages_s(target, sizes, source) if sizes else {}
    except OSError as error:
        return {"error": str(error), "reached": not isinstance(error, NotReachedError)}
    return {"rtt_s": rtt_s, "rtt_median_s": median_s, "rates": rates, "messages_s": messages_s}


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
                f"--dist-url: port {port} cannot be opened here ({_why(error)}), expected a free port"
            ) from None
        self._controls: dict[int, socket.socket] = {}
        self._gone: set[int] = set()
        self._ranks: list[HostFacts] = []

    def run(self) -> dict[str, Any]:
        """Gather, measure, report; every rank gets the report.

        A rank that leaves, and Ctrl-C, end what has to do with it; what was measured until then is reported.
        """
        try:
            self._gather()
            report = self._report()
            for control in self._controls.values():
                with contextlib.suppress(OSError):  # it left
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
            try:
                self._check(facts, found)
            except InputError:
                control.close()
                raise
            keep_alive(control)
            control.settimeout(self._patience_s)
            with contextlib.suppress(OSError):  # one that left at once is found out when it is asked
                send_line(control, {"do": "joined"})
            found[facts.rank] = facts
            self._controls[facts.rank] = control
        self._ranks = [found[rank] for rank in range(self._world_size)]

    def _check(self, facts: HostFacts, found: Mapping[int, HostFacts]) -> None:
        """Refuse a rank that cannot belong to the session, before anything is measured."""
        where = f"rank {facts.rank} ({facts.host})"
        if facts.rank in found:
            raise InputError(
                f"--rank: found {facts.rank} twice ({found[facts.rank].host}, {facts.host}), expected once"
            )
        if not 0 <= facts.rank < self._world_size:
            raise InputError(f"--rank: found {facts.rank} ({facts.host}), expected 0 to {self._world_size - 1}")
        if self._options.regions and facts.region not in self._options.regions:
            expected = one_of(facts.region, self._options.regions)
            raise InputError(f"{where}: --region: found {facts.region!r}, expected {expected}, as in the cluster")

    @property
    def _patience_s(self) -> float:
        """Longer than any answer takes; the kernel tells of hosts that have vanished (`keep_alive`)."""
        each_s = max(self._options.seconds or 0.0, LONGEST_COUNT_S) + SILENT_S
        return 600.0 + 2 * each_s * len(self._options.streams)

    def _pairs(self) -> list[list[tuple[int, int]]]:
        """What is to be measured: pairs of ranks of which the first that both are still there is taken."""
        every = [(a, b) for a in range(self._world_size) for b in range(self._world_size) if a != b]
        if self._options.pairs == "all" or not all(facts.region for facts in self._ranks):
            return [[pair] for pair in every]
        chosen: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for a, b in every:
            chosen.setdefault((self._ranks[a].region, self._ranks[b].region), []).append((a, b))
        return sorted(chosen.values())

    def _address(self, target: HostFacts) -> str:
        # Rank 0 calls itself, perhaps by loopback; the others know it by the URL's host.
        return self._host if target.rank == 0 else target.seen_address

    def _report(self) -> dict[str, Any]:
        links: list[dict[str, Any]] = []
        problems: list[NetworkFault] = []
        complete = True
        try:
            self._measure_all(links, problems)
        except KeyboardInterrupt:
            complete = False
        problems += [left_problem(self._ranks[rank]) for rank in sorted(self._gone)]
        problems += host_problems(self._ranks, links)
        return {
            "format": "polygon-probe",
            "version": 1,
            "complete": complete,
            "ranks": [as_message(facts) for facts in self._ranks],
            "links": links,
            "problems": [dataclasses.asdict(problem) for problem in problems],
        }

    def _measure_all(self, links: list[dict[str, Any]], problems: list[NetworkFault]) -> None:
        jobs = self._pairs()
        for done, pairs in enumerate(jobs, start=1):
            for a, b in pairs:
                if {a, b} & self._gone:
                    continue
                result = self._ask(a, self._ranks[b])
                label = f"[{done}/{len(jobs)}] {name_of(self._ranks[a])} -> {name_of(self._ranks[b])}"
                if result is None or ("error" in result and self._has_left(b)):
                    self._say(f"{label}: rank {a if a in self._gone else b} left")
                    continue  # another pair of these regions may stand in
                if "error" in result:
                    problem = broken_problem if result["reached"] else connect_problem
                    problems.append(problem(a, self._ranks[b], result["error"]))
                    self._say(f"{label}: {result['error']}")
                else:
                    links.append(self._link(a, b, result))
                    self._say(f"{label}: {describe(links[-1])}")
                break

    def _ask(self, rank: int, target: HostFacts) -> dict[str, Any] | None:
        """What a rank measured; None where it has left."""
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
        except OSError:
            self._gone.add(rank)
            return None

    def _has_left(self, rank: int) -> bool:
        """Whether a rank that has nothing to say now has closed its connection."""
        control = self._controls[rank]
        try:
            readable, _, _ = select.select([control], [], [], 0)
            left = bool(readable) and not control.recv(1, socket.MSG_PEEK)
        except OSError:
            left = True
        if left:
            self._gone.add(rank)
        return left

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


def name_of(facts: HostFacts) -> str:
    """What a rank's host is called: in many places all have one name, so its region stands beside it, or its rank."""
    return f"{facts.region}/{facts.host}" if facts.region else f"rank {facts.rank} ({facts.host})"


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
