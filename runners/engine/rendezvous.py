"""Where ranks meet, agree that they run the same thing, and part."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path

from polygon_comm.transport import local_address
from torch.distributed import PrefixStore, Store, TCPStore

from polygon.domain.errors import InputError, PolygonError
from polygon.domain.plan import Plan, Problem
from runners.engine.options import Options
from runners.probe_net.diagnose import interface_addresses, machine

ASK_AGAIN_S = 0.2
"""Between two tries to reach a rank 0 that has not started yet."""
QUIET_S = 5.0
"""After so long one line says what is waited for."""
NAMED = 8
"""Of ranks that are missing, at most so many are named."""


class RunFailedError(PolygonError):
    """A run that cannot go on; the message says who noticed what."""


def open_store(host: str, port: int, rank: int, timeout_s: float, listen_fd: int | None = None) -> Store:
    """The place where ranks meet, kept by rank 0 (on a socket that listens already, where it is given one).

    Under torchrun its agent keeps it, also over restarts: then every start has names of its own.
    """
    timeout = timedelta(seconds=timeout_s)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = rank == 0 and not agent
    if keeper:
        _require_known(host, port)
    else:
        _reach(rank, host, port, timeout_s)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"
    made = partial(TCPStore, host, port, None, keeper, timeout, wait_for_workers=False, master_listen_fd=listen_fd)
    try:
        store = made() if keeper else _answered(made, host, port, timeout_s)
        return PrefixStore(f"polygon/{start}", store)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            raise InputError(f"--dist-url: found port {port} in use by another program, expected a free one") from error
        raise RunFailedError(f"rank {rank}: no meeting point at tcp://{host}:{port}: {reason}") from error


def _require_known(host: str, port: int) -> None:
    """Raise `InputError` for a host that has no address: rank 0 itself comes to its meeting point by that name."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InputError(
            f"--dist-url: found host {host!r} ({error.strerror}: no host of that name), expected this machine's"
        ) from None


def _answered(connect: Callable[[], TCPStore], host: str, port: int, timeout_s: float) -> TCPStore:
    """What `connect` returns; torch waits for ever for an answer where another program than rank 0 listens."""
    made: Future[TCPStore] = Future()

    def run() -> None:
        try:
            made.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - handed on to who waits
            made.set_exception(error)

    threading.Thread(target=run, daemon=True, name="meeting point").start()
    try:
        return made.result(timeout_s)
    except TimeoutError:
        raise InputError(
            f"--dist-url: found a program at tcp://{host}:{port} that does not answer as rank 0 does in {timeout_s:g}"
            " s, expected rank 0 (is the port another program's?)"
        ) from None


