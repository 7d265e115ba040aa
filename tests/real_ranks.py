"""Runs a function on several real ranks: processes forked from a server that has torch imported already.

The server is forked before any computation, so no rank inherits threads.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from multiprocessing.connection import wait

from tests.free_ports import free_port
from tests.patience import PATIENCE_S

CONTEXT = multiprocessing.get_context("forkserver")
# torch.optim imports torch._dynamo (a second) on the first step of an optimizer; tests of ranks import the others,
# and with them scipy (half a second). A rank begins by importing the module of its test: what that imports and is not
# here every rank imports anew (hypothesis: 0.15 CPU-s, the recipes: 0.1).
_PRELOADED = [
    "torch._dynamo", "runners.engine.run", "pytest", "hypothesis", "polygon.export.targets", "runners.dist_runner",
    "runners.train", "runners.recipes.backends.engine_backend",
]  # fmt: skip
_PAGES, _LAST = "polygon.web.pricing", "tests.frozen"


def preload(module):
    """Let the server import a module as well, for tests whose ranks all need it; to be called before any test runs."""
    _PRELOADED.append(module)


def prepare_server():
    """Say what the server loads; once more after all test modules were imported (`tests/conftest.py`).

    There is one server in a process, and the page's pricing has it load its own modules instead when it is imported:
    then every rank would import torch anew.
    """
    pages = [f"{_PAGES}_ready"] if _PAGES in sys.modules else []
    CONTEXT.set_forkserver_preload([*_PRELOADED, *pages, _LAST])


prepare_server()  # for programs that are no tests


def _enter(connection, function, rank, port, args):
    import torch

    torch.set_num_threads(1)
    try:
        connection.send(("result", function(rank, port, *args)))
    except BaseException as error:  # noqa: BLE001 - reported by the parent
        connection.send(("error", f"rank {rank}: {error!r}\n{traceback.format_exc()}"))


def leave_together(store, rank, ranks):
    """End only when all have done what they came for, and rank 0, which holds the store, when all others know it."""
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(ranks)])
    if rank:
        store.set(f"left/{rank}", "1")
    else:
        store.wait([f"left/{other}" for other in range(1, ranks)])


def start_ranks(function, n_ranks, *args):
    """Start `function(rank, port, *args)` on every rank; processes and the ends of their pipes."""
    port, started = free_port(), []
    for rank in range(n_ranks):
        mine, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_enter, args=(theirs, function, rank, port, args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    return started


def result_of(end, rank):
    """What a rank returned, whose end of the pipe is ready; raises what it raised."""
    try:
        kind, value = end.recv()
    except EOFError:
        kind, value = "error", f"rank {rank} died"
    if kind == "error":
        raise RuntimeError(value)
    return value


def end_ranks(started, *, patient):
    """End the processes, which may take a moment where all have returned, and close the pipes."""
    for process, end in started:
        process.join(2 if patient else 0)
        if process.is_alive():
            process.kill()
            process.join()
        end.close()


def run_ranks(function, n_ranks, *args, timeout_s=PATIENCE_S):
    """What `function(rank, port, *args)` returns on every rank; raises what any of them raises."""
    started = start_ranks(function, n_ranks, *args)
    results = {}
    try:
        open_ends = {end: rank for rank, (_, end) in enumerate(started)}
        while open_ends:
            ready = wait(list(open_ends), timeout=timeout_s)
            if not ready:
                raise TimeoutError(f"ranks {sorted(open_ends.values())} did not end within {timeout_s} s")
            for end in ready:
                rank = open_ends.pop(end)
                results[rank] = result_of(end, rank)
    finally:
        end_ranks(started, patient=len(results) == n_ranks)
    return [results[rank] for rank in range(n_ranks)]
