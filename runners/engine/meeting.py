"""Where ranks meet, agree that they run the same thing, and part."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from polygon.domain.errors import InputError, PolygonError
from polygon.domain.plan import Plan, Problem
from runners.engine.options import Options


class RunFailedError(PolygonError):
    """A run that cannot go on; the message says who noticed what."""


def open_store(host: str, port: int, rank: int, timeout_s: float, listen_fd: int | None = None) -> Store:
    """The place where ranks meet, kept by rank 0 (on a socket that listens already, where it is given one).

    Under torchrun its agent keeps it, also over restarts: then every start has names of its own.
    """
    timeout = timedelta(seconds=timeout_s)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = rank == 0 and not agent
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"
    try:
        store = TCPStore(host, port, None, keeper, timeout, wait_for_workers=False, master_listen_fd=listen_fd)
        return PrefixStore(f"polygon/{start}", store)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RunFailedError(f"rank {rank}: no meeting point at tcp://{host}:{port}: {reason}") from error


def run_digest(problem: Problem, plan: Plan, options: Options) -> str:
    """A short name of what is to be run; equal on ranks that run the same thing."""
    return _digest([plan_digest(problem, plan), options.shared()])


def plan_digest(problem: Problem, plan: Plan) -> str:
    """A short name of a plan for a model and batch."""
    parts = [repr(problem.model), repr(problem.batch), repr(plan.stages), plan.routes.tolist(), plan.micro_batch_size]
    return _digest([*parts, plan.spans, repr(plan.links), plan.reduction, plan.local_steps])


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def code_digest() -> str:
    """A short name of the program itself: of the sources that decide what a rank computes and sends."""
    import polygon_comm

    import polygon.domain

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(polygon_comm.__file__).parent, Path(polygon.domain.__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def agree(store: Store, rank: int, world_size: int, run: str, code: str) -> None:
    """Wait for all ranks and require that they run the same thing; the same error on all of them if not.

    Parameters
    ----------
    store : Store
    rank, world_size : int
    run, code : str
        Digests of what is run and of the program.
    """
    digests = {"plan and options": run, "program": code}
    try:
        store.set(f"digest/{rank}", json.dumps(digests))
        if rank == 0:
            store.set("verdict", _verdict(store, world_size, digests))
        verdict = store.get("verdict").decode()
        store.set(f"seen/{rank}", "1")
        if rank == 0:
            # Rank 0 keeps the meeting point: it must not leave before all who came have read the verdict.
            for other in range(world_size):
                if store.check([f"digest/{other}"]):
                    store.get(f"seen/{other}")
    except RuntimeError as error:
        raise RunFailedError(f"rank {rank}: the ranks did not meet: {str(error).splitlines()[0]}") from error
    if verdict != "ok":
        raise InputError(verdict)


def _verdict(store: Store, world_size: int, digests: dict[str, str]) -> str:
    for other in range(world_size):
        try:
            found = json.loads(store.get(f"digest/{other}"))
        except RuntimeError:
            return f"rank {other} did not come"
        for what, digest in digests.items():
            if found[what] != digest:
                return f"{what} of rank {other}: found digest {found[what]}, expected {digest} as on rank 0"
    return "ok"


def leave_together(store: Store, rank: int, world_size: int) -> None:
    """Rank 0 keeps the meeting point, so it leaves last."""
    store.set(f"done/{rank}", "1")
    if rank == 0:
        for other in range(world_size):
            store.get(f"done/{other}")