def _reach(rank: int, host: str, port: int, timeout_s: float) -> None:
    """Return when somebody listens at the meeting point; torch's own wait says what went wrong in thirty lines."""
    start_s, where, said = time.monotonic(), f"tcp://{host}:{port}", False
    while True:
        left_s = start_s + timeout_s - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, left_s)):
                return
        except OSError as caught:
            error = caught
        if isinstance(error, socket.gaierror):
            reason = f"{error.strerror}: no host of that name"
        elif isinstance(error, ConnectionRefusedError):
            reason = f"{error.strerror}: rank 0 does not run there"
        else:
            reason = f"{error.strerror or 'no answer'}: a firewall, or another host: try nc -vz {host} {port}"
        if left_s <= ASK_AGAIN_S and isinstance(error, socket.gaierror):
            raise InputError(f"--dist-url: found host {host!r} ({reason}), expected that of rank 0")
        if left_s <= ASK_AGAIN_S:
            raise RunFailedError(f"rank {rank}: no meeting point at {where} in {timeout_s:g} s ({reason})")
        if not said and time.monotonic() - start_s > QUIET_S:
            said = True
            print(f"rank {rank}: waiting for {where} ({reason})", file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(ASK_AGAIN_S)


def own_address(host: str, port: int) -> str:
    """This machine's address for the other ranks: of GLOO_SOCKET_IFNAME's interface, else that on the way to rank 0."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        return local_address(host, port)
    interfaces = interface_addresses()
    if name not in interfaces:
        known = ", ".join(f"{key} ({address})" for key, address in interfaces.items())
        raise InputError(f"GLOO_SOCKET_IFNAME: found {name!r}, expected an interface with an IPv4 address: {known}")
    return interfaces[name]


def unreachable(places: Mapping[int, tuple[str, str]]) -> str | None:
    """What is wrong where a rank would give ranks on other machines an address that only its own machine can reach.

    Parameters
    ----------
    places : mapping of rank to (address, machine)
    """
    for rank, (address, here) in places.items():
        if ipaddress.ip_address(address).is_loopback and any(there != here for _, there in places.values()):
            return (
                f"rank {rank}: found its address {address}, which other machines cannot reach (its host name stands "
                "for the loopback), expected the one of its network: set GLOO_SOCKET_IFNAME there to the interface's "
                "name (ip -4 addr), or give --dist-url an address"
            )
    return None


def run_digest(problem: Problem, plan: Plan, options: Options) -> str:
    """A short name of what is to be run; equal on ranks that run the same thing."""
    return _digest([plan_digest(problem, plan), options.shared()])


def plan_digest(problem: Problem, plan: Plan) -> str:
    """A short name of a plan for a model and batch."""
    parts = [repr(problem.model), repr(problem.batch), repr(plan.stages), plan.routes.tolist(), plan.micro_batch_size]
    order = [] if plan.order is None else [plan.order.tolist()]
    return _digest([*parts, plan.spans, repr(plan.links), plan.reduction, plan.local_steps, *order])


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def code_digest() -> str:
    """A short name of the program itself: of the sources that decide what a rank computes and sends."""
    import polygon_comm

    import polygon.domain
    import runners.data
    import runners.engine

    digest = hashlib.sha256()
    packages = (runners.engine, runners.data, polygon_comm, polygon.domain)
    for folder in (Path(str(package.__file__)).parent for package in packages):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def agree(store: Store, rank: int, world_size: int, run: str, code: str, data: str, address: str) -> None:
    """Wait for all ranks and require that they run the same thing; the same error on all of them if not.

    Parameters
    ----------
    store : Store
    rank, world_size : int
    run, code, data : str
        Digests of what is run, of the program and of what is read.
    address : str
        Of this machine, for the others.
    """
    digests = {"plan and options": run, "program": code, "data": data}
    try:
        if store.add(f"came/{rank}", 1) > 1:
            twice = f"--rank: found {rank} twice (again on {address}), expected every rank once"
            store.set("twice", twice)
            raise InputError(twice)
        store.set(f"digest/{rank}", json.dumps(digests | {"place": (address, machine())}))
        if rank == 0:
            store.set("verdict", _verdict(store, world_size, digests))
        verdict = store.get("verdict").decode()
        store.set(f"seen/{rank}", "1")
        if rank == 0:
            # Rank 0 keeps the meeting point: it must not leave before all who came have read the verdict.
            for other in range(world_size):
                if store.check([f"came/{other}"]):
                    store.get(f"seen/{other}")
    except RuntimeError as error:
        raise RunFailedError(f"rank {rank}: the ranks did not meet: {str(error).splitlines()[0]}") from error
    if verdict != "ok":
        raise InputError(verdict)


def _verdict(store: Store, world_size: int, digests: dict[str, str]) -> str:
    places = {}
    for other in range(world_size):
        deadline_s = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
        while not store.check([f"digest/{other}"]):
            if store.check(["twice"]):
                return store.get("twice").decode()
            if time.monotonic() > deadline_s:
                return _missing(store, world_size)
            time.sleep(ASK_AGAIN_S / 4)
        found = json.loads(store.get(f"digest/{other}"))
        for what, digest in digests.items():
            if found[what] != digest:
                return f"{what} of rank {other}: found digest {found[what]}, expected {digest} as on rank 0"
        places[other] = tuple(found["place"])
    return unreachable(places) or "ok"


def _missing(store: Store, world_size: int) -> str:
    """Who has not come, in words."""
    absent = [rank for rank in range(world_size) if not store.check([f"digest/{rank}"])]
    names = ", ".join(map(str, absent[:NAMED])) + (f" and {len(absent) - NAMED} more" if len(absent) > NAMED else "")
    waited_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
    return (
        f"rank{'s' * (len(absent) > 1)} {names} did not come in {waited_s:g} s (--timeout): "
        f"{world_size - len(absent)} of {world_size} are here; start them with this --dist-url"
    )


def leave_together(store: Store, rank: int, world_size: int) -> None:
    """Rank 0 keeps the meeting point, so it leaves last."""
    store.set(f"done/{rank}", "1")
    if rank == 0:
        for other in range(world_size):
            store.get(f"done/{other}")
